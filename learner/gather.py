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
    for keys in plan_gathers(model, model.saved_keys, bucket_bytes):
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


def plan_gathers(model: LoadedModel, keys: Sequence[str], num_bytes: int) -> list[list[str]]:
    """State-dict keys cut into runs of at most ``num_bytes``. Keys of one layer stay together where names are converted."""
    units: list[list[str]] = []
    previous = None
    for key in keys:
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
        size = sum(_aligned(whole_numel(t) * t.element_size()) for t in map(model.tensor, unit))
        if not plan or size > room:
            plan.append([])
            room = num_bytes
        plan[-1] += unit
        room -= size
    return plan


def whole_numel(tensor: Tensor) -> int:
    """Elements of the whole tensor. ZeRO-3 leaves an empty one in place of a parameter and keeps size and shape aside."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def whole_shape(tensor: Tensor) -> torch.Size:
    """Shape of the whole tensor, see ``whole_numel``."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


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
