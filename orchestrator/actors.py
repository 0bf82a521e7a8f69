"""The Ray actors. Each is a thin shell round a plain Python object, which is made in the actor, in its own process.

Engines and learner are named by import path and imported here only when an actor starts: the driver never loads vLLM or DeepSpeed.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError
from torch.distributed import TCPStore

from configs.schema import RewardConfig
from orchestrator import cluster
from orchestrator.checkpoint import Files, describe_files
from orchestrator.handles import StepReport
from orchestrator.shared_folder import FolderView, look_from
from rewards.contract import RewardItem
from rewards.pool import RewardPool
from rewards.sandbox import choose
from rollout.engine import Engine, EngineError, GroupRequest, Health, SleepReport, SwapReport, TokenScores, Wake
from rollout.records import Group, GroupMeta, Score, ScoredGroup, Visit, describe_group
from rollout.stack_signal import listen
from rollout.transports import Parcel, make_receiver
from rollout.weights import Manifest

PULSE = "pulse"  # a reward actor's concurrency group for ``health``


def process_facts() -> dict[str, Any]:
    """What the driver checks of an actor's process: where it is (its node's id, address and name), niceness, thread budget."""
    return {
        "pid": os.getpid(),
        "node": ray.get_runtime_context().get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "hostname": socket.gethostname(),
        "niceness": os.nice(0),
        "num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
    }


class RolloutActor:
    """A rollout worker: one engine."""

    def __init__(self, module: str, spec: dict[str, Any], transport: str = "local") -> None:
        """``module`` holds EngineSpec and make_engine; ``spec`` are the fields of the former."""
        listen()
        self._receiver = make_receiver(transport, spec["name"])
        self._engine: Engine = resolve_name(f"{module}:make_engine")(resolve_name(f"{module}:EngineSpec")(**spec))
        self._closed = threading.Event()

    def facts(self) -> dict[str, Any]:
        return process_facts()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._engine.submit(requests)

    def groups(self) -> Iterator[list[Group] | list[GroupMeta]]:
        """A stream of pairs: some groups, then their small records. The caller owns both. In this order whoever has the records
        knows that the groups were given out before the worker could be lost."""
        while not self._closed.is_set():
            try:
                groups = self._engine.poll(timeout_s=0.5)
            except EngineError:
                if self._closed.is_set():  # it was closed while we waited
                    return
                raise
            if groups:
                yield groups
                yield [describe_group(group) for group in groups]

    def receive(self, parcel: Parcel) -> None:
        self._engine.receive(self._receiver.fetch(parcel))

    def swap(self, version: int, manifest: Manifest) -> SwapReport:
        self._receiver.close()
        return self._engine.swap(version, manifest)

    def score_tokens(self, rows: Sequence[np.ndarray[Any, Any]], temperature: float) -> list[TokenScores]:
        return self._engine.score_tokens(rows, temperature)

    def sleep(self) -> SleepReport:
        return self._engine.sleep()

    def wake(self, what: Wake) -> None:
        self._engine.wake(what)

    def cancel(self, visits: Sequence[Visit]) -> None:
        self._engine.cancel(visits)

    def health(self) -> Health:
        return self._engine.health()

    def close(self) -> None:
        self._closed.set()
        self._receiver.abort()
        self._engine.close()


class LearnerActor:
    """One learner rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        listen()
        self._rank, self._world_size = rank, world_size
        self._learner: Any = None
        self._fetched: list[list[Group]] = []

    def rendezvous(self) -> tuple[str, int]:
        """An address of this node and a port of it, where the ranks can meet: the store listens there from now on, so nobody can
        take the port before the ranks come."""
        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, self._world_size, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def start(self, module: str, spec: dict[str, Any], address: str, port: int, transport: str = "local") -> None:
        """Makes the learner: ``module`` holds LearnerSpec, Learner and RolloutBatch; ``spec`` are the fields of the first. All ranks
        meet at rank 0's ``address`` and ``port``."""
        cluster.use_interface_of(ray.util.get_node_ip_address())
        # With an agent's store rank 0 comes to it as the others do, in place of listening at the port itself
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        learner_spec = resolve_name(f"{module}:LearnerSpec")(**spec)
        self._learner = resolve_name(f"{module}:Learner")(learner_spec, self._rank, self._world_size)
        self._batch_type = resolve_name(f"{module}:RolloutBatch")
        self._sender = resolve_name("learner.sending:make_sender")(transport, ray.util.get_node_ip_address())
        self._send_all = resolve_name("learner.sending:send_all")

    def facts(self) -> dict[str, Any]:
        return process_facts() | {"rank": self._rank}

    def fetch(self, parcels: Sequence[Any]) -> list[int]:
        """Takes the parcels of the next batch and holds them, so that nothing of it can be lost any more. Returns which of them, by
        their places, lay on a node that is gone."""
        try:
            self._fetched = ray.get(list(parcels))
        except ObjectLostError:
            return [place for place, parcel in enumerate(parcels) if _is_lost(parcel)]
        return []

    def prepare(
        self, step: int, version: int, places: Sequence[tuple[int, int]], scores: Sequence[tuple[Score, ...]]
    ) -> tuple[dict[str, float], int]:
        """Metrics of the batch, and how many tokens this rank has to train. Each group is the k-th of the i-th fetched parcel for its
        ``(i, k)`` of ``places``; its scores stand at the same place of ``scores``."""
        fetched, self._fetched = self._fetched, []
        groups = tuple(ScoredGroup(fetched[i][k], score) for (i, k), score in zip(places, scores, strict=True))
        report = self._learner.prepare(self._batch_type(step=step, version=version, groups=groups))
        return dict(report.metrics), report.num_rank_tokens

    def train(self) -> StepReport:
        report = self._learner.train()
        return StepReport(dict(report.metrics), report.num_optimizer_steps, report.moved)

    def offload(self) -> int:
        num_bytes: int = self._learner.offload()
        return num_bytes

    def reload(self) -> None:
        self._learner.reload()

    def buckets(self, generation: int, scale: float = 1.0, receivers: Sequence[str] = ()) -> Iterator[Parcel]:
        """Rank 0's parcels for the workers of these names, while the other ranks ``gather``."""
        yield from self._send_all(self._sender, generation, receivers, self._learner.buckets(generation, scale))

    def parcels(self, generation: int, scale: float = 1.0, receivers: Sequence[str] = ()) -> Iterator[Parcel | None]:
        """``buckets`` as a stream of pairs: a parcel, then None. Ray gives an error out as one more reference; whoever finds the second
        of a pair knows, without fetching it, that the first is a parcel."""
        for parcel in self.buckets(generation, scale, receivers):
            yield parcel
            yield None

    def abort_push(self) -> None:
        """Rank 0: whatever waits for a receiver fails at once, and the buckets that remain are gathered without being sent."""
        self._sender.abort()

    def gather(self, generation: int, scale: float = 1.0) -> None:
        """Takes part in the gathers of rank 0's ``buckets``."""
        for _ in self._learner.buckets(generation, scale):
            raise AssertionError("only rank 0 has buckets to send")

    def manifest(self) -> Manifest:
        """Of the last ``buckets``, once every receiver has each of its parcels: this ends their generation."""
        self._sender.close()
        manifest: Manifest = self._learner.manifest()
        return manifest

    def score_tokens(self, rows: Sequence[np.ndarray[Any, Any]], temperature: float) -> list[np.ndarray[Any, Any]]:
        scores: list[np.ndarray[Any, Any]] = self._learner.score_tokens(rows, temperature)
        return scores

    def save(self, folder: str) -> Files:
        """This rank's share of the training state. It digests here what it wrote, so that nobody reads it over the network."""
        return describe_files(Path(folder), self._learner.save(folder))

    def load(self, folder: str) -> None:
        self._learner.load(folder)

    def export(self, folder: str) -> Files:
        return describe_files(Path(folder), self._learner.export(folder))

    def see_folder(self, folder: str, token: str, wait_s: float) -> FolderView:
        """Whether this rank sees the folder as the driver does: see ``orchestrator.shared_folder``."""
        return look_from(Path(folder), token, f"rank-{self._rank}", ray.util.get_node_ip_address(), wait_s)


