"""Asking a server over HTTP: JSON in, JSON out, within one deadline, and no secret in any message."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import ssl
from base64 import b64encode
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from rewards.contract import RewardError
from rewards.strict_json import read_json

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0
_NAME = re.compile(r"[A-Z]{1,12}(_[A-Z0-9]{1,12}){0,5}")  # as such variables are named; keys have longer words, or small letters
MAX_QUOTED = 300  # characters of a server's own words in a message


class RemoteError(Exception):
    """A server's answer that is no verdict. The message names the server without credentials."""


class Unavailable(RemoteError):
    """It can not be reached, or asks to be left alone for now: another server, or the same one later, may do."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # what the server asked for by Retry-After


def shown(url: str) -> str:
    """The address without what may be secret in it: login, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_url(url: Any, key: str, secret: str | None) -> str:
    """``url`` if it is an http address, and has no login of its own where a ``secret`` is to be sent. Raises `RewardError` naming ``key``."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        httpx.URL(url)
    except (ValueError, TypeError, AttributeError, httpx.InvalidURL):  # no text, a port that is no number, a bracket left open
        good = False
    if not good:
        raise RewardError(f"{key}: wants an address such as http://localhost:8080/score")
    if secret is not None and parts.username is not None:
        raise RewardError(f"{key}: holds a login, and a secret is named too; a request carries one of them only")
    return str(url)


def read_secret(variable: str | None, key: str) -> str | None:
    """The value of an environment variable, None where none is named. Raises `RewardError` naming ``key`` and the variable; what does
    not look like a variable's name is not shown: somebody may have put the secret itself there."""
    if variable is None:
        return None
    secret = os.environ.get(variable, "").strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        state = "holds no text that a header can carry" if variable in os.environ else "is not set where the verifiers run"
        if _NAME.fullmatch(variable):
            raise RewardError(f"{key}: the environment variable {variable} {state}")
        raise RewardError(
            f"{key}: wants the name of the environment variable that holds the secret, such as LIMEN_TOKEN; what is given does not look "
            f"like a name, so it is not shown, and a variable of that name {state}"
        )
    return secret


async def post_json(url: str, content: Any, *, secret: str | None, max_bytes: int, try_again: Callable[[int], bool]) -> Any:
    """POST ``content`` and return the JSON that came back. The caller sets the deadline (`asyncio.timeout`): it then covers
    connecting, a body that drips and one without end.

    Args:
        url: where to; redirects are not followed, the secret would go with them.
        content: any JSON value.
        secret: sent as ``Authorization: Bearer``. Where the server repeats it, or the password of a login in ``url``, it is blacked out.
        max_bytes: largest body that is read.
        try_again: whether a status code means "later", not "no".

    Raises:
        Unavailable: no connection, or such a status code.
        RemoteError: another status than 200, a body too large or not strict JSON (`read_json`).
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # unpacked, a small body may be endless
    if secret is not None:
        headers["Authorization"] = f"Bearer {secret}"
    # ASCII: a text cut inside a surrogate pair has no UTF-8 form.
    data = json.dumps(content, ensure_ascii=True, allow_nan=False).encode()
    try:
        async with (
            # The whole exchange has one deadline, the caller's. A client of its own ties no connection to an event loop.
            httpx.AsyncClient(verify=_certificates(), timeout=None, follow_redirects=False) as client,
            client.stream("POST", url, content=data, headers=headers) as response,
        ):
            body = await _read(response, url, max_bytes)
            for hidden in _secrets(url, secret):  # a server that repeats its request must not bring them into a log
                body = body.replace(hidden.encode(), b"***")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(_clean(f"{shown(url)} can not be reached: {type(error).__name__}: {error}", url, secret)) from None
    if response.status_code != httpx.codes.OK:
        said = _clean(_words(body), url, secret)
        message = f"{shown(url)} answered {response.status_code}{': ' + said if said else ''}"
        if try_again(response.status_code):
            raise Unavailable(message, _retry_after(response.headers))
        if response.is_redirect:
            message += ", a redirect, which is not followed; give the address it leads to"
        raise RemoteError(message)
    try:
        return read_json(body)
    except ValueError as error:
        said = _clean(f"{error}: {_words(body)!r}", url, secret)
        raise RemoteError(f"{shown(url)} answered what is no JSON ({len(body)} bytes): {said}") from None


async def back_off(attempt: int, wait_s: float = 0.0) -> None:
    """Wait before try ``attempt`` (1 is the first repetition): twice as long each time, at least what the server asked for, and up
    to half as long again by chance, so that many clients do not come back at once."""
    pause = max(min(FIRST_BACKOFF_S * 2 ** (attempt - 1), MAX_BACKOFF_S), wait_s)
    await asyncio.sleep(pause * (1 + random.random() / 2))


@lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # tens of milliseconds, the same for every client


async def _read(response: httpx.Response, url: str, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise RemoteError(f"{shown(url)} answered more than {max_bytes} bytes; reading was stopped")
    return bytes(body)


def _words(body: bytes) -> str:
    """The beginning of a body on one line."""
    return " ".join(body[: 4 * MAX_QUOTED].decode(errors="replace").split())


def _clean(text: str, url: str, secret: str | None) -> str:
    parts = urlsplit(url)
    for hidden in (*_secrets(url, secret), *_worth_hiding(parts.username, parts.query)):
        text = text.replace(hidden, "***")
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def _secrets(url: str, secret: str | None) -> list[str]:
    """The secret and the password of the address, as written there, as meant, and as sent."""
    parts = urlsplit(url)
    name, password = unquote(parts.username or ""), unquote(parts.password or "")
    sent = b64encode(f"{name}:{password}".encode()).decode() if password else None
    return _worth_hiding(secret, sent, parts.password, password)


def _worth_hiding(*texts: str | None) -> list[str]:
    return [text for text in texts if text and len(text) > 3]  # blacking out every "me" would hide the message, not the login


def _retry_after(headers: httpx.Headers) -> float:
    value = headers.get("retry-after", "")
    return float(value) if re.fullmatch(r"\d{1,6}(\.\d+)?", value) else 0.0
