"""All rollout workers as one, and the reward pool, as the loop drives them over Ray."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError

from orchestrator.errors import RunStopped
from orchestrator.handles import Lost
from orchestrator.stages import Address, Finished, Scored
from orchestrator.waits import DeadlinePassed, Waits
from rollout.engine import EngineError, GroupRequest
from rollout.records import Consequence, Prompt, Purpose, Score, Visit

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
        self.on_lost: Callable[[Worker, str], None] | None = (
            None  # told of a worker whose stream ended; without it that ends the run
        )
        self.on_silent: Callable[[Worker, str], None] | None = None  # told of one that passed ``answer_s``; likewise
        self._request = request
        self._waits, self._answer_s = waits, answer_s
        self._outstanding: dict[str, set[Visit]] = {worker.name: set() for worker in workers}
        self._waiting: list[Visit] = []  # submitted while there was no worker
        self._order = asyncio.Lock()  # an actor's threads keep no order: a cancel must not overtake the submission it cancels
        self._finished: asyncio.Queue[list[Finished]] = asyncio.Queue()
        self._lost: asyncio.Queue[Lost] = asyncio.Queue()
        self._evaluated: dict[Visit, asyncio.Future[Finished]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams = {worker.name: asyncio.create_task(self._follow(worker)) for worker in workers}
        self.num_groups: Counter[str] = Counter()  # finished training groups by worker

    # ---- workers come and go ----------------------------------------------------------------------------------------

    async def add(self, worker: Worker) -> None:
        """Visits go to this worker from now on, those that waited for one first."""
        self.workers.append(worker)
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
        self._lost.put_nowait(Lost(worker.name, tuple(sorted(visits)), "unproven"))

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
        """Awaits a worker's answer. One that is gone does not matter here: its stream ends too, and its visits come back from there."""
        try:
            await self._waits.wait(answer, owner=worker.name, name=name, deadline_s=self._answer_s)
        except (RayActorError, EngineError):
            pass
        except DeadlinePassed as error:
            if self.on_silent is None:
                raise
            self.on_silent(worker, str(error))

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

    async def cancel(self, visits: Sequence[Visit]) -> None:
        dropped = set(visits)
        async with self._order:
            self._waiting = [visit for visit in self._waiting if visit not in dropped]
            for worker in list(self.workers):
                mine = self._outstanding[worker.name] & dropped
                if mine:
                    self._outstanding[worker.name] -= mine
                    await self._answer(worker, worker.actor.cancel.remote(list(mine)), "dropping visits")

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
        self.on_lost(worker, words(error))
        visits, self._outstanding[worker.name] = self._outstanding[worker.name], set()
        training = tuple(sorted(visit for visit in visits if visit.purpose is Purpose.TRAIN))
        if training:
            self._lost.put_nowait(Lost(worker.name, training, "lost_worker"))
        await self.submit(sorted(visit for visit in visits if visit.purpose is Purpose.EVAL))

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


def words(error: BaseException) -> str:
    """A worker's own message, without the remote traceback that Ray wraps round it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip()}"


class RayScorer:
    """Scores parcels on the node that holds them."""

    def __init__(
        self,
        pools: Mapping[str, Any],
        nodes: Mapping[str, str],
        prompts: Mapping[str, Prompt],
        replace: Callable[[str, str], Any],
        tell: Callable[[Sequence[Scored]], None] = lambda scored: None,
    ) -> None:
        """``pools`` are the reward actors by node, ``nodes`` the node of each worker by its name; ``replace`` makes a node's pool anew,
        told why; ``tell`` gets the scores as they come in, also those whose policy ends the run."""
        self._pools = dict(pools)
        self._nodes = nodes
        self._prompts = prompts
        self._replace = replace
        self._tell = tell
        self._num_lost: dict[str, int] = {}
        self.num_asked = 0  # parcels that wait for their scores

    @property
    def num_lost(self) -> int:
        """Verifier processes that were killed or died, in the pools as they are now."""
        return sum(self._num_lost.values())

    def _node(self, worker: str) -> str:
        """The worker's. One that started anew on a node without a pool, its own being lost, sends its text to another."""
        node = self._nodes.get(worker, "")
        return node if node in self._pools else next(iter(self._pools))

    async def score(self, finished: Sequence[Finished]) -> list[Scored]:
        parcels: dict[Any, list[Finished]] = defaultdict(list)
        for item in finished:
            parcels[item.address.parcel].append(item)
        scored = await asyncio.gather(*(self._score_parcel(parcel, items) for parcel, items in parcels.items()))
        by_visit = {item.meta.visit: item for items in scored for item in items}
        return [by_visit[item.meta.visit] for item in finished]

    async def _score_parcel(self, parcel: Any, items: Sequence[Finished]) -> list[Scored]:
        questions = []
        for item in items:
            prompt = self._prompts[item.meta.visit.prompt_id]
            questions.append((item.address.place, prompt.text, prompt.answer, prompt.reward, prompt.source))
        self.num_asked += 1
        try:
            scores = await self._ask(self._node(items[0].meta.worker), parcel, questions)
        finally:
            self.num_asked -= 1
        scored = [Scored(item.meta, item.address, of_group) for item, of_group in zip(items, scores, strict=True)]
        self._tell(scored)
        for group in scored:
            _stop_where_told(group.meta.visit, group.scores)
        return scored

    async def _ask(self, node: str, parcel: Any, questions: Sequence[Any]) -> list[tuple[Score, ...]]:
        """A pool's actor that is lost is replaced, and asked once more."""
        pool = self._pools[node]
        try:
            scores, num_lost = await pool.score.remote(parcel, questions)
        except RayActorError as error:
            if self._pools[node] is pool:  # once, however many parcels lose it
                self._pools[node] = self._replace(node, words(error))
            try:
                scores, num_lost = await self._pools[node].score.remote(parcel, questions)
            except RayActorError as again:
                raise RunStopped(f"the reward pool of node {node} was lost twice over the same groups: {words(again)}") from again
        self._num_lost[node] = num_lost
        return scores


def _stop_where_told(visit: Visit, scores: Sequence[Score]) -> None:
    for score in scores:
        if score.consequence is Consequence.FAIL:
            raise RunStopped(f"a verifier gave no verdict, and its policy is `fail`: prompt {visit.prompt_id!r}: {score.detail}")
