"""The pool with real processes and verifiers that do their worst."""

import asyncio
import contextlib
import errno
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import rewards.lane
import rewards.process
from configs.errors import ConfigError
from configs.schema import RewardConfig, RewardPart
from rewards.contract import RewardError, RewardItem
from rewards.lane import MAX_CALLS, Task
from rewards.pool import RewardPool
from rewards.worker import read_score
from rollout.records import Outcome, Status

pytestmark = pytest.mark.timeout(90)

HOSTILE = Path(__file__).with_name("hostile_verifiers.py")
TIMEOUT_S = 1.0
KILL_S = 3.0  # allowed for killing and replacing a process, on a busy machine


def part(function, **keys):
    return RewardPart(function=f"{HOSTILE}:{function}", **keys)


UNSET = {"part": None, "source": None, "num_tokens": None, "options": {}}


def item(completion, answer="1", **keys):
    return RewardItem(**{"prompt": "p", "completion": completion, "answer": answer, "prompt_id": "id"} | UNSET | keys)


def make_pool(num_workers=1, timeout_s=TIMEOUT_S, memory_gib=None, **parts):
    return RewardPool(RewardConfig(parts=parts, num_workers=num_workers, timeout_s=timeout_s, memory_gib=memory_gib))


@pytest.fixture(scope="module")
def pool():
    """Two processes that do what a completion says."""
    with make_pool(num_workers=2, obey=part("obey")) as made:
        yield made


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def noted(path, count):
    """The process ids that verifiers have written into a file."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = [int(line) for line in path.read_text().split()] if path.exists() else []
        if len(pids) >= count:
            return pids
        time.sleep(0.02)
    raise AssertionError(f"{count} processes wanted, {pids} seen")


def gone(pids, within_s=5.0):
    deadline = time.monotonic() + within_s
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(lives(pid) for pid in pids)


def test_order_is_kept_and_a_missing_answer_moves_nothing():
    """Case B39."""
    with make_pool(num_workers=2, math=RewardPart(function="exact_integer")) as pool:
        scores = pool.score([item(t, a) for t, a in [("4", "4"), ("none", "5"), ("6", "6"), ("", "7"), ("so 8", "8")]])
        assert [s.value for s in scores] == [1, 0, 1, 0, 1]
        assert [s.extracted for s in scores] == ["4", None, "6", None, "8"]
        assert [s.outcome for s in scores] == ["right", "unparsed", "right", "unparsed", "right"]
        many = pool.score([item(f"it is {i}", str(i if i % 3 else i + 1)) for i in range(1000)])
        assert [s.value for s in many] == [float(i % 3 != 0) for i in range(1000)]
        assert [s.extracted for s in many] == [str(i) for i in range(1000)]
        assert pool.score([]) == []


@pytest.mark.parametrize("act", ["sleep", "hold_interpreter", "ignore_signals", "print_for_ever"])
def test_one_of_fifty_never_returns(pool, act):
    completions = ["1"] * 50
    completions[17] = act
    begun = time.monotonic()
    scores = pool.score([item(c) for c in completions])
    took_s = time.monotonic() - begun
    assert [s.value for s in scores] == [None if i == 17 else 1.0 for i in range(50)]
    assert (scores[17].status, scores[17].outcome, scores[17].accuracy) == (Status.TIMEOUT, Outcome.NONE, None)
    assert "obey" in scores[17].detail
    assert TIMEOUT_S <= scores[17].time_s < TIMEOUT_S + KILL_S
    assert took_s < TIMEOUT_S + KILL_S


def test_many_that_never_return_are_each_a_timeout():
    """More than one chunk's worth of tries: those queued behind a stuck one are not blamed for it."""
    with make_pool(timeout_s=0.2, obey=part("obey")) as pool:
        scores = pool.score([item(c) for c in ["sleep"] * 5 + ["1"] * 5])
        assert [s.status for s in scores] == [Status.TIMEOUT] * 5 + [Status.OK] * 5
        assert pool.health().num_lost == 5


