"""Advantages: how the values of a rollout batch's samples become one number a sample.

An estimator is one pure function ``(samples, *, keyword parameters) -> advantage``, float32 [S], 0 at every sample that is not
valid. It sees the whole rollout batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """What estimators of advantages and of sample weights know about the S samples of a rollout batch.

    Raises ValueError for a wrong shape or dtype, or for a valid sample whose value is not finite.
    """

    values: Tensor  # [S] float32 or float64, what trains; anything where not valid
    group: Tensor  # [S] int64, which group the sample belongs to; any numbers
    valid: Tensor  # [S] bool, whether the verifier gave a value

    def __post_init__(self) -> None:
        for name, dtypes in (("values", (torch.float32, torch.float64)), ("group", (torch.int64,)), ("valid", (torch.bool,))):
            tensor = getattr(self, name)
            if tensor.shape != self.values.shape or tensor.dim() != 1 or tensor.dtype not in dtypes:
                expected = " or ".join(str(dtype) for dtype in dtypes)
                raise ValueError(
                    f"Samples.{name} must be {expected} [{len(self.values)}], got {tensor.dtype} {list(tensor.shape)}"
                )
        broken = (self.valid & ~self.values.isfinite()).nonzero()
        if len(broken):
            place = int(broken[0])
            raise ValueError(
                f"sample {place} is marked valid but its value is {float(self.values[place])}; "
                "a verifier's value that is not finite must be marked not valid"
            )


def grpo(samples: Samples, *, std_mode: Literal["unbiased", "population", "none"] = "unbiased", eps: float = 1e-6) -> Tensor:
    """A = (R - mean) / (std + eps) over the valid members of the group (DeepSeekMath 2402.03300, section 4.1.2).

    ``std_mode``: divide by n - 1 (unbiased), by n (population), or not at all (Dr. GRPO 2503.20783). A group whose valid
    members have one value, or which has one valid member, gets exactly 0.
    """
    if std_mode not in ("unbiased", "population", "none"):
        raise ValueError(f"std_mode must be unbiased, population or none, got {std_mode!r}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}; 1e-6 is usual")
    values = samples.values[samples.valid].double()
    _, place, count = torch.unique(samples.group[samples.valid], return_inverse=True, return_counts=True)

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(count)).index_add(0, place, x)

    # Measured from the group's lowest value: a constant group is then 0 to the last bit, whatever its value.
    lowest = values.new_full((len(count),), torch.inf).scatter_reduce(0, place, values, "amin")
    above = values - lowest[place]
    centred = above - (group_sum(above) / count)[place]
    if std_mode != "none":
        divisor = (count - 1).clamp(min=1) if std_mode == "unbiased" else count
        std = (group_sum(centred.square()) / divisor).sqrt()
        centred = centred / (std[place] + eps)
    advantage = torch.zeros_like(samples.values, dtype=torch.float32)
    advantage[samples.valid] = centred.float()
    return advantage


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"grpo": grpo}
