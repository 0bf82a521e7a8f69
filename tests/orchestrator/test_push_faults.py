"""Order and timing of a push with everything that can go wrong in it: a real receiver and real bytes, but fake engines and learner."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from configs.schema import DeadlinesConfig, Dtype
from orchestrator import workers
from orchestrator.errors import RunStopped
from orchestrator.fleet import RayFleet, Worker
from orchestrator.handles import StepReport
from orchestrator.proof import FixedTokens
from orchestrator.push import RayPusher
from orchestrator.waits import DeadlinePassed, Waits
from orchestrator.workers import Crew
from rollout.engine import PushError, SwapReport, TokenScores
from rollout.receiving import PushReceiver
from rollout.records import Purpose, Visit
from rollout.weights import Bucket, Manifest, TensorSpec, digest_bytes

pytestmark = pytest.mark.timeout(20)

ROWS = [np.array([1, 2, 3], dtype=np.int32)]
NAMES = [f"layer.{i}.weight" for i in range(5)]
MOVED = StepReport({}, 1, moved=True)


def logps(values):
    """What a model of these weights says of the two scored tokens."""
    return np.array([values.sum(), values[0]], np.float32)


class FakeLearner:
    """Five tensors of one number, a bucket each."""

    def __init__(self):
        self.values = np.arange(1, 6, dtype=np.float32)
        self.lie = lambda specs: specs
        self.log = []
        self.hang = False

    async def buckets(self, generation, scale=1.0, receivers=()):
        self.log.append(("gather", generation, scale))
        self.specs, self.generation = [], generation
        try:
            for i, name in enumerate(NAMES):
                if self.hang:
                    await asyncio.sleep(60)
                data = np.frombuffer((self.values[i : i + 1] * np.float32(scale)).tobytes(), np.uint8)
                spec = TensorSpec(name, "float32", (1,), 4, digest_bytes(data))
                (spec,) = self.lie([spec])
                self.specs.append(spec)
                yield Bucket(generation, i, (spec,), (0,), data)
        finally:
            self.log.append(("drained", generation, scale))

    async def manifest(self):
        return Manifest(self.generation, len(NAMES), tuple(self.specs))

    async def score_tokens(self, rows, temperature):
        return [logps(self.values)]


class Call:
    def __init__(self, engine, function):
        self.engine, self.function = engine, function

    def remote(self, *arguments):
        return asyncio.ensure_future(self.engine.call(self.function, arguments))


class FakeEngine:
    """An actor whose ``faults`` say what happens at a call: a function of (call's name, its argument, how often it was called)."""

    def __init__(self, name, faults=lambda call, argument, number: None):
        self.name, self.faults = name, faults
        self.receiver, self.values, self.version = PushReceiver(), np.full(5, -7, np.float32), -1
        self.killed = asyncio.Event()
        self.log = []
        self.stuck = lambda: False  # loads nothing and says it did
        for function in ("facts", "receive", "swap", "score_tokens", "submit", "cancel"):
            setattr(self, function, Call(self, getattr(self, f"do_{function}")))
        self.groups = self

    def remote(self):
        return self.stream()

    async def stream(self):
        await self.killed.wait()
        raise ActorDiedError
        yield

    async def call(self, function, arguments):
        name = function.__name__.removeprefix("do_")
        self.log.append((name, *arguments[:1]))
        fault = self.faults(name, arguments[0] if arguments else None, sum(entry[0] == name for entry in self.log))
        if fault == "refuse":
            raise PushError("layer.3.weight: digest 0000000000000001 sent, 0000000000000002 arrived")
        if fault == "die":
            self.killed.set()
        if fault == "wait":
            await asyncio.sleep(0.3)
        if fault == "hang":
            await self.killed.wait()
        if self.killed.is_set():
            raise ActorDiedError
        await asyncio.sleep(0.001)
        return function(*arguments)

    def do_facts(self):
        return {"pid": 0, "node": ""}

    def do_receive(self, bucket):
        self.receiver.add(bucket)

    def do_swap(self, version, manifest):
        buckets = self.receiver.take(manifest)
        if not self.stuck():
            self.values = np.concatenate([bucket.data.view(np.float32) for bucket in buckets])
        self.version = version
        return SwapReport(version, len(buckets), manifest.num_bytes, 0, 0, 0.001)

    def do_score_tokens(self, rows, temperature):
        return [TokenScores(logps(self.values), np.ones(2, np.int32))]

    def do_submit(self, requests):
        assert sum(entry[0] == "swap" for entry in self.log) >= 3, "visits before its weights were proven"

    def do_cancel(self, visits):
        pass


class World:
    def __init__(self, monkeypatch, num_workers=2, *, dtype=Dtype.float32, faults=None, swap_waits=False, **deadlines):
        """``faults``: by a worker's name."""
        self.engines, self.events, self.faults = {}, [], faults or {}
        self.learner = FakeLearner()
        self.waits = Waits()
        deadlines = DeadlinesConfig(**({"receive_s": 0.1, "push_s": 5.0, "start_s": 5.0} | deadlines))
        self.fleet = RayFleet([], lambda visit: visit, self.waits, deadlines.heartbeat_s)

        async def end(crew, worker):
            worker.actor.killed.set()

        monkeypatch.setattr(Crew, "_end", end)
        self.crew = Crew(self.fleet, self.make, self.waits, deadlines, self.event)
        self.pusher = RayPusher(
            self.learner,
            self.crew,
            self.waits,
            deadlines,
            self.event,
            dtype=dtype,
            tokens=FixedTokens(ROWS, 1.0),
            swap_waits=swap_waits,
        )
        self.num_workers = num_workers

    def make(self, slot, number):
        name = f"rollout-{slot}" + (f".{number}" if number else "")
        self.engines[name] = FakeEngine(name, self.faults.get(name, lambda *_: None))
        return Worker(name, self.engines[name])

    def event(self, name, **fields):
        self.events.append((name, fields))

    def named(self, name):
        return [fields for event, fields in self.events if event == name]

    async def start(self):
        await self.crew.start([self.make(slot, 0) for slot in range(self.num_workers)])
        await self.pusher.push(0)
        self.events.clear()
        self.learner.log.clear()

    async def step(self, version, report=MOVED):
        await self.pusher.hold()
        if report.moved:
            self.learner.values = self.learner.values + np.float32(0.25)
        return await self.pusher.push(version, report)

    async def until(self, condition):
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)

    def in_use(self):
        return [worker.name for worker in self.fleet.workers]


