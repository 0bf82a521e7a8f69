"""One seed of the demonstration, shortened: the held-out pass rate rises, and the run's folder tells how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMEN = Path(sys.executable).with_name("limen")


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_embedded_job_learns(tmp_path):
    """`make demo` with 40 of its 150 steps. It gains about 0.4 there; a run that learns nothing stays within 0.03."""
    folder = tmp_path / "run"
    command = [LIMEN, "train", "steps=40", f"run_dir={folder}", "evaluation.max_prompts_per_stratum=100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["pass_at_1_after"] >= summary["pass_at_1_before"] + 0.15
    assert summary["exit_reason"] == "done"
    strata = summary["pass_at_1_by_stratum_before"]
    assert strata["digits_1"] > strata["digits_2"] > strata["digits_3"], "easy, middling, hard"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert max(row["mismatch/same_version"] for row in rows) < 1e-4
    assert rows[-1]["version"] == 40
    assert (folder / "samples" / "samples.jsonl").stat().st_size > 0
    assert list((folder / "tensorboard").iterdir())
    assert "after training: pass@1" in done.stdout
    assert "next: limen sample" in done.stdout
    for clutter in ("Traceback", "[WARNING]", "Loading", "shards"):
        assert clutter not in done.stdout + done.stderr
