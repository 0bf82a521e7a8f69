"""The verifier of multiple-choice answers."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

from rewards.answers import final_text
from rewards.contract import InvalidItem, RewardError, Verdict
from rollout.records import Outcome


def choice(completion: str, answer: Any, prompt: str = "", *, choices: str = "ABCDEFGHIJ") -> Verdict:
    r"""1.0 where the letter chosen in the final text of the completion (`final_text`) is the answer; else 0.0.

    The first of these that the text has decides, and of several of one kind the last:

    1. ``\boxed{B}``, also ``\boxed{(B) Paris}``; a box that does not hold one letter is ``unparsed``;
    2. the whole text, where it is a letter: ``B``, ``b.``, ``(B)``;
    3. a letter after *answer*, *option* or *choice*: ``Answer: B``, ``the answer is (B)``;
    4. a letter in brackets, a capital at the end of a line, or one before ``.``, ``)`` or ``:`` at the start of a line.

    Markup (``$``, ``*``, ``\text{}``) and double quotes do not matter. Small letters count in brackets and where nothing follows. A
    letter out of a word, an article or a pronoun is no choice, nor are letters joined by *or*, *and*, a comma, a slash or ``|``, nor
    one behind *not*, *neither* or *nor*. Nothing chosen: outcome ``unparsed``.

    Raises `InvalidItem` unless ``answer`` is one of ``choices``, plain or as ``(B)``, ``B)`` or ``B.``.
    """
    kinds = _kinds(choices.upper())
    gold = re.fullmatch(rf"\(?({kinds.letter})[.)]?", answer.strip()) if isinstance(answer, str) else None
    if gold is None:
        raise InvalidItem(f"the reference answer {answer!r} is none of the choices {choices}; write it as 'B'")
    found = _chosen(final_text(completion, prompt), kinds)
    outcome = Outcome.UNPARSED if found is None else Outcome.RIGHT if found == gold[1].upper() else Outcome.WRONG
    right = float(outcome is Outcome.RIGHT)
    return Verdict(value=right, accuracy=right, outcome=outcome, extracted=found)


def _prepare(*, choices: str) -> None:
    if not re.fullmatch("[A-Za-z0-9]+", choices):
        raise RewardError(f"choices={choices!r}: name the letters in one word, such as ABCD")


choice.prepare = _prepare  # type: ignore[attr-defined]


class _Kinds(NamedTuple):
    letter: str  # the class of letters, of both cases
    alone: re.Pattern[str]
    boxed: re.Pattern[str]
    after_word: re.Pattern[str]
    marked: re.Pattern[str]
    joined_before: re.Pattern[str]
    joined_after: re.Pattern[str]


@lru_cache
def _kinds(choices: str) -> _Kinds:
    """The patterns for some capital letters. Possessive repeats keep each search linear in the length of the text."""
    capital, letter = f"[{re.escape(choices)}]", f"[{re.escape(choices + choices.lower())}]"
    bracketed = rf"(?<=[(\[]){letter}(?=[)\]])"
    ended = r"(?![\w'\N{RIGHT SINGLE QUOTATION MARK}-])"
    # "A cat" and "I think" go on as sentences do; "A because" is a choice with its reason.
    free = rf"(?<!\w){capital}{ended}(?!(?<=[AI])[ ](?!(?:because|since|as|and|or|but)\b)[a-z])"
    another = rf"(?:[(\[]{letter}[)\]]|(?<!\w)(?!I){capital}{ended})"
    join = r"\s{0,9}(?:[,;]?\s{0,9}\(?\b(?i:or|and)\b|[,/&|])\s{0,9}"
    return _Kinds(
        letter=letter,
        alone=re.compile(rf"[(\[]?({letter})[)\]]?[.:]?"),
        boxed=re.compile(rf"[(\[]?({letter})(?:[)\]]?[.:]?|[)\].:]++\s.*+)"),
        after_word=re.compile(
            r"(?<!\w)(?i:answer|option|choice)(?:\s++(?:is|was|must be|should be|would be)\b)?+\s*+(?:[:=]\s*+)?+[(\[]?"
            rf"({bracketed}|{free}|(?<!\w){letter}(?=[.,;]?[ \t]*+$))",
            re.MULTILINE,
        ),
        marked=re.compile(
            rf"({bracketed}|(?<![\w'.-])(?!I){capital}(?=[.!]?[ \t]*+$)|(?<=^){capital}(?=[.):](?:\s|$)))", re.MULTILINE
        ),
        joined_before=re.compile(rf"(?:{another}{join}|\b(?i:not|neither|nor)\s{{1,9}})[(\[]?\Z"),
        joined_after=re.compile(rf"[)\]]?{join}{another}"),
    )


def _chosen(text: str, kinds: _Kinds) -> str | None:
    box = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    text = _without_markup(text if box < 0 else _braced(text, box))
    found = (kinds.alone if box < 0 else kinds.boxed).fullmatch(text)
    if found is None and box < 0:
        for kind in (kinds.after_word, kinds.marked):
            last = deque(kind.finditer(text), maxlen=1)
            if last:
                found = last[0]
                break
    if (
        found is None
        or kinds.joined_before.search(text[max(0, found.start(1) - 40) : found.start(1)])
        or kinds.joined_after.match(text, found.end(1))
    ):
        return None
    return found[1].upper()


def _braced(text: str, start: int) -> str:
    """What the braces after ``start`` hold; empty where they do not close."""
    begin, depth = text.index("{", start), 0
    for brace in re.finditer("[{}]", text[begin:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin + 1 : begin + brace.start()]
    return ""


def _without_markup(text: str) -> str:
    return re.sub(
        r"\\(?:text|math)(?:bf|rm|it)?(?![a-zA-Z])|\\[()\[\]]|[${}*`\"\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}]",
        "",
        text,
    ).strip()
