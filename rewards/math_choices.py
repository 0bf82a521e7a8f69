"""Answers to multiple choice: a letter, ``(E)``, and a letter before what it stands for, ``(E) 35``."""

from __future__ import annotations

import re

_CHOICE = re.compile(r"(?:(?i:option|choice|answer)\s*:?\s*)?(?:\(([A-Za-z])\)|([A-Za-z])\)|([A-Z])[.:]?)[.:]?")
_LABEL = re.compile(r"(?:\(([A-J])\)[.:]?\s*|([A-J])[.):]\s+)(?!and\b|or\b|[(,;&])(?=\S)")
# After a label: a second one, or the first taken back.
_HEDGE = re.compile(
    r"(?<![A-Za-z])\([A-J]\)|(?<!\w)[A-J][.):](?=\s|$)|\b(?:or|and|not)\s+\(?[A-J]\b(?!')|^\W*(?i:is|was|not|no|isn't|wrong|incorrect)\b"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def choice(text: str) -> str | None:
    """The letter of an answer that is nothing but one, such as ``(E)``, ``E.``, ``E``, ``Option E``."""
    match = _CHOICE.fullmatch(text.strip())
    return next((group for group in match.groups() if group is not None), None) if match else None


def labelled(text: str) -> tuple[str, str] | None:
    """Letter and content of ``(E) 35``; None where the content names another letter or denies this one."""
    match = _LABEL.match(text)
    if match is None:
        return None
    content = text[match.end() :].strip()
    return None if choice(content) or _HEDGE.search(content) else (match[1] or match[2], content)


def same_choice(found: str, gold: str) -> bool | None:
    """Whether the letters are the same; None where not both answers have one, or both have more than a letter."""
    found_text, gold_text = untexted(found), untexted(gold)
    mine, theirs = choice(found_text), choice(gold_text)
    if mine is not None and theirs is not None:
        # As written "a" and "A" are two names; a mark shows that they are choices.
        return mine == theirs or (mine.upper() == theirs.upper() and not (found == mine and gold == theirs))
    if theirs is not None and (marked := labelled(found_text)) is not None:
        return marked[0].upper() == theirs.upper()
    if mine is not None and (marked := labelled(gold_text)) is not None:
        return marked[0].upper() == mine.upper()
    return None


def without_labels(found: str, gold: str) -> tuple[str, str]:
    """What the labels stand for, where both are the same or only one answer has one. ``(A) x`` beside ``Ax`` stays a product."""
    mine, theirs = labelled(untexted(found)), labelled(untexted(gold))
    if mine is not None and theirs is not None:
        return (mine[1], theirs[1]) if mine[0] == theirs[0] else (found, gold)
    if mine is not None and not _names(gold, mine[0]):
        return mine[1], gold
    if theirs is not None and not _names(found, theirs[0]):
        return found, theirs[1]
    return found, gold


def untexted(text: str) -> str:
    """The text without the commands of text around its parts."""
    return _TEXT.sub(r"\1", text).strip() if "\\" in text else text


def _names(text: str, letter: str) -> bool:
    return re.search(rf"{letter}(?![a-z])", text) is not None
