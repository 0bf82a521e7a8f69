"""Samples: whose score counts where, and what each token's denominator is."""

from functools import partial

import numpy as np
import pytest
import torch

from configs.schema import Aggregation
from learner.advantages import grpo
from learner.batching import RowCost
from learner.samples import Gap, Plan, make_samples, plan_optimizer_steps
from learner.weighting import none, sample_weights

WEIGHT = partial(sample_weights, none, params={})


def plan(**changes):
    fields = {
        "num_mini_batches": 1,
        "tokens_per_micro_batch": 1000,
        "aggregation": Aggregation.token_mean,
        "max_response_tokens": 10,
        "cost": RowCost(per_token=1, per_pair=0, per_scored=0),
        "version": 3,
        "rank": 0,
        "world_size": 1,
        "device": torch.device("cpu"),
    }
    return Plan(**fields | changes)


def test_b59_invalid_scores_are_in_no_statistic(rollouts):
    groups = [rollouts.group(values) for values in ([1.0, None, 0.0, 1.0], [1.0, float("nan"), 1.0, 0.0], [0.0, 1.0, 1.0, 1.0])]
    samples, counts = make_samples(groups, grpo, WEIGHT, mask_truncated=False)
    # (1, 0, 1): mean 2/3, unbiased deviation 1/sqrt(3): A = 1/sqrt(3) and -2/sqrt(3). (0, 1, 1, 1): mean 3/4, deviation 1/2.
    expected = [0.577349, -1.154699, 0.577349, 0.577349, 0.577349, -1.154699, -1.5, 0.5, 0.5, 0.5]
    np.testing.assert_allclose([s.advantage for s in samples], expected, atol=5e-6)
    assert [s.group for s in samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert {s.weight for s in samples} == {1.0}
    assert (counts.num_samples, counts.num_invalid) == (10, 2)


def test_a_completion_without_a_loss_token_counts_in_the_statistics_only(rollouts):
    group = rollouts.group([1.0, 0.0, 0.0], lengths=[2, 3, 0])
    samples, counts = make_samples([group], grpo, WEIGHT, mask_truncated=False)
    assert (len(samples), counts.num_empty) == (2, 1)
    assert samples[0].advantage == pytest.approx(2 / 3**0.5, abs=1e-5)  # as in a group of three
    (step,), _ = plan_optimizer_steps(samples, plan(aggregation=Aggregation.seq_mean_token_sum), [0])
    assert set(step[0].policy_denominator.tolist()) == {2.0}


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        (Aggregation.token_mean, 4.0, 4.0),
        (Aggregation.seq_mean_token_mean, 2.0, 6.0),
        (Aggregation.seq_mean_token_sum, 2.0, 2.0),
        (Aggregation.token_sum_norm, 20.0, 20.0),
    ],
)
def test_denominators_are_of_the_optimizer_step_whatever_the_micro_batch(aggregation, short, long, rollouts):
    """Two responses with 1 and 3 loss tokens; L_max is 10 (ALGORITHMS 0.1)."""
    samples, _ = make_samples([rollouts.group([1.0, 0.0], lengths=[1, 3])], grpo, WEIGHT, mask_truncated=False)
    for budget in (1, 1000):
        (step,), _ = plan_optimizer_steps(samples, plan(aggregation=aggregation, tokens_per_micro_batch=budget), [0])
        assert len(step) == (2 if budget == 1 else 1)
        assert torch.cat([micro.policy_denominator for micro in step]).tolist() == [long] * 3 + [short]


def test_every_token_keeps_what_belongs_to_it(rollouts):
    versions = [np.array([2, 3, 3], dtype=np.int32), np.array([3, 3], dtype=np.int32)]
    group = rollouts.group([1.0, 0.0], lengths=[3, 2], prompt_length=2)
    completions = tuple(
        rollouts.completion(i, len(v), versions=v, mixed=np.arange(len(v)) == 2, roll_logp=np.float32([-1, -2, -3])[: len(v)])
        for i, v in enumerate(versions)
    )
    completions[0].loss_mask[1] = False
    group = type(group)(type(group.group)(group.group.visit, group.group.prompt_token_ids, completions, "w", 0.0), group.scores)
    samples, _ = make_samples([group], grpo, WEIGHT, mask_truncated=False)
    ((micro,),), _ = plan_optimizer_steps(samples, plan(), [0])
    assert micro.targets.tolist() == [*completions[0].token_ids[[0, 2]], *completions[1].token_ids]
    assert micro.positions.tolist() == [1, 3, 6, 7]  # rows of five, prompts of two
    assert micro.response.tolist() == [0, 0, 1, 1]
    assert micro.roll_logp.tolist() == [-1, -3, -1, -2]
    assert micro.gap.tolist() == [Gap.OLDER_VERSION, Gap.MIXED, Gap.SAME_VERSION, Gap.SAME_VERSION]
    assert micro.advantage.tolist() == pytest.approx([0.5**0.5] * 2 + [-(0.5**0.5)] * 2, abs=1e-5)


def test_ranks_share_an_optimizer_step_and_run_the_same_number_of_micro_batches(rollouts):
    samples, _ = make_samples([rollouts.group([1, 0, 1], lengths=[4, 4, 4])], grpo, WEIGHT, mask_truncated=False)
    plans = [plan_optimizer_steps(samples, plan(rank=r, world_size=2, tokens_per_micro_batch=1), [0]) for r in (0, 1)]
    ranks = [steps[0] for steps, _ in plans]
    assert [[micro.num_tokens > 0 for micro in micro_batches] for micro_batches in ranks] == [[True, True], [True, False]]
    assert {
        d for micro_batches in ranks for micro in micro_batches if micro.num_tokens for d in micro.policy_denominator.tolist()
    } == {12.0}
    width = len(samples[0].row.token_ids)
    assert plans[0][1] == plans[1][1]
    assert plans[0][1].num_tokens == (2 * width, width)
    assert plans[0][1].imbalance == 2 / 1.5
    assert plans[0][1].padding_frac == pytest.approx(1 / (3 * width + 1))
