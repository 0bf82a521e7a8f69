"""Advantages against tables worked by hand and the numeric cases."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.refusals import GROUP_RELATIVE
from learner.advantages import (
    ADVANTAGES,
    Samples,
    batch_norm,
    discounted_sums,
    dr_grpo,
    estimate,
    gdpo,
    grpo,
    is_group_relative,
    is_per_token,
    mad,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)

pytestmark = pytest.mark.timeout(60)


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


# ---- the other estimators -------------------------------------------------------------------------------------------


def full_samples(groups, **fields):
    """Samples with everything an estimator may ask for: accuracy is the value, each has as many tokens as its place tells."""
    samples = make_samples(groups)
    values = samples.values.nan_to_num(0.0)
    return replace(
        samples,
        accuracy=values,
        num_tokens=torch.arange(len(values)) % 3 + 1,
        parts={"right": samples.values, "form": samples.values.square()},
        part_weights={"right": 1.0, "form": 0.5},
        **fields,
    )


def test_section_2_8_rloo():
    assert rloo(make_samples([[1.0, 0.0, 0.0, 1.0]])).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize(("right", "above", "below"), [(1, 4.0, -0.5714), (4, 1.0, -1.0), (7, 0.5714, -4.0)])
def test_section_3_1_mad(right, above, below):
    ours = mad(make_samples([[1.0] * right + [0.0] * (8 - right)])).tolist()
    assert ours == pytest.approx([above] * right + [below] * (8 - right), abs=6e-5)
    assert sum(map(abs, ours)) == pytest.approx(8, abs=1e-4)


@pytest.mark.parametrize(
    ("size", "right", "population", "raw"),
    [(16, 1, 7.746, 1.875), (16, 8, 16, 8), (16, 15, 7.746, 1.875), (8, 1, 5.292, 1.75), (4, 1, 3.464, 1.5)],
)
def test_closed_forms_of_section_0_2(size, right, population, raw):
    p, group = right / size, [[1.0] * right + [0.0] * (size - right)]
    scaled, centred = np.array(advantages(group, std_mode="population")), dr_grpo(make_samples(group)).numpy()
    assert [scaled[0], scaled[-1]] == pytest.approx([math.sqrt((1 - p) / p), -math.sqrt(p / (1 - p))], abs=2e-5)
    assert [centred[0], centred[-1]] == pytest.approx([1 - p, -p])
    assert [np.abs(scaled).sum(), np.abs(centred).sum()] == pytest.approx([population, raw], abs=6e-4)
    assert np.abs(scaled).sum() == pytest.approx(2 * size * math.sqrt(p * (1 - p)), abs=2e-4)
    assert (scaled**2).sum() == pytest.approx(size, abs=2e-4)


def test_section_2_8_reinforce_pp():
    """Returns (1) and (0, 0, 0): mean 1/4, unbiased variance 1/4. The group mean does not matter without a baseline."""
    samples = replace(make_samples([[1.0, 0.0]]), num_tokens=torch.tensor([1, 3]))
    assert reinforce_pp(samples).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)
    # With the baseline: returns (1/2) and (-1/2) three times, mean -1/4, variance 1/4.
    assert reinforce_pp_baseline(samples).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)


def test_section_2_12_gdpo():
    """Part right (1,0,0,1): +-0.5 over unbiased std 0.57735, so +-0.866025. Part form (1,1,0,0) alike, at half the weight; the third
    part is constant and adds 0. Sums 1.299038, -0.433013, -1.299038, 0.433013: unbiased std 1.118034, whitened 1.161895 and 0.387298."""
    base = make_samples([[1.5, 0.5, 0.0, 1.0]])
    parts = {"right": [1.0, 0.0, 0.0, 1.0], "form": [1.0, 1.0, 0.0, 0.0], "same": [0.3] * 4}
    samples = replace(
        base, parts={k: torch.tensor(v) for k, v in parts.items()}, part_weights={"right": 1.0, "form": 0.5, "same": 9.0}
    )
    assert gdpo(samples, whitening=False).tolist() == pytest.approx([1.299038, -0.433013, -1.299038, 0.433013], abs=1e-5)
    assert gdpo(samples).tolist() == pytest.approx([1.161895, -0.387298, -1.161895, 0.387298], abs=1e-5)


def test_gdpo_part_that_did_not_judge():
    """The second sample has no `form`: the part's mean and std are those of the others, (1, 0): +-0.5 / 0.707107."""
    samples = replace(
        make_samples([[1.0, 0.0, 1.0]]),
        parts={"form": torch.tensor([1.0, math.nan, 0.0])},
        part_weights={"form": 1.0},
    )
    assert gdpo(samples, whitening=False).tolist() == pytest.approx([0.707106, 0, -0.707106], abs=1e-5)


