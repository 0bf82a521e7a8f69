"""Surrogates: how the ratio between the current and the old policy becomes a factor on the token's advantage.

A surrogate is one pure function ``(tokens, *, keyword parameters) -> Surrogate``. Its gradient is ``-advantage * factor``
for each token's log-probability; ``value`` is the loss that is logged and never differentiated. Symbols: r = pi / pi_old
(``tokens.ratio``), A the advantage, w the factor, l the log-probability.

The factor is exactly 0 where A is 0 or a mask says so, and never below 0. Masks are multiplied, not filled in: a NaN ratio must
reach the non-finite guard also where the advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.entropy import is_low_entropy
from learner.formulas import formula
from learner.loss_tokens import MAX_EXPONENT, LossTokens


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """What a surrogate makes of T loss tokens."""

    factor: Tensor  # [T] float32, w
    value: Tensor  # [T] float32, the token's loss, advantage included
    regions: Mapping[str, Tensor]  # bool, or float for a mean, [T] by name; a name in _pos or _neg is over that sign's tokens


def _clip_formula(*, eps_low: float, eps_high: float, dual_c: float | None) -> str:
    beyond = "" if dual_c is None else f", or A < 0 and r > {dual_c:g}"
    return f"r, but 0 where A > 0 and r > 1 + {eps_high:g}, or A < 0 and r < 1 - {eps_low:g}{beyond}"


def _no_ratio_formula(*, keep_clip_mask: bool, eps_low: float, eps_high: float) -> str:
    return f"1, but 0 where A > 0 and r > 1 + {eps_high:g}, or A < 0 and r < 1 - {eps_low:g}" if keep_clip_mask else "1"


@formula(_clip_formula, "PPO 1707.06347, eq. 7; GRPO 2402.03300; dual clip 1912.09729")
def grpo(tokens: LossTokens, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_c: float | None = None) -> Surrogate:
    """PPO's clip: L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)) (Schulman et al. 1707.06347, eq. 7; GRPO 2402.03300).

    ``dual_c`` bounds the loss of negative advantages by -A dual_c, without gradient beyond (Ye et al. 1912.09729); without it their
    weight has no bound. The factor is r, and 0 where clipped; exactly on a bound it is still r. Also named ``ppo``.
    """
    _check_clip(eps_low, eps_high, dual_c)
    return _clip(tokens.ratio, tokens.advantage, eps_low, eps_high, dual_c)


@formula(
    "s = exp(mean over the response of log r), but 0 where A > 0 and s > 1 + {eps_high}, or A < 0 and s < 1 - {eps_low}",
    "GSPO 2507.18071, eq. 5 to 7",
)
def gspo(tokens: LossTokens, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Surrogate:
    """The PPO clip on the response's ratio s = exp(mean over its loss tokens of log r) (GSPO 2507.18071, eq. 5 to 7).

    ds/dl is s/|o| for each token; the 1/|o| is that of ``seq_mean_token_mean``, so the factor is s. A response shares one
    advantage here; where tokens have their own, take ``gspo_token``. s moves far less than r: the range is a thousand times
    smaller, and its clip shares do not compare with GRPO's (all tokens of a clipped response count).
    """
    _check_clip(eps_low, eps_high, None)
    return _clip(torch.exp(_response_log_ratio(tokens)), tokens.advantage, eps_low, eps_high, None)


@formula(
    "s = exp(mean over the response of log r), but 0 where A > 0 and s > 1 + {eps_high}, or A < 0 and s < 1 - {eps_low}",
    "GSPO 2507.18071, section 4.3",
)
def gspo_token(tokens: LossTokens, *, eps_low: float = 3e-4, eps_high: float = 4e-4, max_log_ratio: float = 10.0) -> Surrogate:
    """GSPO's token form: s_t = sg(s) pi / sg(pi), its value s and its gradient each token's own (2507.18071, section 4.3).

    The same credit as ``gspo`` where a response shares its advantage, and right where tokens differ: each is clipped by its own
    sign. log s is capped at ``max_log_ratio`` (10 in verl); beyond the cap the clip's side is the same.
    """
    _check_clip(eps_low, eps_high, None)
    if not max_log_ratio > 0:
        raise ValueError(f"max_log_ratio must be above 0, got {max_log_ratio}; 10 is usual")
    return _clip(torch.exp(_response_log_ratio(tokens).clamp(max=max_log_ratio)), tokens.advantage, eps_low, eps_high, None)


@formula(
    "min(1/r, {dual_c}) where A > 0, but 0 where r > 1 + {eps_high}; min(r, {dual_c}) where A < 0, but 0 where r < 1 - {eps_low}",
    "ASPO 2510.06062 v2",
)
def aspo(tokens: LossTokens, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_c: float = 3.0) -> Surrogate:
    """Asymmetric importance sampling (ASPO, arXiv 2510.06062 v2), three steps on the raw ratio, in this order:

    1. hard mask, as in PPO: factor 0 where A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low;
    2. flip: factor 1/r where A > 0 (lagging tokens gain weight), r where A < 0;
    3. soft dual clip: the factor is capped at ``dual_c`` and the gradient kept.

    The logged value is bounded: -A times the factor, and the clip bound's value where masked. (The released code logs
    -A dual_c logp on capped tokens, which has the same gradient and jumps.)
    """
    _check_clip(eps_low, eps_high, dual_c)
    return _flip(tokens, eps_low, eps_high, dual_c)


@formula(
    "min(1/r, {dual_c}) where A > 0, but 0 where r > 1 + eps_high; min(r, {dual_c}) where A < 0, but 0 where r < 1 - eps_low; "
    "eps_low, eps_high = {eps_low}, {eps_high} on the {entropy_quantile} lowest entropies of a response, else {uncertain_eps_low}, "
    "{uncertain_eps_high}",
    "script released with ASPO 2510.06062",
)
def aspo_archer(
    tokens: LossTokens,
    *,
    entropy_quantile: float = 0.8,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    uncertain_eps_low: float = 0.4,
    uncertain_eps_high: float = 0.4,
    dual_c: float = 3.0,
) -> Surrogate:
    """ASPO with Archer's split by entropy: tokens of high entropy under the current policy get a wider trust region.

    ``eps_low`` and ``eps_high`` are for the low-entropy tokens of a response (``learner.entropy.is_low_entropy``), the
    ``uncertain_`` ones for the others; the defaults are those of the script released with arXiv 2510.06062.
    """
    _check_clip(eps_low, eps_high, dual_c)
    _check_clip(uncertain_eps_low, uncertain_eps_high, None)
    uncertain = (~is_low_entropy(tokens.entropy, tokens.response, entropy_quantile)).float()
    low = eps_low + (uncertain_eps_low - eps_low) * uncertain
    return _flip(tokens, low, eps_high + (uncertain_eps_high - eps_high) * uncertain, dual_c)


@formula(
    "(mean of r over the response) where A > 0, r where A < 0; 0 where A > 0 and r > 1 + {eps_high}, or A < 0 and r < 1 - {eps_low}",
    "ASPO 2510.06062 v2, ablation",
)
def pos_resp_mean(tokens: LossTokens, *, eps_low: float = 0.2, eps_high: float = 0.2) -> Surrogate:
    """An arm of the ASPO paper's ablation: PPO's hard masks on the raw ratio, then for A > 0 the response's mean ratio for r.

    The mean is arithmetic, over the response's loss tokens, masked ones included (the paper states neither; ours). Masking by r
    itself leaves this arm and its neighbours with the same trust region, so that they differ in the weight alone.
    """
    _check_clip(eps_low, eps_high, None)
    plain = _clip(tokens.ratio, tokens.advantage, eps_low, eps_high, None)
    positive = (tokens.advantage > 0).float()
    ratio = torch.lerp(tokens.ratio, tokens.response_mean(tokens.ratio), positive)
    hard_pos, hard_neg = plain.regions["hard_pos"], plain.regions["hard_neg"]
    factor = ratio * ((tokens.advantage != 0) & ~hard_pos & ~hard_neg)
    value = -tokens.advantage * (factor + hard_pos * (1 + eps_high) + hard_neg * (1 - eps_low))
    return Surrogate(factor, value, plain.regions)


@formula(_no_ratio_formula, "ASPO 2510.06062 v2, ablation")
def no_ratio(tokens: LossTokens, *, keep_clip_mask: bool = True, eps_low: float = 0.2, eps_high: float = 0.2) -> Surrogate:
    """All ratios 1 (the ASPO paper's arm without importance sampling): factor 1, and 0 where PPO's hard mask says so.

    Whether the paper kept the mask is not stated: ``keep_clip_mask=false`` leaves it out. The logged value is -A times the factor.
    """
    _check_clip(eps_low, eps_high, None)
    plain = _clip(tokens.ratio, tokens.advantage, eps_low, eps_high, None)
    factor = tokens.ratio.clamp(1, 1) * (tokens.advantage != 0)  # 1, and NaN where the ratio is
    if keep_clip_mask:
        factor = factor * ~(plain.regions["hard_pos"] | plain.regions["hard_neg"])
    return Surrogate(factor, -tokens.advantage * factor, plain.regions if keep_clip_mask else {})


@formula("clip(r, {floor}, {cap})", "MiniMax-M1 2506.13585, eq. 4 and 5; bounds as ScaleRL and TRL write them")
def cispo(tokens: LossTokens, *, cap: float = 5.0, floor: float = 0.0) -> Surrogate:
    """L = -sg(clip(r, floor, cap)) A l: the weight is clipped, no token is dropped (MiniMax-M1 2506.13585, eq. 4 and 5).

    In absolute ratios, as ScaleRL and TRL write it; ``cispo_relative`` counts from 1, as verl does. Mistaking one for the other
    trains another objective. The paper does not state its upper bound; ScaleRL's cap is 5.
    """
    if not 0 <= floor < cap:
        raise ValueError(f"floor must be at least 0 and below cap, got floor={floor}, cap={cap}; 0 and 5 are usual")
    ratio, advantage = tokens.ratio, tokens.advantage
    factor = ratio.clamp(floor, cap) * (advantage != 0)
    signs = {"pos": advantage > 0, "neg": advantage < 0}
    regions = {f"cap_{sign}": (ratio > cap) & of_sign for sign, of_sign in signs.items()}
    if floor > 0:
        regions |= {f"floor_{sign}": (ratio < floor) & of_sign for sign, of_sign in signs.items()}
    return Surrogate(factor, -advantage * factor * tokens.logp, regions)


@formula("clip(r, 1 - {eps_low}, 1 + {eps_high})", "MiniMax-M1 2506.13585, eq. 4 and 5; bounds as verl writes them")
def cispo_relative(tokens: LossTokens, *, eps_high: float, eps_low: float = 1.0) -> Surrogate:
    """``cispo`` with the bounds 1 - eps_low and 1 + eps_high. An ``eps_low`` of 1 is no lower bound, as the paper has it."""
    _check_clip(eps_low, eps_high, None)
    return cispo(tokens, cap=1 + eps_high, floor=1 - eps_low)


@formula("4 s (1 - s) r with s = sigmoid(tau (r - 1)); tau = {tau_pos} where A > 0, {tau_neg} where A < 0", "SAPO 2511.20347")
def sapo(tokens: LossTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Surrogate:
    """A soft gate for the clip: L = -A f(r), f(r) = sigmoid(tau (r - 1)) 4 / tau (SAPO 2511.20347).

    ``tau_pos`` where A > 0, else ``tau_neg``. With s the sigmoid the factor is 4 s (1 - s) r: 1 at r = 1, falling to 0 on both
    sides. ``clip/gate_pos`` and ``clip/gate_neg`` are means of f.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be above 0, got {tau_pos} and {tau_neg}; 1.0 and 1.05 are usual")
    ratio, advantage = tokens.ratio, tokens.advantage
    tau = tau_neg + (tau_pos - tau_neg) * (advantage > 0)
    steep = tau * (ratio - 1)
    gate = torch.sigmoid(steep)
    factor = 4 * gate * torch.sigmoid(-steep) * ratio * (advantage != 0)
    value = gate * 4 / tau
    return Surrogate(factor, -advantage * value, {"gate_pos": value, "gate_neg": value})


@formula("r, but 0 where A > 0 and pi - pi_old > {max_shift}, or A < 0 and pi_old - pi > {max_shift}", "ours, after DPPO")
def tv_mask(tokens: LossTokens, *, max_shift: float = 0.2) -> Surrogate:
    """Factor r, and 0 where the token's probability has already moved by more than ``max_shift`` the way its advantage points.

    A > 0 and pi - pi_old > max_shift, or A < 0 and pi_old - pi > max_shift: a bound on the total variation, not on the ratio (ours,
    after DPPO). Rare tokens are never masked, whatever their ratio, so the factor has no bound.
    """
    if not 0 < max_shift <= 1:
        raise ValueError(f"max_shift must be above 0 and at most 1, got {max_shift}; 0.2 is usual")
    advantage = tokens.advantage
    shift = torch.exp(tokens.logp) - torch.exp(tokens.old_logp)
    hard_pos, hard_neg = (advantage > 0) & (shift > max_shift), (advantage < 0) & (shift < -max_shift)
    factor = tokens.ratio * ((advantage != 0) & ~hard_pos & ~hard_neg)
    return Surrogate(factor, -advantage * factor, {"hard_pos": hard_pos, "hard_neg": hard_neg})


@formula("1", "Williams 1992")
def reinforce(tokens: LossTokens) -> Surrogate:
    """L = -A l: factor 1 (Williams 1992). Nothing holds the policy near the one that sampled."""
    factor = (tokens.advantage != 0).float()
    return Surrogate(factor, -tokens.advantage * tokens.logp, {})


def is_ratio_based(surrogate: Callable[..., Surrogate]) -> bool:
    """Whether the surrogate acts through the ratio alone, and so does nothing with one optimizer step a batch (ratio exactly 1).

    A function is taken to be, unless it says ``function.ratio_based = False``.
    """
    return bool(getattr(surrogate, "ratio_based", True))


no_ratio.ratio_based = reinforce.ratio_based = False  # type: ignore[attr-defined]

SURROGATES: dict[str, Callable[..., Surrogate]] = {
    "grpo": grpo,
    "ppo": grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "aspo": aspo,
    "aspo_archer": aspo_archer,
    "pos_resp_mean": pos_resp_mean,
    "no_ratio": no_ratio,
    "cispo": cispo,
    "cispo_relative": cispo_relative,
    "sapo": sapo,
    "tv_mask": tv_mask,
    "reinforce": reinforce,
}


def _clip(ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float, dual_c: float | None) -> Surrogate:
    positive, negative = advantage > 0, advantage < 0
    hard_pos, hard_neg = positive & (ratio > 1 + eps_high), negative & (ratio < 1 - eps_low)
    value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps_low, 1 + eps_high))
    active = (advantage != 0) & ~hard_pos & ~hard_neg
    regions = {"hard_pos": hard_pos, "hard_neg": hard_neg}
    if dual_c is not None:
        dual_neg = negative & (ratio > dual_c)
        value = torch.where(dual_neg, -advantage * dual_c, value)
        active = active & ~dual_neg
        regions["dual_neg"] = dual_neg
    return Surrogate(ratio * active, value, regions)


