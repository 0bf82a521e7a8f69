"""``limen score``: a reward without training. JSON lines in, JSON lines out, in order, in bounded memory.

The pool is that of a training run. A chunk of lines is one call of it; so many calls are under way at once that a line which takes its
whole time limit keeps no process idle. A line that cannot be used ends the work behind the lines before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from configs.compose import load_config
from configs.errors import InputError
from configs.schema import Config, RewardConfig
from orchestrator.errors import RunStopped
from orchestrator.score_lines import Line, LineParser, read_lines
from orchestrator.tally import Tally, say, show_table
from rewards.pool import RewardPool
from rollout.records import Consequence, Score

CHUNK_LINES, CHUNK_BYTES = 32, 1 << 20
MAX_CHUNKS = 64  # under way at once
EXIT_SIGTERM = 143


class Judgement(Protocol):
    """What becomes of the scores."""

    def rows(self, line: Line, scores: Sequence[Score]) -> Iterator[dict[str, Any]]:
        """The output of one line; ``scores`` of each reward."""

    def show(self, terminal: Console, wall_s: float) -> None:
        """Prints the summary; ``wall_s`` is what the judging took."""


def score(config: Config) -> int:
    """Scores ``input`` into ``output`` by ``config.reward``."""
    return _run(config, [config.reward], Scores())


def compare(flags: Mapping[str, str], overrides: Sequence[str], config_dir: Path | None) -> int:
    """Scores by two rewards and writes the lines on which they disagree."""
    given = flags["--compare"]
    try:
        others = shlex.split(given)
    except ValueError as error:
        raise InputError(f"--compare {given}: {error}") from error
    strange = [other for other in others if other.lstrip("~+").partition("=")[0].split(".")[0] not in ("reward", "experiment")]
    if strange or not others:
        what = f"{strange[0]} is not of a reward" if strange else "it is empty"
        raise InputError(
            f"--compare {given}: {what}; it wants the second reward, in one argument: --compare 'reward=exact' input=in.jsonl"
        )
    config = load_config(overrides, config_dir, combinations=False)
    other = load_config(others, config_dir, combinations=False)
    return _run(config, [config.reward, other.reward], Comparison([" ".join(overrides) or "as configured", given]))


# ---- what becomes of the scores -------------------------------------------------------------------------------------


class Scores:
    """Every line with its score."""

    def __init__(self) -> None:
        self._tally = Tally()

    def rows(self, line: Line, scores: Sequence[Score]) -> Iterator[dict[str, Any]]:
        (score,) = scores
        self._tally.add(line, score)
        yield {
            **line.rest,
            "value": score.value,
            "accuracy": score.accuracy,
            "status": score.status,
            "outcome": score.outcome,
            "parts": {**score.parts, **score.measures},
            "extracted": score.extracted,
            "time_s": round(score.time_s, 6),
            "detail": score.detail,
        }

    def show(self, terminal: Console, wall_s: float) -> None:
        self._tally.show(terminal, wall_s)


class Comparison:
    """The lines on which two rewards disagree: in value, in accuracy, or in whether there is one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._tallies = (Tally(), Tally())
        self._table: Counter[tuple[str, str]] = Counter()
        self._num_both, self._difference = 0, 0.0

    def rows(self, line: Line, scores: Sequence[Score]) -> Iterator[dict[str, Any]]:
        first, second = scores
        for tally, score in zip(self._tallies, scores, strict=True):
            tally.add(line, score)
        self._table[_verdict(first), _verdict(second)] += 1
        if first.value is not None and second.value is not None:
            self._num_both += 1
            self._difference += second.value - first.value
        if (first.value, first.accuracy) != (second.value, second.accuracy):
            asked = {"completion": line.items[0].completion, "answer": line.items[0].answer}
            yield {"line": line.number, **line.rest, **asked, "first": _brief(first), "second": _brief(second)}

    def show(self, terminal: Console, wall_s: float) -> None:
        for name, tally in zip(self._names, self._tallies, strict=True):
            say(terminal, f"--- {name}")
            tally.show(terminal, wall_s)
        kinds = sorted({kind for pair in self._table for kind in pair})
        rows = [[f"first {a}", *(str(self._table[a, b]) for b in kinds)] for a in kinds]
        show_table(terminal, "lines", ["", *(f"second {kind}" for kind in kinds)], rows)
        if self._num_both:
            mean = self._difference / self._num_both
            say(terminal, f"mean difference in value, second less first: {mean:+.4f} over {self._num_both} lines")


def _verdict(score: Score) -> str:
    if score.accuracy is None:
        return str(score.status)
    return "right" if score.accuracy >= 0.5 else "wrong"


def _brief(score: Score) -> dict[str, Any]:
    keys = ("value", "accuracy", "status", "outcome", "extracted")
    return {key: getattr(score, key) for key in keys}


# ---- the work -------------------------------------------------------------------------------------------------------

Take = Callable[[Sequence[Line], Sequence[Sequence[Score]]], None]  # the scores by reward


