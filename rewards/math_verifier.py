r"""The verifier ``math``: is the completion's answer the reference answer?

It finds the one answer in the text (`rewards.answers`), reads its structure (`rewards.math_grammar`), and compares it with the reference's: by
exact arithmetic (`rewards.math_exact`), and what is not rational to as many digits as it takes, in a process of its own (`rewards.math_child`). Formulas that
this grammar does not know are left to math-verify, in that process too.

*Status and outcome.* A completion that is wrong, holds no answer (``unparsed``) or asks for more time or memory than allowed (``time_limit``,
``memory_limit``) has the status ok and the value 0. ``invalid`` is a reference answer that is empty, no text or number, or itself can not be read or
evaluated; no completion is then at fault.
"""

from __future__ import annotations

import json
import math as _math
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from rewards import math_child
from rewards.answers import clean, find_answer, last_box
from rewards.contract import InvalidItem, Verdict
from rewards.math_child import Found
from rewards.math_choices import same_choice, untexted, without_labels
from rewards.math_compare import Undecided, same
from rewards.math_exact import Exact
from rewards.math_grammar import read
from rewards.math_nodes import Node, plain_words
from rewards.math_numbers import written_out
from rewards.math_ranges import without_range
from rewards.math_tokens import MAX_LENGTH, Unreadable, normalize
from rollout.records import Outcome

_INTEGER = re.compile(r"\s*(?P<sign>[+-]?)\s*(?P<digits>[0-9]++)\s*\.?\s*")
_DIGITS = re.compile(r"[-+\N{MINUS SIGN}\d\s,.{}!\\~']*+")
_WORDS = re.compile(r"\\(?:text|mbox|hbox)")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")  # of a word or name, not of a command
_SPACES = re.compile(r"\\[,;:! ]|\\(?:left|right)(?![A-Za-z])|[\s$~]")
_AND = re.compile(r"(?<=[a-z])(?:,?and|,)(?=\d)")  # 11 hours and 30 minutes
_LIBRARY = re.compile(
    r"\\(?:i{1,3}nt|oint|sum|prod|lim|setminus|backslash|cap|pmod|det|operatorname|begin|Re|Im|arg|bar|overline)(?![A-Za-z])"
)
_LIMITS = {Found.TIME_LIMIT: Outcome.TIME_LIMIT, Found.MEMORY_LIMIT: Outcome.MEMORY_LIMIT, Found.CRASH: Outcome.CRASH}


def math(
    completion: str,
    answer: Any,
    prompt: str = "",
    *,
    require_box: bool = False,
    timeout_seconds: float = 5.0,
    memory_limit_mb: int = 1024,
    decimal_digits: int = 6,
    require_number: bool = False,
) -> Verdict:
    r"""1.0 where the completion's answer equals ``answer``, a text (LaTeX or plain) or a number; else 0.0.

    ``require_box``: only an answer in ``\boxed{}`` counts. ``timeout_seconds`` and ``memory_limit_mb`` bound the comparison of what is not
    rational. ``decimal_digits``: a decimal of so many significant digits equals a value without a finite decimal that rounds to
    it; 0 never. ``extracted`` is the answer as written; the measure ``symbolic`` is 1 where exact arithmetic was not enough.

    The value of an answer counts, not its form: ``2^{10}`` is ``1024``, and ``37 \\cdot 48`` repeats a question about it. With ``require_number``,
    where the reference answer is a number (integer, decimal, fraction, mixed number, percent; also with a unit, in lists, pairs, intervals),
    the answer must be one: no root, power or product counts, and no fraction that is not in lowest terms unless the reference is it.

    Raises `InvalidItem` for a reference answer that can not be used.
    """
    gold = _reference(answer)
    found = find_answer(completion, require_box=require_box, prompt=prompt)
    if found is None:
        return Verdict(value=0.0, accuracy=0.0, outcome=Outcome.UNPARSED, extracted=None, measures={"symbolic": 0.0})
    symbolic = 0.0
    equal = _same_as_written(clean(found), gold)
    if equal is None:
        mine, theirs, ranges_differ = _bare(clean(found), gold)
        equal = False if ranges_differ else _without_symbols(mine, theirs, decimal_digits, require_number)
    outcome = Outcome.RIGHT if equal else Outcome.WRONG
    if equal is None:
        symbolic = 1.0
        gold_is_read = _structure(theirs) is not None
        library = not gold_is_read or _structure(mine) is None
        decided = math_child.compare(
            mine,
            theirs,
            library=library,
            decimal_digits=decimal_digits,
            timeout_s=timeout_seconds,
            memory_bytes=memory_limit_mb << 20,
        )
        # That math-verify is asked for a reference answer that our grammar reads, and can not read it, is the completion's doing.
        if decided is Found.GOLD and not (library and gold_is_read):
            raise InvalidItem(f"the reference answer {gold!r} can not be read or evaluated as a formula")
        equal = decided is Found.EQUAL
        outcome = _LIMITS.get(decided, Outcome.RIGHT if equal else Outcome.WRONG)
    return Verdict(value=float(equal), accuracy=float(equal), outcome=outcome, extracted=found, measures={"symbolic": symbolic})


