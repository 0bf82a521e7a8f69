"""Credit put together: the formula by hand, masks, padding, non-finite values, and the metrics beside it."""

import math
from functools import partial

import pytest
import torch

from configs.schema import KlKind, KlRatio
from learner.corrections import Correction
from learner.credit import token_credit
from learner.loss_tokens import LossTokens, response_index, select_loss_tokens
from learner.metric_sums import MetricSums
from learner.surrogates import SURROGATES, Surrogate, aspo, grpo, is_ratio_based

pytestmark = pytest.mark.timeout(60)
NAN, INF = math.nan, math.inf
PLAIN = {"surrogate": grpo, "kl_kind": KlKind.off, "kl_beta": 0.0, "entropy_beta": 0.0}


def number(value):
    return float(value)  # "nan", "inf" and "-inf" of the case file


def test_every_factor_has_its_place(make_tokens):
    """One token, r = 1/2, A = 2, so w = 2; d = ln 2, so k3's factor is 1/2 and its value ln 2 - 1/2:
    c = -2*3*5*7*2/11 + .1*(1/2)*1/13;   e = -.01/11;   L = -2*2*3*5*7/11 + .1*(ln 2 - 1/2)/13 - .01*1.5/11."""
    tokens = make_tokens(
        [math.log(0.25)], old_logp=[math.log(0.5)], ref_logp=[math.log(0.125)], advantage=[2.0], entropy=[1.5],
        sample_weight=[3.0], token_weight=[5.0], correction=[7.0], policy_denominator=[11.0], kl_denominator=[13.0],
    )  # fmt: skip
    credit = token_credit(tokens, surrogate=aspo, kl_kind=KlKind.k3, kl_beta=0.1, entropy_beta=0.01)
    assert float(credit.logp) == pytest.approx(-420 / 11 + 0.05 / 13, rel=1e-6)
    assert float(credit.entropy) == pytest.approx(-0.01 / 11, rel=1e-6)
    assert float(credit.loss) == pytest.approx(-420 / 11 + 0.1 * (math.log(2) - 0.5) / 13 - 0.015 / 11, rel=1e-6)
    squared = token_credit(tokens, surrogate=aspo, kl_kind=KlKind.k2, kl_beta=0.1, entropy_beta=0.0)
    assert float(squared.logp) == pytest.approx(-420 / 11 + 0.1 * math.log(2) / 13, rel=1e-6)


def test_kl_term_has_its_own_mask_and_no_weights(make_tokens):
    """Token 0 is out of the KL term, and what its reference says does not matter; weights and correction 0 do not touch token 1's."""
    tokens = make_tokens(
        [-1.0, -1.0], ref_logp=[NAN, -2.0], advantage=[0.0, 1.0], correction=[1.0, 0.0],
        sample_weight=[1.0, 0.0], kl_mask=[0.0, 1.0], kl_denominator=[1.0, 4.0],
    )  # fmt: skip
    credit = token_credit(tokens, surrogate=grpo, kl_kind=KlKind.k2, kl_beta=0.2, entropy_beta=0.0)
    assert credit.logp.tolist() == pytest.approx([0.0, 0.2 * 1.0 / 4])
    assert float(credit.loss) == pytest.approx(0.2 * 0.5 / 4)
    assert credit.sums.sums["kl/k1_ref"] == (1.0, 1.0)


def test_kl_without_a_reference_is_refused(make_tokens):
    with pytest.raises(ValueError, match=r"learner\.reference=frozen"):
        token_credit(make_tokens([-1.0]), surrogate=grpo, kl_kind=KlKind.k3, kl_beta=0.1, entropy_beta=0.0)


def test_case_b79_masked_positions_leak_nothing(numeric_cases):
    """The same loss and credit as with zeros at the masked positions, and a finite gradient through the log-probabilities."""
    case = numeric_cases["B79-1"]

    def loss_and_gradient(inputs):
        logp = torch.tensor([list(map(number, inputs["log_probs"]))], requires_grad=True)
        mask = torch.tensor([inputs["mask"]], dtype=torch.bool)
        credit, picked = token_credit(_from_rows(logp, mask), **PLAIN), logp[mask]
        (credit.logp * picked).sum().backward()
        return credit.loss, logp.grad

    loss, gradient = loss_and_gradient(case["inputs"])
    expected_loss, expected_gradient = loss_and_gradient(case["expect"]["loss_and_gradient_equal_to"])
    assert loss.isfinite()
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient)
    assert gradient.tolist() == [[-1.0, 0.0, -1.0, 0.0, -1.0, 0.0]]


