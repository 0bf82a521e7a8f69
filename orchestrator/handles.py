"""What the loop drives: engines, verifiers, learner and push, each behind a small asynchronous handle.

The real ones stand in ``fleet``, ``actors`` and ``push``; a test puts fakes in their place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.stages import Batch, Finished, Kept, Scored, StepOutcome
from rollout.records import Visit

MOST_REPLACEMENTS = 3  # of one worker without a proven push of a step in between, of one pool over the same groups


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the learner says of one trained batch."""

    metrics: dict[str, float]
    num_optimizer_steps: int
    moved: bool  # some optimizer step changed the weights


@dataclass(frozen=True, slots=True)
class Lost:
    """Visits whose groups a worker will not give."""

    worker: str
    visits: tuple[Visit, ...]
    reason: str  # lost_worker, or unproven: then nothing is trained that the worker made before


class Fleet(Protocol):
    """All rollout workers as one."""

    manned: asyncio.Event  # some worker takes visits; without one they wait for the next, whose start has deadlines of its own

    async def submit(self, visits: Sequence[Visit]) -> None:
        """Asks for the visits' groups."""

    async def next_finished(self) -> list[Finished]:
        """Training groups as they finish, at least one."""

    async def next_lost(self) -> Lost:
        """The visits of a worker that was lost, or is no longer trusted."""

    async def cancel(self, visits: Sequence[Visit]) -> None:
        """Stops generating them; their groups do not come back."""


class Scorer(Protocol):
    async def score(self, finished: Sequence[Finished]) -> list[Scored]:
        """A score for every completion, in order; without those groups that lay on a node which is gone. A verifier that fails gives a
        status; only where its policy is `fail` this raises RunStopped."""


class LearnerHandle(Protocol):
    async def fetch(self, batch: Batch) -> list[Kept]:
        """Brings the groups of the batch to every rank, outside of any collective. Returns those that lay on a node which is gone."""

    async def prepare(self, batch: Batch) -> dict[str, float]:
        """Log-probabilities, advantages, weights and denominators of the batch that was fetched; its metrics."""

    async def train(self) -> StepReport:
        """The optimizer steps of the prepared batch."""


class Pusher(Protocol):
    async def hold(self) -> None:
        """Before the learner is busy: returns once no new worker is being proven, and lets none begin until the next push."""

    async def push(self, version: int, report: StepReport) -> dict[str, float]:
        """The learner's weights, to which ``report`` led, on every engine as ``version``, proven. Returns metrics."""


class Observer(Protocol):
    """What sees and saves the run. It is awaited, so the loop stands still meanwhile."""

    async def after_step(self, outcome: StepOutcome) -> None:
        """A step is over: its batch is trained and pushed, or it was empty."""

    def event(self, name: str, **fields: object) -> None:
        """Something worth a line in events.jsonl."""
