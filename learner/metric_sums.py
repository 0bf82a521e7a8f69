"""Metrics that can be merged over micro-batches, mini-batches and ranks, so that they do not depend on how a batch was cut.

Plain numbers, so that any process can read them; means, spreads and percentiles are taken only at the end.

Percentiles come from fixed bins of a logarithm x, made of the upper bits of |x| + 2^-17 as a float32: 32 bins an octave, on either
side of 0. What is read is the middle of a bin, so a percentile's logarithm is right to 2 % of itself and 2e-7, and a ratio of exactly
1 reads exactly 1. Beyond e^32 and e^-32, and for 0, there are only the last bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DROPPED = 18  # of the 23 bits of a float32's mantissa; the other 5 are the 32 bins of an octave
_SMALLEST, _LARGEST = 2.0**-17, 32.0
_FIRST = int(np.float32(_SMALLEST).view(np.int32)) >> _DROPPED
_HALF = (int(np.float32(_LARGEST).view(np.int32)) >> _DROPPED) - _FIRST
NUM_BINS = 2 * _HALF + 1


@dataclass(frozen=True, slots=True)
class MetricSums:
    """``a + b`` merges two; each kind by metric name, ``values`` tells under which names it is reported."""

    sums: Mapping[str, tuple[float, float]]  # a total, and what it is divided by
    maxima: Mapping[str, float]
    spreads: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # count, sum, sum of squares
    histograms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # [NUM_BINS] counts of log values
    # [2, NUM_BINS]: by a token's key, counts and totals of its value
    profiles: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        sums = dict(self.sums)
        for name, (total, count) in other.sums.items():
            mine, my_count = sums.get(name, (0.0, 0.0))
            sums[name] = (mine + total, my_count + count)
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            mine = maxima.get(name, value)
            maxima[name] = mine if mine > value or math.isnan(mine) else value  # NaN wins: it must be seen
        spreads = dict(self.spreads)
        for name, (count, first, second) in other.spreads.items():
            a, b, c = spreads.get(name, (0.0, 0.0, 0.0))
            spreads[name] = (a + count, b + first, c + second)
        return MetricSums(sums, maxima, spreads, _add(self.histograms, other.histograms), _add(self.profiles, other.profiles))

    def values(self) -> dict[str, float]:
        """The metrics themselves. What is over nothing is left out.

        A spread NAME with a ``{}`` in it gives its mean and std (population) there, and ``ess``, the effective share of the tokens
        (sum x)^2 / (n sum x^2). A histogram gives p01, p50 and p99 there. A profile gives means of the value over the parts, of
        equal size, into which its last word cuts the keys: ``quartile`` four, ``half`` two, from the lowest key to the highest.
        """
        values = {name: total / count for name, (total, count) in self.sums.items() if count} | dict(self.maxima)
        for name, (count, total, squares) in self.spreads.items():
            if count:
                values[name.format("mean")] = total / count
                values[name.format("std")] = math.sqrt(max(squares / count - (total / count) ** 2, 0.0))
                if squares > 0:
                    values[name.format("ess")] = total**2 / (count * squares)
        for name, counts in self.histograms.items():
            if counts.sum():
                values |= {name.format(f"p{round(100 * q):02}"): _percentile(counts, q) for q in (0.01, 0.5, 0.99)}
        for name, (counts, totals) in self.profiles.items():
            values |= _parts(name, counts, totals)
        return values


def _add(mine: Mapping[str, NDArray[np.float64]], other: Mapping[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    return {**mine, **{name: mine[name] + counts if name in mine else counts for name, counts in other.items()}}


def _percentile(counts: NDArray[np.float64], q: float) -> float:
    """The value of the bin in which the smallest share ``q`` of the tokens ends."""
    place = int(np.searchsorted(np.cumsum(counts), q * counts.sum())) - _HALF
    if place in (0, -_HALF):
        return 1.0 if place == 0 else 0.0
    edges = ((np.array([0, 1]) + abs(place) + _FIRST) << _DROPPED).astype(np.int32).view(np.float32)
    return math.exp(math.copysign(float(edges.mean()) - _SMALLEST, place))


def _parts(name: str, counts: NDArray[np.float64], totals: NDArray[np.float64]) -> dict[str, float]:
    num_parts = {"quartile": 4, "half": 2}[name.rpartition("_")[2]]
    if not counts.sum():
        return {}
    # A bin that lies across a border gives each side its share.
    borders = np.arange(num_parts + 1) / num_parts * counts.sum()
    below = np.interp(borders, np.concatenate([[0.0], np.cumsum(counts)]), np.concatenate([[0.0], np.cumsum(totals)]))
    means = np.diff(below) / (counts.sum() / num_parts)
    return {f"{name}_{i + 1}": float(mean) for i, mean in enumerate(means)}


def log_bins(log_value: Tensor) -> Tensor:
    """The bin of each log value of float32 [T], int32 [T], 0 to NUM_BINS - 1. NaN is as 0."""
    x = log_value.nan_to_num(0.0)
    size = x.abs().add_(_SMALLEST).clamp_(max=_LARGEST).view(torch.int32)
    return (size >> _DROPPED).sub_(_FIRST).mul_(x.sign_().to(torch.int32)).add_(_HALF)


def collect_sums(
    means: Mapping[str, tuple[Tensor, Tensor]],
    maxima: Mapping[str, tuple[Tensor, Tensor]],
    spreads: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    histograms: Mapping[str, Tensor] | None = None,
    profiles: Mapping[str, Tensor] | None = None,
) -> MetricSums:
    """Sums, maxima and spreads of values float32 [T], each over its own mask; a maximum over nothing is left out.

    A mask is bool [T]: what the values are where it is False does not matter. It may be float32 [T], a weight on finite values, for
    maxima 0 or 1 on values from 0: on a CPU that is many times faster. Spreads are added up in float64. Histograms are [NUM_BINS] counts,
    profiles [2, NUM_BINS] counts and totals. One transfer from the device fetches everything.
    """
    spreads, histograms, profiles = spreads or {}, histograms or {}, profiles or {}
    masks = {id(mask): mask for group in (means, spreads, maxima) for _, mask in group.values()}
    counts = {key: mask.sum(dtype=torch.float64 if mask.dtype is torch.bool else None) for key, mask in masks.items()}
    scalars = [total for value, mask in means.values() for total in (_total(value, mask), counts[id(mask)])]
    for value, mask in spreads.values():
        x = value.double()
        masked = x * mask
        scalars += [counts[id(mask)], masked.sum(), torch.dot(masked, x)]
    scalars += [top for value, mask in maxima.values() for top in (_top(value, mask), counts[id(mask)])]
    parts = [torch.stack(scalars).double()] if scalars else []
    arrays = [array.double().flatten() for array in [*histograms.values(), *profiles.values()]]
    numbers = torch.cat([*parts, *arrays]).cpu().numpy()
    places = [0, 2 * len(means), 3 * len(spreads), 2 * len(maxima), NUM_BINS * len(histograms)]
    of_means, of_spreads, tops, of_histograms, of_profiles = (
        numbers[a:b] for a, b in zip(np.cumsum(places), [*np.cumsum(places)[1:], len(numbers)], strict=True)
    )
    return MetricSums(
        sums={name: (float(a), float(b)) for name, (a, b) in zip(means, of_means.reshape(-1, 2), strict=True)},
        maxima={name: float(top) for name, (top, count) in zip(maxima, tops.reshape(-1, 2), strict=True) if count},
        spreads={
            name: (float(a), float(b), float(c)) for name, (a, b, c) in zip(spreads, of_spreads.reshape(-1, 3), strict=True)
        },
        histograms=dict(zip(histograms, of_histograms.reshape(-1, NUM_BINS), strict=True)),
        profiles=dict(zip(profiles, of_profiles.reshape(-1, 2, NUM_BINS), strict=True)),
    )


def _total(value: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.where(mask, value, 0.0).sum(dtype=torch.float64)
    return torch.dot(value, mask)


def _top(value: Tensor, mask: Tensor) -> Tensor:
    if len(value) == 0:
        return value.new_zeros(())
    return (torch.where(mask, value, -torch.inf) if mask.dtype is torch.bool else value * mask).amax()
