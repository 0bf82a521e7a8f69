"""Which Ray a run uses, and where its actors go: a foreign instance is joined only where an address was given, and never stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from configs.compose import load_config
from configs.errors import ConfigError
from configs.schema import ClusterConfig
from orchestrator import cluster
from orchestrator.cluster import Demand, join_address, start_cluster
from orchestrator.errors import RunStopped
from orchestrator.launch import Launcher
from orchestrator.placement import Reservation, reserve
from orchestrator.pools import RayScorer
from orchestrator.stages import Address, Finished
from orchestrator.waits import DeadlinePassed, Waits
from rollout.records import GroupMeta, Prompt, Purpose, Visit

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

BIN = Path(sys.executable).parent
# A driver in a process of its own: joins or starts as told, says where it is, and ends
DRIVER = """
import json, os, sys
import ray
from configs.schema import ClusterConfig
from orchestrator.cluster import Demand, start_cluster

instance = start_cluster(ClusterConfig(address=sys.argv[1]), Demand(num_cpus=1, num_gpus=0))
print(json.dumps({"said": str(instance), "session": ray.get_runtime_context().gcs_address, "cpus": ray.cluster_resources()["CPU"]}))
instance.close()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "token").write_text("0123456789abcdef" * 4)
    names = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / "token"), "RAY_USAGE_STATS_ENABLED": "0"}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | names


