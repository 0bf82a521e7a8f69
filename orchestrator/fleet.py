"""All rollout workers as one, as the loop drives them over Ray."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError

from orchestrator.handles import Lost
from orchestrator.stages import Address, Finished
from orchestrator.waits import DeadlinePassed, Waits, heard
from rollout.engine import EngineError, GroupRequest
from rollout.records import Purpose, Visit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Worker:
    """A rollout actor and its name."""

    name: str
    actor: Any


class RayFleet:
    """Deals visits to workers by how many each has outstanding, and merges their streams of finished groups.

    Workers come and go. Training visits of a worker that goes come out of ``next_lost``, evaluation visits are asked of the
    others; while there is no worker at all, visits wait for the next one.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        request: Callable[[Visit], GroupRequest],
        waits: Waits,
        answer_s: float,
    ) -> None:
        """``answer_s``: a worker may take so long to take visits, or to drop them."""
        self.workers = list(workers)
        self.manned = asyncio.Event()
        if workers:
            self.manned.set()
        # Told of a worker that is lost, how (dead, silent, failed) and why; without it that ends the run.
        self.on_lost: Callable[[Worker, str, BaseException], None] | None = None
        self._request = request
        self._waits, self._answer_s = waits, answer_s
        self._outstanding: dict[str, set[Visit]] = {worker.name: set() for worker in workers}
        self._waiting: list[Visit] = []  # submitted while there was no worker
        self._order = asyncio.Lock()  # an actor's threads keep no order: a cancel must not overtake the submission it cancels
        self._finished: asyncio.Queue[list[Finished]] = asyncio.Queue()
        self._lost: asyncio.Queue[Lost] = asyncio.Queue()
        self._evaluated: dict[Visit, asyncio.Future[Finished]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # a life may end by another error
        self._streams = {worker.name: asyncio.create_task(self._follow(worker)) for worker in workers}
        self.num_groups: Counter[str] = Counter()  # finished training groups by worker

    # ---- workers come and go ----------------------------------------------------------------------------------------

    async def add(self, worker: Worker) -> None:
        """Visits go to this worker from now on, those that waited for one first."""
        self.workers.append(worker)
        self.manned.set()
        self._outstanding[worker.name] = set()
        if worker.name not in self._streams:
            self._streams[worker.name] = asyncio.create_task(self._follow(worker))
        async with self._order:  # before: what is cancelled meanwhile still waits where the cancel looks for it
            waiting, self._waiting = self._waiting, []
            await self._submit(waiting)

    def remove(self, worker: Worker) -> None:
        """No more visits for a worker that is being killed: what it gave out before is still taken, then its stream ends."""
        if worker in self.workers:
            self.workers.remove(worker)
        if not self.workers:
            self.manned.clear()

    async def withdraw(self, worker: Worker) -> None:
        """No more visits for a worker in doubt, and nothing of what it has made is used. ``add`` takes it back."""
        self.remove(worker)
        visits = self._outstanding[worker.name]
        self._outstanding[worker.name] = set()
        async with self._order:
            await self._answer(worker, worker.actor.cancel.remote(list(visits)), "dropping visits")
        for items in [self._finished.get_nowait() for _ in range(self._finished.qsize())]:
            if items[0].meta.worker == worker.name:
                visits |= {item.meta.visit for item in items}
            else:
                self._finished.put_nowait(items)
        self._lost.put_nowait(Lost(worker.name, _of(visits, Purpose.TRAIN), "unproven"))
        await self.submit(_of(visits, Purpose.EVAL))

    def fail(self, error: BaseException) -> None:
        """Ends the run: whoever waits for groups gets ``error``."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.cancel()
        self._failed.cancel()

    def depths(self) -> dict[str, Any]:
        """What each worker has outstanding, what waits for a worker, and parcels that nobody has taken yet."""
        outstanding = {name: len(visits) for name, visits in self._outstanding.items() if visits}
        return {"outstanding": outstanding, "waiting": len(self._waiting), "finished": self._finished.qsize()}

    # ---- visits -----------------------------------------------------------------------------------------------------

    async def submit(self, visits: Sequence[Visit]) -> None:
        async with self._order:
            await self._submit(visits)

    async def _submit(self, visits: Sequence[Visit]) -> None:
        if not self.workers:
            self._waiting += visits
            return
        requests: dict[str, list[GroupRequest]] = defaultdict(list)
        for visit in visits:
            worker = min(self.workers, key=lambda worker: len(self._outstanding[worker.name]))
            self._outstanding[worker.name].add(visit)
            requests[worker.name].append(self._request(visit))
        asked = [worker for worker in self.workers if requests[worker.name]]
        await asyncio.gather(*(self._answer(w, w.actor.submit.remote(requests[w.name]), "taking visits") for w in asked))

    async def _answer(self, worker: Worker, answer: Awaitable[Any], name: str) -> None:
        """Awaits a worker's answer. The visits of one that is lost come back when its stream ends. Raises ValueError for what no engine can
        take."""
        try:
            await self._waits.wait(answer, owner=worker.name, name=name, deadline_s=self._answer_s)
        except (RayError, EngineError, DeadlinePassed) as error:
            if self.on_lost is None or isinstance(error, ValueError):
                raise
            kind = "silent" if isinstance(error, DeadlinePassed) else "failed" if isinstance(error, RayTaskError) else "dead"
            self.on_lost(worker, kind, error)

    async def next_finished(self) -> list[Finished]:
        return await self.or_failure(asyncio.create_task(self._finished.get()))

    async def next_lost(self) -> Lost:
        return await self._lost.get()

    async def evaluate(self, visits: Sequence[Visit]) -> list[Finished]:
        """The groups of evaluation visits, in the order asked. They never reach ``next_finished``."""
        loop = asyncio.get_running_loop()
        self._evaluated |= {visit: loop.create_future() for visit in visits}
        await self.submit(visits)
        finished = await self.or_failure(asyncio.gather(*(self._evaluated[visit] for visit in visits)))
        for visit in visits:
            del self._evaluated[visit]
        return finished

    async def or_failure(self, wanted: asyncio.Future[T]) -> T:
        """The wanted result; raises what was given to ``fail`` before it came."""
        try:
            waiting: set[asyncio.Future[Any]] = {wanted, self._failed}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return wanted.result()
        finally:
            wanted.cancel()
            wanted.add_done_callback(heard)

    async def cancel(self, visits: Sequence[Visit]) -> None:
        dropped = set(visits)
        async with self._order:
            self._waiting = [visit for visit in self._waiting if visit not in dropped]
            held = {name: visits & dropped for name, visits in self._outstanding.items()}
            # Of a lost worker too: when its stream ends, and its visits are told of, these may be under way elsewhere
            for outstanding in self._outstanding.values():
                outstanding.difference_update(dropped)
            for worker in list(self.workers):
                if held[worker.name]:
                    await self._answer(worker, worker.actor.cancel.remote(list(held[worker.name])), "dropping visits")

    async def cancel_all(self) -> None:
        """Stops everything that any worker is asked for."""
        await self.cancel([*self._waiting, *(visit for visits in self._outstanding.values() for visit in visits)])

    # ---- the streams ------------------------------------------------------------------------------------------------

    async def _follow(self, worker: Worker) -> None:
        try:
            await self._let_go(worker, await self._end_of_stream(worker))
        except Exception as fault:  # ours: it must not pass for a lost worker, and nobody awaits this task
            self.fail(fault)

    async def _end_of_stream(self, worker: Worker) -> Exception:
        """Why it ended."""
        try:
            await self._take_groups(worker)
        except RayError as reason:
            return reason
        return EngineError(f"the stream of groups of {worker.name} ended while the run goes on")

    async def _let_go(self, worker: Worker, error: Exception) -> None:
        self.remove(worker)
        if self.on_lost is None:
            self.fail(error)
            return
        self.on_lost(worker, "failed" if isinstance(error, RayTaskError) else "dead", error)
        visits, self._outstanding[worker.name] = self._outstanding[worker.name], set()
        training = _of(visits, Purpose.TRAIN)
        if training:
            self._lost.put_nowait(Lost(worker.name, training, "lost_worker"))
        await self.submit(_of(visits, Purpose.EVAL))

    async def _take_groups(self, worker: Worker) -> None:
        stream = worker.actor.groups.remote().__aiter__()
        async for parcel in stream:
            record = await anext(stream, None)
            if record is None:
                await parcel  # raises what ended the stream
                return
            metas = await record
            finished = [Finished(meta, Address(parcel, place)) for place, meta in enumerate(metas)]
            wanted = [item for item in finished if item.meta.visit in self._outstanding[worker.name]]  # the rest was cancelled
            self._outstanding[worker.name] -= {item.meta.visit for item in wanted}
            for item in wanted:
                if item.meta.visit.purpose is Purpose.EVAL:
                    self._evaluated[item.meta.visit].set_result(item)
            training = [item for item in wanted if item.meta.visit.purpose is Purpose.TRAIN]
            if training:
                self.num_groups[worker.name] += len(training)
                self._finished.put_nowait(training)


def _of(visits: Iterable[Visit], purpose: Purpose) -> tuple[Visit, ...]:
    return tuple(sorted(visit for visit in visits if visit.purpose is purpose))


def words(error: BaseException) -> str:
    """A worker's own message, without the remote traceback that Ray wraps round it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip()}"
