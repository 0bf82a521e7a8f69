"""Line 3.2: two hundred pushes in bfloat16 raise no alarm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

LIMEN = Path(sys.executable).with_name("limen")
STEPS = 200
ALARMS = ("push_aborted", "push_retried", "push_unchanged", "worker_lost", "mismatch", "proven_again")


@pytest.mark.line(id="3.2")
@pytest.mark.timeout(1800)
def test_no_false_alarm_in_200_pushes_in_bfloat16(record, tmp_path):
    run = tmp_path / "run"
    overrides = [
        f"run_dir={run}",
        f"steps={STEPS}",
        "model.dtype=bfloat16",
        "learner.zero_stage=1",
        "learner.optimizer.learning_rate=1e-5",  # small steps: many weights do not change in bfloat16
        "rollout.num_workers=2",
        "batch.groups_per_step=8",
        "evaluation.before=false",
        "evaluation.after=false",
        "log.console=off",
    ]
    subprocess.run([LIMEN, "train", *overrides], check=True, timeout=1700)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    counts = Counter(event["event"] for event in events)
    mismatch = [row["mismatch/same_version"] for row in rows if "mismatch/same_version" in row]
    proofs = [event for event in events if event["event"] == "proven"]
    record(
        {
            "pushes": rows[-1]["version"],
            "alarms": sum(counts[name] for name in ALARMS),
            "smallest share of tensors changed": min(row["push/changed_frac"] for row in rows),
            "mean same-version mismatch": sum(mismatch) / len(mismatch),
            "largest same-version mismatch": max(mismatch),
            "first push: mean difference from the learner": max(event["mean_difference"] for event in proofs),
            "scaled push: largest move": min(event["moved"] for event in proofs),
        }
    )
    assert rows[-1]["version"] == STEPS
    assert not {name: counts[name] for name in ALARMS if counts[name]}
    assert all(row["push/num_generations"] == 1 for row in rows)
