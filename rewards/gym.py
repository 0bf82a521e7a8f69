"""The scorers of reasoning-gym as a verifier: https://github.com/open-thought/reasoning-gym, checked with 0.1.25."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from rewards.answers import after_reasoning, final_text, last_tagged
from rewards.contract import InvalidItem, RewardError, Verdict
from rollout.records import Outcome

try:
    from reasoning_gym.factory import DATASETS, create_dataset
except ModuleNotFoundError as missing:
    raise RewardError("the package reasoning_gym is not installed: pip install 'limen[reasoning-gym]'") from missing

_LOOSE = {
    "coin_flip": "pays in full for 0, with which every probability begins",
    "game_of_life_halting": "pays in full for any answer",
    "puzzle24": "pays in full for numbers that were not given",
}
_OF_TUPLES = {"arc_agi", "rearc"}  # compare with the tuples of their metadata, which are lists in JSON
# Scorers that execute an answer: as Python (these want a list), or by sympy's parser (these want a formula).
_EVALUATES = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_PARSES = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
_FUNCTIONS = {
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("exp", "log", "ln", "sqrt", "Abs"),
}
_NO_NUMBER = re.compile(r"(?i)(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])")
_FULL = 1 - 1e-9
_MAX_FORMULA, _MAX_POWER, _MAX_NUMBER = 2000, 500, 1e100  # characters; exponents over one another, multiplied; a number's size


def reasoning_gym(
    completion: str, answer: Any, prompt: str = "", *, partial: bool = False, require_tag: bool = False, allow_loose: bool = False
) -> Verdict:
    """What the scorer of the item's task gives the answer in a completion: 1.0 for full marks, else 0.0.

    ``answer`` is an item of reasoning-gym, ``{task, question, answer, metadata}`` and the task's ``settings`` where they are not the
    defaults, as the prompt source gives it with ``params.entry=true``. The answer is the last ``<answer>`` block after the reasoning,
    else the whole text after it (`final_text`); with ``require_tag`` only the block counts.

    ``partial`` lets the value be the scorer's own marks between 0 and 1, where they exceed what it gives for an empty answer (twelve
    scorers pay for that). Accuracy is 1.0 for full marks alone. An empty answer is 0, outcome ``unparsed``, and so is one on
    which the scorer raises.

    Nine scorers execute the answer, which could then reach into this process: those get nothing but a literal or plain capitals, or a
    formula of bounded powers (`_is_harmless`); anything else is 0. So is an answer that names no number, ``nan`` or ``inf``: comparing
    with it is false either way, and a scorer of distances then pays in full. Three scorers are refused because they pay for wrong
    answers, unless ``allow_loose``.

    Raises `InvalidItem` for an answer that is no such item, an unknown task or settings, a refused scorer, and an item whose own
    reference answer does not get full marks.
    """
    task, scorer, entry = _read_item(answer, allow_loose)
    text = final_text(completion, prompt)
    if require_tag and last_tagged(after_reasoning(completion, prompt)) is None:
        text = ""
    if not text:
        return Verdict(0.0, 0.0, Outcome.UNPARSED)
    if text != entry["answer"] and _NO_NUMBER.search(text):
        return Verdict(0.0, 0.0, Outcome.WRONG, text)
    if text != entry["answer"] and not _is_harmless(task, text):
        return Verdict(0.0, 0.0, Outcome.WRONG, text, detail=f"not given to the scorer of {task}, which would execute it")
    marks = _marks(scorer, text, entry)
    full = float(marks is not None and marks >= _FULL)
    if not full and entry["answer"] is not None and (_marks(scorer, entry["answer"], entry) or 0.0) < _FULL:
        # Most scorers swallow what is missing in the metadata: then everybody's marks are 0.
        raise InvalidItem(
            f"the scorer of {task} does not accept the item's own reference answer; are its metadata and settings whole?"
        )
    if marks is None:
        return Verdict(0.0, 0.0, Outcome.UNPARSED, text)
    floor = _marks(scorer, "", entry) if partial and not full else None
    value = marks if partial and marks > (floor or 0.0) else full
    return Verdict(value, full, Outcome.RIGHT if full else Outcome.WRONG, text, measures={"marks": marks})


# The pool shuts it in: the guard above knows the scorers of one version.
reasoning_gym.executes_answers = True  # type: ignore[attr-defined]


def _read_item(answer: Any, allow_loose: bool) -> tuple[str, Any, Mapping[str, Any]]:
    keys = ("task", "question", "answer", "metadata")
    if not isinstance(answer, Mapping) or not all(key in answer for key in keys) or not isinstance(answer["metadata"], Mapping):
        raise InvalidItem(
            f"the reference answer is no reasoning-gym item {{{', '.join(keys)}}}; set data.sources.NAME.params.entry=true"
        )
    task = answer["task"]
    if task not in DATASETS or task == "composite":
        raise InvalidItem(
            f"reasoning-gym has no task {task!r}" + (" to score by; name the one it is of" if task == "composite" else "")
        )
    if task in _LOOSE and not allow_loose:
        raise InvalidItem(f"the scorer of {task} {_LOOSE[task]}; params.allow_loose=true takes it all the same")
    metadata = answer["metadata"]
    if task in _OF_TUPLES:
        metadata = {key: _as_tuples(value) for key, value in metadata.items()}
    entry = {"question": answer["question"], "answer": answer["answer"], "metadata": metadata}
    try:
        return task, _scorer(task, json.dumps(answer.get("settings") or {}, sort_keys=True)), entry
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidItem(f"reasoning-gym task {task} refused its settings {answer['settings']}: {error}") from error


@lru_cache(maxsize=256)
def _scorer(task: str, settings: str) -> Any:
    return create_dataset(task, **{"size": 1, "seed": 0, **json.loads(settings)})


def _marks(scorer: Any, text: str, entry: Mapping[str, Any]) -> float | None:
    """The scorer's marks in [0, 1], or None where it raises: they parse answers as they please."""
    try:
        return min(1.0, max(0.0, float(scorer.score_answer(text, entry))))
    except Exception:
        return None


