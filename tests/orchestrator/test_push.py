"""Pushes from a real DeepSpeed learner to real vLLM engines, and sabotage of every kind, each where it can happen.

Engines are shared: a test makes a crew of its own over the same actor, in which a replacement is the same actor under another
name. So a fault that stays goes down the whole ladder in a second; one test does it with an engine that is really started anew.
"""

from __future__ import annotations

import dataclasses
import re
import sys

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle

from configs.compose import load_config
from configs.schema import DeadlinesConfig, Dtype
from orchestrator import cluster, material
from orchestrator.actors import LearnerActor, RolloutActor
from orchestrator.errors import RunStopped
from orchestrator.fleet import RayFleet, Worker
from orchestrator.handles import StepReport
from orchestrator.proof import FixedTokens
from orchestrator.push import RayPusher
from orchestrator.ranks import RayLearner
from orchestrator.waits import Waits
from orchestrator.workers import Crew
from rollout.engine import engine_environment
from rollout.records import Purpose, Visit
from rollout.weights import digest_bytes, tensor_bytes

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(120)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = [np.array([1, 20, 21, 22, 23, 24, 30], dtype=np.int32), np.array([1, 40, 33, 22, 11], dtype=np.int32)]
VICTIM = "model.layers.0.mlp.up_proj.weight"
OTHER = "model.layers.1.mlp.up_proj.weight"  # of the same shape


def altered(bucket, change):
    """The bucket with ``change(spec, bytes) -> (spec, bytes) or None`` applied to every tensor, consistent in itself."""
    specs, offsets, parts, end = [], [], [], 0
    for place, spec in enumerate(bucket.specs):
        changed = change(spec, tensor_bytes(bucket, place))
        if changed is None:
            continue
        new_spec, data = changed
        specs.append(new_spec)
        offsets.append(end)
        parts.append(np.pad(data, (0, -data.nbytes % 64)))
        end += parts[-1].nbytes
    data = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return dataclasses.replace(bucket, specs=tuple(specs), offsets=tuple(offsets), data=data)


def sealed(spec, data, **fields):
    return dataclasses.replace(spec, num_bytes=data.nbytes, digest=digest_bytes(data), **fields), data


def skip(spec, data):
    return None if spec.name == VICTIM else (spec, data)


def rename(spec, data):
    return (dataclasses.replace(spec, name="model.layers.0.mlp.sideways_proj.weight") if spec.name == VICTIM else spec), data


