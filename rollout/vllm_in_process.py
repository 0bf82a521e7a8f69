"""vLLM's engine inside this process, as the stepper of the step loop.

``async_scheduling`` is off and asserted: only then is the engine at rest between two steps, with no batch already launched,
so that weights can be swapped there and every token belongs to one version. The engine's core is driven directly, below
vLLM's detokenizer and output objects, which keeps the Python work a token small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from rollout.engine import Engine, EngineError, GroupRequest, OnSwap, PushError, Sampling, TokenScores, Wake
from rollout.receiving import some_lines
from rollout.records import Finish
from rollout.stepping import Produced, SteppingEngine
from rollout.tokenizer import load_tokenizer
from rollout.vllm_weights import bucket_tensors, load_tensors
from rollout.weights import Bucket

_SCORE_ROWS = 16  # rows scored at once; each holds logits of its whole length
_MIN_BATCH_TOKENS = 8192  # of one prefill step
SLEEP_LEVEL = 2  # of vLLM's: weights and cache are thrown away, since every wake is followed by a push
WAKE_TAGS = {Wake.WEIGHTS: "weights", Wake.CACHE: "kv_cache"}
_FINISH = {FinishReason.STOP: Finish.STOP, FinishReason.LENGTH: Finish.LENGTH}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is made of."""

    name: str  # of the worker, written into its groups
    model_path: str  # a model's folder or hub name; with load_format=dummy only its config is read
    tokenizer_path: str
    dtype: str  # float32 or bfloat16
    seed: int  # of unseeded sampling and of random start weights
    max_model_tokens: int  # longest prompt plus completion
    max_running: int  # completions decoded at once
    cache_gib: float  # key and value cache on CPU
    gpu_memory_share: float  # of a GPU's memory that weights and cache may take
    tensor_parallel_size: int
    on_swap: OnSwap
    trust_remote_code: bool
    load_format: str = "dummy"  # random start weights, so that a tensor no push reaches shows; "auto" loads the model's own
    sleeps: bool = False  # gives a GPU's memory away between its turns (cluster.placement=colocated)


def make_engine(spec: EngineSpec) -> Engine:
    """Starts the engine; its version is -1 until the first swap, or 0 where it loaded the model's own weights.

    The process must have been started with ``rollout.engine.engine_environment``; raises EngineError otherwise.
    """
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0" or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise EngineError(
            "an in-process engine needs VLLM_ENABLE_V1_MULTIPROCESSING=0 and VLLM_USE_V2_MODEL_RUNNER=0 in the environment "
            "of its process: start it with rollout.engine.engine_environment()"
        )
    return SteppingEngine(
        spec.name,
        lambda: VllmStepper(spec),
        on_swap=spec.on_swap,
        max_running=spec.max_running,
        first_version=-1 if spec.load_format == "dummy" else 0,
    )


class VllmStepper:
    """The Stepper of rollout/stepping.py over one vLLM engine core."""

    def __init__(self, spec: EngineSpec) -> None:
        self._tokenizer = load_tokenizer(spec.tokenizer_path, spec.trust_remote_code)
        self._engine = LLMEngine.from_engine_args(engine_args(spec), enable_multiprocessing=False)
        self._core = self._engine.engine_core
        if self._core.engine_core.batch_queue is not None:
            raise EngineError("vLLM schedules ahead (batch_queue is set): it would not be at rest between two steps")
        self._max_model_tokens = spec.max_model_tokens
        self._vocab_size: int = self._engine.model_config.get_vocab_size()
        self._num_swaps = 0
        self._num_scored = 0

    def check(self, request: GroupRequest) -> None:
        check_request(request, self._max_model_tokens, self._vocab_size)

    def check_row(self, row: NDArray[np.int32]) -> None:
        check_row(row, self._max_model_tokens, self._vocab_size)

    def add(self, key: int, prompt_token_ids: list[int], seed: int | None, sampling: Sampling) -> None:
        self._add(str(key), prompt_token_ids, sampling_params(sampling, seed))

    def _add(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        self._core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=token_ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                # Of the swap, not of the version: the same version may be pushed twice.
                cache_salt=str(self._num_swaps),
                data_parallel_rank=None,
            )
        )

    def step(self) -> list[Produced]:
        return [_produced(output) for output in self._core.get_output().outputs]

    def abort(self, keys: Sequence[int]) -> None:
        self._core.abort_requests([str(key) for key in keys])

    def load(self, buckets: Sequence[Bucket], *, recompute: bool) -> None:
        problems = self._core.collective_rpc(load_tensors, args=(bucket_tensors(buckets),))
        if any(problems):
            lines = sorted({line for lines in problems for line in lines})
            raise PushError(f"the tensors do not fill the model; the running weights are untouched: {some_lines(lines)}")
        self._num_swaps += 1
        # With ``recompute`` this preempts running completions; without it, it does nothing while there are any (then the
        # salt keeps new requests off the old blocks).
        self._core.reset_prefix_cache(reset_running_requests=recompute)

    def score(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> tuple[list[TokenScores], list[Produced]]:
        scores: list[TokenScores] = []
        produced: list[Produced] = []
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False, skip_clone=True
        )
        self._core.collective_rpc(set_prompt_temperature, args=(temperature,))
        for start in range(0, len(rows), _SCORE_ROWS):
            waiting: dict[str, TokenScores | None] = {}
            for row in rows[start : start + _SCORE_ROWS]:
                self._num_scored += 1
                waiting[f"score-{self._num_scored}"] = None
                self._add(f"score-{self._num_scored}", row.tolist(), params)
            while None in waiting.values():
                for output in self._core.get_output().outputs:
                    if output.request_id in waiting:
                        waiting[output.request_id] = _token_scores(output)
                    else:
                        produced.append(_produced(output))
            scores += [score for score in waiting.values() if score is not None]
        return scores, produced

    def sleep(self) -> int:
        free = sum(self._core.collective_rpc(free_bytes))
        self._core.sleep(SLEEP_LEVEL)
        return sum(self._core.collective_rpc(free_bytes)) - free

    def wake(self, what: Wake) -> None:
        self._core.wake_up([WAKE_TAGS[what]])

    def decode(self, token_ids: Sequence[NDArray[np.int32]]) -> list[str]:
        return self._tokenizer.batch_decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def close(self) -> None:
        self._core.shutdown()


