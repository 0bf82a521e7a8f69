"""Metrics of a step that the driver computes itself: rewards, pass rates, lengths, drops. Names as in the glossary, ``area/name``.

Whatever depends on the clock lies under ``time/`` or ends in ``_s``, ``_per_s`` or ``_bytes``; nothing else may.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from orchestrator.stages import Scored, StepOutcome
from rollout.records import Consequence, Prompt, Score, Status, pass_rate


def step_metrics(outcome: StepOutcome, prompts: Mapping[str, Prompt]) -> dict[str, float]:
    """Everything about one step that is known without the learner."""
    seen, batch = outcome.seen, outcome.batch
    lengths = [n for scored in seen for n in scored.meta.num_tokens]
    values = [score.value for scored in seen for score in scored.scores if score.value is not None]
    rates = [rate for scored in seen if (rate := pass_rate(scored.scores)) is not None]
    metrics: dict[str, float] = {
        "batch/num_groups": len(batch.groups),
        "batch/num_visits": len(seen),
        "eff/prompt_frac": outcome.num_kept / len(seen) if seen else 0.0,
    }
    if values:
        metrics |= {"reward/mean": fmean(values), "reward/std": pstdev(values)}
    if lengths:
        truncated = sum(scored.meta.num_truncated for scored in seen)
        metrics |= {
            "len/mean": fmean(lengths),
            "len/p95": float(np.percentile(lengths, 95)),
            "len/trunc_frac": truncated / len(lengths),
            "rep/ratio20": sum(scored.meta.repeated_share * scored.meta.num_finished for scored in seen) / len(lengths),
            "rep/max_freq20": max(scored.meta.max_repeats for scored in seen),
        }
    if rates:
        metrics |= {
            "group/pass_rate": fmean(rates),
            "group/solve_none": sum(rate == 0 for rate in rates) / len(rates),
            "group/solve_all": sum(rate == 1 for rate in rates) / len(rates),
            "group/valid": sum(0 < rate < 1 for rate in rates) / len(rates),
        }
        metrics |= {f"group/pass_hist_{i}": n for i, n in enumerate(_histogram(rates))}
    metrics |= {f"pass_rate/{stratum}": rate for stratum, rate in pass_rates_by_stratum(seen, prompts).items()}
    metrics |= {_drop_name(reason): n for reason, n in sorted(outcome.dropped.items())}
    metrics |= _straggler_metrics(seen)
    statuses = status_counts(seen)
    metrics |= {f"verifier/{status}": statuses[status] for status in Status}
    metrics |= _verifier_metrics([score for scored in seen for score in scored.scores])
    if batch.groups:
        lags = [batch.version - kept.scored.meta.min_version for kept in batch.groups]
        metrics |= {"stale/versions": fmean(lags), "stale/max_versions": max(lags)}
    return metrics | _throughput(outcome, sum(lengths))


def _straggler_metrics(seen: Sequence[Scored]) -> dict[str, float]:
    """Of the groups that were given out without their last members, how long these had become, against the members that ended. Who is
    missing depends on the clock."""
    cut = [scored.meta for scored in seen if scored.meta.unfinished]
    if not cut:
        return {}
    missing = [n for meta in cut for n in meta.unfinished]
    return {
        "time/straggler_num_groups": len(cut),
        "time/straggler_num_missing": len(missing),
        "time/straggler_len_missing": fmean(missing),
        "time/straggler_len_finished": fmean(n for meta in cut for n in meta.num_tokens),
    }


def _verifier_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Means of each reward part's value and of what its verifier measured, over the completions that have one; how many got a value
    from a policy, for lack of a verdict; times."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            numbers[f"reward/{name}_mean"].append(value)
        for name, value in score.measures.items():
            numbers[f"reward/{name}"].append(value)
    metrics: dict[str, float] = {"verifier/zeroed": sum(score.consequence is Consequence.ZERO for score in scores)}
    metrics |= {name: fmean(values) for name, values in sorted(numbers.items())}
    if scores:
        times = [score.time_s for score in scores]
        metrics |= {"time/verifier_p95_s": float(np.percentile(times, 95)), "time/verifier_max_s": max(times)}
    return metrics


def _drop_name(reason: str) -> str:
    """How many surplus visits were asked beyond a batch depends on what finished first."""
    return "time/num_surplus" if reason == "surplus" else f"drop/{reason}"


def _throughput(outcome: StepOutcome, num_tokens: int) -> dict[str, float]:
    seconds = outcome.metrics.get("time/step_s", 0.0)
    return {"time/tokens_per_s": num_tokens / seconds} if seconds else {}


def status_counts(seen: Sequence[Scored]) -> Counter[Status]:
    """How many completions got each verifier status."""
    return Counter(score.status for scored in seen for score in scored.scores)


def pass_rates_by_stratum(seen: Sequence[Scored], prompts: Mapping[str, Prompt]) -> dict[str, float]:
    """Mean pass rate of the scored groups of each stratum."""
    rates: dict[str, list[float]] = defaultdict(list)
    for scored in seen:
        rate = pass_rate(scored.scores)
        if rate is not None:
            rates[prompts[scored.meta.visit.prompt_id].stratum].append(rate)
    return {stratum: fmean(values) for stratum, values in sorted(rates.items())}


def _histogram(rates: Sequence[float]) -> list[int]:
    """Ten bins: exactly 0, then eighths of the open interval, then exactly 1."""
    counts = [0] * 10
    for rate in rates:
        counts[0 if rate == 0 else 9 if rate == 1 else 1 + min(7, int(rate * 8))] += 1
    return counts


def pass_rate_histogram(seen: Sequence[Scored]) -> str:
    """One line for a message: how many groups had which pass rate."""
    rates = [rate for scored in seen if (rate := pass_rate(scored.scores)) is not None]
    names = ["0", *(f"{i}/8-{i + 1}/8" for i in range(8)), "1"]
    parts = [f"{name}: {n}" for name, n in zip(names, _histogram(rates), strict=True) if n]
    return f"pass rates of {len(rates)} groups: " + (", ".join(parts) or "none")


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (Chen et al. 2021, arXiv 2107.03374, eq. 1)."""
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
