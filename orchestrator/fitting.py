"""Whether a run fits its machines: counts of workers and ranks, their places, the memory of each device and node, and the smallest
change that makes a run fit which does not. Pure arithmetic, for `limen plan`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from configs.errors import ConfigError
from configs.schema import Config, Placement, PlanConfig
from configs.validate import check_values
from orchestrator.footprint import GIB, Item, Use, completion_cache_bytes, engine_use, learner_use, longest_row, weight_bytes
from orchestrator.shapes import Shape

COUNTS = ("rollout.num_workers", "rollout.tensor_parallel_size", "learner.num_ranks")
STATES = ("master weights", "moments", "gradients")  # what a colocated learner lays aside while the engine has the device
ENGINE_WIDTHS = (1, 2, 4, 8)  # devices of one engine that are tried
SEVERAL = 64  # GPUs up to which every number is tried
GPU_SIZES_GIB = (16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288, *(2**n for n in range(9, 20)))

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
        return max(self.turns) if _colocated(self.config) else max(self.learner.total, self.engine.total)

    @property
    def turns(self) -> tuple[int, int]:
        """Bytes of a colocated device in the learner's turn, the engine asleep, and in the engine's, the learner's states aside."""
        learner, engine = self.learner, self.engine
        return learner.total + engine.of("runtime"), engine.total + learner.of("weights", "reference", "runtime")


def fit(config: Config, shape: Shape, here: Here) -> Fit:
    """The run on its machines. Counts that are all at their default of 1 are proposed where there are GPUs; others stand."""
    machines = Machines.of(config.plan, here)
    if machines.num_gpus == 0 or not has_default_counts(config):
        return _measure(config, shape, machines)
    tries = (_measure(with_counts(config, counts), shape, machines) for counts in _splits(config, shape, machines))
    first = next(tries, None)
    if first is None or not first.problems:
        return first or _measure(config, shape, machines)
    return next((found for found in tries if not found.problems), first)


def has_default_counts(config: Config) -> bool:
    return (config.rollout.num_workers, config.rollout.tensor_parallel_size, config.learner.num_ranks) == (1, 1, 1)


def with_counts(config: Config, counts: tuple[int, int, int]) -> Config:
    for key, count in zip(COUNTS, counts, strict=True):
        config = with_key(config, key, count)
    return config


