"""Run a program that may want to break out, and tell how it ended.

Three rungs, the strongest first. At each the program runs as a fresh interpreter with nothing of our environment, limits of the kernel on
time, memory, files and threads, no new privileges, and, where we are root, as a user of its own.

- ``namespaces`` (bubblewrap): it sees nothing but the interpreter, the system's libraries, five devices and an empty folder in
  memory; no network, no other processes, no /proc. The system call filter of `rewards.confine` on top.
- ``landlock``: the same filter, and Landlock: it opens no file but those of the interpreter and of its folder. It can ask for the
  size, owner and times of any path that its user may, the machine's name, and the ids of processes. No privilege is needed; works
  in ordinary containers.
- ``rlimits``: the filter and the limits. It reads and writes every file that its user may.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from rewards import confine, sandbox_process
from rewards.contract import RewardError
from rewards.sandbox_process import Ended
from rewards.sandbox_setup import RUNG_NUMBERS, START_CPU_S, Limits, Rung, bubblewrap

__all__ = ["RUNG_NUMBERS", "Limits", "Ran", "Rung", "available", "choose", "run_python"]

_PROBE = "import json, heapq, os\nopen('probe', 'w').write('x')\nprint(json.dumps(heapq.nsmallest(1, [2, 1])))"
_PROBE_LIMITS = Limits(cpu_s=10, wall_s=20, memory_bytes=2**29, output_bytes=2**16, file_bytes=2**20, num_files=16)
_USER_NAMESPACES = (
    "allow user namespaces (sysctl user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: docker run --security-opt seccomp=unconfined)"
)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended, and what it wrote."""

    outcome: Literal["exited", "time_limit", "memory_limit", "output_limit", "crash"]
    exit_code: int | None  # where it exited
    signal: str | None  # such as SIGSEGV, where one ended it
    stdout: bytes
    stderr: bytes
    result: bytes  # what it wrote to descriptor 3
    time_s: float  # wall time from the program's start to its end
    cut: bool  # an output was longer than `Limits.output_bytes`, which is kept of it


def run_python(
    source: str,
    *,
    stdin: bytes = b"",
    args: Sequence[str] = (),
    files: Mapping[str, bytes] = {},
    limits: Limits,
    rung: Rung,
) -> Ran:
    """Run ``source`` as the program ``main.py`` with this Python's standard library and no other packages.

    It starts in a folder of its own, which holds ``files`` (relative names; importable) and is its HOME and TMPDIR. Outcomes:
    ``time_limit`` (CPU or wall), ``memory_limit`` (an uncaught MemoryError, or SIGKILL by the kernel), ``output_limit`` (more output
    or more in its folder than allowed), ``crash`` (ended by a signal), ``exited`` (``exit_code`` 1 and a traceback on stderr for an
    unhandled exception). Safe in any thread; when it returns, nothing that was started is left and the folder is gone.

    Raises `RewardError` where the program can not be confined at ``rung``, ValueError for a bad name in ``files``.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name in (".", "main.py") or "\0" in name:
            raise ValueError(f"'{name}' is no name for a file in a program's folder")
    content = {"main.py": source.encode(errors="surrogatepass"), **files}
    ended = sandbox_process.run(rung, limits, content, args, stdin)
    return _judge(ended, rung, limits)


@functools.cache
def available() -> dict[Rung, str]:
    """For each rung an empty text, or why it is not to be had here and what would help. Tried once a process, with a real program."""
    return {rung: _why_not(rung) for rung in Rung}


def choose(isolation: Literal["auto", "namespaces", "landlock", "rlimits"]) -> Rung:
    """The rung to use: the one named, or for ``auto`` the best there is, landlock at least.

    Raises `RewardError` where it is missing: nothing weaker takes its place.
    """
    why = available()
    if isolation == "auto":
        for rung in (Rung.NAMESPACES, Rung.LANDLOCK):
            if not why[rung]:
                return rung
        raise RewardError(
            f"no sandbox for programs here. namespaces: {why[Rung.NAMESPACES]}. landlock: {why[Rung.LANDLOCK]}. "
            "isolation: rlimits runs them all the same, and they then read and write every file that their user may"
        )
    rung = Rung(isolation)
    if why[rung]:
        raise RewardError(f"isolation: {isolation} is not to be had here: {why[rung]}")
    return rung


def _why_not(rung: Rung) -> str:
    try:
        if rung is Rung.NAMESPACES:
            bubblewrap()
        missing = confine.missing() if rung is Rung.LANDLOCK else confine.missing_filter()
        if missing:
            return missing
        ran = run_python(_PROBE, limits=_PROBE_LIMITS, rung=rung)
    except RewardError as error:
        wants_namespaces = rung is Rung.NAMESPACES and "bwrap:" in str(error)
        return f"{error}; {_USER_NAMESPACES}" if wants_namespaces else str(error)
    except OSError as error:
        return str(error)
    if ran.outcome == "exited" and ran.stdout == b"[1]\n":
        return ""
    return f"a trivial program fails in it ({ran.outcome}): {ran.stderr[-500:].decode(errors='replace').strip()}"


def _judge(ended: Ended, rung: Rung, limits: Limits) -> Ran:
    code = os.waitstatus_to_exitcode(ended.status)
    if rung is Rung.NAMESPACES and code > 128:
        code = 128 - code  # the way in which process 1 there tells a signal
    name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else None
    outcome: Literal["exited", "time_limit", "memory_limit", "output_limit", "crash"] = "exited"
    if ended.killed:
        outcome = "time_limit" if ended.killed == "time" else "output_limit"
    elif ended.cpu_s > limits.cpu_s + START_CPU_S:
        outcome = "time_limit"
    elif name == "SIGKILL":  # not ours, nor the limit on CPU time: the kernel was short of memory
        outcome = "memory_limit"
    elif name is not None:
        outcome = "crash"
    elif code == 1 and ended.stderr.rsplit(b"\n", 2)[-2:] in ([b"MemoryError", b""],):
        outcome = "memory_limit"
    return Ran(
        outcome=outcome,
        exit_code=code if outcome in ("exited", "memory_limit") and code >= 0 else None,
        signal=name,
        stdout=bytes(ended.stdout),
        stderr=bytes(ended.stderr),
        result=bytes(ended.result),
        time_s=ended.time_s,
        cut=ended.killed == "output",
    )
