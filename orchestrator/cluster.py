"""Ray: which instance a run uses, what its actors ask of it, and the environment each actor's process starts with.

Two settings decide the speed of a small machine, a factor of twenty between them (measured): Ray starts its workers at nice 15
unless told otherwise before the instance starts, and OpenMP's barriers spin. Both are set here, on purpose, for every process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import configs
from configs.schema import ClusterConfig, Config
from orchestrator.errors import RunStopped
from orchestrator.threads import usable_cpus

SMALLEST_BOOKS = 4  # CPUs in the books of a private instance, however few cores there are


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks of Ray: one CPU (or GPU) a rollout worker's device, one a learner rank, one CPU a verifier."""

    num_cpus: int
    num_gpus: int

    @classmethod
    def of(cls, config: Config, *, gpu: bool) -> Demand:
        devices = config.rollout.num_workers * config.rollout.tensor_parallel_size + config.learner.num_ranks
        return cls(num_cpus=devices + config.reward.num_workers, num_gpus=devices if gpu else 0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray instance of this run."""

    address: str
    joined: bool  # somebody else's: never stopped by us

    def close(self) -> None:
        """Leaves a joined instance running; ends a private one with everything in it."""
        ray.shutdown()


def start_cluster(config: ClusterConfig, demand: Demand) -> Cluster:
    """Joins or starts Ray. Raises RunStopped with asked and available numbers where the demand cannot be met.

    A private instance may carry two single-threaded actors a core (and four on one core), since at lag 0 engine and learner work
    in turn; a number given as ``cluster.num_cpus``, and a joined instance, are taken at their word.
    """
    address = _address(config)
    os.environ.setdefault("RAY_worker_niceness", "0")  # read by the raylet when it starts, so before init
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if address is not None:
        _init(address=address, **common)
        cluster = Cluster(address=address, joined=True)
    else:
        cores = usable_cpus()
        books = (
            config.num_cpus if config.num_cpus is not None else max(cores, min(demand.num_cpus, max(SMALLEST_BOOKS, 2 * cores)))
        )
        _init(address="local", num_cpus=books, include_dashboard=False, **common)
        cluster = Cluster(address="private", joined=False)
    available = ray.cluster_resources()
    for resource, asked in (("CPU", demand.num_cpus), ("GPU", demand.num_gpus)):
        have = int(available.get(resource, 0))
        if asked > have:
            cluster.close()
            raise RunStopped(
                f"the run asks for {asked} {resource}s (one a rollout worker's device, one a learner rank, one CPU a verifier), "
                f"Ray has {have}; lower rollout.num_workers, learner.num_ranks or reward.num_workers, or join a larger cluster"
            )
    return cluster


def _init(**arguments: Any) -> None:
    """Ray puts the driver's working directory first on every worker's path, where a user's own ``rewards/`` or ``configs/`` would
    hide ours (seen). Started from our folder, workers import ours; paths in the configuration are absolute by then."""
    with contextlib.chdir(Path(configs.__file__).parent.parent):
        ray.init(**arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler would end with 15 as exit code


def _address(config: ClusterConfig) -> str | None:
    """Where to join, or None for a private instance. ``auto`` joins only where the environment asks for it."""
    if config.address == "local":
        return None
    if config.address != "auto":
        return config.address
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    return "auto" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else None


def actor_options(name: str, *, num_cpus: float, num_gpus: float, env: dict[str, str], concurrency: int) -> dict[str, Any]:
    """Options of an actor whose environment is there before its process starts."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {
        "name": f"{name}-{os.getpid()}",
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


def free_port(address: str) -> int:
    """A port of this node's ``address`` that nothing listens on now, for torch.distributed's rendezvous."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
