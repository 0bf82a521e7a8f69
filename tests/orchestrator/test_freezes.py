"""Every stage of a real run frozen on purpose, one after another in one step: real Ray, vLLM, DeepSpeed and reward pool.

Each actor freezes once in each of its calls: it stops its own process (SIGSTOP), or sleeps. The watchdog has to name it, with stacks,
after the deadline and before three times it. Then the test thaws it, before anybody acts on the breach: the answer comes late and
is taken, so one run gets through all of them. (What is done about a culprit otherwise: test_lost_workers and test_watchdog.)
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from ray import cloudpickle

from configs.compose import load_config
from orchestrator import cluster, launch, material
from orchestrator.actors import LearnerActor, RewardActor, RolloutActor
from orchestrator.job import Job
from orchestrator.waits import Waits
from rollout.records import Purpose

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(280)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

DEADLINE_S = 5.0
HEARTBEAT_S = 8.0
PUSH_S = 8.0  # above that of a bucket
CONFIG = [
    "steps=2",
    "model.embedded.steps=2",
    "data.sources.arithmetic.params.max_digits=1",
    "selection=none",
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "rollout.max_new_tokens=8",
    "rollout.oversample=1",
    "evaluation.before=false",
    "evaluation.after=true",
    "evaluation.max_prompts_per_stratum=4",
    "evaluation.num_samples=1",
    "checkpoint.every=2",
    "reward.timeout_s=0.05",
    "reward.max_failed_share=1",
    *(f"deadlines.{key}_s={DEADLINE_S}" for key in ("score", "prepare", "train", "receive", "checkpoint", "evaluate", "close")),
    f"deadlines.push_s={PUSH_S}",
    f"deadlines.heartbeat_s={HEARTBEAT_S}",
    "log.console=off",
    "log.tensorboard=false",
]


def freeze(stage):
    """Where the stage is armed: tells who it is, and stops or sleeps until it is thawed."""
    folder = Path(os.environ["LIMEN_TEST_FREEZES"])
    try:
        how = (folder / stage).read_text()
        (folder / stage).unlink()
    except FileNotFoundError:
        return
    (folder / f"{stage}.frozen").write_text(f"{os.getpid()}")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while not (folder / f"{stage}.thawed").exists():
        time.sleep(0.02)


class Rollout(RolloutActor):
    def submit(self, requests):
        freeze("evaluate" if requests[0].visit.purpose is Purpose.EVAL else "produce")
        super().submit(requests)

    def receive(self, parcel):
        freeze("receive")
        super().receive(parcel)

    def swap(self, version, manifest):
        freeze("swap")
        return super().swap(version, manifest)

    def close(self):
        freeze("close")
        super().close()


class Learner(LearnerActor):
    def fetch(self, *args):
        freeze("fetch")
        return super().fetch(*args)

    def prepare(self, *args):
        freeze("prepare")
        return super().prepare(*args)

    def train(self):
        freeze("train")
        return super().train()

    def buckets(self, *args):
        freeze("gather")
        yield from super().buckets(*args)

    def save(self, folder):
        freeze("save")
        return super().save(folder)


class Reward(RewardActor):
    def score(self, parcel, questions):
        evaluated = parcel[questions[0][0]].visit.purpose is Purpose.EVAL
        freeze("evaluate scores" if evaluated else "score")
        return super().score(parcel, questions)


# Stage: how it freezes, owner and name of the wait that must tell of it, the culprit, the deadline (that of scores grows with the queue)
LONGEST_SCORE_S = DEADLINE_S + 16 * 4 * 2 * 0.05  # 16 completions, four groups under way, two calls of 0.05 s each
STAGES = {
    "produce": ("sleep", "rollout-0", "taking visits", "rollout-0", HEARTBEAT_S),
    "score": ("sleep", "reward pool", "scores", "rewards-0", None),
    "fetch": ("sleep", "learner", "fetch step 2", "learner-0", DEADLINE_S),
    "prepare": ("sleep", "learner", "prepare step 2", "learner-0", DEADLINE_S),
    "train": ("stop", "learner", "train step 2", "learner-0", DEADLINE_S),
    "gather": ("sleep", "push", "version 2", "learner-0", PUSH_S),
    "receive": ("stop", "rollout-0", "bucket 0 of generation 5", "rollout-0", DEADLINE_S),
    "swap": ("sleep", "rollout-0", "swap to version 2", "rollout-0", DEADLINE_S),
    "save": ("sleep", "learner", "checkpoint of step 2", "learner-0", DEADLINE_S),
    "evaluate": ("stop", "rollout workers", "completions of the evaluation", "rollout-0", DEADLINE_S),
    "evaluate scores": ("sleep", "reward pool", "scores of the evaluation", "rewards-0", DEADLINE_S),
    "close": ("stop", "rollout-0", "close", "rollout-0", DEADLINE_S),
}


class PatientWaits(Waits):
    """Knows what is waited for."""

    def __init__(self):
        super().__init__()
        self.work = {}

    async def wait(self, awaitable, *, owner, name, deadline_s):
        self.work[owner, name] = asyncio.ensure_future(awaitable)
        return await super().wait(self.work[owner, name], owner=owner, name=name, deadline_s=deadline_s)


class Frozen(Job):
    """Arms all stages after the first step, and thaws whatever froze once the watchdog has told of it."""

    def __init__(self, freezes, *arguments):
        super().__init__(*arguments)
        self.freezes = freezes
        self._told = self._watchdog.breach
        self._watchdog.breach = self._breach

    async def after_step(self, outcome):
        await super().after_step(outcome)
        if outcome.batch.step == 1:
            for stage, (how, *_) in STAGES.items():
                (self.freezes / stage).write_text(how)

    async def _breach(self, wait, others):
        found = await self._told(wait, others)
        for frozen in self.freezes.glob("*.frozen"):
            frozen.with_suffix(".thawed").touch()
            os.kill(int(frozen.read_text()), signal.SIGCONT)
        await asyncio.wait({self._waits.work[wait.owner, wait.name]}, timeout=30.0)
        return found


async def test_the_watchdog_names_every_frozen_stage_with_stacks_in_time(tmp_path, monkeypatch):
    freezes = tmp_path / "freezes"
    freezes.mkdir()
    monkeypatch.setenv("LIMEN_TEST_FREEZES", str(freezes))  # before the instance starts: its actors inherit it
    monkeypatch.setattr("orchestrator.job.Waits", PatientWaits)
    monkeypatch.setattr("orchestrator.reward_plan.GRACE_S", 0.0)  # two seconds for each of 64 calls would be most of the test
    monkeypatch.setattr(launch, "RolloutActor", Rollout)
    monkeypatch.setattr(launch, "LearnerActor", Learner)
    monkeypatch.setattr(launch, "RewardActor", Reward)
    config = load_config(CONFIG)
    stuff = material.gather_material(config, lambda line: None)
    instance = cluster.start_cluster(config.cluster, cluster.Demand.of(config, gpu=False))
    job = Frozen(freezes, config, tmp_path, stuff, None)
    try:
        await job.start()
        assert await job.run() == "done"
    finally:
        await job.close()
        job.view.close()
        instance.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    breaches = {(event["owner"], event["wait"]): event for event in events if event["event"] == "deadline_passed"}
    for stage, (how, owner, name, culprit, deadline_s) in STAGES.items():
        assert (freezes / f"{stage}.frozen").exists(), f"{stage} never came"
        assert (owner, name) in breaches, (stage, sorted(breaches))
        breach = breaches[owner, name]
        least, most = (deadline_s, deadline_s) if deadline_s else (DEADLINE_S, LONGEST_SCORE_S)
        assert least <= breach["deadline_s"] <= most, stage
        assert breach["deadline_s"] <= breach["waited_s"] < 3 * breach["deadline_s"], stage
        pid = (freezes / f"{stage}.frozen").read_text()
        assert breach["culprits"][culprit].startswith(f"process {pid} is {'stopped' if how == 'stop' else ''}"), stage
        stacks = (tmp_path / breach["stacks"]).read_text()
        assert f"process {pid} (ray::" in stacks, stage
        if how == "sleep":
            assert re.search(r" in \w+ at freeze \(test_freezes\.py:\d+\)", breach["culprits"][culprit]), stage
            assert "in freeze" in stacks, stage
    assert not [event for event in events if event["event"] == "worker_lost"]
