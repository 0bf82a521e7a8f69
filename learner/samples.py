"""From scored groups to what training runs on: the samples of a rollout batch, its loss tokens as flat arrays, and micro-batches.

    groups --list_samples--> samples --choose--> trained samples --cut_steps--> who trains what when --pack--> forwards

Pure but for the device the tensors land on. Every rank does it for the whole rollout batch and keeps its own micro-batches, so
statistics, weights and denominators are global without a word between ranks. A token is known by its place among the loss tokens of
all samples, one sample after another: what is known of tokens are arrays [N] in that order, of samples [S].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.advantages import Samples
from learner.batching import PackedRows, Row, RowCost, cut_mini_batches, pack_rows, plan_micro_batches
from rollout.records import Completion, Finish, Score, ScoredGroup, Status

MOST_LAG = 8  # versions behind that are told apart; more count as so many


class Gap(IntEnum):
    """How a token's weights stand to the learner's."""

    SAME_VERSION = 0
    OLDER_VERSION = 1
    MIXED = 2  # new weights over older keys and values


def lag_name(lag: int) -> str:
    """Of tokens that are so many versions behind, in the names of metrics."""
    return f"lag_{lag}" + ("_or_more" if lag == MOST_LAG else "")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion of a rollout batch."""

    group: int  # place of its group in the rollout batch
    row: Row
    completion: Completion
    score: Score
    num_loss_tokens: int


def list_samples(groups: Sequence[ScoredGroup]) -> list[Sample]:
    """All completions of a rollout batch in its order, those without a valid score as well."""
    return [
        Sample(place, _row(group.group.prompt_token_ids, completion), completion, score, int(completion.loss_mask.sum()))
        for place, group in enumerate(groups)
        for completion, score in zip(group.group.completions, group.scores, strict=True)
    ]


def tabulate(samples: Sequence[Sample], part_weights: Mapping[str, float]) -> Samples:
    """What estimators and weightings see of the S samples. A part that a score does not name did not judge it."""
    valid = [_is_valid(sample.score) for sample in samples]
    accuracy = [sample.score.accuracy or 0.0 if is_valid else 0.0 for sample, is_valid in zip(samples, valid, strict=True)]
    return Samples(
        values=torch.tensor([s.score.value if ok else 0.0 for s, ok in zip(samples, valid, strict=True)], dtype=torch.float64),
        group=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        valid=torch.tensor(valid, dtype=torch.bool),
        accuracy=torch.tensor(accuracy, dtype=torch.float64),
        num_tokens=torch.tensor([sample.num_loss_tokens for sample in samples], dtype=torch.int64),
        parts={
            name: torch.tensor([sample.score.parts.get(name, nan) for sample in samples], dtype=torch.float64)
            for name in part_weights
        },
        part_weights=part_weights,
    )


def _is_valid(score: Score) -> bool:
    return score.status is Status.OK and score.value is not None and isfinite(score.value)


def _row(prompt: NDArray[np.int32], completion: Completion) -> Row:
    scored = np.zeros(len(prompt) + completion.num_tokens, dtype=np.bool_)
    scored[len(prompt) :] = completion.loss_mask
    return Row(np.concatenate([prompt, completion.token_ids]), scored)


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What became of the completions of a rollout batch."""

    num_samples: int  # trained on
    num_invalid: int  # without a value: the verifier gave none, or KL in the reward is not finite
    num_truncated: int  # left out because they hit the token limit
    num_empty: int  # without a loss token
    num_pruned: int  # left out by the weighting


def choose(samples: Sequence[Sample], valid: Tensor, kept: Tensor, *, mask_truncated: bool) -> tuple[list[int], BatchCounts]:
    """The numbers of the samples that are trained on, in order. ``valid`` and ``kept`` are bool [S].

    A completion without a valid score is in no statistic, loss or denominator. One that is left out for being truncated, or has no
    loss token, still counts in its group's statistics: what its reward says of the others is true.
    """
    chosen, num_invalid, num_truncated, num_empty, num_pruned = [], 0, 0, 0, 0
    for number, (sample, is_valid, is_kept) in enumerate(zip(samples, valid.tolist(), kept.tolist(), strict=True)):
        if not is_valid:
            num_invalid += 1
        elif mask_truncated and sample.completion.finish is Finish.LENGTH:
            num_truncated += 1
        elif sample.num_loss_tokens == 0:
            num_empty += 1
        elif not is_kept:
            num_pruned += 1
        else:
            chosen.append(number)
    return chosen, BatchCounts(len(chosen), num_invalid, num_truncated, num_empty, num_pruned)


@dataclass(frozen=True, slots=True, eq=False)
class EngineTokens:
    """What the rollout says of the N loss tokens."""

    roll_logp: Tensor  # float32 [N]
    gap: Tensor  # int64 [N], Gap
    version: Tensor  # int64 [N], the weights that made it
    lag: Tensor  # int64 [N], versions that these are behind the learner's; 0 in a replay, where they may be ahead; at most MOST_LAG


def engine_tokens(samples: Sequence[Sample], version: int) -> EngineTokens:
    """Of all loss tokens; ``version`` is the learner's as it trains them."""
    if not samples:
        nothing = torch.zeros(0, dtype=torch.int64)
        return EngineTokens(torch.zeros(0), nothing, nothing, nothing)
    completions = [sample.completion for sample in samples]
    mask = np.concatenate([c.loss_mask for c in completions])
    versions = np.concatenate([c.versions for c in completions])[mask].astype(np.int64)
    mixed = np.concatenate([c.mixed for c in completions])[mask]
    gap = np.where(mixed, Gap.MIXED, np.where(versions < version, Gap.OLDER_VERSION, Gap.SAME_VERSION))
    roll_logp = np.concatenate([c.roll_logp for c in completions])[mask]
    return EngineTokens(*map(torch.from_numpy, (roll_logp, gap, versions, np.clip(version - versions, 0, MOST_LAG))))


