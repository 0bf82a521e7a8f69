"""The learner's ranks as one: every call goes to all of them, since each takes part in every collective. So they also fail as one: where
a rank is lost the others cannot go on, and the run goes back to its last checkpoint (``orchestrator.recovery``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError, RayTaskError

from orchestrator.checkpoint import Files
from orchestrator.errors import RunStopped
from orchestrator.fleet import words
from orchestrator.handles import StepReport
from orchestrator.shared_folder import FolderView
from orchestrator.stages import Batch, Kept
from rollout.weights import Manifest

BUCKETS_AHEAD = 2  # gathered and not yet fetched by the driver: more would copy the whole model into the object store
DEATH_S = 2.0  # until Ray tells of a death of which other ranks' broken connections tell at once
MOST_CHARACTERS = 400  # of Ray's message within ours


class RankFailed(RunStopped):
    """A rank died or raised: the learner is lost as a whole. It stops a run that does not recover."""

    def __init__(self, number: int, call: str, error: RayError) -> None:
        """``call`` is what rank ``number`` was asked for. Ray's own error, with the remote traceback, becomes the cause where this is
        raised from it."""
        self.call = call
        self.died = not isinstance(error, RayTaskError)  # killed by Ray for want of memory it is an OutOfMemoryError
        self.kind = "died" if self.died else f"raised {type(getattr(error, 'cause', None) or error).__name__}"
        text = " ".join(words(error).split())
        super().__init__(f"learner rank {number} {self.kind.split()[0]} in '{call}': {text[:MOST_CHARACTERS]}")


class RayLearner:
    """Metrics, scores and weights are rank 0's. Every call raises RankFailed where a rank fails: of several errors that of a rank which is
    dead, for the others' only follow from it."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = tuple(ranks)

    async def _all(self, name: str, call: Callable[[Any], Any], *, patience_s: float | None = DEATH_S) -> list[Any]:
        """The ranks' answers. After an error the others have ``patience_s`` to end too, or all the time they need; a death is told at
        once."""
        answers = [asyncio.ensure_future(answer_of(i, name, call(rank))) for i, rank in enumerate(self.ranks)]
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
            if _errors(answers):
                raise await _worst(answers, patience_s)
            return [answer.result() for answer in answers]
        finally:
            _forget(answers)

    async def fetch(self, batch: Batch) -> list[Kept]:
        """What one rank cannot get is lost for all."""
        parcels = _parcels(batch)
        lost = {number for numbers in await self._all("fetch", lambda rank: rank.fetch.remote(parcels)) for number in numbers}
        gone = {id(parcels[number]) for number in lost}
        return [kept for kept in batch.groups if id(kept.scored.address.parcel) in gone]

    async def prepare(self, batch: Batch) -> dict[str, float]:
        number = {id(parcel): i for i, parcel in enumerate(_parcels(batch))}
        places = [(number[id(kept.scored.address.parcel)], kept.scored.address.place) for kept in batch.groups]
        scores = [kept.scored.scores for kept in batch.groups]
        reports = await self._all("prepare", lambda rank: rank.prepare.remote(batch.step, batch.version, places, scores))
        least = min(num_tokens for _, num_tokens in reports)
        return reports[0][0] | {"batch/num_rank_tokens_min": float(least)}

    async def train(self) -> StepReport:
        reports = await self._all("train", lambda rank: rank.train.remote())
        report: StepReport = reports[0]
        return report

    async def offload(self) -> int:
        """Lays the states aside on all ranks; the bytes that became free on all their devices."""
        return sum(await self._all("offload", lambda rank: rank.offload.remote()))

    async def reload(self) -> None:
        await self._all("reload", lambda rank: rank.reload.remote())

    async def buckets(self, generation: int, scale: float = 1.0, receivers: Sequence[str] = ()) -> AsyncGenerator[Any, None]:
        """References to the parcels of the weights times ``scale`` for the workers of these names, each as soon as it is gathered.

        Whoever stops early must close it (``contextlib.aclosing``): the generation is aborted, the ranks gather to the end, and what
        they still yield is thrown away, so that none of them is left waiting for a receiver or inside a collective. A rank that fails
        ends it with its own error at once: the others may wait for it for ever.
        """
        first, *others = self.ranks
        gathers = [
            asyncio.ensure_future(answer_of(i, "gather", r.gather.remote(generation, scale))) for i, r in enumerate(others, 1)
        ]
        everyone = asyncio.gather(*gathers)
        stream = first.parcels.options(_generator_backpressure_num_objects=2 * BUCKETS_AHEAD).remote(
            generation, scale, tuple(receivers)
        )
        step: asyncio.Future[Any] = everyone
        try:
            while True:
                step = asyncio.ensure_future(_next_parcel(stream))
                while not step.done() and not _errors([everyone]):
                    await asyncio.wait({step} if everyone.done() else {step, everyone}, return_when=asyncio.FIRST_COMPLETED)
                if _errors([step, everyone]):
                    raise await _worst([step, *gathers], DEATH_S)
                if step.result() is None:
                    break
                yield step.result()
            await everyone
        except GeneratorExit:
            # After the stream where one thread serves the rank, else at once: see Launcher.ranks
            aborted = answer_of(0, "abort_push", first.abort_push.remote())
            async for _ in stream:
                pass
            await asyncio.gather(everyone, aborted)
            raise
        finally:
            _forget([step, everyone, *gathers])

    async def manifest(self) -> Manifest:
        """Of the last ``buckets``, read to the end."""
        manifest: Manifest = await answer_of(0, "manifest", self.ranks[0].manifest.remote())
        return manifest

    async def score_tokens(self, rows: Sequence[np.ndarray[Any, Any]], temperature: float) -> list[np.ndarray[Any, Any]]:
        scores: list[np.ndarray[Any, Any]] = (
            await self._all("score_tokens", lambda rank: rank.score_tokens.remote(rows, temperature))
        )[0]
        return scores

    async def save(self, folder: Path) -> Files:
        """Training state below ``folder/learner`` and the model below ``folder/model``. Returns what was written, by its name within
        ``folder``: every rank has forced its files to the disk and digested them. Where one fails, its error comes after the others
        have ended: then nobody writes into the folder any more. One that raised, and did not die, has not failed the learner: the disk
        may be full, and training goes on. So that is no RankFailed but Ray's own error."""
        try:
            state = await self._all("save", lambda rank: rank.save.remote(str(folder / "learner")), patience_s=None)
            model = await self._all("export", lambda rank: rank.export.remote(str(folder / "model")), patience_s=None)
        except RankFailed as error:
            if error.died or error.__cause__ is None:
                raise
            raise error.__cause__ from None
        return {
            f"{part}/{name}": e
            for part, all_files in (("learner", state), ("model", model))
            for files in all_files
            for name, e in files.items()
        }

    async def load(self, folder: Path) -> None:
        await self._all("load", lambda rank: rank.load.remote(str(folder)))

    async def see_folder(self, folder: Path, token: str, wait_s: float) -> list[FolderView]:
        """What each rank sees of it: see ``orchestrator.shared_folder``."""
        return await self._all("see_folder", lambda rank: rank.see_folder.remote(str(folder), token, wait_s))


