"""The loop: one for every lag, plain asyncio, driven by handles.

    ledger picks -> rollout worker -> reward pool -> selection -> buffer -> prepare -> train -> push -> rollout worker

| stage   | takes              | gives                            | waits for                        | who unblocks it          |
|---------|--------------------|----------------------------------|----------------------------------|--------------------------|
| produce | the ledger's picks | groups, as each finishes         | room: see ``_room``              | a proven push, a drop    |
| score   | group              | scored group                     | a free reward process            | the pool; a deadline     |
| select  | scored group       | kept, or dropped with a reason   | nothing (pure)                   | -                        |
| fetch   | a full batch       | its groups in every rank         | nodes that hold them             | one that is gone: refill |
| prepare | a fetched batch    | log-probabilities, advantages    | a forward of the learner         | learner ranks            |
| train   | a prepared batch   | metrics; changed weights         | optimizer steps                  | learner ranks            |
| push    | changed weights    | engines at the new version       | every engine, with a deadline    | engines; a lost one is replaced |

A visit is *open* from its pick until it is dropped, or until the step that trained it has its version proven. Never more than
``(max_lag + oversample) * groups_per_step`` are open, so at ``max_lag: 0`` nothing is generated between a full batch and the
end of the push: the synchronous mode is a lag of 0, not another loop. Above it a visit that others overtake can be trained later than
``max_lag`` versions after it was asked: ``late`` says whether it is (correct), the batch waits for it in time (wait), or it is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from configs.errors import ConfigError
from configs.schema import Auto, DeadlinesConfig, Late, WhenShort
from learner.selection import Decision
from orchestrator.admission import KeepRate, leaves_late, most_open, too_old
from orchestrator.errors import RunStopped
from orchestrator.failures import over_budget
from orchestrator.handles import MOST_REPLACEMENTS, Fleet, LearnerHandle, Lost, Observer, Pusher, Scorer
from orchestrator.ledger import Ledger, Pick, State
from orchestrator.metrics import pass_rate_histogram
from orchestrator.pass_rates import observe
from orchestrator.stages import Batch, Finished, Judged, Kept, LoopState, Scored, StepOutcome
from orchestrator.waits import Waits
from rollout.records import Consequence, GroupMeta, Score, Visit


@dataclass(frozen=True, slots=True)
class LoopSettings:
    groups_per_step: int
    max_lag: int
    oversample: float | Auto
    max_visits_per_step: int
    when_short: WhenShort
    late: Late
    max_token_lag: int | None  # set where late groups are dropped
    max_failed_share: float
    num_steps: int
    verifiers_s: Callable[[int], float]  # longest that so many completions may take in the reward pool
    deadlines: DeadlinesConfig


class Asked(NamedTuple):
    """A visit under way. A surplus visit is asked twice; a group made before the second asking is not its answer."""

    pick: Pick
    version: int

    def answered_by(self, meta: GroupMeta) -> bool:
        return meta.min_version >= self.version


class Loop:
    """Trains from ``step`` (the last one done) to ``settings.num_steps``, or until ``stop`` is called or the data is used up."""

    def __init__(
        self,
        settings: LoopSettings,
        ledger: Ledger,
        handles: tuple[Fleet, Scorer, LearnerHandle, Pusher, Observer],
        select: Callable[[Sequence[Score]], Decision],
        waits: Waits,
        *,
        step: int,
        version: int,
        state: LoopState | None = None,
    ) -> None:
        """``state`` is what ``state()`` gave where a run is resumed; the ledger then knows the same kept groups."""
        self._settings = settings
        self._ledger = ledger
        self._fleet, self._scorer, self._learner, self._pusher, self._observer = handles
        self._select = select
        self._waits = waits
        self.step = step
        self.version = version
        self.between_steps = True  # the learner's weights are those of ``version``
        self._running: dict[Visit, Asked] = {}  # asked of an engine, or being scored
        self._buffer: dict[int, Kept] = {}  # kept groups by pick order
        self._num_doubts: Counter[str] = Counter()  # how often a worker was found unproven, by its name
        self._score_ends: list[float] = []  # when the pool's deadlines for what is being scored pass, by the monotonic clock
        self._progress = asyncio.Event()  # a group came in, was kept or dropped, or the run is to stop
        self._stopping = False
        self._filling = False
        self._keep_rate = KeepRate()
        self._in_hand: list[Kept] = []  # the batch, from when it is full until it is trained and its version proven
        self._begin_step()
        if state is not None:
            self._take_up(state)
        if ledger.num_open != len(self._buffer):
            raise ValueError(f"{ledger.num_open} visits are open at the start, but {len(self._buffer)} groups are at hand")
        bound = most_open(settings.max_lag, settings.oversample, settings.groups_per_step)
        if ledger.num_open > bound:
            oversample = "auto" if isinstance(settings.oversample, Auto) else f"{settings.oversample:g}"
            raise ConfigError(
                f"resume: {ledger.num_open} groups of the checkpoint wait to be trained, but (rollout.max_lag={settings.max_lag} + "
                f"rollout.oversample={oversample}) * batch.groups_per_step={settings.groups_per_step} allows "
                f"{bound}; resume with the values the run was started with"
            )

    def state(self) -> LoopState:
        """What it has in hand now, for a checkpoint; the ledger's state at the same moment belongs to it."""
        return LoopState(
            waiting=(*self._in_hand, *self._buffer.values()),
            judged=tuple(self._judged.values()),
            dropped=dict(self._dropped),
            num_picked=self._num_picked - len(self._running),
            budget=self._budget,
        )

    def _take_up(self, state: LoopState) -> None:
        self._buffer = {kept.pick.order: kept for kept in state.waiting}
        self._judged |= {judged.pick.order: judged for judged in state.judged}
        self._judged_before |= self._judged.keys()
        self._dropped.update(state.dropped)
        self._num_picked = state.num_picked
        self._budget = state.budget
        self._ask_older_again()

    def _ask_older_again(self) -> None:
        """What was kept under a higher ``max_lag`` than this run's, and could be trained only later than this one allows."""
        made = {order: kept.scored.meta.min_version for order, kept in self._buffer.items()}
        settings, waits = self._settings, self._settings.late is Late.wait
        numbers = {"version": self.version, "max_lag": settings.max_lag, "groups_per_step": settings.groups_per_step}
        older = [self._buffer[order].pick for order in too_old(made, waits=waits, **numbers)]
        for pick in older:
            del self._buffer[pick.order]
            self._judged.pop(pick.order, None)
        if older:
            self._ask_again(older, "late", None)

    def stop(self) -> None:
        """Ends the run at the next moment at which it stands on whole steps."""
        self._stopping = True
        self._progress.set()

    async def run(self) -> str:
        """Runs the loop. Returns why it ended: ``done``, ``data used up`` or ``stopped``. Raises RunStopped, DeadlinePassed."""
        collector = asyncio.create_task(self._collect())
        try:
            while self.step < self._settings.num_steps:
                reason = await self._run_step(collector)
                if reason:
                    return reason
            return "done"
        finally:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)

    async def _run_step(self, collector: asyncio.Task[None]) -> str | None:
        started = time.monotonic()
        batch = await self._fill(collector)
        filled = time.monotonic()
        while lost := await self._fetch(batch):
            self.forget(kept.scored for kept in lost)
            batch = await self._fill(collector)
            filled = time.monotonic()
        fetched = time.monotonic()
        if self._stopping:
            return "stopped"
        if not batch.groups and self._used_up():
            return "data used up"
        metrics = {"time/generate_s": filled - started}
        if batch.groups:
            metrics |= await self._train(batch)
            metrics["time/prepare_s"] += fetched - filled
        self.step = batch.step
        self.between_steps = True
        metrics["time/step_s"] = time.monotonic() - started
        outcome = StepOutcome(batch, tuple(self._seen), self._num_kept, dict(self._dropped), metrics)
        self._close_step(batch.version)
        self._begin_step()  # what is scored while the observer works belongs to the next step
        await self._observer.after_step(outcome)
        return None

    def _close_step(self, version: int) -> None:
        self._keep_rate = self._keep_rate.after(self._num_kept, len(self._judged))
        for entry in self._ledger.close_step(version):
            visit = entry.pick.visit
            fields = {"prompt_id": visit.prompt_id, "visit": visit.number, "order": entry.pick.order, "state": entry.state}
            self._observer.event("visit_stuck", step=self.step, since_step=entry.since, **fields)

    def _begin_step(self) -> None:
        self._num_picked = 0
        self._budget = self._ledger.step_budget()
        self._dropped: Counter[str] = Counter()
        self._judged: dict[int, Judged] = {}  # by pick order
        # Of these, before the run was resumed: its verifier may be mended by now.
        self._judged_before: frozenset[int] = frozenset()

    # ---- produce ----------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        asked = self._settings.oversample
        oversample = self._keep_rate.oversample if isinstance(asked, Auto) else asked
        bound = most_open(self._settings.max_lag, oversample, self._settings.groups_per_step)
        if self._ledger.num_open > self._most_open:
            raise AssertionError(f"{self._ledger.num_open} visits are open, the bound is {self._most_open}")
        left = self._settings.max_visits_per_step - self._num_picked
        if self._budget is not None:
            left = min(left, self._budget - self._num_picked)
        # A resumed run has learned nothing of what ``auto`` stands for, and may have more open than it would open now
        return max(0, min(max(bound - self._ledger.num_open, self._num_overtaken()), left))

    @property
    def _most_open(self) -> int:
        return most_open(self._settings.max_lag, self._settings.oversample, self._settings.groups_per_step)

    def _num_overtaken(self) -> int:
        """At lag 0: visits to be asked again that come before a kept one. A batch is not full without them."""
        if self._settings.max_lag or not self._buffer:
            return 0
        return self._ledger.num_again_before(max(self._buffer))

    def _make_room(self) -> None:
        """For visits that were overtaken: after a resume with less oversampling, or when drops were none. The last kept ones are surplus."""
        while (num_overtaken := self._num_overtaken()) and self._ledger.num_open + num_overtaken > self._most_open:
            last = self._buffer.pop(max(self._buffer)).pick
            self._judged.pop(last.order, None)
            self._ledger.requeue(last.visit, "surplus")
            self._dropped["surplus"] += 1
            self._num_picked -= 1

    async def _produce(self) -> None:
        await self._submit(self._pick())

    def _pick(self) -> list[Visit]:
        if self._stopping or (self._settings.max_lag == 0 and not self._filling):
            return []  # at lag 0 nothing is asked from a full batch until its version is proven
        self._make_room()
        picks = self._ledger.pick(self._room())
        self._num_picked += len(picks)
        self._running |= {pick.visit: Asked(pick, self.version) for pick in picks}
        return [pick.visit for pick in picks]

    async def _submit(self, visits: list[Visit]) -> None:
        # The rest became surplus before this task began, or was given back and is another task's
        visits = [visit for visit in visits if self._ledger.state_of(visit) is State.PICKED]
        self._ledger.run(visits)
        if visits:
            await self._engines(self._fleet.submit(visits), "taking new visits")

    async def _engines(self, call: Awaitable[None], name: str) -> None:
        await self._waits.wait(call, owner="rollout workers", name=name, deadline_s=self._settings.deadlines.generate_s)

    # ---- score, select ----------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._collect_lost(tasks))
            while True:
                finished = await self._fleet.next_finished()
                tasks.create_task(self._score(finished))

    async def _collect_lost(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._give_back(await self._fleet.next_lost())
            visits = self._pick()  # at once: a batch may not close over a visit that is not running
            tasks.create_task(self._submit(visits))
            self._progress.set()

    def _give_back(self, lost: Lost) -> None:
        """The worker's visits are asked again under their numbers; of an unproven one also what waits to be trained, and what this step
        has dropped for what it made of it."""
        picks = [self._running.pop(visit).pick for visit in lost.visits if visit in self._running]
        doubtful: list[Pick] = []
        dropped: list[Judged] = []
        if lost.reason == "unproven":
            self._num_doubts[lost.worker] += 1
            doubtful = [kept.pick for kept in self._buffer.values() if kept.scored.meta.worker == lost.worker]
            dropped = [j for j in self._judged.values() if j.reason is not None and j.scored.meta.worker == lost.worker]
        for pick in doubtful:
            del self._buffer[pick.order]
            self._judged.pop(pick.order, None)  # not there where an earlier step judged it
        self._take_back(dropped, lost.reason)
        self._ask_again([*picks, *doubtful], lost.reason, lost.worker, num_more=len(dropped))

    def _take_back(self, dropped: Sequence[Judged], why: str) -> None:
        """Drops of the step in hand are none: their visits are queued again."""
        for judged in dropped:
            assert judged.reason is not None
            del self._judged[judged.pick.order]
            self._ledger.take_back(judged.pick, judged.reason, why)
            self._dropped[judged.reason] -= 1
        self._dropped += Counter()  # drops reasons that came to nothing

    def forget(self, lost: Iterable[Scored]) -> None:
        """Groups that lay on a node which is gone: what was kept is asked again, of what was dropped nothing more is told. The rest of a
        batch in hand waits in the buffer again."""
        self._buffer |= {kept.pick.order: kept for kept in self._in_hand}
        self._in_hand = []
        gone = {id(scored) for scored in lost}
        again: dict[str, list[Pick]] = defaultdict(list)
        for kept in [kept for kept in self._buffer.values() if id(kept.scored) in gone]:
            del self._buffer[kept.pick.order]
            again[kept.scored.meta.worker].append(kept.pick)
        self._judged = {order: judged for order, judged in self._judged.items() if id(judged.scored) not in gone}
        for worker, picks in again.items():
            self._ask_again(picks, "lost_node", worker)

    def _ask_again(self, picks: Sequence[Pick], reason: str, worker: str | None, *, num_more: int = 0) -> None:
        """``num_more``: of the same worker and for the same reason, queued again already."""
        for pick in picks:
            self._ledger.requeue(pick.visit, reason)
        self._num_picked -= len(picks) + num_more  # they are no new visits of the step
        self._observer.event("visits_lost", worker=worker, reason=reason, num_visits=len(picks) + num_more)

    async def _score(self, finished: Sequence[Finished]) -> None:
        # The rest was cancelled, or is the second answer of an engine that had made a group before it was told to stop
        wanted = [f for f in finished if self._wants(f.meta) and self._ledger.state_of(f.meta.visit) is State.RUNNING]
        if not wanted:
            return
        asked = {group.meta.visit: self._running[group.meta.visit] for group in wanted}
        for visit in asked:
            self._ledger.finish(visit)
        # The pool serves every parcel under way, and each completion may take its whole time limit before its status says so.
        queued = sum(len(item.meta.num_tokens) for item in finished) * max(1, len(self._running))
        deadline_s = self._settings.deadlines.score_s + self._settings.verifiers_s(queued)
        end = time.monotonic() + deadline_s
        self._score_ends.append(end)
        self._progress.set()  # from now on the group is waited for as long as its verifiers may take
        worker = wanted[0].meta.worker  # of all of them
        num_doubts = self._num_doubts[worker]
        try:
            scored = await self._waits.wait(self._scorer.score(wanted), owner="reward pool", name="scores", deadline_s=deadline_s)
        finally:
            self._score_ends.remove(end)
        proven = self._num_doubts[worker] == num_doubts
        self._void([asked[visit] for visit in asked.keys() - {item.meta.visit for item in scored}], "lost_node", worker)
        if not proven:
            self._void([asked[item.meta.visit] for item in scored], "unproven", worker)
        for item in scored if proven else []:
            self._settle(item, asked[item.meta.visit])
        if scored:  # now, not when the step closes: refills for what was dropped would go on being generated in vain
            group_size = len(scored[0].scores) + len(scored[0].meta.unfinished)
            self._check_verifiers(at_least=self._settings.groups_per_step * group_size)
        await self._produce()
        self._progress.set()

    def _wants(self, meta: GroupMeta) -> bool:
        asked = self._running.get(meta.visit)
        return asked is not None and asked.answered_by(meta)

    def _void(self, asked: Sequence[Asked], reason: str, worker: str) -> None:
        """Their groups are of no use."""
        picks = [one.pick for one in asked if self._ends(one)]
        if picks:
            self._ask_again(picks, reason, worker)

    def _ends(self, asked: Asked) -> bool:
        """Ends the asking; False where it was lost or became surplus meanwhile, and may have been asked again."""
        if self._running.get(asked.pick.visit) is not asked:
            return False
        del self._running[asked.pick.visit]
        return True

    def _settle(self, scored: Scored, asked: Asked) -> None:
        if not self._ends(asked):
            return
        pick = asked.pick
        self._ledger.score(pick.visit, observe(scored.scores))
        reason = _dropped_by_policy(scored.scores) or self._select(scored.scores).reason
        self._judged[pick.order] = Judged(pick, scored, reason)
        if reason is not None:
            self._drop(pick, reason)
        else:
            self._ledger.keep(pick.visit)
            self._buffer[pick.order] = Kept(pick, scored)

    def _drop(self, pick: Pick, reason: str) -> None:
        self._ledger.drop(pick.visit, reason)
        self._dropped[reason] += 1

    # ---- the batch --------------------------------------------------------------------------------------------------

    async def _fill(self, collector: asyncio.Task[None]) -> Batch:
        """The groups of this step, in pick order; fewer than a batch only by ``when_short`` or at the end of the data."""
        self._filling = True
        try:
            groups = await self._fill_batch(collector)
        finally:
            self._filling = False
        return Batch(step=self.step + 1, version=self.version, groups=tuple(groups))

    async def _fill_batch(self, collector: asyncio.Task[None]) -> list[Kept]:
        await self._produce()
        while not self._stopping:
            self._progress.clear()
            self._drop_late()
            ready = self._ready()
            if len(ready) == self._settings.groups_per_step and not self._would_leave_late(ready):
                return await self._take(ready)
            if not self._running:
                if self._room() == 0:
                    return await self._short(ready)
                await self._produce()  # drops made the room, and nobody else asks
            await self._await_progress(collector)
        return []

    async def _await_progress(self, collector: asyncio.Task[None]) -> None:
        """Returns when a group has come in, was judged or lost, or when there is a worker again. Raises what ended the collector."""
        deadlines, manned = self._settings.deadlines, self._fleet.manned
        scores_s = max(0.0, max(self._score_ends, default=0.0) - time.monotonic())
        name, deadline_s = f"a finished group for step {self.step + 1}", deadlines.generate_s + scores_s
        awaited = {asyncio.ensure_future(self._progress.wait())}
        if not manned.is_set():  # the run ends before, when the last try to start one has failed
            awaited.add(asyncio.ensure_future(manned.wait()))
            name = "a lost one to be replaced"
            deadline_s = (MOST_REPLACEMENTS + 1) * (deadlines.close_s + deadlines.start_s + deadlines.push_s)
        try:
            first = asyncio.wait({*awaited, collector}, return_when=asyncio.FIRST_COMPLETED)
            await self._waits.wait(first, owner="rollout workers", name=name, deadline_s=deadline_s)
        finally:
            for future in awaited:
                future.cancel()
        if collector.done():
            _raise_first(collector)

    def _ready(self) -> list[Kept]:
        """In pick order: at lag 0 the first kept visits, whatever finished first; above it the first of those that are there, or of the
        oldest of these where the batch waits so that none becomes late."""
        orders = sorted(self._buffer)
        if self._settings.late is Late.wait:
            by_age = sorted(orders, key=lambda order: self._buffer[order].scored.meta.min_version)
            orders = sorted(by_age[: self._settings.groups_per_step])
        if self._settings.max_lag == 0 and self._running:
            first_running = min(asked.pick.order for asked in self._running.values())
            orders = [order for order in orders if order < first_running]
        return [self._buffer[order] for order in orders[: self._settings.groups_per_step]]

    def _would_leave_late(self, groups: list[Kept]) -> bool:
        if self._settings.late is not Late.wait:
            return False
        taken = {kept.pick.order for kept in groups}
        return leaves_late(
            [asked.version for asked in self._running.values()],
            [kept.scored.meta.min_version for order, kept in self._buffer.items() if order not in taken],
            version=self.version,
            max_lag=self._settings.max_lag,
            groups_per_step=self._settings.groups_per_step,
        )

    async def _take(self, groups: list[Kept]) -> list[Kept]:
        self._check_verifiers()
        self._in_hand = groups
        for kept in groups:
            del self._buffer[kept.pick.order]
        if self._settings.max_lag == 0:
            self._filling = False  # before anything is awaited: a score that comes in now must find the batch closed
            running, self._running = self._running, {}
            self._ask_surplus_again(groups, [asked.pick for asked in running.values()])
            if running:
                await self._engines(self._fleet.cancel(list(running)), "dropping surplus visits")
        return groups

    def _ask_surplus_again(self, groups: list[Kept], running: list[Pick]) -> None:
        """Everything asked beyond a full batch is as if it had not been asked, judged or not: only so the clock decides nothing."""
        surplus = [*running, *(kept.pick for kept in self._buffer.values())]
        self._buffer.clear()
        for pick in surplus:
            self._ledger.requeue(pick.visit, "surplus")
        last = groups[-1].pick.order if len(groups) == self._settings.groups_per_step else max(self._judged, default=0)
        beyond = [judged for order, judged in self._judged.items() if order > last]
        dropped = [judged for judged in beyond if judged.reason is not None]
        self._take_back(dropped, "surplus")
        for judged in beyond:
            self._judged.pop(judged.pick.order, None)
        self._dropped["surplus"] += len(surplus) + len(dropped)
        self._num_picked -= len(surplus) + len(dropped)  # should the batch lose a group before it is trained, it is filled again

    @property
    def _seen(self) -> list[Scored]:
        return [judged.scored for _, judged in sorted(self._judged.items())]

    @property
    def _num_kept(self) -> int:
        return sum(judged.reason is None for judged in self._judged.values())

    def _drop_late(self) -> None:
        limit = self._settings.max_token_lag
        late = [k for k in self._buffer.values() if limit is not None and self.version - k.scored.meta.min_version > limit]
        for kept in late:
            del self._buffer[kept.pick.order]
            self._drop(kept.pick, "late")

    async def _short(self, ready: list[Kept]) -> list[Kept]:
        """The batch cannot be filled: the visits allowed to this step, or the data, are used up."""
        self._check_verifiers()
        used_up = self._used_up()
        if used_up or (self._budget is not None and self._num_picked >= self._budget):
            return await self._take(ready)
        message = (
            f"step {self.step + 1}: {len(ready)} of {self._settings.groups_per_step} groups were kept out of "
            f"{self._num_picked} visits ({', '.join(f'{reason}: {n}' for reason, n in self._dropped.items()) or 'none dropped'}); "
            f"{pass_rate_histogram(self._seen)}"
        )
        self._observer.event("short_batch", step=self.step + 1, message=message, policy=self._settings.when_short.value)
        match self._settings.when_short:
            case WhenShort.stop:
                raise RunStopped(
                    message + "; raise rollout.max_visits_per_step, choose prompts nearer the model's ability, "
                    "or set rollout.when_short to train or carry"
                )
            case WhenShort.train:
                return await self._take(ready)
            case WhenShort.carry:
                return []

    def _check_verifiers(self, *, at_least: int = 0) -> None:
        seen = [judged.scored for order, judged in sorted(self._judged.items()) if order not in self._judged_before]
        over = over_budget(seen, self._settings.max_failed_share, f"step {self.step + 1}", at_least=at_least)
        if over is not None:
            self._observer.event("verifier_failed", step=self.step + 1, messages=dict(over.details.most_common(20)))
            raise RunStopped(over.message)

    def _used_up(self) -> bool:
        return self._ledger.used_up and not self._running

    # ---- train, push ------------------------------------------------------------------------------------------------

    async def _fetch(self, batch: Batch) -> list[Kept]:
        """Groups of the batch that are lost, found out before any rank waits for the others."""
        if self._stopping or not batch.groups:
            return []
        deadline_s = self._settings.deadlines.prepare_s
        return await self._waits.wait(
            self._learner.fetch(batch), owner="learner", name=f"fetch step {batch.step}", deadline_s=deadline_s
        )

    async def _train(self, batch: Batch) -> dict[str, float]:
        deadlines = self._settings.deadlines
        # Before the learner is busy, not only before it changes: a proof behind a long prepare would pass its deadline
        await self._waits.wait(self._pusher.hold(), owner="push", name="new workers to be proven", deadline_s=deadlines.push_s)
        start = time.monotonic()
        prepared = await self._waits.wait(
            self._learner.prepare(batch), owner="learner", name=f"prepare step {batch.step}", deadline_s=deadlines.prepare_s
        )
        middle = time.monotonic()
        self.between_steps = False
        report = await self._waits.wait(
            self._learner.train(), owner="learner", name=f"train step {batch.step}", deadline_s=deadlines.train_s
        )
        end = time.monotonic()
        pushed = await self._waits.wait(
            self._pusher.push(self.version + 1, report),
            owner="push",
            name=f"version {self.version + 1}",
            # Where no engine is left it starts one; with rollout.on_swap=finish it waits for completions. Inside, each has its own.
            deadline_s=deadlines.push_s + deadlines.start_s + deadlines.generate_s,
        )
        self.version += 1
        self._ledger.train([kept.pick.visit for kept in batch.groups])
        self._in_hand = []
        times = {
            "time/prepare_s": middle - start,
            "time/train_s": end - middle,
            "time/push_s": time.monotonic() - end,
        }
        return prepared | report.metrics | pushed | times


def _dropped_by_policy(scores: Sequence[Score]) -> str | None:
    """The reason, such as ``verifier_timeout``, where the policy of a missing verdict drops the whole group."""
    return next((f"verifier_{score.status}" for score in scores if score.consequence is Consequence.DROP_GROUP), None)


def _raise_first(task: asyncio.Task[None]) -> None:
    """The collector ends only by an exception; a group of one is shown as that one."""
    error = task.exception()
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    raise error or RuntimeError("the collector of finished groups ended by itself")
