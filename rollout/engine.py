"""The engine contract: what a rollout engine does, whichever form it has.

An engine turns group requests into groups, and takes new weights while it does so. Between ``receive`` and ``swap`` the new
weights lie beside the running model; a swap happens only where the engine is at rest, so every token knows its version.

    submit(requests) ... poll() -> groups ...       generation
    receive(bucket) ... receive(bucket) swap(v, m)  a push: buckets land apart, then the model changes between two decode steps
    score_tokens(rows)                              teacher-forced log-probabilities: the proof of a push, reward by likelihood
    sleep() ... wake(weights) swap(v, m) wake(cache)   the device is another's meanwhile; what was on it is lost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.records import Group, Visit
from rollout.weights import Bucket, Manifest


class OnSwap(StrEnum):
    """What happens to requests that are running when weights are swapped (DESIGN: the engine contract)."""

    RECOMPUTE = "recompute"  # preempted and recomputed on the new weights: exact
    KEEP = "keep"  # they go on over older keys and values; their later tokens are flagged ``mixed``
    FINISH = "finish"  # the swap waits until they are done


class Wake(StrEnum):
    """What a sleeping engine takes memory for again, in this order."""

    WEIGHTS = "weights"
    CACHE = "cache"


class EngineError(RuntimeError):
    """The engine cannot go on. The worker that owns it is replaced."""


class PushError(RuntimeError):
    """A push arrived damaged or incomplete, or does not fit the model. The running weights are untouched: an engine whose
    weights were half written does not raise this, it stops with EngineError."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled. The engine takes these values only, never a model's own generation config."""

    temperature: float
    top_p: float  # 1.0 is off
    top_k: int  # 0 is off
    min_p: float  # 0.0 is off
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Straggler:
    """When a group is given out without its last members, which are cancelled."""

    after_s: float  # since the last of its members was admitted
    min_finished: int  # so many members have ended, at least


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One visit asked of an engine."""

    visit: Visit
    prompt_token_ids: NDArray[np.int32]
    seeds: tuple[int, ...] | None  # one a completion, or None for unseeded sampling
    group_size: int
    sampling: Sampling
    straggler: Straggler | None  # None: it is given out whole


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Teacher-forced scores of one row of token ids.

    ``logp[i]`` and ``rank[i]`` belong to ``token_ids[i + 1]`` given ``token_ids[: i + 1]``; both have length n - 1.
    Rank 1 is the most likely token. Log-probabilities are at the temperature the row was scored with.
    """

    logp: NDArray[np.float32]
    rank: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What a swap did."""

    version: int
    num_tensors: int
    num_bytes: int
    num_recomputed: int  # running requests that were preempted
    num_mixed: int  # running requests that went on over older keys and values
    time_s: float


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What sleep did."""

    freed_bytes: int  # of the device, as measured there; 0 on CPU, where nothing is given away
    time_s: float


@dataclass(frozen=True, slots=True)
class Health:
    """An engine's state, answered while it is generating."""

    version: int  # -1 before the first swap of an engine that started from random weights, and from sleep to the next swap
    num_running: int  # completions being generated
    num_waiting: int
    num_tokens: int  # sampled since start
    num_steps: int
    last_step_age_s: float  # since the end of the last decode step; 0 when idle


class Engine(Protocol):
    """A rollout engine. Every method may be called from any thread; each blocks at most for its own work."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queues visits. Raises EngineError when the engine has stopped, ValueError for a prompt that cannot fit and while it sleeps."""

    def poll(self, timeout_s: float) -> list[Group]:
        """Finished groups, as each finishes; an empty list after ``timeout_s`` without one. Raises EngineError."""

    def pause(self) -> None:
        """Returns once the engine is at rest between two decode steps; it stays there until ``resume``, except for what
        ``score_tokens`` and a swap with on_swap=finish must step. Groups that end in those steps are returned after ``resume``."""

    def resume(self) -> None:
        """Goes on generating."""

    def receive(self, bucket: Bucket) -> None:
        """Takes one bucket of a push and lays it beside the running model; generation goes on. A bucket of a newer generation
        drops an unfinished older one. The sender must not write into a bucket it has given. Raises PushError on a digest that
        differs, and for a generation older than the newest begun or not newer than the last swapped."""

    def swap(self, version: int, manifest: Manifest) -> SwapReport:
        """Makes the received weights the model's, and ends their generation either way. Raises PushError when names, shapes,
        dtypes or digests differ from ``manifest``, or when the tensors do not fill the model exactly."""

    def score_tokens(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> list[TokenScores]:
        """Teacher-forced log-probabilities and ranks of rows of at least two tokens, under the current weights. Raises
        ValueError for a row that cannot be scored."""

    def sleep(self) -> SleepReport:
        """Gives the device's memory away, weights and cache. Raises ValueError while completions run or wait, and where it sleeps
        already. Until both are awake and a swap has filled the weights, ``submit`` and ``score_tokens`` raise ValueError."""

    def wake(self, what: Wake) -> None:
        """Takes memory again: first for the weights, which only the next swap fills, then for the cache. Raises ValueError in
        another order, and for what is awake."""

    def cancel(self, visits: Sequence[Visit]) -> None:
        """Drops visits; unknown ones are ignored. Their groups are not returned."""

    def health(self) -> Health:
        """Answers at once, also while the engine is busy."""

    def close(self) -> None:
        """Ends the engine and its thread; queued visits are lost. Safe to call twice."""


def engine_environment(*, num_threads: int) -> dict[str, str]:
    """The environment that an engine's process must be started with: too late once torch or vLLM is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the process that owns the step loop
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose prompt log-probabilities can be asked at a temperature
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # first batch in 0.3 s instead of 2 to 9 s on CPU, same steady speed
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning barriers cost a factor of twenty on a busy machine
        # On CPU oneDNN keeps code of its own for every shape of a matrix product. A batch has as many rows as it has tokens, so for
        # hundreds of steps each brings new shapes: with room for 1,024 of them, which is the default, a small model's worker grew by
        # 0.2 GiB in 450 steps and went on. The layers share shapes, so 64 last for a dozen batch sizes; no CPU time is lost by it.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
