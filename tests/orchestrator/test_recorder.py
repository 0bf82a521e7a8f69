"""What a run writes of scores as they come in, whatever ends it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from configs.schema import LogConfig
from orchestrator.job import Job
from orchestrator.recorder import Recorder
from orchestrator.stages import Address, Scored
from rollout.records import Consequence, GroupMeta, Outcome, Purpose, Score, Status, Visit

pytestmark = pytest.mark.timeout(60)


def group(prompt_id, *times, status=Status.OK, purpose=Purpose.TRAIN):
    visit = Visit(prompt_id, 0, purpose)
    meta = GroupMeta(visit, "w", 3, (2,) * len(times), (2,) * len(times), 0, 0, 0, 0, 0.0, 0, 0.0, ())
    value = 1.0 if status is Status.OK else None
    scores = (Score(status, Outcome.NONE, value, value, {}, None, s, f"of {prompt_id}", {}, Consequence.NONE) for s in times)
    return Scored(meta, Address(None, 0), tuple(scores))


def test_a_run_that_ends_within_a_step_tells_the_slowest_the_most_failing_and_the_first_five(tmp_path):
    """No step ever closes. The evaluation before it has five of its own."""
    recorder = Recorder(tmp_path, LogConfig(tensorboard=False), {}, incarnation=0, after_step=0, record=False, seed=0)
    job = SimpleNamespace(_recorder=recorder, _step=3)
    Job._tell_scores(job, [group("e", *[0.1] * 6, status=Status.ERROR, purpose=Purpose.EVAL)])
    Job._tell_scores(job, [group("p1", 0.5, 2.0), group("p2", 0.1, 0.2, 0.3, 0.4, status=Status.TIMEOUT)])
    Job._tell_scores(job, [group("p3", 0.25, 0.15, 0.6, status=Status.ERROR)])
    recorder.close()
    told = json.loads((tmp_path / "rewards.json").read_text())
    assert [(row["prompt_id"], row["index"], row["time_s"]) for row in told["slowest"][:3]] == [
        ("p1", 1, 2.0),
        ("p3", 2, 0.6),
        ("p1", 0, 0.5),
    ]
    assert [(row["prompt_id"], row["num_failed"], row["step"], row["purpose"]) for row in told["most_failing"]] == [
        ("e", 6, 3, "eval"),
        ("p2", 4, 4, "train"),
        ("p3", 3, 4, "train"),
    ]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"], row["prompt_id"], row["index"], row["status"], row["detail"]) for row in events] == [
        *(("verifier_failed", 3, "e", i, "error", "of e") for i in range(5)),
        *(("verifier_failed", 4, "p2", i, "timeout", "of p2") for i in range(4)),
        ("verifier_failed", 4, "p3", 0, "error", "of p3"),
    ]
