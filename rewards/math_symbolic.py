r"""Equality of formulas that are not rational: roots, pi, e, i, logarithms, angles, powers of names.

Both are evaluated to as many bits as their own size asks for. They differ where the values do; they are the same where the values agree
in all those bits, `_MIN_BITS` and eight for every bit of the numbers written in them and of the size of every power and exponential. That is
the uniformity conjecture's bound for numbers made by closed formulas (Richardson, The uniformity conjecture, 2001) with a wide margin: a formula
of that size that is not 0 is not that close to 0.

With names in them, formulas are compared at fixed places: near 0 and far from it, of all signs, integers too, where both are real throughout (where
``i`` stands in neither). So ``\sqrt{x^2}`` is not ``x``, ``|x - 10|`` not ``10 - x``, ``\sqrt{x}\sqrt{y}`` is ``\sqrt{xy}``, and ``(-1)^n``, which is
real at integers only, is ``\cos n\pi``. Without names, roots and logarithms of negative numbers have their principal values.

It runs in the child process of `rewards.math_child` alone: it takes as long as the formulas ask for.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from mpmath import mp, mpc, mpf

from rewards.math_compare import Undecided
from rewards.math_exact import Exact, Undefined, within_last_digit
from rewards.math_nodes import Node, names

_MIN_BITS = 256
_MAX_BITS = 1 << 16
_MAX_POWER = 1 << 40  # bits of a power; above it is `Huge`
_MAX_ANGLE = 1 << 14  # bits before the point of what goes into a periodic function
_NEAR, _MIDDLE, _FAR, _FARTHER, _INTEGER = range(5)  # below 1, 1 to 5, 10 to 42, some 10^5, 4 to 13
_POSITIVE, _NEGATIVE, _FIRST_NEGATIVE, _SECOND_NEGATIVE = (1, 1), (-1, -1), (-1, 1), (1, -1)  # names in turn
_PLACES = (
    *((size, _POSITIVE) for size in (_NEAR, _MIDDLE, _NEAR, _FAR, _FARTHER)),
    *((size, signs) for signs in (_FIRST_NEGATIVE, _SECOND_NEGATIVE) for size in (_NEAR, _MIDDLE)),
    *((size, _NEGATIVE) for size in (_FAR, _FARTHER)),
    *((_INTEGER, _POSITIVE) for _ in range(3)),
)
_NUM_AGREEING = 2  # at least, and at a quarter of the places where the reference has a value
_I = Node("const", ("i",))
_FUNCTIONS = {
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arsinh": "asinh",
    "arcosh": "acosh",
    "artanh": "atanh",
    "factorial2": "fac2",
}
_NO_VALUE = (Undefined, ZeroDivisionError, ValueError, OverflowError)  # the last three are mpmath's
_PERIODIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))


class Huge(Undecided):
    """A number so large that even its size can not be held."""


class Numeric:
    """The ``values`` of `rewards.math_exact.same`. Raises `Huge` where the prediction is, and `Undecided` where agreement can not be
    told from a difference within `_MAX_BITS`."""

    def __init__(self, decimal_digits: int) -> None:
        self._decimal_digits = decimal_digits

    def equal(self, pred: Node, gold: Node) -> bool:
        try:
            return Exact(self._decimal_digits, max_bits=1 << 22, max_work=1 << 26).equal(pred, gold)
        except Undecided:
            pass
        free = names(pred) | names(gold)
        if not free:
            return bool(_compare(pred, gold)) or self._rounds(pred, gold)
        return _agree(pred, gold, free)

    def proportional(self, pred: Node, gold: Node, *, positive: bool) -> bool:
        try:
            return Exact(self._decimal_digits, max_bits=1 << 20).proportional(pred, gold, positive=positive)
        except Undecided:
            pass
        placed = [(_placed(pred, place), _placed(gold, place)) for _, place in _places(names(pred) | names(gold))]
        pairs = [pair for pair in placed if all(_has_value(node, real=True, other_than_0=True) for node in pair)]
        if len(pairs) <= _NUM_AGREEING or (positive and not _positive(Node("div", pairs[0]))):
            return False
        (first, gold_first), *rest = pairs
        return all(_compare(Node("mul", (mine, gold_first)), Node("mul", (theirs, first))) for mine, theirs in rest)

    def _rounds(self, pred: Node, gold: Node) -> bool:
        for decimal, exact in ((pred, gold), (gold, pred)):
            if not self._decimal_digits or decimal.kind != "num" or decimal.args[1] is None or exact.kind == "num":
                continue
            try:
                value = _Evaluation(_MIN_BITS + 4 * decimal.args[1]).of(exact)
            except _NO_VALUE:
                continue
            if (
                isinstance(value, mpf)
                and mp.isfinite(value)
                and within_last_digit(decimal, self._decimal_digits, _fraction(value))
            ):
                return True
        return False


def _agree(pred: Node, gold: Node, free: frozenset[Node]) -> bool:
    """Whether two formulas with names in them are equal."""
    real = not _holds(pred, _I) and not _holds(gold, _I)
    num_equal = num_values = 0
    for size, place in _places(free):
        mine, theirs = _placed(pred, place), _placed(gold, place)
        try:
            equal = _compare(mine, theirs, real=real, max_bits=_MAX_BITS if size in (_NEAR, _MIDDLE) else _MAX_BITS >> 4)
        except Undecided:
            if size in (_NEAR, _MIDDLE):
                raise
            equal = None  # powers are out of reach there
        if equal is False:
            return False
        num_equal += equal is True
        num_values += equal is True or _has_value(theirs, real=real)
    return num_equal >= max(_NUM_AGREEING, num_values / 4)


def _compare(pred: Node, gold: Node, *, real: bool = False, max_bits: int = _MAX_BITS) -> bool | None:
    """Whether two formulas without names are equal; None where one of them has no value, or only one is real. With ``real`` a formula
    has no value either where a part of it is not real."""
    bits = _MIN_BITS
    while True:
        mine, theirs = _Evaluation(bits), _Evaluation(bits)
        try:
            try:
                b = theirs.of(gold)
            except Huge:
                mine.of(pred)
                return False
            a = mine.of(pred)
        except _NO_VALUE:
            return None
        if isinstance(a, mpf) != isinstance(b, mpf) or (real and (mine.left_reals or theirs.left_reals)):
            return None
        with mp.workprec(bits):
            sizes = [mp.mag(value) for value in (a, b) if value != 0]
            if len(sizes) == 2 and abs(sizes[0] - sizes[1]) > 2:
                return False
            difference = abs(a - b)
            # 64 bits for the errors of the operations
            if difference != 0 and mp.mag(difference) > max(mine.largest, theirs.largest) - bits + 64:
                return False
        needed = _MIN_BITS + 8 * (mine.size + theirs.size)
        if bits >= needed:
            return True
        if needed > max_bits:
            raise Undecided("they agree, but the formulas are too large to tell that they are equal")
        bits = needed


def _has_value(node: Node, *, real: bool, other_than_0: bool = False) -> bool:
    evaluation = _Evaluation(_MIN_BITS)
    try:
        value = evaluation.of(node)
    except (Undecided, *_NO_VALUE):
        return False
    return not (real and evaluation.left_reals) and not (other_than_0 and value == 0)


def _holds(node: Any, part: Node) -> bool:
    return node == part or (isinstance(node, tuple) and any(_holds(child, part) for child in node))


def _positive(node: Node) -> bool:
    return bool(_Evaluation(_MIN_BITS).of(node) > 0)


class _Evaluation:
    """One evaluation with ``bits`` bits. ``size`` is the bits of all numbers in it, ``largest`` those of the largest value, ``left_reals``
    whether a part of it was not real."""

    def __init__(self, bits: int) -> None:
        self.bits, self.size, self.largest, self.left_reals = bits, 0, 0, False

    def of(self, node: Node) -> Any:
        """mpf or mpc. Raises `Huge`, `Undefined`, ZeroDivisionError and what mpmath raises."""
        with mp.workprec(self.bits + 32):
            value = self._value(node)
            if isinstance(value, mpc):
                value = value.real if self._is_noise(value.imag, abs(value)) else value
            return value if isinstance(value, mpc) else mpf(value)

    def _value(self, node: Node) -> Any:
        value = self._formula(node)
        if not mp.isfinite(value):
            raise Undefined(node.kind)
        if value != 0:
            self.left_reals |= isinstance(value, mpc) and not self._is_noise(value.imag, abs(value))
            magnitude = int(mp.mag(value))
            self.largest = max(self.largest, magnitude)
            if node.kind not in ("add", "mul", "div"):
                self.size += abs(magnitude)
        return value

    def _formula(self, node: Node) -> Any:
        kind, args = node
        if kind == "num":
            value: Fraction = args[0]
            self.size += value.numerator.bit_length() + value.denominator.bit_length()
            return mpf(value.numerator) / value.denominator
        if kind == "const" and args[0] in ("pi", "e", "i"):
            return {"pi": +mp.pi, "e": +mp.e, "i": mpc(0, 1)}[args[0]]
        if kind == "add":
            return self._sum([self._value(part) for part in args])
        if kind == "mul":
            return mp.fprod([self._value(part) for part in args])
        if kind == "div":
            return self._value(args[0]) / self._value(args[1])
        if kind == "pow":
            return self._power(self._value(args[0]), args[1])
        if kind == "pct":
            return self._value(args[0]) / 100
        if kind == "deg":
            return self._value(args[0]) * mp.pi / 180
        if kind == "call":
            return self._call(args[0], args[1:])
        raise Undefined(kind)

    def _sum(self, values: list[Any]) -> Any:
        total = mp.fsum(values)
        # What is left when equal terms cancel would pass for a number of its own, and be divided by.
        return mpf(0) if self._is_noise(total, max(map(abs, values))) else total

    def _is_noise(self, value: Any, beside: Any) -> bool:
        return value == 0 or (beside != 0 and mp.mag(value) < mp.mag(beside) - self.bits * 3 // 4)

    def _power(self, base: Any, exponent_node: Node) -> Any:
        exponent: Any
        try:
            rational = Exact(0).value(exponent_node, {})
            exponent = rational.numerator if rational.denominator == 1 else mpf(rational.numerator) / rational.denominator
            self._value(exponent_node)  # for its size
        except Undecided:
            exponent = self._value(exponent_node)
        if base == 0:
            if not isinstance(exponent, (int, mpf)) or exponent <= 0:
                raise Undefined("a power of 0")
            return mpf(0)
        if abs(exponent) > 1 and mp.mag(exponent) + max(0, int(mp.mag(abs(mp.log(base)) or 1))) > 40:
            raise Huge("a power")
        self.size += min(int(abs(exponent * mp.log(base))), _MAX_POWER)
        return base**exponent

    def _call(self, name: str, nodes: tuple[Node, ...]) -> Any:
        values = [self._value(node) for node in nodes]
        first = values[0]
        if name == "root":
            return self._root(first, values[1])
        if name == "log":
            if first == 0:
                raise Undefined("log 0")
            return mp.log(first) if nodes[1] == Node("const", ("e",)) else mp.log(first) / mp.log(values[1])
        if name in _PERIODIC:
            return self._periodic(name, first)
        if name in ("exp", "sinh", "cosh", "tanh"):
            if first != 0 and mp.mag(first) > 40:
                raise Huge(name)
            self.size += 2 * int(abs(first))
            return getattr(mp, name)(first)
        if name in ("max", "min", "floor", "ceil") and all(isinstance(value, mpf) for value in values):
            return max(values) if name == "max" else min(values) if name == "min" else getattr(mp, name)(first)
        if name in ("factorial", "factorial2", "binom"):
            return self._factorial(name, values)
        if name == "abs":
            return abs(first)
        if name in _FUNCTIONS:
            return getattr(mp, _FUNCTIONS[name])(first)
        raise Undefined(name)

    def _factorial(self, name: str, values: list[Any]) -> Any:
        is_integer = all(value == mp.floor(value) for value in values if isinstance(value, mpf))
        if name == "factorial2" and not is_integer:
            raise Undefined(name)  # mpmath's has little to do with double factorials
        if any(value != 0 and mp.mag(value) > (40 if is_integer else 4) for value in values):
            raise Huge(name)  # of fractions it takes long
        return mp.binomial(*values) if name == "binom" else getattr(mp, _FUNCTIONS.get(name, name))(values[0])

    def _root(self, value: Any, index: Any) -> Any:
        if index == 0:
            raise Undefined("a root")
        if isinstance(value, mpf) and value < 0 and index == int(index) and int(index) % 2:
            return -((-value) ** (1 / index))
        return mp.sqrt(value) if index == 2 else value ** (1 / index)

    def _periodic(self, name: str, angle: Any) -> Any:
        if angle != 0 and mp.mag(angle) > _MAX_ANGLE:
            raise Huge(name)
        sine, cosine = (mpf(0) if self._is_noise(value, mpf(1)) else value for value in (mp.sin(angle), mp.cos(angle)))
        above, below = {
            "sin": (sine, 1),
            "cos": (cosine, 1),
            "tan": (sine, cosine),
            "cot": (cosine, sine),
            "sec": (1, cosine),
            "csc": (1, sine),
        }[name]
        return mpf(1) * above / below


def _placed(node: Any, place: dict[Node, Node]) -> Any:
    """The formula with numbers for its names."""
    if not isinstance(node, Node):
        return node
    if node.kind == "sym":
        return place[node]
    return Node(node.kind, tuple(_placed(child, place) for child in node.args))


def _places(free: frozenset[Node]) -> Iterator[tuple[int, dict[Node, Node]]]:
    """How far from 0, and the numbers for all names."""
    ordered = sorted(free, key=lambda name: str(name.args[0]))
    for number, (size, signs) in enumerate(_PLACES):
        yield (
            size,
            {
                name: Node("num", (signs[index % 2] * _coordinate(name.args[0], number, size), None))
                for index, name in enumerate(ordered)
            },
        )


@lru_cache(maxsize=1024)
def _coordinate(name: str, number: int, size: int) -> Fraction:
    first, second = hashlib.blake2b(f"{number} {name}".encode(), digest_size=2).digest()
    if size == _INTEGER:
        return Fraction(2 * (first % 5) + 4 + number % 2)  # odd and even
    fraction = Fraction(first + 2, second + 300)
    return {
        _NEAR: fraction,
        _MIDDLE: 1 + 4 * fraction,
        _FAR: 10 + Fraction(first, 8) + fraction,
        _FARTHER: 10**5 + 1000 * first + fraction,
    }[size]


def _fraction(value: Any) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    return Fraction(-mantissa if sign else mantissa) * Fraction(2) ** exponent


def evaluate_all(node: Any) -> None:
    """Evaluate every formula without names in a structure, for the work of it."""
    if isinstance(node, Node) and node.kind in ("add", "mul", "div", "pow", "call"):
        with contextlib.suppress(Undecided, *_NO_VALUE):
            if not names(node):
                _Evaluation(_MIN_BITS).of(node)
    elif isinstance(node, tuple):
        for child in node:
            evaluate_all(child)
