"""One verifier process: what runs on the far side of `rewards.process.WorkerProcess`.

It speaks over one socket. In come frames: 8 bytes of length, then a pickle; first the `Setup`, then lists of calls
``(number, part, pickled options, pickled items)``. Out go JSON lines, which the parent can read without trusting whatever ran here:

    ["ready", pid, batch, async]    the verifiers are loaded; the names of the parts that are batch verifiers, and async ones; or
    ["failed", message]             they can not be
    ["begin", number]               this call starts now: the parent's clock runs from here
    ["full"]                        what was judged has left so much memory in use that this process should be replaced
    ["done", number, late, scores]  the fields of `rollout.records.Score`, in order, an item; late: the call was cancelled at its
                                    deadline

Calls of an async verifier are cancelled here at their deadline, which costs no process and no other call.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import resource
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from configs.errors import ConfigError
from configs.schema import RewardPart
from rewards.confine import confine_here
from rewards.contract import RewardError, RewardItem, Verifier, describe, failed, judge, judge_async, prepare
from rewards.verifiers import load_verifier
from rollout.records import Consequence, Outcome, Score, Status
from rollout.stack_signal import listen

_HEADER = struct.Struct("<Q")
_SCORE = attrgetter(*(field.name for field in fields(Score)))

Call = tuple[int, str, bytes, Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to know before its first item."""

    parts: Mapping[str, RewardPart]
    timeout_s: Mapping[str, float]  # of one call, by part
    memory_bytes: int | None  # limit of its address space


def frame(content: Any) -> bytes:
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


def read_score(values: Sequence[Any]) -> Score:
    """One score of a ``done`` message. Raises TypeError or ValueError for what `judge` never says: the parent counts with these."""
    status, outcome, value, accuracy, parts, extracted, time_s, detail, measures, consequence = values
    score = Score(
        Status(status), Outcome(outcome), value, accuracy, parts, extracted, time_s, detail, measures, Consequence(consequence)
    )
    numbers, texts = [time_s], [detail] if extracted is None else [detail, extracted]
    if score.status is Status.OK:
        numbers += [value, accuracy]
    elif (value, accuracy) != (None, None):
        raise ValueError("a value without a verdict")
    if (
        (parts, score.consequence) != ({}, Consequence.NONE)
        or not isinstance(measures, dict)
        or not all(isinstance(text, str) for text in texts)
    ):
        raise TypeError("not the fields of a score")
    if not all(isinstance(number, float) and math.isfinite(number) for number in (*numbers, *measures.values())):
        raise TypeError("not a finite number")
    return score


def main(connection_fd: int) -> None:
    """Serve until the parent closes the connection."""
    listen()
    os.set_inheritable(connection_fd, False)
    connection = socket.socket(fileno=connection_fd)
    # What a verifier forks must neither keep the connection open after us nor speak on it: a fork that comes back into the
    # loop below fails at its first send and ends.
    os.register_at_fork(after_in_child=connection.close)
    setup: Setup = pickle.loads(_receive(connection))
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    with asyncio.Runner() as runner:
        runner.get_loop()  # made before the process is confined
        try:
            judging = _Judging(setup, runner)
        except ConfigError as error:
            connection.sendall(_line("failed", str(error)))
            return
        batch, can_cancel = ([n for n, v in judging.verifiers.items() if getattr(v, kind)] for kind in ("is_batch", "is_async"))
        _silence()
        connection.sendall(_line("ready", os.getpid(), batch, can_cancel))
        if any(part.concurrency > 1 for part in setup.parts.values()):
            runner.run(_serve_at_once(connection, judging))
        while data := _receive(connection):
            _serve_in_turn(connection, pickle.loads(data), judging)


