"""What a run writes: metrics.jsonl, events.jsonl, rewards.json, samples, whole groups where asked, TensorBoard.

A disk that is full for a while costs no row: what it refuses waits and is written in order once there is room. It is told of at the
first step; the second one in a row ends the run, as with checkpoints. A step's whole groups do not wait: they may be many.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from configs.schema import LogConfig
from orchestrator.errors import RunStopped
from orchestrator.groups import group_json, score_json
from orchestrator.lost import group_at
from orchestrator.run_folder import JsonLines, json_line, write_json, write_whole
from orchestrator.stages import Kept, Scored, StepOutcome
from orchestrator.worst import WorstSamples
from rollout.records import Group, Prompt, Purpose, Score

REWARDS = "rewards.json"
MAX_SAMPLE_CHARACTERS = 4000
MOST_FAILURES_TOLD = 5  # of a step, and of an evaluation; rewards.json has more


class Recorder:
    """The files of one run, of this incarnation."""

    def __init__(
        self,
        folder: Path,
        log: LogConfig,
        prompts: Mapping[str, Prompt],
        *,
        incarnation: int,
        after_step: int,
        record: bool,
        seed: int,
    ) -> None:
        """``after_step`` is the one the incarnation goes on from: TensorBoard shows none of an earlier one's later steps."""
        self._folder = folder
        self._prompts = prompts
        self._incarnation = incarnation
        purge_step = after_step + 1 if incarnation else None
        self._record = record
        self._seed = seed
        self._samples_per_step = log.samples_per_step
        self._metrics = JsonLines(folder / "metrics.jsonl")
        self._events = JsonLines(folder / "events.jsonl")
        self._samples = JsonLines(folder / "samples" / "samples.jsonl", budget_bytes=int(log.samples_mib * 2**20))
        self._refused: dict[str, OSError] = {}  # by file, what the disk said last of what waits to be written
        self._step_refused = False  # the last step ended with something that waits
        self._warnings: list[str] = []
        self._worst = WorstSamples()
        self.last_events: deque[tuple[float, str]] = deque(maxlen=10)  # time.time() and name, heartbeats aside
        self._told: dict[Purpose, Counter[int]] = {}  # failures told, by the step they came in
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge_step) if log.tensorboard else None

    def event(self, name: str, **fields: object) -> None:
        """A line of events.jsonl."""
        if name != "heartbeat":
            self.last_events.append((time.time(), name))
        self._write(self._events, {"time": time.time(), "incarnation": self._incarnation, "event": name, **fields})

    def _write(self, file: JsonLines, row: Mapping[str, Any]) -> bool:
        """False where the file's byte budget is used up."""
        try:
            return file.write(dict(row))
        except OSError as error:
            self._refused[file.name] = error
            return True

    def settle(self) -> list[str]:
        """Once a step: writes what waits. Returns warnings. Raises RunStopped where a second step in a row ends with rows that wait."""
        left = self._unwritten()
        if left and self._step_refused:
            raise RunStopped(f"{left} could not be written at two steps in a row; make room and resume the run")
        self._step_refused = bool(left)
        if left:
            self._warnings.append(f"{left} could not be written and wait for room; the run stops if the next step ends like this")
            self.event("rows_wait", message=left)
        warnings, self._warnings = self._warnings, []
        return warnings

    def _unwritten(self) -> str:
        """What waits although it was tried once more, and why, in words; "" where nothing does."""
        for file in (self._metrics, self._events, self._samples):
            with contextlib.suppress(OSError):
                file.flush()
            if file.num_waiting == 0:
                self._refused.pop(file.name, None)
        if REWARDS in self._refused:
            self.rewards()
        if not self._refused:
            return ""
        rows = {file.name: file.num_waiting for file in (self._metrics, self._events, self._samples)}
        names = ", ".join(f"{n} row{'s' * (n != 1)} of {name}" if (n := rows.get(name)) else name for name in self._refused)
        return f"{names} ({_words(next(iter(self._refused.values())))})"

    def metrics(self, step: int, version: int, weights: str, metrics: Mapping[str, float]) -> None:
        """The row of a step. ``weights`` is the digest of all weights that the engines run after it."""
        row = {"step": step, "version": version, "incarnation": self._incarnation, "weights": weights, **metrics}
        self._write(self._metrics, row)
        if self._board is None:
            return
        try:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:  # of the thread that writes, which has ended by it
            self._board = None
            self._warnings.append(f"TensorBoard has no more of this run ({_words(error)}); metrics.jsonl has all of it")
            self.event("tensorboard_ended", step=step, reason=str(error))

    def scored(self, step: int, groups: Sequence[Scored]) -> None:
        """Takes up scores as they come in, so that a run which ends within a step tells of those that ended it. ``step``: the one
        being filled, or the last one done where the groups are of an evaluation."""
        for group in groups:
            visit = group.meta.visit
            for index, score in enumerate(group.scores):
                where = {"step": step, "purpose": visit.purpose, "visit": visit.number, "index": index}
                self._worst.add(visit.prompt_id, score, where)
                if not score.has_verdict and self._may_tell(step, visit.purpose):
                    told = {"prompt_id": visit.prompt_id, "status": score.status, "detail": score.detail}
                    self.event("verifier_failed", **where, **told)

    def _may_tell(self, step: int, purpose: Purpose) -> bool:
        told = self._told.get(purpose, Counter())
        self._told[purpose] = Counter({step: told[step] + 1})  # of earlier steps nothing is kept
        return told[step] < MOST_FAILURES_TOLD

    async def groups(self, outcome: StepOutcome) -> None:
        """Some samples of the step, and every kept group whole with ``rollout.record``. Raises RunStopped where these cannot be written:
        without them the record could not be replayed."""
        num_in_step = sum(len(scored.scores) for scored in outcome.seen)
        for scored, index in self._choose(outcome.seen, outcome.batch.step):
            group = await group_at(scored.address)
            if group is None:
                continue
            row = self._sample(outcome.batch.step, group, scored.scores[index], index, num_in_step)
            if not self._write(self._samples, row):
                break
        if self._record and outcome.batch.groups:
            found = [(kept, await group_at(kept.scored.address)) for kept in outcome.batch.groups]
            whole = [(kept, group) for kept, group in found if group is not None]
            if len(whole) < len(found):  # they were trained: only their record is lost with their node
                self.event("unrecorded", step=outcome.batch.step, num_groups=len(found) - len(whole))
            path = self._folder / "groups" / f"step-{outcome.batch.step:06d}.jsonl"
            try:
                await asyncio.to_thread(_write_groups, path, whole)
            except OSError as error:
                step = outcome.batch.step
                raise RunStopped(
                    f"the groups of step {step} could not be recorded ({error}), so the step is not saved either"
                ) from error

    def _choose(self, seen: Sequence[Scored], step: int) -> list[tuple[Scored, int]]:
        """Completions to write: in turn from every class of stratum and right or wrong."""
        classes: dict[tuple[str, bool], list[tuple[Scored, int]]] = defaultdict(list)
        for scored in seen:
            stratum = self._prompts[scored.meta.visit.prompt_id].stratum
            for index, score in enumerate(scored.scores):
                classes[(stratum, (score.accuracy or 0.0) >= 0.5)].append((scored, index))
        random = np.random.default_rng([self._seed, step])
        for members in classes.values():
            random.shuffle(members)
        chosen: list[tuple[Scored, int]] = []
        while len(chosen) < self._samples_per_step and any(classes.values()):
            for name in sorted(classes):
                if classes[name] and len(chosen) < self._samples_per_step:
                    chosen.append(classes[name].pop())
        return chosen

    def _sample(self, step: int, group: Group, score: Score, index: int, num_in_step: int) -> dict[str, Any]:
        prompt, completion = self._prompts[group.visit.prompt_id], group.completions[index]
        return {
            "step": step,
            "incarnation": self._incarnation,
            "prompt_id": prompt.id,
            "stratum": prompt.stratum,
            "visit": group.visit.number,
            "index": index,
            "num_written": self._samples_per_step,
            "num_in_step": num_in_step,
            "prompt": prompt.text[-MAX_SAMPLE_CHARACTERS:],
            "completion": completion.text[:MAX_SAMPLE_CHARACTERS],
            "num_tokens": completion.num_tokens,
            "finish": completion.finish,
            "answer": prompt.answer,
            "versions": sorted({int(v) for v in completion.versions}),
            **score_json(score),
        }

    def rewards(self) -> None:
        """rewards.json: the slowest samples of this incarnation, and the prompts whose verifier failed most often."""
        try:
            write_json(self._folder / REWARDS, {"incarnation": self._incarnation, **self._worst.as_json()})
            self._refused.pop(REWARDS, None)
        except OSError as error:
            self._refused[REWARDS] = error

    def close(self) -> str:
        """Returns in words what could not be written, and is lost now; "" where all is."""
        self.rewards()
        lost = self._unwritten()
        for file in (self._metrics, self._events, self._samples):
            file.close()
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                lost = "; ".join(filter(None, (lost, f"the end of TensorBoard's file ({_words(error)})")))
        return lost


def _write_groups(path: Path, whole: Sequence[tuple[Kept, Group]]) -> None:
    """All at once, in place of what a step that is done again had left."""
    path.parent.mkdir(exist_ok=True)
    write_whole(path, "".join(json_line(group_json(kept.pick, kept.scored.scores, group)) for kept, group in whole))


def _words(error: OSError) -> str:
    return error.strerror or str(error)
