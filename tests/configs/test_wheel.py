"""The installed wheel carries every YAML file, and composes it in a folder that has `configs` and `rewards` of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "rollout", "rewards", "learner", "orchestrator")

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import configs.compose, rewards, orchestrator.main
assert configs.compose.__file__.startswith(sys.argv[1]), configs.compose.__file__
assert rewards.__file__.startswith(sys.argv[1]), rewards.__file__
needs = {"jsonl": ["data.sources.main.path=p.jsonl"], "parquet": ["data.sources.main.path=p.jsonl"],
         "datasets": ["data.sources.main.path=owner/name"], "data/reasoning_gym": ["data.sources.main.params.task=gcd"],
         "pretrained": ["model.path=owner/name"], "bypass": ["algorithm=grpo"],
         "replay": ["rollout.source_run=run"], "http": ["reward.parts.http.params.urls=http://localhost/score"],
         "judge": ["reward.parts.judge.params.base_url=http://localhost/v1", "reward.parts.judge.params.model=m"],
         "reward_model": ["reward.parts.reward_model.params.path=folder"]}
for group, names in configs.compose.shipped_files().items():
    for name in names:
        configs.compose.load_config([f"{group}={name}", *needs.get(name, needs.get(f"{group}/{name}", []))])
        print(f"{group}/{name}.yaml")
assert not {"torch", "ray", "vllm", "deepspeed"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked. It is built from a copy, so that no build folder appears in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(out), str(source)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (archive,) = out.glob("limen-*.whl")
    zipfile.ZipFile(archive).extractall(out / "unpacked")
    return out / "unpacked"


@pytest.mark.timeout(180)
def test_every_yaml_is_in_the_wheel_and_composes(wheel: Path, tmp_path: Path) -> None:
    for name in ("configs", "rewards"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own package was imported')\n")
    (tmp_path / "configs" / "config.yaml").write_text("steps: 1\n")
    (tmp_path / "p.jsonl").touch()
    (tmp_path.parent / "probe.py").write_text(CODE)
    done = subprocess.run(
        [sys.executable, str(tmp_path.parent / "probe.py"), str(wheel)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shipped = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert set(done.stdout.split()) == shipped - {"config.yaml"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "p.jsonl", "rewards"]  # Hydra wrote nothing
