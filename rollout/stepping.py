"""The step-loop form of the engine contract: one thread owns a stepper and makes one decode step after another.

Everything that touches the model happens in that thread, between two steps: commands (pause, swap, score, cancel) are taken
there, new completions are admitted there. So the weights cannot change during a step, and each token's version is the one
that the loop holds when the step returns.

    caller                  loop thread                                     stepper
    submit  -> queue  -->   admit while fewer than ``max_running`` run  ->  add
                            step                                        ->  step: tokens of every running completion
    poll    <- ready  <--   a group whose last completion ended
    swap    -> command -->  between two steps                           ->  load

The loop adds a few list operations a token. Arrays and texts are made in the thread that polls.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.engine import (
    EngineError,
    GroupRequest,
    Health,
    OnSwap,
    PushError,
    Sampling,
    SleepReport,
    SwapReport,
    TokenScores,
    Wake,
)
from rollout.receiving import PushReceiver
from rollout.records import Completion, Finish, Group, Visit
from rollout.sleeping import SleepState
from rollout.weights import Bucket, Manifest

_CLOSE_S = 30.0  # how long ``close`` waits for the step in progress

T = TypeVar("T")


class Produced(NamedTuple):
    """What one step made for one completion."""

    key: int
    token_ids: Sequence[int]
    logps: Sequence[float]  # as long as token_ids, at the sampling temperature
    finish: Finish | None  # set with the last tokens


class Stepper(Protocol):
    """The low level of an engine: a batch of completions, all advanced by one step at a time.

    Built, called and closed in the loop's thread, except ``check`` and ``decode``, which any thread may call. An exception
    other than those named ends the engine.
    """

    def check(self, request: GroupRequest) -> None:
        """Raises ValueError for a request that could never run."""

    def check_row(self, row: NDArray[np.int32]) -> None:
        """Raises ValueError for a row that could never be scored."""

    def add(self, key: int, prompt_token_ids: list[int], seed: int | None, sampling: Sampling) -> None:
        """Adds one completion to the batch."""

    def step(self) -> Sequence[Produced]:
        """One decode step. Keys that were aborted do not appear."""

    def abort(self, keys: Sequence[int]) -> None:
        """Takes completions out of the batch."""

    def load(self, buckets: Sequence[Bucket], *, recompute: bool) -> None:
        """Makes the tensors the model's weights and, with ``recompute``, running completions forget their keys and values.
        Raises PushError, with the weights untouched, when the tensors do not fill the model exactly."""

    def score(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> tuple[list[TokenScores], list[Produced]]:
        """Scores rows in steps in which running completions take part; what those made comes back as well."""

    def sleep(self) -> int:
        """Gives the memory of weights and cache away; the bytes that became free on the device. Nothing is running."""

    def wake(self, what: Wake) -> None:
        """Takes memory again. Weights hold nothing until ``load``."""

    def decode(self, token_ids: Sequence[NDArray[np.int32]]) -> list[str]:
        """Texts without special tokens."""

    def close(self) -> None:
        """Frees the model's memory."""


class _Running:
    """One completion on its way. ``marks`` holds (first token, version, mixed), a new one for every swap it lives through."""

    __slots__ = ("finish", "group", "index", "key", "logps", "marks", "token_ids")

    def __init__(self, key: int, group: _OpenGroup, index: int) -> None:
        self.key = key
        self.group = group
        self.index = index
        self.token_ids: list[int] = []
        self.logps: list[float] = []
        self.marks: list[tuple[int, int, bool]] = []
        self.finish = Finish.LENGTH


class _OpenGroup:
    """A visit from its submission until its last completion ends."""

    __slots__ = ("admitted", "completions", "num_left", "num_queued", "prompt", "request", "submitted", "time_s", "unfinished")

    def __init__(self, request: GroupRequest, keys: itertools.count[int]) -> None:
        self.request = request
        self.prompt: list[int] = request.prompt_token_ids.tolist()
        self.completions = [_Running(next(keys), self, index) for index in range(request.group_size)]
        self.num_left = self.num_queued = request.group_size
        self.unfinished: tuple[int, ...] = ()
        self.submitted = self.admitted = time.monotonic()  # admitted: the last of its completions
        self.time_s = 0.0

    def is_late(self, now: float) -> bool:
        """Whether it is to be given out without the completions that have not ended."""
        rule = self.request.straggler
        if rule is None or self.num_queued or now - self.admitted < rule.after_s:
            return False
        return self.request.group_size - self.num_left >= rule.min_finished


