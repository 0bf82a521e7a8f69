"""Every objective through the real learner: what is chosen acts, on any number of ranks, whatever the micro-batches, also after a resume.

Run by pytest, this file starts itself as two processes (see ``run_group`` in conftest.py), whose results are compared with one rank.
"""

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from configs.errors import ConfigError
from configs.schema import (
    AdaptiveEntropyConfig,
    Aggregation,
    Choice,
    KlConfig,
    KlFilter,
    KlKind,
    KlPlace,
    KlRatio,
    Optimizer,
    Reference,
)

pytestmark = pytest.mark.timeout(200)

_SPEC = importlib.util.spec_from_file_location("learner_conftest", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conftest)

from learner.learner import Learner, RolloutBatch  # noqa: E402  after conftest has chosen DeepSpeed's accelerator
from learner.model import ModelError  # noqa: E402
from learner.objective import Objective  # noqa: E402
from learner.surrogates import SURROGATES  # noqa: E402

GROUPS = Path(__file__).parents[2] / "configs"
PARTS = {"main": 1.0, "style": 0.5}
# Steps are large here: with the usual range of GSPO all tokens would be clipped.
WIDE = {
    "gspo": {"eps_low": 0.2, "eps_high": 0.2},
    "gspo_token": {"eps_low": 0.2, "eps_high": 0.2},
    "tv_mask": {"max_shift": 0.05},
}
TWO_BY_TWO = {"num_mini_batches": 2, "num_passes": 2, "learning_rate": 0.02}


def kl(kind=KlKind.k3, **fields):
    return {"kl": KlConfig(kind=kind, beta=0.3, **fields), "reference": Reference.frozen}


def make_batch(learner, step=0, version=0, seed=11):
    """Eight unequal groups with two reward parts, some members without a score, sampled from near the weights of ``learner``."""
    rollouts = conftest.Rollouts(np.random.default_rng(seed))
    mains = ([1, 0, 0], [0, 1, None, 1], [1, 0, 1, 0, 0], [None, None], [1, 0], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1])
    groups = []
    for values in mains:
        group = rollouts.group(values, lengths=rollouts.rng.integers(1, 13, len(values)).tolist())
        prompt = group.group.prompt_token_ids
        rows = [np.concatenate([prompt, c.token_ids]) for c in group.group.completions]
        logps = [scores[len(prompt) - 1 :] for scores in learner.score_tokens(rows, 1.0)]
        completions = tuple(
            dataclasses.replace(
                c,
                roll_logp=logp + rollouts.rng.normal(rollouts.rng.normal(0, 0.4), 0.3, len(logp)).astype(np.float32),
                versions=rollouts.rng.integers(max(0, version - 2), version + 1, len(logp)).astype(np.int32),
            )
            for c, logp in zip(group.group.completions, logps, strict=True)
        )
        scores = tuple(_score(value, rollouts.rng.integers(0, 5) / 4) for value in values)
        groups.append(dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions), scores=scores))
    return RolloutBatch(step, version, tuple(groups))


def _score(main, style):
    if main is None:
        return conftest.score(None)
    total = PARTS["main"] * main + PARTS["style"] * style
    return dataclasses.replace(conftest.score(total), accuracy=float(main), parts={"main": float(main), "style": style})


class Tools:
    def __init__(self, models, rank=0, world_size=1):
        self.models, self.rank, self.world_size = models, rank, world_size

    def learner(self, model="qwen3", **settings):
        settings = {"part_weights": PARTS, **settings}
        return Learner(conftest.learner_spec(self.models[model], **settings), self.rank, self.world_size)


def trajectory(tools, settings, stage=0, budget=64, num_steps=2):
    """Raw gradients, reports and memory of a few steps; versions count up."""
    learner = tools.learner(zero_stage=stage, tokens_per_micro_batch=budget, **(TWO_BY_TWO | settings))
    gradients, metrics = [], []
    batches = [make_batch(learner, step, step, seed=20 + step) for step in range(num_steps)]
    for batch in batches:
        metrics.append(learner.prepare(batch).metrics)
        train = learner.train
        reports = []
        learner.train = lambda train=train, reports=reports: reports.append(train())
        gradients += conftest.collect_raw_gradients(learner)
        learner.train = train
        metrics.append({k: v for k, v in reports[0].metrics.items() if not k.startswith("time/")})
    return {"gradients": gradients, "metrics": metrics, "memory": learner.objective.memory()}


