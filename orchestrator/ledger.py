"""The prompt ledger: which prompt is asked next, under which visit number, and what became of every visit.

The order is a seeded permutation of the training prompts for each epoch. A step takes its picks, refills included, from that
order as it stands at the start of the step, so the picks of a step do not depend on which group finishes first.

    picked -> running -> finished -> scored -> kept -> trained
       |         |           |          |        |
       +---------+-----------+----------+--------+---> dropped(reason)
       +---------+-----------+----------+--------+---> lost(reason): queued again, keeps its number, is picked first

*Running* is handed to an engine, *finished* handed over by it and being scored. Every visit that was picked ends trained or dropped, once
in the history that led to the present weights: a checkpoint holds the ledger of its moment, and a run that goes back to it
has the visits since before it again.

A surplus visit is queued again, not dropped: which visits beyond a full batch were asked depends on what finished first, and
dropping them would let the clock decide which prompts a run sees. For the same reason what the groups of a step say of their prompts
(pass rates, answers) is taken up when the step closes, in pick order; no group is judged by a posterior that holds its own result. Where
a group that was kept is asked for again after that, what it said is taken out as the next step closes: each visit speaks once.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import ConfigError
from configs.schema import LastBatch, LedgerConfig
from orchestrator.answers import AnswerCounts
from orchestrator.pass_rates import Observation, PassRates
from orchestrator.prompt_index import PromptIndex
from rollout.records import Purpose, Visit


class LedgerError(RuntimeError):
    """A visit was moved to a state that it cannot reach: a fault of the loop."""


class State(StrEnum):
    """Of an open visit, in this order."""

    PICKED = "picked"
    RUNNING = "running"
    FINISHED = "finished"
    SCORED = "scored"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Pick:
    """A visit with its place in the order of all picks of the run."""

    order: int
    visit: Visit


@dataclass(frozen=True, slots=True)
class Entry:
    """A visit that has not ended."""

    pick: Pick
    state: State
    since: int  # steps that had ended when it was first picked


@dataclass(frozen=True, slots=True)
class Length:
    """How many prompts an epoch has, how many of them are used, and how the run is cut into steps. Raises ConfigError where
    ``data.last_batch: drop`` would leave none."""

    num_prompts: int
    groups_per_step: int
    last_batch: LastBatch

    def __post_init__(self) -> None:
        if self.visits_per_epoch == 0:
            raise ConfigError(
                f"data.last_batch=drop: {self.num_prompts} prompts to train on do not fill one batch of "
                f"batch.groups_per_step={self.groups_per_step}; data.last_batch=wrap works, or fewer groups"
            )

    @property
    def visits_per_epoch(self) -> int:
        """Prompts asked in one epoch: all, or all but the last partial batch."""
        if self.last_batch is LastBatch.drop:
            return self.num_prompts - self.num_prompts % self.groups_per_step
        return self.num_prompts

    @property
    def num_skipped(self) -> int:
        """Prompts that an epoch leaves out; which ones depends on its order."""
        return self.num_prompts - self.visits_per_epoch

    def visits(self, num_epochs: float) -> int:
        """Visits in ``num_epochs`` passes."""
        return round(self.visits_per_epoch * num_epochs)

    def steps(self, num_epochs: float) -> int:
        """Steps in ``num_epochs`` passes when no group is dropped."""
        if self.last_batch is LastBatch.wrap:
            return -(-self.visits(num_epochs) // self.groups_per_step)
        whole, part = divmod(self.visits(num_epochs), self.visits_per_epoch)
        return whole * -(-self.visits_per_epoch // self.groups_per_step) + -(-part // self.groups_per_step)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the group of a visit said of its prompt."""

    visit: Visit
    observation: Observation
    version: int | None  # as of which it was taken up; None where that is still to come


