"""Weights on the move: buckets of tensors as plain bytes, their digests, and the manifest a push is checked against.

Numpy has no bfloat16, so a tensor travels as bytes with its dtype's name. Names are checkpoint names, as ``save_pretrained``
would write them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a push: everything that must be equal on both sides."""

    name: str  # checkpoint name
    dtype: str  # torch's name without the prefix: float32, bfloat16
    shape: tuple[int, ...]
    num_bytes: int
    digest: int  # xxh3_64 of the bytes as sent


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of tensors packed into one byte array, each at its offset."""

    generation: int  # of the push; buckets of an older generation are refused
    index: int
    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # into ``data``, in bytes, aligned to 64
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a whole push consists of, made by the sender."""

    generation: int
    num_buckets: int
    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def digest(self) -> int:
        """One number for the whole set: equal weights under equal names give equal digests."""
        return digest_specs(self.specs)


def digest_bytes(data: NDArray[np.uint8]) -> int:
    """64-bit xxh3 of a contiguous byte array."""
    return xxhash.xxh3_64_intdigest(data.data)


def digest_specs(specs: Iterable[TensorSpec]) -> int:
    """64-bit digest over names, dtypes, shapes and tensor digests, whatever the order of the tensors."""
    lines = sorted(f"{s.name} {s.dtype} {s.shape} {s.digest:016x}" for s in specs)
    return xxhash.xxh3_64_intdigest("\n".join(lines).encode())


def tensor_bytes(bucket: Bucket, place: int) -> NDArray[np.uint8]:
    """The bytes of the bucket's tensor number ``place``; a view, nothing is copied."""
    start = bucket.offsets[place]
    return bucket.data[start : start + bucket.specs[place].num_bytes]


def damaged_tensors(bucket: Bucket) -> list[str]:
    """One line for each of the bucket's tensors whose bytes are not those it was sent with."""
    lines = []
    for place, spec in enumerate(bucket.specs):
        data = tensor_bytes(bucket, place)
        if data.nbytes != spec.num_bytes:
            lines.append(f"{spec.name}: {spec.num_bytes} bytes sent, {data.nbytes} arrived")
        elif (digest := digest_bytes(data)) != spec.digest:
            lines.append(f"{spec.name}: digest {spec.digest:016x} sent, {digest:016x} arrived")
    return lines


def manifest_differences(sent: Manifest, arrived: Iterable[TensorSpec]) -> list[str]:
    """One line for each way in which what arrived differs from the manifest; empty when nothing does."""
    expected = {spec.name: spec for spec in sent.specs}
    got = {spec.name: spec for spec in arrived}
    lines = [f"{name}: sent, never arrived" for name in expected.keys() - got.keys()]
    lines += [f"{name}: arrived, but is not in the manifest" for name in got.keys() - expected.keys()]
    for name in expected.keys() & got.keys():
        want, have = expected[name], got[name]
        if (want.dtype, want.shape) != (have.dtype, have.shape):
            lines.append(f"{name}: sent as {want.dtype} {want.shape}, arrived as {have.dtype} {have.shape}")
        elif want.digest != have.digest:
            lines.append(f"{name}: digest {want.digest:016x} sent, {have.digest:016x} arrived")
    return sorted(lines)
