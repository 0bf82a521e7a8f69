"""Whole groups as lines of JSON, and back exactly: for ``rollout.record``, and for what a checkpoint carries into the resumed run.

A float32 is written as the shortest decimal of the double it equals, so it comes back bit for bit; Python's NaN and infinities are
kept by ``json`` under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.ledger import Pick
from orchestrator.stages import Address, Judged, Kept, LoopState, Scored
from rollout.records import Completion, Consequence, Finish, Group, Outcome, Purpose, Score, Status, Visit, describe_group


def score_json(score: Score) -> dict[str, Any]:
    """A score as it stands in files."""
    return {
        "value": score.value,
        "accuracy": score.accuracy,
        "status": score.status,
        "outcome": score.outcome,
        "parts": dict(score.parts),
        "extracted": score.extracted,
        "time_s": score.time_s,
        "detail": score.detail,
        "measures": dict(score.measures),
        "consequence": score.consequence,
    }


def group_json(pick: Pick, scores: Sequence[Score], group: Group) -> dict[str, Any]:
    """Everything about a scored group."""
    return {
        "order": pick.order,
        "prompt_id": group.visit.prompt_id,
        "visit": group.visit.number,
        "worker": group.worker,
        "time_s": group.time_s,
        "unfinished": list(group.unfinished),
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "completions": [
            {
                "index": c.index,
                "token_ids": c.token_ids.tolist(),
                "roll_logp": c.roll_logp.tolist(),
                "loss_mask": c.loss_mask.tolist(),
                "versions": c.versions.tolist(),
                "mixed": c.mixed.tolist(),
                "text": c.text,
                "finish": c.finish,
                "score": score_json(score),
            }
            for c, score in zip(group.completions, scores, strict=True)
        ],
    }


def read_group(row: Mapping[str, Any]) -> tuple[Pick, tuple[Score, ...], Group]:
    """What ``group_json`` was given."""
    visit = Visit(row["prompt_id"], row["visit"], Purpose.TRAIN)
    completions = tuple(_read_completion(c) for c in row["completions"])
    prompt = np.array(row["prompt_token_ids"], dtype=np.int32)
    group = Group(visit, prompt, completions, row["worker"], row["time_s"], tuple(row["unfinished"]))
    return Pick(row["order"], visit), tuple(_read_score(c["score"]) for c in row["completions"]), group


def _read_completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        index=row["index"],
        token_ids=np.array(row["token_ids"], dtype=np.int32),
        roll_logp=np.array(row["roll_logp"], dtype=np.float32),
        loss_mask=np.array(row["loss_mask"], dtype=np.bool_),
        versions=np.array(row["versions"], dtype=np.int32),
        mixed=np.array(row["mixed"], dtype=np.bool_),
        text=row["text"],
        finish=Finish(row["finish"]),
    )


def _read_score(row: Mapping[str, Any]) -> Score:
    named = {"status": Status(row["status"]), "outcome": Outcome(row["outcome"]), "consequence": Consequence(row["consequence"])}
    return Score(**{**row, **named})


# ---- what the loop had in hand --------------------------------------------------------------------------------------


def state_json(state: LoopState) -> dict[str, Any]:
    """The loop's state but for its groups."""
    return {"dropped": dict(state.dropped), "num_picked": state.num_picked, "budget": state.budget}


def held_groups(state: LoopState) -> dict[int, Judged]:
    """Every group of the state once, by the order of its pick."""
    held = {judged.pick.order: judged for judged in state.judged}
    return held | {kept.pick.order: Judged(kept.pick, kept.scored, None) for kept in state.waiting}


def state_rows(state: LoopState, groups: Mapping[int, Group]) -> list[dict[str, Any]]:
    """The groups of the state as rows; ``groups`` by the order of their picks."""
    waiting, judged = ({item.pick.order for item in items} for items in (state.waiting, state.judged))
    return [
        {"waiting": order in waiting, "judged": order in judged, "reason": item.reason}
        | group_json(item.pick, item.scored.scores, groups[order])
        for order, item in sorted(held_groups(state).items())
    ]


def read_state(state: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], put: Callable[[list[Group]], Any]) -> LoopState:
    """The state that ``state_json`` and ``state_rows`` tell of. ``put`` makes one parcel of its groups and returns the reference."""
    read = [read_group(row) for row in rows]
    parcel = put([group for _, _, group in read]) if read else None
    found = [
        Judged(pick, Scored(describe_group(group), Address(parcel, place), scores), row["reason"])
        for place, (row, (pick, scores, group)) in enumerate(zip(rows, read, strict=True))
    ]
    return LoopState(
        waiting=tuple(Kept(j.pick, j.scored) for j, row in zip(found, rows, strict=True) if row["waiting"]),
        judged=tuple(j for j, row in zip(found, rows, strict=True) if row["judged"]),
        dropped=state["dropped"],
        num_picked=state["num_picked"],
        budget=state["budget"],
    )
