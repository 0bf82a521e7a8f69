"""The self-test of ``experiment=selftest_lr0``: what must hold of every step of a run whose weights never move.

All versions have the same weights then. So ratios are 1, and engine and learner differ by rounding alone, on old tokens as on new ones,
from the first step to the last. What is above its limit is a fault of the system, not of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from configs.schema import Dtype
from orchestrator.errors import RunStopped
from orchestrator.proof import BASELINE_STEPS, MISMATCH_LIMIT

# How far a ratio may be from 1. In prepare and in training the learner computes it in one packing and with the same kernels.
RATIO_LIMIT = {Dtype.float32: 1e-4, Dtype.bfloat16: 0.05}
# Mean mismatch of all tokens that is flat: below the first, or the second times that of the first steps.
FLAT = {Dtype.float32: (2e-5, 4.0), Dtype.bfloat16: (0.05, 2.0)}
# Mismatch of a single token: in float32 a hundred times what healthy runs show, in bfloat16 four times. A few wrong tokens among
# thousands hide in any mean.
WORST = {Dtype.float32: 1e-2, Dtype.bfloat16: 1.0}

_ALL, _TOP = "mismatch/logp_absdiff", "mismatch/logp_absdiff_max"
_MEANS = {
    "same_version": "engine and learner disagree on tokens of the same weights: temperature or truncated sampling (rollout.top_p, top_k, "
    "min_p), token ids, dtype, or a push that did not take",
    "older_version": "tokens of an older version differ though its weights were the same: versions, caches or requests were mixed up at a swap",
    "mixed": "tokens made over keys and values of an older version differ though its weights were the same: the cache is not that of the request",
}
_ONE = "a token stands apart while most agree: log-probabilities and tokens were mixed up, at a swap, a preemption or the end of a request"
_RATIO = "the learner computed one log-probability twice, with the same weights, and got two numbers: another packing, dtype or kernel in prepare "
_RATIO += "than in training, dropout, or weights that moved"


class SelfTest:
    """Fed with the metrics of one step after another."""

    def __init__(self, dtype: Dtype) -> None:
        self._dtype = dtype
        self._first: list[float] = []  # mean mismatch of the first steps
        self._num_steps = 0
        self._worst = {"ratio": 0.0, "mismatch": 0.0, "token": 0.0, "age": 0.0}

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises RunStopped with the figure that is above its limit, and what it means. A step that trained nothing shows nothing."""
        if _ALL not in metrics:
            return
        self._num_steps += 1
        self._check_weights(step, metrics)
        for kind in ("max", "mean", "p01"):
            for name in (f"ratio/{kind}_pos", f"ratio/{kind}_neg"):
                if name in metrics:
                    limit, distance = RATIO_LIMIT[self._dtype], abs(metrics[name] - 1)
                    self._hold(step, "ratio", f"{name}={metrics[name]:.6g}, away from 1 by", distance, limit, _RATIO)
        limit, _ = MISMATCH_LIMIT[self._dtype]
        for gap, meaning in _MEANS.items():
            for name in metrics:
                if name == f"mismatch/{gap}" or name.startswith(f"mismatch/{gap}_lag_"):
                    self._hold(step, "mismatch", f"{name}, in nats a token,", metrics[name], limit, meaning)
        self._hold(step, "token", f"{_TOP}, in nats,", metrics.get(_TOP, 0.0), WORST[self._dtype], _ONE)
        self._check_flat(step, metrics[_ALL])
        self._worst["age"] = max(self._worst["age"], metrics.get("stale/max_versions", 0.0))

    def verdict(self) -> str:
        """What was shown. Raises RunStopped where nothing was."""
        if not self._num_steps:
            raise RunStopped("selftest_lr0: no step trained anything, so nothing is shown; selection=none keeps every group")
        return (
            f"self-test at learning rate 0 passed: over {self._num_steps} steps ratios were within {self._worst['ratio']:.2g} of 1, engine and "
            f"learner differed by {self._worst['mismatch']:.2g} nats a token at most ({self._worst['token']:.2g} on the worst one), on tokens up to "
            f"{self._worst['age']:.0f} versions old"
        )

    def _check_weights(self, step: int, metrics: Mapping[str, float]) -> None:
        changed = metrics.get("push/changed_frac", 0.0)
        if changed > 0:
            raise RunStopped(f"selftest_lr0, step {step}: {changed:.3g} of the tensors changed at learning rate 0; none may")

    def _check_flat(self, step: int, mismatch: float) -> None:
        noise, factor = FLAT[self._dtype]
        if len(self._first) < BASELINE_STEPS:
            self._first.append(mismatch)
        before = fmean(self._first)
        meaning = (
            f"it was {before:.3g} in the first steps, and no weight has moved since: engine and learner come apart by themselves"
        )
        self._hold(step, "mismatch", f"{_ALL}, in nats a token,", mismatch, max(noise, factor * before), meaning)

    def _hold(self, step: int, kind: str, what: str, value: float, limit: float, meaning: str) -> None:
        if not value <= limit:  # NaN is not
            raise RunStopped(f"selftest_lr0, step {step}: {what} {value:.3g} is above {limit:.3g}: {meaning}")
        self._worst[kind] = max(self._worst[kind], value)
