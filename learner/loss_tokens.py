"""What the credit functions see of a micro-batch: its loss tokens, flat, detached and in float32.

A token that is masked never gets here. It is taken out before any exponential, because 0 x NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INTEGER_FIELDS = ("response", "group", "role", "pass_number")  # of LossTokens: int64; the others are float32
MAX_EXPONENT = 20.0  # exponents of ratios are clamped to plus and minus this; the log-ratios themselves never are


@dataclass(frozen=True, slots=True, eq=False)
class LossTokens:
    """The T loss tokens of one micro-batch. All tensors are [T], detached, float32 unless said otherwise.

    The four log-probabilities are those of DESIGN section 3, at the sampling temperature, in nats.
    """

    logp: Tensor  # the learner, now
    entropy: Tensor  # of its full distribution, in nats
    old_logp: Tensor  # the learner when the rollout batch arrived
    roll_logp: Tensor  # the engine
    ref_logp: Tensor | None  # the frozen reference; None without one
    advantage: Tensor
    sample_weight: Tensor  # mean 1 over the valid samples of the rollout batch
    token_weight: Tensor
    correction: Tensor  # of the mismatch between engine and learner
    policy_denominator: Tensor  # of the optimizer step, over all ranks
    kl_denominator: Tensor  # the same for the KL term's own mask
    kl_mask: Tensor  # 1 where the KL term counts
    response: Tensor  # int64, which response of the micro-batch the token belongs to
    # What only some schemes need; None where the learner was not asked for it.
    max_logp: Tensor | None = None  # of the most probable token, by the learner now
    role: Tensor | None = None  # int64, 0 reasoning, 1 action
    teacher_logp: Tensor | None = None  # the sampled token, by a teacher that sees more
    group: Tensor | None = None  # int64, which group of the rollout batch the response belongs to
    pass_number: Tensor | None = None  # int64, which pass over the rollout batch this is, from 0

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
    def ratio(self) -> Tensor:
        """r = pi / pi_old = exp(clamp(logp - old_logp, -20, 20)). NaN stays NaN, so that the non-finite guard sees it."""
        return torch.exp(torch.clamp(self.logp - self.old_logp, -MAX_EXPONENT, MAX_EXPONENT))


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
