"""Surrogates: how the ratio between the current and the old policy becomes a factor on the token's advantage.

A surrogate is one pure function ``(tokens, *, keyword parameters) -> Surrogate``. Its gradient is ``-advantage * factor``
for each token's log-probability; ``value`` is the loss that is logged and never differentiated. Symbols: r = pi / pi_old
(``tokens.ratio``), A the advantage, w the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.loss_tokens import LossTokens


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """What a surrogate makes of T loss tokens."""

    factor: Tensor  # [T] float32, w
    value: Tensor  # [T] float32, the token's loss, advantage included
    regions: Mapping[str, Tensor]  # bool [T] by name; a name that ends in _pos or _neg is a share of that sign's tokens


def grpo(tokens: LossTokens, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_c: float | None = None) -> Surrogate:
    """PPO's clip: L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)) (Schulman et al. 1707.06347, eq. 7; GRPO 2402.03300).

    ``dual_c`` bounds the loss of negative advantages by -A dual_c, without gradient beyond (Ye et al. 1912.09729). The factor
    is r, and 0 where clipped; exactly on a bound it is still r.
    """
    _check_bounds(eps_low, eps_high, dual_c)
    ratio, advantage = tokens.ratio, tokens.advantage
    positive, negative = advantage > 0, advantage < 0
    hard_pos, hard_neg = positive & (ratio > 1 + eps_high), negative & (ratio < 1 - eps_low)
    value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps_low, 1 + eps_high))
    dual_neg = torch.zeros_like(negative)
    if dual_c is not None:
        dual_neg = negative & (ratio > dual_c)
        value = torch.where(negative, torch.minimum(value, -advantage * dual_c), value)
    return Surrogate(
        # A product, not a fill: a NaN ratio must reach the non-finite guard also where the advantage is 0.
        factor=ratio * ((advantage != 0) & ~hard_pos & ~hard_neg & ~dual_neg),
        value=value,
        regions={"hard_pos": hard_pos, "hard_neg": hard_neg, "dual_pos": torch.zeros_like(positive), "dual_neg": dual_neg},
    )


def aspo(tokens: LossTokens, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_c: float = 3.0) -> Surrogate:
    """Asymmetric importance sampling (ASPO, arXiv 2510.06062 v2), three steps on the raw ratio, in this order:

    1. hard mask, as in PPO: factor 0 where A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low;
    2. flip: factor 1/r where A > 0 (lagging tokens gain weight), r where A < 0;
    3. soft dual clip: the factor is capped at ``dual_c`` and the gradient kept.

    The logged value is bounded: -A times the factor, and the clip bound's value where masked. (The released code logs
    -A dual_c logp on capped tokens, which has the same gradient and jumps.)
    """
    _check_bounds(eps_low, eps_high, dual_c)
    ratio, advantage = tokens.ratio, tokens.advantage
    positive, negative = advantage > 0, advantage < 0
    hard_pos, hard_neg = positive & (ratio > 1 + eps_high), negative & (ratio < 1 - eps_low)
    hard = hard_pos | hard_neg
    flipped = torch.where(positive, 1 / ratio, ratio)
    capped = flipped > dual_c
    factor = flipped.clamp(max=dual_c) * ((advantage != 0) & ~hard)
    bound = torch.where(positive, 1 / (1 + eps_high), 1 - eps_low)
    return Surrogate(
        factor=factor,
        value=-advantage * torch.where(hard, bound, factor),
        regions={
            "hard_pos": hard_pos,
            "hard_neg": hard_neg,
            "dual_pos": capped & positive,
            "dual_neg": capped & negative,
        },
    )


def _check_bounds(eps_low: float, eps_high: float, dual_c: float | None) -> None:
    if not 0 <= eps_low <= 1:
        raise ValueError(f"eps_low must lie in [0, 1], got {eps_low}; 0.2 is usual")
    if not eps_high >= 0:
        raise ValueError(f"eps_high must be at least 0, got {eps_high}; 0.2 is usual")
    if dual_c is not None and not dual_c > 1:
        raise ValueError(f"dual_c must be above 1, got {dual_c}; 3 is usual")


def is_ratio_based(surrogate: Callable[..., Surrogate]) -> bool:
    """Whether the surrogate acts through the ratio alone, and so does nothing with one optimizer step a batch (ratio exactly 1).

    A function is taken to be, unless it says ``function.ratio_based = False``.
    """
    return bool(getattr(surrogate, "ratio_based", True))


SURROGATES: dict[str, Callable[..., Surrogate]] = {"grpo": grpo, "aspo": aspo}