def _is_harmless(task: str, text: str) -> bool:
    """Whether the scorer of ``task`` may see a text: it does not execute it, or executing it can do nothing and ends soon."""
    if task in _EVALUATES:
        # Capitals, digits and blanks: small letters would name the scorer's own variables, the reference answer among them.
        return re.fullmatch(r"[A-Z0-9_\s,]*", text) is not None or _parsed(text, ast.literal_eval) is not None
    if task in _PARSES:
        formula = _parsed(text, lambda text: ast.parse(text, mode="eval"))
        return formula is not None and 0 < _power(formula.body) <= _MAX_POWER
    return True


def _parsed(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text) if len(text) <= _MAX_FORMULA else None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _power(node: ast.AST) -> float:
    """The highest power in a formula, exponents over one another multiplied; 0 for what is no formula of numbers, variables,
    ``+ - * / **`` and the functions of `_FUNCTIONS`."""
    match node:
        case ast.Constant(value=int() | float() as number) if abs(number) < _MAX_NUMBER:
            return 1
        case ast.Name(id=name) if len(name) <= 2 or name == "pi":
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _power(operand)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return 2 * _power(argument)  # so that nesting is bounded too
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            powers = _power(left), _power(right)
            return max(powers) if min(powers) else 0
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(left) * _exponent(right)
    return 0


def _exponent(node: ast.AST) -> float:
    """A bound of an exponent's size; infinite where it is more than numbers and variables under ``+ - * /``."""
    match node:
        case ast.Constant(value=int() | float() as number) if abs(number) < _MAX_NUMBER:
            return max(1.0, abs(number))
        case ast.Name():
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return 2 * _exponent(left) * _exponent(right)
    return math.inf


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(part) for part in value) if isinstance(value, (list, tuple)) else value
