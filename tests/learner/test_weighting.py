"""Sample weights and pruning against numbers worked by hand, slow loops, and their neutral settings."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import Samples, dr_grpo, grpo
from learner.weighting import (
    WEIGHTINGS,
    Anchor,
    Weights,
    cppo,
    dgpo_question,
    ha_dw,
    length,
    magnitude,
    none,
    pods,
    sign,
    weigh_samples,
    weight_metrics,
)

pytestmark = pytest.mark.timeout(60)


def make_samples(groups, *, accuracy=None, num_tokens=None):
    """Groups as lists; None is a member whose verifier gave no value. Accuracy is the value unless given."""
    flat = [value for members in groups for value in members]
    values = torch.tensor([math.nan if value is None else value for value in flat], dtype=torch.float64)
    return Samples(
        values,
        torch.tensor([i for i, members in enumerate(groups) for _ in members]),
        ~values.isnan(),
        accuracy=values if accuracy is None else torch.tensor(accuracy),
        num_tokens=torch.arange(len(flat)) % 4 + 1 if num_tokens is None else torch.tensor(num_tokens),
    )


def weights(scheme, samples, advantage=None, **params):
    return weigh_samples(scheme, samples, grpo(samples) if advantage is None else advantage, params)[0].weight


HALF = [1.0, 0.0, 1.0, 0.0]


def test_none_is_one_on_every_valid_sample():
    samples = make_samples([[1.0, None, 0.0], [0.3, 0.7, None]])
    assert weights(none, samples).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_section_3_2_sample_level():
    """R = (1,0,0,0): |A| = (.75, .25, .25, .25), mean .375; the invalid member changes nothing."""
    samples = make_samples([[1.0, 0.0, 0.0, 0.0, None]])
    for bounds in ({}, {"w_min": 0.0, "w_max": 1e9}):
        assert weights(magnitude, samples, level="sample", **bounds).tolist() == pytest.approx([2, 2 / 3, 2 / 3, 2 / 3, 0])


def test_section_3_2_group_level():
    """Pass rates 1/4 and 2/4: mean |A| = .375 and .5."""
    ours = weights(magnitude, make_samples([[1.0, 0.0, 0.0, 0.0], HALF])).tolist()
    assert ours == pytest.approx([0.857143] * 4 + [1.142857] * 4, abs=1e-6)


def test_magnitude_clips_then_normalises():
    """Mean |A| of 1/16 and of 8/16: .1171875 and .5; over their mean .379747 and 1.620253. Clipped at 1.25: .379747 and 1.25, mean
    .814873. With alpha 2 the second is clipped at 1.25, the first is .1041 and lifted to .25: mean .75. Without normalising first,
    .25 and .5."""
    samples = make_samples([[1.0] + [0.0] * 15, [1.0] * 8 + [0.0] * 8])
    for params, first, second in (
        ({"w_max": 1.25}, 0.379747 / 0.814873, 1.25 / 0.814873),
        ({"w_max": 1.25, "alpha": 2.0}, 0.25 / 0.75, 1.25 / 0.75),
        ({"normalise": False}, 0.25 / 0.375, 0.5 / 0.375),
    ):
        ours = weights(magnitude, samples, **params)
        assert [float(ours[0]), float(ours[-1])] == pytest.approx([first, second], abs=1e-5)


def test_magnitude_bases():
    """Population of |A| at sample level: std-normalised, a lone success of 4 weighs 1.5 / .75 = 2 and one of two members
    .7071 / .9357 within (1.5, .5, .5, .5, .7071, .7071); raw, .75 and .5 within (.75, .25, .25, .25, .5, .5)."""
    samples, wide = make_samples([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0]]), {"level": "sample", "w_min": 0.0, "w_max": 99.0}
    std = np.array([1.5, 0.5, 0.5, 0.5, 0.70711, 0.70711])
    raw = np.array([0.75, 0.25, 0.25, 0.25, 0.5, 0.5])
    assert weights(magnitude, samples, base="group_std", **wide).numpy() == pytest.approx(std / std.mean(), abs=1e-4)
    assert weights(magnitude, samples, base="raw", **wide).numpy() == pytest.approx(raw / raw.mean(), abs=1e-6)
    # One scale for the whole batch cancels against the mean.
    assert weights(magnitude, samples, base="batch_std", **wide).numpy() == pytest.approx(raw / raw.mean(), abs=1e-6)
    # Of 1 and of 3 the bounds see the scale: .5 / std(1, 0, 3, 0) = .353553 becomes .5 where only the batch's std makes it so.
    bounded = weights(magnitude, make_samples([[1.0, 0.0], [3.0, 0.0]]), base="batch_std", normalise=False, w_min=0.5)
    assert bounded.numpy() == pytest.approx(np.array([0.5, 0.5, 1.06066, 1.06066]) / 0.78033, abs=1e-4)


def test_magnitude_leaves_groups_without_signal_out():
    """Groups that are constant weigh 1 and do not move the others; one that is left alone weighs 1."""
    alone = weights(magnitude, make_samples([[1.0, 0.0, 0.0, 0.0], HALF])).tolist()
    mixed = weights(magnitude, make_samples([[1.0] * 3, [1.0, 0.0, 0.0, 0.0], [0.0, None], HALF])).tolist()
    assert mixed == pytest.approx([1.0] * 3 + alone[:4] + [1.0, 0.0] + alone[4:])
    assert weights(magnitude, make_samples([[1.0, 0.0], [0.0, 0.0]])).tolist() == [1.0] * 4
    assert weights(magnitude, make_samples([[0.0, 0.0]])).tolist() == [1.0] * 2


def test_section_3_1_dgpo_question():
    """Accuracies 1/4, 3/4 and 0 (signal through values alone, so it counts as 1): 3 softmax(-.125, -.375, -.5)."""
    samples = make_samples(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.1, 0.0, 0.1, 0.0], [1.0, 1.0]],
        accuracy=[1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
    )
    powers = np.exp([-0.125, -0.375, -0.5])
    expected = np.repeat([*(3 * powers / powers.sum()), 1.0], [4, 4, 4, 2])
    assert weights(dgpo_question, samples).numpy() == pytest.approx(expected, rel=1e-6)
    assert weights(dgpo_question, samples, temperature=1e9).numpy() == pytest.approx(np.ones(14), abs=1e-6)


def test_section_3_1_ha_dw():
    """C = .5, lambda 1: at p = .125 a success weighs 1.45499, a failure .68729; at .875 the other way round."""
    samples = make_samples([[1.0] + [0.0] * 7, [1.0] * 7 + [0.0]])
    state = Anchor(0.5, [0.5] * 10)  # its standard deviation is 0, so C stays
    weight, after = ha_dw(state, samples, grpo(samples))
    assert weight.tolist() == pytest.approx([1.45499] + [0.68729] * 7 + [0.68729] * 7 + [1.45499], abs=1e-5)
    assert after == state


def test_ha_dw_moves_its_anchor():
    """C_3 and on: history (.4, .6) has standard deviation .1; eta 2 gives .2: .8 x .6 + .2 x .25 = .53. At first C is a mean."""
    samples = make_samples([[1.0, 0.0, 0.0, 0.0]])
    assert ha_dw(Anchor(0.6, [0.4, 0.6]), samples, grpo(samples), eta=2.0, window=2)[1].centre == pytest.approx(0.53)
    state = ha_dw.initial
    for passed, centre in ((1, 0.25), (3, 0.5), (2, 0.5)):
        batch = make_samples([[1.0] * passed + [0.0] * (4 - passed), [None]])
        state = weigh_samples(ha_dw, batch, grpo(batch), {"window": 3}, state)[1]
        assert state.centre == pytest.approx(centre)
    assert state.history == pytest.approx([0.25, 0.5, 0.5])
    assert Anchor(**json.loads(json.dumps(dataclasses.asdict(state)))) == state
    assert ha_dw.initial == Anchor()
    nothing = make_samples([[None]])
    assert weigh_samples(ha_dw, nothing, torch.zeros(1), {}, state)[1] == state


def test_cppo_keeps_the_largest_advantages():
    """Half of five valid members is two; of one, one. Equal ones in the order of the batch. A tenth of twenty is two."""
    samples = make_samples([[0.0, 1.0, None, 1.0, 1.0, 1.0], [0.5, None], HALF])
    result, _ = weigh_samples(cppo, samples, dr_grpo(samples), {})
    assert result.kept.tolist() == [True, True, False, False, False, False, True, False, True, True, False, False]
    assert result.weight.tolist() == result.kept.float().tolist()
    twenty = make_samples([[1.0] + [0.0] * 19])
    assert weigh_samples(cppo, twenty, dr_grpo(twenty), {"pruning_rate": 0.9})[0].kept.tolist() == [True] * 2 + [False] * 18
    sixteen = make_samples([[1.0] + [0.0] * 15])
    assert weigh_samples(cppo, sixteen, dr_grpo(sixteen), {"pruning_rate": 0.9375})[0].kept.sum() == 1


def test_cppo_takes_no_sign_for_rounding():
    """A = +-.5 but for the last bit: the earlier two are kept, whichever sign they have."""
    samples = make_samples([[0.1, 0.3, 0.1, 0.3], [0.3, 0.1, 0.1, 0.3]])
    for up, down in ((0.5, 0.49999997), (0.49999997, 0.5)):
        advantage = torch.where(samples.values > 0.2, up, -down)
        assert weigh_samples(cppo, samples, advantage, {})[0].kept.tolist() == [True, True, False, False] * 2


def test_pods_is_balanced_for_binary_rewards():
    """4 of 8: with 3 successes two of each kind, with 1 the success and three failures. Three members stay whole."""
    samples = make_samples([[1.0, 1.0, 1.0] + [0.0] * 5, [0.0] * 7 + [1.0], [1.0, 0.0, 0.0, None]])
    kept = weigh_samples(pods, samples, grpo(samples), {})[0].kept
    assert [int(samples.values[:8][kept[:8]].sum()), int(kept[:8].sum())] == [2, 4]
    assert [int(samples.values[8:16][kept[8:16]].sum()), int(kept[8:16].sum())] == [1, 4]
    assert kept[16:].tolist() == [True, True, True, False]


def test_pods_has_one_scale_for_all_groups():
    """Squares of 1e9 swallow those of 1: the differences of the second group must not be lost beside the first."""
    samples = make_samples([[0.0, 1e9, 3e9], [1.0, 0.0, 20.0, 1.0, 1.0]])
    kept = weigh_samples(pods, samples, grpo(samples), {"num_kept": 2})[0].kept
    assert kept.tolist() == [True, False, True, False, True, True, False, False]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(-9, 9)), min_size=1, max_size=7), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_pods_has_the_largest_variance_of_all_subsets(groups, num_kept):
    samples = make_samples(groups, accuracy=[0.0] * sum(map(len, groups)))
    kept = weigh_samples(pods, samples, torch.zeros(len(samples.values)), {"num_kept": num_kept})[0].kept
    start = 0
    for members in groups:
        values = [v for v in members if v is not None]
        ours = samples.values[start : start + len(members)][kept[start : start + len(members)]].numpy()
        start += len(members)
        size = min(num_kept, len(values))
        assert len(ours) == size
        if size:
            best = max(np.var(subset) for subset in itertools.combinations(values, size))
            assert ours.var() == pytest.approx(best, abs=1e-9)


def test_sign():
    """Weights (.1, 1, 1) for a success, a failure and A = 0, over their mean .7."""
    samples = make_samples([[1.0, 0.0, 0.5]])
    assert weights(sign, samples, positive=0.1).numpy() == pytest.approx(np.array([0.1, 1, 1]) / 0.7)
    assert weights(sign, samples, positive=0.0).tolist() == pytest.approx([0, 1.5, 1.5])


def test_length():
    """Lengths 2, 4 and 6, mean 4: (2, 1, 2/3) over 11/9; the fourth is not valid. Squared and bounded: (2, 1, .4444)."""
    samples = make_samples([[1.0, 0.0, 0.5, None]], num_tokens=[2, 4, 6, 100])
    assert weights(length, samples).numpy() == pytest.approx(np.array([2, 1, 2 / 3, 0]) * 9 / 11)
    assert weights(length, samples, power=2.0).numpy() == pytest.approx(np.array([2, 1, 4 / 9, 0]) * 27 / 31)
    assert weights(length, samples, power=-1.0).numpy() == pytest.approx(np.array([0.5, 1, 1.5, 0]))


NEUTRAL = {
    "none": {},
    "magnitude": {"alpha": 0.0},
    "cppo": {"pruning_rate": 0.0},
    "pods": {"num_kept": 99},
    "sign": {},
    "length": {"power": 0.0},
}


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("level", ["group", "sample"])
def test_neutral_settings_are_bit_identical_to_none(name, level):
    samples = make_samples([[1.0, 0.0, 0.3, None], [0.0, 0.0], [0.1, 0.7, 0.7], [None], [1.0]])
    params = NEUTRAL[name] | ({"level": level} if name == "magnitude" else {})
    ours, plain = (weigh_samples(scheme, samples, grpo(samples), p)[0] for scheme, p in ((WEIGHTINGS[name], params), (none, {})))
    assert torch.equal(ours.weight, plain.weight)
    assert torch.equal(ours.kept, plain.kept)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_invalid_members_are_as_if_absent(name):
    whole = make_samples([[1.0, None, 0.0, 0.0], [0.5, 0.25, None, 1.0, 0.0, 0.1], [None], [0.0, 1.0]])
    valid = whole.valid
    alone = Samples(*(getattr(whole, f)[valid] for f in ("values", "group", "valid", "accuracy", "num_tokens")))
    ours, expected = (weigh_samples(WEIGHTINGS[name], samples, grpo(samples), {})[0] for samples in (whole, alone))
    assert torch.equal(ours.weight[valid], expected.weight)
    assert torch.equal(ours.kept[valid], expected.kept)
    assert not ours.kept[~valid].any()
    assert not ours.weight[~valid].any()


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_mean_one_over_what_is_kept_in_any_order(name):
    """All |A| of a group are different, so that pruning has no ties to break."""
    samples = make_samples([[0.9, 0.11, 0.0, 0.3, 0.52, 0.61], [0.51, 0.25, None, 0.9], [0.7, 0.81, 0.1]])
    order = torch.randperm(len(samples.values), generator=torch.Generator().manual_seed(2))
    moved = Samples(*(getattr(samples, f)[order] for f in ("values", "group", "valid", "accuracy", "num_tokens")))
    ours, theirs = (weigh_samples(WEIGHTINGS[name], s, grpo(s), {})[0] for s in (samples, moved))
    assert float(ours.weight[ours.kept].mean()) == pytest.approx(1, abs=1e-6)
    assert theirs.kept.tolist() == ours.kept[order].tolist()
    assert theirs.weight.numpy() == pytest.approx(ours.weight[order].numpy(), abs=1e-6)


def test_weights_of_pruned_samples_do_not_count_in_the_mean():
    samples = make_samples([[1.0, 0.0, 0.5]])

    def mine(samples, advantage):
        return Weights(torch.tensor([1.0, 9.0, 3.0]), torch.tensor([True, False, True]))

    assert weigh_samples(mine, samples, grpo(samples), {})[0].weight.tolist() == [0.5, 0.0, 1.5]


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0])
def test_weights_without_sense_are_refused(bad):
    samples = make_samples([[1.0, 0.0]])

    def mine(samples, advantage):
        return torch.full_like(advantage, bad)

    with pytest.raises(ValueError, match="weighting mine gave a weight"):
        weigh_samples(mine, samples, grpo(samples), {})


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("magnitude", {"alpha": -1.0}, "alpha must be at least 0"),
        ("magnitude", {"w_min": 2.0}, "w_min must lie in"),
        ("dgpo_question", {"temperature": 0.0}, "temperature must be above 0"),
        ("ha_dw", {"window": 1}, "window at least 2"),
        ("cppo", {"pruning_rate": 1.0}, "pruning_rate must lie in"),
        ("pods", {"num_kept": 0}, "num_kept must be at least 1"),
        ("sign", {"positive": -0.1}, "positive and negative must be 0 or more"),
        ("length", {"w_max": 0.5}, "w_max be at least 1"),
    ],
)
def test_values_out_of_range_are_named(name, params, words):
    samples = make_samples([[1.0, 0.0]])
    with pytest.raises(ValueError, match=words):
        weigh_samples(WEIGHTINGS[name], samples, grpo(samples), params)


def test_metrics_tell_how_weights_go_with_pass_rates():
    """Pass rates 1/4, 1/2, 3/4; sums of |A| 1.5, 2, 1.5, which the weights 1, 2, 3 make 1.5, 4, 4.5 of 10."""
    samples = make_samples([[1.0, 0.0, 0.0, 0.0, None], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    weight = torch.tensor([1.0] * 4 + [99.0] + [2.0] * 4 + [3.0] * 4)
    advantage = torch.tensor([0.75, -0.25, -0.25, -0.25, 0.0, 0.5, 0.5, -0.5, -0.5, 0.25, 0.25, 0.25, -0.75])
    chosen = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert weight_metrics(samples, weight, advantage, chosen) == {
        "weight/std": pytest.approx(math.sqrt(2 / 3)),
        "weight/max": 3.0,
        "weight/corr_pass_rate": pytest.approx(1.0),
        "weight/share_pass_low": pytest.approx(0.15),
        "weight/share_pass_mid": pytest.approx(0.4),
        "weight/share_pass_high": pytest.approx(0.45),
    }
    same = weight_metrics(samples, torch.ones(13), torch.zeros(13), chosen)
    assert same == {"weight/std": 0.0, "weight/max": 1.0, "weight/corr_pass_rate": 0.0}, "no advantage, no shares"
    # Weights 1, 3, 1, 1 at pass rates 1/2, 1/2, 1, 1: covariance -0.125, deviations sqrt(0.75) and 0.25.
    pair = make_samples([[1.0, 0.0], [1.0, 1.0]])
    metrics = weight_metrics(pair, torch.tensor([1.0, 3.0, 1.0, 1.0]), torch.tensor([0.5, -0.5, 0.0, 0.0]), range(4))
    assert metrics["weight/corr_pass_rate"] == pytest.approx(-1 / math.sqrt(3))
    # Without the second sample the group keeps its pass rate: it was judged, if not trained on.
    assert weight_metrics(pair, torch.ones(4), torch.tensor([0.5, -0.5, 0.0, 0.0]), [0, 2])["weight/share_pass_mid"] == 1.0
