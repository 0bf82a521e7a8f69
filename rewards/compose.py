"""From the scores of the parts to the one score of a completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from configs.policies import Policy, Then, parse_policy
from configs.schema import Combine, RewardConfig, RewardPart
from rewards.contract import RewardError, failed
from rollout.records import Consequence, Outcome, Score, Status

_WORST_FIRST = (Status.ERROR, Status.TIMEOUT, Status.INVALID, Status.ABSTAIN)
_HARDEST_FIRST = (Consequence.FAIL, Consequence.DROP_GROUP, Consequence.DROP_SAMPLE, Consequence.ZERO, Consequence.NONE)
_CONSEQUENCES = {
    Then.drop_sample: Consequence.DROP_SAMPLE,
    Then.drop_group: Consequence.DROP_GROUP,
    Then.fail: Consequence.FAIL,
}


def applicable(parts: Mapping[str, RewardPart], routed: str | None, source: str | None) -> dict[str, RewardPart]:
    """The parts that judge an item, a gate before what needs it.

    Those are the one that its row names and the gates that this one needs; else all whose ``sources`` are empty or hold the
    item's ``source``, and again their gates. Raises `RewardError` for a name that is no part, and where none judges the source.
    """
    if routed is not None and routed not in parts:
        raise RewardError(f"the reward part '{routed}' is unknown; reward.parts has: {', '.join(parts)}")
    if routed is not None:
        chosen = [routed]
    else:
        chosen = [name for name, part in parts.items() if not part.sources or source in part.sources]
    if not chosen:
        what = "an item without a source" if source is None else f"the source '{source}'"
        raise RewardError(f"no reward part judges {what}; reward.parts.NAME.sources=[] judges all")
    judging: dict[str, RewardPart] = {}
    for name in chosen:
        chain = [name]
        while (gate := parts[chain[-1]].needs) is not None and gate not in judging:
            chain.append(gate)
        judging |= {link: parts[link] for link in reversed(chain)}
    return judging


def options_of(options: Mapping[str, Any], judging: Mapping[str, RewardPart]) -> dict[str, Mapping[str, Any]]:
    """An item's options by the part that takes them: given as ``{part: {...}}``, or bare where one part judges it."""
    if all(name in judging and isinstance(own, Mapping) for name, own in options.items()):
        return dict(options)
    if len(judging) == 1:
        return dict.fromkeys(judging, options)
    raise RewardError(f"options: {', '.join(judging)} judge this item, so write them as {{part: {{...}}}}; got {dict(options)!r}")


def passes(score: Score) -> bool:
    """Whether the part whose score this is lets those that need it be called."""
    return score.accuracy is not None and score.accuracy >= 0.5


def policies(name: str, part: RewardPart) -> dict[Status, Policy]:
    """What becomes of an item, by the status of this part. Raises ConfigError for a text that is no policy."""
    texts = {
        Status.ERROR: part.on_error,
        Status.TIMEOUT: part.on_timeout,
        Status.INVALID: part.on_invalid,
        Status.ABSTAIN: part.on_abstain,
    }
    return {status: parse_policy(text, f"reward.parts.{name}.on_{status}") for status, text in texts.items()}


def settle(score: Score, then: Then) -> Score:
    """A score without a verdict, as its policy wants it: with a consequence, or with value 0 and accuracy 0."""
    if then is not Then.zero:
        return replace(score, consequence=_CONSEQUENCES[then])
    detail = f"counted as 0 by on_{score.status}=zero: {score.detail}"
    return replace(score, status=Status.OK, value=0.0, accuracy=0.0, detail=detail, consequence=Consequence.ZERO)