def test_the_clock_starts_when_work_starts():
    """Six items of 0.4 s in one process, all waiting from the start, need longer than the deadline of one."""
    with make_pool(obey=part("obey")) as pool:
        scores = pool.score([item("nap 0.4")] * 6)
        assert [s.status for s in scores] == [Status.OK] * 6
        assert sum(s.time_s for s in scores) > 2 * TIMEOUT_S


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("exit 3", "exited with code 3"),
        ("exit 0", "exited with code 0"),
        ("kill SIGKILL", "was killed by SIGKILL"),
        ("kill SIGTERM", "was killed by SIGTERM"),
        ("segfault", "was killed by SIGSEGV"),
    ],
)
def test_a_process_that_dies_costs_its_item_only(pool, act, told):
    lost = pool.health().num_lost
    scores = pool.score([item(c) for c in ["1", "1", act, "1", "1"]])
    assert [s.value for s in scores] == [1.0, 1.0, None, 1.0, 1.0]
    assert scores[2].status is Status.ERROR
    assert told in scores[2].detail
    assert "obey" in scores[2].detail
    assert pool.score([item("1")])[0].value == 1.0
    assert pool.health().num_lost == lost + 1 + (act == "kill SIGKILL")  # that may be anybody's doing, so it is judged once more


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("busy", [True, False])
def test_a_process_that_somebody_kills_or_stops_costs_no_item(number, busy):
    """B170, of a reward worker: idle or at work, what it was given is judged by the next, long before a limit of its own."""
    with make_pool(timeout_s=60.0, obey=part("obey")) as pool, ThreadPoolExecutor(1) as executor:
        (pid,) = pool.health().pids
        pending = executor.submit(pool.score, [item("nap 1.0"), item("0"), item("1")]) if busy else None
        while busy and pool.health().num_running == 0:
            time.sleep(0.01)
        os.kill(pid, number)
        begun = time.monotonic()
        scores = pending.result() if pending else pool.score([item("nap 0.0"), item("0"), item("1")])
        assert [score.value for score in scores] == [1.0, 0.0, 1.0]
        assert time.monotonic() - begun < 20.0
        assert pool.health().num_lost == 1
        assert gone([pid])