class _Swap(NamedTuple):
    version: int
    manifest: Manifest
    buckets: list[Bucket]
    answer: Future[Any]


class SteppingEngine:
    """An Engine (rollout/engine.py) over any Stepper.

    ``build`` makes the stepper in the loop's thread; what it raises comes out of the constructor. ``first_version`` is that of
    the weights it starts with.
    """

    def __init__(self, name: str, build: Callable[[], Stepper], *, on_swap: OnSwap, max_running: int, first_version: int) -> None:
        self._name = name
        self._on_swap = on_swap
        self._max_running = max_running
        self._version = first_version
        self._receiver = PushReceiver()
        self._keys = itertools.count()
        # One lock for everything callers and the loop share; the rest belongs to the loop's thread alone.
        lock = threading.Lock()
        self._wake = threading.Condition(lock)
        self._grouped = threading.Condition(lock)
        self._commands: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._unanswered: set[Future[Any]] = set()
        self._open: dict[Visit, _OpenGroup] = {}
        self._queue: deque[_Running] = deque()
        self._ready: list[_OpenGroup] = []
        self._held: list[_OpenGroup] = []  # ended while paused
        self._sleep = SleepState(name)
        self._closing = False
        self._error: str | None = None
        # The loop's own.
        self._live: dict[int, _Running] = {}
        self._paused = False
        self._pending_swap: _Swap | None = None
        self._num_tokens = 0
        self._num_steps = 0
        self._last_step = time.monotonic()

        started: Future[Stepper] = Future()
        self._thread = threading.Thread(target=self._main, args=(build, started), name=f"engine-{name}", daemon=True)
        self._thread.start()
        self._stepper = started.result()

    # ---- for callers -------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            if request.seeds is not None and len(request.seeds) != request.group_size:
                raise ValueError(f"{request.visit}: {len(request.seeds)} seeds for {request.group_size} completions")
            self._stepper.check(request)
        with self._wake:
            self._raise_if_stopped()
            self._sleep.may_compute()
            known = {request.visit for request in requests}
            if len(known) < len(requests) or known & self._open.keys():
                raise ValueError(
                    f"visits submitted while the same are open: {sorted(known & self._open.keys()) or 'twice at once'}"
                )
            for request in requests:
                group = _OpenGroup(request, self._keys)
                self._open[request.visit] = group
                self._queue.extend(group.completions)
            self._wake.notify()

    def poll(self, timeout_s: float) -> list[Group]:
        with self._grouped:
            self._grouped.wait_for(lambda: self._ready or self._error, timeout_s)
            groups, self._ready = self._ready, []
            if not groups:
                self._raise_if_stopped()
        return [self._assemble(group) for group in groups]

    def pause(self) -> None:
        self._call(lambda: self._set_paused(True))

    def resume(self) -> None:
        self._call(lambda: self._set_paused(False))

    def receive(self, bucket: Bucket) -> None:
        self._receiver.add(bucket)

    def swap(self, version: int, manifest: Manifest) -> SwapReport:
        swap = _Swap(version, manifest, self._receiver.take(manifest), Future())
        return self._send(swap.answer, lambda: self._begin_swap(swap))

    def score_tokens(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> list[TokenScores]:
        if not temperature > 0:
            raise ValueError(f"rows are scored at a temperature above 0, not {temperature}")
        for row in rows:
            self._stepper.check_row(row)
        return self._call(lambda: self._score(rows, temperature))

    def sleep(self) -> SleepReport:
        return self._call(self._fall_asleep)

    def wake(self, what: Wake) -> None:
        self._call(lambda: self._wake_up(what))

    def cancel(self, visits: Sequence[Visit]) -> None:
        self._call(lambda: self._drop(set(visits)))

    def health(self) -> Health:
        num_running = len(self._live)
        stepping = num_running > 0 and not self._paused
        return Health(
            version=self._version,
            num_running=num_running,
            num_waiting=len(self._queue),
            num_tokens=self._num_tokens,
            num_steps=self._num_steps,
            last_step_age_s=time.monotonic() - self._last_step if stepping else 0.0,
        )

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise EngineError(f"engine {self._name}: the step in progress did not end within {_CLOSE_S:.0f} s of close")

    def _call(self, run: Callable[[], T]) -> T:
        answer: Future[T] = Future()
        return self._send(answer, lambda: answer.set_result(run()))

    def _send(self, answer: Future[T], command: Callable[[], None]) -> T:
        """Has ``command`` run between two steps and waits until somebody has answered."""
        with self._wake:
            self._raise_if_stopped()
            self._commands.append((answer, command))
            self._unanswered.add(answer)
            self._wake.notify()
        try:
            return answer.result()
        finally:
            with self._wake:
                self._unanswered.discard(answer)

    def _raise_if_stopped(self) -> None:
        if self._error is not None:
            raise EngineError(self._error)

    def _assemble(self, group: _OpenGroup) -> Group:
        tokens = [np.array(one.token_ids, np.int32) for one in group.completions]
        texts = self._stepper.decode(tokens)
        completions = []
        for one, token_ids, text in zip(group.completions, tokens, texts, strict=True):
            starts, versions, mixed = zip(*one.marks, strict=True)
            lengths = np.diff(starts, append=len(token_ids))
            completions.append(
                Completion(
                    index=one.index,
                    token_ids=token_ids,
                    roll_logp=np.array(one.logps, np.float32),
                    loss_mask=np.ones(len(token_ids), np.bool_),
                    versions=np.repeat(np.array(versions, np.int32), lengths),
                    mixed=np.repeat(np.array(mixed, np.bool_), lengths),
                    text=text,
                    finish=one.finish,
                )
            )
        request = group.request
        return Group(
            request.visit, request.prompt_token_ids, tuple(completions), self._name, group.time_s, unfinished=group.unfinished
        )

    # ---- the loop's thread -------------------------------------------------------------------------------------------

    def _main(self, build: Callable[[], Stepper], started: Future[Stepper]) -> None:
        try:
            stepper = build()
        except BaseException as error:  # it belongs to the thread that asked for the engine
            started.set_exception(error)
            return
        self._stepper = stepper
        started.set_result(stepper)
        reason = f"engine {self._name} is closed"
        try:
            while self._turn():
                pass
        except Exception as error:  # whatever it was, the model can no longer be trusted: every caller is told
            reason = f"engine {self._name} stopped: {type(error).__name__}: {error}"
        finally:
            with self._wake:
                self._error = reason
                unanswered = list(self._unanswered)
                self._grouped.notify_all()
            for answer in unanswered:
                if not answer.done():
                    answer.set_exception(EngineError(reason))
            stepper.close()

    def _turn(self) -> bool:
        """One command, or one step, or a sleep until there is either. False when the engine is to end."""
        with self._wake:
            while not (self._closing or self._commands or self._may_step()):
                self._wake.wait()
            if self._closing:
                return False
            command = self._commands.popleft() if self._commands else None
            admitted = self._admit() if command is None else []
        if command is not None:
            self._execute(*command)
        else:
            for one in admitted:
                request = one.group.request
                seed = None if request.seeds is None else request.seeds[one.index]
                self._stepper.add(one.key, one.group.prompt, seed, request.sampling)
            self._take(self._stepper.step())
            self._num_steps += 1
            self._last_step = time.monotonic()
            self._cut_stragglers(self._last_step)
        if self._pending_swap is not None and not self._live:
            swap, self._pending_swap = self._pending_swap, None
            self._execute(swap.answer, lambda: self._swap(swap))
        return True

    def _may_step(self) -> bool:
        if self._pending_swap is not None:
            return bool(self._live)
        return not self._paused and bool(self._live or self._queue)

    def _admit(self) -> list[_Running]:
        if self._pending_swap is not None:
            return []
        if not self._live:
            self._last_step = time.monotonic()  # the age of the last step counts from the start of this spell of work
        admitted = []
        while self._queue and len(self._live) < self._max_running:
            one = self._queue.popleft()
            one.marks.append((0, self._version, False))
            self._live[one.key] = one
            one.group.num_queued -= 1
            one.group.admitted = time.monotonic()
            admitted.append(one)
        return admitted

    def _execute(self, answer: Future[Any], command: Callable[[], None]) -> None:
        try:
            command()
        except (PushError, ValueError) as error:  # refusals: the engine is as it was
            answer.set_exception(error)

    def _take(self, produced: Sequence[Produced]) -> None:
        """Files what a step made. All of it was made by the current version."""
        live = self._live
        finished: list[_OpenGroup] = []
        for key, token_ids, logps, finish in produced:
            one = live[key]
            one.token_ids += token_ids
            one.logps += logps
            self._num_tokens += len(token_ids)
            if finish is not None:
                del live[key]
                one.finish = finish
                one.group.num_left -= 1
                if one.group.num_left == 0:
                    finished.append(one.group)
        if finished:
            self._give_out(finished)

    def _give_out(self, groups: list[_OpenGroup]) -> None:
        now = time.monotonic()
        with self._grouped:
            for group in groups:
                group.time_s = now - group.submitted
                del self._open[group.request.visit]
            (self._held if self._paused else self._ready).extend(groups)
            self._grouped.notify_all()

    def _cut_stragglers(self, now: float) -> None:
        """Gives out the groups whose last completions take too long, without these."""
        late = {one.group for one in self._live.values() if one.group.is_late(now)}
        if not late:
            return
        keys = [key for key, one in self._live.items() if one.group in late]
        self._stepper.abort(keys)
        cut = [self._live.pop(key) for key in keys]
        for group in late:
            group.unfinished = tuple(len(one.token_ids) for one in cut if one.group is group)
            group.completions = [one for one in group.completions if one not in cut]
        self._give_out(list(late))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._last_step = time.monotonic()
        if not paused:
            with self._grouped:
                self._ready += self._held
                self._held = []
                self._grouped.notify_all()

    def _begin_swap(self, swap: _Swap) -> None:
        if self._pending_swap is not None:
            newer = f"a swap of generation {swap.manifest.generation} came before running requests ended"
            self._pending_swap.answer.set_exception(PushError(f"{newer}; the running weights are untouched"))
            self._pending_swap = None
        if self._on_swap is OnSwap.FINISH and self._live:
            self._pending_swap = swap
        else:
            self._swap(swap)

    def _swap(self, swap: _Swap) -> None:
        start = time.monotonic()
        self._sleep.may_swap()
        self._stepper.load(swap.buckets, recompute=self._on_swap is OnSwap.RECOMPUTE)
        self._sleep.swapped()
        self._version = swap.version
        mixed = self._on_swap is OnSwap.KEEP
        for one in self._live.values():
            one.marks.append((len(one.token_ids), swap.version, mixed))
        num_live = len(self._live)
        swap.answer.set_result(
            SwapReport(
                version=swap.version,
                num_tensors=len(swap.manifest.specs),
                num_bytes=swap.manifest.num_bytes,
                num_recomputed=0 if mixed else num_live,
                num_mixed=num_live if mixed else 0,
                time_s=time.monotonic() - start,
            )
        )

    def _fall_asleep(self) -> SleepReport:
        start = time.monotonic()
        with self._wake:  # nobody submits between the look and the mark
            self._sleep.may_sleep(len(self._live) + len(self._queue))
            self._sleep.slept()
        self._version = -1
        return SleepReport(self._stepper.sleep(), time.monotonic() - start)

    def _wake_up(self, what: Wake) -> None:
        self._sleep.may_wake(what)
        self._stepper.wake(what)
        self._sleep.woke(what)

    def _score(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> list[TokenScores]:
        self._sleep.may_compute()
        scores, produced = self._stepper.score(rows, temperature)
        self._take(produced)
        return scores

    def _drop(self, visits: set[Visit]) -> None:
        keys = [key for key, one in self._live.items() if one.group.request.visit in visits]
        if keys:
            self._stepper.abort(keys)
        for key in keys:
            del self._live[key]
        with self._wake:
            for visit in visits:
                self._open.pop(visit, None)
            self._queue = deque(one for one in self._queue if one.group.request.visit not in visits)
            self._ready = [group for group in self._ready if group.request.visit not in visits]
            self._held = [group for group in self._held if group.request.visit not in visits]
