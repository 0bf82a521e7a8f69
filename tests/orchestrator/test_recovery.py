"""A run that loses learner ranks: it goes back to its last checkpoint by itself and as one, once for the same cause at the same step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from configs.compose import load_config
from configs.schema import CheckpointConfig, DeadlinesConfig
from orchestrator import commands, launch, recovery
from orchestrator.actors import LearnerActor
from orchestrator.checkpoint import Checkpoint, Checkpoints, SaveFailed, find_checkpoint
from orchestrator.errors import RunStopped
from orchestrator.job import Job
from orchestrator.ledger import State
from orchestrator.ledger_view import read_rows, report
from orchestrator.ranks import RankFailed, RayLearner
from orchestrator.recovery import Lives, Mark, cause_of, discarded, next_incarnation
from orchestrator.waits import DeadlinePassed, Wait
from rollout.records import Purpose, Visit

cloudpickle.register_pickle_by_value(sys.modules[__name__])
fast = pytest.mark.timeout(30)


def died(call="train", number=1):
    return RankFailed(number, call, ActorDiedError())


def raised(error, call="train", number=0):
    return RankFailed(number, call, RayTaskError(call, "Traceback", error))


def late(owner, name):
    return DeadlinePassed(Wait(owner, name, 1.0, 0.0), [])


def save_failed(cause):
    error = SaveFailed("the checkpoint of step 4 could not be written")
    error.__cause__ = cause
    return error


# ---- lives, of jobs that do nothing but fail ------------------------------------------------------------------------


class Script:
    """A run of fake jobs in a folder with real checkpoints. Each life is a list of what it does: an error to raise in ``run``, after so many
    more steps; or in ``start``, where the steps are None."""

    def __init__(self, folder, *lives):
        self.folder, self.lives, self.jobs, self.events = folder, list(lives), [], []

    def make(self, checkpoint):
        self.jobs.append(FakeJob(self, checkpoint, self.lives[len(self.jobs)]))
        return self.jobs[-1]

    def of_run(self):
        return Lives(self.make(None), self.make)

    async def save(self, step):
        async def nothing(partial):
            return {}

        state = {"step": step, "version": step, "incarnation": 0}
        checkpoints = Checkpoints(self.folder / "checkpoints", CheckpointConfig())
        await checkpoints.write(state, {}, {"groups.jsonl": ""}, nothing, pass_at_1=None)


class FakeJob:
    def __init__(self, script, checkpoint, plan):
        self.script, self.plan, self.folder = script, plan, script.folder
        self.checkpoint = checkpoint.folder if checkpoint else None
        self.step = checkpoint.step if checkpoint else 0
        self.incarnation = len(script.jobs)
        self.config = SimpleNamespace(deadlines=DeadlinesConfig())
        self.started, self.unwritten, self.log, self.seconds = False, [], [], Counter(train=2.0 * self.step)
        self.view = SimpleNamespace(line=self.log.append, close=lambda: self.log.append("view closed"))

    async def start(self):
        steps, error = self.plan
        if steps is None:
            raise error
        self.started = True

    async def run(self):
        steps, error = self.plan
        self.step += steps
        self.seconds["train"] += 2.0 * steps
        if callable(error):
            error = await error(self)
        if error is None:
            return "done"
        raise error

    async def close(self):
        await asyncio.sleep(0)
        self.log.append("closed")

    def stop(self):
        return True

    def what_stands(self):
        return "step-000002 stands"

    def summarize(self, reason):
        self.log.append(f"summary: {reason}")

    def mark(self):
        return Mark(self.step, self.step, self.incarnation, {"trained": 4 * self.step}, {}, sum(self.seconds.values()))

    def add_time(self, stage, time_s):
        self.seconds[stage] += time_s

    def event(self, name, **fields):
        self.script.events.append({"event": name, "incarnation": self.incarnation} | fields)


@fast
async def test_a_lost_rank_is_a_new_life_from_the_newest_checkpoint(tmp_path):
    script = Script(tmp_path, (3, died()), (4, None))
    await script.save(2)
    lives = script.of_run()
    assert await lives.run() == "done"
    await lives.end("done")
    first, second = script.jobs
    assert second.checkpoint.name == "step-000002"
    assert second.step == 6
    assert first.log[-2:] == ["closed", "view closed"]
    assert second.log[-2:] == ["closed", "summary: done"]
    (event,) = script.events
    detail = event.pop("detail")
    assert "actor died" in detail
    reason = event.pop("reason")
    assert reason.startswith("learner rank 1 died in 'train': ActorDiedError")
    assert event == {
        "event": "rolled_back",
        "incarnation": 1,
        "step": 4,
        "cause": "a learner rank died in 'train'",
        "from_step": 3,
        "from_version": 3,
        "from_incarnation": 0,
        "to_step": 2,
        "to_version": 2,
        "checkpoint": "step-000002",
        "num_steps": 1,
        "num_visits": {"trained": 4},
    }
    assert second.seconds["discarded"] == 2.0, "no second of the run is forgotten"


@fast
async def test_without_a_checkpoint_it_begins_again(tmp_path):
    (tmp_path / "checkpoints" / "step-000001.partial").mkdir(parents=True)  # of a save that the death cut short
    script = Script(tmp_path, (1, died("prepare")), (2, None))
    assert await script.of_run().run() == "done"
    assert (script.jobs[1].checkpoint, script.events[0]["to_step"], script.events[0]["checkpoint"]) == (None, 0, None)


@fast
async def test_the_same_at_the_same_step_ends_the_run_the_second_time(tmp_path):
    """Whatever the message says, and whichever rank it is; another cause, or the same at another step, is another failure."""
    plans = [(2, died()), (2, raised(MemoryError("2 GiB"))), (1, died()), (3, None)]
    script = Script(tmp_path, *plans)
    assert await script.of_run().run() == "done"
    assert [event["step"] for event in script.events] == [3, 3, 2]
    script = Script(tmp_path, (2, died(number=0)), (2, died(number=1)))
    lives = script.of_run()
    with pytest.raises(RunStopped, match=r"rank 1 died in 'train'.*went back to a checkpoint once from the same at step 3$"):
        await lives.run()
    await lives.end("failed")
    assert len(script.jobs) == 2
    assert script.jobs[1].log[-2:] == ["closed", "summary: failed"]


@fast
@pytest.mark.parametrize(
    "error",
    [
        RunStopped("a verifier gave no verdict, and its policy is `fail`"),
        late("rollout workers", "a finished group for step 3"),
        late("reward pool", "scores"),
        save_failed(OSError(28, "No space left on device")),
        OSError(28, "No space left on device"),
    ],
)
async def test_what_is_no_ranks_fault_ends_the_run_as_it_is(tmp_path, error):
    script = Script(tmp_path, (2, error))
    with pytest.raises(type(error)) as caught:
        await script.of_run().run()
    assert caught.value is error


@fast
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (died("gather"), "a learner rank died in 'gather'"),
        (raised(MemoryError("x"), "prepare"), "a learner rank raised MemoryError in 'prepare'"),
        (save_failed(died("save")), "a learner rank died in 'save'"),
        (save_failed(late("learner", "checkpoint of step 4")), "learner passed its deadline for 'checkpoint of step 4'"),
        (late("push", "version 5"), "push passed its deadline for 'version 5'"),
    ],
)
def test_what_is(error, cause):
    assert cause_of(error) == cause


@fast
@pytest.mark.parametrize(
    "error",
    [
        raised(MemoryError("2 GiB"), "start"),
        ActorDiedError.from_task_error(RayTaskError("__init__", "Traceback", ValueError("no such model"))),
        late("rollout workers", "start"),
        RunStopped("no place for the learner ranks within 60 s"),
    ],
)
async def test_what_is_wrong_in_the_start_of_the_first_life_is_not_tried_again(tmp_path, error):
    script = Script(tmp_path, (None, error))
    with pytest.raises(type(error)) as caught:
        await script.of_run().run()
    assert (caught.value, len(script.jobs)) == (error, 1)


@fast
@pytest.mark.parametrize("error", [died("start"), ActorDiedError(), OutOfMemoryError("the node was running low on memory")])
async def test_an_actor_that_dies_in_the_start_of_the_first_life_costs_a_start(tmp_path, error):
    script = Script(tmp_path, (None, error), (2, None))
    assert await script.of_run().run() == "done"
    assert [event["cause"] for event in script.events] == ["an actor failed in the start of a life"]
    script = Script(tmp_path, (None, error), (None, error))
    with pytest.raises(type(error)):
        await script.of_run().run()
    script = Script(tmp_path, (None, error), (1, died()), *[(None, error)] * 2, (3, None))
    assert await script.of_run().run() == "done", "it has come to train since: three starts in a row may fail"


@fast
@pytest.mark.parametrize("error", [died("start"), ActorDiedError(), late("rollout workers", "start")])
async def test_a_later_start_is_tried_three_times_in_a_row(tmp_path, error):
    """Whichever actor fails in it; and three times again once a life has come to train."""
    bad = (None, error)
    script = Script(tmp_path, (1, died()), bad, bad, (2, died()), bad, bad, (5, None))
    assert await script.of_run().run() == "done"
    causes = ["a learner rank died in 'train'", *["an actor failed in the start of a life"] * 2]
    assert [event["cause"] for event in script.events] == causes * 2
    script = Script(tmp_path, (1, died()), bad, bad, bad)
    with pytest.raises(RunStopped, match=r"; start 3 of a run that was going back .* since learner rank 1 died in 'train'"):
        await script.of_run().run()


@fast
@pytest.mark.parametrize(
    "error", [RunStopped("no place for the learner ranks within 60 s"), OSError(28, "No space left on device", "stacks")]
)
async def test_a_later_life_without_a_place_ends_the_run_with_both_reasons(tmp_path, error):
    script = Script(tmp_path, (1, died()), (None, error))
    with pytest.raises(RunStopped) as caught:
        await script.of_run().run()
    assert str(caught.value).startswith(
        f"{error}; start 1 of a run that was going back to its last checkpoint, since learner rank 1 died"
    )


@fast
async def test_a_life_that_does_not_end_ends_the_run_in_time(tmp_path, monkeypatch):
    """Ray's own processes are stopped, say: nobody tells what is left of the actors. Both reasons are told, and it is closed once."""
    script = Script(tmp_path, (1, died()), (1, None))
    monkeypatch.setattr(recovery, "BURIED_S", 0.1)
    monkeypatch.setattr(FakeJob, "close", lambda job: asyncio.sleep(60, job.log.append("closing")))
    lives = script.of_run()
    script.jobs[0].config.deadlines.close_s = 0.05
    with pytest.raises(
        RunStopped, match=r"^learner rank 1 died .* cannot go .*: actors did not finish 'the end of a life' within 0.2 s"
    ):
        await lives.run()
    await lives.end("failed")
    assert (len(script.jobs), script.jobs[0].log.count("closing")) == (1, 1)


