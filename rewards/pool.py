"""The reward pool: verifiers in processes of their own, so that no completion can take a run down.

Not a library's pool: pebble, the nearest, has one maintainer, bounds a whole chunk rather than an item, leaves what the killed
process had started running, and (like loky and concurrent.futures) brings multiprocessing's start-up with it, which runs the
caller's main module again and is refused to daemonic parents.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RewardConfig
from rewards.compose import applicable
from rewards.contract import RewardError, RewardItem, describe, failed
from rewards.process import START_S, Woken, WorkerProcess
from rewards.worker import Setup, read_score
from rollout.records import Score, Status

MAX_CHUNK = 64  # items sent to a process at once
MAX_TRIES = 3  # processes that may die before an item is begun until that item is given up


@dataclass(frozen=True, slots=True)
class PoolHealth:
    num_alive: int  # verifier processes that run
    num_lost: int  # processes that were killed or died, and were replaced, since the start
    num_queued: int  # items that no process has been given
    num_running: int  # items that are being judged
    longest_running_s: float  # of these; 0.0 without any
    pids: tuple[int, ...]


class RewardPool:
    """Scores completions in ``reward.num_workers`` processes.

    ``reward.timeout_s`` bounds each completion, all its parts together; its clock starts when work on it starts. At the
    deadline the process and everything it started are killed and it is replaced; only that completion is a ``timeout``. A
    process that dies makes its completion an ``error`` that tells how it died. What verifiers print is dropped.

    Raises `RewardError` when the verifiers can not be loaded, with the key, the function and the reason. User code is only
    ever imported in the processes. A user's file is found relative to the working directory.
    """

    def __init__(self, reward: RewardConfig) -> None:
        if not reward.parts or reward.num_workers < 1:
            raise RewardError("reward.parts needs at least one part and reward.num_workers at least 1")
        self._parts, self._timeout_s = dict(reward.parts), reward.timeout_s
        memory = None if reward.memory_gib is None else int(reward.memory_gib * 2**30)
        self._setup = Setup(parts=self._parts, memory_bytes=memory)
        self._changed = threading.Condition()  # guards the queue, the batches and `_ended`
        self._queue: deque[_Task] = deque()
        self._batches: set[_Batch] = set()
        self._ended: str | None = None  # why no more is scored
        self._wake_read, self._wake_write = map(os.fdopen, os.pipe(), ("rb", "wb"))  # closing the second ends every wait
        self._seats = [_Seat() for _ in range(reward.num_workers)]
        # A thread a process: it starts it, feeds it, keeps its deadline and replaces it.
        self._threads = [threading.Thread(target=self._keep, args=(s,), name="reward-pool", daemon=True) for s in self._seats]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()
        for seat in self._seats:
            seat.tried.wait()
        failures = [seat.failure for seat in self._seats if seat.failure is not None]
        if failures:
            self.close()
            raise RewardError(failures[0])

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """One score an item, in the same order. Blocks; any thread may call it, several at once.

        A failed verifier is a status in its score, never an exception. Raises `RewardError` where an item names an unknown
        part, RuntimeError when the pool is closed.
        """
        for item in items:
            applicable(self._parts, item.part)
        batch = _Batch(scores=[None] * len(items), num_left=len(items), done=threading.Event())
        tasks = []
        for place, item in enumerate(items):
            try:
                tasks.append(_Task(batch, place, pickle.dumps(item, pickle.HIGHEST_PROTOCOL)))
            except Exception as error:  # an answer of a type that can not be pickled may raise anything
                self._finish(batch, place, failed(Status.ERROR, f"the item can not be pickled: {describe(error)}", 0.0))
        if not tasks:
            batch.done.set()
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(self._ended)
            self._batches.add(batch)
            self._queue.extend(tasks)
            self._changed.notify_all()
        try:
            batch.done.wait()
        finally:  # also when the caller is interrupted
            with self._changed:
                self._batches.discard(batch)
                if not batch.done.is_set():
                    self._queue = deque(task for task in self._queue if task.batch is not batch)
        scores = [score for score in batch.scores if score is not None]
        if len(scores) < len(items):
            raise RuntimeError(self._ended)
        return scores

    def health(self) -> PoolHealth:
        processes = [seat.process for seat in self._seats]
        running = [time.monotonic() - begun for seat in self._seats if (begun := seat.begun) is not None]
        return PoolHealth(
            num_alive=sum(process is not None and process.alive() for process in processes),
            num_lost=sum(seat.num_lost for seat in self._seats),
            num_queued=len(self._queue),
            num_running=len(running),
            longest_running_s=max(running, default=0.0),
            pids=tuple(process.pid for process in processes if process is not None),
        )

    def close(self) -> None:
        """Kill all processes and what they started. Calls of `score` that wait raise RuntimeError. May be repeated."""
        self._end("the reward pool is closed")
        for thread in self._threads:
            thread.join()
        self._wake_read.close()
        atexit.unregister(self.close)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, why: str) -> None:
        with self._changed:
            if self._ended is not None:
                return
            self._ended = why
            self._queue.clear()
            for batch in self._batches:
                batch.done.set()
            self._wake_write.close()
            self._changed.notify_all()

    def _keep(self, seat: _Seat) -> None:
        """A seat's thread."""
        try:
            self._start(seat)
            while tasks := self._take():
                process = seat.process or self._start(seat)
                if process is None:
                    for task in tasks:
                        self._finish(task.batch, task.place, failed(Status.ERROR, str(seat.failure), 0.0))
                elif not self._serve(seat, process, tasks):
                    self._start(seat)
        except Woken:
            pass
        except BaseException as error:  # a fault of the pool's own must not leave `score` waiting
            self._end(f"the reward pool failed: {describe(error)}")
            raise
        finally:
            if seat.process is not None:
                seat.process.kill()
            seat.tried.set()

    def _start(self, seat: _Seat) -> WorkerProcess | None:
        try:
            seat.process = WorkerProcess(self._setup, self._wake_read.fileno())
        except RewardError as error:
            seat.failure = str(error)
        seat.tried.set()
        return seat.process

    def _take(self) -> list[_Task]:
        """The next tasks for one process; none when the pool has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended is not None)
            # Ever smaller chunks towards the end of the queue, so that all processes finish at about the same time.
            size = min(MAX_CHUNK, len(self._queue), 1 + len(self._queue) // (2 * len(self._seats)))
            return [self._queue.popleft() for _ in range(size)]

    def _serve(self, seat: _Seat, process: WorkerProcess, tasks: Sequence[_Task]) -> bool:
        """Have ``tasks`` judged; False if that cost the process. What it had not begun goes back to the head of the queue."""
        left = dict(enumerate(tasks))
        running: tuple[int, str] | None = None  # the item being judged and the part that judges it
        limit = time.monotonic() + START_S
        try:
            process.send([(number, task.data) for number, task in left.items()])
            while left:
                messages = process.receive(limit)
                if not messages:
                    raise TimeoutError
                for kind, number, *rest in messages:
                    if kind == "done":
                        task, running, seat.begun = left.pop(number), None, None
                        self._finish(task.batch, task.place, read_score(rest))
                        continue
                    if running is None:
                        seat.begun = time.monotonic()
                        limit = seat.begun + self._timeout_s
                    running = number, rest[0]
            return True
        except TimeoutError:
            process.kill()
            status, what = Status.TIMEOUT, f"was still running after {self._timeout_s:g} s and was killed"
        except (EOFError, OSError):
            status, what = Status.ERROR, f"its process {process.kill(grace_s=1.0)}"
        seat.num_lost += 1
        if running is not None:
            task = left.pop(running[0])
            detail = f"reward part '{running[1]}': {self._parts[running[1]].function}: {what}"
            self._finish(task.batch, task.place, failed(status, detail, time.monotonic() - (seat.begun or limit)))
        elif len(left) == len(tasks):
            self._count_try(left, what)
        seat.process, seat.begun = None, None
        with self._changed:
            if self._ended is None:
                self._queue.extendleft(reversed(left.values()))
                self._changed.notify_all()
        return False

    def _count_try(self, left: dict[int, _Task], what: str) -> None:
        """A process ended before it began anything: give up items to which that has happened too often."""
        for number, task in list(left.items()):
            task.num_tries += 1
            if task.num_tries >= MAX_TRIES:
                detail = f"given up after {MAX_TRIES} verifier processes ended before they began it; the last: {what}"
                self._finish(task.batch, task.place, failed(Status.ERROR, detail, 0.0))
                del left[number]

    def _finish(self, batch: _Batch, place: int, score: Score) -> None:
        with self._changed:
            batch.scores[place] = score
            batch.num_left -= 1
            if batch.num_left == 0:
                batch.done.set()


@dataclass(eq=False, slots=True)
class _Batch:
    """One call of `score`."""

    scores: list[Score | None]
    num_left: int
    done: threading.Event


@dataclass(eq=False, slots=True)
class _Task:
    """One item of a batch."""

    batch: _Batch
    place: int
    data: bytes  # the pickled item
    num_tries: int = 0


class _Seat:
    """The place of one process, through all its replacements."""

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.failure: str | None = None  # why the last start failed
        self.tried = threading.Event()  # the first start has succeeded or failed
        self.num_lost = 0
        self.begun: float | None = None  # when the running item began, by time.monotonic
