"""Token weights: how much each loss token of a response counts in the policy term, beside its sample's weight.

A scheme is one pure function ``(tokens, *, keyword parameters) -> weight``, detached float32 [T], not negative. It multiplies the
surrogate's factor after clipping; denominators stay as they are. Symbols: A the advantage, H the entropy, pi the probability of
the sampled token under the old policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

from learner.entropy import is_low_entropy
from learner.formulas import formula
from learner.loss_tokens import LossTokens

Scheme = TypeVar("Scheme", bound=Callable[..., Tensor])


def _marked(*needs: str, experimental: bool = False, whole_batch: bool = False) -> Callable[[Scheme], Scheme]:
    """``experimental``: stands in for formulas that we could not see; choosing it is logged."""

    def mark(scheme: Scheme) -> Scheme:
        scheme.needs, scheme.experimental, scheme.whole_batch = needs, experimental, whole_batch  # type: ignore[attr-defined]
        return scheme

    return mark


def needed_fields(scheme: Callable[..., Tensor]) -> tuple[str, ...]:
    """The optional fields of LossTokens that it reads. A function of the user's says so with ``function.needs = ("role",)``."""
    return tuple(getattr(scheme, "needs", ()))


def is_whole_batch(scheme: Callable[..., Tensor]) -> bool:
    """Whether it compares the responses of a group, and so must see all tokens of the rollout batch at once, not a micro-batch."""
    return bool(getattr(scheme, "whole_batch", False))


@formula("1")
def none(tokens: LossTokens) -> Tensor:
    """Every token counts alike."""
    return torch.ones_like(tokens.logp)


@formula("{low} on the {quantile} lowest entropies of a response, {high} on the others", "2506.01939")
def entropy_split(
    tokens: LossTokens, *, quantile: float = 0.8, low: float = 0.0, high: float = 1.0, normalise: bool = False
) -> Tensor:
    """``low`` on the low-entropy tokens of each response (``learner.entropy.is_low_entropy``), ``high`` on the others: 0.8, 0 and 1
    train on the forking fifth alone (2506.01939).

    ``normalise``: mean 1 over the response.
    """
    if not (low >= 0 and high >= 0):
        raise ValueError(f"low and high must be 0 or more, got {low} and {high}; 0 and 1 are usual")
    weight = torch.where(is_low_entropy(tokens.entropy, tokens.response, quantile), low, high).float()
    return _mean_one(weight, tokens.response) if normalise else weight