@pytest.fixture
async def world(monkeypatch):
    made = []

    def make(*arguments, **keywords):
        made.append(World(monkeypatch, *arguments, **keywords))
        return made[-1]

    yield make
    for one in made:
        one.crew.close()
        one.fleet.close()


def at(call, number, fault):
    return lambda name, argument, times: fault if (name, times) == (call, number) else None


async def test_new_engines_are_proven_by_three_pushes_for_all_of_them_at_once(world):
    w = world()
    await w.crew.start([w.make(0, 0), w.make(1, 0)])
    assert w.in_use() == []
    await w.pusher.push(7)
    assert [entry for entry in w.learner.log if entry[0] == "gather"] == [
        ("gather", 1, 1.0),
        ("gather", 2, 1.015625),
        ("gather", 3, 1.0),
    ]
    assert w.in_use() == ["rollout-0", "rollout-1"]
    for fields in w.named("proven"):
        assert fields["version"] == 7
        assert fields["max_difference"] == fields["not_restored"] == 0
        assert fields["moved"] == pytest.approx(15 * 2**-6)  # the sum of 1 .. 5, scaled
    assert len(w.named("proven")) == 2
    assert {engine.version for engine in w.engines.values()} == {7}


@pytest.mark.parametrize("swap_waits", [True, False])
async def test_an_engine_that_first_ends_its_completions_is_waited_for(world, swap_waits):
    """``rollout.on_swap=finish``: a swap takes as long as the completions do, three times ``receive_s`` here."""
    w = world(faults={"rollout-0": at("swap", 4, "wait")}, swap_waits=swap_waits, generate_s=2.0)
    await w.start()
    await w.step(1)
    assert bool(w.named("worker_lost")) is not swap_waits


async def test_a_step_is_one_generation(world):
    w = world()
    await w.start()
    metrics = await w.step(1)
    assert w.learner.log == [("gather", 4, 1.0), ("drained", 4, 1.0)]
    assert metrics["push/num_generations"] == 1
    assert metrics["push/changed_frac"] == 1
    assert metrics["push/sent_bytes"] == 20
    assert metrics["push/num_replaced"] == 0
    assert w.events == []


def fails_in_bucket_3(fault):
    """Of the first step's push: the fourth that sends the engine five buckets."""
    return at("receive", 3 * 5 + 4, fault)


