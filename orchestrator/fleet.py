"""All rollout workers as one, and the reward pool, as the loop drives them over Ray."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.stages import Address, Finished, Scored
from rollout.engine import GroupRequest
from rollout.records import Prompt, Purpose, Visit


@dataclass(frozen=True, slots=True)
class Worker:
    """A rollout actor and its name."""

    name: str
    actor: Any


class RayFleet:
    """Deals visits to workers by how many each has outstanding, and merges their streams of finished groups."""

    def __init__(self, workers: Sequence[Worker], request: Callable[[Visit], GroupRequest]) -> None:
        self.workers = tuple(workers)
        self._request = request
        self._outstanding: dict[str, set[Visit]] = {worker.name: set() for worker in workers}
        self._order = asyncio.Lock()  # an actor's threads keep no order: a cancel must not overtake the submission it cancels
        self._finished: asyncio.Queue[list[Finished]] = asyncio.Queue()
        self._evaluated: dict[Visit, asyncio.Future[Finished]] = {}
        self._streams = [asyncio.create_task(self._follow(worker)) for worker in workers]
        self.num_groups: Counter[str] = Counter()  # finished training groups by worker

    async def submit(self, visits: Sequence[Visit]) -> None:
        async with self._order:
            await self._submit(visits)

    async def _submit(self, visits: Sequence[Visit]) -> None:
        requests: dict[str, list[GroupRequest]] = defaultdict(list)
        for visit in visits:
            name = min(self._outstanding, key=lambda name: len(self._outstanding[name]))
            self._outstanding[name].add(visit)
            requests[name].append(self._request(visit))
        await asyncio.gather(*(w.actor.submit.remote(requests[w.name]) for w in self.workers if requests[w.name]))

    async def next_finished(self) -> list[Finished]:
        return await self._or_stream_error(asyncio.create_task(self._finished.get()))

    async def evaluate(self, visits: Sequence[Visit]) -> list[Finished]:
        """The groups of evaluation visits, in the order asked. They never reach ``next_finished``."""
        loop = asyncio.get_running_loop()
        self._evaluated |= {visit: loop.create_future() for visit in visits}
        await self.submit(visits)
        finished = await self._or_stream_error(asyncio.gather(*(self._evaluated[visit] for visit in visits)))
        for visit in visits:
            del self._evaluated[visit]
        return finished

    async def _or_stream_error(self, wanted: asyncio.Future[list[Finished]]) -> list[Finished]:
        """The wanted result, or what ended a worker's stream before it came."""
        waiting: set[asyncio.Future[Any]] = {wanted, *self._streams}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for stream in self._streams:
                if stream.done():
                    stream.result()
                    raise RuntimeError("a rollout worker's stream of groups ended while the run goes on")
            return wanted.result()
        finally:
            wanted.cancel()

    async def cancel(self, visits: Sequence[Visit]) -> None:
        dropped = set(visits)
        async with self._order:
            for worker in self.workers:
                mine = self._outstanding[worker.name] & dropped
                if mine:
                    self._outstanding[worker.name] -= mine
                    await worker.actor.cancel.remote(list(mine))

    def close(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def _follow(self, worker: Worker) -> None:
        stream = worker.actor.groups.remote().__aiter__()
        async for reference in stream:
            metas = await reference
            parcel = await stream.__anext__()
            finished = [Finished(meta, Address(parcel, place)) for place, meta in enumerate(metas)]
            self._outstanding[worker.name] -= {item.meta.visit for item in finished}
            for item in finished:
                if item.meta.visit.purpose is Purpose.EVAL:
                    self._evaluated[item.meta.visit].set_result(item)
            training = [item for item in finished if item.meta.visit.purpose is Purpose.TRAIN]
            if training:
                self.num_groups[worker.name] += len(training)
                self._finished.put_nowait(training)


class RayScorer:
    """Scores parcels on the node that holds them."""

    def __init__(self, pools: Mapping[str, Any], nodes: Mapping[str, str], prompts: Mapping[str, Prompt]) -> None:
        """``pools`` are the reward actors by node, ``nodes`` the node of each worker by its name."""
        self._pools = pools
        self._nodes = nodes
        self._prompts = prompts

    def _pool(self, worker: str) -> Any:
        """Of the worker's node. A worker that started anew on a node without one, its own being lost, sends its text to another."""
        return self._pools.get(self._nodes.get(worker, "")) or next(iter(self._pools.values()))

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
            questions.append((item.address.place, prompt.text, prompt.answer, prompt.reward))
        scores = await self._pool(items[0].meta.worker).score.remote(parcel, questions)
        return [Scored(item.meta, item.address, score) for item, score in zip(items, scores, strict=True)]
