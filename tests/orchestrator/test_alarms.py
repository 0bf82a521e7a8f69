"""Alarms on sequences of metrics worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from configs.compose import load_config
from orchestrator.alarms import _RULES, Watch, feed
from orchestrator.job import Job
from orchestrator.metrics import step_metrics
from orchestrator.stages import Address, Batch, Scored, StepOutcome
from rollout.records import Consequence, GroupMeta, Outcome, Prompt, Purpose, Score, Status, Visit

pytestmark = pytest.mark.timeout(30)


def told(*stretches: tuple[int, dict[str, float]]) -> list[tuple[int, str]]:
    """Which alarms begin at which step, of stretches of so many steps with the same metrics."""
    return [(step, alarm.kind) for step, alarm in alarms(*stretches)]


def alarms(*stretches):
    watch, begun, step = Watch(), [], 0
    for count, metrics in stretches:
        for _ in range(count):
            step += 1
            watch, new = feed(watch, metrics)
            begun += [(step, alarm) for alarm in new]
    return begun


def test_a_large_ratio_is_told_once_and_again_only_ten_steps_after_it_ended():
    high, low = {"mismatch/rho_max": 101.0}, {"mismatch/rho_max": 100.0}
    assert told((1, low), (3, high)) == [(2, "engine_mismatch")]
    assert told((1, high), (9, low), (1, high)) == [(1, "engine_mismatch")], "nine quiet steps do not end it"
    assert told((1, high), (9, low), (1, high), (9, low), (1, high)) == [(1, "engine_mismatch")], "each begins the count anew"
    assert told((1, high), (10, low), (1, high)) == [(1, "engine_mismatch"), (12, "engine_mismatch")]
    assert told((1, high), (10, {}), (1, high)) == [(1, "engine_mismatch"), (12, "engine_mismatch")], "no value is no alarm"
    assert told((5, {"mismatch/rho_max": math.nan})) == []


def test_few_groups_are_told_from_the_mean_of_ten_steps():
    assert told((9, {"eff/prompt_frac": 0.0})) == [], "nine steps are too few"
    assert told((30, {"eff/prompt_frac": 0.3})) == [], "the bound itself is allowed"
    # 10 steps at 0.5, then 0.1: the mean of ten is 0.5 - 0.04 n, which is 0.3 at n = 5 and 0.26 at n = 6.
    begins, falls, rises = (10, {"eff/prompt_frac": 0.5}), (20, {"eff/prompt_frac": 0.1}), (20, {"eff/prompt_frac": 1.0})
    first = (16, "few_groups_with_signal")
    assert told(begins, falls) == [first]
    # Back at 1.0 the mean is 0.1 + 0.09 n: above 0.3 from the third of them on, so it has ended at the twelfth. Then 0.1 again: the mean
    # is 1 - 0.09 n, below 0.3 from n = 8 on, that is at step 10 + 20 + 20 + 8.
    assert told(begins, falls, rises, falls) == [first, (58, "few_groups_with_signal")]


def test_steps_without_a_value_and_values_that_are_not_finite_add_nothing():
    few, nan, none = {"eff/prompt_frac": 0.1}, {"eff/prompt_frac": math.nan}, {"reward/mean": 0.5}
    assert told((9, few), (50, nan), (50, none), (1, {"eff/prompt_frac": -math.inf}), (1, few)) == [
        (111, "few_groups_with_signal")
    ]


def test_entropy_alone_is_no_alarm_and_neither_is_repetition():
    early = {"policy/entropy": 1.0, "rep/ratio20": 0.02}
    collapsed = {"policy/entropy": 0.1, "rep/ratio20": 0.1}
    assert told((20, early), (40, early | {"policy/entropy": 0.1})) == []
    assert told((20, early), (40, early | {"rep/ratio20": 0.9})) == []
    assert told((60, collapsed)) == [], "it was so from the start"
    assert told((20, early), (40, {"policy/entropy": 0.1})) == [], "without new values of repetition the last ones stand"
    # The mean of ten entropies is 1 - 0.09 n, below 0.25 from n = 9 on; that of repetition is above 0.03 from n = 2 on.
    ((step, alarm),) = alarms((20, early), (40, collapsed))
    assert (step, alarm.kind) == (29, "entropy_collapse")
    assert alarm.text == "policy/entropy 0.19 is below 25% of 1 at step 20, while rep/ratio20 rose from 0.02 to 0.092"


def test_step_20_counts_as_the_mean_of_the_ten_steps_up_to_it():
    first, early, later = ({"policy/entropy": x, "rep/ratio20": y} for x, y in ((9.0, 0.0), (1.0, 0.0), (0.3, 0.5)))
    assert told((10, first), (10, early), (60, later)) == [], "0.3 is not below a quarter of 1.0; of 9.0 it would be"


def test_clipping_that_rises_without_gain():
    calm = {"clip/hard_pos": 0.01, "reward/mean": 0.5, "reward/std": 0.4}
    clipped = calm | {"clip/hard_pos": 0.049}
    assert told((100, clipped)) == [], "it does not rise"
    # Twenty steps against the twenty before: 0.01 + (0.049 - 0.01) n / 20 is 0.01975 at n = 5 and 0.0217, more than twice 0.01, at n = 6.
    ((step, alarm),) = alarms((40, calm), (6, clipped))
    assert (step, alarm.kind) == (46, "clipping_without_gain")
    assert alarm.text == "clip/hard_pos rose from 0.01 to 0.0217 (means of 20 steps), while reward/mean went from 0.5 to 0.5"
    # A reward that rises by 0.05 each step: after six steps the mean of twenty is up 0.0525, which is more than 0.05 * 0.4.
    gains = [(1, clipped | {"reward/mean": 0.5 + 0.05 * n}) for n in range(1, 20)]
    assert told((40, calm), *gains) == []
    falls = [(1, clipped | {"reward/mean": 0.5 - 0.02 * n}) for n in range(1, 7)]
    assert told((40, calm), *falls) == [(46, "clipping_without_gain")], "a falling reward is no gain either"
    tiny = calm | {"clip/hard_pos": 0.00001}
    assert told((40, tiny), (40, calm | {"clip/hard_pos": 0.0015})) == [], "150 times as much, and still next to nothing"


def test_length_that_halves_within_fifty_steps():
    # From 100 to 40: the mean of ten is 100 - 6 n, below 50 at n = 9.
    ((step, alarm),) = alarms((30, {"len/mean": 100.0}), (30, {"len/mean": 40.0}))
    assert (step, alarm.kind, alarm.text) == (39, "length_collapse", "len/mean fell from 100 to 46 within 50 steps")
    assert told((30, {"len/mean": 100.0}), (30, {"len/mean": 50.0})) == [], "half is not more than half"
    slowly = [(1, {"len/mean": 100.0 * 0.99**n}) for n in range(300)]  # 0.99 ** 40 = 0.67 between the ends of fifty steps
    assert told(*slowly) == []
    # The longest mean of ten, of steps 1 to 10, is 99. At 1.0 the mean is 90 - 8.9 n: 54.4 at n = 4, 45.5 at n = 5.
    assert told((9, {"len/mean": 100.0}), (30, {"len/mean": 90.0}), (9, {"len/mean": 1.0})) == [(44, "length_collapse")]


def test_a_correction_that_masks_much():
    assert told((30, {"correction/masked_frac": 0.05})) == []
    assert told((30, {"correction/masked_frac": 0.06})) == [(10, "correction_masks_much")]


def test_every_advice_names_a_key_that_there_is():
    config = load_config([])
    for _, advice, key in _RULES.values():
        node = config
        for part in key.split("."):
            node = getattr(node, part)
        assert advice


def test_a_run_tells_an_alarm_as_one_event_and_one_line():
    events, lines = [], []
    job = SimpleNamespace(
        _watch=Watch(),
        _first_step=0,
        event=lambda name, **fields: events.append((name, fields)),
        view=SimpleNamespace(line=lines.append),
    )
    for step in (1, 2):
        Job._warn(job, step, {"mismatch/rho_max": 250.0, "time/loop_lag_s": 0.0})
    ((name, fields),) = events
    assert (name, fields["step"], fields["kind"], fields["key"]) == ("alarm", 1, "engine_mismatch", "correction")
    assert fields["text"] == "mismatch/rho_max 250 is above 100"
    assert len(lines) == 1
    assert lines[0].startswith("alarm: mismatch/rho_max 250 is above 100: engine and learner disagree")
    assert lines[0].endswith("(correction)")


def test_a_run_whose_every_completion_is_cut_warns_by_its_second_step():
    """B125: three steps of completions that all end at the limit; the line names the limit and the template."""
    lines = []
    job = SimpleNamespace(
        _watch=Watch(),
        _first_step=0,
        config=load_config(["rollout.max_new_tokens=9"]),
        event=lambda name, **fields: None,
        view=SimpleNamespace(line=lines.append),
    )
    prompts = {"p": Prompt("p", "s", "s", "", np.zeros(1, np.int32), "", None)}
    for step in (1, 2, 3):
        cut = GroupMeta(Visit("p", step, Purpose.TRAIN), "w", 3, (9, 9), (9, 9), 2, 0, 0, 0, 0.0, 0, 0.0, ())
        score = Score(Status.OK, Outcome.WRONG, 0.0, 0.0, {}, None, 0.0, "", {}, Consequence.NONE)
        scored = Scored(cut, Address(None, 0), (score, score))
        metrics = step_metrics(StepOutcome(Batch(step, step - 1, ()), (scored,), 0, {}, {}), prompts)
        assert metrics["len/trunc_frac"] == 1.0
        Job._warn(job, step, metrics | {"time/loop_lag_s": 0.0})
        warned = [line for line in lines if line.startswith("warning: ")]
        assert len(warned) == min(step, 2), "and then no more"
        assert "rollout.max_new_tokens=9" in warned[-1]
        assert "template" in warned[-1]
