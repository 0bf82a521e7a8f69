"""The ledger under any interleaving of what can happen to visits, with crashes, resumes and rollbacks between: in the history that led to
the present state each visit was trained at most once, none is lost, and no more are open than may be."""

from __future__ import annotations

import copy
import io
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.schema import LastBatch, LedgerConfig
from orchestrator.ledger import Ledger, LedgerError, Length, State, read_entry
from orchestrator.pass_rates import Observation

IDS, STRATA = [f"p{i}" for i in range(7)], list("aabbccc")
BOUND = 6  # visits that may be open


class LedgerHistory(RuleBasedStateMachine):
    """``ended``, by the order of the picks, and ``at`` are a plain model of what the ledger holds; both go back with it."""

    @initialize(max_visits=st.sampled_from([None, 12, 40]), last=st.sampled_from(LastBatch))
    def start(self, max_visits, last):
        self.made = {"length": Length(len(IDS), 3, last), "max_visits": max_visits}
        self.seen = {}  # order -> visit, over all histories
        self.ended = {}  # order -> trained or dropped, in this one
        self.at = {}  # order -> state of an open visit
        self.steps = 0
        self.of_step = {}  # order -> reason, of the drops of the step in hand
        self.shown = {}  # order -> (right, answer), of the groups scored in it
        self.known = {}  # order -> (right, answer, step), of those taken up that stand
        self.void = set()  # orders of those that no longer do: they go when the step ends
        self.ledger = self.make()
        self.saved = [self.snapshot()]

    def make(self):
        return Ledger(IDS, STRATA, LedgerConfig(), seed=3, shuffle=True, **self.made)

    def visit(self, order):
        return self.seen[order]

    def choose(self, data, *states):
        orders = sorted(order for order, state in self.at.items() if state in states)
        return data.draw(st.sampled_from(orders)) if orders else None

    # ---- what happens to visits

    @rule(count=st.integers(0, BOUND))
    def picks(self, count):
        count = min(count, BOUND - self.ledger.num_open)
        budget = self.ledger.step_budget()
        for pick in self.ledger.pick(count if budget is None else min(count, budget)):
            assert pick.order not in self.ended
            assert pick.order not in self.at
            assert self.seen.setdefault(pick.order, pick.visit) == pick.visit, "the same order is the same visit in every history"
            self.at[pick.order] = State.PICKED

    @rule(data=st.data(), right=st.integers(0, 4), answer=st.integers(0, 20))
    def goes_on(self, data, right, answer):
        order = self.choose(data, *list(State)[:-1])
        if order is None:
            return
        state = self.at[order]
        match state:
            case State.PICKED:
                self.ledger.run([self.visit(order)])
            case State.RUNNING:
                self.ledger.finish(self.visit(order))
            case State.FINISHED:
                self.ledger.score(self.visit(order), Observation(right, 4, (answer,)))
                self.shown[order] = (right, answer)
            case State.SCORED:
                self.ledger.keep(self.visit(order))
        self.at[order] = list(State)[list(State).index(state) + 1]

    @rule()
    def all_that_run_are_kept(self):
        for order, state in self.at.items():
            for place in range(list(State).index(state), len(State) - 1):
                (
                    lambda visit: self.ledger.run([visit]),
                    self.ledger.finish,
                    lambda visit: self.ledger.score(visit, Observation(1, 4, (3,))),
                    self.ledger.keep,
                )[place](self.visit(order))
                if place == 2:
                    self.shown[order] = (1, 3)
            self.at[order] = State.KEPT

    @rule(data=st.data())
    def drops(self, data):
        order = self.choose(data, *State)
        if order is not None:
            self.ledger.drop(self.visit(order), "x")
            del self.at[order]
            self.ended[order] = "dropped"
            self.of_step[order] = "x"

    @rule(count=st.integers(1, 4))
    def trains(self, count):
        batch = sorted(order for order, state in self.at.items() if state is State.KEPT)[:count]
        self.ledger.train([self.visit(order) for order in batch])
        for order in batch:
            del self.at[order]
            assert order not in self.ended
            self.ended[order] = "trained"

    @rule(data=st.data(), reason=st.sampled_from(["lost_worker", "lost_node", "unproven", "surplus"]))
    def is_asked_again(self, data, reason):
        order = self.choose(data, *State)
        if order is not None:
            self.ledger.requeue(self.visit(order), reason)
            self.is_void(order)
            del self.at[order]

    def is_void(self, order):
        if self.shown.pop(order, None) is None and order in self.known:
            self.void.add(order)

    @rule(data=st.data())
    def surplus_is_taken_back(self, data):
        order = data.draw(st.sampled_from(sorted(self.of_step))) if self.of_step else None
        if order is not None:
            pick = next(entry.pick for entry, _ in self.ledger._dropped.values() if entry.pick.order == order)
            self.ledger.take_back(pick, self.of_step.pop(order), "surplus")
            del self.ended[order]
            self.is_void(order)

    @rule()
    def the_step_ends(self):
        self.steps += 1
        self.ledger.close_step(self.steps)
        self.of_step.clear()
        for order in self.void:
            del self.known[order]
        self.known |= {order: (*shown, self.steps) for order, shown in self.shown.items()}
        self.void.clear()
        self.shown.clear()

    # ---- what is not allowed

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), move=st.sampled_from(["run", "finish", "score", "keep", "train", "drop", "requeue"]))
    def what_has_ended_does_not_move(self, data, move):
        visit = self.visit(data.draw(st.sampled_from(sorted(self.ended))))
        arguments = {"run": ([visit],), "train": ([visit],), "score": (visit, Observation(0, 4, ()))}
        with pytest.raises(LedgerError, match="is not open"):
            getattr(self.ledger, move)(*arguments.get(move, (visit, "x") if move in ("drop", "requeue") else (visit,)))

    # ---- checkpoints, crashes, rollbacks

    def snapshot(self):
        file = io.BytesIO()
        np.savez(file, **self.ledger.arrays())
        model = (self.ended, self.at, self.steps, self.of_step, self.shown, self.known, self.void)
        return json.dumps(self.ledger.state()), file.getvalue(), copy.deepcopy(model)

    @rule()
    def saves(self):
        self.saved.append(self.snapshot())

    @rule(data=st.data(), alive=st.booleans())
    def goes_back(self, data, alive):
        """To the newest checkpoint or, where that is damaged, an earlier one: in the same process, or after a crash in another."""
        del self.saved[data.draw(st.integers(max(1, len(self.saved) - 2), len(self.saved))) :]
        state, arrays, model = self.saved[-1]
        self.ended, at, self.steps, self.of_step, self.shown, self.known, self.void = copy.deepcopy(model)
        self.ledger = self.ledger if alive else self.make()
        with np.load(io.BytesIO(arrays)) as loaded:
            self.ledger.restore(json.loads(state), dict(loaded))
        self.at = {order: state for order, state in at.items() if state is State.KEPT}
        for order in at.keys() - self.at.keys():
            self.is_void(order)
        if not alive:
            assert {name: array.tobytes() for name, array in self.ledger.arrays().items()} == {
                name: array.tobytes() for name, array in np.load(io.BytesIO(arrays)).items()
            }

    # ---- what holds at any time

    @invariant()
    def each_visit_is_in_one_place(self):
        state = self.ledger.state()
        opened = {entry.pick.order: entry for entry in map(read_entry, state["open"])}
        again = [read_entry(row).pick.order for row in state["again"]]
        assert {order: entry.state for order, entry in opened.items()} == self.at
        assert again == sorted(set(again))
        assert sorted([*opened, *again, *self.ended]) == list(range(state["num_picks"])), "none is lost, none is twice"

    @invariant()
    def no_more_are_open_than_may_be(self):
        assert self.ledger.num_open == len(self.at) == self.ledger.num_by_state.total() <= BOUND
        max_visits = self.made["max_visits"]
        assert max_visits is None or self.ledger.counts["picked"] <= max_visits

    @invariant()
    def the_counts_are_those_of_this_history(self):
        counts = self.ledger.counts
        assert counts["trained"] == sum(end == "trained" for end in self.ended.values())
        assert counts["dropped/x"] == sum(end == "dropped" for end in self.ended.values())
        assert counts["picked"] == self.ledger.state()["num_picks"]

    @invariant()
    def each_visit_that_stands_speaks_once(self):
        """Of every prompt what is known is what its groups said, weighed by their age: none twice, none that was asked again."""
        version = self.steps + 1
        a, b = (self.ledger.rates.posteriors(np.arange(len(IDS)), version) - self.prior(version)).T
        for place, prompt in enumerate(IDS):
            groups = [(shown, self.seen[order].prompt_id) for order, shown in self.known.items()]
            mine = [shown for shown, name in groups if name == prompt]
            weights = [2 ** (-(version - step) / LedgerConfig().half_life_versions) for _, _, step in mine]
            right = sum(w * right for w, (right, _, _) in zip(weights, mine, strict=True))
            assert a[place] == pytest.approx(right, abs=1e-4)
            assert a[place] + b[place] == pytest.approx(4 * sum(weights), abs=1e-4)
            kept, others = self.ledger.answers.of(place)
            assert sum(kept.values()) + others == len(mine)
            given = Counter(answer for _, answer, _ in mine)
            assert all(count <= given[answer] for answer, count in kept.items())

    def prior(self, version):
        return self.ledger.rates.priors(version)[self.ledger.rates.stratum]

    @invariant()
    def visits_of_a_prompt_are_numbered_without_gaps(self):
        num_picks = self.ledger.state()["num_picks"]
        for prompt in IDS:
            numbers = [self.seen[order].number for order in range(num_picks) if self.seen[order].prompt_id == prompt]
            assert numbers == list(range(len(numbers)))


LedgerHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestLedgerHistory = pytest.mark.timeout(120)(LedgerHistory.TestCase)
