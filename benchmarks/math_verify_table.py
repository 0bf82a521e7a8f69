"""math-verify alone against ours on the cases of tests/cases/math.jsonl, as the tables of docs/verifiers_math.md.

    python benchmarks/math_verify_table.py [--write]

Each case is judged in a child process with a limit on time and memory; a breach, like an exception, is a wrong result.
``--write`` puts the tables into the page, between its two markers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
from collections.abc import Callable, Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "cases" / "math.jsonl"
PAGE = ROOT / "docs" / "verifiers_math.md"
BEGIN, END = "<!-- made by benchmarks/math_verify_table.py -->", "<!-- end -->"
LIMIT_S = 20.0
MEMORY_BYTES = 3 * 2**30
SHOWN = 60  # characters of a completion

Case = Mapping[str, Any]


def bare(case: Case) -> float:
    from math_verify import parse, verify  # noqa: PLC0415 - only in the child: sympy takes a second to import

    return float(verify(parse(case["answer"]), parse(case["completion"])))


def boxed_gold(case: Case) -> float:
    from math_verify import parse, verify  # noqa: PLC0415

    return float(verify(parse(rf"\boxed{{{case['answer']}}}"), parse(case["completion"])))


def ours(case: Case) -> float:
    from rewards.math_verifier import math  # noqa: PLC0415

    options = {key: value for key, value in case.get("options", {}).items() if key != "run_in"}
    return math(case["completion"], case["answer"], **options).value


JUDGES: dict[str, Callable[[Case], float]] = {"parse(gold)": bare, "gold in a box": boxed_gold, "Limen": ours}


def serve(connection: Connection, name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    while True:
        try:
            result: float | str = JUDGES[name](connection.recv())
        except EOFError:
            return
        except Exception as error:
            result = type(error).__name__
        connection.send(result)


def run(name: str, cases: list[Case]) -> dict[str, float | str]:
    """What the judge says of each case: a score, or in words what it did instead."""
    context = multiprocessing.get_context("spawn")
    process, mine, results = None, None, {}
    for case in cases:
        if process is None or mine is None:
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, name), daemon=True)
            process.start()
            theirs.close()
        try:
            mine.send(case)
            results[case["id"]] = mine.recv() if mine.poll(LIMIT_S) else f"no answer in {LIMIT_S:g} s"
        except (EOFError, OSError):
            results[case["id"]] = "died"
        if results[case["id"]] == "died" or (isinstance(results[case["id"]], str) and "no answer" in results[case["id"]]):
            process.kill()
            process, mine = None, None
    if mine is not None:
        mine.close()
    return results


def is_right(case: Case, result: float | str) -> bool:
    expect = case["expect"]
    return result in expect["one_of"] if isinstance(expect, dict) else result == expect


def code(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
    return f"`{text}`".replace("|", r"\|") if text else "(empty)"


def tables(cases: list[Case], results: Mapping[str, Mapping[str, float | str]]) -> str:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case["id"].split("-")[0], []).append(case)
    lines = [f"math-verify {version('math-verify')}, {len(cases)} cases.", ""]
    lines += ["| group | about | cases | " + " | ".join(JUDGES) + " |", "|---|---|--:|" + "--:|" * len(JUDGES)]

    def right(name: str, chosen: list[Case]) -> int:
        return sum(is_right(case, results[name][case["id"]]) for case in chosen)

    for group, chosen in groups.items():
        about = "; ".join(dict.fromkeys(case["note"] for case in chosen[:2]))
        lines.append(f"| {group} | {about} | {len(chosen)} | " + " | ".join(str(right(name, chosen)) for name in JUDGES) + " |")
    lines.append(f"| all | | {len(cases)} | " + " | ".join(f"**{right(name, cases)}**" for name in JUDGES) + " |")
    lines += ["", "Every case that one of the three gets wrong:", ""]
    lines += ["| case | completion | gold | right is | " + " | ".join(JUDGES) + " |", "|---|---|---|---|" + "---|" * len(JUDGES)]
    for case in cases:
        got = [results[name][case["id"]] for name in JUDGES]
        if not all(is_right(case, result) for result in got):
            said = " | ".join(f"{result:g}" if isinstance(result, float) else result for result in got)
            expect = case["expect"]
            wanted = "either" if isinstance(expect, dict) else f"{expect:g}"
            lines.append(f"| {case['id']} | {code(case['completion'])} | {code(case['answer'])} | {wanted} | {said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    text = tables(cases, {name: run(name, cases) for name in JUDGES})
    if not arguments.write:
        print(text)
        return
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
