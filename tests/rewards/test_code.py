"""The code verifier, with real programs in the real sandbox at both rungs that protect."""

import functools
import json
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.schema import RewardConfig, RewardPart
from rewards.code_verifier import code
from rewards.contract import InvalidItem, RewardError, RewardItem
from rewards.pool import RewardPool

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
CASES = [json.loads(line) for line in (ROOT / "tests/cases/code.jsonl").read_text().splitlines()]
FAMILY = {case["id"]: case for case in CASES}
FUNCTION = "rewards.code_verifier.code"


def fenced(source):
    return f"```python\n{textwrap.dedent(source).strip()}\n```"


def script(*tests):
    return {"kind": "stdio", "tests": [{"stdin": stdin, "stdout": stdout} for stdin, stdout in tests]}


def call(*tests, function="f"):
    return {"kind": "call", "function": function, "tests": [{"args": list(args), "returns": returns} for *args, returns in tests]}


def asserts(*blocks):
    return {"kind": "asserts", "code": list(blocks)}


def run(source, answer, rung="landlock", **options):
    return code(fenced(source), answer, **{"isolation": rung, "timeout_seconds": 8.0} | options)


@functools.cache
def judge_cases(rung):
    """What became of every case, eight at a time in plain threads, and how long each took."""

    def judge(case):
        begun = time.monotonic()
        try:
            verdict = code(case["completion"], case["answer"], isolation=rung, **case.get("options", {}))
        except InvalidItem as error:
            verdict = error
        return verdict, time.monotonic() - begun

    with ThreadPoolExecutor(8) as threads:
        return dict(zip(FAMILY, threads.map(judge, CASES), strict=True))


@pytest.fixture
def handed(rung):
    return judge_cases(rung)


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_handed_cases(handed, case):
    verdict, took_s = handed[case["id"]]
    expect = case["expect"]
    if expect == {"status": "invalid"}:
        assert isinstance(verdict, InvalidItem)
        return
    if isinstance(expect, dict):
        assert (verdict.value, verdict.outcome) == (expect["score"], expect["outcome"])
    else:
        assert (verdict.value, verdict.accuracy) == (expect, expect)
    assert took_s < case.get("max_seconds", 12)


def test_what_is_kept_of_endless_output_is_cut_and_says_so(handed):
    for name in ("B49-1", "B49-3", "B49-4"):
        verdict, _ = handed[name]
        assert verdict.outcome == "output_limit"
        assert "output cut at 1048" in verdict.detail
        assert len(verdict.detail) < 3000


