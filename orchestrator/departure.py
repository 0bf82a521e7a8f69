"""The waits that nobody in the event loop can end: for the loop itself, and for the driver to end. A thread ends the process then."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading

from orchestrator.console import to_stderr
from orchestrator.grace import speak_and_leave

EXIT_STOPPED = 3
TICKS = 50  # of a limit


class Departure:
    """The last wait, for the driver itself to end: a thread that hangs (on a disk, on a node that is gone) would keep it for ever. From
    ``begin`` on the block has ``limit_s``; then the stacks go to stderr, the reason last, and the process ends with the exit code."""

    def __enter__(self) -> Departure:
        self._timer: threading.Timer | None = None
        return self

    def begin(self, limit_s: float, exit_code: int, reason: str) -> None:
        told = f"the run has ended, but its driver hangs and is left {limit_s:g} s later"
        self._timer = threading.Timer(limit_s, _leave_with_stacks, (told, exit_code, reason))
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Vigil:
    """Ends the process where ``awake`` is not called for ``limit_s``: an event loop that stands still (a disk that hangs under one of
    the run's files, Ray's own processes) keeps every deadline from being kept, and signals from being heard.

    It counts what it was awake itself: a process that is stopped and goes on later has lost nothing."""

    def __init__(self, limit_s: float, stacks: str) -> None:
        """``stacks`` tells where to look."""
        self._limit_s, self._stacks = limit_s, stacks
        self._num_ticks = 0
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="vigil", daemon=True).start()

    def awake(self) -> None:
        self._num_ticks = 0

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._limit_s / TICKS):
            self._num_ticks += 1
            if self._num_ticks > TICKS:
                reason = f"the driver's event loop has stood still for {self._limit_s:g} s; {self._stacks}"
                _leave_with_stacks("the driver is left as it is", EXIT_STOPPED, reason)


def _leave_with_stacks(told: str, exit_code: int, reason: str) -> None:
    leave_for(told, exit_code, reason, stacks=True)


def leave_for(told: str, exit_code: int, reason: str, *, stacks: bool = False) -> None:
    """Ends this process and what it has started, the reason last."""

    def speak() -> None:
        if stacks:
            with contextlib.suppress(OSError):
                print(_stacks(), file=sys.stderr, flush=True)
        to_stderr(f"watchdog: {told}", waits=True)
        to_stderr(f"{'stopped: ' if exit_code else ''}{reason}", waits=True)

    speak_and_leave(speak, exit_code)


def _stacks() -> str:
    """Of all threads. Written to stderr by the interpreter itself, where nobody reads that, they would hold up every thread."""
    with open(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
