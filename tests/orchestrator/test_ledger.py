"""The prompt ledger: orders, lengths, states, and what a checkpoint carries."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.schema import LastBatch
from orchestrator.ledger import Ledger, LedgerError, Length
from rollout.records import Purpose, Visit

TEN = [f"p{i}" for i in range(10)]


def make(ids=TEN, *, per_step=4, last=LastBatch.wrap, seed=0, shuffle=True, max_visits=None):
    length = Length(len(ids), per_step, last)
    return Ledger(ids, length=length, seed=seed, shuffle=shuffle, max_visits=max_visits)


def run_epochs(ledger: Ledger, per_step: int) -> list[list[str]]:
    """Steps of a loop that keeps and trains everything, until the data is used up."""
    steps = []
    while not ledger.used_up:
        budget = ledger.step_budget()
        picks = ledger.pick(per_step if budget is None else min(per_step, budget))
        for pick in picks:
            ledger.keep(pick.visit)
        ledger.train([pick.visit for pick in picks])
        steps.append([pick.visit.prompt_id for pick in picks])
    return steps


@pytest.mark.parametrize(
    ("last", "sizes", "times_seen"),
    [
        (LastBatch.keep, [4, 4, 2, 4, 4, 2], 2),  # B108: 3 steps an epoch, each row twice
        (LastBatch.drop, [4, 4, 4, 4], None),  # 2 steps an epoch, two rows an epoch skipped
        (LastBatch.wrap, [4, 4, 4, 4, 4], 2),
    ],
)
def test_two_epochs_of_ten_rows(last, sizes, times_seen):
    length = Length(10, 4, last)
    ledger = make(last=last, max_visits=length.visits(2))
    steps = run_epochs(ledger, 4)
    assert [len(step) for step in steps] == sizes
    assert length.steps(2) == len(sizes), "planned steps equal real ones"
    counts = Counter(prompt for step in steps for prompt in step)
    if times_seen:
        assert counts == dict.fromkeys(TEN, times_seen)
    else:
        assert sum(counts.values()) == 16
        assert max(counts.values()) <= 2


@pytest.mark.parametrize(("last", "steps"), [(LastBatch.keep, 14), (LastBatch.drop, 12)])
def test_planned_steps_of_fifty_prompts(last, steps):
    """B162: 7 steps an epoch with the partial one, 6 without; two mini-batches a step make it 28 and 24 updates."""
    assert Length(50, 8, last).steps(2) == steps


def test_epochs_have_their_own_order_and_skip_other_rows():
    ledger = make(last=LastBatch.drop, max_visits=Length(10, 4, LastBatch.drop).visits(6))
    steps = run_epochs(ledger, 4)
    epochs = [first + second for first, second in zip(steps[::2], steps[1::2], strict=True)]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len({frozenset(TEN) - frozenset(epoch) for epoch in epochs}) > 1


def test_the_order_depends_on_the_seed_alone():
    def order(seed, shuffle=True):
        return [pick.visit.prompt_id for pick in make(seed=seed, shuffle=shuffle).pick(10)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, shuffle=False) == TEN


def test_a_second_visit_has_the_next_number():
    ledger = make()
    numbers = [pick.visit for pick in ledger.pick(30)]
    assert Counter(visit.number for visit in numbers) == {0: 10, 1: 10, 2: 10}
    assert len(set(numbers)) == 30


def test_states_are_guarded():
    ledger = make()
    first, second = (pick.visit for pick in ledger.pick(2))
    with pytest.raises(LedgerError, match="is picked, needs kept"):
        ledger.train([first])
    ledger.keep(first)
    ledger.train([first])
    with pytest.raises(LedgerError, match="is not open"):
        ledger.drop(first, "late")
    ledger.drop(second, "zero_variance")
    assert ledger.num_open == 0
    assert ledger.counts == {"picked": 2, "kept": 1, "trained": 1, "dropped/zero_variance": 1}


def test_a_requeued_visit_keeps_number_and_place():
    ledger = make()
    picks = ledger.pick(3)
    ledger.keep(picks[0].visit)
    ledger.requeue(picks[1].visit, "lost")
    ledger.requeue(picks[0].visit, "surplus")
    assert ledger.num_open == 1
    assert ledger.pick(3)[:2] == picks[:2]
    assert ledger.counts == {"picked": 4, "kept": 0, "requeued/lost": 1, "requeued/surplus": 1}


@given(st.data())
def test_a_restored_ledger_goes_on_as_the_unbroken_one(data):
    """What was in flight at the checkpoint is picked again first, what was kept stays open; new picks follow the same order."""
    ledger = make(last=LastBatch.wrap)
    in_flight, kept = [], []
    for _ in range(data.draw(st.integers(0, 5))):
        for pick in ledger.pick(data.draw(st.integers(0, 7))):
            fate = data.draw(st.sampled_from(["in_flight", "drop", "keep", "train"]))
            if fate == "drop":
                ledger.drop(pick.visit, "x")
            elif fate == "in_flight":
                in_flight.append(pick)
            else:
                ledger.keep(pick.visit)
                if fate == "train":
                    ledger.train([pick.visit])
                else:
                    kept.append(pick)
    state = json.loads(json.dumps(ledger.state()))
    again = make(last=LastBatch.wrap)
    again.restore(state)
    assert again.num_open == len(kept)
    resumed = again.pick(len(in_flight) + 9)
    assert resumed[: len(in_flight)] == sorted(in_flight, key=lambda pick: pick.order)
    assert resumed[len(in_flight) :] == ledger.pick(9)
    again.train([pick.visit for pick in kept])
    assert again.counts["picked"] == ledger.counts["picked"]
    assert again.counts["kept"] == ledger.counts["kept"]
    assert again.counts["trained"] == ledger.counts["trained"] + len(kept)


def test_a_checkpoint_of_other_data_is_refused():
    ledger = make()
    ledger.pick(5)
    with pytest.raises(ConfigError, match="prompts that the data no longer has"):
        make(["q1", "q2", "q3", "q4"]).restore(ledger.state())


def test_visits_of_the_run_are_training_visits():
    assert {pick.visit.purpose for pick in make().pick(10)} == {Purpose.TRAIN}
    assert Visit("p0", 0, Purpose.TRAIN) != Visit("p0", 0, Purpose.EVAL)
