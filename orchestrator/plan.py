"""``limen plan``: what a configuration takes, worked out before anything starts, and the smallest change where it cannot fit.

Arithmetic over the configuration, the model's shape and the machines: no Ray, no torch, no model. Formulas: docs/plan.md.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from configs.errors import InputError
from configs.lag import correction_in_use, oldest_token
from configs.schema import Auto, Config, SourceKind
from orchestrator.admission import most_open
from orchestrator.changes import smallest_change
from orchestrator.doctor import command_output
from orchestrator.fitting import COUNTS, Fit, Here, Machines, Nodes, fit, gib, has_default_counts
from orchestrator.footprint import (
    GIB,
    MIB,
    Use,
    bucket_bytes,
    cache_token_bytes,
    completion_cache_bytes,
    longest_row,
    mini_batch_samples,
    weight_bytes,
)
from orchestrator.ledger import Length
from orchestrator.reward_plan import num_processes
from orchestrator.shapes import Shape, model_shape
from orchestrator.threads import Threads, thread_budget, usable_cpus
from rollout.held_out import held_out_places
from rollout.sources import load_rows

VISITS_BOUND_BATCHES = 8  # of a step, where rollout.max_visits_per_step is not set
COUNTABLE = (SourceKind.arithmetic, SourceKind.jsonl, SourceKind.parquet)  # sources that are read at once and offline
DIGEST_BYTES = 8
FIRST_PUSHES = 3  # to a new engine, for its proof: the weights, the weights scaled, the weights again


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step, and how many there are."""

    groups: int
    completions: int
    visits_bound: int
    tokens_bound: int  # prompts and completions that are trained
    optimizer_steps: int  # a step
    samples: int  # of an optimizer step, over all ranks
    rows_per_micro_batch: int  # of the greatest length
    micro_batches: int  # of a rank in an optimizer step, if every row had the greatest length
    steps: int | None  # None: set by data.num_epochs over prompts that are not counted here
    epochs: float | None  # at the least: filtered groups take prompts too
    num_skipped: int | None  # prompts that every epoch leaves out (data.last_batch: drop)
    open_bound: int  # visits open at once


@dataclass(frozen=True, slots=True)
class PushPlan:
    num_bytes: int  # of one push
    num_tensors: int
    bucket_bytes: int
    seconds: float  # to one node, at the stated bandwidth
    num_fetches: int  # nodes with engines but without rank 0
    proof_bytes: int  # digests of every push
    first_bytes: int  # to a new engine


@dataclass(frozen=True, slots=True)
class Plan:
    fit: Fit
    proposed: tuple[str, ...]  # overrides that give a run these counts, where they are not its own
    shape: Shape
    cache_token_bytes: int  # on one device
    completions_that_fit: int  # of the greatest length, in the cache of one engine
    batch: BatchPlan
    push: PushPlan
    threads: Threads


def plan(config: Config) -> int:
    """Prints the plan. Raises InputError where it does not fit, naming the smallest change that makes it fit."""
    here = Here(gpus_here(), psutil.virtual_memory().total, usable_cpus())
    made = make_plan(config, here, count_prompts(config))
    print("\n".join(describe(made)))
    problems = made.fit.problems
    if problems:
        changes, changed = smallest_change(config, made.shape, here)
        counts = _proposed(changed, fit(changed, made.shape, here))
        others = [change for change in changes if not change.startswith(COUNTS)]
        run = f"; for the run: {' '.join([*others, *counts])}" if counts else ""
        raise InputError(f"this does not fit: {'; '.join(problems)}; with {' '.join(changes)} it fits{run}")
    return 0


def _proposed(config: Config, found: Fit) -> tuple[str, ...]:
    """The counts that are planned, as overrides for the run, where they are not its own."""
    if not has_default_counts(config):
        return ()
    planned = found.config
    counts = (planned.rollout.num_workers, planned.rollout.tensor_parallel_size, planned.learner.num_ranks)
    return tuple(f"{key}={n}" for key, n in zip(COUNTS, counts, strict=True) if n > 1)


def make_plan(config: Config, here: Here, num_prompts: int | None) -> Plan:
    """The plan, whether it fits or not. ``num_prompts``: those to train on, where they are known. Raises InputError for a
    model whose shape is not known, and where the prompts do not fill a batch."""
    shape = model_shape(config.model)
    found = fit(config, shape, here)
    gpu, planned = found.machines.num_gpus > 0, found.config
    return Plan(
        fit=found,
        proposed=_proposed(config, found),
        shape=shape,
        cache_token_bytes=cache_token_bytes(shape, planned),
        completions_that_fit=found.engine.of("cache") // completion_cache_bytes(shape, planned, gpu=gpu),
        batch=_batch(planned, num_prompts),
        push=_push(planned, shape, found.machines, found.nodes),
        threads=thread_budget(planned, found.machines.cpus, shape.num_parameters),
    )


