"""The prompt ledger: orders, lengths, states, and what a checkpoint carries."""

from __future__ import annotations

import json
import sys
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.schema import LastBatch, LedgerConfig
from orchestrator import prompt_index
from orchestrator.ledger import Ledger, LedgerError, Length, State
from orchestrator.pass_rates import Observation
from rollout.records import Purpose, Visit

SEEN = Observation(1, 4, (7,))
TEN = [f"p{i}" for i in range(10)]


def make(ids=TEN, *, per_step=4, last=LastBatch.wrap, seed=0, shuffle=True, max_visits=None):
    length = Length(len(ids), per_step, last)
    strata = ["even" if i % 2 == 0 else "odd" for i in range(len(ids))]
    return Ledger(ids, strata, LedgerConfig(), length=length, seed=seed, shuffle=shuffle, max_visits=max_visits)


def advance(ledger, visits, to=State.KEPT, seen=SEEN):
    """Moves picked visits on to a state."""
    for visit in visits:
        moves = (
            (State.RUNNING, lambda v: ledger.run([v])),
            (State.FINISHED, ledger.finish),
            (State.SCORED, lambda v: ledger.score(v, seen)),
            (State.KEPT, ledger.keep),
        )
        for state, move in moves[: list(State).index(to)]:
            move(visit)
            assert ledger.num_by_state[state] > 0


def run_epochs(ledger: Ledger, per_step: int) -> list[list[str]]:
    """Steps of a loop that keeps and trains everything, until the data is used up."""
    steps = []
    while not ledger.used_up:
        budget = ledger.step_budget()
        picks = ledger.pick(per_step if budget is None else min(per_step, budget))
        advance(ledger, [pick.visit for pick in picks])
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


