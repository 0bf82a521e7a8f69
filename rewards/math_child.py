"""Formulas are compared in a process of their own, because only an end from outside bounds what an answer can ask for.

One *nursery* a calling process has the modules loaded. For each question it forks a child, which limits its own memory and time, gives up
files, network and processes (`rewards.confine`, where this machine has that), answers over a socket of its own, and ends. The kernel ends it at its
limit, so the caller needs no signals and may be any thread, any number at once. When the caller dies the nursery reads the end of its
socket and ends, and its children with it.
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
from enum import StrEnum
from pathlib import Path

from rewards import confine
from rewards.math_compare import Undecided, same
from rewards.math_grammar import read
from rewards.math_nodes import Node
from rewards.math_symbolic import Numeric, evaluate_all
from rewards.math_tokens import Unreadable

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
    GOLD = "gold"  # the reference answer can not be read or evaluated


def compare(pred: str, gold: str, *, library: bool, decimal_digits: int, timeout_s: float, memory_bytes: int) -> Found:
    """Whether two answers are the same; with ``library`` by math-verify.

    ``timeout_s`` is processor time, and `WALL_GRACE_S` more by the clock. ``memory_bytes`` comes on top of what the process has at the
    start. Raises RuntimeError when the process can not be had.
    """
    request = json.dumps([pred, gold, library, decimal_digits, timeout_s, memory_bytes]).encode()
    for _ in range(2):  # the nursery may have been killed since the last question
        begun = time.monotonic()
        heard = _ask(request, library, timeout_s + WALL_GRACE_S + 2.0)
        if heard:
            break
    else:
        raise RuntimeError("the process that compares formulas ends before it answers")
    *before, last = heard
    if last not in ("begun", "ready"):
        return Found.GOLD if last == Found.MEMORY_LIMIT and "ready" not in before else Found(last)
    if last == "begun":
        return Found.GOLD
    return Found.TIME_LIMIT if time.monotonic() - begun >= 0.9 * timeout_s else Found.MEMORY_LIMIT


def _ask(request: bytes, library: bool, limit_s: float) -> list[str]:
    """What the child said before it ended; nothing where there was none."""
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            try:
                socket.send_fds(_nursery.connection(), [b"library" if library else b"formula"], [theirs.fileno()])
            except OSError:
                _nursery.end()
                return []
        deadline = time.monotonic() + limit_s + (30.0 if library else 0.0)  # the first time it is loaded
        data = b""
        with contextlib.suppress(OSError):  # a child that died has closed the connection
            mine.sendall(request + b"\n")
            while not data.endswith(b"\n\n"):
                mine.settimeout(max(0.01, deadline - time.monotonic()))
                part = mine.recv(4096)
                if not part:
                    break
                data += part
    if not data:
        _nursery.end()
    return data.decode().split()


class _Nursery:
    """The caller's end of it. Started when first needed, and again where it has ended."""

    def __init__(self) -> None:
        self.forget()
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """In a fork of the calling process the nursery is the parent's: the copy of its socket goes, so that it sees the parent's end."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def connection(self) -> socket.socket:
        with self._lock:
            if self._socket is None or self._process is None or self._process.poll() is not None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                root = str(Path(__file__).resolve().parents[1])
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno()), root, *sys.path],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
            return self._socket

    def end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._socket = None


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
                    _answer(socket.socket(fileno=fds[0]))
            finally:
                os._exit(0)
        os.close(fds[0])


def _answer(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as lines:
        pred, gold, library, decimal_digits, timeout_s, memory_bytes = json.loads(lines.readline())
        connection.sendall(b"begun\n")
        _limit(timeout_s, memory_bytes)
        try:
            found = (_by_library if library else _by_value)(connection, pred, gold, decimal_digits)
        except (MemoryError, RecursionError):
            found = Found.MEMORY_LIMIT
        connection.sendall(f"{found}\n\n".encode())


def _limit(timeout_s: float, memory_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + memory_bytes if hard == resource.RLIM_INFINITY else min(now + memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number, timer, limit_s in (
        (signal.SIGPROF, signal.ITIMER_PROF, timeout_s),
        (signal.SIGALRM, signal.ITIMER_REAL, timeout_s + WALL_GRACE_S),
    ):
        signal.signal(number, signal.SIG_DFL)  # the kernel's: the process ends, whatever it is doing
        signal.setitimer(timer, limit_s)
    if not confine.missing():
        confine.confine_here(read=sys.path)


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
        theirs = module.formula(gold)
        module.evaluate(theirs)
    except Unreadable:
        return Found.GOLD
    connection.sendall(b"ready\n")
    try:
        return Found.EQUAL if module.equal(module.formula(pred), theirs) else Found.DIFFERENT
    except MemoryError:
        raise
    except Exception:  # whatever math-verify stumbles over, this prediction is not the answer
        return Found.DIFFERENT
