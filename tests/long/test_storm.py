"""Line 6.2: two thousand steps with a fault every minute or so end where undisturbed runs end, and leave nothing behind.

The six runs take hours on one core. ``LIMEN_STORM_RUNS`` names a folder that keeps them: those that it has are taken as they are, so that
they can be made one by one (see storm.py).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median, stdev

import pytest

_SPEC = importlib.util.spec_from_file_location("storm", Path(__file__).with_name("storm.py"))
storm = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(storm)

SEEDS = (0, 1, 2, 3, 4)
EARLY, LATE, WIDTH = 400, 1900, 50  # steps between which memory may not grow, and over how many around each it is taken
SETTLED = (
    50,
    100,
)  # steps made since a process was first seen, at which processes that came later are compared with earlier ones
MOST = 1.05


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lives(part: Path) -> dict[tuple[int, float], list[dict]]:
    """The samples of each process."""
    samples = defaultdict(list)
    for row in rows_of(part / "processes.jsonl"):
        samples[row["pid"], row["born"]].append(row)
    return samples


def around(samples: list[dict], step: int, what: str) -> float | None:
    """Over the last time the run came by."""
    near = [row[what] for row in samples if abs(row["step"] - step) <= WIDTH]
    return median(near) if near else None


def growth(part: Path, what: str = "rss") -> dict[str, float]:
    """What the processes that were there at both steps take at the later one, as a multiple of the earlier; the largest of each kind."""
    grown = defaultdict(list)
    for samples in lives(part).values():
        early, late = around(samples, EARLY, what), around(samples, LATE, what)
        if early and late:
            grown[samples[-1]["kind"]].append(late / early)
    return {kind: max(of_kind) for kind, of_kind in grown.items()}


def growth_of_successors(part: Path) -> dict[str, float]:
    """The same for actors that did not live so long: those of the run's later half against those of its earlier half, at one age."""
    at_age = defaultdict(list)
    for samples in lives(part).values():
        settled = [row["rss"] for row in samples if SETTLED[0] <= row["rows"] - samples[0]["rows"] <= SETTLED[1]]
        if settled and samples[-1]["kind"] in storm.ACTORS:
            at_age[samples[-1]["kind"]].append((samples[0]["born"], median(settled)))
    grown = {}
    for kind, of_kind in at_age.items():
        sizes = [size for _, size in sorted(of_kind)]
        half = len(sizes) // 2
        grown[kind] = fmean(sizes[half:]) / fmean(sizes[:half])
    return grown


def figures(part: Path) -> dict[str, float]:
    facts, summary = (json.loads((part / name).read_text()) for name in ("part.json", "run/summary.json"))
    assert facts["exit_code"] == 0, (part / "output.txt").read_text()[-3000:]
    assert facts["left"] == {"processes": [], "segments": []}
    held = json.loads((part / "held.json").read_text())
    assert held["actors"] == []
    driver = next(samples for samples in lives(part).values() if samples[0]["kind"] == "driver")
    return {
        "pass@1 before": summary["pass_at_1_before"],
        "pass@1 after": summary["pass_at_1_after"],
        "steps": summary["step"],
        "lives": summary["incarnation"] + 1,
        "seconds": facts["seconds"],
        "commit": facts["commit"],
        "open files of the driver, early": around(driver, EARLY, "files"),
        "open files of the driver, late": around(driver, LATE, "files"),
        "objects that Ray held at the end": len(held["references"]),
    } | {f"memory late over early, {kind}": grown for kind, grown in growth(part).items()}


def weights(part: Path) -> dict[int, str]:
    """The digest of all weights after each step, as they were in the end: the rows of a step that was done again come later."""
    return {row["step"]: row["weights"] for row in rows_of(part / "run" / "metrics.jsonl")}


@pytest.mark.line(id="6.2")
@pytest.mark.timeout(6 * 3600)
def test_two_thousand_steps_in_a_storm(record, tmp_path):
    folder = Path(os.environ.get("LIMEN_STORM_RUNS", tmp_path))
    calm = [figures(storm.whole_part("undisturbed", seed, folder)) for seed in SEEDS]
    part = storm.whole_part("disturbed", SEEDS[0], folder)
    stormy = figures(part)
    for seed, run in zip(SEEDS, calm, strict=True):
        record({"faults": "none", "seed": seed} | run)

    faults = rows_of(part / "faults.jsonl")
    by_kind = {f"faults: {kind}": sum(fault["target"] == kind for fault in faults) for kind in (*storm.ACTORS, "verifier")}
    successors = growth_of_successors(part)
    twin, own = weights(folder / f"undisturbed-{SEEDS[0]}"), weights(part)
    rates = [run["pass@1 after"] for run in calm]
    error = stdev(rates) * math.sqrt(1 + 1 / len(SEEDS))  # of one run's distance from the mean of the others
    apart = stormy["pass@1 after"] - fmean(rates)
    record(
        {"faults": len(faults), "seed": SEEDS[0]}
        | by_kind
        | {"of them SIGSTOP": sum(fault["signal"] == "SIGSTOP" for fault in faults)}
        | {"seconds between two faults, on average": (faults[-1]["time"] - faults[0]["time"]) / (len(faults) - 1)}
        | stormy
        | {f"memory of later over earlier ones, {kind}": grown for kind, grown in successors.items()}
        | {
            "steps with the weights of the undisturbed run of this seed, bit for bit": sum(
                own[step] == twin[step] for step in own
            )
        }
        | {"pass@1 less the mean of the undisturbed": apart, "standard error": error}
    )

    assert len(faults) >= 30
    assert {run["steps"] for run in (*calm, stormy)} == {storm.STEPS}
    assert min(rates) > calm[0]["pass@1 before"] + 0.2, "the job learns: a run that does not would show nothing"
    assert abs(apart) <= 2 * error
    assert all(run[name] <= MOST for run in (*calm, stormy) for name in run if name.startswith("memory"))
    assert all(grown <= MOST for grown in successors.values())
    assert stormy["open files of the driver, late"] <= stormy["open files of the driver, early"] + 10
    assert stormy["objects that Ray held at the end"] <= max(run["objects that Ray held at the end"] for run in calm)
