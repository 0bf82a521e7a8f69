"""The parent's end of one verifier process: start, talk within deadlines, kill with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewards.contract import RewardError
from rewards.supervisor import KILL_S, children
from rewards.worker import Setup, frame

START_S = 120.0  # a process must have loaded its verifiers, and an idle one must take up its work, within this
STOPPED_S = 2.0  # a process that has work may stay stopped (SIGSTOP) before it is given up; looked at twice in this
MAX_BYTES = 1 << 28  # of one message

# Our packages are imported from where they lie before the parent's search path is taken over: in a folder that has a
# `rewards/` of its own that path would find the wrong one. `-c` rather than multiprocessing: nothing of the parent's main
# module runs again, and a daemonic parent, such as a pool worker, may have these children.
_BOOT = """
import json, sys
boot = json.loads(sys.argv[1])
sys.path.insert(0, boot["root"])
from rewards.supervisor import supervise
supervise(boot["parent"], boot["connection"])
import configs, rollout
sys.path[:] = boot["path"]
from rewards.worker import main
main(boot["connection"])
"""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class GarbledError(Exception):
    """What came from the process is none of the worker's messages: a verifier has written into its connection."""


class StoppedError(Exception):
    """The process was stopped, and stays so."""


class Woken(Exception):
    """The wait was ended because no more is wanted of the process."""


class WorkerProcess:
    """A started process whose verifiers are loaded. One thread uses it, and stays alive while it does.

    (The kernel ties the process to the thread that started it: when that thread ends, the process is killed.)

    Args:
        setup: what it is to judge, and its limits.
        news_fd: whatever can be read there ends a wait; it is read away.
        unwanted: whether the process is no more wanted; asked when there are news.

    Raises `RewardError` when the process can not load its verifiers within `START_S`, or is stopped and stays so, `Woken` when it became
    unwanted meanwhile.
    """

    def __init__(self, setup: Setup, news_fd: int, unwanted: Callable[[], bool]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._received, self._unsent = bytearray(), bytearray()
        self._poll = select.poll()
        self._poll.register(news_fd, select.POLLIN)
        self._news_fd, self._unwanted = news_fd, unwanted
        boot = {
            "root": str(Path(__file__).resolve().parents[1]),
            "path": sys.path,
            "connection": theirs.fileno(),
            "parent": os.getpid(),
        }
        with theirs, tempfile.TemporaryFile() as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it
            )
            theirs.close()  # before the first wait: the end of the process must end the connection
            try:
                self.pid, self.batch_parts, self.async_parts = self._finish_start(setup)
            except (EOFError, OSError, GarbledError) as error:
                how = self.kill(grace_s=1.0)
                output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
                tail = output.read().decode(errors="replace").strip()
                raise RewardError(
                    f"a verifier process {how} while it loaded its verifiers{': ' + tail if tail else ''}"
                ) from error
            except BaseException:
                self.kill()
                raise

    def alive(self) -> bool:
        try:
            # WNOWAIT leaves it a zombie: its process id stays ours until `kill` has used it.
            return os.waitid(os.P_PID, self._supervisor.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # reaped
            return False

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP): it does nothing, and no limit of its own holds."""
        return _is_stopped(self.pid)

    def send(self, content: Any) -> None:
        """Goes out now as far as the process takes it, the rest while `receive` waits. Raises OSError when it has ended."""
        self._unsent += frame(content)
        self._flush()

    def receive(self, limit: float) -> list[list[Any]]:
        """All messages that have arrived, waiting for the first; none if ``limit`` (of ``time.monotonic``) passed before, or news came.

        Raises EOFError or OSError when the process has ended, `GarbledError` where that is no message, `Woken` when the process is no
        more wanted.
        """
        data = b""
        while b"\n" not in data:  # only what is new is looked through
            self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = dict(self._poll.poll(max(0.0, limit - time.monotonic()) * 1000))
            if self._news_fd in ready:
                os.read(self._news_fd, 1 << 16)
                if self._unwanted():
                    raise Woken
            if ready.get(self._socket.fileno(), 0) & select.POLLOUT:
                self._flush()
            if ready.get(self._socket.fileno(), 0) & ~select.POLLOUT:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise EOFError
                self._received += data
                if len(self._received) > MAX_BYTES:
                    raise GarbledError
            elif self._news_fd in ready or not ready:
                return []
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        try:
            return [[str(kind), *rest] for kind, *rest in map(json.loads, lines)]
        except (ValueError, TypeError, RecursionError) as error:
            raise GarbledError from error

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process and all its descendants. Returns how it ended, such as ``was killed by SIGSEGV``.

        ``grace_s``: how long one that has closed the connection is given to end by itself, so that its own end is told.
        """
        deadline = time.monotonic() + grace_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.002)
        if alive:
            for number in (signal.SIGTERM, signal.SIGCONT):  # the supervisor's word to end all that is below it
                self._supervisor.send_signal(number)
        try:
            code = self._supervisor.wait(2 * KILL_S)
        except subprocess.TimeoutExpired:  # stopped or held up: its worker at least ends with it
            self._supervisor.kill()
            code = self._supervisor.wait()
        self._socket.close()
        if alive:
            return "was killed by the pool"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    def _finish_start(self, setup: Setup) -> tuple[int, list[str], list[str]]:
        stopped: float | None = None
        limit = time.monotonic() + START_S
        self.send(setup)
        while not (messages := self.receive(min(limit, time.monotonic() + STOPPED_S / 2))):
            now, supervisor = time.monotonic(), self._supervisor.pid
            if now >= limit:
                raise RewardError(f"a verifier process had not loaded its verifiers after {START_S:g} s")
            stopped = (stopped or now) if any(map(_is_stopped, [supervisor, *children(supervisor)])) else None
            if stopped is not None and now >= stopped + STOPPED_S:
                raise RewardError("a verifier process was stopped while it loaded its verifiers")
        kind, *rest = messages[0]
        if kind == "failed":
            raise RewardError(rest[0])
        pid, batch, can_cancel = rest
        return pid, batch, can_cancel


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
