"""The tests in a reference answer, in the shapes that data sets have them."""

import json

import pytest

from rewards.code_answers import ScriptTest, check_answer, read_answer
from rewards.contract import InvalidItem

SCRIPTS = (ScriptTest("1\n", "2\n"), ScriptTest("3\n", "4\n"))


def calls(answer):
    tests = read_answer(answer)
    return tests.function, [(json.loads(test.request), test.returns) for test in tests.tests]


@pytest.mark.parametrize(
    "answer",
    [
        {"kind": "stdio", "tests": [{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "3\n", "stdout": "4\n"}]},
        {"kind": "stdio", "tests": '[{"stdin": "1\\n", "stdout": "2\\n"}, {"stdin": "3\\n", "stdout": "4\\n"}]'},
        {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]},
        {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"], "fn_name": None},
        {"inputs": '["1\\n", "3\\n"]', "outputs": '["2\\n", "4\\n"]'},
        {"inputs": [["1", ""], ["3", ""]], "outputs": [["2", ""], ["4", ""]]},  # lists of lines
        [{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "4\n"}],
    ],
)
def test_scripts_in_every_shape(answer):
    for shape in (answer, json.dumps(answer)):
        tests = read_answer(shape)
        assert (tests.tests, tests.function) == (SCRIPTS, None)


def test_calls():
    tests = [{"args": [1, "a"], "returns": [1.5]}, {"args": [], "kwargs": {"k": None}, "returns": None}]
    assert calls({"kind": "call", "function": "f", "tests": tests}) == (
        "f",
        [({"args": [1, "a"], "kwargs": {}}, ([1.5],)), ({"args": [], "kwargs": {"k": None}}, (None,))],
    )
    assert calls({"kind": "call", "function": "f", "tests": [{"returns": 1}]}) == ("f", [({"args": [], "kwargs": {}}, (1,))])


def test_an_answer_made_in_python_is_read_as_its_json_would_be():
    answer = {"kind": "call", "function": "f", "tests": [{"args": [(1, 2)], "returns": {1: (2, 3)}}]}
    assert calls(answer) == ("f", [({"args": [[1, 2]], "kwargs": {}}, ({"1": [2, 3]},))])


def test_outputs_that_some_rows_wrap_in_a_list():
    inputs = [[[1, 2]], [[3]]]
    wrapped = calls({"inputs": inputs, "outputs": [[3], [0]], "fn_name": "f"})
    assert wrapped == ("f", [({"args": i, "kwargs": {}}, o) for i, o in zip(inputs, [([3], 3), ([0], 0)], strict=True)])
    # A list of another length shows that the lists are the values themselves.
    plain = calls({"inputs": inputs, "outputs": [[3], [0, 1]], "fn_name": "f"})
    assert [returns for _, returns in plain[1]] == [([3],), ([0, 1],)]


