"""Verifiers that compare what a text says with the reference answer exactly."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal

from rewards.answers import final_text
from rewards.contract import InvalidItem, RewardError, Verdict
from rollout.records import Outcome

# A number as people write it, with what belongs to it: decimals, groups, fractions, times, powers, exponents, letters. So
# the 14 of "3.14" is never taken for an integer. A sign after a digit, a letter or a closing bracket is an operator, and
# digits after a letter are part of a name. Possessive repeats keep the search linear in the length of the text.
_SIGN = "[+\N{MINUS SIGN}-]"
_NUMBER = re.compile(
    rf"(?<![\w./^])(?:(?<![)\]}}])(?P<sign>{_SIGN}))?(?P<digits>[0-9]++)"
    rf"(?P<rest>(?:[.,/:^]{_SIGN}?[0-9]++)*+(?:[eE]{_SIGN}?[0-9]++)?+\w*+)"
)
# The same for numbers that need not be integers, with a percent sign; and what of it is read.
_TOKEN = re.compile(
    rf"(?<![\w./^])(?:(?<![)\]}}])(?P<sign>{_SIGN}))?(?P<body>(?:[0-9]++|\.[0-9]++)(?:[.,/:^]{_SIGN}?[0-9]++)*+"
    rf"(?:[eE]{_SIGN}?[0-9]++)?+\w*+)(?:\s?\\?(?P<percent>%))?+"
)
_PLAIN = re.compile(
    r"(?P<decimal>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++|[0-9]++)?(?:\.[0-9]++)?(?:[eE][+-]?[0-9]{1,3})?)(?:/(?P<below>[0-9]++))?"
)
_MAX_NUMBER = 1000  # characters
_MOST_DECOMPOSED = 4  # code points that compose to one, or to what is folded to one (Unicode, Annex 15)
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
    return _verdict(found == gold, found)


def exact(
    completion: str,
    answer: Any,
    prompt: str = "",
    *,
    ignore_case: bool = False,
    ignore_whitespace: bool = True,
    ignore_punctuation: bool = False,
) -> Verdict:
    """1.0 where the final text of the completion (`final_text`) equals the answer, or one of a list of accepted answers.

    Both sides are normalised alike: composed Unicode (NFC), no whitespace at the ends, and by setting: case folded; runs of
    whitespace as one space; punctuation removed, except a dash, a point, a comma, a colon or a slash before a digit (``-5`` and ``3.14``
    stay what they are). Nothing else is made equal: ``4.0`` is not ``4``. No final text: outcome ``unparsed``.

    Raises `InvalidItem` unless ``answer`` is a text, an int or a list of these, each with something left after normalising.
    """

    def plain(text: str) -> str:
        if ignore_punctuation:
            text = "".join(c for c, after in zip(text, f"{text[1:]} ", strict=False) if not _is_punctuation(c, after))
        if ignore_whitespace:
            text = " ".join(text.split())
        return (text.casefold() if ignore_case else text).strip()

    accepted = set()
    for gold in answer if isinstance(answer, list) and answer else [answer]:
        accepted.add(plain(unicodedata.normalize("NFC", _written(gold) or "")))
        if "" in accepted:
            raise InvalidItem(f"the reference answer {gold!r} is no text to compare with; write a text, or a list of texts")
    text = final_text(completion, prompt)
    found = plain(text)
    # Composing takes time quadratic in the marks on one letter, so a text that is too long to be equal is left as it is.
    if len(found) <= _MOST_DECOMPOSED * max(map(len, accepted)):
        found = plain(unicodedata.normalize("NFC", text))
    return _verdict(found in accepted, found or None)


def numeric(
    completion: str,
    answer: Any,
    prompt: str = "",
    *,
    last: bool = True,
    absolute: float = 0.0,
    relative: float = 0.0,
    percent: Literal["convert", "strip"] = "convert",
) -> Verdict:
    """1.0 where the number in the final text of the completion (`final_text`) is near enough to the answer: their difference is at
    most ``absolute`` or at most ``relative`` times the answer's magnitude. Exact arithmetic; without a tolerance, equality.

    With ``last`` the last number of the text counts; without it, the whole text must be one number. A number is a decimal
    (``-3.14``, ``.5``, ``1e-3``), one with commas between groups of three digits (``1,234.5``), or a fraction ``3/4``; a sign is
    ``+``, ``-`` or U+2212. ``50%`` is 0.5, or with ``percent: strip`` 50, in the completion and in the answer alike. What is
    run together with other characters is no number: ``7kg``, ``12:30``, ``1,23``, ``2^10``. Exponents have at most three
    digits and numbers at most 1,000 characters, so that none costs more than it is worth. No number: outcome ``unparsed``.

    Raises `InvalidItem` unless ``answer`` is an int, a finite float or a text that is one number.
    """
    _check_tolerances(absolute=absolute, relative=relative)
    written = repr(answer) if isinstance(answer, float) else _written(answer)
    gold = None if written is None else _whole_number(written, percent)
    if gold is None:
        raise InvalidItem(f"the reference answer {answer!r} is not a number; write it as 0.5, '0.5', '1/2' or '50%'")
    text = final_text(completion, prompt)
    found = _last_number(text, percent) if last else _whole_number(text, percent)
    if found is None:
        return _verdict(False, None)
    # By way of the text: 0.1 is a tenth here, not the double next to it.
    tolerance = max(Fraction(str(absolute)), Fraction(str(relative)) * abs(gold))
    return _verdict(abs(found - gold) <= tolerance, _spell(found))


def _check_tolerances(*, absolute: float, relative: float, **_: Any) -> None:
    for name, tolerance in (("absolute", absolute), ("relative", relative)):
        if tolerance < 0:
            raise RewardError(f"{name}={tolerance} is negative; 0 is no tolerance")


numeric.prepare = _check_tolerances  # type: ignore[attr-defined]


def _gold(answer: Any) -> str:
    written = _written(answer)
    gold = None if written is None else _whole_integer(written)
    if gold is None:
        raise InvalidItem(f"the reference answer {answer!r} is not an integer; write it as 42 or '42'")
    return gold


def _written(answer: Any) -> str | None:
    """A text or an int as text, else None. By way of Decimal, which has no limit on digits; int's own str() refuses more than 4,300."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return format(Decimal(answer), "f")
    return answer if isinstance(answer, str) else None


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


