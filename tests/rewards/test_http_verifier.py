"""The `http` verifier against real servers on loopback that do what servers do."""

import asyncio
import itertools
import socket
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import pytest

import rewards.http_verifier
from rewards.contract import Abstain, InvalidItem, RewardError, Verdict
from rewards.http_verifier import http
from rewards.remote import RemoteError, Unavailable

pytestmark = pytest.mark.timeout(60)

SECRET = "sentinel456"
NO_NAMES = ["sk-Xy0123456789", "AKIAIOSFODNN7EXAMPLE", "hf_AbCdEfGhIj", "JBSWY3DPEHPK3PXP"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No server is set aside by an earlier test, and no proxy of this machine stands between."""
    monkeypatch.setattr(rewards.http_verifier, "_aside", {})
    monkeypatch.setattr(rewards.http_verifier, "_turn", itertools.count())
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def right_where_equal(handler, content, number):
    handler.reply({"scores": [float(item["completion"] == item["answer"]) for item in content["items"]]})


def code(number, **headers):
    return lambda handler, content, _: handler.reply(b"no", number, **headers)


def says(content):
    return lambda handler, *_: handler.reply(content)


def hangs(handler, *_):
    handler.server.ended.wait(30)


def endless(handler, *_):
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.ended.is_set():
        handler.wfile.write(b" " * 65536)


def drips(handler, *_):
    """Each byte comes in time for any limit on a single read."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.ended.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def echoes_secret(handler, content, number):
    handler.reply({"error": f"bad credentials {handler.headers['Authorization']}"}, 400)


def fails_first(num_failures, failing):
    return lambda handler, content, number: (failing if number < num_failures else right_where_equal)(handler, content, number)


SCRIPT = {
    "/good": right_where_equal,
    "/also_good": right_where_equal,
    "/echoes": echoes_secret,
    "/echoes_detail": lambda handler, *_: handler.reply(
        {"scores": [{"status": "error", "detail": f"got {handler.headers['Authorization']}"}]}
    ),
    "/echoes_login": lambda handler, *_: handler.reply(
        {"scores": [{"status": "error", "detail": f"p@ssword, {handler.headers['Authorization'].split()[1]}"}]}
    ),
    "/500": code(500),
    "/400": lambda handler, *_: handler.reply({"error": "items[1].answer: no tests"}, 400),
    "/503": code(503),
    "/loop": code(302, Location="/loop"),
    "/short": says({"scores": [1.0]}),
    "/long": says({"scores": [1.0, 1.0, 1.0, 1.0]}),
    "/empty": says({"scores": []}),
    "/garbage": says(b"<html>it works</html>"),
    "/not_utf8": says(b'{"scores": ["\xff"]}'),
    "/deep": says(b"[" * 100_000),
    "/list": says([1.0, 0.0, 1.0]),
    "/scalar": says({"scores": 1.0}),
    "/nan": says(b'{"scores": [1.0, NaN, 0.0]}'),
    "/huge": says(b'{"scores": [1.0, 1e400, 0.0]}'),
    "/twice": says(b'{"scores": [0.0, 0.0, 0.0], "scores": [1.0, 1.0, 1.0]}'),
    "/endless": endless,
    "/drips": drips,
    "/hangs": hangs,
    "/second_time": fails_first(1, code(503)),
    "/when_told": fails_first(1, code(503, Retry_After="1.2")),
    "/cuts": fails_first(1, lambda handler, *_: handler.connection.shutdown(socket.SHUT_RDWR)),
    "/mixed": says(
        {
            "scores": [
                {"value": 0.25, "accuracy": 1, "outcome": "right", "extracted": "4", "measures": {"speed": 2.0}, "detail": "hm"},
                {"status": "invalid", "detail": "no tests"},
                {"status": "abstain", "detail": "not mine"},
                {"status": "timeout", "detail": "too slow"},
                {"status": "error", "detail": "broke"},
                {"status": "great"},
                {"accuracy": 1.0},
                {"value": 1.0, "acuracy": 1.0},
                {"status": "ok", "value": True},
            ]
        }
    ),
}


@pytest.fixture(scope="module")
def server(serving):
    with serving(SCRIPT) as made:
        yield made


def ask(urls, pairs=(("4", "4"), ("5", "6"), ("7", "7")), **settings):
    completions, answers = zip(*pairs, strict=True)
    count = len(pairs)
    call = http(completions, answers, ["p"] * count, ["id"] * count, [None] * count, urls=urls, **settings)
    return asyncio.run(call)


def values(results):
    return [result.value for result in results]


def test_a_batch_travels_whole_and_comes_back_in_order(server):
    sent = http(["4", "\ud83d and \u2212"], ["4", {"b": [1]}], ["p0", "p1"], ["i0", "i1"], [3, None], urls=server.url("/good"))
    assert values(asyncio.run(sent)) == [1.0, 0.0]
    assert server.seen[-1][2] == {
        "items": [
            {"completion": "4", "answer": "4", "prompt": "p0", "prompt_id": "i0", "num_tokens": 3},
            {"completion": "\ud83d and \u2212", "answer": {"b": [1]}, "prompt": "p1", "prompt_id": "i1", "num_tokens": None},
        ]
    }


def test_every_status_and_every_fault_of_a_score_is_its_own_items(server):
    results = ask(server.url("/mixed"), [("x", "y")] * 9)
    assert results[0] == Verdict(0.25, 1, "right", "4", measures={"speed": 2.0}, detail="hm")
    kinds = [InvalidItem, Abstain, TimeoutError, RemoteError, RemoteError, RemoteError, RemoteError]
    assert [type(result) for result in results[1:8]] == kinds
    words = ["no tests", "not mine", "too slow", "broke", "unknown status 'great'", "without 'value'", "unknown keys acuracy"]
    assert all(word in str(result) for word, result in zip(words, results[1:8], strict=True))
    assert results[8] == Verdict(True)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/500", "answered 500: no"),
        ("/400", "items[1].answer: no tests"),
        ("/503", "answered 503"),
        ("/loop", "answered 302: no, a redirect, which is not followed"),
        ("/short", "expected 3, got 1"),
        ("/long", "expected 3, got 4"),
        ("/empty", "expected 3, got 0"),
        ("/garbage", "no JSON (21 bytes)"),
        ("/not_utf8", "no JSON"),
        ("/deep", "no JSON"),
        ("/list", 'no {"scores": [...]}'),
        ("/scalar", 'no {"scores": [...]}'),
        ("/nan", "NaN is no JSON"),
        ("/huge", "the number 1e400 is too large"),
        ("/twice", "the key 'scores' stands twice"),
        ("/endless", "more than 1835008 bytes"),
    ],
)
def test_a_faulty_server_is_an_error_of_every_item_with_its_address(server, path, words):
    results = ask(server.url(path), retries=0, timeout_seconds=20.0)
    assert [isinstance(result, RemoteError) for result in results] == [True] * 3
    assert words in str(results[0])
    assert f"{server.url(path)} answered" in str(results[0])


