"""SIGTERM and Ctrl-C at every moment of a run: real processes with real parts, which stand still where a file in the user's folder says so.

The runs of one story follow one another in one folder, each resumed from what the one before left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from orchestrator.commands import Interrupt, heard
from orchestrator.console import PlainView, to_stderr
from orchestrator.grace import StepInHand, step_may_take_s

SMALL = [
    "model.embedded.steps=120",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=2",
    "evaluation.before=false",
    "evaluation.after=false",
    "evaluation.max_prompts_per_stratum=4",
    "evaluation.num_samples=1",
    "reward.parts.exact_integer.function=my_reward.py:score",
    "reward.timeout_s=100",
    "log.heartbeat_every_s=0.2",
    "log.tensorboard=false",
    "steps=5000",
]
REWARD = """
import os, time
def score(completion, answer):
    while os.path.exists({hold!r}):
        time.sleep(0.02)
    return float(completion.strip() == str(answer))
"""
# limen train, whose checkpoints stand still before they are sealed
DRIVER = """
import os, sys, time
from orchestrator.checkpoint import Checkpoints
from orchestrator.main import main
seal = Checkpoints._seal
def slow(self, *rest):
    while os.path.exists({hold!r}):
        open({held!r}, "w").close()
        time.sleep(0.02)
    return seal(self, *rest)
Checkpoints._seal = slow
sys.exit(main())
"""


class Story:
    """A user's folder, a run in it, and the process that is the run's present life."""

    def __init__(self, folder):
        self.folder, self.run_dir = folder, folder / "run"
        self.hold_scores, self.hold_save, self.save_held = folder / "hold_scores", folder / "hold_save", folder / "save_held"
        (folder / "my_reward.py").write_text(REWARD.format(hold=str(self.hold_scores)))
        (folder / "driver.py").write_text(DRIVER.format(hold=str(self.hold_save), held=str(self.save_held)))

    def start(self, *overrides):
        where = f"resume={self.run_dir}" if self.run_dir.exists() else f"run_dir={self.run_dir}"
        own = SMALL if where.startswith("run_dir") else []
        self.lives = len({row["incarnation"] for row in self.rows()})
        for file in (self.hold_scores, self.hold_save, self.save_held):
            file.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "driver.py", "train", where, *own, *overrides],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def rows(self):
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has_trained(self, num_steps):
        rows = self.rows()
        first = rows and max(row["incarnation"] for row in rows)
        return (
            sum(row["incarnation"] == first for row in rows) >= num_steps and len({r["incarnation"] for r in rows}) > self.lives
        )

    def stands_in(self, stage, for_s, after=None):
        """The last heartbeat of this process says that the run is in this stage for so long at least, and which step was the last."""
        path = self.run_dir / "heartbeat.json"
        beat = json.loads(path.read_text()) if path.exists() else {}
        return (
            beat.get("pid") == self.process.pid
            and (beat["stage"], beat["step"]) == (stage, beat["step"] if after is None else after)
            and (beat["stage_s"] >= for_s)
        )

    def wait_for(self, condition, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "the run did not get there in time"
            time.sleep(0.02)

    def end(self, *signals, group=False, within_s):
        """Sends the signals and returns the output; nothing of the run may be left then."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        send = os.killpg if group else os.kill
        for number in signals:
            send(self.process.pid, number)
            time.sleep(0.3)
        started = time.monotonic()
        out, _ = self.process.communicate(timeout=100)
        took = time.monotonic() - started
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"left behind: {alive}\n{out}"
        assert took < within_s, out
        return out

    def saved(self):
        folders = (self.run_dir / "checkpoints").glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in folders if not path.suffix)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return Story(tmp_path_factory.mktemp("story"))


@pytest.mark.cluster
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_b151_sigterm_at_every_moment(story, tmp_path):
    """B151, 6.4: each ends with 143 in its time, leaves a checkpoint of the last whole step where there is one, and no process."""
    before_the_first_step(Story(tmp_path))
    while_scores_are_awaited_and_again_while_it_saves(story)
    while_a_checkpoint_is_written(story)
    during_an_evaluation_longer_than_the_grace_period(story)
    during_an_update_longer_than_the_grace_period(story)


def before_the_first_step(story):
    process = story.start()
    story.wait_for(lambda: story.stands_in("starting actors", 1.0))
    out = story.end(signal.SIGTERM, group=True, within_s=60)
    assert process.returncode == 143, out
    assert out.splitlines()[-1] == "stopped: no step was done"
    assert story.saved() == []
    assert json.loads((story.run_dir / "summary.json").read_text())["exit_reason"] == "stopped"


def while_scores_are_awaited_and_again_while_it_saves(story):
    """The first signal goes to every process of the run, as schedulers send it: the actors are there for the save all the same."""
    process = story.start("checkpoint.every=2")
    story.wait_for(lambda: story.has_trained(3))
    story.hold_scores.touch()
    story.wait_for(lambda: story.stands_in("generate", 1.0))
    before, last = story.saved(), story.rows()[-1]["step"]
    story.hold_save.touch()
    os.killpg(process.pid, signal.SIGTERM)
    if last not in before:
        story.wait_for(story.save_held.exists)
    out = story.end(signal.SIGTERM, within_s=5)
    assert process.returncode == 143, out
    assert story.saved() == before


def while_a_checkpoint_is_written(story):
    before = story.saved()
    process = story.start("checkpoint.every=2")
    story.wait_for(lambda: story.has_trained(1))
    story.hold_save.touch()
    story.wait_for(story.save_held.exists)
    assert story.saved() == before
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "the save is waited for"
    story.hold_save.unlink()
    out = story.end(within_s=60)
    assert process.returncode == 143, out
    assert story.rows()[0]["step"] == 1
    assert story.rows()[-1]["step"] == story.saved()[-1] > before[-1]
    assert out.splitlines()[-1] == f"stopped: step-{story.saved()[-1]:06d} is saved, the last whole step"