def test_batch_norm_has_one_scale():
    """Centred (1/2, -1/2), (0, 0); std of (1, 0, 1, 1) is 1/2. A lone failure in a big group is not blown up."""
    assert batch_norm(make_samples([[1.0, 0.0], [1.0, 1.0]])).tolist() == pytest.approx([1, -1, 0, 0], abs=1e-5)


def test_reinforce_baselines():
    samples = make_samples([[1.0, None], [0.0, 0.5]])
    assert reinforce(samples).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert reinforce(samples, baseline="none").tolist() == [1.0, 0.0, 0.0, 0.5]


def test_kl_in_the_reward():
    """Values 1 and 0; tokens pay 0.1, and 0.2 and 0.3: returns 0.9 and -0.5. By token: (0.9), (-0.5, -0.3); discounted by half
    (0.9), (-0.35, -0.3)."""
    samples = replace(make_samples([[1.0, 0.0]]), num_tokens=torch.tensor([1, 2]), kl=torch.tensor([0.1, 0.2, 0.3]))
    assert dr_grpo(samples).tolist() == pytest.approx([0.7, -0.7])
    for gamma, expected in ((1.0, [0.9, -0.5, -0.3]), (0.5, [0.9, -0.35, -0.3])):
        exact = (np.array(expected) - np.mean(expected)) / np.std(expected, ddof=1)
        assert reinforce_pp(samples, gamma=gamma).numpy() == pytest.approx(exact, abs=1e-5)
    with pytest.raises(ValueError, match="gdpo normalises each reward part alone"):
        gdpo(samples)


def reference(name, rows, lengths, kl):
    """Every estimator again, group by group and token by token. ``rows`` are (group, value or None)."""
    valid = [i for i, (_, value) in enumerate(rows) if value is not None]
    starts = np.cumsum([0, *lengths])
    taken = [kl[starts[i] : starts[i + 1]].sum() for i in range(len(rows))]
    value = {i: rows[i][1] for i in valid}
    total = {i: value[i] - taken[i] for i in valid}
    mates = {i: [j for j in valid if rows[j][0] == rows[i][0]] for i in valid}
    everyone = np.array([total[i] for i in valid])
    out = np.zeros(len(rows))
    if name.startswith("reinforce_pp"):
        return reference_tokens(name, rows, lengths, kl, value, mates)
    for i in valid:
        members = np.array([total[j] for j in mates[i]])
        centred = total[i] - members.mean()
        deviation = np.abs(members - members.mean()).mean()
        out[i] = {
            "dr_grpo": centred,
            "rloo": total[i] - np.mean([total[j] for j in mates[i] if j != i]) if len(members) > 1 else 0.0,
            "mad": centred / (deviation + 1e-6),
            "batch_norm": centred / ((everyone.std(ddof=1) if len(valid) > 1 else 0.0) + 1e-6),
            "reinforce": total[i] - everyone.mean(),
        }[name]
    return out


