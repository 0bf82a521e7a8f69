"""The reward pool: verifiers in processes of their own, so that no completion can take a run down.

    score(items) -> a task for each part of each item -> lane (`rewards.lane`): the processes that judge this part
                 <- one score an item (`rewards.compose`) <- policy: retry, or what becomes of a missing verdict

Not a library's pool: pebble, the nearest, has one maintainer, bounds a whole chunk rather than an item, leaves what the killed
process had started running, and (like loky and concurrent.futures) brings multiprocessing's start-up with it, which runs the
caller's main module again and is refused to daemonic parents.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.schema import RewardConfig, RewardPart
from rewards.compose import applicable, compose, options_of, passes, policies, settle
from rewards.contract import RewardError, RewardItem, describe, failed
from rewards.lane import Lane, Task
from rewards.worker import Setup
from rollout.records import Score, Status


@dataclass(frozen=True, slots=True)
class PoolHealth:
    num_alive: int  # verifier processes that run
    num_lost: int  # processes that were killed or died, and were replaced, since the start
    num_recycled: int  # processes that were replaced after their share of items, or for the memory they kept
    num_retried: int  # calls that were made again by a policy
    num_ended: int  # calls that have ended since the start, by a verdict or with their process
    num_queued: int  # calls that no process has been given
    num_running: int  # calls under way
    longest_running_s: float  # of these; 0.0 without any
    pids: tuple[int, ...]


class RewardPool:
    """Scores completions in ``reward.num_workers`` processes, and those of parts that have ``num_processes`` of their own there.

    Each call of a verifier has a deadline, the part's ``timeout_s`` or ``reward.timeout_s``; its clock starts when the call
    starts. An async call is cancelled then. Any other is ended with its process and everything that started, which is replaced:
    only that completion is a ``timeout``. A process that dies makes its completion an ``error`` that tells how it died. Where a
    call was of several completions, or several calls were under way in the process, each is judged again alone, once, so that one bad
    completion harms no other. CPU time of a call, over all threads, is bounded by the same seconds. Then the part's policy for
    the status applies. What verifiers print is dropped.

    Raises `RewardError` when the verifiers can not be loaded, with the key, the function and the reason. User code is only
    ever imported in the processes. A user's file is found relative to the working directory.
    """

    def __init__(self, reward: RewardConfig) -> None:
        if not reward.parts or reward.num_workers < 1:
            raise RewardError("reward.parts needs at least one part and reward.num_workers at least 1")
        self._reward = reward
        self._policies = {name: policies(name, part) for name, part in reward.parts.items()}
        self._changed = threading.Condition()  # guards the queues, the batches, what is known of items, and `_ended`
        self._batches: set[_Batch] = set()
        self._ended: str | None = None  # why no more is scored
        self._orders = itertools.count()
        self._num_retried = 0
        self._num_ended = 0
        shared = {name: part for name, part in reward.parts.items() if part.num_processes is None}
        own = [({name: part}, part.num_processes) for name, part in reward.parts.items() if part.num_processes is not None]
        groups = [*([(shared, reward.num_workers)] if shared else []), *own]
        self._lanes = [self._lane(parts, num_processes) for parts, num_processes in groups]
        self._lane_of = {name: lane for lane, (parts, _) in zip(self._lanes, groups, strict=True) for name in parts}
        atexit.register(self.close)
        for lane in self._lanes:
            lane.start()
        seats = [seat for lane in self._lanes for seat in lane.seats]
        for seat in seats:
            seat.tried.wait()
        failures = [seat.failure for seat in seats if seat.failure is not None]
        if failures:
            self.close()
            raise RewardError(failures[0])

    def _lane(self, parts: Mapping[str, RewardPart], num_processes: int) -> Lane:
        limits = [self._reward.memory_gib if part.memory_gib is None else part.memory_gib for part in parts.values()]
        setup = Setup(
            parts=parts,
            timeout_s={name: self._reward.timeout_s if p.timeout_s is None else p.timeout_s for name, p in parts.items()},
            memory_bytes=None if limits[0] is None else int(limits[0] * 2**30),  # parts that share a lane have none of their own
        )
        return Lane(setup, num_processes, self._reward.items_per_process, self._changed, self._end)

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """One score an item, in the same order. Blocks; any thread may call it, several at once.

        A failed verifier is a status in its score, never an exception. Raises `RewardError` where an item names an unknown
        part, where no part judges its source, and where its options name a part that does not judge it; RuntimeError when the
        pool is closed.
        """
        judging = functools.cache(functools.partial(applicable, self._reward.parts))
        batch = _Batch(scores=[None] * len(items), num_left=len(items), done=threading.Event())
        states = []
        for place, item in enumerate(items):
            parts = judging(item.part, item.source)
            options = options_of(item.options, parts) if item.options else {}
            states.append(_Item(batch, place, parts, options, num_open=len(parts)))
        first: dict[Lane, list[Task]] = {lane: [] for lane in self._lanes}
        for item, state in zip(items, states, strict=True):
            try:
                data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # an answer of a type that can not be pickled may raise anything
                score = failed(Status.ERROR, f"the item can not be pickled: {describe(error)}", 0.0)
                settled = {name: settle(score, self._policies[name][Status.ERROR].then) for name in state.judging}
                self._finish(state, compose(self._reward, state.judging, settled))
                continue
            for name, part in state.judging.items():
                if part.needs is None:
                    first[self._lane_of[name]].append(self._task(state, name, data))
        if not items:
            return []
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(self._ended)
            self._batches.add(batch)
        for lane, tasks in first.items():
            lane.put(tasks)
        try:
            batch.done.wait()
        finally:  # also when the caller is interrupted
            with self._changed:
                self._batches.discard(batch)
                for state in states if not batch.done.is_set() else ():
                    for task in state.tasks:
                        task.done = True
        scores = [score for score in batch.scores if score is not None]
        if len(scores) < len(items):
            raise RuntimeError(self._ended)
        return scores

    def health(self) -> PoolHealth:
        seats = [seat for lane in self._lanes for seat in lane.seats]
        processes = [process for seat in seats if (process := seat.process) is not None]
        running = [time.monotonic() - call.begun for seat in seats for call in list(seat.running.values())]
        return PoolHealth(
            num_alive=sum(process.alive() for process in processes),
            num_lost=sum(seat.num_lost for seat in seats),
            num_recycled=sum(seat.num_recycled for seat in seats),
            num_retried=self._num_retried,
            num_ended=self._num_ended + sum(seat.num_lost for seat in seats),
            num_queued=sum(lane.num_queued() for lane in self._lanes),
            num_running=len(running),
            longest_running_s=max(running, default=0.0),
            pids=tuple(process.pid for process in processes),
        )

    def close(self) -> None:
        """Kill all processes and what they started. Calls of `score` that wait raise RuntimeError. May be repeated."""
        self._end("the reward pool is closed")
        for lane in self._lanes:
            lane.join()
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
            for batch in self._batches:
                batch.done.set()
            for lane in self._lanes:
                lane.end()

    # ---- what becomes of an item ----

    def _task(self, state: _Item, name: str, data: bytes) -> Task:
        options = pickle.dumps(state.options.get(name, {}))
        task = Task(name, next(self._orders), data, options, functools.partial(self._judged, state))
        state.tasks.append(task)
        return task

    def _judged(self, state: _Item, task: Task, score: Score) -> None:
        """Takes the verdict of a call: a retry, or the part's own score."""
        with self._changed:
            self._num_ended += 1
            if task.done:
                return
            num_calls = state.num_calls[task.part] = state.num_calls.get(task.part, 0) + 1
            spent_s = state.spent_s[task.part] = state.spent_s.get(task.part, 0.0) + score.time_s
            if score.status is not Status.OK:
                policy = self._policies[task.part][score.status]
                if num_calls <= policy.num_retries:
                    self._num_retried += 1
                    task.alone = True
                    self._lane_of[task.part].put([task], first=True)
                    return
                told = score.detail if num_calls == 1 else f"{score.detail} (the last of {num_calls} calls)"
                score = settle(replace(score, detail=told), policy.then)
            task.done = True
            state.scores[task.part] = score if num_calls == 1 else replace(score, time_s=spent_s)
            self._close(state, task.part, task.data, is_open=passes(score))
            if state.num_open == 0:
                self._finish(state, compose(self._reward, state.judging, state.scores))

    def _close(self, state: _Item, name: str, data: bytes, *, is_open: bool) -> None:
        """The part is done, or will not be called: call those that need it, or never."""
        state.num_open -= 1
        for gated, part in state.judging.items():
            if part.needs == name and is_open:
                self._lane_of[gated].put([self._task(state, gated, data)])
            elif part.needs == name:
                self._close(state, gated, data, is_open=False)

    def _finish(self, state: _Item, score: Score) -> None:
        with self._changed:
            state.tasks.clear()  # they know the item: so its text is freed at once, not when cycles are looked for
            batch = state.batch
            batch.scores[state.place] = score
            batch.num_left -= 1
            if batch.num_left == 0:
                batch.done.set()


@dataclass(eq=False, slots=True)
class _Batch:
    """One call of `score`."""

    scores: list[Score | None]
    num_left: int
    done: threading.Event


class _Item:
    """One item of a batch, while it is judged."""

    def __init__(
        self,
        batch: _Batch,
        place: int,
        judging: Mapping[str, RewardPart],
        options: Mapping[str, Mapping[str, object]],
        num_open: int,
    ) -> None:
        self.batch, self.place, self.judging, self.options = batch, place, judging, options
        self.num_open = num_open  # parts that are neither done nor behind a closed gate
        self.tasks: list[Task] = []
        self.scores: dict[str, Score] = {}
        self.num_calls: dict[str, int] = {}
        self.spent_s: dict[str, float] = {}