@pytest.mark.parametrize(("fault", "kind"), [("hang", "silent"), ("die", "dead")])
async def test_survivors_end_the_push_and_the_lost_worker_is_replaced_proven_and_in_use(world, fault, kind):
    w = world(faults={"rollout-1": fails_in_bucket_3(fault)})
    await w.start()
    metrics = await w.step(1)
    assert w.engines["rollout-0"].version == 1
    np.testing.assert_array_equal(w.engines["rollout-0"].values, w.learner.values)
    assert w.learner.log[:4] == [("gather", 4, 1.0), ("drained", 4, 1.0), ("gather", 5, 1.0), ("drained", 5, 1.0)]
    assert metrics["push/num_generations"] == 2
    assert metrics["push/num_replaced"] == 1
    (aborted,), (lost,) = w.named("push_aborted"), w.named("worker_lost")
    assert aborted["generation"] == 4
    assert list(aborted["reasons"]) == ["rollout-1"]
    assert (lost["worker"], lost["kind"]) == ("rollout-1", kind)
    if fault == "hang":
        assert "bucket 3 of generation 4" in lost["reason"]
    assert [entry for entry in w.engines["rollout-1"].log if entry[0] == "swap"] == [("swap", 0), ("swap", -1), ("swap", 0)]
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])
    (proven,) = w.named("proven")
    assert (proven["worker"], proven["version"]) == ("rollout-1.1", 1)
    await w.step(2)
    assert {w.engines[name].version for name in w.in_use()} == {2}


async def test_who_has_swapped_gets_no_second_generation(world):
    w = world(faults={"rollout-1": at("swap", 4, "die")})
    await w.start()
    metrics = await w.step(1)
    assert metrics["push/num_generations"] == 1
    assert sum(entry == ("swap", 1) for entry in w.engines["rollout-0"].log) == 1


async def test_a_refused_push_is_sent_once_more_to_those_who_lack_it(world):
    """As often as steps come, one refusal in each: a step that got there takes the worker back to the first rung."""
    w = world(faults={"rollout-1": lambda call, argument, number: "refuse" if call == "swap" and number in (4, 6, 8) else None})
    await w.start()
    for version in (1, 2, 3):
        metrics = await w.step(version)
        assert metrics["push/num_generations"] == 2
        assert metrics["push/num_replaced"] == 0
        retried = w.named("push_retried")[-1]
        assert (retried["worker"], retried["version"]) == ("rollout-1", version)
        assert "digest 0000000000000001 sent, 0000000000000002 arrived" in retried["reason"]
        assert w.engines["rollout-1"].version == version
        assert sum(entry == ("swap", version) for entry in w.engines["rollout-0"].log) == 1
    assert w.in_use() == ["rollout-0", "rollout-1"]


async def test_a_lost_worker_gets_no_visit_from_then_on(world):
    """Also while its process is still there."""
    w = world()
    await w.start()
    w.crew.lose(w.crew.proven[1], "silent", "said nothing")
    assert w.in_use() == ["rollout-0"]


async def test_the_ladder_ends_with_both_numbers(world):
    """Refused, sent once more, a new engine, and that one refuses too."""
    refuses = lambda call, argument, number: "refuse" if call == "swap" and argument == 1 else None  # noqa: E731
    w = world(faults={"rollout-1": refuses, "rollout-1.1": refuses})
    await w.start()
    await w.step(1)
    assert w.engines["rollout-0"].version == 1, "the other engine goes on meanwhile"
    with pytest.raises(
        RunStopped, match=r"rollout-1\.1 fails at version 1.*digest 0000000000000001 sent, 0000000000000002 arrived"
    ):
        await w.fleet.next_finished()
    assert [name for name, _ in w.events] == ["push_retried", "worker_lost", "worker_replaced"]


async def test_an_engine_that_loads_only_once_is_told(world):
    """It reports success, and agrees with the learner after the first push."""
    w = world(1)
    make = w.make

    def make_stuck(slot, number):
        worker = make(slot, number)
        worker.actor.stuck = lambda: sum(entry[0] == "swap" for entry in worker.actor.log) > 1
        return worker

    w.crew._make = make_stuck
    await w.crew.start([make_stuck(0, 0)])
    with pytest.raises(RunStopped, match=r"all weights times 1.01562 moved .* by 0, at least 0.001 is due"):
        await w.pusher.push(0)
    assert w.in_use() == []


