"""Evaluation on held-out prompts: pass@k and avg@k, all of them and by stratum, bound to one version of the weights.

The sampling seeds depend on the prompt alone, so two evaluations of the same weights give the same completions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from configs.schema import EvaluationConfig
from orchestrator.errors import RunStopped
from orchestrator.failures import over_budget
from orchestrator.fleet import RayFleet
from orchestrator.handles import Scorer
from orchestrator.metrics import pass_at_k
from orchestrator.stages import Scored
from orchestrator.waits import Waits
from rollout.records import Prompt, Purpose, Status, Visit


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out results of one version."""

    version: int
    num_prompts: int
    num_failed: int  # completions whose verifier failed; they count nowhere
    pass_at: dict[int, float]  # by k; pass_at[1] is also avg@num_samples
    pass_at_1_by_stratum: dict[str, float]

    @property
    def pass_at_1(self) -> float:
        return self.pass_at[1]

    def metrics(self) -> dict[str, float]:
        metrics = {f"eval/pass@{k}": value for k, value in self.pass_at.items()}
        metrics[f"eval/avg@{max(self.pass_at)}"] = self.pass_at_1
        metrics |= {f"eval/pass@1/{stratum}": value for stratum, value in self.pass_at_1_by_stratum.items()}
        return metrics | {"eval/num_failed": self.num_failed}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Evaluation:
        """What ``as_json`` wrote."""
        return cls(**{**row, "pass_at": {int(k): value for k, value in row["pass_at"].items()}})

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "num_prompts": self.num_prompts,
            "num_failed": self.num_failed,
            "pass_at": {str(k): value for k, value in self.pass_at.items()},
            "pass_at_1_by_stratum": self.pass_at_1_by_stratum,
        }


def choose_prompts(held_out: Sequence[Prompt], config: EvaluationConfig) -> list[Prompt]:
    """The held-out prompts to ask: all, or the first of each stratum in their own (hashed) order."""
    if config.max_prompts_per_stratum is None:
        return list(held_out)
    chosen: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in held_out:
        if len(chosen[prompt.stratum]) < config.max_prompts_per_stratum:
            chosen[prompt.stratum].append(prompt)
    return [prompt for prompts in chosen.values() for prompt in prompts]


async def evaluate(
    fleet: RayFleet,
    scorer: Scorer,
    prompts: Mapping[str, Prompt],
    waits: Waits,
    *,
    num_samples: int,
    version: int,
    max_failed_share: float,
    deadline_s: float,
) -> Evaluation:
    """Samples ``num_samples`` completions of every prompt and scores them, each within ``deadline_s``, again what lay on a lost node. No
    push may happen meanwhile.

    Raises RunStopped where more than this share got no verdict: a pass rate of the few that did would pass for one of all.
    """
    visits = [Visit(prompt_id, 0, Purpose.EVAL) for prompt_id in prompts]
    by_visit: dict[Visit, Scored] = {}
    while left := [visit for visit in visits if visit not in by_visit]:
        finished = await waits.wait(
            fleet.evaluate(left), owner="rollout workers", name="completions of the evaluation", deadline_s=deadline_s
        )
        versions = {(item.meta.min_version, item.meta.max_version) for item in finished}
        if versions != {(version, version)}:
            raise RuntimeError(f"an evaluation of version {version} got tokens of versions {sorted(versions)}")
        scores = scorer.score(finished)
        answers = await waits.wait(scores, owner="reward pool", name="scores of the evaluation", deadline_s=deadline_s)
        by_visit |= {item.meta.visit: item for item in answers}
    scored = [by_visit[visit] for visit in visits]
    over = over_budget(scored, max_failed_share, f"the evaluation of version {version}")
    if over is not None:
        raise RunStopped(over.message)
    return summarize(scored, prompts, num_samples=num_samples, version=version)


def summarize(scored: Sequence[Scored], prompts: Mapping[str, Prompt], *, num_samples: int, version: int) -> Evaluation:
    """Means over prompts. A prompt with fewer than k valid samples does not count in pass@k."""
    rates: dict[str, list[float]] = defaultdict(list)
    passes: dict[int, list[float]] = {k: [] for k in _ks(num_samples)}
    num_failed = 0
    for item in scored:
        valid = [score.accuracy >= 0.5 for score in item.scores if score.status is Status.OK and score.accuracy is not None]
        num_failed += len(item.scores) - len(valid)
        for k, values in passes.items():
            if len(valid) >= k:
                values.append(pass_at_k(len(valid), sum(valid), k))
        if valid:
            rates[prompts[item.meta.visit.prompt_id].stratum].append(sum(valid) / len(valid))
    return Evaluation(
        version=version,
        num_prompts=len(scored),
        num_failed=num_failed,
        pass_at={k: fmean(values) if values else float("nan") for k, values in passes.items()},
        pass_at_1_by_stratum={stratum: fmean(values) for stratum, values in sorted(rates.items())},
    )


def _ks(num_samples: int) -> list[int]:
    """1, 2, 4 ... up to the number of samples, which is always among them."""
    ks = {1 << i for i in range(num_samples.bit_length()) if 1 << i <= num_samples}
    return sorted(ks | {num_samples})
