r"""From the text of one answer to its structure.

`read` gives a tree that holds no decision about equality: lists, sets, tuples and intervals, equations and inequalities, quantities
with units, times, words, and in them formulas. What the grammar does not know (integrals, sums, limits, ...) is `Unreadable`; that is left to
math-verify (`rewards.math_library`). ``a \pm b`` is the list of both values. ``12:30`` is a time where its parts have two digits, ``(a, b)`` a pair
or an open interval: `rewards.math_compare` decides by what it is compared with.
"""

from __future__ import annotations

import re

from rewards.math_formulas import RELATIONS, FormulaParser
from rewards.math_nodes import ALL_REALS, EMPTY, Node, flat, plain_words, spread
from rewards.math_reader import nested
from rewards.math_tokens import FUNCTIONS, Token, Unreadable, tokens
from rewards.math_units import SEPARATORS, unit_at

_WORDS_ONLY = re.compile(r"(?:[^\W\d_]|[ '.,!?-])*")
_NO_WORDS = frozenset(("and", "or", "pi", "inf", "infinity", "i", "e"))
_SAID_BEFORE = re.compile(r"(?i)(?:so |thus |hence |therefore,? )?(?:the )?(?:final )?answer\s*(?:is\b|[:=])\s*")
_NOTHING = re.compile(
    r"(?:(?:there)?(?:is|are|has|have))?no(?:real|integer|such)?(?:solutions?|roots?)(?:exists?)?|(?:the)?emptyset"
)
_EVERYTHING = re.compile(r"(?:all|any|every|theset(?:of)?(?:all)?)?(?:the)?real(?:s|numbers?)x?|all(?:real)?(?:values(?:of)?)?x")


def read(text: str) -> Node:
    """The structure of one answer. Raises `Unreadable`."""
    text = _SAID_BEFORE.sub("", text, count=1).strip()
    found = tokens(text)
    if not found:
        raise Unreadable("empty")
    words = _words(found)
    if words is not None:
        plain = plain_words(words)
        return EMPTY if _NOTHING.fullmatch(plain) else ALL_REALS if _EVERYTHING.fullmatch(plain) else Node("text", (words,))
    parser = _Parser(found)
    items = parser.items()
    if parser.position < len(found):
        raise Unreadable(f"'{parser.peek}' was not expected")
    return spread(listed(items))


def _words(found: list[Token]) -> str | None:
    """The text of an answer that is words and nothing else."""
    if not all(token.kind in ("word", "text") or token.text in ".,'-!?" for token in found):
        return None
    text = "".join((" " if token.spaced else "") + token.text for token in found).strip()
    runs = re.findall(r"[^\W\d_]+", text)
    if not runs or (len(runs) == 1 and len(runs[0]) == 1) or not _WORDS_ONLY.fullmatch(text):
        return None
    # Words are told from products of names by a run of two letters that are no name, separator or function.
    return text if any(len(run) > 1 and run not in _NO_WORDS and run not in FUNCTIONS for run in runs) else None


def listed(items: list[Node]) -> Node:
    """One item as it is; several as a list. ``n = 1, 2, 3`` is one equation whose right side is a list."""
    if len(items) == 1:
        return items[0]
    first, *rest = items
    if (
        first.kind == "chain"
        and first.args[0] in (("=",), ("\\in",))
        and all(item.kind not in ("chain", "text") for item in rest)
    ):
        name, value = first.args[1]
        return Node("chain", (first.args[0], (name, listed([*flat([value]), *flat(rest)]))))
    return Node("list", tuple(flat(items)))


