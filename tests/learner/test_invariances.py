"""What holds for every objective: garbage in the padding, another order, another split into micro-batches change nothing; no weight, no
credit; the bound of each gradient; and one and the same credit at ratio 1."""

import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.schema import KlKind, KlRatio
from learner.corrections import CORRECTIONS
from learner.credit import token_credit
from learner.loss_tokens import LossTokens, response_index, select_loss_tokens
from learner.metric_sums import MetricSums
from learner.surrogates import SURROGATES, grpo, is_ratio_based

pytestmark = pytest.mark.timeout(120)
NAN, INF = math.nan, math.inf
PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PARAMS = {"cispo_relative": {"eps_high": 4.0}, "ppo": {"dual_c": 3.0}}
OBJECTIVES = {name: partial(f, **PARAMS.get(name, {})) for name, f in SURROGATES.items()}
INTERPOLATED = partial(CORRECTIONS["decoupled"], prox="interpolated")
HALVES = st.integers(-8, 0).map(lambda n: n / 2)
TOKEN = st.tuples(HALVES, HALVES, HALVES, HALVES, st.integers(0, 6).map(lambda n: n / 2), st.integers(1, 3))
RESPONSE = st.tuples(st.sampled_from([-2.0, 0.0, 0.5, 1.0]), st.lists(TOKEN, min_size=1, max_size=5))
RESPONSES = st.lists(RESPONSE, min_size=1, max_size=5)
# Bound of the factor for A > 0 and A < 0 at the parameters above; e^20 is the clamp of the ratio. SAPO's: the highest 4 s (1 - s) r on
# a fine grid, for tau 1 and 1.05.
BOUNDS = {
    "grpo": (1.2, math.exp(20)), "ppo": (1.2, 3.0), "gspo": (1.0004, math.exp(20)), "gspo_token": (1.0004, math.exp(10)),
    "aspo": (3.0, 3.0), "aspo_archer": (3.0, 3.0), "pos_resp_mean": (math.exp(20), math.exp(20)), "no_ratio": (1.0, 1.0),
    "cispo": (5.0, 5.0), "cispo_relative": (5.0, 5.0), "sapo": (1.57468, 1.53626), "tv_mask": (math.exp(20), math.exp(20)),
    "reinforce": (1.0, 1.0),
}  # fmt: skip


def tokens_of(responses, *, extra=0, garbage=0.0, order=None):
    """Loss tokens of padded rows, with ``extra`` more columns and garbage wherever no token is."""
    responses = responses if order is None else [responses[i] for i in order]
    width = max(len(tokens) for _, tokens in responses) + extra
    columns = torch.full((6, len(responses), width), garbage)
    mask = torch.zeros(len(responses), width, dtype=torch.bool)
    for i, (_, tokens) in enumerate(responses):
        columns[:, i, : len(tokens)] = torch.tensor(tokens).t()
        mask[i, : len(tokens)] = True
    logp, old, roll, ref, entropy, behave = (select_loss_tokens(column, mask) for column in columns)
    one, ten = torch.ones(len(logp)), torch.full((len(logp),), 10.0)
    advantage = select_loss_tokens(torch.tensor([a for a, _ in responses]), mask)
    return LossTokens(
        logp=logp, entropy=entropy, old_logp=old, roll_logp=roll, ref_logp=ref, advantage=advantage, sample_weight=one,
        token_weight=one, correction=one, policy_denominator=ten, kl_denominator=ten, kl_mask=one, response=response_index(mask),
        behave_step=behave, prox_step=2 * one, current_step=3 * one,
    )  # fmt: skip


def credit_of(tokens, surrogate, correction):
    return token_credit(
        tokens, surrogate=surrogate, correction=correction, kl_kind=KlKind.k3, kl_beta=0.05, kl_ratio=KlRatio.through,
        kl_entropy_quantile=0.5, entropy_beta=0.01,
        token_weighting=lambda t: 1 + t.response_mean(t.entropy),  # a whole-response weight
    )  # fmt: skip


def same_values(first, second):
    assert first.keys() == second.keys()
    assert second == pytest.approx(first, rel=1e-4, abs=1e-5)


CHOICES = st.tuples(
    st.sampled_from(sorted(OBJECTIVES)).map(OBJECTIVES.get), st.sampled_from([None, INTERPOLATED, *CORRECTIONS.values()])
)