@formula("{alpha} pi_old + 1 - {alpha}", "2505.12929")
def ar(tokens: LossTokens, *, alpha: float = 0.3) -> Tensor:
    """alpha pi + (1 - alpha): improbable tokens, whose gradients are the largest, count less (2505.12929, advantage reweighting).

    0 is bit-identical to ``none``.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}; 0.3 is usual")
    return alpha * tokens.old_logp.exp() + (1 - alpha)


@formula("1 where pi_old <= {eta} in odd passes, where pi_old > {eta} in even ones, else 0", "Lopti 2505.12929")
@_marked("pass_number")
def lopti(tokens: LossTokens, *, eta: float = 0.5) -> Tensor:
    """1 for tokens with pi <= eta and 0 for the others in the first pass, the reverse in the second, and so on (2505.12929, Lopti).

    The paper updates twice on each mini-batch, its improbable tokens first. Here it is once over *all* mini-batches for either
    kind, so the two updates of a mini-batch lie further apart. ``batch.num_passes`` must be even, or the improbable tokens are
    trained on more often than the others.
    """
    if not 0 < eta < 1:
        raise ValueError(f"eta must lie between 0 and 1, got {eta}; 0.5 is usual")
    improbable = tokens.old_logp <= math.log(eta)
    return (improbable == (_need(tokens, "pass_number") % 2 == 0)).float()


@formula(
    "{lambda_r} on reasoning tokens, n softmax(H / {tau}) over the n action tokens",
    "experimental, after the abstract of ActFocus 2605.14558",
)
@_marked("role", experimental=True)
def act_focus(tokens: LossTokens, *, lambda_r: float = 0.1, tau: float | None = 1.0, normalise: bool = True) -> Tensor:
    """``lambda_r`` on reasoning tokens; n softmax(H / tau) over a response's n action tokens. Experimental: of ActFocus (2605.14558)
    we saw the abstract, which fixes neither the energy nor any number.

    ``tau`` None is infinite: all actions alike. ``normalise``: mean 1 over the response. 1 and None are bit-identical to ``none``.
    """
    if not lambda_r >= 0:
        raise ValueError(f"lambda_r must be 0 or more, got {lambda_r}; 0.1 is the default")
    if tau is not None and not tau > 0:
        raise ValueError(f"tau must be above 0, or null, got {tau}; 1 is the default")
    weight = torch.full_like(tokens.logp, lambda_r)
    action = _need(tokens, "role") == 1
    energy = tokens.entropy[action].double() / (math.inf if tau is None else tau)
    share, count = _softmax(energy, tokens.response[action])
    weight[action] = (count * share).float()
    return _mean_one(weight, tokens.response) if normalise else weight


@formula(
    "1 + {a_pos} (h - mean h) where A > 0, 1 - {a_neg} (h - mean h) where A < 0, in [{w_min}, {w_max}]; h: {surrogate}",
    "experimental, after the abstract of ACPO 2607.03126",
)
@_marked("max_logp", experimental=True)
def acpo(
    tokens: LossTokens,
    *,
    surrogate: Literal["mode_entropy", "mode_logp"] = "mode_entropy",
    vocab_size: int | None = None,
    a_pos: float = 1.0,
    a_neg: float = 1.0,
    w_min: float = 0.5,
    w_max: float = 2.0,
) -> Tensor:
    """Uncertain tokens count more where A > 0, sure ones where A < 0: 1 + a_pos (h - mean h), 1 - a_neg (h - mean h), the mean over
    the response, clipped to [w_min, w_max]. Experimental: of ACPO (2607.03126) we saw the abstract; its surrogate is not public.

    ``surrogate``: h is the entropy of "the most probable token or another", in bits, or -log(its probability) / log(vocab_size).
    ``a_pos`` and ``a_neg`` 0 are bit-identical to ``none``.
    """
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(f"w_min must lie in [0, 1] and w_max be at least 1, got {w_min} and {w_max}; 0.5 and 2 are the defaults")
    max_logp = _need(tokens, "max_logp")
    if surrogate == "mode_entropy":
        mode = max_logp.exp()
        rest = (1 - mode).clamp(min=1e-30)  # its share of the entropy is then 0
        h = -(mode * max_logp + rest * rest.log()) / math.log(2)
    elif vocab_size is None or vocab_size < 2:
        raise ValueError(f"surrogate=mode_logp needs vocab_size, 2 or more, got {vocab_size}; surrogate=mode_entropy needs none")
    else:
        h = -max_logp / math.log(vocab_size)
    centred = h - _mean_at(h, tokens.response)
    change = torch.where(tokens.advantage > 0, a_pos, torch.where(tokens.advantage < 0, -a_neg, 0.0))
    return (1 + change * centred).clamp(w_min, w_max)


@formula(
    "1 + {strength} sign(A) (sibling credit under the teacher, tau {tau}), in [{w_min}, {w_max}]",
    "experimental, after the abstract of CRAFT 2606.29476",
)
@_marked("teacher_logp", "group", experimental=True, whole_batch=True)
def craft(tokens: LossTokens, *, strength: float = 1.0, tau: float = 1.0, w_min: float = 0.5, w_max: float = 2.0) -> Tensor:
    """1 + strength sign(A) credit, clipped to [w_min, w_max], with ``sibling_credit``: what a better informed teacher would do more
    of counts more in good responses and less in bad ones. Experimental: of CRAFT (2606.29476) we saw the abstract; the credit is
    our reconstruction, how it becomes a weight is ours.

    Siblings that are not among ``tokens`` are not seen: give it whole groups. ``strength`` 0 is bit-identical to ``none``.
    """
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(f"w_min must lie in [0, 1] and w_max be at least 1, got {w_min} and {w_max}; 0.5 and 2 are the defaults")
    return (1 + strength * tokens.advantage.sign() * sibling_credit(tokens, tau)).clamp(w_min, w_max)


def sibling_credit(tokens: LossTokens, tau: float) -> Tensor:
    """sum_i v_i A_i - mean_i A_i over the responses i of the group that have a t-th loss token, with v = softmax_i(g_it / tau) and
    g = teacher_logp - old_logp; float32 [T], the same for all siblings at t. The tokens of a response lie together, in order.

    0 where the teacher has no preference, or a response has no sibling as long.
    """
    if not tau > 0:
        raise ValueError(f"tau must be above 0, got {tau}; 1 is the default")
    teacher, group, count = _need(tokens, "teacher_logp"), _need(tokens, "group"), _count(tokens.response)
    place = torch.arange(len(group), device=group.device) - (count.cumsum(0) - count)[tokens.response]
    of_response = group.new_zeros(len(count)).scatter(0, tokens.response, group).unique(return_inverse=True)[1]
    step = of_response[tokens.response] * (int(count.max()) if len(count) else 0) + place
    advantage = tokens.advantage.double()
    share, _ = _softmax((teacher - tokens.old_logp).double() / tau, step)
    return ((_sum(share * advantage, step) - _sum(advantage, step) / _count(step).clamp(min=1)).float()).index_select(0, step)


def _need(tokens: LossTokens, name: str) -> Tensor:
    tensor = getattr(tokens, name)
    if tensor is None:
        raise ValueError(f"this token weighting needs LossTokens.{name}, which is None")
    return tensor


def _count(index: Tensor) -> Tensor:
    """How often 0, 1, ... stand in ``index``, int64."""
    return torch.bincount(index)


def _sum(x: Tensor, index: Tensor) -> Tensor:
    """Of the entries with index 0, 1, ..., float64."""
    size = int(index.max()) + 1 if len(index) else 0
    return torch.zeros(size, dtype=torch.float64, device=x.device).index_add(0, index, x.double())


def _softmax(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Over the entries that share an index: their shares, and how many share it; [T] each."""
    count = _count(index)
    highest = x.new_full((len(count),), -math.inf).scatter_reduce(0, index, x, "amax")
    grown = torch.exp(x - highest.index_select(0, index))
    return grown / _sum(grown, index).index_select(0, index), count.index_select(0, index)


def _mean_at(x: Tensor, index: Tensor) -> Tensor:
    """At every entry the mean of those that share its index, float32 [T]."""
    return (_sum(x, index) / _count(index)).float().index_select(0, index)


def _mean_one(weight: Tensor, response: Tensor) -> Tensor:
    """Divided by its mean over each response; a response whose weights are all 0 keeps them."""
    mean = _mean_at(weight, response)
    return weight / mean.where(mean > 0, 1.0)


TOKEN_WEIGHTINGS: dict[str, Callable[..., Tensor]] = {
    "none": none,
    "entropy_split": entropy_split,
    "ar": ar,
    "lopti": lopti,
    "act_focus": act_focus,
    "acpo": acpo,
    "craft": craft,
}
