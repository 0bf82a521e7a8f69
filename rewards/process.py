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
from pathlib import Path
from typing import Any

import psutil

from rewards.contract import RewardError
from rewards.worker import Setup, frame

START_S = 120.0  # a process must have loaded its verifiers, and an idle one must take up its work, within this
SEND_S = 30.0  # an idle process must have read what it is sent within this

# Our packages are imported from where they lie before the parent's search path is taken over: in a folder that has a
# `rewards/` of its own that path would find the wrong one. `-c` rather than multiprocessing: nothing of the parent's main
# module runs again, and a daemonic parent, such as a pool worker, may have these children.
_BOOT = """
import json, sys
boot = json.loads(sys.argv[1])
sys.path.insert(0, boot["root"])
import configs, rollout, rewards
sys.path[:] = boot["path"]
from rewards.worker import main
main(boot["connection"], boot["parent"])
"""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


class Woken(Exception):
    """The wait was ended by the wake descriptor."""


class WorkerProcess:
    """A started process whose verifiers are loaded. One thread uses it, and stays alive while it does.

    (The kernel ties the process to the thread that started it: when that thread ends, the process is killed.)
    Raises `RewardError` when the process can not load its verifiers within `START_S`, `Woken` when ``wake_fd`` became
    readable meanwhile.
    """

    def __init__(self, setup: Setup, wake_fd: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SEND_S)
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(wake_fd, select.POLLIN)
        self._wake_fd = wake_fd
        boot = {
            "root": str(Path(__file__).resolve().parents[1]),
            "path": sys.path,
            "connection": theirs.fileno(),
            "parent": os.getpid(),
        }
        with theirs, tempfile.TemporaryFile() as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it, and its group can be killed as one
            )
            theirs.close()  # before the first wait: the end of the process must end the connection
            try:
                self._finish_start(setup)
            except (EOFError, OSError) as error:
                how = self.kill(grace_s=1.0)
                output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
                tail = output.read().decode(errors="replace").strip()
                raise RewardError(
                    f"a verifier process {how} while it loaded its verifiers{': ' + tail if tail else ''}"
                ) from error
            except BaseException:
                self.kill()
                raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        try:
            # WNOWAIT leaves it a zombie: its process id stays ours until `kill` has used it.
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # reaped
            return False

    def send(self, content: Any) -> None:
        """Raises OSError (a TimeoutError after `SEND_S`) when the process does not take it."""
        self._socket.sendall(frame(content))

    def receive(self, limit: float) -> list[list[Any]]:
        """All messages that have arrived, waiting for the first; none if ``limit`` (of ``time.monotonic``) passed before.

        Raises EOFError or OSError when the process has ended, `Woken` when the wake descriptor became readable.
        """
        while b"\n" not in self._buffer:
            ready = [fd for fd, _ in self._poll.poll(max(0.0, limit - time.monotonic()) * 1000)]
            if self._wake_fd in ready:
                raise Woken
            if not ready:
                return []
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        return [json.loads(line) for line in lines]

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process and all its descendants. Returns how it ended, such as ``was killed by SIGSEGV``.

        ``grace_s``: how long one that has closed the connection is given to end by itself, so that its own end is told.
        """
        deadline = time.monotonic() + grace_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.002)
        _kill_tree(self.pid)
        code = self._popen.wait()
        self._socket.close()
        if alive:
            return "was killed by the pool"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _finish_start(self, setup: Setup) -> None:
        limit = time.monotonic() + START_S
        self.send(setup)
        messages = self.receive(limit)
        if not messages:
            raise RewardError(f"a verifier process had not loaded its verifiers after {START_S:g} s")
        kind, *rest = messages[0]
        if kind == "failed":
            raise RewardError(rest[0])


def _kill_tree(pid: int) -> None:
    """SIGKILL to a child of ours, its process group and every descendant, also those in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more
        deadline = time.monotonic() + 5.0  # a process in the kernel's hands may take its time to die
        while time.monotonic() < deadline:
            # The worker adopts orphans, so that whatever came from it hangs below it until it is gone itself.
            children = [c for c in psutil.Process(pid).children(recursive=True) if _lives(c)]
            if not children:
                break
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
