"""Runs that repeat and runs that go on: whole jobs on real engines and learners, which all jobs of this file share.

What is shared is processes: every job makes its learner anew in them, and its engines start from the weights that it pushes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray import cloudpickle
from safetensors.numpy import load_file

from configs.compose import dump_config, load_config
from orchestrator import cluster, launch
from orchestrator.actors import LearnerActor, RolloutActor
from orchestrator.checkpoint import SaveFailed, find_checkpoint
from orchestrator.fleet import Worker
from orchestrator.job import Job
from orchestrator.material import gather_material
from rollout.receiving import PushReceiver

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(300)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CONFIG = [
    "model.embedded.steps=120",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=4",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "steps=6",
    "rollout.oversample=1",
    "rollout.max_visits_per_step=8",
    "rollout.when_short=carry",
    "rollout.record=true",
    "learner.optimizer.learning_rate=2e-4",
    "learner.optimizer.schedule=linear",
    "learner.optimizer.warmup_steps=4",
    "evaluation.every=2",
    "evaluation.num_samples=2",
    "evaluation.max_prompts_per_stratum=8",
    "checkpoint.every=1",
    "checkpoint.keep_last=100",
    "log.tensorboard=false",
    "log.console=off",
    "cluster.address=local",
    "cluster.num_cpus=20",  # places of processes that a job leaves are not given back
]

TWO = ["learner.num_ranks=2", "learner.zero_stage=1", "steps=4", "evaluation.every=0", "evaluation.before=false"]


# ---- processes that serve one job after another ---------------------------------------------------------------------


class SharedRollout(RolloutActor):
    """A worker whose engine forgets the job before."""

    def __init__(self, *args):
        super().__init__(*args)
        self._stream = threading.Semaphore()

    def groups(self):
        with self._stream:
            yield from super().groups()

    def renew(self):
        self._closed.set()
        with self._stream:  # the stream of the job before has ended
            self._closed = threading.Event()
        self._engine._receiver = PushReceiver()

    def close(self):
        """A job ends; the process stays."""


class SharedLearner(LearnerActor):
    """A rank that dies between its share of a checkpoint and the barrier where a file in the run's folder says so."""

    def save(self, folder):
        files = super().save(folder)
        run_dir = Path(folder).parents[2]
        if self._rank == 1 and (run_dir / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return files


class Machine:
    """Actors by their place, made when a job first asks for them."""

    def __init__(self):
        self.workers, self.ranks, self.pools = {}, {}, None

    def launcher(self, config, stuff, **more):
        return SharedLauncher(self, config, stuff, **more)


class SharedLauncher(launch.Launcher):
    def __init__(self, machine, config, stuff, **more):
        super().__init__(config, stuff, **more)
        self.machine = machine

    async def reserve(self, *, with_ranks, with_engines=True):
        """Only for actors that this machine lacks."""
        machine, config = self.machine, self._config
        missing = range(len(machine.workers), config.rollout.num_workers)
        if missing or config.learner.num_ranks not in machine.ranks:
            await super().reserve(with_ranks=with_ranks)
            for number in missing:
                machine.workers[number] = super().rollout_worker(number)
            if config.learner.num_ranks not in machine.ranks:
                machine.ranks[config.learner.num_ranks] = super().ranks()
            machine.pools = machine.pools or super().rewards()

    def rollout_worker(self, number, **_):
        worker = self.machine.workers[number]
        ray.get(worker.actor.renew.remote())
        return Worker(worker.name, worker.actor)

    async def give_back(self):
        """The next job has the same processes in the same places."""

    def ranks(self):
        return self.machine.ranks[self._config.learner.num_ranks]

    def rewards(self):
        return self.machine.pools


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    config = load_config(CONFIG)
    instance = cluster.start_cluster(config.cluster, cluster.Demand(num_cpus=20, num_gpus=0))
    machine = Machine()

    async def leave(actors, waits, deadline_s):
        """Processes stay for the next job."""

    number, options = itertools.count(), cluster.actor_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "actor_options", lambda name, **asked: options(f"{name}-{next(number)}", **asked))
        patch.setattr(launch, "RolloutActor", SharedRollout)
        patch.setattr(launch, "LearnerActor", SharedLearner)
        patch.setattr("orchestrator.job.Launcher", machine.launcher)
        patch.setattr("orchestrator.job.close_actors", leave)
        yield SimpleNamespace(
            machine=machine, stuff=gather_material(config, lambda line: None), folder=tmp_path_factory.mktemp("runs")
        )
    instance.close()


