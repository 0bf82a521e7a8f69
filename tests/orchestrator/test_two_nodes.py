"""A run over two nodes: two raylets in two network namespaces, each with an address of its own, and nothing between them but that."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BIN = Path(sys.executable).parent
CPUS_A_NODE = 3  # a worker, its verifier, a rank: the run needs both nodes whole
OVERRIDES = [
    "model.embedded.steps=20",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=8",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "selection.name=none",
    "evaluation.before=false",
    "evaluation.after=false",
    "steps=2",
    "rollout.num_workers=2",
    "rollout.cache_gib=0.1",
    "learner.num_ranks=2",
    "learner.zero_stage=3",
    "log.tensorboard=false",
]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def namespaces():
    """Two namespaces joined by a cable, each with its address; skips loudly where the system forbids them."""
    number = os.getpid() % 200
    names = [f"limen{os.getpid()}{side}" for side in "ab"]
    addresses = [f"10.213.{number}.1", f"10.213.{number}.2"]
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ends = [f"lm{os.getpid() % 10**6}{side}" for side in "ab"]
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
            for name, end, address in zip(names, ends, addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", end, "up")
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            reason = f"TWO NODES NOT TESTED: network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}"
            warnings.warn(reason, stacklevel=1)
            pytest.skip(reason)
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of all processes: a home of their own, where Ray keeps the token that they share."""
    home = tmp_path_factory.mktemp("home")
    (home / "token").write_text("0123456789abcdef" * 4)
    return os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(home / "token"),
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture(scope="module")
def nodes(namespaces, environment, tmp_path_factory):
    """A raylet in each namespace, the first with the head. They are ended by their process groups, and nobody else's Ray is touched."""
    head = namespaces[0][1]
    started = []
    try:
        for i, (name, address) in enumerate(namespaces):
            where = ["--head", "--port=6379", "--include-dashboard=false"] if i == 0 else [f"--address={head}:6379"]
            temp_dir = tmp_path_factory.mktemp(f"r{i}")
            log = (temp_dir / "start.log").open("w+")
            command = [
                *("ip", "netns", "exec", name, str(BIN / "ray"), "start", *where, f"--node-ip-address={address}"),
                *(f"--num-cpus={CPUS_A_NODE}", f"--temp-dir={temp_dir}", "--object-store-memory=200000000", "--block"),
            ]
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=temp_dir
            )
            started.append(process)
            wait_for_line(Path(log.name), "Ray runtime started", process)
        yield namespaces
    finally:
        for process in reversed(started):
            end(process)


def wait_for_line(path, text, process, timeout=60):
    deadline = time.monotonic() + timeout
    while text not in path.read_text():
        assert process.poll() is None, path.read_text()
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.2)


def end(process):
    """Asks a process to end, `ray start --block` with its node, then kills whatever of its children is left."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=15)
    for member in [*family, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=10)


def test_a_run_over_two_nodes(nodes, environment, tmp_path):
    (name, address), (_, other) = nodes
    run_dir = tmp_path / "run"
    limen = [str(BIN / "limen"), "train", *OVERRIDES, f"cluster.address={address}:6379", f"run_dir={run_dir}"]
    command = ["ip", "netns", "exec", name, *limen]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=150)
    finally:
        end(process)
    assert process.returncode == 0, out
    assert f"Ray: joined {address}:6379" in out
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    facts = next(event for event in events if event["event"] == "started")
    assert facts["ray"] == f"{address}:6379"
    # each node has one of everything: an engine, the verifiers of its text, a learner rank
    ranks = [actor for actor in facts["actors"] if "rank" in actor]
    others = [actor["address"] for actor in facts["actors"] if "rank" not in actor]
    assert sorted(actor["address"] for actor in ranks) == [address, other]
    assert sorted(others) == [address, address, other, other]
    assert all(actor["niceness"] == 0 for actor in facts["actors"])
    made = json.loads((run_dir / "summary.json").read_text())["num_groups_by_worker"]
    assert len(made) == 2
    assert min(made.values()) > 0, made
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["batch/num_rank_tokens_min"] > 0
        assert row["push/changed_frac"] > 0
