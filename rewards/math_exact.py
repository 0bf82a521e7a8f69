r"""Equality of formulas by exact arithmetic, without sympy: what most answers need."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, gcd, isqrt, lcm

from rewards.math_compare import Undecided
from rewards.math_nodes import Node, names

NUM_POINTS = 3  # at which two formulas with names in them are compared


class TooBig(Undecided):
    """A number has more bits than are allowed."""


class Undefined(Exception):
    """The formula has no value here."""


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
        if name == "mod" and values[1]:
            return Fraction(first % values[1])
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
    if abs(written) * 10**places < 10 ** (decimal_digits - 1):
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
