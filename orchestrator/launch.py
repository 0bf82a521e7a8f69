"""Making the actors of a run: what each is made of, what it asks of Ray, and the environment its process starts with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from configs.schema import Config
from orchestrator import cluster, material
from orchestrator.actors import LearnerActor, RewardActor, RolloutActor
from orchestrator.fleet import Worker
from orchestrator.material import Material
from orchestrator.threads import thread_budget, usable_cpus
from orchestrator.waits import DeadlinePassed, Waits
from rollout.engine import engine_environment
from rollout.transports import MEETS

LEARNER_MODULE = "learner.learner"


class Launcher:
    """Makes the actors of one run; they start by themselves, and whoever needs one waits for it."""

    def __init__(self, config: Config, stuff: Material) -> None:
        self._config = config
        self._material = stuff
        self._gpu = stuff.num_gpus > 0
        self.threads = thread_budget(config, usable_cpus(), stuff.num_parameters)

    def rollout_worker(self, number: int, *, replacement: int = 0, model_path: str | None = None) -> Worker:
        """A worker whose engine starts from random weights, or from those at ``model_path``. ``replacement`` counts those before it."""
        name = f"rollout-{number}" + (f".{replacement}" if replacement else "")
        load_format = "dummy" if model_path is None else "auto"
        path = model_path or self._material.model_path
        spec = material.engine_spec(self._config, self._material, name=name, model_path=path, load_format=load_format)
        devices = self._config.rollout.tensor_parallel_size
        options = cluster.actor_options(
            name,
            num_cpus=devices,
            num_gpus=devices if self._gpu else 0,
            env=engine_environment(num_threads=self.threads.engine),
            concurrency=8,  # the stream of groups, a push, a score and health must not wait for one another
        )
        module = material.ENGINE_MODULES[self._config.rollout.engine.value]
        return Worker(
            name, ray.remote(RolloutActor).options(**options).remote(module, spec, self._config.rollout.transport.value)
        )

    def ranks(self) -> list[Any]:
        """The learner's ranks, without a learner yet: see ``start_ranks``."""
        world_size = self._config.learner.num_ranks
        actors = []
        for rank in range(world_size):
            options = cluster.actor_options(
                f"learner-{rank}",
                num_cpus=1,
                num_gpus=1 if self._gpu else 0,
                env=cluster.learner_environment(self.threads.learner, rank=rank, world_size=world_size, gpu=self._gpu),
                concurrency=2 if self._config.rollout.transport.value in MEETS else 1,  # an abort must not wait for what it ends
            )
            actors.append(ray.remote(LearnerActor).options(**options).remote(rank, world_size))
        return actors

    async def start_ranks(self, ranks: Sequence[Any], *, total_optimizer_steps: int) -> None:
        """Makes the learners, which meet at an address of rank 0's choosing."""
        spec = material.learner_spec(self._config, self._material, total_optimizer_steps=total_optimizer_steps)
        address, port = await ranks[0].rendezvous.remote()
        transport = self._config.rollout.transport.value
        await asyncio.gather(*(rank.start.remote(LEARNER_MODULE, spec, address, port, transport) for rank in ranks))

    def rewards(self) -> Any:
        """The reward pool. It holds one CPU a verifier process in Ray's books."""
        options = cluster.actor_options(
            "rewards", num_cpus=self._config.reward.num_workers, num_gpus=0, env={"OMP_NUM_THREADS": "1"}, concurrency=8
        )
        return ray.remote(RewardActor).options(**options).remote(self._config.reward)


async def close_actors(actors: Sequence[Any], waits: Waits, deadline_s: float) -> None:
    """Asks each actor to close, then kills it: one that does not answer is not waited for twice."""
    for actor in actors:
        if hasattr(actor, "close"):
            with contextlib.suppress(DeadlinePassed, RayError):  # it is killed next
                await waits.wait(_await(actor.close.remote()), owner="actor", name="close", deadline_s=deadline_s)
        ray.kill(actor)


async def _await(reference: Any) -> Any:
    return await reference
