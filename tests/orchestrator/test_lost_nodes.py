"""Nodes that leave: two raylets on this machine, one of which is killed under what lies there, and under a whole run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.compose import load_config
from configs.schema import DeadlinesConfig
from orchestrator import cluster, material
from orchestrator.actors import PULSE, LearnerActor, RewardActor
from orchestrator.fleet import RayFleet, Worker
from orchestrator.job import Job
from orchestrator.launch import close_actors
from orchestrator.ledger import Pick
from orchestrator.lost import group_at
from orchestrator.pools import PoolWatch, RayScorer
from orchestrator.ranks import RayLearner
from orchestrator.stages import Address, Batch, Finished, Kept
from orchestrator.waits import Waits
from orchestrator.workers import end_actors
from rollout.engine import GroupRequest
from rollout.records import Completion, Finish, Group, Prompt, Purpose, Visit, describe_group

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Ray knows of a node's end after three missed checks, here within a second or two
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
# Tokens of a completion. Ray keeps what is below 100 KB in all with the driver; of the rest it copies to the driver's node what the driver
# waits for in a stream.
SIZES = {"small": 10, "streamed": 40_000, "big": 40_000}


def group(visit, size, worker):
    ones = np.ones(size, np.float32)
    completion = Completion(0, ones.astype(np.int32), -ones, ones > 0, ones.astype(np.int32), ones < 0, "2", Finish.STOP)
    return Group(visit, np.array([1], np.int32), (completion,), worker, 0.0, ())


class Generous:
    """A rollout worker that has a group for every visit at once: as large as the prompt's name says."""

    def __init__(self, name):
        self._name, self._asked = name, asyncio.Queue()

    async def pid(self):
        return os.getpid()

    async def give(self, visit):
        return [group(visit, SIZES[visit.prompt_id], self._name)]

    async def submit(self, requests):
        self._asked.put_nowait([group(request.visit, SIZES[request.visit.prompt_id], self._name) for request in requests])

    async def groups(self):
        while True:
            groups = await self._asked.get()
            yield groups
            yield [describe_group(one) for one in groups]


class Stuck(RewardActor):
    """A pool whose lock somebody holds for ever, from the first score on."""

    def score(self, parcel, questions):
        def hold():
            self._pool._changed.acquire()
            time.sleep(1000)

        threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.2)
        return super().score(parcel, questions)


@pytest.fixture(scope="module")
def two_nodes():
    """A head and another node. The driver is on the head."""
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 3, "_system_config": QUICK, "include_dashboard": False, "object_store_memory": 200_000_000},
    )
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def driver(two_nodes):
    """Connected; gives its node's id."""
    ray.init(address=two_nodes.address, logging_level="ERROR")
    yield ray.get_runtime_context().get_node_id()
    ray.shutdown()


def add_node(two_nodes, num_cpus):
    node = two_nodes.add_node(num_cpus=num_cpus, object_store_memory=200_000_000)
    two_nodes.wait_for_nodes()
    return node


def on(node_id):
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False), "num_cpus": 0}


def request(visit):
    return GroupRequest(visit, np.array([1], np.int32), None, 1, None, None)


async def take(fleet, count):
    """So many finished groups by their prompt."""
    found = {}
    async with asyncio.timeout(60):
        while len(found) < count:
            found |= {item.meta.visit.prompt_id: item for item in await fleet.next_finished()}
    return found


async def test_what_a_killed_worker_gave_out_stays_and_what_a_lost_node_held_is_told_to_all_who_need_it(two_nodes, driver):
    gone = add_node(two_nodes, 2)
    here, there = driver, gone.node_id
    assert here != there
    reward = load_config([]).reward
    pools = {node: ray.remote(RewardActor).options(max_concurrency=8, **on(node)).remote(reward) for node in (there, here)}
    rank = ray.remote(LearnerActor).options(**on(here)).remote(0, 1)
    actor = ray.remote(Generous).options(max_concurrency=8, **on(there)).remote("rollout-0")
    waits, replaced, prompt = Waits(), [], Prompt("p", "s", "s", "1+1=", None, "2", None)

    async def left_to_others(node, reason):
        replaced.append(node)

    fleet = RayFleet([Worker("rollout-0", actor)], request, waits, 60.0)
    fleet.on_lost = lambda worker, kind, error: None
    scorer = RayScorer(pools, lambda worker: there, dict.fromkeys(SIZES, prompt), left_to_others)
    for name in ("small", "streamed"):
        await fleet.submit([Visit(name, 0, Purpose.TRAIN)])
    found = await take(fleet, 2)
    visit = Visit("big", 0, Purpose.TRAIN)
    parcel = actor.give.remote(visit)  # and looked at by nobody here
    await asyncio.to_thread(ray.wait, [parcel], fetch_local=False)
    found["big"] = Finished(describe_group(group(visit, SIZES["big"], "rollout-0")), Address(parcel, 0))

    # The worker is killed: whatever it gave out is where it was, in the node's store or with the driver.
    process = psutil.Process(await actor.pid.remote())
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait, 10)
    assert [len(one.scores) for one in await scorer.score(list(found.values()))] == [1, 1, 1]
    for name in ("small", "streamed"):
        assert (await group_at(found[name].address)).completions[0].num_tokens == SIZES[name]

    # Its node is killed: what lay nowhere else is lost to the driver, the pools and the ranks.
    two_nodes.remove_node(gone, allow_graceful=False)
    kept = [Kept(Pick(i, item.meta.visit), item) for i, item in enumerate(found.values())]
    async with asyncio.timeout(60):
        scored, lost = await asyncio.gather(
            scorer.score(list(found.values())),
            RayLearner([rank]).fetch(Batch(1, 0, tuple(kept))),
        )
        assert await group_at(found["big"].address) is None
    assert sorted(item.meta.visit.prompt_id for item in scored) == ["small", "streamed"]
    assert [one.pick.visit.prompt_id for one in lost] == ["big"]
    assert replaced == [there], "its pool is left to the others, once"
    assert list(scorer.pools) == [here]
    for name in ("small", "streamed"):
        assert (await group_at(found[name].address)).completions[0].num_tokens == SIZES[name]
    fleet.close()
    await end_actors({"pool": pools[here], "rank": rank}, 10.0)


