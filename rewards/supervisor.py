"""The small process that stands above each verifier process, so that nothing outlives it.

    parent ---- supervisor ---- worker, where the verifiers run ---- whatever they start

Orphans of the worker's children become the supervisor's, whatever sessions they made for themselves. When the worker ends, by itself
or not, and when the parent ends or asks, the supervisor kills all that is left below it, then ends as the worker did. It is
the interpreter as it is before anything is loaded, forked once: a few megabytes and no second start-up. A verifier that
kills its own supervisor on purpose can leave children behind; one that is `confined` has no way to.

Standard library only: what is imported here is paid for by every process twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Set
from typing import NoReturn

KILL_S = 5.0  # given to processes in the kernel's hands to die
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}
_KNOWS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # a kernel may be built without it


def supervise(parent_pid: int, connection_fd: int) -> None:
    """Fork the worker and return in it; the supervisor itself never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bind_to(parent_pid, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    worker = os.fork()
    if worker:
        os.close(connection_fd)  # the worker's end alone keeps the connection open
        _end_as(_watch(worker))
    os.setsid()  # a verifier that signals its own process group reaches no supervisor
    _bind_to(supervisor, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # some containers forbid it
        file.write("1000")  # the first that the kernel kills when memory runs out


def _watch(worker: int) -> int:
    """The worker's exit status, once it and everything that came from it is gone."""
    status, some_left = None, True
    while status is None and signal.sigwait(_WATCHED) != signal.SIGTERM:
        status, some_left = _reap(worker)
    deadline, held = time.monotonic() + KILL_S, set[int]()
    while some_left and time.monotonic() < deadline:
        # All are stopped before the first is killed: what starts others faster than they are killed would never end.
        known, held = held, _stop_all(held)
        if held <= known or time.monotonic() > deadline - KILL_S / 2:
            for pid in held:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.0005)
        ended, some_left = _reap(worker)
        status = ended if status is None else status
    return signal.SIGKILL if status is None else status


def _reap(worker: int) -> tuple[int | None, bool]:
    """Takes leave of every child that has ended: the worker's status if it is one of them, and whether any are left."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        status = ended if pid == worker else status


def _stop_all(stopped: Set[int]) -> set[int]:
    """All that is below us. Those that are not among the ``stopped`` are stopped, each before its own children are looked for."""
    found: set[int] = set()
    left = [os.getpid()]
    while left:
        for pid in children(left.pop()):
            if pid not in stopped:
                _signal(pid, signal.SIGSTOP)
            found.add(pid)
            left.append(pid)
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; or it became another user
        os.kill(pid, number)


def children(parent: int) -> list[int]:
    """The processes that it has started and that have not ended."""
    if not _KNOWS_CHILDREN:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == parent]
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _end_as(status: int) -> NoReturn:
    """End as a process of this wait status did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _bind_to(parent_pid: int, number: signal.Signals) -> None:
    """Get this signal when the parent, or the thread of it that started us, ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended while we started


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