@pytest.mark.parametrize("name", OBJECTIVES)
@PROPERTY
@given(
    RESPONSES,
    st.integers(1, 3),
    st.sampled_from([NAN, INF, -INF, 1e30]),
    st.sampled_from([None, *CORRECTIONS.values()]),
    st.data(),
)
def test_padding_order_and_micro_batches_change_nothing(name, responses, extra, garbage, correction, data):
    choice = (OBJECTIVES[name], correction)
    whole = credit_of(tokens_of(responses), *choice)
    padded = credit_of(tokens_of(responses, extra=extra, garbage=garbage), *choice)
    assert torch.equal(whole.logp, padded.logp)
    assert torch.equal(whole.entropy, padded.entropy)
    assert whole.loss == padded.loss
    assert whole.sums.values() == padded.sums.values()

    order = data.draw(st.permutations(range(len(responses))))
    cut = data.draw(st.integers(0, len(responses)))
    parts = [credit_of(tokens_of(responses, order=part), *choice) for part in (order[:cut], order[cut:]) if part]
    by_response = whole.logp.split([len(tokens) for _, tokens in responses])
    # Not bit for bit: torch's exp of the last few elements, outside a vector register, may differ in the last bit.
    ours, expected = torch.cat([part.logp for part in parts]), torch.cat([by_response[i] for i in order])
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-9)
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-4, abs=1e-4)
    merged = sum((part.sums for part in parts), start=MetricSums({}, {}))
    assert merged.maxima == whole.sums.maxima
    assert all((merged.histograms[n] == counts).all() for n, counts in whole.sums.histograms.items())
    same_values(merged.values(), whole.sums.values())


@PROPERTY
@given(CHOICES, RESPONSES, st.randoms(use_true_random=False))
def test_the_order_of_the_tokens_is_free(choice, responses, random):
    """Also of one response's, where no two entropies tie: the rank of a tie goes by order."""
    responses = [(a, [(*t[:4], 0.25 * i + 0.01 * j, t[5]) for j, t in enumerate(ts)]) for i, (a, ts) in enumerate(responses)]
    tokens = tokens_of(responses)
    order = list(range(len(tokens.logp)))
    random.shuffle(order)
    moved = replace(tokens, **{f.name: x[order] for f in fields(tokens) if (x := getattr(tokens, f.name)) is not None})
    expected = credit_of(tokens, *choice).logp[order]
    torch.testing.assert_close(credit_of(moved, *choice).logp, expected, rtol=1e-5, atol=1e-7)


@PROPERTY
@given(CHOICES, RESPONSES, st.sampled_from(["sample_weight", "advantage"]))
def test_no_weight_no_credit(choice, responses, name):
    tokens = tokens_of(responses)
    tokens = replace(tokens, **{name: torch.zeros_like(tokens.logp)})
    surrogate, correction = choice
    credit = token_credit(tokens, surrogate=surrogate, correction=correction, kl_kind=KlKind.off, kl_beta=0.0, entropy_beta=0.0)
    assert (credit.logp == 0).all()


@pytest.mark.parametrize("name", BOUNDS)
@PROPERTY
@given(st.lists(st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.booleans()), min_size=1, max_size=20))
def test_the_gradient_has_the_sign_of_minus_the_advantage_and_its_bound(name, make_tokens, rows):
    logp, old, positive = (torch.tensor(column) for column in zip(*rows, strict=True))
    tokens = make_tokens(logp, old_logp=old, advantage=torch.where(positive, 1.0, -1.0), response=torch.arange(len(logp)) // 3)
    factor = OBJECTIVES[name](tokens).factor
    high, low = BOUNDS[name]
    assert (factor >= 0).all()
    assert (factor <= torch.where(positive, high, low) * (1 + 1e-6)).all()


def test_every_objective_has_a_bound():
    assert set(BOUNDS) == set(SURROGATES)


@PROPERTY
@given(RESPONSES)
def test_ratio_based_objectives_agree_at_ratio_one(responses):
    """Factor exactly 1 where A is not 0: in the first optimizer step of a batch a scheme changes nothing."""
    tokens = tokens_of(responses)
    tokens = replace(tokens, old_logp=tokens.logp)
    plain = token_credit(tokens, surrogate=grpo, kl_kind=KlKind.off, kl_beta=0.0, entropy_beta=0.0)
    for name, surrogate in OBJECTIVES.items():
        if is_ratio_based(SURROGATES[name]):
            credit = token_credit(tokens, surrogate=surrogate, kl_kind=KlKind.off, kl_beta=0.0, entropy_beta=0.0)
            assert torch.equal(credit.logp, plain.logp), name
