"""What a run writes: metrics.jsonl, events.jsonl, rewards.json, samples, whole groups where asked, TensorBoard."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from configs.schema import LogConfig
from orchestrator.groups import group_json, score_json
from orchestrator.run_folder import JsonLines, write_json
from orchestrator.stages import Scored, StepOutcome
from orchestrator.worst import WorstSamples
from rollout.records import Group, Prompt, Purpose, Score

MAX_SAMPLE_CHARACTERS = 4000
MOST_FAILURES_TOLD = 5  # of a step, and of an evaluation; rewards.json has more


class Recorder:
    """The files of one run, of this incarnation."""

    def __init__(
        self, folder: Path, log: LogConfig, prompts: Mapping[str, Prompt], *, incarnation: int, record: bool, seed: int
    ) -> None:
        self._folder = folder
        self._prompts = prompts
        self._incarnation = incarnation
        self._record = record
        self._seed = seed
        self._samples_per_step = log.samples_per_step
        self._metrics = JsonLines(folder / "metrics.jsonl")
        self._events = JsonLines(folder / "events.jsonl")
        self._samples = JsonLines(folder / "samples" / "samples.jsonl", budget_bytes=int(log.samples_mib * 2**20))
        self._worst = WorstSamples()
        self.last_events: deque[tuple[float, str]] = deque(maxlen=10)  # time.time() and name, heartbeats aside
        self._told: dict[Purpose, Counter[int]] = {}  # failures told, by the step they came in
        self._board = SummaryWriter(str(folder / "tensorboard")) if log.tensorboard else None

    def event(self, name: str, **fields: object) -> None:
        """A line of events.jsonl."""
        if name != "heartbeat":
            self.last_events.append((time.time(), name))
        self._events.write({"time": time.time(), "incarnation": self._incarnation, "event": name, **fields})

    def metrics(self, step: int, version: int, weights: str, metrics: Mapping[str, float]) -> None:
        """The row of a step. ``weights`` is the digest of all weights that the engines run after it."""
        self._metrics.write({"step": step, "version": version, "incarnation": self._incarnation, "weights": weights, **metrics})
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

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
        """Some samples of the step, and every kept group whole with ``rollout.record``."""
        num_in_step = sum(len(scored.scores) for scored in outcome.seen)
        for scored, index in self._choose(outcome.seen, outcome.batch.step):
            group: Group = (await scored.address.parcel)[scored.address.place]
            row = self._sample(outcome.batch.step, group, scored.scores[index], index, num_in_step)
            if not self._samples.write(row):
                break
        if self._record and outcome.batch.groups:
            file = JsonLines(self._folder / "groups" / f"step-{outcome.batch.step:06d}.jsonl")
            for kept in outcome.batch.groups:
                group = (await kept.scored.address.parcel)[kept.scored.address.place]
                file.write(group_json(kept.pick, kept.scored.scores, group))
            file.close()

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
        write_json(self._folder / "rewards.json", {"incarnation": self._incarnation, **self._worst.as_json()})

    def close(self) -> None:
        self.rewards()
        for file in (self._metrics, self._events, self._samples):
            file.close()
        if self._board is not None:
            self._board.close()