def _batch(config: Config, num_prompts: int | None) -> BatchPlan:
    batch, rollout, longest = config.batch, config.rollout, longest_row(config)
    samples, rows = mini_batch_samples(batch), max(1, batch.tokens_per_micro_batch // longest)
    of_a_rank = -(-samples // config.learner.num_ranks)
    steps, epochs = config.steps, config.data.num_epochs
    length = None if num_prompts is None else Length(num_prompts, batch.groups_per_step, config.data.last_batch)
    if length is not None and epochs is not None:
        steps = length.steps(epochs)
    elif length is not None and steps is not None:
        epochs = steps * batch.groups_per_step / length.visits_per_epoch
    return BatchPlan(
        groups=batch.groups_per_step,
        completions=batch.groups_per_step * batch.group_size,
        visits_bound=rollout.max_visits_per_step or VISITS_BOUND_BATCHES * batch.groups_per_step,
        tokens_bound=batch.groups_per_step * batch.group_size * longest,
        optimizer_steps=batch.num_mini_batches * batch.num_passes,
        samples=samples,
        rows_per_micro_batch=rows,
        micro_batches=-(-of_a_rank // rows),
        steps=steps,
        epochs=epochs,
        num_skipped=None if length is None else length.num_skipped,
        open_bound=most_open(rollout.max_lag, rollout.oversample, batch.groups_per_step),
    )


def _push(config: Config, shape: Shape, machines: Machines, nodes: Nodes) -> PushPlan:
    num_bytes = weight_bytes(config) * shape.num_parameters
    roles = [{role for device in node for role in device} for node in nodes]
    return PushPlan(
        num_bytes=num_bytes,
        num_tensors=shape.num_tensors,
        bucket_bytes=bucket_bytes(shape, config),
        seconds=num_bytes / machines.bandwidth,
        num_fetches=sum("learner-0" not in node and any(role.startswith("rollout") for role in node) for node in roles),
        proof_bytes=DIGEST_BYTES * shape.num_tensors,
        first_bytes=FIRST_PUSHES * num_bytes,
    )


def count_prompts(config: Config) -> int | None:
    """Prompts to train on, if none is too long; None where a source is not read at once and offline. Raises DataError for a bad row."""
    sources = config.data.sources
    if any(source.kind not in COUNTABLE for source in sources.values()):
        return None
    rows = [row for name, source in sources.items() for row in load_rows(name, source, list(config.reward.parts))]
    keys = [row.split_key for row in rows]
    return len(rows) - len(held_out_places([row.stratum for row in rows], keys, config.data.held_out_per_stratum))


def gpus_here() -> int:
    """GPUs that a run on this machine would see, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(name.strip() not in ("", "-1") for name in visible.split(","))
    return len((command_output(["nvidia-smi", "-L"]) or "").splitlines()) if shutil.which("nvidia-smi") else 0


# ---- for a person ---------------------------------------------------------------------------------------------------------------


def describe(made: Plan) -> Iterator[str]:
    """The plan as lines of text."""
    found, shape = made.fit, made.shape
    config, machines = found.config, found.machines
    where = (
        "CPU"
        if machines.num_gpus == 0
        else f"{machines.num_gpus} GPUs of {gib(machines.gpu_bytes)}, {machines.gpus_per_node} a node"
    )
    yield f"{config.model.path}: {shape.num_parameters:,} parameters in {shape.num_tensors:,} tensors, {config.model.dtype.value}; {where}"
    yield ""
    yield f"placement ({config.cluster.placement.value})"
    yield from _draw(config, found.nodes)
    if made.proposed:
        yield f"  proposed, since the counts are at their defaults; for the run: {' '.join(made.proposed)}"
    yield from _describe_batch(made.batch, config)
    yield from _describe_use("memory of a learner rank", found.learner)
    yield from _describe_use("memory of an engine" if machines.num_gpus == 0 else "memory of a device of an engine", found.engine)
    yield _row("keys and values of a token", f"{made.cache_token_bytes:,} bytes")
    yield _row(
        "completions that fit",
        f"{made.completions_that_fit:,} of {longest_row(config)} tokens; {config.rollout.max_running} may run",
    )
    if machines.num_gpus > 0:
        yield ""
        yield _row("the fullest GPU", _room(found.fullest, machines.gpu_bytes))
    yield from _describe_use("main memory of the fullest node", found.node)
    if machines.node_bytes is not None:
        yield _row("of the node", _room(found.node.total, machines.node_bytes))
    yield from _describe_push(made.push, machines)
    yield ""
    yield "staleness"
    yield _row("open visits", f"at most (max_lag + oversample) x groups_per_step = {made.batch.open_bound}")
    yield _row("versions a group is behind", _gap(config))
    yield _row("correction of late tokens", _correction(config))
    yield ""
    yield f"threads on CPU ({machines.cpus} cores): {made.threads}"


def _draw(config: Config, nodes: Nodes) -> Iterator[str]:
    kind = "cpu" if nodes and len(nodes) == len(nodes[0]) == 1 else "gpu"
    for number, node in enumerate(nodes):
        for place, roles in enumerate(node):
            name = f"node {number}" if place == 0 else ""
            yield f"  {name:<9}{kind} {place}  {', '.join(roles) or 'idle'}"
    yield f"  every node with rollout workers, on CPU: verifier processes, {num_processes(config.reward)}"


def _describe_batch(batch: BatchPlan, config: Config) -> Iterator[str]:
    size = config.batch
    yield ""
    yield "batch"
    yield _row(
        "a step",
        f"{batch.groups} groups x {size.group_size} = {batch.completions:,} completions, at most {batch.tokens_bound:,} tokens",
    )
    yield _row("visits for it", f"at most {batch.visits_bound}")
    yield _row(
        "optimizer steps of it", f"{size.num_mini_batches} mini-batches x {size.num_passes} passes = {batch.optimizer_steps}"
    )
    yield _row(
        "an optimizer step",
        f"{batch.samples} completions over {config.learner.num_ranks} ranks; at full length {batch.micro_batches} micro-batches a rank, of "
        f"{batch.rows_per_micro_batch} rows",
    )
    steps = (
        "set by data.num_epochs"
        if batch.steps is None
        else f"{batch.steps}, {batch.steps * batch.optimizer_steps:,} optimizer steps"
    )
    yield _row("steps", steps)
    yield _row("passes over the prompts", "not counted here" if batch.epochs is None else f"at least {batch.epochs:.2f}")
    if batch.num_skipped:
        yield _row("prompts skipped in each pass", f"{batch.num_skipped} (data.last_batch={config.data.last_batch.value})")


def _describe_use(name: str, use: Use) -> Iterator[str]:
    yield ""
    yield name
    for item in use.items:
        if item.num_bytes:
            yield _row(item.name, f"{_size(item.num_bytes)}{'  estimate' if item.estimate else ''}")
    yield _row("total", _size(use.total))


def _describe_push(push: PushPlan, machines: Machines) -> Iterator[str]:
    yield ""
    yield f"push at {machines.bandwidth / 1e9:g} GB/s"
    yield _row("bytes", f"{push.num_bytes:,}, in buckets of at most {push.bucket_bytes:,}")
    away = (
        f"fetched over the network once a node, by {push.num_fetches}"
        if push.num_fetches
        else "on the learner's node, through shared memory"
    )
    yield _row("seconds to an engine", f"{push.seconds:.3g}; {away}")
    yield _row(
        "proof",
        f"{push.num_tensors:,} digests, {push.proof_bytes:,} bytes, at every push; {push.first_bytes:,} bytes to a new engine",
    )


def _gap(config: Config) -> str:
    rollout = config.rollout
    if rollout.max_lag == 0:
        return "0: what is trained was made by the weights it meets"
    oldest = oldest_token(rollout)
    late = "no bound for one that others overtake" if oldest is None else f"{oldest} for any token"
    assert not isinstance(rollout.oversample, Auto), "refused above lag 0"
    in_turn = rollout.max_lag + math.ceil(rollout.oversample) - 1
    return f"at most {in_turn} for one that is trained in its turn; {late} (rollout.late={rollout.late.value})"


def _correction(config: Config) -> str:
    chosen = correction_in_use(config)
    params = ", ".join(f"{name}={value}" for name, value in chosen.params.items())
    text = chosen.name + (f" ({params})" if params else "")
    if chosen is config.correction:
        return text
    return f"{text}, since rollout.max_lag is {'above 0; correction=none turns it off' if config.rollout.max_lag else 0}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:8.2f} MiB" if num_bytes < GIB // 10 else f"{num_bytes / GIB:8.2f} GiB"


def _room(used: int, available: int) -> str:
    rest = available - used
    return f"{gib(used)} of {gib(available)}, {gib(abs(rest))} {'free' if rest >= 0 else 'too much'}"


def _row(name: str, text: str) -> str:
    return f"  {name:<44}{text}"
