"""Metrics that can be merged: sums with their counts, and maxima, over micro-batches, mini-batches and ranks.

Plain numbers, so that any process can read them; a mean is taken only at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Sums by metric name, each with what it is divided by, and maxima by metric name. ``a + b`` merges two."""

    sums: Mapping[str, tuple[float, float]]
    maxima: Mapping[str, float]

    def __add__(self, other: MetricSums) -> MetricSums:
        sums = dict(self.sums)
        for name, (total, count) in other.sums.items():
            mine, my_count = sums.get(name, (0.0, 0.0))
            sums[name] = (mine + total, my_count + count)
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            mine = maxima.get(name, value)
            maxima[name] = mine if mine > value or isnan(mine) else value  # NaN wins: it must be seen
        return MetricSums(sums, maxima)

    def values(self) -> dict[str, float]:
        """The metrics themselves. A mean over nothing is left out."""
        return {name: total / count for name, (total, count) in self.sums.items() if count} | dict(self.maxima)


def collect_sums(means: Mapping[str, tuple[Tensor, Tensor]], maxima: Mapping[str, tuple[Tensor, Tensor]]) -> MetricSums:
    """Sums and maxima of values float32 [T], each over its own mask bool [T]; a maximum over nothing is left out.

    What the values are where the mask is False does not matter. One transfer from the device fetches everything.
    """
    totals = [torch.where(mask, value, 0.0).sum(dtype=torch.float64) for value, mask in means.values()]
    counts = [mask.sum(dtype=torch.float64) for _, mask in means.values()]
    tops = [
        torch.cat([torch.where(mask, value, -torch.inf), value.new_full((1,), -torch.inf)]).amax().double()
        for value, mask in maxima.values()
    ]
    numbers = torch.stack([*totals, *counts, *tops]).tolist()
    num_means = len(means)
    return MetricSums(
        sums=dict(zip(means, zip(numbers[:num_means], numbers[num_means : 2 * num_means], strict=True), strict=True)),
        maxima={name: top for name, top in zip(maxima, numbers[2 * num_means :], strict=True) if top != float("-inf")},
    )
