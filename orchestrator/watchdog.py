"""The watchdog: says who waits for whom when a deadline has passed, shows what the culprits do, and tells now and then that all is well.

    breach of a wait      -> event `deadline_passed`, stderr, RUN/stacks/TIME-OWNER.txt; then the policy of whoever waits
    a stopped process     -> the same after `deadlines.heartbeat_s`, then it is killed: a dead one has a policy everywhere
    a driver that blocks  -> RUN/stacks/TIME-driver.txt, written by a thread of the interpreter's own; event `driver_blocked` afterwards, and
                             where there is none, the end of the process (`departure.Vigil`)
    Ray's own processes   -> where one that the driver started has ended: event `ray_lost`, exit code 3
    heartbeats            -> RUN/heartbeat.json (the last one), events `heartbeat`: step, stage, open waits, processes

It looks and tells; the only thing it ever does to a process is to end one that is stopped, and its own, which can do nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ray.exceptions import RayError

from orchestrator.cluster import lost_processes
from orchestrator.console import to_stderr
from orchestrator.departure import EXIT_STOPPED, Vigil, leave_for
from orchestrator.run_folder import HEARTBEAT, STACKS, write_json
from orchestrator.stacks import STOPPED, Look, Portrait, Process, here_id, look, on_nodes, portray, whereabouts
from orchestrator.waits import Wait, Waits
from orchestrator.workers import end_processes
from rollout.stack_signal import listen

DRIVER = "driver"
EVIDENCE_S = 10.0  # to ask the culprits, and less where the deadline itself is shorter
LOOK_S = 10.0  # for all nodes to tell how their processes are
BLOCKED, LEAST_BLOCKED_S = (
    10,
    60.0,
)  # times the limit that a standstill may last, and then the driver is left; at least so many seconds
MOST_NAMED = 4  # suspects in the message of an error
MOST_FILES = 200  # of stacks that one process of the driver writes
SPARSE = 1000  # a heartbeat becomes an event when the run is a 1000th older than at the last one: a few thousand rows in weeks

# Which actors, by how their names begin, have to answer for an owner; another owner is the name of an actor.
CULPRITS: Mapping[str, tuple[str, ...]] = {
    "actors": ("rollout-", "learner-", "rewards-"),
    "rollout workers": ("rollout-",),
    "reward pool": ("rewards-",),
    "learner": ("learner-",),
    "push": ("learner-", "rollout-"),
    "disk": (DRIVER,),
    "recorder": (DRIVER,),
}


@dataclass(slots=True)
class Stage:
    """What the run is doing."""

    name: str
    since: float  # time.monotonic()
    step: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the watchdog goes by."""

    every_s: float  # between two heartbeats
    limit_s: float  # a stopped process may stay so, and the driver's event loop may stand still
    actors: Callable[[], Mapping[str, Any]]  # all that were made, by name
    depths: Callable[[], Mapping[str, Any]]  # how much waits where
    last_events: Sequence[tuple[float, str]]  # time.time() and name