@pytest.mark.parametrize(
    ("source", "answer", "value", "outcome", "words"),
    [
        ("print(input()[::-1])", script(("ab\n", "ba\n"), ("c\n", "c\n")), 1.0, "right", ""),
        ("print(input())", script(("a\n", "a\n"), ("b\n", "c\n")), 0.0, "wrong", r"test 2 of 2: expected 'c\n', printed 'b\n'"),
        ("if __name__ == '__main__':\n    print(3)\n    exit()", script(("", "3\n")), 1.0, "right", ""),
        ("import sys\nprint(3)\nsys.exit(1)", script(("", "3\n")), 0.0, "crash", "ended with exit code 1"),
        ("print(3)\n1 / 0", script(("", "3\n")), 0.0, "crash", "ZeroDivisionError: division by zero"),
        ("import os\nprint(3, flush=True)\nos.abort()", script(("", "3\n")), 0.0, "crash", "SIGABRT"),
        ("print(input() + input())", script(("a\n", "a")), 0.0, "crash", "EOFError"),
        ("print(0" + "+0" * 50_000 + ")", script(("", "0\n")), 0.0, "syntax", "SyntaxError"),
        ("(" * 500 + ")" * 500, script(("", "0\n")), 0.0, "syntax", "SyntaxError"),
        ("a = '\0'", script(("", "0\n")), 0.0, "syntax", "SyntaxError"),
        ("a = '\ud800'", script(("", "0\n")), 0.0, "syntax", "SyntaxError"),
        ("print('\N{GREEK SMALL LETTER ALPHA}' + input())", script(("\u00e9", "\u03b1\u00e9")), 1.0, "right", ""),
        ("def f(x):\n    return x + 1", call((1, 2), (2, 3)), 1.0, "right", ""),
        ("def f(x):\n    return 2", call((1, 2), (2, 3)), 0.0, "wrong", "test 2 of 2: expected '3'"),
        ("def f(x):\n    return 1 / x", call((0, 2)), 0.0, "crash", "ZeroDivisionError: division by zero (program.py, line 2)"),
        ("def g(x):\n    return 1", call((0, 1)), 0.0, "crash", "defines no 'f'"),
        ("class Solution:\n    def f(self, x):\n        return x", call((1, 1)), 1.0, "right", ""),
        ("class Solution:\n    def f(self, x: List[int]) -> Optional[int]:\n        return x", call((1, 1)), 1.0, "right", ""),
        (
            "class Solution:\n    def f(self, x):\n        return x",
            {"test": "def check(c):\n    assert c(1) == 1", "entry_point": "Solution().f"},
            1.0,
            "right",
            "",
        ),
        ("print(3)\nraise ValueError('no')", call((1, 1)), 0.0, "crash", "ValueError: no"),
        ("def f(x) return x", call((1, 1)), 0.0, "syntax", "line 1"),
        ("def f(x):\n    return [0] * 10**10", call((1, 1)), 0.0, "memory_limit", "MemoryError"),
        ("def f(x):\n    while x: print('x' * 9999)", call((1, 1)), 0.0, "output_limit", "output cut at"),
        ("def f(x):\n    return f(x)", call((1, 1)), 0.0, "crash", "RecursionError"),
        ("def f(x):\n    return 'x' * 2**21", call((1, 1)), 0.0, "output_limit", "output cut at"),
        ("def f(x):\n    return x + 1", asserts("assert f(1) == 2", "assert f(2) == 3"), 1.0, "right", ""),
        ("def f(x):\n    return 2", asserts("assert f(1) == 2", "assert f(2) == 3"), 0.0, "wrong", "test 2 of 2: expected '3'"),
        ("def f(x):\n    return 2", asserts("assert f(1) == 2", "assert f(2) > 2"), 0.0, "wrong", "test 2 of 2: AssertionError"),
        ("def f(x):\n    return y", asserts("assert f(1) == 2"), 0.0, "crash", "NameError: name 'y' is not defined"),
        ("def f(x):\n    return x", {"test": "def check(c):\n    assert c(1) == 1", "entry_point": "f"}, 1.0, "right", ""),
        (
            "def f(x):\n    return x",
            {"test": "def check(c):\n    assert c(1) == 2", "entry_point": "f"},
            0.0,
            "wrong",
            "expected '2'",
        ),
        (
            "def f(x):\n    return x",
            {"test": "def check(c):\n    x = 1\n    assert c(x) == 2", "entry_point": "f"},
            0.0,
            "wrong",
            "line 4",
        ),
    ],
)
def test_outcomes(source, answer, value, outcome, words):
    verdict = run(source, answer)
    assert (verdict.value, verdict.accuracy, verdict.outcome) == (value, value, outcome)
    assert words in verdict.detail
    assert verdict.extracted == textwrap.dedent(source).strip()


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        (
            "import sys\ndef f(x):\n    return x + 1\nprint('a note', file=sys.stderr)\nf('2')",
            'ended with exit code 1: TypeError: can only concatenate str (not "int") to str\na note\n'
            '  File "program.py", line 5, in <module>\n    f(\'2\')\n  File "program.py", line 3, in f\n    return x + 1\n',
        ),
        ("raise ValueError('a\\nb')", 'ended with exit code 1: ValueError: a\nb\n  File "program.py", line 1, in <module>'),
        ("try:\n    1 / 0\nfinally:\n    [][0]", "ended with exit code 1: IndexError: list index out of range\nTraceback"),
        ("def f(:\n", 'SyntaxError: invalid syntax\n  File "program.py", line 1'),
        ("import sys\nsys.exit('no luck')", "ended with exit code 1: no luck"),
    ],
)
def test_the_error_of_a_program_comes_first_and_the_harness_nowhere(source, detail):
    verdict = run(source, script(("", "3\n")))
    assert verdict.detail.startswith(f"test 1 of 1: {detail}")
    assert "main.py" not in verdict.detail
    assert "run_program" not in verdict.detail


def test_words_without_a_program_are_unparsed():
    for completion in ("", "I do not know the answer.", "```cpp\nint main() {}\n```"):
        verdict = code(completion, script(("", "3\n")), isolation="landlock")
        assert (verdict.value, verdict.outcome, verdict.extracted) == (0.0, "unparsed", None)


