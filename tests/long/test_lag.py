"""Line 6.5: generation ahead of the learner costs no pass rate where late tokens are corrected, and saves time.

It draws docs/lag.svg: the pass rate of what was generated, with and without the correction.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, variance

import pytest
from matplotlib.figure import Figure

LIMEN = Path(sys.executable).with_name("limen")
SEEDS = (0, 1, 2)
LAGS = (0, 1, 4)
FIGURE = Path(__file__).resolve().parents[2] / "docs" / "lag.svg"
STEPS_A_POINT = 10
# 15 runs of about a minute and a half. The engine has one core and the learner one, at every lag.
SMALL = [
    "steps=100",
    "batch.groups_per_step=32",
    "rollout.num_threads=1",
    "learner.num_threads=1",
    "evaluation.before=false",
    "checkpoint.every=0",
    "log.console=off",
]
# Only the lag differs, and whether late tokens are corrected.
ARMS = {
    (0, "corrected"): [],
    (1, "corrected"): ["rollout.max_lag=1"],
    (4, "corrected"): ["rollout.max_lag=4"],
    (1, "uncorrected"): ["rollout.max_lag=1", "correction=none"],
    (4, "uncorrected"): ["rollout.max_lag=4", "correction=none"],
}


def two_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def train(folder: Path, *overrides: str) -> dict[str, float]:
    command = [LIMEN, "train", f"run_dir={folder}", *SMALL, *overrides]
    subprocess.run(command, check=True, timeout=600, preexec_fn=two_cores)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "pass@1 after": json.loads((folder / "summary.json").read_text())["pass_at_1_after"],
        "seconds of all steps": sum(row["time/step_s"] for row in rows),
        "versions a group was behind": fmean(row["stale/versions"] for row in rows if "stale/versions" in row),
        "mismatch of older versions, nats a token": fmean(
            [row["mismatch/older_version"] for row in rows if "mismatch/older_version" in row] or [0.0]
        ),
    }


def draw(curves: dict[tuple[int, str], list[list[float]]]) -> None:
    """``curves``: ``pass_rates`` of each run, by arm. Drawn: the mean over the seeds."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for (lag, kind), of_seeds in curves.items():
        points = [fmean(of_point) for of_point in zip(*of_seeds, strict=True)]
        steps = [(i + 0.5) * STEPS_A_POINT for i in range(len(points))]
        axes.plot(steps, points, "-o" if kind == "corrected" else "--s", markersize=3, label=f"max_lag {lag}, {kind}")
    axes.set(
        xlabel="step",
        ylabel="pass rate of what was generated",
        title=f"mean of {len(SEEDS)} seeds, {STEPS_A_POINT} steps a point",
    )
    axes.legend(fontsize="small")
    figure.savefig(FIGURE, metadata={"Date": None})


def pass_rates(folder: Path) -> list[float]:
    """Of every ten steps. A step whose groups all came in before it began has none of its own."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    blocks = [rows[i : i + STEPS_A_POINT] for i in range(0, len(rows), STEPS_A_POINT)]
    return [fmean(row["group/pass_rate"] for row in block if "group/pass_rate" in row) for block in blocks]


@pytest.mark.line(id="6.5")
@pytest.mark.timeout(5400)
def test_lag_costs_no_pass_rate_and_saves_time(record, tmp_path):
    runs: dict[tuple[int, str], list[dict[str, float]]] = {arm: [] for arm in ARMS}
    curves: dict[tuple[int, str], list[list[float]]] = {arm: [] for arm in ARMS}
    for seed in SEEDS:  # arms within seeds: a machine that grows busy slows all of them
        for number, (arm, overrides) in enumerate(ARMS.items()):
            folder = tmp_path / f"{seed}-{number}"
            runs[arm].append(train(folder, f"seed={seed}", *overrides))
            curves[arm].append(pass_rates(folder))
    draw(curves)
    for (lag, kind), of_arm in runs.items():
        by_seed = {f"{name}, seed {seed}": one[name] for seed, one in zip(SEEDS, of_arm, strict=True) for name in one}
        means = {f"{name}, mean": fmean(one[name] for one in of_arm) for name in of_arm[0]}
        record({"max_lag": lag, "arm": kind} | by_seed | means)

    def rates(lag: int, kind: str = "corrected") -> list[float]:
        return [one["pass@1 after"] for one in runs[lag, kind]]

    # Three seeds tell little of their own spread: that of the three corrected arms together stands for each.
    error = math.sqrt(fmean(variance(rates(lag)) for lag in LAGS) * 2 / len(SEEDS))
    apart = {lag: fmean(rates(lag)) - fmean(rates(0)) for lag in (1, 4)}
    record(
        {"standard error of a difference of means": error}
        | {f"pass@1 of lag {lag} less that of lag 0, corrected": apart[lag] for lag in apart}
        | {f"the same, uncorrected, lag {lag}": fmean(rates(lag, "uncorrected")) - fmean(rates(0)) for lag in (1, 4)}
    )
    seconds = {lag: [one["seconds of all steps"] for one in runs[lag, "corrected"]] for lag in (0, 1)}
    assert min(rates(0)) > 0.3, "the job learns: a difference of runs that do not would show nothing"
    assert all(abs(difference) <= 2 * error for difference in apart.values()), apart
    assert all(ahead < synchronous for ahead, synchronous in zip(seconds[1], seconds[0], strict=True)), seconds
