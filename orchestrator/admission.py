"""How many visits may be open, whether a batch may close while others still run, what is too old for it. Pure: the loop keeps the books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs.schema import Auto

MOST_OVERSAMPLE = 4.0  # of ``rollout.oversample=auto``: where next to nothing is kept, more open visits are no cure
MEMORY = 0.8  # what a step weighs against the one after it


def most_open(max_lag: int, oversample: float | Auto, groups_per_step: int) -> int:
    """How many visits may be open at once; of ``auto`` the most that it comes to."""
    batches = max_lag + (MOST_OVERSAMPLE if isinstance(oversample, Auto) else oversample)
    return int(round(batches * groups_per_step, 6))  # 1.15 * 100 is 114.99999999999999


@dataclass(frozen=True, slots=True)
class KeepRate:
    """The share of groups that were kept lately. It begins at one of one."""

    num_kept: float = 1.0
    num_judged: float = 1.0

    def after(self, num_kept: int, num_judged: int) -> KeepRate:
        """With one more step."""
        return KeepRate(MEMORY * self.num_kept + num_kept, MEMORY * self.num_judged + num_judged)

    @property
    def oversample(self) -> float:
        """One over it, at most ``MOST_OVERSAMPLE``."""
        return self.num_judged / max(self.num_kept, self.num_judged / MOST_OVERSAMPLE)


def leaves_late(running: Sequence[int], waiting: Sequence[int], *, version: int, max_lag: int, groups_per_step: int) -> bool:
    """Whether a batch that closes at ``version`` would leave visits of which some must then be trained more than ``max_lag`` versions
    after their first token, and that waiting for the running ones would spare.

    Args:
        running: versions at which the visits that still run were asked.
        waiting: versions of the oldest token of the kept groups that the batch does not take.

    After this batch ``k`` more, taken oldest first, train ``k * groups_per_step`` visits before version ``version + k + 1``. A visit of
    version v must be trained at v + max_lag at the latest: so of those up to version - max_lag + k no more than that may be left.
    """
    for k in range(max_lag):
        turn = version - max_lag + k
        late = sum(asked <= turn for asked in running)
        if late and late + sum(made <= turn for made in waiting) > k * groups_per_step:
            return True
    return False


def too_old(made: Mapping[int, int], *, version: int, max_lag: int, waits: bool, groups_per_step: int) -> list[int]:
    """Which of the kept groups of a resumed run, kept under a higher lag perhaps, this one could train only later than it allows.

    Args:
        made: the version of each one's oldest token, by the order of its pick.
        waits: whether batches take the oldest first and no token may be more than ``max_lag`` versions old; else nothing is too old above
            lag 0.
    """
    if max_lag == 0:  # a batch is cut in the order of the picks: what comes after an older one goes with it
        first = min((order for order in made if made[order] < version), default=None)
        return [] if first is None else [order for order in made if order >= first]
    in_time: set[int] = set()
    for order in sorted(made, key=made.__getitem__):  # as the batches to come will take them
        if not waits or version + len(in_time) // groups_per_step - made[order] <= max_lag:
            in_time.add(order)
    return [order for order in made if order not in in_time]
