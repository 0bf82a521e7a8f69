"""Whether what a program gave is what a test expects. Nothing here trusts what came out of the sandbox."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

# A number that stands alone, in ASCII digits. Possessive repeats keep the search linear in the length of the text.
_NUMBER = re.compile(r"(?<![\w.])([+-]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+)(?![\w.])", re.ASCII)
_MAX_INT_DIGITS = 4300  # int() refuses more; Decimal is exact at any length


def same_output(expected: str, got: str, tolerance: float) -> bool:
    """Whether two outputs agree line by line.

    Whitespace at the end of a line and empty lines at the end do not count; all else does, spaces inside a line too. Where a
    number of the expected line is a decimal (it has a point or an exponent), the number in its place may differ by
    ``tolerance``, absolute or relative, and may be written in any way; integers and words must be the same text.
    """
    lines, others = expected.rstrip().split("\n"), got.rstrip().split("\n")
    return len(lines) == len(others) and all(map(_same_line, lines, others, [tolerance] * len(lines)))


def same_value(expected: Any, got: Any, tolerance: float) -> bool:
    """Whether two JSON values are equal as Python compares them, but for floats.

    Where ``expected`` is a float, ``got`` may differ by ``tolerance``, absolute or relative; NaN equals NaN. An expected
    integer or bool must be met exactly, by any type of number: ``3.0`` is 3 and ``1`` is true.
    """
    pairs = [(expected, got)]  # no recursion: the depth of `got` is the candidate's choice
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict):
            if one.keys() != other.keys():
                return False
            pairs += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, (int, float, Decimal)) and isinstance(other, (int, float, Decimal)):
            if not _same_number(one, other, tolerance):
                return False
        elif type(one) is not type(other) or one != other:
            return False
    return True


def read_json(data: bytes) -> Any:
    """JSON as the sandbox wrote it. Raises ValueError where it is none, or too deep; integers of any length are exact."""
    try:
        return json.loads(data, parse_int=lambda digits: int(digits) if len(digits) < _MAX_INT_DIGITS else Decimal(digits))
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _same_line(expected: str, got: str, tolerance: float) -> bool:
    expected, got = expected.rstrip(), got.rstrip()
    if expected == got:
        return True
    pieces, others = _NUMBER.split(expected), _NUMBER.split(got)
    if len(pieces) != len(others) or pieces[::2] != others[::2]:
        return False
    return all(
        one == other or (re.search("[.eE]", one) is not None and _close(float(one), float(other), tolerance))
        for one, other in zip(pieces[1::2], others[1::2], strict=True)
    )


def _same_number(expected: float | Decimal, got: float | Decimal, tolerance: float) -> bool:
    if isinstance(expected, float):
        try:
            return _close(expected, float(got), tolerance)
        except OverflowError:  # an integer beyond all floats
            return False
    return expected == got


def _close(expected: float, got: float, tolerance: float) -> bool:
    if math.isfinite(expected) and math.isfinite(got):
        return abs(expected - got) <= tolerance * max(1.0, abs(expected))
    return expected == got or (math.isnan(expected) and math.isnan(got))
