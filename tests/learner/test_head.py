"""The token-logprob head against the naive log-softmax and finite differences, and its memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from learner.head import TokenLogpHead

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "head.py"


def naive(hidden, weight, targets, temperature):
    log_p = ((hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


def make_inputs(rows=37, vocab=101, width=16, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = (torch.randn(rows, width, generator=generator) * scale).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(vocab, width, generator=generator).to(dtype))
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=generator)


def credits(rows, *, with_entropy=True):
    generator = torch.Generator().manual_seed(rows)
    logp, entropy = torch.randn(2, rows, generator=generator)
    return logp, entropy if with_entropy else torch.zeros(rows)


def run(outputs, hidden, weight, credit):
    """Values and gradients of credit . (logp, entropy)."""
    hidden.grad = weight.grad = None
    logp, entropy = outputs
    ((credit[0].to(logp.dtype) * logp).sum() + (credit[1].to(logp.dtype) * entropy).sum()).backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 8, 37, 1000])
def test_equals_naive(chunk_rows, temperature, with_entropy):
    """float32 against the naive head in float64, in value and gradient, whatever the chunk."""
    hidden, weight, targets = make_inputs(scale=0.25)
    credit = credits(37, with_entropy=with_entropy)
    out = TokenLogpHead(weight, chunk_rows=chunk_rows)(hidden, targets, temperature)
    assert out.logp.dtype == out.entropy.dtype == torch.float32
    ours = run(out[:2], hidden, weight, credit)
    wide, wide_weight = hidden.detach().double().requires_grad_(), nn.Parameter(weight.detach().double())
    reference = run(naive(wide, wide_weight, targets, temperature), wide, wide_weight, credit)
    for mine, exact in zip(ours, reference, strict=True):
        assert float((mine - exact).abs().max()) < 2e-6 * float(exact.abs().max())


def test_bfloat16_is_as_near_to_exact_as_naive():
    hidden, weight, targets = make_inputs(rows=300, vocab=512, width=64, dtype=torch.bfloat16, scale=0.25)
    credit = credits(300)
    out = TokenLogpHead(weight, chunk_rows=64)(hidden, targets, 0.8)
    assert out.logp.dtype == torch.float32
    ours = run(out[:2], hidden, weight, credit)
    theirs = run(naive(hidden, weight, targets, 0.8), hidden, weight, credit)
    wide, wide_weight = hidden.detach().double().requires_grad_(), nn.Parameter(weight.detach().double())
    exact = run(naive(wide, wide_weight, targets, 0.8), wide, wide_weight, credit)
    assert ours[3].dtype == torch.bfloat16
    for mine, plain, value in zip(ours, theirs, exact, strict=True):
        assert float((mine - value).norm()) < 1.2 * float((plain - value).norm())
        assert float((mine - value).norm()) < 0.02 * float(value.norm())


def test_gradients_against_finite_differences():
    """float64 runs through the same code. The entropy's gradient is exact, not a one-sample estimate."""
    hidden, weight, targets = make_inputs(rows=5, vocab=7, width=3, dtype=torch.float64)

    def outputs(hidden, weight):
        return TokenLogpHead(weight, chunk_rows=2)(hidden, targets, 0.7)[:2]

    assert torch.autograd.gradcheck(outputs, (hidden, weight), eps=1e-6, atol=1e-7)


def test_large_logits_keep_entropy_digits():
    """A common offset of 300 on all logits: entropy as lse - sum(p z) would lose it."""
    hidden, weight, targets = make_inputs(rows=8, vocab=64, width=4)
    hidden = torch.cat([hidden.detach() * 0.1, torch.full((8, 1), 300.0)], 1)
    weight = nn.Parameter(torch.cat([weight.detach(), torch.ones(64, 1)], 1))
    out = TokenLogpHead(weight, chunk_rows=8)(hidden, targets, 1.0)
    logp, entropy = naive(hidden[:, :4].double(), weight.detach()[:, :4].double(), targets, 1.0)
    torch.testing.assert_close(out.entropy.double(), entropy, atol=2e-5, rtol=0)
    torch.testing.assert_close(out.logp.double(), logp, atol=1e-4, rtol=0)


@pytest.mark.parametrize("number", [1, 2])
def test_cases_b88_temperature(number, numeric_cases):
    case = numeric_cases[f"B88-{number}"]
    head = TokenLogpHead(nn.Parameter(torch.eye(2)), chunk_rows=4)
    inputs = case["inputs"]
    out = head(torch.tensor([inputs["logits"]], dtype=torch.float32), torch.tensor([inputs["token"]]), inputs["temperature"])
    assert out.logp.item() == pytest.approx(case["expect"]["log_prob"], abs=case["expect"]["tolerance"])


