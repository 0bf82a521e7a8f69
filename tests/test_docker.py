"""The images cannot be built where the tests run. `make check` lints them; what they promise the rest of the project is checked here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_installs_as_a_plain_user(path: Path) -> None:
    steps = instructions(path)
    assert ":" in dict(steps)["FROM"]
    user = next(i for i, (word, rest) in enumerate(steps) if word == "USER" and rest.isdigit() and rest != "0")
    install = next(i for i, (word, rest) in enumerate(steps) if word == "RUN" and "./install.sh" in rest)
    assert user < install
    assert ("ENTRYPOINT", '["limen"]') in steps


def test_the_build_gets_what_the_installation_needs() -> None:
    # .dockerignore lets nothing through but what it names.
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    named = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert named == {
        "pyproject.toml",
        "install.sh",
        "README.md",
        "LICENSE",
        "configs",
        "rollout",
        "rewards",
        "learner",
        "orchestrator",
    }
    assert all((ROOT / name).exists() for name in named)


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"])


def test_compose_is_a_head_and_two_workers_that_wait_for_it(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"head", "worker-1", "worker-2"}
    assert "--head" in services["head"]["entrypoint"]
    for name in ("worker-1", "worker-2"):
        assert "--address=head:6379" in services[name]["entrypoint"]
        assert services[name]["depends_on"] == {"head": {"condition": "service_healthy"}}


def test_every_node_can_join_and_hold_its_objects(services: dict[str, dict[str, Any]]) -> None:
    for node in services.values():
        # One token for all, given by the user and never written here; no worker starved by Ray's niceness.
        assert node["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert node["environment"]["RAY_worker_niceness"] == "0"
        shared_memory = int(node["shm_size"].removesuffix("gb")) * 10**9
        store = next(int(word.split("=")[1]) for word in node["entrypoint"] if word.startswith("--object-store-memory"))
        assert store < shared_memory
        assert node["healthcheck"]["test"][0] == "CMD"


def test_ray_knows_every_option_that_compose_gives(services: dict[str, dict[str, Any]]) -> None:
    ray = str(Path(sys.executable).parent / "ray")
    known = subprocess.run([ray, "start", "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    given = {word.split("=")[0] for node in services.values() for word in node["entrypoint"] if word.startswith("--")}
    assert {option for option in given if option not in known} == set()