def _splits(config: Config, shape: Shape, machines: Machines) -> Iterator[tuple[int, int, int]]:
    """(workers, devices of each, ranks) in the order in which they are tried: the narrowest engines first, on half of the GPUs,
    then a quarter and so on, so that the learner gets more. Colocated, engines and ranks take them all."""
    num = machines.num_gpus
    for width in ENGINE_WIDTHS:
        if width > machines.gpus_per_node or shape.num_heads % width:
            continue
        if _colocated(config):
            workers = sum(size // width for size in machines.node_sizes)
            if workers:
                yield workers, width, workers * width
            continue
        for workers in (max(1, num // 2 // width), *_halves(num // 2 // width, 1)):
            if num > workers * width:
                yield workers, width, num - workers * width


def place(config: Config, machines: Machines) -> Nodes | None:
    """Roles on every device of every node; None where there are too few. Engines first, each whole on one node, then the ranks:
    on the devices left, or colocated on the engines' own."""
    width = config.rollout.tensor_parallel_size
    engines = [f"rollout-{i}" for i in range(config.rollout.num_workers)]
    ranks = [f"learner-{i}" for i in range(config.learner.num_ranks)]
    if machines.num_gpus == 0:
        return (((*engines, *ranks),),)
    nodes: list[list[list[str]]] = [[[] for _ in range(size)] for size in machines.node_sizes]
    bundles = [node[start : start + width] for node in nodes for start in range(0, len(node) - width + 1, width)]
    if len(bundles) < len(engines):
        return None
    for name, bundle in zip(engines, bundles, strict=False):
        for device in bundle:
            device.append(name)
    devices = [device for node in nodes for device in node]
    devices = sorted(devices, key=lambda device: not device) if _colocated(config) else [d for d in devices if not d]
    if len(devices) < len(ranks):
        return None
    for name, device in zip(ranks, devices, strict=False):
        device.append(name)
    return tuple(tuple(tuple(device) for device in node) for node in nodes)


def _colocated(config: Config) -> bool:
    return config.cluster.placement is Placement.colocated


# ---- memory ---------------------------------------------------------------------------------------------------------------------


def _measure(config: Config, shape: Shape, machines: Machines) -> Fit:
    gpu, nodes = machines.num_gpus > 0, place(config, machines)
    learner = learner_use(shape, config, gpu=gpu)
    engine = engine_use(shape, config, device_bytes=machines.gpu_bytes, gpu=gpu)
    node = _node_use(config, shape, nodes or (), learner, engine, gpu=gpu)
    found = Fit(config, machines, nodes or (), learner, engine, node, ())
    return dataclasses.replace(found, problems=tuple(_problems(found, shape)))


def _node_use(config: Config, shape: Shape, nodes: Nodes, learner: Use, engine: Use, *, gpu: bool) -> Use:
    """Main memory of the fullest node. Every rank loads the whole model before DeepSpeed takes it, whatever the ZeRO stage."""
    weights, engines = (
        weight_bytes(config) * shape.num_parameters,
        config.rollout.num_workers * config.rollout.tensor_parallel_size,
    )
    items = [Item("a push in Ray's object store", weights, False)]
    if gpu:
        ranks = max((sum(role.startswith("learner") for device in node for role in device) for node in nodes), default=0)
        aside = learner.of(*STATES) if _colocated(config) else 0
        items.append(Item(f"{ranks} ranks loading, or states laid aside", ranks * max(weights, aside), False))
    else:
        items.append(Item(f"{engines} x an engine", engines * engine.total, True))
        items.append(Item(f"{config.learner.num_ranks} x a learner rank", config.learner.num_ranks * learner.total, True))
    if config.reward.memory_gib is not None:
        limit = int(config.reward.num_workers * config.reward.memory_gib * GIB)
        items.append(Item(f"{config.reward.num_workers} verifiers at their limit", limit, False))
    return Use(tuple(items))


def _problems(found: Fit, shape: Shape) -> Iterator[str]:
    config, machines = found.config, found.machines
    gpu, width = machines.num_gpus > 0, config.rollout.tensor_parallel_size
    if shape.num_heads % width:
        yield f"rollout.tensor_parallel_size={width} does not divide the model's {shape.num_heads} attention heads"
    if not found.nodes:
        yield (
            f"{config.rollout.num_workers} rollout workers of {width} GPUs, each on one node, and {config.learner.num_ranks} learner "
            f"ranks do not go onto {machines.num_gpus} GPUs, {machines.gpus_per_node} a node ({config.cluster.placement.value})"
        )
    if gpu:
        names, uses = ("a learner rank", "an engine"), (found.learner.total, found.engine.total)
        if _colocated(config):
            names, uses = ("the learner's turn", "the engine's turn"), found.turns
        for name, used in zip(names, uses, strict=True):
            if used > machines.gpu_bytes:
                yield f"{name} takes {gib(used)} of a GPU's {gib(machines.gpu_bytes)}"
    one, cache = completion_cache_bytes(shape, config, gpu=gpu), found.engine.of("cache")
    if cache < one:
        yield f"a completion of {longest_row(config)} tokens takes {gib(one)} of cache, of which an engine has {gib(cache)}"
    if machines.node_bytes is not None and found.node.total > machines.node_bytes:
        yield f"a node takes {gib(found.node.total)} of main memory and has {gib(machines.node_bytes)}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


# ---- the smallest change --------------------------------------------------------------------------------------------------------


def smallest_change(config: Config, shape: Shape, here: Here) -> tuple[str, ...]:
    """Overrides that make the run fit: the first single key, in the order of ``_changes``, else the first pair, else the first three.

    Three always do: GPUs enough for the counts, each large enough, and nodes large enough, or one of these and other counts.
    """
    values: dict[str, list[Any]] = {}
    for key, value in _changes(config, shape, here):
        values.setdefault(key, []).append(value)
    for number in (1, 2, 3):
        for keys in itertools.combinations(values, number):
            chosen = _first_that_fits(
                config, [(key, values[key] if number < 3 else values[key][-1:]) for key in keys], shape, here
            )
            if chosen is not None:
                return tuple(f"{key}={_text(functools.reduce(getattr, key.split('.'), chosen))}" for key in keys)
    return ()


def _first_that_fits(config: Config, changes: list[tuple[str, list[Any]]], shape: Shape, here: Here) -> Config | None:
    """The configuration with the first values that fit. The last key is tried at its end first where it only ever adds machines:
    where that does not help, none of its values does."""
    (key, options), *rest = changes
    adds_machines = key.startswith("plan.") and len(options) > 1 and not rest
    if adds_machines and _first_that_fits(config, [(key, options[-1:])], shape, here) is None:
        return None
    for value in options:
        changed = with_key(config, key, value)
        found = _first_that_fits(changed, rest, shape, here) if rest else changed if _fits(changed, shape, here) else None
        if found is not None:
            return found
    return None


def _fits(config: Config, shape: Shape, here: Here) -> bool:
    if fit(config, shape, here).problems:
        return False
    try:
        check_values(config)
    except ConfigError:
        return False
    return True


def _changes(config: Config, shape: Shape, here: Here) -> Iterator[tuple[str, Any]]:
    """Single keys that save memory, what costs least first: settings of the learner, of the engine, counts, then other machines."""
    learner, rollout, machines = config.learner, config.rollout, Machines.of(config.plan, here)
    gpu, width = machines.num_gpus > 0, rollout.tensor_parallel_size
    if not learner.gradient_checkpointing:
        yield "learner.gradient_checkpointing", True
    yield from (("learner.zero_stage", stage) for stage in range(learner.zero_stage + 1, 4))
    yield from (("batch.tokens_per_micro_batch", n) for n in _halves(config.batch.tokens_per_micro_batch, longest_row(config)))
    yield from (("rollout.max_running", n) for n in _halves(rollout.max_running, 8))
    if gpu:
        yield from (("rollout.gpu_memory_share", n / 10) for n in range(9, 1, -1))
    else:
        one = completion_cache_bytes(shape, config, gpu=False)
        yield "rollout.cache_gib", -(-one * 4 // GIB) / 4  # a quarter of a GiB at a time
    if not (gpu and has_default_counts(config)):  # else they are proposed anyway
        widths = [w for w in ENGINE_WIDTHS if w > width] * gpu + [w for w in reversed(ENGINE_WIDTHS) if w < width]
        yield from (("rollout.tensor_parallel_size", n) for n in widths)
        yield from (("learner.num_ranks", n) for n in range(learner.num_ranks + 1, machines.num_gpus + 1))
        yield from (("rollout.num_workers", n) for n in range(rollout.num_workers - 1, 0, -1))
        yield from (("learner.num_ranks", n) for n in range(learner.num_ranks - 1, 0, -1))
    if gpu and not _colocated(config):
        yield "cluster.placement", Placement.colocated
    if gpu:
        needed = rollout.num_workers * width + learner.num_ranks + machines.gpus_per_node
        sizes = [*range(1, SEVERAL + 1), *(n for n in (96, 128, 256, 512, needed) if n > SEVERAL)]
        yield from (("plan.num_gpus", n) for n in sizes if n > machines.num_gpus)
        yield from (("plan.gpu_gib", float(n)) for n in GPU_SIZES_GIB if n * GIB > machines.gpu_bytes)
    if machines.node_bytes is not None:
        yield from (("plan.node_memory_gib", float(2**n)) for n in range(2, 20) if 2**n * GIB > machines.node_bytes)


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def with_key(config: Any, key: str, value: Any) -> Any:
    """A copy of a configuration with one dotted key set."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: with_key(getattr(config, name), rest, value) if rest else value})


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