def truncate(spec, data):
    if spec.name != VICTIM:
        return spec, data
    return sealed(spec, data[: data.nbytes // 2].copy(), shape=(spec.shape[0] // 2, *spec.shape[1:]))


def narrow(spec, data):
    """bfloat16: the upper half of every float32."""
    if spec.name != VICTIM:
        return spec, data
    return sealed(spec, data.reshape(-1, 4)[:, 2:].copy().reshape(-1), dtype="bfloat16")


def exchange(spec, data):
    """Gives two tensors of one shape each other's names."""
    names = {VICTIM: OTHER, OTHER: VICTIM}
    return dataclasses.replace(spec, name=names.get(spec.name, spec.name)), data


def zero(spec, data):
    return spec, (np.zeros_like(data) if spec.name == VICTIM else data)


def shorten(spec, data):
    return spec, (data[: data.nbytes // 2] if spec.name == VICTIM else data)


def mistype(spec, data):
    return (dataclasses.replace(spec, dtype="bfloat16") if spec.name == VICTIM else spec), data


CHANGES = {f.__name__: f for f in (skip, rename, truncate, narrow, exchange, zero, shorten, mistype)}


class Saboteur(LearnerActor):
    """A learner whose pushes lie consistently: bytes, digests and manifest agree with one another."""

    lie, times = "", 0

    def tell(self, lie, times=1000):
        self.lie, self.times = lie, times

    def nudge(self, factor):
        """Moves every weight, as a step of training does."""
        import torch

        with torch.no_grad():
            for parameter in self._learner.model.policy.parameters():
                parameter.mul_(factor)

    def buckets(self, generation, *arguments):
        lie = self.lie if self.times else ""
        self.times -= bool(self.times)
        sent, self._specs = [], []
        for place, bucket in enumerate(super().buckets(generation, *arguments)):
            if lie == "old":
                sent.append(dataclasses.replace(self._last[place], generation=generation))
            else:
                sent.append(altered(bucket, CHANGES[lie]) if lie else bucket)
            self._specs += sent[-1].specs
            yield sent[-1]
        self._last = sent

    def manifest(self):
        return dataclasses.replace(super().manifest(), specs=tuple(self._specs))


class SabotagedWorker(RolloutActor):
    """Spoils what it received, or has its engine load it wrongly and report success."""

    transit, times = "", 0

    def __init__(self, *arguments, transit=""):
        super().__init__(*arguments)
        self.tell_transit(transit)
        self._load = self._engine._stepper.load
        self._held = []

    def tell_transit(self, change, times=1000):
        self.transit, self.times = change, times

    def receive(self, bucket):
        change = self.transit if self.times > 0 else ""
        self._engine.receive(altered(bucket, CHANGES[change]) if change else bucket)

    def swap(self, version, manifest):
        self.times -= 1
        return super().swap(version, manifest)

    def tell_loader(self, fault, first=0):
        """The loader is wrong from its load number ``first`` on."""
        num_loads = 0

        def load(buckets, *, recompute):
            nonlocal num_loads
            num_loads += 1
            old, self._held = self._held, list(buckets)
            if not fault or num_loads <= first:
                return self._load(buckets, recompute=recompute)
            if fault == "skip":  # one tensor keeps its old bytes
                kept = {spec.name: tensor_bytes(b, i) for b in old for i, spec in enumerate(b.specs)}
                buckets = [altered(b, lambda s, d: (s, kept[s.name] if s.name == VICTIM else d)) for b in buckets]
            elif fault == "old":  # nothing is loaded
                return None
            else:
                buckets = [altered(b, CHANGES[fault]) for b in buckets]
            return self._load(buckets, recompute=recompute)

        self._engine._stepper.load = load


class OneActor(Crew):
    """A crew whose replacements are the same actor under the next name."""

    async def _end(self, worker):
        pass


class Bench:
    """A learner and one engine; ``crew`` and ``pusher`` are made anew for every test."""

    def __init__(self, config):
        self.config = config
        self.layout = "tied" if config.model.embedded.tie_word_embeddings else "untied"
        self.stuff = material.gather_material(config, lambda line: None)
        environment = cluster.learner_environment(1, rank=0, world_size=1, gpu=False)
        options = cluster.actor_options(f"learner-{self.layout}", num_cpus=1, num_gpus=0, env=environment, concurrency=1)
        self.learner = ray.remote(Saboteur).options(**options).remote(0, 1)
        self.engine = self.start_engine("rollout-0")
        spec = material.learner_spec(config, self.stuff.model_path, total_optimizer_steps=1)
        ray.get(self.learner.start.remote("learner.learner", spec, *ray.get(self.learner.rendezvous.remote())))

    def start_engine(self, name, **sabotage):
        spec = material.engine_spec(self.config, self.stuff, name=name, model_path=self.stuff.model_path, load_format="dummy")
        options = cluster.actor_options(
            f"{name}-{self.layout}", num_cpus=1, num_gpus=0, env=engine_environment(num_threads=1), concurrency=200
        )
        return ray.remote(SabotagedWorker).options(**options).remote("rollout.vllm_in_process", spec, **sabotage)

    async def begin(self, crew_type=OneActor, make=None, workers=None):
        await self.learner.tell.remote("")
        await self.engine.tell_transit.remote("")
        await self.engine.tell_loader.remote("")
        self.events = []
        waits, deadlines = Waits(), DeadlinesConfig()
        self.fleet = RayFleet([], lambda visit: visit, waits, deadlines.heartbeat_s)
        self.crew = crew_type(self.fleet, make or self.make_same, waits, deadlines, self.event)
        self.pusher = RayPusher(
            RayLearner([self.learner]),
            self.crew,
            waits,
            deadlines,
            self.event,
            dtype=Dtype.float32,
            tokens=FixedTokens(ROWS, 0.7),
        )
        # Generations go on where the last test's ended: the engine remembers them.
        self.pusher._generation = Bench.generation
        await self.crew.start(workers or [Worker("rollout-0", self.engine)])
        return self

    generation = 0

    def end(self):
        Bench.generation = self.pusher._generation + 1
        self.crew.close()
        self.fleet.close()

    def make_same(self, slot, number):
        return Worker(f"rollout-0.{number}", self.engine)

    def event(self, name, **fields):
        self.events.append((name, fields))

    @property
    def names(self):
        return [name for name, _ in self.events]

    async def step(self, version, factor=1.01, **metrics):
        await self.pusher.hold()
        await self.learner.nudge.remote(factor)
        return await self.pusher.push(version, StepReport(metrics, 1, moved=True))

    async def stops(self, match):
        """The run stops for this reason, in the push or beside it."""
        with pytest.raises(RunStopped, match=match):
            await self.fleet.next_finished()

    async def agrees(self):
        (row, *_), (theirs, *_) = (
            await self.learner.score_tokens.remote(ROWS, 0.7),
            await self.engine.score_tokens.remote(ROWS, 0.7),
        )
        np.testing.assert_allclose(theirs.logp, row, atol=1e-4)


@pytest.fixture(scope="module")
def ray_instance():
    config = load_config(["cluster.num_cpus=6"])
    instance = cluster.start_cluster(config.cluster, cluster.Demand(num_cpus=6, num_gpus=0))
    yield instance
    instance.close()


def make_bench(tied):
    return Bench(load_config([f"model.embedded.tie_word_embeddings={tied}", "model.embedded.steps=2", "rollout.temperature=0.7"]))


@pytest.fixture(scope="module")
def shared(ray_instance):
    return make_bench("true")


@pytest.fixture
async def bench(shared):
    yield await shared.begin()
    shared.end()


async def test_three_pushes_prove_a_new_engine_and_one_carries_a_step(bench):
    await bench.pusher.push(0)
    ((name, figures),) = bench.events
    assert name == "proven"
    assert figures["max_difference"] <= 1e-4
    assert figures["moved"] > 0.01
    assert figures["not_restored"] == 0
    for version, factor in enumerate([1.01, 0.97, 1.02], start=1):
        metrics = await bench.step(version, factor)
        await bench.agrees()
        assert metrics["push/changed_frac"] == 1
        assert metrics["push/num_generations"] == 1
        assert metrics["time/push_send_s"] > 0
    assert bench.names == ["proven"]


SENDER = [
    ("skip", r"sent 34 tensors, 35 before.*layers\.0\.mlp\.up_proj\.weight is missing"),
    ("rename", r"sideways_proj\.weight is new; model\.layers\.0\.mlp\.up_proj\.weight is missing"),
    ("truncate", r"up_proj\.weight is float32 \(128, 96\), was float32 \(256, 96\)"),
    ("narrow", r"up_proj\.weight is bfloat16 \(256, 96\), was float32 \(256, 96\)"),
    ("old", r"0 of 35 tensors changed although the update moved the weights"),
]


@pytest.mark.parametrize(("lie", "words"), SENDER, ids=[lie for lie, _ in SENDER])
async def test_a_sender_that_lies_in_a_step(bench, lie, words):
    """B137: caught before any engine swaps, told with both numbers, gathered anew once, then the run stops."""
    await bench.pusher.push(0)
    await bench.learner.tell.remote(lie)
    with pytest.raises(RunStopped, match=words):
        await bench.step(1)
    assert bench.names == ["proven", "push_retried"]
    assert (await bench.engine.health.remote()).version == 0


@pytest.mark.parametrize("lie", [lie for lie, _ in SENDER])
async def test_a_sender_that_lies_once_is_cured_by_gathering_anew(bench, lie):
    await bench.pusher.push(0)
    await bench.learner.tell.remote(lie, 1)
    await bench.step(1)
    assert bench.names == ["proven", "push_retried"]
    await bench.agrees()


FIRST = [
    ("skip", r"gate_up_proj\.weight: 24576 of 49152 elements arrived; missing model\.layers\.0\.mlp\.up_proj\.weight"),
    ("rename", r"the model's loader objects: .*sideways_proj"),
    ("truncate", r"loader objects|of 49152 elements arrived"),
    ("narrow", r"differ from the learner's by .*; 0\.0001 at most is allowed"),
    ("exchange", r"differ from the learner's by .*; 0\.0001 at most is allowed"),
]


@pytest.mark.parametrize(("lie", "words"), FIRST, ids=[lie for lie, _ in FIRST])
async def test_a_sender_that_lies_from_the_first_push_on(bench, lie, words):
    """B137: nothing to compare the manifest with: the engine's rehearsal refuses it, or the proof on fixed tokens."""
    await bench.learner.tell.remote(lie)
    with pytest.raises(RunStopped, match=words):
        await bench.pusher.push(0)
    assert bench.names == ["push_retried", "worker_lost", "worker_replaced"]
    assert bench.crew.proven == bench.fleet.workers == []


TRANSIT = [
    ("zero", r"arrived damaged: model\.layers\.0\.mlp\.up_proj\.weight: digest [0-9a-f]{16} sent, [0-9a-f]{16} arrived"),
    ("shorten", r"arrived damaged: .*digest [0-9a-f]{16} sent, [0-9a-f]{16} arrived"),
    ("skip", r"up_proj\.weight: sent, never arrived"),
    ("rename", r"sideways_proj\.weight: arrived, but is not in the manifest"),
    ("truncate", r"up_proj\.weight: sent as float32 \(256, 96\), arrived as float32 \(128, 96\)"),
    ("mistype", r"up_proj\.weight: sent as float32 \(256, 96\), arrived as bfloat16 \(256, 96\)"),
    ("exchange", r"up_proj\.weight: digest [0-9a-f]{16} sent, [0-9a-f]{16} arrived"),
]


@pytest.mark.parametrize(("change", "words"), TRANSIT, ids=[change for change, _ in TRANSIT])
async def test_bytes_spoilt_in_transit(bench, change, words):
    """B137: what arrived is not what was sent; the engine refuses it, and so does the one in its place."""
    await bench.pusher.push(0)
    await bench.engine.tell_transit.remote(change)
    pushing = bench.step(1)
    with pytest.raises(RunStopped, match=words):
        await pushing
    assert bench.names.count("push_retried") == bench.names.count("worker_replaced") == 1


@pytest.mark.parametrize("change", ["skip", "exchange"])
async def test_bytes_spoilt_in_transit_once_are_sent_again(bench, change):
    await bench.pusher.push(0)
    await bench.engine.tell_transit.remote(change, 1)
    metrics = await bench.step(1)
    assert bench.names == ["proven", "push_retried"]
    assert metrics["push/num_generations"] == 2
    await bench.agrees()


LOADER = [
    ("old", 0, r"differ from the learner's by .*; 0\.0001 at most is allowed"),
    ("old", 1, r"all weights times 1\.01562 moved its log-probabilities of the fixed tokens by 0, at least 0\.001 is due"),
    ("zero", 0, r"differ from the learner's by .*; 0\.0001 at most is allowed"),
    ("exchange", 0, r"differ from the learner's by .*; 0\.0001 at most is allowed"),
    ("zero", 2, r"pushed once more, they gave log-probabilities .* that differ by .* from before, 0 is allowed"),
    ("skip", 2, r"pushed once more, they gave log-probabilities .* that differ by .* from before, 0 is allowed"),
]


@pytest.mark.parametrize(("fault", "first", "words"), LOADER, ids=[f"{fault}-after-{first}" for fault, first, _ in LOADER])
async def test_a_loader_that_loads_wrongly_and_reports_success(bench, fault, first, words):
    """B137: ``first`` loads are right. The engine that comes in its place has loaded often enough to be wrong from its first on."""
    await bench.engine.tell_loader.remote("")
    await bench.learner.nudge.remote(1.01)  # what the engine still has from the last test is not what it is sent
    await bench.engine.tell_loader.remote(fault, first)
    with pytest.raises(RunStopped, match=r"rollout-0\.1 fails at version 0"):
        await bench.pusher.push(0)
    (retried,) = (fields for name, fields in bench.events if name == "push_retried")
    assert re.search(words, retried["reason"]), retried["reason"]
    assert bench.names == ["push_retried", "worker_lost", "worker_replaced"]


async def test_a_loader_that_fails_once_is_cured_by_the_retry(bench):
    await bench.learner.nudge.remote(1.01)
    await bench.engine.tell_transit.remote("skip", 1)
    await bench.pusher.push(0)
    assert bench.names == ["push_retried", "proven"]


async def test_a_loader_that_goes_wrong_later_is_told_by_the_mismatch(bench):
    await bench.pusher.push(0)
    await bench.step(1, **{"mismatch/same_version": 1e-6})
    await bench.engine.tell_loader.remote("skip")
    await bench.step(2, **{"mismatch/same_version": 1e-6})
    assert bench.names == ["proven"], "bytes are right, and nothing has been generated yet"
    with pytest.raises(RunStopped, match=r"rollout-0\.1 fails at version 3: .*differ from the learner's|does not"):
        await bench.step(3, **{"mismatch/same_version": 0.02})
    assert bench.names[1:] == ["mismatch", "proven_again", "push_retried", "worker_lost", "worker_replaced"]


async def test_the_ladder_with_an_engine_that_is_really_started_anew(shared):
    """Spoilt on the way to this worker only: its process is ended, the next one is proven and carries the next step."""
    made = []

    def make(slot, number):
        made.append(shared.start_engine(f"rollout-0.{number}"))
        return Worker(f"rollout-0.{number}", made[-1])

    class Ends(Crew):
        async def _end(self, worker):
            shared.engine = made[0] if made else shared.engine
            await super()._end(worker)

    bench = await shared.begin(Ends, make)
    first = bench.engine
    pid = ray.get(first.facts.remote())["pid"]
    await bench.pusher.push(0)
    await first.tell_transit.remote("zero")
    await bench.step(1)
    bench.engine = made[0]
    assert bench.names == ["proven", "push_aborted", "push_retried", "push_aborted", "worker_lost", "worker_replaced", "proven"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    await bench.step(2)
    await bench.agrees()
    assert [worker.name for worker in bench.fleet.workers] == ["rollout-0.1"]
    bench.end()


async def test_two_workers_make_the_completions_of_a_visit_and_no_two_visits_share_them(shared):
    """B123: two visits of one prompt, one a worker, four completions each at temperature 1. Of the eight at least seven differ; asked the
    other way round, each visit gets the same tokens from the other worker."""
    workers = [
        Worker(name, shared.start_engine(name)) for name in ("rollout-0", "rollout-1")
    ]  # of the shared one others took the stream
    bench = await shared.begin(workers=workers)
    await bench.pusher.push(0)
    assert [worker.name for worker in bench.fleet.workers] == ["rollout-0", "rollout-1"]
    config = load_config(["rollout.temperature=1", "rollout.max_new_tokens=16", "batch.group_size=4"])
    bench.fleet._request = material.request_maker(config, bench.stuff)
    prompt = bench.stuff.prompts.train[0]
    visits = [Visit(prompt.id, number, Purpose.TRAIN) for number in range(2)]
    made = {}
    for order in (visits, visits[::-1]):
        await bench.fleet.submit(order)  # one a worker, in this order
        finished = [item for _ in range(2) for item in await bench.fleet.next_finished()]
        assert {item.meta.visit: item.meta.worker for item in finished} == dict(
            zip(order, ("rollout-0", "rollout-1"), strict=True)
        )
        for item in finished:
            group = (await item.address.parcel)[item.address.place]
            tokens = [completion.token_ids.tolist() for completion in group.completions]
            assert made.setdefault(item.meta.visit, tokens) == tokens
    completions = [tuple(tokens) for of_visit in made.values() for tokens in of_visit]
    assert len(completions) == 8
    assert len(set(completions)) >= 7
    bench.end()
    for worker in workers:
        ray.kill(worker.actor)


async def test_untied_heads_are_two_tensors(ray_instance):
    """B135: the other layout of the head."""
    bench = await make_bench("false").begin()
    await bench.pusher.push(0)
    await bench.step(1)
    await bench.agrees()
    bench.end()
    for actor in (bench.engine, bench.learner):
        ray.kill(actor)
