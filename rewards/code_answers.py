"""The tests in a reference answer of the code verifier.

An answer is one of these, or the JSON text of one:

    {"kind": "stdio", "tests": [{"stdin": text, "stdout": text}, ...]}
    {"kind": "call", "function": name, "tests": [{"args": [...], "kwargs": {...}, "returns": value}, ...]}
    {"kind": "asserts", "code": Python text, or a list of them, each a test}

``stdin``, ``args`` and ``kwargs`` may be left out; ``tests`` may be a JSON text. Also read, as data sets have them:

    {"inputs": [text, ...], "outputs": [text, ...]}                       stdio (APPS, TACO); a list of lines stands for a text
    {"inputs": [[arg, ...], ...], "outputs": [...], "fn_name": name}      call (APPS, TACO); where every output is a list of one, as
                                                                          some of their rows wrap it, the value in it is right too
    [{"input": text, "output": text}, ...]                                stdio
    ["assert ...", ...], or {"test_list": [...], "test_setup_code": text} asserts (MBPP)
    {"test": text with def check(candidate), "entry_point": name}         asserts (HumanEval; ``Solution().name``, as LeetCode's)

An assert that compares an expression with a literal, ``assert f(1) == [2]`` in either order, becomes a test of its own: the expression is
evaluated in the sandbox, the literal stays outside. Code with anything else in it runs there whole. A ``check`` that is nothing but
asserts is taken apart like this, too.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewards.code_harness import plain
from rewards.contract import InvalidItem, cut


@dataclass(frozen=True, slots=True)
class ScriptTest:
    """The program is run on ``stdin``; what it prints must be ``stdout``."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class FunctionTest:
    """What the harness is to do, as JSON, and the values one of which must come back."""

    request: bytes
    returns: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CodeTests:
    """At least one test. ``function``: the name that is called, where the tests call one."""

    tests: tuple[ScriptTest, ...] | tuple[FunctionTest, ...]
    function: str | None


def check_answer(answer: Any) -> None:
    """Raise `InvalidItem`, saying what is wrong, unless ``answer`` holds tests. For rows that are refused where they are loaded."""
    read_answer(answer)


def read_answer(answer: Any) -> CodeTests:
    """The tests of an answer in any of the shapes above. Raises `InvalidItem`."""
    answer = _decoded(answer, "the answer")
    if isinstance(answer, list) and answer and all(isinstance(test, str) for test in answer):
        return _asserts(answer, "the answer")
    if isinstance(answer, list):
        pairs = [(_get(t, "input", f"test {i}"), _get(t, "output", f"test {i}")) for i, t in _numbered(answer, "the answer")]
        return _scripts(pairs)
    if not isinstance(answer, Mapping):
        raise _invalid("the answer", answer, "an object with 'kind' and 'tests'")
    if "kind" in answer:
        return _of_kind(answer)
    if "inputs" in answer and "outputs" in answer:
        return _inputs_outputs(answer)
    if "test_list" in answer:
        setup = _text(answer.get("test_setup_code") or "", "test_setup_code")
        return _asserts(answer["test_list"], "test_list", setup)
    if "test" in answer and "entry_point" in answer:
        entry_point = answer["entry_point"]
        name = entry_point.removeprefix("Solution().") if isinstance(entry_point, str) else entry_point
        name, test = _name(name, "entry_point"), _text(answer["test"], "test")
        setup, asserts = _taken_apart(test, entry_point)
        return _asserts(asserts or [f"{test}\n\ncheck({entry_point})\n"], "test", setup, name)
    raise InvalidItem(f"the answer has no 'kind' (stdio, call, asserts) and is in no known shape; its keys: {list(answer)}")


def _of_kind(answer: Mapping[str, Any]) -> CodeTests:
    kind = answer["kind"]
    if kind == "asserts":
        code = _get(answer, "code", "the answer")
        return _asserts([code] if isinstance(code, str) else code, "code")
    if kind not in ("stdio", "call"):
        raise InvalidItem(f"the answer's kind {kind!r} is unknown; there are stdio, call, asserts")
    tests = _numbered(_decoded(_get(answer, "tests", "the answer"), "tests"), "tests")
    if kind == "stdio":
        return _scripts([(_object(test, i).get("stdin", ""), _get(test, "stdout", f"test {i}")) for i, test in tests])
    calls = []
    for i, test in tests:
        args, kwargs = _object(test, i).get("args", []), test.get("kwargs", {})
        calls.append(_call(args, kwargs, (_get(test, "returns", f"test {i}"),), i))
    return CodeTests(tuple(calls), _name(_get(answer, "function", "the answer"), "function"))


def _inputs_outputs(answer: Mapping[str, Any]) -> CodeTests:
    inputs, outputs = _decoded(answer["inputs"], "inputs"), _decoded(answer["outputs"], "outputs")
    numbered = _numbered(inputs, "inputs")
    if not isinstance(outputs, list) or len(outputs) != len(inputs):
        raise _invalid("outputs", outputs, f"a list as long as inputs ({len(inputs)})")
    if answer.get("fn_name") is None:
        return _scripts(list(zip(inputs, outputs, strict=True)))
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    calls = [_call(args, {}, (outputs[i - 1], *(outputs[i - 1] if wrapped else ())), i) for i, args in numbered]
    return CodeTests(tuple(calls), _name(answer["fn_name"], "fn_name"))