MOVES = {
    "run": (lambda ledger, visit: ledger.run([visit]), {State.PICKED}),
    "finish": (lambda ledger, visit: ledger.finish(visit), {State.RUNNING}),
    "score": (lambda ledger, visit: ledger.score(visit, Observation(0, 4, ())), {State.FINISHED}),
    "keep": (lambda ledger, visit: ledger.keep(visit), {State.SCORED}),
    "train": (lambda ledger, visit: ledger.train([visit]), {State.KEPT}),
    "drop": (lambda ledger, visit: ledger.drop(visit, "x"), set(State)),
    "requeue": (lambda ledger, visit: ledger.requeue(visit, "x"), set(State)),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", MOVES)
def test_a_move_is_made_from_its_own_states_alone(move, state):
    make_it, allowed = MOVES[move]
    ledger = make()
    visit = ledger.pick(1)[0].visit
    advance(ledger, [visit], state)
    before = (ledger.state(), Counter(ledger.counts))
    if state in allowed:
        make_it(ledger, visit)
        assert ledger.num_by_state[state] == 0
    else:
        with pytest.raises(LedgerError, match=rf"visit 0 of prompt {visit.prompt_id} is {state}, needs {min(allowed)}"):
            make_it(ledger, visit)
        assert (ledger.state(), ledger.counts) == before, "an illegal move changes nothing"


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("end", ["drop", "train", "requeue"])
def test_a_visit_that_has_ended_does_not_move(move, end):
    ledger = make()
    visit = ledger.pick(1)[0].visit
    advance(ledger, [visit])
    MOVES[end][0](ledger, visit)
    with pytest.raises(LedgerError, match="is not open"):
        MOVES[move][0](ledger, visit)


def test_of_a_batch_all_are_trained_or_none():
    ledger = make()
    first, second = (pick.visit for pick in ledger.pick(2))
    advance(ledger, [first])
    with pytest.raises(LedgerError, match="is picked, needs kept"):
        ledger.train([first, second])
    assert ledger.counts["trained"] == 0
    assert ledger.num_open == 2


def test_what_became_of_visits_is_counted():
    ledger = make()
    first, second, third = (pick.visit for pick in ledger.pick(3))
    advance(ledger, [first, third])
    ledger.train([first])
    ledger.drop(second, "zero_variance")
    ledger.drop(third, "late")
    assert ledger.num_open == 0
    assert ledger.counts == {"picked": 3, "kept": 2, "trained": 1, "dropped/zero_variance": 1, "dropped/late": 1}


def test_a_requeued_visit_keeps_number_and_place():
    ledger = make()
    picks = ledger.pick(3)
    advance(ledger, [picks[0].visit])
    ledger.requeue(picks[1].visit, "lost")
    ledger.requeue(picks[0].visit, "surplus")
    assert ledger.num_open == 1
    assert ledger.pick(3)[:2] == picks[:2]
    assert ledger.counts == {"picked": 4, "kept": 0, "requeued/lost": 1, "requeued/surplus": 1}


def test_only_a_drop_of_the_step_in_hand_is_taken_back():
    ledger = make()
    one, two, _ = ledger.pick(3)
    advance(ledger, [one.visit, two.visit], State.SCORED)
    ledger.drop(one.visit, "x")
    ledger.drop(two.visit, "x")
    with pytest.raises(LedgerError, match="was not dropped for y in this step"):
        ledger.take_back(one, "y", "surplus")
    ledger.take_back(one, "x", "surplus")
    with pytest.raises(LedgerError, match="was not dropped for x in this step"):
        ledger.take_back(one, "x", "surplus")
    assert ledger.counts == {"picked": 3, "dropped/x": 1, "requeued/surplus": 1}
    ledger.close_step(0)
    assert seen_of(ledger, one.visit.prompt_id) == 0, "what it showed went with it"
    assert seen_of(ledger, two.visit.prompt_id) == 4
    with pytest.raises(LedgerError, match="was not dropped for x in this step"):
        ledger.take_back(two, "x", "surplus")
    assert ledger.pick(1) == [one]
    assert ledger.num_open == 2


def test_where_batches_are_kept_short_no_step_reaches_over_the_end_of_an_epoch():
    """Ten prompts, four a step, eight asked at once: what is surplus at the end of the first epoch is the last step's, and alone."""
    ledger = make(last=LastBatch.keep, max_visits=20)
    assert ledger.step_budget() == 10
    picks = ledger.pick(8)
    advance(ledger, [pick.visit for pick in picks[:4]])
    for pick in picks[4:]:
        ledger.requeue(pick.visit, "surplus")
    ledger.train([pick.visit for pick in picks[:4]])
    assert ledger.step_budget() == 6
    second = ledger.pick(6)
    assert [pick.order for pick in second] == [4, 5, 6, 7, 8, 9]
    advance(ledger, [pick.visit for pick in second[:5]])
    ledger.train([pick.visit for pick in second[:4]])
    assert ledger.step_budget() == 0, "one is kept and one runs, both of the first epoch"
    ledger.requeue(second[5].visit, "surplus")
    assert ledger.step_budget() == 1
    assert ledger.pick(1) == [second[5]]
    ledger.drop(second[5].visit, "x")
    ledger.train([second[4].visit])
    assert ledger.step_budget() == 10


def test_a_kept_group_that_is_asked_again_after_its_step_speaks_once():
    """An unproven engine made it: what it said is taken out as the next step closes, and what the second one says is taken up."""
    ledger = make()
    visit = ledger.pick(1)[0].visit
    advance(ledger, [visit], State.KEPT, Observation(3, 4, (5, 5, 6)))
    ledger.close_step(0)
    state, arrays = json.loads(json.dumps(ledger.state())), ledger.arrays()
    place = int(ledger.prompts.find([visit.prompt_id])[0])
    assert ledger.answers.of(place) == ({5: 2, 6: 1}, 0)

    ledger.requeue(visit, "unproven")
    ledger.pick(1)
    advance(ledger, [visit], State.KEPT, Observation(1, 4, (6, 7)))
    ledger.close_step(50)  # a half-life later
    assert ledger.answers.of(place) == ({6: 1, 7: 1}, 0)
    once = make()
    assert once.pick(1)[0].visit == visit
    advance(once, [visit], State.KEPT, Observation(1, 4, (6, 7)))
    once.close_step(50)
    np.testing.assert_allclose(ledger.rates.posteriors(np.arange(10), 60), once.rates.posteriors(np.arange(10), 60), atol=1e-6)
    ledger.train([visit])
    ledger.close_step(51)
    assert seen_of(ledger, visit.prompt_id, 51) == pytest.approx(4 * 2 ** (-1 / 50), abs=1e-5), "a trained one stays"

    resumed = make()  # from where it was kept: likewise
    resumed.restore(state, arrays)
    resumed.requeue(visit, "late")
    resumed.close_step(1)
    assert seen_of(resumed, visit.prompt_id, 1) == 0
    assert resumed.answers.of(place) == ({}, 0)


def test_a_drop_of_a_group_that_an_earlier_step_took_up_is_undone_whole():
    ledger = make()
    pick = ledger.pick(1)[0]
    advance(ledger, [pick.visit], State.KEPT, Observation(3, 4, (5,)))
    ledger.close_step(0)
    ledger.drop(pick.visit, "late")
    ledger.take_back(pick, "late", "unproven")
    assert ledger.counts["requeued/unproven"] == 1
    ledger.close_step(0)
    assert seen_of(ledger, pick.visit.prompt_id) == 0
    assert ledger.answers.of(int(ledger.prompts.find([pick.visit.prompt_id])[0])) == ({}, 0)


def test_visits_are_picked_while_a_checkpoint_is_copied():
    ledger = make()
    ledger.pick(3)
    before, copy = ledger.arrays(), ledger.snapshot()
    ledger.pick(12)
    after = copy()
    assert {name: array.tobytes() for name, array in after.items()} == {name: array.tobytes() for name, array in before.items()}
    assert after["num_visits"].tolist() == [1, 1, 1]


def seen_of(ledger, prompt_id, version=0):
    """Decayed completions behind a prompt's posterior."""
    place = ledger.prompts.find([prompt_id])
    prior = ledger.rates.priors(version)[ledger.rates.stratum[place]].sum()
    return round(float(ledger.rates.posteriors(place, version).sum() - prior), 6)


def test_what_a_step_shows_is_taken_up_when_it_closes_and_in_pick_order():
    """Whatever finishes first; and no group is judged by a posterior that holds its own result."""
    shown = {order: Observation(order % 5, 4, (order, 7)) for order in range(24)}
    ledgers = []
    for turn in (1, -1, 7):
        ledger = make()  # of ten prompts: 24 visits come back to each two or three times
        for version in range(2):
            picks = ledger.pick(12)
            before = ledger.rates.posteriors(np.arange(10), version).tobytes()
            for pick in picks[::turn] if abs(turn) == 1 else [picks[i * turn % 12] for i in range(12)]:
                advance(ledger, [pick.visit], State.SCORED, shown[pick.order])
            assert ledger.rates.posteriors(np.arange(10), version).tobytes() == before
            ledger.close_step(version)
            assert ledger.rates.posteriors(np.arange(10), version).tobytes() != before
            for pick in picks:
                ledger.drop(pick.visit, "x")
        ledgers.append(ledger)
    arrays = [{name: array.tobytes() for name, array in ledger.arrays().items()} for ledger in ledgers]
    assert arrays[0] == arrays[1] == arrays[2]
    assert ledgers[0].answers.of(0)[0][7] > 1


def test_visits_open_for_long_are_told_of_once():
    ledger = make()
    stuck = ledger.pick(2)
    for step in range(1, 25):
        others = ledger.pick(1)
        told = ledger.close_step(step)
        assert [entry.pick for entry in told] == (stuck if step == LedgerConfig().stuck_after_steps else [])
        ledger.drop(others[0].visit, "x")
        if step == 20:
            ledger.drop(stuck[0].visit, "x")


@given(st.data())
def test_a_restored_ledger_goes_on_as_the_unbroken_one(data):
    """What was in flight at the checkpoint is picked again first, what was kept stays open; new picks follow the same order, and what is
    known of every prompt is the same bit for bit, in the middle of a step too."""
    ledger = make(last=LastBatch.wrap)
    in_flight, kept = [], []
    for version in range(data.draw(st.integers(0, 5))):
        for pick in ledger.pick(data.draw(st.integers(0, 7))):
            fate = data.draw(st.sampled_from([*list(State)[:3], "drop", State.KEPT, "train"]))
            seen = Observation(data.draw(st.integers(0, 4)), 4, tuple(data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=4))))
            if fate == "drop":
                advance(ledger, [pick.visit], State.SCORED, seen)
                ledger.drop(pick.visit, "x")
            elif fate in (State.KEPT, "train"):
                advance(ledger, [pick.visit], State.KEPT, seen)
                if fate == "train":
                    ledger.train([pick.visit])
                else:
                    kept.append(pick)
            else:
                advance(ledger, [pick.visit], fate)
                in_flight.append(pick)
        if data.draw(st.booleans()):
            ledger.close_step(version)
    state, arrays = json.loads(json.dumps(ledger.state())), ledger.arrays()
    again = make(last=LastBatch.wrap)
    again.restore(state, arrays)
    assert again.num_open == len(kept)
    for one in (ledger, again):
        one.close_step(9)
    assert {name: array.tobytes() for name, array in again.arrays().items()} == {
        name: array.tobytes() for name, array in ledger.arrays().items()
    }
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
    with pytest.raises(ConfigError, match="knows 5 prompts that the data no longer has, of 5 that were asked"):
        make(["q1", "q2", "q3", "q4"]).restore(ledger.state(), ledger.arrays())