def _reference(answer: Any) -> str:
    """The reference answer as text; of a worked solution the last box, or what follows ``####``."""
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if isinstance(answer, int):
        return format(Decimal(answer), "f")
    if isinstance(answer, float) and _math.isfinite(answer):
        return format(Decimal(repr(answer)), "f")
    if isinstance(answer, str):
        box = last_box(answer)
        gold = clean(box if box is not None else answer.rpartition("####")[2])
        if gold.strip("$ "):
            return gold
    raise InvalidItem(
        f"the reference answer {json.dumps(answer, default=repr)[:200]} is no text or number; write it as '42', '\\\\frac{{1}}{{2}}' or 42"
    )


def _same_as_written(found: str, gold: str) -> bool | None:
    """Whether two texts, integers or letters of multiple choice are the same; None where they are something else."""
    if found == gold:
        return True
    integers = _integer(found), _integer(gold)
    if integers[0] is not None and integers[1] is not None:
        return integers[0] == integers[1]
    return same_choice(found, gold) if _LETTER.search(found) and _LETTER.search(gold) else None


def _bare(found: str, gold: str) -> tuple[str, str, bool]:
    """Both without labels and ranges of parameters, and whether these ranges differ."""
    if not (_LETTER.search(found) or _LETTER.search(gold)):
        return found, gold, False
    found, gold = without_labels(found, gold)
    (found, range_found), (gold, range_gold) = without_range(found), without_range(gold)
    return found, gold, bool(range_found and range_gold and range_found != range_gold)


def _without_symbols(found: str, gold: str, decimal_digits: int, require_number: bool) -> bool | None:
    """Whether two answers are the same; None where formulas must be evaluated."""
    mine, theirs = _structure(found), _structure(gold)
    if require_number and theirs is not None and mine != theirs and written_out(theirs) and not (mine and written_out(mine)):
        return False
    if mine is None or theirs is None:
        return _unread(found, gold, theirs)
    try:
        return same(mine, theirs, Exact(decimal_digits))
    except Undecided:
        return None


def _unread(found: str, gold: str, gold_read: Node | None) -> bool | None:
    """The same where our grammar does not know one of both.

    A reference answer is then words, unless it is written as a formula. Only formulas of the kinds in `_LIBRARY` are worth a second reader:
    of other text math-verify takes the part it can read, ``5`` of ``5 \\text{ or maybe 6}``.
    """
    if gold_read is None or gold_read.kind == "text":
        mine, theirs = (_AND.sub("", _SPACES.sub("", untexted(text))) for text in (found, gold))
        if mine == theirs or ("\\" not in mine + theirs and plain_words(mine) == plain_words(theirs)):
            return True
    if gold_read is None and "\\" in gold and not _LIBRARY.search(gold) and not _WORDS.search(gold):
        raise InvalidItem(f"the reference answer {gold[:200]!r} can not be read as a formula; words belong into \\text{{}}")
    if max(len(found), len(gold)) > MAX_LENGTH or _WORDS.search(found) or _WORDS.search(gold):
        return False
    return None if _LIBRARY.search(gold) or _LIBRARY.search(found) else False


def _integer(text: str) -> str | None:
    """Digits without leading zeros, with the sign where negative, at any length."""
    if len(text) > MAX_LENGTH and not _DIGITS.fullmatch(text):
        return None
    match = _INTEGER.fullmatch(normalize(text))
    if match is None:
        return None
    digits = match["digits"].lstrip("0") or "0"
    return f"-{digits}" if match["sign"] == "-" and digits != "0" else digits


def _structure(text: str) -> Node | None:
    return _read_cached(text) if len(text) < 500 else _read(text)  # so that the cache stays small


def _read(text: str) -> Node | None:
    try:
        return read(text)
    except (Unreadable, RecursionError):  # the second where the caller is deep already
        return None


_read_cached = lru_cache(maxsize=4096)(_read)
