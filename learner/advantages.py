"""Advantages: how the values of a rollout batch's samples become the advantage of every sample, or of every token.

An estimator is one pure function ``(samples, *, keyword parameters) -> advantage`` over the whole rollout batch: float32 [S], one
number a sample, or flat float32 [sum of num_tokens] in sample order, one a token. Samples that are not valid get 0 and take
part in no statistic. Statistics are float64; what has no spread gives 0 to the last bit, whatever its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from learner.formulas import formula


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """What estimators of advantages and of sample weights know about the S samples of a rollout batch.

    Raises ValueError for a wrong shape or dtype, or for a valid sample whose value, accuracy or KL is not finite.
    """

    values: Tensor  # [S] float32 or float64, what trains; anything where not valid
    group: Tensor  # [S] int64, which group the sample belongs to; any numbers
    valid: Tensor  # [S] bool, whether the verifier gave a value
    accuracy: Tensor | None = None  # [S] float32 or float64, 0 to 1; anything where not valid
    num_tokens: Tensor | None = None  # [S] int64, loss tokens
    parts: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # reward parts by name, [S] unweighted; NaN where a part did not judge
    part_weights: Mapping[str, float] = field(default_factory=dict)  # their factors in ``values``
    kl: Tensor | None = None  # [sum of num_tokens] float32, KL in the reward: what it takes from each token, its beta included

    def __post_init__(self) -> None:
        floats, size = (torch.float32, torch.float64), len(self.values)
        _check_tensor("values", self.values, size, floats)
        _check_tensor("group", self.group, size, (torch.int64,))
        _check_tensor("valid", self.valid, size, (torch.bool,))
        _check_finite("value", self.values, self.valid)
        if self.accuracy is not None:
            _check_tensor("accuracy", self.accuracy, size, floats)
            _check_finite("accuracy", self.accuracy, self.valid)
        if self.num_tokens is not None:
            _check_tensor("num_tokens", self.num_tokens, size, (torch.int64,))
        for name, part in self.parts.items():
            _check_tensor(f"parts[{name!r}]", part, size, floats)
            _check_finite(f"reward part {name}", part.where(~part.isnan(), 0.0), self.valid)
        if self.parts.keys() != self.part_weights.keys():
            raise ValueError(f"Samples.part_weights must name {sorted(self.parts)}, got {sorted(self.part_weights)}")
        if self.kl is not None:
            _check_tensor("kl", self.kl, int(self.need("num_tokens").sum()), floats)
            _check_finite("KL", self.sum_tokens(self.kl), self.valid)

    def need(self, name: str) -> Tensor:
        """The optional field ``name``. Raises ValueError where it is None."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this needs Samples.{name}, which is None")
        return tensor

    def token_sample(self) -> Tensor:
        """The sample that each token belongs to, int64 [sum of num_tokens]."""
        return torch.arange(len(self.values)).repeat_interleave(self.need("num_tokens"))

    def sum_tokens(self, per_token: Tensor) -> Tensor:
        """The sum over each sample's tokens, float64 [S]; 0 for a sample without any."""
        return torch.zeros(len(self.values), dtype=torch.float64).index_add(0, self.token_sample(), per_token.double())


def _check_tensor(name: str, tensor: Tensor, size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != (size,) or tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"Samples.{name} must be {expected} [{size}], got {tensor.dtype} {list(tensor.shape)}")


def _check_finite(what: str, tensor: Tensor, valid: Tensor) -> None:
    broken = (valid & ~tensor.isfinite()).nonzero()
    if len(broken):
        place = int(broken[0])
        raise ValueError(
            f"sample {place} is marked valid but its {what} is {float(tensor[place])}; "
            "what a verifier gives that is not finite must be marked not valid"
        )


