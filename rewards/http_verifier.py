"""A reward that lives elsewhere: a batch of completions is sent to a server, which sends their scores back.

The protocol, version `PROTOCOL`, which `rewards.service` speaks too: ``POST`` with

    {"items": [{"completion": str, "answer": any JSON, "prompt": str, "prompt_id": str, "num_tokens": int or null}, ...]}

is answered by 200 and one score an item, in the same order:

    {"scores": [0.5,                                                        a number: the value
                {"value": 1, "accuracy": 1, "outcome": "right", "extracted": "42", "measures": {}, "detail": ""},
                {"status": "invalid", "detail": "no tests"},                error | timeout | invalid | abstain: no value
                ...]}

In a verdict all keys but ``value`` may be missing, and further ones are an error. Any other status code, or a body that is not of
this form, is an error of all items of the request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from rewards.contract import Abstain, InvalidItem, RewardError, Verdict
from rewards.remote import RemoteError, Unavailable, back_off, check_url, post_json, read_secret, shown

PROTOCOL = "limen.score/1"
LATER = frozenset({429, 502, 503, 504})  # status codes that another server, or the same one later, may mend
SET_ASIDE_S = 10.0  # how long a server that failed is not asked, unless all have
MAX_BYTES, MAX_ITEM_BYTES = 2**20, 2**18  # largest answer that is read: the first, and the second for each item
_KEYS = {field.name for field in fields(Verdict)} | {"status"}

_aside: dict[str, float] = {}  # server: when it may be asked again, by time.monotonic; shared by all calls in this process
_turn = itertools.count()


@dataclass(frozen=True, slots=True)
class _Servers:
    urls: tuple[str, ...]
    secret: str | None
    timeout_s: float
    retries: int


async def http(  # noqa: PLR0913
    completions: Sequence[str],
    answers: Sequence[Any],
    prompts: Sequence[str],
    prompt_ids: Sequence[str],
    nums_tokens: Sequence[int | None],
    *,
    urls: Any,
    token_env: str | None = None,
    timeout_seconds: float = 50.0,
    retries: int = 3,
) -> list[Verdict | Exception]:
    """The scores that servers give, spread over those that work; what became of each item alone stands in its place.

    A share whose server can not be reached or answers 429, 502, 503 or 504 is sent again, ``retries`` times at most, with growing pauses
    (or as long as ``Retry-After`` asks), to the next server that works; the one that failed is set aside for some seconds. Whatever else a
    server does wrong is an error of its share alone.

    Args:
        urls: one or several addresses: a list, or text with commas. Items are spread evenly.
        token_env: environment variable whose value is sent as ``Authorization: Bearer``.
        timeout_seconds: of a call, all its tries together; then the share is a timeout. Set it below the part's ``timeout_s``.
        retries: further tries of a share.
    """
    servers = _settings(
        _listed(urls),
        token_env=token_env,
        timeout_seconds=timeout_seconds,
        retries=retries,
    )
    columns = zip(completions, answers, prompts, prompt_ids, nums_tokens, strict=True)
    items = [{"completion": c, "answer": a, "prompt": p, "prompt_id": i, "num_tokens": n} for c, a, p, i, n in columns]
    results: list[Any] = [_refusal(item["answer"]) for item in items]
    sent = [place for place, result in enumerate(results) if result is None]
    num_shares = min(len(sent), len(_good(servers.urls)))
    edges = [len(sent) * k // max(num_shares, 1) for k in range(num_shares + 1)]
    shares = [sent[low:high] for low, high in itertools.pairwise(edges)]
    first = next(_turn)
    asked = (_ask(servers, [items[place] for place in share], first + k) for k, share in enumerate(shares))
    for share, answered in zip(shares, await asyncio.gather(*asked), strict=True):
        for place, result in zip(share, answered, strict=True):
            results[place] = result
    return results


def _prepare(*, urls: Any, **others: Any) -> None:
    """The servers themselves are asked only when there is something to score."""
    _settings(_listed(urls), **others)


http.prepare = _prepare  # type: ignore[attr-defined]


def _listed(urls: Any) -> tuple[Any, ...]:
    if isinstance(urls, str):
        return tuple(url.strip() for url in urls.split(","))
    return tuple(urls) if isinstance(urls, Sequence) else (urls,)


@lru_cache(maxsize=16)
def _settings(
    urls: tuple[str, ...],
    *,
    token_env: str | None,
    timeout_seconds: float,
    retries: int,
) -> _Servers:
    """Raises `RewardError` for settings that can not work."""
    if not urls:
        raise RewardError("urls: wants at least one address, such as http://localhost:8080/score")
    if timeout_seconds <= 0 or retries < 0:
        raise RewardError("timeout_seconds must be above 0, retries 0 or more")
    secret = read_secret(token_env, "token_env")
    return _Servers(
        urls=tuple(check_url(url, f"urls, address {place}", secret) for place, url in enumerate(urls, 1)),
        secret=secret,
        timeout_s=timeout_seconds,
        retries=retries,
    )


def _refusal(answer: Any) -> InvalidItem | None:
    try:
        json.dumps(answer, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        return InvalidItem(f"the reference answer is no JSON: {error}")  # it must not spoil the request of the others
    return None


def _good(urls: Sequence[str]) -> list[str]:
    """Those that are not set aside; where all are, the one whose time is over first."""
    now = time.monotonic()
    return [url for url in urls if _aside.get(url, now) <= now] or [min(urls, key=lambda url: _aside.get(url, now))]


async def _ask(servers: _Servers, share: Sequence[dict[str, Any]], turn: int) -> Iterable[Verdict | Exception]:
    """One result for each item of the share. Never raises."""
    url = ""
    try:
        async with asyncio.timeout(servers.timeout_s):
            for attempt in range(servers.retries + 1):
                good = _good(servers.urls)
                url = good[(turn + attempt) % len(good)]
                try:
                    content = await post_json(
                        url,
                        {"items": share},
                        secret=servers.secret,
                        max_bytes=MAX_BYTES + MAX_ITEM_BYTES * len(share),
                        try_again=LATER.__contains__,
                    )
                    _aside.pop(url, None)
                    return _read_scores(content, len(share), url)
                except Unavailable as error:
                    _aside[url] = time.monotonic() + SET_ASIDE_S
                    if attempt == servers.retries:
                        raise
                    await back_off(attempt + 1, error.wait_s)
        raise AssertionError("the loop returns or raises")
    except TimeoutError:
        _aside[url] = time.monotonic() + SET_ASIDE_S
        return [TimeoutError(f"{shown(url)} had not answered after {servers.timeout_s:g} s") for _ in share]
    except Exception as error:  # the other shares go on
        return [error for _ in share]


def _read_scores(content: Any, expected: int, url: str) -> list[Verdict | Exception]:
    if not isinstance(content, dict) or not isinstance(content.get("scores"), list):
        raise RemoteError(f'{shown(url)} answered no {{"scores": [...]}}: {repr(content)[:300]}')
    scores = content["scores"]
    if len(scores) != expected:
        raise RemoteError(f"{shown(url)} answered with the wrong number of scores: expected {expected}, got {len(scores)}")
    return [_read_one(score, url) for score in scores]


def _read_one(score: Any, url: str) -> Verdict | Exception:
    if not isinstance(score, dict):
        return Verdict(value=score)  # what is no finite number is refused by the contract, for this item alone
    if unknown := sorted(map(str, score.keys() - _KEYS)):
        return RemoteError(f"{shown(url)} answered a score with the unknown keys {', '.join(unknown)[:300]}")
    status, detail = score.get("status", "ok"), score.get("detail", "")
    if status == "ok":
        if "value" not in score:
            return RemoteError(f"{shown(url)} answered a score without 'value'")
        return Verdict(**{key: value for key, value in score.items() if key != "status"})
    kinds = {"error": RemoteError, "timeout": TimeoutError, "invalid": InvalidItem, "abstain": Abstain}
    if not isinstance(status, str) or status not in kinds:
        return RemoteError(f"{shown(url)} answered the unknown status {repr(status)[:100]}")
    return kinds[status](f"{shown(url)}: {detail}")
