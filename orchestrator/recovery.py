"""A run as a sequence of lives in one process.

A life is a Job: actors, loop, files. Learner ranks are one group, so where one of them died, raised or passed its deadline none can go on,
and the life ends: its actors and their places are given back, and another one is made from the newest whole checkpoint of the run's
folder, or from version 0 where there is none yet, on the path of `resume=`. Ledger, curriculum, buffer and version go back as one with
the weights; what came after the checkpoint is discarded and counted (event `rolled_back`), and every row from then on carries the next
incarnation. Workers, reward pools and lost groups are mended within a life.

A failure with the same cause at the same step is recovered from once. So a run ends that cannot get past a step, and one that loses a rank
now and then goes on for ever. In the start of a later life any actor may fail, and MOST_STARTS in a row may; in that of the first one, where
most failures are the configuration's, one actor may die once. A life that was asked to stop is not recovered from.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError

from configs.errors import InputError
from orchestrator.checkpoint import Checkpoint, find_checkpoint
from orchestrator.departure import Vigil
from orchestrator.errors import RunStopped
from orchestrator.ledger import State
from orchestrator.ranks import RankFailed
from orchestrator.waits import DeadlinePassed, Waits
from rollout.records import Visit

if TYPE_CHECKING:  # it asks this module for its number
    from orchestrator.job import Job

BURIED_S = 120.0  # for a life to give its places back and close its files, beside the end of its actors
MOST_STARTS = 3  # of lives, in a row, of which none came to train
OF_THE_LEARNER = ("learner", "push")  # owners of waits: within a push each worker has a deadline of its own
OF_ACTORS = (RankFailed, RayError, DeadlinePassed)
_INCARNATION = re.compile(rb'"incarnation": (\d+)')


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a life stands."""

    step: int
    version: int
    incarnation: int
    counts: Mapping[str, int]  # as of Ledger.counts
    open_visits: Mapping[Visit, State]
    time_s: float  # of all stages of its history


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a life ended, and in which step."""

    step: int
    cause: str  # the same words for the same failure
    reason: str
    detail: str  # with a remote traceback


def cause_of(error: BaseException) -> str | None:
    """What happened to the learner, in words that are the same for the same failure; None where it is not the learner that failed."""
    for known in _chain(error):
        if isinstance(known, RankFailed):
            return f"a learner rank {known.kind} in '{known.call}'"
        if isinstance(known, DeadlinePassed) and known.wait.owner in OF_THE_LEARNER:
            return f"{known.wait.owner} passed its deadline for '{known.wait.name}'"
    return None


def detail_of(error: BaseException) -> str:
    """The text of what an error came from in the end."""
    *_, root = _chain(error)
    return str(root)


def _is_death(error: BaseException) -> bool:
    """Whether an actor is gone, and did not say why: what its constructor raises would be raised again."""
    if isinstance(error, RankFailed):
        return error.died
    raised = isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)
    return isinstance(error, RayError) and not raised


def _chain(error: BaseException) -> Iterator[BaseException]:
    known: BaseException | None = error
    while known is not None:
        yield known
        known = known.__cause__


def next_incarnation(folder: Path, resumed: Checkpoint | None) -> int:
    """One more than any that the run's files name: a life that ended before it saved has used its number too."""
    used = {int(resumed.state["incarnation"])} if resumed else set()
    for path in (folder / "events.jsonl", folder / "metrics.jsonl"):
        if path.is_file():
            with path.open("rb") as file:
                used |= {int(found[1]) for line in file if (found := _INCARNATION.search(line))}
    return max(used, default=-1) + 1


def discarded(before: Mark, after: Mark) -> dict[str, int]:
    """Visits whose work is void now that the run is back at ``after``, by what had become of them; kept ones that the checkpoint holds
    are not."""
    ended = Counter({name: before.counts[name] - after.counts.get(name, 0) for name in before.counts})
    lost = Counter({"trained": ended["trained"]})
    lost["dropped"] = sum(n for name, n in ended.items() if name.startswith("dropped/"))
    lost.update(str(state) for visit, state in before.open_visits.items() if after.open_visits.get(visit) is not state)
    return dict(+lost)


