"""From scored groups to what training runs on: samples with advantage and weight, and micro-batches of tensors.

    groups --make_samples--> samples --plan_optimizer_steps--> optimizer steps of micro-batches

Pure but for the device the tensors land on. Every rank does it for the whole rollout batch and keeps its own micro-batches, so
statistics, weights and denominators are global without a word between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.schema import Aggregation
from learner.advantages import Samples
from learner.aggregation import StepCounts, denominators
from learner.batching import PackedRows, Row, RowCost, cut_mini_batches, pack_rows, plan_micro_batches
from rollout.records import Completion, Finish, Score, ScoredGroup, Status


class Gap(IntEnum):
    """How a token's weights stand to the learner's."""

    SAME_VERSION = 0
    OLDER_VERSION = 1
    MIXED = 2  # new weights over older keys and values


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion that is trained on."""

    group: int  # place of its group in the rollout batch
    row: Row
    completion: Completion
    num_loss_tokens: int
    advantage: float
    weight: float  # mean 1 over the valid samples of the rollout batch


@dataclass(slots=True, eq=False)
class MicroBatch:
    """Tensors of one forward and backward; [T] means one entry a loss token. ``old_logp`` and ``ref_logp`` are what *prepare* adds."""

    input_ids: Tensor  # int64 [rows, width]
    positions: Tensor  # int64 [T], see PackedRows
    targets: Tensor  # int64 [T]
    response: Tensor  # int64 [T]
    advantage: Tensor  # float32 [T], as are the four below
    sample_weight: Tensor
    roll_logp: Tensor
    policy_denominator: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None
    gap: Tensor  # int64 [T], Gap
    num_tokens: int  # without padding; 0 makes it a padding micro-batch, whose credit is 0


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of the completions of a rollout batch."""

    num_samples: int  # trained on
    num_invalid: int  # the verifier gave no value
    num_truncated: int  # left out because they hit the token limit
    num_empty: int  # without a loss token


def make_samples(
    groups: Sequence[ScoredGroup],
    advantage: Callable[[Samples], Tensor],
    weight: Callable[[Samples, Tensor], Tensor],
    *,
    mask_truncated: bool,
) -> tuple[list[Sample], BatchCounts]:
    """Samples of a rollout batch in its order, with their advantages and sample weights.

    A completion without a valid score is in no statistic, loss or denominator. One that is left out for being truncated, or has no
    loss token, still counts in its group's statistics: what its reward says of the others is true.
    """
    members = [
        (place, group, completion, score)
        for place, group in enumerate(groups)
        for completion, score in zip(group.group.completions, group.scores, strict=True)
    ]
    table = Samples(
        values=torch.tensor([score.value if _is_valid(score) else 0.0 for *_, score in members], dtype=torch.float64),
        group=torch.tensor([place for place, *_ in members], dtype=torch.int64),
        valid=torch.tensor([_is_valid(score) for *_, score in members], dtype=torch.bool),
    )
    advantages = advantage(table)
    weights = weight(table, advantages)
    samples: list[Sample] = []
    num_invalid = num_truncated = num_empty = 0
    for (place, group, completion, score), a, w in zip(members, advantages.tolist(), weights.tolist(), strict=True):
        if not _is_valid(score):
            num_invalid += 1
        elif mask_truncated and completion.finish is Finish.LENGTH:
            num_truncated += 1
        elif not completion.loss_mask.any():
            num_empty += 1
        else:
            row = _row(group.group.prompt_token_ids, completion)
            samples.append(Sample(place, row, completion, int(np.count_nonzero(completion.loss_mask)), a, w))
    return samples, BatchCounts(len(samples), num_invalid, num_truncated, num_empty)


def _is_valid(score: Score) -> bool:
    return score.status is Status.OK and score.value is not None and isfinite(score.value)


def _row(prompt: NDArray[np.int32], completion: Completion) -> Row:
    scored = np.zeros(len(prompt) + completion.num_tokens, dtype=np.bool_)
    scored[len(prompt) :] = completion.loss_mask
    return Row(np.concatenate([prompt, completion.token_ids]), scored)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a rollout batch is cut, dealt and aggregated."""

    num_mini_batches: int
    tokens_per_micro_batch: int
    aggregation: Aggregation
    max_response_tokens: int
    cost: RowCost
    version: int  # of the learner, as it trains the batch
    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Dealt:
    """What all ranks together were dealt of a rollout batch."""

    num_tokens: tuple[int, ...]  # of each rank, without padding
    num_places: int  # of tokens and padding, padding micro-batches included

    @property
    def imbalance(self) -> float:
        """Tokens of the rank with most over their mean; 1 is even."""
        return max(self.num_tokens) * len(self.num_tokens) / max(1, sum(self.num_tokens))

    @property
    def padding_frac(self) -> float:
        return 1 - sum(self.num_tokens) / self.num_places if self.num_places else 0.0


