"""Credit put together: the formula by hand, masks, padding, non-finite values, and the metrics beside it."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import KlKind
from learner.credit import token_credit
from learner.loss_tokens import LossTokens, response_index, select_loss_tokens
from learner.metric_sums import MetricSums
from learner.surrogates import aspo, grpo

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


@pytest.mark.parametrize("surrogate", [grpo, aspo])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_case_b81_4_nan_ratio_reaches_the_guard(surrogate, advantage, make_tokens):
    """Also where the advantage is 0: hiding it there would hide a broken model."""
    for fields in ({"logp": [NAN], "old_logp": [-1.0]}, {"logp": [-1.0], "old_logp": [NAN]}):
        credit = token_credit(make_tokens(advantage=[advantage], **fields), **PLAIN | {"surrogate": surrogate})
        assert credit.logp.isnan().all()
        assert credit.loss.isnan()


@pytest.mark.parametrize("case_id", ["B81-1", "B81-2", "B81-3"])
@pytest.mark.parametrize("surrogate", [grpo, aspo, partial(grpo, dual_c=3.0)])
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


ROWS = st.lists(
    st.lists(st.tuples(*[st.floats(-4, 0, width=16)] * 3, st.floats(0, 3, width=16)), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)


def _pad(rows, extra, garbage):
    """[R, L] fields and mask of ragged rows, with `extra` more columns, garbage wherever no token is."""
    width = max(map(len, rows)) + extra
    fields = torch.full((4, len(rows), width), garbage)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        fields[:, i, : len(row)] = torch.tensor(row).t()
        mask[i, : len(row)] = True
    return fields, mask


def _credit_of(rows, *, extra=0, garbage=0.0, denominator=10.0):
    (logp, old, ref, entropy), mask = _pad(rows, extra, garbage)
    response = response_index(mask)
    one = torch.ones(len(response))
    advantage = select_loss_tokens(torch.tensor([row[0][0] + 2 for row in rows]), mask)  # a response's tokens share it
    picked = [select_loss_tokens(field, mask) for field in (logp, entropy, old, old, ref)]
    tokens = LossTokens(*picked, advantage, one, one, one, one * denominator, one * denominator, one, response)
    return token_credit(tokens, surrogate=aspo, kl_kind=KlKind.k3, kl_beta=0.05, entropy_beta=0.01)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS, st.integers(0, 3), st.sampled_from([NAN, INF, -INF, 1e30]), st.data())
def test_padding_order_and_micro_batches_change_nothing(rows, extra, garbage, data):
    """Properties (e) and (f): garbage padding, another order of responses, a split in two."""
    whole, padded = _credit_of(rows), _credit_of(rows, extra=extra, garbage=garbage)
    assert torch.equal(whole.logp, padded.logp)
    assert torch.equal(whole.entropy, padded.entropy)
    assert whole.loss == padded.loss
    assert whole.sums == padded.sums

    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [_credit_of([rows[i] for i in part]) for part in (order[:cut], order[cut:]) if part]
    by_response = dict(zip(range(len(rows)), whole.logp.split([len(row) for row in rows]), strict=True))
    assert torch.equal(torch.cat([part.logp for part in parts]), torch.cat([by_response[i] for i in order]))
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-4, abs=1e-5)
    merged = sum((part.sums for part in parts), start=MetricSums({}, {}))
    assert merged.maxima == whole.sums.maxima
    assert merged.values() == pytest.approx(whole.sums.values(), rel=1e-5, abs=1e-6)


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
        "eff/token_frac": 0.5,
        "kl/old_new": (3.0 - math.log(0.5 * 1.5 * 4)) / 4,
        "mismatch/logp_absdiff": 3 * log2 / 4, "mismatch/logp_absdiff_max": 2 * log2,
        "mismatch/rho_mean": 4.25 / 4, "mismatch/rho_max": 2.0,
        "mismatch/k3_engine": (0.25 + log2) / 4,
    }  # fmt: skip
    assert credit.sums.values() == pytest.approx(expected, abs=1e-6)
    assert credit.sums.sums["clip/hard_pos"] == (1.0, 2.0)


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