async def test_an_engine_that_never_loads_is_told(world):
    w = world(1)
    make = w.make

    def make_deaf(slot, number):
        worker = make(slot, number)
        worker.actor.stuck = lambda: True
        return worker

    w.crew._make = make_deaf
    await w.crew.start([make_deaf(0, 0)])
    # 15 and 1 by the learner, -35 and -7 by the engine
    with pytest.raises(RunStopped, match=r"differ from the learner's by 50 at most and 29 on average; 0.0001 at most is allowed"):
        await w.pusher.push(0)
    assert [name for name, _ in w.events] == ["push_retried", "worker_lost", "worker_replaced"]


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (
            lambda s: dataclasses.replace(s, name="new.weight") if s.name == NAMES[2] else s,
            "layer.2.weight is missing; new.weight is new",
        ),
        (
            lambda s: dataclasses.replace(s, dtype="bfloat16", shape=(2,)) if s.name == NAMES[2] else s,
            r"layer.2.weight is bfloat16 \(2,\), was float32 \(1,\)",
        ),
    ],
)
async def test_a_sender_that_is_wrong_consistently_is_asked_again_and_then_stops_the_run(world, lie, text):
    w = world()
    await w.start()
    w.learner.lie = lambda specs: [lie(spec) for spec in specs]
    with pytest.raises(RunStopped, match=f"the learner sent 5 tensors, 5 before, and they are not the same: {text}"):
        await w.step(1)
    assert {engine.version for engine in w.engines.values()} == {0}, "no engine swapped"
    assert [entry for entry in w.learner.log if entry[0] == "gather"] == [("gather", 4, 1.0), ("gather", 5, 1.0)]
    assert len(w.named("push_retried")) == 1


async def test_an_update_that_changed_nothing_stops_the_run(world):
    w = world()
    await w.start()
    with pytest.raises(RunStopped, match="0 of 5 tensors changed although the update moved the weights"):
        await w.pusher.push(1, MOVED)
    assert len(w.named("push_retried")) == 1


async def test_a_step_that_did_not_move_may_change_nothing(world):
    w = world()
    await w.start()
    metrics = await w.step(1, StepReport({}, 1, moved=False))
    assert metrics["push/changed_frac"] == 0


async def test_bfloat16_may_hide_two_small_updates_in_a_row_and_no_third(world):
    w = world(dtype=Dtype.bfloat16)
    await w.start()
    for version in (1, 2):
        await w.pusher.push(version, MOVED)
    await w.step(3)
    for version in (4, 5):
        await w.pusher.push(version, MOVED)
    assert len(w.named("push_unchanged")) == 4
    with pytest.raises(RunStopped, match="0 of 5 tensors changed"):
        await w.pusher.push(6, MOVED)


async def test_old_weights_sent_once_are_cured_by_gathering_anew(world):
    w = world()
    await w.start()
    old, new = w.learner.values, w.learner.values + np.float32(0.25)
    gather = w.learner.buckets

    def stale_once(generation, scale=1.0, receivers=()):
        w.learner.values = old if generation == 4 else new
        return gather(generation, scale)

    w.learner.buckets = stale_once
    await w.pusher.push(1, MOVED)
    np.testing.assert_array_equal(w.engines["rollout-0"].values, new)


async def test_with_no_engine_left_the_push_waits_for_the_next_one(world):
    w = world(1, faults={"rollout-0": fails_in_bucket_3("hang")})
    await w.start()
    metrics = await w.step(1)
    assert w.in_use() == ["rollout-0.1"]
    assert w.engines["rollout-0.1"].version == 1
    assert metrics["push/num_replaced"] == 1


async def test_the_digest_is_that_of_the_weights_which_a_push_without_survivors_left_to_the_next_engine(world):
    w = world(1, faults={"rollout-0": fails_in_bucket_3("die")})
    await w.start()
    before = w.pusher.digest
    await w.step(1)
    assert w.in_use() == ["rollout-0.1"]
    assert w.pusher.digest != before
    assert w.pusher.digest == f"{(await w.learner.manifest()).digest:016x}"


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_an_engine_that_falls_silent_in_its_proof_is_replaced(world, number):
    """At its first, second or third scoring. The run goes on: the push must not pass its own deadline first."""
    w = world(faults={"rollout-1": at("score_tokens", number, "hang")}, push_s=1.0)
    await w.crew.start([w.make(slot, 0) for slot in range(2)])
    await w.pusher.push(0)
    (lost,) = w.named("worker_lost")
    assert (lost["worker"], lost["kind"]) == ("rollout-1", "silent")
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])


