"""What a surrogate makes of given ratios: the factor and the credit of a token, with rows just inside and outside each edge.

The real function is called, on responses of two tokens that share the ratio, the first surer than the second: where a function tells
them apart there are two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.loss_tokens import INTEGER_FIELDS, LossTokens
from learner.surrogates import Surrogate

RATIOS = (0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 4.0)
PI_OLD = (
    0.1  # of the token under the old policy, or less where pi would exceed 1: a few functions look at it, and not at the ratio
)
_LOWEST_EDGE, _HIGHEST_EDGE = 1e-5, 3.0  # |log ratio| between which edges are looked for: 0.05 to 20
_BESIDE = 4e-6  # a row beside an edge, in log ratio


@dataclass(frozen=True, slots=True)
class Cell:
    """A token with advantage +1 or -1, all weights and denominators 1."""

    factor: float
    credit: float  # dL / dlogp
    regions: tuple[str, ...]  # of the surrogate, that the token is in


@dataclass(frozen=True, slots=True)
class CreditRow:
    label: str
    ratio: float
    positive: Cell
    negative: Cell


@dataclass(frozen=True, slots=True, eq=False)
class _GivenRatio(LossTokens):
    """Loss tokens whose ratio is as given: exp(log r) is off by a last bit, which matters exactly on an edge."""

    given: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        assert self.given is not None
        return self.given


def credit_tables(surrogate: Callable[[LossTokens], Surrogate], ratios: Sequence[float] = RATIOS) -> dict[str, list[CreditRow]]:
    """The rows by kind of token: ``all``, or ``low-entropy`` and ``high-entropy`` where the surrogate tells them apart.

    ``surrogate`` has its parameters bound. Rows are in the order of their ratios.
    """
    edges = _edges(surrogate)
    places = [(ratio, f"{ratio:g}") for ratio in ratios]
    for edge in edges:
        beside = _BESIDE * edge
        places += [(edge - beside, f"just below {edge:.6g}"), (edge + beside, f"just above {edge:.6g}")]
    places.sort()
    given = torch.tensor([ratio for ratio, _ in places], dtype=torch.float32)
    signs = {sign: _Answer(surrogate, given, sign) for sign in (1.0, -1.0)}

    def table(token: int) -> list[CreditRow]:
        return [
            CreditRow(label, ratio, signs[1.0].cell(i, token), signs[-1.0].cell(i, token))
            for i, (ratio, label) in enumerate(places)
        ]

    low, high = table(0), table(1)
    return {"all": low} if low == high else {"low-entropy": low, "high-entropy": high}


class _Answer:
    """What the surrogate says of ratios [n] at one sign of the advantage; tensors are [n, 2], the surer token first."""

    def __init__(self, surrogate: Callable[[LossTokens], Surrogate], ratios: Tensor, sign: float) -> None:
        self.sign = sign
        self._answer = surrogate(_tokens(ratios, sign))
        self.factor = self._answer.factor.view(-1, 2)
        self.regions = {n: region.view(-1, 2) for n, region in self._answer.regions.items() if region.dtype is torch.bool}

    def cell(self, row: int, token: int) -> Cell:
        factor = float(self.factor[row, token])
        inside = tuple(name for name, region in self.regions.items() if bool(region[row, token]))
        return Cell(factor, -self.sign * factor, inside)

    def states(self) -> Tensor:
        """Which regions each ratio is in, and whether its factor is 0; bool [n, number of these]."""
        return torch.cat([*self.regions.values(), self.factor == 0], dim=1)


def _tokens(ratios: Tensor, sign: float) -> LossTokens:
    ratio = ratios.float().repeat_interleave(2)
    count, log_ratio = len(ratio), ratio.double().log()
    old_logp = torch.minimum(torch.full_like(log_ratio, PI_OLD).log(), -log_ratio)
    old, ones = old_logp.float(), torch.ones(count)
    response = torch.arange(count) // 2
    fields = {name: torch.zeros(count, dtype=torch.int64) for name in INTEGER_FIELDS}
    fields |= {"response": response, "group": response}
    fields |= {name: old for name in ("old_logp", "roll_logp", "ref_logp", "teacher_logp")}
    fields |= {name: torch.zeros(count) for name in ("behave_step", "prox_step", "current_step")}
    fields["logp"] = fields["max_logp"] = (old_logp + log_ratio).float()
    fields |= {"entropy": torch.arange(count).float() % 2, "advantage": sign * ones}
    names = LossTokens.__slots__
    return _GivenRatio(**{name: fields.get(name, ones) for name in names}, given=ratio)


def _edges(surrogate: Callable[[LossTokens], Surrogate]) -> list[float]:
    """The ratios at which, for either sign, a region or a mask begins or ends, ascending."""
    half = torch.logspace(torch.log10(torch.tensor(_LOWEST_EDGE)).item(), torch.log10(torch.tensor(_HIGHEST_EDGE)).item(), 300)
    grid = torch.cat([-half.flip(0), torch.zeros(1), half]).double()
    found: list[float] = []
    for sign in (1.0, -1.0):
        states = _Answer(surrogate, grid.exp(), sign).states()
        for place in (states[1:] != states[:-1]).any(1).nonzero()[:, 0].tolist():
            low, high = grid[place], grid[place + 1]
            for _ in range(40):
                middle = (low + high) / 2
                state = _Answer(surrogate, middle.exp()[None], sign).states()[0]
                low, high = (middle, high) if torch.equal(state, states[place]) else (low, middle)
            found.append(float(((low + high) / 2).exp()))
    return [edge for i, edge in enumerate(sorted(found)) if i == 0 or edge - sorted(found)[i - 1] > 1e-6 * edge]
