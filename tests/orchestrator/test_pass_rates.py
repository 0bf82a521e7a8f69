"""Pass rates by prompt and stratum, against numbers worked by hand, exact fractions, and groups drawn from a known Beta."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.answers import SLOTS, AnswerCounts
from orchestrator.pass_rates import MAX_STRENGTH, MIN_STRENGTH, Observation, PassRates, bands, observe
from orchestrator.prompt_index import hash_text
from rollout.records import Consequence, Outcome, Score, Status


def rates_of(strata, *groups, half_life=math.inf):
    """``groups`` as (prompt, right, valid, version), added one by one."""
    rates = PassRates(np.array(strata, dtype=np.int32), max(strata) + 1, half_life)
    for prompt, right, valid, version in groups:
        rates.add(np.array([prompt]), np.array([right]), np.array([valid]), version)
    return rates


def test_without_data_the_prior_is_flat():
    np.testing.assert_allclose(rates_of([0, 1]).priors(5), [[1, 1], [1, 1]], rtol=1e-12)


def test_the_prior_of_a_few_groups_worked_by_hand():
    """Groups of four: 4, 0 and 2 right; one more of four as Beta(1, 1) makes it. W = 4, N = 16, X = 6 + 2 = 8, m = 1/2,
    Q = 4 + 0 + 1 + (1 + 3/3)/4 + 1 = 6.5; (6.5 - 4) / (1/4) = 10; rho = (10 - 4) / 12 = 1/2; strength 1: Beta(1/2, 1/2)."""
    rates = rates_of([0, 0, 0, 0], (0, 4, 4, 0), (1, 0, 4, 0), (2, 2, 4, 0))
    np.testing.assert_allclose(rates.priors(0), [[0.5, 0.5]], rtol=1e-12)
    # The prompts: (1/2 + x, 1/2 + n - x)
    np.testing.assert_allclose(rates.posteriors(np.arange(4), 0), [[4.5, 0.5], [0.5, 4.5], [2.5, 2.5], [0.5, 0.5]], rtol=1e-6)


def test_decay_worked_by_hand():
    """A half-life of 2: what version 0 showed weighs 1/2 at version 2 and 1/4 at version 4."""
    rates = rates_of([0], (0, 4, 4, 0), half_life=2.0)
    at_2 = rates.posteriors(np.array([0]), 2) - rates.priors(2)
    np.testing.assert_allclose(at_2, [[2.0, 0.0]], atol=1e-6)
    rates.add(np.array([0]), np.array([1]), np.array([4]), 2)
    at_4 = rates.posteriors(np.array([0]), 4) - rates.priors(4)
    np.testing.assert_allclose(at_4, [[1.0 + 0.5, 1.5]], atol=1e-6)
    np.testing.assert_allclose(rates.priors(400), [[1, 1]], rtol=1e-9), "and in the end nothing is known"


def test_taking_groups_out_worked_by_hand():
    """A half-life of 2. At version 2 the group of version 0 weighs 1/2, right and wrong, and goes; that of version 2 stays."""
    rates = rates_of([0, 0], (0, 3, 4, 0), (0, 1, 4, 2), (1, 4, 4, 2), half_life=2.0)
    np.testing.assert_allclose((rates.posteriors(np.array([0]), 2) - rates.priors(2)), [[1.5 + 1, 0.5 + 3]], atol=1e-6)
    rates.take_out(np.array([0]), np.array([3]), np.array([4]), np.array([0]), 2)
    alone = rates_of([0, 0], (0, 1, 4, 2), (1, 4, 4, 2), half_life=2.0)
    np.testing.assert_allclose(rates.posteriors(np.arange(2), 5), alone.posteriors(np.arange(2), 5), atol=1e-6)
    rates.take_out(np.array([0, 1]), np.array([1, 4]), np.array([4, 4]), np.array([2, 2]), 3)
    np.testing.assert_allclose(rates.posteriors(np.arange(2), 3), [[1, 1], [1, 1]], atol=1e-6)


def exact_prior(groups, size):
    """The docstring's formula in exact fractions, from the deviations themselves rather than from sums of squares."""
    # The group that Beta(1, 1) adds: mean 1/2, and the mean square of its x/n about any m is that of a beta-binomial with rho = 1/3.
    num = sum(n for _, n in groups) + size
    mean = (sum(Fraction(x) for x, _ in groups) + size / 2) / num
    spread = sum(n * (Fraction(x, n) - mean) ** 2 for x, n in groups)
    spread += size * (Fraction(1, 4) / size * (1 + (size - 1) / 3) + (Fraction(1, 2) - mean) ** 2)
    weight = len(groups) + 1
    rho = (spread / (mean * (1 - mean)) - weight) / (num - weight)
    strength = min(max(1 / rho - 1, MIN_STRENGTH), MAX_STRENGTH) if rho > 0 else MAX_STRENGTH
    return float(mean * strength), float((1 - mean) * strength)


@given(st.lists(st.integers(1, 16).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1, max_size=12))
def test_the_prior_is_that_of_exact_arithmetic(groups):
    rates = rates_of([0] * len(groups), *((i, x, n, 0) for i, (x, n) in enumerate(groups)))
    size = max(Fraction(2), Fraction(sum(n for _, n in groups), len(groups)))
    np.testing.assert_allclose(rates.priors(0)[0], exact_prior(groups, size), rtol=1e-6)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.4, 1.2), (6.0, 2.0), (10.0, 10.0)])