@pytest.mark.parametrize("how", ["deadlocked", "stopped"])
async def test_a_pool_that_is_stuck_is_replaced_and_its_groups_are_scored(driver, how):
    """Nobody else would tell: it lives, and each of its calls has hours. One that is stopped does not hear Ray and is killed."""
    reward = load_config([]).reward
    made, told, prompt = [], [], Prompt("p", "s", "s", "1+1=", None, "2", None)

    def make(kind):
        actor = ray.remote(concurrency_groups={PULSE: 1})(kind).options(max_concurrency=8, **on(driver))
        made.append(actor.remote(reward))
        return made[-1]

    async def replace(node, reason):
        told.append(reason)
        await end_actors({"pool": made[-1]}, 10.0)
        return node, make(RewardActor)

    first = make(Stuck if how == "deadlocked" else RewardActor)
    process = psutil.Process((await first.facts.remote())["pid"])
    scorer = RayScorer({driver: first}, lambda worker: driver, {"small": prompt}, replace)
    watch = PoolWatch(scorer, Waits(), DeadlinesConfig(heartbeat_s=2.0), still_s=2.0, event=lambda name, **fields: None)
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(1.0)  # so that it has answered once
    if how == "stopped":
        process.send_signal(signal.SIGSTOP)
    one = group(Visit("small", 0, Purpose.TRAIN), 10, "rollout-0")
    async with asyncio.timeout(60):
        (scored,) = await scorer.score([Finished(describe_group(one), Address(ray.put([one]), 0))])
    assert [score.value for score in scored.scores] == [1.0]
    assert len(told) == 1
    assert {"deadlocked": "'a call of a verifier to end' within 2 s", "stopped": "'a sign of life' within 2 s"}[how] in told[0]
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    watching.cancel()
    await end_actors({"pool": made[-1]}, 10.0)


async def test_at_the_end_an_actor_that_is_stopped_is_killed_on_its_node(two_nodes, driver):
    other = add_node(two_nodes, 1)
    actors = {node: ray.remote(Generous).options(**on(node)).remote(node) for node in (driver, other.node_id)}
    processes = [psutil.Process(await actor.pid.remote()) for actor in actors.values()]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    await close_actors(actors, Waits(), 10.0)
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    two_nodes.remove_node(other)


class Watched(Job):
    """Ends a few steps after a worker on the third node has had groups trained; ``on_step`` is called after each."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trained = defaultdict(list)  # the versions of the batches, by worker
        self.visits = Counter()
        self.on_step = lambda step: None

    async def after_step(self, outcome):
        await super().after_step(outcome)
        for kept in outcome.batch.groups:
            self.trained[kept.scored.meta.worker].append(outcome.batch.version)
            self.visits[kept.pick.visit] += 1
        self.on_step(outcome.batch.step)
        if any(name.startswith("rollout-1.") for name in self.trained):
            self.stop()


CONFIG = [
    "steps=100000",
    "model.embedded.steps=2",
    "rollout.num_workers=2",
    "rollout.cache_gib=0.1",
    "selection=none",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=1",
    "evaluation.before=false",
    "evaluation.after=false",
    "log.tensorboard=false",
]


async def test_a_run_goes_on_without_a_node_and_takes_in_the_next_one(two_nodes, tmp_path):
    """The head has room for a worker, its verifier and the rank; the other node for a worker and its verifier. That one is killed after two
    steps; after three more with one worker another node joins."""
    gone = add_node(two_nodes, 2)
    config = load_config([*CONFIG, f"cluster.address={two_nodes.address}"])
    stuff = material.gather_material(config, lambda line: None)
    instance = cluster.start_cluster(config.cluster, cluster.Demand.of(config, gpu=False))
    job = Watched(config, tmp_path, stuff, None)
    nodes = [gone]

    def on_step(step):
        if step == 2:
            two_nodes.remove_node(gone, allow_graceful=False)
        lost_at = job.lost_at = getattr(job, "lost_at", None) or (step if told("no_place") else None)
        if lost_at and step == lost_at + 3:
            nodes.append(two_nodes.add_node(num_cpus=2, object_store_memory=200_000_000))

    def told(name):
        return [row for row in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines()) if row["event"] == name]

    job.on_step = on_step
    try:
        await job.start()
        assert await job.run() == "stopped"
    finally:
        await job.close()
        job.view.close()
        instance.close()
    (lost,) = told("worker_lost")
    assert lost["worker"].startswith("rollout-")
    assert [row["worker"] for row in told("no_place")] == [lost["worker"]]
    (moved,) = told("reward_pool_replaced")
    assert (moved["node"], moved["by"]) == (gone.node_id, None)
    (replaced,) = told("worker_replaced")
    assert replaced["worker"] == lost["worker"]
    assert [row["worker"] for row in told("proven")][-1] == replaced["by"]
    assert job.trained[replaced["by"]]
    counts = job._ledger.counts
    assert set(job.visits.values()) == {1}
    assert counts["trained"] == sum(job.visits.values())
    assert counts["picked"] == counts["trained"] + len(job._ledger.state()["again"])
