"""The tree that an answer is read into: `Node`, and what only looks at trees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple


class Node(NamedTuple):
    """``kind`` and what belongs to it.

    Formulas: num(Fraction, decimal places or None), sym(name), const(name), add(*), mul(*), div(a, b), pow(a, b), call(name, *args), pm(x), mp(x),
    deg(x), pct(x). Structures: list(*), set(*), seq(left, right, *), union(*), chain(ops, sides), qty(value, unit), matrix(rows), cases(rows), base(digits,
    base), time(*ints, half of the day), ratio(*), residue(value, modulus), text(words).
    """

    kind: str
    args: tuple[Any, ...]


def num(value: int | Fraction) -> Node:
    return Node("num", (Fraction(value), None))


MINUS_ONE = num(-1)
INFINITY = Node("const", ("infinity",))
EMPTY = Node("set", ())
ALL_REALS = Node("const", ("set R",))
FORMULAS = frozenset(("num", "sym", "const", "add", "mul", "div", "pow", "call", "deg", "pct"))
_NO_NAMES: frozenset[Node] = frozenset()


def negative(node: Node) -> Node:
    if node.kind == "num":
        return Node("num", (-node.args[0], node.args[1]))
    return Node("mul", (MINUS_ONE, node))


def product(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))


def names(node: Node) -> frozenset[Node]:
    """The names in a formula, as nodes."""
    kind, args = node
    if kind == "sym":
        return frozenset((node,))
    if kind in ("num", "const"):
        return _NO_NAMES
    return _NO_NAMES.union(*(names(child) for child in args if isinstance(child, Node)))


def flat(items: list[Node]) -> Iterator[Node]:
    for item in items:
        if item.kind == "list":
            yield from item.args
        else:
            yield item


def spread(node: Node) -> Node:
    r"""``a \pm b`` as the list of its two values, wherever in a structure it stands. All its signs go together."""
    if not _holds(node, ("pm", "mp")):
        return node
    if node.kind in ("list", "set"):
        return Node(node.kind, tuple(flat([spread(member) for member in node.args])))
    if node.kind == "chain":
        return Node("chain", (node.args[0], tuple(spread(side) for side in node.args[1])))
    return Node("list", (_signed(node, 1), _signed(node, -1)))


def _holds(node: Any, kinds: tuple[str, ...]) -> bool:
    if isinstance(node, Node):
        return node.kind in kinds or any(_holds(child, kinds) for child in node.args)
    return isinstance(node, tuple) and any(_holds(child, kinds) for child in node)


def _signed(node: Any, sign: int) -> Any:
    if isinstance(node, Node):
        if node.kind in ("pm", "mp"):
            inner = _signed(node.args[0], sign)
            return inner if (sign > 0) == (node.kind == "pm") else negative(inner)
        return Node(node.kind, tuple(_signed(child, sign) for child in node.args))
    return tuple(_signed(child, sign) for child in node) if isinstance(node, tuple) else node


def plain_words(text: str) -> str:
    """Words for comparison: case, blanks and marks around them do not matter."""
    return re.sub(r"\s+", "", text).casefold().strip(".,;:!?'\"")