def _is_lost(parcel: Any) -> bool:
    try:
        ray.get(parcel)
    except ObjectLostError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class PoolPulse:
    """How far a reward pool is."""

    num_open: int  # parcels that are being scored
    num_ended: int  # calls of verifiers that have ended since the start
    num_lost: int  # verifier processes that were killed or died since the start


class RewardActor:
    """The reward pool of one node. Text is scored where it lies: the parcel is fetched here, only scores travel."""

    def __init__(self, reward: RewardConfig) -> None:
        listen()
        self._pool = RewardPool(reward)
        self._counting = threading.Lock()
        self._num_open = 0

    def facts(self) -> dict[str, Any]:
        return process_facts()

    def isolation(self, levels: Mapping[str, Any]) -> dict[str, str]:
        """The rung of the sandbox that each of these reward parts has here. Raises RewardError where it is not what is demanded."""
        return {part: str(choose(level)) for part, level in levels.items()}

    def score(
        self, parcel: Sequence[Group], questions: Sequence[tuple[int, str, Any, str | None, str]]
    ) -> tuple[list[tuple[Score, ...]], int]:
        """Scores the groups of a parcel at the given places; and how many verifier processes were lost so far. A question is (place,
        prompt text, answer, reward part, source)."""
        self._count(1)
        try:
            return self._score(parcel, questions)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._counting:
            self._num_open += change

    def _score(
        self, parcel: Sequence[Group], questions: Sequence[tuple[int, str, Any, str | None, str]]
    ) -> tuple[list[tuple[Score, ...]], int]:
        items, sizes = [], []
        for place, prompt, answer, part, source in questions:
            group = parcel[place]
            sizes.append(len(group.completions))
            items += [
                RewardItem(
                    prompt=prompt,
                    completion=c.text,
                    answer=answer,
                    prompt_id=group.visit.prompt_id,
                    part=part,
                    source=source,
                    num_tokens=c.num_tokens,
                    options={},
                )
                for c in group.completions
            ]
        scores = iter(self._pool.score(items))
        return [tuple(next(scores) for _ in range(size)) for size in sizes], self._pool.health().num_lost

    def health(self) -> PoolPulse:
        """To be asked in the concurrency group ``PULSE``, whose thread answers while all others score."""
        health = self._pool.health()
        return PoolPulse(self._num_open, health.num_ended, health.num_lost)

    def close(self) -> None:
        self._pool.close()
