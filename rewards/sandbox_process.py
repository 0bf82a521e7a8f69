"""A sandboxed process seen from outside: fed, read within limits, watched, killed with everything it started, cleaned up after."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from rewards import launcher
from rewards.contract import RewardError
from rewards.sandbox_setup import (
    ENVIRONMENT,
    INSIDE,
    Limits,
    Rung,
    command,
    folder_for_samples,
    mounts_itself,
    open_to_all,
    own_uid,
    payload,
)

START_S = 30.0  # a process must be confined within this; the program's own time starts then
KILL_S = 30.0  # a killed process must be gone within this
LOOK_S = 0.2  # how often the files in a sample's folder are counted
_LOOKS = 20  # in a row, while folders go away under them
_CHUNK = 1 << 16


@dataclass(slots=True)
class Ended:
    """How a process ended."""

    status: int = 0  # as wait gives it
    cpu_s: float = 0.0
    time_s: float = 0.0
    killed: str = ""  # by us, for "time", "output" or "files"
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    result: bytearray = field(default_factory=bytearray)


def run(rung: Rung, limits: Limits, files: Mapping[str, bytes], args: Sequence[str], stdin: bytes) -> Ended:
    """Run ``main.py`` of ``files``; when it returns nothing of it is left. Raises `RewardError` where it can not be confined."""
    with contextlib.ExitStack() as stack:
        uid, folder = own_uid(), INSIDE
        if rung is not Rung.NAMESPACES:
            folder = tempfile.mkdtemp(prefix="limen-sample-", dir=folder_for_samples())
            stack.callback(remove_tree, folder)
        result, write = os.pipe()
        stack.callback(os.close, result)
        with contextlib.ExitStack() as theirs:
            given: dict[str, int | None] = {"result_fd": _moved(write, theirs), "prefix_fd": None}
            if rung is not Rung.NAMESPACES and uid is not None and not open_to_all(sys.base_prefix):
                given["prefix_fd"] = _moved(os.open(sys.base_prefix, os.O_PATH), theirs)
            process = subprocess.Popen(
                command(rung, limits),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                pass_fds=[fd for fd in given.values() if fd is not None],
                start_new_session=True,
                **_identity(rung, uid),
            )
        stack.callback(_discard, process)
        room = (limits.num_files + len(files), limits.file_bytes + sum(map(len, files.values())))
        sample = _Sample(process, result, rung, limits, folder, room)
        stack.callback(sample.end)
        settings = payload(rung, limits, files, args, folder=folder, uid=uid, pid=process.pid, given=given)
        sample.exchange([stdin, settings])
        return sample.end()


def _identity(rung: Rung, uid: int | None) -> dict[str, Any]:
    """Where a user namespace is to be made, its owner must be the sample's user from the start."""
    if rung is Rung.NAMESPACES and uid is not None and not mounts_itself():
        return {"user": uid, "group": uid, "extra_groups": []}
    return {}


