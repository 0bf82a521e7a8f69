"""The lives of the rollout workers: new ones wait for their proof, proven ones get visits, lost ones are ended and replaced.

A slot whose node is gone waits until Ray has a place for it on another, while the run goes on with the workers it has.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from configs.schema import DeadlinesConfig
from orchestrator.errors import RunStopped
from orchestrator.fleet import RayFleet, Worker, words
from orchestrator.handles import MOST_REPLACEMENTS
from orchestrator.placement import living_nodes
from orchestrator.stacks import Process, on_nodes, whereabouts
from orchestrator.waits import DeadlinePassed, Wait, Waits
from rollout.engine import Health

POLL_S = 0.05
PLACE_POLL_S = 0.5  # between two looks whether Ray has a place
MOST_TRACEBACK = 4000  # characters of a remote traceback that an event holds
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
        *,
        has_place: Callable[[int], bool] = lambda slot: True,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``make(slot, number)`` makes the ``number``-th worker of a slot, the first being 0; ``has_place(slot)``: Ray has a place for it,
        on a node that lives; it may block. ``tell`` shows a line on the console."""
        self.fleet = fleet
        fleet.on_lost = self._found_lost
        self._make = make
        self._has_place, self._tell = has_place, tell
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
        self._stuck: set[str] = set()  # had made no decode step for too long when they were last asked
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

    def node(self, name: str) -> str:
        """The id of the node that the worker of this name runs on, or ran on."""
        node: str = self._facts[name]["node"]
        return node

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

    def lose(self, worker: Worker, kind: str, reason: str, traceback: str | None = None) -> None:
        """Ends the worker and has another started in its slot. Raises RunStopped where that happened too often."""
        if not self.has(worker):
            return  # known already: its stream ends when it is killed
        for workers in (self.new, self.proven):
            if worker in workers:
                workers.remove(worker)
        self.fleet.remove(worker)
        more = {} if traceback is None else {"traceback": traceback[-MOST_TRACEBACK:]}
        self._event("worker_lost", worker=worker.name, kind=kind, reason=reason, **more)
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
            self._found_lost(worker, "dead", error)
            return
        limit_s += self._deadlines.receive_s  # what a push brings is loaded between two steps
        if health.last_step_age_s <= limit_s or not self.has(worker):
            self._stuck.discard(worker.name)
        elif worker.name not in self._stuck:
            # Once more: where all of the run was paused, it is in the middle of the step it was in
            self._stuck.add(worker.name)
        else:
            since = time.monotonic() - health.last_step_age_s
            stuck = Wait(owner=worker.name, name="a decode step", deadline_s=limit_s, since=since)
            self.lose(worker, "stuck", str(await self._waits.passed(stuck)))

    def _found_lost(self, worker: Worker, kind: str, error: BaseException) -> None:
        """Whoever found it must go on, whatever comes of it."""
        remote = isinstance(error, RayTaskError)  # then its text is the traceback of where it was raised
        try:
            self.lose(worker, kind, words(error), traceback=str(error) if remote else None)
        except RunStopped as stopped:
            stopped.__cause__ = error
            self.fleet.fail(stopped)

    def _replace(self, lost: Worker, reason: str) -> None:
        slot = self.slot(lost)
        self.num_lost += 1
        self._since_proof[slot] += 1
        if self._since_proof[slot] > MOST_REPLACEMENTS:
            raise RunStopped(
                f"{lost.name} is lost ({reason}), and its place was filled {MOST_REPLACEMENTS} times already without a step's push "
                "proven in between; events.jsonl tells of each, with its traceback where there is one"
            )
        self._in_motion.add(lost.name)
        self.spawn(self._start_another(lost, slot))

    async def _start_another(self, lost: Worker, slot: int) -> None:
        began = time.monotonic()
        await self._end(lost)
        self._in_motion.discard(lost.name)
        has_started = False
        while not has_started:
            await self._wait_for_place(slot, lost)
            while not self._may_start.is_set():
                await self._may_start.wait()
            self._in_motion.add(lost.name)
            try:
                has_started = await self._start_in(slot, lost, began)
            finally:
                self._in_motion.discard(lost.name)

    async def _wait_for_place(self, slot: int, lost: Worker) -> None:
        """Returns once Ray has a place for the slot's next worker. Raises RunStopped where there was none for ``start_s``, and no other
        worker."""
        alone_since: float | None = None
        told = False
        while not await asyncio.to_thread(self._has_place, slot):
            if not told:
                told = True
                self._event("no_place", worker=lost.name)
                self._tell(
                    f"warning: there is no place for another worker instead of {lost.name}; until there is one it goes on without"
                )
            now = time.monotonic()
            if self.new or self.proven or self._in_motion:
                alone_since = None
            elif alone_since is None:
                alone_since = now
            elif now - alone_since > self._deadlines.start_s:
                raise RunStopped(
                    f"no rollout worker is left, and for {self._deadlines.start_s:g} s (deadlines.start_s) there was no place for another "
                    f"one instead of {lost.name}, whose node is gone: let a node join, or ask for fewer devices"
                )
            await asyncio.sleep(PLACE_POLL_S)

    async def _start_in(self, slot: int, lost: Worker, began: float) -> bool:
        """False where its node left meanwhile: it needs another place."""
        self._num_made[slot] += 1
        worker = self._make(slot, self._num_made[slot])
        self._slots[worker.name] = slot
        starting = asyncio.ensure_future(self._started(worker))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=PLACE_POLL_S)
                if not starting.done() and not await asyncio.to_thread(self._has_place, slot):
                    ray.kill(worker.actor)
                    return False
            self._facts[worker.name] = starting.result()
        except (DeadlinePassed, RayError) as error:
            self._event("worker_lost", worker=worker.name, kind="not started", reason=words(error))
            self._replace(worker, words(error))
            return True
        finally:
            starting.cancel()
        self._event("worker_replaced", worker=lost.name, by=worker.name, start_s=time.monotonic() - began)
        self.new.append(worker)
        self.arrived.set()
        return True

    async def _started(self, worker: Worker) -> dict[str, Any]:
        facts: dict[str, Any] = await self._waits.wait(
            _answer(worker.actor.facts.remote()), owner=worker.name, name="start", deadline_s=self._deadlines.start_s
        )
        return facts

    async def _end(self, worker: Worker) -> None:
        """Kills the worker and waits until its process, and with it the device's memory, is gone, or its node is."""
        facts = self._facts.get(worker.name)
        if facts is None:  # it never answered
            process = await asyncio.to_thread(whereabouts, worker.name, worker.actor)
        else:
            process = Process(worker.name, facts["pid"], facts["node"])
        ray.kill(worker.actor)
        while process is not None and not await self._has_ended(process):
            await asyncio.sleep(PLACE_POLL_S)

    async def _has_ended(self, process: Process) -> bool:
        limit_s = self._deadlines.close_s
        name = f"process {process.pid} of {process.name} to end"
        try:
            ended = await self._waits.wait(
                on_nodes(end_processes, [process], 2 * limit_s), owner=f"node {process.node}", name=name, deadline_s=limit_s
            )
        except DeadlinePassed:  # it has been told, and nothing may start on devices that are not free
            ended = {}
        return ended.get(process, False) or process.node not in await asyncio.to_thread(living_nodes)


async def end_actors(actors: Mapping[str, Any], limit_s: float) -> None:
    """Kills actors, named, and on their nodes what is left of their processes: a stopped one does not hear Ray."""
    found = await asyncio.to_thread(lambda: [whereabouts(name, actor) for name, actor in actors.items()])
    for actor in actors.values():
        ray.kill(actor)
    await on_nodes(end_processes, [process for process in found if process is not None], limit_s)


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference


def end_processes(pids: Sequence[int]) -> dict[int, bool]:
    """Whether each is gone now; runs on their node."""
    return {pid: end_process(pid) for pid in pids}


def end_process(pid: int) -> bool:
    """Whether the process is gone; runs on its node. One that does not go by itself, such as a stopped one, is killed."""
    try:
        process = psutil.Process(pid)
        if not "".join(process.cmdline()).startswith("ray::"):
            return True  # the number is another's by now, or the process is only to be reaped
        try:
            process.wait(GRACE_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(GRACE_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:  # it is deep in the kernel
        return False
    return True
