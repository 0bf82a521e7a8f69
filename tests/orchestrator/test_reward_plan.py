"""What a reward takes, worked by hand."""

import pytest

from configs.schema import RewardConfig, RewardPart
from orchestrator.reward_plan import longest_s, memory_limits, num_processes

pytestmark = pytest.mark.timeout(30)

JUDGE = RewardPart(function="f", timeout_s=60.0, num_processes=16, memory_gib=8.0)


def reward(**parts):
    return RewardConfig(parts=parts, num_workers=4, timeout_s=10.0, memory_gib=2.0)


def test_one_completion_is_not_sooner_done_by_more_processes():
    """Calls at most: one in a batch, one alone, two more by the policy. Each 10 s and 2 to be ended: 48 s however many processes."""
    assert longest_s(reward(math=RewardPart(on_timeout="retry(2)", on_error="retry(1, zero)")), 1) == 48.0


def test_many_completions_share_the_processes():
    parts = reward(math=RewardPart(on_timeout="retry(2)"), judge=JUDGE)
    assert longest_s(parts, 1) == 4 * 12 + 2 * 62
    assert longest_s(parts, 17) == 4 * 12 * (1 + 16 / 4) + 2 * 62 * (1 + 16 / 16)


def test_processes_and_memory_of_a_node():
    assert (num_processes(reward(math=RewardPart(), judge=JUDGE)), num_processes(reward(judge=JUDGE))) == (20, 16)
    assert memory_limits(reward(math=RewardPart(), judge=JUDGE)) == [2.0] * 4 + [8.0] * 16