def test_a_process_that_somebody_stops_while_it_loads_is_replaced_by_one_that_loads(tmp_path):
    """It stood still for START_S, two minutes, and every score with it."""
    code = """
        import os, pathlib, signal
        loads = pathlib.Path(__file__).with_name("loads")
        loads.open("a").write("x")
        if loads.read_text() == "xx":
            os.kill(os.getpid(), signal.SIGSTOP)
        def right(completion, answer):
            return float(completion == answer)
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    with make_pool(timeout_s=60.0, mine=RewardPart(function=f"{tmp_path}/mine.py:right")) as pool:
        (pid,) = pool.health().pids
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        assert [score.value for score in pool.score([item("1"), item("0")])] == [1.0, 0.0]
        assert time.monotonic() - begun < 40.0
        assert (tmp_path / "loads").read_text() == "xxx"


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("raise", "ConnectionError: the judge is away"),
        ("sys_exit 3", "SystemExit: 3"),
        ("unprintable", "Unprintable"),
        ("recurse", "RecursionError"),
        ("junk none", "None of type NoneType, not a number"),
        ("junk nan", "value nan"),
        ("junk inf", "value inf"),
        ("junk list", "of type list"),
        ("junk tuple", "of type tuple"),
        ("junk text", "of type str"),
        ("junk array", "of type ndarray"),
        ("junk array_of_one", "of type ndarray"),
        ("junk complex", "of type complex"),
        ("junk too_large", "OverflowError"),
        ("junk accuracy_above_one", "accuracy 1.5"),
        ("junk unknown_key", "did you mean 'accuracy'"),
        ("junk no_value", "without 'value'"),
        (
            "junk unknown_outcome",
            "hostile_verifiers.py:obey: ValueError: returned the outcome 'great', which is none of right, wrong, unparsed, time_limit, "
            "memory_limit, output_limit, syntax, crash, none",
        ),
        ("junk half_a_name", "a measure named 'half a"),
        ("junk long_name", "1 to 100 printable characters"),
        ("junk no_name", "a measure named 3"),
        ("junk many_measures", "at most 100"),
    ],
)
def test_a_wrong_return_or_exception_is_an_error_with_the_function_named(pool, act, told):
    lost = pool.health().num_lost
    before, score, after = pool.score([item("1"), item(act), item("0")])
    assert (score.status, score.outcome, score.value, score.accuracy) == (Status.ERROR, Outcome.NONE, None, None)
    assert told in score.detail
    assert f"{HOSTILE}:obey" in score.detail
    assert (before.value, after.value) == (1.0, 0.0)
    assert pool.health().num_lost == lost  # none of these costs a process


def test_failures_of_the_verifier_are_kept_apart_from_a_wrong_answer(pool):
    """Case B61."""
    scores = pool.score([item("1"), item("raise"), item("sleep"), item("2")])
    assert [s.status for s in scores] == ["ok", "error", "timeout", "ok"]
    assert [s.value for s in scores] == [1.0, None, None, 0.0]


@pytest.mark.parametrize("status", ["abstain", "invalid", "timeout"])
def test_a_verifier_may_give_up_by_an_exception(pool, status):
    (score,) = pool.score([item(f"give_up {status}")])
    assert (score.status, score.value, score.outcome) == (status, None, Outcome.NONE)
    assert "as told" in score.detail


def test_each_part_has_a_deadline_of_its_own_and_the_stuck_one_is_named():
    with make_pool(timeout_s=5.0, first=part("obey"), second=part("obey", timeout_s=0.3)) as pool:
        (score,) = pool.score([item("nap 0.6")])
        assert (score.status, "'second'" in score.detail, "'first'" in score.detail) == (Status.TIMEOUT, True, False)
        assert 0.6 + 0.3 <= score.time_s < 5.0  # a whole nap and a cut one
        assert score.parts == {"first": 1.0}


def test_prints_go_nowhere_and_corrupt_nothing(pool, capfd):
    scores = pool.score([item(c) for c in ["1", "print", "1", "print"]])
    assert [s.value for s in scores] == [1.0] * 4
    assert capfd.readouterr() == ("", "")


def test_a_killed_verifier_takes_its_children_along(pool, tmp_path):
    notes = tmp_path / "pids"
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(pool.score, [item(f"family {notes}")])
        pids = noted(notes, 1)
        assert pending.result()[0].status is Status.TIMEOUT
    family = [int(line) for line in notes.read_text().split()]
    assert len(family) == 4
    assert gone(family + pids)


def test_a_fork_is_no_second_worker(pool, tmp_path):
    notes = tmp_path / "pids"
    scores = pool.score([item(f"fork_and_return {notes}"), item("1"), item("0")])
    assert [s.value for s in scores] == [1.0, 1.0, 0.0]
    assert gone(noted(notes, 1))
    assert [s.value for s in pool.score([item("1"), item("0")])] == [1.0, 0.0]


def test_a_fork_that_outlives_its_worker_delays_nothing(pool, tmp_path):
    begun = time.monotonic()
    (score,) = pool.score([item(f"fork_and_die {tmp_path / 'pids'}")])
    assert time.monotonic() - begun < TIMEOUT_S + KILL_S
    assert (score.status, "exited with code 7" in score.detail) == (Status.ERROR, True)
    assert gone(noted(tmp_path / "pids", 1))


@pytest.mark.parametrize("act", ["escape_and_die", "many_forks"])
def test_what_a_verifier_starts_in_sessions_of_its_own_dies_with_its_process(pool, tmp_path, act):
    """Also when the process ends by itself, and when one of them becomes ever another process."""
    notes = tmp_path / "pids"
    (score,) = pool.score([item(f"{act} {notes}")])
    assert score.status is (Status.ERROR if act == "escape_and_die" else Status.TIMEOUT)
    count = len(noted(notes, 20))
    assert gone(noted(notes, 20))
    time.sleep(0.3)
    assert len(noted(notes, 20)) == count  # and no more came
    assert pool.score([item("1")])[0].value == 1.0


@pytest.mark.parametrize("act", ["relays", "bomb"])
def test_processes_that_start_others_without_end_are_ended(tmp_path, act):
    with make_pool(timeout_s=0.5, obey=part("obey")) as pool:
        scores = pool.score([item(f"{act} {tmp_path}"), item("1")])
    assert [s.status for s in scores] == [Status.TIMEOUT, Status.OK]
    assert standing_in(tmp_path) == []


def standing_in(folder):
    """Processes whose working directory it is, but for those that have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
    return found