@pytest.mark.parametrize(
    ("answer", "requests", "function"),
    [
        ({"kind": "asserts", "code": "assert f(1) == 2"}, [("", "f(1)", 2)], "f"),
        (
            {"kind": "asserts", "code": ["assert (f(1)) == 2, 'no'", "assert f({3}) == {2, 1}"]},
            [("", "f(1)", 2), ("", "f({3})", [1, 2])],
            "f",
        ),
        (
            {"kind": "asserts", "code": "# all\nassert f(1) == (2, -0.5)\nassert set(f(2)) == {1: None}"},
            [("", "f(1)", [2, -0.5]), ("", "set(f(2))", {"1": None})],
            "f",
        ),
        (["assert f('a\\n') == b'c'"], [("\nassert f('a\\n') == b'c'",)], "f"),  # bytes are no JSON
        (["assert f(1) == 2", "assert f(1) < 2"], [("", "f(1)", 2), ("\nassert f(1) < 2",)], "f"),
        (
            ["assert f(1) == 2 == f(2)", "assert f(1) == g(2)", "x = 1\nassert f(x) == 2"],
            [("\nassert f(1) == 2 == f(2)",), ("\nassert f(1) == g(2)",), ("\nx = 1\nassert f(x) == 2",)],
            "f",
        ),
        ({"test_list": ["assert f(m) == 2"], "test_setup_code": "m = 1"}, [("m = 1", "f(m)", 2)], "f"),
        ({"test_list": ["assert not f(1)"], "test_setup_code": None}, [("\nassert not f(1)",)], "f"),
        (["assert 2 == f(1)", "assert sorted(f(2)) == [1]"], [("", "f(1)", 2), ("", "sorted(f(2))", [1])], "f"),
        (["import math\nassert math.isclose(f(1), 2)"], [("\nimport math\nassert math.isclose(f(1), 2)",)], "f"),
        (
            {"test": "def check(c): assert c(1)", "entry_point": "Solution().f"},
            [("\nassert Solution().f(1)",)],
            "f",
        ),
        (
            {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"},
            [("", "f(1)", 2)],
            "f",
        ),
        (
            {
                "test": "A = 1\ndef check(g):\n    'All.'\n    assert True, 'so'\n    assert g(A) == [g, 2][1:], g(0)\n    assert 3 == g(g(1))",
                "entry_point": "Solution().f",
            },
            [
                ("A = 1\nassert Solution().f(A) == [Solution().f, 2][1:], Solution().f(0)",),
                ("A = 1", "Solution().f(Solution().f(1))", 3),
            ],
            "f",
        ),
        (
            {"test": "def check(g):\n    x = 1\n    assert g(x) == 2", "entry_point": "f"},
            [("\ndef check(g):\n    x = 1\n    assert g(x) == 2\n\ncheck(f)\n",)],
            "f",
        ),
        ({"test": "def check(g): pass", "entry_point": "f"}, [("\ndef check(g): pass\n\ncheck(f)\n",)], "f"),
    ],
)
def test_asserts(answer, requests, function):
    for shape in (answer, json.dumps(answer)):
        tests = read_answer(shape)
        read = [(*json.loads(test.request).values(), *test.returns) for test in tests.tests]
        assert (read, tests.function) == (requests, function)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "the answer is None"),
        (42, "the answer is 42"),
        ("", "can not be decoded as JSON"),
        ("print(3)", "can not be decoded as JSON"),
        ("[" * 100_000, "can not be decoded as JSON"),
        ([], "empty list"),
        ([1], "test 1 is 1, not an object"),
        ([{"input": "1"}], "test 1 has no 'output'; it has input"),
        ({}, "no known shape"),
        ({"tests": [{"stdin": "", "stdout": "3"}]}, "no 'kind'"),
        ({"kind": "stdout", "tests": []}, "kind 'stdout' is unknown; there are stdio, call, asserts"),
        ({"kind": "stdio"}, "the answer has no 'tests'; it has kind"),
        ({"kind": "stdio", "tests": []}, "without a test every program would be right"),
        ({"kind": "stdio", "tests": None}, "tests is None"),
        ({"kind": "stdio", "tests": "[{"}, "tests is a text that can not be decoded"),
        ({"kind": "stdio", "tests": {"stdin": "", "stdout": ""}}, "not a list of tests"),
        ({"kind": "stdio", "tests": [{"stdin": ""}]}, "test 1 has no 'stdout'"),
        ({"kind": "stdio", "tests": [{"stdout": "1"}, {"stdout": 3}]}, "test 2: stdout is 3, not a text"),
        ({"kind": "stdio", "tests": [{"stdin": None, "stdout": "3"}]}, "test 1: stdin is None"),
        ({"kind": "call", "tests": [{"returns": 1}]}, "the answer has no 'function'"),
        ({"kind": "call", "function": "f(x)", "tests": [{"returns": 1}]}, "not the name of a function"),
        ({"kind": "call", "function": "f", "tests": [{"args": [1]}]}, "test 1 has no 'returns'"),
        ({"kind": "call", "function": "f", "tests": [{"args": 1, "returns": 1}]}, "test 1: args is 1, not a list"),
        ({"kind": "call", "function": "f", "tests": [{"kwargs": [], "returns": 1}]}, "test 1: kwargs is"),
        ({"kind": "call", "function": "f", "tests": [{"args": [{1, 2}], "returns": 1}]}, "test 1 can not be written as JSON"),
        ({"kind": "asserts"}, "the answer has no 'code'"),
        ({"kind": "asserts", "code": " \n"}, "code, test 1 is empty"),
        ({"kind": "asserts", "code": ["assert f(1) == 1", "assert f("]}, "code, test 2 is not Python"),
        ({"kind": "asserts", "code": []}, "empty list"),
        ({"test_list": ["assert f(1)"], "test_setup_code": "x ="}, "is not Python"),
        ({"inputs": ["1"], "outputs": []}, "a list as long as inputs"),
        ({"inputs": [], "outputs": []}, "empty list"),
        ({"inputs": [1], "outputs": ["2"]}, "test 1: stdin is 1"),
        ({"test": "def check(c): (", "entry_point": "f"}, "test, test 1 is not Python"),
        ({"test": f"def check(c):\n    assert c({'-' * 50_000}1)", "entry_point": "f"}, "test, test 1 is not Python"),
        ({"test_list": []}, "test_list is an empty list"),
        ({"test": "def check(c): pass", "entry_point": "f g"}, "entry_point is 'f g'"),
        ({"test": "def check(c): pass", "entry_point": "Solution().f()"}, "entry_point is 'f()'"),
        ({"test": "def check(c): pass", "entry_point": None}, "entry_point is None"),
    ],
)
def test_an_answer_without_readable_tests_is_invalid_and_says_why(answer, words):
    """B44."""
    with pytest.raises(InvalidItem) as caught:
        check_answer(answer)
    assert words in str(caught.value)