def test_case_b79_nan_at_a_valid_position_is_reported(numeric_cases):
    inputs = numeric_cases["B79-2"]["inputs"]
    logp = torch.tensor([list(map(number, inputs["log_probs"]))])
    credit = token_credit(_from_rows(logp, torch.tensor([inputs["mask"]], dtype=torch.bool)), **PLAIN)
    assert credit.loss.isnan()
    assert credit.logp.isnan().tolist() == [False, True, False]


def _from_rows(logp, mask):
    """Loss tokens of padded rows with A = 1, r = 1 and denominator 1; old and engine log-probabilities carry the same garbage."""
    flat = select_loss_tokens(logp, mask)
    one = torch.ones_like(flat)
    return LossTokens(flat, flat, flat, flat, None, one, one, one, one, one, one, one, response_index(mask))


RATIO_BASED = [partial(f, eps_high=0.2) if n == "cispo_relative" else f for n, f in SURROGATES.items() if is_ratio_based(f)]


@pytest.mark.parametrize("surrogate", [*RATIO_BASED, SURROGATES["no_ratio"]])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_case_b81_4_nan_ratio_reaches_the_guard(surrogate, advantage, make_tokens):
    """Also where the advantage is 0: hiding it there would hide a broken model."""
    for fields in ({"logp": [NAN], "old_logp": [-1.0]}, {"logp": [-1.0], "old_logp": [NAN]}):
        credit = token_credit(make_tokens(advantage=[advantage], **fields), **PLAIN | {"surrogate": surrogate})
        assert credit.logp.isnan().all()
        assert credit.loss.isnan()


@pytest.mark.parametrize("case_id", ["B81-1", "B81-2", "B81-3"])
@pytest.mark.parametrize("surrogate", [*RATIO_BASED, SURROGATES["no_ratio"], SURROGATES["reinforce"], partial(grpo, dual_c=3.0)])
def test_cases_b81_ratio_overflow(case_id, surrogate, numeric_cases, make_tokens):
    case = numeric_cases[case_id]
    for sign in (1, -1):
        gap = sign * case["inputs"]["new_minus_old_log_prob"]
        tokens = make_tokens([gap - 1.0], old_logp=[-1.0], advantage=[case["inputs"]["advantage"]])
        credit = token_credit(tokens, **PLAIN | {"surrogate": surrogate})
        assert credit.loss.isfinite()
        assert credit.logp.isfinite().all()
        if case["inputs"]["advantage"] == 0:
            assert credit.logp == case["expect"]["gradient"] == 0


def test_metrics_of_four_tokens(make_tokens):
    """A = (+,+,-,0), r = (1/2, 3/2, 4, 1), ASPO's w = (2, 0, 3, 0); engine log-probabilities off by (0, ln 2, 0, -2 ln 2)."""
    old = torch.tensor([0.5, 0.25, 0.125, 0.5]).log()
    tokens = make_tokens(
        old + torch.tensor([0.5, 1.5, 4.0, 1.0]).log(), old_logp=old, entropy=[1.0, 2.0, 4.0, 8.0], advantage=[2.0, 1.0, -1.0, 0.0],
        roll_logp=old - torch.tensor([1.0, 2.0, 1.0, 0.25]).log(),
    )  # fmt: skip
    credit = token_credit(tokens, **PLAIN | {"surrogate": aspo})
    log2 = math.log(2)
    expected = {
        "policy/entropy": 3.75, "policy/entropy_pos": 1.5, "policy/entropy_neg": 4.0,
        "ratio/mean_pos": 1.0, "ratio/mean_neg": 4.0, "ratio/max_pos": 1.5, "ratio/max_neg": 4.0,
        "w/mean_pos": 1.0, "w/mean_neg": 3.0, "w/max_pos": 2.0, "w/max_neg": 3.0,
        "clip/hard_pos": 0.5, "clip/hard_neg": 0.0, "clip/dual_pos": 0.0, "clip/dual_neg": 1.0,
        "clip/hard_pos_all": 0.25, "clip/hard_neg_all": 0.0, "clip/dual_pos_all": 0.0, "clip/dual_neg_all": 0.25,
        "ratio/std_pos": 0.5, "ratio/std_neg": 0.0, "ratio/lag_frac": 0.5,
        "w/std_pos": 1.0, "w/std_neg": 0.0, "w/ess_pos": 0.5, "w/ess_neg": 1.0,
        "eff/token_frac": 0.5, "eff/mean": 1.25, "eff/ess": 25 / 52, "eff/nonfinite_frac": 0.0, "mismatch/nonfinite_frac": 0.0,
        "kl/old_new": (3.0 - math.log(0.5 * 1.5 * 4)) / 4,
        "mismatch/logp_absdiff": 3 * log2 / 4, "mismatch/logp_absdiff_max": 2 * log2,
        "mismatch/rho_mean": 4.25 / 4, "mismatch/rho_max": 2.0,
        "mismatch/k3_engine": (0.25 + log2) / 4,
    }  # fmt: skip
    values = credit.sums.values()
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert credit.sums.sums["clip/hard_pos"] == (1.0, 2.0)
    # Percentiles are right to 2 % of their logarithm, and a weight of 0 reads 0.
    for name, exact in {
        "ratio/p01_pos": 0.5,
        "ratio/p99_pos": 1.5,
        "ratio/p50_neg": 4.0,
        "w/p99_neg": 3.0,
        "w/p99_pos": 2.0,
    }.items():
        assert math.log(values[name]) == pytest.approx(math.log(exact), rel=0.02), name
    assert values["w/p01_pos"] == 0.0


