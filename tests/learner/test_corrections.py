"""Corrections against the numbers of ALGORITHMS 2.9 and 2.10, a slow loop in Python, and log-probabilities that are not finite."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import KlKind
from learner.corrections import (
    CORRECTIONS,
    bypass,
    decoupled,
    geometric,
    icepop,
    k3_rejection,
    mis_seq,
    none,
    opsm,
    tis_seq,
    tis_token,
)
from learner.credit import token_credit
from learner.surrogates import grpo

pytestmark = pytest.mark.timeout(60)
PLAIN = {"surrogate": grpo, "kl_kind": KlKind.off, "kl_beta": 0.0, "entropy_beta": 0.0}


def of_rho(make_tokens, rho, **fields):
    """Tokens whose learner gives exp(-1) and whose engine gave that divided by rho."""
    old = torch.full((len(rho),), -1.0)
    return make_tokens(fields.pop("logp", old), old_logp=old, roll_logp=old - torch.tensor(rho).log(), **fields)


def test_one_token_by_hand(make_tokens):
    """old -1, roll -2: rho e. TIS(2) 2, IcePop(.5, 5) e, IcePop(.5, 2) 0. old -2, roll -1: rho 1/e; TIS keeps it, IcePop masks it."""
    high = make_tokens([-1.0], roll_logp=[-2.0])
    low = make_tokens([-2.0], roll_logp=[-1.0])
    assert float(tis_token(high).weight) == pytest.approx(2.0)
    assert float(icepop(high).weight) == pytest.approx(2.71828, abs=1e-5)
    assert float(icepop(high, high=2.0).weight) == 0.0
    assert float(tis_token(low).weight) == pytest.approx(0.367879, abs=1e-6)
    assert float(icepop(low).weight) == 0.0
    assert icepop(high, high=2.0).regions["above"].all()
    assert icepop(low).regions["below"].all()


def test_a_product_over_the_response_has_the_length_trap(make_tokens):
    """1.1 a token is 13,780 after a hundred: truncated by tis_seq, masked by mis_seq; a second response keeps its own product."""
    tokens = of_rho(make_tokens, [1.1] * 100 + [1.5, 0.8], response=[0] * 100 + [1, 1])
    assert float(mis_seq(tokens, high=20_000.0).weight[0]) == pytest.approx(1.1**100, rel=1e-4)
    assert tis_seq(tokens).weight.tolist() == pytest.approx([2.0] * 100 + [1.2] * 2, rel=1e-6)
    assert mis_seq(tokens).weight.tolist() == pytest.approx([0.0] * 100 + [1.2] * 2, rel=1e-6)


def test_responses_are_kept_or_dropped_whole(make_tokens):
    """rho (2, 1/2) has geometric mean 1 but K3 mean (1 - ln 2 + ln 2 - 1/2) / 2 = 1/4; rho (1.01, 1.01) has mean 1.01, K3 4.97e-5."""
    tokens = of_rho(make_tokens, [2.0, 0.5, 1.01, 1.01], response=[0, 0, 1, 1])
    assert geometric(tokens).weight.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert k3_rejection(tokens).weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert k3_rejection(tokens, limit=0.2501).weight.tolist() == [1.0] * 4
    assert k3_rejection(tokens, limit=0.2499).weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert k3_rejection(tokens, limit=4.9e-5).weight.tolist() == [0.0] * 4


def test_opsm_drops_negative_responses_that_the_policy_has_left(make_tokens):
    """mean(roll - logp): (0.4 + 0.8) / 2 = 0.6 for the first response, 0.3 for the second; only A < 0 and above 0.5 goes."""
    fields = {"logp": [-1.4, -1.8, -1.3, -1.3], "roll_logp": [-1.0] * 4, "response": [0, 0, 1, 1]}
    negative = make_tokens(**fields, advantage=[-1.0] * 4)
    positive = make_tokens(**fields, advantage=[1.0] * 4)
    assert opsm(negative).weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert opsm(positive).weight.tolist() == [1.0] * 4
    assert opsm(negative, delta=0.25).weight.tolist() == [0.0] * 4


def test_decoupled_by_hand(make_tokens):
    """ALGORITHMS 2.10: pi_b .4, pi_prox .5, pi .55, A = 1, eps .2: r = 1.1, omega = 1.25, loss and gradient -1.375. Coupled: the ratio
    to pi_b is 1.375 > 1.2, so value -1.2 and gradient 0."""
    tokens = make_tokens([math.log(0.55)], old_logp=[math.log(0.5)], roll_logp=[math.log(0.4)])
    credit = token_credit(tokens, **PLAIN, correction=decoupled)
    assert float(decoupled(tokens).weight) == pytest.approx(1.25)
    assert float(credit.loss) == pytest.approx(-1.375, abs=1e-6)
    assert float(credit.logp) == pytest.approx(-1.375, abs=1e-6)
    coupled = token_credit(tokens, **PLAIN, correction=bypass)
    assert float(coupled.loss) == pytest.approx(-1.2, abs=1e-6)
    assert float(coupled.logp) == 0.0
    assert float(coupled.sums.values()["ratio/mean_pos"]) == pytest.approx(1.375)


def test_decoupled_bounds(make_tokens):
    tokens = of_rho(make_tokens, [0.25, 1.0, 8.0])
    assert decoupled(tokens).weight.tolist() == pytest.approx([0.25, 1.0, 5.0])
    assert decoupled(tokens, lower=0.5, upper=2.0).weight.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert decoupled(tokens, lower=0.5, upper=2.0, mode="mask").weight.tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert decoupled(tokens).prox_logp is None


def test_the_interpolated_proximal_policy(make_tokens):
    """pi_b = .2, pi = .8, so log pi - log pi_b = ln 4. Steps: made at 2, now 6, the update began at 5: a = 3/4, pi_prox = .2 * 4^(3/4),
    omega = 4^(3/4), r = 4^(1/4). Made at the step of the update: a = 0, omega 1. Not a step since: pi_prox = pi_b."""
    count = 3
    tokens = make_tokens(
        torch.full((count,), 0.8).log(), old_logp=torch.full((count,), 0.3).log(), roll_logp=torch.full((count,), 0.2).log(),
        behave_step=[2.0, 5.0, 6.0], prox_step=[5.0] * count, current_step=[6.0] * count,
    )  # fmt: skip
    given = decoupled(tokens, prox="interpolated")
    assert given.weight.tolist() == pytest.approx([4**0.75, 1.0, 1.0], rel=1e-6)
    assert given.prox_logp.exp().tolist() == pytest.approx([0.2 * 4**0.75, 0.2, 0.2], rel=1e-5)
    credit = token_credit(tokens, **PLAIN | {"surrogate": lambda t: grpo(t, eps_high=10.0)}, correction=decoupled_by_steps)
    assert (-credit.logp).tolist() == pytest.approx([4.0, 4.0, 4.0], rel=1e-5)  # omega r = pi / pi_b


def decoupled_by_steps(tokens):
    return decoupled(tokens, prox="interpolated")


def test_interpolation_at_the_first_step_of_an_update_has_ratio_one(make_tokens):
    tokens = make_tokens(
        [-0.3, -2.0], roll_logp=[-1.0, -1.0], behave_step=[2.0, 4.0], prox_step=[5.0] * 2, current_step=[5.0] * 2
    )
    given = decoupled(tokens, prox="interpolated")
    assert torch.equal(given.prox_logp, tokens.logp)


def test_interpolation_without_counts_is_refused(make_tokens):
    with pytest.raises(ValueError, match="prox=recompute works without"):
        decoupled(make_tokens([-1.0]), prox="interpolated")


def test_none_is_the_plain_run_bit_for_bit(make_tokens):
    torch.manual_seed(0)
    logp = -torch.rand(50) * 4
    tokens = make_tokens(logp, old_logp=logp + 0.3 * torch.randn(50), roll_logp=logp + torch.randn(50), advantage=torch.randn(50))
    plain, same = token_credit(tokens, **PLAIN), token_credit(tokens, **PLAIN, correction=none)
    assert torch.equal(plain.logp, same.logp)
    assert plain.loss == same.loss


def test_a_correction_touches_the_policy_term_alone(make_tokens):
    """Weight 2 doubles A's part; k2's part with d = 1, beta .1 and the entropy's stay; weight 0 leaves them alone."""
    settings_ = PLAIN | {"kl_kind": KlKind.k2, "kl_beta": 0.1, "entropy_beta": 0.01}
    tokens = make_tokens([-1.0], roll_logp=[-1.0 - math.log(8)], ref_logp=[-2.0], entropy=[1.0])
    doubled = token_credit(tokens, **settings_, correction=tis_token)
    assert float(doubled.logp) == pytest.approx(-2 + 0.1)
    assert float(doubled.entropy) == pytest.approx(-0.01)
    masked = token_credit(tokens, **settings_, correction=icepop)
    assert float(masked.logp) == pytest.approx(0.1)
    assert masked.sums.values()["correction/masked_frac"] == 1.0


