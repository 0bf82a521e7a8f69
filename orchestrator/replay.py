"""Replay: the groups of a run made with ``rollout.record=true`` in place of engines and verifiers, in the order it trained them.

The loop is the same, at lag 0. Tokens keep the log-probabilities and versions they were recorded with, so what the learner says of
lag and mismatch is about them; a version of the source run is not this run's, whose policy goes its own way. No weights travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from configs.build import to_plain
from configs.errors import ConfigError
from configs.schema import Config
from orchestrator.groups import read_group
from orchestrator.handles import Lost, StepReport
from orchestrator.ranks import RayLearner
from orchestrator.stages import Address, Finished, Scored
from rollout.prompts import PromptSet
from rollout.records import Group, Prompt, Score, ScoredGroup, Visit, describe_group

# What must be as it was: the tokens' ids, log-probabilities and group size depend on it.
SAME_KEYS = (
    "model.path",
    "model.random_weights",
    "model.warm_start_file",
    "model.embedded",
    "batch.group_size",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.min_p",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a recorded group stands."""

    path: Path
    offset: int  # in bytes, of its line
    step: int  # that trained it


@dataclass(frozen=True, slots=True)
class Record:
    """The recorded groups of a run. They stay on the disk; what is held is where each stands, by an id of its own, in order."""

    folder: Path
    places: Mapping[str, Place]
    prompts: PromptSet  # one prompt a recorded group, under the group's id; neither answers nor strata are on record

    def read(self, group_id: str) -> tuple[Group, tuple[Score, ...]]:
        """The group under the visit it was recorded with, and its scores."""
        place = self.places[group_id]
        with place.path.open("rb") as file:
            file.seek(place.offset)
            _, scores, group = read_group(json.loads(file.readline()))
        return group, scores

    def step_groups(self, step: int | None = None) -> list[ScoredGroup]:
        """All groups that a step of the source run trained, or all there are."""
        wanted = [name for name, place in self.places.items() if step is None or place.step == step]
        return [ScoredGroup(*self.read(name)) for name in wanted]


