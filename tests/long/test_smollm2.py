"""Line 2.8: a real language model, ten steps in float32 and in bfloat16, with real vLLM and DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMEN = Path(sys.executable).with_name("limen")


@pytest.mark.line(id="2.8")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_trains_ten_steps(record, tmp_path, dtype):
    folder = tmp_path / "run"
    more = ["learner.zero_stage=1"] if dtype == "bfloat16" else []
    command = [LIMEN, "train", "experiment=smollm2_arithmetic", f"model.dtype={dtype}", f"run_dir={folder}", *more]
    subprocess.run([*command, "log.console=plain"], check=True, timeout=5000)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    mismatch = [row["mismatch/same_version"] for row in rows if "mismatch/same_version" in row]
    record(
        {
            "dtype": dtype,
            "steps": summary["step"],
            "versions": summary["version"],
            "pass@1 before": summary["pass_at_1_before"],
            "pass@1 after": summary["pass_at_1_after"],
            "mean distance of engine and learner log-probabilities": sum(mismatch) / len(mismatch),
            "seconds a step": sum(row["time/step_s"] for row in rows) / len(rows),
            "bytes a push": rows[-1].get("push/sent_bytes", 0.0),
        }
    )
    assert summary["step"] == 10
    assert summary["version"] >= 8, "nearly every step had groups with signal"
    assert max(mismatch) < (1e-3 if dtype == "float32" else 0.1)
