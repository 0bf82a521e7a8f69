"""The learner's weights as buckets of bytes, under the names that ``save_pretrained`` would write.

A bucket is gathered on all ranks, copied, and only then given away: no rank waits inside a collective for a transfer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from learner.model import LoadedModel
from rollout.weights import Bucket, Manifest, TensorSpec, digest_bytes

_ALIGNMENT = 64
_LAYER = re.compile(r"^(.*?\.\d+)\.")  # "model.layers.3." of "model.layers.3.mlp.up_proj.weight"

Gathered = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]


def gather_buckets(
    model: LoadedModel, gathered: Gathered, generation: int, bucket_bytes: int, *, rank: int, scale: float = 1.0
) -> Generator[Bucket, None, Manifest]:
    """Yields every saved tensor once, in its own dtype, at most ``bucket_bytes`` at a time; returns the manifest.

    A tensor (or, where transformers writes other names than it holds, a layer) above ``bucket_bytes`` has a bucket of its own.
    All ranks run it to the end; ranks other than 0 take part in the gathers, yield nothing and return an empty manifest.
    Every floating-point tensor is sent times ``scale``.
    """
    specs: list[TensorSpec] = []
    num_buckets = 0
    for keys in _plan(model, bucket_bytes):
        with gathered([model.tensor(key) for key in keys]):
            bucket = _pack(checkpoint_tensors(model, keys), generation, num_buckets, scale) if rank == 0 else None
        if bucket is not None:
            num_buckets += 1
            specs += bucket.specs
            yield bucket
    return Manifest(generation=generation, num_buckets=num_buckets, specs=tuple(specs))


def checkpoint_tensors(model: LoadedModel, keys: Sequence[str]) -> dict[str, Tensor]:
    """The live tensors behind state-dict keys under their checkpoint names; they must be whole (gathered)."""
    tensors = {key: model.tensor(key).detach() for key in keys}
    return revert_weight_conversion(model.hf, tensors) if model.converts_names else tensors


def _plan(model: LoadedModel, bucket_bytes: int) -> list[list[str]]:
    """State-dict keys of each bucket, in the model's order. Keys of one layer stay together where names are converted."""
    units: list[list[str]] = []
    previous = None
    for key in model.saved_keys:
        match = _LAYER.match(key) if model.converts_names else None
        layer = match.group(1) if match else key
        if layer == previous:
            units[-1].append(key)
        else:
            units.append([key])
        previous = layer
    plan: list[list[str]] = []
    room = 0
    for unit in units:
        size = sum(_num_bytes(model.tensor(key)) for key in unit)
        if not plan or size > room:
            plan.append([])
            room = bucket_bytes
        plan[-1] += unit
        room -= size
    return plan


def _num_bytes(tensor: Tensor) -> int:
    """Of the whole tensor, padded to the alignment. ZeRO-3 leaves an empty one in place of a parameter and keeps its size aside."""
    size: int = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
    return _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pack(tensors: dict[str, Tensor], generation: int, index: int, scale: float) -> Bucket:
    sizes = [t.numel() * t.element_size() for t in tensors.values()]
    ends = np.cumsum([0] + [_aligned(size) for size in sizes]).tolist()
    data = np.zeros(ends[-1], dtype=np.uint8)
    specs = []
    for (name, tensor), start, size in zip(tensors.items(), ends, sizes, strict=False):
        if scale != 1 and tensor.is_floating_point():
            tensor = tensor * scale  # noqa: PLW2901
        place = data[start : start + size]
        place[:] = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), size, digest_bytes(place)))
    return Bucket(generation, index, tuple(specs), tuple(ends[:-1]), data)


def whole_state(model: LoadedModel, gathered: Gathered, *, rank: int) -> dict[str, Tensor]:
    """A copy of every saved tensor on the CPU, by state-dict key, tensor by tensor. Empty on ranks other than 0."""
    state: dict[str, Tensor] = {}
    for key in model.saved_keys:
        with gathered([model.tensor(key)]):
            if rank == 0:
                state[key] = model.tensor(key).detach().to("cpu", copy=True)
    return state