def during_an_evaluation_longer_than_the_grace_period(story):
    process = story.start("evaluation.every=1", "checkpoint.every=1000", "deadlines.grace_s=30")
    story.wait_for(lambda: story.has_trained(1))
    story.hold_scores.touch()
    story.wait_for(lambda: story.stands_in("evaluate", 1.0) or release_if_generating(story))
    out = story.end(signal.SIGTERM, within_s=30)
    assert process.returncode == 143, out
    assert story.rows()[-1]["step"] == story.saved()[-1], "the step whose evaluation was abandoned is whole"
    assert "eval/pass@1" not in story.rows()[-1]
    assert out.splitlines()[-1] == f"stopped: step-{story.saved()[-1]:06d} is saved, the last whole step"


def release_if_generating(story):
    """The scores that are held are to be those of an evaluation."""
    if story.stands_in("generate", 0.5):
        story.hold_scores.unlink(missing_ok=True)
        time.sleep(0.05)
        story.hold_scores.touch()
    return False


def during_an_update_longer_than_the_grace_period(story):
    """Half an update is nobody's weights: the checkpoint before it stands, and the last line says so."""
    before = story.saved()[-1]
    process = story.start("evaluation.every=0", "batch.num_passes=100", "deadlines.grace_s=3")
    story.wait_for(lambda: story.has_trained(1))
    story.wait_for(lambda: story.stands_in("train", 0.1, after=story.rows()[-1]["step"]))
    out = story.end(signal.SIGTERM, within_s=4)
    assert process.returncode == 143, out
    assert story.saved()[-1] == before
    assert f"step-{before:06d} stands" in out.splitlines()[-1], out
    assert f"step {story.rows()[-1]['step']} is not saved" in out.splitlines()[-1]


# ---- a terminal that goes, or holds ----------------------------------------------------------------------------------


async def test_a_terminal_that_is_closed_ends_the_run_on_whole_steps_however_often_it_is_told():
    """Kernel and shell each send SIGHUP, and a session manager SIGTERM with it: none of them is the second signal that stops at once."""
    stops, said = [], []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    interrupt = Interrupt(lambda: not stops.append("asked"), said.append)
    try:
        codes = []
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)
            codes.append(interrupt.exit_code)
    finally:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)
    assert (codes, stops) == ([129, 129, 143, 143], ["asked"])
    assert said == ["SIGHUP: ending after the step in hand and saving it; once more to stop at once"]


def test_under_nohup_a_closed_terminal_is_not_heard(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    assert heard() == {signal.SIGINT, signal.SIGTERM}


@pytest.fixture
def held():
    """A pipe that takes nothing more and that nobody reads."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    yield os.fdopen(writes, "w")
    os.close(reads)


def test_a_run_does_not_wait_for_whoever_holds_its_output(held, monkeypatch):
    monkeypatch.setattr(sys, "stdout", held)
    monkeypatch.setattr(sys, "stderr", held)
    PlainView(2, quiet=False).line("a line that finds no room")
    to_stderr("another")


@pytest.mark.parametrize("how", ["Vigil(0.2, ''); time.sleep(60)", "grace.leave_after(0.2, 3, lambda: 'why'); time.sleep(60)"])
def test_a_driver_that_hangs_is_left_though_its_output_is_held(held, how):
    """Also where the interpreter would write the stacks by itself, and keep every thread waiting."""
    code = f"import time; from orchestrator import grace; from orchestrator.departure import Vigil; grace.WORDS_S = 0.5; {how}"
    assert subprocess.run([sys.executable, "-c", code], stderr=held, check=False, timeout=50).returncode == 3


# ---- the grace period ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace_s", "save_s", "expected"),
    [
        (60.0, 5.0, 40.0),  # 60 - 2 x 5 - 10
        (60.0, None, 30.0),  # 60 - 20 - 10
        (15.0, 2.0, 6.0),  # 15 - 4 - 5
        (30.0, 20.0, 0.0),
    ],
)
def test_the_step_in_hand_has_what_a_save_and_the_end_leave(grace_s, save_s, expected):
    assert step_may_take_s(grace_s, save_s) == pytest.approx(expected)


async def test_a_save_in_hand_is_not_abandoned():
    """The time for the step passes while its checkpoint is written: that ends, and the loop by itself after it."""
    step, done = StepInHand(0.3), []

    async def loop():
        with step.saving():
            step.limit()  # 0.1 s from now
            await asyncio.sleep(0.3)
            done.append("saved")
        return "stopped after the save"

    assert await step.run(loop()) == "stopped after the save"
    assert done == ["saved"]
    assert not step.abandoned


async def test_a_step_is_abandoned_in_time_and_only_for_want_of_time():
    step = StepInHand(0.3)
    started = time.monotonic()
    asyncio.get_running_loop().call_later(0.05, step.limit)
    assert await step.run(asyncio.sleep(60, "done")) == "stopped"
    assert 0.1 < time.monotonic() - started < 0.3
    assert step.abandoned

    other = asyncio.create_task(StepInHand(0.3).run(asyncio.sleep(60, "done")))
    await asyncio.sleep(0.05)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other


async def test_without_a_grace_period_the_step_takes_its_time():
    step = StepInHand(None)
    asyncio.get_running_loop().call_soon(step.limit)
    assert await step.run(asyncio.sleep(0.3, "done")) == "done"
