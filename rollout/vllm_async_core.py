"""The ``async_core`` form of the engine contract. **Written, untested**: against the interfaces of vLLM 0.32, never run.

vLLM's own core runs in its own process, where decode overlaps scheduling; pipeline and data parallel engines need it. The
engine is not at rest between two steps here, so a swap goes through vLLM's own pause (mode ``keep``: requests freeze in the
queue), and versions come from vLLM's tags: it labels each output token with the weight version that sampled it, and that
changes only while generation is paused.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from rollout.engine import (
    Engine,
    EngineError,
    GroupRequest,
    Health,
    OnSwap,
    PushError,
    SleepReport,
    SwapReport,
    TokenScores,
    Wake,
)
from rollout.receiving import PushReceiver, some_lines
from rollout.records import Completion, Finish, Group, Visit
from rollout.sleeping import SleepState
from rollout.tokenizer import load_tokenizer
from rollout.vllm_in_process import (
    SLEEP_LEVEL,
    WAKE_TAGS,
    EngineSpec,
    check_request,
    check_row,
    engine_args,
    free_bytes,
    sampling_params,
    set_prompt_temperature,
)
from rollout.vllm_weights import bucket_tensors, load_tensors
from rollout.weights import Bucket, Manifest

__all__ = ["EngineSpec", "make_engine"]

T = TypeVar("T")


def make_engine(spec: EngineSpec) -> Engine:
    """Starts the engine and its core process."""
    return AsyncCoreEngine(spec)


class AsyncCoreEngine:
    """An Engine (rollout/engine.py) over AsyncLLM, whose event loop runs in a thread of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        # Weights reach the core's workers as pickled calls; both ends are this program.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._spec = spec
        self._tokenizer = load_tokenizer(spec.tokenizer_path, spec.trust_remote_code)
        self._receiver = PushReceiver()
        self._sleep = SleepState(spec.name)
        self._finished: queue.Queue[Group | BaseException] = queue.Queue()
        self._tasks: dict[Visit, asyncio.Task[None]] = {}
        self._request_ids = itertools.count()
        self._version = -1 if spec.load_format == "dummy" else 0
        self._num_swaps = 0
        self._num_live = 0
        self._num_tokens = 0
        self._last_output = time.monotonic()
        self._paused = False
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._admitting = asyncio.Event()
        self._idle = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"engine-{spec.name}", daemon=True)
        self._thread.start()
        self._llm: AsyncLLM = self._run(self._start())
        self._vocab_size: int = self._llm.model_config.get_vocab_size()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            check_request(request, self._spec.max_model_tokens, self._vocab_size)
        self._run(self._begin(requests))

    def poll(self, timeout_s: float) -> list[Group]:
        try:
            groups = [self._finished.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._finished.empty():
            groups.append(self._finished.get_nowait())
        for group in groups:
            if not isinstance(group, Group):
                raise EngineError(f"engine {self._spec.name} stopped: {type(group).__name__}: {group}")
        return [group for group in groups if isinstance(group, Group)]

    def pause(self) -> None:
        self._paused = True
        self._run(self._llm.pause_generation(mode="keep", clear_cache=False))

    def resume(self) -> None:
        self._paused = False
        self._run(self._llm.resume_generation())

    def receive(self, bucket: Bucket) -> None:
        self._receiver.add(bucket)

    def swap(self, version: int, manifest: Manifest) -> SwapReport:
        return self._run(self._swap(version, manifest, self._receiver.take(manifest)))

    def score_tokens(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> list[TokenScores]:
        for row in rows:
            check_row(row, self._spec.max_model_tokens, self._vocab_size)
        return self._run(self._score(rows, temperature))

    def sleep(self) -> SleepReport:
        return self._run(self._fall_asleep())

    def wake(self, what: Wake) -> None:
        self._run(self._wake_up(what))

    def cancel(self, visits: Sequence[Visit]) -> None:
        self._run(self._cancel(visits))

    def health(self) -> Health:
        return Health(
            version=self._version,
            num_running=self._num_live,
            num_waiting=0,  # vLLM's own queue, in its process
            num_tokens=self._num_tokens,
            num_steps=0,  # likewise
            last_step_age_s=time.monotonic() - self._last_output if self._num_live and not self._paused else 0.0,
        )

    def close(self) -> None:
        if self._closed:
            return
        self._run(self._cancel(list(self._tasks)))
        self._closed = True
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30.0)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise EngineError(f"engine {self._spec.name} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- in the event loop -------------------------------------------------------------------------------------------

    async def _start(self) -> AsyncLLM:
        self._admitting.set()
        self._idle.set()
        args = engine_args(self._spec)
        fields = {name: value for name, value in vars(args).items() if name != "async_scheduling"}
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**fields))

    async def _begin(self, requests: Sequence[GroupRequest]) -> None:
        self._sleep.may_compute()
        for request in requests:
            if request.straggler is not None:
                raise ValueError(f"{request.visit}: this engine gives out whole groups only")
            if request.visit in self._tasks:
                raise ValueError(f"visits submitted while the same are open: {request.visit}")
            self._tasks[request.visit] = asyncio.create_task(self._group(request))

    async def _group(self, request: GroupRequest) -> None:
        start = time.monotonic()
        try:
            work = [self._complete(request, index) for index in range(request.group_size)]
            completions = tuple(await asyncio.gather(*work))
            group = Group(request.visit, request.prompt_token_ids, completions, self._spec.name, time.monotonic() - start, ())
            self._finished.put(group)
        except Exception as error:  # told to whoever polls
            self._finished.put(error)
        finally:
            self._tasks.pop(request.visit, None)

    async def _complete(self, request: GroupRequest, index: int) -> Completion:
        await self._admitting.wait()
        params = sampling_params(request.sampling, None if request.seeds is None else request.seeds[index])
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._num_live += 1
        self._idle.clear()
        try:
            output = await self._last(request.prompt_token_ids, params)
        finally:
            self._num_live -= 1
            if self._num_live == 0:
                self._idle.set()
        made = output.outputs[0]
        token_ids = np.array(made.token_ids, np.int32)
        self._num_tokens += len(token_ids)
        self._last_output = time.monotonic()
        versions = np.full(len(token_ids), self._version, np.int32)
        for span in made.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        logps = [position[token].logprob for position, token in zip(made.logprobs or (), made.token_ids, strict=True)]
        return Completion(
            index=index,
            token_ids=token_ids,
            roll_logp=np.array(logps, np.float32),
            loss_mask=np.ones(len(token_ids), np.bool_),
            versions=versions,
            mixed=(versions != versions[0]) & (self._spec.on_swap is OnSwap.KEEP),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            finish=Finish(made.finish_reason),
        )

    async def _last(self, token_ids: NDArray[np.int32], params: SamplingParams) -> RequestOutput:
        prompt = tokens_input(token_ids.tolist(), cache_salt=str(self._num_swaps))
        last = None
        async for output in self._llm.generate(prompt, params, request_id=str(next(self._request_ids))):
            last = output
        if last is None:
            raise EngineError("vLLM ended a request without an output")
        return last

    async def _swap(self, version: int, manifest: Manifest, buckets: list[Bucket]) -> SwapReport:
        start = time.monotonic()
        self._sleep.may_swap()
        if self._spec.on_swap is OnSwap.FINISH:
            self._admitting.clear()
            if self._paused:
                await self._llm.resume_generation()
            await self._idle.wait()
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        problems = await self._llm.collective_rpc(load_tensors, args=(bucket_tensors(buckets),))
        if not any(problems):
            self._num_swaps += 1
            await self._llm.reset_prefix_cache(reset_running_requests=self._spec.on_swap is OnSwap.RECOMPUTE)
            await self._llm.update_weight_version(str(version))
            self._version = version
            self._sleep.swapped()
        self._admitting.set()
        num_live = self._num_live
        if not self._paused:
            await self._llm.resume_generation()
        if any(problems):
            lines = sorted({line for part in problems for line in part})
            raise PushError(f"the tensors do not fill the model; the running weights are untouched: {some_lines(lines)}")
        mixed = num_live if self._spec.on_swap is OnSwap.KEEP else 0
        time_s = time.monotonic() - start
        return SwapReport(version, len(manifest.specs), manifest.num_bytes, num_live - mixed, mixed, time_s)

    async def _score(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> list[TokenScores]:
        self._sleep.may_compute()
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
        await self._llm.collective_rpc(set_prompt_temperature, args=(temperature,))
        if self._paused:
            await self._llm.resume_generation()
        outputs = await asyncio.gather(*(self._last(row, params) for row in rows))
        if self._paused:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        scores = []
        for row, output in zip(rows, outputs, strict=True):
            positions = (output.prompt_logprobs or [])[1:]  # nothing predicts the first token
            found = [position[token] for position, token in zip(positions, row[1:].tolist(), strict=True) if position]
            scores.append(
                TokenScores(np.array([f.logprob for f in found], np.float32), np.array([f.rank for f in found], np.int32))
            )
        return scores

    async def _fall_asleep(self) -> SleepReport:
        start = time.monotonic()
        self._sleep.may_sleep(len(self._tasks))
        self._sleep.slept()
        self._version = -1
        free = sum(await self._llm.collective_rpc(free_bytes))
        await self._llm.sleep(SLEEP_LEVEL)
        return SleepReport(sum(await self._llm.collective_rpc(free_bytes)) - free, time.monotonic() - start)

    async def _wake_up(self, what: Wake) -> None:
        self._sleep.may_wake(what)
        await self._llm.wake_up([WAKE_TAGS[what]])
        self._sleep.woke(what)

    async def _cancel(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            if task := self._tasks.get(visit):
                task.cancel()