QUARTERS = st.integers(-12, 0).map(lambda n: n / 4)  # no ratio of these stands beside a bound, where float32 might err
ROWS = st.lists(st.lists(st.tuples(*[QUARTERS] * 3), min_size=1, max_size=4), min_size=1, max_size=4)


def slow(name, response):
    """The weights of one response of (logp, old, roll) with A = -1, as the table of 2.9 says them."""
    log_rho = [old - roll for _, old, roll in response]
    rho, count = [math.exp(x) for x in log_rho], len(response)
    product, mean = math.prod(rho), sum(log_rho) / count
    left = sum(roll - logp for logp, _, roll in response) / count
    return {
        "none": [1.0] * count,
        "tis_token": [min(r, 2.0) for r in rho],
        "tis_seq": [min(product, 2.0)] * count,
        "mis_token": [r if 0.5 <= r <= 5 else 0.0 for r in rho],
        "icepop": [r if 0.5 <= r <= 5 else 0.0 for r in rho],
        "mis_seq": [product if product <= 3 else 0.0] * count,
        "geometric": [1.0 if 0.999 <= math.exp(mean) <= 1.001 else 0.0] * count,
        "k3_rejection": [1.0 if sum(r - x - 1 for r, x in zip(rho, log_rho, strict=True)) / count <= 0.01 else 0.0] * count,
        "opsm": [0.0 if left > 0.5 else 1.0] * count,
        "decoupled": [min(r, 5.0) for r in rho],
        "bypass": [1.0] * count,
    }[name]


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_every_correction_against_a_slow_loop(name, make_tokens, rows):
    expected = [weight for row in rows for weight in slow(name, row)]
    logp, old, roll = zip(*[token for row in rows for token in row], strict=True)
    response = [i for i, row in enumerate(rows) for _ in row]
    tokens = make_tokens(logp, old_logp=old, roll_logp=roll, advantage=[-1.0] * len(logp), response=response)
    assert CORRECTIONS[name](tokens).weight.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", [n for n in CORRECTIONS if n != "none"])
