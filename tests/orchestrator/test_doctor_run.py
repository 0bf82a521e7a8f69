"""What `limen doctor RUN` says of runs that go on, have ended, were killed, or stand still. The folders are written by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from orchestrator.main import main
from orchestrator.run_folder import locked

NOW = 2e9


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A run of 42 steps whose last checkpoint is of step 40, seen 5 s ago in the middle of a train step; ``say`` gives the diagnosis."""
    monkeypatch.setattr(
        "orchestrator.doctor_run.time", SimpleNamespace(time=lambda: NOW, strftime=time.strftime, localtime=time.localtime)
    )
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-000040").mkdir(parents=True)
    (folder / "checkpoints" / "step-000041.partial").mkdir()
    (folder / "checkpoints" / "step-000040" / "manifest.json").write_text('{"step": 40}')
    (folder / "config.yaml").write_text("")

    class Run:
        def __init__(self):
            self.folder = folder
            self.beat = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "began": psutil.Process().create_time() + 1,
                "time": NOW - 5,
                "every_s": 30.0,
                "step": 42,
                "stage": "train",
                "stage_s": 90.0,
                "waits": [{"owner": "learner", "name": "train step 43", "age_s": 90.0, "deadline_s": 1800.0}],
                "depths": {"open_visits": 16},
                "processes": {"learner-0": {"pid": 17, "state": "running", "rss_bytes": 3 * 2**20, "cpu_s": 1.0}},
            }
            self.metrics = [{"step": step, "version": step, "incarnation": 0} for step in (41, 42)]
            self.events = [{"event": "started"}]
            self.summary = None

        def say(self):
            (folder / "heartbeat.json").write_text(json.dumps(self.beat))
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.metrics) + '{"step": 43, "ver')
            events = [{"time": NOW - 600, "incarnation": 0} | event for event in self.events]
            (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
            if self.summary:
                (folder / "summary.json").write_text(json.dumps(self.summary))
            assert main(["doctor", str(folder)]) == 0
            return capsys.readouterr().out

    return Run()


def test_a_run_that_is_well(run):
    lines = run.say().splitlines()
    assert lines[:4] == [
        f"run {run.folder}",
        f"state: alive: its driver, process {os.getpid()} on {socket.gethostname()}, runs; last heartbeat 5.0 s ago",
        "last step: 42, version 42",
        "doing: train for 1 min 35 s, after step 42",
    ]
    assert lines[4:7] == [
        "  the driver waits for learner: 'train step 43', for 1 min 35 s of at most 30 min 0 s",
        "  learner-0: process 17, running, 3 MiB",
        "  queues: open_visits 16",
    ]
    assert lines[-2].startswith("checkpoint: step-000040, written ")
    assert lines[-2].endswith("; 2 steps came after it")
    assert lines[-1] == "next: nothing: let it run"


def test_a_wait_that_has_used_most_of_its_time_is_pointed_at(run):
    run.beat["waits"][0]["age_s"] = 1400.0
    assert "next: learner has used 78% of its time for 'train step 43'" in run.say()


def test_what_was_lost_and_replaced_the_breaches_and_the_alarms(run):
    culprits = {"learner-1": "process 9 is stopped, by SIGSTOP or SIGTSTP"}
    run.events += [{"event": "worker_lost", "worker": f"rollout-{i}", "kind": "dead", "reason": "killed"} for i in range(7)]
    run.events += [
        {"event": "worker_replaced", "worker": "rollout-0", "by": "rollout-0.1", "start_s": 75.0},
        {"event": "reward_pool_replaced", "node": "n1", "reason": "it died"},
        {
            "event": "deadline_passed",
            "owner": "learner",
            "wait": "train step 9",
            "deadline_s": 60.0,
            "culprits": culprits,
            "stacks": "stacks/a.txt",
        },
        {"event": "alarm", "step": 30, "kind": "k", "text": "entropy fell", "advice": "go back", "key": "algorithm.entropy_beta"},
        {"event": "push_retried"},
        {"event": "push_retried"},
    ]
    out = run.say()
    assert "worker lost: 7 times, the last ones:" in out
    assert "rollout-1 was" not in out
    assert "rollout-2 was dead: killed" in out
    assert "rollout-0 by rollout-0.1, after 1 min 15 s" in out
    assert "that of node n1: it died" in out
    assert (
        "learner did not finish 'train step 9' within 1 min 0 s; learner-1: process 9 is stopped, by SIGSTOP or SIGTSTP; stacks: stacks/a.txt"
        in out
    )
    assert "step 30: entropy fell: go back (algorithm.entropy_beta)" in out
    assert "other events: push_retried 2" in out
    assert f"next: read the newest file in {run.folder / 'stacks'}" in out


def test_returns_to_a_checkpoint_are_told_and_are_no_starts(run):
    back = {
        "event": "rolled_back",
        "from_step": 42,
        "to_step": 40,
        "checkpoint": "step-000040",
        "reason": "learner rank 1 died in 'train'",
    }
    first = back | {"from_step": 3, "to_step": 0, "checkpoint": None, "incarnation": 1}
    run.events += [first, {"event": "started", "incarnation": 2}, back | {"incarnation": 3}]
    out = run.say()
    assert out.startswith(f"run {run.folder}, started 2 times, went back to a checkpoint 2 times\n")
    assert "from step 3 to 0 (no checkpoint), for learner rank 1 died in 'train'" in out
    assert "from step 42 to 40 (step-000040), for learner rank 1 died in 'train'" in out


def test_a_driver_that_was_killed(run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    run.beat["pid"] = process.pid
    out = run.say()
    assert (
        f"state: dead: its driver, process {process.pid} on {socket.gethostname()}, is gone without having ended the run" in out
    )
    assert "last seen doing: train for 1 min 30 s" in out
    assert f"next: limen train resume={run.folder} goes on from its last checkpoint" in out


def test_the_stacks_that_are_read_are_the_ones_written_last(run):
    """The file of a driver is there from its start on, and empty where it never stood still."""
    run.summary = {"exit_reason": "stopped", "incarnation": 0}
    folder = run.folder / "stacks"
    folder.mkdir()
    empty, driver, learner = (
        folder / f"2030010{day}-000000-{name}.txt" for day, name in ((3, "driver"), (1, "driver"), (2, "learner"))
    )
    empty.touch()
    assert "next: read" not in run.say()
    for seconds, file in enumerate((learner, driver)):
        file.write_text("stacks")
        os.utime(file, (NOW + seconds, NOW + seconds))
    assert f"next: read {driver}: what was seen" in run.say()


def test_a_number_that_is_another_process_by_now(run):
    run.beat["began"] = psutil.Process().create_time() - 60
    assert "state: dead: " in run.say()


def test_a_driver_that_is_stopped_and_one_whose_loop_stands_still(run):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.beat |= {"pid": process.pid, "began": NOW, "time": NOW - 200}
        assert f"process {process.pid} on {socket.gethostname()}, is there (" in run.say()
        assert "its event loop stands still: last heartbeat 3 min 20 s ago, one is due every 30 s" in run.say()
        os.kill(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert f"is stopped, by SIGSTOP or SIGTSTP: `kill -CONT {process.pid}` lets it go on" in run.say()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("age_s", "word"), [(10, "is alive"), (500, "is silent")])
def test_a_driver_on_another_host_is_known_by_its_heartbeat(run, age_s, word):
    run.beat |= {"host": "elsewhere", "time": NOW - age_s}
    assert f"its driver, process {os.getpid()} on elsewhere, {word}: last heartbeat" in run.say()


def test_a_run_that_ended_and_one_that_stopped_itself_and_was_resumed(run):
    run.summary = {"exit_reason": "done", "incarnation": 0}
    out = run.say()
    assert "state: ended: done" in out
    assert f"next: limen eval checkpoint_dir={run.folder}" in out
    run.summary["exit_reason"] = "the verifier failed on 9 of 9"
    (run.folder / "stacks").mkdir()
    (run.folder / "stacks" / "20300101-000000-learner.txt").write_text("learner did not finish")
    out = run.say()
    assert "state: ended: the verifier failed on 9 of 9" in out
    assert f"next: read {run.folder}/stacks/20300101-000000-learner.txt" in out
    assert out.endswith(f"next: limen train resume={run.folder} goes on from its last checkpoint\n")
    run.events.append({"event": "started", "incarnation": 1})
    assert "state: alive" in run.say(), "the summary is of the time before"


def test_a_run_that_is_resumed_and_has_sent_no_heartbeat(run):
    """What the folder tells is of the life before: neither "ended" nor "dead" is true."""
    run.summary = {"exit_reason": "stopped", "incarnation": 0}
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    run.beat["pid"] = process.pid
    with locked(run.folder):
        out = run.say()
    assert f"state: starting: process {os.getpid()} holds the folder, its first heartbeat is still to come\n" in out
    assert "learner" not in out
    assert out.endswith("next: nothing: let it run\n")
    assert "state: ended: stopped" in run.say()


def test_a_run_that_ended_before_it_began(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("")
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "state: it has no heartbeat: it ended before its actors were started\n" in out
    assert "next: start it anew" in out


def test_files_that_were_cut_or_hold_something_else_are_passed_over(run):
    run.say()
    (run.folder / "summary.json").write_text('{"exit_reason": "do')
    (run.folder / "checkpoints" / "step-000040" / "manifest.json").write_bytes(b"\xff{")
    for name in ("events.jsonl", "metrics.jsonl"):
        with (run.folder / name).open("ab") as file:
            file.write(b'\n3\nnull\n["a"]\n\xff\x00\n')
    assert main(["doctor", str(run.folder)]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [("events.jsonl", '{"event": "worker_lost"}\n'), ("heartbeat.json", '{"a": 1}'), ("events.jsonl", '{"incarnation": "x"}\n')],
)
def test_a_folder_of_something_else_is_one_line(tmp_path, capsys, name, text):
    (tmp_path / name).write_text(text)
    assert main(["doctor", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"limen: {tmp_path}: holds what `limen train` of this version does not write (")


def test_the_folder_of_several_runs_names_them(run, capsys):
    run.say()
    assert main(["doctor", str(run.folder.parent)]) == 2
    assert capsys.readouterr().err.endswith("is not the folder of a run; it holds runs: run\n")


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"limen: {tmp_path}: is not the folder of a run; name one that `limen train` printed as `run folder`\n"
    )
