"""Whether a run fits its machines: counts of workers and ranks, their places, the memory of each device and node.

Pure arithmetic, for `limen plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.schema import Config, Placement, PlanConfig
from orchestrator.footprint import (
    GIB,
    MIB,
    Item,
    Use,
    completion_cache_bytes,
    engine_use,
    has_reference,
    learner_use,
    longest_row,
    reference_bytes,
    weight_bytes,
)
from orchestrator.reward_plan import memory_limits, num_processes
from orchestrator.shapes import Shape
from orchestrator.threads import private_books

COUNTS = ("rollout.num_workers", "rollout.tensor_parallel_size", "learner.num_ranks")
STATES = ("master weights", "moments", "gradients")  # what a colocated learner lays aside while the engine has the device
ENGINE_WIDTHS = (1, 2, 4, 8)  # devices of one engine that are tried

Nodes = tuple[tuple[tuple[str, ...], ...], ...]  # node, device, roles on it


@dataclass(frozen=True, slots=True)
class Here:
    """This machine: what stands in for keys of the plan group that are not set."""

    num_gpus: int
    memory_bytes: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Machines:
    num_gpus: int  # 0: CPU alone, one node
    gpus_per_node: int
    gpu_bytes: int
    node_bytes: int | None  # None: not known, so not checked
    cpus: int
    bandwidth: float  # bytes a second

    @classmethod
    def of(cls, keys: PlanConfig, here: Here) -> Machines:
        """What the plan group says, else this machine."""
        num_gpus = here.num_gpus if keys.num_gpus is None else keys.num_gpus
        stated = None if keys.node_memory_gib is None else int(keys.node_memory_gib * GIB)
        return cls(
            num_gpus=num_gpus,
            gpus_per_node=keys.gpus_per_node,
            gpu_bytes=int(keys.gpu_gib * GIB),
            node_bytes=here.memory_bytes if stated is None and num_gpus == 0 else stated,
            cpus=keys.cpus or here.cpus,
            bandwidth=keys.bandwidth_gb_per_s * 1e9,
        )

    @property
    def node_sizes(self) -> list[int]:
        """GPUs of each node; the last may have fewer."""
        full, rest = divmod(self.num_gpus, self.gpus_per_node)
        return [self.gpus_per_node] * full + [rest] * (rest > 0)


@dataclass(frozen=True, slots=True)
class Fit:
    """Counts, places and memory of a run, and what stands against it."""

    config: Config  # with the counts that are planned
    machines: Machines
    nodes: Nodes  # empty where the roles do not find their places
    learner: Use  # one rank's device
    engine: Use  # each device of an engine
    node: Use  # main memory of the fullest node
    problems: tuple[str, ...]

    @property
    def fullest(self) -> int:
        """Bytes of the fullest device; on CPU of the node."""
        if self.machines.num_gpus == 0:
            return self.node.total
        uses = turns(self.learner, self.engine) if colocated(self.config) else (self.learner.total, self.engine.total)
        return max(uses)


def fit(config: Config, shape: Shape, here: Here) -> Fit:
    """The run on its machines. Counts that are all at their default of 1 are proposed where there are GPUs; others stand."""
    machines = Machines.of(config.plan, here)
    if machines.num_gpus == 0 or not has_default_counts(config):
        return _measure(config, shape, machines)
    splits = list(_splits(config, shape, machines)) or [(1, 1, 1)]
    for counts in splits:
        tried = with_counts(config, counts)
        if any(_device_problems(tried, shape, machines, *_device_uses(tried, shape, machines))):
            continue  # before its roles are placed, since a search comes here thousands of times
        found = _measure(tried, shape, machines)
        if not found.problems:
            return found
    return _measure(with_counts(config, splits[0]), shape, machines)


def has_default_counts(config: Config) -> bool:
    return (config.rollout.num_workers, config.rollout.tensor_parallel_size, config.learner.num_ranks) == (1, 1, 1)


def with_counts(config: Config, counts: tuple[int, int, int]) -> Config:
    for key, count in zip(COUNTS, counts, strict=True):
        config = with_key(config, key, count)
    return config


def with_key(config: Any, key: str, value: Any) -> Any:
    """A copy of a configuration with one dotted key set."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: with_key(getattr(config, name), rest, value) if rest else value})


