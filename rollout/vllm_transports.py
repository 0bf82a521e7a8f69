"""The receiving halves of the transports `nccl` and `ipc`, through vLLM's own weight-transfer engines.

**Never run on a GPU**: written against the interfaces of vLLM 0.32, tested with recording fakes. vLLM's engines hand what arrives to
``model.load_weights`` and would load it at once, unproven. Here that model is a tray: the bucket comes as one array of bytes, is
copied to host memory, and goes the way of every bucket: digested, laid aside, rehearsed, swapped in.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config.weight_transfer import WeightTransferConfig

from rollout.engine import EngineError, PushError
from rollout.transports import Header, Invitation, Lane, Parcel
from rollout.weights import Bucket

_ENGINES = {
    "nccl": "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine",
    "ipc": "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferEngine",
}
_ARGUMENTS = ("config", "vllm_config", "device", "model")
_METHODS = ("parse_init_info", "init_transfer_engine", "parse_update_info", "receive_weights", "shutdown")


class _Tray(nn.Module):
    """Stands where vLLM's engines expect the model, and keeps what they would load."""

    def __init__(self) -> None:
        super().__init__()
        self._lying: Tensor | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        ((_, self._lying),) = weights

    def take(self) -> NDArray[np.uint8]:
        """Its bytes in host memory; the copy waits for this thread's stream, and what lay on the GPU is let go."""
        tensor, self._lying = self._lying, None
        assert tensor is not None
        data: NDArray[np.uint8] = tensor.cpu().numpy()
        return data


class _Inbox:
    """One of vLLM's weight-transfer engines, whichever way its bytes come."""

    def __init__(self, transport: str, init_info: dict[str, Any]) -> None:
        """Joins with ``init_info``, as an engine of one rank: TP workers get their parts from this process later."""
        self._tray = _Tray()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        self._engine = _engine_class(transport)(
            config=WeightTransferConfig(backend=transport),
            vllm_config=SimpleNamespace(parallel_config=parallel, model_config=None),
            device=_this_gpu(),
            model=self._tray,
        )
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def receive(self, header: Header) -> NDArray[np.uint8]:
        update: dict[str, Any] = {"names": ["bucket"], "dtype_names": ["uint8"], "shapes": [[header.num_bytes]]}
        if isinstance(header.way, dict):
            update["ipc_handles"] = [header.way]
        self._engine.receive_weights(self._engine.parse_update_info(update))
        return self._tray.take()

    def shutdown(self) -> None:
        self._engine.shutdown()


def _engine_class(transport: str) -> Any:
    """vLLM's engine for a transport. Raises EngineError where this vLLM has another interface: it has moved in five releases."""
    path = _ENGINES[transport]
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError):
        found = None
    known = found is not None and (
        set(_ARGUMENTS) <= set(inspect.signature(found.__init__).parameters) and all(hasattr(found, name) for name in _METHODS)
    )
    if not known:
        raise EngineError(
            f"rollout.transport={transport} is written against vLLM 0.32, and {path} is missing or another in vLLM "
            f"{vllm.__version__}; rollout.transport=local works"
        )
    return found


def _this_gpu() -> torch.device:
    """The first that this process sees."""
    return torch.device("cuda", torch.cuda.current_device())


class NcclReceiver:
    """Takes part in the broadcasts of one sender, over a communicator of each generation's own."""

    def __init__(self, worker: str) -> None:
        _engine_class("nccl")  # says at once what is missing
        self._worker = worker
        self._lane: Lane[_Inbox] | None = None
        self._generation = -1
        self._next_index = 0

    def fetch(self, parcel: Parcel) -> Bucket:
        assert isinstance(parcel, Header)
        assert isinstance(parcel.way, Invitation)
        if parcel.generation > self._generation and parcel.index == 0:
            self.abort()
            name = f"{self._worker} in generation {parcel.generation}"
            self._lane = Lane(name, partial(_join, parcel.way, self._worker), _Inbox.shutdown)
            self._generation, self._next_index = parcel.generation, 0
        if self._lane is None or (parcel.generation, parcel.index) != (self._generation, self._next_index):
            raise PushError(
                f"parcel {parcel.index} of generation {parcel.generation} came where parcel {self._next_index} of generation "
                f"{self._generation} was next; the running weights are untouched"
            )
        self._next_index += 1
        return parcel.filled(self._lane.submit(lambda inbox: inbox.receive(parcel)).result())

    def close(self) -> None:
        if self._lane is not None:
            self._lane.end("closed")

    def abort(self) -> None:
        if self._lane is not None:
            self._lane.end("aborted")


def _join(invitation: Invitation, worker: str) -> _Inbox:
    """Returns when every rank has joined."""
    torch.cuda.set_stream(torch.cuda.Stream())  # of this thread: a broadcast that waits must hold up no decode step
    meeting = {"master_address": invitation.address, "master_port": invitation.port}
    rank = 1 + invitation.receivers.index(worker)
    return _Inbox("nccl", meeting | {"rank_offset": rank, "world_size": invitation.world_size})


class IpcReceiver:
    """Opens what a learner on this very GPU left there."""

    def __init__(self, worker: str) -> None:
        self._inbox = _Inbox("ipc", {})

    def fetch(self, parcel: Parcel) -> Bucket:
        assert isinstance(parcel, Header)
        assert isinstance(parcel.way, dict)
        mine = str(torch.cuda.get_device_properties(_this_gpu()).uuid)
        if mine not in parcel.way:
            raise PushError(
                f"the bytes lie on GPU {', '.join(parcel.way)}, this engine runs on {mine}: rollout.transport=ipc needs engine "
                "and learner on one GPU; rollout.transport=nccl or local works; the running weights are untouched"
            )
        return parcel.filled(self._inbox.receive(parcel))

    def close(self) -> None:
        """Nothing to end: each bucket was let go when it was copied."""

    abort = close
