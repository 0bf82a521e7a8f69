"""``limen explain --on RUN``: the credit that a scheme, or two side by side, would give to the tokens of a recorded run.

The old policy is the engine's recorded log-probability. Without a model the ratio is 1, as at the first optimizer step of a batch, and
advantages, weights and what needs no ratio tell schemes apart; with ``checkpoint_dir`` it is that model against the record. The KL
term is left out, since no reference is on record.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.compose import load_config, shipped_files
from configs.errors import ConfigError, InputError
from configs.schema import Config, KlConfig
from learner.batching import RowCost
from learner.head import HeadOutput
from learner.model import load_model
from learner.objective import Objective
from learner.prepare import Rank, loss_tokens, prepare_batch
from learner.samples import Inputs, first_places, list_samples
from learner.spec import LearnerSpec, RolloutBatch
from learner.warm_start import base_model_path
from orchestrator.asking import saved_model
from orchestrator.material import learner_spec, quiet_libraries
from orchestrator.replay import Record, open_record
from rollout.records import ScoredGroup
from rollout.tokenizer import load_tokenizer

GROUPS = (
    "algorithm",
    "advantage",
    "weighting",
    "token_weighting",
    "correction",
)  # of which files may be picked over those of the run
NUM_TOKENS_SHOWN = 12


@dataclass(frozen=True, eq=False)
class StepCredit:
    """What a scheme gives to the N loss tokens of one recorded step."""

    credit: NDArray[np.float32]  # [N], times D; NaN where the token is not trained on
    advantage: NDArray[np.float32]  # [N]
    ratio: NDArray[np.float32]  # [N]


@dataclass(frozen=True, eq=False)
class Scheme:
    name: str
    config: Config
    steps: list[StepCredit]

    def joined(self, field: str) -> NDArray[np.float32]:
        return np.concatenate([getattr(step, field) for step in self.steps])


def explain_run(flags: Mapping[str, str], overrides: Sequence[str], config_dir: Path | None) -> int:
    """Prints what one scheme, or two, give. Raises InputError for a run that was not recorded and for a wrong override."""
    if "--on" not in flags:
        raise InputError("--against compares two schemes on a recorded run: give it with --on RUN")
    run = Path(flags["--on"]).expanduser().absolute()
    if not (run / "config.yaml").is_file():
        raise InputError(f"--on {run}: is not the folder of a run; give one that was made with rollout.record=true")
    quiet_libraries()
    wanted = [(" ".join(overrides) or "as it ran", list(overrides))]
    if "--against" in flags:
        wanted.append((flags["--against"], shlex.split(flags["--against"])))
    configs = [(name, scheme_config(run, given, config_dir)) for name, given in wanted]
    base = configs[0][1]
    configs = [(name, replace(config, checkpoint_dir=config.checkpoint_dir or base.checkpoint_dir)) for name, config in configs]
    path = str(base_model_path(base.model, progress=print))
    tokenizer = load_tokenizer(path, base.model.trust_remote_code)
    record = open_record(run, tokenizer)
    schemes = [Scheme(name, config, credit_on(record, config, path)) for name, config in configs]
    print("\n".join(report(record, schemes, tokenizer)))
    return 0


def scheme_config(run: Path, overrides: Sequence[str], config_dir: Path | None) -> Config:
    """The run's configuration with another objective: a picked file takes the place of the run's group, single keys come on top."""
    picked = [group for group in GROUPS if any(_key(text) == group for text in overrides)]
    keys = [text for text in overrides if _key(text).partition(".")[0] not in picked]
    for text in keys:
        if _key(text) in shipped_files():
            raise ConfigError(f"{text}: of a recorded run only the objective can be changed: {', '.join(GROUPS)}")
    config = load_config([f"resume={run}", *keys])
    if picked:
        chosen = [text for text in overrides if _key(text).partition(".")[0] in picked]
        fresh = load_config(chosen, config_dir)
        config = replace(config, **{group: getattr(fresh, group) for group in picked})
    return config


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


# ---- the credit -----------------------------------------------------------------------------------------------------


def credit_on(record: Record, config: Config, model_path: str) -> list[StepCredit]:
    """The credit of every loss token of the record, step by step: with the model in ``config.checkpoint_dir``, or at ratio 1."""
    config = replace(config, algorithm=replace(config.algorithm, kl=KlConfig()))
    objective = Objective(LearnerSpec(**learner_spec(config, model_path, total_optimizer_steps=1)))
    forward = _model_forward(config, objective) if config.checkpoint_dir else None
    if objective.extras and forward is None:
        raise ConfigError(
            f"{config.token_weighting.name} reads the likeliest token, which is not on record: give checkpoint_dir=MODEL"
        )
    steps = sorted({place.step for place in record.places.values()})
    return [_step_credit(record.step_groups(step), step, objective, forward) for step in steps]


def _step_credit(
    groups: Sequence[ScoredGroup], step: int, objective: Objective, forward: Callable[[Inputs], HeadOutput] | None
) -> StepCredit:
    version = max(int(c.versions.max()) for group in groups for c in group.group.completions)
    none = torch.zeros(0)
    here = Rank(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        cost=RowCost(1.0, 0.0, 0.0),
        policy=lambda inputs: HeadOutput(torch.zeros(len(inputs.places)), none, None, None),  # its old_logp is not used
        reference=None,
        of_all_ranks=lambda mine: [mine],
    )
    prepared = prepare_batch(RolloutBatch(step, version, tuple(groups)), objective, here, 0)
    samples = list_samples(groups)
    count = int(first_places(samples)[-1]) + samples[-1].num_loss_tokens
    credit, advantage, ratio = (np.full(count, value, dtype=np.float32) for value in (np.nan, 0.0, 1.0))
    for micro in (micro for step_batches in prepared.steps for micro in step_batches if micro.inputs.num_tokens):
        micro.old_logp = micro.roll_logp
        out = forward(micro.inputs) if forward else HeadOutput(micro.roll_logp, torch.zeros_like(micro.roll_logp), None, None)
        tokens = loss_tokens(micro, out, 0, num_steps_before=0, num_steps=0)
        places = micro.inputs.places.numpy()
        credit[places] = (objective.credit(tokens).logp * micro.policy_denominator).numpy()
        advantage[places], ratio[places] = micro.advantage.numpy(), tokens.ratio.numpy()
    return StepCredit(credit, advantage, ratio)


def _model_forward(config: Config, objective: Objective) -> Callable[[Inputs], HeadOutput]:
    path = str(saved_model(config.checkpoint_dir or ""))
    chunk_rows = config.learner.head_chunk_rows
    policy = load_model(config.model, path, seed=config.seed, chunk_rows=chunk_rows, gradient_checkpointing=False).policy

    def forward(inputs: Inputs) -> HeadOutput:
        with torch.no_grad():
            out: HeadOutput = policy(
                inputs.input_ids, inputs.positions, inputs.targets, config.rollout.temperature, extras=objective.extras
            )
        return out

    return forward


# ---- the report -----------------------------------------------------------------------------------------------------


def report(record: Record, schemes: Sequence[Scheme], tokenizer: Any) -> list[str]:
    """The lines that are printed."""
    first = schemes[0]
    model = first.config.checkpoint_dir
    num_tokens = sum(len(step.credit) for step in first.steps)
    ratio = (
        f"r = pi of {model} over the engine's recorded probability"
        if model
        else "r = 1: no model is given (checkpoint_dir=MODEL), and entropies, which are not on record, are all alike"
    )
    names = [f"scheme {i + 1}" for i in range(len(schemes))]
    head = [f"{record.folder}: {len(first.steps)} steps, {len(record.places)} groups, {num_tokens} loss tokens; {ratio}"]
    head += [f"{name}: {scheme.name}: {_chosen(scheme.config)}" for name, scheme in zip(names, schemes, strict=True)]
    columns = [_figures(scheme) for scheme in schemes]
    rows = [("", *names), *((key, *(f"{column[key]:.6g}" for column in columns)) for key in columns[0])]
    lines = [*head, "credit times D, without KL", *_align(rows)]
    return lines + _largest(record, schemes, tokenizer)


def _chosen(config: Config) -> str:
    return " ".join(f"{group}={getattr(config, group).name}" for group in GROUPS)


def _figures(scheme: Scheme) -> dict[str, float]:
    credit, advantage = scheme.joined("credit"), scheme.joined("advantage")
    trained = ~np.isnan(credit)
    figures = {"tokens trained on": float(trained.sum())}
    for sign, of_sign in (("A > 0", advantage > 0), ("A < 0", advantage < 0)):
        mine = credit[of_sign & trained]
        figures[f"tokens, {sign}"] = float(len(mine))
        figures[f"sum of credit, {sign}"] = float(mine.sum(dtype=np.float64))
        figures[f"share clipped or masked, {sign}"] = float((mine == 0).mean()) if len(mine) else 0.0
    return figures


def _largest(record: Record, schemes: Sequence[Scheme], tokenizer: Any) -> list[str]:
    """The tokens whose credit differs most between two schemes; of one, those with the largest credit."""
    steps = sorted({place.step for place in record.places.values()})
    places = [(step, i) for step, part in zip(steps, schemes[0].steps, strict=True) for i in range(len(part.credit))]
    credits = [np.nan_to_num(scheme.joined("credit")) for scheme in schemes]
    size = np.abs(credits[0] - credits[1]) if len(schemes) > 1 else np.abs(credits[0])
    order = np.argsort(-size, kind="stable")[:NUM_TOKENS_SHOWN]
    order = order[size[order] > 0]
    if not len(order):
        return ["", "the two schemes give every token the same credit" if len(schemes) > 1 else "every credit is 0"]
    rows: list[tuple[str, ...]] = [
        ("step", "prompt", "member", "token", "r", *(f"{what}{i + 1}" for what in ("A ", "c ") for i in range(len(schemes))))
    ]
    for number in order.tolist():
        step, place = places[number]
        names = [*_where(record.step_groups(step), place, tokenizer), f"{schemes[0].joined('ratio')[number]:.4g}"]
        advantages = [f"{scheme.joined('advantage')[number]:.4g}" for scheme in schemes]
        rows.append((str(step), *names, *advantages, *(f"{credit[number]:.4g}" for credit in credits)))
    title = "tokens with the largest difference in credit" if len(schemes) > 1 else "tokens with the largest credit"
    return ["", title, *_align(rows)]


def _where(groups: Sequence[ScoredGroup], place: int, tokenizer: Any) -> tuple[str, str, str]:
    """Prompt, member and text of a step's loss token."""
    for group in groups:
        for completion in group.group.completions:
            ids = completion.token_ids[completion.loss_mask]
            if place < len(ids):
                return group.group.visit.prompt_id, str(completion.index), repr(tokenizer.decode([int(ids[place])]))
            place -= len(ids)
    raise IndexError(place)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