class _Judging:
    """The verifiers of this process and the limits they work under. Raises ConfigError where they can not be had."""

    def __init__(self, setup: Setup, runner: asyncio.Runner) -> None:
        self._runner, self._timeout_s = runner, setup.timeout_s
        self.verifiers = {name: _load(name, part) for name, part in setup.parts.items()}
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if setup.memory_bytes and sys.platform == "linux" else None
        self._full_bytes = math.inf
        if setup.memory_bytes:  # half of the room that loading has left
            self._full_bytes = (setup.memory_bytes + self._address_space()) / 2
        if any(part.confined for part in setup.parts.values()):
            confine_here(read=[path for path in sys.path if path])

    def begin(self, call: Call) -> tuple[Verifier, list[RewardItem], Mapping[str, Any]] | list[Score]:
        """What the call needs; or, where its items can not be read, their scores."""
        _, name, options, blobs = call
        # CPU time of the process, all its threads: at the deadline of what is judged in one of them, however many there are. A
        # verifier's child processes inherit the limit.
        soft = math.ceil(time.process_time() + self._timeout_s[name]) + 1
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        try:
            return self.verifiers[name], [pickle.loads(blob) for blob in blobs], pickle.loads(options)
        except Exception as error:
            detail = f"the item can not be unpickled in a verifier process: {describe(error)}"
            return [failed(Status.ERROR, detail, 0.0)] * len(blobs)

    def in_turn(self, call: Call) -> bytes:
        """Judge, and say so."""
        began = self.begin(call)
        if isinstance(began, list):
            return self._done(call, began)
        verifier, items, options = began
        if verifier.is_async:
            return self._runner.run(self._within(call, verifier, items, options))
        return self._done(call, judge(verifier, items, options, lambda result: self._runner.run(_wait_for(result))))

    async def at_once(self, call: Call) -> bytes:
        """The same for an async verifier."""
        began = self.begin(call)
        return self._done(call, began) if isinstance(began, list) else await self._within(call, *began)

    async def _within(self, call: Call, verifier: Verifier, items: Sequence[RewardItem], options: Mapping[str, Any]) -> bytes:
        limit_s, scores = self._timeout_s[call[1]], None
        try:
            async with asyncio.timeout(limit_s) as scope:
                scores = await judge_async(verifier, items, options)
        except TimeoutError:
            pass
        # A verdict that a cancelled call gave all the same came too late.
        if scores is None or scope.expired():
            detail = f"{verifier.name}: was still running after {limit_s:g} s and was cancelled"
            return self._done(call, [failed(Status.TIMEOUT, detail, limit_s / len(items))] * len(items), late=True)
        return self._done(call, scores)

    def _done(self, call: Call, scores: Sequence[Score], *, late: bool = False) -> bytes:
        full = _line("full") if self._statm is not None and self._address_space() > self._full_bytes else b""
        return full + _line("done", call[0], late, [_SCORE(score) for score in scores])

    def _address_space(self) -> int:
        # The file was opened before the process was confined.
        return 0 if self._statm is None else int(os.pread(self._statm, 100, 0).split()[0]) * resource.getpagesize()


def _serve_in_turn(connection: socket.socket, calls: Sequence[Call], judging: _Judging) -> None:
    unsent = b""  # the last call's "done" travels with this one's "begin": one write a call
    for call in calls:
        connection.sendall(unsent + _line("begin", call[0]))
        unsent = judging.in_turn(call)
    connection.sendall(unsent)


async def _serve_at_once(connection: socket.socket, judging: _Judging) -> None:
    """Start every call as it arrives: the parent sends no more than may be under way."""
    reader, writer = await asyncio.open_connection(sock=connection)
    running: set[asyncio.Task[None]] = set()

    async def serve(call: Call) -> None:
        writer.write(_line("begin", call[0]))
        writer.write(await judging.at_once(call))

    while True:
        try:
            (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            calls = pickle.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):  # the parent has ended
            os._exit(0)
        for call in calls:
            task = asyncio.create_task(serve(call))
            running.add(task)
            task.add_done_callback(running.discard)


def _load(name: str, part: RewardPart) -> Verifier:
    key = f"reward.parts.{name}"
    try:
        verifier = load_verifier(name, part)
        prepare(verifier, f"{key}.params")
        return verifier
    except ConfigError:
        raise
    except BaseException as error:  # a user's module may raise anything while it is imported, SystemExit included
        raise RewardError(f"{key}.function: '{part.function}' can not be loaded: {describe(error)}") from error


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _line(*message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _receive(connection: socket.socket) -> bytes:
    """The next frame; empty at the end of the connection."""
    header = connection.recv(_HEADER.size, socket.MSG_WAITALL)
    if len(header) < _HEADER.size:
        return b""
    (size,) = _HEADER.unpack(header)
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


def _silence() -> None:
    """Whatever a verifier prints from here on is dropped: it may be endless."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
