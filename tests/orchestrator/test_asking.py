"""`limen eval` and `limen sample` where whoever they ask freezes: real Ray and actors, an engine that only says that it works."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from ray import cloudpickle

from configs.compose import load_config
from orchestrator import asking, launch
from orchestrator.actors import RewardActor, RolloutActor, process_facts
from orchestrator.errors import RunStopped
from rollout.records import Completion, Finish, Group, describe_group
from rollout.stack_signal import listen

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(150)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

HEARTBEAT_S, EVALUATE_S = 2.0, 4.0
CONFIG = [
    "model.embedded.steps=2",
    "evaluation.max_prompts_per_stratum=1",
    "evaluation.num_samples=1",
    f"deadlines.heartbeat_s={HEARTBEAT_S}",
    "deadlines.close_s=5",
]


class Rollout(RolloutActor):
    """Answers every visit with one token."""

    def __init__(self, module, spec, *transport):
        listen()
        self._closed, self._asked, self._name = threading.Event(), [], spec["name"]

    def facts(self):
        return process_facts()

    def submit(self, requests):
        self._asked += requests

    def groups(self):
        while not self._closed.wait(0.05):
            while self._asked:
                group = self._answer(self._asked.pop())
                yield [group]
                yield [describe_group(group)]

    def _answer(self, request):
        one = np.ones(1, dtype=np.int32)
        answers = tuple(
            Completion(i, one, -one.astype(np.float32), one.astype(bool), 0 * one, one > 1, "1", Finish.STOP)
            for i in range(request.group_size)
        )
        return Group(request.visit, request.prompt_token_ids, answers, self._name, 0.1, ())

    def close(self):
        self._closed.set()


class StopsAtWork(Rollout):
    def submit(self, requests):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()


class HangingReward(RewardActor):
    def score(self, parcel, questions):
        time.sleep(60)


@pytest.fixture
def in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(asking.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_worker_that_is_stopped_at_work_ends_limen_sample_long_before_its_deadline(
    monkeypatch, capfd, caplog, in_temporary_folder
):
    monkeypatch.setattr(launch, "RolloutActor", StopsAtWork)
    started = time.monotonic()
    with pytest.raises(RunStopped):
        asking.sample(load_config(CONFIG))
    assert time.monotonic() - started < 100, "deadlines.evaluate_s is half an hour"
    gc.collect()
    told = capfd.readouterr().err
    assert re.search(r"rollout-0 did not finish 'a sign of life' within 2 s.*rollout-0: process \d+ is stopped, by SIGSTOP", told)
    (file,) = in_temporary_folder.glob("limen-*/stacks/*.txt")
    assert f"limen: the stacks are in {file.parent}" in told
    assert "state T" in file.read_text()
    assert "never retrieved" not in told + caplog.text


def test_scores_that_do_not_come_are_the_reward_pools_fault(monkeypatch, capfd, in_temporary_folder):
    monkeypatch.setattr(launch, "RolloutActor", Rollout)
    monkeypatch.setattr(launch, "RewardActor", HangingReward)
    with pytest.raises(RunStopped) as error:
        asking.evaluate_model(load_config([*CONFIG, f"deadlines.evaluate_s={EVALUATE_S}"]))
    assert re.match(
        r"reward pool did not finish 'scores of the evaluation' within 4 s: rewards-0, process \d+ is \w+, in score \(",
        str(error.value),
    )


def test_limen_sample_that_is_well_leaves_nothing(monkeypatch, capfd, in_temporary_folder):
    monkeypatch.setattr(launch, "RolloutActor", Rollout)
    assert asking.sample(load_config([*CONFIG, "sample.prompts=[two]"])) == 0
    out, err = capfd.readouterr()
    assert "[1 tokens, stop] 1" in out
    assert "watchdog" not in err
    assert not list(in_temporary_folder.glob("limen-*"))
