r"""Equality of answers by exact arithmetic, without sympy: what most answers need.

`same` walks two structures and leaves every pair of formulas to ``values``: here `Exact`, in `rewards.math_symbolic` arithmetic with
as many digits as it takes. The rules of structures:

- *Lists* (commas, *and*, *or*, ``\pm``, ``x = 1, 2``) and *sets* are one kind: all members, no others, in any order. In a list each
  counts as often as it stands, in a set once. A set of one member is that member.
- *Tuples* keep their order, and ``(0, 1)`` is the open interval where the other is one. A bare list in the tuple's order is accepted for a
  tuple, a tuple for a list is not. Open and closed ends of intervals differ. A column or row is its tuple.
- *Relations*: ``x = 5`` and ``5`` are the same in both directions, ``x = 5`` and ``y = 5`` are not. ``x < 3``, ``x \in (-\infty, 3)`` and
  ``(-\infty, 3)`` are the same. Equations are the same up to a factor. In a chain every side that is no name must be right; what follows
  a value and ``\approx`` is not read.
- *Units*: compared where both have one that is known, without conversion; a missing or unknown one does not matter.
- *Percent*: ``50\%`` equals ``50\%``, ``50`` and ``0.5``.
- *Numerals of a base* are compared as written, also with a numeral whose base is not given. *Times* are compared part by part, ``9:30`` is ``09:30``;
  *ratios* by proportion.
- *Words*: case, blanks and marks at the ends do not matter; *yes* is *true*, *no* is *false*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, gcd, isqrt, lcm
from typing import Protocol

from rewards.math_grammar import INFINITY, Node, negative, num, plain_words

NUM_POINTS = 3  # at which two formulas with names in them are compared
_FORMULAS = frozenset(("num", "sym", "const", "add", "mul", "div", "pow", "call", "deg", "pct"))
_NO_NAMES: frozenset[Node] = frozenset()
_SAME_WORDS = {"true": "yes", "false": "no", "correct": "yes", "incorrect": "no", "dne": "doesnotexist", "undefined": "undefined"}


class Undecided(Exception):
    """Exact arithmetic can not tell."""


class TooBig(Undecided):
    """A number has more bits than are allowed."""


class Undefined(Exception):
    """The formula has no value here."""


class Values(Protocol):
    def equal(self, pred: Node, gold: Node) -> bool:
        """Whether two formulas are equal. May raise `Undecided`."""
        ...

    def proportional(self, pred: Node, gold: Node, *, positive: bool) -> bool:
        """Whether one is the other times a constant other than 0."""
        ...


def same(pred: Node, gold: Node, values: Values) -> bool:
    """Whether two answers are the same. Raises what ``values`` raises."""
    return _Comparison(values).same(_relation(pred), _relation(gold))


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
        if pred.kind in ("time", "ratio") or gold.kind in ("time", "ratio"):
            return self.ratios(pred, gold)
        if pred.kind == "base" or gold.kind == "base":
            return _numerals(pred, gold)
        if pred.kind == gold.kind == "matrix":
            return len(pred.args) == len(gold.args) and all(map(self.all_same, pred.args, gold.args))
        if pred.kind not in _FORMULAS or gold.kind not in _FORMULAS or _infinite(pred) or _infinite(gold):
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
        coordinates = _coordinates(pred), _coordinates(gold)
        if coordinates[0] is not None and coordinates[1] is not None:
            mine, theirs = coordinates
            return mine.keys() == theirs.keys() and all(self.same(mine[name], theirs[name]) for name in mine)
        differences = _difference(pred), _difference(gold)
        if differences[0] is not None and differences[1] is not None:
            return self.values.proportional(*differences, positive=False)
        if pred.kind == "assign" and gold.kind != "equation" and gold.kind != "assign":
            return all(self.same(side, gold) for side in pred.args[1])
        if gold.kind == "assign" and pred.kind != "equation" and pred.kind != "assign":
            return self.same(pred, gold.args[1][-1])
        return False

    def quantities(self, pred: Node, gold: Node) -> bool:
        (value, unit), (gold_value, gold_unit) = _quantity(pred), _quantity(gold)
        if unit and gold_unit:
            return unit == gold_unit and self.same(value, gold_value)
        if self.same(value, gold_value):
            return True
        if "%" in (unit, gold_unit):
            if value.kind not in _FORMULAS or gold_value.kind not in _FORMULAS:
                return False
            return self.same(Node("pct", (value,)) if unit else value, Node("pct", (gold_value,)) if gold_unit else gold_value)
        # "2 m" may have meant a product.
        other, letter, amount = (gold_value, unit, value) if unit else (value, gold_unit, gold_value)
        if letter is not None and len(letter) == 1 and Node("sym", (letter,)) in names(other) and amount.kind in _FORMULAS:
            return self.same(Node("mul", (amount, Node("sym", (letter,)))), other)
        return False

    def words(self, pred: Node, gold: Node) -> bool:
        if pred.kind == gold.kind:
            mine, theirs = (plain_words(node.args[0]) for node in (pred, gold))
            if _SAME_WORDS.get(mine, mine) == _SAME_WORDS.get(theirs, theirs):
                return True
        as_products = _product_of_names(pred), _product_of_names(gold)
        if as_products[0] is None or as_products[1] is None:
            return False
        return self.same(*as_products)

    def intervals(self, pred: Node, gold: Node) -> bool:
        parts = [[_interval(part) for part in (node.args if node.kind == "union" else (node,))] for node in (pred, gold)]
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
            vectors = _vector(pred), _vector(gold)
            return vectors[0] is not None and vectors[1] is not None and self.all_same(*vectors)
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

    def ratios(self, pred: Node, gold: Node) -> bool:
        if pred.kind == gold.kind == "time":
            *mine, half = pred.args
            *theirs, gold_half = gold.args
            return mine == theirs and (half == gold_half or "" in (half, gold_half))
        parts = _ratio(pred), _ratio(gold)
        if parts[0] is None or parts[1] is None or len(parts[0]) != len(parts[1]):
            return False
        (first, *mine), (gold_first, *theirs) = parts
        return all(
            self.values.equal(Node("mul", (a, gold_first)), Node("mul", (b, first))) for a, b in zip(mine, theirs, strict=True)
        )


# Relations


def _relation(node: Node) -> Node:
    """Equations and inequalities as what they say.

    assign(name or None, sides), equation(difference), inequality(strict, what is below 0); all else unchanged.
    """
    if node.kind == "chain":
        return _chain(*node.args)
    if node == Node("const", ("set R",)):
        return _interval(node)
    if node.kind == "list":
        items = [_relation(item) for item in node.args]
        if all(item.kind == "assign" and item.args[0] == items[0].args[0] for item in items):
            parts = [item.args[1][-1] for item in items]
            both = _between(parts)
            value = both or Node("union" if any(part.kind in ("interval", "union") for part in parts) else "list", tuple(parts))
            return Node("assign", (items[0].args[0], (value,)))
        if all(item.kind == "assign" and item.args[0] is not None for item in items):  # x = 1, y = 2 as (x, y) = (1, 2)
            named, parts = (tuple(item.args[0] for item in items), tuple(item.args[1][-1] for item in items))
            return Node("assign", (Node("seq", ("(", ")", *named)), (Node("seq", ("(", ")", *parts)),)))
        return Node("list", tuple(items))
    return node


def _chain(operators: tuple[str, ...], sides: tuple[Node, ...]) -> Node:
    if "\\approx" in operators:
        cut = operators.index("\\approx")
        if not _is_name(sides[cut]):
            operators, sides = operators[:cut], sides[: cut + 1]
            if not operators:
                return sides[0]
        operators = tuple("=" if operator == "\\approx" else operator for operator in operators)
    if set(operators) == {"="}:
        return _equation(sides)
    if operators == ("\\in",):
        return Node("assign", (sides[0], (_interval(sides[1]) if sides[1].kind == "const" else sides[1],)))
    if operators == ("!=",) and sides[0].kind == "sym":
        rays = (Node("interval", (negative(INFINITY), sides[1], True, True)), Node("interval", (sides[1], INFINITY, True, True)))
        return Node("assign", (sides[0], (Node("union", rays),)))
    if set(operators) <= {"<", "<="} or set(operators) <= {">", ">="}:
        if operators[0].startswith(">"):
            operators, sides = tuple(operator.replace(">", "<") for operator in reversed(operators)), sides[::-1]
        return _inequality(operators, sides)
    return Node("chain", (operators, sides))


def _equation(sides: tuple[Node, ...]) -> Node:
    if _is_name(sides[0]):
        return Node("assign", (sides[0], tuple(side for side in sides[1:] if not _is_name(side)) or sides[-1:]))
    if len(sides) == 2 and _is_name(sides[1]):
        return Node("assign", (sides[1], sides[:1]))
    if len(sides) > 2 or not any(names(side) for side in sides):
        return Node("assign", (None, sides))
    return Node("equation", (Node("add", (sides[0], negative(sides[1]))),))


def _inequality(operators: tuple[str, ...], sides: tuple[Node, ...]) -> Node:
    place = next((place for place, side in enumerate(sides) if side.kind == "sym"), None)
    others = [side for at, side in enumerate(sides) if at != place]
    if place is not None and len(sides) <= 3 and not any(side == sides[place] or sides[place] in names(side) for side in others):
        if len(sides) == 3 and place == 1:
            return Node("assign", (sides[1], (Node("interval", (sides[0], sides[2], operators[0] == "<", operators[1] == "<")),)))
        if len(sides) == 2 and not names(others[0]):
            low, high = (negative(INFINITY), others[0]) if place == 0 else (others[0], INFINITY)
            is_open = operators[0] == "<"
            ray = (low, high, True, is_open) if place == 0 else (low, high, is_open, True)
            return Node("assign", (sides[place], (Node("interval", ray),)))
    parts = [
        Node("inequality", (operator == "<", Node("add", (left, negative(right)))))
        for operator, left, right in zip(operators, sides, sides[1:], strict=False)
    ]
    return parts[0] if len(parts) == 1 else Node("list", tuple(parts))


def _between(parts: Sequence[Node]) -> Node | None:
    """``x > 1, x < 3`` as (1, 3), where both ends are plain numbers."""
    if len(parts) != 2 or any(part.kind != "interval" for part in parts):
        return None
    low = next((part for part in parts if part.args[1] == INFINITY), None)
    high = next((part for part in parts if part.args[0] == negative(INFINITY)), None)
    if low is None or high is None or low is high or low.args[0].kind != "num" or high.args[1].kind != "num":
        return None
    if low.args[0].args[0] >= high.args[1].args[0]:
        return None
    return Node("interval", (low.args[0], high.args[1], low.args[2], high.args[3]))


def _is_name(node: Node) -> bool:
    """A name, or names only: ``f(x)``, ``AB``, ``\\cos x``, ``(x, y)``."""
    if node.kind in ("sym", "text"):
        return True
    if node.kind in ("mul", "div"):
        return all(_is_name(part) or part.kind == "const" for part in node.args) and bool(names(node))
    if node.kind == "seq":
        return all(_is_name(part) for part in node.args[2:])
    return (
        node.kind == "call"
        and all(_is_name(part) or part.kind in ("num", "const") for part in node.args[1:])
        and bool(names(node))
    )


def _difference(node: Node) -> Node | None:
    """What an equation of formulas says is 0."""
    if node.kind == "equation":
        difference: Node = node.args[0]
        return difference
    if node.kind == "assign" and len(node.args[1]) == 1 and node.args[0] is not None:
        name, value = node.args[0], node.args[1][0]
        if name.kind in _FORMULAS and value.kind in _FORMULAS:
            return Node("add", (name, negative(value)))
    return None


# Parts of structures


def _coordinates(node: Node) -> dict[Node, Node] | None:
    """``(x, y) = (1, 2)`` as what each name is."""
    if node.kind != "assign" or node.args[0] is None or node.args[0].kind != "seq":
        return None
    named, value = node.args[0].args[2:], node.args[1][-1]
    return dict(zip(named, value.args[2:], strict=True)) if value.kind == "seq" and len(value.args) == len(named) + 2 else None


def _members(node: Node, other: Node) -> list[Node]:
    """The members of a list or set, each once where one of both is a set; of anything else itself."""
    if node.kind not in ("list", "set"):
        return [node]
    return list(dict.fromkeys(node.args)) if "set" in (node.kind, other.kind) else list(node.args)


def _quantity(node: Node) -> tuple[Node, str | None]:
    return (node.args[0], node.args[1]) if node.kind == "qty" else (node, None)


def _interval(node: Node) -> Node:
    if node.kind == "seq" and len(node.args) == 4:
        left, right, low, high = node.args
        return Node("interval", (low, high, left == "(", right == ")"))
    if node == Node("const", ("set R",)):
        return Node("interval", (negative(INFINITY), INFINITY, True, True))
    return node


def _vector(node: Node) -> tuple[Node, ...] | None:
    if node.kind == "seq":
        return node.args[2:]
    if node.kind == "matrix" and (len(node.args) == 1 or len(node.args[0]) == 1):
        return tuple(entry for row in node.args for entry in row)
    return None


def _ratio(node: Node) -> tuple[Node, ...] | None:
    if node.kind == "ratio":
        return node.args
    return (node, num(1)) if node.kind in _FORMULAS else None


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


def names(node: Node) -> frozenset[Node]:
    """The names in a formula, as nodes."""
    kind, args = node
    if kind == "sym":
        return frozenset((node,))
    if kind in ("num", "const"):
        return _NO_NAMES
    return _NO_NAMES.union(*(names(child) for child in args if isinstance(child, Node)))


# Formulas


class Exact:
    """Rational arithmetic. Formulas with names are compared at `NUM_POINTS` points of 40 random bits, the same each time: equal
    rational functions agree at all of them, and others of degree d at all three with a chance below (d / 2^40)^3.

    A decimal with at least ``decimal_digits`` significant digits also equals a value that has no finite decimal and is
    rounded or cut to it: 0.333333 is 1/3, 0.333 and 0.333334 are not. 0 turns this off. Two decimals, integers and fractions with
    a finite decimal are compared exactly.

    ``max_bits`` bounds every number, ``max_work`` the bits of all of them.
    """

    def __init__(self, decimal_digits: int, max_bits: int = 1 << 15, max_work: int = 1 << 20) -> None:
        self._decimal_digits, self._max_bits, self._max_work = decimal_digits, max_bits, max_work
        self._work = 0

    def equal(self, pred: Node, gold: Node) -> bool:
        free = names(pred) | names(gold)
        if not free:
            mine, theirs = self._value(pred), self._value(gold)
            return mine == theirs if mine is None or theirs is None else mine == theirs or self._rounds(pred, mine, gold, theirs)
        num_equal = 0
        for point in points(free):
            mine, theirs = self._value(pred, point), self._value(gold, point)
            if mine is None and theirs is None:
                continue
            if mine != theirs:
                return False
            num_equal += 1
        return num_equal == NUM_POINTS

    def proportional(self, pred: Node, gold: Node, *, positive: bool) -> bool:
        ratios = set()
        for point in points(names(pred) | names(gold)):
            mine, theirs = self._value(pred, point), self._value(gold, point)
            if not mine or not theirs:
                return False
            ratios.add(mine / theirs)
        return len(ratios) == 1 and (not positive or ratios.pop() > 0)

    def _rounds(self, pred: Node, mine: Fraction, gold: Node, theirs: Fraction) -> bool:
        return stands_for(pred, theirs, self._decimal_digits) or stands_for(gold, mine, self._decimal_digits)

    def _value(self, node: Node, point: dict[Node, Fraction] | None = None) -> Fraction | None:
        try:
            return self.value(node, point or {})
        except (Undefined, ZeroDivisionError):
            return None

    def value(self, node: Node, point: dict[Node, Fraction]) -> Fraction:
        """Raises `Undecided` for what is not rational, `Undefined` or ZeroDivisionError where there is no value."""
        kind, args = node
        if kind == "num":
            result: Fraction = args[0]
            return result
        if kind == "sym":
            return point[node]
        if kind == "add":
            result = Fraction(0)
            for part in args:
                result = self._check(result + self.value(part, point))
            return result
        if kind == "mul":
            result = Fraction(1)
            for part in args:
                result = self._check(result * self.value(part, point))
            return result
        if kind == "div":
            return self._check(self.value(args[0], point) / self.value(args[1], point))
        if kind == "pct":
            return self.value(args[0], point) / 100
        if (
            kind in ("pow", "call")
            and point
            and (kind == "call" or args[1].kind != "num" or args[1].args[0].denominator != 1)
            and names(node)
        ):
            raise Undecided(kind)  # no rational function: sqrt(x^2) is x at positive places only
        if kind == "pow":
            return self._power(self.value(args[0], point), self.value(args[1], point))
        if kind == "call":
            return self._call(args[0], [self.value(part, point) for part in args[1:]])
        raise Undecided(kind)

    def _check(self, value: Fraction) -> Fraction:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        self._work += bits
        if bits > self._max_bits or self._work > self._max_work:
            raise TooBig("a number is too long")
        return value

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            if base < 0 or exponent.denominator > 64:
                raise Undecided("a root")
            base = _root(base, exponent.denominator)
        power = exponent.numerator
        if base == 0:
            if power <= 0:
                raise Undefined("0 to the power of 0 or less")
            return base
        if base in (1, -1):
            return base if power % 2 else Fraction(1)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(power) > self._max_bits:
            raise TooBig("a power is too long")
        return self._check(base**power)

    def _call(self, name: str, values: list[Fraction]) -> Fraction:
        first = values[0]
        if name == "root":
            index = values[1]
            if index.denominator != 1 or not 2 <= index <= 64:
                raise Undecided("a root")
            if first < 0 and index % 2:
                return -_root(-first, int(index))
            return self._power(first, 1 / index)
        if name == "abs":
            return abs(first)
        if name in ("floor", "ceil"):
            return Fraction(first.__floor__() if name == "floor" else first.__ceil__())
        if name in ("max", "min"):
            return max(values) if name == "max" else min(values)
        if name == "log":
            return _logarithm(first, values[1])
        if all(value.denominator == 1 for value in values):
            return self._of_integers(name, [value.numerator for value in values])
        raise Undecided(name)

    def _of_integers(self, name: str, values: list[int]) -> Fraction:
        first = values[0]
        if name in ("factorial", "factorial2"):
            if first < 0:
                raise Undefined("a factorial of less than 0")
            if first * first.bit_length() > self._max_bits:
                raise TooBig("a factorial is too long")
            if name == "factorial":
                return self._check(Fraction(factorial(first)))
            result = 1
            for factor in range(first, 1, -2):
                result *= factor
            return self._check(Fraction(result))
        if name == "binom":
            if not 0 <= values[1] <= first:
                raise Undecided("a binomial beyond its triangle")
            if min(values[1], first - values[1]) * first.bit_length() > self._max_bits:
                raise TooBig("a binomial is too long")
            return self._check(Fraction(comb(first, values[1])))
        functions: dict[str, Callable[..., int]] = {"gcd": gcd, "lcm": lcm}
        if name in functions:
            return self._check(Fraction(functions[name](*values)))
        raise Undecided(name)


def points(free: frozenset[Node]) -> list[dict[Node, Fraction]]:
    """`NUM_POINTS` places, each name with 40 random bits that depend on it alone."""
    return [{name: _random(name.args[0], number) for name in free} for number in range(NUM_POINTS)]


@lru_cache(maxsize=1024)
def _random(name: str, number: int) -> Fraction:
    digest = hashlib.blake2b(f"{number} {name}".encode(), digest_size=5).digest()
    return Fraction(int.from_bytes(digest) | 1 << 39)


def stands_for(node: Node, exact: Fraction, decimal_digits: int) -> bool:
    """Whether ``node`` is a decimal of enough digits to which ``exact``, which has no finite decimal, is rounded or cut."""
    if not decimal_digits or node.kind != "num" or node.args[1] is None or is_finite_decimal(exact):
        return False
    return within_last_digit(node, decimal_digits, exact)


def within_last_digit(node: Node, decimal_digits: int, exact: Fraction) -> bool:
    written, places = node.args
    if len(str(abs(int(written * 10**places)))) < decimal_digits:
        return False
    step = Fraction(1, 10**places)
    cut = int(exact / step) * step
    return abs(written - exact) <= step / 2 or written == cut


def is_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    rest //= rest & -rest
    while rest % 5 == 0:
        rest //= 5
    return rest == 1


def _root(value: Fraction, index: int) -> Fraction:
    above, below = _integer_root(value.numerator, index), _integer_root(value.denominator, index)
    if above**index != value.numerator or below**index != value.denominator:
        raise Undecided("not a perfect power")
    return Fraction(above, below)


def _integer_root(value: int, index: int) -> int:
    """The largest integer whose power is not above ``value``, by Newton's steps from above."""
    if index == 2:
        return isqrt(value)
    if value < 2:
        return value
    root = 1 << -(-value.bit_length() // index)
    while True:
        step = ((index - 1) * root + value // root ** (index - 1)) // index
        if step >= root:
            return root
        root = step


def _logarithm(value: Fraction, base: Fraction) -> Fraction:
    """Where it is an integer."""
    if value <= 0 or base <= 0 or base == 1:
        raise Undefined("a logarithm")
    if base < 1:
        return -_logarithm(value, 1 / base)
    if value < 1:
        return -_logarithm(1 / value, base)
    power, result = Fraction(1), 0
    while power < value and result < 4096:
        power, result = power * base, result + 1
    if power != value:
        raise Undecided("no integer logarithm")
    return Fraction(result)
