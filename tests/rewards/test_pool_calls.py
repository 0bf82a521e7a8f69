"""Batches, async calls, lanes, gates and policies, in the pool's real processes."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.schema import RewardConfig, RewardPart
from rewards.confine import missing
from rewards.contract import RewardError, RewardItem
from rewards.pool import RewardPool
from rollout.records import Consequence, Outcome, Status

pytestmark = pytest.mark.timeout(90)

HOSTILE = Path(__file__).with_name("hostile_verifiers.py")


def part(function, **keys):
    return RewardPart(function=f"{HOSTILE}:{function}", **keys)


def item(completion, answer="1", **keys):
    given = {"prompt": "p", "completion": completion, "answer": answer, "prompt_id": "id"}
    unset = {"part": None, "source": None, "num_tokens": None, "options": {}}
    return RewardItem(**{**given, **unset, **keys})


def make_pool(timeout_s=5.0, num_workers=1, **parts):
    return RewardPool(RewardConfig(parts=parts, num_workers=num_workers, timeout_s=timeout_s))


# ---- batch verifiers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("one", "expected 3 results, got 1"),
        ("two", "expected 3 results, got 2"),
        ("scalar", "expected 3 results in a list, got 1.0 of type float"),
        ("column", "expected 3 results, got an array of shape (3, 1)"),
        ("dict", "of type dict"),
        ("generator", "of type generator"),
    ],
)
def test_a_batch_of_another_shape_is_an_error_of_all_its_items(what, told):
    """Case B57."""
    with make_pool(mine=part("batch_returns", params={"what": what})) as pool:
        scores = pool.score([item(c) for c in "abc"])
    for score in scores:
        assert (score.status, score.value) == (Status.ERROR, None)
        assert told in score.detail
        assert f"{HOSTILE}:batch_returns" in score.detail


def test_results_of_a_batch_stand_in_their_places():
    returns = {what: part("batch_returns", params={"what": what}) for what in ("row", "tuple", "mixed", "errors")}
    with make_pool(**returns) as pool:
        row, numbers, mixed, errors = (pool.score([item(c, part=what) for c in "abc"]) for what in returns)
    assert [s.value for s in row] == [1.0, 0.0, 0.5]
    assert [s.value for s in numbers] == [1.0, 1.0, 0.5]
    assert [s.value for s in mixed] == [1.0, None, None]
    assert ["None of type NoneType" in mixed[1].detail, "value nan" in mixed[2].detail] == [True, True]
    assert [s.status for s in errors] == [Status.ABSTAIN, Status.INVALID, Status.ERROR]
    assert ["not mine" in errors[0].detail, "no gold" in errors[1].detail, "ConnectionError: away" in errors[2].detail] == [
        True
    ] * 3


def test_a_batch_is_given_all_it_asks_for_in_calls_of_batch_size():
    with make_pool(mine=part("batch_everything", batch_size=4, params={"scale": 2.0})) as pool:
        items = [item(f"c{i}", i, prompt=f"p{i}", prompt_id=f"id{i}", num_tokens=i or None) for i in range(10)]
        items[5] = item("c5", 5, prompt="p5", prompt_id="id5", num_tokens=5, options={"scale": 3.0})
        scores = pool.score(items)
    assert [s.extracted for s in scores] == [f"c{i}|p{i}|{i}|id{i}|{i or None}" for i in range(10)]
    assert [s.value for s in scores] == [3.0 if i == 5 else 2.0 for i in range(10)]
    assert scores[5].measures == {"mine.batch": 1.0}  # other options, another call
    assert [s.measures["mine.batch"] for s in scores[:5]] == [4.0] * 4 + [1.0]


@pytest.mark.parametrize(
    ("bad", "status", "told"), [("sleep", Status.TIMEOUT, "still running"), ("exit 3", Status.ERROR, "exited with code 3")]
)
def test_one_bad_item_harms_no_other_of_its_batch(bad, status, told):
    with make_pool(timeout_s=1.0, mine=part("batch_obey", batch_size=8)) as pool:
        scores = pool.score([item(c) for c in ("1", "0", bad, "1", "1")])
        assert [s.value for s in scores] == [1.0, 0.0, None, 1.0, 1.0]
        assert [s.measures for s in (scores[0], scores[4])] == [{"mine.batch": 1.0}] * 2  # each alone, once
        assert (scores[2].status, told in scores[2].detail) == (status, True)
        assert pool.health().num_lost == 2
        whole = pool.score([item(c) for c in ("1", "raise", "1")])
        assert [s.status for s in whole] == [Status.ERROR] * 3  # what the function raises is its word on all of them


def test_one_item_and_many_do_not_mix():
    with pytest.raises(RewardError, match="'completion', of one item, and 'answers', of many; 'completions' works"):
        make_pool(mine=part("mixed_up"))


# ---- async verifiers --------------------------------------------------------------------------------------------------


def test_as_many_async_calls_as_configured_are_under_way_in_one_process():
    with make_pool(remote=part("remote", num_processes=1, concurrency=8)) as pool:
        scores = pool.score([item("nap 0.2")] * 40)
        assert {s.extracted for s in scores} == {scores[0].extracted}
        at_once = [s.measures["remote.at_once"] for s in scores]
        assert (max(at_once), min(s.value for s in scores)) == (8.0, 1.0)
        with ThreadPoolExecutor(4) as executor:  # later callers join the calls under way
            results = list(executor.map(lambda _: pool.score([item("nap 0.5")]), range(4)))
        assert max(scores[0].measures["remote.at_once"] for scores in results) > 1


def test_an_async_call_is_cancelled_at_its_deadline_and_no_other_is_harmed():
    with make_pool(timeout_s=1.0, remote=part("remote", num_processes=1, concurrency=6)) as pool:
        scores = pool.score([item(c) for c in ("1", "hang", "nap 0.5", "1", "hang", "1")] * 2)
        assert [s.status for s in scores] == ["ok", "timeout", "ok", "ok", "timeout", "ok"] * 2
        assert "was cancelled" in scores[1].detail
        assert len({s.extracted for s in scores if s.extracted}) == 1
        assert pool.health().num_lost == 0


@pytest.mark.parametrize(("act", "num_lost"), [("swallow", 1), ("block", 2)])
def test_a_call_that_can_not_be_cancelled_costs_its_process_only(act, num_lost):
    """It is killed beyond its deadline. What was under way with it is judged again, though a blocked loop made it late too."""
    with make_pool(timeout_s=1.0, remote=part("remote", num_processes=1, concurrency=3)) as pool:
        scores = pool.score([item(c) for c in (act, "1", *["nap 0.1"] * 6)])
        assert [s.status for s in scores] == ["timeout"] + ["ok"] * 7
        assert "was killed" in scores[0].detail
        assert pool.health().num_lost == num_lost


def test_a_process_that_dies_with_several_calls_under_way_blames_the_right_one():
    with make_pool(remote=part("remote", num_processes=1, concurrency=4)) as pool:
        scores = pool.score([item(c) for c in ("nap 0.3", "1", "exit 5", "nap 0.3", "1", "nap 0.1")])
        assert [s.status for s in scores] == ["ok", "ok", "error", "ok", "ok", "ok"]
        assert "exited with code 5" in scores[2].detail


def test_an_async_batch_is_cancelled_and_judged_item_by_item():
    with make_pool(timeout_s=0.5, remote=part("remote_batch", num_processes=1, concurrency=2, batch_size=4)) as pool:
        scores = pool.score([item(c) for c in ("1", "hang", "1", "1", "1", "1", "1", "1")])
        assert [s.status for s in scores] == ["ok", "timeout"] + ["ok"] * 6
        assert [s.measures["remote.batch"] for s in scores[2:]] == [1.0] * 2 + [4.0] * 4
        assert pool.health().num_lost == 0


def test_a_plain_function_has_no_calls_at_once():
    with pytest.raises(RewardError, match=r"reward\.parts\.mine\.concurrency=4: .*obey' is a plain function"):
        make_pool(mine=part("obey", num_processes=1, concurrency=4))


# ---- lanes and gates --------------------------------------------------------------------------------------------------


def test_parts_with_their_own_processes_have_their_own_deadlines_and_order_is_kept():
    parts = {
        "exact": part("obey"),
        "style": part("length", accuracy=False),
        "remote": part("remote", num_processes=1, concurrency=16, timeout_s=0.5, accuracy=False),
        "many": part("batch_everything", num_processes=2, accuracy=False),
    }
    with make_pool(timeout_s=30.0, **parts) as pool:
        items = [item(f"nap 0.01{'0' * (i % 7)}", i) for i in range(200)]
        items[50] = item("nap 0.7")
        scores = pool.score(items)
        assert (scores[50].status, "'remote'" in scores[50].detail, "'exact'" in scores[50].detail) == (
            Status.TIMEOUT,
            True,
            False,
        )
        assert scores[50].parts == {"exact": 1.0, "style": 7.0, "many": 1.0}  # the same nap, within the other deadline
        for i, score in enumerate(scores):
            if i != 50:
                assert score.parts == {"exact": 1.0, "style": 8.0 + i % 7, "remote": 1.0, "many": 1.0}
                assert score.value == 11.0 + i % 7
        assert len(pool.health().pids) == 4
        assert pool.health().num_lost == 0


@pytest.mark.parametrize("num_processes", [None, 1])
def test_behind_a_closed_gate_nothing_is_called(tmp_path, num_processes):
    path = tmp_path / "seen"
    parts = {
        "math": part("seen", needs="format", weight=2.0, params={"path": str(path)}, num_processes=num_processes),
        "format": part("length", clip_max=1.0, weight=0.5),
    }
    with make_pool(**parts) as pool:
        scores = pool.score([item("1"), item(""), item("0")])
    assert [s.value for s in scores] == [2 * 1 + 0.5, 0.0, 0.5]
    assert [s.parts for s in scores] == [{"format": f, "math": m} for f, m in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0))]
    assert scores[1].outcome is Outcome.WRONG
    assert Counter(path.read_text().split()) == {"1": 1, "0": 1}


def test_a_gate_whose_verifier_failed_leaves_no_value_and_calls_nothing(tmp_path):
    path = tmp_path / "seen"
    parts = {"format": part("obey"), "math": part("seen", needs="format", params={"path": str(path)})}
    with make_pool(**parts) as pool:
        (score,) = pool.score([item("raise")])
        assert (score.status, score.value, score.parts) == (Status.ERROR, None, {})
        assert not path.exists()
    parts["format"].on_error = "zero"
    with make_pool(**parts) as pool:
        (score,) = pool.score([item("raise")])
        assert (score.status, score.value, score.parts) == (Status.OK, 0.0, {"format": 0.0, "math": 0.0})


def test_sources_choose_the_parts():
    parts = {"exact": part("obey", sources=["sums"]), "long": part("length", sources=["essays"])}
    with make_pool(**parts) as pool:
        scores = pool.score([item("1", source="sums"), item("abc", source="essays"), item("ab", source="sums", part="long")])
        assert [s.parts for s in scores] == [{"exact": 1.0}, {"long": 3.0}, {"long": 2.0}]
        with pytest.raises(RewardError, match="no reward part judges the source 'poems'"):
            pool.score([item("", source="poems")])


def test_options_of_an_item_override_the_parameters_and_are_checked():
    with make_pool(math=RewardPart(function="exact_integer", params={"last": False})) as pool:
        scores = pool.score([item("so 1"), item("so 1", options={"last": True}), item("1", options={"lst": True})])
        assert [s.value for s in scores] == [0.0, 1.0, None]
        assert "options.lst" in scores[2].detail
        assert "did you mean 'last'" in scores[2].detail


# ---- policies ---------------------------------------------------------------------------------------------------------


def test_a_flaky_grader_is_asked_again_and_its_failures_are_no_zeros(tmp_path):
    """Case B61: the second raises, the third times out, the fourth is truly 0."""
    path = tmp_path / "calls"
    keys = {"on_error": "retry(1)", "on_timeout": "retry(1, drop_group)", "params": {"path": str(path)}}
    with make_pool(flaky=part("flaky", **keys)) as pool:
        scores = pool.score([item(c) for c in ("fails 0 error", "fails 9 error", "fails 9 timeout", "fails 1 error")])
        assert [s.status for s in scores] == ["ok", "error", "timeout", "ok"]
        assert [s.value for s in scores] == [1.0, None, None, 1.0]
        assert [s.consequence for s in scores] == ["none", "drop_sample", "drop_group", "none"]
        assert "call 2 " in scores[1].detail
        assert "(the last of 2 calls)" in scores[1].detail
        assert pool.health().num_retried == 3
    calls = Counter(line.partition("|")[0] for line in path.read_text().splitlines())
    assert calls == {"fails 0 error": 1, "fails 9 error": 2, "fails 9 timeout": 2, "fails 1 error": 2}


@pytest.mark.parametrize("kind", ["die", "sleep"])
def test_a_retry_is_not_on_the_process_that_was_lost(tmp_path, kind):
    path = tmp_path / "calls"
    keys = {"on_error": "retry(2)", "on_timeout": "retry(2)", "params": {"path": str(path)}}
    with make_pool(timeout_s=0.5, flaky=part("flaky", **keys)) as pool:
        (score,) = pool.score([item(f"fails 2 {kind}")])
    assert (score.status, score.value) == (Status.OK, 1.0)
    pids = [line.partition("|")[2] for line in path.read_text().splitlines()]
    assert len(set(pids)) == 3


@pytest.mark.parametrize(
    ("kind", "policy", "status", "value", "consequence"),
    [
        ("error", "fail", Status.ERROR, None, Consequence.FAIL),
        ("timeout", "zero", Status.OK, 0.0, Consequence.ZERO),
        ("invalid", "drop_group", Status.INVALID, None, Consequence.DROP_GROUP),
        ("abstain", "drop_sample", Status.ABSTAIN, None, Consequence.DROP_SAMPLE),
        ("die", "retry(1, zero)", Status.OK, 0.0, Consequence.ZERO),
    ],
)
def test_each_status_has_its_policy(tmp_path, kind, policy, status, value, consequence):
    key = {"die": "on_error"}.get(kind, f"on_{kind}")
    with make_pool(flaky=part("flaky", params={"path": str(tmp_path / "calls")}, **{key: policy})) as pool:
        (score,) = pool.score([item(f"fails 9 {kind}")])
    assert (score.status, score.value, score.accuracy, score.consequence) == (status, value, value, consequence)
    assert score.detail


# ---- confined processes -----------------------------------------------------------------------------------------------


def test_a_function_that_executes_answers_demands_to_be_confined():
    for keys in ({}, {"num_processes": 1}, {"confined": True}):
        with pytest.raises(RewardError, match=r"reward\.parts\.mine\.confined=true with reward\.parts\.mine\.num_processes=1"):
            make_pool(mine=part("evaluates", **keys))


def test_a_confined_process_judges_and_does_no_harm(tmp_path):
    """Case B177, by a verifier that evaluates the answer itself."""
    if missing():
        if os.environ.get("CI") == "true" and not os.environ.get("LIMEN_ALLOW_SKIPS"):
            pytest.fail(missing())
        pytest.skip(missing())
    mark, secret = tmp_path / "MARK", tmp_path / "secret"
    secret.write_text("sentinel")
    acts = [
        f"__import__('os').system('touch {mark}')",
        f"open('{mark}', 'w') and 1",
        f"len(open('{secret}').read())",
        "__import__('os').fork()",
        "__import__('socket').socket() and 1",
        "__import__('os').kill(__import__('os').getppid(), 9) or 1",
        "len(__import__('os').listdir('/proc'))",
    ]
    keys = {"num_processes": 1, "confined": True, "batch_size": 1}
    with make_pool(mine=part("evaluates", **keys)) as pool:
        scores = pool.score([item(c) for c in ("1 + 1", *acts, "0.5")])
        assert (scores[0].value, scores[-1].value) == (2.0, 0.5)
        assert [s.status for s in scores[2:-1]] == [Status.ERROR] * 6
        assert all("PermissionError" in s.detail for s in scores[2:-1])
        assert (scores[1].value, mark.exists()) == (127 << 8, False)  # the shell could not be started
        assert pool.health().num_lost == 0