def test_a_verifier_that_turns_on_its_group_or_its_supervisor_costs_its_item_only(pool):
    scores = pool.score([item(c) for c in ("1", "kill_group", "1", "kill_supervisor", "1")])
    assert [s.value for s in scores] == [1.0, None, 1.0, None, 1.0]
    assert "was killed by SIGKILL" in scores[1].detail
    assert scores[3].status is Status.ERROR


@pytest.mark.parametrize(
    "act",
    [
        "close_all",
        "scribble nonsense",
        "scribble 7",
        'scribble ["done", 10000, false, []]',
        'scribble ["done"]',
        'scribble ["begin", [1]]',
        "scribble " + "[" * 100_000,
    ],
)
def test_a_verifier_that_gets_hold_of_the_pools_connection_harms_no_other(pool, act):
    scores = pool.score([item(c) for c in ("1", act, "1", "0")])
    assert [s.value for s in scores] == [1.0, None, 1.0, 0.0]
    assert scores[1].status is Status.ERROR
    assert pool.score([item("1")])[0].value == 1.0


FIELDS = {"status": "ok", "outcome": "right", "value": 1.0, "accuracy": 1.0, "parts": {}, "extracted": None, "time_s": 0.1}
FIELDS |= {"detail": "", "measures": {}, "consequence": "none"}


@pytest.mark.parametrize(
    "strange",
    [
        {"value": "x"},
        {"value": None},
        {"value": float("nan")},
        {"accuracy": "x"},
        {"time_s": "x"},
        {"measures": [1.0]},
        {"measures": {"m": None}},
        {"detail": [1]},
        {"extracted": 1},
        {"parts": 3},
        {"consequence": "fail"},
        {"status": "error"},
    ],
)
def test_the_parent_takes_no_fields_that_it_can_not_count_with(strange):
    assert read_score(list(FIELDS.values())).value == 1.0
    with pytest.raises((TypeError, ValueError)):
        read_score(list((FIELDS | strange).values()))


def test_a_forged_verdict_on_the_call_under_way_harms_no_other():
    with make_pool(obey=part("obey")) as pool:
        forged = "scribble " + json.dumps(["done", 1, False, [list((FIELDS | {"measures": [1.0]}).values())]])
        scores = pool.score([item(forged), item("1")])
        assert [s.status for s in scores] == [Status.ERROR, Status.OK]
        assert "wrote into the pool's connection" in scores[0].detail


def short_of_processes(monkeypatch, fails):
    """The starts of these numbers, from 1, find no more processes to be had."""
    starts, popen = itertools.count(1), subprocess.Popen

    def start(*args, **keys):
        if next(starts) in fails:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return popen(*args, **keys)

    monkeypatch.setattr(rewards.process.subprocess, "Popen", start)
    monkeypatch.setattr(rewards.lane, "RESTART_S", 0.05)


def test_what_a_new_process_lacks_for_a_moment_costs_nothing(monkeypatch):
    short_of_processes(monkeypatch, {2, 3})
    with make_pool(obey=part("obey")) as pool:
        scores = pool.score([item(c) for c in ("exit 3", "1", "1")])
        assert [s.value for s in scores] == [None, 1.0, 1.0]


def test_without_a_new_process_items_are_errors_and_the_pool_goes_on(monkeypatch):
    short_of_processes(monkeypatch, range(2, 8))
    with make_pool(obey=part("obey")) as pool:
        scores = pool.score([item(c) for c in ("exit 3", "1")])
        assert [s.status for s in scores] == [Status.ERROR, Status.ERROR]
        assert "can not be started: [Errno 11] no more processes" in scores[1].detail
        assert pool.score([item("1")])[0].value == 1.0


def test_a_first_process_that_can_not_be_started_is_told_at_once(monkeypatch):
    short_of_processes(monkeypatch, {1})
    with pytest.raises(RewardError, match="can not be started"):
        make_pool(obey=part("obey"))


