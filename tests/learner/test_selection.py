"""Selection on the scores of one group."""

import pytest

from learner.selection import SAME_ACCURACY, Decision, none, zero_variance
from rollout.records import Consequence, Outcome, Score, Status


def make_score(accuracy, *, value=None):
    status = Status.ERROR if accuracy is None else Status.OK
    value = accuracy if value is None else value
    return Score(status, Outcome.NONE, value, accuracy, {}, None, 0.0, "", {}, Consequence.NONE)


def scores(*accuracies):
    return [make_score(accuracy) for accuracy in accuracies]


def test_case_b96_a_constant_group_has_no_signal(numeric_cases):
    case = numeric_cases["B96-1"]
    assert [zero_variance(scores(*group)).keep for group in case["inputs"]["groups"]] == case["expect"]["keep"]


@pytest.mark.parametrize(
    ("accuracies", "decision"),
    [
        ((1, 1, 1), Decision(False, "zero_variance_solved")),
        ((0.5, 0.5), Decision(False, "zero_variance_solved")),
        ((0, 0, 0), Decision(False, "zero_variance_unsolved")),
        ((0.4, 0.4), Decision(False, "zero_variance_unsolved")),
        ((1, 0), Decision(True, None)),
        ((1, None, 1), Decision(False, "zero_variance_solved")),
        ((1, None, 0), Decision(True, None)),
        ((1, None, None), Decision(False, "too_few_valid")),
        ((None, None), Decision(False, "too_few_valid")),
        ((), Decision(False, "too_few_valid")),
    ],
)
def test_reasons(accuracies, decision):
    assert zero_variance(scores(*accuracies)) == decision


def test_accuracy_decides_and_not_the_shaped_value():
    """All wrong, one with a length penalty: no signal. All alike in value, not in accuracy: signal."""
    wrong = [make_score(0.0, value=0.0), make_score(0.0, value=-0.5)]
    assert zero_variance(wrong) == Decision(False, "zero_variance_unsolved")
    mixed = [make_score(0.0, value=0.7), make_score(1.0, value=0.7)]
    assert zero_variance(mixed) == Decision(True, None)


def test_rounding_is_no_variance():
    parts = [(0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3]
    assert parts[0] != parts[1]
    assert not zero_variance(scores(*parts)).keep
    assert zero_variance(scores(0.5, 0.5 + 10 * SAME_ACCURACY)).keep


def test_none_keeps_whatever_has_a_value():
    assert none(scores(1, 1, None)) == Decision(True, None)
    assert none(scores(0)) == Decision(True, None)
    assert none(scores(None, None)) == Decision(False, "too_few_valid")
