"""math-verify alone against ours: the tables of docs/verifiers_math.md.

    python benchmarks/math_verify_table.py [--write]

On the cases of tests/cases/math.jsonl, and on answers drawn from the kinds of tests/rewards/test_math_kinds.py. Each is judged
in a child process with a limit on time and memory; a breach, like an exception, is a wrong result. ``--write`` puts the
tables into the page, between its two markers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import runpy
from collections.abc import Callable, Mapping
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "cases" / "math.jsonl"
KINDS = ROOT / "tests" / "rewards" / "test_math_kinds.py"
PAGE = ROOT / "docs" / "verifiers_math.md"
BEGIN, END = "<!-- made by benchmarks/math_verify_table.py -->", "<!-- end -->"
LIMIT_S = 20.0
MEMORY_BYTES = 3 * 2**30
DRAWN = 60  # examples drawn of a kind; fewer where draws repeat
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
            case = connection.recv()
        except EOFError:
            return
        try:
            result: float | str = JUDGES[name](case)
        except Exception as error:
            result = type(error).__name__
        connection.send(result)


def run(name: str, cases: list[Case]) -> dict[str, float | str]:
    """What the judge says of each case: a score, or in words what it did instead."""
    results: dict[str, float | str] = {}
    process = None
    for case in cases:
        if process is None:
            mine, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, name), daemon=True)
            process.start()
            theirs.close()
        result = None
        try:
            mine.send(case)
            result = mine.recv() if mine.poll(LIMIT_S) else f"no answer in {LIMIT_S:g} s"
            results[case["id"]] = result
        except (EOFError, OSError):
            results[case["id"]] = "died"
        if result is None or (isinstance(result, str) and result.startswith("no answer")):
            process.kill()
            process = None
    return results


def draw(strategy: SearchStrategy[Any]) -> list[Any]:
    examples: dict[Any, None] = {}

    @settings(max_examples=DRAWN, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example: Any) -> None:
        examples[example] = None

    collect()
    return list(examples)


def drawn() -> list[Case]:
    """The examples of the kinds: each gold with the other notation, which is right, and with its neighbour, which is not."""
    tests = runpy.run_path(str(KINDS))
    cases: list[Case] = []
    for kind, strategy in (tests["EXACT"] | tests["SYMBOLIC"]).items():
        for number, (gold, *pair) in enumerate(draw(strategy)):
            for expect, written in zip((1.0, 0.0), pair, strict=True):
                name = f"{kind}-{number}={expect:g}"
                cases.append({"id": name, "completion": rf"\boxed{{{written}}}", "answer": gold, "expect": expect, "note": ""})
    return cases


def is_right(case: Case, result: float | str) -> bool:
    expect = case["expect"]
    return result in expect["one_of"] if isinstance(expect, dict) else result == expect


def code(text: str) -> str:
    text = text.replace("\n", " ")
    text = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
    return f"`{text}`".replace("|", r"\|") if text else "(empty)"


def tables(cases: list[Case], most: int, shown: tuple[str, ...]) -> str:
    """Right counts by group, then the cases that any of the judges in ``shown`` gets wrong, at most so many of a group."""
    results = {name: run(name, cases) for name in JUDGES}
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case["id"].split("-")[0], []).append(case)

    def row(title: str, chosen: list[Case]) -> str:
        counts = [sum(is_right(case, results[name][case["id"]]) for case in chosen) for name in JUDGES]
        return f"| {title} | {len(chosen)} | " + " | ".join(map(str, counts)) + " |"

    lines = ["| group | cases | " + " | ".join(JUDGES) + " |", "|---|--:|" + "--:|" * len(JUDGES)]
    for group, chosen in groups.items():
        notes = "; ".join(dict.fromkeys(case["note"] for case in chosen[:2]))
        lines.append(row(f"{group}: {notes}" if notes else group, chosen))
    which = f"by {' or '.join(shown)}{f', at most {most} of a group' if most < len(cases) else ''}"
    lines += [row("all", cases), "", f"What was judged wrongly {which}:", ""]
    lines += ["| case | completion | gold | right is | " + " | ".join(JUDGES) + " |", "|---|---|---|---|" + "---|" * len(JUDGES)]
    for chosen in groups.values():
        wrong = [case for case in chosen if not all(is_right(case, results[name][case["id"]]) for name in shown)]
        for case in wrong[:most]:
            said = [f"{r:g}" if isinstance(r := results[name][case["id"]], float) else r for name in JUDGES]
            wanted = "either" if isinstance(case["expect"], dict) else f"{case['expect']:g}"
            cells = [case["id"].rpartition("=")[0] or case["id"], code(case["completion"]), code(case["answer"]), wanted, *said]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    given_cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    kinds = drawn()
    text = (
        f"### The cases\nmath-verify {version('math-verify')}, the {len(given_cases)} cases of `tests/cases/math.jsonl`.\n\n"
        f"{tables(given_cases, len(given_cases), tuple(JUDGES))}\n\n"
        f"### The kinds\n{len(kinds)} pairs drawn from `tests/rewards/test_math_kinds.py`, all in boxes, half of them right.\n\n"
        f"{tables(kinds, 3, ('gold in a box', 'Limen'))}"
    )
    if not arguments.write:
        print(text)
        return
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
