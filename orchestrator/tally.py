"""What ``limen score`` says at its end: counts, means, times and the worst lines, on stderr."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.console import printable
from orchestrator.score_lines import Line
from orchestrator.worst import WorstSamples
from rewards.sandbox import RUNG_NUMBERS
from rollout.records import Outcome, Score, Status

PER_DECADE = 100  # bins of a histogram of times: 2.3 % wide each
SHOWN = 5  # rows of a table of the worst lines
RUNGS = {float(number): str(rung) for rung, number in RUNG_NUMBERS.items()}
QUANTILES = (0.5, 0.95, 0.99, 1.0)
MOST_WORDS = 4096  # different words of verifiers that are counted


class Times:
    """Quantiles of any number of times, to the width of a bin."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self._bins[math.ceil(PER_DECADE * math.log10(max(seconds, 1e-9)))] += 1

    def quantile(self, share: float) -> float:
        """The smallest upper edge of a bin that at least this share of the times do not pass."""
        wanted, below = share * self._bins.total(), 0
        for edge, count in sorted(self._bins.items()):
            below += count
            if below >= wanted:
                return float(10 ** (edge / PER_DECADE))
        return 0.0


class Tally:
    """All scores of one reward."""

    def __init__(self) -> None:
        self._statuses: Counter[Status] = Counter()
        self._outcomes: Counter[Outcome] = Counter()
        self._sums = {"value": 0.0, "accuracy": 0.0}
        self._parts: dict[str, tuple[float, int]] = {}  # sum and number of each part's own values
        self._complaints: Counter[str] = Counter()  # what was said where there is no verdict
        self._num_judged = 0
        self._rungs: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._times = Times()
        self._worst = WorstSamples()

    def add(self, line: Line, score: Score) -> None:
        self._statuses[score.status] += 1
        if score.status is Status.OK:
            self._outcomes[score.outcome] += 1
            self._sums["value"] += score.value or 0.0
            self._sums["accuracy"] += score.accuracy or 0.0
        for name, number in score.parts.items():
            total, count = self._parts.get(name, (0.0, 0))
            self._parts[name] = (total + number, count + 1)
        if score.has_verdict:
            self._num_judged += 1
        elif score.detail in self._complaints or len(self._complaints) < MOST_WORDS:
            self._complaints[score.detail] += 1
        for name, number in score.measures.items():
            part, _, measure = name.rpartition(".")
            if measure == "rung" and number in RUNGS:  # a verifier of the user's may measure another thing by that name
                self._rungs[part][RUNGS[number]] += 1
        self._times.add(score.time_s)
        self._worst.add(line.items[0].prompt_id, score, {"line": line.number})

    def show(self, terminal: Console, wall_s: float) -> None:
        total = self._statuses.total()
        if not total:
            say(terminal, "no lines were scored")
            return
        say(terminal, f"{total} lines in {wall_s:.1f} s, {total / wall_s:,.0f} a second")
        say(terminal, f"status: {_counts(self._statuses)}")
        if num_ok := self._statuses[Status.OK]:
            means = ", ".join(f"mean {name} {number / num_ok:.4f}" for name, number in self._sums.items())
            say(terminal, f"outcome: {_counts(self._outcomes)}; {means}")
        if self._parts:
            means = ", ".join(f"{name} {total / count:.4f}" for name, (total, count) in self._parts.items())
            say(terminal, f"mean of each part: {means}")
        quantiles = ", ".join(f"{_share(share)} {human_time(self._times.quantile(share))}" for share in QUANTILES)
        say(terminal, f"time of a line: {quantiles}")
        for part, rungs in self._rungs.items():
            say(terminal, f"isolation of {part}: {_counts(rungs)}")
        failing = self._worst.failing()
        show_table(
            terminal, "most failing", ["line", "id", "failed", "status", "detail"], _cells(failing, "num_failed", "detail")
        )
        show_table(
            terminal, "slowest", ["line", "id", "time", "status", "outcome"], _cells(self._worst.slowest(), "time_s", "outcome")
        )
        if not self._num_judged:
            words, times = self._complaints.most_common(1)[0]
            say(terminal, f"the verifier judged none of the {total} lines; {times} times it said: {words or 'nothing'}")


def say(terminal: Console, text: str) -> None:
    terminal.print(Text(printable(text)), soft_wrap=True)


def show_table(terminal: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Nothing for a table without rows."""
    table = Table(*head, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(" ".join(cell.split()), limit=200)) for cell in row))
    if table.row_count:
        terminal.print(table)


def human_time(seconds: float) -> str:
    """Two digits, in milliseconds below a second: 0.018 ms, 12 ms, 1.2 s, 340 s."""
    number, unit = (seconds, "s") if seconds >= 0.995 else (seconds * 1000, "ms")
    if unit == "ms" and number < 0.001:
        return "under 0.001 ms"
    return f"{number:.0f} {unit}" if number >= 99.5 else f"{number:.2g} {unit}"


def _cells(rows: Sequence[Mapping[str, Any]], number: str, last: str) -> list[list[str]]:
    keys = ("line", "prompt_id", number, "status", last)
    return [[human_time(row[key]) if key == "time_s" else str(row[key]) for key in keys] for row in rows[:SHOWN]]


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _share(share: float) -> str:
    return "longest" if share == 1.0 else f"{share:.0%}"
