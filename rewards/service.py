"""``limen serve-reward``: a reward as an HTTP service, by the protocol that `rewards.http_verifier` describes.

``POST /score`` scores a batch, ``GET /health`` tells how the pool is. An item may also carry ``source``, ``part`` and ``options``; all keys
but ``completion`` and ``answer`` have defaults. A request is refused as a whole, by 400 and one line that names the item: so a
client's mistake is never taken for a reward. Other refusals: 401 without the token, 408 for a body that does not come, 413 for one that is too
large, 503 with ``Retry-After`` where as many requests are under way as may be. ``/health``
asks for no token. Nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, InstanceOf, NonNegativeInt, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from configs.schema import RewardConfig, ServeConfig
from rewards.contract import RewardError, RewardItem
from rewards.http_verifier import PROTOCOL
from rewards.pool import RewardPool
from rewards.remote import read_secret
from rewards.strict_json import read_json
from rollout.records import Score, Status

BODY_S = 30.0  # a request's body must have come within this
GRACE_S = 20  # after a first signal, requests under way have so long to end
MAX_ERRORS = 3  # named in one refusal


class Item(BaseModel):
    """One completion to be scored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    completion: InstanceOf[str]  # any text of Python's: one cut inside a surrogate pair too
    answer: Any
    prompt: InstanceOf[str] = ""
    prompt_id: InstanceOf[str] = ""
    num_tokens: NonNegativeInt | None = None
    source: str | None = None
    part: str | None = None
    options: dict[str, Any] = {}


class Batch(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: list[Item]


def serve(reward: RewardConfig, settings: ServeConfig) -> int:
    """Serve until a signal comes. Returns the exit code: 130 after Ctrl-C, 143 after SIGTERM; a second signal ends the process at once.

    Raises `RewardError` where the verifiers can not be loaded, the address can not be listened on, or others could reach it and no
    token is asked for.
    """
    token = read_secret(settings.token_env, "serve.token_env")
    if token is None and not _is_loopback(settings.host):
        raise RewardError(
            f"serve.host: {settings.host!r} can be reached by others; name the variable of a token: serve.token_env=LIMEN_TOKEN"
        )
    listener = _listen(settings.host, settings.port)
    with listener, RewardPool(reward) as pool:
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/score"
        config = uvicorn.Config(
            make_app(pool, list(reward.parts), token, settings, address),
            log_level="warning",
            http="h11",  # bounds what comes before a body, which httptools collects without end, of clients without the token too
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=GRACE_S,
        )
        server = _Server(config)
        server.run(sockets=[listener])
    return 128 + server.stopped_by if server.stopped_by else 0


class _Server(uvicorn.Server):
    stopped_by = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by:
            os._exit(128 + sig)  # the verifier processes are bound to this one and end with it
        self.stopped_by, self.should_exit = sig, True


def make_app(pool: RewardPool, parts: list[str], token: str | None, settings: ServeConfig, address: str) -> FastAPI:
    """The application. It closes ``pool`` when it ends, so that what still waits for scores ends too."""
    # A request waits in a thread while the pool works.
    threads = ThreadPoolExecutor(settings.max_requests, thread_name_prefix="serve-reward")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        print(f"limen serve-reward: listening on {address}", flush=True)
        yield
        await asyncio.to_thread(pool.close)
        threads.shutdown()

    app = FastAPI(title="limen serve-reward", version=version("limen"), lifespan=lifespan)
    door = _Door(token, int(settings.max_body_mib * 2**20), settings.max_requests)

    @app.post("/score", openapi_extra={"requestBody": {"content": {"application/json": {"schema": Batch.model_json_schema()}}}})
    async def score(body: bytes = Depends(door.admit)) -> Response:
        items = _read_items(body)
        try:
            scores = await asyncio.get_running_loop().run_in_executor(threads, pool.score, items)
        except RewardError as error:  # an item names what the configuration does not have
            raise HTTPException(400, str(error)) from error
        return _json({"scores": [_result(one) for one in scores]})

    @app.get("/health")
    async def health() -> Response:
        state = pool.health()
        numbers = {"num_alive": state.num_alive, "num_lost": state.num_lost, "num_queued": state.num_queued}
        running = {"num_running": state.num_running, "longest_running_s": state.longest_running_s}
        return _json({"protocol": PROTOCOL, "version": app.version, "parts": parts, **numbers, **running})

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> Response:
        return _json({"error": error.detail}, error.status_code, error.headers)

    return app


class _Door:
    """Lets in a request that brings the token, while there is room, with its whole body; a slow one can not keep its place."""

    def __init__(self, token: str | None, max_bytes: int, max_requests: int) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_bytes, self._max_requests = max_bytes, max_requests
        self._inside = 0

    async def admit(self, request: Request) -> AsyncIterator[bytes]:
        given = request.headers.get("authorization", "").encode()
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise HTTPException(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        if self._inside >= self._max_requests:
            raise HTTPException(503, f"{self._max_requests} requests are under way; come back later", {"Retry-After": "1"})
        self._inside += 1
        try:
            yield await self._read(request)
        finally:
            self._inside -= 1

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes; send fewer items at once")
        except ClientDisconnect as error:  # nobody reads the answer, but the log would hold a traceback
            raise HTTPException(400, "the client has gone") from error
        except TimeoutError as error:
            raise HTTPException(408, f"the body had not come after {BODY_S:g} s") from error
        return bytes(body)


def _read_items(body: bytes) -> list[RewardItem]:
    try:
        batch = Batch.model_validate(read_json(body))
    except ValidationError as error:
        told = [f"{_place(one['loc'])}: {one['msg']}" for one in error.errors(include_input=False, include_url=False)]
        more = f"; {len(told) - MAX_ERRORS} more" if len(told) > MAX_ERRORS else ""
        raise HTTPException(400, "; ".join(told[:MAX_ERRORS]) + more) from error
    except ValueError as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    return [RewardItem(**dict(item)) for item in batch.items]


def _place(location: tuple[int | str, ...]) -> str:
    """``("items", 3, "answer")`` as ``items[3].answer``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in location)
    return text.lstrip(".") or "the body"


def _result(score: Score) -> dict[str, Any]:
    if score.status is not Status.OK:
        return {"status": score.status, "detail": score.detail}
    # The client sees one number; the parts it was made of stand among the measures.
    parts = score.parts if len(score.parts) > 1 else {}
    return {
        "value": score.value,
        "accuracy": score.accuracy,
        "outcome": score.outcome,
        "extracted": score.extracted,
        "measures": {**parts, **score.measures},
        "detail": score.detail,
    }


def _json(content: Any, status_code: int = 200, headers: Any = None) -> Response:
    # ASCII: a text cut inside a surrogate pair has no UTF-8 form.
    return Response(json.dumps(content, ensure_ascii=True, allow_nan=False), status_code, headers, "application/json")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # before the address is told: who asks at once waits until the server takes over
    except OSError as error:
        reason = error.strerror or str(error)
        raise RewardError(
            f"serve.host={host}, serve.port={port}: can not be listened on: {reason}; serve.port=0 takes a free port"
        ) from error
    return listener
