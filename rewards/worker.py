"""One verifier process: what runs on the far side of `rewards.process.WorkerProcess`.

It speaks over one socket. In come frames: 4 bytes of length, then a pickle; first the `Setup`, then chunks of
``(number, pickled item)``. Out go JSON lines, which the parent can read without trusting whatever ran here:

    ["ready"]                       the verifiers are loaded, or
    ["failed", message]             they can not be
    ["begin", number, part]         work on this part of this item starts now: the parent's clock runs from here
    ["done", number, *score]        the fields of `rollout.records.Score`, in order
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from configs.errors import ConfigError
from configs.schema import RewardPart
from rewards.compose import applicable, compose
from rewards.contract import RewardError, RewardItem, Verifier, describe, failed, judge
from rewards.verifiers import load_verifier
from rollout.records import Consequence, Outcome, Score, Status

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HEADER = struct.Struct("<I")
_SCORE = attrgetter(*(field.name for field in fields(Score)))


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to know before its first item."""

    parts: Mapping[str, RewardPart]
    memory_bytes: int | None  # limit of its address space


def frame(content: Any) -> bytes:
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


def main(connection_fd: int, parent_pid: int) -> None:
    """Serve until the parent closes the connection or dies."""
    _bind_to_parent(parent_pid)
    os.set_inheritable(connection_fd, False)
    connection = socket.socket(fileno=connection_fd)
    # What a verifier forks must neither keep the connection open after us nor speak on it: a fork that comes back into the
    # loop below fails at its first send and ends.
    os.register_at_fork(after_in_child=connection.close)
    setup: Setup = pickle.loads(_receive(connection))
    if setup.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    try:
        verifiers = {name: _load(name, part) for name, part in setup.parts.items()}
    except ConfigError as error:
        connection.sendall(_line("failed", str(error)))
        return
    _silence()
    connection.sendall(_line("ready"))
    with asyncio.Runner() as runner:
        while data := _receive(connection):
            _score_chunk(connection, pickle.loads(data), setup.parts, verifiers, lambda result: runner.run(_wait_for(result)))


def _score_chunk(
    connection: socket.socket,
    chunk: Sequence[tuple[int, bytes]],
    parts: Mapping[str, RewardPart],
    verifiers: Mapping[str, Verifier],
    run: Callable[[Awaitable[Any]], Any],
) -> None:
    unsent = b""  # the last item's "done" travels with this one's "begin": one write an item
    for number, blob in chunk:
        try:
            item: RewardItem = pickle.loads(blob)
        except Exception as error:
            score = failed(Status.ERROR, f"the item can not be unpickled in a verifier process: {describe(error)}", 0.0)
        else:
            judging, scores = applicable(parts, item.part), {}
            for name in judging:
                connection.sendall(unsent + _line("begin", number, name))
                unsent = b""
                (scores[name],) = judge(verifiers[name], [item], {}, run)
            score = compose(judging, scores)
        unsent += _line("done", number, *_SCORE(score))
    connection.sendall(unsent)


def read_score(values: Sequence[Any]) -> Score:
    """The score in a ``done`` message."""
    status, outcome, *rest, consequence = values
    return Score(Status(status), Outcome(outcome), *rest, consequence=Consequence(consequence))


def _load(name: str, part: RewardPart) -> Verifier:
    key = f"reward.parts.{name}"
    try:
        return load_verifier(name, part)
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


def _bind_to_parent(parent_pid: int) -> None:
    """Die with the parent, adopt orphans, and be the first that the kernel kills when memory runs out."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # A verifier's child that outlives its own parent becomes ours, not init's, so that it can be found and killed.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # some containers forbid it
            file.write("1000")
    if os.getppid() != parent_pid:
        sys.exit("the parent ended while this process started")


def _silence() -> None:
    """Whatever a verifier prints from here on is dropped: it may be endless."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
