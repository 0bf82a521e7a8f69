"""Sample weights: how much each sample of a rollout batch counts in the policy term, and which are left out of it.

A scheme is one pure function ``(samples, advantage, *, keyword parameters) -> weight``, [S] and not negative, or ``Weights`` where
it prunes. A scheme that remembers earlier batches is ``(state, samples, advantage, *, ...) -> (weight, new state)`` and has its
first state as ``function.initial``. ``weigh_samples`` applies a scheme and normalises, once, before the batch is cut into
mini-batches. So a constant factor on all weights does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from learner.advantages import Groups, Samples, batch_norm, dr_grpo, grpo
from learner.formulas import formula


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Of the S samples of a rollout batch. A weight of 0 leaves a sample in the denominators; one that is not kept leaves them too."""

    weight: Tensor  # [S], not negative
    kept: Tensor  # bool [S]


def weigh_samples(
    scheme: Callable[..., Any], samples: Samples, advantage: Tensor, params: Mapping[str, Any], state: Any = None
) -> tuple[Weights, Any]:
    """A scheme's weights with mean 1 over the kept samples (samples, not tokens), float32, 0 where not kept; and its new state.

    ``advantage`` [S]. ``state`` is what the call before gave, None at first and for a scheme without a memory. Only valid samples
    are kept. Raises ValueError where a kept sample's weight is negative or not finite, or where all are 0.
    """
    name = getattr(scheme, "__name__", repr(scheme))
    if hasattr(scheme, "initial"):
        given, state = scheme(scheme.initial if state is None else state, samples, advantage, **params)
    else:
        given = scheme(samples, advantage, **params)
    if not isinstance(given, Weights):
        given = Weights(given, samples.valid)
    kept = given.kept & samples.valid
    weight = torch.where(kept, given.weight.double(), 0.0)
    if not samples.valid.any():
        return Weights(weight.float(), kept), state
    if not (weight.isfinite() & (weight >= 0)).all() or not weight.any():
        raise ValueError(f"weighting {name} gave a weight that is negative or not finite, or no weight above 0")
    return Weights((weight / (weight.sum() / kept.sum())).float(), kept), state


@formula("1")
def none(samples: Samples, advantage: Tensor) -> Tensor:
    """Every sample counts alike."""
    return torch.ones_like(advantage)


@formula("clip(|A0|^{alpha} / mean, {w_min}, {w_max}) at {level} level, A0 the advantage of base {base}", "ours")
def magnitude(
    samples: Samples,
    advantage: Tensor,
    *,
    level: Literal["group", "sample"] = "group",
    alpha: float = 1.0,
    base: Literal["raw", "group_std", "batch_std"] = "raw",
    w_min: float = 0.25,
    w_max: float = 2.0,
    normalise: bool = True,
) -> Tensor:
    """W = (mean of |A| over the group)^alpha at group level, |A|^alpha at sample level; clipped to [w_min, w_max]. Ours.

    Group level prefers boundary prompts, where |A| is largest on average. Sample level prefers lone successes and failures, the
    weakest evidence: with ``base`` raw they stay tame, divided by the group's standard deviation they do not.

    Args:
        alpha: 0 is bit-identical to ``none``.
        base: the advantage that W is made of, whatever the estimator: R - mean; that over the standard deviation of the group;
            or over that of the batch.
        normalise: whether the bounds are for W / mean(W), or for W itself.

    A group whose members all have A = 0 takes no part in the mean, and weighs 1.
    """
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(f"w_min must lie in [0, 1] and w_max be at least 1, got {w_min} and {w_max}; 0.25 and 2 are usual")
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0, got {alpha}; 1 is usual, 0 is off")
    estimator = {"raw": dr_grpo, "group_std": grpo, "batch_std": batch_norm}[base]
    size, groups = estimator(samples)[samples.valid].double().abs(), Groups(samples.group[samples.valid])
    mean = groups.mean(size)[groups.place]
    live = mean > 0
    weight = (mean if level == "group" else size)[live] ** alpha
    if normalise:
        weight = weight / weight.mean()
    return _at(samples, live, weight.clamp(w_min, w_max))


def _at(samples: Samples, live: Tensor, weight: Tensor) -> Tensor:
    """``weight`` with mean 1 at the ``live`` (bool [number valid]) of the valid samples, 1 at the others; [S]."""
    of_valid = torch.ones(len(live), dtype=torch.float64).masked_scatter(live, weight / weight.mean())
    return torch.ones(len(samples.values), dtype=torch.float64).masked_scatter(samples.valid, of_valid)


