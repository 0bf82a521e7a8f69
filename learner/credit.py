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
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import KlKind
from learner.kl import KL_TERMS, k3
from learner.loss_tokens import MAX_EXPONENT, LossTokens
from learner.metric_sums import MetricSums, collect_sums
from learner.surrogates import Surrogate


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """The credit of the T loss tokens of one micro-batch."""

    logp: Tensor  # [T] float32, c
    entropy: Tensor  # [T] float32, e
    loss: Tensor  # scalar; those of an optimizer step's micro-batches, over all ranks, add up to its loss
    sums: MetricSums


def token_credit(
    tokens: LossTokens,
    *,
    surrogate: Callable[[LossTokens], Surrogate],
    kl_kind: KlKind,
    kl_beta: float,
    entropy_beta: float,
) -> Credit:
    """The credit of every loss token. ``surrogate`` has its parameters bound.

    A NaN at a loss token stays in its credit and in the loss, so the non-finite guard sees it. Raises ValueError where a KL
    term is asked for and ``tokens.ref_logp`` is None.
    """
    policy = surrogate(tokens)
    scale = tokens.sample_weight * tokens.token_weight * tokens.correction / tokens.policy_denominator
    logp_credit = -tokens.advantage * scale * policy.factor
    loss = (policy.value * scale).sum() - entropy_beta * (tokens.entropy / tokens.policy_denominator).sum()
    if kl_kind is not KlKind.off:
        in_kl, log_ratio = _reference_log_ratio(tokens)
        term = KL_TERMS[kl_kind](log_ratio)
        kl_scale = torch.where(in_kl, kl_beta * tokens.kl_mask / tokens.kl_denominator, 0.0)
        logp_credit = logp_credit + term.factor * kl_scale
        loss = loss + (term.value * kl_scale).sum()
    return Credit(
        logp=logp_credit,
        entropy=-entropy_beta / tokens.policy_denominator,
        loss=loss,
        sums=_metric_sums(tokens, policy),
    )


def _reference_log_ratio(tokens: LossTokens) -> tuple[Tensor, Tensor]:
    """Where the KL term counts, bool [T], and d = logp - ref_logp there, 0 elsewhere."""
    if tokens.ref_logp is None:
        raise ValueError("a KL term needs ref_logp: set learner.reference=frozen, or algorithm.kl.kind=off")
    in_kl = tokens.kl_mask != 0
    return in_kl, torch.where(in_kl, tokens.logp - tokens.ref_logp, 0.0)


def _metric_sums(tokens: LossTokens, policy: Surrogate) -> MetricSums:
    """The metrics of ALGORITHMS section 10 that a micro-batch can tell; ``w`` is the surrogate's factor.

    ``kl/old_new`` and ``mismatch/k3_engine`` are the k3 estimates of KL(old || new) and KL(engine || learner) on the tokens at hand.
    """
    every = torch.ones_like(tokens.advantage, dtype=torch.bool)
    signs = {"pos": tokens.advantage > 0, "neg": tokens.advantage < 0}
    ratio, mismatch = tokens.ratio, tokens.old_logp - tokens.roll_logp
    rho = torch.exp(torch.clamp(mismatch, -MAX_EXPONENT, MAX_EXPONENT))
    means = {
        "policy/entropy": (tokens.entropy, every),
        "kl/old_new": (k3(tokens.old_logp - tokens.logp).value, every),
        "mismatch/logp_absdiff": (mismatch.abs(), every),
        "mismatch/k3_engine": (k3(-mismatch).value, every),
        "mismatch/rho_mean": (rho, every),
        "eff/token_frac": ((policy.factor > 0).float(), every),
    }
    maxima = {"mismatch/logp_absdiff_max": (mismatch.abs(), every), "mismatch/rho_max": (rho, every)}
    for sign, mask in signs.items():
        means[f"policy/entropy_{sign}"] = (tokens.entropy, mask)
        means[f"ratio/mean_{sign}"] = (ratio, mask)
        means[f"w/mean_{sign}"] = (policy.factor, mask)
        maxima[f"ratio/max_{sign}"] = (ratio, mask)
        maxima[f"w/max_{sign}"] = (policy.factor, mask)
    for name, region in policy.regions.items():
        means[f"clip/{name}"] = (region.float(), signs.get(name.rpartition("_")[2], every))
    if tokens.ref_logp is not None:
        in_kl, log_ratio = _reference_log_ratio(tokens)
        means["kl/k1_ref"] = (log_ratio, in_kl)
        means["kl/k3_ref"] = (k3(log_ratio).value, in_kl)
    return collect_sums(means, maxima)
