"""The budget of missing verdicts: `reward.max_failed_share` of the completions of a step, or of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.metrics import status_counts
from orchestrator.stages import Scored
from rollout.records import Status


@dataclass(frozen=True, slots=True)
class OverBudget:
    message: str  # what ends the run
    details: Counter[str]  # what the verifiers said, and how often


def over_budget(seen: Sequence[Scored], max_failed_share: float, where: str, *, at_least: int = 0) -> OverBudget | None:
    """Whether more completions than this share have no verdict, those that a policy counted as 0 included. ``where``: for the message.

    ``at_least``: it is a share of so many completions where fewer were seen, so that the first few do not decide.
    """
    statuses = status_counts(seen)
    details = Counter(score.detail for scored in seen for score in scored.scores if not score.has_verdict)
    failed, total = details.total(), statuses.total()
    if failed <= max_failed_share * max(total, at_least):
        return None
    detail, times = details.most_common(1)[0]
    zeroed = failed - (total - statuses[Status.OK])
    counts = [f"{status}: {count}" for status, count in statuses.items()] + [f"zeroed of these: {zeroed}"] * bool(zeroed)
    message = (
        f"the verifier failed on {failed} of {total} completions of {where} ({', '.join(counts)}), more than "
        f"reward.max_failed_share={max_failed_share:g} allows; {times} times it said: {detail or 'nothing'}"
    )
    return OverBudget(message, details)