def _parcels(batch: Batch) -> list[Any]:
    """Each once, in the order of their first groups."""
    return list({id(kept.scored.address.parcel): kept.scored.address.parcel for kept in batch.groups}.values())


async def _next_parcel(stream: Any) -> Any:
    """The next reference of ``LearnerActor.parcels``, None at its end. Raises what ended it otherwise: as a reference like the others
    it would reach the workers, and they would pass for dead."""
    try:
        reference = await anext(stream, None)
        if reference is None:
            return None
        second = await anext(stream, None)
        if second is None:
            await reference
            raise RuntimeError("rank 0's stream of parcels ended within a pair")
        await second
        return reference
    except RayError as error:
        raise RankFailed(0, "parcels", error) from error


async def answer_of(number: int, call: str, reference: Awaitable[Any]) -> Any:
    """What rank ``number`` answers to ``call``. Raises RankFailed where Ray says that there is no answer."""
    try:
        return await reference
    except RayError as error:
        raise RankFailed(number, call, error) from error


async def _worst(answers: Sequence[asyncio.Future[Any]], patience_s: float | None) -> BaseException:
    """Of answers of which one has failed: the error of a rank that died, else the first one. Others may tell of a broken connection
    before Ray tells of the death that broke it."""
    waiting = {answer for answer in answers if not answer.done()}
    while waiting and not any(map(_is_death, _errors(answers))):
        done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
    return max(_errors(answers), key=_is_death)


def _errors(answers: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    return [error for answer in answers if answer.done() and not answer.cancelled() and (error := answer.exception()) is not None]


def _is_death(error: BaseException) -> bool:
    return isinstance(error, RankFailed) and error.died


def _forget(answers: Sequence[asyncio.Future[Any]]) -> None:
    """Nobody waits for them any more, nor wants to hear how they end."""
    for answer in answers:
        answer.cancel()
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