class Ledger:
    """Visits of the training prompts of one run, and what they have shown of these."""

    def __init__(
        self,
        ids: Sequence[str],
        strata: Sequence[str],
        config: LedgerConfig,
        *,
        length: Length,
        seed: int,
        shuffle: bool,
        max_visits: int | None,
    ) -> None:
        """``strata`` are those of the prompts, in the order of ``ids``. ``max_visits`` bounds the run (``data.num_epochs``); None leaves
        it to the number of steps. Raises ConfigError for ids that cannot be told apart."""
        self.prompts = PromptIndex(ids)
        self._config = config
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._max_visits = max_visits
        numbers: dict[str, int] = {}
        stratum = np.fromiter((numbers.setdefault(name, len(numbers)) for name in strata), dtype=np.int32, count=len(ids))
        self._strata = dict(zip(numbers, np.bincount(stratum, minlength=1).tolist(), strict=False))  # prompts by name, in order
        self.rates = PassRates(stratum, len(numbers), config.half_life_versions)
        self.answers = AnswerCounts(len(ids))
        self._num_visits = np.zeros(len(ids), dtype=np.int32)
        self._num_picks = 0  # picks made so far; a visit queued again is picked under its old place
        self._num_steps = 0
        self._epoch_order: tuple[int, NDArray[np.int32]] | None = None
        self._open: dict[Visit, Entry] = {}
        self._again: list[Entry] = []  # in the order of their picks
        self._observed: dict[int, Shown] = {}  # in the step in hand, by the order of the pick
        self._taken_up: dict[int, Shown] = {}  # by an earlier step, of visits that are still open
        self._void: dict[int, Shown] = {}  # likewise, but the visit is asked again: to be taken out
        self._dropped: dict[int, tuple[Entry, str]] = {}  # in the step in hand, with the reason
        self.counts: Counter[str] = Counter()  # picked, kept, trained, dropped/<reason>, requeued/<reason>

    @property
    def num_open(self) -> int:
        """Visits from their pick until they are dropped, or trained with their version proven."""
        return len(self._open)

    @property
    def num_by_state(self) -> Counter[State]:
        """Open visits."""
        return Counter(entry.state for entry in self._open.values())

    def open_visits(self) -> dict[Visit, State]:
        """All of them, with their states."""
        return {visit: entry.state for visit, entry in self._open.items()}

    def state_of(self, visit: Visit) -> State | None:
        """None where it is not open."""
        return self._open[visit].state if visit in self._open else None

    @property
    def used_up(self) -> bool:
        """No visit of the run is left to pick: ``data.num_epochs`` is reached."""
        return self._max_visits is not None and self._num_picks >= self._max_visits and not self._again

    @property
    def nbytes(self) -> int:
        """Of everything that grows with the number of prompts, but for their ids."""
        epoch = self._epoch_order[1].nbytes if self._epoch_order else 0
        return self.prompts.nbytes + self.rates.nbytes + self.answers.nbytes + self._num_visits.nbytes + epoch

    def num_again_before(self, order: int) -> int:
        """Visits queued again whose place is before ``order``."""
        return bisect.bisect_left(self._again, order, key=_order)

    def step_budget(self) -> int | None:
        """How many new visits the step that starts now may pick; None where nothing bounds them.

        A step never reaches over an epoch's end where batches are kept short there, nor over the end of the run's data.
        """
        left = None if self._max_visits is None else self._max_visits - self._num_picks + len(self._again)
        if self._length.last_batch is not LastBatch.keep:
            return left
        oldest = min(map(_order, [*self._again[:1], *self._open.values()]), default=self._num_picks)
        end = (oldest // self._length.visits_per_epoch + 1) * self._length.visits_per_epoch  # of the epoch that has not ended
        to_epoch_end = max(0, end - self._num_picks) + self.num_again_before(end)
        return to_epoch_end if left is None else min(left, to_epoch_end)

    # ---- what becomes of a visit ------------------------------------------------------------------------------------

    def pick(self, count: int) -> list[Pick]:
        """The next ``count`` visits of the order, those queued again first."""
        entries, self._again = self._again[:count], self._again[count:]
        entries += [Entry(self._new_pick(), State.PICKED, self._num_steps) for _ in range(count - len(entries))]
        self._open |= {entry.pick.visit: entry for entry in entries}
        return [entry.pick for entry in entries]

    def _new_pick(self) -> Pick:
        epoch, at = divmod(self._num_picks, self._length.visits_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self.prompts))
            self._epoch_order = (epoch, (order if self._shuffle else np.arange(len(self.prompts))).astype(np.int32))
        prompt = self._epoch_order[1][at]
        pick = Pick(self._num_picks, Visit(self.prompts.ids[prompt], int(self._num_visits[prompt]), Purpose.TRAIN))
        self._num_visits[prompt] += 1
        self._num_picks += 1
        self.counts["picked"] += 1
        return pick

    def run(self, visits: Iterable[Visit]) -> None:
        """They are handed to the engines."""
        for visit in visits:
            self._move(visit, State.PICKED, State.RUNNING)

    def finish(self, visit: Visit) -> None:
        """An engine handed over its group, which is now being scored."""
        self._move(visit, State.RUNNING, State.FINISHED)

    def score(self, visit: Visit, observation: Observation) -> None:
        """Its group has its scores. What they say of the prompt is taken up when the step closes."""
        order = self._move(visit, State.FINISHED, State.SCORED).pick.order
        self._observed[order] = Shown(visit, observation, None)

    def keep(self, visit: Visit) -> None:
        """Its group passed selection."""
        self._move(visit, State.SCORED, State.KEPT)
        self.counts["kept"] += 1

    def train(self, visits: Sequence[Visit]) -> None:
        """The step that trained them has its version proven on the engines."""
        for visit in visits:
            self._entry(visit, State.KEPT)
        for visit in visits:
            del self._open[visit]
        self.counts["trained"] += len(visits)

    def drop(self, visit: Visit, reason: str) -> None:
        """It will not be trained, for a reason that is counted."""
        entry = self._entry(visit, *State)
        del self._open[visit]
        self._dropped[entry.pick.order] = (entry, reason)
        self.counts[f"dropped/{reason}"] += 1

    def requeue(self, visit: Visit, reason: str) -> None:
        """Its group is lost or surplus; it keeps its number and its place in the order, and is picked before new visits. What its group
        said of the prompt does not count."""
        entry = self._entry(visit, *State)
        del self._open[visit]
        self.counts["kept"] -= entry.state is State.KEPT
        self._ask_again(entry, reason)

    def take_back(self, pick: Pick, reason: str, why: str) -> None:
        """Undoes a drop for ``reason`` of the step in hand; the visit is queued again. ``why``: it is surplus, beyond a full batch, and
        whether it was judged before that was full is chance; or its group is of no use."""
        entry, dropped_for = self._dropped.get(pick.order, (None, None))
        if entry is None or dropped_for != reason or entry.pick != pick:
            raise LedgerError(
                f"visit {pick.visit.number} of prompt {pick.visit.prompt_id} was not dropped for {reason} in this step"
            )
        del self._dropped[pick.order]
        self.counts[f"dropped/{reason}"] -= 1
        self._ask_again(entry, why)

    def _ask_again(self, entry: Entry, reason: str) -> None:
        self._observed.pop(entry.pick.order, None)  # it will be scored anew
        if entry.pick.order in self._taken_up:
            self._void[entry.pick.order] = self._taken_up.pop(entry.pick.order)
        bisect.insort(self._again, replace(entry, state=State.PICKED), key=_order)
        self.counts[f"requeued/{reason}"] += 1

    def _move(self, visit: Visit, before: State, after: State) -> Entry:
        entry = self._open[visit] = replace(self._entry(visit, before), state=after)
        return entry

    def _entry(self, visit: Visit, *allowed: State) -> Entry:
        if visit not in self._open:
            raise LedgerError(f"visit {visit.number} of prompt {visit.prompt_id} is not open")
        entry = self._open[visit]
        if entry.state not in allowed:
            raise LedgerError(f"visit {visit.number} of prompt {visit.prompt_id} is {entry.state}, needs {' or '.join(allowed)}")
        return entry

    # ---- the end of a step ------------------------------------------------------------------------------------------

    def close_step(self, version: int) -> list[Entry]:
        """Takes up what the step's groups, made by ``version``, showed of their prompts. Returns the visits that have now been open
        for ``stuck_after_steps`` steps."""
        void, void_prompts, right, valid = self._in_order(self._void)
        added = np.array([shown.version for shown in void], dtype=np.int64)
        self.rates.take_out(void_prompts, right, valid, added, version)
        self.answers.take_out(void_prompts.tolist(), [shown.observation.answers for shown in void])
        groups, prompts, right, valid = self._in_order(self._observed)
        self.rates.add(prompts, right, valid, version)
        self.answers.add(prompts.tolist(), [shown.observation.answers for shown in groups])
        self._taken_up |= {order: replace(shown, version=version) for order, shown in self._observed.items()}
        self._taken_up = {order: shown for order, shown in self._taken_up.items() if shown.visit in self._open}
        self._void.clear()
        self._observed.clear()
        self._dropped.clear()
        self._num_steps += 1
        stuck = self._num_steps - self._config.stuck_after_steps
        return sorted((entry for entry in self._open.values() if entry.since == stuck), key=_order)

    def _in_order(
        self, shown: Mapping[int, Shown]
    ) -> tuple[list[Shown], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """By the order of the picks: what was shown, the places of the prompts, right completions and valid ones."""
        groups = [shown[order] for order in sorted(shown)]
        of_groups = [(group.observation.num_right, group.observation.num_valid) for group in groups]
        right, valid = np.array(of_groups, dtype=np.int64).reshape(-1, 2).T
        return groups, self.prompts.find([group.visit.prompt_id for group in groups]), right, valid

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside ``arrays`` of the same moment, as JSON. Kept visits stay open: a checkpoint carries their
        groups. Those in flight will be queued again."""
        return {
            "num_picks": self._num_picks,
            "num_steps": self._num_steps,
            "open": [_row(entry) for entry in sorted(self._open.values(), key=_order)],
            "again": [_row(entry) for entry in self._again],
            "observed": _shown_rows(self._observed),
            "taken_up": _shown_rows(self._taken_up),
            "void": _shown_rows(self._void),
            "dropped": [[*_row(entry), reason] for _, (entry, reason) in sorted(self._dropped.items())],
            "counts": dict(self.counts),
            "strata": self._strata,
            "config": asdict(self._config),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What is known of every prompt that was asked, one row each in the order of the data, and of the strata."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, NDArray[Any]]]:
        """What makes ``arrays`` as of now, in a thread (seconds at ten million prompts): meanwhile visits may be picked and move, but no
        step may close."""
        return functools.partial(self._arrays, self._num_visits.copy())

    def _arrays(self, num_visits: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        places = np.flatnonzero(num_visits)
        own: dict[str, NDArray[Any]] = {"prompt": self.prompts.hashes_of(places), "num_visits": num_visits[places]}
        return own | self.rates.arrays(places) | self.answers.arrays(places)

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes up what a checkpoint holds, whatever came since. Raises ConfigError for a prompt that this run does not have."""
        places = self.prompts.find_hashes(arrays["prompt"])
        if (places < 0).any():
            raise ConfigError(
                f"resume: the checkpoint knows {(places < 0).sum()} prompts that the data no longer has, of {len(places)} that were asked; "
                "resume with the data the run was started with"
            )
        rows = {name: row for row, name in enumerate(state["strata"])}
        self._num_visits[:] = 0
        self._num_visits[places] = arrays["num_visits"]
        self.rates.restore(places, arrays, np.array([rows.get(name, -1) for name in self._strata], dtype=np.int64))
        self.answers.restore(places, arrays)
        self._num_picks, self._num_steps = state["num_picks"], state["num_steps"]
        entries = [read_entry(row) for row in state["open"]]
        self._open = {entry.pick.visit: entry for entry in entries if entry.state is State.KEPT}
        in_flight = [replace(entry, state=State.PICKED) for entry in entries if entry.state is not State.KEPT]
        self._again = sorted([*map(read_entry, state["again"]), *in_flight], key=_order)
        self._dropped = {row[0]: (read_entry(row[:-1]), row[-1]) for row in state["dropped"]}
        asked_again = {entry.pick.order for entry in in_flight}
        self._observed = {order: shown for order, shown in _read_shown(state["observed"]) if order not in asked_again}
        taken_up = dict(_read_shown(state["taken_up"]))
        self._void = dict(_read_shown(state["void"])) | {order: taken_up.pop(order) for order in asked_again & taken_up.keys()}
        self._taken_up = taken_up
        self.counts = Counter(state["counts"])


def _order(entry: Entry) -> int:
    return entry.pick.order


def _row(entry: Entry) -> list[Any]:
    return [entry.pick.order, entry.pick.visit.prompt_id, entry.pick.visit.number, str(entry.state), entry.since]


def _shown_rows(shown: Mapping[int, Shown]) -> list[list[Any]]:
    return [
        [
            order,
            s.visit.prompt_id,
            s.visit.number,
            s.version,
            s.observation.num_right,
            s.observation.num_valid,
            list(s.observation.answers),
        ]
        for order, s in sorted(shown.items())
    ]


def _read_shown(rows: Iterable[Sequence[Any]]) -> Iterator[tuple[int, Shown]]:
    for order, prompt_id, number, version, num_right, num_valid, answers in rows:
        seen = Observation(num_right, num_valid, tuple(answers))
        yield order, Shown(Visit(prompt_id, number, Purpose.TRAIN), seen, version)


def read_entry(row: Sequence[Any]) -> Entry:
    """A row of ``open`` or ``again`` in a ledger's state."""
    order, prompt_id, number, state, since = row
    return Entry(Pick(order, Visit(prompt_id, number, Purpose.TRAIN)), State(state), since)
