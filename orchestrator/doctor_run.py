"""``limen doctor RUN``: what a run is doing, or was doing when it ended, in words. It reads the run's folder, asks the system whether the
driver's process lives, and touches neither; a run that is dead for weeks reads as one that goes on."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from configs.errors import ConfigError
from orchestrator.console import printable
from orchestrator.run_folder import HEARTBEAT, LOCK, STACKS

LATE_BEATS = 4  # heartbeats missed before that is worth a word
MOST_TOLD = 5  # of each kind of event, the last ones
STRAINED = 0.5  # share of its deadline after which a wait is worth a word
TOLD = (
    "rolled_back",
    "worker_lost",
    "worker_replaced",
    "reward_pool_replaced",
    "deadline_passed",
    "alarm",
    "checkpoint_failed",
    "driver_blocked",
    "ray_lost",
)
UNTOLD = {*TOLD, "heartbeat", "started", "stopped", "proven", "evaluated", "checkpoint", "turn", "isolation"}

Row = Mapping[str, Any]
_LOCKS = Path("/proc/locks")


@dataclass(slots=True)
class Story:
    """What the run's files say."""

    folder: Path
    heartbeat: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    step: Row = field(default_factory=dict)  # the last row of metrics.jsonl
    last: dict[str, deque[Row]] = field(default_factory=dict)  # the last events of each kind
    counts: Counter[str] = field(default_factory=Counter)
    incarnation: int = -1
    starting: int | None = (
        None  # the process that goes on with the run and has sent no heartbeat; what there was is of a life before
    )

    def of(self, name: str) -> list[Row]:
        return list(self.last.get(name, ()))


def doctor_run(folder: Path) -> int:
    """Prints the diagnosis and returns 0. Raises ConfigError for a folder that is no run's, or whose files cannot be read."""
    if not any((folder / name).is_file() for name in ("config.yaml", "events.jsonl", HEARTBEAT)):
        runs = sorted(path.parent.name for path in folder.glob(f"*/{HEARTBEAT}"))
        hint = f"it holds runs: {', '.join(runs[-MOST_TOLD:])}" if runs else "name one that `limen train` printed as `run folder`"
        raise ConfigError(f"{folder}: is not the folder of a run; {hint}")
    try:
        lines = diagnose(read(folder))
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder}: holds what `limen train` of this version does not write ({type(error).__name__}: {error}); its "
            f"config.yaml, {HEARTBEAT}, events.jsonl, metrics.jsonl and summary.json are read"
        ) from error
    print(printable("\n".join(lines), limit=100_000))
    return 0


def read(folder: Path) -> Story:
    """Takes whatever is there; a line that was cut by a crash is passed over."""
    story = Story(folder, _object(folder / HEARTBEAT), _object(folder / "summary.json"))
    holder = _holder(folder / LOCK)
    if holder not in (None, story.heartbeat.get("pid")):
        story.starting, story.heartbeat, story.summary = holder, {}, {}
    for event in _rows(folder / "events.jsonl"):
        name = str(event.get("event"))
        story.counts[name] += 1
        story.last.setdefault(name, deque(maxlen=MOST_TOLD)).append(event)
        story.incarnation = max(story.incarnation, int(event.get("incarnation", -1)))
    for story.step in _rows(folder / "metrics.jsonl"):
        pass
    return story


def diagnose(story: Story) -> list[str]:
    """The lines of the diagnosis."""
    alive, state = _state(story)
    return [
        f"run {story.folder}" + _lives(story),
        f"state: {state}",
        *_doing(story, alive),
        *_troubles(story),
        f"checkpoint: {_checkpoint(story)}",
        *(f"next: {line}" for line in _next(story, alive)),
    ]


def _lives(story: Story) -> str:
    num_back = story.counts["rolled_back"]
    num_starts = story.incarnation + 1 - num_back
    return (f", started {num_starts} times" if num_starts > 1 else "") + (
        f", went back to a checkpoint {num_back} times" if num_back else ""
    )