@pytest.mark.parametrize(
    ("expression", "returns"),
    [
        ("(1, [2, (3,)])", [1, [2, [3]]]),
        ("{3, 1, 2}", [1, 2, 3]),
        ("frozenset([(2, 1), (1, 2)])", [[1, 2], [2, 1]]),
        ("{1: 'a', None: {True: 2.5}}", {"1": "a", "null": {"true": 2.5}}),
        ("float('nan')", float("nan")),
        ("[float('inf'), -float('inf')]", [float("inf"), -float("inf")]),
        ("0.1 + 0.2", 0.3),
        ("10**30 + 1", 10**30 + 1),
        ("__import__('fractions').Fraction(6, 4)", 1.5),
        ("__import__('decimal').Decimal(3)", 3),
        ("__import__('collections').Counter('aab')", {"a": 2, "b": 1}),
        ("__import__('collections').namedtuple('P', 'x y')(1, 2)", [1, 2]),
        ("'\\ud800\\n\\x00'", "\ud800\n\0"),
        ("None", None),
    ],
)
def test_values_that_cross_as_json(expression, returns):
    verdict = run(f"def f():\n    return {expression}", call((returns,)))
    assert verdict.outcome == "right", verdict.detail


@pytest.mark.parametrize(
    "expression",
    [
        "object()",
        "b'a'",
        "1j",
        "{(1, 2): 3}",
        "{1: 2, '1': 3}",
        "(i for i in [1])",
        "lambda: 1",
        "float('nan')",
        "__import__('decimal').Decimal('NaN')",
        "10**5000",  # longer than Python would print
    ],
)
def test_values_that_do_not_are_wrong(expression):
    verdict = run(f"def f():\n    return {expression}", call((1,)))
    assert (verdict.value, verdict.outcome) == (0.0, "wrong")


def test_a_value_that_contains_itself_is_wrong():
    assert run("def f():\n    a = []\n    a.append(a)\n    return a", call(([[[]]],))).value == 0.0


def test_what_the_program_remembers_stays_and_arguments_are_fresh():
    source = """
        seen = []
        def f(x):
            seen.append(x)
            x.append(len(seen))
            return x
    """
    assert run(source, call(([0], [0, 1]), ([0], [0, 2]))).outcome == "right"


def test_a_module_that_is_imported_has_another_name_and_no_input():
    source = """
        import sys
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        def f():
            return [__name__ == "__main__", sys.stdin.read(), Point(3).x]
    """
    assert run(source, call(([False, "", 3],))).outcome == "right"


PARTIAL = """
    import os
    def f(x):
        if x == 2: os._exit(0)
        if x == 3: return 0
        if x == 4: raise SystemExit
        if x == 5:
            while True: pass
        return x
"""


def test_partial_counts_the_tests_that_pass_whatever_became_of_the_others(rung):
    answer = call(*((x, x) for x in range(1, 8)))
    verdict = run(PARTIAL, answer, rung, partial=True, test_timeout_seconds=0.7)
    assert (verdict.value, verdict.accuracy) == (3 / 7, 0.0)  # 1, 6 and 7
    assert verdict.measures == {"num_tests": 7, "num_passed": 3, "rung": {"namespaces": 3, "landlock": 2}[rung]}
    assert verdict.outcome == "crash"  # of the first that failed
    assert verdict.detail.startswith("test 2 of 7: ended with exit code 0")
    whole = run(PARTIAL, answer, rung)
    assert (whole.value, whole.measures["num_passed"]) == (0.0, 1)
    slow = run(PARTIAL, call((5, 5), (1, 1)), rung, partial=True, test_timeout_seconds=0.7)
    assert (slow.value, slow.outcome) == (0.5, "time_limit")


def test_partial_of_scripts():
    source = "x = input()\nif x == 'b':\n    while True: pass\nprint(x)"
    answer = script(("a", "a"), ("b", "b"), ("c", "d"), ("d", "d"))
    verdict = run(source, answer, partial=True, test_timeout_seconds=0.7)
    assert (verdict.value, verdict.outcome, verdict.measures["num_passed"]) == (0.5, "time_limit", 2)
    everything = run("print(input())", answer["tests"][:1] and script(("a", "a"), ("b", "b")), partial=True)
    assert (everything.value, everything.accuracy) == (1.0, 1.0)