# ---- who trains what when -------------------------------------------------------------------------------------------

Cut = list[list[list[list[int]]]]  # optimizer steps of ranks of micro-batches of sample numbers; an empty micro-batch is padding


@dataclass(frozen=True, slots=True)
class Plan:
    """How a rollout batch is cut and dealt."""

    num_mini_batches: int
    tokens_per_micro_batch: int
    cost: RowCost
    world_size: int


def cut_steps(samples: Sequence[Sample], chosen: Sequence[int], plan: Plan, seed: Sequence[int]) -> Cut:
    """Cuts the chosen samples into the optimizer steps of one pass. Groups without a chosen sample are not counted as groups."""
    by_group: dict[int, list[int]] = {}
    for number in chosen:
        by_group.setdefault(samples[number].group, []).append(number)
    groups = list(by_group.values())
    cut = []
    for places in cut_mini_batches(len(groups), plan.num_mini_batches, seed):
        mine = [number for place in places for number in groups[place]]
        rows = [samples[number].row for number in mine]
        lengths, costs = [len(row.token_ids) for row in rows], [plan.cost.of(row) for row in rows]
        ranks = plan_micro_batches(lengths, costs, plan.world_size, plan.tokens_per_micro_batch)
        cut.append([[[mine[i] for i in batch] for batch in batches] for batches in ranks])
    return cut


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


def count_dealt(samples: Sequence[Sample], cut: Cut, world_size: int) -> Dealt:
    """What a cut gives to each rank."""
    num_tokens, num_places = [0] * world_size, 0
    for step in cut:
        for rank, batches in enumerate(step):
            for batch in batches:
                lengths = [len(samples[number].row.token_ids) for number in batch]
                num_tokens[rank] += sum(lengths)
                num_places += len(lengths) * max(lengths, default=0) or 1
    return Dealt(tuple(num_tokens), num_places)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Tensors of one forward; T of its tokens are loss tokens. A padding micro-batch has one, whose credit is 0."""

    input_ids: Tensor  # int64 [rows, width]
    positions: Tensor  # int64 [T], see PackedRows
    targets: Tensor  # int64 [T]
    response: Tensor  # int64 [T], its row
    places: Tensor  # int64 [T] on the CPU: the token's place among the N; any in a padding micro-batch
    owners: Tensor  # int64 [T] on the CPU: the number of its sample
    num_tokens: int  # without padding; 0 makes it a padding micro-batch


def pack(samples: Sequence[Sample], starts: NDArray[np.int64], numbers: Sequence[int], device: torch.device) -> Inputs:
    """The forward of the samples with these numbers. ``starts`` [S]: place of each sample's first loss token among the N."""
    packed = pack_rows([samples[number].row for number in numbers])
    input_ids, positions, targets = packed_tensors(packed, device)
    lengths = [samples[number].num_loss_tokens for number in numbers]
    places = [np.arange(starts[number], starts[number] + n) for number, n in zip(numbers, lengths, strict=True)]
    owners = np.repeat(np.asarray(numbers, dtype=np.int64), lengths)
    padding = np.zeros(1, dtype=np.int64)
    return Inputs(
        input_ids=input_ids,
        positions=positions,
        targets=targets,
        response=torch.from_numpy(packed.responses).to(device),
        places=torch.from_numpy(np.concatenate(places) if numbers else padding),
        owners=torch.from_numpy(owners if numbers else padding),
        num_tokens=packed.num_tokens,
    )


def first_places(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """The place of each sample's first loss token among the N, [S]."""
    lengths = np.array([sample.num_loss_tokens for sample in samples], dtype=np.int64)
    return np.cumsum(lengths) - lengths


def packed_tensors(packed: PackedRows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, positions and targets, as the policy module takes them."""
    return tuple(torch.from_numpy(array).to(device) for array in (packed.input_ids, packed.positions, packed.targets))


@dataclass(slots=True, eq=False)
class MicroBatch:
    """One forward and backward, ready to train. [T], float32 but for ``group``, ``gap`` and ``lag``."""

    inputs: Inputs
    advantage: Tensor
    sample_weight: Tensor
    token_weight: Tensor
    policy_denominator: Tensor
    kl_denominator: Tensor
    roll_logp: Tensor
    old_logp: Tensor | None  # None where it is logp.detach() of its own first forward
    ref_logp: Tensor | None
    behave_step: Tensor  # optimizer steps taken when the token was made
    group: Tensor
    gap: Tensor
    lag: Tensor
    lags: tuple[int, ...]  # that occur in it
    num_responses: float  # of the optimizer step, over all ranks