@pytest.fixture(scope="module")
def foreign(environment, tmp_path_factory):
    """Somebody else's instance with one CPU, in a folder of its own: its address. It must outlive every run of this file."""
    temp_dir = tmp_path_factory.mktemp("foreign")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    log = (temp_dir / "start.log").open("w+")
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    command += [f"--temp-dir={temp_dir}", "--object-store-memory=100000000"]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=temp_dir)
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in Path(log.name).read_text():
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        yield (temp_dir / "ray_current_cluster").read_text().strip(), family
        assert process.poll() is None
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
        for member in [*family, process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(timeout=10)


def drive(environment, address, **more):
    command = [sys.executable, "-c", DRIVER, address]
    done = subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_foreign_instance_is_joined_only_where_its_address_was_given_and_lives_on(foreign, environment, tmp_path_factory):
    """B164: with no address an instance of its own, though the foreign one runs and Ray's address file names it; with RAY_ADDRESS or
    the option the foreign one, and it says so."""
    address, family = foreign
    ray_folder = tmp_path_factory.mktemp("t") / "ray"
    ray_folder.mkdir()
    (ray_folder / "ray_current_cluster").write_text(address)
    alone = drive(environment, "auto", RAY_TMPDIR=str(ray_folder.parent))
    assert alone["said"] == "a private instance"
    assert alone["session"] != address
    for joined in (drive(environment, "auto", RAY_ADDRESS=address), drive(environment, address)):
        assert joined == {"said": f"joined {address}", "session": address, "cpus": 1.0}
    assert drive(environment, "local", RAY_ADDRESS=address)["said"] == "a private instance"
    assert all(member.is_running() for member in family)


def test_a_token_that_is_missing_is_named(foreign, environment):
    """An address that is given does not turn token authentication on; a wrong token is no better than none."""
    address, _ = foreign
    for names in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "f" * 64}):
        command = [sys.executable, "-c", DRIVER, address]
        done = subprocess.run(command, env=environment | names, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("orchestrator.errors.RunStopped: ")
        assert address in last
        assert "RAY_AUTH_MODE=token" in last


@pytest.mark.parametrize(
    ("key", "address", "words"),
    [
        ("cluster.address", "ray://10.0.0.1:10001", "cluster.address=HOST:6379"),
        ("cluster.address", "10.0.0.1", "is not HOST:PORT"),
        ("RAY_ADDRESS", "auto", "cluster.address=local"),  # to Ray it means: whatever runs on this machine
        ("RAY_ADDRESS", "http://10.0.0.1:8265", "Ray job"),  # the dashboard, for `ray job submit`
    ],
)
def test_an_address_that_cannot_be_joined_is_refused_with_the_key_and_the_fix(monkeypatch, key, address, words):
    monkeypatch.setenv("RAY_ADDRESS", address if key == "RAY_ADDRESS" else "")
    with pytest.raises(ConfigError, match=words) as caught:
        join_address(ClusterConfig(address="auto" if key == "RAY_ADDRESS" else address))
    assert str(caught.value).startswith(f"{key}={address}")


def test_colocated_an_engine_and_a_rank_ask_for_halves_of_one_gpu_and_a_cpu_each():
    overrides = ["rollout.num_workers=4", "learner.num_ranks=4", "reward.num_workers=2"]
    for placement, num_gpus in (("split", 8), ("colocated", 4)):
        config = load_config([*overrides, f"cluster.placement={placement}"])
        assert Demand.of(config, gpu=True) == Demand(num_cpus=10, num_gpus=num_gpus)
        assert Demand.of(config, gpu=False) == Demand(num_cpus=10, num_gpus=0)
    bundles = ({"CPU": 2.0, "GPU": 1.0},)
    assert Reservation(None, bundles, 2).asks(0) == {"num_cpus": 1.0, "num_gpus": 0.5}
    assert Reservation(None, bundles, 1).asks(0) == {"num_cpus": 2.0, "num_gpus": 1.0}


def test_nobody_at_the_address_is_one_line_within_the_deadline(monkeypatch):
    """Ray itself would try for minutes. The socket takes connections and never answers, as a stopped GCS does."""
    monkeypatch.setattr(cluster, "JOIN_S", 4.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(RunStopped, match=f"no Ray instance answers at {address} within 4 s"):
            start_cluster(ClusterConfig(address=address), Demand(num_cpus=1, num_gpus=0))
    assert time.monotonic() - started < 15
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def two_cpus():
    instance = start_cluster(ClusterConfig(address="local", num_cpus=2), Demand(num_cpus=2, num_gpus=0))
    yield instance
    instance.close()


@pytest.mark.parametrize(
    ("demand", "words"),
    [(Demand(num_cpus=6, num_gpus=0), "asks for 6 CPUs .* has 2"), (Demand(num_cpus=2, num_gpus=1), "asks for 1 GPUs .* has 0")],
)
def test_more_than_the_books_hold_is_refused_with_both_numbers(demand, words):
    """B166, at once: 4 workers, a rank and a verifier on two CPUs; a GPU on a machine without one."""
    with pytest.raises(RunStopped, match=words):
        start_cluster(ClusterConfig(address="local", num_cpus=2), demand)
    assert not ray.is_initialized()


def test_a_run_that_asks_for_more_than_there_is_ends_with_both_numbers(environment, tmp_path):
    """B166, of the whole run: within its minute, with the reason last."""
    asked = ["rollout.num_workers=4", "cluster.address=local", "cluster.num_cpus=2", "model.random_weights=true"]
    command = [str(BIN / "limen"), "train", *asked, f"run_dir={tmp_path / 'run'}"]
    started = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert time.monotonic() - started < 60
    assert done.returncode == 3, done.stderr
    assert re.match(
        r"limen: stopped: the run asks for 6 CPUs .* has 2 available; lower rollout\.num_workers", done.stderr.splitlines()[-1]
    )


def test_what_others_hold_is_not_waited_for_without_end(two_cpus):
    """B166, where the books would do but the CPUs are taken: an error with what was asked and what is free."""

    async def ask():
        held = await reserve("the rollout workers", [{"CPU": 1.0}], "SPREAD")
        assert held.nodes() == [ray.get_runtime_context().get_node_id()]
        with pytest.raises(RunStopped, match=r"no place for the learner ranks within 2 s: asked 2 CPUs .*available 1 "):
            await reserve("the learner ranks", [{"CPU": 1.0}] * 2, "PACK", deadline_s=2.0)
        # what was refused is given back: it does not hold the CPU that is free
        await reserve("the verifiers", [{"CPU": 1.0}], "SPREAD", nodes=held.nodes())

    asyncio.run(ask())


async def test_places_that_are_no_longer_waited_for_are_given_back(monkeypatch):
    """Ray would find them later, and hold them from the next life of the same process."""
    given_back: list[str] = []
    monkeypatch.setattr("orchestrator.placement.placement_group", lambda bundles, **_: "group")
    monkeypatch.setattr("orchestrator.placement.placement_group_table", lambda group: {"state": "PENDING"})
    monkeypatch.setattr("orchestrator.placement.remove_placement_group", given_back.append)
    asked = reserve("the learner ranks", [{"CPU": 1.0}], "PACK")
    with pytest.raises(DeadlinePassed):
        await Waits().wait(asked, owner="Ray", name="places of the actors", deadline_s=0.1)
    await asyncio.sleep(0)
    assert given_back == ["group"]


@pytest.mark.parametrize("placement", ["split", "colocated"])
async def test_a_life_that_begins_again_waits_longer_for_places(monkeypatch, placement):
    """A node that took ranks with it may be followed by another within minutes; at first a run without a place ends within its one."""
    waited: dict[str, float] = {}

    async def found(what, bundles, strategy, *, deadline_s, **_):
        waited[what] = deadline_s
        return SimpleNamespace(nodes=lambda: ["node"])

    monkeypatch.setattr("orchestrator.launch.reserve", found)
    config, stuff = load_config([f"cluster.placement={placement}"]), SimpleNamespace(num_gpus=0, num_parameters=1000)
    for more, deadline_s in (({}, 60.0), ({"places_s": 300.0}, 300.0)):
        waited.clear()
        await Launcher(config, stuff, **more).reserve(with_ranks=True)
        assert len(waited) == (3 if placement == "split" else 2)
        assert set(waited.values()) == {deadline_s}


def test_gloo_talks_over_the_interface_that_carries_the_address(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "gone")  # so that the test's own changes are undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    cluster.use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"


class Pool:
    """A reward actor that says which groups it was given."""

    def __init__(self):
        self.score = self
        self.given = []

    async def remote(self, parcel, questions):
        self.given.append(parcel)
        return [() for _ in questions], len(self.given)


def test_text_is_scored_by_the_pool_of_its_workers_node():
    prompt = Prompt("p", "s", "s", "1+1", None, "2", None)

    def finished(worker, parcel):
        meta = GroupMeta(Visit("p", len(parcel), Purpose.TRAIN), worker, 1, (1,), (1,), 0, 0, 0, 0, 0.0, 0, 0.0, ())
        return Finished(meta, Address(parcel, 0))

    pools = {"A": Pool(), "B": Pool()}
    nodes = {"rollout-0": "A", "rollout-1": "B", "rollout-1.1": "elsewhere"}
    scorer = RayScorer(pools, nodes.__getitem__, {"p": prompt}, replace=None)
    groups = [
        finished("rollout-1", "b"),
        finished("rollout-0", "aa"),
        finished("rollout-1", "bbb"),
        finished("rollout-1.1", "cccc"),
    ]
    scored = asyncio.run(scorer.score(groups))
    assert [item.meta for item in scored] == [item.meta for item in groups]
    assert pools["B"].given == ["b", "bbb"]
    assert pools["A"].given == ["aa", "cccc"]
    assert scorer.num_lost == 2 + 2
