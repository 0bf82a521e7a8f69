"""KL to the reference as a term of the loss: per token a factor on the log-probability's gradient, and a value to log.

With d = logp - ref_logp of the sampled token (Schulman, "Approximating KL divergence", 2020):

    k1 = d          k2 = d^2 / 2, factor d          k3 = exp(-d) - 1 + d, factor 1 - exp(-d)

On the policy's own samples the expected gradient of k2 is that of KL(pi || ref), of k3 that of KL(ref || pi). Differentiating
k1 gives 0 in expectation, so it is no loss. Only the exponent is clamped: clamping the value would end the gradient exactly
where the policy has run away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import KlKind
from learner.loss_tokens import MAX_EXPONENT


@dataclass(frozen=True, slots=True, eq=False)
class KlTerm:
    """The KL of T tokens."""

    factor: Tensor  # [T], the coefficient of grad logp
    value: Tensor  # [T], nats


def k2(log_ratio: Tensor) -> KlTerm:
    """k2 of d = logp - ref_logp [T]."""
    return KlTerm(factor=log_ratio, value=log_ratio.square() / 2)


def k3(log_ratio: Tensor) -> KlTerm:
    """k3 of d = logp - ref_logp [T]. ``expm1`` keeps the digits of a small d."""
    tail = torch.expm1(torch.clamp(-log_ratio, -MAX_EXPONENT, MAX_EXPONENT))
    return KlTerm(factor=-tail, value=tail + log_ratio)


KL_TERMS: dict[KlKind, Callable[[Tensor], KlTerm]] = {KlKind.k2: k2, KlKind.k3: k3}