def reference_tokens(name, rows, lengths, kl, value, mates):
    starts, out, place = np.cumsum([0, *lengths]), np.zeros(sum(lengths)), {}
    for i in value:
        if name == "reinforce_pp_baseline" and len(mates[i]) == 1:
            continue
        reward = value[i] - (np.mean([value[j] for j in mates[i]]) if name == "reinforce_pp_baseline" else 0.0)
        running = 0.0
        for t in reversed(range(starts[i], starts[i + 1])):
            running = (reward if t == starts[i + 1] - 1 else 0.0) - kl[t] + 0.9 * running
            place[t] = running
    if len(place) > 1:
        numbers = np.array(list(place.values()))
        for t, number in place.items():
            out[t] = (number - numbers.mean()) / math.sqrt(numbers.var(ddof=1) + 1e-8)
    return out


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("grpo", "gdpo")])
@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0, 3.0]))), min_size=1, max_size=14
    ),
    with_kl=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_against_loops_in_numpy(name, rows, with_kl, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, len(rows)).tolist()
    kl = rng.normal(size=sum(lengths)) * with_kl
    samples = Samples(
        torch.tensor([math.nan if value is None else value for _, value in rows]),
        torch.tensor([group for group, _ in rows]),
        torch.tensor([value is not None for _, value in rows]),
        num_tokens=torch.tensor(lengths),
        kl=torch.from_numpy(kl) if with_kl else None,
    )
    ours = ADVANTAGES[name](samples, **({"gamma": 0.9} if is_per_token(ADVANTAGES[name]) else {}))
    assert ours.dtype == torch.float32
    expected = reference(name, rows, lengths, kl)
    assert ours.numpy() == pytest.approx(expected, rel=1e-4, abs=2e-5)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), *[st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))] * 2), min_size=1, max_size=14
    ),
    whitening=st.booleans(),
)
def test_gdpo_against_loops_in_numpy(rows, whitening):
    """A row is (group, part a, part b); None is a part that did not judge. Without either the sample is not valid."""
    valid = np.array([a is not None or b is not None for _, a, b in rows])
    weights, out = {1: 2.0, 2: 0.5}, np.zeros(len(rows))
    for i, row in enumerate(rows):
        for part, weight in weights.items():
            mates = np.array([other[part] for other in rows if other[0] == row[0] and other[part] is not None])
            if row[part] is not None and len(mates) > 1:
                out[i] += weight * (row[part] - mates.mean()) / (mates.std(ddof=1) + 1e-6)
    if whitening and valid.sum() > 1:
        out[valid] = (out[valid] - out[valid].mean()) / (out[valid].std(ddof=1) + 1e-6)
    parts = {name: torch.tensor([math.nan if row[k] is None else row[k] for row in rows]) for name, k in (("a", 1), ("b", 2))}
    samples = Samples(
        torch.zeros(len(rows)),
        torch.tensor([row[0] for row in rows]),
        torch.from_numpy(valid),
        parts=parts,
        part_weights={"a": 2.0, "b": 0.5},
    )
    assert gdpo(samples, whitening=whitening).numpy() == pytest.approx(out, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_b59_invalid_members_are_as_if_absent(name):
    """Also where their tokens, parts and KL are NaN."""
    whole = full_samples([[1.0, None, 0.0, 1.0], [0.5, 0.25, None], [None], [0.0, 1.0, 1.0]])
    valid, of_token = whole.valid, whole.token_sample()
    garbage = torch.where(valid, 0.1, math.nan)
    kl = None if name == "gdpo" else garbage[of_token].float()
    whole = replace(whole, kl=kl, accuracy=torch.where(valid, whole.values, math.nan))
    alone = Samples(
        whole.values[valid],
        whole.group[valid],
        whole.valid[valid],
        num_tokens=whole.num_tokens[valid],
        parts={k: v[valid] for k, v in whole.parts.items()},
        part_weights=whole.part_weights,
        kl=None if kl is None else kl[valid[of_token]],
    )
    estimator = ADVANTAGES[name]
    ours, expected = estimator(whole), estimator(alone)
    kept = valid[of_token] if is_per_token(estimator) else valid
    assert torch.equal(ours[kept], expected)
    assert (ours[~kept] == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_the_samples_does_not_matter(name):
    whole = full_samples([[1.0, 0.2, 0.0, 1.0], [0.5, 0.25, None, 0.1], [0.0, 1.0, 1.0]])
    order = torch.randperm(len(whole.values), generator=torch.Generator().manual_seed(1))
    moved = replace(
        whole,
        **{f: getattr(whole, f)[order] for f in ("values", "group", "valid", "accuracy", "num_tokens")},
        parts={k: v[order] for k, v in whole.parts.items()},
    )
    ours, theirs = (estimate(ADVANTAGES[name], samples, {}).sample for samples in (whole, moved))
    assert theirs.numpy() == pytest.approx(ours[order].numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("grpo", 0),
        ("dr_grpo", 1),
        ("rloo", 1),
        ("mad", 0),
        ("batch_norm", 0),
        ("reinforce", 1),
        ("reinforce_pp", 0),
        ("reinforce_pp_baseline", 0),
    ],
)
def test_shift_and_scale(name, scale):
    """Adding 5 to all rewards changes nothing; eight times the rewards give eight times the advantage, or the same one."""
    groups = [[1.0, 0.25, 0.0, 1.0], [0.5, 0.25], [0.0, 1.0, 1.0]]
    estimator, samples = ADVANTAGES[name], full_samples(groups)
    base = estimator(samples)
    moved = estimator(replace(samples, values=samples.values * 8 + 5))
    assert moved.numpy() == pytest.approx((base * 8**scale).numpy(), abs=1e-4)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("reinforce", "reinforce_pp")])