def test_all_tests_of_a_sample_share_its_time():
    def judge(answer, partial):
        begun = time.monotonic()
        verdict = run("import time\ntime.sleep(60)", answer, timeout_seconds=1.0, partial=partial)
        return verdict.value, verdict.outcome, time.monotonic() - begun < 1.0 + 2.0

    answers = [script(*[("", "3")] * 5), call(*[(1, 1)] * 5), asserts(*["assert f(1)"] * 5)]
    with ThreadPoolExecutor(6) as threads:
        for partial in (False, True):
            assert list(threads.map(judge, answers, [partial] * 3)) == [(0.0, "time_limit", True)] * 3


# Forgeries: how to be paid without solving. f(x) is to return x * 7 + 3; the scripts are to print it.

HUNT = """
    import gc, os, re, sys
    def hunt():
        texts = []
        frame = sys._getframe()
        while frame:
            texts.append(repr(frame.f_locals) + repr(frame.f_globals)[:10**6])
            frame = frame.f_back
        texts += [repr(o)[:10**5] for o in gc.get_objects() if isinstance(o, (dict, list, tuple))][:5000]
        for folder in (".", "..", "/tmp"):
            try:
                for name in os.listdir(folder):
                    texts.append(open(folder + "/" + name, errors="replace").read(10**6))
            except OSError:
                pass
        os.set_blocking(0, False)
        for fd in range(32):
            if fd in (1, 2, 3): continue
            try:
                os.set_blocking(fd, False)
                texts.append(os.read(fd, 10**6).decode(errors="replace"))
            except OSError:
                pass
        found = [t for text in texts for t in re.findall("GOLD" + "-[0-9]+", text)]
        return found[0] if found else "nothing"
"""


def test_the_expected_value_is_nowhere_in_the_sandbox(rung):
    gold = "GOLD-" + "48151623"
    script_verdict = run(HUNT + "\n    print(hunt())", script(("", gold)), rung)
    assert script_verdict.outcome == "wrong"
    assert "printed 'nothing" in script_verdict.detail
    call_verdict = run(HUNT + "\n    def f():\n        return hunt()", call((gold,)), rung)
    assert call_verdict.outcome == "wrong"
    assert "nothing" in call_verdict.detail
    # The hunt works: it finds the word where it is put.
    assert run(HUNT + f"\n    here = {gold!r}\n    print(hunt())", script(("", gold)), rung).outcome == "right"


FORGERIES = {
    "exit early": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef f(x):\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "SystemExit in the call": "def f(x):\n    raise SystemExit(0)",
    "equal to everything": """
        class Any:
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __hash__ = lambda self: 0
            __iter__ = lambda self: iter(())
            __float__ = lambda self: 11.0
            __int__ = lambda self: 11
            __module__ = "fractions"
        def f(x):
            return Any()
    """,
    "a number equal to everything": """
        class Any(int):
            __eq__ = lambda self, other: True
            __hash__ = lambda self: 0
            __repr__ = lambda self: "10"
        def f(x):
            return Any(5)
    """,
    "a list equal to everything": "class L(list):\n    __eq__ = lambda s, o: True\ndef f(x):\n    return L([1])",
    "a result of its own": """
        import os
        def f(x):
            os.write(3, b'{"failed": "right", "detail": ""}\\n{"value": true}\\n')
            os._exit(0)
    """,
    "results before it was called": """
        import os
        os.write(3, b'loaded\\n' + b'{"failed": "right", "detail": ""}\\n' * 2)
        os._exit(0)
    """,
    "outcomes of its own": """
        import os
        def f(x):
            os.write(3, b'{"failed": "none", "detail": ""}\\n[]\\n"value"\\n{"value": NaN}\\n')
            os._exit(0)
    """,
    "markers": "import os\nprint('ok PASSED 1.0 all tests passed', flush=True)\nos.write(3, b'compiled\\nloaded\\n' * 9)\nos._exit(0)",
    "another json": """
        import json, json.encoder
        json.loads = json.dumps = lambda *a, **k: '{"value": true}'
        json.JSONEncoder.encode = json.encoder.JSONEncoder.encode = lambda *a: '{"value": true}'
        def f(x):
            return 1
    """,
    "other builtins": """
        import builtins
        builtins.isinstance = lambda *a: True
        builtins.all = builtins.any = lambda *a: True
        builtins.exec = builtins.compile = builtins.len = lambda *a, **k: None
        builtins.AssertionError = Exception
        def f(x):
            return 1
    """,
    "not a number": "def f(x):\n    return float('nan')\nprint('nan')",
    "infinite": "def f(x):\n    return float('inf')\nprint('inf')",
    "true": "def f(x):\n    return True\nprint(True)",
    "every answer at once": "def f(x):\n    return list(range(100))\nfor i in range(100): print(i)",
    "nothing": "def f(x):\n    pass",
    "text in place of a number": "def f(x):\n    return str(x * 7 + 3)\nprint('10.')",
    "its own tracer": """
        import sys, threading
        def trace(frame, event, arg):
            return trace
        sys.settrace(trace); sys.setprofile(lambda *a: None)
        def f(x):
            return 1
    """,
    "a handler for everything": """
        import atexit, os, sys
        sys.excepthook = lambda *a: os._exit(0)
        atexit.register(os._exit, 0)
        def f(x):
            raise ValueError
    """,
}


