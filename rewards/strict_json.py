"""JSON as others send it: what is read has one meaning, or is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn


def read_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8, with or without a byte order mark.

    Raises ValueError for what is none; UnicodeDecodeError, which is one, for another encoding. NaN, infinities and numbers too
    large for a float are none, nor is an object with one key twice, of which readers take now the first and now the last.
    """
    try:
        return json.loads(
            data.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:100]!r} stands twice in an object")
    return found