@fast
async def test_the_files_of_the_next_life_are_opened_under_a_guard(tmp_path, monkeypatch):
    script, log = Script(tmp_path, (1, died()), (1, None)), []

    class Guard:
        def __init__(self, limit_s, where):
            log.append(("begins", limit_s, len(script.jobs)))

        def close(self):
            log.append(("ends", len(script.jobs)))

    monkeypatch.setattr(recovery, "Vigil", Guard)
    assert await script.of_run().run() == "done"
    assert log == [("begins", 600.0, 1), ("ends", 2)]


@fast
async def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_from_nothing(tmp_path):
    script = Script(tmp_path, (3, died()))
    await script.save(2)
    (tmp_path / "checkpoints" / "step-000002" / "state.json").unlink()
    lives = script.of_run()
    with pytest.raises(
        RunStopped, match=r"^learner rank 1 died .* cannot go back to a checkpoint: .*none of its 1 checkpoints is whole"
    ):
        await lives.run()
    await lives.end("failed")
    assert script.jobs[0].log.count("closed") == 1


@fast
async def test_a_second_failure_at_the_end_does_not_hide_the_first(tmp_path, monkeypatch):
    async def fails(job):
        raise OSError(5, "Input/output error")

    script = Script(tmp_path, (1, RunStopped("the reason")))
    lives = script.of_run()
    monkeypatch.setattr(FakeJob, "close", fails)
    with pytest.raises(RunStopped, match="the reason"):
        await lives.run()
    await lives.end("the reason")
    assert script.jobs[0].log == ["summary: the reason"]
    assert lives.unwritten == ["the end of its actors ([Errno 5] Input/output error)"]
    script = Script(tmp_path, (1, died()), (1, None))
    with pytest.raises(RunStopped, match=r"^learner rank 1 died .* cannot go back to a checkpoint: .*Input/output error"):
        await script.of_run().run()


