"""Alarms: what a step's metrics say is going wrong, with both numbers and what to do.

Pure: ``feed`` takes the state and the metrics of one step, and gives the next state and the alarms that begin there. An alarm is told when
it begins, and again only after it has ended, that is after ``SPAN`` steps in a row without its condition. A metric that a step does not
have, or that is not finite, adds nothing to what is known of it. But for the ratio of engine and learner all are told from means over
``SPAN`` steps or more, so none of these can begin in the first ones.

The state is in no checkpoint: a resumed run watches anew, and what is compared with step 20 is then compared with its twentieth step.

The rules and the bounds of ``LOW_ENTROPY`` to ``MASKED_SHARE`` are those of ALGORITHMS section 10, which marks them as inferred [X]; it says
neither how long a metric is watched nor what counts as rising or flat: those constants are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

LOW_ENTROPY = 0.25  # share of the value at step EARLY
SHORTER = 0.5  # share of the length that it was within the last LENGTH_SPAN steps
FEW_GROUPS = 0.3  # share of groups with signal
LARGE_RHO = 100.0  # learner's probability of one token over the engine's
MASKED_SHARE = 0.05  # share of tokens to which the correction gives weight 0
LENGTH_SPAN = 50  # steps

EARLY = 20  # the step whose value later ones are compared with, as the mean of the SPAN steps up to it
SPAN = 10  # steps of a mean
TREND = 20  # steps that are compared with as many before
MORE_REPETITION = 0.01  # rise of rep/ratio20 since step EARLY
MORE_CLIPPED = 2.0  # times what was clipped before; in recorded runs that learn it went to 1.9 while the reward stood still
MIN_CLIPPED = 0.002  # a smaller share of clipped tokens is not worth a word, however fast it rose
FLAT_REWARD = 0.05  # of the standard deviation of the rewards: about the error of a mean over TREND small steps

_ENTROPY, _REPETITION, _CLIPPED, _LENGTH = "policy/entropy", "rep/ratio20", "clip/hard_pos", "len/mean"
_REWARD, _SPREAD, _SIGNAL, _MASKED = "reward/mean", "reward/std", "eff/prompt_frac", "correction/masked_frac"
_RHO = "mismatch/rho_max"
_WATCHED = (_ENTROPY, _REPETITION, _CLIPPED, _LENGTH, _REWARD, _SPREAD, _SIGNAL, _MASKED)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is told. ``key`` is the setting that the advice is about."""

    kind: str
    text: str  # what was seen, and against what
    advice: str
    key: str


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known of the steps so far."""

    histories: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # the last LENGTH_SPAN finite values by metric
    early: Mapping[str, float] = field(default_factory=dict)  # the value at step EARLY by metric
    quiet: Mapping[str, int] = field(default_factory=dict)  # of each alarm that goes on: steps in a row without its condition

    def recent(self, name: str) -> float | None:
        """Mean of the last SPAN values; None before there are so many."""
        values = self.histories.get(name, ())
        return fmean(values[-SPAN:]) if len(values) >= SPAN else None

    def trend(self, name: str) -> tuple[float, float] | None:
        """Mean of the TREND values before the last TREND ones, and of those; None before there are so many."""
        values = self.histories.get(name, ())
        return (fmean(values[-2 * TREND : -TREND]), fmean(values[-TREND:])) if len(values) >= 2 * TREND else None


def feed(watch: Watch, metrics: Mapping[str, float]) -> tuple[Watch, tuple[Alarm, ...]]:
    """The state after a step with these metrics, and the alarms that begin with it."""
    histories, early = dict(watch.histories), dict(watch.early)
    for name in _WATCHED:
        if math.isfinite(value := metrics.get(name, math.nan)):
            values = histories[name] = (*histories.get(name, ()), value)[-LENGTH_SPAN:]
            if len(values) == EARLY and name not in early:
                early[name] = fmean(values[-SPAN:])
    now = Watch(histories, early)
    quiet: dict[str, int] = {}
    begun = []
    for name, (condition, advice, key) in _RULES.items():
        text = condition(now, metrics)
        if text is not None:
            quiet[name] = 0
            if name not in watch.quiet:
                begun.append(Alarm(name, text, advice, key))
        elif name in watch.quiet and watch.quiet[name] + 1 < SPAN:
            quiet[name] = watch.quiet[name] + 1
    return Watch(histories, early, quiet), tuple(begun)


def _entropy_collapse(watch: Watch, metrics: Mapping[str, float]) -> str | None:
    entropy, repetition = watch.recent(_ENTROPY), watch.recent(_REPETITION)
    if entropy is None or repetition is None or not {_ENTROPY, _REPETITION} <= watch.early.keys():
        return None
    before, repeated_before = watch.early[_ENTROPY], watch.early[_REPETITION]
    if entropy >= LOW_ENTROPY * before or repetition <= repeated_before + MORE_REPETITION:
        return None
    return (
        f"{_ENTROPY} {entropy:.3g} is below {LOW_ENTROPY:.0%} of {before:.3g} at step {EARLY}, while {_REPETITION} rose from "
        f"{repeated_before:.3g} to {repetition:.3g}"
    )


def _clipping(watch: Watch, metrics: Mapping[str, float]) -> str | None:
    clipped, reward, spread = watch.trend(_CLIPPED), watch.trend(_REWARD), watch.trend(_SPREAD)
    if clipped is None or reward is None or spread is None:
        return None
    if clipped[1] <= max(MIN_CLIPPED, MORE_CLIPPED * clipped[0]) or reward[1] - reward[0] > FLAT_REWARD * spread[1]:
        return None
    return (
        f"{_CLIPPED} rose from {clipped[0]:.3g} to {clipped[1]:.3g} (means of {TREND} steps), while {_REWARD} went from "
        f"{reward[0]:.3g} to {reward[1]:.3g}"
    )


def _shrinking(watch: Watch, metrics: Mapping[str, float]) -> str | None:
    length = watch.recent(_LENGTH)
    if length is None:
        return None
    values = watch.histories[_LENGTH]
    longest = max(fmean(values[i : i + SPAN]) for i in range(len(values) - SPAN + 1))
    if length >= SHORTER * longest:
        return None
    return f"{_LENGTH} fell from {longest:.3g} to {length:.3g} within {LENGTH_SPAN} steps"


def _few_groups(watch: Watch, metrics: Mapping[str, float]) -> str | None:
    share = watch.recent(_SIGNAL)
    return None if share is None or share >= FEW_GROUPS else f"{_SIGNAL} {share:.3g} (mean of {SPAN} steps) is below {FEW_GROUPS}"


def _mismatch(watch: Watch, metrics: Mapping[str, float]) -> str | None:
    rho = metrics.get(_RHO, math.nan)
    return f"{_RHO} {rho:.3g} is above {LARGE_RHO:g}" if rho > LARGE_RHO else None


def _masked(watch: Watch, metrics: Mapping[str, float]) -> str | None:
    share = watch.recent(_MASKED)
    return (
        f"{_MASKED} {share:.3g} (mean of {SPAN} steps) is above {MASKED_SHARE}"
        if share is not None and share > MASKED_SHARE
        else None
    )


_RULES: Mapping[str, tuple[Callable[[Watch, Mapping[str, float]], str | None], str, str]] = {
    "entropy_collapse": (
        _entropy_collapse,
        "the policy repeats itself: go back to an earlier checkpoint with a lower learning rate, or with algorithm.entropy_beta above 0",
        "learner.optimizer.learning_rate",
    ),
    "clipping_without_gain": (
        _clipping,
        "the policy moves far within a step and gains nothing: lower the learning rate, or take fewer optimizer steps a batch",
        "learner.optimizer.learning_rate",
    ),
    "length_collapse": (
        _shrinking,
        "read samples/: if short answers are paid without being right, mend the reward; else try algorithm.aggregation=token_sum_norm, which "
        "does not favour short right answers",
        "algorithm.aggregation",
    ),
    "few_groups_with_signal": (
        _few_groups,
        "most of what is generated teaches nothing: with a high group/solve_all take harder prompts, with a high group/solve_none easier "
        "ones, or a larger batch.group_size",
        "data.sources",
    ),
    "engine_mismatch": (
        _mismatch,
        "engine and learner disagree on a token: correction=tis_token bounds its weight; where mismatch/logp_absdiff is large as well, "
        "look at model.dtype and rollout.max_lag first",
        "correction",
    ),
    "correction_masks_much": (
        _masked,
        "the correction takes this share of the tokens out: lower rollout.max_lag, or widen the correction's bounds; where mismatch/rho_mean "
        "is far from 1 at lag 0, engine and learner compute different models",
        "rollout.max_lag",
    ),
}