def _verdict(right: bool, extracted: str | None) -> Verdict:
    outcome = Outcome.UNPARSED if extracted is None else Outcome.RIGHT if right else Outcome.WRONG
    return Verdict(value=float(right), accuracy=float(right), outcome=outcome, extracted=extracted)


def _is_punctuation(character: str, after: str) -> bool:
    """Whether it is, and no part of the number that ``after`` begins or goes on."""
    category = unicodedata.category(character)
    return category[0] == "P" and not ((category == "Pd" or character in ".,:/") and after.isdigit())


def _last_number(text: str, percent: str) -> Fraction | None:
    last = deque(_TOKEN.finditer(text), maxlen=1)
    return _value(last[0], percent) if last else None


def _whole_number(text: str, percent: str) -> Fraction | None:
    token = _TOKEN.fullmatch(text.strip())
    return None if token is None else _value(token, percent)


def _value(token: re.Match[str], percent: str) -> Fraction | None:
    plain = _PLAIN.fullmatch(token["body"].replace("\N{MINUS SIGN}", "-")) if len(token["body"]) <= _MAX_NUMBER else None
    if plain is None or (plain["below"] and not plain["below"].strip("0")):
        return None
    # Decimal reads any number of digits; int and Fraction refuse more than Python's limit.
    value = Fraction(Decimal(plain["decimal"].replace(",", ""))) / Fraction(Decimal(plain["below"] or "1"))
    if token["percent"] and percent == "convert":
        value /= 100
    return -value if token["sign"] not in (None, "+") else value


def _spell(number: Fraction) -> str:
    """One spelling a number: its digits where they end, else numerator/denominator."""
    twos_and_fives = number.denominator
    for prime in (2, 5):
        while twos_and_fives % prime == 0:
            twos_and_fives //= prime
    if twos_and_fives > 1:
        return f"{Decimal(number.numerator)}/{Decimal(number.denominator)}"
    with localcontext(prec=4 * _MAX_NUMBER):
        return format(Decimal(number.numerator) / Decimal(number.denominator), "f")
