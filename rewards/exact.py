"""Verifiers that compare what a text says with the reference answer exactly."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from typing import Any

from rewards.contract import InvalidItem, Verdict
from rollout.records import Outcome

# A number as people write it, with what belongs to it: decimals, groups, fractions, times, powers, exponents, letters. So
# the 14 of "3.14" is never taken for an integer. A sign after a digit, a letter or a closing bracket is an operator, and
# digits after a letter are part of a name. Possessive repeats keep the search linear in the length of the text.
_SIGN = "[+\N{MINUS SIGN}-]"
_NUMBER = re.compile(
    rf"(?<![\w./^])(?:(?<![)\]}}])(?P<sign>{_SIGN}))?(?P<digits>[0-9]++)"
    rf"(?P<rest>(?:[.,/:^]{_SIGN}?[0-9]++)*+(?:[eE]{_SIGN}?[0-9]++)?+\w*+)"
)
_WHOLE = re.compile(rf"\s*(?P<sign>{_SIGN})?(?P<digits>[0-9]++)\s*")


def exact_integer(completion: str, answer: Any, *, last: bool = True) -> Verdict:
    """1.0 where the completion's integer equals the answer exactly, at any length; else 0.0.

    With ``last`` the last number in the text counts; without it, the whole text must be one integer. Leading zeros do not
    matter, ``-0`` is 0, a sign is ``+``, ``-`` or U+2212. Decimals, fractions, powers, digits grouped by commas and
    digits run together with letters (``5e3``, ``7kg``) are numbers but no integers. No integer: outcome ``unparsed``.

    Raises `InvalidItem` unless ``answer`` is an int or a string that is one integer.
    """
    gold = _gold(answer)
    found = _last_integer(completion) if last else _whole_integer(completion)
    if found is None:
        return Verdict(value=0.0, accuracy=0.0, outcome=Outcome.UNPARSED, extracted=None)
    right = found == gold
    return Verdict(value=float(right), accuracy=float(right), outcome=Outcome.RIGHT if right else Outcome.WRONG, extracted=found)


def _gold(answer: Any) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool):
        # By way of Decimal, which is exact and has no limit on digits; int's own str() refuses more than 4,300.
        return format(Decimal(answer), "f")
    gold = _whole_integer(answer) if isinstance(answer, str) else None
    if gold is None:
        raise InvalidItem(f"the reference answer {answer!r} is not an integer; write it as 42 or '42'")
    return gold


def _last_integer(text: str) -> str | None:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _canonical(last[0]) if last and not last[0]["rest"] else None


def _whole_integer(text: str) -> str | None:
    number = _WHOLE.fullmatch(text)
    return None if number is None else _canonical(number)


def _canonical(number: re.Match[str]) -> str:
    """Digits without leading zeros, with ``-`` where negative: equal strings exactly where the integers are equal."""
    digits = number["digits"].lstrip("0") or "0"
    return f"-{digits}" if number["sign"] not in (None, "+") and digits != "0" else digits