class Groups:
    """Statistics of n numbers within their groups; ``group`` int64 [n] may hold any numbers, in any order."""

    def __init__(self, group: Tensor) -> None:
        _, self.place, self.count = torch.unique(group, return_inverse=True, return_counts=True)  # [n], [number of groups]

    def sum(self, x: Tensor) -> Tensor:
        """[number of groups]"""
        return x.new_zeros(len(self.count)).index_add(0, self.place, x)

    def mean(self, x: Tensor) -> Tensor:
        """[number of groups]"""
        return self.sum(x) / self.count

    def largest(self, x: Tensor) -> Tensor:
        """[number of groups]"""
        return x.new_full((len(self.count),), -torch.inf).scatter_reduce(0, self.place, x, "amax")

    def centre(self, x: Tensor) -> Tensor:
        """x - mean of its group, [n]. Measured from the group's lowest value, so that a constant group is exactly 0."""
        above = x + self.largest(-x)[self.place]
        return above - self.mean(above)[self.place]

    def std(self, centred: Tensor, std_mode: Literal["unbiased", "population"]) -> Tensor:
        """[number of groups]; 0 for a group of one."""
        divisor = (self.count - 1).clamp(min=1) if std_mode == "unbiased" else self.count
        return (self.sum(centred.square()) / divisor).sqrt()


def centre_all(x: Tensor) -> tuple[Tensor, Tensor]:
    """x - mean over all of x, exactly 0 where x is constant, and its unbiased standard deviation, 0 for less than two numbers."""
    above = x - x.amin() if len(x) else x
    centred = above - above.mean()
    return centred, (centred.square().sum() / max(len(x) - 1, 1)).sqrt()


def returns(samples: Samples) -> Tensor:
    """The value of every valid sample, less what KL in the reward takes from all its tokens; float64 [number valid]."""
    values = samples.values.double()
    return (values if samples.kl is None else values - samples.sum_tokens(samples.kl))[samples.valid]


def _spread(samples: Samples, of_valid: Tensor) -> Tensor:
    """Numbers of the valid samples at their places among all, float32 [S]."""
    return torch.zeros(len(samples.values)).masked_scatter(samples.valid, of_valid.float())


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What an estimator made of S samples."""

    sample: Tensor  # [S] float32; where the estimator gives one a token, the mean over the sample's tokens
    token: Tensor | None  # [sum of num_tokens] float32; None where all tokens of a sample share one


def estimate(estimator: Callable[..., Tensor], samples: Samples, params: Mapping[str, Any]) -> Advantages:
    """Applies an estimator. Raises ValueError for a result of the wrong shape, or one that is not finite at a valid sample."""
    per_token = is_per_token(estimator)
    result = estimator(samples, **params).float()
    expected = int(samples.need("num_tokens").sum()) if per_token else len(samples.values)
    name = getattr(estimator, "__name__", repr(estimator))
    if result.shape != (expected,):
        kind = "token" if per_token else "sample"
        raise ValueError(
            f"advantage {name} must give one number a {kind}, [{expected}], and gave {list(result.shape)}; "
            "a function that gives one a token says so with function.per_token = True, others do not"
        )
    sample = (samples.sum_tokens(result) / samples.need("num_tokens").clamp(min=1)).float() if per_token else result
    if not sample[samples.valid].isfinite().all():
        raise ValueError(f"advantage {name} gave a number that is not finite for a valid sample")
    return Advantages(sample, result if per_token else None)


Estimator = TypeVar("Estimator", bound=Callable[..., Tensor])


def _group_relative(estimator: Estimator) -> Estimator:
    estimator.group_relative = True  # type: ignore[attr-defined]
    return estimator


def _per_token(estimator: Estimator) -> Estimator:
    estimator.per_token = True  # type: ignore[attr-defined]
    return estimator


def is_group_relative(estimator: Callable[..., Tensor]) -> bool:
    """Whether it compares the members of a group, so that a group of one teaches nothing: ``batch.group_size=1`` is refused, and a
    group that shrank to one valid member gets 0. A function of the user's says so with ``function.group_relative = True``."""
    return bool(getattr(estimator, "group_relative", False))


def is_per_token(estimator: Callable[..., Tensor]) -> bool:
    """Whether it gives one number a token. A function of the user's says so with ``function.per_token = True``."""
    return bool(getattr(estimator, "per_token", False))


def _group_formula(*, std_mode: str, eps: float) -> str:
    return "R - mean of the group" if std_mode == "none" else f"(R - mean of the group) / ({std_mode} std of the group + {eps:g})"