def test_data_may_come_in_another_order_and_with_more_prompts():
    """Numbers and rates belong to the prompts, by their ids; a stratum that is new starts from Beta(1, 1)."""
    ledger = make()
    picks = ledger.pick(6)
    advance(ledger, [pick.visit for pick in picks], State.SCORED)
    ledger.close_step(3)
    other = Ledger(
        ["new", *TEN[::-1]],
        ["third", *("odd" if i % 2 else "even" for i in range(9, -1, -1))],
        LedgerConfig(),
        length=Length(11, 4, LastBatch.wrap),
        seed=5,
        shuffle=True,
        max_visits=None,
    )
    other.restore(ledger.state(), ledger.arrays())
    for name in TEN:
        ours, theirs = (one.rates.posteriors(one.prompts.find([name]), 7) for one in (other, ledger))
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(other.rates.posteriors(np.array([0]), 7), [[1.0, 1.0]], rtol=1e-12)


def test_prompts_take_few_bytes():
    """Ten million prompts cost at most 10^7 times this: 480 MB with the list of their ids, and 1.1 GB more once each has been asked."""
    count, asked = 200_000, 50_000
    ids = [f"source/{i}" for i in range(count)]
    length = Length(count, 64, LastBatch.wrap)
    ledger = Ledger(ids, ["s"] * count, LedgerConfig(), length=length, seed=0, shuffle=True, max_visits=None)
    picks = ledger.pick(1)
    start = ledger.nbytes
    assert (start + sys.getsizeof(ids)) / count <= 48.5
    picks += ledger.pick(asked - 1)
    ledger.run([pick.visit for pick in picks])
    for pick in picks:
        ledger.finish(pick.visit)
        ledger.score(pick.visit, Observation(3, 8, (1, 2, 3, 4)))
        ledger.drop(pick.visit, "x")
    ledger.close_step(1)
    assert (ledger.nbytes - start) / asked <= 113
    assert sum(array.nbytes for array in ledger.arrays().values()) / asked <= 129, "and in a checkpoint"
    assert len(json.dumps(ledger.state())) < 200 * asked
    ledger.close_step(2)
    assert len(json.dumps(ledger.state())) < 1000, "where the state has no line for a prompt"


