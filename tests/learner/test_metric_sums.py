"""Percentiles and parts from fixed bins: how near they come, and that merging is counting."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.metric_sums import NUM_BINS, MetricSums, collect_sums, log_bins

pytestmark = pytest.mark.timeout(60)


def histogram(logs):
    counts = torch.bincount(log_bins(torch.tensor(logs)), minlength=NUM_BINS)
    return collect_sums({}, {}, histograms={"x/{}": counts})


@settings(max_examples=200, deadline=None)
@given(st.floats(-20, 20, width=32))
def test_a_value_comes_back_within_two_per_cent_of_its_logarithm(log_value):
    read = math.log(histogram([log_value]).values()["x/p50"])
    assert abs(read - log_value) <= 0.02 * abs(log_value) + 3e-7


def test_one_and_zero_come_back_exactly():
    assert histogram([0.0]).values() == {"x/p01": 1.0, "x/p50": 1.0, "x/p99": 1.0}
    assert histogram([-math.inf]).values()["x/p50"] == 0.0


def test_percentiles_of_a_hundred_values_in_two_halves():
    """The values .01 .. 1.00: the smallest 1, 50 and 99 of them end at .01, .50 and .99."""
    logs = [math.log(i / 100) for i in range(1, 101)]
    whole, merged = histogram(logs), histogram(logs[::2]) + histogram(logs[1::2])
    assert merged.values() == whole.values()
    for name, exact in {"x/p01": 0.01, "x/p50": 0.5, "x/p99": 0.99}.items():
        assert math.log(whole.values()[name]) == pytest.approx(math.log(exact), rel=0.03)


def test_parts_of_equal_size_by_key():
    """Keys 1 1 1 2 2 3 4 4 with values 10 each where the key is 1, else the key: the first quarter is 10, the second (10 + 2) / 2,
    since half of it lies in the first bin, the third (2 + 3) / 2, the last 4."""
    keys, values = torch.tensor([1.0, 1, 1, 2, 2, 3, 4, 4]), torch.tensor([10.0, 10, 10, 2, 2, 3, 4, 4])
    bins = log_bins(keys)
    profile = torch.stack([torch.bincount(bins, minlength=NUM_BINS), torch.bincount(bins, weights=values, minlength=NUM_BINS)])
    read = collect_sums({}, {}, profiles={"x/by_key_quartile": profile}).values()
    assert list(read.values()) == pytest.approx([10.0, 6.0, 2.5, 4.0])


def test_spreads_by_hand():
    """1, 2, .5, 1: mean 1.125, squares 6.25 / 4, so std sqrt(1.5625 - 1.265625); (4.5)^2 / (4 * 6.25) = 0.81. Masked: 2 alone."""
    x, every = torch.tensor([1.0, 2.0, 0.5, 1.0]), torch.ones(4)
    sums = collect_sums({}, {}, {"x/{}": (x, every), "y/{}": (x, torch.tensor([0.0, 1.0, 0.0, 0.0])), "z/{}": (x, 0 * every)})
    assert sums.values() == pytest.approx(
        {"x/mean": 1.125, "x/std": 0.544862, "x/ess": 0.81, "y/mean": 2.0, "y/std": 0.0, "y/ess": 1.0}, abs=1e-6
    )
    assert (sums + sums).values() == pytest.approx(sums.values())


def test_a_small_spread_around_one_keeps_its_digits():
    """Ratios 1 - 1e-5 and 1 + 1e-5, as float64: std 1e-5."""
    x = torch.tensor([-1e-5, 1e-5], dtype=torch.float64) + 1
    assert collect_sums({}, {}, {"x/{}": (x, torch.ones(2))}).values()["x/std"] == pytest.approx(1e-5, rel=1e-4)


def test_bool_masks_hide_what_is_not_finite():
    x, mask = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([True, False, True])
    sums = collect_sums({"x": (x, mask)}, {"top": (x, mask), "none": (x, torch.zeros(3, dtype=torch.bool))})
    assert sums.values() == {"x": 2.0, "top": 3.0}
    assert (MetricSums({}, {}) + sums).values() == sums.values()