def check_request(request: GroupRequest, max_model_tokens: int, vocab_size: int) -> None:
    """Raises ValueError for a request that an engine could never run."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if request.group_size < 1 or sampling.max_new_tokens < 1:
        raise ValueError(f"{request.visit}: {request.group_size} completions of {sampling.max_new_tokens} tokens")
    if len(prompt) < 1 or len(prompt) + sampling.max_new_tokens > max_model_tokens:
        raise ValueError(
            f"{request.visit}: {len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones do not fit an engine for "
            f"1 to {max_model_tokens} tokens (rollout.max_model_tokens)"
        )
    _check_ids(prompt, vocab_size)
    try:
        sampling_params(sampling, None)
    except VLLMValidationError as error:
        raise ValueError(f"{request.visit}: {error}") from error


def check_row(row: NDArray[np.int32], max_model_tokens: int, vocab_size: int) -> None:
    """Raises ValueError for a row that an engine could never score."""
    if not 2 <= len(row) <= max_model_tokens:
        raise ValueError(f"a row of {len(row)} tokens cannot be scored: 2 to {max_model_tokens} (rollout.max_model_tokens)")
    _check_ids(row, vocab_size)


def _check_ids(token_ids: NDArray[np.int32], vocab_size: int) -> None:
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ValueError(f"token ids {token_ids.min()} to {token_ids.max()}, but the model's vocabulary has {vocab_size}")


def engine_args(spec: EngineSpec) -> EngineArgs:
    max_model_len = spec.max_model_tokens + 1  # scoring a row of the greatest length samples one token after it
    return EngineArgs(
        model=spec.model_path,
        skip_tokenizer_init=True,
        trust_remote_code=spec.trust_remote_code,
        dtype=spec.dtype,
        seed=spec.seed,
        load_format=spec.load_format,
        generation_config="vllm",  # never the model's own file: requests say everything
        max_model_len=max_model_len,
        max_num_seqs=spec.max_running + _SCORE_ROWS,
        # A seeded request crashes on CPU when its prompt is prefilled in parts, and a preempted one prefills prompt and
        # completion in one go: whole rows must fit.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(max_model_len, _MIN_BATCH_TOKENS),
        enable_prefix_caching=True,
        block_size=32 if current_platform.is_cpu() else None,  # the least there: a prompt shorter than a block is never shared
        async_scheduling=False,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",  # at the sampling temperature, after truncation: what was sampled from
        tensor_parallel_size=spec.tensor_parallel_size,
        kv_cache_memory_bytes=int(spec.cache_gib * 2**30) if current_platform.is_cpu() else None,
        gpu_memory_utilization=spec.gpu_memory_share,
        enable_sleep_mode=spec.sleeps and not current_platform.is_cpu(),  # vLLM refuses it on CPU, where sleep does nothing
        disable_log_stats=True,
    )


def sampling_params(sampling: Sampling, seed: int | None) -> SamplingParams:
    """Every value that shapes the distribution, spelled out."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        max_tokens=sampling.max_new_tokens,
        min_tokens=0,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the stop tokens above are the only ones
        seed=seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _produced(output: EngineCoreOutput) -> Produced:
    reason = output.finish_reason
    if reason is not None and reason not in _FINISH:
        raise EngineError(f"vLLM ended a completion with {reason.name}")
    logps = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
    return Produced(int(output.request_id), output.new_token_ids, logps, None if reason is None else _FINISH[reason])


def _token_scores(output: EngineCoreOutput) -> TokenScores:
    found = output.new_prompt_logprobs_tensors
    if found is None:
        raise EngineError("vLLM returned no prompt log-probabilities")
    return TokenScores(found.logprobs[:, 0].numpy().copy(), found.selected_token_ranks.numpy().astype(np.int32))


def free_bytes(_worker: Any) -> int:
    """Of the worker's GPU, whoever uses it; 0 on CPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def set_prompt_temperature(worker: Any, temperature: float) -> None:
    """Has prompt log-probabilities computed at ``temperature``: vLLM gives them at 1, whatever the request says.

    The sampler that serves prompts also serves running completions, so its method is replaced only inside the call that
    computes prompt log-probabilities.
    """
    runner = worker.model_runner
    runner.__dict__.pop("_get_prompt_logprobs_dict", None)
    if temperature == 1.0:
        return
    at_one: Callable[..., Any] = runner._get_prompt_logprobs_dict

    def at_temperature(*args: Any, **kwargs: Any) -> Any:
        with _scaled_logits(runner.sampler, temperature):
            return at_one(*args, **kwargs)

    runner._get_prompt_logprobs_dict = at_temperature


@contextmanager
def _scaled_logits(sampler: Any, temperature: float) -> Iterator[None]:
    plain: Callable[[Tensor], Tensor] = sampler.compute_logprobs
    sampler.compute_logprobs = lambda logits: plain(logits / temperature)
    try:
        yield
    finally:
        del sampler.compute_logprobs
