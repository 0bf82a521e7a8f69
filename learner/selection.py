"""Selection: which groups are worth training on, told from the scores of one group.

A selection is one pure function ``(scores, *, keyword parameters) -> Decision``. It looks at ``accuracy``, never at the shaped
``value``: a group that is all wrong stays without signal though one member's length penalty differs. The reason of a drop is
also the name under which it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.records import Score

TOO_FEW_VALID = "too_few_valid"  # verifier failures left fewer members than the selection needs
ZERO_VARIANCE_SOLVED = "zero_variance_solved"  # every valid member has the same accuracy, 0.5 or more
ZERO_VARIANCE_UNSOLVED = "zero_variance_unsolved"  # every valid member has the same accuracy, below 0.5

SAME_ACCURACY = 1e-9  # accuracies this near are equal: means over parts, added in another order, differ in the last bits


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a group is kept; if not, why."""

    keep: bool
    reason: str | None


def zero_variance(scores: Sequence[Score]) -> Decision:
    """Drops a group whose valid members all have the same accuracy (DAPO 2503.14476, dynamic sampling), or of which fewer
    than two are valid: no group-relative advantage can come of either."""
    valid = _valid_accuracies(scores)
    if len(valid) < 2:
        return Decision(False, TOO_FEW_VALID)
    if max(valid) - min(valid) <= SAME_ACCURACY:
        return Decision(False, ZERO_VARIANCE_SOLVED if valid[0] >= 0.5 else ZERO_VARIANCE_UNSOLVED)
    return Decision(True, None)


def none(scores: Sequence[Score]) -> Decision:
    """Keeps every group that has a valid member."""
    return Decision(True, None) if _valid_accuracies(scores) else Decision(False, TOO_FEW_VALID)


def _valid_accuracies(scores: Sequence[Score]) -> list[float]:
    return [score.accuracy for score in scores if score.accuracy is not None]


SELECTIONS: dict[str, Callable[..., Decision]] = {"zero_variance": zero_variance, "none": none}
