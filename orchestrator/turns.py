"""Engines and learner on the same devices in turn (``cluster.placement=colocated``).

| phase        | owner           | what it does                                                        |
|--------------|-----------------|---------------------------------------------------------------------|
| sleep        | rollout workers | engines give weights and cache away; what became free is measured   |
| reload       | learner         | masters, moments and gradient buffers come back to the device       |
| prepare      | learner         | as where the devices are split                                      |
| train        | learner         | likewise                                                            |
| offload      | learner         | they are laid aside again; the weights stay, to be gathered         |
| wake_weights | rollout workers | memory for weights, still without any                               |
| push         | push            | the learner's weights into it                                       |
| wake_cache   | rollout workers | memory for keys and values; engines can score, then generate        |

Each has a deadline and is a ``turn`` event. A worker that fails in one is lost, as in a push; with a learner that fails the run goes back
to its last checkpoint. While it is the learner's turn no engine is started: a replacement waits. A checkpoint between two steps needs the
learner's states too, so it is a turn of its own, after which the same weights are pushed again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from ray.exceptions import RayError

from configs.schema import DeadlinesConfig
from orchestrator.errors import RunStopped
from orchestrator.fleet import Worker, words
from orchestrator.handles import LearnerHandle, StepReport
from orchestrator.stages import Batch, Kept
from orchestrator.waits import DeadlinePassed, Waits
from rollout.engine import Wake

T = TypeVar("T")


class TurnLearner(LearnerHandle, Protocol):
    async def offload(self) -> int:
        """Lays its states aside; bytes that became free."""

    async def reload(self) -> None:
        """Takes them back."""


class TurnPusher(Protocol):
    on_delivered: Callable[[], Awaitable[None]] | None

    async def hold(self) -> None:
        """As ``handles.Pusher``."""

    async def push(self, version: int, report: StepReport | None = None) -> dict[str, float]:
        """Likewise; calls ``on_delivered`` once the weights are there and before anything is computed with them."""


class TurnCrew(Protocol):
    new: list[Worker]
    proven: list[Worker]

    async def hold(self) -> None: ...

    def go_on(self) -> None: ...

    def has(self, worker: Worker) -> bool: ...

    def lose(self, worker: Worker, kind: str, reason: str) -> None: ...


def widened(deadlines: DeadlinesConfig) -> DeadlinesConfig:
    """What the loop may wait for prepare and push where phases of a turn, each with its own deadline, come before or within them."""
    settled = deadlines.push_s + deadlines.start_s + deadlines.close_s
    return dataclasses.replace(
        deadlines,
        prepare_s=deadlines.prepare_s + settled + 3 * deadlines.turn_s,
        push_s=deadlines.push_s + 3 * deadlines.turn_s,
    )


class Turns:
    """Stands where the loop has its learner and its pusher. It begins in the engines' turn, before any engine is started."""

    def __init__(
        self,
        learner: TurnLearner,
        pusher: TurnPusher,
        crew: TurnCrew,
        cancel: Callable[[], Awaitable[None]],
        waits: Waits,
        deadlines: DeadlinesConfig,
        event: Callable[..., None],
    ) -> None:
        """``cancel`` stops everything that engines generate."""
        self._learner, self._pusher, self._crew, self._cancel = learner, pusher, crew, cancel
        self._waits, self._deadlines, self._event = waits, deadlines, event
        self._turn: str | None = "engines"  # None: a phase between two turns failed
        self._asleep: list[Worker] = []
        self._push_began = 0.0
        self._times: dict[str, float] = defaultdict(float)
        pusher.on_delivered = self._delivered

    # ---- as learner and pusher --------------------------------------------------------------------------------------

    async def fetch(self, batch: Batch) -> list[Kept]:
        """Whosever turn it is: it needs no device, and engines may have to refill the batch."""
        return await self._learner.fetch(batch)

    async def prepare(self, batch: Batch) -> dict[str, float]:
        await self.to_learner()
        name, deadline_s = f"step {batch.step}", self._deadlines.prepare_s
        return await self._phase("prepare", "learner", self._learner.prepare(batch), deadline_s, of=name) | self._take_times()

    async def train(self) -> StepReport:
        return await self._phase("train", "learner", self._learner.train(), self._deadlines.train_s)

    async def hold(self) -> None:
        await self._pusher.hold()

    async def push(self, version: int, report: StepReport) -> dict[str, float]:
        return await self._to_engines(version, report) | self._take_times()

    # ---- whose turn it is -------------------------------------------------------------------------------------------

    async def lay_aside(self) -> None:
        """At the start, before any engine is: engines measure what is free."""
        await self._offload()

    async def to_learner(self) -> None:
        """Ends the engines' turn; nothing where it is the learner's. What engines still generate is cancelled. Raises RunStopped after
        a turn that failed half-way."""
        self._check()
        if self._turn == "learner":
            return
        self._turn = None
        deadlines = self._deadlines
        await self._wait("push", "new workers to be proven", self._pusher.hold(), deadlines.push_s)
        await self._wait("rollout workers", "replaced ones to start", self._crew.hold(), deadlines.start_s)
        await self._wait("rollout workers", "what they generate to end", self._cancel(), deadlines.turn_s)
        self._asleep = await self._all("sleep", [*self._crew.proven, *self._crew.new], lambda worker: worker.actor.sleep.remote())
        await self._wait("rollout workers", "lost ones to end", self._crew.hold(), deadlines.close_s)
        await self._phase("reload", "learner", self._learner.reload(), deadlines.turn_s)
        self._turn = "learner"

    async def to_engines(self, version: int) -> None:
        """Ends the learner's turn without a step: the engines get the weights of ``version`` again. Nothing where it is theirs; raises
        as ``to_learner``."""
        self._check()
        if self._turn == "learner":
            await self._to_engines(version, None)

    def _check(self) -> None:
        if self._turn is None:
            raise RunStopped("the devices changed hands only half-way: the turn events tell which phase was the last that ended")

    async def _to_engines(self, version: int, report: StepReport | None) -> dict[str, float]:
        self._turn = None
        await self._offload()
        self._crew.go_on()
        self._asleep = await self._wake("wake_weights", Wake.WEIGHTS)
        self._push_began = time.monotonic()
        return await self._pusher.push(version, report)

    async def _delivered(self) -> None:
        if self._turn == "engines":
            return  # the first push, to engines that never slept
        self._record("push", time.monotonic() - self._push_began)
        await self._wake("wake_cache", Wake.CACHE)
        self._asleep = []
        self._turn = "engines"

    # ---- phases -----------------------------------------------------------------------------------------------------

    async def _offload(self) -> None:
        began = time.monotonic()
        freed = await self._wait("learner", "offload", self._learner.offload(), self._deadlines.turn_s)
        self._record("offload", time.monotonic() - began, {"learner": freed})

    async def _wake(self, phase: str, what: Wake) -> list[Worker]:
        sleepers = [worker for worker in self._asleep if self._crew.has(worker)]
        return await self._all(phase, sleepers, lambda worker: worker.actor.wake.remote(what))

    async def _all(self, phase: str, workers: list[Worker], ask: Callable[[Worker], Awaitable[Any]]) -> list[Worker]:
        """Those of the workers that did it; the others are lost."""
        began = time.monotonic()
        answers = await asyncio.gather(*(self._answer(phase, worker, ask(worker)) for worker in workers))
        done = {worker: answer for worker, answer in zip(workers, answers, strict=True) if not isinstance(answer, _Failed)}
        freed = {worker.name: report.freed_bytes for worker, report in done.items() if report is not None}
        self._record(phase, time.monotonic() - began, freed)
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, _Failed):
                self._crew.lose(worker, answer.kind, answer.text)
        return list(done)

    async def _answer(self, phase: str, worker: Worker, ask: Awaitable[Any]) -> Any:
        try:
            return await self._wait(worker.name, phase, ask, self._deadlines.turn_s)
        except DeadlinePassed as error:
            return _Failed("silent", str(error))
        except RayError as error:
            return _Failed("dead", words(error))

    async def _phase(self, phase: str, owner: str, work: Awaitable[T], deadline_s: float, *, of: str = "") -> T:
        began = time.monotonic()
        result = await self._wait(owner, f"{phase} {of}".strip(), work, deadline_s)
        self._record(phase, time.monotonic() - began)
        return result

    async def _wait(self, owner: str, name: str, work: Awaitable[T], deadline_s: float) -> T:
        return await self._waits.wait(work, owner=owner, name=name, deadline_s=deadline_s)

    def _record(self, phase: str, time_s: float, freed_bytes: dict[str, int] | None = None) -> None:
        self._times[f"time/turn_{phase}_s"] += time_s
        self._event("turn", phase=phase, time_s=time_s, freed_bytes=freed_bytes or {})

    def _take_times(self) -> dict[str, float]:
        times, self._times = dict(self._times), defaultdict(float)
        return times


@dataclasses.dataclass(frozen=True, slots=True)
class _Failed:
    kind: str  # silent or dead
    text: str