@fast
async def test_a_life_that_was_to_end_is_the_last_one(tmp_path):
    async def stopped_then_dead(job):
        assert lives.stop()
        return died()

    script = Script(tmp_path, (2, stopped_then_dead))
    lives = script.of_run()
    assert await lives.run() == "stopped"
    assert script.events[-1]["event"] == "stopped"
    assert script.jobs[0].log[-1].endswith("the run was to end: step-000002 stands")


@fast
@pytest.mark.parametrize("moment", ["closing", "starting"])
async def test_sigterm_during_recovery_ends_it_with_143(tmp_path, monkeypatch, moment):
    """While the dead life is being closed, that is done first; the last life is closed once, either way."""
    script = Script(tmp_path, (3, died()), (0, None))
    lives = script.of_run()
    name, of_life = ("close", 0) if moment == "closing" else ("start", 1)
    real, told = getattr(FakeJob, name), []

    async def signalled(job):
        if job.incarnation == of_life and not told:
            told.append(job)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2 if moment == "closing" else 60.0)
        await real(job)

    monkeypatch.setattr(FakeJob, "stop", lambda job: False)
    monkeypatch.setattr(FakeJob, name, signalled)
    stuff = SimpleNamespace(
        model_path="m", num_parameters=1, prompts=SimpleNamespace(train=[], held_out=[], num_too_long=0, num_cut=0)
    )
    departure = SimpleNamespace(begin=lambda *_: None)
    script.jobs[0].config, script.jobs[0].length = load_config([]), SimpleNamespace(num_skipped=0)
    try:
        assert await commands._train(lives, stuff, SimpleNamespace(), departure) == 143
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert len(script.jobs) == (1 if moment == "closing" else 2)
    assert all(job.log.count("closed") == 1 for job in script.jobs)
    assert "summary: stopped" in script.jobs[-1].log