SIBLINGS = """
import torch

def siblings(tokens, *, strength: float):
    \"\"\"Tokens that the policy finds likelier than its group does on average count more.\"\"\"
    size = int(tokens.group.max()) + 1
    total = torch.zeros(size).index_add(0, tokens.group, tokens.old_logp)
    count = torch.zeros(size).index_add(0, tokens.group, torch.ones_like(tokens.logp))
    return (1 + strength * (tokens.old_logp - (total / count)[tokens.group]).tanh()).float()

siblings.needs, siblings.whole_batch = ("group",), True
"""


def combinations(folder):
    """What ranks are compared on: together they use everything that one rank alone could get wrong."""
    return {
        "kl in reward": {
            "algorithm": "aspo",
            "advantage": Choice("reinforce_pp", {"gamma": 0.9}),
            "weighting": Choice("length", {}),
            "token_weighting": Choice("entropy_split", {"low": 0.3}),
            "correction": Choice("tis_token", {}),
            **kl(KlKind.k1, place=KlPlace.reward),
        },
        "siblings": {
            "algorithm": "gspo",
            "algorithm_params": WIDE["gspo"],
            "advantage": Choice("gdpo", {}),
            "weighting": Choice("cppo", {"pruning_rate": 0.5}),
            "token_weighting": Choice(f"{folder / 'siblings.py'}:siblings", {"strength": 0.5}),
            "correction": Choice("decoupled", {"prox": "interpolated"}),
        },
        "memory": {
            "algorithm": "aspo_archer",
            "advantage": Choice("mad", {}),
            "weighting": Choice("ha_dw", {"window": 2}),
            "token_weighting": Choice("acpo", {}),
            "correction": Choice("icepop", {}),
            "entropy_beta": 0.01,
            "adaptive_entropy": AdaptiveEntropyConfig(target=9.0, gain=0.01, max_beta=0.5),
            **kl(KlKind.k2, token_filter=KlFilter.low_entropy, ratio=KlRatio.through),
        },
    }


STAGE_OF = {"kl in reward": 3, "siblings": 2, "memory": 1}


def main(folder, rank, world_size):
    tools = Tools(json.loads((folder / "models.json").read_text()), rank, world_size)
    results = {name: trajectory(tools, s, STAGE_OF[name]) for name, s in combinations(folder).items()}
    torch.save(results, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))


# ---- what must be true of it ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tiny_models):
    return Tools(tiny_models)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("objectives")
    (root / "siblings.py").write_text(SIBLINGS)
    return root


@pytest.fixture(scope="module")
def two(tiny_models, folder):
    (folder / "models.json").write_text(json.dumps(tiny_models))
    results = conftest.run_group(__file__, folder, 2, timeout_s=120)
    return {name: [result[name] for result in results] for name in results[0]}


def assert_close(got, expected, tolerance):
    """Within ``tolerance`` of each tensor's largest entry."""
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].isfinite().all()
        largest = expected[name].abs().max().item()
        assert largest > 0, name
        error = (got[name].double() - expected[name].double()).abs().max().item()
        assert error <= tolerance * largest, f"{name}: off by {error / largest:.1e} of its largest entry"


def assert_same_run(got, expected):
    """Later gradients come from weights that may already differ in the last bits."""
    assert len(got["gradients"]) == len(expected["gradients"])
    for number, (ours, theirs) in enumerate(zip(got["gradients"], expected["gradients"], strict=True)):
        assert_close(ours, theirs, 1e-5 if number == 0 else 5e-5)
    cut = {"batch/num_micro_batches", "batch/padding_frac", "batch/rank_imbalance"}
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - cut:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name
    ours, theirs = got["memory"], expected["memory"]
    assert ours["steps_at"] == theirs["steps_at"]
    assert ours["entropy_beta"] == pytest.approx(theirs["entropy_beta"], rel=1e-5)
    assert ours["weighting"] == theirs["weighting"]


