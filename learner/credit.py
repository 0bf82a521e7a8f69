"""Credit: the coefficient that each token's log-probability and entropy receive in the loss.

Every policy objective here has a gradient of the form sum_t c_t grad logp_t + sum_t e_t grad H_t. The credits c and e are
computed from detached tensors, without autograd; the learner multiplies them with the head's outputs and goes backward:

    c = - advantage * sample_weight * token_weight * correction * surrogate_factor / policy_denominator
        + kl_beta * kl_factor * kl_mask / kl_denominator
    e = - entropy_beta / policy_denominator

The loss that is logged is computed beside them and never differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from configs.schema import KlKind, KlRatio
from learner.corrections import Correction
from learner.credit_metrics import credit_metrics
from learner.entropy import is_low_entropy
from learner.kl import KL_TERMS, reference_log_ratio, weigh_by_ratio
from learner.loss_tokens import LossTokens
from learner.metric_sums import MetricSums
from learner.surrogates import Surrogate


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The credit of the T loss tokens of one micro-batch."""

    logp: Tensor  # [T] float32, c
    entropy: Tensor  # [T] float32, e
    loss: Tensor  # scalar; those of an optimizer step's micro-batches, over all ranks, add up to its loss
    metrics: Callable[[], MetricSums]

    @property
    def sums(self) -> MetricSums:
        """The metrics beside it, computed when asked: they cost more than the credit."""
        return self.metrics()


def token_credit(  # noqa: PLR0913 - a parameter for each factor of the formula
    tokens: LossTokens,
    *,
    surrogate: Callable[[LossTokens], Surrogate],
    kl_kind: KlKind,
    kl_beta: float,
    entropy_beta: float,
    kl_ratio: KlRatio = KlRatio.none,
    kl_entropy_quantile: float | None = None,
    correction: Callable[[LossTokens], Correction] | None = None,
    token_weighting: Callable[[LossTokens], Tensor] | None = None,
) -> Credit:
    """The credit of every loss token. The functions have their parameters bound.

    Args:
        tokens: of one micro-batch. ``correction`` and ``token_weight`` there are what this call's functions leave: without a
            function they count as they are.
        surrogate: sees the tokens with the correction's proximal policy in place of ``old_logp``.
        kl_kind: of the term in the loss; ``off`` where there is none or it is in the reward.
        kl_beta: its coefficient.
        entropy_beta: coefficient of the entropy bonus.
        kl_ratio: whether the KL term is multiplied by the ratio, and how.
        kl_entropy_quantile: the KL term counts the low-entropy tokens alone, by ``is_low_entropy``; its denominator must be that of
            their ``low_entropy_count``. None counts what ``kl_mask`` says.
        correction: of the mismatch between engine and learner.
        token_weighting: weight [T] a token, not negative.

    A NaN at a loss token stays in its credit and in the loss, so the non-finite guard sees it. Raises ValueError where a KL
    term is asked for and ``tokens.ref_logp`` is None, or where a function's tensor is not float32 [T].
    """
    given = correction(tokens) if correction is not None else None
    seen = tokens
    if given is not None:
        prox = tokens.old_logp if given.prox_logp is None else given.prox_logp
        seen = replace(seen, correction=given.weight, old_logp=prox)
    if token_weighting is not None:
        seen = replace(seen, token_weight=token_weighting(seen))
    if kl_entropy_quantile is not None:
        seen = replace(seen, kl_mask=is_low_entropy(seen.entropy, seen.response, kl_entropy_quantile).float())
    policy = surrogate(seen)
    if any(x.shape != seen.logp.shape or x.dtype != torch.float32 for x in (policy.factor, policy.value)):
        raise ValueError(f"the surrogate's factor and value must be float32 of shape [{len(seen.logp)}]")
    weight = (seen.sample_weight * seen.token_weight).mul_(seen.correction)
    scale = weight / seen.policy_denominator
    logp_credit = (-seen.advantage).mul_(scale).mul_(policy.factor)
    loss = scale.mul_(policy.value).sum()
    if entropy_beta:
        loss = loss - entropy_beta * (seen.entropy / seen.policy_denominator).sum()
    if kl_kind is not KlKind.off:
        in_kl, log_ratio = reference_log_ratio(seen)
        term = KL_TERMS[kl_kind](log_ratio)
        if kl_ratio is not KlRatio.none:
            term = weigh_by_ratio(term, seen.ratio, kl_ratio)
        kl_scale = torch.where(in_kl, kl_beta * seen.kl_mask / seen.kl_denominator, 0.0)
        logp_credit = logp_credit + term.factor * kl_scale
        loss = loss + (term.value * kl_scale).sum()
    return Credit(
        logp=logp_credit,
        entropy=-entropy_beta / seen.policy_denominator,
        loss=loss,
        metrics=partial(credit_metrics, tokens, seen, policy, given, weight),
    )
