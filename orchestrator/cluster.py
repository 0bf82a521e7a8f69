"""Ray: which instance a run uses, what its actors ask of it, and the environment each actor's process starts with.

Two settings decide the speed of a small machine, a factor of twenty between them (measured): Ray starts its workers at nice 15
unless told otherwise before the instance starts, and OpenMP's barriers spin. Both are set here, on purpose, for every process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError

import configs
from configs.errors import ConfigError
from configs.schema import ClusterConfig, Config, Placement
from orchestrator.errors import RunStopped
from orchestrator.grace import kill
from orchestrator.reward_plan import num_processes
from orchestrator.threads import private_books, usable_cpus

JOIN_S = 20.0  # for the instance to answer that the run is to join
_NUMBERS = itertools.count()  # of the actors this process makes: a name is free again only some time after its actor is dead
_HELLO = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks of Ray: one CPU (and GPU) a rollout worker's device, one a learner rank, one CPU a verifier. Colocated, engine
    and rank share a GPU. Verifiers are counted
    once; the nodes of the workers each have their own, and are known once the workers have their places."""

    num_cpus: int
    num_gpus: int

    @classmethod
    def of(cls, config: Config, *, gpu: bool) -> Demand:
        if config.rollout.source_run is not None:  # no engine and no verifier
            return cls(num_cpus=config.learner.num_ranks, num_gpus=config.learner.num_ranks if gpu else 0)
        engines, ranks = config.rollout.num_workers * config.rollout.tensor_parallel_size, config.learner.num_ranks
        gpus = engines if config.cluster.placement is Placement.colocated else engines + ranks
        return cls(num_cpus=engines + ranks + num_processes(config.reward), num_gpus=gpus if gpu else 0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray instance of this run."""

    address: str
    joined: bool  # somebody else's: never stopped by us
    processes: tuple[psutil.Process, ...]  # of a private instance: those that start all others

    def __str__(self) -> str:
        return f"joined {self.address}" if self.joined else "a private instance"

    def close(self) -> None:
        """Leaves a joined instance running; ends a private one with everything in it, which takes Ray up to two minutes by itself."""
        family = [*self.processes]
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
                if process.name() not in ("raylet", "gcs_server"):  # by now nobody needs the rest; Ray would give each a second
                    process.kill()
        ray.shutdown()
        kill(family)


def start_cluster(config: ClusterConfig, demand: Demand) -> Cluster:
    """Joins or starts Ray. Raises ConfigError for an address that cannot be joined, RunStopped where nobody answers there, or with
    asked and available numbers where the demand cannot be met.

    A private instance may carry more actors than cores, see ``private_books``; a number given as ``cluster.num_cpus``, and a joined
    instance, are taken at their word.
    """
    address = join_address(config)
    os.environ.setdefault("RAY_worker_niceness", "0")  # read by the raylet when it starts, so before init
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is not None:
        _join(address)
        cluster = Cluster(address=address, joined=True, processes=())
    else:
        # Else its GCS keeps a record of each of the last 100,000 calls (3.4 MB a thousand), and as many dead actors and their processes, for
        # a dashboard that is not there.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        os.environ.setdefault("RAY_maximum_gcs_destroyed_actor_cached_count", "50")
        os.environ.setdefault("RAY_maximum_gcs_dead_worker_cached_count", "50")
        books = private_books(demand.num_cpus, usable_cpus()) if config.num_cpus is None else config.num_cpus
        before = set(psutil.Process().children())
        _init(address="local", num_cpus=books, include_dashboard=False)
        cluster = Cluster(address="private", joined=False, processes=tuple(set(psutil.Process().children()) - before))
    available = ray.cluster_resources()
    for resource, asked in (("CPU", demand.num_cpus), ("GPU", demand.num_gpus)):
        have = int(available.get(resource, 0))
        if asked > have:
            cluster.close()
            raise RunStopped(
                f"the run asks for {asked} {resource}s (one a rollout worker's device, one a learner rank, one CPU a verifier), "
                f"Ray has {have} available; lower rollout.num_workers, learner.num_ranks, reward.num_workers or a part's num_processes, or "
                + (
                    "join a larger cluster"
                    if cluster.joined or resource == "GPU"
                    else f"let them share cores: cluster.num_cpus={asked}"
                )
            )
    return cluster


def join_address(config: ClusterConfig) -> str | None:
    """HOST:PORT to join, or None for a private instance. Raises ConfigError for an address of another form.

    ``auto`` joins where RAY_ADDRESS is set; Ray sets it for the driver of a Ray job. Only an address that somebody gave is joined:
    Ray's own search, ``auto`` to it, takes any instance that runs on the machine.
    """
    key, address = ("cluster.address", config.address) if config.address != "auto" else ("RAY_ADDRESS", _ray_address())
    if address in ("", "local"):
        return None
    if "://" in address:
        raise ConfigError(
            f"{key}={address}: a Ray client has no streaming returns, by which groups and weights travel; start limen on a node of the "
            "cluster with the address of its GCS, cluster.address=HOST:6379, or submit it as a Ray job"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{key}={address}: is not HOST:PORT of a Ray instance's GCS, which `ray start --head` prints (port 6379 by default)"
            + ("; cluster.address=local starts a private one" if key == "RAY_ADDRESS" else "; `auto` and `local` work too")
        )
    return address


def _ray_address() -> str:
    return os.environ.get("RAY_ADDRESS", "")


def _join(address: str) -> None:
    """Ray itself tries for many minutes where nobody answers (seen: eight), so somebody else asks first, within a deadline."""
    try:
        said = subprocess.run(
            [sys.executable, "-c", _HELLO, address],
            check=False,
            capture_output=True,
            text=True,
            timeout=JOIN_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise RunStopped(
            f"no Ray instance answers at {address} within {JOIN_S:g} s; is it running, and is the port its GCS's?"
        ) from error
    try:
        if said.returncode:
            raise ConnectionError((said.stderr.strip() or "no answer").splitlines()[-1])
        _init(address=address)
    except (ConnectionError, RuntimeError, RayError) as error:
        cause = error.__cause__ or error
        hint = ""
        if "token" in str(cause).lower() or "authenticat" in str(cause).lower():
            hint = "; a cluster with token authentication is joined with RAY_AUTH_MODE=token and its token in the environment"
        elif "node info" in str(cause):
            hint = "; none of its nodes runs on this machine: start limen on one of them, or as a Ray job"
        raise RunStopped(f"cannot join the Ray instance at {address}: {type(cause).__name__}: {cause}{hint}") from error


def lost_processes() -> list[str]:
    """Those of Ray's own processes that a private instance cannot be without and that have ended; Ray has no public call for it."""
    node = ray_worker._global_node
    started = node.all_processes if node is not None else {}
    return [name for name in ("gcs_server", "raylet") for info in started.get(name, ()) if info.process.poll() is not None]


def _init(**arguments: Any) -> None:
    """Ray puts the driver's working directory first on every worker's path, where a user's own ``rewards/`` or ``configs/`` would
    hide ours (seen). Started from our folder, workers import ours; paths in the configuration are absolute by then."""
    with _out_of_reach_of_signals(), contextlib.chdir(Path(configs.__file__).parent.parent):
        ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=True, **arguments)


@contextlib.contextmanager
def _out_of_reach_of_signals() -> Iterator[None]:
    """For processes that are started within: schedulers send SIGTERM, and terminals that close SIGHUP, to every process of a job, and the
    last step cannot be saved without its actors. The driver hears them afterwards, SIGTERM by its own handler: Ray's would end it with 15
    as exit code."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def actor_options(name: str, *, num_cpus: float, num_gpus: float, env: dict[str, str], concurrency: int) -> dict[str, Any]:
    """Options of an actor whose environment is there before its process starts."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {
        "name": f"{name}-{os.getpid()}-{next(_NUMBERS)}",
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_concurrency": concurrency,
        "max_restarts": 0,
        "runtime_env": {"env_vars": quiet | env},
    }


def learner_environment(num_threads: int, *, rank: int, world_size: int, gpu: bool) -> dict[str, str]:
    """torch.distributed's variables but for the meeting place, and DeepSpeed's choice of accelerator."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",  # one actor a device: each sees only its own
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return environment if gpu else environment | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def use_interface_of(address: str) -> None:
    """Gloo and NCCL talk over the interface that carries this node's own address, unless the user chose one. Left alone, Gloo takes
    what the hostname resolves to, which is the loopback on many machines, and NCCL the first that is up."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
