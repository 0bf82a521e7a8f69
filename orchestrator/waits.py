"""The one way to wait: every wait has an owner, a name and a deadline, and can be listed while it lasts.

A wait is for somebody: a process that works, a disk. A task that stands ready for whatever comes next (groups from the engines, a new
worker to prove) waits for nobody, and is none of these: that something must come is its asker's wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 1.0  # a wait is looked at so often: by what the driver comes later than that, the deadline moves


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait that is going on: who must unblock it, what for, since when, and for how long at most."""

    owner: str
    name: str
    deadline_s: float
    since: float  # time.monotonic()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since


class DeadlinePassed(RuntimeError):
    """A wait outlived its deadline. The message names the owner, the wait, what was found out of the culprits, and every other wait that
    was open."""

    def __init__(self, wait: Wait, others: list[Wait], found: str = "") -> None:
        self.wait = wait
        text = f"{wait.owner} did not finish '{wait.name}' within {wait.deadline_s:g} s"
        if found:
            text += f": {found}"
        if others:
            text += "; also waiting: " + ", ".join(f"{w.owner} for '{w.name}' since {w.age_s:.1f} s" for w in others)
        super().__init__(text)


class Waits:
    """The register of waits of one process."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._next = 0
        # Told of a wait whose deadline has passed and of the others, before anything is done about it; returns what it found out.
        self.on_breach: Callable[[Wait, list[Wait]], Awaitable[str]] | None = None

    def open(self) -> list[Wait]:
        """The waits that are going on, oldest first."""
        return sorted(self._open.values(), key=lambda wait: wait.since)

    async def wait(self, awaitable: Awaitable[T], *, owner: str, name: str, deadline_s: float) -> T:
        """The awaitable's result. Raises DeadlinePassed after ``deadline_s``; the awaitable is then cancelled. A result that comes in while
        ``on_breach`` looks into it is taken all the same.

        Time in which the driver itself stood still (stopped, a container that was paused, a blocked event loop) is nobody's fault and does
        not count: whoever is waited for may have stood still with it. What runs in another process goes on until its owner is killed, which is the caller's decision.
        """
        task = asyncio.ensure_future(awaitable)
        wait = Wait(owner=owner, name=name, deadline_s=deadline_s, since=time.monotonic())
        number, self._next = self._next, self._next + 1
        self._open[number] = wait
        try:
            left_s = deadline_s
            while left_s > 0 and not task.done():
                began, limit_s = time.monotonic(), min(left_s, LOOK_S)
                await asyncio.wait({task}, timeout=limit_s)
                left_s -= min(time.monotonic() - began, limit_s)
            if not task.done():
                error = await self.passed(wait)
                if not task.done():
                    raise error
            return task.result()
        finally:
            del self._open[number]
            task.cancel()  # nothing where it is done
            task.add_done_callback(heard)

    async def passed(self, wait: Wait) -> DeadlinePassed:
        """The error of a wait that is too long, once ``on_breach`` has looked into it."""
        others = [other for other in self.open() if other is not wait]
        found = await self.on_breach(wait, others) if self.on_breach is not None else ""
        return DeadlinePassed(wait, others, found)


def heard(task: asyncio.Future[Any]) -> None:
    """A callback: what a cancelled task still raises is nobody's, and must not be the last word of a run on stderr."""
    if not task.cancelled():
        task.exception()


class LoopLag:
    """How late the event loop wakes a task: what keeps the driver busy keeps every stage waiting."""

    INTERVAL_S = 0.05

    def __init__(self) -> None:
        self._worst = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(self.INTERVAL_S)
            self._worst = max(self._worst, time.monotonic() - asked - self.INTERVAL_S)

    def take(self) -> float:
        """The longest lag since the last call, in seconds."""
        worst, self._worst = self._worst, 0.0
        return worst

    def close(self) -> None:
        self._task.cancel()
