"""A real run whose groups are trained without their last members: real vLLM cancels them, the learner trains the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMEN = str(Path(sys.executable).with_name("limen"))
OVERRIDES = [
    "model.embedded.steps=120",
    "data.sources.arithmetic.params.max_digits=2",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=2",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.every=0",
    "rollout.max_lag=1",
    "rollout.oversample=1",
    "rollout.record=true",
    "rollout.straggler.after_s=0.0001",  # with the first decode step after the second member has ended
    "rollout.straggler.min_finished=2",
    "steps=4",
]


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_groups_are_trained_with_those_that_ended(tmp_path):
    folder = tmp_path / "run"
    command = [LIMEN, "train", f"run_dir={folder}", *OVERRIDES]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    groups = {
        int(path.stem.removeprefix("step-")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "groups").iterdir()
    }
    assert [row["step"] for row in rows] == sorted(groups) == [1, 2, 3, 4]
    for row in rows:
        members = [len(group["completions"]) for group in groups[row["step"]]]
        assert row["batch/num_samples"] == sum(members)
        assert row["time/straggler_num_groups"] > 0
    cut = [group for step in groups.values() for group in step if group["unfinished"]]
    assert len(cut) > 8
    assert sum(sum(group["unfinished"]) for group in cut) > 0, "they were cancelled while they ran"
    for group in cut:
        places = [completion["index"] for completion in group["completions"]]
        assert places == sorted(set(places))
        assert len(places) >= 2
        assert len(places) + len(group["unfinished"]) == 8