async def test_engines_in_doubt_that_die_while_they_are_proven_again_are_lost_and_no_fault_of_ours(world):
    """Two are stuck; while the visits of the first are withdrawn, the stream of the second ends."""
    w = world(3)
    await w.start()
    bad = [w.engines["rollout-0"], w.engines["rollout-1"]]
    swaps = len([entry for entry in bad[0].log if entry[0] == "swap"])
    for engine in bad:
        engine.stuck = lambda engine=engine: len([entry for entry in engine.log if entry[0] == "swap"]) == swaps + 1

    def dies(call, argument, number):
        if call == "cancel":  # rollout-0 is being withdrawn: rollout-1 dies meanwhile
            bad[1].killed.set()
            return "wait"
        return None

    bad[0].faults = dies
    await w.step(1, StepReport({"mismatch/same_version": 0.5}, 1, moved=True))
    assert [lost["worker"] for lost in w.named("worker_lost")] == ["rollout-1"]
    await w.until(lambda: sorted(w.in_use()) == ["rollout-0", "rollout-1.1", "rollout-2"])
    assert {w.engines[name].version for name in w.in_use()} == {1}


async def test_an_engine_that_dies_between_its_last_score_and_its_proof_is_lost(world):
    """Two are in doubt; while the first is taken back into use, the stream of the second ends."""
    w = world(2)
    await w.start()
    for engine in w.engines.values():
        swaps = len([entry for entry in engine.log if entry[0] == "swap"])
        engine.stuck = lambda engine=engine, swaps=swaps: len([e for e in engine.log if e[0] == "swap"]) == swaps + 1
    visit = Visit("p0", 0, Purpose.TRAIN)

    def dies(call, argument, number):
        if call == "submit":
            w.engines["rollout-1"].killed.set()
            return "wait"
        return None

    w.engines["rollout-0"].faults = dies
    doubt = w.crew.doubt

    async def doubted(worker):
        await doubt(worker)
        if not w.fleet.workers:
            await w.fleet.submit([visit])  # waits for the first that is taken back

    w.crew.doubt = doubted
    await w.step(1, StepReport({"mismatch/same_version": 0.5}, 1, moved=True))
    assert [lost["worker"] for lost in w.named("worker_lost")] == ["rollout-1"]
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])


async def test_a_fault_of_ours_behind_the_end_of_a_stream_ends_the_run(world):
    """Nobody awaits the task that follows a stream: what it raises would leave an evaluation waiting."""

    def refuses(call, argument, number):
        if (call, number) == ("submit", 2):
            raise ValueError("visits submitted while the same are open")

    w = world(faults={"rollout-0": refuses, "rollout-1": at("submit", 1, "die")})
    await w.start()
    with pytest.raises(ValueError, match="submitted while the same are open"):
        async with asyncio.timeout(2):
            await w.fleet.evaluate([Visit(f"p{i}", 0, Purpose.EVAL) for i in range(2)])


async def test_what_is_cancelled_while_a_worker_comes_into_use_is_not_asked(world):
    w = world(1)
    await w.start()
    (worker,) = w.crew.proven
    w.fleet.remove(worker)
    visit = Visit("p0", 0, Purpose.TRAIN)
    await w.fleet.submit([visit])  # waits
    async with w.fleet._order:  # somebody else's call is under way
        cancelling = asyncio.create_task(w.fleet.cancel([visit]))
        coming = asyncio.create_task(w.fleet.add(worker))
        await asyncio.sleep(0.01)
    await asyncio.gather(coming, cancelling)
    assert not [entry for entry in w.engines[worker.name].log if entry[0] == "submit" and entry[1]]


async def test_what_is_cancelled_while_its_worker_is_being_ended_is_not_told_of_as_lost(world):
    """A stopped worker is lost seconds before its stream ends. The loop may have asked the visit of another by then, and would ask it a
    third time: an engine that has it open refuses it, which ends the run."""
    w = world()
    await w.start()
    visits = [Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(4)]
    await w.fleet.submit(visits)  # the second and the fourth go to rollout-1
    stopped = w.crew.proven[1]
    w.fleet.remove(stopped)
    await w.fleet.cancel([visits[3]])
    assert not [entry for entry in w.engines["rollout-1"].log if entry[0] == "cancel"], "it hears nothing any more"
    await w.fleet.submit([visits[3]])
    stopped.actor.killed.set()
    lost = await w.fleet.next_lost()
    assert (lost.worker, lost.visits) == ("rollout-1", (visits[1],))


@pytest.mark.parametrize("changed", [True, False])
async def test_no_worker_is_proven_while_the_learner_is_busy(world, changed):
    w = world(faults={"rollout-1": at("submit", 1, "die")})
    await w.start()
    await w.pusher.hold()
    w.learner.log.clear()
    visits = [Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(4)]
    await w.fleet.submit(visits)
    lost = await w.fleet.next_lost()
    assert (lost.worker, lost.reason) == ("rollout-1", "lost_worker")
    assert set(lost.visits) == {visits[1], visits[3]}
    await w.until(lambda: w.named("worker_replaced"))
    await asyncio.sleep(0.05)
    assert w.learner.log == []
    if changed:
        await w.pusher.push(1, StepReport({}, 1, moved=False))
    else:
        w.pusher.go_on()
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])
    assert w.engines["rollout-1.1"].version == changed