@pytest.mark.parametrize("path", ["/hangs", "/drips"])
def test_the_deadline_covers_the_whole_exchange(server, path):
    begun = time.monotonic()
    results = ask(server.url(path), timeout_seconds=0.5)
    assert [type(result) for result in results] == [TimeoutError] * 3
    assert "had not answered after 0.5 s" in str(results[0])
    assert time.monotonic() - begun < 10


def test_a_server_that_is_busy_or_breaks_off_is_asked_again(server):
    assert values(ask(server.url("/second_time"))) == [1.0, 0.0, 1.0]
    assert values(ask(server.url("/cuts"))) == [1.0, 0.0, 1.0]
    begun = time.monotonic()
    assert values(ask(server.url("/when_told"))) == [1.0, 0.0, 1.0]
    assert time.monotonic() - begun >= 1.2  # it had asked for that
    seen = server.num_seen("/503")
    assert "answered 503" in str(ask(server.url("/503"), retries=2)[0])
    assert server.num_seen("/503") == seen + 3
    seen = server.num_seen("/500")  # what is no "later" is a no
    ask(server.url("/500"), retries=2)
    assert server.num_seen("/500") == seen + 1


def test_items_are_spread_and_a_bad_server_is_set_aside_and_asked_again(server):
    SCRIPT["/sick"] = code(503)
    urls = [server.url(path) for path in ("/good", "/sick", "/also_good")]
    pairs = [(str(i), str(i if i % 2 else -1)) for i in range(7)]

    def asked(urls):
        server.seen.clear()
        assert values(ask(urls, pairs)) == [0, 1, 0, 1, 0, 1, 0]
        return sorted((path, len(content["items"])) for path, _, content in server.seen)

    first = asked(urls)
    assert len(first) == 4  # three shares, and the sick one's once more elsewhere
    assert sum(size for path, size in first if path != "/sick") == 7
    assert sorted(size for _, size in asked(",".join(urls))) == [3, 4]  # it is set aside
    assert "/sick" not in [path for path, _ in asked(urls)]
    SCRIPT["/sick"] = right_where_equal
    rewards.http_verifier._aside[server.url("/sick")] -= rewards.http_verifier.SET_ASIDE_S  # the time passes
    assert sorted(size for _, size in asked(urls)) == [2, 2, 3]
    assert "/sick" in [path for path, _ in asked(urls)]
    # Where all are set aside one is asked nevertheless.
    rewards.http_verifier._aside.update(dict.fromkeys(urls, time.monotonic() + 60))
    assert [size for _, size in asked(urls)] == [7]


