"""A disk that is really full: a small file system in memory, which only this test sees and which goes with it.

B145, 6.4: the earlier checkpoint stands and resumes, nothing half written counts, the room of what failed is given back, no row is lost
without a word, and where the run must end it ends with 3, the reason last.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.compose import load_config
from configs.schema import CheckpointConfig, LogConfig
from orchestrator import commands
from orchestrator import job as job_module
from orchestrator.checkpoint import Checkpoints, describe_files, find_checkpoint
from orchestrator.errors import RunStopped
from orchestrator.evaluation import Evaluation
from orchestrator.grace import StepInHand
from orchestrator.job import Job
from orchestrator.ledger import Pick
from orchestrator.recorder import Recorder
from orchestrator.run_folder import JsonLines, make_run_folder, write_json
from orchestrator.stages import Address, Batch, Kept, Scored, StepOutcome
from orchestrator.waits import Waits
from rollout.records import Completion, Consequence, Finish, Group, Outcome, Prompt, Purpose, Score, Status, Visit, describe_group

pytestmark = pytest.mark.timeout(60)

PAGE = 4096
WRITTEN = ["learner/rank-000.bin", "learner/rank-001.bin", "model/model.safetensors"]
ARRAYS = {"prompt": np.arange(40, dtype=np.uint64)}
TEXTS = {"groups.jsonl": '{"order": 3}\n' * 600, "config.yaml": "seed: 7\n"}


class Disk:
    """A small file system, under the eyes of a process that holds it: it is gone when that process is."""

    def __init__(self, folder, options):
        mount = f'mount -t tmpfs -o {options} limen-test "$0" && echo ready && exec cat'
        self._holder = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)],
            stdin=subprocess.PIPE,  # its end is the holder's
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = self._holder.stdout.readline()
        if said != "ready\n":
            self.close()
            raise OSError(said.strip() or "unshare ended")
        self.path = Path(f"/proc/{self._holder.pid}/root{folder}")

    def free(self):
        """Pages, and files."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize // PAGE, facts.f_favail

    def fill(self, pages_left):
        """Takes all pages but so many."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            file.write(b"x" * (PAGE * (self.free()[0] - pages_left)))

    def crowd(self, files_left):
        """Takes all files but so many, the folder for them included."""
        (self.path / "crowd").mkdir()
        for number in range(self.free()[1] - files_left):
            (self.path / "crowd" / f"{number}").touch()
        assert self.free()[1] == files_left

    def make_room(self):
        (self.path / "filler").unlink(missing_ok=True)
        for path in (self.path / "crowd").glob("*"):
            path.unlink()
        if (self.path / "crowd").exists():
            (self.path / "crowd").rmdir()

    def close(self):
        self._holder.stdin.close()
        self._holder.wait(10)
        self._holder.stdout.close()


@pytest.fixture
def make_disk(tmp_path):
    disks = []

    def make(options):
        folder = tmp_path / "disk"
        folder.mkdir()
        try:
            disks.append(Disk(folder, options))
        except OSError as error:
            message = f"a full disk is not tested here: a file system of one's own needs user namespaces ({error})"
            if os.environ.get("CI") == "true" and not os.environ.get("LIMEN_ALLOW_SKIPS"):
                pytest.fail(f"{message}. LIMEN_ALLOW_SKIPS=1 allows it")
            pytest.skip(message)
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


async def save(partial):
    for name in WRITTEN:
        (partial / name).write_bytes(name.encode() * 300)  # two pages each
    return describe_files(partial, WRITTEN)


async def write(run, step):
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig(keep_last=1, keep_best=False))
    return await checkpoints.write({"step": step, "version": step}, ARRAYS, TEXTS, save, pass_at_1=None)


@pytest.mark.parametrize("what", ["pages", "files"])
async def test_whichever_file_fills_the_disk_the_checkpoint_before_stands(make_disk, what):
    """The second save fails at its first page (or file), then at its second, and so on until there is room for all of it."""
    disk = make_disk("size=1m,nr_inodes=200")
    await write(disk.path, 10)
    take = disk.fill if what == "pages" else disk.crowd
    for left in range(100):
        take(left)
        free = disk.free()
        failed = None
        try:
            await write(disk.path, 20)
        except OSError as error:
            failed = error
        if failed is None:
            break
        assert failed.errno == errno.ENOSPC
        assert [p.name for p in (disk.path / "checkpoints").glob("step-*")] == ["step-000010"]
        assert disk.free() == free, "the room of what failed is given back"
        assert find_checkpoint(disk.path, pytest.fail).step == 10
        disk.make_room()
    assert left >= 9, "every file was the one that did not fit"
    assert find_checkpoint(disk.path, pytest.fail).step == 20


# ---- rows ------------------------------------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_that_does_not_fit_leaves_no_half_and_comes_before_the_next(make_disk):
    """The second row would fill the page that is left and more."""
    disk = make_disk("size=64k")
    disk.fill(1)
    file = JsonLines(disk.path / "rows.jsonl")
    file.write({"row": 1})
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.write({"row": 2, "text": "x" * PAGE})
        assert lines(disk.path / "rows.jsonl") == [{"row": 1}]
    assert file.num_waiting == 2
    disk.make_room()
    file.write({"row": 3})
    file.close()
    assert [row["row"] for row in lines(disk.path / "rows.jsonl")] == [1, 2, 2, 3]


def test_a_file_that_is_written_whole_or_not_at_all_gives_its_room_back(make_disk):
    disk = make_disk("size=64k")
    write_json(disk.path / "summary.json", {"step": 1})
    disk.fill(1)
    with pytest.raises(OSError, match="No space left"):
        write_json(disk.path / "summary.json", {"text": "x" * 2 * PAGE})
    assert disk.free()[0] == 1
    assert json.loads((disk.path / "summary.json").read_text()) == {"step": 1}
    assert sorted(path.name for path in disk.path.iterdir()) == ["filler", "summary.json"]


def recorder(folder, *, tensorboard=False, record=False):
    return Recorder(
        folder, LogConfig(tensorboard=tensorboard), {"p0": PROMPT}, incarnation=0, after_step=0, record=record, seed=0
    )


def a_step(of, step):
    """A step whose rows take several pages. Returns the warnings."""
    of.event("long", text="x" * PAGE)
    of.metrics(step, step, "digest", {f"metric/{i}": 0.5 for i in range(400)})
    return of.settle()


def test_rows_wait_for_a_disk_that_is_full_at_one_step(make_disk):
    disk = make_disk("size=256k")
    of = recorder(disk.path)
    assert a_step(of, 1) == []
    disk.fill(0)
    assert a_step(of, 2) == [
        "1 row of events.jsonl, 1 row of metrics.jsonl (No space left on device) could not be written and wait for room; the run stops if "
        "the next step ends like this"
    ]
    disk.make_room()
    assert a_step(of, 3) == []
    disk.fill(0)
    assert len(a_step(of, 4)) == 1, "not the second in a row"
    disk.make_room()
    assert of.close() == ""
    assert [row["step"] for row in lines(disk.path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["event"] for row in lines(disk.path / "events.jsonl")] == [
        "long",
        "long",
        "rows_wait",
        "long",
        "long",
        "rows_wait",
    ]


def test_a_disk_that_is_full_at_two_steps_in_a_row_ends_the_run_and_every_lost_row_is_counted(make_disk):
    disk = make_disk("size=256k")
    of = recorder(disk.path)
    disk.fill(0)
    assert len(a_step(of, 1)) == 1
    with pytest.raises(RunStopped, match=r"2 rows of metrics\.jsonl.*No space left.*at two steps in a row; make room and resume"):
        a_step(of, 2)
    lost = of.close()
    for part in ("2 rows of metrics.jsonl", "3 rows of events.jsonl", "rewards.json", "(No space left on device)"):
        assert part in lost
    assert lines(disk.path / "metrics.jsonl") == []


def write_much(board):
    for number in range(400):  # more than the rest of its page
        board.add_scalar(f"metric/{number}", 1.0, 0)
    board.flush()


def test_tensorboard_ends_with_a_word_and_the_rows_go_on(make_disk, monkeypatch):
    """Its own thread writes, and dies of a full disk."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    disk = make_disk("size=256k")
    of = recorder(disk.path, tensorboard=True)
    disk.fill(0)
    with pytest.raises(OSError, match="No space left"):
        write_much(of._board)
    disk.make_room()
    (warning,) = a_step(of, 1)
    assert warning == "TensorBoard has no more of this run (No space left on device); metrics.jsonl has all of it"
    assert a_step(of, 2) == []
    assert of.close() == ""
    assert [row["step"] for row in lines(disk.path / "metrics.jsonl")] == [1, 2]
    assert [row["event"] for row in lines(disk.path / "events.jsonl")] == ["long", "tensorboard_ended", "long"]


