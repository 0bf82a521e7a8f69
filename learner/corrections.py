"""Corrections of the mismatch between engine and learner: a detached weight on the policy term, never on the KL term.

A correction is one pure function ``(tokens, *, keyword parameters) -> Correction``. rho = pi_old / pi_engine, from ``old_logp`` and
``roll_logp``, is the ratio of what the learner says of a token to what it was sampled from; exponents are clamped to 20. A weight
of 0 masks a token without leaving the denominator, otherwise what is kept would grow. A log-ratio that is not finite (an engine
that reports -inf, say) counts as 0 and is in the region ``nonfinite``.

Weights are not normalised to mean 1: the mean over an optimizer step is known only after its last forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from learner.formulas import formula
from learner.loss_tokens import MAX_EXPONENT, LossTokens


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What a correction makes of T loss tokens."""

    weight: Tensor  # [T] float32, 0 or more
    prox_logp: Tensor | None = None  # [T] float32, takes the place of old_logp in the ratio; None leaves it
    regions: Mapping[str, Tensor] = field(default_factory=dict)  # bool [T] by name, shares of all tokens


@formula("1")
def none(tokens: LossTokens) -> Correction:
    """Weight 1. The learner's own old_logp is in the ratio, so the engine's numerics are not."""
    return Correction(torch.ones_like(tokens.logp))


@formula("min(rho, {cap})", "truncated importance sampling, as verl and TRL have it")
def tis_token(tokens: LossTokens, *, cap: float = 2.0) -> Correction:
    """Truncated importance sampling, token by token: min(rho, cap). Caps of 1.5 to 5 are usual."""
    _check_range(0.0, cap)
    log_rho, regions = _finite(tokens.old_logp - tokens.roll_logp)
    rho = _exp(log_rho)
    return Correction(rho.clamp(max=cap), regions=regions | {"above": rho > cap})


@formula("min(product of rho over the response, {cap})", "truncated importance sampling, as verl has it")
def tis_seq(tokens: LossTokens, *, cap: float = 2.0) -> Correction:
    """Truncated importance sampling of the whole response: min(product of rho, cap). Caps of 2 to 10 are usual.

    A product runs away with the length: 1.1 a token is 13,780 after a hundred.
    """
    _check_range(0.0, cap)
    log_rho, regions = _finite(tokens.old_logp - tokens.roll_logp)
    rho = _exp(tokens.response_sum(log_rho))
    return Correction(rho.clamp(max=cap), regions=regions | {"above": rho > cap})


