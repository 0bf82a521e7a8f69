r"""Whether two answers are the same.

`same` walks two structures and leaves every pair of formulas to ``values``: `rewards.math_exact.Exact`, or `rewards.math_symbolic.Numeric` with
as many digits as it takes. The rules of structures:

- *Lists* (commas, *and*, *or*, ``\pm``, ``x = 1, 2``) and *sets* are one kind: all members, no others, in any order. In a list each
  counts as often as it stands, in a set once. A set of one member is that member.
- *Tuples* keep their order, and ``(0, 1)`` is the open interval where the other is one. A bare list in the tuple's order is accepted for a
  tuple, a tuple for a list is not. Open and closed ends of intervals differ. A column or row is its tuple.
- *Relations*: ``x = 5`` and ``5`` are the same in both directions, ``x = 5`` and ``y = 5`` are not. ``x < 3``, ``x \in (-\infty, 3)`` and
  ``(-\infty, 3)`` are the same. Equations are the same up to a factor. In a chain every side that is no name must be right; what follows
  a value and ``\approx`` is not read.
- *Units*: compared where both have one that is known, without conversion; a missing or unknown one does not matter.
- *Percent*: ``50\%`` equals ``50\%``, ``50`` and ``0.5``. *Degrees*: ``90^\circ`` equals ``90`` and ``\frac{\pi}{2}``.
- *Numerals of a base* are compared as written, also with a numeral whose base is not given. *Times* are compared part by part, ``9:30`` is ``09:30``;
  *ratios* by proportion. *Residues*, ``n \equiv 1 \pmod 3``, by their modulus, and ``4`` is the same one.
- *Words*: case, blanks and marks at the ends do not matter; *yes* is *true*, *no* is *false*.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from rewards.math_nodes import FORMULAS, INFINITY, Node, names, negative, num, plain_words
from rewards.math_relations import coordinates, difference, indexed_values, interval, relation

_OF_INTEGERS = ("time", "ratio", "residue")
_SAME_WORDS = {"true": "yes", "false": "no", "correct": "yes", "incorrect": "no", "dne": "doesnotexist", "undefined": "undefined"}


class Undecided(Exception):
    """``values`` can not tell."""


class Values(Protocol):
    def equal(self, pred: Node, gold: Node) -> bool:
        """Whether two formulas are equal. May raise `Undecided`."""
        ...

    def proportional(self, pred: Node, gold: Node, *, positive: bool) -> bool:
        """Whether one is the other times a constant other than 0."""
        ...


def same(pred: Node, gold: Node, values: Values) -> bool:
    """Whether two answers are the same. Raises what ``values`` raises."""
    return _Comparison(values).same(relation(pred), relation(gold))


class _Comparison:
    def __init__(self, values: Values) -> None:
        self.values = values

    def same(self, pred: Node, gold: Node) -> bool:
        if pred == gold:
            return True
        if pred.kind in ("assign", "equation", "inequality") or gold.kind in ("assign", "equation", "inequality"):
            return self.relations(pred, gold)
        if pred.kind == "qty" or gold.kind == "qty":
            return self.quantities(pred, gold)
        if pred.kind == "text" or gold.kind == "text":
            return self.words(pred, gold)
        if pred.kind in ("interval", "union") or gold.kind in ("interval", "union"):
            return self.intervals(pred, gold)
        if pred.kind == "seq" or gold.kind == "seq":
            return self.sequences(pred, gold)
        if pred.kind in ("list", "set") or gold.kind in ("list", "set"):
            return self.unordered(_members(pred, gold), _members(gold, pred))
        if pred.kind in _OF_INTEGERS or gold.kind in _OF_INTEGERS:
            return self.ratios(pred, gold)
        if pred.kind == "base" or gold.kind == "base":
            return _numerals(pred, gold)
        if pred.kind == gold.kind == "matrix":
            return len(pred.args) == len(gold.args) and all(map(self.all_same, pred.args, gold.args))
        if pred.kind not in FORMULAS or gold.kind not in FORMULAS or _infinite(pred) or _infinite(gold):
            return False
        return self.values.equal(pred, gold)

    def all_same(self, preds: Sequence[Node], golds: Sequence[Node]) -> bool:
        return len(preds) == len(golds) and all(map(self.same, preds, golds))

    def relations(self, pred: Node, gold: Node) -> bool:
        if pred.kind == "inequality" or gold.kind == "inequality":
            return (
                pred.args[:1] == gold.args[:1]
                and pred.kind == gold.kind
                and self.values.proportional(pred.args[1], gold.args[1], positive=True)
            )
        if pred.kind == gold.kind == "assign" and (pred.args[0] == gold.args[0] or None in (pred.args[0], gold.args[0])):
            return all(self.same(side, gold.args[1][-1]) for side in pred.args[1])
        if pred.kind == "assign" and (roots := indexed_values(pred)) is not None and gold.kind in ("list", "set"):
            return self.same(roots, gold)  # x_1 = 1, x_2 = 2
        if gold.kind == "assign" and (roots := indexed_values(gold)) is not None and pred.kind in ("list", "set"):
            return self.same(pred, roots)
        mine, theirs = coordinates(pred), coordinates(gold)
        if mine is not None and theirs is not None:
            return mine.keys() == theirs.keys() and all(self.same(mine[name], theirs[name]) for name in mine)
        difference_of, gold_difference = difference(pred), difference(gold)
        if difference_of is not None and gold_difference is not None:
            return self.values.proportional(difference_of, gold_difference, positive=False)
        if pred.kind == "assign" and gold.kind not in ("equation", "assign"):
            return all(self.same(side, gold) for side in pred.args[1])
        if gold.kind == "assign" and pred.kind not in ("equation", "assign"):
            return self.same(pred, gold.args[1][-1])
        return False

    def quantities(self, pred: Node, gold: Node) -> bool:
        (value, unit), (gold_value, gold_unit) = _quantity(pred), _quantity(gold)
        if unit and gold_unit:
            return unit == gold_unit and self.same(value, gold_value)
        if self.same(value, gold_value):
            return True
        if "%" in (unit, gold_unit):
            if value.kind not in FORMULAS or gold_value.kind not in FORMULAS:
                return False
            return self.same(Node("pct", (value,)) if unit else value, Node("pct", (gold_value,)) if gold_unit else gold_value)
        if "degree" in (unit, gold_unit) and value.kind in FORMULAS and gold_value.kind in FORMULAS:  # the other is in radians
            return self.same(Node("deg", (value,)) if unit else value, Node("deg", (gold_value,)) if gold_unit else gold_value)
        # "2 m" may have meant a product.
        other, letter, amount = (gold_value, unit, value) if unit else (value, gold_unit, gold_value)
        if letter is not None and len(letter) == 1 and Node("sym", (letter,)) in names(other) and amount.kind in FORMULAS:
            return self.same(Node("mul", (amount, Node("sym", (letter,)))), other)
        return False

    def words(self, pred: Node, gold: Node) -> bool:
        if pred.kind == gold.kind:
            mine, theirs = (plain_words(node.args[0]) for node in (pred, gold))
            if _SAME_WORDS.get(mine, mine) == _SAME_WORDS.get(theirs, theirs):
                return True
        product, gold_product = _product_of_names(pred), _product_of_names(gold)
        return product is not None and gold_product is not None and self.same(product, gold_product)

    def intervals(self, pred: Node, gold: Node) -> bool:
        parts = [[interval(part) for part in (node.args if node.kind == "union" else (node,))] for node in (pred, gold)]
        if len(parts[0]) == len(parts[1]) == 1:
            mine, theirs = parts[0][0], parts[1][0]
            if mine.kind != "interval" or theirs.kind != "interval":
                return False
            return mine.args[2:] == theirs.args[2:] and self.all_same(mine.args[:2], theirs.args[:2])
        return self.unordered(parts[0], parts[1])

    def sequences(self, pred: Node, gold: Node) -> bool:
        if gold.kind == "seq" and pred.kind == "list":
            return self.all_same(pred.args, gold.args[2:])
        if (pred.kind == "set" and len(pred.args) == 1) or (gold.kind in ("set", "list") and len(gold.args) == 1):
            return self.unordered(_members(pred, gold), _members(gold, pred))
        if pred.kind == "matrix" or gold.kind == "matrix":
            entries, gold_entries = _vector(pred), _vector(gold)
            return entries is not None and gold_entries is not None and self.all_same(entries, gold_entries)
        if pred.kind != gold.kind or (len(pred.args) == 4 and pred.args[:2] != gold.args[:2]):
            return False
        return self.all_same(pred.args[2:], gold.args[2:])

    def unordered(self, preds: Sequence[Node], golds: Sequence[Node]) -> bool:
        left = list(golds)
        if len(preds) != len(left):
            return False
        for mine in preds:
            found = self.find(mine, left)
            if found is None:
                return False
            del left[found]
        return True

    def find(self, mine: Node, golds: Sequence[Node]) -> int | None:
        undecided: Undecided | None = None
        for place, gold in enumerate(golds):
            try:
                if self.same(mine, gold):
                    return place
            except Undecided as error:
                undecided = error
        if undecided is not None:
            raise undecided
        return None

    def residues(self, pred: tuple[Node, Node], gold: tuple[Node, Node]) -> bool:
        if not self.same(pred[1], gold[1]):
            return False
        (value, modulus), (gold_value, _) = pred, gold
        if value.kind == gold_value.kind == modulus.kind == "num" and modulus.args[0]:
            return bool((value.args[0] - gold_value.args[0]) % modulus.args[0] == 0)
        return self.same(value, gold_value)

    def ratios(self, pred: Node, gold: Node) -> bool:
        if pred.kind == gold.kind == "time":
            *mine, half = pred.args
            *theirs, gold_half = gold.args
            return mine == theirs and (half == gold_half or "" in (half, gold_half))
        if pred.kind == gold.kind == "residue":
            return self.residues(pred.args, gold.args)
        parts, gold_parts = _ratio(pred), _ratio(gold)
        if parts is None or gold_parts is None or len(parts) != len(gold_parts):
            return False
        crosswise = [
            (Node("mul", (part, gold_parts[0])), Node("mul", (gold_part, parts[0])))
            for part, gold_part in zip(parts[1:], gold_parts[1:], strict=True)
        ]
        return all(self.values.equal(*pair) for pair in crosswise)


def _members(node: Node, other: Node) -> list[Node]:
    """The members of a list or set, each once where one of both is a set; of anything else itself."""
    if node.kind not in ("list", "set"):
        return [node]
    return list(dict.fromkeys(node.args)) if "set" in (node.kind, other.kind) else list(node.args)


def _quantity(node: Node) -> tuple[Node, str | None]:
    return (node.args[0], node.args[1]) if node.kind == "qty" else (node, None)


def _vector(node: Node) -> tuple[Node, ...] | None:
    if node.kind == "seq":
        return node.args[2:]
    if node.kind == "matrix" and (len(node.args) == 1 or len(node.args[0]) == 1):
        return tuple(entry for row in node.args for entry in row)
    return None


def _ratio(node: Node) -> tuple[Node, ...] | None:
    if node.kind == "ratio":
        return node.args
    return (node, num(1)) if node.kind in FORMULAS else None


def _numerals(pred: Node, gold: Node) -> bool:
    """Digits as written; a base that only one of both gives does not matter."""
    based, other = (pred, gold) if pred.kind == "base" else (gold, pred)
    return other.kind == "num" and other.args[1] is None and other.args[0] == Fraction(int(based.args[0]))


def _product_of_names(node: Node) -> Node | None:
    """``xy``, which was taken for a word, as a product."""
    if node.kind != "text":
        return node
    word = node.args[0]
    if len(word) > 4 or not word.isalpha() or not set("aeiou").isdisjoint(word[1:].lower()):
        return None
    return Node("mul", tuple(Node("sym", (letter,)) for letter in word))


def _infinite(node: Node) -> bool:
    return node == INFINITY or node == negative(INFINITY)
