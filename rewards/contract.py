"""What a verifier is, what it is given, and how its return becomes a score.

A verifier is any function, plain or async. Its signature decides what it is given: parameters named ``completion``,
``answer``, ``prompt`` or ``prompt_id`` receive that part of the item, its own keyword-only parameters come from the
configuration. ``def f(completion, answer) -> float`` is enough. It judges one completion at a time, so there is no list
whose length could be wrong. It returns

- a number or a bool: the value that trains; the accuracy is the value clipped to [0, 1];
- a `Verdict`, or a dict with the same keys, to say more;

or raises `InvalidItem` (the reference answer is unusable), `Abstain` (it declines to judge) or TimeoutError (a call of its own
took too long). Any other exception and any other return, None, NaN, infinities, lists and arrays included, is the status
``error`` with the function's name: never a 0.
"""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np

from configs.errors import ConfigError, did_you_mean
from rollout.records import Consequence, Outcome, Score, Status

GIVEN = ("completion", "answer", "prompt", "prompt_id")
MAX_TEXT = 10_000  # characters kept of an extracted answer or a message; the cut says so


class RewardError(ConfigError):
    """The reward can not be built or used as configured. The message is the one clear line."""


class InvalidItem(Exception):
    """Raised by a verifier: this item can not be judged by anyone, its reference answer is unusable."""


class Abstain(Exception):
    """Raised by a verifier that declines to judge this completion."""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One completion to be scored."""

    prompt: str  # what the model read
    completion: str  # what it wrote
    answer: Any  # reference answer; any JSON value
    prompt_id: str
    part: str | None  # the one reward part that judges it, or None for all that judge its source
    source: str | None  # the data source it comes from
    num_tokens: int | None  # tokens of the completion, where it was sampled
    options: Mapping[str, Any]  # keyword parameters for this item, over `params`; of the one part, or {part: {...}}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier may return when a bare number says too little."""

    value: float  # trains; any finite number
    accuracy: float | None = None  # 0..1, filters; without one, value clipped to [0, 1]
    outcome: Outcome | str | None = None  # without one: right where accuracy >= 0.5, else wrong
    extracted: str | None = None  # the answer that was read from the completion


@dataclass(frozen=True, slots=True)
class Verifier:
    """A function bound to its parameters, ready to judge items."""

    name: str  # as written in the configuration
    function: Callable[..., Any]
    positional: tuple[str, ...]  # positional-only parameters, in order
    named: tuple[str, ...]
    params: Mapping[str, Any]


def bind_verifier(name: str, function: Callable[..., Any], params: Mapping[str, Any], key: str) -> Verifier:
    """Work out from the signature what ``function`` is given.

    ``params`` have passed ``configs.functions.check_params``, so keyword-only parameters are settled. Raises `RewardError`,
    naming the configuration ``key``, where another parameter is no part of an item and has no default.
    """
    positional: list[str] = []
    named: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named += [given for given in GIVEN if given not in (*positional, *named)]
        elif parameter.name in GIVEN:
            (positional if parameter.kind is parameter.POSITIONAL_ONLY else named).append(parameter.name)
        elif (
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        ):
            raise RewardError(
                f"{key}.function: '{name}' has the parameter '{parameter.name}', which is none of {', '.join(GIVEN)}"
                "; a setting of its own goes behind a * in the signature"
            )
    return Verifier(name=name, function=function, positional=tuple(positional), named=tuple(named), params=dict(params))


def judge(verifier: Verifier, item: RewardItem, run: Callable[[Awaitable[Any]], Any]) -> Score:
    """Call the verifier on one item; ``run`` waits for what an async function returns. Never raises.

    The score is of this verifier alone: ``parts`` is empty.
    """
    begun = time.perf_counter()
    try:
        positional = [getattr(item, key) for key in verifier.positional]
        named = {key: getattr(item, key) for key in verifier.named}
        returned = verifier.function(*positional, **named, **verifier.params)
        if inspect.isawaitable(returned):
            returned = run(returned)
        verdict = read_return(returned)
    # BaseException: a verifier that calls sys.exit() has failed on this item, it has not ended the process.
    except BaseException as error:
        known = ((InvalidItem, Status.INVALID), (Abstain, Status.ABSTAIN), (TimeoutError, Status.TIMEOUT))
        status = next((status for kind, status in known if isinstance(error, kind)), Status.ERROR)
        return failed(status, f"{verifier.name}: {describe(error)}", time.perf_counter() - begun)
    return Score(
        status=Status.OK,
        outcome=Outcome(verdict.outcome or Outcome.NONE),
        value=verdict.value,
        accuracy=verdict.accuracy,
        parts={},
        extracted=verdict.extracted,
        time_s=time.perf_counter() - begun,
        detail="",
        measures={},
        consequence=Consequence.NONE,
    )


def read_return(returned: Any) -> Verdict:
    """The verdict in a verifier's return, every field filled. Raises TypeError or ValueError for anything else."""
    if isinstance(returned, Mapping):
        known = [field.name for field in fields(Verdict)]
        for key in returned:
            if key not in known:
                raise ValueError(f"returned the unknown key {key!r}{did_you_mean(str(key), known)}; known: {', '.join(known)}")
        if "value" not in returned:
            raise ValueError("returned a dict without 'value'")
        returned = Verdict(**returned)
    elif not isinstance(returned, Verdict):
        returned = Verdict(value=returned)
    value = _number(returned.value, "value")
    accuracy = min(max(value, 0.0), 1.0) if returned.accuracy is None else _number(returned.accuracy, "accuracy")
    if not 0.0 <= accuracy <= 1.0:
        raise ValueError(f"returned the accuracy {accuracy}, which is not in [0, 1]")
    by_accuracy = Outcome.RIGHT if accuracy >= 0.5 else Outcome.WRONG
    outcome = by_accuracy if returned.outcome is None else Outcome(returned.outcome)
    extracted = None if returned.extracted is None else cut(str(returned.extracted))
    return Verdict(value=value, accuracy=accuracy, outcome=outcome, extracted=extracted)


def failed(status: Status, detail: str, time_s: float) -> Score:
    """The score of an item whose verifier gave no verdict."""
    return Score(
        status=status,
        outcome=Outcome.NONE,
        value=None,
        accuracy=None,
        parts={},
        extracted=None,
        time_s=time_s,
        detail=cut(detail),
        measures={},
        consequence=Consequence.NONE,
    )


def describe(error: BaseException) -> str:
    """Type, message and the line that raised it, unless that line is in this file."""
    try:
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except Exception:  # a message that can not be printed must not hide the failure
        message = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else message


def cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text) - MAX_TEXT} more characters)"


def _number(number: Any, what: str) -> float:
    # Real takes in int, float, bool, Fraction and numpy's scalars; an array or a tensor, even of one element, is refused.
    if not isinstance(number, (Real, np.bool_)):
        raise TypeError(f"returned the {what} {cut(repr(number))} of type {type(number).__name__}, not a number")
    result = float(number)
    if not math.isfinite(result):
        raise ValueError(f"returned the {what} {result}")
    return result
