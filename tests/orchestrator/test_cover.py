"""Combinations on recorded groups in one process: every pair of choices that is not refused, through the real learner.

``everything`` and ``SETTINGS`` also serve the whole product in tests/long.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from configs.compose import load_config, shipped_files
from configs.refusals import refused
from configs.schema import Aggregation, Choice, Config, KlConfig, KlFilter, KlKind, KlPlace, KlRatio, Reference
from learner.learner import Learner
from learner.objective import Objective
from learner.spec import LearnerSpec, RolloutBatch
from orchestrator.material import learner_spec
from orchestrator.replay import open_record
from rollout.tokenizer import character_tokenizer

pytestmark = pytest.mark.timeout(300)

YAML = Path(__file__).parents[2] / "configs"
# No run has roles or a teacher yet: they are refused by name. `auto` is none or tis_token.
NOT_GIVEN = {"act_focus", "craft", "auto"}
KL = {
    "off": KlConfig(),
    "k1 in the reward": KlConfig(KlKind.k1, 0.01, KlPlace.reward),
    "k2": KlConfig(KlKind.k2, 0.01),
    "k3 through": KlConfig(KlKind.k3, 0.01, ratio=KlRatio.through),
    "k3 detached": KlConfig(KlKind.k3, 0.01, ratio=KlRatio.detached),
    "k3+ of low entropy": KlConfig(KlKind.k3_plus, 0.01, token_filter=KlFilter.low_entropy),
}


def choices(group: str) -> dict[str, Choice]:
    """What the shipped files of a group choose, by file."""
    names = [name for name in shipped_files()[group] if name not in NOT_GIVEN]
    return {name: Choice(**yaml.safe_load((YAML / group / f"{name}.yaml").read_text())) for name in names}


def everything(overrides: list[str]) -> dict[str, dict[str, object]]:
    """The settings of every factor by name: algorithms with their parameters, and the other choices."""
    algorithms = {
        name: load_config([*overrides, f"algorithm={name}"], combinations=False) for name in shipped_files()["algorithm"]
    }
    return {
        "algorithm": {name: config.algorithm for name, config in algorithms.items()},
        "advantage": choices("advantage"),
        "weighting": choices("weighting"),
        "token_weighting": choices("token_weighting"),
        "correction": choices("correction"),
        "kl": KL,
        "aggregation": {mode.value: mode for mode in Aggregation},
    }


def assemble(base: Config, factors: dict[str, dict[str, object]], names: dict[str, str]) -> Config:
    """The configuration of one combination; ``names`` gives one name a factor."""
    picked = {factor: factors[factor][name] for factor, name in names.items()}
    algorithm = dataclasses.replace(picked.pop("algorithm"), kl=picked.pop("kl"), aggregation=picked.pop("aggregation"))
    return dataclasses.replace(base, algorithm=algorithm, **picked)


def base_config(recorded) -> Config:
    config = recorded.load()
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, reference=Reference.frozen))


def is_refused(base: Config, factors: dict[str, dict[str, object]], names: dict[str, str]) -> bool:
    return next(refused(assemble(base, factors, names)), None) is not None


def pairwise(base: Config, factors: dict[str, dict[str, object]]) -> Iterator[dict[str, str]]:
    """Combinations, none refused, that hold every pair of choices which some combination can hold: greedily, each begins with a pair
    that is still open and takes, factor by factor, what closes most of the others."""
    plain = {factor: "none" if "none" in names else next(iter(names)) for factor, names in factors.items()}
    plain |= {"algorithm": "grpo", "kl": "off", "aggregation": "seq_mean_token_mean", "advantage": "grpo"}
    pairs = {
        frozenset((one, other))
        for (f, mine), (g, theirs) in itertools.combinations(factors.items(), 2)
        for one, other in itertools.product(((f, name) for name in mine), ((g, name) for name in theirs))
    }
    open_pairs = {pair for pair in pairs if not is_refused(base, factors, plain | dict(pair))}
    while open_pairs:
        names = dict(min(open_pairs, key=sorted))
        for factor, options in factors.items():
            if factor in names:
                continue
            gain = {name: sum(frozenset(((factor, name), item)) in open_pairs for item in names.items()) for name in options}
            for name in sorted(gain, key=lambda name: (-gain[name], name)):
                if not is_refused(base, factors, plain | names | {factor: name}):
                    names[factor] = name
                    break
        names = {factor: names[factor] for factor in factors}
        if is_refused(base, factors, names):
            raise AssertionError(f"greedy choice led to a refused combination: {names}")
        open_pairs -= {frozenset(pair) for pair in itertools.combinations(names.items(), 2)}
        yield names


def test_every_pair_of_choices_trains_on_a_record(recorded):
    """One model, one DeepSpeed engine; the objective is exchanged before each batch."""
    base, factors = base_config(recorded), everything(recorded.overrides)
    cover = list(pairwise(base, factors))
    seen = {frozenset(pair) for names in cover for pair in itertools.combinations(names.items(), 2)}
    for factor, names in factors.items():
        assert all(any(row[factor] == name for row in cover) for name in names), f"not every {factor} can be used"
    assert frozenset((("algorithm", "aspo"), ("correction", "icepop"))) in seen
    assert frozenset((("algorithm", "aspo"), ("correction", "bypass"))) not in seen
    learner = Learner(LearnerSpec(**learner_spec(base, recorded.model, total_optimizer_steps=10_000)), 0, 1)
    batch = RolloutBatch(1, 0, tuple(open_record(recorded.folder, character_tokenizer()).step_groups(1)))
    start = [p.detach().clone() for p in learner.model.hf.parameters()]
    moves, num_acting = {}, 0
    for names in cover:
        config = assemble(base, factors, names)
        learner.spec = LearnerSpec(**learner_spec(config, recorded.model, total_optimizer_steps=10_000))
        learner.objective = Objective(learner.spec)
        with torch.no_grad():
            for parameter, value in zip(learner.model.hf.parameters(), start, strict=True):
                parameter.copy_(value)
        prepared = learner.prepare(batch)
        report = learner.train()
        assert report.num_skipped == 0, names
        acts = report.metrics["eff/token_frac"] > 0
        assert report.moved == acts, names  # a rejection may leave no token any weight; at the reference KL has no gradient
        assert all(math.isfinite(value) for value in (*prepared.metrics.values(), *report.metrics.values())), names
        assert prepared.metrics["batch/num_invalid"] == 1, names
        num_acting += acts
        moves[tuple(names.values())] = sum(float(p.detach().double().sum()) for p in learner.model.hf.parameters())
    assert num_acting > 0.95 * len(cover)
    same = num_acting - len(set(moves.values()))
    assert same < 0.1 * len(moves), f"{same} of {len(moves)} combinations moved the weights exactly as another did"
