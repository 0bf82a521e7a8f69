"""B170: a real run that loses both of its workers: one is stopped in the middle of a push, the other killed while it generates."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict

import psutil
import pytest
from ray import cloudpickle

from configs.compose import load_config
from orchestrator import cluster, launch, material
from orchestrator.actors import RolloutActor
from orchestrator.job import Job

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(480)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RECEIVE_S, PUSH_S = 6.0, 30.0
CONFIG = [
    "steps=100000",  # until both replacements are in use
    "model.embedded.steps=2",
    "model.embedded.hidden_size=192",
    "model.embedded.intermediate_size=512",
    "learner.bucket_mib=1",  # six buckets
    "rollout.num_workers=2",
    "selection=none",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=1",
    "evaluation.before=false",
    "evaluation.after=false",
    f"deadlines.receive_s={RECEIVE_S}",
    f"deadlines.push_s={PUSH_S}",
]


class FragileActor(RolloutActor):
    """``rollout-1`` stops in bucket 3 of the second step's push, ``rollout-0`` is killed at work at version 4; no replacement is."""

    def __init__(self, module, spec, *transport):
        super().__init__(module, spec, *transport)
        self._name = spec["name"]

    def receive(self, parcel):
        if self._name == "rollout-1" and parcel.generation == 3 + 2 and parcel.index == 3:  # three went before the first step
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(5)  # with several threads the stop may come a moment after the call has returned
        super().receive(parcel)

    def submit(self, requests):
        super().submit(requests)
        if self._name == "rollout-0" and self._engine.health().version == 4:
            while self._engine.health().num_tokens == 0:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


class Watched(Job):
    """Ends once both replacements have had groups trained, and keeps who made what was trained."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trained = defaultdict(list)  # groups' records by worker
        self.visits = Counter()

    async def after_step(self, outcome):
        await super().after_step(outcome)
        for kept in outcome.batch.groups:
            self.trained[kept.scored.meta.worker].append((outcome.batch.version, kept.scored.meta))
            self.visits[kept.pick.visit] += 1
        if {"rollout-0.1", "rollout-1.1"} <= self.trained.keys():
            self.stop()


async def test_a_worker_stopped_in_bucket_3_and_one_killed_at_work_are_replaced_proven_and_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "RolloutActor", FragileActor)
    config = load_config(CONFIG)
    stuff = material.gather_material(config, lambda line: None)
    instance = cluster.start_cluster(config.cluster, cluster.Demand.of(config, gpu=False))
    job = Watched(config, tmp_path, stuff, None)
    try:
        await job.start()
        assert await job.run() == "stopped"
    finally:
        await job.close()
        job.view.close()
        instance.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())}

    def of(name, **fields):
        return [event for event in events if event["event"] == name and fields.items() <= event.items()]

    # The push of step 2 ends on the survivor, under a second generation, soon after the silent engine's deadline.
    (aborted,) = of("push_aborted")
    assert (aborted["version"], aborted["generation"]) == (2, 5)
    assert "bucket 3 of generation 5" in aborted["reasons"]["rollout-1"]
    assert steps[2]["push/num_generations"] == 2
    assert RECEIVE_S < steps[2]["time/push_s"] < PUSH_S
    assert steps[3]["push/num_generations"] == 1
    (silent,), (dead,) = of("worker_lost", worker="rollout-1"), of("worker_lost", worker="rollout-0")
    assert (silent["kind"], dead["kind"]) == ("silent", "dead")
    pids = [actor["pid"] for actor in of("started")[0]["actors"][:2]]
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids)

    # B140: replaced, proven, in use, and never trained on what the weights of another version than named have made.
    for lost in ("rollout-0", "rollout-1"):
        (replaced,) = of("worker_replaced", worker=lost)
        (proven,) = of("proven", worker=replaced["by"])
        assert proven["max_difference"] <= 1e-4
        assert proven["not_restored"] == 0
        for version, meta in job.trained[replaced["by"]]:
            assert proven["version"] <= meta.min_version == meta.max_version == version
    assert of("visits_lost", worker="rollout-0")[0]["num_visits"] > 0

    # No visit is lost, none trained twice.
    counts = job._ledger.counts
    assert counts["requeued/lost_worker"] == of("visits_lost", worker="rollout-0")[0]["num_visits"]
    assert set(job.visits.values()) == {1}
    assert counts["trained"] == sum(job.visits.values()) == 8 * len(steps)
    waiting = len(job._ledger.state()["again"])
    assert counts["picked"] == counts["trained"] + waiting
