"""The ranks as one, over fakes that wait as a real transport does."""

import asyncio
import contextlib

import pytest

from orchestrator.ranks import RayLearner

pytestmark = pytest.mark.timeout(20)


class Remote:
    def __init__(self, function):
        self.remote = function

    def options(self, **_):
        return self


class Rank:
    """Rank 0 over a transport that waits for its receivers: without an abort, the third parcel never comes."""

    def __init__(self):
        self.log = []
        self.aborted = asyncio.Event()
        self.buckets, self.gather, self.abort_push = Remote(self._buckets), Remote(self._gather), Remote(self._abort)

    async def _buckets(self, generation, scale, receivers):
        self.log.append((generation, scale, receivers))
        for index in range(5):
            if index == 2 and "silent" in receivers:
                await self.aborted.wait()
            self.log.append(index)
            yield index

    def _gather(self, generation, scale):
        return asyncio.ensure_future(asyncio.sleep(0))

    def _abort(self):
        self.aborted.set()
        return asyncio.ensure_future(asyncio.sleep(0))


async def test_who_stops_early_aborts_the_generation_and_the_ranks_gather_to_the_end():
    first = Rank()
    learner = RayLearner([first, Rank()])
    async with contextlib.aclosing(learner.buckets(3, 1.5, ["rollout-0", "silent"])) as parcels:
        assert [await anext(parcels), await anext(parcels)] == [0, 1]
    assert first.aborted.is_set()
    assert first.log == [(3, 1.5, ("rollout-0", "silent")), 0, 1, 2, 3, 4]


async def test_a_generation_read_to_its_end_is_not_aborted():
    first = Rank()
    assert [parcel async for parcel in RayLearner([first]).buckets(1)] == [0, 1, 2, 3, 4]
    assert not first.aborted.is_set()
