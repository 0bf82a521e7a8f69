"""What the credit functions see of a micro-batch: its loss tokens, flat, detached and in float32.

A token that is masked never gets here. It is taken out before any exponential, because 0 x NaN is NaN. A response is whole: all
its loss tokens are in one micro-batch, so what a surrogate or a correction says of a response needs no other micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_EXPONENT = 20.0  # exponents of ratios are clamped to plus and minus this; the log-ratios themselves never are
INTEGER_FIELDS = ("response", "role", "group", "pass_number")  # of LossTokens: int64


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The T loss tokens of one micro-batch. All tensors are [T], detached, float32 unless said otherwise.

    The four log-probabilities are those of DESIGN section 3, at the sampling temperature, in nats. What may be None is there only
    where something that the configuration chose asks for it.
    """

    logp: Tensor  # the learner, now
    entropy: Tensor  # of its full distribution, in nats
    old_logp: Tensor  # the learner when the rollout batch arrived, or what a correction puts in its place
    roll_logp: Tensor  # the engine
    ref_logp: Tensor | None  # the frozen reference; None without one
    advantage: Tensor
    sample_weight: Tensor  # mean 1 over the valid samples of the rollout batch
    token_weight: Tensor  # 1, or what the token weighting made
    correction: Tensor  # 1, or what the correction of the mismatch between engine and learner made
    policy_denominator: Tensor  # of the optimizer step, over all ranks
    kl_denominator: Tensor  # the same for the KL term's own mask
    kl_mask: Tensor  # 1 where the KL term counts
    response: Tensor  # int64, which response of the micro-batch the token belongs to; 0 or more, below T
    max_logp: Tensor | None = None  # of the likeliest token, the learner, now
    role: Tensor | None = None  # int64: 0 reasoning, 1 action
    teacher_logp: Tensor | None = None  # the same token under a teacher
    group: Tensor | None = None  # int64: which group of the rollout batch the response belongs to
    pass_number: Tensor | None = None  # int64: which pass over the rollout batch this is, from 0
    # Counts of optimizer steps: of the weights that made the token, at the start of this update, and now.
    behave_step: Tensor | None = None
    prox_step: Tensor | None = None
    current_step: Tensor | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            dtype = torch.int64 if name in INTEGER_FIELDS else torch.float32
            if tensor.shape != self.logp.shape or tensor.dim() != 1 or tensor.dtype != dtype or tensor.requires_grad:
                raise ValueError(
                    f"LossTokens.{name} must be a detached {dtype} tensor of shape [{len(self.logp)}], "
                    f"got {tensor.dtype} {list(tensor.shape)}{', with gradient' if tensor.requires_grad else ''}"
                )

    @property
    def log_ratio(self) -> Tensor:
        """logp - old_logp, its exponent clamped to plus and minus 20. NaN stays NaN, so that the non-finite guard sees it."""
        return torch.clamp(self.logp - self.old_logp, -MAX_EXPONENT, MAX_EXPONENT)

    @property
    def ratio(self) -> Tensor:
        """r = pi / pi_old = exp(clamp(logp - old_logp, -20, 20))."""
        return torch.exp(self.log_ratio)

    def response_sum(self, values: Tensor) -> Tensor:
        """At every token the sum of ``values`` [T] over its response's loss tokens, float32 [T]. A NaN reaches its whole response."""
        return self._spread(torch.bincount(self.response, weights=values.double()))

    def response_mean(self, values: Tensor) -> Tensor:
        """At every token the mean of ``values`` [T] over its response's loss tokens, float32 [T]."""
        return self._spread(torch.bincount(self.response, weights=values.double()) / torch.bincount(self.response))

    def response_length(self) -> Tensor:
        """At every token the number of its response's loss tokens, float32 [T]."""
        return self._spread(torch.bincount(self.response))

    def _spread(self, of_response: Tensor) -> Tensor:
        return of_response.float().index_select(0, self.response)


def no_tokens() -> LossTokens:
    """Loss tokens of length 0 with every field there: enough to find a parameter out of range."""
    fields = LossTokens.__slots__
    return LossTokens(**{name: torch.zeros(0, dtype=torch.int64 if name in INTEGER_FIELDS else torch.float32) for name in fields})


def select_loss_tokens(values: Tensor, loss_mask: Tensor) -> Tensor:
    """The entries of ``values`` at the loss tokens, flat, detached and in float32, row after row.

    ``values`` is [R, L] with one entry a token or [R] with one a response; ``loss_mask`` is bool [R, L]. What lies at a masked
    position, NaN included, is gone afterwards.
    """
    if values.dim() == 1:
        values = values[:, None].expand_as(loss_mask)
    return values.detach()[loss_mask].float()


def response_index(loss_mask: Tensor) -> Tensor:
    """The row of every loss token of ``loss_mask`` bool [R, L], int64 [T], in the order of ``select_loss_tokens``."""
    return loss_mask.nonzero()[:, 0]