def test_what_was_scored_is_let_go_of_at_once(pool):
    """Texts are long, and so few objects that the collector of cycles hardly ever comes."""
    pool.score([item("1")])
    gc.collect()
    gc.disable()
    try:
        pool.score([item("1")] * 200)
        left = sum(isinstance(thing, Task) for thing in gc.get_objects())
    finally:
        gc.enable()
    assert left <= 2 * MAX_CALLS, "the last calls of each process"


def test_cpu_time_is_bounded_anew_for_each_call():
    """The limit moves with the time already used; beyond it the status is that of a deadline."""
    with make_pool(timeout_s=15.0, obey=part("obey")) as pool:
        first, _, second, cut = pool.score([item("cpu_limit"), item("burn 2"), item("cpu_limit"), item("kill SIGXCPU")])
        assert first.extracted == second.extracted
        for score in (first, second):
            assert 15.0 <= score.value <= 17.0  # whole seconds, and one for rounding
        assert (cut.status, "CPU time" in cut.detail) == (Status.TIMEOUT, True)


def test_a_process_is_replaced_after_its_share_of_items():
    reward = RewardConfig(parts={"obey": part("obey")}, timeout_s=20.0, items_per_process=3)
    with RewardPool(reward) as pool:
        pids = [s.extracted for s in pool.score([item("pid")] * 8)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 2]
        assert (pool.health().num_recycled, pool.health().num_lost) == (2, 0)


def test_a_process_that_keeps_half_of_its_memory_is_replaced_before_that_fails_an_item():
    with make_pool(timeout_s=20.0, memory_gib=1.0, obey=part("obey")) as pool:
        scores = pool.score([item("keep_memory 350")] * 5)
        assert [s.value for s in scores] == [1.0] * 5
        assert len({s.extracted for s in scores}) > 1
        assert pool.health().num_recycled >= 1


def test_nothing_waits_behind_a_stuck_item(tmp_path):
    """999 items are judged while one hangs, though some were sent to its process with it."""
    path = tmp_path / "seen"
    with make_pool(num_workers=2, timeout_s=8.0, seen=part("seen", params={"path": str(path)})) as pool:
        completions = [str(i) for i in range(1000)]
        completions[137] = "sleep"
        with ThreadPoolExecutor(1) as executor:
            pending = executor.submit(pool.score, [item(c, c) for c in completions])
            deadline = time.monotonic() + 7
            while len(set(path.read_text().split("\n")) if path.exists() else ()) < 1001:  # with the empty one after the last
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert not pending.done()
            assert pool.score([item("x", "x")] * 100)[99].value == 1.0
            assert not pending.done()
            scores = pending.result()
    assert [s.value for s in scores] == [None if i == 137 else 1.0 for i in range(1000)]
    assert scores[137].status is Status.TIMEOUT


def test_memory_limit():
    with make_pool(timeout_s=20.0, memory_gib=1.0, obey=part("obey")) as pool:
        scores = pool.score([item("1"), item("allocate"), item("1")])
        assert [s.value for s in scores] == [1.0, None, 1.0]
        assert (scores[1].status, "MemoryError" in scores[1].detail) == (Status.ERROR, True)


def test_async_function_keeps_its_loop():
    with make_pool(later=part("later")) as pool:
        scores = pool.score([item("1"), item("0"), item("1")])
        assert [s.value for s in scores] == [1.0, 0.0, 1.0]
        assert len({s.extracted for s in scores}) == 1


def test_the_signature_decides_what_is_given():
    parts = {
        "everything": part("everything", params={"scale": 0.5}),
        "only_answer": part("only_answer", weight=10.0),
        "all_by_name": part("all_by_name"),
        "length": part("length", weight=0.0, accuracy=False),
    }
    with make_pool(**parts) as pool:
        (score,) = pool.score([item("abc", 3, prompt="q", prompt_id="p7")])
        assert score.parts == {"everything": 0.5, "only_answer": 3.0, "all_by_name": 0.0, "length": 3.0}
        assert score.value == 30.5
        assert score.extracted == "q|abc|3|p7"
        assert pool.score([item("", part="all_by_name")])[0].extracted == "answer,completion,num_tokens,prompt,prompt_id"
        with pytest.raises(RewardError, match="'lenght' is unknown"):
            pool.score([item("", part="lenght")])


