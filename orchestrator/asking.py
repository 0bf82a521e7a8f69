"""``limen eval`` and ``limen sample``: a saved model is asked, without a run. Nothing waits here without a watchdog either."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from configs.errors import ConfigError
from configs.schema import Config
from orchestrator import cluster
from orchestrator.checkpoint import find_checkpoint
from orchestrator.commands import LEAVE_S, Interrupt, one_line
from orchestrator.console import evaluation_lines, printable, to_stderr
from orchestrator.departure import EXIT_STOPPED, Departure
from orchestrator.errors import RunStopped
from orchestrator.evaluation import choose_prompts, evaluate
from orchestrator.fleet import RayFleet
from orchestrator.launch import Launcher, close_actors
from orchestrator.material import ASKED, Material, gather_material, request_maker
from orchestrator.pools import RayScorer
from orchestrator.run_folder import STACKS
from orchestrator.waits import DeadlinePassed, Waits
from orchestrator.watchdog import Pulse, Watchdog
from rollout.records import Purpose, Visit
from rollout.sources import DataError


@dataclass(frozen=True, slots=True)
class Engines:
    """What there is to ask."""

    fleet: RayFleet
    scorer: RayScorer
    stuff: Material
    waits: Waits


def evaluate_model(config: Config) -> int:
    """pass@k and avg@k of a checkpoint, or of the base model, on the held-out prompts."""

    async def ask(engines: Engines) -> int:
        held_out = {prompt.id: prompt for prompt in choose_prompts(engines.stuff.prompts.held_out, config.evaluation)}
        if not held_out:
            raise DataError(
                "data.held_out_per_stratum: no prompt is held out, at most a fifth of a stratum is; there is nothing to ask"
            )
        result = await evaluate(
            engines.fleet,
            engines.scorer,
            held_out,
            engines.waits,
            num_samples=config.evaluation.num_samples,
            version=0,
            max_failed_share=config.reward.max_failed_share,
            deadline_s=config.deadlines.evaluate_s,
        )
        for line in evaluation_lines(config.checkpoint_dir or config.model.path, None, result):
            print(line)
        return 0

    return _with_engines(config, ask)


def sample(config: Config) -> int:
    """Completions of a checkpoint, or of the base model: for ``sample.prompts``, else for held-out prompts."""

    async def ask(engines: Engines) -> int:
        stuff, wait, deadline_s = engines.stuff, engines.waits.wait, config.deadlines.evaluate_s
        if config.sample.prompts:
            chosen = [prompt.id for prompt in stuff.by_id.values() if prompt.source == ASKED]
        else:
            chosen = [prompt.id for prompt in stuff.prompts.held_out[: config.sample.num_prompts]]
        asked = engines.fleet.evaluate([Visit(prompt_id, 0, Purpose.EVAL) for prompt_id in chosen])
        for item in await wait(asked, owner="rollout workers", name="completions", deadline_s=deadline_s):
            parcel = await wait(item.address.parcel, owner="rollout workers", name="their text", deadline_s=deadline_s)
            group = parcel[item.address.place]
            print(printable(stuff.by_id[group.visit.prompt_id].text))
            for completion in group.completions:
                print(f"  [{completion.num_tokens} tokens, {completion.finish}] {printable(completion.text)}")
        return 0

    return _with_engines(config, ask)


def _with_engines(config: Config, ask: Callable[[Engines], Awaitable[int]]) -> int:
    """Starts rollout workers on a saved model and the reward pool, asks, and ends them."""
    config.rollout.source_run = None  # a run that replays another is evaluated on its own data
    stuff = gather_material(config, print)
    model_path = str(saved_model(config.checkpoint_dir)) if config.checkpoint_dir else stuff.model_path
    ray_cluster = cluster.start_cluster(config.cluster, cluster.Demand.of(config, gpu=stuff.num_gpus > 0))
    with Departure() as departure:
        try:
            return asyncio.run(_ask(config, stuff, model_path, ask, departure))
        finally:
            ray_cluster.close()


async def _ask(
    config: Config, stuff: Material, model_path: str, ask: Callable[[Engines], Awaitable[int]], departure: Departure
) -> int:
    waits, deadlines, launcher = Waits(), config.deadlines, Launcher(config, stuff)
    interrupt = Interrupt(lambda: False, print)
    reason, failed = "failed", EXIT_STOPPED

    async def replace_pool(node: str, reason: str) -> tuple[str, Any] | None:
        print(f"warning: the reward pool of node {node} was lost and is made anew ({reason})")
        return await launcher.next_pool(node)

    with _watched(config, waits, launcher) as watchdog:
        try:
            await launcher.reserve(with_ranks=False)
            workers = [launcher.rollout_worker(i, model_path=model_path) for i in range(config.rollout.num_workers)]
            pools = launcher.rewards()
            started = asyncio.gather(*(actor.facts.remote() for actor in launcher.actors.values()))
            facts = await waits.wait(started, owner="actors", name="start", deadline_s=deadlines.start_s)
            nodes = {name: fact["node"] for name, fact in zip(launcher.actors, facts, strict=True)}
            watchdog.enter("generate", 0)
            fleet = RayFleet(workers, request_maker(config, stuff), waits, deadlines.heartbeat_s)
            scorer = RayScorer(pools, nodes.__getitem__, stuff.by_id, replace_pool)
            try:
                failed = await ask(Engines(fleet, scorer, stuff, waits))
            finally:
                fleet.close()
        except asyncio.CancelledError:
            if interrupt.exit_code == 0:
                raise
        except (DeadlinePassed, RayError, RunStopped) as error:
            reason = str(error) if isinstance(error, RunStopped) else one_line(error)
            raise RunStopped(reason) from error
        finally:
            interrupt.end_has_begun()
            departure.begin(LEAVE_S + 2 * deadlines.close_s, interrupt.exit_code or failed, reason)
            watchdog.enter("closing", 0)
            await close_actors(launcher.actors, waits, deadlines.close_s)
    return interrupt.exit_code or failed


@contextlib.contextmanager
def _watched(config: Config, waits: Waits, launcher: Launcher) -> Iterator[Watchdog]:
    """There is no run whose folder its stacks could lie in: a temporary one stays where there are any."""
    folder = Path(tempfile.mkdtemp(prefix="limen-"))
    pulse = Pulse(
        every_s=config.log.heartbeat_every_s,
        limit_s=config.deadlines.heartbeat_s,
        actors=lambda: launcher.actors,
        depths=dict,
        last_events=(),
    )
    watchdog = Watchdog(folder, waits, lambda name, **fields: None, pulse)
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.close()
        if any((folder / STACKS).iterdir()):
            to_stderr(f"the stacks are in {folder / STACKS}")
        else:
            shutil.rmtree(folder)


def saved_model(checkpoint_dir: str) -> Path:
    """The Hugging Face folder of a checkpoint, of a run's newest checkpoint, or the folder itself."""
    folder = Path(checkpoint_dir)
    if (folder / "checkpoints").is_dir():
        return find_checkpoint(folder, print).model
    for candidate in (folder / "model", folder):
        if (candidate / "config.json").is_file():
            return candidate
    if (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"checkpoint_dir={checkpoint_dir}: this run has no checkpoint yet")
    raise ConfigError(
        f"checkpoint_dir={checkpoint_dir}: neither a run folder, nor one of its checkpoints, nor a model folder with config.json"
    )