async def test_visits_wait_where_no_worker_is_left(world):
    """B140: the first request of the new engine comes after its push (the fake asserts that), with no worker in between."""
    w = world(1, faults={"rollout-0": at("submit", 1, "die")})
    await w.start()
    visit = Visit("p0", 0, Purpose.TRAIN)
    await w.fleet.submit([visit])
    lost = await w.fleet.next_lost()
    await w.fleet.submit(lost.visits)
    await w.until(lambda: w.in_use() == ["rollout-0.1"])
    await w.until(lambda: ("submit", [visit]) in w.engines["rollout-0.1"].log)


async def test_evaluation_visits_of_a_lost_worker_are_asked_of_the_others(world):
    """B142: those it goes on with take no push until it ends, although the new worker is pushed and proven meanwhile."""
    w = world(faults={"rollout-1": at("submit", 1, "die")})
    await w.start()
    survivor = w.engines["rollout-0"]
    num_received = sum(entry[0] == "receive" for entry in survivor.log)
    visits = [Visit(f"p{i}", 0, Purpose.EVAL) for i in range(2)]
    asking = asyncio.create_task(w.fleet.evaluate(visits))
    await w.until(lambda: ("submit", [visits[1]]) in survivor.log)
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])
    assert sum(entry[0] == "receive" for entry in survivor.log) == num_received
    asking.cancel()


async def test_a_place_that_is_filled_too_often_stops_the_run(world):
    """B168: every engine of the place fails."""
    w = world(faults={f"rollout-1.{n}": at("facts", 1, "die") for n in range(1, 9)} | {"rollout-1": fails_in_bucket_3("die")})
    await w.start()
    await w.step(1)
    with pytest.raises(RunStopped, match=r"rollout-1\.3 is lost .*its place was filled 3 times already"):
        await w.fleet.next_finished()
    assert workers.MOST_REPLACEMENTS == 3


async def test_a_step_that_all_engines_get_to_ends_the_count_of_failures(world):
    """B168: of a place two fail to start after one that died, the next serves a step; then the same again, six in all."""
    dies_at_start = {f"rollout-1.{n}": at("facts", 1, "die") for n in (1, 2, 4, 5)}
    dies_in_step_3 = {"rollout-1.3": at("receive", 3 * 5 + 5 + 4, "die")}  # its proof, step 2, and three buckets went before
    w = world(faults=dies_at_start | dies_in_step_3 | {"rollout-1": fails_in_bucket_3("die")})
    await w.start()
    for version, in_use in ((1, "rollout-1.3"), (2, "rollout-1.3"), (3, "rollout-1.6")):
        await w.step(version)
        await w.until(lambda in_use=in_use: w.in_use() == ["rollout-0", in_use])
        assert {w.engines[name].version for name in w.in_use()} == {version}
    assert [lost["worker"] for lost in w.named("worker_lost")] == ["rollout-1", *(f"rollout-1.{n}" for n in range(1, 6))]
    assert len(w.named("worker_lost")) > workers.MOST_REPLACEMENTS


async def test_two_pushes_at_once_go_one_after_the_other(world):
    """B142."""
    w = world()
    await w.start()
    await asyncio.gather(*(w.pusher.push(version, StepReport({}, 1, moved=False)) for version in (1, 2)))
    assert w.learner.log == [("gather", 4, 1.0), ("drained", 4, 1.0), ("gather", 5, 1.0), ("drained", 5, 1.0)]
    assert {engine.version for engine in w.engines.values()} == {2}


async def test_after_an_exception_inside_a_push_the_next_one_goes(world):
    """B142. The deadline names the push and what it waited for."""
    w = world(push_s=0.2)
    await w.start()
    w.learner.hang = True
    with pytest.raises(DeadlinePassed, match=r"push did not finish 'version 1' within 0\.2 s"):
        await w.step(1)
    w.learner.hang = False
    await w.pusher.push(2, StepReport({}, 1, moved=False))
    assert {engine.version for engine in w.engines.values()} == {2}