def compose(reward: RewardConfig, judging: Mapping[str, RewardPart], scores: Mapping[str, Score]) -> Score:
    """One score of the ``judging`` parts' own ``scores``, gates first. A part without a score was not called: its gate was closed.

    A part's own value is what its verifier gave, within ``clip_min`` and ``clip_max``; behind a closed gate it is exactly 0, and
    accuracy and the gate's outcome go with it. ``value`` is the sum of weight times own value, the smallest of these, or their
    product (``reward.combine``), within the total's bounds. Parts of weight 0 stay out of it, so that a mere gate makes no product 0.

    ``accuracy`` is over the parts with ``accuracy: true``; where none has it, as when a row names a part without it, over all.
    With ``sum`` it is their mean: a format part of accuracy 1 beside a wrong answer gives 0.5, which counts as solved, so leave
    format parts out of it (``accuracy: false``). With ``min`` it is the smallest and with ``product`` the product, as with the values.

    ``outcome`` is ``right`` where all that count are right, else that of the first that is not; ``extracted`` is the first of those
    that count. Measures are named PART.measure. Any part that is not ok leaves no value: the worst status (error, timeout,
    invalid, abstain) and the hardest consequence (fail, drop_group, drop_sample) stand, with the details of all that failed.
    """
    time_s = sum(score.time_s for score in scores.values())
    measures = {f"{name}.{key}": number for name, score in scores.items() for key, number in score.measures.items()}
    consequence = min((score.consequence for score in scores.values()), key=_HARDEST_FIRST.index)
    broken = {name: score for name, score in scores.items() if score.status is not Status.OK}
    if broken:
        worst = min((score.status for score in broken.values()), key=_WORST_FIRST.index)
        score = failed(worst, _details(broken), time_s)
        values = {name: _own(judging[name], score) for name, score in scores.items() if name not in broken}
        return replace(score, parts=values, measures=measures, consequence=consequence)
    full = dict(scores)
    for name, part in judging.items():
        if name not in full and part.needs is not None:
            full[name] = _gated(full[part.needs].outcome)
    values = {name: _own(part, full[name]) if name in scores else 0.0 for name, part in judging.items()}
    total = _combine(reward, [part.weight * values[name] for name, part in judging.items() if part.weight])
    if not math.isfinite(total):
        score = failed(Status.ERROR, f"the {reward.combine.value} of the reward parts is {total}", time_s)
        return replace(score, parts=values, measures=measures, consequence=Consequence.DROP_SAMPLE)
    counting = [full[name] for name, part in judging.items() if part.accuracy] or list(full.values())
    return Score(
        status=Status.OK,
        outcome=next((score.outcome for score in counting if score.outcome is not Outcome.RIGHT), Outcome.RIGHT),
        value=total,
        accuracy=_ACCURACY[reward.combine]([score.accuracy for score in counting if score.accuracy is not None]),
        parts=values,
        extracted=next((score.extracted for score in counting if score.extracted is not None), None),
        time_s=time_s,
        detail=_details({name: score for name, score in scores.items() if score.detail}),
        measures=measures,
        consequence=consequence,
    )


_ACCURACY: Mapping[Combine, Callable[[Sequence[float]], float]] = {
    Combine.sum: fmean,
    Combine.min: min,
    Combine.product: math.prod,
}
_VALUE: Mapping[Combine, Callable[[Sequence[float]], float]] = {Combine.sum: sum, Combine.min: min, Combine.product: math.prod}


def _combine(reward: RewardConfig, terms: Sequence[float]) -> float:
    # Where a row names a part of weight 0 there is nothing to combine.
    return _clip(float(_VALUE[reward.combine](terms)) if terms else 0.0, reward)


def _own(part: RewardPart, score: Score) -> float:
    return 0.0 if score.value is None or score.consequence is Consequence.ZERO else _clip(score.value, part)


def _clip(value: float, bounded: RewardPart | RewardConfig) -> float:
    value = value if bounded.clip_min is None else max(value, bounded.clip_min)
    return value if bounded.clip_max is None else min(value, bounded.clip_max)


def _gated(outcome: Outcome) -> Score:
    outcome = Outcome.WRONG if outcome is Outcome.RIGHT else outcome
    return replace(failed(Status.OK, "", 0.0), outcome=outcome, value=0.0, accuracy=0.0)


def _details(scores: Mapping[str, Score]) -> str:
    return "; ".join(f"reward part '{name}': {score.detail}" for name, score in scores.items())
