"""Runs under a storm of faults, and undisturbed ones like them: the parts that line 6.2 compares.

    python tests/long/storm.py undisturbed SEED FOLDER
    python tests/long/storm.py disturbed SEED FOLDER      for a trial also every_s=15, and overrides such as steps=100

A part is a whole `limen train` on one core, watched from outside, in FOLDER/undisturbed-SEED or FOLDER/disturbed-SEED:

    run/             the run's folder
    output.txt       what it printed
    faults.jsonl     what was done to it
    processes.jsonl  memory, files and threads of each of its processes, now and then
    held.json        what Ray still held for it before it ended
    part.json        that it is whole: configuration, commit, exit code, seconds, and what it left on the machine

A fault is a SIGKILL or a SIGSTOP of a rollout worker, a learner rank, or a reward worker (the reward actor or one of its verifier
processes), drawn evenly. Nothing is ever told to go on: what was stopped must be found and ended by the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

ROOT = Path(__file__).resolve().parents[2]
DRIVE = Path(__file__).with_name("storm_drive.py")
MARK = "LIMEN_STORM_PART"  # in the environment of every process of a part
STEPS = 2000
# Drawn between two faults, on average: waiting until one can strike, and until the run is back, makes it about a minute.
EVERY_S = 28.0
SAMPLE_S = 5.0
TICK_S = 0.2
CONFIG = (
    f"steps={STEPS}",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=2",
    "rollout.num_workers=2",
    "rollout.num_threads=1",
    "rollout.cache_gib=0.1",
    "learner.num_threads=1",
    "learner.optimizer.learning_rate=1e-4",
    "learner.optimizer.schedule=linear",
    "learner.optimizer.min_learning_rate_ratio=0.1",
    "checkpoint.every=25",
    "reward.timeout_s=5",
    "deadlines.heartbeat_s=15",
    "deadlines.receive_s=20",
    "log.heartbeat_every_s=5",
    "log.console=off",
)
ACTORS = {"rollout": "ray::RolloutActor", "learner": "ray::LearnerActor", "reward": "ray::RewardActor"}
KINDS = tuple(ACTORS)


# ---- the processes of a run, seen from outside -----------------------------------------------------------------------


def kind_of(process: psutil.Process) -> str:
    """What a process of a run is, by its title."""
    title = " ".join(process.cmdline())
    for kind, begins in ACTORS.items():
        if title.startswith(begins):
            return kind
    if "rewards.supervisor" in title:
        return "verifier" if "rewards.supervisor" in " ".join(process.parent().cmdline()) else "supervisor"
    if title.startswith("ray::"):
        return "idle worker"
    return next((name for name in ("gcs_server", "raylet") if title.split(" ")[0].endswith(name)), "other")


def family(driver: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """The driver and all that came from it, each with its kind; what ends meanwhile is left out."""
    with contextlib.suppress(psutil.Error):
        yield "driver", driver
        for process in driver.children(recursive=True):
            with contextlib.suppress(psutil.Error, AttributeError):  # it, or its parent, has ended
                yield kind_of(process), process


class Fault(NamedTuple):
    time: float  # time.time()
    step: int  # the largest that was done before
    kind: str
    target: str  # rollout, learner, reward or verifier
    pid: int
    signal: str


def strike(driver: psutil.Process, kind: str, how: signal.Signals, draw: random.Random, step: int) -> Fault | None:
    """Kills or stops one process of the kind; None where there is none that runs."""
    targets = {
        target: [
            p
            for found, p in family(driver)
            if found == target and p.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        ]
        for target in ({"reward": ("reward", "verifier")}.get(kind, (kind,)))
    }
    if not all(targets.values()):  # both of the reward workers, so that neither is drawn oftener for being there sooner
        return None
    target = draw.choice(sorted(targets))
    process = draw.choice(sorted(targets[target], key=lambda p: p.pid))
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(how)
        return Fault(time.time(), step, kind, target, process.pid, how.name)
    return None


def memory(process: psutil.Process) -> dict[str, int]:
    """Bytes: resident and swapped, their share of what others map too, and what is its own."""
    kib: dict[str, int] = {}
    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        kib[name] = int(value.split()[0])
    names = {"rss": ("Rss", "Swap"), "pss": ("Pss", "SwapPss"), "anonymous": ("Anonymous", "Swap")}
    return {name: 1024 * sum(kib[part] for part in parts) for name, parts in names.items()}


def marked(mark: str) -> list[int]:
    """Processes whose environment has the mark, wherever they hang in the tree."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def shared_memory(unused: bool = False) -> set[str]:
    """Segments of shared memory of this machine; ``unused``: those that no process has open or mapped."""
    segments = {str(path) for path in Path("/dev/shm").rglob("*") if not path.is_dir()}
    for entry in Path("/proc").iterdir() if unused else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                segments -= {
                    line.split(maxsplit=5)[-1] for line in (entry / "maps").read_text().splitlines() if "/dev/shm/" in line
                }
                segments -= {os.readlink(file) for file in (entry / "fd").iterdir()}
    return segments


# ---- one run, watched ------------------------------------------------------------------------------------------------