def train(bench, name, *overrides):
    """A run of its own; returns its folder."""
    folder = bench.folder / name
    folder.mkdir()
    go(bench, folder, load_config([*CONFIG, *overrides]), None)
    return folder


def resume(bench, run, step, name, *overrides):
    """Goes on with a copy of the run as it was after ``step``."""
    folder = bench.folder / name
    (folder / "checkpoints").mkdir(parents=True)
    for file in ("config.yaml", "checkpoints/run.json"):
        shutil.copy(run / file, folder / file)
    shutil.copytree(checkpoint(run, step), checkpoint(folder, step))
    go(bench, folder, load_config([f"resume={folder}", *overrides]), find_checkpoint(folder, pytest.fail))
    return folder


def go(bench, folder, config, resumed):
    asyncio.run(_go(bench, folder, config, resumed))


async def _go(bench, folder, config, resumed):
    (folder / "config.yaml").write_text(dump_config(config, redact=True))
    job = Job(config, folder, bench.stuff, resumed)
    reason = "failed"
    try:
        await job.start()
        reason = await job.run()
    finally:
        await job.close()
        job.summarize(reason)


# ---- what a run leaves ----------------------------------------------------------------------------------------------


def checkpoint(run, step):
    return run / "checkpoints" / f"step-{step:06d}"


def read(path):
    return json.loads(path.read_text())


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def events(run, name):
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == name]


def groups(run, step):
    """Everything about the groups of a step but the seconds and who made them."""
    path = run / "groups" / f"step-{step:06d}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        del row["time_s"], row["worker"]
        for completion in row["completions"]:
            del completion["score"]["time_s"]
    return rows


def by_the_clock(name):
    """The naming rule: whatever depends on the clock, and nothing else, is called so."""
    return name.startswith("time/") or name.endswith(("_s", "_per_s", "_bytes"))


LAYOUT = {  # how ranks share a batch
    "weights",
    "batch/num_micro_batches",
    "batch/num_rank_tokens_min",
    "batch/num_rank_tokens_max",
    "batch/padding_frac",
    "batch/rank_imbalance",
}


