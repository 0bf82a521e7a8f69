"""The low-entropy tokens of a response against a slow sort, and the adaptive bonus by hand."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.entropy import EntropyState, adapt_entropy, initial_entropy_state, is_low_entropy, low_entropy_count

pytestmark = pytest.mark.timeout(60)


def test_counts_by_hand():
    """floor(q (n - 1)) + 1: at 0.8 of 1, 2, 5, 6 and 11 tokens 1, 1, 4, 5 and 9; none of none. 0.29 * 100 is 29, whatever float says."""
    assert low_entropy_count(torch.tensor([1, 2, 5, 6, 11, 0]), 0.8).tolist() == [1, 1, 4, 5, 9, 0]
    assert low_entropy_count(torch.tensor([101]), 0.29).tolist() == [30]
    assert low_entropy_count(torch.tensor([7, 7]), 1.0).tolist() == [7, 7]
    assert low_entropy_count(torch.tensor([7]), 0.0).tolist() == [1]
    with pytest.raises(ValueError, match="entropy_quantile"):
        low_entropy_count(torch.tensor([7]), 1.1)


def test_ties_nan_and_one_token():
    """Of equal entropies the earlier are low; NaN ranks highest; the token of a one-token response is low, even where it is NaN."""
    response = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    entropy = torch.tensor([1.0, 1.0, 1.0, 1.0, math.nan, math.nan, 5.0])
    assert is_low_entropy(entropy, response, 0.5).tolist() == [True, True, False, False, True, False, True]
    assert is_low_entropy(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.5).tolist() == []


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 12, width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=40), min_size=1, max_size=6),
    st.floats(0, 1),
    st.randoms(use_true_random=False),
)
def test_against_a_slow_sort_in_any_order_of_tokens(rows, quantile, random):
    tokens = [(i, entropy) for i, row in enumerate(rows) for entropy in row]
    random.shuffle(tokens)
    low = is_low_entropy(torch.tensor([e for _, e in tokens]), torch.tensor([i for i, _ in tokens]), quantile).tolist()
    for i, row in enumerate(rows):
        places = [place for place, (owner, _) in enumerate(tokens) if owner == i]
        count = int(low_entropy_count(torch.tensor([len(row)]), quantile))
        expected = sorted(places, key=lambda place: tokens[place][1])[:count]
        assert [place for place in places if low[place]] == sorted(expected)


def test_adaptive_entropy_by_hand():
    """beta 0.002, gain 0.01, target 0.3: at H = 0.2 it rises by 0.001, at 0.9 it would fall by 0.006 and stops at 0, far below at 0.01."""
    steer = {"target": 0.3, "gain": 0.01, "max_beta": 0.01}
    state = initial_entropy_state(0.002)
    assert adapt_entropy(state, 0.2, **steer).beta == pytest.approx(0.003)
    assert adapt_entropy(state, 0.9, **steer).beta == 0.0
    assert adapt_entropy(state, -2.0, **steer).beta == 0.01
    assert adapt_entropy(state, math.nan, **steer) is state
    assert EntropyState(**json.loads(json.dumps(asdict(state)))) == state