def test_an_answer_that_is_no_json_spoils_its_own_item_alone(server):
    results = ask(server.url("/good"), [("4", "4"), ("5", float("nan")), ("6", "6")])
    assert [result.value for result in (results[0], results[2])] == [1.0, 1.0]
    assert isinstance(results[1], InvalidItem)


def test_nobody_there_is_an_error_that_names_the_server_without_its_login():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    results = ask(f"http://me:{SECRET}@127.0.0.1:{port}/score?key={SECRET}", retries=1)
    assert [type(result) for result in results] == [Unavailable] * 3
    assert f"http://127.0.0.1:{port}/score can not be reached: ConnectError" in str(results[0])
    assert SECRET not in str(results)


@pytest.mark.parametrize("path", ["/echoes", "/echoes_detail"])
def test_the_token_is_sent_and_stands_in_no_message(server, path, monkeypatch):
    """Case B183."""
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    server.seen.clear()
    (result,) = ask(server.url(path), [("4", "4")], token_env="REWARD_TOKEN")
    assert server.seen[0][1]["Authorization"] == f"Bearer {SECRET}"
    assert "Bearer ***" in str(result)
    assert SECRET not in repr(result)


def test_a_login_in_the_address_is_sent_and_stands_in_no_message_however_it_is_written(server):
    server.seen.clear()
    (result,) = ask(server.url("/echoes_login").replace("//", "//me%40home:p%40ssword@"), [("4", "4")])
    assert server.seen[0][1]["Authorization"] == f"Basic {b64encode(b'me@home:p@ssword').decode()}"
    assert str(result).endswith(": ***, ***")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": ""}, "urls, address 1: wants an address such as"),
        ({"urls": []}, "urls: wants at least one address"),
        ({"urls": "http://a/score, localhost:80"}, "urls, address 2: wants an address such as"),
        ({"urls": "http://a:port/score"}, "urls, address 1"),
        ({"urls": [7]}, "urls, address 1"),
        ({"urls": "http://a\x00b/score"}, "urls, address 1: wants an address such as"),
        (
            {"urls": f"http://me:{SECRET}@a/score", "token_env": "PATH"},
            "urls, address 1: holds a login, and a secret is named too",
        ),
        ({"urls": 7}, "urls, address 1"),
        (
            {"token_env": "LIMEN_NO_SUCH_VARIABLE"},
            "token_env: the environment variable LIMEN_NO_SUCH_VARIABLE is not set where the verifiers run",
        ),
        *(({"token_env": secret}, "token_env: wants the name of the environment variable") for secret in NO_NAMES),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0"),
        ({"retries": -1}, "retries 0 or more"),
    ],
)
def test_settings_that_can_not_work_are_refused_before_anything_is_sent(settings, words):
    defaults = {"urls": "http://localhost/score", "token_env": None, "timeout_seconds": 1.0, "retries": 0}
    with pytest.raises(RewardError) as refused:
        http.prepare(**defaults | settings)
    assert words in str(refused.value)
    assert not any(secret in str(refused.value) for secret in NO_NAMES), "somebody may have put the secret itself there"


def test_it_gives_the_same_in_any_thread(server):
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: values(ask(server.url("/good"))), range(8))) == [[1.0, 0.0, 1.0]] * 8