def test_one_valid_member_gets_zero(name):
    """0.1 is not exact in binary: a mean that is off by a bit would show."""
    estimator = ADVANTAGES[name]
    samples = full_samples([[None, 0.1, None], [0.0, 1.0]])
    assert (estimate(estimator, samples, {}).sample[:3] == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_case_b68_equal_values_give_exactly_zero(name, numeric_cases):
    inputs = numeric_cases["B68-1"]["inputs"]
    for value in inputs["equal_reward_values"]:
        samples = full_samples([[value] * inputs["group_size"], [value] * 3])
        assert (ADVANTAGES[name](samples) == 0).all()


def test_group_relative_names_are_those_the_configuration_refuses_at_group_size_1():
    assert {name for name, estimator in ADVANTAGES.items() if is_group_relative(estimator)} == GROUP_RELATIVE
    assert not is_group_relative(lambda samples: samples.values)


def test_estimate_gives_samples_their_mean_and_refuses_the_wrong_shape():
    samples = replace(make_samples([[1.0, 0.0]]), num_tokens=torch.tensor([1, 3]))

    def mine(samples):
        return torch.tensor([1.0, 2.0, 4.0, 6.0])

    with pytest.raises(ValueError, match=r"advantage mine must give one number a sample, \[2\], and gave \[4\]"):
        estimate(mine, samples, {})
    mine.per_token = True
    result = estimate(mine, samples, {})
    assert result.sample.tolist() == [1.0, 4.0]
    assert result.token.tolist() == [1.0, 2.0, 4.0, 6.0]
    assert estimate(grpo, samples, {}).token is None
    with pytest.raises(ValueError, match="advantage broken gave a number that is not finite"):
        estimate(broken, samples, {})


def broken(samples):
    return samples.values / 0


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 1000])
def test_discounted_sums_of_long_rows(length):
    x = np.random.default_rng(length).normal(size=length + 5)
    to_end = torch.tensor([*range(length - 1, -1, -1), *range(4, -1, -1)])
    expected = np.zeros(length + 5)
    for row in (range(length), range(length, length + 5)):
        running = 0.0
        for t in reversed(row):
            running = expected[t] = x[t] + 0.97 * running
    assert discounted_sums(torch.from_numpy(x), to_end, 0.97).numpy() == pytest.approx(expected, abs=1e-9)


def test_wrong_optional_fields_are_named():
    samples = make_samples([[1.0, 0.0]])
    with pytest.raises(ValueError, match=r"Samples\.num_tokens must be torch.int64 \[2\]"):
        replace(samples, num_tokens=torch.ones(2))
    with pytest.raises(ValueError, match="sample 1 is marked valid but its KL is nan"):
        replace(samples, num_tokens=torch.tensor([1, 2]), kl=torch.tensor([0.0, 0.0, math.nan]))
    with pytest.raises(ValueError, match="reward part form is inf"):
        replace(samples, parts={"form": torch.tensor([1.0, math.inf])}, part_weights={"form": 1.0})
    with pytest.raises(ValueError, match=r"part_weights must name \['form'\], got \[\]"):
        replace(samples, parts={"form": torch.tensor([1.0, 0.0])})
    with pytest.raises(ValueError, match=r"needs Samples\.num_tokens, which is None"):
        reinforce_pp(samples)
    with pytest.raises(ValueError, match=r"needs Samples\.parts"):
        gdpo(samples)
    with pytest.raises(ValueError, match=r"gamma must lie in \(0, 1\], got 0"):
        reinforce_pp(replace(samples, num_tokens=torch.tensor([1, 2])), gamma=0.0)
