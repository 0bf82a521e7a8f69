"""`make long`: which tests it runs, and that a record says where its figures come from."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LONG_TESTS = """
import pytest

@pytest.mark.line(id="2.1")
def test_first(record):
    record({"pass@1 after": 0.73456, "steps": 500})

@pytest.mark.line(id="2.10")
def test_tenth(record):
    record({"never": 1})
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the runner, two long tests of its own, a short one and one that runs alone."""
    (tmp_path / "tests" / "long").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "tests" / "long" / "conftest.py", tmp_path / "tests" / "long")
    (tmp_path / "tests" / "long" / "test_lines.py").write_text(LONG_TESTS)
    (tmp_path / "tests" / "test_short.py").write_text("def test_short(): pass\n")
    (tmp_path / "tests" / "test_alone.py").write_text("import pytest\n\n@pytest.mark.cluster\ndef test_alone(): pass\n")
    (tmp_path / "docs" / "measured.md").write_text("# Measured\n")
    (tmp_path / "install.sh").write_text("#!/bin/sh\n")
    (tmp_path / "install.sh").chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    (tmp_path / ".gitignore").write_text(".venv/\n__pycache__/\n.pytest_cache/\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_only_runs_exactly_that_line_and_records_it(project: Path) -> None:
    done = make(project, "long", "ONLY=2.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 deselected" in done.stdout
    text = (project / "docs" / "measured.md").read_text()
    assert re.search(r"^## 2\.1: test_first, \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert re.search(r"^`make long ONLY=2\.1` at commit [0-9a-f]{7,}; \d+ cores of ", text, re.MULTILINE)
    assert "| pass@1 after | 0.7346 |\n| steps | 500 |\n" in text
    assert "never" not in text

    # The record itself does not make the tree dirty; anything else does, and the record says so.
    (project / "Makefile").open("a").write("\n")
    assert make(project, "long", "ONLY=2.1").returncode == 0
    commits = re.findall(r"at commit (.*?);", (project / "docs" / "measured.md").read_text())
    assert [text.endswith(" with uncommitted changes") for text in commits] == [False, True]


def test_a_line_that_does_not_exist_is_an_error(project: Path) -> None:
    assert make(project, "long", "ONLY=9.9").returncode != 0


def test_make_test_leaves_the_long_lines_out(project: Path) -> None:
    done = make(project, "test")
    assert done.returncode == 0
    assert done.stdout.count("1 passed") == 2, "one beside others, one alone"
    assert (project / "docs" / "measured.md").read_text() == "# Measured\n"


def test_a_long_test_without_a_line_is_refused(project: Path) -> None:
    (project / "tests" / "long" / "test_more.py").write_text("def test_lost(): pass\n")
    done = make(project, "long")
    assert done.returncode != 0
    assert "a long test names its line" in done.stdout + done.stderr
