"""The slowest samples, and the prompts whose verifier failed most often, in bounded memory."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Any

from rollout.records import Score

MOST_ROWS = 20  # of each table
MOST_NAMES = 4096  # prompts whose failures are counted at once; beyond, those with the fewest are forgotten


class WorstSamples:
    """Fed with every score of a run or of a file."""

    def __init__(self) -> None:
        self._slowest: list[tuple[float, int, dict[str, Any]]] = []  # a heap, the fastest of them first
        self._failed: dict[str, tuple[int, dict[str, Any]]] = {}  # by prompt id: how often, and the last of them
        self._numbers = itertools.count()  # tell samples of one time apart

    def add(self, prompt_id: str, score: Score, where: Mapping[str, Any]) -> None:
        """``where``: what the sample's row should say of its place, such as its step or line."""
        failed = not score.has_verdict
        slow = len(self._slowest) < MOST_ROWS or score.time_s > self._slowest[0][0]
        if not failed and not slow:
            return
        verdict = {"time_s": score.time_s, "status": score.status, "outcome": score.outcome, "detail": score.detail}
        row = {"prompt_id": prompt_id, **where, **verdict}
        if slow:
            push = heapq.heappush if len(self._slowest) < MOST_ROWS else heapq.heappushpop
            push(self._slowest, (score.time_s, -next(self._numbers), row))
        if failed:
            times, _ = self._failed.get(prompt_id, (0, row))
            self._failed[prompt_id] = (times + 1, row)
            if len(self._failed) > MOST_NAMES:
                self._failed = dict(self._most_failing(MOST_NAMES // 2))

    def slowest(self) -> list[dict[str, Any]]:
        """The slowest first."""
        return [row for *_, row in sorted(self._slowest, key=lambda entry: entry[:2], reverse=True)]

    def failing(self) -> list[dict[str, Any]]:
        """Of the prompts that failed most often, the last failure and how many there were."""
        return [{**row, "num_failed": times} for _, (times, row) in self._most_failing(MOST_ROWS)]

    def as_json(self) -> dict[str, Any]:
        return {"slowest": self.slowest(), "most_failing": self.failing()}

    def _most_failing(self, count: int) -> list[tuple[str, tuple[int, dict[str, Any]]]]:
        return sorted(self._failed.items(), key=lambda item: -item[1][0])[:count]