class Lives:
    """The lives of one run, one after another."""

    def __init__(self, job: Job, make: Callable[[Checkpoint | None], Job]) -> None:
        """``job`` is the first life, not started; ``make`` makes the next one from a checkpoint."""
        self.job = job
        self._make = make
        self._recovered: set[tuple[int, str]] = set()  # steps and causes
        self._since: Fault | None = None  # the last one of a life that had started
        self._num_starts = 0  # that failed since then
        self._stopping = False
        self._closed = False  # the job is
        self._unwritten: list[str] = []  # by lives that are over

    @property
    def unwritten(self) -> list[str]:
        """As ``Job.unwritten``, of all lives."""
        return [*self._unwritten, *self.job.unwritten]

    def stop(self) -> bool:
        """As ``Job.stop``; and no other life begins."""
        self._stopping = True
        return self.job.stop()

    def line(self, text: str) -> None:
        """To whoever watches."""
        self.job.view.line(text)

    def what_stands(self) -> str:
        """Of the run if it ends now, in words."""
        return self.job.what_stands()

    async def run(self) -> str:
        """Lives until the run ends, and returns why. Raises what ended it where that is not to be recovered from."""
        while True:
            ended = await self._live()
            if isinstance(ended, str):
                return ended
            await self._begin_again(ended)

    async def end(self, reason: str) -> None:
        """Ends the last life and sums up the run. What fails in that must not hide why the run ended: it is in ``unwritten``."""
        try:
            if not self._closed:
                await self.job.close()
        except (RayError, OSError) as error:
            self._unwritten.append(f"the end of its actors ({error})")
        try:
            self.job.summarize(reason)
        except OSError as error:
            self._unwritten.append(f"its summary ({error})")

    def event(self, name: str, **fields: object) -> None:
        """An event of the life that goes on; nothing where the next one could not be made."""
        if not self._closed:
            self.job.event(name, **fields)

    async def _live(self) -> str | Fault:
        """Why the run ended, or what ended only this life."""
        try:
            await self.job.start()
            return await self.job.run()
        except (DeadlinePassed, RayError, RunStopped, OSError) as error:
            if self._stopping and cause_of(error) is not None:
                reason = " ".join(str(error).split())
                self.job.event("stopped", reason=reason, detail=detail_of(error))
                self.line(f"warning: {reason}; the run was to end: {self.what_stands()}")
                return "stopped"
            return self._judged(error)

    def _judged(self, error: BaseException) -> Fault:
        """What ended the life. Raises where that ends the run: ``error``, or both reasons where this is not the first."""
        reason = " ".join(str(error).split())
        step = self.job.mark().step + 1
        if not self.job.started:
            self._num_starts += 1
            told = Fault(step, "an actor failed in the start of a life", reason, detail_of(error))
            if self._since is None:
                if self._num_starts > 1 or not _is_death(error):
                    raise error
                return told
            if self._num_starts == MOST_STARTS or not any(isinstance(known, OF_ACTORS) for known in _chain(error)):
                raise RunStopped(
                    f"{reason}; start {self._num_starts} of a run that was going back to its last checkpoint, since {self._since.reason}"
                ) from error
            return told
        cause = cause_of(error)
        if cause is None:
            raise error
        if (step, cause) in self._recovered:
            raise RunStopped(f"{reason}; the run went back to a checkpoint once from the same at step {step}") from error
        self._recovered.add((step, cause))
        self._since, self._num_starts = Fault(step, cause, reason, detail_of(error)), 0
        return self._since

    async def _begin_again(self, fault: Fault) -> None:
        dead = self.job
        dead.view.line(f"warning: {fault.reason}; the run goes back to its last checkpoint")
        before = dead.mark()
        try:
            checkpoint = await self._newest(dead)
            await _unbroken(self._bury(dead))
            # The watchdog of neither life looks on, and a disk may hang
            vigil = Vigil(dead.config.deadlines.checkpoint_s, "it was opening the files of the next life")
            try:
                job = self._make(checkpoint)
            finally:
                vigil.close()
        except (InputError, OSError, DeadlinePassed, RayError) as error:
            raise RunStopped(f"{fault.reason}; and the run cannot go back to a checkpoint: {error}") from error
        self.job, self._closed = job, False
        self._unwritten += dead.unwritten
        del dead
        gc.collect()  # its parts know each other; until they are gone its groups stay in Ray's object store
        after = job.mark()
        lost = discarded(before, after)
        job.event(
            "rolled_back",
            step=fault.step,
            cause=fault.cause,
            reason=fault.reason,
            detail=fault.detail,
            from_step=before.step,
            from_version=before.version,
            from_incarnation=before.incarnation,
            to_step=after.step,
            to_version=after.version,
            checkpoint=checkpoint.folder.name if checkpoint else None,
            num_steps=before.step - after.step,
            num_visits=lost,
        )
        job.add_time("discarded", before.time_s - after.time_s)
        job.view.line(
            f"back at step {after.step}, version {after.version} ({checkpoint.folder.name if checkpoint else 'no checkpoint yet'}); "
            f"discarded: {before.step - after.step} steps, visits: {', '.join(f'{n} {what}' for what, n in lost.items()) or 'none'}"
        )

    async def _newest(self, dead: Job) -> Checkpoint | None:
        """None where none was ever written: that of a save which was cut short is named `.partial`."""
        if not any(folder.suffix == "" for folder in (dead.folder / "checkpoints").glob("step-*")):
            return None
        found = asyncio.to_thread(find_checkpoint, dead.folder, dead.view.line)
        deadline_s = dead.config.deadlines.checkpoint_s
        return await Waits().wait(found, owner="disk", name="the newest whole checkpoint", deadline_s=deadline_s)

    async def _bury(self, dead: Job) -> None:
        self._closed = True
        limit_s = 2 * dead.config.deadlines.close_s + BURIED_S
        await Waits().wait(dead.close(), owner="actors", name="the end of a life", deadline_s=limit_s)
        dead.view.close()


async def _unbroken(work: Awaitable[Any]) -> None:
    """Does it to its end also where the caller is cancelled meanwhile, which then is told."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
