"""What a function of the objective computes, in one line for a reader: ``limen explain`` prints it with the numbers in use.

A function says it with ``@formula("r min(1, {cap})", "Author 2401.00001")``, which sets two attributes; a function of the user's may
set them itself, ``mine.formula = "..."``. Without, the first paragraph of the docstring stands in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_ARXIV = re.compile(r"(?:[A-Z][\w.+-]*(?: [A-Z][\w.+-]*)* )?(?:arXiv )?\d{4}\.\d{5}(?: v\d)?")


def formula(text: str | Callable[..., str], source: str = "") -> Callable[[Function], Function]:
    """Args: ``text``: the formula, with keyword parameters in braces; or a function of them that gives it. ``source``: where it is
    from; "ours" where it is from nowhere else."""

    def mark(function: Function) -> Function:
        function.formula, function.source = text, source  # type: ignore[attr-defined]
        return function

    return mark


def formula_of(function: Callable[..., Any], params: Mapping[str, Any]) -> str:
    """The formula with the numbers of ``params``, and the defaults of the parameters that are not among them."""
    text = getattr(function, "formula", None)
    if text is None:
        return _first_paragraph(function) or "(no formula and no docstring)"
    values = all_params(function, params)
    try:
        return str(text(**values) if callable(text) else text.format(**{name: _number(value) for name, value in values.items()}))
    except (KeyError, IndexError, TypeError, ValueError):  # of a user's own
        return str(text)


def source_of(function: Callable[..., Any]) -> str:
    """Where it is from: what it says, else the papers that its docstring names."""
    given = getattr(function, "source", None)
    if isinstance(given, str):
        return given
    return ", ".join(dict.fromkeys(_ARXIV.findall(inspect.getdoc(function) or "")))


def all_params(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword-only parameters in use: those given, and the defaults of the others."""
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    return own | dict(params)


def _number(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _first_paragraph(function: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