class _Parser(FormulaParser):
    def items(self) -> list[Node]:
        """What is separated by commas, semicolons, *and*, *or*."""
        found = [self.item()]
        while self.separator():
            found.append(self.item())
        if self.accept("\\pmod"):
            modulus = self.argument()
            found = [_residue(item, modulus) for item in found]
        return found

    def separator(self) -> bool:
        any_read = False
        while self.position < len(self.tokens):
            kind, text, _ = self.tokens[self.position]
            if text not in (",", ";", "\\and", "\\or") and not (
                kind in ("word", "text") and text.strip(" ,").lower() in SEPARATORS
            ):
                break
            self.position += 1
            any_read = True
        return any_read

    @nested
    def item(self) -> Node:
        if [token.text for token in self.tokens[self.position + 1 : self.position + 2]] == [":"] and (
            time := self.time()
        ) is not None:
            return time
        outer, self.unit = self.unit, None
        sides, operators = [self.side()], []
        while self.peek in RELATIONS:
            operators.append(self.take())
            sides.append(self.side())
        if operators:
            node = Node("chain", (tuple(operators), tuple(sides)))
        elif self.peek == ":":
            node = self.ratio(sides[0])
        else:
            node = sides[0]
        self.unit = outer
        return node

    def ratio(self, first: Node) -> Node:
        parts = [first]
        while self.accept(":"):
            parts.append(self.sum())
        return Node("ratio", tuple(parts))

    def time(self) -> Node | None:
        """``9:30``, ``9:30:00``, ``9:30 p.m.``"""
        start = self.position
        parts = [self.take()]
        while self.accept(":"):
            parts.append(self.take())
        if not 2 <= len(parts) <= 3 or not all(part.isdigit() for part in parts) or any(len(part) != 2 for part in parts[1:]):
            self.position = start
            return None
        rest = re.sub(r"[.\s]", "", "".join(token.text for token in self.tokens[self.position : self.position + 4])).lower()
        half = rest if rest in ("am", "pm") else ""
        if half:
            self.position = len(self.tokens)
        return Node("time", (*map(int, parts), half))

    def side(self) -> Node:
        """A value with its unit, or a union of sets."""
        parts = [self.quantity()]
        while self.accept("\\cup"):
            parts.append(self.quantity())
        return parts[0] if len(parts) == 1 else Node("union", tuple(parts))

    def quantity(self) -> Node:
        self.unit = None
        value = self.sum()
        if self.position < len(self.tokens) and self.unit is None:
            ending = unit_at(self.tokens, self.position)
            if ending is not None:
                self.position, self.unit = ending
        if value.kind == "pct":
            return Node("qty", (value.args[0], "%"))
        if self.unit is None and _has_degrees(value):
            self.unit = "degree"
        value = _without_degrees(value) if self.unit in ("degree", "C", "F") else value
        return value if self.unit is None else Node("qty", (value, self.unit))

    def bracketed(self) -> Node:
        left = self.take()
        if left == "\\{" and self.accept("\\}"):
            return EMPTY
        bound = left == "\\{" and self.skip_bound_name()
        items = self.items()
        right = self.take()
        if left == "\\{":
            if right != "\\}":
                raise Unreadable("a set is not closed")
            if bound:
                return listed(items)
            return Node("set", tuple(flat(items)))
        if left == "\\langle" and right == "\\rangle":
            return Node("seq", ("(", ")", *items))
        if right not in (")", "]"):
            raise Unreadable("a bracket is not closed")
        if len(items) == 1 and (left, right) in (("(", ")"), ("[", "]")):
            return items[0]
        return Node("seq", (left, right, *items))

    def skip_bound_name(self) -> bool:
        r"""Over the ``x :`` or ``x \in \mathbb{R} \mid`` of a set given by a condition."""
        texts = [token.text for token in self.tokens[self.position : self.position + 7]]
        after = 6 if texts[1:6] == ["\\in", "\\mathbb", "{", "R", "}"] else 1
        if texts[after : after + 1] in ([":"], ["|"]) and texts[0].isalpha():
            self.position += after + 1
            return True
        return False


def _residue(item: Node, modulus: Node) -> Node:
    """``n = 1`` as the residue of n."""
    if item.kind == "chain":
        operators, sides = item.args
        return Node("chain", (operators, (*sides[:-1], Node("residue", (sides[-1], modulus)))))
    return Node("residue", (item, modulus))


def _has_degrees(node: Node) -> bool:
    return node.kind == "deg" or (
        node.kind != "call" and any(_has_degrees(child) for child in node.args if isinstance(child, Node))
    )


def _without_degrees(node: Node) -> Node:
    """An angle in degrees as its number; inside a function it stays an angle."""
    if node.kind == "deg":
        return _without_degrees(node.args[0])
    if node.kind == "call":
        return node
    return Node(node.kind, tuple(_without_degrees(child) if isinstance(child, Node) else child for child in node.args))