def test_mean_ratio_of_a_response_and_weights_by_probability(make_tokens):
    """Two positive responses with ratios (2, 1, 3) and (4): the mean over responses is (2 + 4) / 2, not 10 / 4. Factors in the order of
    pi, .1 .2 .4 .8, are the ratios 4, 2, 1, 3 (grpo without a bound): one token a quartile. A negative token is no part of the former."""
    new = torch.tensor([0.2, 0.4, 0.8, 0.1])
    tokens = make_tokens(new.log(), old_logp=(new / torch.tensor([2.0, 1.0, 3.0, 4.0])).log(), response=[0, 0, 0, 1])
    values = token_credit(tokens, **PLAIN | {"surrogate": partial(grpo, eps_high=10.0)}).sums.values()
    assert values["ratio/resp_mean_pos"] == pytest.approx(3.0)
    assert "ratio/resp_mean_neg" not in values
    quartiles = [values[f"w/by_pi_quartile_{i}"] for i in (1, 2, 3, 4)]
    assert quartiles == pytest.approx([4.0, 2.0, 1.0, 3.0], rel=1e-5)


def test_kl_by_entropy_half(make_tokens):
    """d = 0 at entropies 1 and 2, d = ln 2 at 3 and 4: k3 is 0 in the lower half, ln 2 - 1/2 in the upper."""
    logp = torch.full((4,), 0.5).log()
    tokens = make_tokens(logp, ref_logp=logp - torch.tensor([0.0, 0.0, 1.0, 1.0]) * math.log(2), entropy=[1.0, 2.0, 3.0, 4.0])
    values = token_credit(tokens, **PLAIN).sums.values()
    assert values["kl/k3_ref_by_entropy_half_1"] == pytest.approx(0.0, abs=1e-7)
    assert values["kl/k3_ref_by_entropy_half_2"] == pytest.approx(math.log(2) - 0.5)


@pytest.mark.parametrize("broken", [{"logp": NAN}, {"old_logp": NAN}, {"entropy": NAN}, {"logp": -INF, "old_logp": -INF}])
def test_a_token_that_is_not_finite_is_counted_and_in_no_statistic(broken, make_tokens):
    fields = {"logp": [-1.0, -2.0, -3.0], "old_logp": [-1.5, -1.0, -3.0], "roll_logp": [-1.5] * 3, "entropy": [1.0, 2.0, 3.0]}
    fields |= {"advantage": [1.0, -1.0, 1.0]}
    alone = token_credit(make_tokens(**{n: v[1:] for n, v in fields.items()}, response=[0, 1]), **PLAIN).sums.values()
    for name, value in broken.items():
        fields[name][0] = value
    values = token_credit(make_tokens(**fields, response=[2, 0, 1]), **PLAIN).sums.values()
    assert values["eff/nonfinite_frac"] == pytest.approx(1 / 3)
    assert all(math.isfinite(value) for value in values.values())
    same = [n for n in alone if n.startswith(("ratio/", "w/", "policy/", "kl/"))]
    assert {n: values[n] for n in same} == pytest.approx({n: alone[n] for n in same})