# ---- the other files ------------------------------------------------------------------------------------------------


class Parcel:
    """Groups that lie somewhere."""

    def __init__(self, *groups):
        self.groups = groups

    def __await__(self):
        yield from ()
        return self.groups


PROMPT = Prompt("p0", "s", "s", "1+1=", np.array([1], np.int32), "2", None)


def outcome(step):
    """A step with one group, which takes more than a page as a sample and as a record."""
    ones = np.ones(2, np.float32)
    whole = Completion(0, ones.astype(np.int32), -ones, ones > 0, ones.astype(np.int32), ones < 0, "x" * 2 * PAGE, Finish.STOP)
    group = Group(Visit("p0", step, Purpose.TRAIN), PROMPT.token_ids, (whole,), "rollout-0", 0.0, ())
    score = Score(Status.OK, Outcome.WRONG, 0.0, 0.0, {}, "y" * PAGE, 0.1, "", {}, Consequence.NONE)
    scored = Scored(describe_group(group), Address(Parcel(group), 0), (score,))
    kept = Kept(Pick(step, group.visit), scored)
    return StepOutcome(Batch(step, step - 1, (kept,)), (scored,), 1, {}, {"time/step_s": 1.0})


async def test_samples_wait_like_every_row(make_disk):
    disk = make_disk("size=256k")
    of = recorder(disk.path)
    disk.fill(0)
    await of.groups(outcome(1))
    (warning,) = of.settle()
    assert warning.startswith("1 row of samples.jsonl (No space left on device) could not be written")
    disk.make_room()
    await of.groups(outcome(2))
    assert of.close() == ""
    assert [row["step"] for row in lines(disk.path / "samples" / "samples.jsonl")] == [1, 2]


