"""The grace period: a scheduler that asks a run to end (SIGTERM) kills it some time later, and the last whole step is to be saved by then.

    signal -> the step in hand goes on -> it is abandoned where only the time for a save and the end is left -> save -> end -> nobody is left

Without `deadlines.grace_s` the step in hand takes the time it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

import psutil

from orchestrator.console import to_stderr

SAVES = 2.0  # a save may take as many times as long as the last one
END_S = 10.0  # for actors and Ray to end; in a shorter period its third, and a third is for a save of unknown length
WORDS_S = 5.0  # for the last words to go out: a pipe whose reader has stopped takes none


def step_may_take_s(grace_s: float, save_s: float | None) -> float:
    """How long from the signal on the step in hand may go on; ``save_s`` is what the last save took, None where there was none yet."""
    save_s = grace_s / 3 if save_s is None else SAVES * save_s
    return max(0.0, grace_s - save_s - min(END_S, grace_s / 3))


class StepInHand:
    """What is abandoned when its time is over. A save in hand is not: it is what the time is for."""

    def __init__(self, grace_s: float | None) -> None:
        self._grace_s = grace_s
        self._save_s: float | None = None  # the last one
        self._saving = False
        self._task: asyncio.Task[str] | None = None
        self.abandoned = False

    async def run(self, loop: Coroutine[Any, Any, str]) -> str:
        """What ``loop`` returns, or ``stopped`` where it is abandoned."""
        self._task = asyncio.create_task(loop)
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self.abandoned:
                raise
            return "stopped"
        finally:
            self._task = None

    def limit(self) -> None:
        """The grace period begins now."""
        if self._grace_s is not None:
            asyncio.get_running_loop().call_later(step_may_take_s(self._grace_s, self._save_s), self._abandon)

    def _abandon(self) -> None:
        if self._task is not None and not self._saving:
            self.abandoned = True
            self._task.cancel()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Round a save, which is timed where it succeeds."""
        started, self._saving = time.monotonic(), True
        try:
            yield
            self._save_s = time.monotonic() - started
        finally:
            self._saving = False


def leave_after(grace_s: float, exit_code: int, words: Callable[[], str]) -> None:
    """Ends this process so many seconds from now, whatever it then does; ``words`` are its last."""

    timer = threading.Timer(grace_s, speak_and_leave, (lambda: to_stderr(words(), waits=True), exit_code))
    timer.daemon = True
    timer.start()


def speak_and_leave(speak: Callable[[], None], exit_code: int) -> NoReturn:
    """Ends this process as ``leave`` does, after ``speak``, or without it where that hangs or fails."""
    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(WORDS_S)
    leave(exit_code)


def leave(exit_code: int) -> NoReturn:
    """Ends this process at once, and what it has started before it: Ray's processes would take up to two minutes to notice."""
    kill(psutil.Process().children(recursive=True))
    os._exit(exit_code)


def kill(processes: list[psutil.Process]) -> None:
    """Those that have ended by themselves are passed over."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