# ---- what it counts -------------------------------------------------------------------------------------------------


@fast
def test_an_incarnation_is_used_once(tmp_path):
    """Two lives that end before the next save must not have one number, nor a resume by hand that of one of them."""
    assert next_incarnation(tmp_path, None) == 0
    saved = Checkpoint(tmp_path, {"incarnation": 2})
    assert next_incarnation(tmp_path, saved) == 3
    lines = [{"time": 1.0, "incarnation": 4, "event": "x", "text": '"incarnation": 9'}, {"incarnation": 3}, {"event": "y"}]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"inc')
    assert next_incarnation(tmp_path, saved) == 5
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "incarnation": 6, "weights": "00"}\n')
    assert next_incarnation(tmp_path, saved) == 7


@fast
def test_what_is_discarded_is_counted_by_what_had_become_of_it():
    """At the checkpoint: two trained, one dropped, two kept. Since then one of the two was trained, with two new ones; two were dropped;
    one is kept anew, one is being scored, two run."""
    visits = [Visit(f"p{i}", 0, Purpose.TRAIN) for i in range(6)]
    after = Mark(1, 1, 1, {"trained": 2, "dropped/a": 1}, {visits[0]: State.KEPT, visits[1]: State.KEPT}, 0.0)
    states = [State.KEPT, None, State.KEPT, State.FINISHED, State.RUNNING, State.RUNNING]
    opened = {visit: state for visit, state in zip(visits, states, strict=True) if state}
    before = Mark(3, 3, 0, {"trained": 5, "dropped/a": 2, "dropped/b": 1, "kept": 9}, opened, 0.0)
    assert discarded(before, after) == {"trained": 3, "dropped": 2, "kept": 1, "finished": 1, "running": 2}


@fast
@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("Task was killed due to the node running low on memory")])
async def test_of_several_ranks_errors_the_death_is_told(tmp_path, death):
    """Rank 0 learns of the broken connection before Ray tells of the death that broke it. A save in which one dies is no full disk."""

    async def fail(after_s, error):
        await asyncio.sleep(after_s)
        raise error

    def rank(after_s, error):
        call = SimpleNamespace(remote=lambda *_: fail(after_s, error))
        return SimpleNamespace(train=call, save=call)

    broken = RayTaskError("train", "Traceback", RuntimeError("connection closed by peer"))
    with pytest.raises(RankFailed, match="rank 1 died in 'train'"):
        await RayLearner([rank(0.0, broken), rank(0.2, death)]).train()
    with pytest.raises(RankFailed, match="rank 1 died in 'save'"):
        await RayLearner([rank(0.0, broken), rank(0.2, death)]).save(tmp_path)
    with pytest.raises(RankFailed, match="rank 0 raised in 'train': RuntimeError: connection closed") as caught:
        await RayLearner([rank(0.0, broken), rank(60.0, death)]).train()
    assert caught.value.kind == "raised RuntimeError"


# ---- real parts -----------------------------------------------------------------------------------------------------

CONFIG = [
    "model.embedded.steps=60",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "selection=none",
    "steps=6",
    "rollout.oversample=1",
    "rollout.max_new_tokens=8",
    "learner.num_ranks=2",
    "learner.zero_stage=1",
    "learner.optimizer.learning_rate=2e-4",
    "checkpoint.every=2",
    "checkpoint.keep_last=100",
    "evaluation.before=false",
    "evaluation.after=false",
    "cluster.address=local",
    "log.console=off",
]


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(1)


def run_out():
    raise MemoryError("no memory left for the batch")


DEATHS = {("prepare", 2): (1, kill), ("train", 4): (0, run_out), ("gather", 6): (1, leave)}  # by call and step: the rank, and how