def plan_optimizer_steps(samples: Sequence[Sample], plan: Plan, seed: Sequence[int]) -> tuple[list[list[MicroBatch]], Dealt]:
    """For each optimizer step of one pass, this rank's micro-batches. Groups without a sample are not counted as groups."""
    by_group: dict[int, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample)
    groups = list(by_group.values())
    steps = []
    num_tokens, num_places = [0] * plan.world_size, 0
    for places in cut_mini_batches(len(groups), plan.num_mini_batches, seed):
        mine = [sample for place in places for sample in groups[place]]
        counts = StepCounts(sum(s.num_loss_tokens for s in mine), len(mine))
        lengths = [len(s.row.token_ids) for s in mine]
        costs = [plan.cost.of(s.row) for s in mine]
        ranks = plan_micro_batches(lengths, costs, plan.world_size, plan.tokens_per_micro_batch)
        for rank, batches in enumerate(ranks):
            num_tokens[rank] += sum(lengths[i] for batch in batches for i in batch)
            num_places += sum(len(batch) * max(lengths[i] for i in batch) if batch else 1 for batch in batches)
        steps.append([_micro_batch([mine[i] for i in batch], plan, counts) for batch in ranks[plan.rank]])
    return steps, Dealt(tuple(num_tokens), num_places)


def packed_tensors(packed: PackedRows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, positions and targets, as the policy module takes them."""
    return tuple(torch.from_numpy(array).to(device) for array in (packed.input_ids, packed.positions, packed.targets))


def _micro_batch(samples: Sequence[Sample], plan: Plan, counts: StepCounts) -> MicroBatch:
    packed = pack_rows([sample.row for sample in samples])
    input_ids, positions, targets = packed_tensors(packed, plan.device)
    response = torch.from_numpy(packed.responses).to(plan.device)

    def spread(values: Sequence[float] | Tensor) -> Tensor:
        """One value a response, at each of its loss tokens."""
        return torch.as_tensor(values if samples else [1.0], dtype=torch.float32, device=plan.device)[response]

    lengths = torch.tensor([sample.num_loss_tokens for sample in samples])
    roll_logp, gap = _of_engine([sample.completion for sample in samples], plan.version)
    return MicroBatch(
        input_ids=input_ids,
        positions=positions,
        targets=targets,
        response=response,
        advantage=spread([sample.advantage for sample in samples]),
        sample_weight=spread([sample.weight for sample in samples]),
        roll_logp=torch.from_numpy(roll_logp).to(plan.device),
        policy_denominator=spread(denominators(plan.aggregation, lengths, counts, plan.max_response_tokens)),
        old_logp=None,
        ref_logp=None,
        gap=torch.from_numpy(gap).to(plan.device),
        num_tokens=packed.num_tokens,
    )


def _of_engine(completions: Sequence[Completion], version: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What the engine says of the loss tokens: log-probabilities and Gap."""
    if not completions:
        return np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64)
    mask = np.concatenate([c.loss_mask for c in completions])
    older = np.concatenate([c.versions for c in completions])[mask] < version
    mixed = np.concatenate([c.mixed for c in completions])[mask]
    gap = np.where(mixed, Gap.MIXED, np.where(older, Gap.OLDER_VERSION, Gap.SAME_VERSION))
    return np.concatenate([c.roll_logp for c in completions])[mask], gap