def _run(config: Config, rewards: Sequence[RewardConfig], judgement: Judgement) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_SIGTERM))
    terminal = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    parser = LineParser(config.input or "standard input", rewards)
    with contextlib.ExitStack() as stack:
        source = _open_input(config.input, stack)
        pools = [stack.enter_context(RewardPool(reward)) for reward in rewards]
        sink = _open_output(config.output, stack)  # last: whatever is refused before leaves no file
        progress = stack.enter_context(_progress(terminal, sink))
        task = progress.add_task("", total=_size(source), num=0)

        def take(lines: Sequence[Line], scores: Sequence[Sequence[Score]]) -> None:
            _write(sink, lines, scores, judgement)
            progress.update(task, advance=sum(line.num_bytes for line in lines), num=lines[-1].number)

        begun = time.monotonic()
        try:
            _stream(read_lines(source), parser, pools, take)
        finally:
            progress.stop()
            judgement.show(terminal, time.monotonic() - begun)
    return 0


def _stream(texts: Iterator[list[bytes]], parser: LineParser, pools: Sequence[RewardPool], take: Take) -> None:
    """Judges the lines and hands them on in order; also those before an unusable one, which is then raised."""
    pipeline, unusable = _Pipeline(pools, take), None
    try:
        try:
            for lines in texts:
                for chunk in _chunks(parser, lines):
                    pipeline.submit(chunk)
        except InputError as error:
            unusable = error
        pipeline.finish()
    except BaseException:
        pipeline.abandon()
        raise
    if unusable is not None:
        raise unusable


def _chunks(parser: LineParser, lines: Sequence[bytes]) -> Iterator[list[Line]]:
    chunk: list[Line] = []
    for text in lines:
        try:
            line = parser.parse(text)
        except InputError:
            if chunk:
                yield chunk
            raise
        if line is not None:
            chunk.append(line)
        if len(chunk) == CHUNK_LINES or sum(line.num_bytes for line in chunk) > CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class _Pipeline:
    """Chunks are judged in threads, which wait for the pool, and handed on in their order by one more."""

    def __init__(self, pools: Sequence[RewardPool], take: Take) -> None:
        self._pools = pools
        self._take = take
        self._failure: BaseException | None = None
        self._queue: queue.Queue[tuple[list[Line], Future[list[list[Score]]]] | None] = queue.Queue(MAX_CHUNKS)
        self._ended = threading.Event()
        self._executor = ThreadPoolExecutor(MAX_CHUNKS)
        threading.Thread(target=self._hand_on, name="score-writer").start()

    def submit(self, chunk: list[Line]) -> None:
        """Waits while too many are under way. Raises what handing on has failed with."""
        self._queue.put((chunk, self._executor.submit(self._judge, chunk)))
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Waits until all is handed on."""
        self._queue.put(None)
        self._ended.wait()
        self._executor.shutdown()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Ends what is under way."""
        for pool in self._pools:
            pool.close()
        if not self._ended.is_set():
            self._queue.put(None)
            self._ended.wait()
        self._executor.shutdown()

    def _judge(self, chunk: Sequence[Line]) -> list[list[Score]]:
        return [pool.score([line.items[place] for line in chunk]) for place, pool in enumerate(self._pools)]

    def _hand_on(self) -> None:
        while entry := self._queue.get():
            chunk, future = entry
            if self._failure is not None:  # the queue is emptied, so that nobody waits for room in it
                continue
            try:
                self._take(chunk, future.result())
            except BaseException as error:  # raised where the lines are read
                self._failure = error
        self._ended.set()


# ---- files ----------------------------------------------------------------------------------------------------------


def _write(sink: int, lines: Sequence[Line], scores: Sequence[Sequence[Score]], judgement: Judgement) -> None:
    """Writes what comes of the lines. Raises RunStopped behind one whose policy says so, and where it cannot write."""
    texts, fatal = [], None
    for line, *of_line in zip(lines, *scores, strict=True):
        texts += [json.dumps(row, allow_nan=False) + "\n" for row in judgement.rows(line, of_line)]
        fatal = next((score for score in of_line if score.consequence is Consequence.FAIL), None)
        if fatal is not None:
            break
    left = memoryview("".join(texts).encode())
    try:
        while left:
            left = left[os.write(sink, left) :]
    except OSError as error:
        raise RunStopped(f"cannot write the output: {error.strerror}") from error
    if fatal is not None:
        raise RunStopped(f"line {line.number}: status {fatal.status}, whose policy is `fail`: {fatal.detail}")


def _open_input(path: str | None, stack: contextlib.ExitStack) -> int:
    if path is None:
        return _descriptor(sys.stdin, "input")
    try:
        return stack.enter_context(open(path, "rb", buffering=0)).fileno()
    except OSError as error:
        raise InputError(f"input={path}: {error.strerror}") from error


def _open_output(path: str | None, stack: contextlib.ExitStack) -> int:
    if path is None:
        return _descriptor(sys.stdout, "output")
    try:
        return stack.enter_context(open(path, "xb", buffering=0)).fileno()
    except FileExistsError as error:
        raise InputError(f"output={path}: this file exists; name a new one") from error
    except OSError as error:
        raise InputError(f"output={path}: {error.strerror}") from error


def _descriptor(stream: TextIO | None, key: str) -> int:
    if stream is None:  # the process was started with it closed
        raise InputError(f"standard {key} is closed; {key}=FILE works")
    return stream.fileno()


def _size(source: int) -> int | None:
    status = os.fstat(source)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _progress(terminal: Console, sink: int) -> Progress:
    """On a terminal, unless the output goes there too."""
    columns = (TextColumn("{task.fields[num]} lines"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=terminal, transient=True, disable=not sys.stderr.isatty() or os.isatty(sink))
