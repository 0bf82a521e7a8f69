"""`limen serve-reward`: the service as a real child process, and the `http` verifier as its client."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from configs.schema import RewardConfig, RewardPart, ServeConfig
from rewards.contract import RewardError, RewardItem
from rewards.pool import RewardPool
from rewards.service import serve

pytestmark = pytest.mark.timeout(120)

SECRET = "sentinel456"
VERIFIERS = '''
import time
from rewards.contract import InvalidItem, Verdict

def obey(completion, answer, prompt, prompt_id, num_tokens):
    """What the completion says."""
    word, _, rest = completion.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    if word == "invalid":
        raise InvalidItem("no tests")
    if word == "raise":
        raise ValueError(rest)
    if word == "tell":
        return Verdict(0.25, 1.0, "crash", rest, {"tokens": num_tokens or -1}, f"{prompt}/{prompt_id}/{answer}")
    return completion == answer
'''


@contextlib.contextmanager
def serving_reward(folder, *overrides, **environment):
    """``limen serve-reward`` with the verifier above: its process and its address."""
    (folder / "verifiers.py").write_text(VERIFIERS)
    command = [sys.executable, "-m", "orchestrator", "serve-reward", "serve.port=0", "~reward.parts.exact_integer"]
    part = "reward.parts.obey.function=verifiers.py:obey"
    process = subprocess.Popen(
        [*command, part, "reward.num_workers=2", *overrides],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"limen serve-reward: listening on (http://127\.0\.0\.1:\d+)/score\n", line)
        assert found, process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """One that asks for a token; its address."""
    folder = tmp_path_factory.mktemp("service")
    keys = ["serve.token_env=SERVE_TOKEN", "serve.max_body_mib=0.5", "serve.max_requests=3", "reward.timeout_s=20"]
    with serving_reward(folder, *keys, SERVE_TOKEN=SECRET) as (_, address):
        yield address


def post(address, content):
    headers = {"Authorization": f"Bearer {SECRET}"}
    body = json.dumps(content) if isinstance(content, (dict, list)) else content
    return httpx.post(f"{address}/score", content=body, headers=headers, timeout=30.0)


def test_a_batch_is_scored_in_order_with_all_a_score_says(service):
    items = [
        {"completion": "4", "answer": "4"},
        {"completion": "invalid", "answer": None},
        {"completion": "tell it", "answer": {"b": [1]}, "prompt": "p", "prompt_id": "i", "num_tokens": 7},
        {"completion": "raise oh", "answer": ""},
        {"completion": "\ud83d", "answer": "\ud83d"},  # half of a surrogate pair
    ]
    answered = post(service, {"items": items})
    assert answered.status_code == 200
    first, invalid, told, raised, half = answered.json()["scores"]
    assert first == {"value": 1.0, "accuracy": 1.0, "outcome": "right", "extracted": None, "measures": {}, "detail": ""}
    assert invalid["status"] == "invalid"
    assert "no tests" in invalid["detail"]
    assert (told["value"], told["accuracy"], told["outcome"], told["extracted"]) == (0.25, 1.0, "crash", "it")
    assert told["measures"] == {"obey.tokens": 7}
    assert "p/i/{'b': [1]}" in told["detail"]
    assert raised["status"] == "error"
    assert "ValueError: oh" in raised["detail"]
    assert half["value"] == 1.0
    assert post(service, {"items": []}).json() == {"scores": []}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"items": [{"completion": "a", "answer": 1}, {"answer": 1}]}, "items[1].completion: Field required"),
        ({"items": [{"completion": 3, "answer": 1}]}, "items[0].completion: Input should be an instance of str"),
        ({"items": [{"completion": "a"}]}, "items[0].answer: Field required"),
        ({"items": [{"completion": "a", "answer": 1, "anwser": 1}]}, "items[0].anwser: Extra inputs"),
        (
            {"items": [{"completion": "a", "answer": 1, "num_tokens": "7"}]},
            "items[0].num_tokens: Input should be a valid integer",
        ),
        ({"items": [7]}, "items[0]: Input should be"),
        ({"items": 7}, "items: Input should be a valid list"),
        ({"item": []}, "items: Field required"),
        ([], "the body: Input should be"),
        (
            {"items": [{}] * 9},
            "items[0].completion: Field required; items[0].answer: Field required; items[1].completion: Field required; 15 more",
        ),
        ({"items": [{"completion": "a", "answer": 1, "part": "nobody"}]}, "nobody"),
        (b"{", "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"1" * 100_000, "the body is no JSON"),
        (b'{"items": [{"completion": "a", "answer": NaN}]}', "the body is no JSON: NaN is no JSON number"),
        (b'{"items": [{"completion": "a", "answer": [1e400]}]}', "the number 1e400 is too large"),
        (b'{"items": [{"completion": "a", "answer": 1, "completion": "b"}]}', "the key 'completion' stands twice"),
        (b'{"items": [{"completion": "a", "answer": 1, "num_tokens": -1}]}', "items[0].num_tokens: Input should be greater"),
    ],
)
def test_a_request_that_is_wrong_is_refused_with_one_line_that_names_the_item(service, content, words):
    answered = post(service, content)
    assert answered.status_code == 400
    assert words in answered.json()["error"]
    assert "\n" not in answered.json()["error"]


def test_who_has_no_token_is_not_served(service):
    for given in (
        {},
        *({"Authorization": word.encode()} for word in ("wrong", "Bearer wrong", f"Bearer {SECRET[:-1]}", "Bearer \u00fc")),
    ):
        answered = httpx.post(f"{service}/score", content=b"{}", headers=given)
        assert (answered.status_code, answered.json()) == (401, {"error": "the token is missing or wrong"})
    assert httpx.get(f"{service}/score", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 405
    assert httpx.get(f"{service}/nothing").status_code == 404


def test_bodies_and_requests_are_bounded(service):
    big = {"items": [{"completion": "x" * 2**19, "answer": "x"}]}
    assert post(service, big).status_code == 413

    # Of no stated length: it is read until it is too large, which is at its last piece here.
    assert post(service, (b" " * 65536 for _ in range(9))).status_code == 413
    with ThreadPoolExecutor(4) as threads:
        slow = {"items": [{"completion": "sleep 1.5", "answer": ""}]}
        answered = list(threads.map(lambda _: post(service, slow), range(4)))
    assert sorted(one.status_code for one in answered) == [200, 200, 200, 503]
    (refused,) = [one for one in answered if one.status_code == 503]
    assert refused.headers["Retry-After"] == "1"
    assert refused.json() == {"error": "3 requests are under way; come back later"}
    assert post(service, {"items": []}).status_code == 200  # the places are free again


def test_headers_without_end_are_refused_and_a_client_that_goes_is_no_failure(service, tmp_path):
    address = ("127.0.0.1", int(service.rpartition(":")[2]))
    # It is refused while it is still being sent.
    with socket.create_connection(address, timeout=20) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"POST /score HTTP/1.1\r\nX: " + b"x" * 2**22)
        assert client.recv(12) in (b"", b"HTTP/1.1 400")
    with serving_reward(tmp_path) as (process, address):
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20) as client:
            client.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
        assert process.stderr.read() == ""


def test_health_tells_how_the_pool_is(service):
    told = httpx.get(f"{service}/health").json()
    assert told["protocol"] == "limen.score/1"
    assert told["parts"] == ["obey"]
    assert (told["num_alive"], told["num_running"], told["num_queued"]) == (2, 0, 0)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", told["version"])


def test_the_http_verifier_is_its_client_and_waits_while_it_is_full(service, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    params = {"urls": f"{service}/score", "token_env": "REWARD_TOKEN", "timeout_seconds": 30.0, "retries": 8}
    part = RewardPart(function="http", num_processes=1, concurrency=6, batch_size=2, timeout_s=40.0, params=params)
    texts = [("4", "4"), ("5", "6"), ("invalid", ""), ("tell it", 7), ("sleep 0.4", ""), ("raise oh", "")] * 3
    items = [
        RewardItem(prompt="p", completion=c, answer=a, prompt_id="i", part=None, source=None, num_tokens=3, options={})
        for c, a in texts
    ]
    with RewardPool(RewardConfig(parts={"far": part})) as pool:
        scores = pool.score(items)
    assert [score.value for score in scores] == [1.0, 0.0, None, 0.25, 0.0, None] * 3
    assert [score.status for score in scores] == ["ok", "ok", "invalid", "ok", "ok", "error"] * 3
    assert scores[3].outcome == "crash"
    assert scores[3].accuracy == 1.0
    assert scores[3].measures == {"far.obey.tokens": 3.0}
    assert "p/i/7" in scores[3].detail
    monkeypatch.setenv("REWARD_TOKEN", "another")
    with RewardPool(RewardConfig(parts={"far": part})) as pool:
        (refused,) = pool.score(items[:1])
    assert refused.status == "error"
    assert "/score answered 401" in refused.detail


def test_several_parts_are_told_apart_among_the_measures(tmp_path):
    with serving_reward(tmp_path, "reward.parts.length.function=verifiers.py:obey", "reward.parts.length.weight=2") as (
        _,
        address,
    ):
        (score,) = post(address, {"items": [{"completion": "4", "answer": "4"}]}).json()["scores"]
    assert score["value"] == 3.0
    assert score["measures"] == {"obey": 1.0, "length": 1.0}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_requests_under_way_end(tmp_path, number, code):
    with serving_reward(tmp_path) as (process, address):
        children = psutil.Process(process.pid).children(recursive=True)
        answers = []
        slow = {"items": [{"completion": "sleep 2", "answer": ""}]}
        asking = threading.Thread(target=lambda: answers.append(post(address, slow)))
        asking.start()
        while httpx.get(f"{address}/health").json()["num_running"] < 1:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(30) == code
        asking.join()
        assert answers[0].json()["scores"][0]["value"] == 0.0
        assert process.stderr.read() == ""
        psutil.wait_procs(children, 10)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_second_signal_ends_it_at_once(tmp_path):
    with serving_reward(tmp_path) as (process, address):
        children = psutil.Process(process.pid).children(recursive=True)
        slow = {"items": [{"completion": "sleep 9", "answer": ""}]}
        asking = threading.Thread(target=_swallow, args=(post, address, slow))
        asking.start()
        while httpx.get(f"{address}/health").json()["num_running"] < 1:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        asking.join()
        psutil.wait_procs(children, 10)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def _swallow(function, *arguments):
    with contextlib.suppress(httpx.HTTPError):
        function(*arguments)


def test_an_address_that_can_not_be_served_is_refused():
    reward = RewardConfig(parts={"exact_integer": RewardPart(function="exact_integer")})
    with pytest.raises(RewardError, match=r"serve\.host: '0\.0\.0\.0' can be reached by others; .*serve\.token_env="):
        serve(reward, ServeConfig(host="0.0.0.0", port=0))
    with pytest.raises(RewardError, match=r"serve\.token_env: the environment variable LIMEN_NO_SUCH_VARIABLE is not set"):
        serve(reward, ServeConfig(host="0.0.0.0", port=0, token_env="LIMEN_NO_SUCH_VARIABLE"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RewardError, match=rf"serve\.port={port}: can not be listened on: Address already in use"):
            serve(reward, ServeConfig(port=port))
    with pytest.raises(RewardError, match=r"serve\.host=no such host"):
        serve(reward, ServeConfig(host="no such host", port=0, token_env="PATH"))


def test_nothing_is_written(tmp_path):
    with serving_reward(tmp_path) as (process, address):
        before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if "__pycache__" not in file.parts}
        assert post(address, {"items": [{"completion": "4", "answer": "4"}]}).status_code == 200
        after = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if "__pycache__" not in file.parts}
        assert after == before
        assert not [file.path for file in psutil.Process(process.pid).open_files() if Path(file.path).is_relative_to(tmp_path)]
