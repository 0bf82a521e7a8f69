"""Which answers a prompt has been given how often: eight of them by their hash, the rest in one number.

Only prompts that were asked take up a row, so ten million prompts cost what those asked of them cost: the rows are zeros, in memory that
the system gives as they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOTS = 8  # answers kept apart for a prompt


class AnswerCounts:
    """Counts of answers by prompt."""

    def __init__(self, num_prompts: int) -> None:
        self._row = np.full(num_prompts, -1, dtype=np.int32)
        self._num_rows = 0
        self._hashes = np.zeros((num_prompts, SLOTS), dtype=np.uint64)
        self._counts = np.zeros((num_prompts, SLOTS), dtype=np.uint32)  # a slot of count 0 is free
        self._others = np.zeros(num_prompts, dtype=np.uint32)

    @property
    def nbytes(self) -> int:
        """Of the rows in use."""
        return self._row.nbytes + sum(array[: self._num_rows].nbytes for array in (self._hashes, self._counts, self._others))

    def add(self, prompts: Sequence[int], groups: Sequence[Iterable[int]]) -> None:
        """The answers of groups, one after the other. Where no slot is free, one that a group gave more often than the rarest kept one was
        ever given takes its place; the others are counted together."""
        self._change(prompts, groups, _count_in)

    def take_out(self, prompts: Sequence[int], groups: Sequence[Iterable[int]]) -> None:
        """Groups that were added and do not stand. No answer is then counted more often than the others gave it."""
        self._change(prompts, groups, _count_out)

    def _change(
        self, prompts: Sequence[int], groups: Sequence[Iterable[int]], change: Callable[[Counter[int], list[int], list[int]], int]
    ) -> None:
        """The rows are read and written at once: one by one that takes ten times as long."""
        given = [(prompt, Counter(answers)) for prompt, answers in zip(prompts, groups, strict=True)]
        given = [(prompt, answers) for prompt, answers in given if answers]
        rows = np.array([self._row_of(prompt) for prompt, _ in given], dtype=np.int64)
        rows, places = np.unique(rows, return_inverse=True)
        hashes, counts, others = (array[rows].tolist() for array in (self._hashes, self._counts, self._others))
        for place, (_, answers) in zip(places.tolist(), given, strict=True):
            others[place] += change(answers, hashes[place], counts[place])
        if given:
            self._hashes[rows], self._counts[rows], self._others[rows] = np.array(hashes, dtype=np.uint64), counts, others

    def of(self, prompt: int) -> tuple[dict[int, int], int]:
        """Counts by hash, the most frequent first, and how many answers were others."""
        row = int(self._row[prompt])
        if row < 0:
            return {}, 0
        kept = {int(answer): int(count) for answer, count in zip(self._hashes[row], self._counts[row], strict=True) if count}
        return dict(sorted(kept.items(), key=lambda item: (-item[1], item[0]))), int(self._others[row])

    def _row_of(self, prompt: int) -> int:
        if self._row[prompt] < 0:
            self._row[prompt] = self._num_rows
            self._num_rows += 1
        return int(self._row[prompt])

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def arrays(self, prompts: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Copies of the rows of these prompts; zeros for one without answers."""
        rows = self._row[prompts]
        there = rows >= 0
        saved = {}
        for name, mine in (("hashes", self._hashes), ("counts", self._counts), ("others", self._others)):
            saved[f"answer_{name}"] = np.zeros((len(prompts), *mine.shape[1:]), dtype=mine.dtype)
            saved[f"answer_{name}"][there] = mine[rows[there]]
        return saved

    def restore(self, prompts: NDArray[Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """What ``arrays`` gave; every other prompt is without answers."""
        there = arrays["answer_counts"].any(axis=1)
        self._row[:] = -1
        in_use, self._num_rows = self._num_rows, int(there.sum())
        self._row[prompts[there]] = np.arange(self._num_rows)
        for name, mine in (("hashes", self._hashes), ("counts", self._counts), ("others", self._others)):
            mine[: self._num_rows] = arrays[f"answer_{name}"][there]
            mine[self._num_rows : in_use] = 0  # the others are zeros, and would take up memory if they were written


def _count_in(given: Counter[int], hashes: list[int], counts: list[int]) -> int:
    """Changes the slots of one prompt. Returns by how much the number of other answers grows."""
    others, slots = 0, _slots(hashes, counts)
    for answer, count in given.items():
        if answer in slots:
            counts[slots[answer]] += count
            continue
        slot = counts.index(min(counts))
        if count > counts[slot]:
            if counts[slot]:
                others += counts[slot]
                del slots[hashes[slot]]
            slots[answer] = slot
            hashes[slot], counts[slot] = answer, count
        else:
            others += count
    return others


def _count_out(given: Counter[int], hashes: list[int], counts: list[int]) -> int:
    """The reverse: what an answer's slot does not hold of it is among the others."""
    others, slots = 0, _slots(hashes, counts)
    for answer, count in given.items():
        held = min(count, counts[slots[answer]]) if answer in slots else 0
        if held:
            counts[slots[answer]] -= held
        others -= count - held
    return others


def _slots(hashes: list[int], counts: list[int]) -> dict[int, int]:
    """Where the answers that are kept apart are."""
    return {hashes[slot]: slot for slot in range(SLOTS) if counts[slot]}
