"""Aggregation: the four ways in which token losses become one number, each as the denominator of every token.

Denominators belong to one optimizer step. They come from counts over all ranks and micro-batches, known before its first
backward, so no split of the step into micro-batches changes its gradient. What left the loss mask is in no count; what only
got factor 0 is. The same function serves the policy term and, from the counts of its own mask, the KL term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema import Aggregation


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What one optimizer step counts. Counts of ranks and micro-batches are added."""

    num_tokens: int  # loss tokens
    num_responses: int  # responses with at least one loss token

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(self.num_tokens + other.num_tokens, self.num_responses + other.num_responses)


def count_step(lengths: Tensor) -> StepCounts:
    """Counts from the number of loss tokens of each response, int64 [R]; a response without any counts nowhere."""
    return StepCounts(int(lengths.sum()), int((lengths > 0).sum()))


def denominators(mode: Aggregation, lengths: Tensor, counts: StepCounts, max_tokens: int) -> Tensor:
    """The denominator of each token of each response, float32 [R].

    ``lengths`` int64 [R]: loss tokens of the responses at hand; ``counts``: of the whole optimizer step; ``max_tokens``: the
    constant L_max, the run's token limit of a completion. With m the mask and L the token loss (DAPO 2503.14476, Dr. GRPO 2503.20783):

        token_mean            sum m L / num_tokens               seq_mean_token_mean   mean over responses of (sum_t m L / sum_t m)
        seq_mean_token_sum    mean over responses of sum_t m L   token_sum_norm        sum m L / (num_responses * max_tokens)
    """
    if mode is Aggregation.seq_mean_token_mean:
        return (counts.num_responses * lengths).float()
    constants = {
        Aggregation.token_mean: counts.num_tokens,
        Aggregation.seq_mean_token_sum: counts.num_responses,
        Aggregation.token_sum_norm: counts.num_responses * max_tokens,
    }
    return torch.full(lengths.shape, float(constants[mode]), device=lengths.device)
