"""Engines and learner in turn: the order over fakes that keep account of the device, and a whole run on the real parts."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from configs.compose import load_config
from configs.schema import DeadlinesConfig
from orchestrator import cluster, workers
from orchestrator.errors import RunStopped
from orchestrator.fleet import Worker
from orchestrator.handles import StepReport
from orchestrator.job import Job
from orchestrator.material import gather_material
from orchestrator.stages import Batch
from orchestrator.turns import Turns, widened
from orchestrator.waits import DeadlinePassed, Waits
from rollout.engine import SleepReport

STEP = [
    "hold push",
    "hold crew",
    "cancel",
    "sleep w0",
    "sleep w1",
    "hold crew",
    "reload",
    "prepare",
    "train",
    "offload",
    "go on",
    "wake weights w0",
    "wake weights w1",
    "deliver 1",
    "wake cache w0",
    "wake cache w1",
    "proofs",
]
PHASES = ["sleep", "reload", "prepare", "train", "offload", "wake_weights", "push", "wake_cache"]


class Engine:
    def __init__(self, world, name):
        self.sleep = SimpleNamespace(remote=lambda: world.do(f"sleep {name}", SleepReport(1000, 0.0)))
        self.wake = SimpleNamespace(remote=lambda what: world.do(f"wake {what} {name}", None))


class World:
    """Learner, pusher and crew in one. ``fail`` names the call that raises, ``hang`` one that never ends."""

    def __init__(self, *, fail="", hang="", deadlines=None):
        self.log, self.events, self.fail, self.hang = [], [], fail, hang
        self.on_delivered = None
        self.new, self.proven = [], [Worker(name, Engine(self, name)) for name in ("w0", "w1")]
        learner = SimpleNamespace(
            prepare=lambda batch: self.do("prepare", {"batch/num_samples": 3.0}),
            train=lambda: self.do("train", StepReport({}, 1, True)),
            offload=lambda: self.do("offload", 500),
            reload=lambda: self.do("reload", None),
        )
        pusher = SimpleNamespace(hold=lambda: self.do("hold push", None), push=self.push)
        crew = SimpleNamespace(
            new=self.new,
            proven=self.proven,
            hold=lambda: self.do("hold crew", None),
            go_on=lambda: self.log.append("go on"),
            has=lambda worker: worker in self.new or worker in self.proven,
            lose=self.lose,
        )
        self.pusher = pusher
        deadlines = deadlines or DeadlinesConfig()
        event = lambda name, **fields: self.events.append((name, fields))  # noqa: E731
        self.turns = Turns(learner, pusher, crew, lambda: self.do("cancel", None), Waits(), deadlines, event)

    async def do(self, call, result):
        self.log.append(call)
        await asyncio.sleep(0)
        if call == self.fail:
            raise RayError(f"{call} failed")
        if call == self.hang:
            await asyncio.Event().wait()
        return result

    async def push(self, version, report=None):
        await self.do(f"deliver {version}", None)
        await self.pusher.on_delivered()
        self.log.append("proofs")
        return {"push/sent_bytes": 8.0}

    def lose(self, worker, kind, reason):
        self.log.append(f"lose {worker.name}: {kind}, {reason}")
        self.proven.remove(worker)

    async def step(self, version=1):
        prepared = await self.turns.prepare(Batch(version, version - 1, ()))
        await self.turns.hold()
        report = await self.turns.train()
        return prepared | await self.turns.push(version, report)

    def phases(self):
        return [fields["phase"] for _, fields in self.events]


@pytest.mark.timeout(20)
async def test_a_step_goes_through_its_phases_in_order_and_tells_of_each():
    world = World()
    metrics = await world.step()
    second = STEP.index("train")
    assert world.log == [*STEP[:second], "hold push", *STEP[second:]]
    assert world.phases() == PHASES
    freed = {fields["phase"]: fields["freed_bytes"] for _, fields in world.events if fields["freed_bytes"]}
    assert freed == {"sleep": {"w0": 1000, "w1": 1000}, "offload": {"learner": 500}}
    assert metrics.keys() == {"batch/num_samples", "push/sent_bytes", *(f"time/turn_{phase}_s" for phase in PHASES)}
    world.log.clear()
    await world.step(2)
    assert [call.replace("2", "1") for call in world.log] == [*STEP[:second], "hold push", *STEP[second:]]


@pytest.mark.timeout(20)
async def test_the_first_push_wakes_nobody_and_the_states_are_laid_aside_before_it():
    world = World()
    await world.turns.lay_aside()
    await world.pusher.push(0)
    assert world.log == ["offload", "deliver 0", "proofs"]


@pytest.mark.timeout(20)
async def test_a_checkpoint_between_steps_is_a_turn_of_its_own_that_ends_with_the_same_weights():
    world = World()
    await world.step()
    world.log.clear()
    await world.turns.to_learner()
    await world.turns.to_learner()  # it is the learner's already
    world.log.append("save")
    await world.turns.to_engines(1)
    await world.turns.to_engines(1)
    first, last = STEP.index("prepare"), STEP.index("offload")
    assert world.log == [*STEP[:first], "save", *STEP[last:]]
    await world.step(2)
    assert world.log[-1] == "proofs"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("call", ["sleep w0", "wake weights w0", "wake cache w0"])
@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_a_worker_that_fails_in_a_phase_is_lost_and_the_turn_goes_on_with_the_others(call, how):
    world = World(**{how: call}, deadlines=DeadlinesConfig(turn_s=0.1))
    await world.step()
    (lost,) = [line for line in world.log if line.startswith("lose")]
    words = f"dead, RayError: {call} failed" if how == "fail" else "silent, w0 did not finish '.*' within 0.1 s"
    assert re.fullmatch(f"lose w0: {words}", lost)
    after = world.log[world.log.index(lost) :]
    assert not [line for line in after if line.endswith("w0")]
    assert world.phases() == PHASES
    if call == "sleep w0":  # its process is gone before the learner takes the device
        assert after[1:3] == ["hold crew", "reload"]
    assert world.log[-1] == "proofs"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("call", ["hold push", "hold crew", "cancel", "reload", "prepare", "train", "offload", "deliver 1"])
@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_a_learner_or_push_that_fails_ends_the_step_there_and_nobody_takes_a_device_in_doubt(call, how):
    short = {name: 0.1 for name in ("turn_s", "start_s", "prepare_s", "train_s", "close_s")}
    world = World(**{how: call}, deadlines=DeadlinesConfig(**short))
    with pytest.raises(RayError if how == "fail" else (DeadlinePassed, TimeoutError)):
        await asyncio.wait_for(world.step(), 1)  # the pusher has deadlines of its own
    assert world.log[-1] == call
    if call in ("prepare", "train"):  # it is still the learner's turn: what is whole can be saved
        await world.turns.to_learner()
        return
    for take in (world.turns.to_learner(), world.turns.to_engines(0)):
        with pytest.raises(RunStopped, match="only half-way"):
            await take
    assert world.log[-1] == call


@pytest.mark.timeout(20)
async def test_a_worker_that_is_new_sleeps_too_and_one_started_in_the_engines_turn_is_not_woken():
    world = World()
    world.new.append(Worker("w2", Engine(world, "w2")))
    await world.turns.to_learner()
    world.new.append(Worker("w3", Engine(world, "w3")))
    await world.turns.to_engines(0)
    assert {"sleep w2", "wake weights w2", "wake cache w2"} <= set(world.log)
    assert not [line for line in world.log if line.endswith("w3")]


@pytest.mark.timeout(20)
async def test_no_worker_starts_in_the_learners_turn_and_the_turn_waits_for_one_that_does(monkeypatch):
    """What Turns asks of the real crew: hold and go_on."""
    monkeypatch.setattr(workers.ray, "kill", lambda actor: None)
    monkeypatch.setattr(workers, "whereabouts", lambda name, actor: None)
    made, ready = [], asyncio.Event()

    async def facts():
        await ready.wait()
        return {}

    def make(slot, number):
        made.append((slot, number))
        return Worker(f"w{slot}.{number}", SimpleNamespace(facts=SimpleNamespace(remote=facts)))

    fleet = SimpleNamespace(on_lost=None, remove=lambda worker: None, fail=lambda error: pytest.fail(repr(error)))
    crew = workers.Crew(fleet, make, Waits(), DeadlinesConfig(), lambda name, **fields: None)
    first = [make(slot, 0) for slot in range(2)]
    ready.set()
    await crew.start(first)
    crew._facts.clear()  # no process stands behind these
    ready.clear()
    crew.lose(first[0], "dead", "gone")
    async with asyncio.timeout(5):
        while made[2:] != [(0, 1)]:
            await asyncio.sleep(0.01)
    hold = asyncio.create_task(crew.hold())
    await asyncio.sleep(0.2)
    assert not hold.done(), "a worker that is being started has the device"
    ready.set()
    crew.go_on()
    await hold
    await crew.hold()
    assert [worker.name for worker in crew.new] == ["w1.0", "w0.1"]
    crew.lose(first[1], "dead", "gone")
    await crew.hold()
    await asyncio.sleep(0.1)
    assert made[2:] == [(0, 1)]
    crew.go_on()
    await asyncio.sleep(0.1)
    assert made[2:] == [(0, 1), (1, 1)]
    crew.close()


def test_the_loop_waits_for_the_phases_within_prepare_and_push_as_well():
    deadlines = widened(DeadlinesConfig(prepare_s=1, push_s=2, turn_s=10, start_s=100, close_s=5))
    assert deadlines.prepare_s == 1 + 3 * 10 + 2 + 100 + 5  # what they generate ends, engines sleep, states come back
    assert deadlines.push_s == 2 + 3 * 10
    assert deadlines.train_s == DeadlinesConfig().train_s


# ---- a whole run ----------------------------------------------------------------------------------------------------

CONFIG = [
    "model.embedded.steps=2",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "steps=2",
    "rollout.when_short=carry",
    "evaluation.before=false",
    "evaluation.after=true",
    "evaluation.every=1",
    "evaluation.num_samples=1",
    "evaluation.max_prompts_per_stratum=4",
    "checkpoint.every=1",
    "log.tensorboard=false",
    "log.console=off",
    "cluster.address=local",
    "cluster.num_cpus=20",  # a job's places go when the test leaves Ray
]
REWARD = """
import zlib

