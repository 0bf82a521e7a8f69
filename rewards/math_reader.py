"""What every part of the grammar reads tokens with, and arrays: matrices and cases."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

from rewards.math_nodes import Node
from rewards.math_tokens import Token, Unreadable

P = TypeVar("P", bound="TokenReader")

MAX_DEPTH = 150  # some 50 brackets inside each other


def nested(method: Callable[[P], Node]) -> Callable[[P], Node]:
    """Counts how deep such methods call each other, well before Python's own limit."""

    @functools.wraps(method)
    def counted(self: P) -> Node:
        if self.depth >= MAX_DEPTH:
            raise Unreadable("nested too deep")
        self.depth += 1
        node = method(self)
        self.depth -= 1
        return node

    return counted


class TokenReader(ABC):
    """Every method reads from ``position`` on and leaves it after what it read."""

    def __init__(self, found: list[Token]) -> None:
        self.tokens = found
        self.position = 0
        self.depth = 0
        self.unit: str | None = None  # of the item that is being read
        self.in_bars = False

    @property
    def peek(self) -> str:
        return self.tokens[self.position].text if self.position < len(self.tokens) else ""

    def take(self) -> str:
        text = self.peek
        self.position += 1
        return text

    def accept(self, *texts: str) -> bool:
        if self.peek in texts and self.position < len(self.tokens):
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"'{text}' was expected, not '{self.peek}'")

    @abstractmethod
    def items(self) -> list[Node]:
        """What is separated by commas, semicolons, *and*, *or*."""

    @abstractmethod
    def side(self) -> Node:
        """A value with its unit, or a union of sets."""

    @abstractmethod
    def bracketed(self) -> Node:
        """What begins with a bracket."""

    def letters(self) -> Iterator[str]:
        braced = self.accept("{")
        while self.position < len(self.tokens) and self.tokens[self.position].kind == "word":
            yield self.take()
            if not braced:
                return
        if braced:
            self.expect("}")

    def matrix(self) -> Node:
        environment = "".join(self.letters())
        if environment == "cases":
            return self.cases()
        if environment not in ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"):
            raise Unreadable(f"\\begin{{{environment}}} is not known")
        if environment == "array":
            self.expect("{")
            while not self.accept("}"):
                self.take()
                if self.position > len(self.tokens):
                    raise Unreadable("array")
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while self.peek != "\\end":
            if self.peek == "\\\\" and not row:
                self.position += 1
                continue
            row.append(self.side())
            if self.accept("&"):
                continue
            rows.append(tuple(row))
            row = []
            if not self.accept("\\\\"):
                break
        self.expect("\\end")
        if "".join(self.letters()) != environment or len({len(row) for row in rows}) != 1:
            raise Unreadable("a matrix whose rows differ in length")
        return Node("matrix", tuple(rows))

    def cases(self) -> Node:
        r"""Equations below each other, as a list; values with their conditions, ``x & \text{if } x > 0``, as cases."""
        rows: list[tuple[Node, ...]] = []
        while self.peek != "\\end":
            cells = [self.cell()]
            while self.accept("&"):
                cells.append(self.cell())
            rows.append(tuple(cells))
            self.accept("\\\\")
        self.expect("\\end")
        if "".join(self.letters()) != "cases" or len({len(row) for row in rows}) != 1 or len(rows[0]) > 2:
            raise Unreadable("cases whose rows differ in length")
        return Node("list", tuple(row[0] for row in rows)) if len(rows[0]) == 1 else Node("cases", tuple(rows))

    def cell(self) -> Node:
        """Of cases: a value, or a condition in signs or words."""
        start = end = self.position
        while end < len(self.tokens) and self.tokens[end].text not in ("&", "\\\\", "\\end"):
            end += 1
        found = [token for token in self.tokens[start:end] if token.text.lower() not in ("if", "for", "when")]
        while found and found[-1].text in (",", ";", "."):
            found.pop()
        self.tokens[start:end] = found
        if any(token.kind == "text" for token in found):
            self.position += len(found)
            return Node("text", (" ".join(token.text for token in found),))
        items = self.items()
        return items[0] if len(items) == 1 else Node("list", tuple(items))
