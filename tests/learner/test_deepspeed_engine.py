"""Schedules by hand, and what the engine refuses."""

import pytest

from configs.schema import Dtype, OptimizerConfig, Schedule
from learner.deepspeed_engine import check_precision, learning_rate


def rates(total, **settings):
    return [learning_rate(OptimizerConfig(learning_rate=1.0, **settings), step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.constant, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        (Schedule.linear, [0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        # (1 + cos(pi x)) / 2 at x = 0.2, 0.4, ... 1
        (Schedule.cosine, [0.25, 0.5, 0.75, 1, 0.9045084972, 0.6545084972, 0.3454915028, 0.0954915028, 0]),
    ],
)
def test_the_schedule_rises_to_the_peak_and_ends_at_zero(schedule, expected):
    assert rates(9, schedule=schedule, warmup_steps=4) == pytest.approx(expected, abs=1e-9)


def test_the_floor_is_a_share_of_the_peak_reached_in_the_last_step_and_kept():
    config = OptimizerConfig(learning_rate=2.0, schedule=Schedule.linear, min_learning_rate_ratio=0.1)
    assert [learning_rate(config, step, 4) for step in (1, 2, 3, 4, 5)] == pytest.approx([1.55, 1.1, 0.65, 0.2, 0.2])


@pytest.mark.parametrize("total", [24, 28])
def test_b162_the_warm_up_ratio_counts_optimizer_steps(total):
    """round(0.1 x 28) = 3 and round(0.1 x 24) = 2 optimizer steps of warm-up."""
    warmup = {28: 3, 24: 2}[total]
    taken = rates(total, schedule=Schedule.linear, warmup_ratio=0.1)
    assert taken.index(1.0) == warmup - 1
    assert taken[-1] == 0.0


def test_b147_ten_steps_with_four_of_warm_up():
    assert rates(10, schedule=Schedule.linear, warmup_steps=4)[6] == pytest.approx(0.5, abs=1e-12)


def test_warm_up_may_be_as_long_as_the_run():
    assert rates(3, schedule=Schedule.cosine, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])


def test_bfloat16_without_a_stage_is_refused_with_the_reason():
    check_precision(Dtype.bfloat16, 1)
    check_precision(Dtype.float32, 0)
    with pytest.raises(ValueError, match=r"zero_stage of 1 or higher.*no float32 master weights"):
        check_precision(Dtype.bfloat16, 0)
