"""Advantages and sample weights against tables worked by hand and the numeric cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import Samples, grpo
from learner.weighting import none, sample_weights


def flat(groups):
    return [value for group in groups for value in group]


def make_samples(groups, *, dtype=torch.float64, valid=None):
    """Groups as lists; None is a member whose verifier gave no value, and reads as NaN."""
    group = torch.tensor([i for i, members in enumerate(groups) for _ in members], dtype=torch.int64)
    values = torch.tensor([math.nan if value is None else value for value in flat(groups)], dtype=dtype)
    return Samples(values, group, ~values.isnan() if valid is None else torch.tensor(valid))


def advantages(groups, **params):
    return grpo(make_samples(groups), **params).tolist()


@pytest.mark.parametrize(
    ("size", "right", "mode", "above", "below"),
    [
        (16, 1, "unbiased", 3.7500, -0.2500),
        (16, 8, "unbiased", 0.9682, -0.9682),
        (16, 15, "unbiased", 0.2500, -3.7500),
        (8, 1, "unbiased", 2.4749, -0.3536),
        (4, 1, "unbiased", 1.5, -0.5),
        (16, 1, "population", 3.8730, -0.2582),
        (16, 8, "population", 1.0, -1.0),
        (16, 15, "population", 0.2582, -3.8730),
        (8, 1, "population", 2.6458, -0.3780),
        (4, 1, "population", 1.7321, -0.5774),
        (16, 1, "none", 0.9375, -0.0625),
        (16, 8, "none", 0.5, -0.5),
        (16, 15, "none", 0.0625, -0.9375),
        (8, 1, "none", 0.875, -0.125),
        (4, 1, "none", 0.75, -0.25),
    ],
)
def test_table_0_2(size, right, mode, above, below):
    expected = [above] * right + [below] * (size - right)
    assert advantages([[1.0] * right + [0.0] * (size - right)], std_mode=mode) == pytest.approx(expected, abs=6e-5)


def test_case_b66_mean_and_std_within_the_group(numeric_cases):
    case = numeric_cases["B66-1"]
    rewards, expect = case["inputs"]["rewards"], case["expect"]
    centred = advantages(rewards, std_mode="none")
    assert centred == pytest.approx(flat(expect["centred"]), abs=expect["tolerance"])
    for kind in expect["one_of"]:
        mode = {"population": "population", "sample": "unbiased"}[kind["std"]]
        assert advantages(rewards, std_mode=mode) == pytest.approx(flat(kind["scaled"]), abs=expect["tolerance"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["unbiased", "population", "none"])
def test_cases_b68_equal_values_give_exactly_zero(numeric_cases, dtype, mode):
    inputs = numeric_cases["B68-2"]["inputs"]
    sizes = range(inputs["group_size_from"], inputs["group_size_to"] + 1)
    groups = [[value] * size for value in inputs["equal_reward_values"] for size in sizes]
    assert (grpo(make_samples(groups, dtype=dtype), std_mode=mode) == 0).all()


@pytest.mark.parametrize("mode", ["unbiased", "population", "none"])
def test_case_b70_group_of_one(numeric_cases, mode):
    case = numeric_cases["B70-1"]
    assert advantages(case["inputs"]["rewards"], std_mode=mode) == flat(case["expect"]["advantages"])
    assert advantages([[None, 1.0, None], [0.0, 1.0]], std_mode=mode)[:3] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("number", [1, 2])
def test_case_b73_dividing_by_std_is_an_option(numeric_cases, number):
    case = numeric_cases[f"B73-{number}"]
    mode = case["inputs"]["std"] if case["inputs"]["divide_by_std"] else "none"
    ours = torch.tensor(advantages(case["inputs"]["rewards"], std_mode=mode)).view(2, 8)
    assert ours.abs().amax(1).tolist() == pytest.approx(case["expect"]["largest_abs_advantage"], abs=case["expect"]["tolerance"])


def test_b59_members_without_a_value_are_left_out():
    groups = [[1.0, None, 0.0, 1.0], [1.0, math.nan, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]]
    ours = advantages(groups, std_mode="none")
    third = 1 / 3
    assert ours == pytest.approx([third, 0, -2 * third, third, third, 0, third, -2 * third, -0.75, 0.25, 0.25, 0.25])
    scaled = advantages(groups)
    assert np.isfinite(scaled).all()
    assert scaled[1] == scaled[5] == 0
    assert scaled[8:] == advantages(groups[2:])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=1, max_size=9), min_size=1, max_size=6),
    st.sampled_from([("unbiased", 1), ("population", 0)]),
    st.randoms(use_true_random=False),
)
def test_against_numpy_group_by_group_in_any_order(groups, mode, random):
    """Samples of one group need not lie together, and group numbers need not start at 0."""
    rows = [(1000 - 7 * i, value) for i, members in enumerate(groups) for value in members]
    random.shuffle(rows)
    number, values = zip(*rows, strict=True)
    valid = torch.tensor([value is not None for value in values])
    numbers = torch.tensor([value if value is not None else math.nan for value in values], dtype=torch.float64)
    ours = grpo(Samples(numbers, torch.tensor(number), valid), std_mode=mode[0])
    for i, (group, value) in enumerate(rows):
        members = np.array([other for g, other in rows if g == group and other is not None])
        if value is None or len(members) < 2:
            assert ours[i] == 0
        else:
            expected = (value - members.mean()) / (members.std(ddof=mode[1]) + 1e-6)
            assert float(ours[i]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_large_values_keep_their_differences():
    """1e6 + {0, 1}: the differences are exact, so the advantages are those of {0, 1}."""
    assert advantages([[1e6, 1e6 + 1, 1e6, 1e6]]) == advantages([[0.0, 1.0, 0.0, 0.0]])


def test_nothing_valid():
    assert advantages([[None, None]]) == [0.0, 0.0]


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="sample 1 is marked valid but its value is nan"):
        make_samples([[1.0, math.nan]], valid=[True, True])
    with pytest.raises(ValueError, match=r"Samples.group must be torch.int64 \[2\]"):
        Samples(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="std_mode must be unbiased, population or none, got 'sample'"):
        advantages([[1.0, 0.0]], std_mode="sample")
    with pytest.raises(ValueError, match="eps must be above 0"):
        advantages([[1.0, 0.0]], eps=0.0)


def test_weighting_none_is_one_on_every_valid_sample():
    samples = make_samples([[1.0, None, 0.0], [0.3, 0.7, None]])
    weight = sample_weights(none, samples, grpo(samples), {})
    assert weight.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_weights_have_mean_one_over_valid_samples():
    """|A| of (1,0,0,0) centred is (.75,.25,.25,.25), mean .375: weights (2, 2/3, 2/3, 2/3); the invalid member changes nothing."""
    samples = make_samples([[1.0, 0.0, 0.0, 0.0, None]])

    def magnitude(samples, advantage, *, power):
        return torch.where(samples.valid, advantage.abs() ** power, math.nan)

    weight = sample_weights(magnitude, samples, grpo(samples, std_mode="none"), {"power": 1.0})
    assert weight.tolist() == pytest.approx([2.0, 2 / 3, 2 / 3, 2 / 3, 0.0])
    level = sample_weights(magnitude, samples, grpo(samples, std_mode="none"), {"power": 0.0})
    assert torch.equal(level, sample_weights(none, samples, grpo(samples), {}))


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0])
def test_weights_without_sense_are_refused(bad):
    samples = make_samples([[1.0, 0.0]])

    def mine(samples, advantage):
        return torch.full_like(advantage, bad)

    with pytest.raises(ValueError, match="weighting mine gave a weight"):
        sample_weights(mine, samples, grpo(samples), {})
