"""The learner's ranks as one: every call goes to all of them, since each takes part in every collective."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from orchestrator.checkpoint import Files
from orchestrator.handles import StepReport
from orchestrator.shared_folder import FolderView
from orchestrator.stages import Batch
from rollout.weights import Manifest

BUCKETS_AHEAD = 2  # gathered and not yet fetched by the driver: more would copy the whole model into the object store


class RayLearner:
    """Metrics, scores and weights are rank 0's; an error is the first one that any rank raises."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)

    async def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        return await asyncio.gather(*(call(rank) for rank in self.ranks))

    async def _to_the_end(self, call: Callable[[Any], Any]) -> list[Any]:
        """Like ``_all``, but an error comes only after the other ranks have ended too; that of a rank which is dead comes at once."""
        answers = [asyncio.ensure_future(_await(call(rank))) for rank in self.ranks]
        try:
            return await asyncio.gather(*answers)
        except RayActorError:
            raise
        except Exception:
            await asyncio.gather(*answers, return_exceptions=True)
            raise

    async def prepare(self, batch: Batch) -> dict[str, float]:
        parcels = list({id(kept.scored.address.parcel): kept.scored.address.parcel for kept in batch.groups}.values())
        number = {id(parcel): i for i, parcel in enumerate(parcels)}
        places = [(number[id(kept.scored.address.parcel)], kept.scored.address.place) for kept in batch.groups]
        scores = [kept.scored.scores for kept in batch.groups]
        reports = await self._all(lambda rank: rank.prepare.remote(batch.step, batch.version, places, scores, parcels))
        least = min(num_tokens for _, num_tokens in reports)
        return reports[0][0] | {"batch/num_rank_tokens_min": float(least)}

    async def train(self) -> StepReport:
        reports = await self._all(lambda rank: rank.train.remote())
        report: StepReport = reports[0]
        return report

    async def offload(self) -> int:
        """Lays the states aside on all ranks; the bytes that became free on all their devices."""
        return sum(await self._all(lambda rank: rank.offload.remote()))

    async def reload(self) -> None:
        await self._all(lambda rank: rank.reload.remote())

    async def buckets(self, generation: int, scale: float = 1.0, receivers: Sequence[str] = ()) -> AsyncGenerator[Any, None]:
        """References to the parcels of the weights times ``scale`` for the workers of these names, each as soon as it is gathered.

        Whoever stops early must close it (``contextlib.aclosing``): the generation is aborted, the ranks gather to the end, and what
        they still yield is thrown away, so that none of them is left waiting for a receiver or inside a collective. A rank that fails
        ends it with its own error at once: the others may wait for it for ever.
        """
        first, *others = self.ranks
        taking_part = asyncio.gather(*(rank.gather.remote(generation, scale) for rank in others))
        stream = first.parcels.options(_generator_backpressure_num_objects=2 * BUCKETS_AHEAD).remote(
            generation, scale, tuple(receivers)
        )
        try:
            while True:
                step = asyncio.ensure_future(_next_parcel(stream))
                waiting: set[asyncio.Future[Any]] = {step, taking_part}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if taking_part.done() and taking_part.exception() and not step.done():
                    step.cancel()
                    taking_part.result()
                reference = await step
                if reference is None:
                    break
                yield reference
            await taking_part
        except GeneratorExit:
            aborted = (
                first.abort_push.remote()
            )  # after the stream where one thread serves the rank, else at once: see Launcher.ranks
            async for _ in stream:
                pass
            await asyncio.gather(taking_part, aborted)
            raise

    async def manifest(self) -> Manifest:
        """Of the last ``buckets``, read to the end."""
        manifest: Manifest = await self.ranks[0].manifest.remote()
        return manifest

    async def score_tokens(self, rows: Sequence[np.ndarray[Any, Any]], temperature: float) -> list[np.ndarray[Any, Any]]:
        scores: list[np.ndarray[Any, Any]] = (await self._all(lambda rank: rank.score_tokens.remote(rows, temperature)))[0]
        return scores

    async def save(self, folder: Path) -> Files:
        """Training state below ``folder/learner`` and the model below ``folder/model``. Returns what was written, by its name within
        ``folder``: every rank has forced its files to the disk and digested them. Where one fails, its error comes after the others
        have ended: then nobody writes into the folder any more."""
        state = await self._to_the_end(lambda rank: rank.save.remote(str(folder / "learner")))
        model = await self._to_the_end(lambda rank: rank.export.remote(str(folder / "model")))
        return {
            f"{part}/{name}": e
            for part, all_files in (("learner", state), ("model", model))
            for files in all_files
            for name, e in files.items()
        }

    async def load(self, folder: Path) -> None:
        await self._all(lambda rank: rank.load.remote(str(folder)))

    async def see_folder(self, folder: Path, token: str, wait_s: float) -> list[FolderView]:
        """What each rank sees of it: see ``orchestrator.shared_folder``."""
        return await self._all(lambda rank: rank.see_folder.remote(str(folder), token, wait_s))


async def _next_parcel(stream: Any) -> Any:
    """The next reference of ``LearnerActor.parcels``, None at its end. Raises what ended it otherwise: as a reference like the others
    it would reach the workers, and they would pass for dead."""
    reference = await anext(stream, None)
    if reference is None:
        return None
    second = await anext(stream, None)
    if second is None:
        await reference
        raise RuntimeError("rank 0's stream of parcels ended within a pair")
    await second
    return reference


async def _await(reference: Any) -> Any:
    return await reference
