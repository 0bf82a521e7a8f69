"""The sending halves of the transports (rollout/transports.py), on learner rank 0.

**`nccl` and `ipc` were never run**: written against the interfaces of vLLM 0.32, tested with recording fakes. A bucket's bytes lie
in host memory, where they were digested; both put them on the GPU as one array of bytes, so that no kernel and no dtype can
change them on the way.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rollout.engine import PushError
from rollout.transports import Header, Invitation, Lane, Parcel, Sender
from rollout.weights import Bucket

_BUCKETS_HELD = 2
# vLLM's own trainer side, named by path: this package does not import vLLM, and only `nccl` loads it here.
_JOIN_AS_TRAINER = "vllm.distributed.weight_transfer.nccl_common:trainer_init"


def make_sender(transport: str, address: str) -> Sender:
    """The sending half. ``address``: of this node, where receivers can reach it."""
    senders: dict[str, Callable[[], Sender]] = {
        "local": LocalSender,
        "nccl": partial(NcclSender, address),
        "ipc": IpcSender,
    }
    return senders[transport]()


def send_all(sender: Sender, generation: int, receivers: Sequence[str], buckets: Iterable[Bucket]) -> Iterator[Parcel]:
    """The parcels of a generation. A generation that fails on the way is gathered to its end, since the other ranks take part in the
    gathers and would wait in them for ever; then its PushError is raised."""
    sender.open(generation, receivers)
    failed: PushError | None = None
    for bucket in buckets:
        if failed is None:
            try:
                parcel = sender.send(bucket)
            except PushError as error:
                failed = error
            else:
                yield parcel
    if failed is not None:
        raise failed


class LocalSender:
    """The bucket is its own parcel: Ray carries it."""

    def open(self, generation: int, receivers: Sequence[str]) -> None:
        """Nothing to begin."""

    def send(self, bucket: Bucket) -> Parcel:
        return bucket

    def close(self) -> None:
        """Nothing to end."""

    abort = close


class NcclSender:
    """Broadcasts over a communicator of each generation's own; the receivers are its other ranks.

    The broadcasts are made in a thread of their own, so the next bucket is gathered meanwhile. Its communicator shares the GPU
    with the ranks' own, but neither ever waits for the other: receivers take part in no gather.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lane: Lane[Any] | None = None
        self._invitation = Invitation(address, 0, ())
        self._in_flight: deque[Future[None]] = deque()

    def open(self, generation: int, receivers: Sequence[str]) -> None:
        self.abort()
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            self._invitation = Invitation(self._address, probe.getsockname()[1], tuple(receivers))
        self._in_flight.clear()
        self._lane = Lane(f"sender of generation {generation}", partial(_join_as_trainer, self._invitation), _destroy)

    def send(self, bucket: Bucket) -> Parcel:
        if self._lane is None:
            raise PushError(f"generation {bucket.generation} was never opened")
        while len(self._in_flight) >= _BUCKETS_HELD:
            self._in_flight.popleft().result()
        sent = self._lane.submit(partial(_broadcast, data=bucket.data))
        if sent.done():
            sent.result()  # the lane has ended: say so before anybody waits for this bucket
        self._in_flight.append(sent)
        return Header.of(bucket, self._invitation)

    def close(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().result()
        if self._lane is not None:
            self._lane.end("closed")

    def abort(self) -> None:
        if self._lane is not None:
            self._lane.end("aborted")


def _join_as_trainer(invitation: Invitation) -> Any:
    """vLLM's communicator, with this process as rank 0. Returns when every rank has joined."""
    torch.cuda.set_stream(torch.cuda.Stream())  # of this thread: a broadcast that waits must hold up nobody's kernels
    return resolve_name(_JOIN_AS_TRAINER)(
        {"master_address": invitation.address, "master_port": invitation.port, "world_size": invitation.world_size}
    )


def _broadcast(communicator: Any, data: NDArray[np.uint8]) -> None:
    stream = torch.cuda.current_stream()
    communicator.broadcast(_on_gpu(data), src=0, stream=stream)
    stream.synchronize()


def _destroy(communicator: Any) -> None:
    communicator.destroy()  # aborts whatever still runs on it


class IpcSender:
    """Leaves the bytes on this GPU and sends handles, which a worker on the same GPU opens.

    CUDA IPC counts: a bucket's memory is free once its one receiver has let go of it. What nobody opened (an aborted generation's
    last buckets) stays taken until this process ends.
    """

    def __init__(self) -> None:
        self._held: deque[Tensor] = deque(maxlen=_BUCKETS_HELD)

    def open(self, generation: int, receivers: Sequence[str]) -> None:
        self.abort()

    def send(self, bucket: Bucket) -> Parcel:
        tensor = _on_gpu(bucket.data)
        _, arguments = reduce_tensor(tensor)
        self._held.append(tensor)
        return Header.of(bucket, {str(torch.cuda.get_device_properties(tensor.device).uuid): arguments})

    def close(self) -> None:
        self._held.clear()
        torch.cuda.ipc_collect()

    abort = close


def _on_gpu(data: NDArray[np.uint8]) -> Tensor:
    """A copy on the current GPU, finished when this returns (from ordinary memory it cannot be otherwise)."""
    return torch.from_numpy(data).to("cuda")
