"""Rewards of a completion's form and length. They say nothing of whether its answer is right: gate or weigh them beside one that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import regex

from rewards.contract import Abstain, RewardError, Verdict
from rollout.records import Outcome, repetition

_THINK_ANSWER = ("think", "answer")
_RLCR = ("think", "answer", "analysis", "confidence")


def format_reward(
    completion: str,
    prompt: str,
    *,
    grammar: Literal["think_answer", "rlcr"] = "think_answer",
    allow_empty_reasoning: bool = False,
    pattern: str | None = None,
    pattern_timeout_s: float = 1.0,
) -> Verdict:
    """1.0 where the whole completion has the demanded form, else 0.0.

    ``think_answer`` is exactly ``<think>...</think>``, whitespace, ``<answer>...</answer>``; ``rlcr`` adds
    ``<analysis>...</analysis>`` and ``<confidence>...</confidence>`` (Damani et al., arXiv 2507.16806). One of each in this
    order, tags in small letters, nothing but whitespace before, between and after, and no tag inside a block. A block must hold
    more than whitespace; ``allow_empty_reasoning`` frees ``<think>`` of that. A prompt that ends with ``<think>``, whitespace
    after it or not, has opened the first block: then the completion must not open it again.

    ``pattern`` replaces the grammar by a regular expression (of the library regex) that must match the completion as a whole,
    without what the prompt has opened. A search that takes longer than ``pattern_timeout_s`` is value 0, outcome ``time_limit``.

    Raises `RewardError` for a pattern that is no regular expression, and for a time of 0 or below, or above an hour.
    """
    if pattern is None:
        blocks = read_blocks(completion, prompt, _THINK_ANSWER if grammar == "think_answer" else _RLCR)
        blank = [] if blocks is None else [tag for tag, content in blocks.items() if not content.strip()]
        well_formed = blocks is not None and (not blank or (allow_empty_reasoning and blank == ["think"]))
    else:
        _check_timeout(pattern_timeout_s)
        try:
            well_formed = _compiled(pattern).fullmatch(completion, timeout=pattern_timeout_s) is not None
        except TimeoutError:  # how long a search takes is the completion's doing
            return Verdict(0.0, 0.0, Outcome.TIME_LIMIT)
    return Verdict(float(well_formed), float(well_formed), Outcome.RIGHT if well_formed else Outcome.WRONG)


def _compiled(pattern: str) -> Any:
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise RewardError(f"pattern: {pattern!r} is no regular expression: {error}") from error


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds <= 3600:  # regex takes what is negative for no limit, and what is huge for none left
        raise RewardError(f"pattern_timeout_s={seconds}: wants seconds above 0 and at most 3600")


def _prepare_format(*, pattern: str | None, pattern_timeout_s: float, **_: Any) -> None:
    _check_timeout(pattern_timeout_s)
    if pattern is not None:
        _compiled(pattern)


format_reward.prepare = _prepare_format  # type: ignore[attr-defined]


def read_blocks(completion: str, prompt: str, tags: Sequence[str]) -> dict[str, str] | None:
    """What the blocks ``<tag>...</tag>`` of a completion hold, or None where it is anything but these blocks, once each and in this
    order, with whitespace around them. A ``prompt`` that ends with the first opening tag has opened that block."""
    opened = prompt.rstrip().endswith(f"<{tags[0]}>")
    rest = f"<{tags[0]}>{completion}" if opened else completion
    blocks = {}
    for tag in tags:
        before, opening, rest = rest.partition(f"<{tag}>")
        blocks[tag], closing, rest = rest.partition(f"</{tag}>")
        if before.strip() or not opening or not closing:
            return None
    stray = any(f"<{slash}{tag}>" in text for text in (*blocks.values(), rest) for tag in tags for slash in ("", "/"))
    return None if stray or rest.strip() else blocks


def length(
    completion: str,
    num_tokens: int | None,
    *,
    target: int,
    limit: int,
    at_least: int = 0,
    unit: Literal["tokens", "characters"] = "tokens",
) -> Verdict:
    """1.0 for a length from ``at_least`` to ``target``, falling in a straight line to 0.0 at ``limit`` and, below, at length 0.

    With ``at_least`` 0 an empty completion earns 1.0: gate it behind a reward of correctness. In ``tokens`` it needs the item's
    ``num_tokens`` and abstains without.
    """
    _check_length(target=target, limit=limit, at_least=at_least)
    size = _counted(num_tokens, "length, or set unit: characters") if unit == "tokens" else len(completion)
    value = size / at_least if size < at_least else min(1.0, max(0.0, (limit - size) / (limit - target)))
    return Verdict(value, outcome=Outcome.NONE, measures={"length": float(size)})


def _check_length(*, target: int, limit: int, at_least: int, **_: Any) -> None:
    if not 0 <= at_least <= target < limit:
        raise RewardError(f"limit={limit}: length needs 0 <= at_least <= target < limit; at_least={at_least}, target={target}")


length.prepare = _check_length  # type: ignore[attr-defined]


def repetition_penalty(completion: str, *, num_words: int = 20) -> Verdict:
    """Minus the share of the completion's runs of ``num_words`` words that repeat an earlier one, in (-1, 0]; 0 for fewer words.

    Words are what whitespace parts, so a repeated text without spaces is not seen. The metric ``rep/ratio20`` counts alike.
    """
    _check_repetition(num_words=num_words)
    share, most = repetition(completion, num_words)
    return Verdict(-share, outcome=Outcome.NONE, measures={"max_repeats": float(most)})


def _check_repetition(*, num_words: int) -> None:
    if num_words < 1:
        raise RewardError(f"num_words={num_words} is not a whole number of at least 1")


repetition_penalty.prepare = _check_repetition  # type: ignore[attr-defined]


def overlong(num_tokens: int | None, *, limit: int, buffer: int, factor: float = 1.0) -> Verdict:
    """Soft overlong punishment: 0 up to ``limit - buffer`` tokens, from there in a straight line down to ``-factor`` at ``limit``.

    min(0, -(n - (limit - buffer)) / buffer * factor), DAPO (arXiv 2503.14476). ``limit`` is ``rollout.max_new_tokens``; a
    completion beyond it pays on along the same line. Needs the item's ``num_tokens`` and abstains without.
    """
    _check_overlong(limit=limit, buffer=buffer, factor=factor)
    excess = _counted(num_tokens, "overlong") - (limit - buffer)
    return Verdict(min(0.0, -excess / buffer * factor), outcome=Outcome.NONE)


def _check_overlong(*, limit: int, buffer: int, factor: float) -> None:
    if not 1 <= buffer <= limit:
        raise RewardError(f"buffer={buffer}: overlong needs 1 <= buffer <= limit, and limit={limit}")
    if factor < 0:
        raise RewardError(f"factor={factor} would reward length, but overlong never pays more than 0; 1.0 works")


overlong.prepare = _check_overlong  # type: ignore[attr-defined]


def _counted(num_tokens: int | None, need: str) -> int:
    if num_tokens is None:
        raise Abstain(f"the item does not say how many tokens its completion has; give num_tokens for {need}")
    return num_tokens
