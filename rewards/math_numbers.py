r"""Answers that are numbers written out, as opposed to a formula that has their value: ``require_number`` of `rewards.math_verifier.math`."""

from __future__ import annotations

from math import gcd

from rewards.math_nodes import INFINITY, MINUS_ONE, Node, num
from rewards.math_relations import is_name

_TEN = num(10)
_FACTORS = tuple(num(10**power) for power in (3, 6, 9, 12))


def written_out(node: Node) -> bool:
    """Whether all values in a structure are integers, decimals, fractions in lowest terms, mixed numbers or percents.

    A number may have a unit, a name before it (``x = 5``) and a power of ten (``3 \\times 10^5``).
    """
    kind, args = node
    if kind in ("list", "set", "union", "ratio"):
        return all(map(written_out, args))
    if kind == "seq":
        return all(map(written_out, args[2:]))
    if kind == "matrix":
        return all(written_out(entry) for row in args for entry in row)
    if kind == "qty":
        return written_out(args[0])
    if kind == "chain":
        return _chain(*args)
    return kind in ("time", "base") or node == INFINITY or _is_number(node)


def _chain(operators: tuple[str, ...], sides: tuple[Node, ...]) -> bool:
    if "\\approx" in operators:  # what follows is not compared
        sides = sides[: operators.index("\\approx") + 1]
    values = [side for side in sides if not is_name(side)]
    if set(operators) <= {"=", "\\approx"}:
        values = values[-1:]  # 37 \cdot 48 = 1776 ends in a number
    return bool(values) and all(map(written_out, values))


def _is_number(node: Node) -> bool:
    kind, args = node
    if kind == "num":
        return True
    if kind in ("pct", "deg"):
        return _is_number(args[0])
    if kind == "div":
        return _is_fraction(*args)
    if kind != "mul" or len(args) != 2:
        return False
    first, second = args
    if first == MINUS_ONE:
        return second == INFINITY or _is_number(second)
    power_of_ten = second.kind == "pow" and second.args[0] == _TEN and second.args[1].kind == "num"
    return first.kind == "num" and (power_of_ten or second in _FACTORS)


def _is_fraction(above: Node, below: Node) -> bool:
    if any(part.kind != "num" or part.args[0].denominator != 1 for part in (above, below)):
        return False
    numerator, denominator = above.args[0].numerator, below.args[0].numerator
    return abs(denominator) > 1 and gcd(numerator, denominator) == 1
