"""From parts to one score."""

import pytest

from configs.schema import RewardPart
from rewards.compose import applicable, compose
from rewards.contract import RewardError, failed
from rollout.records import Consequence, Outcome, Score, Status


def ok(value, accuracy, outcome=Outcome.RIGHT, extracted=None):
    return Score(
        status=Status.OK,
        outcome=outcome,
        value=value,
        accuracy=accuracy,
        parts={},
        extracted=extracted,
        time_s=0.5,
        detail="",
        measures={},
        consequence=Consequence.NONE,
    )


PARTS = {"math": RewardPart(weight=2.0), "style": RewardPart(weight=-0.5), "length": RewardPart(weight=0.1, accuracy=False)}


def test_weighted_sum_and_mean_of_the_accuracies_that_count():
    scores = {"math": ok(1.0, 1.0), "style": ok(0.4, 0.5, Outcome.WRONG, "b"), "length": ok(30.0, 0.9, Outcome.CRASH, "c")}
    score = compose(PARTS, scores)
    assert score.value == pytest.approx(2.0 - 0.2 + 3.0)
    assert score.accuracy == 0.75
    assert score.parts == {"math": 1.0, "style": 0.4, "length": 30.0}
    assert (score.outcome, score.extracted, score.time_s) == (Outcome.WRONG, "b", 1.5)


@pytest.mark.parametrize(
    ("math", "style", "worst"),
    [
        (Status.ABSTAIN, Status.OK, Status.ABSTAIN),
        (Status.OK, Status.TIMEOUT, Status.TIMEOUT),
        (Status.ABSTAIN, Status.INVALID, Status.INVALID),
        (Status.INVALID, Status.TIMEOUT, Status.TIMEOUT),
        (Status.TIMEOUT, Status.ERROR, Status.ERROR),
    ],
)
def test_one_failed_part_leaves_no_value(math, style, worst):
    def score(status, name):
        return ok(1.0, 1.0) if status is Status.OK else failed(status, f"{name} failed", 0.0)

    merged = compose(PARTS, {"math": score(math, "m"), "style": score(style, "s"), "length": ok(7.0, 1.0)})
    assert (merged.status, merged.value, merged.accuracy, merged.outcome) == (worst, None, None, Outcome.NONE)
    assert merged.parts["length"] == 7.0
    assert ("math" in merged.detail) == (math is not Status.OK)
    assert ("s failed" in merged.detail) == (style is not Status.OK)


def test_routing_takes_one_part_and_counts_its_accuracy():
    parts = applicable(PARTS, "length")
    assert compose(parts, {"length": ok(30.0, 0.25)}).accuracy == 0.25
    assert applicable(PARTS, None) == PARTS
    with pytest.raises(RewardError, match=r"'maths' is unknown; reward\.parts has: math, style, length"):
        applicable(PARTS, "maths")


def test_a_sum_beyond_all_floats_is_an_error():
    parts = {"a": RewardPart(weight=10.0)}
    assert compose(parts, {"a": ok(1e308, 1.0)}).status is Status.ERROR