# The names in turn: lists of unequal length, so that the pairs are many.
ADVANTAGES = ["grpo", "reinforce_pp", "rloo", "mad", "batch_norm", "gdpo", "reinforce", "dr_grpo", "reinforce_pp_baseline"]
WEIGHTINGS = ["magnitude", "none", "ha_dw", "cppo", "dgpo_question", "pods", "sign", "length"]
TOKEN_WEIGHTINGS = ["ar", "lopti", "entropy_split", "none", "acpo"]
CORRECTIONS = ["none", "tis_token", "tis_seq", "icepop", "mis_seq", "geometric", "opsm", "k3_rejection", "decoupled", "bypass"]
AGGREGATIONS = list(Aggregation)
KLS = [
    {},
    kl(),
    kl(KlKind.k1, place=KlPlace.reward),
    kl(KlKind.k2, ratio=KlRatio.through),
    kl(KlKind.k3, token_filter=KlFilter.low_entropy),
    kl(KlKind.k3_plus, ratio=KlRatio.detached) | {"entropy_beta": 0.05},
]
NEEDED = {"cispo_relative": {"eps_high": 1.0}}

# The tokens are random, so pi is near 1/128, and the engine is far off: with the usual bounds nothing would be left.
LOOSE = {"lopti": {"eta": 0.005}, "geometric": {"low": 0.5, "high": 2.0}, "k3_rejection": {"limit": 0.2}}


def combination(number):
    algorithm = list(SURROGATES)[number]
    advantage = ADVANTAGES[number % len(ADVANTAGES)]
    settings = KLS[number % len(KLS)]
    if advantage == "gdpo":  # refuses KL in the reward
        settings = KLS[1]
    token_weighting, correction = TOKEN_WEIGHTINGS[number % len(TOKEN_WEIGHTINGS)], CORRECTIONS[number % len(CORRECTIONS)]
    return {
        "algorithm": algorithm,
        "algorithm_params": (NEEDED | WIDE).get(algorithm, {}),
        "advantage": Choice(advantage),
        "weighting": Choice(WEIGHTINGS[number % len(WEIGHTINGS)]),
        "token_weighting": Choice(token_weighting, LOOSE.get(token_weighting, {})),
        "correction": Choice(correction, LOOSE.get(correction, {})),
        "aggregation": AGGREGATIONS[number % len(AGGREGATIONS)],
        **settings,
    }


@pytest.mark.parametrize("number", range(len(SURROGATES)))
def test_no_objective_depends_on_the_micro_batches(number, one):
    settings = combination(number)
    fine, coarse = (trajectory(one, settings, budget=budget, num_steps=1) for budget in (20, 10_000))
    assert coarse["metrics"][0]["batch/num_micro_batches"] == 2 < fine["metrics"][0]["batch/num_micro_batches"]
    assert len(fine["gradients"]) == 4
    assert_same_run(fine, coarse)


@pytest.mark.parametrize("name", STAGE_OF)
def test_two_ranks_make_the_objective_of_one(name, one, two, folder):
    expected = trajectory(one, combinations(folder)[name])
    first, second = two[name]
    assert first["metrics"] == second["metrics"]
    assert first["memory"] == second["memory"]
    for got in (first, second):
        assert_same_run(got, expected)


# ---- nothing silently does nothing ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def still(one):
    """A learner whose weights stay; ``credits(settings)``: what its tokens receive where the ratio is not 1, by a hash of nothing but
    the order in which they are trained."""
    learner = one.learner(learning_rate=0.0, num_passes=2, **kl())
    batch = make_batch(learner)
    learner.prepare(batch)  # so that the reference and the batch are there

    def credits(**settings):
        learner.objective = Objective(conftest.learner_spec("", part_weights=PARTS, num_passes=2, **settings))
        learner.prepare(batch)
        shift = torch.Generator().manual_seed(0)
        for micro in (micro for step in learner._steps for micro in step):
            inputs = micro.inputs
            micro.old_logp = learner._forward(inputs).logp.detach() + torch.randn(len(inputs.targets), generator=shift) * 0.4
        taken = []
        credit = learner.objective.credit

        def spy(tokens):
            taken.append(credit(tokens))
            return taken[-1]

        learner.objective.credit = spy
        learner.train()
        return torch.cat([c.logp for c in taken]), torch.cat([c.entropy for c in taken])

    return credits


