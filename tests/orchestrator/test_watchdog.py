"""The watchdog over real processes of a real Ray instance, frozen on purpose; and workers whose pulse is gone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError

from configs.schema import ClusterConfig, DeadlinesConfig
from orchestrator import stacks, watchdog
from orchestrator.cluster import Demand, start_cluster
from orchestrator.fleet import RayFleet, Worker
from orchestrator.stacks import Process
from orchestrator.waits import DeadlinePassed, Waits
from orchestrator.watchdog import Pulse, Watchdog
from orchestrator.workers import Crew
from rollout.engine import Health
from rollout.stack_signal import listen

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Actor:
    """What a real one has in common with others: it listens from its first line on."""

    def __init__(self, freeze=False):
        listen()
        if freeze:
            os.kill(os.getpid(), signal.SIGSTOP)

    def facts(self):
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    def grind(self, seconds):
        time.sleep(seconds)

    def stream(self):
        yield 1
        self.grind(30)

    def meet(self, rank, address):
        """Rank 1 does not come to the collective."""
        torch.distributed.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=2)
        if rank == 0:
            torch.distributed.all_reduce(torch.zeros(1))
        self.grind(30)

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(30)


@pytest.fixture(scope="module")
def instance():
    instance = start_cluster(ClusterConfig(address="local", num_cpus=4), Demand(num_cpus=4, num_gpus=0))
    yield instance
    instance.close()


class World:
    def __init__(self, folder, **pulse):
        self.folder, self.events, self.actors, self.waits = folder, [], {}, Waits()
        pulse = {"every_s": 0.2, "limit_s": 60.0} | pulse
        about = {"actors": lambda: self.actors, "depths": lambda: {"open_visits": 7}, "last_events": [(time.time(), "proven")]}
        self.dog = Watchdog(folder, self.waits, self.event, Pulse(**pulse, **about))
        self.dog.start()

    def event(self, name, **fields):
        self.events.append((name, json.loads(json.dumps(fields))))

    def named(self, name):
        return [fields for event, fields in self.events if event == name]

    def make(self, name, *args):
        self.actors[name] = ray.remote(Actor).options(num_cpus=0, max_concurrency=4).remote(*args)
        return self.actors[name]

    async def until(self, condition, limit_s=30):
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(0.02)


@pytest.fixture
async def world(instance, tmp_path):
    made = []

    def make(**pulse):
        made.append(World(tmp_path, **pulse))
        return made[-1]

    yield make
    for one in made:
        one.dog.close()
        for actor in one.actors.values():
            ray.kill(actor)


async def test_a_breach_names_the_culprits_with_their_stacks_before_anything_is_done(world, capfd):
    w = world()
    ranks = [w.make(f"learner-{rank}") for rank in range(2)]
    w.make("rollout-0")  # is not to blame
    facts = await asyncio.gather(*(rank.facts.remote() for rank in ranks))
    stopped = ranks[1].stop.remote()
    w.dog.enter("train", 2)
    other = asyncio.create_task(w.waits.wait(asyncio.sleep(30), owner="reward pool", name="scores", deadline_s=60))
    calls = asyncio.gather(ranks[0].grind.remote(20), stopped)
    started = time.monotonic()
    with pytest.raises(DeadlinePassed) as error:
        await w.waits.wait(calls, owner="learner", name="train step 3", deadline_s=2.0)
    assert 2.0 <= time.monotonic() - started < 6.0
    (breach,) = w.named("deadline_passed")
    assert (breach["owner"], breach["wait"], breach["deadline_s"]) == ("learner", "train step 3", 2.0)
    assert (breach["stage"], breach["step"], breach["depths"]) == ("train", 2, {"open_visits": 7})
    assert breach["last_events"][0].startswith("proven ")
    assert [(row["owner"], row["name"]) for row in breach["also_waiting"]] == [("reward pool", "scores")]
    pids = [fact["pid"] for fact in facts]
    at_work = breach["culprits"].pop("learner-0")  # its other threads wake now and then
    assert re.fullmatch(rf"process {pids[0]} is (sleeping|running), in grind \(test_watchdog\.py:\d+\)", at_work)
    assert breach["culprits"] == {"learner-1": f"process {pids[1]} is stopped, by SIGSTOP or SIGTSTP"}
    text = (w.folder / breach["stacks"]).read_text()
    driver, alive, dead = text.split("==== learner-")
    assert f"process {os.getpid()} " in driver
    assert "in grind" in alive
    assert "state T" in dead
    message = str(error.value)
    assert message.startswith("learner did not finish 'train step 3' within 2 s: learner-1, process ")
    assert breach["stacks"] in message
    assert "learner did not finish 'train step 3'" in capfd.readouterr().err
    other.cancel()


async def test_of_ranks_that_wait_for_one_another_the_one_is_named_that_did_not_come(world):
    w = world()
    ranks = [w.make(f"learner-{rank}") for rank in range(3)]
    pids = [facts["pid"] for facts in await asyncio.gather(*(rank.facts.remote() for rank in ranks))]
    meeting = asyncio.gather(*(rank.meet.remote(i, w.folder / "meeting") for i, rank in enumerate(ranks[:2])))
    with pytest.raises(DeadlinePassed) as error:
        await w.waits.wait(meeting, owner="learner", name="train step 3", deadline_s=15.0)
    (breach,) = w.named("deadline_passed")
    waiting, absent, idle = (breach["culprits"][f"learner-{rank}"] for rank in range(3))
    assert re.search(r"in meet at \w+ \(\w+\.py:\d+\), which waits for the other ranks$", waiting)
    assert re.search(r"in meet at grind \(test_watchdog\.py:\d+\)$", absent)
    assert idle.endswith(", in no call")
    assert str(error.value).startswith(f"learner did not finish 'train step 3' within 15 s: learner-1, process {pids[1]} is ")
    assert "learner-0" not in str(error.value)


async def test_a_stream_of_results_is_a_call_too(world):
    w = world()
    rank = w.make("learner-0")
    await rank.facts.remote()
    stream = rank.stream.remote().__aiter__()
    assert await (await anext(stream)) == 1
    with pytest.raises(DeadlinePassed, match=r"in stream at grind \(test_watchdog\.py:\d+\)"):
        await w.waits.wait(anext(stream), owner="learner", name="bucket 1", deadline_s=2.0)


async def test_breaches_at_one_time_do_not_take_each_others_answers(world):
    """Of the same process: what it writes for one of them it has written for all."""
    w = world()
    rank = w.make("learner-0")
    await rank.facts.remote()
    grinding = asyncio.ensure_future(rank.grind.remote(20))
    deadlines = [2.0 + 0.04 * i for i in range(5)]
    waits = [w.waits.wait(asyncio.shield(grinding), owner="learner", name=f"{s}", deadline_s=s) for s in deadlines]
    assert all(isinstance(error, DeadlinePassed) for error in await asyncio.gather(*waits, return_exceptions=True))
    breaches = w.named("deadline_passed")
    assert len(breaches) == 5
    for breach in breaches:
        assert "in grind" in breach["culprits"]["learner-0"]
        assert "in grind" in (w.folder / breach["stacks"]).read_text()


async def test_an_answer_that_comes_while_the_stacks_are_taken_is_an_answer(world):
    w = world()
    rank = w.make("learner-0")
    await rank.facts.remote()
    seen = w.dog.breach

    async def slow_breach(*args):
        found = await seen(*args)
        await asyncio.sleep(2)
        return found

    w.waits.on_breach = slow_breach
    await w.waits.wait(rank.grind.remote(1.5), owner="learner", name="train step 1", deadline_s=0.7)
    assert len(w.named("deadline_passed")) == 1


async def test_an_actor_that_stops_in_its_constructor_is_known_before_it_has_answered(world):
    w = world()
    deadlines = DeadlinesConfig(start_s=9.0)
    crew = Crew(RayFleet([], None, w.waits, 60.0), None, w.waits, deadlines, w.event)
    worker = Worker("rollout-0", w.make("rollout-0", True))
    started = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"rollout-0 did not finish 'start' within 9 s: rollout-0, process \d+ is stopped"):
        await crew.start([worker])
    assert 9.0 <= time.monotonic() - started < 27.0
    crew.fleet.close()


async def test_a_process_that_stays_stopped_is_named_and_ended(world):
    w = world(limit_s=1.0)
    pool = w.make("rewards-0")
    pid = (await pool.facts.remote())["pid"]
    began = time.monotonic()
    with pytest.raises(RayActorError):
        await asyncio.wait_for(pool.stop.remote(), 20)
    assert time.monotonic() - began >= 1.0
    (breach,) = w.named("deadline_passed")
    assert (breach["owner"], breach["wait"]) == ("rewards-0", "a sign of life")
    assert breach["waited_s"] < 3.0
    assert breach["culprits"] == {"rewards-0": f"process {pid} is stopped, by SIGSTOP or SIGTSTP"}


async def test_processes_of_another_node_are_seen_by_a_task_there_and_a_node_that_is_gone_is_left_out(world, monkeypatch):
    rank = world().make("learner-0")
    facts = await rank.facts.remote()
    grinding = rank.grind.remote(30)
    there = Process("learner-0", facts["pid"], facts["node"])
    gone = Process("learner-1", 2, "a" * len(facts["node"]))
    monkeypatch.setattr(stacks, "here_id", lambda: "another")
    seen = await stacks.on_nodes(stacks.portray, [there, gone], 15.0, 3.0)
    assert list(seen) == [there]
    assert "in grind" in seen[there].text
    assert grinding


async def test_heartbeats_tell_stage_waits_and_processes(world):
    w = world(every_s=0.3)
    rank = w.make("learner-0")
    pid = (await rank.facts.remote())["pid"]
    w.dog.enter("prepare", 4)
    waiting = asyncio.create_task(w.waits.wait(rank.grind.remote(20), owner="learner", name="prepare step 5", deadline_s=60))
    await w.until(lambda: any(row["waits"] and "learner-0" in row["processes"] for row in w.named("heartbeat")))
    beat = w.named("heartbeat")[-1]
    assert (beat["stage"], beat["step"]) == ("prepare", 4)
    ((owner, name),) = [(row["owner"], row["name"]) for row in beat["waits"]]
    assert (owner, name) == ("learner", "prepare step 5")
    assert beat["processes"]["learner-0"]["pid"] == pid
    assert beat["processes"]["learner-0"]["rss_bytes"] > 2**20
    assert beat["processes"]["driver"]["pid"] == os.getpid()
    last = json.loads((w.folder / "heartbeat.json").read_text())
    assert (last["pid"], last["step"]) == (os.getpid(), 4)
    waiting.cancel()


async def test_heartbeats_become_rarer_in_a_long_run(world):
    w = world(every_s=0.05)
    await w.until(lambda: w.named("heartbeat"))
    w.dog._began = time.time() - 3600  # a thousandth of it are 3.6 s
    await asyncio.sleep(0.1)
    before, written = len(w.named("heartbeat")), (w.folder / "heartbeat.json").stat().st_mtime_ns
    await asyncio.sleep(1.0)
    assert len(w.named("heartbeat")) <= before + 1
    assert (w.folder / "heartbeat.json").stat().st_mtime_ns > written


async def test_a_driver_that_blocks_leaves_its_stacks(world):
    w = world(every_s=0.2, limit_s=0.4)
    await w.until(lambda: w.named("heartbeat"))

    def write_to_a_disk_that_hangs():
        time.sleep(1.5)

    write_to_a_disk_that_hangs()
    await w.until(lambda: w.named("driver_blocked"))
    (blocked,) = w.named("driver_blocked")
    assert "in write_to_a_disk_that_hangs" in (w.folder / blocked["stacks"]).read_text()


async def test_a_watchdog_that_cannot_write_does_not_hide_the_breach(world, capfd):
    w = world()
    await w.make("learner-0").facts.remote()
    w.dog._stacks = w.folder / "none" / "such"
    with pytest.raises(DeadlinePassed, match=r"learner did not finish 'x' within 0\.5 s"):
        await w.waits.wait(asyncio.sleep(30), owner="learner", name="x", deadline_s=0.5)
    assert w.named("watchdog_failed")[0]["owner"] == "learner"
    assert w.named("deadline_passed")[0]["stacks"] is None

    def full(name, **fields):
        raise OSError(28, "No space left on device")

    w.dog._event = full
    with pytest.raises(DeadlinePassed, match=r"learner did not finish 'y' within 0\.5 s"):
        await w.waits.wait(asyncio.sleep(30), owner="learner", name="y", deadline_s=0.5)
    assert "learner did not finish 'y'" in capfd.readouterr().err


@pytest.mark.parametrize("hanging", ["whereabouts", "_write_stacks"])
async def test_a_disk_or_an_instance_that_hangs_does_not_keep_the_breach_from_being_acted_on(world, monkeypatch, hanging):
    w, over = world(every_s=60.0), threading.Event()
    await w.until(lambda: w.named("heartbeat"))
    await w.make("learner-0").facts.remote()
    if hanging == "whereabouts":
        monkeypatch.setattr(watchdog, "whereabouts", lambda name, actor: over.wait(30))
    else:
        monkeypatch.setattr(w.dog, "_write_stacks", lambda *args: over.wait(30))
    started = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await w.waits.wait(asyncio.sleep(30), owner="learner", name="x", deadline_s=2.0)
    assert time.monotonic() - started < 3 * 2.0
    assert [row["wait"] for row in w.named("deadline_passed")] == ["x"]
    over.set()


async def test_heartbeats_that_hang_do_not_keep_the_watchdog_from_watching(world, monkeypatch, capfd):
    w, over = world(every_s=0.1, limit_s=0.6), threading.Event()
    monkeypatch.setattr(watchdog, "write_json", lambda *args: over.wait(30))
    await asyncio.sleep(2.0)
    assert capfd.readouterr().err.count("no heartbeat: the one before has not ended") == 1
    assert not w.named("driver_blocked")
    over.set()


def test_a_driver_whose_event_loop_stands_still_is_left_with_the_reason_last():
    """Awake for longer than the limit first; then it blocks, as in a write to a disk that hangs."""
    code = (
        "import time\n"
        "from orchestrator.departure import Vigil\n"
        "def write_to_a_disk_that_hangs():\n    time.sleep(60)\n"
        "vigil = Vigil(1.0, 'see there')\n"
        "for _ in range(30):\n    time.sleep(0.05)\n    vigil.awake()\n"
        "print('awake', flush=True)\n"
        "write_to_a_disk_that_hangs()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout) == (3, "awake\n")
    assert "in write_to_a_disk_that_hangs" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "limen: stopped: the driver's event loop has stood still for 1 s; see there"


def test_a_driver_that_was_stopped_and_goes_on_is_not_left():
    code = (
        "import time\n"
        "from orchestrator.departure import Vigil\n"
        "vigil = Vigil(1.0, '')\n"
        "print('up', flush=True)\n"
        "time.sleep(0.3)\n"
        "print('on', flush=True)\n"
        "time.sleep(0.3)\n"
        "vigil.close()\n"
        "time.sleep(1.5)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        assert (process.wait(30), process.stderr.read()) == (0, "")


@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_run_whose_own_ray_is_killed_ends_with_the_reason_last(tmp_path, victim):
    """Ray itself ends the driver after a minute, with exit code 1 and a word of its own."""
    code = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "import psutil\n"
        "from configs.schema import ClusterConfig\n"
        "from orchestrator.cluster import Demand, start_cluster\n"
        "from orchestrator.waits import Waits\n"
        "from orchestrator.watchdog import Pulse, Watchdog\n"
        "folder, victim = Path(sys.argv[1]), sys.argv[2]\n"
        "instance = start_cluster(ClusterConfig(address='local', num_cpus=1), Demand(num_cpus=1, num_gpus=0))\n"
        "def event(name, **fields):\n"
        "    with (folder / 'events').open('a') as file:\n        file.write(f'{name} {json.dumps(fields)}\\n')\n"
        "async def run():\n"
        "    Watchdog(folder, Waits(), event, Pulse(0.5, 60.0, dict, dict, ())).start()\n"
        "    await asyncio.sleep(2)\n"
        "    for process in psutil.Process().children():\n"
        "        if process.name() == victim:\n            process.kill()\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), victim]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        f"limen: stopped: Ray's own {victim}, which this process had started, has ended: killed, or for want of memory; "
        "the last checkpoint stands"
    )
    assert f'ray_lost {{"processes": ["{victim}"]}}' in (tmp_path / "events").read_text()


def test_a_driver_that_hangs_at_its_end_is_left_with_the_reason_last():
    code = (
        "import asyncio, time\n"
        "from orchestrator.departure import Departure\n"
        "def hang_on_a_disk():\n    time.sleep(60)\n"
        "async def run(departure):\n"
        "    asyncio.get_running_loop().run_in_executor(None, hang_on_a_disk)\n"
        "    departure.begin(1.0, 3, 'the checkpoint of step 2 could not be written')\n"
        "with Departure() as departure:\n    asyncio.run(run(departure))\n"  # which waits for its threads
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 3
    assert "in hang_on_a_disk" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "limen: stopped: the checkpoint of step 2 could not be written"


# ---- the pulse of the workers --------------------------------------------------------------------------------------------


class FakeCall:
    def __init__(self, run):
        self.remote = run


class FakeEngine:
    """``health`` answers with the age of the last step, or never."""

    def __init__(self, age_s):
        self.age_s = age_s
        self.facts, self.health = FakeCall(self.answer_facts), FakeCall(self.answer_health)

    async def answer_facts(self):
        return {"pid": 1, "node": "n"}

    async def answer_health(self):
        if self.age_s is None:
            await asyncio.sleep(60)
        return Health(0, 4, 0, 9, 3, self.age_s)


@pytest.mark.parametrize(
    ("age_s", "kind", "text"), [(None, "silent", "'a sign of life'"), (1.5, "stuck", "'a decode step' within 1.2 s")]
)
async def test_a_worker_without_a_pulse_is_lost_and_replaced(monkeypatch, age_s, kind, text):
    events, ended = [], []

    async def end(crew, worker):
        ended.append(worker.name)

    monkeypatch.setattr(Crew, "_end", end)
    deadlines = DeadlinesConfig(heartbeat_s=0.2, receive_s=1.0)
    waits = Waits()
    fleet = RayFleet([], None, waits, 1.0)
    crew = Crew(
        fleet,
        lambda slot, number: Worker(f"rollout-{slot}.{number}", FakeEngine(0.0)),
        waits,
        deadlines,
        lambda n, **f: events.append((n, f)),
    )
    await crew.start([Worker("rollout-0", FakeEngine(0.3)), Worker("rollout-1", FakeEngine(age_s))])
    async with asyncio.timeout(5):
        while [worker.name for worker in crew.new] != ["rollout-0", "rollout-1.1"]:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    ((lost, fields),) = [event for event in events if event[0] == "worker_lost"]
    assert (lost, fields["worker"], fields["kind"]) == ("worker_lost", "rollout-1", kind)
    assert text in fields["reason"]
    assert ended == ["rollout-1"]
    crew.close()
    fleet.close()


async def test_an_engine_that_was_paused_with_the_whole_run_is_not_stuck():
    """Its last step is long ago when it is asked at once, and it makes the next one a moment later."""
    events, waits = [], Waits()
    fleet = RayFleet([], None, waits, 1.0)
    crew = Crew(fleet, None, waits, DeadlinesConfig(heartbeat_s=0.2, receive_s=1.0), lambda n, **f: events.append((n, f)))
    engine = FakeEngine(600.0)
    told = engine.answer_health

    async def steps_again():
        health = await told()
        engine.age_s = 0.0
        return health

    engine.health = FakeCall(steps_again)
    await crew.start([Worker("rollout-0", engine)])
    async with asyncio.timeout(5):
        while engine.age_s:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    engine.age_s = 600.0
    await asyncio.sleep(0.3)
    assert not events
    crew.close()
    fleet.close()


async def test_a_worker_that_does_not_take_visits_is_given_up_in_time():
    told, waits = [], Waits()
    fleet = RayFleet([], lambda visit: visit, waits, 0.2)
    fleet.on_lost = lambda worker, kind, error: told.append((worker.name, kind, str(error)))

    class Deaf:
        def __init__(self):
            self.submit = self.cancel = FakeCall(lambda visits: asyncio.sleep(60))

    fleet.workers.append(Worker("rollout-0", Deaf()))
    fleet._outstanding["rollout-0"] = set()
    started = time.monotonic()
    await fleet.submit(["a", "b"])
    await fleet.cancel(["a"])
    assert 0.4 <= time.monotonic() - started < 1.2
    assert [(name, kind) for name, kind, _ in told] == [("rollout-0", "silent")] * 2
    assert "'taking visits'" in told[0][2]
    assert "'dropping visits'" in told[1][2]
    assert fleet.depths()["outstanding"] == {"rollout-0": 1}
    fleet.close()
