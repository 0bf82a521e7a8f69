"""Rewarding stated confidence by the Brier score (RLCR: Damani et al., arXiv 2507.16806), and measures of calibration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NoReturn

from configs.errors import ConfigError
from configs.functions import check_params, resolve_function
from configs.schema import RewardPart
from rewards.contract import (
    GIVEN,
    Abstain,
    InvalidItem,
    RewardError,
    RewardItem,
    Verdict,
    Verifier,
    bind_verifier,
    judge,
    prepare,
)
from rewards.text_rewards import read_blocks
from rewards.verifiers import ENTRY_POINTS, VERIFIERS
from rollout.records import Outcome, Score, Status

_CONFIDENCE = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:\s?(?P<percent>%))?")


def brier(  # noqa: PLR0913  what an item has, to hand on, and the settings
    completion: str,
    answer: Any,
    prompt: str,
    prompt_id: str,
    num_tokens: int | None,
    *,
    correctness: str = "math",
    correctness_params: dict[str, Any] | None = None,
    grammar: Literal["think_answer_confidence", "rlcr"] = "think_answer_confidence",
    scale: Literal["paper", "code"] = "paper",
) -> Verdict:
    """Correctness less the squared error of the stated confidence: R = z - (q - z)^2, in [-1, 1].

    z is 1 where the verifier ``correctness`` (a name, a dotted path or ``file.py:function``, with ``correctness_params``) gives the
    ``<answer>`` block an accuracy of at least 0.5, else 0; q is the confidence (`read_confidence`). Stating the true probability p
    of being right is worth most, p^2, which grows with p. ``scale: code`` is what the authors' program pays,
    0.5 + 0.5 z + 0.5 (1 - (z - q)^2) = 1 + 0.5 R, in [0.5, 1.5].

    The whole completion must be ``<think>``, ``<answer>``, ``<analysis>`` and ``<confidence>`` blocks, none blank, as the reward
    ``format`` with ``grammar: rlcr`` demands; unless ``grammar`` is ``rlcr``, it may lack the analysis. Any other form, and a
    missing or bad confidence, is malformed: value 0, accuracy 0, outcome ``unparsed``, whatever the answer. On the paper's scale
    that is what a wrong answer with confidence 0 earns: weigh a ``format`` reward beside it, or take ``scale: code``.

    Accuracy is z. Measures: ``well_formed``, and of well-formed completions ``confidence`` and ``squared_error``. Divide no
    advantage by its standard deviation: that changes the balance of the terms from group to group.

    Raises what ``correctness`` raises, and `RewardError` where it can not be used.
    """
    verifier = _correctness(correctness, json.dumps(correctness_params or {}, sort_keys=True))
    with_analysis = grammar == "rlcr" or "<analysis>" in completion
    blocks = read_blocks(completion, prompt, ("think", "answer", *(["analysis"] if with_analysis else []), "confidence"))
    well_formed = blocks is not None and all(content.strip() for content in blocks.values())
    confidence = read_confidence(blocks["confidence"]) if blocks is not None and well_formed else None
    if blocks is None or confidence is None:
        return Verdict(0.0, 0.0, Outcome.UNPARSED, measures={"well_formed": 0.0})
    # The reasoning that the prompt has opened is over where the answer stands.
    asked = prompt.rstrip().removesuffix("<think>")
    item = RewardItem(asked, blocks["answer"], answer, prompt_id, None, None, num_tokens, {})
    (score,) = judge(verifier, [item], {}, _refuse_to_wait)
    if score.accuracy is None:
        raise _failure(score)
    correct = score.accuracy >= 0.5
    error = squared_error(correct, confidence)
    reward = float(correct) - error
    return Verdict(
        value=reward if scale == "paper" else 1 + 0.5 * reward,
        accuracy=float(correct),
        outcome=score.outcome,
        extracted=score.extracted,
        measures={"well_formed": 1.0, "confidence": confidence, "squared_error": error},
        detail=score.detail,
    )


def _prepare(*, correctness: str, correctness_params: dict[str, Any] | None, **_: Any) -> None:
    prepare(_correctness(correctness, json.dumps(correctness_params or {}, sort_keys=True)), "correctness_params")


brier.prepare = _prepare  # type: ignore[attr-defined]


def squared_error(correct: bool, confidence: float) -> float:
    """(q - z)^2, the Brier score of one statement: 0 is best, 1 is worst."""
    return (confidence - float(correct)) ** 2


def read_confidence(text: str) -> float | None:
    """The confidence in [0, 1] that a text states: a decimal from 0 to 1 (``0.83``, ``.5``, ``1``) or a percentage from ``0%`` to
    ``100%``. None for anything else: out of range, ``85`` without its sign, ``0.9/1``, words, two numbers, exponents, signs."""
    stated = _CONFIDENCE.fullmatch(text.strip())
    if stated is None:
        return None
    value = Fraction(f"0{stated['number']}") / (100 if stated["percent"] else 1)
    return float(value) if value <= 1 else None


# Calibration of many statements: ``confidence`` in [0, 1] and ``correct``, one of each a statement ------------------------------


def expected_calibration_error(confidence: Sequence[float], correct: Sequence[bool], num_bins: int = 10) -> float | None:
    """ECE: over bins of equal width, the mean distance of mean confidence and share correct, weighted by the bin's size.

    A confidence on an edge is in the upper bin, 1.0 in the last. None without statements.
    """
    bins: dict[int, list[float]] = {}
    for stated, right in zip(confidence, correct, strict=True):
        bins.setdefault(_bin(stated, num_bins), []).append(stated - float(right))
    return sum(abs(sum(gaps)) for gaps in bins.values()) / len(confidence) if bins else None


def auroc(confidence: Sequence[float], correct: Sequence[bool]) -> float | None:
    """The chance that a right statement is more confident than a wrong one; equal ones count half. None unless there are both."""
    num_right = sum(map(bool, correct))
    num_wrong = len(correct) - num_right
    if not num_right or not num_wrong:
        return None
    tied: dict[float, list[int]] = {}
    for stated, is_right in zip(confidence, correct, strict=True):
        tied.setdefault(stated, [0, 0])[bool(is_right)] += 1
    above, wins = 0, 0.0  # wrong ones of less confidence; pairs won
    for _, (wrong, right) in sorted(tied.items()):
        wins += right * (above + 0.5 * wrong)
        above += wrong
    return wins / (num_right * num_wrong)


def mean_confidence(confidence: Sequence[float]) -> float | None:
    return sum(confidence) / len(confidence) if confidence else None


def confidence_entropy(confidence: Sequence[float], num_bins: int = 10) -> float | None:
    """Entropy in nats of the confidences over bins of equal width: 0 where all are in one, a collapse to one value."""
    counts: dict[int, int] = {}
    for stated in confidence:
        place = _bin(stated, num_bins)
        counts[place] = counts.get(place, 0) + 1
    shares = [count / len(confidence) for count in counts.values()]
    return abs(sum(share * math.log(share) for share in shares)) if shares else None


def share_extreme(confidence: Sequence[float]) -> float | None:
    """The share of confidences that are exactly 0 or 1."""
    return sum(stated in (0.0, 1.0) for stated in confidence) / len(confidence) if confidence else None


def _bin(confidence: float, num_bins: int) -> int:
    return min(int(confidence * num_bins), num_bins - 1)


@lru_cache
def _correctness(name: str, params: str) -> Verifier:
    part = RewardPart(function=name, params=json.loads(params))
    try:
        function = resolve_function(name, VERIFIERS, "correctness", entry_points=ENTRY_POINTS)
        check_params(function, part.params, "correctness_params", GIVEN)
        verifier = bind_verifier(function, part, "correctness")
    except ConfigError as error:
        raise RewardError(str(error)) from error
    if verifier.is_async:
        raise RewardError(f"correctness: '{name}' is async; brier needs a plain function")
    return verifier


def _refuse_to_wait(_: Any) -> NoReturn:
    raise RewardError("correctness: the verifier returned something to wait for; brier needs a plain function")


def _failure(score: Score) -> Exception:
    kinds = {Status.INVALID: InvalidItem, Status.ABSTAIN: Abstain, Status.TIMEOUT: TimeoutError}
    return kinds.get(score.status, RuntimeError)(score.detail)