def shipped(group):
    return sorted(path.stem for path in (GROUPS / group).glob("*.yaml"))


def chosen(group, name):
    config = yaml.safe_load((GROUPS / group / f"{name}.yaml").read_text())
    return Choice(config["name"], config.get("params") or {})


def differs(a, b):
    return a[0].shape != b[0].shape or not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]))


NEUTRAL = {"advantage": "reinforce", "weighting": "none", "token_weighting": "none", "correction": "none"}
RESOLVED = ("auto",)  # before it comes to the learner: one of the others, by rollout.max_lag
REFUSED = {"act_focus": "role", "craft": "teacher_logp"}


@pytest.mark.parametrize(
    ("group", "name"),
    [(g, name) for g, neutral in NEUTRAL.items() for name in shipped(g) if name != neutral and name not in RESOLVED],
)
def test_every_shipped_choice_acts_or_is_refused(group, name, still):
    plain = {"advantage": Choice("reinforce")}
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{group}={name} needs LossTokens.{REFUSED[name]}: .* none is built"):
            still(**plain, **{group: chosen(group, name)})
        return
    assert differs(still(**(plain | {group: chosen(group, name)})), still(**plain))


@pytest.mark.parametrize("name", [name for name in shipped("algorithm") if name != "reinforce"])
def test_every_shipped_algorithm_acts(name, still):
    config = yaml.safe_load((GROUPS / "algorithm" / f"{name}.yaml").read_text())
    if "algorithm" not in config:  # another name for a preset
        config = yaml.safe_load((GROUPS / "algorithm" / f"{config['defaults'][0]}.yaml").read_text())
    algorithm = config["algorithm"]
    surrogate = {"algorithm": algorithm["name"], "algorithm_params": algorithm.get("params") or {}}
    for default in config.get("defaults", []):
        surrogate |= {group.removeprefix("override /"): Choice(other) for group, other in default.items()}
    aggregation = {"aggregation": Aggregation(algorithm["aggregation"])}
    assert differs(still(**surrogate, **aggregation), still(algorithm="reinforce", **aggregation))


@pytest.fixture(scope="module")
def moved(one):
    """``gradients(settings)`` of a learner whose weights have left the reference, and stay there."""
    learner = one.learner(learning_rate=0.1, **kl())
    batch = make_batch(learner)
    learner.prepare(batch)
    learner.train()
    learner.spec.learner.optimizer.learning_rate = 0.0

    def gradients(**settings):
        learner.objective = Objective(conftest.learner_spec("", part_weights=PARTS, **settings))
        learner.prepare(batch)
        return conftest.collect_raw_gradients(learner)[0]

    return gradients


KL = kl()
SETTINGS = [
    (KL, {}),
    (kl(KlKind.k2), KL),
    (kl(KlKind.k3_plus), KL),
    (kl(token_filter=KlFilter.low_entropy), KL),
    (kl(token_filter=KlFilter.low_entropy, entropy_quantile=0.5), kl(token_filter=KlFilter.low_entropy)),
    (kl(place=KlPlace.reward), KL),
    (kl(place=KlPlace.reward), kl(KlKind.k1, place=KlPlace.reward)),
    (kl(ratio=KlRatio.through), KL),
    ({"entropy_beta": 0.1}, {}),
    *(({"aggregation": mode}, {}) for mode in Aggregation if mode is not Aggregation.seq_mean_token_mean),
]


@pytest.mark.parametrize(("settings", "others"), SETTINGS)
def test_every_setting_acts(settings, others, moved):
    with_it, without = moved(**settings), moved(**others)
    assert any((with_it[name] - without[name]).abs().max() > 1e-3 * without[name].abs().max() for name in with_it)


OFF = {
    "magnitude": {"weighting": Choice("magnitude", {"alpha": 0.0})},
    "length": {"weighting": Choice("length", {"power": 0.0})},
    "sign": {"weighting": Choice("sign", {"positive": 1.0, "negative": 1.0})},
    "cppo": {"weighting": Choice("cppo", {"pruning_rate": 0.0})},
    "pods": {"weighting": Choice("pods", {"num_kept": 99})},
    "ar": {"token_weighting": Choice("ar", {"alpha": 0.0})},
    "acpo": {"token_weighting": Choice("acpo", {"a_pos": 0.0, "a_neg": 0.0})},
    "entropy_split": {"token_weighting": Choice("entropy_split", {"low": 1.0, "high": 1.0})},
    "grpo": {"advantage": Choice("grpo", {"std_mode": "unbiased"})},
}


