"""From the scores of the parts to the one score of a completion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from configs.schema import RewardPart
from rewards.contract import RewardError, failed
from rollout.records import Consequence, Outcome, Score, Status

_WORST_FIRST = (Status.ERROR, Status.TIMEOUT, Status.INVALID, Status.ABSTAIN)


def applicable(parts: Mapping[str, RewardPart], routed: str | None) -> dict[str, RewardPart]:
    """The parts that judge an item: the one its source names, or all. Raises `RewardError` for a name that is no part."""
    if routed is None:
        return dict(parts)
    if routed not in parts:
        raise RewardError(f"the reward part '{routed}' is unknown; reward.parts has: {', '.join(parts)}")
    return {routed: parts[routed]}


def compose(parts: Mapping[str, RewardPart], scores: Mapping[str, Score]) -> Score:
    """One score of the applicable ``parts``' own ``scores`` (same keys).

    ``value`` is the weighted sum. ``accuracy`` is the mean over the parts with ``accuracy: true``; where none has it, as when
    a source names a part without it, over all of them. ``outcome`` is ``right`` where all that count are right, else
    that of the first that is not; ``extracted`` is the first of those that count. Any part that is not ok leaves no
    value, and the worst status (error, timeout, invalid, abstain) stands, with the details of all that failed.
    """
    values = {name: score.value for name, score in scores.items() if score.value is not None}
    time_s = sum(score.time_s for score in scores.values())
    broken = {name: score for name, score in scores.items() if score.status is not Status.OK}
    if broken:
        worst = min((score.status for score in broken.values()), key=_WORST_FIRST.index)
        score = failed(worst, "; ".join(f"reward part '{name}': {score.detail}" for name, score in broken.items()), time_s)
        return replace(score, parts=values)
    total = sum(parts[name].weight * value for name, value in values.items())
    if not math.isfinite(total):
        return replace(failed(Status.ERROR, f"the weighted sum of the reward parts is {total}", time_s), parts=values)
    counting = [scores[name] for name in parts if parts[name].accuracy] or list(scores.values())
    accuracies = [score.accuracy for score in counting if score.accuracy is not None]
    return Score(
        status=Status.OK,
        outcome=next((score.outcome for score in counting if score.outcome is not Outcome.RIGHT), Outcome.RIGHT),
        value=total,
        accuracy=sum(accuracies) / len(accuracies),
        parts=values,
        extracted=next((score.extracted for score in counting if score.extracted is not None), None),
        time_s=time_s,
        detail="",
        measures={},
        consequence=Consequence.NONE,
    )
