"""The lives of the rollout workers: new ones wait for their proof, proven ones get visits, lost ones are ended and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.schema import DeadlinesConfig
from orchestrator.errors import RunStopped
from orchestrator.fleet import RayFleet, Worker, words
from orchestrator.waits import DeadlinePassed, Wait, Waits
from rollout.engine import Health

MOST_REPLACEMENTS = 3  # of one slot without a proven push of a step in between
POLL_S = 0.05
GRACE_S = 2.0  # for a killed actor's process to end by itself; a stopped one (SIGSTOP) does not


class Crew:
    """Every slot has one worker at a time: on its way, ``new`` (started, without weights), ``proven``, or lost."""

    def __init__(
        self,
        fleet: RayFleet,
        make: Callable[[int, int], Worker],
        waits: Waits,
        deadlines: DeadlinesConfig,
        event: Callable[..., None],
    ) -> None:
        """``make(slot, number)`` makes the ``number``-th worker of a slot, the first being 0."""
        self.fleet = fleet
        fleet.on_lost = self._stream_ended
        fleet.on_silent = lambda worker, reason: self.lose(worker, "silent", reason)
        self._make = make
        self._waits = waits
        self._deadlines = deadlines
        self._event = event
        self.new: list[Worker] = []
        self.proven: list[Worker] = []
        self.arrived = asyncio.Event()  # somebody is new
        self.num_lost = 0
        self._slots: dict[str, int] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._num_made: Counter[int] = Counter()
        self._since_proof: Counter[int] = Counter()  # replacements by slot
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._in_motion: set[str] = (
            set()
        )  # lost workers whose process may live, and their slots' next ones until they are started

    async def start(self, workers: Sequence[Worker]) -> None:
        """Takes in the first workers, in the order of their slots, once their engines run."""
        for slot, worker in enumerate(workers):
            self._slots[worker.name] = slot
        facts = await asyncio.gather(*(self._started(worker) for worker in workers))
        self._facts = {worker.name: fact for worker, fact in zip(workers, facts, strict=True)}
        self.new += workers
        self.arrived.set()
        self.spawn(self._feel_pulses())

    async def hold(self) -> None:
        """Returns once no lost worker's process is left and no other is being started: from then on its devices are free, and none
        starts until ``go_on``."""
        self._may_start.clear()
        while self._in_motion:
            await asyncio.sleep(POLL_S)

    def go_on(self) -> None:
        self._may_start.set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def slot(self, worker: Worker) -> int:
        return self._slots[worker.name]

    def has(self, worker: Worker) -> bool:
        return worker in self.new or worker in self.proven

    async def prove(self, worker: Worker) -> None:
        """It runs the learner's weights: visits may go to it."""
        self.new.remove(worker)
        self.proven.append(worker)
        self.proven.sort(key=self.slot)
        await self.fleet.add(worker)

    async def doubt(self, worker: Worker) -> None:
        """It must be proven again, and what it made is not used."""
        self.proven.remove(worker)
        self.new.append(worker)
        await self.fleet.withdraw(worker)

    def step_proven(self) -> None:
        """A step's push is proven on these workers: their slots may be replaced again as often."""
        for worker in self.proven:
            del self._since_proof[self.slot(worker)]

    def lose(self, worker: Worker, kind: str, reason: str) -> None:
        """Ends the worker and has another started in its slot. Raises RunStopped where that happened too often."""
        if not self.has(worker):
            return  # known already: its stream ends when it is killed
        for workers in (self.new, self.proven):
            if worker in workers:
                workers.remove(worker)
        self.fleet.remove(worker)
        self._event("worker_lost", worker=worker.name, kind=kind, reason=reason)
        self._replace(worker, reason)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` beside everything else; what it raises ends the run."""
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.fleet.fail(error)

    async def _feel_pulses(self) -> None:
        """Asks every worker now and then whether it lives: the engine steps in a thread of its own, so it answers meanwhile."""
        while True:
            await asyncio.sleep(self._deadlines.heartbeat_s / 4)
            await asyncio.gather(*(self._feel_pulse(worker) for worker in [*self.proven, *self.new]))

    async def _feel_pulse(self, worker: Worker) -> None:
        limit_s = self._deadlines.heartbeat_s
        try:
            health: Health = await self._waits.wait(
                _answer(worker.actor.health.remote()), owner=worker.name, name="a sign of life", deadline_s=limit_s
            )
        except DeadlinePassed as error:
            self.lose(worker, "silent", str(error))
            return
        except RayError as error:
            self.lose(worker, "dead", words(error))
            return
        limit_s += self._deadlines.receive_s  # what a push brings is loaded between two steps
        if health.last_step_age_s > limit_s and self.has(worker):
            since = time.monotonic() - health.last_step_age_s
            stuck = Wait(owner=worker.name, name="a decode step", deadline_s=limit_s, since=since)
            self.lose(worker, "stuck", str(await self._waits.passed(stuck)))

    def _stream_ended(self, worker: Worker, reason: str) -> None:
        try:
            self.lose(worker, "dead", reason)
        except RunStopped as error:
            self.fleet.fail(error)

    def _replace(self, lost: Worker, reason: str) -> None:
        slot = self.slot(lost)
        self.num_lost += 1
        self._since_proof[slot] += 1
        if self._since_proof[slot] > MOST_REPLACEMENTS:
            raise RunStopped(
                f"{lost.name} is lost ({reason}), and its place was filled {MOST_REPLACEMENTS} times already without a step's push "
                "proven in between; events.jsonl tells of each"
            )
        self._in_motion.add(lost.name)
        self.spawn(self._start_another(lost, slot))

    async def _start_another(self, lost: Worker, slot: int) -> None:
        started = time.monotonic()
        await self._end(lost)
        self._in_motion.discard(lost.name)
        while not self._may_start.is_set():
            await self._may_start.wait()
        self._in_motion.add(lost.name)
        try:
            await self._start_in(slot, lost, started)
        finally:
            self._in_motion.discard(lost.name)

    async def _start_in(self, slot: int, lost: Worker, started: float) -> None:
        self._num_made[slot] += 1
        worker = self._make(slot, self._num_made[slot])
        self._slots[worker.name] = slot
        try:
            self._facts[worker.name] = await self._started(worker)
        except (DeadlinePassed, RayError) as error:
            self._event("worker_lost", worker=worker.name, kind="not started", reason=words(error))
            self._replace(worker, words(error))
            return
        self._event("worker_replaced", worker=lost.name, by=worker.name, start_s=time.monotonic() - started)
        self.new.append(worker)
        self.arrived.set()

    async def _started(self, worker: Worker) -> dict[str, Any]:
        facts: dict[str, Any] = await self._waits.wait(
            _answer(worker.actor.facts.remote()), owner=worker.name, name="start", deadline_s=self._deadlines.start_s
        )
        return facts

    async def _end(self, worker: Worker) -> None:
        """Kills the worker and waits until its process, and with it the device's memory, is gone."""
        ray.kill(worker.actor)
        facts = self._facts.get(worker.name)
        if facts is None:
            return  # it never answered: Ray ends its process, if there is one
        on_its_node = NodeAffinitySchedulingStrategy(facts["node"], soft=False)
        gone = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=on_its_node).remote(facts["pid"])
        with contextlib.suppress(RayError):  # the node is gone, and the process with it
            await self._waits.wait(
                _answer(gone),
                owner=f"node {facts['node']}",
                name=f"process {facts['pid']} of {worker.name} to end",
                deadline_s=self._deadlines.close_s,
            )


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference


def end_process(pid: int) -> None:
    """Returns once the process is gone; runs on its node. One that does not go by itself, such as a stopped one, is killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if not "".join(process.cmdline()).startswith("ray::"):
            return  # the number is another's by now, or the process is only to be reaped
        try:
            process.wait(GRACE_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(GRACE_S)