PAID = (
    script(("1\n", "10\n"), ("2\n", "17\n")),
    call((1, 10), (2, 17)),
    asserts("assert f(1) == 10", "assert abs(f(2) - 17) < 1e-6"),
)


@pytest.mark.parametrize("source", FORGERIES.values(), ids=FORGERIES)
def test_forgeries_are_worth_nothing(source):
    for answer in PAID:
        verdict = run(source, answer, partial=True)
        assert (verdict.accuracy, verdict.value) == (0.0, 0.0), answer


def test_the_honest_program_is_paid():
    source = "def f(x):\n    return x * 7 + 3\nif __name__ == '__main__':\n    print(f(int(input())))"
    for answer in PAID:
        assert run(source, answer).value == 1.0


ASSERT_FORGERIES = {
    "abs": "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x):\n    return 1",
    "AssertionError": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\ndef f(x):\n    return 1",
    "its own main": "import __main__\n__main__.exec = __main__.read_frame = lambda *a: None\ndef f(x):\n    return 1",
    "its own exec": "import sys\nsys._getframe(1).f_globals['exec'] = lambda *a: None\ndef f(x):\n    return 1",
    "input": "import sys\nprint(sys.stdin.read(), open(0, closefd=False).read())\ndef f(x):\n    return 1",
    "caught": "def f(x):\n    try:\n        raise AssertionError\n    except AssertionError:\n        raise SystemExit(0)",
}


@pytest.mark.parametrize("source", ASSERT_FORGERIES.values(), ids=ASSERT_FORGERIES)
def test_easy_forgeries_of_asserts_fail(source):
    assert run(source, asserts("assert abs(f(1) - 10) < 1e-6")).value == 0.0
    assert run("def f(x):\n    return 10", asserts("assert abs(f(1) - 10) < 1e-6")).value == 1.0


def test_a_check_of_asserts_alone_is_not_won_by_what_equals_everything():
    answer = {"test": "def check(candidate):\n    assert candidate(1) == 10\n    assert [17] == candidate(2)", "entry_point": "f"}
    assert run(FORGERIES["equal to everything"], answer).value == 0.0
    assert run(FORGERIES["a list equal to everything"], answer).value == 0.0
    assert run("def f(x):\n    return 10 if x == 1 else [17]", answer).value == 1.0


SEEN = """
    import os
    print(sorted(os.environ), flush=True)
    for path in ["/proc/self/environ", f"/proc/{os.getppid()}/environ", "/proc/1/environ"]:
        try:
            print(open(path).read())
        except OSError as error:
            print(path, error.strerror)
    print(os.environ["HOME"] == os.getcwd(), "end")
"""

IN_A_CHILD = """
import json, resource, sys
from rewards.code_verifier import code
from rewards import code_verifier

kept = []
run_python = code_verifier.run_python
code_verifier.run_python = lambda *a, **k: kept.append(run_python(*a, **k)) or kept[-1]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
verdicts = [code(completion, answer, **options) for completion, answer, options in json.load(sys.stdin)]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([[v.value, v.detail] for v in verdicts]))
print(grown)
print(ascii([ran.stdout[:100_000] for ran in kept]))
"""


def in_a_child(jobs, **environment):
    """Values and details, KiB by which the verifier's process grew, and what the programs printed."""
    result = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    verdicts, grown, printed = result.stdout.splitlines()
    return json.loads(verdicts), int(grown), printed


def test_the_environment_of_the_parent_stays_outside(rung):
    """B179."""
    jobs = [(fenced(SEEN), script(("", "x")), {"isolation": rung})]
    [(_, detail)], _, printed = in_a_child(jobs, FAKE_API_KEY="sentinel123", HOME="/root")
    assert "sentinel123" not in printed + detail
    assert "FAKE_API_KEY" not in printed + detail
    assert "True end" in printed
    assert "/root" not in printed
    allowed = {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONHASHSEED", "MALLOC_ARENA_MAX", "PWD", "LC_CTYPE"}
    names = printed.split("]")[0].split("[")[-1].replace('"', "").replace("'", "").split(", ")
    assert set(names) <= allowed, names


def test_the_verifier_does_not_grow_with_what_programs_write(rung):
    """B49."""
    jobs = [(FAMILY[f"B49-{i}"]["completion"], FAMILY[f"B49-{i}"]["answer"], {"isolation": rung}) for i in range(1, 5)]
    big = "import sys\nsys.stdout.write('[' * 2 * 10**8)"
    nested = "def f():\n    import os\n    os.write(3, b'{\"value\": ' + b'[' * 2**19 + b']' * 2**19 + b'}\\n')\n    os._exit(0)"
    wide = "def f():\n    return [[]] * 200_000"
    jobs += [(fenced(big), script(("", "x")), {"isolation": rung, "memory_limit_mb": 4096})]
    jobs += [(fenced(source), call((1,)), {"isolation": rung}) for source in (nested, wide)]
    verdicts, grown, _ = in_a_child(jobs)
    assert [value for value, _ in verdicts] == [0.0] * 7
    assert grown < 100 * 1024


def test_a_rung_is_taken_or_refused_and_settings_are_checked():
    assert code("print(3)", script(("", "3")), isolation="rlimits").measures["rung"] == 1
    assert code("print(3)", script(("", "3"))).measures["rung"] >= 2
    for options in ({"timeout_seconds": 0}, {"memory_limit_mb": 16}, {"tolerance": -1.0}, {"test_timeout_seconds": -1.0}):
        with pytest.raises(RewardError, match=next(iter(options))):
            code("print(3)", script(("", "3")), **options)


def items(*names):
    return [
        RewardItem(
            prompt="",
            completion=FAMILY[name]["completion"],
            answer=FAMILY[name]["answer"],
            prompt_id=name,
            part=None,
            source=None,
            num_tokens=None,
            options={"memory_limit_mb": 2048},
        )
        for name in names
    ]


def reward_config(rung):
    part = RewardPart(function=FUNCTION, params={"timeout_seconds": 2.0, "isolation": rung}, timeout_s=8.0)
    return RewardConfig(parts={"code": part}, num_workers=2)


BATCH = ("B47-1", "B47-2", "B47-3", "B47-4", "B47-5", "B44-1")
BATCH_GIVES = [
    (0.0, "time_limit"),
    (0.0, "memory_limit"),
    (0.0, "time_limit"),
    (0.0, "syntax"),
    (1.0, "right"),
    (None, "none"),
]


def test_a_batch_in_the_pool(rung):
    """B44, B47: told apart, each in its time, and a row without tests has no value."""
    with RewardPool(reward_config(rung)) as pool:
        pids = pool.health().pids
        scores = pool.score(items(*BATCH))
        assert [(score.value, str(score.outcome)) for score in scores] == BATCH_GIVES
        assert [str(score.status) for score in scores] == ["ok"] * 5 + ["invalid"]
        assert scores[4].measures["code.num_tests"] == 1
        assert all(score.time_s < 2.0 + 2.0 for score in scores)
        assert [score.value for score in pool.score(items("B40-1"))] == [1.0]
        assert (pool.health().pids, pool.health().num_lost) == (pids, 0)


@pytest.mark.cluster
def test_a_batch_in_a_ray_actor(monkeypatch):
    """B44, B47."""
    import ray

    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

    class Grader:
        def grade(self, name):
            case = FAMILY[name]
            try:
                verdict = code(case["completion"], case["answer"], timeout_seconds=2.0, memory_limit_mb=2048)
            except InvalidItem:
                return None, "none"
            return verdict.value, str(verdict.outcome)

    try:
        grader = ray.remote(Grader).options(max_concurrency=4).remote()
        assert ray.get([grader.grade.remote(name) for name in BATCH], timeout=60) == BATCH_GIVES
        assert ray.get(grader.grade.remote("B40-1"), timeout=30) == (1.0, "right")
    finally:
        ray.shutdown()


def test_many_threads_leave_nothing_behind(rung):
    before = threading.active_count()
    with ThreadPoolExecutor(6) as threads:
        runs = [threads.submit(run, "print(input())", script((str(i), str(i))), rung) for i in range(24)]
        assert [future.result().value for future in runs] == [1.0] * 24
    assert threading.active_count() == before
