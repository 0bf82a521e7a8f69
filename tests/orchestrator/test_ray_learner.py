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


def second():
    """Of a pair: an answer that is there."""
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(None)
    return answer


class Rank:
    """Rank 0 over a transport that waits for its receivers: without an abort, the third parcel never comes."""

    def __init__(self):
        self.log = []
        self.aborted = asyncio.Event()
        self.parcels, self.gather, self.abort_push = Remote(self._parcels), Remote(self._gather), Remote(self._abort)

    async def _parcels(self, generation, scale, receivers):
        self.log.append((generation, scale, receivers))
        for index in range(5):
            if index == 2 and "silent" in receivers:
                await self.aborted.wait()
            self.log.append(index)
            yield index
            yield second()

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


async def test_a_rank_that_fails_ends_a_generation_although_rank_0_waits_for_it():
    class Failing(Rank):
        async def _fail(self):
            raise RuntimeError("out of memory on rank 1")

        def _gather(self, generation, scale):
            return asyncio.ensure_future(self._fail())

    async def read_all():
        return [parcel async for parcel in RayLearner([Rank(), Failing()]).buckets(1, 1.0, ["silent"])]

    with pytest.raises(RuntimeError, match="out of memory on rank 1"):
        await asyncio.wait_for(read_all(), 5)


@pytest.mark.parametrize("within", [False, True])
async def test_rank_0s_own_error_reaches_no_worker(within):
    """Ray gives it out as one more reference of the stream, which raises where it is awaited: in place of a parcel where the gather
    fails, after one where the rank dies."""

    async def fail():
        raise RuntimeError("out of memory on rank 0")

    class Failing(Rank):
        async def _parcels(self, generation, scale, receivers):
            yield "parcel 0"
            yield second()
            if within:
                yield "parcel 1"
            yield fail()

    given = []

    async def read_all():
        async for parcel in RayLearner([Failing()]).buckets(1):
            given.append(parcel)

    with pytest.raises(RuntimeError, match="out of memory on rank 0"):
        await read_all()
    assert given == ["parcel 0"]


async def test_a_failed_save_is_told_when_nobody_writes_any_more(tmp_path):
    class Saving:
        def __init__(self, seconds, error=None):
            self.ended = False
            self.save = Remote(lambda folder: asyncio.ensure_future(self._save(seconds, error)))

        async def _save(self, seconds, error):
            await asyncio.sleep(seconds)
            self.ended = True
            if error:
                raise error

    slow = Saving(0.2)
    with pytest.raises(OSError, match="disk full"):
        await RayLearner([Saving(0.0, OSError("disk full")), slow]).save(tmp_path)
    assert slow.ended
