"""What processes are doing, seen from outside: the stacks they write when asked, and what /proc says of those that cannot answer.

``look`` and ``portray`` run on the node of the processes; ``on_nodes`` brings the call there, by a small task where it is another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray._private import state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.stack_signal import FILE_NAME, stack_signal

T = TypeVar("T")

POLL_S = 0.05
MOST_CHILDREN = 64  # of one process
MOST_THREADS = 200  # of one process that are listed
MOST_BYTES = 200_000  # of the stacks of one process
GONE, STOPPED = "gone", "stopped"
MOST_CALLS = 3  # of one actor that are told in its verdict

_FRAME = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_RAY = ("/ray/_private/", "/ray/util/")  # below a call of an actor
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run: its actor's name, or ``driver``."""

    name: str
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class Look:
    """A glance at a process."""

    state: str  # as psutil calls it, such as sleeping or stopped; or gone
    rss_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Portrait:
    """All that can be found out of a process and of those it has started."""

    well: bool  # it runs and answers
    waits: bool  # and is in no call, or in one that waits for other ranks
    verdict: str  # in a few words
    text: str


def whereabouts(name: str, actor: Any) -> Process | None:
    """Where an actor's process is, by Ray's own books: known as soon as there is one, while its constructor still runs. None where there
    is none yet, or none any more. Ray has no public call for it that works without its dashboard."""
    info = ray_state.actors(actor._actor_id.hex())
    if not info or info["State"] == "DEAD" or not info["Pid"]:
        return None
    return Process(name, info["Pid"], info["Address"]["NodeID"])


async def on_nodes(
    call: Callable[..., Mapping[int, T]], processes: Iterable[Process], limit_s: float, *more: Any
) -> dict[Process, T]:
    """``call(pids, *more)`` on the node of each process, all nodes at once; what a node does not answer in time is left out."""
    by_node: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        by_node[process.node].append(process)
    here = here_id()

    async def ask(node: str, pids: Sequence[int]) -> Mapping[int, T]:
        if node == here:
            return await asyncio.to_thread(call, pids, *more)
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return await _answer(_remote(call).options(num_cpus=0, scheduling_strategy=there).remote(pids, *more))

    asked = {node: _within(ask(node, [p.pid for p in group]), limit_s) for node, group in by_node.items()}
    answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
    return {p: answers[p.node][p.pid] for group in by_node.values() for p in group if p.pid in answers[p.node]}