def score(completion, answer):
    return float(zlib.crc32(completion.encode()) % 2)
"""


async def train(config, folder, stuff):
    folder.mkdir()
    job = Job(config, folder, stuff, None)
    try:
        await job.start()
        assert await job.run() == "done"
    finally:
        await job.close()
        job.view.close()


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(300)
async def test_a_run_in_turns_is_the_split_run_bit_for_bit_and_its_events_show_the_order(tmp_path, monkeypatch):
    """Two steps, an evaluation and a checkpoint after each; the first checkpoint fails once, as on a disk that is full for a while."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    overrides = [*CONFIG, f"reward.parts.exact_integer.function={tmp_path / 'my_reward.py'}:score"]
    write, fails = Job._write, [OSError(28, "No space left on device")]

    async def full_once(self, *arguments):
        if fails:
            raise fails.pop()
        return await write(self, *arguments)

    config = load_config(overrides)
    stuff = gather_material(config, lambda line: None)
    instance = cluster.start_cluster(config.cluster, cluster.Demand(num_cpus=20, num_gpus=0))
    options = cluster.actor_options
    try:
        for placement in ("split", "colocated"):
            monkeypatch.setattr(cluster, "actor_options", lambda name, p=placement, **asks: options(f"{p}-{name}", **asks))
            if placement == "colocated":
                monkeypatch.setattr(Job, "_write", full_once)
            await train(load_config([*overrides, f"cluster.placement={placement}"]), tmp_path / placement, stuff)
    finally:
        instance.close()
    clock = lambda name: name.startswith("time/") or name.endswith(("_s", "_per_s", "_bytes"))  # noqa: E731
    split, turns = (rows(tmp_path / placement / "metrics.jsonl") for placement in ("split", "colocated"))
    assert [{k: v for k, v in row.items() if not clock(k)} for row in turns] == [
        {k: v for k, v in row.items() if not clock(k)} for row in split
    ]
    assert turns[-1]["version"] == 2
    assert len({row["weights"] for row in turns}) == 2
    events = rows(tmp_path / "colocated" / "events.jsonl")
    order = [e.get("phase", e["event"]) for e in events if e["event"] in ("turn", "started", "proven", "evaluated", "checkpoint")]
    to_learner, to_engines = PHASES[:2], PHASES[4:]
    last_turn = [*to_learner, "checkpoint", *to_engines]
    failed = [*to_learner, *to_engines]
    assert order == ["offload", "started", "proven", *PHASES, "evaluated", *failed, *PHASES, *last_turn, "evaluated"]
    offloads = [e["freed_bytes"]["learner"] for e in events if e.get("phase") == "offload"]
    assert offloads[0] < offloads[1] == offloads[2]  # the optimizer makes its moments in the first step
    assert {phase for phase in PHASES if f"time/turn_{phase}_s" in turns[0]} == set(PHASES)
