"""A training run, put together: actors, the first proof, the loop, evaluations, checkpoints, the summary."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from configs.compose import dump_config
from configs.errors import ConfigError
from configs.functions import resolve_function
from configs.lag import oldest_token
from configs.schema import Config, Late, OnSwap, Placement
from learner.selection import SELECTIONS, Decision
from orchestrator import material
from orchestrator.alarms import Watch, feed
from orchestrator.checkpoint import GROUPS, Checkpoint, Checkpoints, SaveFailed
from orchestrator.console import View, evaluation_lines, make_view
from orchestrator.errors import RunStopped
from orchestrator.evaluation import Evaluation, choose_prompts, evaluate
from orchestrator.fleet import RayFleet, Worker, words
from orchestrator.grace import StepInHand
from orchestrator.groups import held_groups, read_state, state_json, state_rows
from orchestrator.handles import LearnerHandle, Scorer, StepReport
from orchestrator.launch import Launcher, close_actors
from orchestrator.ledger import Ledger, Length
from orchestrator.loop import Loop, LoopSettings
from orchestrator.lost import group_at
from orchestrator.material import Material
from orchestrator.metrics import step_metrics
from orchestrator.placement import RESERVE_S
from orchestrator.pools import PoolWatch, RayScorer
from orchestrator.proof import FixedTokens
from orchestrator.push import RayPusher
from orchestrator.ranks import RayLearner, answer_of
from orchestrator.recorder import Recorder
from orchestrator.recovery import Mark, cause_of, next_incarnation
from orchestrator.replay import ReplayFleet, ReplayPusher, ReplayScorer, check_length
from orchestrator.reward_plan import isolation_levels, longest_s, still_s
from orchestrator.run_folder import write_json
from orchestrator.selftest import SelfTest
from orchestrator.shared_folder import prove_shared
from orchestrator.stages import Address, Batch, Finished, Kept, LoopState, Scored, StepOutcome
from orchestrator.turns import Turns, widened
from orchestrator.waits import DeadlinePassed, LoopLag, Waits
from orchestrator.watchdog import Pulse, Watchdog
from orchestrator.workers import Crew
from rollout.records import Group, Purpose, Score, sampling_seed

DEFAULT_BATCHES_PER_STEP = 8  # bound on the visits of a step where rollout.max_visits_per_step is not set
MOST_CHARACTERS = 400  # of a library's message within one of ours
LOOP_LAG_ALARM_S = 0.5  # the driver was busy for so long that it held up the stages


class Job:
    """One life of a training run. ``start`` brings everything up, ``run`` trains, ``close`` ends every actor."""

    def __init__(
        self, config: Config, folder: Path, stuff: Material, resumed: Checkpoint | None, *, places_s: float = RESERVE_S
    ) -> None:
        """``places_s``: so long may Ray take to find the places of each part of the run."""
        self.config = config
        self._places_s = places_s
        self.folder = folder
        self._material = stuff
        self._resumed = resumed
        self._waits = Waits()
        state = resumed.state if resumed else {"step": 0, "version": 0}
        self._incarnation = next_incarnation(folder, resumed)
        self.length = Length(len(stuff.prompts.train), config.batch.groups_per_step, config.data.last_batch)
        epochs = config.data.num_epochs
        self.num_steps = config.steps if config.steps is not None else self.length.steps(epochs or 0)
        if stuff.record:
            check_length(stuff.record, self.num_steps, config.batch.groups_per_step)
            epochs = 1.0  # no group twice
        self._ledger = Ledger(
            [prompt.id for prompt in stuff.prompts.train],
            [prompt.stratum for prompt in stuff.prompts.train],
            config.ledger,
            length=self.length,
            seed=config.seed,
            shuffle=config.data.shuffle and not stuff.record,
            max_visits=self.length.visits(epochs) if epochs is not None else None,
        )
        if resumed:
            _check_kind(config, resumed)
            self._ledger.restore(resumed.state["ledger"], resumed.ledger_arrays())
        self._checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
        self._recorder = Recorder(
            folder,
            config.log,
            stuff.by_id,
            incarnation=self._incarnation,
            after_step=state["step"],
            record=config.rollout.record,
            seed=config.seed,
        )
        self._watchdog = Watchdog(
            folder,
            self._waits,
            self.event,
            Pulse(
                every_s=config.log.heartbeat_every_s,
                limit_s=config.deadlines.heartbeat_s,
                actors=self._named_actors,
                depths=self._depths,
                last_events=self._recorder.last_events,
            ),
        )
        self._held_out = {prompt.id: prompt for prompt in choose_prompts(stuff.prompts.held_out, config.evaluation)}
        self._seconds: dict[str, float] = defaultdict(float)
        self._saved_step: int | None = resumed.step if resumed else None
        self._save_failed = False  # the last time
        self._stopping = False  # it was asked to
        self._unrecorded = False  # groups of the last step are missing in its record
        self._in_hand = StepInHand(config.deadlines.grace_s)
        self.unwritten: list[str] = []  # what the run's files lack, in words
        self._step, self._version = state["step"], state["version"]
        self._first_step = self._step
        self._evaluations: dict[int, Evaluation] = {}
        if resumed:
            self._seconds.update(resumed.state["seconds_by_stage"])
            if resumed.state["evaluation_before"]:
                self._evaluations[0] = Evaluation.from_json(resumed.state["evaluation_before"])
        self._watch = Watch()
        self._selftest = SelfTest(config.model.dtype) if config.selftest_lr0 else None
        self._rewards: RayScorer | None = None  # there is none in a replay
        self._loop: Loop | None = None
        self._turns: Turns | None = None  # where engines and learner have the same devices
        self.started = False
        self.checkpoint: Path | None = resumed.folder if resumed else None
        self.view: View = make_view(config.log.console, self.num_steps)

    # ---- start and end ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Actors, weights, the first push and its proof."""
        self._watchdog.start()
        self._enter("starting actors")
        self.view.line(f"starting the actors and their models (deadline {self.config.deadlines.start_s:g} s)")
        config, started = self.config, time.monotonic()
        record = self._material.record
        self._launcher = launcher = Launcher(config, self._material, places_s=self._places_s)
        self.view.line(f"threads: {launcher.threads}")
        places = launcher.reserve(with_ranks=True, with_engines=not record)
        deadline_s = 3 * self._places_s + config.deadlines.start_s  # three parts at most ask for places, one after another
        await self._wait(places, "Ray", "places of the actors", deadline_s)
        workers = [] if record or config.cluster.placement is Placement.colocated else self._make_workers()
        ranks, pools = launcher.ranks(), {} if record else launcher.rewards()
        self._learner = RayLearner(ranks)
        total = self.num_steps * config.batch.num_mini_batches * config.batch.num_passes
        await self._start_wait(launcher.start_ranks(ranks, total_optimizer_steps=total), "learner", "start")
        proof = prove_shared(self._checkpoints.folder, self._learner.see_folder)
        await self._start_wait(proof, "learner", "a look into the checkpoint folder")
        if self._resumed:
            await self._start_wait(self._learner.load(self._resumed.learner), "learner", "load")
        await self._tell_isolation(pools)
        self._make_handles(pools)
        if self._turns:  # engines measure what the ranks leave free
            await self._turns.lay_aside()
            workers = self._make_workers()
        facts = await self._start_wait(asyncio.gather(*map(self._facts, launcher.actors.values())), "actors", "start")
        address = ray.get_runtime_context().gcs_address
        self._recorder.event("started", ray=address, actors=facts, threads=str(launcher.threads))
        slow = [fact["pid"] for fact in facts if fact["niceness"] > 0]
        if slow:
            self.view.line(
                f"warning: Ray runs {len(slow)} of {len(facts)} actors at a lower priority (nice > 0): any other process slows them "
                "many times over; start the cluster with RAY_worker_niceness=0 in its environment"
            )
        self._enter("first push")
        if not record:
            await self._start_wait(self._crew.start(workers), "rollout workers", "start")
        await self._start_wait(self._pusher.push(self._version), "push", f"version {self._version}")
        self.add_time("start", time.monotonic() - started)
        self.started = True

    async def _facts(self, actor: Any) -> Any:
        ranks, asked = self._learner.ranks, actor.facts.remote()
        return await (answer_of(ranks.index(actor), "facts", asked) if actor in ranks else asked)

    async def _tell_isolation(self, pools: dict[str, Any]) -> None:
        """What each verifier that runs programs shuts them in with, on every node. Raises where a node lacks what is demanded."""
        levels = isolation_levels(self.config.reward) if pools else {}
        if levels:
            asked = asyncio.gather(*(pool.isolation.remote(levels) for pool in pools.values()))
            rungs = dict(zip(pools, await self._start_wait(asked, "reward pool", "isolation"), strict=True))
            self.event("isolation", nodes=rungs)
            for line in sorted(
                {f"isolation of reward.parts.{part}: {rung}" for of in rungs.values() for part, rung in of.items()}
            ):
                self.view.line(line)

    def _make_handles(self, pools: dict[str, Any]) -> None:
        config, record = self.config, self._material.record
        if record:
            self._fleet: Any = ReplayFleet(record, ray.put)
            self._scorer: Scorer = ReplayScorer(self._fleet, self._tell_scores)
            self._pusher: Any = ReplayPusher(self._learner, self._fleet)
        else:
            make_request = material.request_maker(config, self._material)
            self._fleet = RayFleet([], make_request, self._waits, config.deadlines.heartbeat_s)
            self._make_pusher()
            prompts = self._material.by_id
            self._scorer = self._rewards = RayScorer(pools, self._crew.node, prompts, self._replace_pool, self._tell_scores)
            watch = PoolWatch(self._rewards, self._waits, config.deadlines, still_s(config.reward), self.event)
            self._crew.spawn(watch.run())
        if config.shuffle_rewards:
            self._scorer = ShufflingScorer(self._scorer, config.seed)

    def _make_pusher(self) -> None:
        config = self.config
        self._crew: Crew = Crew(
            self._fleet,
            self._make_worker,
            self._waits,
            config.deadlines,
            self.event,
            has_place=self._launcher.has_place,
            tell=self.view.line,
        )
        self._pusher = RayPusher(
            self._learner,
            self._crew,
            self._waits,
            config.deadlines,
            self.event,
            dtype=config.model.dtype,
            tokens=FixedTokens(material.proof_rows(config, self._material), config.rollout.temperature),
            swap_waits=config.rollout.on_swap is OnSwap.finish,
        )
        if config.cluster.placement is Placement.colocated:
            cancel, deadlines = self._fleet.cancel_all, config.deadlines
            self._turns = Turns(self._learner, self._pusher, self._crew, cancel, self._waits, deadlines, self.event)

    def _make_workers(self) -> list[Worker]:
        return [self._make_worker(slot, 0) for slot in range(self.config.rollout.num_workers)]

    def _make_worker(self, slot: int, number: int) -> Worker:
        return self._launcher.rollout_worker(slot, replacement=number)

    async def _replace_pool(self, node: str, reason: str) -> tuple[str, Any] | None:
        successor = await self._launcher.next_pool(node)
        by = successor[0] if successor else None
        self.event("reward_pool_replaced", node=node, by=by, reason=reason)
        what = "made anew" if by == node else f"made anew on node {by}" if by else "left to the pools of other nodes"
        self.view.line(f"warning: the reward pool of node {node} was lost and is {what} ({reason})")
        return successor

    def _tell_scores(self, scored: Sequence[Scored]) -> None:
        for group in scored:
            evaluated = group.meta.visit.purpose is Purpose.EVAL
            self._recorder.scored(self._step + (not evaluated), [group])

    async def close(self) -> None:
        """Ends the actors, each within its deadline, gives their places back, and ends the files."""
        if hasattr(self, "_crew"):
            self._crew.close()
        if hasattr(self, "_fleet"):
            self._fleet.close()
        self._enter("closing")
        try:
            await close_actors(self._named_actors(), self._waits, self.config.deadlines.close_s)
            if hasattr(self, "_launcher"):
                await self._launcher.give_back()
        finally:
            if lost := self._recorder.close():  # which may hang with its disk: the watchdog ends the driver then
                self._miss(lost)
            self._watchdog.close()

    def _miss(self, what: str) -> None:
        self.unwritten.append(what)
        self.view.line(f"warning: could not be written: {what}")

    def _write_or_miss(self, path: Path, value: Any) -> None:
        try:
            write_json(path, value)
        except OSError as error:
            self._miss(f"{path.name} ({error.strerror or error})")

    def stop(self) -> bool:
        """Asks the loop to end on whole steps and the run to save them. False where neither goes on: the caller cancels."""
        if self._loop is None:
            return False
        self._stopping = True
        self._loop.stop()
        self._in_hand.limit()
        return True

    def what_stands(self) -> str:
        """What is left of a run that ends now, in words."""
        if self.checkpoint is None:
            return "no step was done" if self._step == 0 else f"none of its {self._step} steps is saved"
        if self._saved_step == self._step:
            return f"{self.checkpoint.name} is saved, the last whole step"
        return f"step {self._step} is not saved, {self.checkpoint.name} stands"

    def mark(self) -> Mark:
        """Where it stands."""
        counts, opened = dict(self._ledger.counts), self._ledger.open_visits()
        return Mark(self._step, self._version, self._incarnation, counts, opened, sum(self._seconds.values()))

    def add_time(self, stage: str, time_s: float) -> None:
        """For the summary."""
        self._seconds[stage] += time_s

    # ---- train ------------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Trains and returns why it ended. Whatever ends it, the last whole step is saved first where it can be: not by a learner that
        failed."""
        config = self.config
        if not self._held_out and (config.evaluation.before or config.evaluation.after or config.evaluation.every):
            why = "a fifth of a stratum rounds to none, or held_out_per_stratum is 0"
            self.view.line(
                "a replay has no engine, so no evaluation; `limen eval checkpoint_dir=...` evaluates what it leaves"
                if self._material.record
                else f"no held-out prompts, so no evaluation: {why}"
            )
        if config.evaluation.before and not self._resumed and self._held_out:
            await self._evaluate("before training")
        loop = Loop(
            self._settings(),
            self._ledger,
            (
                self._fleet,
                self._scorer,
                StagedLearner(self._turns or self._learner, self._enter),
                self._turns or self._pusher,
                self,
            ),
            self._selection(),
            self._waits,
            step=self._step,
            version=self._version,
            state=await self._read_state(),
        )
        self._loop = loop
        self._lag = LoopLag()
        self._enter("generate")
        try:
            reason = await self._in_hand.run(loop.run())
            if self._in_hand.abandoned:
                self.event("step_abandoned", step=loop.step + 1, weights_whole=loop.between_steps)
            if self._selftest and reason != "stopped":
                self.view.line(self._selftest.verdict())
            if loop.between_steps:  # a step that was abandoned may have changed the weights: the checkpoint before it stands
                await self._save()
        except SaveFailed:
            raise
        except Exception as error:
            if loop.between_steps and cause_of(error) is None:
                await self._save_or_tell()
            raise
        finally:
            self._loop = None
            self._lag.close()
        if reason != "stopped" and not self._stopping and config.evaluation.after and self._held_out:
            await self._to_engines()
            await self._evaluate("after training")
        return reason

    async def _read_state(self) -> LoopState | None:
        if self._resumed is None:
            return None
        return await self._start_wait(asyncio.to_thread(_loop_state, self._resumed), "disk", "groups of the checkpoint")

    def _settings(self) -> LoopSettings:
        config = self.config
        return LoopSettings(
            groups_per_step=config.batch.groups_per_step,
            max_lag=config.rollout.max_lag,
            oversample=config.rollout.oversample,
            max_visits_per_step=config.rollout.max_visits_per_step or DEFAULT_BATCHES_PER_STEP * config.batch.groups_per_step,
            when_short=config.rollout.when_short,
            late=config.rollout.late,
            max_token_lag=oldest_token(config.rollout) if config.rollout.late is Late.drop else None,
            max_failed_share=config.reward.max_failed_share,
            num_steps=self.num_steps,
            verifiers_s=functools.partial(longest_s, config.reward),
            deadlines=widened(config.deadlines) if self._turns else config.deadlines,
        )

    def _selection(self) -> Callable[[Sequence[Score]], Decision]:
        choice = self.config.selection
        return functools.partial(resolve_function(choice.name, SELECTIONS, "selection"), **choice.params)

    async def after_step(self, outcome: StepOutcome) -> None:
        """Observer of the loop: metrics, samples, evaluation and checkpoint where they are due."""
        self._step = step = outcome.batch.step
        self._version = outcome.batch.version + bool(outcome.batch.groups)
        metrics = outcome.metrics | {"time/loop_lag_s": self._lag.take()}
        if self._rewards is not None:
            metrics["verifier/num_lost"] = self._rewards.num_lost
        for name in ("generate", "prepare", "train", "push"):
            self._seconds[name] += metrics.get(f"time/{name}_s", 0.0)
        every = self.config.evaluation.every
        self._unrecorded = self.config.rollout.record and bool(outcome.batch.groups)
        try:
            told = asyncio.to_thread(step_metrics, outcome, self._material.by_id)
            metrics |= await self._wait(told, "recorder", f"metrics of step {step}", self.config.deadlines.checkpoint_s)
            await self._wait(
                self._recorder.groups(outcome), "recorder", f"samples of step {step}", self.config.deadlines.checkpoint_s
            )
            self._unrecorded = False
            if every and step % every == 0 and step < self.num_steps and self._held_out:
                metrics |= (await self._evaluate(f"step {step}")).metrics()
        finally:  # whatever fails here: the step is saved, so a resumed run does not write its row again
            self._recorder.metrics(step, self._version, self._pusher.digest, metrics)
        for warning in self._recorder.settle():
            self.view.line(f"warning: {warning}")
        if self._selftest:
            self._selftest.check(step, metrics)
        self._warn(step, metrics)
        self.view.step(step, metrics)
        self._enter("generate")
        if self.config.checkpoint.every and step % self.config.checkpoint.every == 0:
            await self._save_or_go_on()

    def _enter(self, stage: str) -> None:
        self.view.stage(stage)
        self._watchdog.enter(stage, self._step)

    def _named_actors(self) -> dict[str, Any]:
        return self._launcher.actors if hasattr(self, "_launcher") else {}

    def _depths(self) -> dict[str, Any]:
        depths: dict[str, Any] = {"visits": {str(state): count for state, count in self._ledger.num_by_state.items()}}
        if self._rewards is not None:
            depths |= {"fleet": self._fleet.depths(), "scoring": self._rewards.num_asked}
        return depths

    def event(self, name: str, **fields: object) -> None:
        self._recorder.event(name, **fields)

    def _warn(self, step: int, metrics: dict[str, float]) -> None:
        if metrics["time/loop_lag_s"] > LOOP_LAG_ALARM_S:
            self.event("loop_lag", step=step, lag_s=metrics["time/loop_lag_s"])
        self._watch, alarms = feed(self._watch, metrics)
        for alarm in alarms:
            self.event("alarm", step=step, **asdict(alarm))
            self.view.line(f"alarm: {alarm.text}: {alarm.advice} ({alarm.key})")
        if metrics.get("len/trunc_frac", 0.0) == 1.0 and step <= self._first_step + 2:
            self.view.line(
                f"warning: every completion of step {step} ran into rollout.max_new_tokens={self.config.rollout.max_new_tokens}: "
                "raise it, or check that the template and the model agree on the end token"
            )

    # ---- evaluate, save ---------------------------------------------------------------------------------------------

    async def _evaluate(self, title: str) -> Evaluation:
        self._enter("evaluate")
        started = time.monotonic()
        before = next(iter(self._evaluations.values()), None)
        evaluation = await evaluate(
            self._fleet,
            self._scorer,
            self._held_out,
            self._waits,
            num_samples=self.config.evaluation.num_samples,
            version=self._version,
            max_failed_share=self.config.reward.max_failed_share,
            deadline_s=self.config.deadlines.evaluate_s,
        )
        self._evaluations[self._version] = evaluation
        if self._saved_step == self._step:
            note = self._checkpoints.note(self._step, evaluation.pass_at_1)
            try:
                await self._wait(note, "disk", "the evaluation noted in the checkpoint", self.config.deadlines.checkpoint_s)
            except OSError as error:  # the checkpoint stands as it was
                self.event("checkpoint_failed", step=self._step, message=f"its held-out pass@1 could not be noted: {error}")
                self.view.line(f"warning: checkpoint {self._saved_step} does not count as evaluated: {error}")
        self._seconds["evaluate"] += time.monotonic() - started
        self._recorder.event("evaluated", title=title, **evaluation.as_json())
        for line in evaluation_lines(title, before, evaluation):
            self.view.line(line)
        return evaluation

    async def _save(self) -> None:
        """A checkpoint of the last whole step; nothing where it is saved already or nothing was trained, and nothing of a step whose
        record is not written: a run that went on from there would leave a hole in it. Raises SaveFailed."""
        if self._step not in (0, self._saved_step) and self._loop is not None and not self._unrecorded:
            with self._in_hand.saving():
                await self._save_step(self._step, self._loop)

    async def _save_step(self, step: int, loop: Loop) -> None:
        self._enter("checkpoint")
        started = time.monotonic()
        name, deadline_s = f"checkpoint of step {step}", self.config.deadlines.checkpoint_s
        try:
            groups = await self._held_groups(loop)
            held, copy = loop.state(), self._ledger.snapshot()
            state = self._state(held)  # all of the same moment, for groups come in meanwhile
            if self._turns:
                await self._turns.to_learner()
            await self._wait(self._pusher.hold(), "push", "new workers to be proven", self.config.deadlines.push_s)
            self.checkpoint = await self._wait(self._write(state, held, groups, copy), "learner", name, deadline_s)
        except (DeadlinePassed, RayError, OSError, RunStopped) as error:
            stands = f"{self.checkpoint.name} stands" if self.checkpoint else "there is none before it"
            reason = " ".join(words(error).split())[:MOST_CHARACTERS]
            raise SaveFailed(f"the {name} could not be written ({reason}); {stands}") from error
        finally:
            if not self._turns:  # there the push that follows ends the hold
                self._pusher.go_on()
        self._saved_step = step
        self._seconds["checkpoint"] += time.monotonic() - started
        self._recorder.event("checkpoint", step=step, folder=self.checkpoint.name)
        self._recorder.rewards()

    def _state(self, held: LoopState) -> dict[str, Any]:
        before = self._evaluations.get(0)
        return {
            "step": self._step,
            "version": self._version,
            "incarnation": self._incarnation,
            "ledger": self._ledger.state(),
            "loop": state_json(held),
            "made_with": _kind(self.config),
            "evaluation_before": before.as_json() if before else None,
            "seconds_by_stage": dict(self._seconds),
        }

    async def _held_groups(self, loop: Loop) -> dict[Address, Group]:
        """All that the loop holds, at the moment at which this returns: it gets more meanwhile, and forgets what lay on a lost node."""
        groups: dict[Address, Group] = {}
        while unread := [item for item in held_groups(loop.state()).values() if item.scored.address not in groups]:
            name, deadline_s = f"groups of the checkpoint of step {self._step}", self.config.deadlines.checkpoint_s
            read = asyncio.gather(*(group_at(item.scored.address) for item in unread))
            found = await self._wait(read, "rollout workers", name, deadline_s)
            loop.forget(item.scored for item, group in zip(unread, found, strict=True) if group is None)
            groups |= {item.scored.address: group for item, group in zip(unread, found, strict=True) if group is not None}
        return groups

    async def _write(
        self, state: dict[str, Any], held: LoopState, groups: dict[Address, Group], copy: Callable[[], dict[str, NDArray[Any]]]
    ) -> Path:
        by_order = {order: groups[item.scored.address] for order, item in held_groups(held).items()}
        lines = await asyncio.to_thread(lambda: "".join(json.dumps(row) + "\n" for row in state_rows(held, by_order)))
        texts = {GROUPS: lines, "config.yaml": await asyncio.to_thread(dump_config, self.config, redact=True)}
        arrays = await asyncio.to_thread(copy)  # no step closes while this is awaited
        evaluation = self._evaluations.get(state["version"])
        return await self._checkpoints.write(
            state, arrays, texts, self._learner.save, pass_at_1=evaluation.pass_at_1 if evaluation else None
        )

    async def _save_or_go_on(self) -> None:
        """A disk may be full for a while: one save that fails is told, a second one in a row ends the run."""
        try:
            await self._save()
            self._save_failed = False
        except SaveFailed as error:
            if self._save_failed or not isinstance(error.__cause__, (OSError, RayTaskError)):
                raise
            self._save_failed = True
            self.event("checkpoint_failed", step=self._step, message=str(error))
            self.view.line(f"warning: {error}; the run goes on and stops if the next one fails too")
        await self._to_engines()

    async def _to_engines(self) -> None:
        """After a checkpoint that took the devices from them."""
        if self._turns:
            await self._turns.to_engines(self._version)

    async def _save_or_tell(self) -> None:
        """Saves a run that is failing; a second failure must not hide the first."""
        try:
            await self._save()
        except SaveFailed as error:
            self.event("checkpoint_failed", step=self._step, message=str(error))

    async def _start_wait(self, awaitable: Any, owner: str, name: str) -> Any:
        return await self._wait(awaitable, owner, name, self.config.deadlines.start_s)

    async def _wait(self, awaitable: Any, owner: str, name: str, deadline_s: float) -> Any:
        return await self._waits.wait(awaitable, owner=owner, name=name, deadline_s=deadline_s)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def summarize(self, reason: str) -> None:
        """Writes summary.json and says how the run went, and what to type next."""
        before, after = self._evaluations.get(0), self._evaluations.get(self._version)
        best = self._checkpoints.best()
        self._write_or_miss(
            self.folder / "summary.json",
            {
                "exit_reason": reason,
                "step": self._step,
                "version": self._version,
                "incarnation": self._incarnation,
                "pass_at_1_before": before.pass_at_1 if before else None,
                "pass_at_1_after": after.pass_at_1 if after else None,
                "pass_at_1_by_stratum_before": before.pass_at_1_by_stratum if before else None,
                "pass_at_1_by_stratum_after": after.pass_at_1_by_stratum if after else None,
                "seconds_by_stage": dict(self._seconds),
                "num_groups_by_worker": dict(self._fleet.num_groups) if hasattr(self, "_fleet") else {},
                "visits": dict(self._ledger.counts),
                "checkpoint": self.checkpoint.name if self.checkpoint else None,
                "best_checkpoint": best.name if best else None,
            },
        )
        total = sum(self._seconds.values()) or 1.0
        shares = sorted(self._seconds.items(), key=lambda item: -item[1])
        if shares:
            self.view.line("time: " + ", ".join(f"{name} {s:.1f} s ({s / total:.0%})" for name, s in shares))
        self.view.line(f"run folder: {self.folder}")
        if self.checkpoint:
            self.view.line(f"next: limen sample checkpoint_dir={self.checkpoint}")
            self.view.line(f"      limen eval checkpoint_dir={self.checkpoint}")
            self.view.line(f"      limen train resume={self.folder} steps={self.num_steps + max(1, self.num_steps // 2)}")


def _kind(config: Config) -> dict[str, str]:
    """What a learner's saved state depends on, whatever the number of ranks and the ZeRO stage."""
    return {"model.dtype": config.model.dtype.value, "learner.optimizer.name": config.learner.optimizer.name.value}


