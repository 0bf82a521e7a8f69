"""The driver's record of a visit at each stage of the loop. Tokens stay where they were made; these hold references to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.ledger import Pick
from rollout.records import GroupMeta, Score


@dataclass(frozen=True, slots=True)
class Address:
    """Where a group lies: a parcel of groups that one task returned, and the group's place in it."""

    parcel: Any  # a reference to a list of rollout.records.Group
    place: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A group that an engine has finished."""

    meta: GroupMeta
    address: Address


@dataclass(frozen=True, slots=True)
class Scored:
    """A finished group with a score for every completion."""

    meta: GroupMeta
    address: Address
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """A scored group that passed selection and waits for a batch."""

    pick: Pick
    scored: Scored


@dataclass(frozen=True, slots=True)
class Batch:
    """The kept groups of one step, in pick order."""

    step: int
    version: int  # of the learner that will train it
    groups: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A scored group and what selection said of it."""

    pick: Pick
    scored: Scored
    reason: str | None  # of its drop; None where it was kept


@dataclass(frozen=True, slots=True)
class LoopState:
    """What the loop has in hand between two awaits. Visits in flight are not in it: they are asked again, under their number and
    with their seeds, and so are groups that wait for their scores."""

    waiting: tuple[Kept, ...]  # kept groups that no step has trained
    judged: tuple[Judged, ...]  # groups scored for the step that is being filled
    dropped: dict[str, int]  # in that step, by reason
    num_picked: int  # visits of that step, without those in flight
    budget: int | None  # how many it may pick in all


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step came to."""

    batch: Batch
    seen: tuple[Scored, ...]  # every group scored in this step, kept or not
    num_kept: int  # of these, by selection, whether or not this batch took them
    dropped: dict[str, int]  # visits dropped in this step, by reason
    metrics: dict[str, float]  # of the learner and the push, and the seconds of each stage
