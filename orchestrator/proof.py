"""What proves a push: pure decisions over figures that others measure.

Bytes are proven by the receivers. Here is what bytes cannot show: that the sender's own manifest is right, that the engine
computes with what it loaded, and, at every step, that engine and learner still agree on the tokens they both saw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from configs.schema import Dtype
from rollout.weights import Manifest

# Largest difference of one log-probability in float32; mean difference in bfloat16, whose own rounding reaches 0.05
TOLERANCE = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.1}
SCALE = 1 + 2**-6  # of the second push: exact in bfloat16 and two steps of its grid
# What that push must move some log-probability by. An engine is compared with itself, so nothing of it is rounding.
LEAST_MOVE = 1e-3
# How many pushes in a row may change no tensor after a step that moved: a warm-up's first steps can lie below bfloat16's grid
MOST_UNCHANGED = {Dtype.float32: 0, Dtype.bfloat16: 2}
# Mean same-version mismatch that is looked into: above the first and above this many times the baseline. Healthy runs show
# 1e-7 to 1e-5 in float32, 0.005 to 0.05 in bfloat16; an engine on foreign weights shows the update's size at least.
MISMATCH_LIMIT = {Dtype.float32: (1e-3, 10.0), Dtype.bfloat16: (0.2, 4.0)}
BASELINE_STEPS = 5

Scores = Sequence[NDArray[np.float32]]  # log-probabilities of each fixed row


@dataclass(frozen=True, slots=True)
class FixedTokens:
    """What engine and learner both score."""

    rows: Sequence[NDArray[np.int32]]  # token ids, at least two each
    temperature: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two scorings of the same tokens, such as an engine's and the learner's."""

    max_difference: float
    mean_difference: float

    @classmethod
    def of(cls, scores: Scores, others: Scores) -> Agreement:
        gaps = np.concatenate([np.abs(a - b) for a, b in zip(scores, others, strict=True)])
        return cls(float(gaps.max()), float(gaps.mean()))

    def proves(self, dtype: Dtype) -> bool:
        """Whether the engine runs the learner's weights. NaN proves nothing."""
        difference = self.max_difference if dtype is Dtype.float32 else self.mean_difference
        return difference <= TOLERANCE[dtype]

    def problem(self, dtype: Dtype) -> str | None:
        if self.proves(dtype):
            return None
        return (
            "it does not run the weights it was sent: its log-probabilities of the fixed tokens differ from the learner's by "
            f"{self.max_difference:.3g} at most and {self.mean_difference:.3g} on average; "
            f"{TOLERANCE[dtype]:g} {'at most' if dtype is Dtype.float32 else 'on average'} is allowed in {dtype.value}"
        )


@dataclass(frozen=True, slots=True)
class LoadingProof:
    """One engine after three pushes: the true weights, all of them times SCALE, the true ones again."""

    agreement: Agreement  # with the learner, after the first
    moved: float  # largest change of a log-probability by the second
    not_restored: float  # largest difference between after the first and after the third

    @classmethod
    def of(cls, learner: Scores, first: Scores, scaled: Scores, back: Scores) -> LoadingProof:
        return cls(
            Agreement.of(first, learner), Agreement.of(scaled, first).max_difference, Agreement.of(back, first).max_difference
        )

    def problem(self, dtype: Dtype) -> str | None:
        """Why the engine is not proven, with both numbers; None where it is."""
        problem = self.agreement.problem(dtype)
        if problem:
            return problem
        if not self.moved >= LEAST_MOVE:
            return (
                f"it does not take a second push: all weights times {SCALE:g} moved its log-probabilities of the fixed tokens "
                f"by {self.moved:.3g}, at least {LEAST_MOVE:g} is due"
            )
        if self.not_restored != 0:
            return (
                "it does not come back to weights it had: pushed once more, they gave log-probabilities of the fixed tokens "
                f"that differ by {self.not_restored:.3g} from before, 0 is allowed"
            )
        return None

    def figures(self) -> dict[str, float]:
        return {
            "max_difference": self.agreement.max_difference,
            "mean_difference": self.agreement.mean_difference,
            "moved": self.moved,
            "not_restored": self.not_restored,
        }


def manifest_problem(before: Manifest | None, after: Manifest) -> str | None:
    """How the tensors of a push differ from those of the push before in name, shape or dtype; None where they do not."""
    if before is None:
        return None  # the engine's rehearsal decides whether they fill the model
    old = {spec.name: (spec.dtype, spec.shape) for spec in before.specs}
    new = {spec.name: (spec.dtype, spec.shape) for spec in after.specs}
    lines = [f"{name} is missing" for name in old.keys() - new.keys()]
    lines += [f"{name} is new" for name in new.keys() - old.keys()]
    lines += [
        f"{name} is {new[name][0]} {new[name][1]}, was {old[name][0]} {old[name][1]}"
        for name in old.keys() & new.keys()
        if old[name] != new[name]
    ]
    if not lines:
        return None
    return f"the learner sent {len(new)} tensors, {len(old)} before, and they are not the same: " + "; ".join(sorted(lines)[:8])


def num_changed(before: Manifest, after: Manifest) -> int:
    """Tensors whose digest is not that of the push before."""
    old = {spec.name: spec.digest for spec in before.specs}
    return sum(old.get(spec.name) != spec.digest for spec in after.specs)


class Baseline:
    """The same-version mismatch of a healthy run: the mean of its first steps that are below the limit."""

    def __init__(self, dtype: Dtype) -> None:
        self._limit, self._factor = MISMATCH_LIMIT[dtype]
        self._first: list[float] = []

    @property
    def value(self) -> float:
        return fmean(self._first) if self._first else 0.0

    @property
    def allowed(self) -> float:
        return max(self._limit, self._factor * self.value)

    def is_beyond(self, mismatch: float | None) -> bool:
        """Whether a step's mismatch calls for a proof. None: no token of the step was made by the version that trains it."""
        if mismatch is None:
            return False
        if math.isnan(mismatch) or mismatch > self.allowed:
            return True
        if len(self._first) < BASELINE_STEPS:
            self._first.append(mismatch)
        return False
