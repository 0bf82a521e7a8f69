"""Which answers a prompt has been given how often: eight of them by their hash, the rest in one number.

Only prompts that were asked take up a row, so ten million prompts cost what those asked of them cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLOTS = 8  # answers kept apart for a prompt


class AnswerCounts:
    """Counts of answers by prompt."""

    def __init__(self, num_prompts: int) -> None:
        self._row = np.full(num_prompts, -1, dtype=np.int32)
        self._num_rows = 0
        self._hashes = np.zeros((0, SLOTS), dtype=np.uint64)
        self._counts = np.zeros((0, SLOTS), dtype=np.uint32)  # a slot of count 0 is free
        self._others = np.zeros(0, dtype=np.uint32)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self._row, self._hashes, self._counts, self._others))

    def add(self, prompt: int, answers: Iterable[int]) -> None:
        """The answers of one group. Where no slot is free, one that this group gave more often than the rarest kept one was ever given
        takes its place; the others are counted together."""
        given = Counter(answers)
        if not given:
            return
        row = self._row_of(prompt)
        hashes, counts, others = self._hashes[row].tolist(), self._counts[row].tolist(), int(self._others[row])
        for answer, count in given.items():
            taken = [slot for slot in range(SLOTS) if counts[slot] and hashes[slot] == answer]
            slot = taken[0] if taken else counts.index(min(counts))
            if taken:
                counts[slot] += count
            elif count > counts[slot]:
                others += counts[slot]
                hashes[slot], counts[slot] = answer, count
            else:
                others += count
        self._hashes[row], self._counts[row], self._others[row] = hashes, counts, others

    def of(self, prompt: int) -> tuple[dict[int, int], int]:
        """Counts by hash, the most frequent first, and how many answers were others."""
        row = int(self._row[prompt])
        if row < 0:
            return {}, 0
        kept = {int(answer): int(count) for answer, count in zip(self._hashes[row], self._counts[row], strict=True) if count}
        return dict(sorted(kept.items(), key=lambda item: (-item[1], item[0]))), int(self._others[row])

    def _row_of(self, prompt: int) -> int:
        if self._row[prompt] < 0:
            if self._num_rows == len(self._others):
                self._grow(self._num_rows // 8 + 64)
            self._row[prompt] = self._num_rows
            self._num_rows += 1
        return int(self._row[prompt])

    def _grow(self, num_rows: int) -> None:
        more = ((0, num_rows), (0, 0))
        self._hashes, self._counts = np.pad(self._hashes, more), np.pad(self._counts, more)
        self._others = np.pad(self._others, more[:1])

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
        self._num_rows = int(there.sum())
        self._row[prompts[there]] = np.arange(self._num_rows)
        self._hashes, self._counts, self._others = (arrays[f"answer_{name}"][there] for name in ("hashes", "counts", "others"))