def test_answers_arrive_as_they_are():
    with make_pool(answer=part("only_answer")) as pool:
        scores = pool.score([item("", 2**40), item("", True), item("", threading.Lock()), item("", 0.1)])
        assert [s.value for s in scores] == [2.0**40, 1.0, None, 0.1]
        assert (scores[2].status, "pickle" in scores[2].detail) == (Status.ERROR, True)


@pytest.mark.parametrize(
    ("function", "params", "told"),
    [
        ("exact_intger", {}, "exact_integer"),
        ("exact_integer", {"lst": True}, "reward.parts.mine.params.lst"),
        (f"{HOSTILE}:obay", {}, "obey"),
        (f"{HOSTILE}:needs_more", {}, "'gold', which is none of completion, answer, prompt, prompt_id, num_tokens, completions"),
        (f"{HOSTILE}:everything", {}, "scale"),
        ("no_such_module.f", {}, "no_such_module"),
        ("{tmp}/typo.py:f", {}, "a setting of its own goes behind a * in the signature; did you mean 'answer'?"),
        ("{tmp}/missing.py:f", {}, "missing.py"),
        ("{tmp}/syntax.py:f", {}, "syntax.py, line 1"),
        ("{tmp}/raises.py:f", {}, "no licence"),
        ("{tmp}/exits.py:f", {}, "SystemExit"),
        ("{tmp}/dies.py:f", {}, "was killed by SIGSEGV"),
        ("{tmp}/dies.py:f", {}, "last words"),
    ],
)
def test_a_function_that_can_not_be_loaded_is_told_at_the_start(tmp_path, function, params, told):
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "typo.py").write_text("def f(completion, anwser):\n    return 1.0\n")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(4)\n")
    (tmp_path / "dies.py").write_text("import os, signal\nos.write(2, b'last words')\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError) as caught:
        make_pool(num_workers=2, mine=RewardPart(function=function.replace("{tmp}", str(tmp_path)), params=params))
    assert told in str(caught.value)
    assert set(psutil.Process().children()) <= before


def test_loading_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards.process, "START_S", 1.0)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    with pytest.raises(RewardError, match="had not loaded its verifiers after 1 s"):
        make_pool(mine=RewardPart(function=f"{tmp_path}/slow.py:f"))


def test_parameters_reach_the_verifier():
    with make_pool(math=RewardPart(function="exact_integer", params={"last": False})) as pool:
        assert [s.value for s in pool.score([item("it is 1"), item("1")])] == [0.0, 1.0]
        assert pool.score([item("1", "one")])[0].status is Status.INVALID


def test_the_same_from_every_kind_of_thread(pool):
    """Case B36."""
    items = [item("1"), item("sleep"), item("0")]

    async def from_executor():
        return await asyncio.get_running_loop().run_in_executor(None, pool.score, items)

    results = [pool.score(items), asyncio.run(from_executor())]
    thread = threading.Thread(target=lambda: results.append(pool.score(items)))
    thread.start()
    thread.join()
    for scores in results:
        assert [s.value for s in scores] == [1.0, None, 0.0]
        assert scores[1].status is Status.TIMEOUT


def test_callers_at_once_get_their_own(pool):
    def call(number):
        return [s.value for s in pool.score([item(str(i), str(number)) for i in range(100)])]

    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(call, range(8)))
    assert results == [[float(i == number) for i in range(100)] for number in range(8)]


def test_health_and_the_death_of_idle_processes():
    with make_pool(num_workers=2, obey=part("obey")) as pool:
        health = pool.health()
        assert (health.num_alive, health.num_lost, health.num_running, health.num_queued, health.longest_running_s) == (
            2,
            0,
            0,
            0,
            0.0,
        )
        for pid in health.pids:
            os.kill(pid, signal.SIGKILL)
        assert gone(health.pids)
        assert pool.health().num_alive == 0
        assert [s.value for s in pool.score([item("1")] * 200)] == [1.0] * 200  # nobody is blamed
        with ThreadPoolExecutor(1) as executor:
            pending = executor.submit(pool.score, [item("sleep")])
            time.sleep(TIMEOUT_S / 2)
            busy = pool.health()
            pending.result()
        assert busy.num_running == 1
        assert 0 < busy.longest_running_s < TIMEOUT_S