@formula(_group_formula, "DeepSeekMath 2402.03300, section 4.1.2")
@_group_relative
def grpo(samples: Samples, *, std_mode: Literal["unbiased", "population", "none"] = "unbiased", eps: float = 1e-6) -> Tensor:
    """A = (R - mean) / (std + eps) over the valid members of the group (DeepSeekMath 2402.03300, section 4.1.2).

    ``std_mode``: divide by n - 1 (unbiased), by n (population), or not at all (Dr. GRPO 2503.20783). A group whose valid
    members have one value, or which has one valid member, gets exactly 0.
    """
    return _spread(samples, _normalise(returns(samples), samples.group[samples.valid], std_mode, eps))


def _normalise(x: Tensor, group: Tensor, std_mode: Literal["unbiased", "population", "none"], eps: float) -> Tensor:
    if std_mode not in ("unbiased", "population", "none"):
        raise ValueError(f"std_mode must be unbiased, population or none, got {std_mode!r}")
    _check_eps(eps)
    groups = Groups(group)
    centred = groups.centre(x)
    return centred if std_mode == "none" else centred / (groups.std(centred, std_mode)[groups.place] + eps)


@formula("R - mean of the group", "Dr. GRPO 2503.20783")
@_group_relative
def dr_grpo(samples: Samples) -> Tensor:
    """A = R - mean of the group, without the standard deviation, which favours very easy and very hard prompts (2503.20783)."""
    return grpo(samples, std_mode="none")


@formula("R - mean of the other members of the group", "RLOO 2402.14740")
@_group_relative
def rloo(samples: Samples) -> Tensor:
    """A = R - mean of the *other* members = n / (n - 1) (R - mean) (RLOO 2402.14740); 0 for a group of one."""
    groups = Groups(samples.group[samples.valid])
    others = (groups.count - 1).clamp(min=1)
    return _spread(samples, groups.centre(returns(samples)) * (groups.count / others)[groups.place])


@formula("(R - mean of the group) / (mean |R - mean| of the group + {eps})", "DGPO 2601.20614")
@_group_relative
def mad(samples: Samples, *, eps: float = 1e-6) -> Tensor:
    """A = (R - mean) / (mean |R - mean| + eps): the sum of |A| is the group's size, however hard the prompt (DGPO 2601.20614)."""
    _check_eps(eps)
    groups = Groups(samples.group[samples.valid])
    centred = groups.centre(returns(samples))
    return _spread(samples, centred / (groups.mean(centred.abs())[groups.place] + eps))


@formula("(R - mean of the group) / (std over the batch + {eps})", "2508.08221")
@_group_relative
def batch_norm(samples: Samples, *, eps: float = 1e-6) -> Tensor:
    """A = (R - mean of the group) / (std of R over the whole batch + eps), unbiased (2508.08221).

    One scale for all groups: no group is blown up for being nearly constant.
    """
    _check_eps(eps)
    values = returns(samples)
    return _spread(samples, Groups(samples.group[samples.valid]).centre(values) / (centre_all(values)[1] + eps))


