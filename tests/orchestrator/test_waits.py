"""Every wait has an owner, a name and a deadline that fires."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.waits import DeadlinePassed, LoopLag, Waits


async def test_a_result_comes_through_and_nothing_stays_registered():
    waits = Waits()

    async def work():
        assert [(w.owner, w.name) for w in waits.open()] == [("cook", "soup")]
        return 7

    assert await waits.wait(work(), owner="cook", name="soup", deadline_s=5) == 7
    assert waits.open() == []


async def test_the_deadline_names_owner_wait_and_the_others():
    waits = Waits()
    other = asyncio.create_task(waits.wait(asyncio.sleep(30), owner="engine", name="groups", deadline_s=60))
    await asyncio.sleep(0)
    started = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"learner did not finish 'train step 3' within 0.2 s.*engine for 'groups'"):
        await waits.wait(asyncio.sleep(30), owner="learner", name="train step 3", deadline_s=0.2)
    assert 0.2 <= time.monotonic() - started < 0.6
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert waits.open() == []


async def test_what_the_work_raises_is_raised():
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await Waits().wait(fail(), owner="a", name="b", deadline_s=1)


async def test_a_passed_deadline_cancels_the_work():
    cancelled = asyncio.Event()

    async def stuck():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(DeadlinePassed):
        await Waits().wait(stuck(), owner="a", name="b", deadline_s=0.05)
    await asyncio.wait_for(cancelled.wait(), 1)


async def test_time_in_which_the_driver_stood_still_is_not_the_others():
    """As after SIGSTOP, or in a container that was paused with all of its processes: nobody has had the time."""

    async def work():
        for _ in range(4):
            await asyncio.sleep(0.1)
        return 7

    waits = Waits()
    waiting = asyncio.create_task(waits.wait(work(), owner="learner", name="train step 3", deadline_s=1.5))
    await asyncio.sleep(0.05)
    time.sleep(2.0)
    assert await waiting == 7
    started = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await waits.wait(asyncio.sleep(30), owner="learner", name="train step 4", deadline_s=1.3)
    assert 1.3 <= time.monotonic() - started < 2.6


async def test_a_busy_event_loop_shows():
    lag = LoopLag()
    await asyncio.sleep(0.15)
    lag.take()
    time.sleep(0.4)  # what must not happen in the driver
    await asyncio.sleep(0.1)
    assert 0.2 < lag.take() < 2
    assert lag.take() == 0.0
    lag.close()
