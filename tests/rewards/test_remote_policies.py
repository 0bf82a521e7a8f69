"""Rewards that live elsewhere through the pool: what a server does wrong is counted and handled by the part's policy."""

import threading
from collections import Counter

import pytest

from configs.schema import RewardConfig, RewardPart
from rewards.contract import RewardError, RewardItem
from rewards.pool import RewardPool

pytestmark = pytest.mark.timeout(60)

SECRET = "sentinel456"


def right_where_equal(handler, content, number):
    handler.reply({"scores": [float(item["completion"] == item["answer"]) for item in content["items"]]})


def one_slow_one_broken(handler, content, number):
    """A verdict of its own for each item, as a grader that fails on some gives it."""
    faults = {
        "slow": {"status": "timeout", "detail": "the grader's sandbox"},
        "broken": {"status": "error", "detail": "out of disk"},
    }
    words = [item["completion"] for item in content["items"]]
    handler.reply({"scores": [faults.get(word, float(word == "4")) for word in words]})


SCRIPT = {
    "/good": right_where_equal,
    "/hangs": lambda handler, *_: handler.server.ended.wait(30),
    "/500": lambda handler, *_: handler.reply(b"no", 500),
    "/short": lambda handler, *_: handler.reply({"scores": [1.0]}),
    "/garbage": lambda handler, *_: handler.reply(b"<html>"),
    "/garbage_twice": lambda handler, content, number: (
        right_where_equal(handler, content, number) if number > 1 else handler.reply(b"<")
    ),
    "/flaky": one_slow_one_broken,
}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def server(serving):
    with serving(SCRIPT) as made:
        yield made


def item(completion, answer="4"):
    return RewardItem(
        prompt="p", completion=completion, answer=answer, prompt_id="i", part=None, source=None, num_tokens=None, options={}
    )


def score(url, texts=("4", "5", "6"), timeout_seconds=10.0, retries=0, **keys):
    params = {"urls": url, "timeout_seconds": timeout_seconds, "retries": retries}
    defaults = {"num_processes": 1, "concurrency": 4, "batch_size": 8, "timeout_s": 20.0, "params": params}
    with RewardPool(RewardConfig(parts={"far": RewardPart(function="http", **defaults | keys)})) as pool:
        return pool.score([item(text) for text in texts])


@pytest.mark.parametrize(
    ("path", "keys", "status", "consequence", "words"),
    [
        ("/hangs", {"timeout_seconds": 0.5, "on_timeout": "drop_group"}, "timeout", "drop_group", "had not answered after 0.5 s"),
        ("/hangs", {"timeout_s": 1.0, "on_timeout": "fail"}, "timeout", "fail", "was still running after 1 s"),
        ("/500", {}, "error", "drop_sample", "/500 answered 500: no"),
        ("/500", {"on_error": "zero"}, "ok", "zero", "/500 answered 500: no"),
        ("/short", {"on_error": "drop_group"}, "error", "drop_group", "expected 3, got 1"),
        ("/garbage", {"on_error": "retry(2, fail)"}, "error", "fail", "no JSON"),
    ],
)
def test_what_a_server_does_wrong_is_handled_by_the_policy(server, path, keys, status, consequence, words):
    scores = score(server.url(path), **keys)
    assert Counter((one.status, one.consequence) for one in scores) == {(status, consequence): 3}
    assert all(words in one.detail for one in scores)
    assert {one.value for one in scores} == {0.0 if consequence == "zero" else None}


def test_a_retry_mends_what_was_passing(server):
    scores = score(server.url("/garbage_twice"), on_error="retry(2)")
    assert [one.value for one in scores] == [1.0, 0.0, 0.0]
    assert [one.status for one in scores] == ["ok"] * 3


def test_a_grader_that_fails_on_some_leaves_the_others_as_they_are(server):
    """Case B61."""
    scores = score(server.url("/flaky"), ["4", "broken", "slow", "5"])
    assert [one.status for one in scores] == ["ok", "error", "timeout", "ok"]
    assert [one.value for one in scores] == [1.0, None, None, 0.0]
    assert "out of disk" in scores[1].detail
    assert "the grader's sandbox" in scores[2].detail


def test_settings_that_can_not_work_are_refused_by_the_pool_with_their_key():
    with pytest.raises(RewardError) as refused:
        score("localhost:80")
    words = "reward.parts.far.params.urls, address 1: wants an address such as http://localhost:8080/score"
    assert str(refused.value) == words


def test_judges_are_asked_at_once_in_one_process(serving, monkeypatch):
    """Each request is answered only when all eight are there."""
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    everyone = threading.Barrier(8)

    def answer(handler, content, number):
        everyone.wait(20)
        good = "right" in content["messages"][1]["content"]
        handler.reply({"choices": [{"message": {"content": f"Score: {10 if good else 2}"}}]})

    with serving({"/v1/chat/completions": answer}) as endpoint:
        params = {"base_url": endpoint.url("/v1"), "model": "m", "api_key_env": "JUDGE_KEY", "rubric": "{completion}"}
        keys = {"num_processes": 1, "concurrency": 8, "timeout_s": 30.0, "params": params}
        with RewardPool(RewardConfig(parts={"taste": RewardPart(function="judge", **keys)})) as pool:
            scores = pool.score([item(f"{'right' if place % 2 else 'wrong'} {place}") for place in range(8)])
        assert {headers["Authorization"] for _, headers, _ in endpoint.seen} == {f"Bearer {SECRET}"}
    assert [one.value for one in scores] == [0.2, 1.0] * 4
    assert [one.accuracy for one in scores] == [0.2, 1.0] * 4
    assert {one.detail for one in scores} == {"reward part 'taste': Score: 2", "reward part 'taste': Score: 10"}