def open_record(folder: Path, tokenizer: Any) -> Record:
    """The record of the run in ``folder``; ``tokenizer`` decodes the prompts. Raises ConfigError naming what is missing or broken."""
    last = _last_step(folder)
    files = [path for path in sorted((folder / "groups").glob("step-*.jsonl")) if _step_of(path) <= last]
    if not files:
        why = "holds no groups" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"rollout.source_run: {str(folder)!r} {why}; give the folder of a run that was made with rollout.record=true"
        )
    rows: dict[int, tuple[str, Place, list[int]]] = {}  # by pick order: a step that was done again after a crash is there twice
    for path in files:
        step, offset = _step_of(path), 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            try:
                row = json.loads(line)
                group_id = f"{row['prompt_id']}#{row['visit']}"
                rows[row["order"]] = (group_id, Place(path, offset, step), row["prompt_token_ids"])
                top = max((*row["prompt_token_ids"], *(i for c in row["completions"] for i in c["token_ids"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}, line {number}: is not a recorded group ({type(error).__name__}: {error})") from error
            if top >= len(tokenizer):
                raise ConfigError(
                    f"{path}, line {number}: token {top} is not in this model's vocabulary of {len(tokenizer)}; "
                    "set model.path to the model of the recorded run"
                )
            offset += len(line)
    in_order = sorted(rows.values(), key=lambda row: (row[1].step, row[1].offset))
    prompts = tuple(_prompt(group_id, ids, tokenizer) for group_id, _, ids in in_order)
    return Record(folder, {group_id: place for group_id, place, _ in in_order}, PromptSet(prompts, (), 0, 0))


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _last_step(folder: Path) -> float:
    """Of the run as it stands, by its last row. Files of later steps are of a history that it went back from."""
    path = folder / "metrics.jsonl"
    rows = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.is_file() else []
    return int(json.loads(rows[-1])["step"]) if rows else math.inf


def _prompt(group_id: str, ids: Sequence[int], tokenizer: Any) -> Prompt:
    source = group_id.partition("/")[0]
    return Prompt(group_id, source, source, tokenizer.decode(ids), np.asarray(ids, dtype=np.int32), None, None)


def check_source(config: Config) -> None:
    """Raises ConfigError where this run's model, group size or sampling is not that of the run it replays."""
    run = Path(config.rollout.source_run or "")
    path = run / "config.yaml"
    if not path.is_file():
        why = "has no config.yaml" if run.is_dir() else "does not exist"
        raise ConfigError(f"rollout.source_run: {str(run)!r} {why}; give the folder of a run made with rollout.record=true")
    source, mine = yaml.safe_load(path.read_text(encoding="utf-8")), to_plain(config)
    for key in SAME_KEYS:
        if key == "model.embedded" and config.model.path != "embedded":
            continue
        recorded, here = _at(source, key), _at(mine, key)
        for inner in recorded if isinstance(recorded, dict) else [None]:
            name, there, value = (key, recorded, here) if inner is None else (f"{key}.{inner}", recorded[inner], here.get(inner))
            if there != value:
                raise ConfigError(
                    f"{name}={value}: {run} was recorded with {name}={there}, and a replay needs the same; set that"
                )


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def check_length(record: Record, num_steps: int, groups_per_step: int) -> None:
    """Raises ConfigError where the record has fewer groups than the run would train."""
    there = len(record.places)
    if there < num_steps * groups_per_step:
        steps = there // groups_per_step
        works = f"steps={steps} works" if steps else f"batch.groups_per_step={there} with steps=1 works"
        raise ConfigError(
            f"steps={num_steps}, batch.groups_per_step={groups_per_step}: {record.folder} has {there} recorded groups, which are "
            f"{steps} steps; {works}"
        )


# ---- the handles of the loop ----------------------------------------------------------------------------------------


class ReplayFleet:
    """Answers every visit at once with the group recorded under its prompt's id."""

    def __init__(self, record: Record, put: Callable[[list[Group]], Any]) -> None:
        """``put`` makes one parcel of some groups and returns the reference."""
        self._record = record
        self._put = put
        self._finished: asyncio.Queue[list[Finished]] = asyncio.Queue()
        self._version = 0
        self.manned = asyncio.Event()
        self.manned.set()
        self.num_groups: Counter[str] = Counter()
        self.scores: dict[Visit, tuple[Score, ...]] = {}  # of what was given out and not yet scored

    def serve(self, version: int) -> None:
        """What is given out from now on counts as answers of this version: the loop takes none from before a visit was asked."""
        self._version = version

    async def submit(self, visits: Sequence[Visit]) -> None:
        read = await asyncio.to_thread(lambda: [self._record.read(visit.prompt_id) for visit in visits])
        groups = [replace(group, visit=visit) for (group, _), visit in zip(read, visits, strict=True)]
        metas = await asyncio.to_thread(lambda: [describe_group(group) for group in groups])
        metas = [replace(meta, min_version=self._version, max_version=self._version, time_s=0.0) for meta in metas]
        self.scores |= {visit: scores for (_, scores), visit in zip(read, visits, strict=True)}
        parcel = self._put(groups)
        self.num_groups["replay"] += len(groups)
        self._finished.put_nowait([Finished(meta, Address(parcel, place)) for place, meta in enumerate(metas)])

    async def next_finished(self) -> list[Finished]:
        return await self._finished.get()

    async def next_lost(self) -> Lost:
        return await asyncio.Future()  # there is nobody to lose

    async def cancel(self, visits: Sequence[Visit]) -> None:
        """Nothing is under way, and the loop leaves out what it no longer wants."""
        for visit in visits:
            self.scores.pop(visit, None)

    def close(self) -> None:
        """Nothing to end."""


class ReplayScorer:
    """The scores of the record."""

    def __init__(self, fleet: ReplayFleet, tell: Callable[[Sequence[Scored]], None]) -> None:
        self._fleet = fleet
        self._tell = tell

    async def score(self, finished: Sequence[Finished]) -> list[Scored]:
        scored = [Scored(item.meta, item.address, self._fleet.scores.pop(item.meta.visit)) for item in finished]
        self._tell(scored)
        return scored


class ReplayPusher:
    """Nothing is sent. The learner's weights are gathered once a step, for their digest alone."""

    def __init__(self, learner: RayLearner, fleet: ReplayFleet) -> None:
        self._learner = learner
        self._fleet = fleet
        self.digest = ""

    async def hold(self) -> None:
        """There is no worker to be proven."""

    def go_on(self) -> None:
        """Likewise."""

    async def push(self, version: int, report: StepReport | None = None) -> dict[str, float]:
        async with contextlib.aclosing(self._learner.buckets(version)) as buckets:
            async for _ in buckets:
                pass
        self.digest = f"{(await self._learner.manifest()).digest:016x}"
        self._fleet.serve(version)
        return {"push/num_replayed": 1.0}
