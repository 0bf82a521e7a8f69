r"""What the grammar of `rewards.math_grammar` does not know (integrals, sums, limits, set differences, ...) goes to math-verify.

It gets the one answer rather than the text around it, the gold in the gold's place, no time limit of its own (it would need signals), and
enough digits that it does not round. It runs in the child process of `rewards.math_child` alone.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from rewards.math_tokens import Unreadable, normalize

_DIGITS = 60
_CONFIG = (LatexExtractionConfig(boxed_match_priority=-1),)

logging.disable(logging.CRITICAL)  # it warns of every answer that it can not read


def formula(text: str) -> Any:
    """Raises `Unreadable`."""
    found = parse(
        f"${normalize(text)}$", _CONFIG, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    if not found:
        raise Unreadable(text)
    return found[0]


def evaluate(formula: Any) -> None:
    """For the work of it. Raises MemoryError."""
    with contextlib.suppress(ArithmeticError, AttributeError, TypeError, ValueError, NotImplementedError):
        formula.doit().evalf()


def equal(pred: Any, gold: Any) -> bool:
    return bool(
        verify(
            gold,
            pred,
            float_rounding=_DIGITS,
            numeric_precision=_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )
