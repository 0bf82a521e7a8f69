"""Candidate programs against tests, in a sandbox. See `code`."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rewards.code_answers import CodeTests, FunctionTest, ScriptTest, read_answer
from rewards.code_outputs import read_json, same_output, same_value
from rewards.contract import RewardError, Verdict
from rewards.programs import find_program
from rewards.sandbox import RUNG_NUMBERS, Limits, Ran, Rung, choose, run_python
from rollout.records import Outcome

_HARNESS = Path(__file__).with_name("code_harness.py").read_text()
_MIN_MEMORY_MB = 64  # Python itself does not start reliably in less
_OUTPUT_BYTES = 2**20  # allowed beside four times what is expected
_FILE_BYTES = 2**26
_NUM_FILES = 64
_TAIL_LINES, _TAIL_BYTES = 10, 2000  # of what the program wrote to stderr, kept for the log
# What a line from the sandbox may say of a failed test. Not "right": the program can write lines, too.
_FAILED = {"wrong": Outcome.WRONG, "crash": Outcome.CRASH, "memory_limit": Outcome.MEMORY_LIMIT}
_TRACEBACK = "Traceback (most recent call last):\n"
_HARNESS_FRAME = re.compile(r'^  File "main\.py", line \d+, in .*\n(?:    .*\n)*', re.MULTILINE)
_SHOWN = 200  # characters of an expected and a given output in the detail of a wrong one


@dataclass(frozen=True, slots=True)
class _Result:
    outcome: Outcome
    detail: str


def code(
    completion: str,
    answer: Any,
    *,
    timeout_seconds: float = 10.0,
    test_timeout_seconds: float | None = None,
    memory_limit_mb: int = 1024,
    isolation: Literal["auto", "namespaces", "landlock", "rlimits"] = "auto",
    partial: bool = False,
    tolerance: float = 1e-6,
) -> Verdict:
    """1.0 where the program in ``completion`` passes every test of ``answer``, else 0.0.

    The program is found as `rewards.programs` says; the shapes of an answer stand in `rewards.code_answers`. It runs in
    `rewards.sandbox` with Python's standard library alone.

    - **stdio**: a process a test. A test passes when the program ends by itself with exit code 0 and its standard output agrees:
      line by line, without whitespace at the ends, decimals within ``tolerance`` absolute or relative, all else as the same text.
    - **call**: one process runs the program once, as a module that is imported (``__name__`` is not ``"__main__"``), then calls its
      function, or that of its class ``Solution``, for one test after the other, so what it remembers stays. Its annotations are
      not evaluated (``List`` need not be imported). What it returns is compared outside as JSON: tuples are lists, sets are lists in order, keys are text, expected floats within ``tolerance``,
      all else as Python's ``==``. What JSON cannot hold is wrong.
    - **asserts**: one process, the tests' code runs in the program's namespace. What an assert compares with a literal is evaluated there
      and compared outside, as for **call**. In other code the expected values are in the program's reach, so one written to cheat can
      pass (an object that equals everything is enough); ending early, overwriting builtins and printing do not help.

    The first test that fails ends it, unless ``partial``: then all are tried and the value is the share that passed, while the
    accuracy stays 1.0 for all and 0.0 for fewer. The outcome is that of the first test that failed: ``wrong``, ``crash`` (an exception, a
    signal, an exit code that is not 0), ``time_limit``, ``memory_limit``, ``output_limit``; ``syntax`` where a fenced program does not
    compile; ``unparsed`` where there is none. All of these are worth 0.

    Args:
        timeout_seconds: for the sample, all its tests together. It is scored at the latest 2 s later.
        test_timeout_seconds: for each test; without one, the sample's.
        memory_limit_mb: address space of a process, in MiB.
        isolation: the sandbox's rung. ``auto`` takes the strongest there is, never below landlock; a name takes exactly that one.
            One that is missing is an error, never a weaker one. ``measures`` tell it: 3 namespaces, 2 landlock, 1 rlimits.
        partial: see above.
        tolerance: see above.

    Returns a `Verdict` whose ``measures`` are ``num_tests``, ``num_passed`` and ``rung``; ``detail`` says which test failed and how.
    Raises `InvalidItem` for an answer without readable tests, `RewardError` for a setting or a rung that is not to be had.
    """
    tests = read_answer(answer)
    rung = _check_settings(timeout_seconds, test_timeout_seconds, memory_limit_mb, isolation, tolerance)
    deadline = time.monotonic() + timeout_seconds
    found = find_program(completion, tests.function)
    if found is None:
        results = [_Result(Outcome.UNPARSED, "there is no program")]
    else:
        sandbox = _Sandbox(found.source, deadline, test_timeout_seconds or timeout_seconds, memory_limit_mb, rung)
        results = _take(sandbox.results(tests, tolerance), len(tests.tests), partial)
    num_passed = sum(result.outcome is Outcome.RIGHT for result in results)
    right = num_passed == len(tests.tests)
    outcome, detail = Outcome.RIGHT, ""
    if not right:
        number, first = next((i, r) for i, r in enumerate(results, 1) if r.outcome is not Outcome.RIGHT)
        outcome, detail = first.outcome, f"test {number} of {len(tests.tests)}: {first.detail}"
        if outcome is Outcome.SYNTAX and found is not None and not found.fenced:
            outcome = Outcome.UNPARSED
    return Verdict(
        value=num_passed / len(tests.tests) if partial else float(right),
        accuracy=float(right),
        outcome=outcome,
        extracted=None if found is None or outcome is Outcome.UNPARSED else found.source,
        measures={"num_tests": len(tests.tests), "num_passed": num_passed, "rung": RUNG_NUMBERS[rung]},
        detail=detail,
    )


def _check_settings(
    timeout_seconds: float,
    test_timeout_seconds: float | None,
    memory_limit_mb: int,
    isolation: Literal["auto", "namespaces", "landlock", "rlimits"],
    tolerance: float,
) -> Rung:
    """The sandbox's rung. Raises `RewardError` for one that is not to be had, and for other settings that can not work."""
    if not timeout_seconds > 0 or not (test_timeout_seconds is None or test_timeout_seconds > 0):
        raise RewardError("timeout_seconds and test_timeout_seconds must be above 0")
    if memory_limit_mb < _MIN_MEMORY_MB or not 0 <= tolerance < math.inf:
        raise RewardError(f"memory_limit_mb must be at least {_MIN_MEMORY_MB}, tolerance a number from 0")
    return choose(isolation)


def _prepare(*, partial: bool, **settings: Any) -> None:
    """A rung that is missing is refused when a process starts, not once a sample."""
    _check_settings(**settings)


code.prepare = _prepare  # type: ignore[attr-defined]


def _take(results: Iterator[_Result], num_tests: int, partial: bool) -> list[_Result]:
    """The results up to the first that failed, or all of them."""
    taken = []
    for result in results:
        taken.append(result)
        if len(taken) == num_tests or not (partial or result.outcome is Outcome.RIGHT):
            break
    return taken


@dataclass(frozen=True, slots=True)
class _Sandbox:
    """One program and what it may use."""

    source: str
    deadline: float  # of the sample, on time.monotonic
    test_limit_s: float
    memory_limit_mb: int
    rung: Rung

    def results(self, tests: CodeTests, tolerance: float) -> Iterator[_Result]:
        """A result a test, in order; fewer where none of the rest can pass. Lazy: what is not asked for is not run."""
        for test in tests.tests:
            if isinstance(test, ScriptTest):
                yield (result := self._script(test, tolerance))
                if result.outcome is Outcome.SYNTAX:
                    return
        calls = [test for test in tests.tests if isinstance(test, FunctionTest)]
        while calls:
            loaded, given = self._calls(calls, tests.function or "", tolerance)
            yield from given
            calls = calls[len(given) :] if loaded else []

    def _script(self, test: ScriptTest, tolerance: float) -> _Result:
        ran = self._run(["stdio"], test.stdin, len(test.stdout), self.test_limit_s)
        if ran is None or ran.outcome != "exited" or ran.exit_code != 0:
            return _ended(ran, compiled=ran is not None and ran.result.startswith(b"compiled\n"))
        got = ran.stdout.decode(errors="replace")
        if same_output(test.stdout, got, tolerance):
            return _Result(Outcome.RIGHT, "")
        return _Result(Outcome.WRONG, f"expected {_shown(test.stdout)}, printed {_shown(got)}")

    def _calls(self, tests: Sequence[FunctionTest], function: str, tolerance: float) -> tuple[bool, list[_Result]]:
        """Whether the program loaded, and the results up to the test in which its process ended, if it did."""
        frames, expected = b"", []
        for test in tests:
            proof = None if test.returns else secrets.token_hex(16)  # an assert is believed when this comes back
            expected.append(test.returns or (proof,))
            frames += _frame(test.request) + (b"" if proof is None else _frame(proof.encode()))
        size = sum(len(repr(values)) for values in expected)
        ran = self._run(["calls", function, repr(self.test_limit_s)], frames, size, math.inf)
        lines = [] if ran is None else ran.result.split(b"\n")[:-1]
        compiled, loaded = lines[:1] == [b"compiled"], lines[:2] == [b"compiled", b"loaded"]
        results = (
            [_returned(line, values, tolerance) for line, values in zip(lines[2:], expected, strict=False)] if loaded else []
        )
        if len(results) < len(tests):
            results.append(_ended(ran, compiled))
        return loaded, results

    def _run(self, args: Sequence[str], stdin: str | bytes, expected_size: int, limit_s: float) -> Ran | None:
        """None where no time is left."""
        wall_s = min(limit_s, self.deadline - time.monotonic())
        if wall_s <= 0:
            return None
        limits = Limits(
            cpu_s=wall_s,
            wall_s=wall_s,
            memory_bytes=self.memory_limit_mb * 2**20,
            output_bytes=_OUTPUT_BYTES + 4 * expected_size,
            file_bytes=_FILE_BYTES,
            num_files=_NUM_FILES,
        )
        files = {"program.py": self.source.encode(errors="surrogatepass")}
        data = stdin.encode(errors="surrogatepass") if isinstance(stdin, str) else stdin
        return run_python(_HARNESS, stdin=data, args=args, files=files, limits=limits, rung=self.rung)