def test_processes_are_light_and_have_one_thread_and_no_accelerator(pool):
    scores = pool.score([item("getenv OMP_NUM_THREADS"), item("getenv CUDA_VISIBLE_DEVICES"), item("modules")])
    assert [s.extracted for s in scores[:2]] == ["1", ""]
    assert not {"torch", "ray", "vllm", "deepspeed", "transformers", "psutil"} & set(scores[2].extracted.split(","))


def test_close_leaves_no_process_and_ends_those_who_wait(tmp_path):
    notes = tmp_path / "pids"
    pool = make_pool(num_workers=2, timeout_s=60.0, obey=part("obey"))
    workers = pool.health().pids
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(pool.score, [item(f"family {notes}"), item("1")])
        family = noted(notes, 4)
        begun = time.monotonic()
        pool.close()
        assert time.monotonic() - begun < KILL_S
        with pytest.raises(RuntimeError, match="closed"):
            pending.result()
    assert gone([*workers, *family])
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([item("1")])
    pool.close()


SCRIPT = textwrap.dedent("""
    import contextlib, sys, threading, time
    from configs.schema import RewardConfig, RewardPart
    from rewards.contract import RewardItem
    from rewards.pool import RewardPool

    print("main runs", flush=True)
    pool = RewardPool(RewardConfig(parts={"obey": RewardPart(function=sys.argv[1])}, num_workers=2, timeout_s=60.0))
    item = RewardItem(prompt="", completion=sys.argv[2], answer="1", prompt_id="", part=None, source=None, num_tokens=None, options={})

    def score():
        with contextlib.suppress(RuntimeError):  # the pool is closed when the script ends
            pool.score([item])

    threading.Thread(target=score, daemon=True).start()
    time.sleep(0.5)
    print(*pool.health().pids, flush=True)
    if sys.argv[3] == "stay":
        time.sleep(60)
""")


@pytest.mark.parametrize(("act", "end"), [("hold_interpreter", "return"), ("hold_interpreter", "stay"), ("family", "stay")])
def test_a_script_without_main_guard_that_forgets_to_close_or_is_killed(tmp_path, act, end):
    """Workers end with their parent and all that they started, be it at its normal end or by SIGKILL; a folder of the user's own
    name hides nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "verifier.py").write_text(HOSTILE.read_text())
    for package in ("configs", "rewards"):
        (tmp_path / "elsewhere" / package).mkdir(parents=True)
        (tmp_path / "elsewhere" / package / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    parent = subprocess.Popen(
        [sys.executable, "-P", script, "../verifier.py:obey", f"{act} {tmp_path / 'pids'}", end],
        cwd=tmp_path / "elsewhere",
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout.readline() == "main runs\n"
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if act == "family":
            pids += noted(tmp_path / "pids", 4)
        if end == "stay":
            assert all(lives(pid) for pid in pids)
            parent.kill()
        assert parent.stdout.read() == ""  # the main module ran once
    assert gone(pids)


def test_importing_rewards_loads_no_heavy_library():
    code = (
        "import sys, rewards.pool, rewards.verifiers, rewards.worker\n"
        "print(sorted({'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'omegaconf'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_overhead_of_an_item():
    with make_pool(math=RewardPart(function="exact_integer")) as pool:
        items = [item(f"it is {i}", str(i)) for i in range(2000)]
        begun = time.perf_counter()
        scores = pool.score(items)
        took_s = time.perf_counter() - begun
    in_verifier_s = sum(s.time_s for s in scores)
    print(
        f"\npool: {1e6 * (took_s - in_verifier_s) / len(items):.0f} us an item beside {1e6 * in_verifier_s / len(items):.0f} us of verifier"
    )
    assert sum(s.value for s in scores) == 2000
