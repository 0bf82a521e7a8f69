r"""What the grammar of `rewards.math_grammar` does not know (integrals, sums, limits, set differences, ...) goes to math-verify.

It gets the one answer whole and as it is: math-verify's own extraction would look for boxes and formulas inside it, read what stands behind the
last ``=`` where the rest makes no sense, and take ``N`` for ``n``. It gets the gold in the gold's place, no time limit of its own (it would need
signals), and enough digits that it does not round. It runs in the child process of `rewards.math_child` alone.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from rewards.math_tokens import Unreadable, normalize

_DIGITS = 60
_NORMAL = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
_CONVERSION = ConversionConfig(lowercase_symbols=False)

logging.disable(logging.CRITICAL)  # it warns of every answer that it can not read


def formula(text: str) -> Any:
    """Raises `Unreadable`."""
    try:
        latex = normalize_latex(normalize(text), _NORMAL)
        return latex2sympy(
            latex, is_real=not should_treat_as_complex(latex), normalization_config=None, conversion_config=_CONVERSION
        )
    except MemoryError:
        raise
    except Exception as error:  # whatever its parser stumbles over
        raise Unreadable(text) from error


def sides(text: str) -> list[str]:
    """What stands between the signs ``=`` of an equation, outside brackets."""
    depth, cuts = 0, [-1]
    for place, sign in enumerate(text):
        depth += (sign in "{[(") - (sign in "}])")
        if sign == "=" and depth == 0:
            cuts.append(place)
    return [text[start + 1 : end].strip() for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


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
