"""Formulas are compared in processes of their own, because only an end from outside bounds what an answer can ask for.

One *nursery* a calling process has the modules loaded and forks *children*, in milliseconds; a child answers questions over a socket of its own, one at
a time, and waits for the next. It has given up files, network and processes (`rewards.confine`, where this machine has that). For
each question it limits its memory and time; at the limit of time the kernel ends it, so the caller needs no signals and may be any
thread, any number at once. When the caller dies its sockets close, so children and nursery end.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from enum import StrEnum
from pathlib import Path

from rewards import confine
from rewards.math_compare import Undecided, same
from rewards.math_grammar import read
from rewards.math_nodes import Node
from rewards.math_relations import is_name
from rewards.math_symbolic import Numeric, evaluate_all
from rewards.math_tokens import Unreadable

_TRIES = 3  # an idle child may have ended, and the nursery with it
WALL_GRACE_S = 3.0  # a machine that is busy may give a child less than its time
_PR_SET_PDEATHSIG = 1
_LIBRARY = "rewards.math_library"
_BOOT = """
import sys
sys.path.insert(0, sys.argv[2])
import configs, rollout, rewards
sys.path[:] = sys.argv[3:]
from rewards.math_child import main
main(int(sys.argv[1]))
"""


class Found(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    TIME_LIMIT = "time_limit"  # of the prediction
    MEMORY_LIMIT = "memory_limit"
    CRASH = "crash"  # an error while the prediction was compared, which must not be a way out of a 0
    GOLD = "gold"  # the reference answer can not be read or evaluated


def compare(pred: str, gold: str, *, library: bool, decimal_digits: int, timeout_s: float, memory_bytes: int) -> Found:
    """Whether two answers are the same; with ``library`` by math-verify.

    ``timeout_s`` is processor time, and `WALL_GRACE_S` more by the clock. ``memory_bytes`` comes on top of what a process has at the
    start. Raises RuntimeError when a process can not be had.
    """
    request = json.dumps([pred, gold, decimal_digits, timeout_s, memory_bytes]).encode() + b"\n"
    for _ in range(_TRIES):
        begun = time.monotonic()
        heard = _nursery.ask(request, library, timeout_s + WALL_GRACE_S + 2.0)
        if heard:
            break
    else:
        raise RuntimeError("the processes that compare formulas end before they answer")
    *before, last = heard
    if last.startswith("failed"):
        if "ready" in before:
            return Found.CRASH
        raise RuntimeError(f"comparing {pred[:200]!r} with {gold[:200]!r} {last}")
    if last == "begun" or (last == Found.MEMORY_LIMIT and "ready" not in before):
        return Found.GOLD
    if last != "ready":
        return Found(last)
    return Found.TIME_LIMIT if time.monotonic() - begun >= 0.9 * timeout_s else Found.MEMORY_LIMIT


class _Nursery:
    """The caller's end of it. Started when first needed, and again where it has ended."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """In a fork of the calling process all this is the parent's: the copies of its sockets go, so that their ends are seen."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._idle: dict[bool, list[socket.socket]] = {False: [], True: []}  # children, by whether they have math-verify

    def ask(self, request: bytes, library: bool, limit_s: float) -> list[str]:
        """What a child said before it ended or was done; nothing where it or the nursery had ended before."""
        with self._lock:
            fresh = not self._idle[library]
            child = self._fork(library) if fresh else self._idle[library].pop()
        if child is None:
            return []
        deadline = time.monotonic() + limit_s + (30.0 if library else 0.0)  # the first time it is loaded
        data = b""
        with contextlib.suppress(OSError):  # a child that died has closed the connection
            child.sendall(request)
            while not data.endswith(b"\n\n"):
                child.settimeout(max(0.01, deadline - time.monotonic()))
                part = child.recv(4096)
                if not part:
                    break
                data += part
        with self._lock:
            if data.endswith(b"\n\n"):
                self._idle[library].append(child)
            elif not data:
                self._idle[library].clear()  # it had ended while it waited; others may have, too
                if fresh:
                    self._await_end()
            elif not self._lives():
                return []  # the child ended with the nursery, by no fault of the question
        return data.decode().split("\n")[: -2 if data.endswith(b"\n\n") else -1]

    def _fork(self, library: bool) -> socket.socket | None:
        if self._socket is None or not self._lives():
            self._start()
        assert self._socket is not None
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [b"library" if library else b"formula"], [theirs.fileno()])
            except OSError:
                self._await_end()
                return None
        return mine

    def _await_end(self) -> None:
        """What has been killed is not gone at once."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(1.0)

    def _lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._idle = {False: [], True: []}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).resolve().parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), root, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )


_nursery = _Nursery()


# The nursery and its children


def main(connection_fd: int) -> None:
    os.set_inheritable(connection_fd, False)
    connection = socket.socket(fileno=connection_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    nursery = os.getpid()
    gc.freeze()
    while True:
        kind, fds, _, _ = socket.recv_fds(connection, 16, 1)
        if not kind:
            return
        if kind == b"library" and _LIBRARY not in sys.modules:
            importlib.import_module(_LIBRARY)  # a second of loading, which most runs never need
            gc.freeze()
        if os.fork() == 0:
            try:
                if prctl is not None:
                    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == nursery:
                    connection.close()
                    _answer(socket.socket(fileno=fds[0]), kind == b"library")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(fds[0])


def _answer(connection: socket.socket, library: bool) -> None:
    """Answer questions until the connection ends."""
    at_start = _address_space()
    if not confine.missing():
        confine.confine_here(read=sys.path)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)  # the kernel's: the process ends, whatever it is doing
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            pred, gold, decimal_digits, timeout_s, memory_bytes = json.loads(line)
            connection.sendall(b"begun\n")
            _limit(timeout_s, at_start + memory_bytes)
            found: str
            try:
                found = (_by_library if library else _by_value)(connection, pred, gold, decimal_digits)
            except (MemoryError, RecursionError):
                found = Found.MEMORY_LIMIT
            except Exception as error:
                found = f"failed {type(error).__name__}: {error}".replace("\n", " ")
            _limit(0.0, None)
            connection.sendall(f"{found}\n\n".encode())


def _address_space(statm: Path = Path("/proc/self/statm")) -> int:
    """Bytes that this process has, or a little more than it can have so far where there is no /proc."""
    try:
        return int(statm.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 512 << 20


def _limit(timeout_s: float, memory_bytes: int | None) -> None:
    """Processor time and time by the clock, 0 for none; address space."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if memory_bytes is None else memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    signal.setitimer(signal.ITIMER_REAL, timeout_s + WALL_GRACE_S if timeout_s else 0.0)


def _by_value(connection: socket.socket, pred: str, gold: str, decimal_digits: int) -> Found:
    theirs: Node = read(gold)
    evaluate_all(theirs)  # what the reference answer asks for is no fault of the completion
    connection.sendall(b"ready\n")
    try:
        return Found.EQUAL if same(read(pred), theirs, Numeric(decimal_digits)) else Found.DIFFERENT
    except Undecided:
        return Found.MEMORY_LIMIT


def _by_library(connection: socket.socket, pred: str, gold: str, _: int) -> Found:
    module = sys.modules[_LIBRARY]
    try:
        theirs = module.formula(_without_name(module.sides(gold)))
        module.evaluate(theirs)
    except Unreadable:
        return Found.GOLD
    connection.sendall(b"ready\n")
    first, *others = module.sides(pred)
    for side in others if others and _is_name(first) else [first, *others]:
        try:
            mine = module.formula(side)
            module.evaluate(mine)  # where memory ends here, math-verify would only say that they differ
            if not module.equal(mine, theirs):
                return Found.DIFFERENT
        except MemoryError:
            raise
        except Exception:  # whatever math-verify stumbles over, this prediction is not the answer
            return Found.DIFFERENT
    return Found.EQUAL


def _without_name(sides: list[str]) -> str:
    """The last side of ``x = ...``; an equation whole."""
    return sides[-1] if _is_name(sides[0]) else "=".join(sides)


def _is_name(text: str) -> bool:
    try:
        return is_name(read(text))
    except Unreadable:
        return False
