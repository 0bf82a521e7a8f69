"""Entropy as a guide: which tokens of a response are the sure ones, and a bonus that keeps the policy's entropy near a target."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import torch
from torch import Tensor

_SMALLEST = (127 - 12) << 23  # the bits of the float32 2^-12


def low_entropy_count(lengths: Tensor, quantile: float) -> Tensor:
    """How many of the n loss tokens of each response count as low-entropy: floor(quantile (n - 1)) + 1, int64 [R]; 0 of 0.

    It depends on the length alone, so the denominators of a term over these tokens are known before any forward.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"entropy_quantile must lie in [0, 1], got {quantile}; 0.8 is usual")
    places = (quantile * (lengths - 1).double() + 1e-9).floor().long()  # 0.29 x 100 is 28.999999999999996
    return (places + 1) * (lengths > 0)


@lru_cache(maxsize=1)  # by identity of the tensors: a surrogate and the KL term of one micro-batch ask for the same split
def is_low_entropy(entropy: Tensor, response: Tensor, quantile: float) -> Tensor:
    """Which tokens are among the ``low_entropy_count`` lowest entropies of their response, bool [T].

    By rank, not by value (Archer compares with the response's quantile, which takes in every tie): of equal entropies the earlier
    tokens are the low ones, NaN ranks highest, and the one token of a one-token response is low. ``entropy`` float32 [T] of whole
    responses, ``response`` int64 [T].
    """
    if len(entropy) == 0:
        return torch.zeros_like(response, dtype=torch.bool)
    # Sorting everything would be most of the cost. A coarse histogram a response tells all but the tokens of its threshold's bin:
    # 2^levels bins over the 16 octaves below 16 nats, what is lower in the first and what is higher in the last.
    num_responses = int(response.max()) + 1
    levels = max(min(9, (4 * len(entropy) // num_responses).bit_length() - 1), 0)
    value = entropy.nan_to_num(nan=torch.inf).clamp_(min=0).abs_().view(torch.int32)  # rises with the entropy
    shift = 27 - levels
    coarse = (value >> shift).sub_(_SMALLEST >> shift).clamp_(0, (1 << levels) - 1)
    bins = torch.bincount((response << levels).add_(coarse), minlength=num_responses << levels).view(num_responses, 1 << levels)
    lengths, below = bins.sum(1), bins.cumsum(1) - bins
    count = low_entropy_count(lengths, quantile)
    edge = (below < count[:, None]).sum(1) - 1  # the last bin that begins below the count; of a response without tokens none
    left = count - below.gather(1, edge.clamp(min=0)[:, None])[:, 0]
    beyond = coarse - edge.int().index_select(0, response)
    low = beyond < 0
    unsure = (beyond == 0).nonzero()[:, 0]
    key, order = torch.sort((response[unsure] << 32) | value[unsure].long(), stable=True)
    owner = key >> 32
    sizes = torch.bincount(owner, minlength=num_responses)
    rank = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[owner]
    low[unsure[order]] = rank < left[owner]
    return low


@dataclass(frozen=True, slots=True)
class EntropyState:
    """What an adaptive entropy bonus remembers between steps; saved with a checkpoint."""

    beta: float


def initial_entropy_state(entropy_beta: float) -> EntropyState:
    """Starts from the configured coefficient."""
    return EntropyState(entropy_beta)


def adapt_entropy(state: EntropyState, entropy: float, *, target: float, gain: float, max_beta: float) -> EntropyState:
    """beta <- clip(beta + gain (target - H), 0, max_beta), once a step; H is the batch's mean entropy in nats (ours).

    The coefficient grows while the policy is surer than the target and falls to 0 above it. An entropy that is not finite
    changes nothing.
    """
    if not isfinite(entropy):
        return state
    return EntropyState(min(max(state.beta + gain * (target - entropy), 0.0), max_beta))
