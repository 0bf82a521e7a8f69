"""Line 6.2: twelve steps under SIGKILL and SIGSTOP of a rollout worker, a learner rank and a reward worker, each at a drawn moment."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from orchestrator.checkpoint import newest_checkpoint
from orchestrator.ledger_view import history, read_rows, report

_SPEC = importlib.util.spec_from_file_location("storm", Path(__file__).parents[1] / "long" / "storm.py")
storm = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(storm)

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(420)]

STEPS, GROUPS = 12, 16
SEED = int(os.environ.get("LIMEN_STORM_SEED", "0"))
CONFIG = [
    f"steps={STEPS}",
    "model.embedded.steps=2",
    "data.sources.arithmetic.params.max_digits=1",
    "selection=none",  # every group that is not lost is trained
    f"batch.groups_per_step={GROUPS}",
    "batch.group_size=8",
    "batch.num_mini_batches=2",
    "rollout.num_workers=2",
    "rollout.max_new_tokens=16",
    "rollout.max_lag=1",
    "rollout.oversample=1",
    "rollout.cache_gib=0.1",
    "rollout.record=true",
    "checkpoint.every=2",
    "evaluation.before=false",
    "evaluation.after=false",
    "reward.timeout_s=2",
    "deadlines.heartbeat_s=5",
    "deadlines.receive_s=10",
    "log.heartbeat_every_s=1",
    "log.console=off",
    "log.tensorboard=false",
]


class Shower:
    """One fault of each kind and signal, in a drawn order, each at a drawn moment after a drawn step."""

    def __init__(self, seed):
        self._draw = random.Random(seed)
        faults = list(itertools.product(storm.KINDS, (signal.SIGKILL, signal.SIGSTOP)))
        self._draw.shuffle(faults)
        steps = sorted(self._draw.sample(range(1, STEPS - 2), len(faults)))
        self.plan = [(step, self._draw.uniform(0, 0.5), *fault) for step, fault in zip(steps, faults, strict=True)]
        self._left = list(self.plan)
        self._due = None

    def tick(self, driver, step, num_rows):
        if not self._left or step < self._left[0][0]:
            return None
        _, delay_s, kind, how = self._left[0]
        self._due = self._due or time.monotonic() + delay_s
        fault = storm.strike(driver, kind, how, self._draw, step) if time.monotonic() >= self._due else None
        if fault is not None:
            self._left.pop(0)
            self._due = None
        return fault


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """The run, ended, with what was done to it and what it left."""
    part, shower, segments = tmp_path_factory.mktemp("storm") / "part", Shower(SEED), storm.shared_memory()
    print(f"LIMEN_STORM_SEED={SEED}: {shower.plan}")
    driver = storm.start(part, CONFIG)
    try:
        storm.watch(driver, part, STEPS, shower)
        (part / "left.json").write_text(json.dumps(storm.left(part, segments)))
    finally:
        storm.end_all(part)
    output = (part / "output.txt").read_text()
    assert driver.returncode == 0, output[-3000:]
    return part


def rows(part, name):
    return list(read_rows(part / "run" / f"{name}.jsonl"))


def faults(part):
    return [storm.Fault(**row) for row in read_rows(part / "faults.jsonl")]


def test_it_finishes_and_every_visit_is_accounted_for(part):
    run = part / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["step"]) == ("done", STEPS)
    assert len(faults(part)) == 6

    # By their places in the order of picks: all that were ever picked, each trained once, or open, or queued again.
    ledger = newest_checkpoint(run).state["ledger"]
    records = [list(read_rows(run / "groups" / f"step-{step:06d}.jsonl")) for step in range(1, STEPS + 1)]
    assert [len(record) for record in records] == [GROUPS] * STEPS
    trained = [row["order"] for record in records for row in record]
    unfinished = [row[0] for row in (*ledger["open"], *ledger["again"])]
    assert sorted(trained + unfinished) == list(range(ledger["num_picks"]))
    counts = ledger["counts"]
    assert counts["picked"] == ledger["num_picks"]
    assert counts["trained"] == STEPS * GROUPS
    assert not [reason for reason in counts if reason.startswith("dropped/")]

    # What was done and undone is told of too.
    past = history(rows(part, "metrics"), summary["incarnation"], STEPS)
    assert [row["step"] for row in past.standing] == list(range(1, STEPS + 1))
    undone = sum(event["num_visits"].get("trained", 0) for event in rows(part, "events") if event["event"] == "rolled_back")
    assert sum(row["batch/num_groups"] for row in past.discarded) == undone
    assert any("discarded by going back to a checkpoint" in line for line in report(run)) == bool(past.discarded)


def test_events_tell_the_story(part):
    events = rows(part, "events")
    names = {
        facts["pid"]: name for event in events if event["event"] == "heartbeat" for name, facts in event["processes"].items()
    }
    struck = faults(part)
    returns = [event for event in events if event["event"] == "rolled_back"]
    assert [event["incarnation"] for event in returns] == list(range(1, 1 + len(returns)))
    assert len([fault for fault in struck if fault.kind == "learner"]) <= len(returns) <= len(struck)

    def told(fault, name, **fields):
        return [
            event for event in events if event["event"] == name and event["time"] > fault.time and fields.items() <= event.items()
        ]

    for fault in struck:
        if fault.target == "learner":
            assert told(fault, "rolled_back"), fault
        elif any(0 < event["time"] - fault.time < 20 for event in returns):
            continue  # the life that it struck ended soon after, or never began for it
        elif fault.target == "rollout":
            assert told(fault, "worker_lost", worker=names[fault.pid]), fault
        elif fault.target == "reward":
            assert told(fault, "reward_pool_replaced"), fault
        else:
            assert told(fault, "verifiers_lost"), fault


def test_nothing_is_left(part):
    assert json.loads((part / "left.json").read_text()) == {"processes": [], "segments": []}
    held = json.loads((part / "held.json").read_text())
    assert held["actors"] == []
    assert "0 MiB, 0 objects" in held["stores"]
    # Before its instance ends the driver knows the groups that the last life had asked ahead, from the streams of its workers, and of the
    # lives before it nothing.
    events = rows(part, "events")
    workers = [event for event in events if event["event"] == "proven" and event["incarnation"] == events[-1]["incarnation"]]
    assert len({storm.task_of(name) for name in held["references"]}) <= len(workers)
