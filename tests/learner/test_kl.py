"""KL terms against the numbers of ALGORITHMS 2.11 and autograd of the estimators."""

import pytest
import torch

from configs.schema import KlKind, KlRatio
from learner.kl import KL_TERMS, k1, k2, k3, k3_plus, weigh_by_ratio

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("policy", "reference", "value2", "value3"), [(0.5, 0.25, 0.240227, 0.193147), (0.25, 0.5, 0.240227, 0.306853)]
)
def test_values_worked_by_hand(policy, reference, value2, value3):
    log_ratio = torch.tensor([policy / reference]).log()
    assert float(k2(log_ratio).value) == pytest.approx(value2, abs=1e-6)
    assert float(k3(log_ratio).value) == pytest.approx(value3, abs=1e-6)
    assert float(k2(log_ratio).factor) == pytest.approx(float(log_ratio))
    assert float(k3(log_ratio).factor) == pytest.approx(1 - reference / policy, abs=1e-6)
    assert float(k1(log_ratio).value) == pytest.approx(0.693147 if policy > reference else -0.693147, abs=1e-6)
    assert float(k3_plus(log_ratio).value) == pytest.approx(value3, abs=1e-6)
    assert torch.equal(k3_plus(log_ratio).factor, log_ratio)


def test_bernoulli_expectations():
    """p = sigmoid(theta) = .5 against (.25, .75) for (1, 0): E k3 = KL(pi||ref) = .143841, E k2 = .161214 (biased). With
    dlogp/dtheta = (1 - p, -p) the expected gradients are d KL(pi||ref)/dtheta = .274653 for k2, d KL(ref||pi)/dtheta = .25 for k3."""
    probability = torch.tensor([0.5, 0.5])
    log_ratio = (probability / torch.tensor([0.25, 0.75])).log()
    slope = torch.tensor([0.5, -0.5])
    assert float((probability * k1(log_ratio).value).sum()) == pytest.approx(0.143841, abs=1e-6)
    assert float((probability * k1(log_ratio).factor * slope).sum()) == 0.0  # why k1 is no loss
    assert float((probability * k3(log_ratio).value).sum()) == pytest.approx(0.143841, abs=1e-6)
    assert float((probability * k2(log_ratio).value).sum()) == pytest.approx(0.161214, abs=1e-6)
    assert float((probability * k2(log_ratio).factor * slope).sum()) == pytest.approx(0.274653, abs=1e-6)
    assert float((probability * k3(log_ratio).factor * slope).sum()) == pytest.approx(0.25, abs=1e-6)


ESTIMATORS = {
    KlKind.k1: lambda d: d,
    KlKind.k2: lambda d: d.square() / 2,
    KlKind.k3: lambda d: torch.exp(-d) - 1 + d,
    KlKind.k3_plus: lambda d: (torch.exp(-d) - 1 + d - d.square() / 2).detach() + d.square() / 2,
}


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("form", [KlRatio.through, KlRatio.detached])
def test_off_policy_forms_against_autograd(kind, form):
    """r k differentiated through r, or with r held. l, old and ref of 40 tokens in float64 on the oracle's side."""
    torch.manual_seed(3)
    old, ref = -3 * torch.rand(40, dtype=torch.float64), -3 * torch.rand(40, dtype=torch.float64)
    logp = (-3 * torch.rand(40, dtype=torch.float64)).requires_grad_()
    ratio = torch.exp(logp - old)
    losses = (ratio if form is KlRatio.through else ratio.detach()) * ESTIMATORS[kind](logp - ref)
    losses.sum().backward()
    log_ratio = (logp - ref).detach()
    term = weigh_by_ratio(KL_TERMS[kind](log_ratio.float()), ratio.detach().float(), form)
    torch.testing.assert_close(term.factor.double(), logp.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(term.value.double(), losses.detach(), rtol=1e-5, atol=1e-6)


def test_the_default_off_policy_factor_of_k3_is_r_times_d():
    """ALGORITHMS 2.11; with r held it is r (1 - exp(-d)). r = 2, d = ln 2: 2 ln 2 and 1."""
    term, two = k3(torch.tensor([2.0]).log()), torch.tensor([2.0])
    assert float(weigh_by_ratio(term, two, KlRatio.through).factor) == pytest.approx(1.386294, abs=1e-6)
    assert float(weigh_by_ratio(term, two, KlRatio.detached).factor) == pytest.approx(1.0, abs=1e-6)
    assert weigh_by_ratio(term, two, KlRatio.none) is term


@pytest.mark.parametrize("kind", [KlKind.k2, KlKind.k3])
def test_factor_is_the_derivative_of_the_value(kind):
    log_ratio = torch.linspace(-6, 6, 97, requires_grad=True)
    value = log_ratio.square() / 2 if kind is KlKind.k2 else torch.exp(-log_ratio) - 1 + log_ratio
    value.sum().backward()
    torch.testing.assert_close(KL_TERMS[kind](log_ratio.detach()).factor, log_ratio.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(KL_TERMS[kind](log_ratio.detach()).value, value.detach(), rtol=1e-5, atol=2e-7)


def test_a_policy_that_ran_away_keeps_its_gradient():
    """The exponent is clamped at 20, the value is not: clamping the value would end the gradient."""
    far = torch.tensor([50.0, -50.0])
    term = k3(far)
    torch.testing.assert_close(term.factor, torch.tensor([1.0, 1.0 - 485165195.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(term.value, torch.tensor([49.0, 485165195.0 - 51.0]), rtol=1e-5, atol=0)
    assert term.factor.isfinite().all()


def test_small_drift_keeps_its_digits():
    """d = 1e-4: exp(-d) - 1 + d has no right digit left in float32; the series d^2/2 - d^3/6 says 4.99983e-9."""
    assert float(k3(torch.tensor([1e-4])).factor) == pytest.approx(9.9995e-5, rel=1e-6)
    assert abs(float(k3(torch.tensor([1e-4])).value) - 4.99983e-9) < 1e-11


@pytest.mark.parametrize("kind", [KlKind.k2, KlKind.k3, KlKind.k3_plus])
def test_nan_is_not_hidden(kind):
    term = KL_TERMS[kind](torch.tensor([float("nan")]))
    assert term.factor.isnan().all()
    assert term.value.isnan().all()