class Lines:
    """The whole lines that a file of JSON objects has gained since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Weather(Protocol):
    """Decides when which fault strikes."""

    def tick(self, driver: psutil.Process, step: int, num_rows: int) -> Fault | None:
        """Asked all the time; ``step`` is the largest that the run has done so far, ``num_rows`` counts those done again too."""


class Storm:
    """Strikes at seeded, exponentially distributed intervals.

    Two ends of a run are by design, and are kept from happening by chance: the same death of a rank at the same step twice, so a rank is
    struck again only when a step is done that was not done before; and one start after another that fails, so at most two faults
    strike between two steps.
    """

    def __init__(self, seed: int, every_s: float) -> None:
        self._draw, self._every_s = random.Random(seed), every_s
        self._next: tuple[float, str, signal.Signals] | None = None
        self._rank_struck_at = 0
        self._rows, self._num_since = 0, 0  # rows there were at the last look, and faults since the last one

    def tick(self, driver: psutil.Process, step: int, num_rows: int) -> Fault | None:
        if num_rows > self._rows:
            self._rows, self._num_since = num_rows, 0
        if self._next is None:
            due = time.monotonic() + self._draw.expovariate(1 / self._every_s)
            self._next = (due, self._draw.choice(KINDS), self._draw.choice((signal.SIGKILL, signal.SIGSTOP)))
        due, kind, how = self._next
        if time.monotonic() < due or self._num_since == 2 or (kind == "learner" and step <= self._rank_struck_at):
            return None
        fault = strike(driver, kind, how, self._draw, step)
        if fault is not None:
            self._next, self._num_since = None, self._num_since + 1
            self._rank_struck_at = step + 1 if kind == "learner" else self._rank_struck_at
        return fault


def watch(driver: psutil.Popen, part: Path, steps: int, weather: Weather | None) -> None:
    """Samples the run's processes, and lets the weather at it, until it ends."""
    rows, step, num_rows, largest, next_sample = Lines(part / "run" / "metrics.jsonl"), 0, 0, 0, 0.0
    with (part / "processes.jsonl").open("w") as samples, (part / "faults.jsonl").open("w") as faults:
        while driver.poll() is None:
            new = rows.new()
            num_rows += len(new)
            step = new[-1]["step"] if new else step
            largest = max(largest, step)
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_S
                for kind, process in family(driver):
                    with contextlib.suppress(psutil.Error, OSError, KeyError):
                        seen = {"time": time.time(), "step": step, "rows": num_rows, "kind": kind, "pid": process.pid}
                        seen |= memory(process) | {"files": process.num_fds(), "threads": process.num_threads()}
                        samples.write(json.dumps(seen | {"born": process.create_time()}) + "\n")
                samples.flush()
            fault = weather.tick(driver, largest, num_rows) if weather and 0 < largest < steps else None
            if fault is not None:
                faults.write(json.dumps(fault._asdict()) + "\n")
                faults.flush()
            time.sleep(TICK_S)


def start(part: Path, overrides: Sequence[str], **options: Any) -> psutil.Popen:
    """`limen train` in ``part``, in a session of its own."""
    part.mkdir(parents=True)
    command = [sys.executable, DRIVE, part / "held.json", "train", f"run_dir={part / 'run'}", *overrides]
    environment = os.environ | {MARK: str(part), "PYTHONPATH": str(ROOT)}  # this tree, whichever is installed
    with (part / "output.txt").open("w") as output:
        return psutil.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True, **options
        )


def left(part: Path, segments_before: set[str], patience_s: float = 10.0) -> dict[str, list[Any]]:
    """Processes, and segments of shared memory that nobody uses, that a run has left: for a moment its last ones may still be ending."""
    until = time.monotonic() + patience_s
    while True:
        found: dict[str, list[Any]] = {
            "processes": marked(str(part)),
            "segments": sorted(shared_memory(unused=True) - segments_before),
        }
        if not any(found.values()) or time.monotonic() > until:
            return found
        time.sleep(0.2)


def task_of(reference: str) -> str:
    """The task that made an object, by the object's id in hexadecimal: four bytes at its end say which of the task's it is."""
    return reference[:-8]


def overrides_of(seed: int) -> list[str]:
    return [*CONFIG, f"seed={seed}"]


def digest_of(kind: str, overrides: Sequence[str], every_s: float) -> str:
    words = [*overrides, f"every_s={every_s:g}"] if kind == "disturbed" else overrides
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def end_all(part: Path) -> None:
    """Kills whatever of a part still runs."""
    for pid in marked(str(part)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_part(kind: str, seed: int, folder: Path, more: Sequence[str] = (), every_s: float = EVERY_S) -> Path:
    """Makes a part; ``more`` overrides, and another ``every_s``, are for trials: no test takes them for a part of the line."""
    part, overrides = (folder / f"{kind}-{seed}").resolve(), [*overrides_of(seed), *more]
    steps = int([entry for entry in overrides if entry.startswith("steps=")][-1].removeprefix("steps="))
    storm = Storm(seed, every_s) if kind == "disturbed" else None
    began, segments, core = time.time(), shared_memory(), min(os.sched_getaffinity(0))
    driver = start(part, overrides, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    try:
        watch(driver, part, steps, storm)
        facts = {
            "config": digest_of(kind, overrides, every_s),
            "commit": commit(),
            "exit_code": driver.wait(),
            "seconds": time.time() - began,
            "load": os.getloadavg()[2],
            "left": left(part, segments),
        }
    finally:
        end_all(part)
    (part / "part.json").write_text(json.dumps(facts, indent=2) + "\n")
    return part


def whole_part(kind: str, seed: int, folder: Path) -> Path:
    """The part, made where it is not there yet. Raises ValueError where it is there, but of another configuration."""
    part = folder / f"{kind}-{seed}"
    if not (part / "part.json").exists():
        return run_part(kind, seed, folder)
    if json.loads((part / "part.json").read_text())["config"] != digest_of(kind, overrides_of(seed), EVERY_S):
        raise ValueError(f"{part} was made with another configuration; name another folder")
    return part


def commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    return said.stdout.strip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started ends with it
    what, seed, folder, *rest = sys.argv[1:]
    every_s = [float(word.removeprefix("every_s=")) for word in rest if word.startswith("every_s=")]
    more = [word for word in rest if not word.startswith("every_s=")]
    print(run_part(what, int(seed), Path(folder), more, *every_s))