@pytest.mark.parametrize("name", OFF)
def test_what_is_off_is_bit_identical_to_the_plain_run(name, still):
    assert not differs(still(**OFF[name]), still())


def test_a_whole_batch_scheme_of_the_users_weighs_each_token_once(still, folder):
    name = f"{folder / 'siblings.py'}:siblings"
    assert differs(still(token_weighting=Choice(name, {"strength": 0.5})), still())
    assert not differs(still(token_weighting=Choice(name, {"strength": 0.0})), still())


# ---- KL in the reward -----------------------------------------------------------------------------------------------


def test_kl_in_the_reward_is_taken_from_every_token_of_the_weights_that_arrive(one):
    """dr_grpo of R - beta sum(logp - ref_logp), from the learner's own scores before and after it left the reference."""
    settings = kl(KlKind.k1, place=KlPlace.reward) | {"advantage": Choice("dr_grpo")}
    learner = one.learner(num_mini_batches=2, learning_rate=0.1, tokens_per_micro_batch=40, **settings)
    batch = make_batch(learner)

    def scores():
        rows = [[np.concatenate([g.group.prompt_token_ids, c.token_ids]) for c in g.group.completions] for g in batch.groups]
        return [
            [s[len(g.group.prompt_token_ids) - 1 :].astype(np.float64) for s in learner.score_tokens(of_group, 1.0)]
            for g, of_group in zip(batch.groups, rows, strict=True)
        ]

    reference = scores()
    learner.prepare(batch)
    learner.train()
    now = scores()
    metrics = learner.prepare(batch).metrics
    expected, taken = {}, []
    for place, group in enumerate(batch.groups):
        values = []
        for i, score in enumerate(group.scores):
            cost = 0.3 * (now[place][i] - reference[place][i]).sum()
            if score.value is not None:
                values.append(score.value - cost)
                taken.append(cost)
        if values:
            expected[place] = sorted(np.array(values) - np.mean(values))
    assert np.abs(taken).max() > 0.1  # it is no small thing
    assert metrics["kl/in_reward"] == pytest.approx(np.mean(taken), rel=1e-4)
    got = {}
    for micro in (micro for step in learner._steps for micro in step):
        for row in range(len(micro.inputs.input_ids)):
            tokens = micro.inputs.response == row
            got.setdefault(int(micro.group[tokens][0]), []).append(float(micro.advantage[tokens][0]))
    assert got.keys() == expected.keys()
    for place, advantages in got.items():
        np.testing.assert_allclose(sorted(advantages), expected[place], atol=2e-5)
    assert learner.train().metrics["kl/k3_ref"] > 0


def test_a_sample_whose_kl_is_not_finite_is_invalid_and_counted(one):
    from learner.samples import list_samples, tabulate

    settings = kl(KlKind.k2, place=KlPlace.reward)
    objective = Objective(conftest.learner_spec("", part_weights=PARTS, **settings))
    rollouts = conftest.Rollouts(np.random.default_rng(0))
    table = tabulate(list_samples([rollouts.group([1, 0, None], lengths=[2, 1, 2])]), {})
    logp = torch.tensor([-1.0, -math.inf, -2.0, math.nan, math.nan])
    taken = objective.take_kl(table, logp, torch.tensor([-1.0, -1.0, -4.0, 0.0, 0.0]))
    assert taken.valid.tolist() == [False, True, False]
    assert taken.kl.tolist() == pytest.approx([0, 0, 0.3 * 2.0, 0, 0])


# ---- what is remembered ---------------------------------------------------------------------------------------------