def _moved(fd: int, stack: contextlib.ExitStack) -> int:
    """The same file at a number that is free in the child, where the small ones have their meaning."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    stack.callback(os.close, moved)
    return moved


def _discard(process: subprocess.Popen[bytes]) -> None:
    """Nothing, except where the process was started and its `_Sample` could not be made."""
    if process.returncode is None:
        process.kill()
        process.wait(KILL_S)


class _Sample:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        result: int,
        rung: Rung,
        limits: Limits,
        folder: str,
        room: tuple[int, int],  # files and bytes in the folder
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._rung, self._limits, self._folder, self._room = process, rung, limits, folder, room
        self._ended, self._reaped = Ended(), False
        self._stdin = process.stdin
        self._outputs = {
            process.stdout.fileno(): self._ended.stdout,
            process.stderr.fileno(): self._ended.stderr,
            result: self._ended.result,
        }
        self._started: float | None = None  # when the program's own time began
        self._poll = select.poll()
        for fd in self._outputs:
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)
        os.set_blocking(self._stdin.fileno(), False)
        self._poll.register(self._stdin, select.POLLOUT)
        self._exit = os.pidfd_open(process.pid)  # readable when the process has ended, whoever still holds its pipes
        self._poll.register(self._exit, select.POLLIN)

    def exchange(self, feed: list[bytes]) -> None:
        """Feed stdin (the last first) and read the outputs until the process ends or has to be killed."""
        views = [memoryview(part) for part in feed]
        stdin = self._stdin.fileno()
        deadline, look = time.monotonic() + START_S, None
        while True:
            now = time.monotonic()
            wake = deadline if look is None else min(deadline, look)
            ready = {fd for fd, _ in self._poll.poll(max(0.0, wake - now) * 1000 + 1)}
            if stdin in ready and not self._feed(views):
                self._poll.unregister(stdin)
                self._stdin.close()
                stdin = -1
            for fd in ready & self._outputs.keys():
                self._read(fd)
            now = time.monotonic()
            if self._started is None and self._ended.result:
                self._started = now
                deadline, look = now + self._limits.wall_s, now + LOOK_S
            if self._exit in ready or self._ended.killed:
                break
            if now >= deadline:
                self._ended.killed = "time"
                break
            if look is not None and now >= look:
                look = now + LOOK_S
                if self._too_much():
                    self._ended.killed = "files"
                    break

    def end(self) -> Ended:
        """Kill what is left of it, take up its last words, and tell how it ended. Raises `RewardError` where it never began."""
        if self._reaped:
            return self._ended
        ended = self._ended
        self._kill()
        if not ended.killed:
            for fd in list(self._outputs):
                while self._read(fd):
                    continue
        _, ended.status, usage = os.wait4(self._process.pid, 0)
        self._reaped = True
        self._process.returncode = os.waitstatus_to_exitcode(ended.status)  # Popen need not wait for it any more
        ended.cpu_s = usage.ru_utime + usage.ru_stime
        ended.time_s = 0.0 if self._started is None else time.monotonic() - self._started
        for stream in (self._stdin, self._process.stdout, self._process.stderr):
            stream.close()  # type: ignore[union-attr]
        os.close(self._exit)
        if ended.result[:1] != launcher.READY:
            how = ended.stderr[-2000:].decode(errors="replace").strip() or f"wait status {ended.status}"
            raise RewardError(f"the sandbox '{self._rung}' can not be started: {how}")
        del ended.result[:1]
        return ended

    def _feed(self, views: list[memoryview]) -> bool:
        """Write what the pipe takes. False when there is no more, or nobody to read it."""
        try:
            while views:
                views[-1] = views[-1][os.write(self._stdin.fileno(), views[-1]) :]
                if not views[-1]:
                    views.pop()
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return False

    def _read(self, fd: int) -> bool:
        """Read once. False when there is nothing more to read now."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._poll.unregister(fd)
            del self._outputs[fd]
            return False
        sink = self._outputs[fd]
        sink += data
        limit = self._limits.output_bytes + (len(launcher.READY) if sink is self._ended.result else 0)
        if len(sink) > limit:
            del sink[limit:]
            self._ended.killed = "output"
            return False
        return True

    def _too_much(self) -> bool:
        if self._rung is Rung.NAMESPACES:  # what is removed and still open counts there, by the size of its file system
            return too_much(self._inside(), *self._room)
        max_files, max_bytes = self._room
        hidden = unlinked_bytes(self._process.pid, self._folder, self._limits.file_bytes)
        return hidden > max_bytes or too_much(self._folder, max_files, max_bytes - hidden)

    def _inside(self) -> str:
        """The folder of a sample in a namespace as we see it."""
        children = _children(self._process.pid)
        return f"/proc/{children[0]}/root{INSIDE}" if children else "/nowhere"

    def _kill(self) -> None:
        """Kill it, and wait until it has ended; it stays a zombie, so that its process id stays ours."""
        limit = time.monotonic() + KILL_S
        exited = select.poll()
        exited.register(self._exit, select.POLLIN)
        while not exited.poll(0):
            # Below bubblewrap is process 1 of the namespace: everything there dies with it, and then bubblewrap ends.
            below = _children(self._process.pid) if self._rung is Rung.NAMESPACES else []
            for pid in below:
                _kill_child(pid, self._process.pid)
            if not below:
                os.kill(self._process.pid, signal.SIGKILL)  # not waited for: the id is still its own
            if time.monotonic() > limit:
                raise RewardError(f"the sandboxed process {self._process.pid} does not end {KILL_S:g} s after SIGKILL")
            exited.poll(10)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:  # a kernel without these files, or the process has ended
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
        return []


def _kill_child(pid: int, parent: int) -> None:
    """Kill a child of ``parent``, and by no means another process that has taken its id meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if pid in _children(parent):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def too_much(folder: str, max_files: int, max_bytes: int) -> bool:
    """Whether ``folder`` holds more files and folders, or its files more bytes. What can not be looked into counts as too much.

    So does a folder below that is gone whenever we come to it: one whose name is changed all the time would hide what it holds.
    """
    for _ in range(_LOOKS):
        found = _measure(folder, max_files, max_bytes)
        if found is not None:
            return found
    return True


def _measure(folder: str, max_files: int, max_bytes: int) -> bool | None:
    """One look; None where a folder went away meanwhile."""
    num_files, num_bytes, folders = 0, 0, [folder]
    gone = False
    while folders:
        place = folders.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        with contextlib.suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            num_bytes += min(found.st_size, found.st_blocks * 512)  # it may have holes
                    if num_files > max_files or num_bytes > max_bytes:
                        return True
        except FileNotFoundError:
            gone = gone or place != folder  # the whole is gone where the process has ended
        except OSError:
            return True
    return None if gone else False


def unlinked_bytes(pid: int, folder: str, max_bytes: int) -> int:
    """The bytes of files that a process keeps open after it has removed them from ``folder``.

    One that is mapped and no longer open counts as ``max_bytes``: its size is not to be had. Nothing is seen, and 0 returned, where
    we may not look into a process of another user, as the root of a container without the right to trace: there such files are
    bounded by the sample's time alone.
    """
    num_bytes, seen = 0, set()
    folder = os.path.realpath(folder)
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(f"/proc/{pid}/fd/{fd}")
                if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and found.st_ino not in seen:
                    seen.add(found.st_ino)
                    num_bytes += min(found.st_size, found.st_blocks * 512)
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(folder) and path[0].endswith(" (deleted)\n") and int(inode) not in seen:
                    seen.add(int(inode))
                    num_bytes += max_bytes
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return num_bytes
    return num_bytes


def remove_tree(folder: str) -> None:
    """Remove a folder whatever it holds: unreadable folders, names by the thousand, and nests deeper than a path can be long.

    Nothing in it may be running any more. Every folder is moved up before its content is removed, so no path grows.
    """
    num_moved = 0
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        os.chmod(place, stat.S_IRWXU)
        with os.scandir(place) as entries:
            names = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        inner = [path for path, is_folder in names if is_folder]
        for path, is_folder in names:
            if not is_folder:
                os.unlink(path)
        for path in inner:
            os.chmod(path, stat.S_IRWXU)  # or it could not get another parent
            num_moved += 1
            moved = f"{folder}.{num_moved}"
            os.rename(path, moved)
            waiting.append(moved)
        os.rmdir(place)
