"""What a sandboxed process is started with: its command, its user, its folder and the settings of its launcher."""

from __future__ import annotations

import functools
import marshal
import math
import os
import resource
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rewards import confine, launcher
from rewards.contract import RewardError

INSIDE = "/sample"  # the only place to write in a namespace
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
# Else the C library reserves 64 MB of address space for each thread, and a sample's would be gone after a dozen.
ENVIRONMENT |= {"MALLOC_ARENA_MAX": "1"}
MAX_THREADS = 64
SHARED_THREADS = 1024  # where a sample runs as our own user: on top of what this user has running
STACK_BYTES = 256 * 2**20
START_CPU_S = 0.1  # of CPU time may go by before the program starts
# User ids that no system hands out: from 1879048192 on, as many as there can be threads; in a container with 65536 users,
# those above ordinary users and below the ones for services.
_FREE_UIDS = ((2_000_000_000, 2**22), (20_000, 40_000))
_CAP_SYS_ADMIN = 21
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Takes the launcher and its settings from the front of stdin, to the byte; what follows is for the program.
_BOOT = """
import marshal, posix
def take(size):
    parts = []
    while size:
        part = posix.read(0, size)
        if not part:
            posix._exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
code, settings = marshal.loads(take(int.from_bytes(take(8), "little")))
launcher = {"__name__": "launcher", "__builtins__": __builtins__}
exec(code, launcher)
launcher["start"](settings)
"""


class Rung(StrEnum):
    """Ways to lock a program in, the strongest first."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    RLIMITS = "rlimits"


# What a verifier measures as `rung`.
RUNG_NUMBERS = {Rung.NAMESPACES: 3, Rung.LANDLOCK: 2, Rung.RLIMITS: 1}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    cpu_s: float  # more is over the limit; the kernel, which counts coarsely, kills somewhat later
    wall_s: float  # from the moment the program starts
    memory_bytes: int  # address space, the interpreter included (about 30 MB)
    output_bytes: int  # each of stdout, stderr and the result
    file_bytes: int  # a file, and all files in its folder together, those removed and still open as well
    num_files: int  # open at once, and in its folder


def command(rung: Rung, limits: Limits) -> list[str]:
    """What to execute. Raises `RewardError` where bubblewrap is needed and missing."""
    # Not -I: it would ignore PYTHONHASHSEED, and the environment is ours already.
    python = [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-c", _BOOT]
    if rung is not Rung.NAMESPACES:
        return python
    # Process 1 is ours: bubblewrap's own would outlive what we wait for, and be left to whoever adopts orphans.
    wrapped = [bubblewrap(), "--as-pid-1", "--die-with-parent", "--new-session", *_namespaces()]
    # No /proc: nothing here needs it, and in many containers it can not be mounted.
    size = str(limits.file_bytes + 2**20)
    return [*wrapped, "--size", size, "--tmpfs", INSIDE, "--remount-ro", "/", "--chdir", INSIDE, "--", *python]


def payload(
    rung: Rung,
    limits: Limits,
    files: Mapping[str, bytes],
    args: Sequence[str],
    *,
    folder: str,
    uid: int | None,
    pid: int,
    given: Mapping[str, int | None],
) -> bytes:
    """What the process reads first: the launcher's code and its settings.

    ``pid`` is the started process, ``given`` the numbers of the descriptors it was given, ``uid`` whom it shall become.
    """
    settings: dict[str, Any] = {
        **given,
        "prefix": sys.base_prefix,
        "folder": folder,
        "uid": uid if rung is not Rung.NAMESPACES or mounts_itself() else None,
        "guard": rung is Rung.NAMESPACES,
        "parent": None if rung is Rung.NAMESPACES else os.getpid(),
        "landlock": confine.landlock((), (folder,), sockets=False) if rung is Rung.LANDLOCK else None,
        "landlock_flags": confine.landlock_flags(),
        "limits": _rlimits(limits, distinct_user=uid is not None),
        "seccomp": confine.seccomp_filter(
            2 if rung is Rung.NAMESPACES else pid, modes=rung is Rung.NAMESPACES or uid is not None
        ),
        "files": list(files.items()),
        "args": list(args),
    }
    content = marshal.dumps((_launcher_code(), settings))
    return len(content).to_bytes(8, "little") + content


@functools.cache
def _namespaces() -> list[str]:
    """Bubblewrap's arguments that are always the same: the namespaces, and what is seen there."""
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--hostname", "sample"]
    if not mounts_itself():
        arguments += ["--unshare-user", "--cap-drop", "ALL"]
    paths = confine.interpreter_paths()
    # Else bubblewrap makes the folders on the way as private as /root is outside.
    for parent in dict.fromkeys(str(parent) for path in paths for parent in [*Path(path).parents][-2::-1]):
        arguments += ["--perms", "0755", "--dir", parent]
    for path in paths:
        arguments += ["--ro-bind", path, path]
    for path in _DEVICES:
        arguments += ["--dev-bind-try", path, path]
    return arguments


def bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise RewardError("bubblewrap is missing: install it (Debian, Ubuntu: apt-get install bubblewrap)")
    return found


@functools.cache
def mounts_itself() -> bool:
    """Whether we are root with the right to mount: then no user namespace is needed."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return _free_uids() is not None and bool(effective >> _CAP_SYS_ADMIN & 1)


def own_uid() -> int | None:
    """As root, a user id that no other sample has now: a thread runs one at a time, and its id is unique on this machine.

    None where a sample runs as our own user: without root, or as the root of a container that knows too few users.
    """
    free = _free_uids()
    return None if free is None else free[0] + threading.get_native_id() % free[1]


@functools.cache
def _free_uids() -> tuple[int, int] | None:
    """The first of the user ids for samples, and how many there are."""
    if os.geteuid() != 0:
        return None
    spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    known = [
        (begin, count)
        for begin, count in _FREE_UIDS
        if any(first <= begin and begin + count <= first + size for first, _, size in spans)
    ]
    return known[0] if known else None


def open_to_all(path: str | Path) -> bool:
    """Whether every user may go there: to be searched, all folders on the way included."""
    path = Path(path).resolve()
    return all(os.stat(folder).st_mode & stat.S_IXOTH for folder in (path, *path.parents))


def folder_for_samples() -> str:
    """Where samples' folders are made: the usual place, or another where as root another user can not go there."""
    usual = tempfile.gettempdir()
    if os.geteuid() != 0:
        return usual
    return next((place for place in (usual, "/tmp", "/var/tmp") if os.path.isdir(place) and open_to_all(place)), usual)


@functools.cache
def _launcher_code() -> Any:
    return compile(Path(launcher.__file__).read_bytes(), "launcher", "exec", optimize=2)


def _rlimits(limits: Limits, *, distinct_user: bool) -> list[tuple[int, int, int]]:
    """Number, soft and hard limit, none above what we may have ourselves."""
    wanted = {
        resource.RLIMIT_CPU: math.ceil(1.25 * limits.cpu_s + 1),  # its clock ticks: seen a tenth ahead of the true time
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.num_files + 8,
        resource.RLIMIT_NPROC: MAX_THREADS if distinct_user else _num_threads(int(time.monotonic())) + SHARED_THREADS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: min(limits.memory_bytes, STACK_BYTES),
    }
    result = []
    for which, limit in wanted.items():
        hard = resource.getrlimit(which)[1] % 2**64  # unlimited is -1, the largest number
        soft = min(limit, hard)
        # Programs for deep recursion ask for an unlimited stack; the address space bounds it.
        result.append((which, soft, hard if which == resource.RLIMIT_STACK else soft))
    return result


@functools.lru_cache(maxsize=1)
def _num_threads(_second: int) -> int:
    """Threads that our user has running, counted once a second."""
    num_threads, uid = 0, os.getuid()
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                num_threads += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:  # it has ended
            continue
    return num_threads
