"""The runner behind `make long`: the [long] lines of the issues, and the record of what they measured.

A test says which line it proves, and records its figures before it asserts on them:

    @pytest.mark.line(id="2.1")
    @pytest.mark.timeout(1800)
    def test_demo_learns(record: Record) -> None:
        ...
        record({"pass@1 before": 0.31, "pass@1 after": 0.74})

Each call of ``record`` appends one section to docs/measured.md.
"""

import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured.md"

Record = Callable[[Mapping[str, float | int | str]], None]


def commit() -> str:
    """The short hash of HEAD, with a word where the work tree differs from it; the record itself does not count."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!docs/measured.md")
    return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")


def machine() -> str:
    """Cores, memory and the load when the test ended: a figure from a busy machine must be known as such."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    return f"{cores} cores of {model or platform.machine()}, {memory:.0f} GiB, Python {python}, load {os.getloadavg()[0]:.1f}"


def section(line: str, test: str, figures: Mapping[str, float | int | str]) -> str:
    """One section of the record, in Markdown."""
    rows = "\n".join(
        f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |" for name, value in figures.items()
    )
    today = datetime.date.today().isoformat()
    return f"\n## {line}: {test}, {today}\n\n`make long ONLY={line}` at commit {commit()}; {machine()}.\n\n| figure | value |\n|---|---|\n{rows}\n"


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Appends the figures of this test, with date, commit, command and machine, to docs/measured.md."""
    line = request.node.get_closest_marker("line").kwargs["id"]

    def append(figures: Mapping[str, float | int | str]) -> None:
        with MEASURED.open("a") as file:
            file.write(section(line, request.node.name, figures))

    return append


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("line")
        if marker is None or set(marker.kwargs) != {"id"}:
            raise pytest.UsageError(f'{item.nodeid}: a long test names its line: @pytest.mark.line(id="2.1")')