def test_extras():
    hidden, weight, targets = make_inputs()
    out = TokenLogpHead(weight, chunk_rows=8)(hidden, targets, 0.7, extras=True)
    log_p = (hidden.detach() @ weight.detach().t() / 0.7).log_softmax(1)
    place = log_p.argsort(1, descending=True)
    torch.testing.assert_close(out.max_logp, log_p.amax(1))
    assert torch.equal(out.rank, (place == targets[:, None]).nonzero()[:, 1] + 1)
    assert not out.max_logp.requires_grad
    assert out.logp.requires_grad
    assert TokenLogpHead(weight, chunk_rows=8)(hidden, targets, 0.7).rank is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_with_no_rows_gives_gradients_of_zero(dtype):
    hidden, weight, targets = make_inputs(rows=0, dtype=dtype)
    out = TokenLogpHead(weight, chunk_rows=8)(hidden, targets, 1.0)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert weight.grad.shape == weight.shape
    assert not weight.grad.any()
    assert hidden.grad.shape == (0, 16)


def test_masked_rows_are_dropped_before_the_head():
    """NaN in a row that is dropped leaks nothing; in a row that is not, it reaches every gradient even with credit 0."""
    hidden, weight, targets = make_inputs()
    keep = torch.arange(37) % 3 != 0
    dirty = torch.where(keep[:, None], hidden.detach(), torch.nan).requires_grad_()
    head = TokenLogpHead(weight, chunk_rows=8)
    credit = credits(int(keep.sum()))
    clean = run(head(hidden[keep], targets[keep], 1.0)[:2], hidden, weight, credit)
    masked = run(head(dirty[keep], targets[keep], 1.0)[:2], dirty, weight, credit)
    for mine, expected in zip(masked, clean, strict=True):
        assert torch.equal(mine, expected)
    assert (masked[2][~keep] == 0).all()

    weight.grad = None
    (head(dirty, targets, 1.0).logp * keep).sum().backward()
    assert weight.grad.isnan().all()


def test_tied_weight_gets_both_gradients():
    """The head keeps the embedding's own Parameter; its gradient is the sum of both uses, and it is listed once."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(31, 8)
            self.head = TokenLogpHead(self.embed.weight, chunk_rows=4)

    torch.manual_seed(0)
    model = Tied()
    tokens = torch.randint(0, 31, (11,))
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
    model.head(model.embed(tokens[:-1]), tokens[1:], 1.0).logp.sum().backward()
    gradient, model.embed.weight.grad = model.embed.weight.grad, None
    naive(model.embed(tokens[:-1]), model.embed.weight, tokens[1:], 1.0)[0].sum().backward()
    torch.testing.assert_close(gradient, model.embed.weight.grad, rtol=1e-5, atol=1e-6)


def test_frozen_weight_gets_no_gradient():
    hidden, weight, targets = make_inputs()
    exact = run(naive(hidden, weight, targets, 1.0), hidden, weight, credits(37))[2]
    weight.requires_grad_(False)
    weight.grad = hidden.grad = None
    out = TokenLogpHead(weight, chunk_rows=8)(hidden, targets, 1.0)
    credit = credits(37)
    ((credit[0] * out.logp).sum() + (credit[1] * out.entropy).sum()).backward()
    torch.testing.assert_close(hidden.grad, exact, rtol=1e-5, atol=1e-5)
    assert weight.grad is None


def test_values_without_sense_are_named():
    hidden, weight, targets = make_inputs()
    with pytest.raises(ValueError, match="chunk_rows must be at least 1"):
        TokenLogpHead(weight, chunk_rows=0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        TokenLogpHead(weight, chunk_rows=8)(hidden, targets, 0.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's peak memory from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory(dtype):
    """512 rows, vocabulary 32,768, hidden 256, chunks of 32 rows: two tiles of 4 MiB, measured 0.01 to 0.02 GiB in all. A second
    buffer of the weight's size in float32 would add 0.031 GiB, the whole logits 0.0625 GiB."""
    sizes = ["--rows", "512", "--time-rows", "0", "--vocab", "32768", "--hidden", "256", "--chunk-rows", "32", "--dtype", dtype]
    done = subprocess.run([sys.executable, str(BENCHMARK), *sizes], capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout)["memory_beyond_gib"] < 0.028
