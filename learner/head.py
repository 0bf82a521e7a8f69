"""The token-logprob head: log-probability and entropy of given tokens, without ever holding the logits of a whole batch.

For hidden states h [N, H], output weights W [V, H], targets y [N] and temperature T:

    z = W h / T        logp = z_y - logsumexp(z)        p = softmax(z)        entropy = -sum_v p_v (z_v - logsumexp(z))

The forward goes over blocks of rows; of each row only the largest logit and its log-probability are kept. The backward computes
the logits anew. For the credit c = dL/dlogp and e = dL/dentropy of a row its gradient is exact:

    dz = c (onehot(y) - p) - e p (log p + entropy)        dh = W^T dz / T        dW = dz h^T / T

With those two numbers a row, any tile of dz stands for itself, so the backward goes over blocks of the *vocabulary* with all
rows at once: each block of dW is one matrix product written to its place. So there is no second buffer of the weight's size,
and the sum over rows happens inside the product, in float32 also for bfloat16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class HeadOutput(NamedTuple):
    """A named tuple, since ZeRO-3 puts its gathering hooks on the tensors of tuples and not on those of other classes."""

    logp: Tensor  # [N] float32, with gradient
    entropy: Tensor  # [N] float32, in nats, with gradient
    max_logp: Tensor | None  # [N] float32, log-probability of the most likely token; None unless extras were asked for
    rank: Tensor | None  # [N] int64, 1 for the most likely token; None unless extras were asked for
    aux_loss: Tensor | None = None  # scalar, of the routers of a mixture of experts; the head leaves it None


CAST_ROWS = 2048  # rows of a weight that are cast at once, where products need another dtype


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """On a GPU products run in the model's dtype. A CPU without bfloat16 instructions multiplies it 10 to 100 times slower than
    float32 (measured), so there the operands are cast, block by block."""
    return hidden.dtype if hidden.is_cuda else torch.promote_types(hidden.dtype, torch.float32)


def _fill_logits(out: Tensor, hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Fills ``out`` [rows, columns] with the logits over the temperature. ``hidden`` has the dtype of products already."""
    step = len(weight) if weight.dtype == hidden.dtype else CAST_ROWS
    for start in range(0, len(weight), step):
        block, place = weight[start : start + step].to(hidden.dtype), out[:, start : start + step]
        if out.dtype == hidden.dtype:
            torch.mm(hidden, block.t(), out=place)
        else:
            place.copy_(hidden @ block.t())
    return out.div_(temperature)


class _TokenLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_rows: int, extras: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        num_rows, vocab = len(hidden), len(weight)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        wide = hidden.to(_product_dtype(hidden))
        logp, entropy, max_logit, max_logp = (hidden.new_empty(num_rows, dtype=dtype) for _ in range(4))
        rank = torch.empty_like(targets) if extras else None
        # Two workspaces serve all blocks: a fresh one each time costs more in page faults than the softmax itself.
        first, second = (hidden.new_empty(min(chunk_rows, num_rows), vocab, dtype=dtype) for _ in range(2))
        for start in range(0, num_rows, chunk_rows):
            rows = slice(start, min(start + chunk_rows, num_rows))
            size = rows.stop - start
            logits = _fill_logits(first[:size], wide[rows], weight, temperature)
            log_p = torch.log_softmax(logits, 1, out=second[:size])
            logp[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
            max_logit[rows], max_logp[rows] = logits.amax(1), log_p.amax(1)
            if rank is not None:
                rank[rows] = (log_p > logp[rows, None]).sum(1) + 1
            entropy[rows] = -torch.exp(log_p, out=first[:size]).mul_(log_p).sum(1)
        ctx.save_for_backward(hidden, weight, targets, entropy, max_logit, max_logp)
        ctx.temperature, ctx.tile_size = temperature, chunk_rows * vocab
        if rank is None:
            return logp, entropy, None, None
        ctx.mark_non_differentiable(max_logp, rank)
        return logp, entropy, max_logp, rank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, max_logit, max_logp = ctx.saved_tensors
        num_rows, vocab = len(hidden), len(weight)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        wide = hidden.to(_product_dtype(hidden))
        grad_hidden = torch.zeros_like(hidden, dtype=entropy.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        credit, entropy_credit = grad_logp[:, None] / ctx.temperature, grad_entropy[:, None] / ctx.temperature
        with_entropy = bool(entropy_credit.any())
        width = min(vocab if weight.dtype == wide.dtype else CAST_ROWS, max(1, ctx.tile_size // max(num_rows, 1)))
        workspaces = [entropy.new_empty(num_rows * width) for _ in range(1 + with_entropy)]
        for start in range(0, vocab, width):
            block = weight[start : start + width].to(wide.dtype)
            tile, *spare = (space[: num_rows * len(block)].view(num_rows, len(block)) for space in workspaces)
            # Largest logit and its log-probability rather than the logsumexp: large logits then cost p no digits.
            log_p = _fill_logits(tile, wide, block, ctx.temperature).sub_(max_logit[:, None]).add_(max_logp[:, None])
            if with_entropy:
                dz = torch.exp(log_p, out=spare[0])
                dz.mul_(log_p.add_(entropy[:, None]).mul_(entropy_credit).add_(credit)).neg_()
            else:
                dz = log_p.exp_().mul_(-credit)
            place = targets[:, None] - start
            inside = (place >= 0) & (place < len(block))
            dz.scatter_add_(1, place.clamp(0, len(block) - 1), torch.where(inside, credit, 0.0))
            dz = dz.to(wide.dtype)
            if grad_hidden is not None:
                grad_hidden += dz @ block
            if grad_weight is not None and grad_weight.dtype == wide.dtype:
                torch.mm(dz.t(), wide, out=grad_weight[start : start + width])
            elif grad_weight is not None:
                grad_weight[start : start + width] = dz.t() @ wide
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


class TokenLogpHead(nn.Module):
    """The output head as a module of its own, so that ZeRO-3's hooks gather its weight for forward and backward.

    ``weight`` [V, H] is kept as the very Parameter object it is given: with tied embeddings the embedding's own. At any time
    at most two buffers of ``chunk_rows`` x V float32 are alive (on a GPU in bfloat16 half of one more), whatever N is.

    Raises ValueError for ``chunk_rows`` below 1 or a temperature that is not above 0.
    """

    def __init__(self, weight: nn.Parameter, *, chunk_rows: int) -> None:
        super().__init__()
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
        self.weight = weight
        self.chunk_rows = chunk_rows

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float, *, extras: bool = False) -> HeadOutput:
        """Log-probability and entropy of ``targets`` [N] int64 given ``hidden`` [N, H], in the dtype of the weight.

        Everything but the matrix products is float32, whatever that dtype; of those see ``_product_dtype``. Rows that no loss needs are left out by the
        caller: a masked row is not harmless, since 0 x NaN is NaN. N = 0 is allowed and gives gradients of zero.
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        return HeadOutput(*_TokenLogp.apply(hidden, self.weight, targets, temperature, self.chunk_rows, extras))