async def test_a_mismatch_has_every_engine_proven_again_and_what_a_bad_one_made_is_not_used(world):
    w = world()
    await w.start()
    await w.step(1, StepReport({"mismatch/same_version": 1e-6}, 1, moved=True))
    await w.fleet.submit([Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(2)])
    bad = w.engines["rollout-1"]
    swaps = len([entry for entry in bad.log if entry[0] == "swap"])
    bad.stuck = lambda: len([entry for entry in bad.log if entry[0] == "swap"]) == swaps + 1
    await w.step(2, StepReport({"mismatch/same_version": 0.05}, 1, moved=True))
    (alarm,) = w.named("mismatch")
    assert alarm["value"] == 0.05
    assert alarm["allowed"] == 1e-3
    lost = await w.fleet.next_lost()
    assert (lost.worker, lost.reason, lost.visits) == ("rollout-1", "unproven", (Visit("p1", 0, Purpose.TRAIN),))
    assert [bool(fields["problem"]) for fields in w.named("proven_again")] == [False, True]
    assert len(w.named("push_retried")) == 1
    assert w.in_use() == ["rollout-0", "rollout-1"], "the same version once more has cured it"
    np.testing.assert_array_equal(bad.values, w.learner.values)


async def test_a_false_alarm_costs_a_proof_and_nothing_else(world):
    w = world()
    await w.start()
    await w.step(1, StepReport({"mismatch/same_version": 0.5}, 1, moved=True))
    assert [name for name, _ in w.events] == ["mismatch", "proven_again", "proven_again"]
    assert w.in_use() == ["rollout-0", "rollout-1"]


async def test_a_learner_that_does_not_score_for_the_new_proof_is_a_push_that_is_late(world):
    w = world(push_s=1.5)
    await w.start()
    w.learner.score_tokens = lambda rows, temperature: asyncio.sleep(60)
    with pytest.raises(DeadlinePassed, match=r"push did not finish 'version 1' within 1\.5 s"):
        async with asyncio.timeout(5):
            await w.step(1, StepReport({"mismatch/same_version": 0.5}, 1, moved=True))


def raises(times):
    """An engine whose every call raises so often: its own words and its traceback come back with Ray's."""

    def fault(call, argument, number):
        if call == "submit" and times:
            times.pop()
            raise RayTaskError(
                "submit",
                "Traceback (most recent call last):\n  engine.py, line 7\nRuntimeError: no kernel",
                RuntimeError("no kernel"),
            )

    return fault


async def test_an_engine_that_raises_on_every_call_ends_the_run_with_its_words_and_the_count(world):
    """B168, first part: its visits are asked of each that takes its place, and the traceback is told each time."""
    endless = [None] * 1000
    w = world(1, faults={f"rollout-0{n}": raises(endless) for n in ("", ".1", ".2", ".3", ".4")})
    await w.start()
    visit = Visit("p0", 0, Purpose.TRAIN)

    async def asking():
        await w.fleet.submit([visit])
        while True:
            await w.fleet.submit((await w.fleet.next_lost()).visits)

    again = asyncio.create_task(asking())
    async with asyncio.timeout(10):
        with pytest.raises(
            RunStopped, match=r"rollout-0\.3 is lost \(RuntimeError: no kernel\), and its place was filled 3 times"
        ) as stopped:
            await w.fleet.next_finished()
    again.cancel()
    assert "engine.py, line 7" in str(stopped.value.__cause__)
    lost = w.named("worker_lost")
    assert [(fields["worker"], fields["kind"]) for fields in lost] == [
        (f"rollout-0{n}", "failed") for n in ("", ".1", ".2", ".3")
    ]
    assert all("engine.py, line 7" in fields["traceback"] for fields in lost)


async def test_an_engine_that_raises_twice_and_then_works_is_forgiven(world):
    """B168, second part: two of five calls raise; the step completes, and its push gives the place all its replacements again."""
    twice = [None] * 2
    w = world(1, faults={f"rollout-0{n}": raises(twice) for n in ("", ".1", ".2")})
    await w.start()
    visit = Visit("p0", 0, Purpose.TRAIN)
    await w.fleet.submit([visit])
    for _ in range(2):
        await w.fleet.submit((await w.fleet.next_lost()).visits)
    await w.until(lambda: w.in_use() == ["rollout-0.2"])
    await w.until(lambda: ("submit", [visit]) in w.engines["rollout-0.2"].log)
    assert w.crew._since_proof[0] == 2
    await w.step(1)
    assert w.crew._since_proof[0] == 0
    assert len(w.named("worker_lost")) == 2


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("killed by Ray's memory monitor"), ActorUnavailableError("no connection", b"1" * 16)]
)
async def test_whatever_ray_calls_the_end_of_a_worker_it_is_replaced(world, error):
    def dies(call, argument, number):
        if call == "submit":
            raise error

    w = world(faults={"rollout-1": dies})
    await w.start()
    await w.fleet.submit([Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(2)])
    lost = await w.fleet.next_lost()
    assert (lost.worker, lost.reason, len(lost.visits)) == ("rollout-1", "lost_worker", 1)
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])