def same_metrics(one, other, *, engine=0.0, learner=0.0):
    """Every figure outside the clock's equal; those that read the engine's log-probabilities to ``engine``. Between learners of
    different ranks the others to ``learner``, but for those that tell of the layout."""
    ours, theirs = ({k: v for k, v in row.items() if not by_the_clock(k) and k != "incarnation"} for row in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name.startswith("mismatch/"):
            assert value == pytest.approx(theirs[name], abs=engine, rel=0), name
        elif learner and name in LAYOUT:
            continue
        elif learner:
            assert value == pytest.approx(theirs[name], rel=learner, abs=learner), name
        else:
            assert value == theirs[name], name


def same_groups(one, other, *, engine):
    """Tokens, texts and scores equal; the engine's log-probabilities to ``engine``."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a["completions"], b["completions"], strict=True):
            np.testing.assert_allclose(x.pop("roll_logp"), y.pop("roll_logp"), atol=engine, rtol=0)
        assert a == b


def same_end(one, other, step):
    """Weights, optimizer, counters, ledger and what the loop had in hand: bit for bit."""
    ours, theirs = (read(checkpoint(run, step) / "manifest.json")["files"] for run in (one, other))
    for name in ours.keys() | theirs.keys():
        if name.startswith(("learner/", "model/")):
            assert ours[name] == theirs[name], name
    ours, theirs = (read(checkpoint(run, step) / "state.json") for run in (one, other))
    for name in ("step", "version", "ledger", "loop", "evaluation_before"):
        assert ours[name] == theirs[name], name
    with np.load(checkpoint(one, step) / "ledger.npz") as ours, np.load(checkpoint(other, step) / "ledger.npz") as theirs:
        for name in ours.keys() | theirs.keys():
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def unbroken(bench):
    return train(bench, "unbroken")


# ---- a run repeats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_repeats(bench, unbroken, num_workers):
    """Done when 4, B123: same picks, tokens, scores, batches, weights and metrics, whether one worker or two make the groups."""
    again = train(bench, f"again-{num_workers}", f"rollout.num_workers={num_workers}")
    assert len(metrics(again)) == 6
    for step, row in metrics(again).items():
        same_metrics(row, metrics(unbroken)[step], engine=1e-5)
        same_groups(groups(again, step), groups(unbroken, step), engine=1e-5)
    same_end(again, unbroken, 6)
    assert len({row["weights"] for row in metrics(unbroken).values()}) == metrics(unbroken)[6]["version"]
    made = read(again / "summary.json")["num_groups_by_worker"]
    assert len(made) == num_workers
    assert min(made.values()) > 0


# ---- a run goes on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_resumed_run_is_the_unbroken_one(bench, unbroken, step):
    """Done when 4, B147: N steps equal k + resume + N - k bit for bit, carried groups, mini-batches, AdamW, a schedule with
    warm-up and evaluations included."""
    resumed = resume(bench, unbroken, step, f"from-{step}")
    rows = metrics(resumed)
    assert sorted(rows) == list(range(step + 1, 7))
    for number, row in rows.items():
        assert row["incarnation"] == 1
        same_metrics(row, metrics(unbroken)[number])
        same_groups(groups(resumed, number), groups(unbroken, number), engine=0.0)
    same_end(resumed, unbroken, 6)
    ours, theirs = read(resumed / "summary.json"), read(unbroken / "summary.json")
    for name in ("pass_at_1_before", "pass_at_1_after", "version", "visits", "checkpoint"):
        assert ours[name] == theirs[name], name


def test_the_run_that_is_cut_carries_groups(unbroken):
    """What the test above stands on: some checkpoints hold kept groups, and these are trained without being made again."""
    carried = {}
    for step in range(1, 6):
        for line in (checkpoint(unbroken, step) / "groups.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["waiting"]
            carried[row["order"]] = step
    assert carried
    trained = {row["order"] for step in range(1, 7) for row in groups(unbroken, step)}
    assert trained & carried.keys()
    versions = {row["version"] for row in metrics(unbroken).values()}
    assert len(versions) < 6, "a step that was carried has no version of its own"
    assert len(versions) > 2, "and some steps train"


def test_a_checkpoint_of_the_last_step_is_written_once_and_named(bench):
    """B149: 4 steps with one save every 3, and one save every 100."""
    for every, expected in ((3, [3, 4]), (100, [4])):
        run = train(bench, f"every-{every}", "steps=4", f"checkpoint.every={every}", "evaluation.after=true")
        assert [row["step"] for row in events(run, "checkpoint")] == expected
        summary = read(run / "summary.json")
        assert summary["checkpoint"] == "step-000004"
        assert summary["best_checkpoint"] == "step-000004"
        assert read(checkpoint(run, 4) / "manifest.json")["pass_at_1"] == summary["pass_at_1_after"]


def test_a_run_whose_data_end_before_its_steps_saves_the_last_one_once(bench):
    """B149: groups without signal use up visits, so the data end before the steps that they were reckoned to last."""
    off = ("evaluation.every=0", "evaluation.before=false", "evaluation.after=false")
    run = train(bench, "used-up", "steps=null", "data.num_epochs=0.4", "checkpoint.every=100", *off)
    last = max(metrics(run))
    assert [row["step"] for row in events(run, "checkpoint")] == [last]
    assert find_checkpoint(run, pytest.fail).step == last
    summary = read(run / "summary.json")
    assert (summary["exit_reason"], summary["checkpoint"]) == ("data used up", f"step-{last:06d}")


def test_another_optimizer_is_refused_by_its_key(bench, unbroken):
    with pytest.raises(ValueError, match=r"learner\.optimizer\.name=sgd, but the run was saved with adamw"):
        resume(bench, unbroken, 3, "other-optimizer", "learner.optimizer.name=sgd")


def test_a_save_that_fails_once_is_told_and_two_in_a_row_end_the_run(bench, monkeypatch):
    """The disk is full at step 2, and again from step 4 on: what was saved stands, and is what a resume takes."""
    real = Job._write

    async def full(self, state, *rest):
        if state["step"] in (2, 4, 5):
            raise OSError(28, "No space left on device")
        return await real(self, state, *rest)

    monkeypatch.setattr(Job, "_write", full)
    with pytest.raises(SaveFailed, match=r"checkpoint of step 5 could not be written .*No space left.*step-000003 stands"):
        train(bench, "full-disk", "evaluation.every=0", "evaluation.before=false", "evaluation.after=false")
    run = bench.folder / "full-disk"
    assert [row["step"] for row in events(run, "checkpoint")] == [1, 3]
    assert [row["step"] for row in events(run, "checkpoint_failed")] == [2, 4]
    assert find_checkpoint(run, pytest.fail).step == 3


# ---- two ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(bench):
    return train(bench, "two-ranks", *TWO)


def test_the_number_of_ranks_may_change(bench, two_ranks):
    """Done when 5: from two ranks to one of another ZeRO stage, and back, within rounding of the run that had two all along."""
    alone = resume(bench, two_ranks, 2, "two-to-one", "learner.num_ranks=1", "learner.zero_stage=0")
    back = resume(bench, alone, 3, "one-to-two", "learner.num_ranks=2", "learner.zero_stage=1")
    for run, step in ((alone, 3), (alone, 4), (back, 4)):
        same_metrics(metrics(run)[step], metrics(two_ranks)[step], engine=1e-5, learner=1e-4)
        same_groups(groups(run, step), groups(two_ranks, step), engine=1e-4)
    theirs = load_file(checkpoint(two_ranks, 4) / "model" / "model.safetensors")
    before = load_file(checkpoint(two_ranks, 2) / "model" / "model.safetensors")
    for run in (alone, back):
        for name, value in load_file(checkpoint(run, 4) / "model" / "model.safetensors").items():
            moved = np.linalg.norm(theirs[name] - before[name])
            assert np.linalg.norm(value - theirs[name]) <= 1e-2 * moved, name


def test_a_rank_that_dies_while_saving_leaves_the_earlier_checkpoint(bench, two_ranks):
    """Done when 5: rank 1 dies between its share and the barrier of the save at step 4. Step 3 stands, and from there the run goes
    on bit for bit as the one that nothing happened to."""
    folder = bench.folder / "dead-rank"
    folder.mkdir()

    async def at_step_4(self, outcome, real=Job.after_step):
        if outcome.batch.step == 4:
            (folder / "die").touch()
        await real(self, outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "after_step", at_step_4)
        with pytest.raises(
            SaveFailed,
            match=r"checkpoint of step 4 could not be written \(RankFailed: learner rank 1 died in 'save': Actor.*step-000003 stands",
        ):
            go(bench, folder, load_config([*CONFIG, *TWO]), None)
    assert not checkpoint(folder, 4).exists()
    for rank in bench.machine.ranks.pop(2):
        ray.kill(rank)
    (folder / "die").unlink()
    found = find_checkpoint(folder, pytest.fail)
    assert found.step == 3
    go(bench, folder, load_config([f"resume={folder}"]), found)
    assert metrics(folder)[4]["incarnation"] == 1
    same_metrics(metrics(folder)[4], metrics(two_ranks)[4])
    same_end(folder, two_ranks, 4)
