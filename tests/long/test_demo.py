"""Line 2.1: the demonstration learns, from a fresh clone and over seeds; its two controls do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMEN = Path(sys.executable).with_name("limen")


def demo(folder: Path, *overrides: str) -> dict[str, float]:
    """The run that `make demo` makes, and its figures."""
    subprocess.run([LIMEN, "train", f"run_dir={folder}", "log.console=off", *overrides], check=True, timeout=1500)
    return figures(folder)


def figures(folder: Path) -> dict[str, float]:
    summary = json.loads((folder / "summary.json").read_text())
    seconds = summary["seconds_by_stage"]
    return {
        "pass@1 before": summary["pass_at_1_before"],
        "pass@1 after": summary["pass_at_1_after"],
        "gain": summary["pass_at_1_after"] - summary["pass_at_1_before"],
        "steps": summary["step"],
        "training seconds (generate, prepare, train, push)": sum(seconds[s] for s in ("generate", "prepare", "train", "push")),
    }


@pytest.mark.line(id="2.1")
@pytest.mark.timeout(3600)
def test_make_demo_from_a_fresh_clone(record, tmp_path):
    """Everything the README promises of `make demo`: it installs, builds the base model, trains, and the pass rate has risen."""
    clone = tmp_path / "limen"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"} | {"LIMEN_CACHE": str(tmp_path / "cache")}
    started = time.monotonic()
    subprocess.run(["make", "demo"], cwd=clone, check=True, timeout=3000, env=environment)
    (run,) = (clone / "runs").iterdir()
    result = figures(run)
    record({"seconds in all, installing included": time.monotonic() - started, **result})
    assert result["gain"] >= 0.25
    assert result["steps"] <= 500


@pytest.mark.line(id="2.1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_learns(record, tmp_path, seed):
    result = demo(tmp_path / "run", f"seed={seed}")
    record({"seed": seed, **result})
    assert result["gain"] >= 0.25
    assert result["steps"] <= 500


@pytest.mark.line(id="2.1")
@pytest.mark.timeout(3600)
def test_demo_without_learning_rate_stays(record, tmp_path):
    result = demo(tmp_path / "run", "learner.optimizer.learning_rate=0")
    record(result)
    assert abs(result["gain"]) < 0.03


@pytest.mark.line(id="2.1")
@pytest.mark.timeout(3600)
def test_demo_with_shuffled_rewards_gains_nothing(record, tmp_path):
    result = demo(tmp_path / "run", "experiment=shuffled_rewards")
    record(result)
    assert result["gain"] < 0.05