async def test_a_visit_that_no_engine_can_take_is_no_fault_of_the_worker(world):
    def refuses(call, argument, number):
        if call == "submit":
            raise RayTaskError("submit", "ValueError: too long", ValueError("too long")).as_instanceof_cause()

    w = world(faults={"rollout-1": refuses})
    await w.start()
    with pytest.raises(ValueError, match="too long"):
        await w.fleet.submit([Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(2)])
    assert w.in_use() == ["rollout-0", "rollout-1"]


async def test_evaluation_visits_of_a_worker_in_doubt_are_asked_of_the_others(world):
    w = world()
    await w.start()
    visits = [Visit(f"p{i}", 0, purpose) for i, purpose in enumerate([Purpose.TRAIN, Purpose.EVAL] * 2)]
    asking = asyncio.create_task(w.fleet.evaluate([visit for visit in visits if visit.purpose is Purpose.EVAL]))
    await asyncio.sleep(0)
    await w.fleet.submit([visit for visit in visits if visit.purpose is Purpose.TRAIN])
    (worker,) = [worker for worker in w.fleet.workers if worker.name == "rollout-1"]
    mine = w.fleet._outstanding["rollout-1"]
    await w.crew.doubt(worker)
    lost = await w.fleet.next_lost()
    assert set(lost.visits) == {visit for visit in mine if visit.purpose is Purpose.TRAIN}
    left = [visit for visit in mine if visit.purpose is Purpose.EVAL]
    assert left
    assert w.engines["rollout-0"].log[-1] == ("submit", left)
    asking.cancel()


async def test_a_slot_without_a_place_waits_while_the_others_go_on(world):
    """The node of rollout-1 is gone. It is told once, costs no try, and is filled when there is a place."""
    places = {0, 1}
    w = world(faults={"rollout-1": at("submit", 1, "die")}, start_s=0.5)
    w.crew._has_place = places.__contains__
    lines = []
    w.crew._tell = lines.append
    await w.start()
    places.remove(1)
    await w.fleet.submit([Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(2)])
    lost = await w.fleet.next_lost()
    await w.fleet.submit(lost.visits)
    for version in (1, 2):
        await w.step(version)
        await asyncio.sleep(0.5)
    assert w.in_use() == ["rollout-0"]
    assert w.named("no_place") == [{"worker": "rollout-1"}]
    assert ["no place for another worker instead of rollout-1" in line for line in lines] == [True]
    places.add(1)
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.1"])
    assert w.engines["rollout-1.1"].version == 2


async def test_with_no_worker_and_no_place_the_run_stops_with_the_reason(world):
    places = {0}
    w = world(1, faults={"rollout-0": at("submit", 1, "die")}, start_s=1.0)
    w.crew._has_place = places.__contains__
    await w.start()
    places.clear()
    await w.fleet.submit([Visit("p0", 0, Purpose.TRAIN)])
    await w.fleet.next_lost()
    assert not w.fleet.manned.is_set()
    began = time.monotonic()
    with pytest.raises(
        RunStopped, match=r"no rollout worker is left, and for 1 s \(deadlines\.start_s\) there was no place .* rollout-0"
    ):
        async with asyncio.timeout(10):
            await w.fleet.next_finished()
    assert time.monotonic() - began >= 1.0


async def test_a_place_that_is_lost_while_its_worker_starts_costs_no_try(world, monkeypatch):
    """The node of the next worker leaves before that has started: Ray would have it wait for ever."""
    places, killed = {0, 1}, []
    monkeypatch.setattr(workers.ray, "kill", killed.append)
    w = world(faults={"rollout-1": at("submit", 1, "die"), "rollout-1.1": at("facts", 1, "hang")})
    w.crew._has_place = places.__contains__
    await w.start()
    await w.fleet.submit([Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(2)])
    await w.until(lambda: "rollout-1.1" in w.engines)
    places.remove(1)
    await w.until(lambda: w.named("no_place"))
    assert killed == [w.engines["rollout-1.1"]]
    places.add(1)
    await w.until(lambda: w.in_use() == ["rollout-0", "rollout-1.2"])
    assert [fields["worker"] for fields in w.named("worker_lost")] == ["rollout-1"]
