"""The prompt ledger: which prompt is asked next, under which visit number, and what became of every visit.

The order is a seeded permutation of the training prompts for each epoch. A step takes its picks, refills included, from that
order as it stands at the start of the step, so the picks of a step do not depend on which group finishes first.

    picked -> kept -> trained
       |        +---> dropped(reason)
       +------------> dropped(reason)
       +------------> queued again (lost with its worker, or surplus), keeps its number, is picked first

A surplus visit is queued again, not dropped: which visits beyond a full batch were asked depends on what finished first, and
dropping them would let the clock decide which prompts a run sees.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.schema import LastBatch
from rollout.records import Purpose, Visit


class LedgerError(RuntimeError):
    """A visit was moved to a state that it cannot reach: a fault of the loop."""


class State(StrEnum):
    PICKED = "picked"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Pick:
    """A visit with its place in the order of all picks of the run."""

    order: int
    visit: Visit


@dataclass(frozen=True, slots=True)
class Length:
    """How many prompts an epoch has, how many of them are used, and how the run is cut into steps."""

    num_prompts: int
    groups_per_step: int
    last_batch: LastBatch

    @property
    def visits_per_epoch(self) -> int:
        """Prompts asked in one epoch: all, or all but the last partial batch."""
        if self.last_batch is LastBatch.drop:
            return self.num_prompts - self.num_prompts % self.groups_per_step
        return self.num_prompts

    def visits(self, num_epochs: float) -> int:
        """Visits in ``num_epochs`` passes."""
        return round(self.visits_per_epoch * num_epochs)

    def steps(self, num_epochs: float) -> int:
        """Steps in ``num_epochs`` passes when no group is dropped."""
        if self.last_batch is LastBatch.wrap:
            return -(-self.visits(num_epochs) // self.groups_per_step)
        whole, part = divmod(self.visits(num_epochs), self.visits_per_epoch)
        return whole * -(-self.visits_per_epoch // self.groups_per_step) + -(-part // self.groups_per_step)


class Ledger:
    """Visits of the training prompts of one run."""

    def __init__(self, prompt_ids: Sequence[str], *, length: Length, seed: int, shuffle: bool, max_visits: int | None) -> None:
        """``max_visits`` bounds the run (``data.num_epochs``); None leaves it to the number of steps."""
        self._ids = tuple(prompt_ids)
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._max_visits = max_visits
        self._num_visits: Counter[str] = Counter()
        self._num_picks = 0  # picks made so far; a visit queued again is picked under its old place
        self._epoch_order: tuple[int, np.ndarray[Any, Any]] | None = None
        self._open: dict[Visit, tuple[Pick, State]] = {}
        self._again: list[Pick] = []  # in the order of their picks
        self.counts: Counter[str] = Counter()  # picked, kept, trained, dropped/<reason>, requeued/<reason>

    @property
    def num_open(self) -> int:
        """Visits from their pick until they are dropped, or trained with their version proven."""
        return len(self._open)

    @property
    def used_up(self) -> bool:
        """No visit of the run is left to pick: ``data.num_epochs`` is reached."""
        return self._max_visits is not None and self._num_picks >= self._max_visits and not self._again

    def step_budget(self) -> int | None:
        """How many new visits the step that starts now may pick; None where nothing bounds them.

        A step never reaches over an epoch's end where batches are kept short there, nor over the end of the run's data.
        """
        left = None if self._max_visits is None else self._max_visits - self._num_picks + len(self._again)
        if self._length.last_batch is not LastBatch.keep:
            return left
        to_epoch_end = self._length.visits_per_epoch - self._num_picks % self._length.visits_per_epoch + len(self._again)
        return to_epoch_end if left is None else min(left, to_epoch_end)

    def pick(self, count: int) -> list[Pick]:
        """The next ``count`` visits of the order, those queued again first."""
        picks, self._again = self._again[:count], self._again[count:]
        picks += [self._new_pick() for _ in range(count - len(picks))]
        for pick in picks:
            self._open[pick.visit] = (pick, State.PICKED)
        return picks

    def _new_pick(self) -> Pick:
        epoch, place = divmod(self._num_picks, self._length.visits_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._ids))
            self._epoch_order = (epoch, order if self._shuffle else np.arange(len(self._ids)))
        prompt_id = self._ids[self._epoch_order[1][place]]
        pick = Pick(self._num_picks, Visit(prompt_id, self._num_visits[prompt_id], Purpose.TRAIN))
        self._num_visits[prompt_id] += 1
        self._num_picks += 1
        self.counts["picked"] += 1
        return pick

    def keep(self, visit: Visit) -> None:
        """Its group passed selection."""
        self._open[visit] = (self._state(visit, State.PICKED), State.KEPT)
        self.counts["kept"] += 1

    def drop(self, visit: Visit, reason: str) -> None:
        """It will not be trained, for a reason that is counted."""
        self._state(visit, State.PICKED, State.KEPT)
        del self._open[visit]
        self.counts[f"dropped/{reason}"] += 1

    def train(self, visits: Sequence[Visit]) -> None:
        """The step that trained them has its version proven on the engines."""
        for visit in visits:
            self._state(visit, State.KEPT)
            del self._open[visit]
        self.counts["trained"] += len(visits)

    def requeue(self, visit: Visit, reason: str) -> None:
        """Its group is lost or surplus; it keeps its number and its place in the order, and is picked before new visits."""
        bisect.insort(self._again, self._state(visit, State.PICKED, State.KEPT), key=lambda pick: pick.order)
        self.counts["kept"] -= self._open.pop(visit)[1] is State.KEPT
        self.counts[f"requeued/{reason}"] += 1

    def take_back(self, pick: Pick, reason: str) -> None:
        """Undoes a drop: the visit lies beyond a full batch, and whether it was judged before that was full is chance."""
        bisect.insort(self._again, pick, key=lambda pick: pick.order)
        self.counts[f"dropped/{reason}"] -= 1
        self.counts["requeued/surplus"] += 1

    def _state(self, visit: Visit, *allowed: State) -> Pick:
        if visit not in self._open:
            raise LedgerError(f"visit {visit.number} of prompt {visit.prompt_id} is not open")
        pick, state = self._open[visit]
        if state not in allowed:
            raise LedgerError(f"visit {visit.number} of prompt {visit.prompt_id} is {state}, needs {' or '.join(allowed)}")
        return pick

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, as JSON. Kept visits stay open: a checkpoint carries their groups. Those in flight are
        queued again."""
        in_flight = [pick for pick, state in self._open.values() if state is State.PICKED]
        kept = [pick for pick, state in self._open.values() if state is State.KEPT]
        return {
            "num_picks": self._num_picks,
            "num_visits": dict(self._num_visits),
            "again": _rows([*self._again, *in_flight]),
            "kept": _rows(kept),
            "counts": dict(self.counts),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the state of a checkpoint. Raises ConfigError for a prompt that this run does not have."""
        unknown = set(state["num_visits"]) - set(self._ids)
        if unknown:
            raise ConfigError(
                f"resume: the checkpoint knows {len(unknown)} prompts that the data no longer has, such as {min(unknown)!r}; "
                "resume with the data the run was started with"
            )
        self._num_picks = state["num_picks"]
        self._num_visits = Counter(state["num_visits"])
        self._again = _picks(state["again"])
        self._open = {pick.visit: (pick, State.KEPT) for pick in _picks(state["kept"])}
        self.counts = Counter(state["counts"])


def _rows(picks: Iterable[Pick]) -> list[list[Any]]:
    return [[pick.order, pick.visit.prompt_id, pick.visit.number] for pick in sorted(picks, key=lambda pick: pick.order)]


def _picks(rows: Iterable[Sequence[Any]]) -> list[Pick]:
    return [Pick(order, Visit(prompt_id, number, Purpose.TRAIN)) for order, prompt_id, number in rows]