def test_two_ids_with_one_hash_are_refused(monkeypatch):
    monkeypatch.setattr(prompt_index, "hash_text", lambda text: 5 if text in ("p3", "p7") else int(text[1:]) + 100)
    with pytest.raises(ConfigError, match=r"the ids 'p3' and 'p7' have one 64-bit hash; give one of the two prompts another id"):
        make()


def test_an_id_that_occurs_twice_is_refused():
    with pytest.raises(ConfigError, match="the id 'p3' occurs twice"):
        make([*TEN, "p3"])


def test_an_unknown_id_is_none_of_the_run_even_where_its_hash_is(monkeypatch):
    ledger = make()
    assert ledger.prompts.find(TEN[::-1]).tolist() == list(range(9, -1, -1))
    with pytest.raises(KeyError, match="p10"):
        ledger.prompts.find(["p3", "p10"])
    monkeypatch.setattr(prompt_index, "hash_text", lambda text: xxhash.xxh3_64_intdigest(b"p3"))
    assert ledger.prompts.find(["p3"]).tolist() == [3]
    with pytest.raises(KeyError, match="another"):
        ledger.prompts.find(["another"])


def test_visits_of_the_run_are_training_visits():
    assert {pick.visit.purpose for pick in make().pick(10)} == {Purpose.TRAIN}
    assert Visit("p0", 0, Purpose.TRAIN) != Visit("p0", 0, Purpose.EVAL)
