"""Line 4.3: every combination that is not refused on one recorded batch, and twelve of them as whole runs."""

import dataclasses
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ORCHESTRATOR = Path(__file__).parents[1] / "orchestrator"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"of_orchestrator_{name}", ORCHESTRATOR / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


conftest, cover = _load("conftest"), _load("test_cover")
recorded = conftest.recorded  # the fixture

from configs.refusals import refused  # noqa: E402  after conftest has chosen DeepSpeed's accelerator
from learner.head import HeadOutput  # noqa: E402
from learner.learner import Learner  # noqa: E402
from learner.objective import Objective  # noqa: E402
from learner.prepare import Rank, loss_tokens, prepare_batch  # noqa: E402
from learner.spec import LearnerSpec, RolloutBatch  # noqa: E402
from orchestrator.material import learner_spec  # noqa: E402
from orchestrator.replay import open_record  # noqa: E402
from rollout.tokenizer import character_tokenizer  # noqa: E402

LIMEN = str(Path(sys.executable).with_name("limen"))
ON_BATCH = ("advantage", "weighting", "aggregation", "kl")  # what prepare looks at
ON_TOKENS = ("algorithm", "token_weighting", "correction")


class Batch:
    """The recorded batch, the policy as it arrived, and the policy a step later: moved, so that ratios are not 1."""

    def __init__(self, recorded, base):
        self.base, self.model = base, recorded.model
        self.learner = Learner(self.spec(base), 0, 1)
        self.batch = RolloutBatch(1, 0, tuple(open_record(recorded.folder, character_tokenizer()).step_groups(1)))

    def spec(self, config):
        return LearnerSpec(**learner_spec(config, self.model, total_optimizer_steps=1))

    def forward(self, inputs, *, moved=False):
        """A policy by a formula of the token, in place of a forward: the old one, or the one that has moved from it."""
        ids = inputs.targets.double()
        logp = -1.5 + torch.sin(ids)
        change = 0.6 * torch.sin(7 * ids) * moved
        entropy = 1.0 + 0.5 * torch.cos(3 * ids)
        likeliest = (logp + change).clamp(min=-1).float() if moved else None
        return HeadOutput((logp + change).float(), entropy.float(), likeliest, None)

    def prepare(self, config):
        here = Rank(
            rank=0,
            world_size=1,
            device=torch.device("cpu"),
            cost=self.learner.model.cost,
            policy=self.forward,
            reference=lambda inputs: self.forward(inputs)._replace(logp=self.forward(inputs).logp - 0.3),
            of_all_ranks=lambda mine: [mine],
        )
        prepared = prepare_batch(self.batch, Objective(self.spec(config)), here, 0)
        micro_batches = [micro for step in prepared.steps for micro in step]
        tokens = []
        for micro in micro_batches:
            micro.old_logp = self.forward(micro.inputs).logp
            tokens.append(loss_tokens(micro, self.forward(micro.inputs, moved=True), 1, num_steps_before=0, num_steps=2))
        return tokens


def run_product(recorded, every=1):
    """Figures of the product: the number of combinations, how many were refused, the seconds. Asserts on each that credit is finite, and
    that without KL it never has the sign of its advantage, and is 0 where that is."""
    base, factors = cover.base_config(recorded), cover.everything(recorded.overrides)
    # Two optimizer steps, each of one micro-batch: how a step is cut is not in question here, and it would cost hours.
    base = dataclasses.replace(base, batch=dataclasses.replace(base.batch, num_mini_batches=1, tokens_per_micro_batch=1 << 20))
    batch, started = Batch(recorded, base), time.monotonic()
    num_refused = num_checked = num_tokens = 0
    on_tokens = list(itertools.product(*(factors[name] for name in ON_TOKENS)))
    for number, outer in enumerate(itertools.product(*(factors[name] for name in ON_BATCH))):
        names = dict(zip(ON_BATCH, outer, strict=True))
        tokens = None
        for inner in on_tokens[number % every :: every]:
            combination = names | dict(zip(ON_TOKENS, inner, strict=True))
            config = cover.assemble(base, factors, {factor: combination[factor] for factor in factors})
            if next(refused(config), None) is not None:
                num_refused += 1
                continue
            tokens = tokens or batch.prepare(config)
            objective = Objective(batch.spec(config))
            for part in tokens:
                credit = objective.credit(part).logp
                assert credit.isfinite().all(), combination
                if names["kl"] in ("off", "k1 in the reward"):
                    assert (credit * part.advantage <= 0).all(), combination
                    assert (credit[part.advantage == 0] == 0).all(), combination
                num_tokens += len(credit)
            num_checked += 1
    seconds = time.monotonic() - started
    return {"combinations": num_checked, "refused": num_refused, "credits": num_tokens, "seconds": seconds}


@pytest.mark.line(id="4.3")
@pytest.mark.timeout(14400)
def test_the_whole_product_on_one_recorded_batch(record, recorded):
    figures = run_product(recorded)
    record(figures)
    assert figures["combinations"] > 500_000


TWELVE = [
    ["algorithm=aspo"],
    ["algorithm=aspo_archer", "weighting=magnitude"],
    ["algorithm=grpo", "algorithm.params.dual_c=3.0", "correction=tis_token"],
    ["algorithm=dapo", "token_weighting=entropy_split", "correction=icepop"],
    ["algorithm=dr_grpo", "advantage=dr_grpo", "weighting=length"],
    ["algorithm=gspo", "correction=mis_seq"],
    ["algorithm=cispo", "advantage=batch_norm", "weighting=cppo"],
    ["algorithm=sapo", "advantage=rloo", "correction=tis_seq"],
    ["algorithm=reinforce_pp", "correction=decoupled"],
    ["algorithm=rloo", "weighting=sign", "weighting.params.positive=0.5"],
    ["algorithm=no_ratio", "advantage=mad", "weighting=dgpo_question", "token_weighting=ar"],
    ["algorithm=tv_mask", "weighting=ha_dw", "algorithm.entropy_beta=0.001", "algorithm.adaptive_entropy.target=0.5"],
]


@pytest.mark.line(id="4.3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", TWELVE, ids=" ".join)
def test_twelve_combinations_through_the_real_job(overrides, record, tmp_path):
    """The embedded model, one digit, eight steps: trains, stays finite, and every push is another policy."""
    small = ["model.embedded.steps=120", "data.sources.arithmetic.params.max_digits=1", "batch.groups_per_step=16", "steps=8"]
    command = [
        LIMEN,
        "train",
        *small,
        f"run_dir={tmp_path / 'run'}",
        "evaluation.before=false",
        "evaluation.after=false",
        *overrides,
    ]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    record(
        {
            "combination": " ".join(overrides),
            "gradient norm, last step": rows[-1]["update/grad_norm"],
            "tokens with weight, last step": rows[-1]["eff/token_frac"],
            "engine and learner apart, mean over the last step": rows[-1]["mismatch/logp_absdiff"],
        }
    )
    assert len(rows) == 8
    assert len({row["weights"] for row in rows}) == 8
    assert all(math.isfinite(v) for row in rows for k, v in row.items() if k not in ("weights",) and v is not None)
    assert sum(row["update/skipped_nonfinite"] for row in rows) == 0
