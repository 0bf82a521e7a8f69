"""Batching: every sample exactly once, within the budget, the same on every rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.batching import Row, RowCost, cut_mini_batches, deal, fill_micro_batches, pack_rows, plan_micro_batches


def row(tokens, scored):
    return Row(np.array(tokens, dtype=np.int32), np.array(scored, dtype=bool))


def test_rows_are_padded_on_the_right_and_scored_tokens_point_one_back():
    packed = pack_rows([row([5, 6, 7], [0, 0, 1]), row([8, 9, 10, 11], [0, 1, 0, 1])])
    assert packed.input_ids.tolist() == [[5, 6, 7, 0], [8, 9, 10, 11]]
    assert packed.positions.tolist() == [1, 4, 6]  # the 6; the 8 and the 10, in rows of four
    assert packed.targets.tolist() == [7, 9, 11]
    assert packed.responses.tolist() == [0, 1, 1]
    assert packed.num_tokens == 7


def test_the_padding_micro_batch_is_one_token():
    packed = pack_rows([])
    assert (packed.input_ids.tolist(), packed.positions.tolist(), packed.num_tokens) == ([[0]], [0], 0)


def test_a_scored_first_token_is_refused():
    with pytest.raises(ValueError, match="no context"):
        pack_rows([row([1, 2], [1, 1])])


def test_the_budget_counts_padded_tokens():
    # Longest first: 6 alone (two rows of 6 would be 12), then 5 and 5 (10), then 4, 1 (8).
    assert fill_micro_batches([1, 5, 4, 6, 5], 10) == [[3], [1, 4], [2, 0]]


def test_a_row_over_the_budget_stands_alone():
    assert fill_micro_batches([3, 50, 4], 8) == [[1], [2, 0]]


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 5), st.integers(1, 100))
def test_a_plan_trains_every_sample_once_and_keeps_ranks_in_step(lengths, num_ranks, budget):
    plans = plan_micro_batches(lengths, [float(n) for n in lengths], num_ranks, budget)
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    for batch in (batch for plan in plans for batch in plan if len(batch) > 1):
        assert len(batch) * max(lengths[i] for i in batch) <= budget


@pytest.mark.parametrize(("num_samples", "num_ranks", "most"), [(5, 4, 2), (1, 2, 1), (9, 4, 3)])
def test_b127_uneven_numbers_of_samples(num_samples, num_ranks, most):
    hands = deal([7.0] * num_samples, num_ranks)
    assert sorted(i for hand in hands for i in hand) == list(range(num_samples))
    assert max(map(len, hands)) == most
    plans = plan_micro_batches([7] * num_samples, [7.0] * num_samples, num_ranks, tokens_per_micro_batch=14)
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(num_samples))
    assert {len(plan) for plan in plans} == {-(-most // 2)}


def test_dear_samples_are_spread():
    hands = deal([8, 1, 1, 7, 1, 6], 3)
    assert sorted(sum(np.array([8, 1, 1, 7, 1, 6])[hand]) for hand in hands) == [8, 8, 8]


def test_mini_batches_are_whole_groups_once_and_repeat_for_a_seed():
    cut = cut_mini_batches(10, 4, seed=3)
    assert sorted(np.concatenate(cut).tolist()) == list(range(10))
    assert sorted(map(len, cut)) == [2, 2, 3, 3]
    assert [c.tolist() for c in cut] == [c.tolist() for c in cut_mini_batches(10, 4, seed=3)]
    assert [c.tolist() for c in cut] != [c.tolist() for c in cut_mini_batches(10, 4, seed=4)]


@pytest.mark.parametrize(("num_groups", "expected"), [(3, 3), (1, 1), (0, 0)])
def test_fewer_groups_than_mini_batches_make_fewer_mini_batches(num_groups, expected):
    cut = cut_mini_batches(num_groups, 4, seed=0)
    assert len(cut) == expected
    assert all(len(c) for c in cut)


def test_the_cost_of_a_row():
    """Three tokens, two of them scored: 3 x 100, (1 + 2 + 3) x 10, 2 x 1000."""
    assert RowCost(per_token=100, per_pair=10, per_scored=1000).of(row([5, 6, 7], [0, 1, 1])) == 2360


def test_samples_are_dealt_by_cost_and_not_by_length():
    """One row of 8 tokens costs 8 + 36, rows of 4 cost 4 + 10: by length the rank with 8 would get a row of 4 as well."""
    lengths = [8, 4, 4, 4, 4]
    costs = [RowCost(per_token=1, per_pair=1, per_scored=0).of(row([1] * n, [0] * n)) for n in lengths]
    assert costs == [44, 14, 14, 14, 14]
    assert plan_micro_batches(lengths, costs, 2, 8) == [[[0], []], [[1, 2], [3, 4]]]
    assert deal(lengths, 2) == [[0, 3], [1, 2, 4]]