@formula("rho where {low} <= rho <= {high}, else 0", "IcePop 2510.18855")
def icepop(tokens: LossTokens, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """rho where low <= rho <= high, else 0 (IcePop 2510.18855; also named ``mis_token``, masked importance sampling)."""
    _check_range(low, high)
    log_rho, regions = _finite(tokens.old_logp - tokens.roll_logp)
    return _masked(_exp(log_rho), low, high, regions)


@formula("P = product of rho over the response, where {low} <= P <= {high}, else 0", "masked importance sampling, as TRL has it")
def mis_seq(tokens: LossTokens, *, low: float = 0.0, high: float = 3.0) -> Correction:
    """The product of the response's rho where it lies in [low, high], else 0 for the whole response. TRL's bound is 3."""
    _check_range(low, high)
    log_rho, regions = _finite(tokens.old_logp - tokens.roll_logp)
    return _masked(_exp(tokens.response_sum(log_rho)), low, high, regions)


@formula("1 where {low} <= exp(mean of log rho over the response) <= {high}, else 0", "geometric rejection, as verl has it")
def geometric(tokens: LossTokens, *, low: float = 0.999, high: float = 1.001) -> Correction:
    """Keeps a response whose geometric mean of rho, exp(mean log rho), lies in [low, high]: weight 1, else 0."""
    _check_range(low, high)
    log_rho, regions = _finite(tokens.old_logp - tokens.roll_logp)
    mean = _exp(tokens.response_mean(log_rho))
    below, above = mean < low, mean > high
    return Correction((~(below | above)).float(), regions=regions | {"below": below, "above": above})


@formula("1 where the mean of rho - log rho - 1 over the response <= {limit}, else 0", "as verl has it")
def k3_rejection(tokens: LossTokens, *, limit: float = 0.01) -> Correction:
    """Keeps a response whose mean of rho - log rho - 1 is at most ``limit``: weight 1, else 0. Limits of 0.001 to 0.01 are usual."""
    if not limit >= 0:
        raise ValueError(f"limit must be at least 0, got {limit}; 0.01 is usual")
    log_rho, regions = _finite(tokens.old_logp - tokens.roll_logp)
    excess = torch.expm1(log_rho.clamp(-MAX_EXPONENT, MAX_EXPONENT)) - log_rho
    above = tokens.response_mean(excess) > limit
    return Correction((~above).float(), regions=regions | {"above": above})


@formula(
    "0 where A < 0 and the mean of log pi_engine - log pi over the response > {delta}, else 1",
    "DeepSeek-V3.2, off-policy sequence masking",
)
def opsm(tokens: LossTokens, *, delta: float = 0.5) -> Correction:
    """Drops, of a response with mean(roll_logp - logp) > delta, the tokens with A < 0: weight 0, else 1 (DeepSeek-V3.2, off-policy
    sequence masking). It looks at the current policy: staleness and engine mismatch together."""
    log_gap, regions = _finite(tokens.roll_logp - tokens.logp)
    dropped = (tokens.advantage < 0) & (tokens.response_mean(log_gap) > delta)
    return Correction((~dropped).float(), regions=regions | {"dropped": dropped})


@formula("pi_prox / pi_behave, {mode} to [{lower}, {upper}]; r = pi / pi_prox, pi_prox {prox}", "2110.00641; AReaL 2505.24298")
def decoupled(
    tokens: LossTokens,
    *,
    lower: float = 0.0,
    upper: float = 5.0,
    mode: Literal["clamp", "mask"] = "clamp",
    prox: Literal["recompute", "interpolated"] = "recompute",
) -> Correction:
    """Decoupled PPO (Hilton et al. 2110.00641; AReaL 2505.24298): r = pi / pi_prox in the surrogate, omega = pi_prox / pi_behave here.

    ``clamp`` bounds omega to [lower, upper], ``mask`` makes it 0 outside. ``recompute`` takes old_logp for log pi_prox;
    ``interpolated`` needs no forward and takes log pi_b + a (log pi - log pi_b), a = (v_prox - v_b) / (v_theta - v_b), v counting
    optimizer steps per token; where v_theta = v_b it is log pi_b. Raises ValueError where those counts are None.
    """
    _check_range(lower, upper)
    if mode not in ("clamp", "mask") or prox not in ("recompute", "interpolated"):
        raise ValueError(f"mode is clamp or mask, prox is recompute or interpolated, got {mode!r} and {prox!r}")
    if prox == "recompute":
        prox_logp = None
        log_omega, regions = _finite(tokens.old_logp - tokens.roll_logp)
    else:
        behave, current = tokens.behave_step, tokens.current_step
        if behave is None or current is None or tokens.prox_step is None:
            raise ValueError("prox=interpolated needs behave_step, prox_step and current_step; prox=recompute works without")
        log_gap, regions = _finite(tokens.logp - tokens.roll_logp)
        share = ((tokens.prox_step - behave) / (current - behave)).nan_to_num(0.0, 0.0, 0.0)
        log_omega = share * log_gap
        prox_logp = tokens.logp - (1 - share) * log_gap  # so, not from roll_logp: that one may be -inf
    omega = _exp(log_omega)
    if mode == "mask":
        masked = _masked(omega, lower, upper, regions)
        return Correction(masked.weight, prox_logp, masked.regions)
    return Correction(omega.clamp(lower, upper), prox_logp, regions | {"below": omega < lower, "above": omega > upper})


@formula("1, with the engine's log-probabilities in r: r = pi / pi_engine", "ours")
def bypass(tokens: LossTokens) -> Correction:
    """roll_logp stands in for old_logp: the ratio is pi / pi_engine, and no forward for old_logp is needed.

    A flipped ratio would turn every mismatch of the engine into weight: refused with ASPO.
    """
    log_gap, regions = _finite(tokens.logp - tokens.roll_logp)
    return Correction(torch.ones_like(tokens.logp), tokens.logp - log_gap, regions)


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "none": none,
    "tis_token": tis_token,
    "tis_seq": tis_seq,
    "mis_token": icepop,
    "icepop": icepop,
    "mis_seq": mis_seq,
    "geometric": geometric,
    "k3_rejection": k3_rejection,
    "opsm": opsm,
    "decoupled": decoupled,
    "bypass": bypass,
}


def _finite(log_ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return log_ratio.nan_to_num(0.0, 0.0, 0.0), {"nonfinite": ~log_ratio.isfinite()}


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT))


def _masked(rho: Tensor, low: float, high: float, regions: Mapping[str, Tensor]) -> Correction:
    below, above = rho < low, rho > high
    return Correction(rho * ~(below | above), regions={**regions, "below": below, "above": above})


def _check_range(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ValueError(f"the bounds must satisfy 0 <= lower < upper, got {low} and {high}; 0.5 and 5 are usual")
