"""How likely a prompt is to be solved now: a posterior for each prompt over a prior for each stratum, both from this run alone.

A prompt is seen a few times in a run, so a flat prior would call every one of them a boundary case. Here a prompt starts from what the
groups of its stratum showed: a Beta with their mean m and their intra-class correlation rho, by the method of moments of the
beta-binomial. With x right of n in each group, weights w and sums W, N, X, Q of w, wn, wx, wx^2/n,

    m = X / N        E[sum of w n (x/n - m)^2] = E[Q - X^2/N] = m (1 - m) (W + rho (N - W))        strength a + b = 1/rho - 1

which is the variance between groups less the binomial part, about the pooled mean. One group more, as Beta(1, 1) would make it on average,
is always in the sums: without data it gives exactly Beta(1, 1). Of everything seen, the weight halves every ``half_life`` versions: the
policy moves. (Beta-binomial and its moments: Kleinman, JASA 68, 1973.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.prompt_index import hash_text
from rollout.records import Score

MIN_STRENGTH, MAX_STRENGTH = 1.0, 32.0  # of a prior, in completions: it stays one, and gives way after a few groups
BANDS = ("hard", "boundary", "easy")
HARD_BELOW, EASY_ABOVE = 0.1, 0.9


@dataclass(frozen=True, slots=True)
class Observation:
    """What a scored group says of its prompt."""

    num_right: int
    num_valid: int  # completions with a verdict
    answers: tuple[int, ...]  # hash of the answer that was read, of each completion that has one


def observe(scores: Sequence[Score]) -> Observation:
    """A value that a policy put in place of a verdict says nothing: a dead grader must not make prompts look hard."""
    valid = [score for score in scores if score.has_verdict]
    return Observation(
        num_right=sum((score.accuracy or 0.0) >= 0.5 for score in valid),
        num_valid=len(valid),
        answers=tuple(hash_text(" ".join(score.extracted.split())) for score in valid if score.extracted is not None),
    )


class PassRates:
    """Decayed counts by prompt, as of the version each was last seen at, and the sums of each stratum."""

    def __init__(self, stratum: NDArray[np.int32], num_strata: int, half_life: float) -> None:
        """``stratum`` [num_prompts]: the number of each prompt's stratum. ``half_life`` in versions."""
        self.stratum = stratum
        self._half_life = half_life
        self._right = np.zeros(len(stratum), dtype=np.float32)
        self._seen = np.zeros(len(stratum), dtype=np.float32)
        self._version = np.zeros(len(stratum), dtype=np.int32)
        self._sums = np.zeros((num_strata, 4))  # W, N, X, Q of the module's docstring
        self._as_of = 0  # version of the sums

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.stratum, self._right, self._seen, self._version, self._sums))

    def add(self, prompts: NDArray[Any], right: NDArray[Any], valid: NDArray[Any], version: int) -> None:
        """Groups that ``version`` made, added in the order given: [num_groups] each. One without a valid completion says nothing."""
        self._weigh_in(prompts, right, valid, np.ones(len(prompts)), version)

    def take_out(
        self, prompts: NDArray[Any], right: NDArray[Any], valid: NDArray[Any], added: NDArray[np.int64], version: int
    ) -> None:
        """At ``version``, groups that were added at the versions ``added`` and do not stand."""
        self._weigh_in(prompts, right, valid, -self._decay(version - added), version)
        for counts in (self._right, self._seen):
            counts[prompts] = np.maximum(counts[prompts], 0)  # nothing less rounding
        np.maximum(self._sums, 0, out=self._sums)

    def _weigh_in(
        self, prompts: NDArray[Any], right: NDArray[Any], valid: NDArray[Any], weight: NDArray[np.float64], version: int
    ) -> None:
        some = valid > 0
        prompts, right, weight = prompts[some], right[some], weight[some]
        valid = valid[some].astype(np.float64)
        touched = np.unique(prompts)
        decay = self._decay(version - self._version[touched])
        for counts, more in ((self._right, right), (self._seen, valid)):
            counts[touched] = counts[touched] * decay
            np.add.at(counts, prompts, (weight * more).astype(np.float32))
        self._version[touched] = version
        self._sums *= self._decay(version - self._as_of)
        self._as_of = version
        terms = np.stack([np.ones_like(valid), valid, right, right**2 / valid], axis=1)
        np.add.at(self._sums, self.stratum[prompts], weight[:, None] * terms)

    def priors(self, version: int) -> NDArray[np.float64]:
        """[num_strata, 2]: a and b of the prior of each stratum."""
        weight, num, right, squares = (self._sums * self._decay(version - self._as_of)).T
        size = np.maximum(2.0, num / np.maximum(weight, 1e-300))  # of the group that Beta(1, 1) adds: as large as the others are
        weight, num, right = weight + 1, num + size, right + size / 2
        squares = squares + (1 + (size - 1) / 3) / 4 + size / 4
        mean = right / num
        rho = ((squares - right * mean) / (mean * (1 - mean)) - weight) / (num - weight)
        strength = np.clip(1 / np.maximum(rho, 1e-9) - 1, MIN_STRENGTH, MAX_STRENGTH)
        return np.stack([mean * strength, (1 - mean) * strength], axis=1)

    def posteriors(self, prompts: NDArray[Any], version: int) -> NDArray[np.float64]:
        """[num_prompts given, 2]: a and b of each prompt's pass rate at ``version``."""
        decay = self._decay(version - self._version[prompts])
        right, seen = self._right[prompts] * decay, self._seen[prompts] * decay
        return self.priors(version)[self.stratum[prompts]] + np.stack([right, seen - right], axis=1)

    def _decay(self, versions: Any) -> Any:
        return np.exp2(-np.asarray(versions, dtype=np.float64) / self._half_life)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def arrays(self, prompts: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Copies of what is known of these prompts, and of the strata."""
        return {
            "right": self._right[prompts],
            "seen": self._seen[prompts],
            "version": self._version[prompts],
            "stratum": self.stratum[prompts],
            "sums": self._sums.copy(),
            "as_of": np.array(self._as_of),
        }

    def restore(self, prompts: NDArray[Any], arrays: Mapping[str, NDArray[Any]], strata: NDArray[Any]) -> None:
        """What ``arrays`` gave; nothing is known of any other prompt. ``strata`` [num_strata]: the row of ``sums`` of each stratum of
        this run, -1 for one that the checkpoint did not have: it starts from Beta(1, 1)."""
        for mine, saved in ((self._right, "right"), (self._seen, "seen"), (self._version, "version")):
            mine[:] = 0
            mine[prompts] = arrays[saved]
        self._sums = np.where((strata >= 0)[:, None], arrays["sums"][strata], 0.0)
        self._as_of = int(arrays["as_of"])


def bands(posteriors: NDArray[np.float64]) -> NDArray[np.int64]:
    """[n]: the place in ``BANDS`` of each posterior, by its mean."""
    mean = posteriors[:, 0] / posteriors.sum(axis=1)
    placed: NDArray[np.int64] = np.digitize(mean, [HARD_BELOW, np.nextafter(EASY_ABOVE, 1.0)])
    return placed