@formula("n softmax(-accuracy / {temperature}) over the n groups with signal", "DGPO 2601.20614")
def dgpo_question(samples: Samples, advantage: Tensor, *, temperature: float = 2.0) -> Tensor:
    """W = n softmax(-accuracy / temperature) over the n groups with signal: hard prompts count more (DGPO 2601.20614).

    ``accuracy`` is the mean over the group's valid members. A group with none right has signal through auxiliary rewards alone: it
    counts as accuracy 1, the lowest weight. A group whose members all have one value takes no part, and weighs 1.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; 2 is usual")
    groups = Groups(samples.group[samples.valid])
    accuracy = groups.mean(samples.need("accuracy")[samples.valid].double())
    accuracy = torch.where(accuracy == 0, 1.0, accuracy)
    live = groups.mean(dr_grpo(samples)[samples.valid].double().abs()) > 0
    weight = torch.ones_like(accuracy).masked_scatter(live, live.sum() * torch.softmax(-accuracy[live] / temperature, 0))
    return torch.ones(len(samples.values), dtype=torch.float64).masked_scatter(samples.valid, weight[groups.place])


@dataclass(frozen=True)
class Anchor:
    """What HA-DW remembers; ``Anchor(**json)`` restores what ``dataclasses.asdict`` gave."""

    centre: float | None = None  # C, the model's pass rate as it moves
    history: list[float] = field(default_factory=list)  # the last values of C, the newest last


@formula("exp(-sign(A) (pass rate - C)), C the pass rate as it moves [eta={eta}, window={window}]", "HA-DW 2601.08521")
def ha_dw(state: Anchor, samples: Samples, advantage: Tensor, *, eta: float = 1.0, window: int = 10) -> tuple[Tensor, Anchor]:
    """W = exp(-sign(A) (p - C)): successes on prompts harder than usual count more, on easier ones less (HA-DW 2601.08521).

    p is the group's pass rate, C_t = (1 - eta s_t) C_{t-1} + eta s_t mean(p), s_t the standard deviation of the last ``window``
    values of C. Until there are that many, C is the mean of the batches so far: ours, as s starts at 0 and C would never move.
    It raises rare successes, the opposite of a guard against them. ``eta`` and ``window`` are ours; the paper's constant factor
    is lost in the normalisation.
    """
    if not eta >= 0 or window < 2:
        raise ValueError(f"eta must be at least 0 and window at least 2, got {eta} and {window}; 1 and 10 work")
    groups = Groups(samples.group[samples.valid])
    if not len(groups.count):
        return torch.ones_like(advantage), state
    passed = groups.mean((samples.need("accuracy")[samples.valid] >= 0.5).double())
    batch, seen = float(passed.mean()), len(state.history)
    if state.centre is None or seen < window:
        centre = ((state.centre or 0.0) * seen + batch) / (seen + 1)
    else:
        rate = min(eta * float(torch.tensor(state.history, dtype=torch.float64).std(correction=0)), 1.0)
        centre = (1 - rate) * state.centre + rate * batch
    harder = centre - passed[groups.place]
    weight = torch.ones(len(samples.values), dtype=torch.float64).masked_scatter(
        samples.valid, torch.exp(advantage[samples.valid].sign().double() * harder)
    )
    return weight, Anchor(centre, [*state.history, centre][-window:])


ha_dw.initial = Anchor()  # type: ignore[attr-defined]


@formula("1 for the (1 - {pruning_rate}) of a group with the largest |A|; the others leave the batch", "CPPO 2503.22342")
def cppo(samples: Samples, advantage: Tensor, *, pruning_rate: float = 0.5) -> Weights:
    """Keeps floor(n (1 - pruning_rate)) of a group's n valid members, at least one: those with the largest |A|, the earlier in the
    batch where equal (CPPO 2503.22342)."""
    if not 0 <= pruning_rate < 1:
        raise ValueError(f"pruning_rate must lie in [0, 1), got {pruning_rate}; 0.5 is usual")
    groups = Groups(samples.group[samples.valid])
    keep = torch.floor(groups.count.double() * (1 - pruning_rate) + 1e-9).clamp(min=1)  # 20 x (1 - 0.9) is a little below 2
    size = advantage[samples.valid].double().abs()
    largest = groups.largest(size)
    # Rounded: +A and -A of a balanced group may differ in the last bit, which would always keep the same sign.
    rank, _ = _rank(groups, -(size / largest.where(largest > 0, 1.0)[groups.place]).round(decimals=5))
    return Weights(torch.ones_like(advantage), samples.valid.masked_scatter(samples.valid, rank < keep[groups.place]))


@formula("1 for the {num_kept} of a group with the largest variance of R; the others leave the batch", "PODS 2504.13818")
def pods(samples: Samples, advantage: Tensor, *, num_kept: int = 4) -> Weights:
    """Keeps the ``num_kept`` of a group's valid members whose values have the largest variance (PODS 2504.13818, "max variance").

    They are the k highest and the num_kept - k lowest for some k, which running sums of the sorted values find. For rewards of 0 and 1 that is as balanced as the group allows. A group that is no larger stays whole.
    """
    if num_kept < 1:
        raise ValueError(f"num_kept must be at least 1, got {num_kept}; half of batch.group_size is usual")
    groups = Groups(samples.group[samples.valid])
    value = groups.centre(samples.values[samples.valid].double())
    largest = groups.largest(value.abs())
    value = value / largest.where(largest > 0, 1.0)[groups.place]  # one scale for all: they share the running sums
    rank, order = _rank(groups, value)
    size = groups.count
    start = (size.cumsum(0) - size)[:, None]
    kept_here = size.clamp(max=num_kept)[:, None]
    high = torch.arange(num_kept + 1)[None, :].minimum(kept_here)  # [number of groups, num_kept + 1]: k, the number of highest
    low = kept_here - high

    def chosen(x: Tensor) -> Tensor:
        running = torch.cat([x.new_zeros(1), x[order].cumsum(0)])
        end = start + size[:, None]
        return (running[start + low] - running[start]) + (running[end] - running[end - high])

    variance = chosen(value.square()) / kept_here - (chosen(value) / kept_here).square()
    # The first of those that are largest but for rounding, so that the same values always give the same members.
    first = (variance >= variance.amax(1, keepdim=True) - 1e-9).int().argmax(1, keepdim=True)
    lowest, highest = low.gather(1, first)[:, 0], high.gather(1, first)[:, 0]
    kept = (rank < lowest[groups.place]) | (rank >= (size - highest)[groups.place])
    return Weights(torch.ones_like(advantage), samples.valid.masked_scatter(samples.valid, kept))


def _rank(groups: Groups, key: Tensor) -> tuple[Tensor, Tensor]:
    """The place of every member in its group by ascending key, the earlier first where equal, [n]; and the order that sorts all
    members by group, then by key, [n]."""
    order = key.argsort(stable=True)
    order = order[groups.place[order].argsort(stable=True)]
    start = groups.count.cumsum(0) - groups.count
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - start[groups.place[order]]
    return rank, order


@formula("{positive} where A > 0, {negative} where A < 0", "2506.01347")
def sign(samples: Samples, advantage: Tensor, *, positive: float = 1.0, negative: float = 1.0) -> Tensor:
    """W = ``positive`` where A > 0, ``negative`` where A < 0, 1 where A = 0.

    With ``positive`` small, or 0, failures teach more than successes, which keeps answers diverse (2506.01347).
    """
    if not (positive >= 0 and negative >= 0 and math.isfinite(positive + negative)):
        raise ValueError(f"positive and negative must be 0 or more, got {positive} and {negative}; 0.1 and 1 work")
    return torch.where(advantage > 0, positive, torch.where(advantage < 0, negative, 1.0))


@formula("clip((mean length / length)^{power}, {w_min}, {w_max})", "ours")
def length(samples: Samples, advantage: Tensor, *, power: float = 1.0, w_min: float = 0.25, w_max: float = 2.0) -> Tensor:
    """W = (mean length / length)^power, clipped to [w_min, w_max]; length counts loss tokens. Ours.

    Above 0 short responses count more, below 0 long ones; 0 is bit-identical to ``none``.
    """
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(f"w_min must lie in [0, 1] and w_max be at least 1, got {w_min} and {w_max}; 0.25 and 2 are usual")
    tokens = samples.need("num_tokens").double()
    counted = samples.valid & (tokens > 0)
    return ((tokens[counted].mean() / tokens.clamp(min=1)) ** power).clamp(w_min, w_max).nan_to_num(1.0)


def weight_metrics(samples: Samples, weight: Tensor, advantage: Tensor, chosen: Sequence[int]) -> dict[str, float]:
    """What the weights, [S], did to the ``chosen`` samples, which are valid and at least one.

    ``weight/corr_pass_rate`` is the correlation with the pass rate p of the sample's group, 0 where either is constant.
    ``weight/share_pass_low``, ``_mid`` and ``_high`` are the shares of the sum of W |A| with p up to 1/4, between, and from 3/4.
    """
    groups = Groups(samples.group[samples.valid])
    passed = groups.mean((samples.need("accuracy")[samples.valid] >= 0.5).double())[groups.place]
    rate = torch.zeros(len(samples.values), dtype=torch.float64).masked_scatter(samples.valid, passed)[list(chosen)]
    weight, size = weight[list(chosen)].double(), advantage[list(chosen)].double().abs()
    spread, both = weight.std(correction=0), (weight - weight.mean()) * (rate - rate.mean())
    scale = float(spread * rate.std(correction=0))
    metrics = {"weight/std": float(spread), "weight/max": float(weight.max())}
    metrics["weight/corr_pass_rate"] = float(both.mean()) / scale if scale > 1e-12 else 0.0
    pull = weight * size
    if pull.sum() > 0:
        bands = {"low": rate <= 0.25, "mid": (rate > 0.25) & (rate < 0.75), "high": rate >= 0.75}
        metrics |= {f"weight/share_pass_{name}": float(pull[band].sum() / pull.sum()) for name, band in bands.items()}
    return metrics


WEIGHTINGS: dict[str, Callable[..., Any]] = {
    "none": none,
    "magnitude": magnitude,
    "dgpo_question": dgpo_question,
    "ha_dw": ha_dw,
    "cppo": cppo,
    "pods": pods,
    "sign": sign,
    "length": length,
}