@formula(
    "sum over reward parts k of w_k (r_k - mean_k of the group) / (std_k + {eps}) [std_mode={std_mode}, whitening={whitening}]",
    "GDPO 2601.05242",
)
@_group_relative
def gdpo(
    samples: Samples,
    *,
    std_mode: Literal["unbiased", "population", "none"] = "unbiased",
    whitening: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """A = sum over reward parts k of w_k (r_k - mean_k) / (std_k + eps), each over its valid members of the group; then, with
    ``whitening``, A / (std over the batch + eps): its mean is 0 already (GDPO 2601.05242).

    w_k are the parts' weights in the reward. A part that is constant in a group, or did not judge a sample, adds 0. Raises
    ValueError for KL in the reward, which belongs to no part.
    """
    if samples.kl is not None:
        raise ValueError("gdpo normalises each reward part alone and has none for KL in the reward; use KL in the loss")
    if not samples.parts:
        raise ValueError("gdpo needs Samples.parts, and there are none")
    total = torch.zeros(len(samples.values), dtype=torch.float64)
    for name, part in samples.parts.items():
        judged = samples.valid & ~part.isnan()
        total[judged] += samples.part_weights[name] * _normalise(part[judged].double(), samples.group[judged], std_mode, eps)
    advantage = total[samples.valid]
    if whitening:
        advantage = advantage / ((advantage.square().sum() / max(len(advantage) - 1, 1)).sqrt() + eps)
    return _spread(samples, advantage)


@formula("R - baseline [{baseline}]", "Williams 1992")
def reinforce(samples: Samples, *, baseline: Literal["none", "batch_mean"] = "batch_mean") -> Tensor:
    """A = R - baseline (Williams 1992). ``baseline``: 0, or the mean over the valid samples of the rollout batch."""
    values = returns(samples)
    return _spread(samples, values if baseline == "none" else centre_all(values)[0])


@formula(
    "whitened over all tokens of the batch: R discounted by {gamma} a token from the end, less KL in the reward",
    "REINFORCE++ 2501.03262",
)
@_per_token
def reinforce_pp(samples: Samples, *, gamma: float = 1.0, eps: float = 1e-8) -> Tensor:
    """REINFORCE++ (2501.03262): A_t = whitened return of token t, flat float32 [sum of num_tokens].

    The reward comes with a sample's last token, and each token pays its KL where the KL is in the reward; the return is their
    sum from t on, discounted by ``gamma`` a token. Whitened over all valid tokens of the rollout batch, unbiased variance:
    long responses weigh more in mean and variance.
    """
    return _whitened_returns(samples, samples.values.double(), samples.valid, gamma, eps)


@formula(
    "whitened over all tokens of the batch: R - mean of the group, discounted by {gamma} a token from the end",
    "REINFORCE++ 2501.03262, -baseline",
)
@_per_token
@_group_relative
def reinforce_pp_baseline(samples: Samples, *, gamma: float = 1.0, eps: float = 1e-8) -> Tensor:
    """REINFORCE++ whose reward is R - mean of the group (2501.03262, the ``-baseline`` form); the rest as in ``reinforce_pp``.

    A group with one valid member gets 0 and its tokens stay out of the whitening.
    """
    values = torch.zeros(len(samples.values), dtype=torch.float64)
    groups = Groups(samples.group[samples.valid])
    values[samples.valid] = groups.centre(samples.values[samples.valid].double())
    counted = samples.valid.masked_scatter(samples.valid, groups.count[groups.place] > 1)
    return _whitened_returns(samples, values, counted, gamma, eps)


def _whitened_returns(samples: Samples, values: Tensor, counted: Tensor, gamma: float, eps: float) -> Tensor:
    """Whitened discounted returns of the tokens of the ``counted`` samples (bool [S]), 0 elsewhere."""
    _check_eps(eps)
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma must lie in (0, 1], got {gamma}; 1 is usual")
    sample, length = samples.token_sample(), samples.need("num_tokens")
    place = torch.arange(len(sample)) - (length.cumsum(0) - length)[sample]
    to_end = length[sample] - 1 - place
    token_return = values[sample] * gamma ** to_end.double()
    if samples.kl is not None:
        token_return = token_return - discounted_sums(samples.kl.double(), to_end, gamma)
    counts = counted[sample]
    centred, std = centre_all(token_return[counts])
    return torch.zeros(len(sample)).masked_scatter(counts, (centred / (std.square() + eps).sqrt()).float())


def discounted_sums(x: Tensor, to_end: Tensor, gamma: float) -> Tensor:
    """y_t = x_t + gamma y_{t+1} within each row; ``to_end`` is how many entries of the row follow. [T], float64.

    By doubling the stretch summed so far: the logarithm of the longest row in passes, no power of 1/gamma that could overflow.
    """
    reach, longest = 1, int(to_end.max()) + 1 if len(x) else 0
    while reach < longest:
        ahead = torch.zeros_like(x)
        ahead[:-reach] = x[reach:]
        x = x + gamma**reach * torch.where(to_end >= reach, ahead, 0.0)
        reach *= 2
    return x


def _check_eps(eps: float) -> None:
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}; 1e-6 is usual")


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "mad": mad,
    "batch_norm": batch_norm,
    "gdpo": gdpo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
