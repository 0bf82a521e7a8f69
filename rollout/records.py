"""The data that flows through a run: prompts, visits, completions, groups and scores.

Standard library and numpy only, so that every other package, and any script, can read a run's records without an engine.
Every record is frozen and every field is required: a stage makes a new object, it never fills a hole in an old one.

    Prompt --pick--> Visit --generate--> Group of Completions --score--> ScoredGroup --select--> kept, or dropped with a reason
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

REPETITION_WORDS = 20  # of the runs that are compared in ``repetition``


class Purpose(StrEnum):
    """What a completion is sampled for. It enters the sampling seed, so the three never share random numbers."""

    TRAIN = "train"
    EVAL = "eval"
    PROBE = "probe"


class Status(StrEnum):
    """What became of the *verifier*. Only ``ok`` carries a value."""

    OK = "ok"
    TIMEOUT = "timeout"
    ERROR = "error"
    INVALID = "invalid"
    ABSTAIN = "abstain"


class Outcome(StrEnum):
    """What the verifier found out about the *completion*."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSED = "unparsed"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    SYNTAX = "syntax"
    CRASH = "crash"
    NONE = "none"


class Consequence(StrEnum):
    """What the policy of a reward part makes of a verifier that gave no verdict (`reward.parts.NAME.on_error` and its like)."""

    NONE = "none"
    ZERO = "zero"  # it was given value 0 and accuracy 0 instead; the status is ok
    DROP_SAMPLE = "drop_sample"
    DROP_GROUP = "drop_group"
    FAIL = "fail"  # the run stops


class Finish(StrEnum):
    """Why a completion ended: a stop token, or the token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with its reference answer, rendered and tokenized."""

    id: str  # stable across runs, unique in a run
    source: str  # name of the prompt source it came from
    stratum: str  # a class of prompts known beforehand, such as the number of digits
    text: str  # what the model reads, after the chat template
    token_ids: NDArray[np.int32]  # [num_prompt_tokens]; exactly these ids go to the engine and to the learner
    answer: Any  # reference answer; any JSON value
    reward: str | None  # name of the reward part that judges it where a source routes its own, else None


@dataclass(frozen=True, slots=True, order=True)
class Visit:
    """One asking of one prompt for one group. It keeps its number when it is queued again."""

    prompt_id: str
    number: int  # 0 for the first visit of this prompt in this run
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. All arrays have one entry a sampled token, the stop token included."""

    index: int  # place in its group, 0 .. group_size - 1
    token_ids: NDArray[np.int32]
    roll_logp: NDArray[np.float32]  # the log-probability the engine sampled from, at the sampling temperature
    loss_mask: NDArray[np.bool_]  # True where the policy sampled the token
    versions: NDArray[np.int32]  # the weights that made the token
    mixed: NDArray[np.bool_]  # True where the token was made by new weights over older keys and values
    text: str  # decoded without special tokens
    finish: Finish

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one visit, in the order of their index. Members that were left out for taking too long have no completion."""

    visit: Visit
    prompt_token_ids: NDArray[np.int32]
    completions: tuple[Completion, ...]
    worker: str  # name of the rollout worker that made it
    time_s: float  # from submission to the last token
    unfinished: tuple[int, ...]  # of each member left out: the tokens it had when it was cancelled


@dataclass(frozen=True, slots=True)
class GroupMeta:
    """What the driver holds of a group while the tokens stay where they were made."""

    visit: Visit
    worker: str
    num_prompt_tokens: int
    num_tokens: tuple[int, ...]  # sampled tokens of each completion
    num_loss_tokens: tuple[int, ...]
    num_truncated: int
    min_version: int
    max_version: int
    num_mixed: int  # tokens flagged ``mixed``
    repeated_share: float  # ``repetition`` of the texts: mean of the shares
    max_repeats: int  # and the largest count
    time_s: float
    unfinished: tuple[int, ...]  # of each member left out: the tokens it had when it was cancelled

    @property
    def num_finished(self) -> int:
        """Members that the group was trained with: all of them, or those that had finished when the others were cancelled."""
        return len(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier says of one completion. ``status`` is about the verifier, ``outcome`` about the completion."""

    status: Status
    outcome: Outcome
    value: float | None  # trains; None unless status is ok
    accuracy: float | None  # 0..1, filters; None unless status is ok
    parts: Mapping[str, float]  # each reward part's own value, within its bounds; 0 where its gate was closed
    extracted: str | None  # the answer the verifier read, where it reads one
    time_s: float  # spent in verifiers, all parts together
    detail: str  # the verifier's words: why it failed, or what it tells beside its verdict
    measures: Mapping[str, float]  # further numbers to log, as PART.measure
    consequence: Consequence  # none unless a verifier gave no verdict

    @property
    def has_verdict(self) -> bool:
        """Whether the verifier judged; a value that a policy put in place of a verdict is none."""
        return self.status is Status.OK and self.consequence is not Consequence.ZERO


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one score for every completion, in the same order."""

    group: Group
    scores: tuple[Score, ...]


def describe_group(group: Group) -> GroupMeta:
    """The small record of a group that travels to the driver."""
    versions = np.concatenate([c.versions for c in group.completions])
    shares, counts = zip(*(repetition(c.text) for c in group.completions), strict=True)
    return GroupMeta(
        visit=group.visit,
        worker=group.worker,
        num_prompt_tokens=len(group.prompt_token_ids),
        num_tokens=tuple(c.num_tokens for c in group.completions),
        num_loss_tokens=tuple(int(c.loss_mask.sum()) for c in group.completions),
        num_truncated=sum(c.finish is Finish.LENGTH for c in group.completions),
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        num_mixed=int(sum(c.mixed.sum() for c in group.completions)),
        repeated_share=fmean(shares),
        max_repeats=max(counts),
        time_s=group.time_s,
        unfinished=group.unfinished,
    )


def repetition(text: str, num_words: int = REPETITION_WORDS) -> tuple[float, int]:
    """Of the runs of ``num_words`` words in a text, words being what whitespace parts: the share that are repeats of an earlier one,
    and how often the most frequent one occurs. (0.0, 0) for a text of fewer words."""
    words = text.split()
    counts = Counter(zip(*(words[i:] for i in range(num_words)), strict=False))
    total = counts.total()
    return ((total - len(counts)) / total, max(counts.values())) if total else (0.0, 0)


def sampling_seed(run_seed: int, visit: Visit, index: int) -> int:
    """The seed of one completion: a hash of run seed, purpose, prompt id, visit and index, in [0, 2**63).

    The same visit asked of any worker, in any batch, gives the same random numbers; two visits never share them.
    """
    text = f"{run_seed}\0{visit.purpose}\0{visit.prompt_id}\0{visit.number}\0{index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def pass_rate(scores: Sequence[Score]) -> float | None:
    """Mean of ``accuracy >= 0.5`` over the scores with status ok; None where there is none."""
    valid = [s.accuracy >= 0.5 for s in scores if s.accuracy is not None]
    return sum(valid) / len(valid) if valid else None