def _check_kind(config: Config, resumed: Checkpoint) -> None:
    for key, value in _kind(config).items():
        saved = resumed.state["made_with"][key]
        if saved != value:
            raise ConfigError(f"resume={config.resume}: {key}={value}, but the run was saved with {saved}; {key}={saved} works")


def _loop_state(resumed: Checkpoint) -> LoopState:
    return read_state(resumed.state["loop"], resumed.group_rows(), ray.put)


class ShufflingScorer:
    """Shuffles the scores within each group, seeded by the visit: the control that must not learn (`shuffle_rewards`)."""

    def __init__(self, inner: Scorer, seed: int) -> None:
        self._inner = inner
        self._seed = seed

    async def score(self, finished: Sequence[Finished]) -> list[Scored]:
        return [self._shuffled(item) for item in await self._inner.score(finished)]

    def _shuffled(self, item: Scored) -> Scored:
        visit = item.meta.visit
        if visit.purpose is Purpose.EVAL:
            return item
        order = np.random.default_rng(sampling_seed(self._seed, visit, -1)).permutation(len(item.scores))
        return Scored(item.meta, item.address, tuple(item.scores[i] for i in order))


class StagedLearner:
    """The learner, telling which stage runs."""

    def __init__(self, inner: LearnerHandle, enter: Callable[[str], None]) -> None:
        self._inner = inner
        self._enter = enter

    async def fetch(self, batch: Batch) -> list[Kept]:
        self._enter("fetch")
        lost = await self._inner.fetch(batch)
        if lost:
            self._enter("generate")
        return lost

    async def prepare(self, batch: Batch) -> dict[str, float]:
        self._enter("prepare")
        return await self._inner.prepare(batch)

    async def train(self) -> StepReport:
        self._enter("train")
        report = await self._inner.train()
        self._enter("push")
        return report