async def test_a_step_whose_groups_are_not_on_record_is_not_saved(make_disk, monkeypatch):
    """A run that goes on from there would leave a hole in its record, and a replay of it would train other steps without a word."""
    disk = make_disk("size=256k")
    of, saved = recorder(disk.path, record=True), []
    job = a_job(of, lambda step, loop: saved.append(step))
    await Job.after_step(job, outcome(1))
    await Job._save(job)
    disk.fill(1)
    with pytest.raises(
        RunStopped, match=r"^the groups of step 2 could not be recorded \(.*No space left.*\), so the step is not saved"
    ):
        await Job.after_step(job, outcome(2))
    await Job._save(job)
    assert saved == [1]
    assert disk.free()[0] == 1, "what was written of them is given back"
    assert [path.name for path in (disk.path / "groups").iterdir()] == ["step-000001.jsonl"]
    disk.make_room()
    await Job.after_step(job, outcome(2))  # as the resumed run does it again
    await Job._save(job)
    assert saved == [1, 2]


def a_job(of, save):
    """What of a job ``after_step`` and ``_save`` need, without engines and learner."""
    waits = Waits()

    async def save_step(step, loop):
        save(step, loop)

    return SimpleNamespace(
        config=load_config(["rollout.record=true", "checkpoint.every=0", "evaluation.every=0"]),
        num_steps=9,
        view=SimpleNamespace(line=lambda text: None, step=lambda step, metrics: None),
        _loop=object(),
        _saved_step=None,
        _selftest=None,
        _material=SimpleNamespace(by_id={"p0": PROMPT}),
        _lag=SimpleNamespace(take=lambda: 0.0),
        _seconds=defaultdict(float),
        _recorder=of,
        _rewards=None,
        _held_out={},
        _pusher=SimpleNamespace(digest="00ff"),
        _in_hand=StepInHand(None),
        _save_step=save_step,
        _warn=lambda step, metrics: None,
        _enter=lambda stage: None,
        _wait=lambda work, owner, name, deadline_s: waits.wait(work, owner=owner, name=name, deadline_s=deadline_s),
    )