def halves(value: int, least: int) -> Iterator[int]:
    """Half of ``value``, half of that and so on, down to ``least``."""
    while value // 2 >= least:
        value //= 2
        yield value


def _splits(config: Config, shape: Shape, machines: Machines) -> Iterator[tuple[int, int, int]]:
    """(workers, devices of each, ranks) in the order in which they are tried: the narrowest engines first, on half of the GPUs,
    then a quarter and so on, so that the learner gets more. Colocated, every GPU has an engine and a rank."""
    num = machines.num_gpus
    if colocated(config):
        yield num, 1, num
        return
    for width in ENGINE_WIDTHS:
        if width > machines.gpus_per_node or shape.num_heads % width:
            continue
        for workers in (max(1, num // 2 // width), *halves(num // 2 // width, 1)):
            if num > workers * width:
                yield workers, width, num - workers * width


def place(config: Config, machines: Machines) -> Nodes | None:
    """Roles on every device of every node; None where there are too few. An engine lies whole on one node.

    As the launch reserves them (orchestrator/launch.py): ranks first, packed on few nodes, then engines, spread over the nodes.
    Colocated, an engine and a rank on each device, packed.
    """
    width = config.rollout.tensor_parallel_size
    engines = [f"rollout-{i}" for i in range(config.rollout.num_workers)]
    ranks = [f"learner-{i}" for i in range(config.learner.num_ranks)]
    if machines.num_gpus == 0:
        return (((*engines, *ranks),),)
    nodes: list[list[list[str]]] = [[[] for _ in range(size)] for size in machines.node_sizes]
    devices = [device for node in nodes for device in node]
    if len(ranks) > len(devices):
        return None
    if not colocated(config):
        for name, device in zip(ranks, devices, strict=False):
            device.append(name)
    free = [[device for device in node if not device] for node in nodes]
    for name in engines:
        room = next((room for room in free if len(room) >= width), []) if colocated(config) else max(free, key=len)
        if len(room) < width:
            return None
        for device in room[:width]:
            device.append(name)
        del room[:width]
    if colocated(config):
        for name, device in zip(ranks, sorted(devices, key=lambda device: not device), strict=False):
            device.append(name)
    return tuple(tuple(tuple(device) for device in node) for node in nodes)


def colocated(config: Config) -> bool:
    return config.cluster.placement is Placement.colocated


# ---- memory ---------------------------------------------------------------------------------------------------------------------


def _measure(config: Config, shape: Shape, machines: Machines) -> Fit:
    nodes = place(config, machines) or ()
    learner, engine = _device_uses(config, shape, machines)
    node = _node_use(config, shape, nodes, learner, engine, gpu=machines.num_gpus > 0)
    problems = list(_device_problems(config, shape, machines, learner, engine))
    if not nodes:
        rollout = config.rollout
        problems.insert(
            0,
            f"engines on {rollout.num_workers} x {rollout.tensor_parallel_size} GPUs, each on one node, and learner ranks on "
            f"{config.learner.num_ranks} do not go onto {machines.num_gpus}, {machines.gpus_per_node} a node ({config.cluster.placement.value})",
        )
    problems += _books_problem(config, machines)
    if machines.node_bytes is not None and node.total > machines.node_bytes:
        problems.append(f"a node takes {gib(node.total)} of main memory and has {gib(machines.node_bytes)}")
    return Fit(config, machines, nodes, learner, engine, node, tuple(problems))


def _device_uses(config: Config, shape: Shape, machines: Machines) -> tuple[Use, Use]:
    gpu = machines.num_gpus > 0
    return learner_use(shape, config, gpu=gpu), engine_use(shape, config, device_bytes=machines.gpu_bytes, gpu=gpu)


def _node_use(config: Config, shape: Shape, nodes: Nodes, learner: Use, engine: Use, *, gpu: bool) -> Use:
    """Main memory of the fullest node. Every rank loads the whole model, and copies it for the reference, before DeepSpeed takes it."""
    weights = weight_bytes(config) * shape.num_parameters
    engines = config.rollout.num_workers * config.rollout.tensor_parallel_size
    items = [Item("a push in Ray's object store", weights, False)]
    if gpu:
        ranks = max((sum(role.startswith("learner") for device in node for role in device) for node in nodes), default=0)
        loading = weights * (1 + has_reference(config))
        kept = reference_bytes(shape, config, gpu=True)[1] + (learner.of(*STATES) if colocated(config) else 0)
        items.append(Item(f"{ranks} ranks, as they load the model", ranks * loading, False))
        items.append(Item(f"{ranks} ranks, what they keep beyond that", ranks * max(0, kept - loading), False))
    else:
        items.append(Item(f"{engines} x an engine", engines * engine.total, True))
        items.append(Item(f"{config.learner.num_ranks} x a learner rank", config.learner.num_ranks * learner.total, True))
    limits = memory_limits(config.reward)
    if limits:
        items.append(Item(f"{len(limits)} verifiers at their limit", int(sum(limits) * GIB), False))
    return Use(tuple(items))


def asked_cpus(config: Config) -> int:
    """What a run on CPU asks of Ray: one an engine's device, one a learner rank, one a verifier."""
    return (
        config.rollout.num_workers * config.rollout.tensor_parallel_size + config.learner.num_ranks + num_processes(config.reward)
    )


def _books_problem(config: Config, machines: Machines) -> list[str]:
    """Where the run would start its own Ray on this one node, which refuses more actors than its books hold."""
    if machines.num_gpus > 0 or config.cluster.address not in ("auto", "local"):
        return []
    asked = asked_cpus(config)
    books = private_books(asked, machines.cpus) if config.cluster.num_cpus is None else config.cluster.num_cpus
    return [f"{asked} CPUs are asked of Ray, which has {books} on {machines.cpus} cores"] if asked > books else []


def _device_problems(config: Config, shape: Shape, machines: Machines, learner: Use, engine: Use) -> Iterator[str]:
    gpu, width = machines.num_gpus > 0, config.rollout.tensor_parallel_size
    if shape.num_heads % width:
        yield f"rollout.tensor_parallel_size={width} does not divide the model's {shape.num_heads} attention heads"
    if gpu:
        names, uses = ("a learner rank", "an engine"), (learner.total, engine.total)
        if colocated(config):
            names, uses = ("the learner's turn", "the engine's turn"), turns(learner, engine)
        for name, used in zip(names, uses, strict=True):
            if used > machines.gpu_bytes:
                yield f"{name} takes {gib(used)} of a GPU's {gib(machines.gpu_bytes)}"
    one, cache = completion_cache_bytes(shape, config, gpu=gpu), engine.of("cache")
    if cache < one:
        yield f"a completion of {longest_row(config)} tokens takes {gib(one)} of cache, of which an engine has {gib(cache)}"


def turns(learner: Use, engine: Use) -> tuple[int, int]:
    """Bytes of a colocated device in the learner's turn, the engine asleep, and in the engine's, the learner's states laid aside."""
    return learner.total + engine.of("runtime"), engine.total + learner.of("weights", "reference", "runtime")


def gib(num_bytes: float) -> str:
    """Bytes for a person; little ones in MiB."""
    return f"{num_bytes / MIB:.1f} MiB" if 0 < num_bytes < GIB // 10 else f"{num_bytes / GIB:.1f} GiB"
