"""The smallest change of a configuration that makes a run fit which does not, for `limen plan`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from configs.errors import ConfigError
from configs.schema import Config, Placement
from configs.validate import check_values
from orchestrator.fitting import (
    COUNTS,
    ENGINE_WIDTHS,
    Here,
    Machines,
    asked_cpus,
    colocated,
    fit,
    halves,
    has_default_counts,
    with_key,
)
from orchestrator.footprint import GIB, completion_cache_bytes, longest_row
from orchestrator.shapes import Shape

_ROOM = ("rollout.cache_gib", "cluster.num_cpus")  # keys of the run that only ever add room, as the machines' do
SEVERAL = 64  # GPUs up to which every number is tried
GPU_SIZES_GIB = (16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)
NOT_BUILT_GIB = tuple(2.0**n for n in range(9, 20))  # GPUs of such sizes are named only where no number of real ones would do


def smallest_change(config: Config, shape: Shape, here: Here) -> tuple[tuple[str, ...], Config]:
    """Overrides that make the run fit, and the configuration with them: the first single key, in the order of ``_changes``, else the
    first pair; else counts and machines together, as few and as small as fit."""
    values: dict[str, list[Any]] = {}
    for key, value in _changes(config, shape, here):
        values.setdefault(key, []).append(value)
    for number in (1, 2):
        for keys in itertools.combinations(values, number):
            chosen = _first_that_fits(config, [(key, values[key]) for key in keys], shape, here)
            if chosen is not None:
                return _overrides(chosen, keys), chosen
    least = _least_of_all(config, values, shape, here)
    chosen = _with_keys(config, least)
    return _overrides(chosen, least), chosen


def _overrides(config: Config, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{key}={_text(functools.reduce(getattr, key.split('.'), config))}" for key in keys)


def _with_keys(config: Config, changes: Mapping[str, Any]) -> Config:
    return functools.reduce(lambda c, item: with_key(c, *item), changes.items(), config)


def _least_of_all(config: Config, values: dict[str, list[Any]], shape: Shape, here: Here) -> dict[str, Any]:
    """Counts of 1, so that they are proposed, and the most of every machine; then what can be left out, and each as small as fits."""

    def fits(changes: dict[str, Any]) -> bool:
        return _fits(_with_keys(config, changes), shape, here)

    machines = {key: options[-1] for key, options in values.items() if key in _ROOM or key.startswith("plan.")}
    chosen = dict.fromkeys(COUNTS, 1) | machines
    if not fits(chosen):
        values = values | {"plan.gpu_gib": [*values.get("plan.gpu_gib", ()), *NOT_BUILT_GIB]}
        chosen["plan.gpu_gib"] = NOT_BUILT_GIB[-1]
    for key in list(chosen):
        fewer = {other: value for other, value in chosen.items() if other != key}
        if fits(fewer):
            chosen = fewer
    for key in chosen:
        chosen[key] = next((value for value in values.get(key, ()) if fits(chosen | {key: value})), chosen[key])
    return chosen


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
    yield from (("batch.tokens_per_micro_batch", n) for n in halves(config.batch.tokens_per_micro_batch, longest_row(config)))
    yield from (("rollout.max_running", n) for n in halves(rollout.max_running, 8))
    if gpu:
        yield from (("rollout.gpu_memory_share", n / 10) for n in range(9, 1, -1))
    else:
        for split in dict.fromkeys((width, 1)):  # an engine that is not split keeps more on its device
            one = completion_cache_bytes(shape, with_key(config, "rollout.tensor_parallel_size", split), gpu=False)
            yield "rollout.cache_gib", -(-one * 4 // GIB) / 4  # a quarter of a GiB at a time
    if not (gpu and has_default_counts(config)):  # else they are proposed anyway
        widths = [w for w in ENGINE_WIDTHS if w > width] * gpu + [w for w in reversed(ENGINE_WIDTHS) if w < width]
        yield from (("rollout.tensor_parallel_size", n) for n in widths)
        yield from (("learner.num_ranks", n) for n in range(learner.num_ranks + 1, machines.num_gpus + 1))
        yield from (("rollout.num_workers", n) for n in range(rollout.num_workers - 1, 0, -1))
        yield from (("learner.num_ranks", n) for n in range(learner.num_ranks - 1, 0, -1))
    if not gpu:
        yield "cluster.num_cpus", asked_cpus(config)
    if gpu and not colocated(config):
        yield "cluster.placement", Placement.colocated
    if gpu:
        needed = rollout.num_workers * width + learner.num_ranks + machines.gpus_per_node
        sizes = [*range(1, SEVERAL + 1), *(n for n in (96, 128, 256, 512, needed) if n > SEVERAL)]
        yield from (("plan.num_gpus", n) for n in sizes if n > machines.num_gpus)
        yield from (("plan.gpu_gib", float(n)) for n in GPU_SIZES_GIB if n * GIB > machines.gpu_bytes)
    if machines.node_bytes is not None:
        yield from (("plan.node_memory_gib", float(2**n)) for n in range(2, 20) if 2**n * GIB > machines.node_bytes)


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
