"""Sample weights: how much each sample of a rollout batch counts in the policy term.

A scheme is one pure function ``(samples, advantage, *, keyword parameters) -> weight``, [S], not negative. ``sample_weights``
applies it and normalises, once, before the batch is cut into mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from learner.advantages import Samples


def none(samples: Samples, advantage: Tensor) -> Tensor:
    """Every sample counts alike."""
    return torch.ones_like(advantage)


def sample_weights(scheme: Callable[..., Tensor], samples: Samples, advantage: Tensor, params: Mapping[str, Any]) -> Tensor:
    """The scheme's weights with mean 1 over the valid samples (samples, not tokens), float32 [S]; 0 where not valid.

    ``advantage`` float32 [S]. Raises ValueError where a valid sample's weight is negative or not finite, or where all are 0.
    """
    weight = torch.where(samples.valid, scheme(samples, advantage, **params).double(), 0.0)
    if not samples.valid.any():
        return weight.float()
    if not (weight.isfinite() & (weight >= 0)).all() or not weight.any():
        name = getattr(scheme, "__name__", repr(scheme))
        raise ValueError(f"weighting {name} gave a weight that is negative or not finite, or no weight above 0")
    return (weight / (weight.sum() / samples.valid.sum())).float()


WEIGHTINGS: dict[str, Callable[..., Tensor]] = {"none": none}