def _flip(tokens: LossTokens, eps_low: float | Tensor, eps_high: float | Tensor, dual_c: float) -> Surrogate:
    ratio, advantage = tokens.ratio, tokens.advantage
    positive, negative = advantage > 0, advantage < 0
    hard_pos, hard_neg = positive & (ratio > 1 + eps_high), negative & (ratio < 1 - eps_low)
    flipped = torch.where(positive, 1 / ratio, ratio)
    capped = flipped > dual_c
    factor = flipped.clamp(max=dual_c) * ((advantage != 0) & ~hard_pos & ~hard_neg)
    return Surrogate(
        factor=factor,
        value=-advantage * (factor + hard_pos * (1 / (1 + eps_high)) + hard_neg * (1 - eps_low)),
        regions={
            "hard_pos": hard_pos,
            "hard_neg": hard_neg,
            "dual_pos": capped & positive,
            "dual_neg": capped & negative,
        },
    )


def _response_log_ratio(tokens: LossTokens) -> Tensor:
    return tokens.response_mean(tokens.logp - tokens.old_logp).clamp(-MAX_EXPONENT, MAX_EXPONENT)


def _check_clip(eps_low: float, eps_high: float, dual_c: float | None) -> None:
    if not 0 <= eps_low <= 1:
        raise ValueError(f"eps_low must lie in [0, 1], got {eps_low}; 0.2 is usual")
    if not eps_high >= 0:
        raise ValueError(f"eps_high must be at least 0, got {eps_high}; 0.2 is usual")
    if dual_c is not None and not dual_c > 1:
        raise ValueError(f"dual_c must be above 1, got {dual_c}; 3 is usual")
