"""What a verifier is, what it is given, and how its return becomes a score.

A verifier is any function, plain or async. Its signature decides what it is given: parameters named ``completion``, ``answer``,
``prompt``, ``prompt_id`` or ``num_tokens`` receive that part of the item, its own keyword-only parameters come from the
configuration. ``def f(completion, answer) -> float`` is enough. It returns

- a number or a bool: the value that trains; the accuracy is the value clipped to [0, 1];
- a `Verdict`, or a dict with the same keys, to say more;

or raises `InvalidItem` (the reference answer is unusable), `Abstain` (it declines to judge) or TimeoutError (a call of its own
took too long). Any other exception and any other return, None, NaN, infinities, lists and arrays included, is the status
``error`` with the function's name: never a 0.

A *batch* verifier takes the plurals ``completions``, ``answers``, ``prompts``, ``prompt_ids``, ``nums_tokens``: lists of one length. It
returns a list, a tuple or an array of one dimension with one result an item, in order; in a place may stand an exception, for
that item alone. Anything else is an ``error`` of every item of the call: another length, a scalar, an array of shape (3, 1). Such
an array is refused, not squeezed: spread against another it would become 3 x 3 without a word.

A function may carry one more as its attribute ``prepare``. A process that has loaded it calls that once with all its settings, before
the first item and outside any deadline: there a model is loaded, or settings that can not work are refused by a `RewardError`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np

from configs.errors import ConfigError, did_you_mean
from configs.functions import check_params
from configs.schema import RewardPart
from rollout.records import Consequence, Outcome, Score, Status

PLURALS = {
    "completion": "completions",
    "answer": "answers",
    "prompt": "prompts",
    "prompt_id": "prompt_ids",
    "num_tokens": "nums_tokens",
}
GIVEN = (*PLURALS, *PLURALS.values())
MAX_TEXT = 10_000  # characters kept of an extracted answer or a message; the cut says so
MAX_MEASURES, MAX_NAME = 100, 100  # of one verdict; characters of a measure's name


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
    measures: Mapping[str, float] = field(default_factory=dict)  # further numbers to log, by printable names of their own
    detail: str = ""  # words for the log, such as a compiler's message


@dataclass(frozen=True, slots=True)
class Verifier:
    """A function bound to its parameters, ready to judge items."""

    name: str  # as written in the configuration
    function: Callable[..., Any]
    positional: tuple[str, ...]  # positional-only parameters, in order
    named: tuple[str, ...]
    params: Mapping[str, Any]
    is_batch: bool  # it takes the plurals
    is_async: bool  # it can be cancelled


def bind_verifier(function: Callable[..., Any], part: RewardPart, key: str) -> Verifier:
    """Work out from the signature what the ``function`` of a reward part is given.

    The part's ``params`` have passed ``configs.functions.check_params``, so keyword-only parameters are settled. Raises
    `RewardError`, naming the configuration ``key`` of the part, where another parameter is no part of an item and has no default,
    where one item and many are mixed, and where the part's own keys do not suit the function.
    """
    positional: list[str] = []
    named: list[str] = []
    open_ended = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.name in GIVEN:
            (positional if parameter.kind is parameter.POSITIONAL_ONLY else named).append(parameter.name)
        elif (
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        ):
            raise RewardError(
                f"{key}.function: '{part.function}' has the parameter '{parameter.name}', which is none of {', '.join(GIVEN)}"
                f"; a setting of its own goes behind a * in the signature{did_you_mean(parameter.name, GIVEN)}"
            )
    of_one, of_many = ([name for name in (*positional, *named) if name in names] for names in (PLURALS, PLURALS.values()))
    if of_one and of_many:
        raise RewardError(
            f"{key}.function: '{part.function}' has the parameters '{of_one[0]}', of one item, and '{of_many[0]}', of many; "
            f"'{PLURALS[of_one[0]]}' works"
        )
    if open_ended:
        named += [name for name in (PLURALS.values() if of_many else PLURALS) if name not in (*positional, *named)]
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    _check_part(function, part, key, is_async=is_async)
    return Verifier(
        name=part.function,
        function=function,
        positional=tuple(positional),
        named=tuple(named),
        params=dict(part.params),
        is_batch=bool(of_many),
        is_async=is_async,
    )


def _check_part(function: Callable[..., Any], part: RewardPart, key: str, *, is_async: bool) -> None:
    if getattr(function, "executes_answers", False) and not (part.confined and part.num_processes):
        raise RewardError(
            f"{key}.function: '{part.function}' executes what it finds in an answer, so it must be shut in: {key}.confined=true "
            f"with {key}.num_processes=1 or more works"
        )
    if part.concurrency > 1 and not is_async:
        raise RewardError(
            f"{key}.concurrency={part.concurrency}: '{part.function}' is a plain function, and only calls of an async one can be under "
            f"way at once; {key}.concurrency=1 with {key}.num_processes={part.concurrency} works"
        )


def prepare(verifier: Verifier, key: str) -> None:
    """Let the verifier get ready in this process. Raises what it raises; a `RewardError` then begins with ``key``, where its params are."""
    if (ready := getattr(verifier.function, "prepare", None)) is None:
        return
    parameters = inspect.signature(verifier.function).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN}
    try:
        ready(**{**settings, **verifier.params})
    except RewardError as error:
        raise RewardError(f"{key}.{error}") from error


def judge(
    verifier: Verifier, items: Sequence[RewardItem], options: Mapping[str, Any], run: Callable[[Awaitable[Any]], Any]
) -> list[Score]:
    """Call the verifier once and read its return: one score an item, of this verifier alone (``parts`` is empty). Never raises.

    Args:
        items: one, or several for a batch verifier.
        options: keyword parameters over those of the configuration.
        run: waits for what an async function returns.
    """
    begun = time.perf_counter()
    try:
        returned = _call(verifier, items, options)
        if inspect.isawaitable(returned):
            returned = run(returned)
    # BaseException: a verifier that calls sys.exit() has failed on this item, it has not ended the process.
    except BaseException as error:
        returned = _Raised(error)
    return _read_call(verifier, returned, len(items), time.perf_counter() - begun)


async def judge_async(verifier: Verifier, items: Sequence[RewardItem], options: Mapping[str, Any]) -> list[Score]:
    """`judge` for an async verifier, within a running loop. Raises CancelledError alone, where the caller cancels it."""
    begun = time.perf_counter()
    try:
        returned = await _call(verifier, items, options)
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        returned = _Raised(error)
    return _read_call(verifier, returned, len(items), time.perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class _Raised:
    """What the call raised, as against an exception that it returned."""

    error: BaseException


def _call(verifier: Verifier, items: Sequence[RewardItem], options: Mapping[str, Any]) -> Any:
    params = verifier.params
    if options:
        params = {**params, **options}
        check_params(verifier.function, params, "options", GIVEN)
    if not verifier.is_batch:
        (item,) = items
        positional, named = ([getattr(item, name) for name in names] for names in (verifier.positional, verifier.named))
    else:
        columns = {plural: [getattr(item, name) for item in items] for name, plural in PLURALS.items()}
        positional, named = ([columns[name] for name in names] for names in (verifier.positional, verifier.named))
    return verifier.function(*positional, **dict(zip(verifier.named, named, strict=True)), **params)


def _read_call(verifier: Verifier, returned: Any, num_items: int, time_s: float) -> list[Score]:
    """The scores in what one call returned or raised; each item bears an equal share of its time."""
    verdicts: list[Verdict | BaseException]
    try:
        if isinstance(returned, _Raised):
            verdicts = [returned.error] * num_items
        elif verifier.is_batch:
            verdicts = [_read_result(result) for result in _listed(returned, num_items)]
        else:
            verdicts = [read_return(returned)]
    except Exception as error:
        verdicts = [error] * num_items
    return [_as_score(verifier, verdict, time_s / num_items) for verdict in verdicts]


def _listed(returned: Any, num_items: int) -> list[Any]:
    # An array or a tensor is known by its shape: no library of tensors is imported here.
    shape = getattr(returned, "shape", None)
    if shape is not None and len(shape) == 1:
        returned = returned.tolist()
    elif shape is not None:
        raise TypeError(f"expected {num_items} results, got an array of shape {tuple(shape)}")
    if not isinstance(returned, (list, tuple)):
        raise TypeError(f"expected {num_items} results in a list, got {cut(repr(returned))} of type {type(returned).__name__}")
    if len(returned) != num_items:
        raise ValueError(f"expected {num_items} results, got {len(returned)}")
    return list(returned)


def _read_result(result: Any) -> Verdict | BaseException:
    try:
        return result if isinstance(result, BaseException) else read_return(result)
    except Exception as error:
        return error


def _as_score(verifier: Verifier, verdict: Verdict | BaseException, time_s: float) -> Score:
    if isinstance(verdict, BaseException):
        known = ((InvalidItem, Status.INVALID), (Abstain, Status.ABSTAIN), (TimeoutError, Status.TIMEOUT))
        status = next((status for kind, status in known if isinstance(verdict, kind)), Status.ERROR)
        return failed(status, f"{verifier.name}: {describe(verdict)}", time_s)
    return Score(
        status=Status.OK,
        outcome=Outcome(verdict.outcome or Outcome.NONE),
        value=verdict.value,
        accuracy=verdict.accuracy,
        parts={},
        extracted=verdict.extracted,
        time_s=time_s,
        detail=verdict.detail,
        measures=verdict.measures,
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
    return Verdict(
        value=value,
        accuracy=accuracy,
        outcome=by_accuracy if returned.outcome is None else _outcome(returned.outcome),
        extracted=None if returned.extracted is None else cut(str(returned.extracted)),
        measures=_measures(returned.measures),
        detail=cut(str(returned.detail)),
    )


def _outcome(name: Any) -> Outcome:
    if isinstance(name, str) and name in list(Outcome):
        return Outcome(name)
    raise ValueError(
        f"returned the outcome {cut(repr(name))}, which is none of {', '.join(Outcome)}{did_you_mean(str(name), Outcome)}"
    )


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


def _measures(measures: Any) -> dict[str, float]:
    if not isinstance(measures, Mapping):
        raise TypeError(f"returned the measures {cut(repr(measures))}, not a dict of numbers by name")
    if len(measures) > MAX_MEASURES:
        raise ValueError(f"returned {len(measures)} measures; each name is a metric of the run, so at most {MAX_MEASURES}")
    for name in measures:
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME):
            raise ValueError(f"returned a measure named {cut(repr(name))}; 1 to {MAX_NAME} printable characters work")
    return {name: _number(number, f"measure '{name}'") for name, number in measures.items()}


def _number(number: Any, what: str) -> float:
    # Real takes in int, float, bool, Fraction and numpy's scalars; an array or a tensor, even of one element, is refused.
    if not isinstance(number, (Real, np.bool_)):
        raise TypeError(f"returned the {what} {cut(repr(number))} of type {type(number).__name__}, not a number")
    result = float(number)
    if not math.isfinite(result):
        raise ValueError(f"returned the {what} {result}")
    return result
