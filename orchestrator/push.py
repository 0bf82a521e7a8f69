"""A push: the learner's weights onto every engine, with proof.

Phases, each with the engines named: gather and send (bucket k + 1 is gathered while k travels), manifest, swap. The bytes are
proven at every push by the receivers. Loading is proven once for each engine: engines start from random weights, so a tensor
that no push reaches is off by nats, and the first push must make the engine agree with the learner on fixed tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.schema import Dtype
from orchestrator.errors import RunStopped
from orchestrator.fleet import Worker
from orchestrator.ranks import RayLearner
from rollout.engine import SwapReport
from rollout.weights import Manifest

# Largest difference of one log-probability in float32; mean difference in bfloat16, whose own rounding reaches 0.05
TOLERANCE = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Engine against learner on the same tokens."""

    worker: str
    max_difference: float
    mean_difference: float

    def proves(self, dtype: Dtype) -> bool:
        """Whether the engine runs the learner's weights. NaN proves nothing."""
        difference = self.max_difference if dtype is Dtype.float32 else self.mean_difference
        return difference <= TOLERANCE[dtype]


class RayPusher:
    """Pushes from rank 0 of the learner to every worker through Ray's object store (the ``local`` transport)."""

    def __init__(
        self, learner: RayLearner, workers: Sequence[Worker], *, dtype: Dtype, temperature: float, rows: Sequence[Any]
    ) -> None:
        """``rows``: the fixed token ids of the proof, each an int32 array of at least two tokens."""
        self._learner = learner
        self._workers = tuple(workers)
        self._dtype = dtype
        self._temperature = temperature
        self._rows = list(rows)
        self._generation = 0
        self._lock = asyncio.Lock()
        self._manifest: Manifest | None = None  # of the last push that every engine swapped in

    async def push(self, version: int) -> dict[str, float]:
        """One push after another: a second call waits for the first. Raises RunStopped with the engine's own words."""
        async with self._lock:
            self._generation += 1
            try:
                manifest = await self._send()
                reports = await asyncio.gather(*(w.actor.swap.remote(version, manifest) for w in self._workers))
            except Exception as error:
                raise RunStopped(f"the push of version {version} failed: {_words(error)}") from error
            changed = _share_changed(self._manifest, manifest)
            self._manifest = manifest
            return _metrics(manifest, reports, changed)

    @property
    def digest(self) -> str:
        """Of all weights that every engine runs: equal weights give equal digests."""
        return f"{self._manifest.digest:016x}" if self._manifest else ""

    async def prove(self) -> list[Agreement]:
        """Compares every engine with the learner on the fixed tokens. Raises RunStopped where one does not agree."""
        expected = await self._learner.score_tokens(self._rows, self._temperature)
        answers = await asyncio.gather(*(w.actor.score_tokens.remote(self._rows, self._temperature) for w in self._workers))
        agreements = []
        for worker, scores in zip(self._workers, answers, strict=True):
            gaps = np.concatenate([np.abs(s.logp - e) for s, e in zip(scores, expected, strict=True)])
            agreements.append(Agreement(worker.name, float(gaps.max()), float(gaps.mean())))
        for agreement in agreements:
            if not agreement.proves(self._dtype):
                raise RunStopped(
                    f"{agreement.worker} does not run the weights it was sent: its log-probabilities of {sum(map(len, self._rows))} "
                    f"fixed tokens differ from the learner's by {agreement.max_difference:.3g} at most and "
                    f"{agreement.mean_difference:.3g} on average; {TOLERANCE[self._dtype]:g} is allowed in {self._dtype.value}"
                )
        return agreements

    async def _send(self) -> Manifest:
        arriving: list[Any] = []
        async for bucket in self._learner.buckets(self._generation):
            await asyncio.gather(*arriving)  # at most two buckets are under way
            arriving = [worker.actor.receive.remote(bucket) for worker in self._workers]
        await asyncio.gather(*arriving)
        return await self._learner.manifest()


def _metrics(manifest: Manifest, reports: Sequence[SwapReport], changed: float | None) -> dict[str, float]:
    metrics = {
        "push/sent_bytes": float(manifest.num_bytes),
        "push/num_recomputed": float(sum(report.num_recomputed for report in reports)),
        "push/num_mixed": float(sum(report.num_mixed for report in reports)),
        "time/swap_s": max(report.time_s for report in reports),
    }
    return metrics if changed is None else metrics | {"push/changed_frac": changed}


def _share_changed(before: Manifest | None, after: Manifest) -> float | None:
    if before is None:
        return None
    old = {spec.name: spec.digest for spec in before.specs}
    return sum(old.get(spec.name) != spec.digest for spec in after.specs) / len(after.specs)


def _words(error: Exception) -> str:
    """The engine's own message, without the remote traceback that Ray wraps round it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"