@pytest.mark.parametrize("roll", [-math.inf, math.nan])
def test_an_engine_value_that_is_not_finite_counts_as_no_mismatch(name, roll, make_tokens):
    """ALGORITHMS 2.9: treated as log-ratio 0 and counted; the other tokens of the response keep theirs."""
    logp, other = [-1.0, -1.0], -1.0005
    broken = make_tokens(logp, roll_logp=[roll, other], advantage=[-1.0, -1.0])
    sound = make_tokens(logp, roll_logp=[-1.0, other], advantage=[-1.0, -1.0])
    correct = CORRECTIONS[name]
    assert torch.equal(correct(broken).weight, correct(sound).weight)
    assert correct(broken).regions["nonfinite"].tolist() == [True, False]
    credit = token_credit(broken, **PLAIN, correction=correct)
    assert torch.equal(credit.logp, token_credit(sound, **PLAIN, correction=correct).logp)
    values = credit.sums.values()
    assert values["correction/nonfinite"] == values["mismatch/nonfinite_frac"] == 0.5
    assert all(math.isfinite(value) for value in values.values())


def test_a_learner_value_that_is_not_finite_still_reaches_the_guard(make_tokens):
    tokens = make_tokens([math.nan, -1.0], old_logp=[-1.0, -1.0], roll_logp=[-1.0, -1.0])
    for correct in CORRECTIONS.values():
        assert token_credit(tokens, **PLAIN, correction=correct).logp.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("correct", "params", "named"),
    [
        (tis_token, {"cap": 0.0}, "lower < upper"),
        (icepop, {"low": 2.0, "high": 1.0}, "lower < upper"),
        (k3_rejection, {"limit": -1.0}, "limit"),
        (decoupled, {"mode": "clip"}, "clamp or mask"),
        (decoupled, {"prox": "old"}, "recompute or interpolated"),
    ],
)
def test_parameters_without_sense_are_named(correct, params, named, make_tokens):
    with pytest.raises(ValueError, match=named):
        correct(make_tokens([-1.0]), **params)


def test_effective_share_of_tokens(make_tokens):
    """ALGORITHMS 2.9: weights (1, 2, .5, 1) have (4.5)^2 / (4 * 6.25) = 0.81."""
    credit = token_credit(make_tokens([-1.0] * 4, sample_weight=[1.0, 2.0, 0.5, 1.0]), **PLAIN)
    assert credit.sums.values()["eff/ess"] == pytest.approx(0.81)