def test_share_of_the_credit_on_actions(make_tokens):
    """|A| w is 2 on the action, 1 and 1 on reasoning."""
    tokens = make_tokens([-1.0] * 3, advantage=[2.0, -1.0, 1.0], role=[1, 0, 0])
    assert token_credit(tokens, **PLAIN).sums.values()["eff/action_share"] == pytest.approx(0.5)


def test_token_weights_and_low_entropy_kl_have_their_place(make_tokens):
    """Weights (3, 0, 1). At quantile 0.5 two of three tokens are low-entropy: k2 with d = 1 and beta .1 is on these alone, over its
    own denominator 2."""
    tokens = make_tokens([-1.0] * 3, ref_logp=[-2.0] * 3, entropy=[0.1, 2.0, 0.3], kl_denominator=[2.0] * 3)
    weighting = lambda tokens: torch.tensor([3.0, 0.0, 1.0])  # noqa: E731
    settings_ = PLAIN | {"kl_kind": KlKind.k2, "kl_beta": 0.1}
    credit = token_credit(tokens, **settings_, token_weighting=weighting, kl_entropy_quantile=0.5)
    assert credit.logp.tolist() == pytest.approx([-3 + 0.05, 0.0, -1 + 0.05])
    assert float(credit.loss) == pytest.approx(-4 + 2 * 0.05 * 0.5)
    assert credit.sums.sums["kl/k1_ref"] == (2.0, 2.0)


def test_kl_weighed_by_the_ratio(make_tokens):
    """r = 2, d = ln 2, beta .1, A = 0: through r the factor of k3 is r d."""
    tokens = make_tokens([math.log(0.5)], old_logp=[math.log(0.25)], ref_logp=[math.log(0.25)], advantage=[0.0])
    settings_ = PLAIN | {"kl_kind": KlKind.k3, "kl_beta": 0.1}
    assert float(token_credit(tokens, **settings_, kl_ratio=KlRatio.through).logp) == pytest.approx(0.2 * math.log(2))
    assert float(token_credit(tokens, **settings_, kl_ratio=KlRatio.detached).logp) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"surrogate": lambda t: Surrogate(torch.ones(1), t.logp, {})}, r"factor and value must be float32 of shape \[2\]"),
        ({"correction": lambda t: Correction(torch.ones(2, dtype=torch.float64))}, r"LossTokens\.correction must be"),
        ({"token_weighting": lambda t: torch.ones(1)}, r"LossTokens\.token_weight must be"),
    ],
)
def test_a_function_of_the_wrong_shape_is_named(part, named, make_tokens):
    """It would broadcast without a word."""
    with pytest.raises(ValueError, match=named):
        token_credit(make_tokens([-1.0, -1.0]), **PLAIN | part)


def test_no_tokens_and_one_sign_only(make_tokens):
    """A mean or a maximum over nothing is left out; a micro-batch without loss tokens adds nothing."""
    empty = token_credit(make_tokens([], ref_logp=[]), surrogate=aspo, kl_kind=KlKind.k3, kl_beta=0.1, entropy_beta=0.1)
    assert float(empty.loss) == 0.0
    assert empty.sums.values() == {}
    positive = token_credit(make_tokens([-1.0]), **PLAIN).sums
    assert (empty.sums + positive).values() == positive.values()
    assert "w/mean_neg" not in positive.values()
    assert "ratio/max_neg" not in positive.values()


@pytest.mark.parametrize("order", [(NAN, 1.0), (1.0, NAN)])
def test_a_nan_maximum_survives_merging(order):
    first, second = (MetricSums({}, {"ratio/max_pos": value}) for value in order)
    assert math.isnan((first + second).maxima["ratio/max_pos"])


def test_wrong_fields_are_named(make_tokens):
    with pytest.raises(ValueError, match=r"LossTokens.advantage must be a detached torch.float32 tensor of shape \[2\]"):
        make_tokens([-1.0, -1.0], advantage=[1.0])
    with pytest.raises(ValueError, match=r"LossTokens.logp .* with gradient"):
        make_tokens(torch.zeros(2, requires_grad=True))