class Mortal(LearnerActor):
    """Fails as ``DEATHS`` say, each once: a file of its name says that it has not happened yet."""

    def prepare(self, step, *rest):
        self._step = step
        self._fate("prepare")
        return super().prepare(step, *rest)

    def train(self):
        self._fate("train")
        return super().train()

    def gather(self, *rest):
        self._fate("gather")
        return super().gather(*rest)

    def _fate(self, call):
        rank, how = DEATHS.get((call, getattr(self, "_step", 0)), (None, None))
        mark = Path(os.environ["LIMEN_TEST_DEATHS"]) / f"{call}-{self._step}" if rank == self._rank else None
        if mark is not None and mark.exists():
            mark.unlink()
            how()


def train(folder):
    """``limen train`` in this process; what it does to the signals is undone."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return commands.train(load_config([*CONFIG, f"run_dir={folder}"]))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(500)
def test_ranks_that_die_in_prepare_train_and_push_change_nothing_but_the_time(tmp_path, monkeypatch):
    """Killed, out of memory, gone: the run finishes by itself with the weights, ledger and rows of one that nothing happened to."""
    fates, run, calm = tmp_path / "fates", tmp_path / "run", tmp_path / "calm"
    fates.mkdir()
    monkeypatch.setenv("LIMEN_TEST_DEATHS", str(fates))  # before the instance starts: its actors inherit it
    monkeypatch.setattr(launch, "LearnerActor", Mortal)
    seen, real = [], Job.after_step

    async def look(job, outcome):
        await real(job, outcome)
        earlier = [
            actor["pid"]
            for row in read_rows(run / "events.jsonl")
            if row["event"] == "started" and row["incarnation"] < job._incarnation
            for actor in row["actors"]
        ]
        places = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        left = [pid for pid in earlier if psutil.pid_exists(pid) and psutil.Process(pid).name().startswith("ray::")]
        files, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        seen.append((job._incarnation, outcome.batch.step, len(places), left, files, tasks))

    assert train(calm) == 0
    monkeypatch.setattr(Job, "after_step", look)
    for call, step in DEATHS:
        (fates / f"{call}-{step}").touch()
    assert train(run) == 0
    assert not list(fates.iterdir()), "each failure came"

    rows, events = ([*read_rows(run / f"{name}.jsonl")] for name in ("metrics", "events"))
    assert [(row["step"], row["incarnation"]) for row in rows] == [
        *[(1, 0)],
        *[(1, 1), (2, 1), (3, 1)],
        *[(3, 2), (4, 2), (5, 2)],
        *[(5, 3), (6, 3)],
    ]
    back = [event for event in events if event["event"] == "rolled_back"]
    assert [(e["cause"], e["from_step"], e["to_step"], e["checkpoint"], e["incarnation"]) for e in back] == [
        ("a learner rank died in 'prepare'", 1, 0, None, 1),
        ("a learner rank raised MemoryError in 'train'", 3, 2, "step-000002", 2),
        ("a learner rank died in 'gather'", 5, 4, "step-000004", 3),
    ]
    assert all(event["num_visits"] == {"trained": 4, "kept": 4} for event in back)
    assert {event["incarnation"] for event in events if event["event"] == "proven"} == {0, 1, 2, 3}
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit_reason"], summary["step"], summary["incarnation"]) == ("done", 6, 3)

    undisturbed = {row["step"]: row["weights"] for row in read_rows(calm / "metrics.jsonl")}
    assert {row["step"]: row["weights"] for row in rows} == undisturbed, "and so had the rows that were discarded"
    ours, theirs = (find_checkpoint(folder, pytest.fail) for folder in (run, calm))
    ledgers = [checkpoint.state["ledger"] for checkpoint in (ours, theirs)]
    assert ledgers[0] == ledgers[1]
    files = [json.loads((checkpoint.folder / "manifest.json").read_text())["files"] for checkpoint in (ours, theirs)]
    for name in files[0].keys() | files[1].keys():
        if name.startswith(("learner/", "model/")):
            assert files[0][name] == files[1][name], name

    told = [" ".join(line.split()) for line in report(run)]
    assert "trained 24" in told
    assert "discarded by going back to a checkpoint: 3 steps, in which 12 visits were judged and 12 trained" in told

    assert all(places == 3 and not left for _, _, places, left, _, _ in seen), seen
    by_life = {incarnation: (files, tasks) for incarnation, step, _, _, files, tasks in seen}
    assert by_life[3][1] == by_life[1][1], f"tasks left behind: {seen}"
    assert by_life[3][0] <= by_life[1][0] + 2, f"files left open: {seen}"
