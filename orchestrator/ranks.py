"""The learner's ranks as one: every call goes to all of them, since each takes part in every collective."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.handles import StepReport
from orchestrator.stages import Batch
from rollout.weights import Manifest

BUCKETS_AHEAD = 2  # gathered and not yet fetched by the driver: more would copy the whole model into the object store


class RayLearner:
    """Metrics, scores and weights are rank 0's; an error is the first one that any rank raises."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)

    async def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        return await asyncio.gather(*(call(rank) for rank in self.ranks))

    async def prepare(self, batch: Batch) -> dict[str, float]:
        parcels = list({id(kept.scored.address.parcel): kept.scored.address.parcel for kept in batch.groups}.values())
        number = {id(parcel): i for i, parcel in enumerate(parcels)}
        places = [(number[id(kept.scored.address.parcel)], kept.scored.address.place) for kept in batch.groups]
        scores = [kept.scored.scores for kept in batch.groups]
        reports = await self._all(lambda rank: rank.prepare.remote(batch.step, batch.version, places, scores, parcels))
        return dict(reports[0])

    async def train(self) -> StepReport:
        reports = await self._all(lambda rank: rank.train.remote())
        report: StepReport = reports[0]
        return report

    async def buckets(self, generation: int, scale: float = 1.0) -> AsyncGenerator[Any, None]:
        """References to the buckets of the weights times ``scale``, each as soon as it is gathered.

        Whoever stops early must close it (``contextlib.aclosing``): the ranks then gather to the end, and what they still yield is
        thrown away, so that none of them is left waiting inside a collective.
        """
        first, *others = self.ranks
        taking_part = [rank.gather.remote(generation, scale) for rank in others]
        stream = first.buckets.options(_generator_backpressure_num_objects=BUCKETS_AHEAD).remote(generation, scale)
        try:
            async for reference in stream:
                yield reference
        finally:
            async for _ in stream:
                pass
            await asyncio.gather(*taking_part)

    async def manifest(self) -> Manifest:
        """Of the last ``buckets``, read to the end."""
        manifest: Manifest = await self.ranks[0].manifest.remote()
        return manifest

    async def score_tokens(self, rows: Sequence[np.ndarray[Any, Any]], temperature: float) -> list[np.ndarray[Any, Any]]:
        scores: list[np.ndarray[Any, Any]] = (await self._all(lambda rank: rank.score_tokens.remote(rows, temperature)))[0]
        return scores

    async def save(self, folder: str) -> None:
        await self._all(lambda rank: rank.save.remote(folder))

    async def load(self, folder: str) -> None:
        await self._all(lambda rank: rank.load.remote(folder))

    async def export(self, folder: str) -> None:
        await self._all(lambda rank: rank.export.remote(folder))
