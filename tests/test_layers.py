"""The layers hold: the import contracts of pyproject.toml, and what importing the light modules really loads."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "ray", "vllm", "deepspeed")


def run_python(code: str, folder: Path) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("module", ["configs.schema", "configs.compose", "rollout.records", "rewards.pool"])
def test_light_modules_load_nothing_heavy(module: str, tmp_path: Path) -> None:
    # A static check cannot see what a third-party library imports in its turn.
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(code, tmp_path).strip() == "[]"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=120)


def test_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


# One forbidden import for every contract, written into an empty copy of the packages.
BREACHES = {
    "rollout/bad.py": ("import learner", "imports point down"),
    "rewards/bad.py": ("import learner", "imports point down"),
    "configs/bad.py": ("import torch", "configs and the records are light"),
    "rewards/judge.py": ("import torch", "rewards are light"),
    "learner/bad.py": ("import ray", "only orchestrator makes Ray actors"),
    "orchestrator/bad.py": ("import vllm", "vLLM stays in its own files"),
    "learner/worse.py": ("import deepspeed", "DeepSpeed stays in its own file"),
}


@pytest.mark.parametrize("path", BREACHES)
def test_each_contract_catches_a_breach(path: str, tmp_path: Path) -> None:
    statement, contract = BREACHES[path]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for package in ("configs", "rollout", "rewards", "learner", "orchestrator"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "rollout" / "records.py").touch()
    (tmp_path / path).write_text(statement + "\n")
    done = lint_imports(tmp_path)
    broken = [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]
    assert done.returncode == 1
    assert len(broken) == 1
    assert broken[0].startswith(contract)
