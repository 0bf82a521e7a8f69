"""Reward pools in a real Ray: one for training and evaluation, made anew when it is lost, and a policy that ends the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from configs.compose import load_config
from configs.schema import ClusterConfig
from orchestrator import cluster, pools
from orchestrator.actors import RewardActor
from orchestrator.errors import RunStopped
from orchestrator.pools import RayScorer
from orchestrator.stages import Address, Finished
from rollout.records import Completion, Finish, Group, Prompt, Purpose, Status, Visit, describe_group

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

CASES = Path(__file__).parents[1] / "cases"
MINE = '''
import json
import os
import signal
from pathlib import Path

import psutil

from rewards.contract import Abstain, Verdict


def slots(completion, answer, prompt, prompt_id, num_tokens):
    """Says what it was given where."""
    return Verdict(1.0, extracted=json.dumps([completion, answer, prompt, prompt_id, num_tokens]))


def kill(completion, answer):
    """Kills the pool's actor, once for each name in ``answer``."""
    for name in answer:
        if not Path(name).exists():
            Path(name).touch()
            actor = next(p for p in psutil.Process().parents() if "RewardActor" in " ".join(p.cmdline()))
            actor.send_signal(signal.SIGKILL)
            signal.pause()
    return 1.0


def decline(completion, answer):
    raise Abstain("not today")
'''


class Bench:
    """Pools of one node, and a scorer of them."""

    def __init__(self, reward):
        self.reward = reward
        self.actors, self.reasons, self.prompts = [], [], {}
        self.told = []
        self.scorer = RayScorer({"here": self.make()}, lambda worker: "here", self.prompts, self.replace, self.told.extend)

    def make(self):
        self.actors.append(ray.remote(RewardActor).options(max_concurrency=8).remote(self.reward))
        return self.actors[-1]

    async def replace(self, node, reason):
        assert node == "here"
        self.reasons.append(reason)
        return "here", self.make()

    async def score(self, part, asked, *, purpose=Purpose.TRAIN):
        """The scores of each group of ``asked``, which is (prompt id, prompt, answer, completions)."""
        groups = []
        for name, prompt, answer, texts in asked:
            self.prompts[name] = Prompt(name, "cases", "cases", prompt, np.array([1], np.int32), answer, part)
            completions = tuple(completion(index, text) for index, text in enumerate(texts))
            groups.append(Group(Visit(name, 0, purpose), np.array([1], np.int32), completions, "rollout-0", 0.0, ()))
        parcel = ray.put(groups)
        finished = [Finished(describe_group(group), Address(parcel, place)) for place, group in enumerate(groups)]
        return [item.scores for item in await self.scorer.score(finished)]


def completion(index, text):
    size = 2 + index
    ones = np.ones(size, np.float32)
    return Completion(index, ones.astype(np.int32), -ones, ones > 0, ones.astype(np.int32), ones < 0, text, Finish.STOP)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(MINE)
    own = {"slots": "", "kill": "", "decline": ", on_abstain: fail"}
    parts = [f"reward.parts.{name}={{function: {folder}/mine.py:{name}{keys}}}" for name, keys in own.items()]
    instance = cluster.start_cluster(ClusterConfig(address="local"), cluster.Demand(num_cpus=2, num_gpus=0))
    try:
        yield Bench(load_config(["reward=math", "reward.timeout_s=30", *parts]).reward)
    finally:
        instance.close()


def math_cases():
    for line in (CASES / "math.jsonl").read_text().splitlines():
        case = json.loads(line)
        if not case.get("options"):
            yield case["id"], "Q: ", case["answer"], [case["completion"]]


async def test_training_and_evaluation_ask_one_pool_and_get_the_same(bench):
    """B03."""
    asked = list(math_cases())
    trained = await bench.score("math", asked)
    evaluated = await bench.score("math", asked, purpose=Purpose.EVAL)

    def told(scores):
        return [(score.status, score.outcome, score.value, score.accuracy, score.extracted) for (score,) in scores]

    assert told(trained) == told(evaluated)
    assert len(asked) > 70
    assert {score.value for (score,) in trained} == {0.0, 1.0}


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVAL])
async def test_the_gold_stands_in_the_gold_slot(bench, purpose):
    """B23."""
    asked = [("p1", "1+1=", {"gold": 2}, ["2", "3"]), ("p2", "2+2=", "4", ["5"])]
    first, second = await bench.score("slots", asked, purpose=purpose)
    assert [json.loads(score.extracted) for score in first] == [
        ["2", {"gold": 2}, "1+1=", "p1", 2],
        ["3", {"gold": 2}, "1+1=", "p1", 3],
    ]
    assert json.loads(second[0].extracted) == ["5", "4", "2+2=", "p2", 2]


async def test_a_lost_pool_is_made_anew_once_and_its_groups_are_scored(bench, tmp_path):
    """The actor is killed under three parcels: each is scored by the one that takes its place."""
    first = bench.actors[-1]
    before = len(bench.actors)
    pid = (await first.facts.remote())["pid"]
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    parcels = [bench.score("kill", [(f"k{i}", "", [str(tmp_path / "once")], ["x", "y"])]) for i in range(3)]
    scores = await asyncio.gather(*parcels)
    assert [[score.value for score in of_group] for (of_group,) in scores] == [[1.0, 1.0]] * 3
    assert len(bench.actors) == before + 1
    assert "died" in bench.reasons[-1].lower()
    assert not psutil.wait_procs(family, timeout=10)[1], "with the actor go its verifiers"


async def test_a_pool_that_is_lost_too_often_over_the_same_groups_ends_the_run(bench, tmp_path, monkeypatch):
    names = [str(tmp_path / "once"), str(tmp_path / "twice")]
    with monkeypatch.context() as patch:
        patch.setattr(pools, "MOST_REPLACEMENTS", 1)
        with pytest.raises(
            RunStopped, match="the reward pool of node here was lost 2 times over the same groups: ActorDiedError"
        ):
            await bench.score("kill", [("k", "", names, ["x"])])
    scores = await bench.score("kill", [("k", "", names, ["x"])])
    assert scores[0][0].status is Status.OK, "another group has a try of its own"


async def test_a_policy_that_fails_ends_the_run_with_the_part_the_prompt_and_the_words(bench):
    with pytest.raises(RunStopped, match=r"its policy is `fail`: prompt 'p9': .*'decline'.*Abstain: not today"):
        await bench.score("decline", [("p9", "", None, ["x"])])
    assert (bench.told[-1].meta.visit.prompt_id, bench.told[-1].scores[0].status) == ("p9", Status.ABSTAIN), "it is told first"


async def test_a_pool_tells_the_rung_of_its_sandbox(bench):
    assert await bench.scorer.pools["here"].isolation.remote({"code": "rlimits"}) == {"code": "rlimits"}