def test_the_prior_finds_the_beta_that_made_the_groups(a, b):
    rng = np.random.default_rng(7)
    size = 8 + rng.integers(-2, 3, 20000)
    right = rng.binomial(size, rng.beta(a, b, 20000))
    rates = PassRates(np.zeros(20000, dtype=np.int32), 1, 50.0)
    rates.add(np.arange(20000), right, size, 3)
    np.testing.assert_allclose(rates.priors(3)[0], [a, b], rtol=0.1)


def test_the_strength_of_a_prior_is_bounded():
    """Prompts that are all alike would make it as strong as all of them together; prompts that are all or nothing, worth nothing."""
    alike = rates_of([0] * 300, *((i, 4, 8, 0) for i in range(300)))
    np.testing.assert_allclose(alike.priors(0), [[MAX_STRENGTH / 2, MAX_STRENGTH / 2]], rtol=1e-6)
    apart = rates_of([0] * 300, *((i, 8 * (i % 2), 8, 0) for i in range(300)))
    np.testing.assert_allclose(apart.priors(0), [[MIN_STRENGTH / 2, MIN_STRENGTH / 2]], rtol=1e-6)


def test_a_stratum_learns_from_its_own_prompts_alone():
    rates = rates_of([0, 0, 1], (0, 8, 8, 0), (0, 7, 8, 1))
    prior = rates.priors(1)
    assert prior[0, 0] > prior[0, 1]
    np.testing.assert_allclose(prior[1], [1, 1], rtol=1e-12)


def test_groups_added_together_are_those_added_one_by_one():
    """Bit for bit, the same prompt twice among them; a group without a verdict says nothing."""
    rng = np.random.default_rng(1)
    prompts, valid = rng.integers(0, 10, 40), rng.integers(0, 9, 40)
    right = rng.integers(0, valid + 1)
    together, single = (PassRates(np.arange(10, dtype=np.int32) % 3, 3, 5.0) for _ in range(2))
    for version, of_step in enumerate(np.split(np.arange(40), 4)):
        together.add(prompts[of_step], right[of_step], valid[of_step], version)
        for i in of_step:
            single.add(prompts[i : i + 1], right[i : i + 1], valid[i : i + 1], version)
    for one, other in pairwise([rates.posteriors(np.arange(10), 9) for rates in (together, single)]):
        assert one.tobytes() == other.tobytes()


def test_bands_and_their_edges():
    """0.1 and 0.9 themselves are boundary cases."""
    assert bands(np.array([[0.99, 9.01], [1.0, 9.0], [1.0, 1.0], [9.0, 1.0], [9.01, 0.99]])).tolist() == [0, 1, 1, 1, 2]


# ---- what a group says ----------------------------------------------------------------------------------------------


def score(accuracy, extracted=None, status=Status.OK, consequence=Consequence.NONE):
    return Score(status, Outcome.NONE, accuracy, accuracy, {}, extracted, 0.0, "", {}, consequence)


def test_only_verdicts_count():
    """Half right counts as right; a timeout, and a zero put in place of one, say nothing of the prompt."""
    scores = [
        score(1.0, " 4 2\n"),
        score(0.5, "4 2"),
        score(0.0, "7"),
        score(0.0),
        score(None, status=Status.TIMEOUT),
        score(0.0, "9", consequence=Consequence.ZERO),
    ]
    assert observe(scores) == Observation(2, 4, (hash_text("4 2"), hash_text("4 2"), hash_text("7")))


def test_answers_are_counted_and_the_rare_ones_together():
    answers = AnswerCounts(3)
    answers.add([1], [[*range(8), 0, 0]])  # 0 three times, 1 to 7 once each: full
    assert answers.of(1) == ({0: 3} | dict.fromkeys(range(1, 8), 1), 0)
    answers.add([1], [[100]])  # not above the rarest
    assert answers.of(1)[1] == 1
    answers.add([1], [[2**64 - 1] * 2 + [7]])  # takes the place of answer 1, the first of the rarest
    kept, others = answers.of(1)
    assert kept == {0: 3, 2**64 - 1: 2, 7: 2} | dict.fromkeys(range(2, 7), 1)
    assert others == 2
    assert answers.of(0) == answers.of(2) == ({}, 0)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=8), max_size=30))
def test_no_answer_is_lost(groups):
    """Kept and others add up to what was given; nothing is overstated; a prompt with at most eight answers keeps each exactly."""
    answers, given = AnswerCounts(3), {prompt: [] for prompt in range(3)}
    for group in groups:
        by_prompt = [[answer for of, answer in group if of == prompt] for prompt in range(3)]
        answers.add(range(3), by_prompt)
        for prompt, of_prompt in enumerate(by_prompt):
            given[prompt] += of_prompt
    for prompt, all_given in given.items():
        kept, others = answers.of(prompt)
        assert sum(kept.values()) + others == len(all_given)
        assert len(kept) <= SLOTS
        assert all(count <= all_given.count(answer) for answer, count in kept.items())
        if len(set(all_given)) <= SLOTS:
            assert kept == {answer: all_given.count(answer) for answer in set(all_given)}


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=20),
    st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=6),
    st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=6),
)
def test_answers_that_do_not_stand_are_taken_out(standing, void, later):
    """The rest still adds up, and no answer is counted more often than it was given."""
    answers = AnswerCounts(1)
    answers.add([0] * len(void), void)
    answers.add([0] * len(standing), standing)
    answers.take_out([0] * len(void), void)
    answers.add([0] * len(later), later)
    given = [answer for group in [*standing, *later] for answer in group]
    kept, others = answers.of(0)
    assert sum(kept.values()) + others == len(given)
    assert all(count <= given.count(answer) for answer, count in kept.items())
    if len({answer for group in [*void, *standing, *later] for answer in group}) <= SLOTS:
        assert kept == {answer: given.count(answer) for answer in set(given)}
