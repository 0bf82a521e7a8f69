"""What is found out of real processes: one that hangs in C code, one that is stopped, one that does not listen, one that is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from configs.schema import RewardConfig, RewardPart
from orchestrator.stacks import look, portray
from rewards.contract import RewardItem
from rewards.pool import RewardPool
from rollout.stack_signal import listen

pytestmark = pytest.mark.timeout(60)

LISTEN = "from rollout.stack_signal import listen\nlisten()\nlisten()\n"
READY = "print('ready', flush=True)\n"
# The pattern backtracks for years within one call of C code that holds the interpreter's lock; a second thread waits for that lock.
HANG = """
import re, threading, time
def waiting_for_the_lock():
    time.sleep(0.3)
    while True: pass
def hanging_in_c():
    re.match(r'(a+)+$', 'a' * 60 + 'b')
threading.Thread(target=waiting_for_the_lock, daemon=True).start()
"""


@pytest.fixture
def run():
    processes = []

    def start(code):
        processes.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        for member in [*psutil.Process(process.pid).children(), process] if process.poll() is None else []:
            member.kill()
        process.wait()


def test_a_process_that_hangs_in_c_and_holds_the_lock_writes_the_stacks_of_all_its_threads(run):
    process = run(LISTEN + HANG + READY + "hanging_in_c()")
    time.sleep(0.5)
    (portrait,) = portray([process.pid], 5.0).values()
    assert portrait.well
    assert "in hanging_in_c" in portrait.text
    assert "in waiting_for_the_lock" in portrait.text
    assert portrait.text.startswith(f"process {process.pid} ({sys.executable} -c")
    again = portray([process.pid], 5.0)[process.pid]
    assert again.text.count("in hanging_in_c") == 1, "the stacks of the first time are gone"
    assert process.poll() is None


def test_a_stopped_process_is_described_from_outside_and_not_waited_for(run):
    process = run(LISTEN + READY + "import time; time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    (portrait,) = portray([process.pid], 10.0).values()
    assert time.monotonic() - started < 5
    assert not portrait.well
    assert portrait.verdict == "is stopped, by SIGSTOP or SIGTSTP"
    assert f"  thread {process.pid} " in portrait.text
    assert "state T" in portrait.text
    assert look([process.pid])[process.pid].state == "stopped"
    os.kill(process.pid, signal.SIGCONT)
    assert portray([process.pid], 5.0)[process.pid].well


def test_who_does_not_listen_is_not_sent_a_signal_that_would_end_it(run):
    process = run(READY + "import time; time.sleep(60)")
    (portrait,) = portray([process.pid], 5.0).values()
    assert not portrait.well
    assert "does not listen" in portrait.verdict
    assert process.poll() is None


def test_who_blocks_the_signal_is_told_apart_within_the_limit(run):
    blocked = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    process = run(LISTEN + blocked + READY + "time.sleep(60)")
    started = time.monotonic()
    (portrait,) = portray([process.pid], 0.5).values()
    assert 0.5 <= time.monotonic() - started < 3
    assert portrait.verdict == "is sleeping and does not answer the signal that asks for its stacks"
    assert "in kernel at" in portrait.text


def test_children_are_in_the_picture_and_a_process_that_ended_is_gone(run):
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {LISTEN + READY + 'import time; time.sleep(61)'!r}]).wait()"
    parent = run(LISTEN + code)
    (portrait,) = portray([parent.pid], 5.0).values()
    assert f"child of {parent.pid}" in portrait.text
    assert portrait.text.count("most recent call first") >= 2
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    child.kill()
    assert portray([parent.pid], 5.0)[parent.pid].verdict == "is gone"
    assert look([parent.pid])[parent.pid].rss_bytes == 0


def test_a_driver_is_shown_without_those_it_has_started_and_they_are_shown_beside_it(run):
    """A private instance's processes are the driver's descendants; asked twice at once, one would give its stacks away once."""
    listen.__wrapped__()  # anew: another test of this process may have closed the file
    process = run(LISTEN + READY + "def rest():\n    import time; time.sleep(60)\nrest()")
    until = time.monotonic() + 20
    while "in rest" not in (portraits := portray([os.getpid(), process.pid], 5.0))[process.pid].text:
        assert time.monotonic() < until  # it may not have come there yet
    assert portraits[process.pid].well
    assert "in test_a_driver_is_shown" in portraits[os.getpid()].text
    assert "in rest" not in portraits[os.getpid()].text


def _score(pool, item):
    with contextlib.suppress(RuntimeError):  # the pool is closed under it
        pool.score([item])


@pytest.mark.parametrize("confined", [False, True])
def test_a_verifier_process_shows_where_its_verifier_hangs(tmp_path, confined):
    (tmp_path / "slow.py").write_text("import time\ndef score(completion, answer):\n    time.sleep(30)\n")
    part = RewardPart(function=f"{tmp_path / 'slow.py'}:score", confined=confined)
    item = RewardItem(prompt="", completion="1", answer="1", prompt_id="p", part=None, source="s", num_tokens=1, options={})
    with RewardPool(RewardConfig(parts={"slow": part}, timeout_s=20.0)) as pool:
        threading.Thread(target=_score, args=(pool, item), daemon=True).start()
        while pool.health().num_running == 0:
            time.sleep(0.01)
        (pid,) = pool.health().pids
        (portrait,) = portray([pid], 5.0).values()
    assert portrait.well
    assert f'File "{tmp_path / "slow.py"}", line 3 in score' in portrait.text
