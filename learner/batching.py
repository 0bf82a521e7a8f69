"""From samples to micro-batches: who trains what, in which order, padded how. Pure, numpy only, deterministic.

    groups --seeded shuffle--> mini-batches --deal--> ranks --token budget--> micro-batches --pack--> padded arrays

Every rank computes the whole plan from the same samples, so nothing is communicated and every rank runs the same number of
micro-batches (ZeRO-3 hangs otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Row:
    """A row of token ids and which of them are scored. The first token has no context and can never be."""

    token_ids: NDArray[np.int32]  # [n]: prompt, then completion
    scored: NDArray[np.bool_]  # [n]: True where the token's log-probability is wanted (in training: the loss mask)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """One micro-batch, padded on the right with token 0. The scored tokens are listed row by row, in order."""

    input_ids: NDArray[np.int64]  # [num_rows, width]
    positions: NDArray[np.int64]  # [num_scored]: flat place of the token *before* each scored one
    targets: NDArray[np.int64]  # [num_scored]: the scored token's id
    responses: NDArray[np.int64]  # [num_scored]: its row in this micro-batch
    num_tokens: int  # without padding


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a row costs in a forward, in multiply-adds; a backward costs a multiple of it.

    Length alone would not do: attention's share grows with the square, and at 8,192 tokens of a model 1,024 wide it is more than half.
    """

    per_token: float  # the matrices that every token meets
    per_pair: float  # attention, for each pair of a token with itself or one before it
    per_scored: float  # the head, which only scored tokens meet

    def of(self, row: Row) -> float:
        n = len(row.token_ids)
        return self.per_token * n + self.per_pair * n * (n + 1) / 2 + self.per_scored * int(np.count_nonzero(row.scored))


def cut_mini_batches(num_groups: int, num_mini_batches: int, seed: int | Sequence[int]) -> list[NDArray[np.int64]]:
    """Cuts a seeded shuffle of whole groups into mini-batches whose sizes differ by at most one.

    With fewer groups than mini-batches there are fewer mini-batches, never an empty one.
    """
    if num_groups == 0:
        return []
    order = np.random.default_rng(seed).permutation(num_groups)
    return np.array_split(order, min(num_groups, num_mini_batches))


def fill_micro_batches(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Numbers of the rows of each micro-batch: rows x longest row stays within the budget.

    Rows are taken from the longest to the shortest, so that little is padded. A row longer than the budget stands alone.
    """
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * width <= tokens_per_micro_batch:
            batches[-1].append(row)
        else:
            batches.append([row])
            width = lengths[row]
    return batches


def deal(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Gives every sample to exactly one rank, the dearest first to the rank with the least so far."""
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for sample in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        hands[rank].append(sample)
        load[rank] += costs[sample]
    return [sorted(hand) for hand in hands]


def plan_micro_batches(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, tokens_per_micro_batch: int
) -> list[list[list[int]]]:
    """For each rank its micro-batches, each a list of sample numbers; an empty list is a padding micro-batch.

    Samples are dealt by cost, micro-batches cut by length; every rank gets the same number of micro-batches.
    """
    plans = []
    for hand in deal(costs, num_ranks):
        batches = fill_micro_batches([lengths[i] for i in hand], tokens_per_micro_batch)
        plans.append([[hand[i] for i in batch] for batch in batches])
    most = max(len(plan) for plan in plans)
    return [plan + [[]] * (most - len(plan)) for plan in plans]


def pack_rows(rows: Sequence[Row]) -> PackedRows:
    """Pads rows on the right and lists their scored tokens. No rows make the padding micro-batch: one token that scores itself,
    whose credit must be 0."""
    if not rows:
        zero = np.zeros(1, dtype=np.int64)
        return PackedRows(np.zeros((1, 1), dtype=np.int64), zero, zero, zero, 0)
    width = max(len(row.token_ids) for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    scored = np.zeros((len(rows), width), dtype=np.bool_)
    for place, row in enumerate(rows):
        if row.scored[0]:
            raise ValueError("the first token of a row has no context and cannot be scored; put one begin token first")
        input_ids[place, : len(row.token_ids)] = row.token_ids
        scored[place, : len(row.token_ids)] = row.scored
    responses, columns = np.nonzero(scored)
    return PackedRows(
        input_ids=input_ids,
        positions=responses * width + columns - 1,
        targets=input_ids[responses, columns],
        responses=responses,
        num_tokens=sum(len(row.token_ids) for row in rows),
    )
