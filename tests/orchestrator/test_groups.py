"""Whole groups as JSON and back exactly, and a loop that is cut anywhere and goes on from what it had in hand."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.groups import group_json, read_group, read_state, state_json, state_rows
from orchestrator.ledger import Pick
from orchestrator.stages import Address, Judged, Kept, LoopState, Scored
from rollout.records import Completion, Consequence, Finish, Group, Outcome, Purpose, Score, Status, Visit, describe_group

FLOATS = st.floats(width=32, allow_nan=False)


def same(a, b):
    """Equal, arrays by dtype and bits, NaN equal to itself."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (math.isnan(a) and math.isnan(b)))


@st.composite
def completions(draw, index):
    n = draw(st.integers(1, 4))
    ints = st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    return Completion(
        index=index,
        token_ids=np.array(draw(ints), dtype=np.int32),
        roll_logp=np.array(draw(st.lists(FLOATS, min_size=n, max_size=n)), dtype=np.float32),
        loss_mask=np.array(draw(flags), dtype=np.bool_),
        versions=np.array(draw(ints), dtype=np.int32),
        mixed=np.array(draw(flags), dtype=np.bool_),
        text=draw(st.text()) + "\ud800\n\x00",
        finish=draw(st.sampled_from(Finish)),
    )


@st.composite
def scores(draw):
    maybe = st.none() | st.floats()
    return Score(
        draw(st.sampled_from(Status)),
        draw(st.sampled_from(Outcome)),
        draw(maybe),
        draw(maybe),
        draw(st.dictionaries(st.text(), st.floats(allow_nan=False))),
        draw(st.none() | st.text()),
        draw(st.floats(0, 10)),
        draw(st.text()),
        draw(st.dictionaries(st.text(), st.floats(allow_nan=False))),
        draw(st.sampled_from(Consequence)),
    )


@given(st.data())
def test_a_group_comes_back_exactly(data):
    visit = Visit(data.draw(st.text()), data.draw(st.integers(0, 9)), Purpose.TRAIN)
    group = Group(
        visit, np.array([1, 2], dtype=np.int32), tuple(data.draw(completions(i)) for i in range(2)), "rollout-0", 0.25, (7, 0)
    )
    scored = tuple(data.draw(scores()) for _ in range(2))
    pick = Pick(data.draw(st.integers(0, 99)), visit)
    row = json.loads(json.dumps(group_json(pick, scored, group)))
    assert same(read_group(row), (pick, scored, group))


def make_group(order, reason=None):
    visit = Visit(f"p{order}", order % 3, Purpose.TRAIN)
    completion = Completion(
        0,
        np.array([order, 5], dtype=np.int32),
        np.array([-0.1, -order / 3], dtype=np.float32),
        np.array([True, True]),
        np.array([order // 4] * 2, dtype=np.int32),
        np.array([False, False]),
        "7",
        Finish.STOP,
    )
    group = Group(visit, np.array([1, 2], dtype=np.int32), (completion,), "w", 0.5, (order,))
    score = Score(Status.OK, Outcome.RIGHT, 1.0, 1.0, {"a": 1.0}, "7", 0.1, "", {"a.seconds": 2.0}, Consequence.NONE)
    return group, Judged(Pick(order, visit), Scored(describe_group(group), Address([group], 0), (score,)), reason)


def test_what_the_loop_had_in_hand_comes_back():
    """One group kept in an earlier step, one kept in this one, one dropped in this one."""
    groups, judged = zip(
        *(make_group(order, reason) for order, reason in ((3, None), (8, None), (9, "zero_variance"))), strict=True
    )
    kept = tuple(Kept(j.pick, j.scored) for j in judged[:2])
    state = LoopState(kept, judged[1:], {"zero_variance": 1}, 5, None)
    rows = state_rows(state, {j.pick.order: group for j, group in zip(judged, groups, strict=True)})
    parcels = []
    back = read_state(
        json.loads(json.dumps(state_json(state))), json.loads(json.dumps(rows)), lambda parcel: parcels.append(parcel) or 77
    )
    assert len(parcels) == 1
    assert same(tuple(parcels[0]), groups)

    def moved(scored):
        return replace(scored, address=Address(77, [j.scored for j in judged].index(scored)))

    assert back.waiting == tuple(replace(k, scored=moved(k.scored)) for k in kept)
    assert back.judged == tuple(replace(j, scored=moved(j.scored)) for j in judged[1:])
    assert (back.dropped, back.num_picked, back.budget) == ({"zero_variance": 1}, 5, None)


def test_a_state_without_groups_puts_nothing_anywhere():
    state = LoopState((), (), {}, 0, 7)
    assert read_state(state_json(state), [], lambda parcel: pytest.fail("an empty parcel")) == state
