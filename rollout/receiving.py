"""Receiving a push: buckets are checked and laid aside, then taken as a whole.

A push is a *generation*. Its buckets may come in any order; a newer generation drops an unfinished older one, and what comes
late from an older one is refused, so tensors of two pushes never mix.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from rollout.engine import PushError
from rollout.weights import Bucket, Manifest, damaged_tensors, manifest_differences

_MAX_LINES = 8  # of a message that could name every tensor of a model


class PushReceiver:
    """Holds the buckets of one push until they are taken. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1  # newest seen
        self._taken = -1  # newest that was taken, or refused as a whole
        self._buckets: dict[int, Bucket] = {}

    def add(self, bucket: Bucket) -> None:
        """Keeps ``bucket`` (without a copy: its sender must not write into it any more).

        Raises PushError for bytes that do not give the digest they were sent with, and for an older generation.
        """
        damaged = damaged_tensors(bucket)
        if damaged:
            raise PushError(f"bucket {bucket.index} of generation {bucket.generation} arrived damaged: {some_lines(damaged)}")
        with self._lock:
            if bucket.generation < self._generation or bucket.generation <= self._taken:
                raise PushError(
                    f"bucket {bucket.index} belongs to generation {bucket.generation}, but "
                    f"{self._generation} has already begun or ended; send it again under a new generation"
                )
            if bucket.generation > self._generation:
                self._generation = bucket.generation
                self._buckets = {}
            self._buckets[bucket.index] = bucket

    def take(self, manifest: Manifest) -> list[Bucket]:
        """The buckets of the manifest's generation, in order; they are forgotten here, whether accepted or refused.

        Raises PushError when what arrived is not exactly what the manifest says.
        """
        with self._lock:
            if manifest.generation != self._generation or manifest.generation <= self._taken:
                raise PushError(
                    f"swap of generation {manifest.generation}, but the newest buckets are of generation "
                    f"{self._generation} and the newest swap of {self._taken}; the running weights are untouched"
                )
            buckets = [self._buckets[index] for index in sorted(self._buckets)]
            self._buckets = {}
            self._taken = manifest.generation
        specs = [spec for bucket in buckets for spec in bucket.specs]
        lines = manifest_differences(manifest, specs)
        lines += [f"{name}: arrived {num} times" for name, num in Counter(spec.name for spec in specs).items() if num > 1]
        if lines:
            raise PushError(
                f"generation {manifest.generation} is incomplete or damaged ({len(buckets)} of {manifest.num_buckets} "
                f"buckets arrived); the running weights are untouched: {some_lines(lines)}"
            )
        return buckets


def some_lines(lines: Sequence[str]) -> str:
    """The first few lines in one, and how many there are beyond them."""
    rest = len(lines) - _MAX_LINES
    return "; ".join(lines[:_MAX_LINES]) + (f"; and {rest} more" if rest > 0 else "")
