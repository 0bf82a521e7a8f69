"""Surrogates against the truth table of ASPO (ALGORITHMS 1.9), autograd of the written losses, and their invariants."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.head import TokenLogpHead
from learner.surrogates import aspo, grpo, is_ratio_based

# id, pi_old, pi, A | ASPO: w, dL/dl, value | GRPO with hard dual clip 3: value, dL/dl. eps 0.2, c 3.
TABLE = [
    ("T1", 0.50, 0.50, +2, 1, -2, -2, -2, -2),
    ("T2", 0.50, 0.25, +2, 2, -4, -4, -1, -1),
    ("T3", 0.50, 0.55, +2, 0.909091, -1.818182, -1.818182, -2.2, -2.2),
    ("T4", 0.50, 0.65, +2, 0, 0, -1.666667, -2.4, 0),
    ("T5", 0.50, 0.10, +2, 3, -6, -6, -0.4, -0.4),
    ("T6", 0.50, 0.25, -1, 0, 0, +0.8, +0.8, 0),
    ("T7", 0.50, 0.45, -1, 0.9, +0.9, +0.9, +0.9, +0.9),
    ("T8", 0.50, 0.50, -1, 1, +1, +1, +1, +1),
    ("T9", 0.50, 0.75, -1, 1.5, +1.5, +1.5, +1.5, +1.5),
    ("T10", 0.20, 0.80, -1, 3, +3, +3, +3, 0),
]
LOGP = st.floats(-12, 0, width=32)
TOKENS = st.lists(st.tuples(LOGP, LOGP, st.floats(-3, 3, width=32)), min_size=1, max_size=20)
PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def table_tokens(make_tokens):
    old, new, advantage = (torch.tensor([row[i] for row in TABLE]) for i in (1, 2, 3))
    return make_tokens(new.log(), old_logp=old.log(), advantage=advantage)


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_truth_table(row, make_tokens):
    _, old, new, advantage, factor, gradient, value, grpo_value, grpo_gradient = row
    tokens = make_tokens([math.log(new)], old_logp=[math.log(old)], advantage=[advantage])
    ours, plain = aspo(tokens), grpo(tokens, dual_c=3.0)
    assert float(ours.factor) == pytest.approx(factor, abs=2e-6)
    assert float(-tokens.advantage * ours.factor) == pytest.approx(gradient, abs=2e-6)
    assert float(ours.value) == pytest.approx(value, abs=2e-6)
    assert float(plain.value) == pytest.approx(grpo_value, abs=2e-6)
    assert float(-tokens.advantage * plain.factor) == pytest.approx(grpo_gradient, abs=2e-6)


def test_table_token_means_and_region_shares(table_tokens):
    ours = aspo(table_tokens)
    assert float(ours.value.mean()) == pytest.approx(-0.828485, abs=1e-6)
    assert float(grpo(table_tokens, dual_c=3.0).value.mean()) == pytest.approx(-0.08, abs=1e-6)
    places = {name: region.nonzero().flatten().tolist() for name, region in ours.regions.items()}
    assert places == {"hard_pos": [3], "hard_neg": [5], "dual_pos": [4], "dual_neg": [9]}


def test_grpo_without_dual_clip_has_no_upper_bound(table_tokens):
    plain = grpo(table_tokens)
    assert float(plain.factor[9]) == pytest.approx(4.0, rel=1e-6)
    assert not plain.regions["dual_neg"].any()


def test_gradient_on_logits(make_tokens):
    """pi_old (.5, .3, .2), pi (.25, .45, .30), token 0, A = 1: r = .5, w = 2, dL/dz = (-1.5, .9, .6). The head is the identity."""
    hidden = torch.tensor([[0.25, 0.45, 0.30]]).log().requires_grad_()
    head = TokenLogpHead(torch.nn.Parameter(torch.eye(3)), chunk_rows=1)
    out = head(hidden, torch.tensor([0]), 1.0)
    tokens = make_tokens(out.logp.detach(), old_logp=[math.log(0.5)], advantage=[1.0])
    (-tokens.advantage * aspo(tokens).factor * out.logp).sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[-1.5, 0.9, 0.6]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_case_b83_ratio_inverted_for_positive_advantages_only(number, numeric_cases, make_tokens):
    case = numeric_cases[f"B83-{number}"]
    inputs, expect = case["inputs"], case["expect"]
    tokens = make_tokens([math.log(inputs["ratio"])], old_logp=[0.0], advantage=[inputs["advantage"]])
    eps = {"eps_low": inputs["eps"], "eps_high": inputs["eps"]}
    gradient = float(-tokens.advantage * aspo(tokens, **eps).factor)
    plain = float(-tokens.advantage * grpo(tokens, **eps).factor)
    assert gradient == pytest.approx(expect["d_loss_d_new_log_prob"], abs=expect["tolerance"])
    assert plain == pytest.approx(expect["plain_ratio_gives"], abs=expect["tolerance"])


@PROPERTY
@given(TOKENS)
def test_equal_to_grpo_bit_for_bit_at_ratio_one(make_tokens, rows):
    """Property (a): the first optimizer step of a batch."""
    logp, _, advantage = zip(*rows, strict=True)
    tokens = make_tokens(list(logp), advantage=list(advantage))
    assert torch.equal(aspo(tokens).factor, grpo(tokens).factor)
    assert torch.equal(aspo(tokens).value, grpo(tokens).value)
    assert torch.equal(aspo(tokens).factor, (tokens.advantage != 0).float())


@PROPERTY
@given(TOKENS)
def test_flip_has_the_gradient_of_advantage_over_ratio(make_tokens, rows):
    """Property (b): for A > 0, not masked, not capped, autograd of +A/r is the oracle."""
    logp, old, advantage = zip(*rows, strict=True)
    tokens = make_tokens(list(logp), old_logp=list(old), advantage=[abs(a) for a in advantage])
    variable = tokens.logp.clone().requires_grad_()
    (tokens.advantage / torch.exp(variable - tokens.old_logp)).sum().backward()
    ours = aspo(tokens)
    active = (tokens.ratio <= 1.2) & (tokens.ratio >= 1 / 3)
    torch.testing.assert_close((-tokens.advantage * ours.factor)[active], variable.grad[active], rtol=1e-5, atol=0)


@PROPERTY
@given(TOKENS, st.floats(1.5, 10))
def test_sign_and_bound_of_the_gradient(make_tokens, rows, dual_c):
    """Properties (c) and (d): the gradient has the sign of -A and at most dual_c times its size."""
    logp, old, advantage = zip(*rows, strict=True)
    tokens = make_tokens(list(logp), old_logp=list(old), advantage=list(advantage))
    factor = aspo(tokens, dual_c=dual_c).factor
    assert (factor >= 0).all()
    assert (factor <= torch.tensor(dual_c)).all()
    assert (factor[tokens.advantage == 0] == 0).all()


@PROPERTY
@given(TOKENS)
def test_grpo_factor_is_the_derivative_of_its_value(make_tokens, rows):
    """Autograd through max(-A r, -A clip(r)) and the dual clip, away from the kinks, gives -A times the factor."""
    logp, old, advantage = zip(*rows, strict=True)
    tokens = make_tokens(list(logp), old_logp=list(old), advantage=list(advantage))
    variable = tokens.logp.clone().requires_grad_()
    ratio = torch.exp(variable - tokens.old_logp)
    loss = torch.maximum(-tokens.advantage * ratio, -tokens.advantage * ratio.clamp(0.8, 1.28))
    loss = torch.where(tokens.advantage < 0, torch.minimum(loss, -4.0 * tokens.advantage), loss)
    loss.sum().backward()
    kinks = torch.tensor([0.8, 1.28, 4.0])
    smooth = ((tokens.ratio[:, None] - kinks).abs() > 1e-4).all(1) & ((tokens.ratio - 1).abs() > 0)
    ours = grpo(tokens, eps_low=0.2, eps_high=0.28, dual_c=4.0)
    torch.testing.assert_close((-tokens.advantage * ours.factor)[smooth], variable.grad[smooth], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.value, loss.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("surrogate", [grpo, aspo])
def test_bounds_belong_to_the_active_side(surrogate, make_tokens):
    """A ratio of exactly 1 + eps or 1 - eps still has a gradient. Powers of two make both exact."""
    tokens = make_tokens([math.log(1.5), math.log(0.5)], old_logp=[0.0, 0.0], advantage=[1.0, -1.0])
    high, low = float(tokens.ratio[0]) - 1, 1 - float(tokens.ratio[1])
    assert (surrogate(tokens, eps_low=low, eps_high=high).factor > 0).all()
    assert (surrogate(tokens, eps_low=low - 1e-3, eps_high=high - 1e-3).factor == 0).all()


@pytest.mark.parametrize("surrogate", [grpo, aspo])
@pytest.mark.parametrize(
    ("params", "named"), [({"eps_low": -0.1}, "eps_low"), ({"eps_high": -1.0}, "eps_high"), ({"dual_c": 1.0}, "dual_c")]
)
def test_parameters_without_sense_are_named(surrogate, params, named, make_tokens):
    with pytest.raises(ValueError, match=named):
        surrogate(make_tokens([-1.0]), **params)


def test_a_function_is_ratio_based_unless_it_says_otherwise():
    def mine(tokens):
        raise NotImplementedError

    assert is_ratio_based(aspo)
    assert is_ratio_based(mine)
    mine.ratio_based = False
    assert not is_ratio_based(mine)
