"""A push: the learner's weights onto every engine, with proof.

A push is a *generation*: buckets (k + 1 is gathered while k travels), manifest, swap. When a worker drops out, the generation
is aborted for all, and a new one sends the same version to those that have not swapped it yet.

| a worker is | when                                  | then                                                        |
|-------------|---------------------------------------|-------------------------------------------------------------|
| refused     | it, or its proof, rejects the push    | the same version once more, then a new engine, then the end |
| silent      | a bucket, swap or score is late       | killed and replaced                                         |
| dead        | Ray says so, or its engine stopped    | replaced                                                    |

A new engine starts from random weights, so a tensor that no push reaches is off by nats. It gets visits only after three pushes
(true, scaled, true again) whose effect on fixed tokens is measured; that happens while the learner rests at the engines' version.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.exceptions import RayError

from configs.schema import DeadlinesConfig, Dtype
from orchestrator.errors import RunStopped
from orchestrator.fleet import Worker, words
from orchestrator.handles import MOST_REPLACEMENTS, StepReport
from orchestrator.proof import (
    MOST_UNCHANGED,
    SCALE,
    Agreement,
    Baseline,
    FixedTokens,
    LoadingProof,
    Scores,
    manifest_problem,
    num_changed,
)
from orchestrator.ranks import RayLearner
from orchestrator.waits import DeadlinePassed, Waits
from orchestrator.workers import Crew
from rollout.engine import PushError, SwapReport
from rollout.weights import Manifest

UNPROVEN = -1  # version of an engine that holds scaled weights, as of one that holds random ones


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str  # refused, silent or dead
    text: str


@dataclass(frozen=True, slots=True)
class _Fault:
    """Of the sender."""

    text: str
    tolerated: bool  # where it stays after a second gather


@dataclass(slots=True)
class _Delivery:
    """What came of sending one version: filled generation by generation."""

    manifest: Manifest | None = None
    reports: dict[str, SwapReport] = field(default_factory=dict)  # by worker
    num_generations: int = 0
    send_s: float = 0.0


class RayPusher:
    """Pushes from the learner to every worker of a crew through Ray's object store (the ``local`` transport)."""

    def __init__(
        self,
        learner: RayLearner,
        crew: Crew,
        waits: Waits,
        deadlines: DeadlinesConfig,
        event: Callable[..., None],
        *,
        dtype: Dtype,
        tokens: FixedTokens,
        swap_waits: bool = False,
    ) -> None:
        """``tokens`` are those of the proof. ``swap_waits``: engines swap only when their running completions have ended
        (``rollout.on_swap=finish``), so a swap may take ``generate_s`` more."""
        self._learner = learner
        self._crew = crew
        self._waits = waits
        self._deadlines = deadlines
        self._event = event
        self._dtype = dtype
        self._tokens = tokens
        self._swap_wait_s = deadlines.generate_s if swap_waits else 0.0
        self._lock = asyncio.Lock()
        self._still = asyncio.Event()  # the learner rests at the engines' version
        self._version = UNPROVEN
        self._generation = 0
        self._manifest: Manifest | None = None  # of the last version that was delivered
        self._num_unchanged = 0  # pushes in a row that changed nothing after a step that moved
        self._baseline = Baseline(dtype)
        self._rungs: Counter[int] = Counter()  # by slot: 1 after a retry, 2 after a replacement
        self.on_delivered: Callable[[], Awaitable[None]] | None = None  # before an engine computes with what a push brought
        crew.spawn(self._tend())

    @property
    def digest(self) -> str:
        """Of all weights that every engine runs: equal weights give equal digests."""
        return f"{self._manifest.digest:016x}" if self._manifest else ""

    async def hold(self) -> None:
        """Before the learner is busy: returns once no new worker is being proven, and lets none begin until the next push or
        ``go_on``."""
        self._still.clear()
        async with self._lock:
            pass

    def go_on(self) -> None:
        """Ends a hold in which the weights did not change."""
        self._still.set()

    async def push(self, version: int, report: StepReport | None = None) -> dict[str, float]:
        """The learner's weights on every engine as ``version``; ``report`` is of the step that made them.

        One push after another: a second call waits for the first. Returns once at least one worker is proven at ``version``. Raises
        RunStopped with both numbers where a proof fails for good, DeadlinePassed where the survivors do not get there in time.
        """
        async with self._lock:
            self._still.clear()
            num_lost = self._crew.num_lost
            moved = report is not None and report.moved
            delivery = await self._in_time(version, self._deliver(version, self._crew.proven, moved=moved))
            changed = self._file(delivery, moved=moved)
            if self.on_delivered is not None:
                await self.on_delivered()
            self._version = version
            for worker in self._crew.proven:
                del self._rungs[self._crew.slot(worker)]
            if report is not None:
                await self._look_into(version, report.metrics.get("mismatch/same_version"))
                self._crew.step_proven()
            while not self._crew.proven:
                arrival = self._crew.fleet.or_failure(asyncio.create_task(self._crew.arrived.wait()))
                deadline_s = MOST_REPLACEMENTS * (self._deadlines.close_s + self._deadlines.start_s)
                await self._waits.wait(arrival, owner="rollout workers", name="a new one to start", deadline_s=deadline_s)
                await self._in_time(version, self._admit(version))
            self._still.set()
            return _metrics(delivery) | changed | {"push/num_replaced": float(self._crew.num_lost - num_lost)}

    async def _in_time(self, version: int, work: Awaitable[Any]) -> Any:
        try:
            deadline_s = self._deadlines.push_s + self._swap_wait_s
            return await self._waits.wait(work, owner="push", name=f"version {version}", deadline_s=deadline_s)
        except RayError as error:
            raise RunStopped(f"the push of version {version} failed: {words(error)}") from error

    # ---- generations ------------------------------------------------------------------------------------------------

    async def _deliver(self, version: int, workers: Sequence[Worker], *, moved: bool = False, scale: float = 1.0) -> _Delivery:
        """Sends, generation after generation, until every worker has swapped or is lost."""
        delivery = _Delivery()
        waiting = list(workers)
        num_faults = 0
        while waiting:
            failures = await self._send(version, waiting, scale, delivery)
            fault = None if failures or scale != 1 else self._sender_fault(delivery.manifest, moved=moved)
            if fault:
                num_faults += 1
                if num_faults == 1:
                    self._event("push_retried", version=version, worker="learner", reason=fault.text)
                    continue
                if not fault.tolerated:
                    raise RunStopped(
                        f"the push of version {version} is wrong, and so it was when it was gathered anew: {fault.text}"
                    )
                self._event("push_unchanged", version=version, reason=fault.text)
            if not failures:
                failures = await self._swap(version, waiting, delivery)
            for worker, failure in failures.items():
                if failure.kind == "refused":
                    self._step_down(worker, version, failure.text)
                else:
                    self._crew.lose(worker, failure.kind, failure.text)
            waiting = [worker for worker in waiting if worker.name not in delivery.reports and self._crew.has(worker)]
        return delivery

    async def _send(self, version: int, workers: Sequence[Worker], scale: float, delivery: _Delivery) -> dict[Worker, _Failure]:
        """Every bucket to every worker; the first failure ends it for all of them, and the learner gathers to its end."""
        started = time.monotonic()
        self._generation += 1
        delivery.num_generations += 1
        arriving: asyncio.Future[dict[Worker, _Failure]] | None = None
        failures: dict[Worker, _Failure] = {}
        index = 0
        names = [worker.name for worker in workers]
        async with contextlib.aclosing(self._learner.buckets(self._generation, scale, names)) as buckets:
            async for bucket in buckets:
                failures = await arriving if arriving else {}  # at most two buckets are under way
                if failures:
                    break
                asks = {worker: worker.actor.receive.remote(bucket) for worker in workers}
                name = f"bucket {index} of generation {self._generation}"
                arriving = asyncio.ensure_future(self._failures(asks, name, self._deadlines.receive_s))
                index += 1
            else:
                failures = await arriving if arriving else {}
        delivery.send_s += time.monotonic() - started
        if failures:
            self._event(
                "push_aborted",
                version=version,
                generation=self._generation,
                reasons={worker.name: failure.text for worker, failure in failures.items()},
            )
        else:
            delivery.manifest = await self._learner.manifest()
        return failures

    async def _swap(self, version: int, workers: Sequence[Worker], delivery: _Delivery) -> dict[Worker, _Failure]:
        asks = {worker: worker.actor.swap.remote(version, delivery.manifest) for worker in workers}
        answers = await self._answers(asks, f"swap to version {version}", self._deadlines.receive_s + self._swap_wait_s)
        delivery.reports |= {w.name: answer for w, answer in answers.items() if not isinstance(answer, _Failure)}
        return {worker: answer for worker, answer in answers.items() if isinstance(answer, _Failure)}

    def _sender_fault(self, manifest: Manifest | None, *, moved: bool) -> _Fault | None:
        """What is wrong with a push that is consistent in itself."""
        before = self._manifest
        if manifest is None or before is None:
            return None  # at the first push the engine's rehearsal decides whether the tensors fill the model
        problem = manifest_problem(before, manifest)
        if problem:
            return _Fault(problem, tolerated=False)
        if moved and num_changed(before, manifest) == 0:
            text = f"0 of {len(manifest.specs)} tensors changed although the update moved the weights"
            return _Fault(text, tolerated=self._num_unchanged < MOST_UNCHANGED[self._dtype])
        return None

    def _file(self, delivery: _Delivery, *, moved: bool) -> dict[str, float]:
        """Keeps the manifest for the next push; the share of tensors that changed."""
        before, after = self._manifest, delivery.manifest
        if after is None:
            return {}  # there was no engine to send to
        self._manifest = after
        if before is None:
            return {}
        num = num_changed(before, after)
        if moved:  # the same weights are sent again where engines had to give up theirs
            self._num_unchanged = self._num_unchanged + 1 if num == 0 else 0
        return {"push/changed_frac": num / len(after.specs)}

    # ---- proofs -----------------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Proves new workers whenever the learner rests at the engines' version."""
        while True:
            await self._crew.arrived.wait()
            await self._still.wait()
            async with self._lock:
                if self._still.is_set():
                    await self._in_time(self._version, self._admit(self._version))

    async def _admit(self, version: int) -> None:
        """Pushes to the new workers until each is proven or lost."""
        self._crew.arrived.clear()
        while self._crew.new:
            workers = tuple(self._crew.new)
            delivery, first = await self._push_and_score(version, workers)
            learner = await self._learner.score_tokens(self._tokens.rows, self._tokens.temperature)
            _, scaled = await self._push_and_score(UNPROVEN, tuple(first), scale=SCALE)
            delivery, back = await self._push_and_score(version, tuple(scaled))
            self._manifest = delivery.manifest or self._manifest  # a push that nobody survived left that of another version
            for worker, scores in back.items():
                if not self._crew.has(worker):
                    continue  # its stream ended since it answered
                proof = LoadingProof.of(learner, first[worker], scaled[worker], scores)
                problem = proof.problem(self._dtype)
                if problem:
                    self._step_down(worker, version, problem)
                else:
                    del self._rungs[self._crew.slot(worker)]
                    self._event("proven", worker=worker.name, version=version, **proof.figures())
                    await self._crew.prove(worker)

    async def _push_and_score(
        self, version: int, workers: Sequence[Worker], *, scale: float = 1.0
    ) -> tuple[_Delivery, dict[Worker, Scores]]:
        delivery = await self._deliver(version, workers, scale=scale)
        return delivery, await self._score([worker for worker in workers if worker.name in delivery.reports])

    async def _score(self, workers: Sequence[Worker]) -> dict[Worker, Scores]:
        """Log-probabilities of the fixed tokens; workers that do not give them are lost."""
        asks = {worker: worker.actor.score_tokens.remote(self._tokens.rows, self._tokens.temperature) for worker in workers}
        scores: dict[Worker, Scores] = {}
        for worker, answer in (await self._answers(asks, "scores of the fixed tokens", self._deadlines.receive_s)).items():
            if isinstance(answer, _Failure):
                self._crew.lose(worker, answer.kind, answer.text)
            else:
                scores[worker] = [row.logp for row in answer]
        return scores

    async def _look_into(self, version: int, mismatch: float | None) -> None:
        """Proves every engine again where the tokens of the step say that engine and learner have come apart."""
        if not self._baseline.is_beyond(mismatch):
            return
        self._event("mismatch", version=version, value=mismatch, baseline=self._baseline.value, allowed=self._baseline.allowed)
        learner = await self._in_time(version, self._learner.score_tokens(self._tokens.rows, self._tokens.temperature))
        for worker, scores in (await self._score(self._crew.proven)).items():
            agreement = Agreement.of(scores, learner)
            problem = agreement.problem(self._dtype)
            self._event("proven_again", worker=worker.name, version=version, problem=problem, **asdict(agreement))
            if problem and self._crew.has(worker):
                await self._crew.doubt(worker)
                self._step_down(worker, version, problem)
        await self._in_time(version, self._admit(version))

    def _step_down(self, worker: Worker, version: int, problem: str) -> None:
        """The next rung for a worker that refused, or whose proof failed: once more, a new engine, the end of the run."""
        if not self._crew.has(worker):
            return  # lost meanwhile: the next engine of its slot answers for itself
        slot = self._crew.slot(worker)
        self._rungs[slot] += 1
        if self._rungs[slot] == 1:
            self._event("push_retried", version=version, worker=worker.name, reason=problem)
        elif self._rungs[slot] == 2:
            self._crew.lose(worker, "refused", problem)
        else:
            raise RunStopped(
                f"{worker.name} fails at version {version}, as did the engine before it and the push before that: {problem}"
            )

    # ---- asking workers ---------------------------------------------------------------------------------------------

    async def _failures(self, asks: Mapping[Worker, Awaitable[Any]], name: str, deadline_s: float) -> dict[Worker, _Failure]:
        answers = await self._answers(asks, name, deadline_s)
        return {worker: answer for worker, answer in answers.items() if isinstance(answer, _Failure)}

    async def _answers(self, asks: Mapping[Worker, Awaitable[Any]], name: str, deadline_s: float) -> dict[Worker, Any]:
        """Each worker's answer, or how it failed."""
        answers = await asyncio.gather(*(self._answer(worker, ask, name, deadline_s) for worker, ask in asks.items()))
        return dict(zip(asks, answers, strict=True))

    async def _answer(self, worker: Worker, ask: Awaitable[Any], name: str, deadline_s: float) -> Any:
        try:
            return await self._waits.wait(ask, owner=worker.name, name=name, deadline_s=deadline_s)
        except DeadlinePassed as error:
            return _Failure("silent", str(error))
        except PushError as error:
            return _Failure("refused", words(error))
        except RayError as error:
            return _Failure("dead", words(error))


def _metrics(delivery: _Delivery) -> dict[str, float]:
    reports = delivery.reports.values()
    return {
        "push/sent_bytes": float(delivery.manifest.num_bytes) if delivery.manifest else 0.0,
        "push/num_generations": float(delivery.num_generations),
        "push/num_recomputed": float(sum(report.num_recomputed for report in reports)),
        "push/num_mixed": float(sum(report.num_mixed for report in reports)),
        "time/push_send_s": delivery.send_s,
        "time/swap_s": max((report.time_s for report in reports), default=0.0),
    }