def here_id() -> str:
    """The driver's node."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


@functools.cache
def _remote(call: Callable[..., Any]) -> Any:
    """Once a call: Ray keeps every remote function that was ever made."""
    return ray.remote(call)


async def _within(asked: Coroutine[Any, Any, Mapping[int, T]], limit_s: float) -> Mapping[int, T]:
    with contextlib.suppress(TimeoutError, RayError):  # the node is busy, or gone
        return await asyncio.wait_for(asked, limit_s)
    return {}


async def _answer(reference: Any) -> Any:
    return await reference


# ---- on the node of the processes ---------------------------------------------------------------------------------------


def look(pids: Sequence[int]) -> dict[int, Look]:
    """A glance at each process."""
    return {pid: _look(pid) for pid in pids}


def _look(pid: int) -> Look:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            state = process.status()
            return Look(GONE if state == psutil.STATUS_ZOMBIE else state, process.memory_info().rss, times.user + times.system)
    except psutil.Error:
        return Look(GONE, 0, 0.0)


def portray(pids: Sequence[int], limit_s: float) -> dict[int, Portrait]:
    """The portrait of each process, all of them within ``limit_s``: those that listen are asked for their stacks. With a process come all
    that it has started, but for this one: a driver may have started all of Ray."""
    families = {pid: [pid, *(_descendants(pid) if pid != os.getpid() else [])] for pid in pids}
    stacks = _stacks({member for family in families.values() for member in family}, time.monotonic() + limit_s)
    return {pid: _portrait(pid, family, stacks) for pid, family in families.items()}


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)][:MOST_CHILDREN]
    return []


def _stacks(pids: Collection[int], until: float) -> dict[int, str | None]:
    """What each wrote before ``until``; None of those that do not listen or are stopped."""
    files = {pid: _stack_file(pid) for pid in pids if _look(pid).state not in (STOPPED, GONE)}
    asked = {pid: file for pid, file in files.items() if file is not None}
    for pid in asked:
        with contextlib.suppress(OSError):
            os.kill(pid, stack_signal())
    sizes: dict[int, int] = dict.fromkeys(asked, 0)
    writing = set(asked)
    while writing and time.monotonic() < until:
        time.sleep(POLL_S)
        for pid in list(writing):
            size = _size(asked[pid])
            if size > 0 and size == sizes[pid]:  # it was there a moment ago, and nothing was added
                writing.discard(pid)
            sizes[pid] = size
    return {pid: _take(asked[pid]) if pid in asked else None for pid in pids}


def _stack_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError):  # it ended, or is another user's
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file).startswith(f"/memfd:{FILE_NAME}"):
                return file
    return None


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _take(file: Path) -> str:
    with contextlib.suppress(OSError):
        text = file.read_bytes()[:MOST_BYTES].decode(errors="replace")
        os.truncate(file, 0)
        return text
    return ""


def _portrait(pid: int, family: Sequence[int], stacks: Mapping[int, str | None]) -> Portrait:
    state = _look(pid).state
    well, waits, verdict = False, False, f"is {state}"
    if state == STOPPED:
        verdict += ", by SIGSTOP or SIGTSTP"
    elif state != GONE and (written := stacks[pid]):
        well, (waits, doing) = True, _doing(pid, written)
        verdict += f", {doing}" if doing else ""
    elif state != GONE:
        verdict += " and does not " + ("listen for" if stacks[pid] is None else "answer") + " the signal that asks for its stacks"
    return Portrait(well, waits, verdict, "\n\n".join(_describe(member, stacks[member]) for member in family))


def _doing(pid: int, stacks: str) -> tuple[bool, str]:
    """Whether all that an actor does is to wait for other ranks, and its calls in words: what was called, and where that is now. Nothing
    of a process that is no actor."""
    if not _command(pid).startswith("ray::"):
        return False, ""
    threads = [list(_FRAME.finditer(text)) for text in stacks.split("\n\n")]  # innermost frame first
    calls = [own for frames in threads if (own := _of_call(frames))]
    if not calls:
        return True, "in no call"
    waiting = [any(part in frame["path"] for frame in frames for part in _COLLECTIVES) for frames in calls]
    told = [_call(frames) + ", which waits for the other ranks" * waits for frames, waits in zip(calls, waiting, strict=True)]
    return all(waiting), " and ".join(told[:MOST_CALLS])


def _of_call(frames: Sequence[re.Match[str]]) -> Sequence[re.Match[str]]:
    """The frames of an actor's call without Ray's own below it; none of a thread that Python itself started, which is no call's."""
    depth = 0 if frames and frames[-1]["path"].endswith("/threading.py") else len(frames)
    while depth and any(part in frames[depth - 1]["path"] for part in _RAY):
        depth -= 1
    return frames[:depth]


def _call(frames: Sequence[re.Match[str]]) -> str:
    now, called = frames[0], frames[-1]["function"]
    at = f"{now['function']} ({os.path.basename(now['path'])}:{now['line']})"
    return f"in {at}" if now is frames[-1] else f"in {called} at {at}"


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def _describe(pid: int, stacks: str | None) -> str:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            title = " ".join(process.cmdline())[:200] or process.name()
            times = process.cpu_times()
            facts = (
                f"process {pid} ({title}), child of {process.ppid()}: {process.status()}, {process.num_threads()} threads, "
                f"{process.memory_info().rss / 2**20:.0f} MiB, {times.user + times.system:.1f} s of CPU time"
            )
    except psutil.Error:
        return f"process {pid}: gone"
    threads = sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name))
    lines = [f"  thread {path.name} {_read(path / 'comm')}: {_thread(path)}" for path in threads[:MOST_THREADS]]
    return "\n".join([facts, *lines, *([stacks] if stacks else [])])


def _thread(path: Path) -> str:
    state = _read(path / "stat").rpartition(")")[2].split()[:1]
    return f"state {''.join(state) or '?'}, in kernel at {_read(path / 'wchan')}, system call {_read(path / 'syscall').split(' ')[0]}"


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip() or "?"
    return "?"
