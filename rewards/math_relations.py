"""What equations and inequalities say: `relation` gives every spelling of it one tree."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.math_nodes import ALL_REALS, FORMULAS, INFINITY, MINUS_ONE, Node, names, negative


def relation(node: Node) -> Node:
    """Equations and inequalities as what they say.

    assign(name or None, sides), equation(difference), inequality(strict, what is below 0); all else unchanged.
    """
    if node.kind == "chain":
        return _chain(*node.args)
    if node == ALL_REALS:
        return interval(node)
    if node.kind == "cases":
        return Node("set", tuple(Node("seq", ("(", ")", value, relation(condition))) for value, condition in node.args))
    if node.kind == "list":
        items = [relation(item) for item in node.args]
        if all(item.kind == "assign" and item.args[0] == items[0].args[0] for item in items):
            parts = [item.args[1][-1] for item in items]
            both = _between(parts)
            value = both or Node("union" if any(part.kind in ("interval", "union") for part in parts) else "list", tuple(parts))
            return Node("assign", (items[0].args[0], (value,)))
        if all(item.kind == "assign" and item.args[0] is not None for item in items):  # x = 1, y = 2 as (x, y) = (1, 2)
            named, last_sides = (item.args[0] for item in items), (item.args[1][-1] for item in items)
            return Node("assign", (Node("seq", ("(", ")", *named)), (Node("seq", ("(", ")", *last_sides)),)))
        return Node("list", tuple(items))
    return node


def _chain(operators: tuple[str, ...], sides: tuple[Node, ...]) -> Node:
    sides = tuple(relation(side) if side.kind == "cases" else side for side in sides)
    if "\\approx" in operators:
        cut = operators.index("\\approx")
        if not is_name(sides[cut]):
            operators, sides = operators[:cut], sides[: cut + 1]
            if not operators:
                return sides[0]
        operators = tuple("=" if operator == "\\approx" else operator for operator in operators)
    if set(operators) == {"="}:
        return _equation(sides)
    if operators == ("\\in",):
        return Node("assign", (sides[0], (interval(sides[1]) if sides[1].kind == "const" else sides[1],)))
    if operators == ("!=",) and sides[0].kind == "sym":
        rays = (Node("interval", (negative(INFINITY), sides[1], True, True)), Node("interval", (sides[1], INFINITY, True, True)))
        return Node("assign", (sides[0], (Node("union", rays),)))
    if set(operators) <= {"<", "<="} or set(operators) <= {">", ">="}:
        if operators[0].startswith(">"):
            operators, sides = tuple(operator.replace(">", "<") for operator in reversed(operators)), sides[::-1]
        return _inequality(operators, sides)
    return Node("chain", (operators, sides))


def _equation(sides: tuple[Node, ...]) -> Node:
    if is_name(sides[0]):
        return Node("assign", (sides[0], tuple(side for side in sides[1:] if not is_name(side)) or sides[-1:]))
    if len(sides) == 2 and is_name(sides[1]):
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


def is_name(node: Node) -> bool:
    """A name, or names only: ``f(x)``, ``AB``, ``\\cos x``, ``(x, y)``."""
    if node.kind in ("sym", "text"):
        return True
    if node.kind == "mul" and _is_function(node.args[0]):  # f(3), f^{-1}(x)
        return all(is_name(part) or part.kind in ("num", "const", "seq") for part in node.args[1:])
    if node.kind in ("mul", "div"):
        return all(is_name(part) or part.kind == "const" for part in node.args) and bool(names(node))
    if node.kind == "seq":
        return all(is_name(part) for part in node.args[2:])
    return (
        node.kind == "call"
        and all(is_name(part) or part.kind in ("num", "const") for part in node.args[1:])
        and bool(names(node))
    )


def _is_function(node: Node) -> bool:
    if node.kind == "pow":
        return node.args[1] == MINUS_ONE and _is_function(node.args[0])
    return node.kind == "sym" and node.args[0].rstrip("'") in ("f", "g", "h", "p", "q", "F", "G", "P", "Q")


def difference(node: Node) -> Node | None:
    """What an equation of formulas says is 0."""
    if node.kind == "equation":
        difference: Node = node.args[0]
        return difference
    if node.kind == "assign" and len(node.args[1]) == 1 and node.args[0] is not None:
        name, value = node.args[0], node.args[1][0]
        if name.kind in FORMULAS and value.kind in FORMULAS:
            return Node("add", (name, negative(value)))
    return None


def coordinates(node: Node) -> dict[Node, Node] | None:
    """``(x, y) = (1, 2)`` as what each name is."""
    if node.kind != "assign" or node.args[0] is None or node.args[0].kind != "seq":
        return None
    named, value = node.args[0].args[2:], node.args[1][-1]
    return dict(zip(named, value.args[2:], strict=True)) if value.kind == "seq" and len(value.args) == len(named) + 2 else None


def indexed_values(node: Node) -> Node | None:
    """``x_1 = 1, x_2 = 2`` as the list of what one name is."""
    found = coordinates(node)
    if found is None or any(name.kind != "sym" for name in found):
        return None
    bases = {name.args[0].partition("_")[0] if "_" in name.args[0] else None for name in found}
    return Node("list", tuple(found.values())) if len(bases) == 1 and None not in bases else None


def interval(node: Node) -> Node:
    if node.kind == "seq" and len(node.args) == 4:
        left, right, low, high = node.args
        return Node("interval", (low, high, left == "(", right == ")"))
    if node == ALL_REALS:
        return Node("interval", (negative(INFINITY), INFINITY, True, True))
    return node
