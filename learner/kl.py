"""KL to the reference: as a term of the loss, per token a factor on the log-probability's gradient and a value to log; or in the
reward, where only the value counts.

With d = logp - ref_logp of the sampled token (Schulman, "Approximating KL divergence", 2020):

    k1 = d   factor 1        k2 = d^2 / 2   factor d        k3 = exp(-d) - 1 + d   factor 1 - exp(-d)
    k3_plus: the value of k3 with the factor of k2 (verl)

On the policy's own samples the expected gradient of k2 is that of KL(pi || ref), of k3 that of KL(ref || pi). Differentiating
k1 gives 0 in expectation, so it is no loss. Off the policy's samples the term is multiplied by r = pi / pi_old (DeepSeek-V3.2):

    through   r k, differentiated through r: factor r (k + k's factor), which is r d for k3
    detached  r k with r held: factor r times k's factor, r (1 - exp(-d)) for k3

Only exponents are clamped: clamping the value would end the gradient exactly where the policy has run away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import KlKind, KlRatio
from learner.loss_tokens import MAX_EXPONENT, LossTokens


@dataclass(frozen=True, slots=True, eq=False)
class KlTerm:
    """The KL of T tokens."""

    factor: Tensor  # [T], the coefficient of grad logp
    value: Tensor  # [T], nats


def k1(log_ratio: Tensor) -> KlTerm:
    """k1 of d = logp - ref_logp [T]: for the reward."""
    return KlTerm(factor=torch.ones_like(log_ratio), value=log_ratio)


def k2(log_ratio: Tensor) -> KlTerm:
    """k2 of d [T]."""
    return KlTerm(factor=log_ratio, value=log_ratio.square() / 2)


def k3(log_ratio: Tensor) -> KlTerm:
    """k3 of d [T]. ``expm1`` keeps the digits of a small d."""
    tail = torch.expm1(torch.clamp(-log_ratio, -MAX_EXPONENT, MAX_EXPONENT))
    return KlTerm(factor=-tail, value=tail + log_ratio)


def k3_plus(log_ratio: Tensor) -> KlTerm:
    """The value of k3 with the gradient of k2."""
    return KlTerm(factor=log_ratio, value=k3(log_ratio).value)


def weigh_by_ratio(term: KlTerm, ratio: Tensor, form: KlRatio) -> KlTerm:
    """The off-policy form of a term; ``ratio`` [T]."""
    if form is KlRatio.none:
        return term
    factor = term.value + term.factor if form is KlRatio.through else term.factor
    return KlTerm(factor=ratio * factor, value=ratio * term.value)


def reference_log_ratio(tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Where the KL term counts, bool [T], and d = logp - ref_logp there, 0 elsewhere."""
    if tokens.ref_logp is None:
        raise ValueError("a KL term needs ref_logp: set learner.reference=frozen, or algorithm.kl.kind=off")
    in_kl = tokens.kl_mask != 0
    return in_kl, torch.where(in_kl, tokens.logp - tokens.ref_logp, 0.0)


KL_TERMS: dict[KlKind, Callable[[Tensor], KlTerm]] = {KlKind.k1: k1, KlKind.k2: k2, KlKind.k3: k3, KlKind.k3_plus: k3_plus}
