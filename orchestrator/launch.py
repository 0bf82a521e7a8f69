"""Making the actors of a run: what each is made of, what it asks of Ray, and the environment its process starts with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from configs.schema import Config, Placement
from orchestrator import cluster, material
from orchestrator.actors import PULSE, LearnerActor, RewardActor, RolloutActor
from orchestrator.fleet import Worker
from orchestrator.material import Material
from orchestrator.placement import RESERVE_S, Bundle, Reservation, give_back, living_nodes, reserve
from orchestrator.ranks import answer_of
from orchestrator.reward_plan import num_processes
from orchestrator.stacks import Process, here_id, look, on_nodes
from orchestrator.threads import thread_budget, usable_cpus
from orchestrator.waits import DeadlinePassed, Waits
from orchestrator.workers import end_actors
from rollout.engine import engine_environment
from rollout.transports import MEETS

LEARNER_MODULE = "learner.learner"


class Launcher:
    """Makes the actors of one run; they start by themselves, and whoever needs one waits for it. ``reserve`` comes first."""

    def __init__(self, config: Config, stuff: Material, *, places_s: float = RESERVE_S) -> None:
        """``places_s``: so long may Ray take to find the places of each part."""
        self._config = config
        self._reserve = functools.partial(reserve, deadline_s=places_s)
        self._material = stuff
        self._gpu = stuff.num_gpus > 0
        self.threads = thread_budget(config, usable_cpus(), stuff.num_parameters)
        self._places: dict[str, Reservation] = {}
        self._pool_seats: dict[str, _PoolSeat] = {}  # by node
        self._pools: dict[str, Any] = {}  # by node
        self._num_pools: Counter[int] = Counter()  # made so far, by the number of their seat
        self.actors: dict[str, Any] = {}  # by name; of each place the last one that was made

    async def reserve(self, *, with_ranks: bool, with_engines: bool = True) -> None:
        """Reserves all devices of the run, or those of a part. Raises RunStopped where Ray has no place.

        Workers are spread over the nodes, ranks are packed on few, where they talk fast. On GPUs the ranks choose first, so that they
        get whole nodes; on CPUs last, so that every node with workers has room for its verifiers. Colocated, a worker and a rank have a
        bundle together, packed.
        """
        if with_ranks and self._config.cluster.placement is Placement.colocated:
            bundles = [self._bundle(1, sharers=2)] * self._config.learner.num_ranks
            shared = await self._reserve("the rollout workers and learner ranks", bundles, "PACK", sharers=2)
            self._places |= {"workers": shared, "ranks": shared}
            await self._reserve_rewards()
            return
        config, devices = self._config, self._config.rollout.tensor_parallel_size
        ranks = functools.partial(self._reserve, "the learner ranks", [self._bundle(1)] * config.learner.num_ranks, "PACK")
        if with_ranks and (self._gpu or not with_engines):
            self._places["ranks"] = await ranks()
        if not with_engines:
            return
        engines = [self._bundle(devices)] * config.rollout.num_workers
        self._places["workers"] = await self._reserve("the rollout workers", engines, "SPREAD")
        await self._reserve_rewards()
        if with_ranks and not self._gpu:
            self._places["ranks"] = await ranks()

    async def _reserve_rewards(self) -> None:
        nodes = sorted(set(self._places["workers"].nodes()))
        places = await self._reserve("the verifiers", [self._pool_bundle()] * len(nodes), "SPREAD", nodes=nodes)
        self._places["rewards"] = places
        self._pool_seats = {node: _PoolSeat(number, places, number) for number, node in enumerate(places.nodes())}

    def _pool_bundle(self) -> Bundle:
        return {"CPU": float(num_processes(self._config.reward))}

    def _bundle(self, devices: int, *, sharers: int = 1) -> Bundle:
        cpus = {"CPU": float(devices * sharers)}
        return cpus | {"GPU": float(devices)} if self._gpu else cpus

    def rollout_worker(self, number: int, *, replacement: int = 0, model_path: str | None = None) -> Worker:
        """A worker whose engine starts from random weights, or from those at ``model_path``. ``replacement`` counts those before it:
        it takes their place, once they have left it."""
        name = self._successor(f"rollout-{number}", replacement)
        load_format = "dummy" if model_path is None else "auto"
        path = model_path or self._material.model_path
        spec = material.engine_spec(self._config, self._material, name=name, model_path=path, load_format=load_format)
        places = self._places["workers"]
        options = cluster.actor_options(
            name,
            **places.asks(number),
            env=engine_environment(num_threads=self.threads.engine),
            concurrency=8,  # the stream of groups, a push, a score and health must not wait for one another
        )
        module = material.ENGINE_MODULES[self._config.rollout.engine.value]
        actor = _remote(RolloutActor).options(**options, **places.at(number))
        self.actors[name] = actor.remote(module, spec, self._config.rollout.transport.value)
        return Worker(name, self.actors[name])

    def _successor(self, first: str, number: int) -> str:
        """The name of the ``number``-th actor after the ``first`` one in a place. The one before it has ended: it is forgotten, or each
        heartbeat of a run of weeks would ask Ray for all that it ever lost."""
        self.actors.pop(_numbered(first, number - 1), None)
        return _numbered(first, number)

    def has_place(self, number: int) -> bool:
        """Whether the place of that worker is on a node that lives: Ray looks for another place where its node is gone."""
        return self._places["workers"].nodes()[number] in living_nodes()

    def ranks(self) -> list[Any]:
        """The learner's ranks, without a learner yet: see ``start_ranks``."""
        world_size, places, actors = self._config.learner.num_ranks, self._places["ranks"], []
        for rank in range(world_size):
            name = f"learner-{rank}"
            options = cluster.actor_options(
                name,
                **places.asks(rank),
                env=cluster.learner_environment(self.threads.learner, rank=rank, world_size=world_size, gpu=self._gpu),
                concurrency=2 if self._config.rollout.transport.value in MEETS else 1,  # an abort must not wait for what it ends
            )
            actor = _remote(LearnerActor).options(**options, **places.at(rank))
            self.actors[name] = actor.remote(rank, world_size)
            actors.append(self.actors[name])
        return actors

    async def start_ranks(self, ranks: Sequence[Any], *, total_optimizer_steps: int) -> None:
        """Makes the learners, which meet at an address of rank 0's choosing."""
        spec = material.learner_spec(self._config, self._material.model_path, total_optimizer_steps=total_optimizer_steps)
        address, port = await answer_of(0, "rendezvous", ranks[0].rendezvous.remote())
        transport = self._config.rollout.transport.value
        started = [rank.start.remote(LEARNER_MODULE, spec, address, port, transport) for rank in ranks]
        await asyncio.gather(*(answer_of(number, "start", answer) for number, answer in enumerate(started)))

    async def give_back(self) -> None:
        """Gives all places back, once their actors have ended."""
        await give_back(list(self._places.values()))
        self._places.clear()

    def rewards(self) -> dict[str, Any]:
        """A reward pool on every node that has rollout workers, by the node's id: text is scored where it lies. It holds one CPU a
        verifier process in Ray's books."""
        return {node: self._reward_pool(node) for node in self._pool_seats}

    async def next_pool(self, node: str) -> tuple[str, Any] | None:
        """Ends the pool of a node and makes the next one: there, or where the node is gone on any that has room; its node, and its actor.
        None where the node is gone and another has a pool. Raises RunStopped where no node has room."""
        await end_actors({node: self._pools[node]}, self._config.deadlines.close_s)
        if await self._answers(node):
            return node, self._reward_pool(node)
        del self._pools[node]
        living = await asyncio.to_thread(living_nodes)
        if living.keys() & self._pools.keys():
            return None
        # As long as a worker's place without any other is waited for: another node may be on its way
        places = await reserve("the verifiers", [self._pool_bundle()], "PACK", deadline_s=self._config.deadlines.start_s)
        number = 1 + max(seat.number for seat in self._pool_seats.values())
        self._places[f"rewards-{number}"] = places
        (other,) = places.nodes()
        self._pool_seats[other] = _PoolSeat(number, places, 0)
        return other, self._reward_pool(other)

    async def _answers(self, node: str) -> bool:
        """Whether the node lives. Ray knows that it does not only some time after it has gone, so it is asked."""
        probe = Process("probe", os.getpid(), node)
        return node == here_id() or probe in await on_nodes(look, [probe], self._config.deadlines.close_s)

    def _reward_pool(self, node: str) -> Any:
        seat = self._pool_seats[node]
        replaced = self._num_pools[seat.number]
        self._num_pools[seat.number] += 1
        name = self._successor(f"rewards-{seat.number}", replaced)
        options = cluster.actor_options(name, **seat.places.asks(seat.place), env={"OMP_NUM_THREADS": "1"}, concurrency=8)
        actor = _remote(RewardActor, PULSE).options(**options, **seat.places.at(seat.place))
        self.actors[name] = self._pools[node] = actor.remote(self._config.reward)
        return self.actors[name]


@functools.cache
def _remote(kind: type, *groups: str) -> Any:
    """The actor class of a class, with concurrency groups of one thread each. Made once: the driver and Ray's own books keep every one
    that was ever made."""
    return ray.remote(concurrency_groups=dict.fromkeys(groups, 1))(kind) if groups else ray.remote(kind)


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name


@dataclass(frozen=True, slots=True)
class _PoolSeat:
    """Where the pool of a node stands."""

    number: int  # in its name
    places: Reservation
    place: int


async def close_actors(actors: Mapping[str, Any], waits: Waits, deadline_s: float) -> None:
    """Asks the actors, named, to close, all at once, and kills all: one that does not answer is not waited for twice. What is left of their
    processes is killed on their nodes."""
    await asyncio.gather(*(_close_actor(name, actor, waits, deadline_s) for name, actor in actors.items()))
    await end_actors(actors, deadline_s)


async def _close_actor(name: str, actor: Any, waits: Waits, deadline_s: float) -> None:
    if hasattr(actor, "close"):
        with contextlib.suppress(DeadlinePassed, RayError):  # it is killed next
            await waits.wait(_await(actor.close.remote()), owner=name, name="close", deadline_s=deadline_s)


async def _await(reference: Any) -> Any:
    return await reference
