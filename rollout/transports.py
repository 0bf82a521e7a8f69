"""How the bytes of a push travel: one contract for Ray's object store (`local`), NCCL and CUDA IPC.

A push is a generation. On every transport its phases are the same, and the orchestrator owns them with their deadlines:

    sender (learner rank 0)         receiver (each rollout worker)
    open(generation, receivers)                                         names the workers, and waits for none of them
    send(bucket) -> parcel          fetch(parcel) -> bucket             parcel by parcel, in the sender's order; the first one joins
    close()                         close()                             after every receiver has fetched every parcel
    abort()                         abort()                             at a deadline, in the middle of anything above

A parcel is what the orchestrator carries: with `local` the bucket itself, else a header without its bytes, which take another
way. What ``fetch`` returns is digested like any bucket, so a transport proves nothing and can spoil nothing unseen. A generation
has a connection of its own: a new one ends an unfinished older one on either side, and after ``abort`` both are ready for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.engine import PushError
from rollout.weights import Bucket, TensorSpec

MEETS = frozenset({"nccl"})  # transports whose sender waits for its receivers, so that an abort must be able to reach it
_RECEIVERS = {
    "local": "rollout.transports:LocalReceiver",
    "nccl": "rollout.vllm_transports:NcclReceiver",
    "ipc": "rollout.vllm_transports:IpcReceiver",
}

C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the ranks of a generation's communicator meet: rank 0 is the sender, the others are its receivers in this order."""

    address: str
    port: int
    receivers: tuple[str, ...]  # names of the workers

    @property
    def world_size(self) -> int:
        return 1 + len(self.receivers)


@dataclass(frozen=True, slots=True)
class Header:
    """A bucket without its bytes."""

    generation: int
    index: int
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    way: Invitation | dict[str, tuple[Any, ...]]  # nccl: where to meet; ipc: how the bytes are opened on the GPU of each id

    @classmethod
    def of(cls, bucket: Bucket, way: Invitation | dict[str, tuple[Any, ...]]) -> Header:
        return cls(bucket.generation, bucket.index, bucket.specs, bucket.offsets, bucket.data.nbytes, way)

    def filled(self, data: NDArray[np.uint8]) -> Bucket:
        return Bucket(self.generation, self.index, self.specs, self.offsets, data)


Parcel: TypeAlias = Bucket | Header


class Sender(Protocol):
    """The half of learner rank 0. ``abort`` may be called from any thread, the rest from one."""

    def open(self, generation: int, receivers: Sequence[str]) -> None:
        """Begins a generation, without waiting for the receivers; an unfinished older one is aborted."""

    def send(self, bucket: Bucket) -> Parcel:
        """Has the bucket's bytes under way, or waiting to be fetched; at most two buckets are held. Raises PushError for a
        generation that was aborted or whose connection failed."""

    def close(self) -> None:
        """Ends a generation that every receiver has fetched. Raises PushError where a bucket was not sent."""

    def abort(self) -> None:
        """Ends a generation at once: whoever waits in ``send`` or ``close`` gets PushError."""


class Receiver(Protocol):
    """The half of a rollout worker. ``abort`` may be called from any thread, the rest from one at a time."""

    def fetch(self, parcel: Parcel) -> Bucket:
        """The parcel's bucket, its bytes in this process's memory. The first parcel of a newer generation joins it and aborts an
        unfinished older one. Raises PushError for a generation that was aborted or whose connection failed, and where the order of
        the parcels is that of the bytes (`nccl`) for one out of order or of an older generation."""

    def close(self) -> None:
        """Ends a generation whose parcels were all fetched."""

    def abort(self) -> None:
        """Ends a generation at once: whoever waits in ``fetch`` gets PushError."""


def make_receiver(transport: str, worker: str) -> Receiver:
    """The receiving half of the worker of that name. vLLM is imported for `nccl` and `ipc` only. Raises EngineError where it lacks
    the transport."""
    receiver: Receiver = resolve_name(_RECEIVERS[transport])(worker)
    return receiver


class LocalReceiver:
    """Ray has brought the bytes: shared memory on a node, one fetch a node across nodes."""

    def __init__(self, worker: str) -> None:
        pass

    def fetch(self, parcel: Parcel) -> Bucket:
        assert isinstance(parcel, Bucket)
        return parcel

    def close(self) -> None:
        """Nothing to end."""

    abort = close


class Lane(Generic[C]):
    """A thread that makes one connection and uses it, job after job, and that can be abandoned at any moment.

    A collective that waits for a peer cannot be interrupted from Python. Only this thread ever waits in one: ``end`` fails at once
    whatever else was waiting for it and breaks the connection; the thread ends by itself when its call returns. The first error
    ends the lane, since a communicator is of no use after it.
    """

    def __init__(self, name: str, connect: Callable[[], C], disconnect: Callable[[C], None]) -> None:
        """``name`` begins every error. ``disconnect`` runs once for a connection that was made, on whichever thread ends it."""
        self._name = name
        self._disconnect = disconnect
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Callable[[C], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._waiting: set[Future[Any]] = set()
        self._connection: C | None = None
        self._error: PushError | None = None
        threading.Thread(target=self._run, args=(connect,), name=name, daemon=True).start()

    def submit(self, job: Callable[[C], T]) -> Future[T]:
        """Has ``job`` run on the connection after the ones before it. The future fails with PushError when the lane ends first."""
        future: Future[T] = Future()
        with self._lock:
            if self._error is None:
                self._waiting.add(future)
                self._jobs.put((job, future))
            else:
                future.set_exception(self._error)
        return future

    def end(self, why: str) -> None:
        """Whatever was not done by now fails with PushError; a lane that has ended stays as it is."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error = PushError(f"{self._name}: {why}; the running weights are untouched")
            waiting, self._waiting = self._waiting, set()
            connection, self._connection = self._connection, None
        for future in waiting:
            future.set_exception(error)
        self._jobs.put(None)
        if connection is not None:
            self._disconnect(connection)

    def _run(self, connect: Callable[[], C]) -> None:
        try:
            connection = connect()
        except Exception as error:  # told to whoever waits for a job
            self.end(f"no connection: {type(error).__name__}: {error}")
            return
        with self._lock:
            ended = self._error is not None
            self._connection = None if ended else connection
        if ended:  # abandoned while it was being made
            self._disconnect(connection)
            return
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                result = job(connection)
            except Exception as error:  # likewise
                self.end(f"{type(error).__name__}: {error}")
                return
            with self._lock:
                wanted = future in self._waiting
                self._waiting.discard(future)
            if wanted:
                future.set_result(result)
