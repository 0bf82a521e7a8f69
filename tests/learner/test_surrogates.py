"""Surrogates against the truth table of ASPO (ALGORITHMS 1.9), autograd of the written losses, and their invariants."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.head import TokenLogpHead
from learner.surrogates import (
    SURROGATES,
    aspo,
    aspo_archer,
    cispo,
    cispo_relative,
    grpo,
    gspo,
    gspo_token,
    is_ratio_based,
    no_ratio,
    pos_resp_mean,
    reinforce,
    sapo,
    tv_mask,
)

pytestmark = pytest.mark.timeout(60)

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
PROPERTY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    assert set(plain.regions) == {"hard_pos", "hard_neg"}


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


def of_ratios(make_tokens, ratios, advantage, *, old=0.1, **fields):
    count = len(ratios)
    logp = (torch.tensor(ratios) * old).log()
    return make_tokens(logp, old_logp=[math.log(old)] * count, advantage=torch.as_tensor(advantage).expand(count), **fields)


def test_gspo_by_hand(make_tokens):
    """ALGORITHMS 2.5: log ratios ln 1.2 and ln 0.9, s = sqrt(1.08) = 1.039230. Its paper's range clips it; at 0.2 each of the two
    tokens weighs s / 2 = 0.519615 once the mean over the response has divided."""
    tokens = of_ratios(make_tokens, [1.2, 0.9], 1.0)
    for surrogate in (gspo, gspo_token):
        assert surrogate(tokens).factor.tolist() == [0.0, 0.0]
        assert surrogate(tokens).regions["hard_pos"].all()
        wide = surrogate(tokens, eps_low=0.2, eps_high=0.2)
        assert wide.factor.tolist() == pytest.approx([1.039230] * 2, abs=1e-6)
        assert (wide.factor / 2).tolist() == pytest.approx([0.519615] * 2, abs=1e-6)
        assert wide.value.tolist() == pytest.approx([-1.039230] * 2, abs=1e-6)


def test_gspo_token_clips_each_token_by_its_own_sign(make_tokens):
    """s = 1.039230 is above the range for A > 0 alone; log s is capped at 0.01 where asked."""
    tokens = of_ratios(make_tokens, [1.2, 0.9], [1.0, -1.0])
    assert gspo_token(tokens).factor.tolist() == pytest.approx([0.0, 1.039230], abs=1e-6)
    assert gspo_token(tokens, max_log_ratio=0.01).factor.tolist() == pytest.approx([0.0, 1.010050], abs=1e-6)


def test_responses_do_not_mix(make_tokens):
    """Tokens of two responses in turn: log means ln 2 and 0."""
    tokens = of_ratios(make_tokens, [4.0, 0.5, 1.0, 2.0], -1.0, response=[0, 1, 0, 1])
    assert gspo(tokens).factor.tolist() == pytest.approx([2.0, 1.0, 2.0, 1.0], abs=1e-6)


def test_cispo_in_its_two_conventions(make_tokens):
    """ALGORITHMS 2.6: r = 6 at cap 5 has w = 5 and gradient -5; r = 0.3 has w = 0.3. Counted from 1 the same 5 is a cap of 6."""
    tokens = of_ratios(make_tokens, [6.0, 0.3], 1.0)
    capped = cispo(tokens)
    assert capped.factor.tolist() == pytest.approx([5.0, 0.3], rel=1e-6)
    assert (-tokens.advantage * capped.factor).tolist() == pytest.approx([-5.0, -0.3], rel=1e-6)
    assert capped.regions["cap_pos"].tolist() == [True, False]
    assert capped.value.tolist() == pytest.approx([-5 * math.log(0.6), -0.3 * math.log(0.03)], rel=1e-5)
    assert cispo_relative(tokens, eps_high=5.0).factor.tolist() == pytest.approx([6.0, 0.3], rel=1e-6)
    floored = cispo_relative(tokens, eps_high=4.0, eps_low=0.2)
    assert floored.factor.tolist() == pytest.approx([5.0, 0.8], rel=1e-6)
    assert floored.regions["floor_pos"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("tau", "ratio", "gate", "factor"), [(1, 1.5, 2.489837, 1.410022), (1, 0.5, 1.510163, 0.470007), (1.05, 1.5, None, 1.401210)]
)
def test_sapo_by_hand(tau, ratio, gate, factor, make_tokens):
    """ALGORITHMS 2.7. At r = 1 the gate is 2 / tau and the factor exactly 1."""
    tokens = of_ratios(make_tokens, [ratio], 1.0)
    soft = sapo(tokens, tau_pos=tau)
    assert float(soft.factor) == pytest.approx(factor, abs=2e-6)
    assert gate is None or float(-soft.value) == pytest.approx(gate, abs=2e-6)
    negative = of_ratios(make_tokens, [ratio], -1.0)
    assert float(sapo(negative, tau_pos=9.0, tau_neg=tau).factor) == pytest.approx(factor, abs=2e-6)
    one = sapo(make_tokens([-1.0], advantage=[1.0]), tau_pos=tau)
    assert float(one.factor) == 1.0
    assert float(one.value) == pytest.approx(-2 / tau)


def test_arms_of_the_aspo_paper_by_hand(make_tokens):
    """r = (1/2, 1, 1.3) in one response of mean 14/15, A = 1 then -1, clip range 0.2: the last is masked for A > 0, the first for A < 0."""
    positive, negative = (of_ratios(make_tokens, [0.5, 1.0, 1.3], sign) for sign in (1.0, -1.0))
    assert pos_resp_mean(positive).factor.tolist() == pytest.approx([14 / 15, 14 / 15, 0.0], abs=1e-6)
    assert pos_resp_mean(positive).value.tolist() == pytest.approx([-14 / 15, -14 / 15, -1.2], abs=1e-6)
    assert pos_resp_mean(negative).factor.tolist() == pytest.approx([0.0, 1.0, 1.3], abs=1e-6)
    assert pos_resp_mean(negative).value.tolist() == pytest.approx([0.8, 1.0, 1.3], abs=1e-6)
    assert no_ratio(positive).factor.tolist() == [1.0, 1.0, 0.0]
    assert no_ratio(negative).factor.tolist() == [0.0, 1.0, 1.0]
    assert no_ratio(positive, keep_clip_mask=False).factor.tolist() == [1.0, 1.0, 1.0]
    assert reinforce(negative).value.tolist() == pytest.approx(negative.logp.tolist())


def test_tv_mask_looks_at_the_probability(make_tokens):
    """pi_old = 0.4: pi = 0.7 has moved by 0.3, pi = 0.5 by 0.1; from 0.01 even a ratio of 10 has moved by 0.09 only."""
    for sign, factors in ((1.0, [0.0, 1.25, 0.25]), (-1.0, [1.75, 1.25, 0.0])):
        tokens = of_ratios(make_tokens, [1.75, 1.25, 0.25], sign, old=0.4)
        assert tv_mask(tokens).factor.tolist() == pytest.approx(factors, abs=1e-6)
    assert float(tv_mask(of_ratios(make_tokens, [10.0], 1.0, old=0.01)).factor) == pytest.approx(10.0, rel=1e-6)


def test_archers_split_widens_the_range_of_uncertain_tokens(make_tokens):
    """Five tokens at quantile 0.5: floor(0.5 * 4) + 1 = 3 are low-entropy. r = 1.3 is masked on those, and 1/1.3 on the two others."""
    tokens = of_ratios(make_tokens, [1.3] * 5, 1.0, entropy=[0.1, 3.0, 0.2, 2.0, 0.3])
    split = aspo_archer(tokens, entropy_quantile=0.5)
    assert split.factor.tolist() == pytest.approx([0.0, 1 / 1.3, 0.0, 1 / 1.3, 0.0], rel=1e-6)
    same = aspo_archer(tokens, uncertain_eps_low=0.2, uncertain_eps_high=0.2)
    assert torch.equal(same.factor, aspo(tokens).factor)


# ---- the textbook losses, by autograd in float64 --------------------------------------------------------------------


def ppo_loss(r, a, low, high):
    return torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))


def pick(a, positive, negative):
    return torch.where(a > 0, positive, torch.where(a < 0, negative, torch.zeros_like(a)))


def hard_mask(r, a, low=0.2, high=0.2):
    return ~(((a > 0) & (r > 1 + high)) | ((a < 0) & (r < 1 - low)))


def aspo_loss(x):
    flipped = pick(x.a, x.old.exp() * x.l.exp() / x.l.exp().detach() ** 2, x.r)
    live = torch.where(flipped > 3, 3 * torch.exp(x.l - x.l.detach()), flipped)
    return -x.a * torch.where(hard_mask(x.r, x.a), live, pick(x.a, torch.full_like(x.a, 1 / 1.2), torch.full_like(x.a, 0.8)))


def sequence_ratio(x):
    return torch.exp(x.over_response(x.l - x.old))


def resp_mean_loss(x):
    r = pick(x.a, (x.over_response(x.r).detach()) * torch.exp(x.l - x.l.detach()), x.r)
    return -x.a * torch.where(hard_mask(x.r, x.a), r, pick(x.a, torch.full_like(x.a, 1.2), torch.full_like(x.a, 0.8)))


LOSSES = {
    "grpo": (lambda x: ppo_loss(x.r, x.a, 0.2, 0.2), {}),
    "ppo": (lambda x: torch.where(x.a < 0, torch.minimum(ppo_loss(x.r, x.a, 0.2, 0.28), -4 * x.a), ppo_loss(x.r, x.a, 0.2, 0.28)),
            {"eps_high": 0.28, "dual_c": 4.0}),
    "gspo": (lambda x: ppo_loss(sequence_ratio(x), x.a, 0.2, 0.2), {"eps_low": 0.2, "eps_high": 0.2}),
    "gspo_token": (lambda x: ppo_loss(sequence_ratio(x).detach() * torch.exp(x.l - x.l.detach()), x.a, 0.2, 0.2),
                   {"eps_low": 0.2, "eps_high": 0.2}),
    "aspo": (aspo_loss, {}),
    "aspo_archer": (aspo_loss, {"uncertain_eps_low": 0.2, "uncertain_eps_high": 0.2}),
    "pos_resp_mean": (resp_mean_loss, {}),
    "no_ratio": (lambda x: -x.a * hard_mask(x.r, x.a) * torch.exp(x.l - x.l.detach()), {}),
    "cispo": (lambda x: -x.r.detach().clamp(0, 3) * x.a * x.l, {"cap": 3.0}),
    "cispo_relative": (lambda x: -x.r.detach().clamp(0.7, 1.5) * x.a * x.l, {"eps_low": 0.3, "eps_high": 0.5}),
    "sapo": (lambda x: -x.a * pick(x.a, torch.sigmoid(x.r - 1) * 4, torch.sigmoid(1.05 * (x.r - 1)) * 4 / 1.05), {}),
    "tv_mask": (lambda x: -x.a * x.r * ~(((x.a > 0) & (x.p - x.p_old > 0.2)) | ((x.a < 0) & (x.p_old - x.p > 0.2))), {}),
    "reinforce": (lambda x: -x.a * x.l, {}),
}  # fmt: skip
RESPONSES = st.lists(
    st.tuples(
        st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.5]),
        st.lists(st.tuples(st.floats(-5, -0.0625, width=16), st.floats(-5, -0.0625, width=16)), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)
KINKS = torch.tensor([0.2, 0.7, 0.8, 1.2, 1.28, 1.5, 1 / 3, 3.0, 4.0], dtype=torch.float64)


class Textbook:
    """Float64 tensors of ragged responses: l with gradient, old, a, and their probabilities and ratio."""

    def __init__(self, responses):
        pairs = [(old, new, a) for a, tokens in responses for old, new in tokens]
        self.old, new, self.a = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
        self.sizes = [len(tokens) for _, tokens in responses]
        self.l = new.requires_grad_()
        self.p, self.p_old, self.r = self.l.exp().detach(), self.old.exp(), torch.exp(self.l - self.old)

    def over_response(self, values):
        return torch.cat([part.mean().expand(len(part)) for part in values.split(self.sizes)])


def test_every_surrogate_has_a_textbook_loss():
    assert set(LOSSES) == set(SURROGATES)


@pytest.mark.parametrize("name", LOSSES)
@PROPERTY
@given(RESPONSES)
def test_value_and_gradient_are_those_of_the_textbook_loss(name, make_tokens, responses):
    loss_of, params = LOSSES[name]
    book = Textbook(responses)
    losses = loss_of(book)
    losses.sum().backward()
    response = torch.arange(len(book.sizes)).repeat_interleave(torch.tensor(book.sizes))
    tokens = make_tokens(book.l.detach(), old_logp=book.old, advantage=book.a, response=response)
    ours = SURROGATES[name](tokens, **params)
    # Away from the kinks: there float32 and float64 may stand on two sides.
    watched = [book.r.detach(), sequence_ratio(book).detach(), (book.p - book.p_old).abs()]
    smooth = torch.stack([((x[:, None] - KINKS).abs() > 1e-5).all(1) for x in watched]).all(0)
    torch.testing.assert_close((-tokens.advantage * ours.factor).double()[smooth], book.l.grad[smooth], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(ours.value.double()[smooth], losses.detach()[smooth], rtol=2e-5, atol=1e-6)


def test_a_function_is_ratio_based_unless_it_says_otherwise():
    def mine(tokens):
        raise NotImplementedError

    assert {name for name, f in SURROGATES.items() if not is_ratio_based(f)} == {"no_ratio", "reinforce"}
    assert is_ratio_based(mine)
    mine.ratio_based = False
    assert not is_ratio_based(mine)
