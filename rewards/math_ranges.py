r"""What a parameter of an answer runs over: ``cx for any real c``, ``\frac{\pi}{4} + k\pi, k \in \mathbb{Z}``."""

from __future__ import annotations

import re

from rewards.math_choices import untexted

_START = re.compile(r"[,(]|(?:\\q?quad|\b)\s*(?:for|where|with)\b|\\forall(?![A-Za-z])")
_PIECE = re.compile(
    r"\\mathbb\s*\{?\s*(?P<set>[A-Z])\s*\}?|(?P<letter>(?<![A-Za-z])[A-Za-z](?:_\{?\w\}?)?(?![A-Za-z]))|(?P<word>\\?[A-Za-z]+)|[\s,.$()]|\\[,;: ]"
)
_SETS = {"R": "real", "Z": "integer", "Q": "rational", "C": "complex", "N": "natural"}
_RANGES = {*_SETS.values(), "positive", "negative", "nonnegative", "nonzero", "odd", "even"}
_OTHER = frozenset(
    [
        r"for",
        r"where",
        r"with",
        r"any",
        r"all",
        r"every",
        r"each",
        r"some",
        r"arbitrary",
        r"a",
        r"an",
        r"is",
        r"are",
        r"be",
        r"can",
        r"the",
        r"in",
        r"of",
        r"number",
        r"value",
        r"constant",
        r"parameter",
        r"\in",
        r"\forall",
        r"\quad",
        r"\qquad",
    ]
)
_WORDS = re.compile(r"\\[A-Za-z]+|[A-Za-z]{5,}")
MAX_TAIL = 150  # characters


def without_range(text: str) -> tuple[str, frozenset[str]]:
    """The answer and what its parameters run over, empty where that is not said.

    Only a tail that says nothing else is taken off, about names that stand before it: ``x > 0`` is a condition, and part of the answer.
    """
    plain = untexted(text)
    for start in _START.finditer(plain, max(0, len(plain) - MAX_TAIL)):
        before = plain[: start.start()].rstrip(" ,\\")
        found = _range(plain[start.start() :], before)
        if found is not None and before:
            return before, found
    return text, frozenset()


def _range(tail: str, before: str) -> frozenset[str] | None:
    position, letters, words = 0, set(), set()
    while position < len(tail):
        piece = _PIECE.match(tail, position)
        if piece is None:
            return None
        position = piece.end()
        if piece["letter"] and piece["letter"] != "a":
            letters.add(piece["letter"])
        elif piece["set"]:
            words.add(_SETS.get(piece["set"], piece["set"]))
        elif piece["word"]:
            words.add(piece["word"].lower().removesuffix("s") if len(piece["word"]) > 3 else piece["word"].lower())
    ranges = words & _RANGES
    if not words <= _RANGES | _OTHER or not (ranges or "constant" in words or "arbitrary" in words) or not letters:
        return None
    if any(letter not in _WORDS.sub("", before) for letter in letters):
        return None
    return frozenset(ranges)
