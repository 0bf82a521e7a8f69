"""Token weights against numbers worked by hand, slow loops, and their neutral settings."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.token_weights import (
    TOKEN_WEIGHTINGS,
    acpo,
    act_focus,
    ar,
    craft,
    entropy_split,
    lopti,
    needed_fields,
    sibling_credit,
)

pytestmark = pytest.mark.timeout(60)
LN2, LN3 = math.log(2), math.log(3)


def test_section_9_1_act_focus(make_tokens):
    """Two reasoning tokens, two actions with entropies ln 2 and 0: softmax (2/3, 1/3), mean 0.55 before normalising."""
    tokens = make_tokens([-1.0] * 4, role=[0, 0, 1, 1], entropy=[3.0, 0.0, LN2, 0.0])
    assert act_focus(tokens, normalise=False).tolist() == pytest.approx([0.1, 0.1, 1.3333, 0.6667], abs=5e-5)
    assert act_focus(tokens).tolist() == pytest.approx([0.181818, 0.181818, 2.424242, 1.212121], abs=5e-7)


def test_act_focus_knows_responses_apart(make_tokens):
    """The second response has no action: its reasoning weighs 1 after normalising, 0.1 before. The third has one action alone."""
    tokens = make_tokens([-1.0] * 5, role=[0, 1, 0, 0, 1], entropy=[9.0, 1.0, 2.0, 3.0, 7.0], response=[0, 0, 1, 1, 2])
    assert act_focus(tokens, normalise=False).tolist() == pytest.approx([0.1, 1, 0.1, 0.1, 1])
    assert act_focus(tokens).tolist() == pytest.approx([0.1 / 0.55, 1 / 0.55, 1, 1, 1])
    assert act_focus(tokens, lambda_r=0.0).tolist() == pytest.approx([0, 2, 0, 0, 1])


def test_section_9_3_acpo(make_tokens):
    """h = (0.2, 0.6), mean 0.4: the advantage 1 becomes (0.8, 1.2), the advantage -1 becomes (-1.2, -0.8)."""
    log_v = math.log(100)
    for advantage, expected in ((1.0, [0.8, 1.2]), (-1.0, [-1.2, -0.8]), (0.0, [0.0, 0.0])):
        tokens = make_tokens([-1.0] * 2, max_logp=[-0.2 * log_v, -0.6 * log_v], advantage=[advantage] * 2)
        weight = acpo(tokens, surrogate="mode_logp", vocab_size=100)
        assert (weight * advantage).tolist() == pytest.approx(expected, abs=1e-6)


def test_acpo_mode_entropy_and_bounds(make_tokens):
    """The entropy of (1/2, 1/2) is 1 bit, of (1/4, 3/4) 0.811278, of (1, 0) 0. With a_pos=9 both bounds are met."""
    tokens = make_tokens([-1.0] * 3, max_logp=[math.log(0.5), math.log(0.75), 0.0])
    mean = (1 + 0.811278 + 0) / 3
    assert acpo(tokens).tolist() == pytest.approx([2 - mean, 1.811278 - mean, max(1 - mean, 0.5)], abs=1e-5)
    assert acpo(tokens, a_pos=9.0).tolist() == [2.0, 2.0, 0.5]


@pytest.mark.parametrize(("gap", "credit"), [([LN3, 0.0], 0.5), ([0.0, LN3], -0.5), ([0.7, 0.7], 0.0)])
def test_section_9_2_craft(make_tokens, gap, credit):
    """A = (1, -1), g = (ln 3, 0): v = (0.75, 0.25), credit 0.5; turned round -0.5; alike 0."""
    tokens = make_tokens(
        [-1.0] * 2,
        old_logp=[-2.0, -3.0],
        teacher_logp=[-2.0 + gap[0], -3.0 + gap[1]],
        advantage=[1.0, -1.0],
        response=[0, 1],
        group=[4, 4],
    )
    assert sibling_credit(tokens, 1.0).tolist() == pytest.approx([credit, credit], abs=1e-6)
    assert craft(tokens, strength=0.6).tolist() == pytest.approx([1 + 0.6 * credit, 1 - 0.6 * credit], abs=1e-6)


def test_ar(make_tokens):
    tokens = make_tokens([-9.0] * 3, old_logp=[0.0, LN2 * -1, LN2 * -2])
    assert ar(tokens, alpha=0.2).tolist() == pytest.approx([1.0, 0.9, 0.85])


def test_lopti_alternates(make_tokens):
    """Probabilities 0.9, 0.5 and 0.1 at eta 0.5: the last two in passes 0 and 2, the first in pass 1."""
    for number, expected in ((0, [0, 1, 1]), (1, [1, 0, 0]), (2, [0, 1, 1])):
        tokens = make_tokens([-9.0] * 3, old_logp=[math.log(p) for p in (0.9, 0.5, 0.1)], pass_number=[number] * 3)
        assert lopti(tokens).tolist() == expected


def test_entropy_split(make_tokens):
    """Five tokens, quantile 0.8 x 4 = 3.2: ranks 0 to 3 are low. The one token of the second response is low."""
    tokens = make_tokens([-1.0] * 6, entropy=[0.1, 0.5, 0.3, 0.2, 0.4, 9.0], response=[0, 0, 0, 0, 0, 1])
    assert entropy_split(tokens).tolist() == [0, 1, 0, 0, 0, 0]
    assert entropy_split(tokens, quantile=0.5, low=0.5, high=2.0).tolist() == [0.5, 2, 0.5, 0.5, 2, 0.5]
    # 0.5 and 2: the mean of the first response is 1.1; one whose weights are all 0 keeps them.
    assert entropy_split(tokens, quantile=0.5, low=0.5, high=2.0, normalise=True).tolist() == pytest.approx(
        [0.5 / 1.1, 2 / 1.1, 0.5 / 1.1, 0.5 / 1.1, 2 / 1.1, 1]
    )
    assert entropy_split(tokens, normalise=True).tolist() == [0, 5, 0, 0, 0, 0]


def random_tokens(make_tokens, lengths, seed):
    rng = np.random.default_rng(seed)
    num = sum(lengths)
    return make_tokens(
        -rng.exponential(1.0, num),
        old_logp=-rng.exponential(1.0, num),
        entropy=rng.exponential(1.0, num),
        max_logp=-rng.exponential(0.5, num),
        teacher_logp=-rng.exponential(1.0, num),
        advantage=rng.normal(size=num),
        role=rng.integers(0, 2, num),
        response=np.repeat(np.arange(len(lengths)), lengths),
        group=np.repeat(np.arange(len(lengths)) % 3 * 7, lengths),
        pass_number=np.zeros(num),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 1 << 30))
def test_against_slow_loops(make_tokens, lengths, seed):
    tokens = random_tokens(make_tokens, lengths, seed)
    field = {
        name: getattr(tokens, name).double().numpy() for name in ("old_logp", "entropy", "max_logp", "teacher_logp", "advantage")
    }
    response, role, group = tokens.response.tolist(), tokens.role.tolist(), tokens.group.tolist()
    rows = [[t for t, r in enumerate(response) if r == row] for row in range(len(lengths))]
    focus, uncertain, credit = np.zeros(len(response)), np.zeros(len(response)), np.zeros(len(response))
    for row in rows:
        actions = [t for t in row if role[t] == 1]
        total = sum(math.exp(field["entropy"][t] / 0.7) for t in actions)
        for t in row:
            focus[t] = len(actions) * math.exp(field["entropy"][t] / 0.7) / total if role[t] else 0.3
        focus[row] /= focus[row].mean()
        p = np.exp(field["max_logp"][row])
        h = -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
        for t, value in zip(row, h, strict=True):
            change = value - h.mean()
            uncertain[t] = min(max(1 + (0.5 * change if field["advantage"][t] > 0 else -2 * change), 0.5), 2.0)
        for place, t in enumerate(row):
            siblings = [other[place] for other in rows if group[other[0]] == group[t] and len(other) > place]
            gap = np.exp((field["teacher_logp"] - field["old_logp"])[siblings] / 0.7)
            advantage = field["advantage"][siblings]
            credit[t] = (gap * advantage).sum() / gap.sum() - advantage.mean()
    assert act_focus(tokens, lambda_r=0.3, tau=0.7).numpy() == pytest.approx(focus, rel=1e-5)
    assert acpo(tokens, a_pos=0.5, a_neg=2.0).numpy() == pytest.approx(uncertain, abs=1e-5)
    assert sibling_credit(tokens, 0.7).numpy() == pytest.approx(credit, abs=1e-5)


NEUTRAL = {
    "none": {},
    "entropy_split": {"low": 1.0, "high": 1.0, "normalise": True},
    "ar": {"alpha": 0.0},
    "act_focus": {"lambda_r": 1.0, "tau": None},
    "acpo": {"a_pos": 0.0, "a_neg": 0.0},
    "craft": {"strength": 0.0},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_settings_are_bit_identical_to_none(name, make_tokens):
    tokens = random_tokens(make_tokens, [1, 49, 7, 300, 2], 5)
    weight = TOKEN_WEIGHTINGS[name](tokens, **NEUTRAL[name])
    assert torch.equal(weight, TOKEN_WEIGHTINGS["none"](tokens))
    assert weight.dtype == torch.float32


def test_act_focus_with_infinite_tau_is_null(make_tokens):
    tokens = random_tokens(make_tokens, [5, 3, 8], 1)
    assert torch.equal(act_focus(tokens, tau=math.inf), act_focus(tokens, tau=None))


@pytest.mark.parametrize("name", TOKEN_WEIGHTINGS)
def test_a_response_does_not_see_another_nor_its_own_garbage(name, make_tokens):
    """Weights of the first two groups' responses are the same alone; NaN in another response's tokens stays there. Never below 0."""
    whole = random_tokens(make_tokens, [4, 6, 5], 3)  # three groups
    scheme = TOKEN_WEIGHTINGS[name]
    fields = {
        f: getattr(whole, f)
        for f in (
            "logp",
            "old_logp",
            "entropy",
            "max_logp",
            "teacher_logp",
            "advantage",
            "role",
            "response",
            "group",
            "pass_number",
        )
    }
    first = make_tokens(**{f: t[:10] for f, t in fields.items()})
    assert torch.equal(scheme(whole)[:10], scheme(first))
    broken = make_tokens(
        **{f: torch.cat([t[:10], torch.full_like(t[10:], math.nan)]) if t.is_floating_point() else t for f, t in fields.items()}
    )
    assert torch.equal(scheme(broken)[:10], scheme(first))
    assert (scheme(whole) >= 0).all()
    assert scheme(make_tokens(**{f: t[:0] for f, t in fields.items()})).shape == (0,)


@pytest.mark.parametrize("name", ["lopti", "act_focus", "acpo", "craft"])
def test_a_missing_field_is_named(name, make_tokens):
    assert all(getattr(make_tokens([-1.0]), field) is None for field in needed_fields(TOKEN_WEIGHTINGS[name]))
    with pytest.raises(ValueError, match=rf"needs LossTokens\.{needed_fields(TOKEN_WEIGHTINGS[name])[0]}, which is None"):
        TOKEN_WEIGHTINGS[name](make_tokens([-1.0]))


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("entropy_split", {"low": -1.0}, "low and high must be 0 or more"),
        ("entropy_split", {"quantile": 1.5}, r"must lie in \[0, 1\], got 1.5"),
        ("ar", {"alpha": 1.5}, "alpha must lie in"),
        ("lopti", {"eta": 1.0}, "eta must lie between 0 and 1"),
        ("act_focus", {"lambda_r": -0.1}, "lambda_r must be 0 or more"),
        ("act_focus", {"tau": 0.0}, "tau must be above 0, or null"),
        ("acpo", {"surrogate": "mode_logp"}, "needs vocab_size"),
        ("acpo", {"w_min": 1.5}, "w_min must lie"),
        ("craft", {"tau": 0.0}, "tau must be above 0"),
        ("craft", {"w_max": 0.5}, "w_max be at least 1"),
    ],
)
def test_values_out_of_range_are_named(name, params, words, make_tokens):
    with pytest.raises(ValueError, match=words):
        TOKEN_WEIGHTINGS[name](random_tokens(make_tokens, [3], 0), **params)