def test_a_resumed_learner_remembers(one, tmp_path):
    settings = {
        "optimizer": Optimizer.adamw,
        "weighting": Choice("ha_dw", {"window": 2}),
        "correction": Choice("decoupled", {"prox": "interpolated"}),
        "entropy_beta": 0.01,
        "adaptive_entropy": AdaptiveEntropyConfig(target=9.0, gain=0.01, max_beta=0.5),
        **TWO_BY_TWO,
    }
    learner = one.learner(**settings)
    batches = [make_batch(learner, step, step, seed=step) for step in range(4)]

    def go(learner, numbers):
        reports = []
        for number in numbers:
            learner.prepare(batches[number])
            reports.append(learner.train().metrics)
        return [{k: v for k, v in report.items() if not k.startswith("time/")} for report in reports]

    go(learner, [0, 1])
    memory = learner.objective.memory()
    assert memory["steps_at"] == {"0": 0, "1": 4}
    assert memory["entropy_beta"] > 0.05
    assert len(memory["weighting"]["history"]) == 2
    learner.save(tmp_path)
    unbroken = go(learner, [2, 3])

    resumed = one.learner(**settings)
    resumed.load(tmp_path)
    assert resumed.objective.memory() == memory
    assert go(resumed, [2, 3]) == unbroken
    expected = conftest.copy_weights(learner)
    assert all(torch.equal(expected[name], w) for name, w in conftest.copy_weights(resumed).items())

    forgetful = one.learner(**settings)
    forgetful.load(tmp_path)
    forgetful.objective = Objective(forgetful.spec)
    assert go(forgetful, [2, 3]) != unbroken


def test_the_entropy_bonus_moves_towards_its_target(one):
    """beta <- clip(beta + gain (target - H), 0, max_beta), once a step."""
    adaptive = AdaptiveEntropyConfig(target=9.0, gain=0.01, max_beta=0.05)
    learner = one.learner(entropy_beta=0.01, adaptive_entropy=adaptive, learning_rate=0.0)
    batch = make_batch(learner)
    used = []
    for _ in range(3):
        learner.prepare(batch)
        metrics = learner.train().metrics
        used.append(metrics["policy/entropy_beta"])
    assert used == pytest.approx([0.01, min(0.05, 0.01 + 0.01 * (9.0 - metrics["policy/entropy"])), 0.05])


# ---- routers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rollout.tokenizer import character_tokenizer

    torch.manual_seed(0)
    shape = conftest.SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    path = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, tie_word_embeddings=False)).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return str(path)


def test_the_loss_of_the_routers_is_that_of_every_response_alone(experts):
    """Values of one group are all the same: no policy term, so the gradient is the routers' alone. Against autograd, row by row."""
    from transformers import AutoModelForCausalLM

    rollouts = conftest.Rollouts(np.random.default_rng(2))
    batch = RolloutBatch(0, 0, (rollouts.group([1, 1, 1, 1], lengths=[5, 1, 8, 3]),))
    model = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    rows = [
        (np.concatenate([g.group.prompt_token_ids, c.token_ids]), len(c.token_ids))
        for g in batch.groups
        for c in g.group.completions
    ]
    total = 0.0
    for row, length in rows:
        layers = model.model(torch.tensor(row[None]).long(), output_router_logits=True).router_logits
        for logits in layers:
            probs = logits[-length - 1 : -1].softmax(-1)
            share = torch.stack([(probs.topk(2).indices == e).any(-1).double().mean() for e in range(4)])
            total = total + 4 / 2 * (share * probs.mean(0)).sum() / len(layers) / len(rows)
    named = {name: p for name, p in model.named_parameters() if "gate.weight" in name}
    expected = dict(zip(named, torch.autograd.grad(0.7 * total, named.values()), strict=True))

    for budget in (1, 10_000):
        tools = Tools({"experts": experts})
        learner = tools.learner("experts", aux_scale=0.7, tokens_per_micro_batch=budget)
        learner.prepare(batch)
        reports = []
        train = learner.train
        learner.train = lambda train=train, reports=reports: reports.append(train())
        (taken,) = conftest.collect_raw_gradients(learner)
        assert reports[0].metrics["policy/router_loss"] == pytest.approx(float(total), rel=1e-5)
        assert reports[0].metrics["update/loss"] == pytest.approx(0.7 * float(total), rel=1e-5)
        assert_close({name: taken[name] for name in named}, expected, 1e-5)


def test_a_model_without_routers_refuses_their_loss(one):
    with pytest.raises(ModelError, match=r"algorithm.aux_scale=0.1: the model at .* has no routers"):
        one.learner(aux_scale=0.1)