def _state(story: Story) -> tuple[bool, str]:
    """Whether the driver lives, and how that is known."""
    if story.summary and story.summary.get("incarnation") == story.incarnation:
        return False, f"ended: {story.summary['exit_reason']}"
    beat = story.heartbeat
    if story.starting is not None:
        return True, f"starting: process {story.starting} holds the folder, its first heartbeat is still to come"
    if not beat:
        return False, "it has no heartbeat: it ended before its actors were started"
    driver, age_s = f"its driver, process {beat['pid']} on {beat['host']},", time.time() - beat["time"]
    heard = f"last heartbeat {_span(age_s)} ago"
    late = age_s > LATE_BEATS * beat["every_s"]
    if beat["host"] != socket.gethostname():
        return not late, f"{driver} {'is silent' if late else 'is alive'}: {heard}; ask that host whether the process is there"
    status = _process_state(beat)
    if status is None:
        return False, f"dead: {driver} is gone without having ended the run; {heard}"
    if status == psutil.STATUS_STOPPED:
        return True, f"{driver} is stopped, by SIGSTOP or SIGTSTP: `kill -CONT {beat['pid']}` lets it go on; {heard}"
    if late:
        return (
            True,
            f"{driver} is there ({status}) and its event loop stands still: {heard}, one is due every {beat['every_s']:g} s",
        )
    return True, f"alive: {driver} runs; {heard}"


