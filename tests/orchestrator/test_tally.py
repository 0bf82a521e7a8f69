"""The bounded tables and quantiles that a run and `limen score` tell at their end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from orchestrator.score_lines import Line
from orchestrator.tally import Tally, Times, human_time
from orchestrator.worst import MOST_NAMES, MOST_ROWS, WorstSamples
from rewards.contract import RewardItem
from rollout.records import Consequence, Outcome, Score, Status


def score(time_s, status=Status.OK, consequence=Consequence.NONE, detail=""):
    return Score(status, Outcome.NONE, None, None, {}, None, time_s, detail, {}, consequence)


def test_the_slowest_are_kept_slowest_first_and_of_equal_times_the_earlier():
    worst, times = WorstSamples(), [i / 1000 for i in range(1000)] + [0.5] * 3
    random.Random(1).shuffle(times)
    for place, time_s in enumerate(times):
        worst.add(f"p{place}", score(time_s), {"step": place})
    rows = worst.slowest()
    assert [row["time_s"] for row in rows] == [(999 - i) / 1000 for i in range(MOST_ROWS)]
    assert all(row["prompt_id"] == f"p{row['step']}" and times[row["step"]] == row["time_s"] for row in rows)
    equal = WorstSamples()
    for place in range(MOST_ROWS + 5):
        equal.add(f"p{place}", score(1.0), {})
    assert [row["prompt_id"] for row in equal.slowest()] == [f"p{place}" for place in range(MOST_ROWS)]


def test_the_prompts_that_fail_most_are_counted_also_where_a_policy_gave_a_value():
    worst = WorstSamples()
    for step in range(3):
        worst.add("often", score(0.1, Status.TIMEOUT, Consequence.DROP_GROUP, f"failure {step}"), {"step": step})
        worst.add("fine", score(0.1), {"step": step})
    worst.add("once", score(0.1, consequence=Consequence.ZERO, detail="counted as 0"), {"step": 3})
    rows = worst.failing()
    assert [(row["prompt_id"], row["num_failed"], row["step"], row["detail"]) for row in rows] == [
        ("often", 3, 2, "failure 2"),
        ("once", 1, 3, "counted as 0"),
    ]


def test_a_run_in_which_every_prompt_fails_is_counted_in_bounded_memory():
    worst = WorstSamples()
    for place in range(5 * MOST_NAMES):
        worst.add(f"p{place}", score(0.0, Status.ERROR), {})
        worst.add("always", score(0.0, Status.ERROR), {})
    assert len(worst._failed) <= MOST_NAMES
    first = worst.failing()[0]
    assert (first["prompt_id"], first["num_failed"]) == ("always", 5 * MOST_NAMES)


def test_times_are_written_for_people():
    times = (0.0, 1.83e-5, 0.0124, 0.0996, 0.9949, 0.996, 1.234, 9.96, 99.4, 99.6, 1234.5)
    told = ["under 0.001 ms", "0.018 ms", "12 ms", "100 ms", "995 ms", "1 s", "1.2 s", "10 s", "99 s", "100 s", "1234 s"]
    assert [human_time(seconds) for seconds in times] == told


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_quantiles_are_true_to_the_width_of_a_bin(scale):
    """Of 1, 2 ... 100: the median is 50, the 95th percentile 95; a bin is 10^(1/100) wide."""
    times, numbers = Times(), list(range(1, 101))
    random.Random(2).shuffle(numbers)
    for number in numbers:
        times.add(number * scale)
    for share, true in ((0.5, 50), (0.95, 95), (1.0, 100)):
        assert true * scale <= times.quantile(share) * (1 + 1e-9) <= true * scale * 10**0.01 * (1 + 1e-6)
    assert Times().quantile(0.5) == 0.0


@pytest.mark.parametrize(("number", "known"), [(3.0, {"namespaces": 1}), (2.0, {"landlock": 1}), (7.0, {}), (0.5, {})])
def test_a_measure_called_rung_is_the_sandbox_only_where_it_is_one_of_its_numbers(number, known):
    """A verifier of the user's may measure another thing by that name."""
    item = RewardItem("", "x", None, "1", None, None, None, {})
    tally = Tally()
    tally.add(Line(1, 1, (item,), {}), replace(score(0.1), measures={"mine.rung": number}))
    assert tally._rungs["mine"] == known