async def test_an_evaluation_that_cannot_be_noted_leaves_the_checkpoint_as_it_was(make_disk, monkeypatch):
    disk = make_disk("size=1m")
    folder = await write(disk.path, 10)
    checkpoints, events, told = Checkpoints(disk.path / "checkpoints", CheckpointConfig()), [], []

    async def evaluated(*_, **__):
        return Evaluation(10, 1, 0, {1: 0.5}, {"s": 0.5})

    monkeypatch.setattr(job_module, "evaluate", evaluated)
    job = a_job(SimpleNamespace(event=lambda name, **fields: events.append((name, fields))), None)
    of_the_run = {"_step": 10, "_version": 10, "_saved_step": 10, "_checkpoints": checkpoints, "_evaluations": {}}
    handles = {"_fleet": None, "_scorer": None, "_waits": None, "event": job._recorder.event}
    vars(job).update(**of_the_run, **handles, view=SimpleNamespace(line=told.append))
    disk.fill(0)
    before = (folder / "manifest.json").read_text()
    assert (await Job._evaluate(job, "after training")).pass_at_1 == 0.5
    assert (folder / "manifest.json").read_text() == before
    assert [name for name, _ in events] == ["checkpoint_failed", "evaluated"]
    assert "No space left" in events[0][1]["message"]
    assert told[0].startswith("warning: checkpoint 10 does not count as evaluated: ")
    assert (find_checkpoint(disk.path, pytest.fail).step, checkpoints.best()) == (10, None)
    disk.make_room()
    await Job._evaluate(job, "after training")
    assert checkpoints.best() == folder


def test_a_summary_that_cannot_be_written_is_told(make_disk):
    disk = make_disk("size=64k")
    disk.fill(0)
    told: list[str] = []
    job = SimpleNamespace(unwritten=[], view=SimpleNamespace(line=told.append))
    job._miss = lambda what: Job._miss(job, what)
    Job._write_or_miss(job, disk.path / "summary.json", {"exit_reason": "done"})
    assert job.unwritten == ["summary.json (No space left on device)"]
    assert told == ["warning: could not be written: summary.json (No space left on device)"]
    assert [path.name for path in disk.path.iterdir()] == ["filler"]


def test_a_run_that_cannot_write_its_configuration_ends_and_its_folder_may_be_used(make_disk, monkeypatch):
    disk = make_disk("size=64k")
    disk.fill(0)
    monkeypatch.setattr(commands, "gather_material", lambda config, log: None)
    config = load_config([f"run_dir={disk.path / 'run'}"])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(RunStopped, match=r"^OSError: .*No space left on device"):
            commands.train(config)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert make_run_folder(config.run_dir, "train") == disk.path / "run"


# ---- output ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 3), (["train", "seed=x"], 2)])
def test_output_that_cannot_be_written_is_told_in_a_line_and_changes_no_other_exit_code(arguments, code):
    """Python itself would end with a traceback, or with 120."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == code
    (said,) = ended.stderr.splitlines()
    assert ("No space left on device" in said) == (code == 3)


# ---- a real run ------------------------------------------------------------------------------------------------------


def limen(*overrides):
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("limen")), "train", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_driver_that_hangs_is_left_though_stderr_is_full():
    code = "from orchestrator.departure import leave_for; leave_for('it hangs', 3, 'why')"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, check=False, timeout=60).returncode == 3


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_run_whose_disk_fills_up_ends_with_3_and_goes_on_when_there_is_room(make_disk):
    """There is room for the rows and one checkpoint of 5.5 MB, not for two: one save that fails is told, the second one ends the run."""
    disk = make_disk("size=64m")
    disk.fill(9 * 2**20 // PAGE)
    run = disk.path / "run"
    process = limen(
        f"run_dir={run}",
        "steps=8",
        "model.embedded.steps=120",
        "data.sources.arithmetic.params.max_digits=1",
        "batch.groups_per_step=8",
        "batch.num_mini_batches=2",
        "evaluation.before=false",
        "evaluation.after=false",
        "checkpoint.every=2",
        "checkpoint.keep_last=1",
    )
    out, said = process.communicate(timeout=200)
    assert process.returncode == 3, said
    assert said.splitlines()[-1].startswith("limen: stopped: the checkpoint of step 6 could not be written (")
    assert "No space left" in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith("step-000002 stands")
    assert "Traceback" not in said
    assert "warning: the checkpoint of step 4 could not be written" in out
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000002"]
    assert [row["step"] for row in lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert "checkpoint of step 6" in json.loads((run / "summary.json").read_text())["exit_reason"]

    disk.make_room()
    process = limen(f"resume={run}")
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert [row["step"] for row in lines(run / "metrics.jsonl") if row["incarnation"] == 1] == [3, 4, 5, 6, 7, 8]
    assert find_checkpoint(run, pytest.fail).step == 8