def _ended(ran: Ran | None, compiled: bool) -> _Result:
    """The result of a test in which the process ended, or for which there was no time."""
    if ran is None:
        return _Result(Outcome.TIME_LIMIT, "no time was left for it")
    tail = _tail(ran.stderr)
    if ran.outcome == "exited" and not compiled:
        return _Result(Outcome.SYNTAX, tail)
    if ran.exit_code == 1 and b"Timeout (" in ran.stderr:
        return _Result(Outcome.TIME_LIMIT, f"took longer than test_timeout_seconds: {tail}")
    if ran.outcome == "exited":
        return _Result(Outcome.CRASH, f"ended with exit code {ran.exit_code}{tail and ': ' + tail}")
    words = {
        "time_limit": f"ran into the time limit after {ran.time_s:.2f} s",
        "memory_limit": "ran into the memory limit",
        "output_limit": f"output cut at {max(len(ran.stdout), len(ran.stderr), len(ran.result))} bytes"
        if ran.cut
        else "wrote more files than are allowed",
        "crash": f"was ended by {ran.signal}",
    }[ran.outcome]
    return _Result(Outcome(ran.outcome), words + (tail and f": {tail}"))


def _returned(line: bytes, expected: tuple[Any, ...], tolerance: float) -> _Result:
    """The result in a line of the harness, which the program may have written."""
    try:
        message = read_json(line)
        if "value" in message:
            right = any(same_value(value, message["value"], tolerance) for value in expected)
            words = f"expected {_shown(json.dumps(expected[0]))}, got {_shown(line.decode())}"
            return _Result(Outcome.RIGHT, "") if right else _Result(Outcome.WRONG, words)
        return _Result(_FAILED[message["failed"]], _printable(str(message["detail"])[:_TAIL_BYTES]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return _Result(Outcome.WRONG, f"wrote {_shown(line.decode(errors='replace'))} in place of a result")


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _tail(stderr: bytes) -> str:
    """The end of what was written; where that is a traceback, the error first, then the program's own frames."""
    text = _HARNESS_FRAME.sub("", stderr[-4 * _TAIL_BYTES :].decode(errors="replace"))
    before, traceback, after = text.rpartition(_TRACEBACK)
    frames, error = _split_traceback(after) if traceback else ([], [])
    if error:
        lines = [*error[:_TAIL_LINES], *[line for line in (*before.split("\n"), *frames) if line][-_TAIL_LINES:]]
    else:
        lines = text.strip().split("\n")[-_TAIL_LINES:]
    return _printable("\n".join(lines).strip())[:_TAIL_BYTES]


def _split_traceback(text: str) -> tuple[list[str], list[str]]:
    """Its frames, which are indented, and the error behind them."""
    lines = text.rstrip().split("\n")
    first = next((place for place, line in enumerate(lines) if line and not line[0].isspace()), len(lines))
    return lines[:first], lines[first:]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