def _holder(lock: Path) -> int | None:
    """The process on this machine that has the run locked, as the kernel tells it: to try the lock could be in a run's way."""
    if not lock.is_file():
        return None
    inode, path = lock.stat().st_ino, lock.resolve()
    for row in _LOCKS.read_text().splitlines() if _LOCKS.is_file() else ():
        _, kind, *_, pid, file, _, _ = row.replace("->", "").split()
        if kind == "FLOCK" and file.endswith(f":{inode}") and _has_open(int(pid), path):
            return int(pid)
    return None


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(file.resolve() == path for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False


def _process_state(beat: Row) -> str | None:
    """None where the number is another process's by now."""
    try:
        process = psutil.Process(beat["pid"])
        return None if process.create_time() > beat["began"] + 1 or process.status() == psutil.STATUS_ZOMBIE else process.status()
    except psutil.NoSuchProcess:
        return None


def _doing(story: Story, alive: bool) -> Iterator[str]:
    step, beat = story.step, story.heartbeat
    yield f"last step: {step['step']}, version {step['version']}" if step else "last step: none yet"
    if not beat:
        return
    since_s = beat["stage_s"] + (time.time() - beat["time"] if alive else 0.0)
    yield f"{'doing' if alive else 'last seen doing'}: {beat['stage']} for {_span(since_s)}, after step {beat['step']}"
    for wait in beat["waits"]:
        age_s = wait["age_s"] + (time.time() - beat["time"] if alive else 0.0)
        yield f"  the driver waits for {wait['owner']}: '{wait['name']}', for {_span(age_s)} of at most {_span(wait['deadline_s'])}"
    for name, process in beat["processes"].items():
        memory = f", {process['rss_bytes'] / 2**20:.0f} MiB" if "rss_bytes" in process else ""
        yield f"  {name}: process {process['pid']}, {process['state']}{memory}"
    if beat["depths"]:
        yield "  queues: " + ", ".join(f"{name} {value}" for name, value in beat["depths"].items())


def _troubles(story: Story) -> Iterator[str]:
    for name in TOLD:
        events = story.of(name)
        if events:
            yield f"{name.replace('_', ' ')}: {story.counts[name]} times" + (", the last ones:" if len(events) > 1 else ":")
            yield from (f"  {_clock(event)} {_told(event)}" for event in events)
    others = [f"{name} {count}" for name, count in sorted(story.counts.items()) if name not in UNTOLD]
    if others:
        yield "other events: " + ", ".join(others)


def _told(event: Row) -> str:
    match event["event"]:
        case "rolled_back":
            to = f"{event['to_step']} ({event['checkpoint'] or 'no checkpoint'})"
            return f"from step {event['from_step']} to {to}, for {event['reason']}"
        case "worker_lost":
            return f"{event['worker']} was {event['kind']}: {event['reason']}"
        case "worker_replaced":
            return f"{event['worker']} by {event['by']}, after {_span(event['start_s'])}"
        case "reward_pool_replaced":
            return f"that of node {event['node']}: {event['reason']}"
        case "deadline_passed":
            culprits = "; ".join(f"{name}: {verdict}" for name, verdict in event["culprits"].items())
            where = f"; stacks: {event['stacks']}" if event["stacks"] else ""
            return f"{event['owner']} did not finish '{event['wait']}' within {_span(event['deadline_s'])}; {culprits or 'no process'}{where}"
        case "alarm":
            return f"step {event['step']}: {event['text']}: {event['advice']} ({event['key']})"
        case "ray_lost":
            return f"{' and '.join(event['processes'])}, without which nothing goes on"
        case "checkpoint_failed":
            return str(event["message"])
        case _:
            return f"stacks: {event['stacks']}"


def _checkpoint(story: Story) -> str:
    whole = sorted((story.folder / "checkpoints").glob("step-*[0-9]/manifest.json"))
    if not whole:
        return "none yet"
    age = f", written {_span(time.time() - whole[-1].stat().st_mtime)} ago"
    lost = story.step.get("step", 0) - _object(whole[-1]).get("step", 0)
    return whole[-1].parent.name + age + (f"; {lost} steps came after it" if lost > 0 else "")


def _next(story: Story, alive: bool) -> Iterator[str]:
    beat, resume = story.heartbeat, f"limen train resume={story.folder}"
    saved = any((story.folder / "checkpoints").glob("step-*/manifest.json"))
    if alive:
        strained = [wait for wait in beat.get("waits", ()) if wait["age_s"] > STRAINED * wait["deadline_s"]]
        for wait in strained:
            yield (
                f"{wait['owner']} has used {wait['age_s'] / wait['deadline_s']:.0%} of its time for '{wait['name']}'; at its deadline "
                + (f"the watchdog writes its stacks into {story.folder / STACKS}")
            )
        if story.of("deadline_passed"):
            yield f"read the newest file in {story.folder / STACKS}: it shows what the culprits were doing"
        elif not strained:
            yield "nothing: let it run"
    elif story.summary.get("incarnation") == story.incarnation and story.summary["exit_reason"] == "done":
        yield f"limen eval checkpoint_dir={story.folder}" if saved else "nothing: it is done"
    else:
        # A driver that was killed leaves the file for its own stacks empty.
        stacks = [path for path in (story.folder / STACKS).glob("*.txt") if path.stat().st_size]
        if stacks:
            newest = max(stacks, key=lambda path: path.stat().st_mtime_ns)
            yield f"read {newest}: what was seen of the processes when it last hung"
        if not story.summary and beat:
            yield "find out who killed the driver: the scheduler, or the kernel for want of memory (`dmesg | grep -i kill`)"
        yield (
            f"{resume} goes on from its last checkpoint"
            if saved
            else "start it anew, in another folder: it has no checkpoint to go on from"
        )


def _rows(path: Path) -> Iterator[Row]:
    """The objects; a line that was cut, or is none, is passed over."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                row = _parsed(line)
                if row:
                    yield row


def _object(path: Path) -> Row:
    """What the file holds; nothing where it is missing or damaged."""
    return _parsed(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def _parsed(text: str) -> Row:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _clock(event: Row) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))


def _span(seconds: float) -> str:
    """Seconds in the two largest units."""
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} {seconds % size // smaller:.0f} {name}"
    return f"{max(0.0, seconds):.1f} s"