def _scripts(pairs: list[tuple[Any, Any]]) -> CodeTests:
    lines = [["\n".join(side) if isinstance(side, list) and _all_text(side) else side for side in pair] for pair in pairs]
    tests = [ScriptTest(_text(a, f"test {i}: stdin"), _text(b, f"test {i}: stdout")) for i, (a, b) in enumerate(lines, 1)]
    return CodeTests(tuple(tests), None)


def _asserts(blocks: Any, what: str, setup: str = "", function: str | None = None) -> CodeTests:
    """``function``: that the tests call; without one, the first in an assert that is none of Python's own."""
    tests = []
    for i, block in _numbered(_decoded(blocks, what), what):
        code = _text(block, f"{what}, test {i}")
        try:
            statements = ast.parse(code).body
            compile(setup, "setup", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InvalidItem(f"{what}, test {i} is not Python: {error}") from error
        if not statements:
            raise InvalidItem(f"{what}, test {i} is empty")
        compared = [_comparison(statement, setup) for statement in statements]
        whole = FunctionTest(json.dumps({"code": f"{setup}\n{code}"}).encode(), ())
        tests += [test for test in compared if test is not None] if None not in compared else [whole]
        function = function or next(filter(None, map(_called, statements)), None)
    return CodeTests(tuple(tests), function)


def _taken_apart(test: str, entry_point: str) -> tuple[str, list[str]]:
    """What stands beside ``check(candidate)``, and its asserts about ``entry_point``; no asserts where there is more to it."""
    try:
        module, target = ast.parse(test), ast.parse(entry_point, mode="eval").body
        match [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]:
            case [ast.FunctionDef(args=ast.arguments(args=[ast.arg(arg=candidate)])) as check]:
                module.body.remove(check)
                statements = [statement for statement in check.body if not _says_nothing(statement)]
                if all(isinstance(statement, ast.Assert) for statement in statements):
                    replace = _Replace(candidate, target)
                    return ast.unparse(module), [ast.unparse(replace.visit(statement)) for statement in statements]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass  # its compilation will say so
    return "", []


def _says_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()) | ast.Assert(test=ast.Constant(value=True)):
            return True
    return False


class _Replace(ast.NodeTransformer):
    def __init__(self, name: str, by: ast.expr) -> None:
        self._name, self._by = name, by

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._by if node.id == self._name else node


def _called(statement: ast.stmt) -> str | None:
    asserts = (node for node in ast.walk(statement) if isinstance(node, ast.Assert))
    calls = (node.func for each in asserts for node in ast.walk(each) if isinstance(node, ast.Call))
    return next((func.id for func in calls if isinstance(func, ast.Name) and not hasattr(builtins, func.id)), None)


def _comparison(statement: ast.stmt, setup: str) -> FunctionTest | None:
    """The test in ``assert EXPRESSION == LITERAL``, or None for any other statement, and for a literal that JSON cannot hold."""
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            for literal, other in ((right, left), (left, right)):
                try:
                    value = plain(ast.literal_eval(literal))
                except (ValueError, TypeError):
                    continue
                return FunctionTest(json.dumps({"code": setup, "expression": ast.unparse(other)}).encode(), (value,))
    return None


def _call(args: Any, kwargs: Any, returns: tuple[Any, ...], number: int) -> FunctionTest:
    if not isinstance(args, (list, tuple)):
        raise _invalid(f"test {number}: args", args, "a list")
    if not isinstance(kwargs, Mapping) or not _all_text(list(kwargs)):
        raise _invalid(f"test {number}: kwargs", kwargs, "an object")
    try:
        request = json.dumps({"args": args, "kwargs": kwargs})
        returns = tuple(map(plain, returns))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidItem(f"test {number} can not be written as JSON: {error}") from error
    return FunctionTest(request.encode(), returns)


def _decoded(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidItem(f"{what} is a text that can not be decoded as JSON: {error}") from error


def _numbered(tests: Any, what: str) -> list[tuple[int, Any]]:
    if not isinstance(tests, list):
        raise _invalid(what, tests, "a list of tests")
    if not tests:
        raise InvalidItem(f"{what} is an empty list: without a test every program would be right")
    return list(enumerate(tests, 1))


def _object(test: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(test, Mapping):
        raise _invalid(f"test {number}", test, "an object")
    return test


def _get(item: Any, key: str, what: str) -> Any:
    if not isinstance(item, Mapping):
        raise _invalid(what, item, "an object")
    if key not in item:
        raise InvalidItem(f"{what} has no {key!r}; it has {', '.join(map(str, item)) or 'nothing'}")
    return item[key]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _invalid(what, value, "a text")
    return value


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise _invalid(what, value, "the name of a function")
    return value


def _all_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _invalid(what: str, value: Any, wanted: str) -> InvalidItem:
    return InvalidItem(f"{what} is {cut(repr(value))}, not {wanted}")