class Watchdog:
    """One run's. Made in the event loop that it watches; ``start`` begins the heartbeats, ``close`` ends them."""

    def __init__(self, folder: Path, waits: Waits, event: Callable[..., None], pulse: Pulse) -> None:
        self.stage = Stage("starting", time.monotonic(), 0)
        self._folder, self._stacks = folder, folder / STACKS
        self._waits, self._event, self._pulse = waits, event, pulse
        self._stopped: dict[str, float] = {}  # for how long each was seen so
        self._looked = 0.0
        self._began = time.time()
        self._last_row = 0.0
        self._num_files = 0
        self._portraying: dict[Process, asyncio.Task[dict[Process, Portrait]]] = {}
        self._beat: asyncio.Task[None] | None = None
        self._vigil: Vigil | None = None
        self._own: TextIO | None = None  # the driver's stacks
        self._own_bytes = 0

    def start(self) -> None:
        listen()
        self._stacks.mkdir(exist_ok=True)
        self._own = self._file(DRIVER).open("w", encoding="utf-8")
        self._waits.on_breach = self.breach
        self._vigil = Vigil(max(LEAST_BLOCKED_S, BLOCKED * self._pulse.limit_s), f"where, shows {self._own.name}")
        self._beat = asyncio.create_task(self._beats())

    def close(self) -> None:
        """Leaves the last heartbeat, and no empty file."""
        if self._beat is None or self._own is None or self._vigil is None:
            return
        self._beat.cancel()
        self._vigil.close()
        self._waits.on_breach = None
        faulthandler.cancel_dump_traceback_later()
        self._own.close()
        if not os.path.getsize(self._own.name):
            os.unlink(self._own.name)

    def enter(self, stage: str, step: int) -> None:
        """The run does this now; ``step`` is the last whole one."""
        self.stage = Stage(stage, time.monotonic(), step)

    # ---- a breach ---------------------------------------------------------------------------------------------------

    async def breach(self, wait: Wait, others: Sequence[Wait]) -> str:
        """Tells of it and returns the culprits' state in words. Whatever keeps it from finding that out, or from writing it down, must
        neither hide the breach nor last: who waits acts next."""
        budget_s = min(EVIDENCE_S, wait.deadline_s)
        portraits: dict[Process, Portrait | None] = {}
        try:
            portraits = await asyncio.wait_for(self._portraits(wait.owner, budget_s), 1.2 * budget_s)
        except Exception as error:  # Ray does not answer
            self._fail(wait, error)
        return await self._tell(wait, others, portraits, budget_s / 2)

    def _fail(self, wait: Wait, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        to_stderr(f"watchdog: cannot tell all of '{wait.name}': {reason}")
        self._try_event("watchdog_failed", owner=wait.owner, wait=wait.name, reason=reason)

    def _try_event(self, name: str, **fields: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # the disk is full, or the files are closed: stderr has it
            self._event(name, **fields)

    async def _portraits(self, owner: str, budget_s: float) -> dict[Process, Portrait | None]:
        """Of whoever has to answer for the owner; and of the driver, which waits and may be to blame itself."""
        processes = await self._processes(lambda name: name == DRIVER or _answers(name, owner))
        fresh = [process for process in processes if process not in self._portraying]
        if fresh:  # one that is asked at the moment is not asked by another: each would take the other's answer away
            asked = asyncio.create_task(on_nodes(portray, fresh, budget_s, budget_s / 2))
            self._portraying |= dict.fromkeys(fresh, asked)
            asked.add_done_callback(lambda _: self._forget(fresh))
        seen: dict[Process, Portrait] = {}
        for task in {self._portraying[process] for process in processes}:
            seen |= await asyncio.shield(task)
        return {process: seen.get(process) for process in processes}

    def _forget(self, asked: Sequence[Process]) -> None:
        for process in asked:
            del self._portraying[process]

    async def _tell(
        self, wait: Wait, others: Sequence[Wait], portraits: Mapping[Process, Portrait | None], limit_s: float
    ) -> str:
        blamed = {p: portrait for p, portrait in portraits.items() if _answers(p.name, wait.owner)}
        verdicts = {p.name: f"process {p.pid} {_verdict(portrait)}" for p, portrait in blamed.items()}
        title = f"{wait.owner} did not finish '{wait.name}' within {wait.deadline_s:g} s, waited for {wait.age_s:.1f} s"
        fields = {
            "owner": wait.owner,
            "wait": wait.name,
            "deadline_s": wait.deadline_s,
            "waited_s": wait.age_s,
            "stage": self.stage.name,
            "step": self.stage.step,
            "culprits": verdicts,
            "also_waiting": _rows(others),
            "depths": self._pulse.depths(),
            "last_events": [f"{name} {time.time() - at:.1f} s ago" for at, name in self._pulse.last_events],
        }
        file = None
        if portraits:
            try:
                writing = asyncio.to_thread(self._write_stacks, wait.owner, title, fields, portraits)
                file = await asyncio.wait_for(writing, limit_s)
            except Exception as error:  # the disk hangs, or is full
                self._fail(wait, error)
        summary = "; ".join(f"{name}: {verdict}" for name, verdict in verdicts.items())
        waiting = ", ".join(f"{w.owner} for '{w.name}' since {w.age_s:.1f} s" for w in others)
        to_stderr(
            f"watchdog: {title}; {summary or 'no process of its own'}; also waiting: {waiting or 'nobody'}; stacks: {file or 'none'}"
        )
        self._try_event("deadline_passed", **fields, stacks=file)
        named = [f"{p.name}, {verdicts[p.name]}" for p in _suspects(blamed)]
        more = [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        return "; ".join([*named[:MOST_NAMED], *more, *([f"see {file}"] if file else [])])

    def _write_stacks(
        self, owner: str, title: str, fields: Mapping[str, Any], portraits: Mapping[Process, Portrait | None]
    ) -> str | None:
        if self._num_files >= MOST_FILES:
            return None
        self._num_files += 1
        path = self._file(owner)
        facts = [f"{key}: {fields[key]}" for key in ("also_waiting", "depths", "last_events") if key in fields]
        parts = [
            f"==== {p.name}: process {p.pid} on node {p.node} {_verdict(portrait)}\n{portrait.text if portrait else ''}"
            for p, portrait in portraits.items()
        ]
        path.write_text("\n".join([title, *facts, "", *parts]) + "\n", encoding="utf-8")
        return str(path.relative_to(self._folder))

    def _file(self, owner: str) -> Path:
        """A name that is free."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9.]+', '-', owner)}"
        return next(path for i in range(1000) if not (path := self._stacks / f"{stem}{f'-{i}' if i else ''}.txt").exists())

    # ---- heartbeats -------------------------------------------------------------------------------------------------

    async def _beats(self) -> None:
        assert self._vigil is not None
        period_s = min(self._pulse.every_s, self._pulse.limit_s / 2)
        beat: asyncio.Task[str] | None = None
        told = ""
        try:
            while True:
                self._vigil.awake()
                self._look_at_ray()
                self._guard_driver()
                if beat is None or beat.done():
                    said = "" if beat is None else beat.result()
                    beat = asyncio.create_task(self._try_beat())
                else:
                    said = "the one before has not ended: the disk or Ray does not answer"
                if said and said != told:
                    to_stderr(f"watchdog: no heartbeat: {said}")
                told = said
                await asyncio.sleep(period_s)
        finally:
            if beat is not None:
                beat.cancel()

    def _look_at_ray(self) -> None:
        """Ends the process before Ray does, which would take a minute, and have no exit code of ours nor a word of the run."""
        lost = lost_processes()
        if lost:
            self._try_event("ray_lost", processes=lost)
            reason = f"Ray's own {' and '.join(lost)}, which this process had started, has ended: killed, or for want of memory; "
            leave_for("nothing goes on without Ray", EXIT_STOPPED, reason + "the last checkpoint stands")

    async def _try_beat(self) -> str:
        """What kept it from being told: a full disk, an instance that does not answer. The run's own waits tell of these."""
        try:
            await self._one_beat()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _guard_driver(self) -> None:
        """Has the stacks of the driver written where it does not come back here in time."""
        assert self._own is not None
        faulthandler.dump_traceback_later(self._pulse.limit_s + self._pulse.every_s, file=self._own)
        before, self._own_bytes = self._own_bytes, os.fstat(self._own.fileno()).st_size
        if self._own_bytes > before:
            self._event("driver_blocked", stacks=str(Path(self._own.name).relative_to(self._folder)))

    async def _one_beat(self) -> None:
        processes = await self._processes(lambda name: True)
        looks = await on_nodes(look, processes, LOOK_S)
        row = {
            "step": self.stage.step,
            "stage": self.stage.name,
            "stage_s": time.monotonic() - self.stage.since,
            "waits": _rows(self._waits.open()),
            "depths": self._pulse.depths(),
            "processes": {
                p.name: {"pid": p.pid, **(asdict(looks[p]) if p in looks else {"state": "unknown"})} for p in processes
            },
        }
        now = time.time()
        told = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "began": self._began,
            "time": now,
            "every_s": self._pulse.every_s,
        }
        await asyncio.to_thread(write_json, self._folder / HEARTBEAT, told | row)
        if now - self._last_row >= max(self._pulse.every_s, (now - self._began) / SPARSE):
            self._last_row = now
            self._event("heartbeat", **row)
        await self._end_stopped(looks)

    async def _processes(self, wanted: Callable[[str], bool]) -> list[Process]:
        """Those of the wanted actors, and the driver's own where its name is."""
        actors = {name: actor for name, actor in self._pulse.actors().items() if wanted(name)}
        found = await asyncio.to_thread(lambda: [whereabouts(name, actor) for name, actor in actors.items()])
        own = [Process(DRIVER, os.getpid(), here_id())] if wanted(DRIVER) else []
        return [*own, *(process for process in found if process is not None)]

    async def _end_stopped(self, looks: Mapping[Process, Look]) -> None:
        # What the driver did not see does not count: it may have been stopped with them.
        now, period_s = time.monotonic(), min(self._pulse.every_s, self._pulse.limit_s / 2)
        seen_s, self._looked = min(now - self._looked, 2 * period_s), now
        stopped = [process for process, seen in looks.items() if seen.state == STOPPED]
        self._stopped = {p.name: self._stopped[p.name] + seen_s if p.name in self._stopped else 0.0 for p in stopped}
        overdue = [process for process in stopped if self._stopped[process.name] >= self._pulse.limit_s]
        await asyncio.gather(*(self._end_one(process, now - self._stopped[process.name]) for process in overdue))

    async def _end_one(self, process: Process, since: float) -> None:
        wait = Wait(owner=process.name, name="a sign of life", deadline_s=self._pulse.limit_s, since=since)
        await self.breach(wait, self._waits.open())
        with contextlib.suppress(RayError):
            await on_nodes(end_processes, [process], LOOK_S)


def _answers(name: str, owner: str) -> bool:
    """Whether the process of this name has to answer for the owner."""
    return name == owner or name.startswith(CULPRITS.get(owner, "\0"))


def _suspects(blamed: Mapping[Process, Portrait | None]) -> list[Process]:
    """Those that cannot answer; where all can, those that do not merely wait for the others."""
    unwell = [process for process, portrait in blamed.items() if not portrait or not portrait.well]
    return unwell or [process for process, portrait in blamed.items() if portrait and not portrait.waits]


def _verdict(portrait: Portrait | None) -> str:
    return portrait.verdict if portrait else "is on a node that does not answer"


def _rows(waits: Sequence[Wait]) -> list[dict[str, Any]]:
    return [{"owner": w.owner, "name": w.name, "age_s": round(w.age_s, 3), "deadline_s": w.deadline_s} for w in waits]
