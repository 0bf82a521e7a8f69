"""Samples: whose score counts where, what each token's denominator is, and what every token keeps."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from configs.schema import Aggregation, Choice, KlConfig, KlFilter, KlKind, Reference
from learner.batching import RowCost
from learner.objective import Objective
from learner.prepare import Rank, prepare_batch
from learner.samples import Gap, list_samples, tabulate

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def prepare(spec_of, batch_of):
    """What a rank makes of groups, without a model: nothing here needs a forward."""

    def go(*groups, rank=0, world_size=1, version=3, **settings):
        settings = {"aggregation": Aggregation.token_mean, "tokens_per_micro_batch": 1000} | settings
        here = Rank(rank, world_size, torch.device("cpu"), RowCost(1, 0, 0), lambda inputs: None, None, lambda mine: [mine])
        return prepare_batch(batch_of(*groups, version=version), Objective(spec_of("", **settings)), here, 0)

    return go


def by_row(micro, values):
    """One number a response: they are all the same over its tokens."""
    rows = micro.inputs.response.tolist()
    of_row = {row: {v for r, v in zip(rows, values.tolist(), strict=True) if r == row} for row in rows}
    assert all(len(numbers) == 1 for numbers in of_row.values())
    return [numbers.pop() for numbers in of_row.values()]


def test_b59_invalid_scores_are_in_no_statistic(rollouts, prepare):
    groups = [rollouts.group(values) for values in ([1.0, None, 0.0, 1.0], [1.0, float("nan"), 1.0, 0.0], [0.0, 1.0, 1.0, 1.0])]
    prepared = prepare(*groups)
    ((micro,),) = prepared.steps
    # (1, 0, 1): mean 2/3, unbiased deviation 1/sqrt(3): A = 1/sqrt(3) and -2/sqrt(3). (0, 1, 1, 1): mean 3/4, deviation 1/2.
    expected = [0.577349, -1.154699, 0.577349, 0.577349, 0.577349, -1.154699, -1.5, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(sorted(by_row(micro, micro.advantage)), sorted(expected), atol=5e-6)
    assert set(micro.sample_weight.tolist()) == {1.0}
    assert (prepared.num_samples, prepared.metrics["batch/num_invalid"]) == (10, 2)
    assert prepared.metrics["adv/mean"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        ("grpo", 2 / 3 / (3**-0.5 + 1e-6), -1 / 3 / (3**-0.5 + 1e-6)),  # 1, 0, 0: mean 1/3, unbiased deviation 1/sqrt(3)
        ("dr_grpo", 2 / 3, -1 / 3),
        ("rloo", 1.0, -0.5),  # the others' mean is 0, or 1/2
    ],
)
def test_a_group_without_its_last_member_is_a_group_of_those_that_ended(rollouts, prepare, estimator, right, wrong):
    """Of four members the second was cancelled, with 90 tokens; a whole group stands beside it."""
    cut = rollouts.group([1.0, 0.0, 0.0], lengths=[2, 5, 3])
    members = tuple(dataclasses.replace(c, index=i) for c, i in zip(cut.group.completions, (0, 2, 3), strict=True))
    cut = dataclasses.replace(cut, group=dataclasses.replace(cut.group, completions=members, unfinished=(90,)))
    prepared = prepare(cut, rollouts.group([1.0, 0.0, 1.0, 0.0], lengths=[1, 1, 1, 1]), advantage=Choice(estimator))
    ((micro,),) = prepared.steps
    advantages = dict(zip(micro.inputs.owners.tolist(), micro.advantage.tolist(), strict=True))  # by number of the sample
    assert [advantages[i] for i in range(3)] == pytest.approx([right, wrong, wrong], abs=1e-6)
    assert set(micro.policy_denominator.tolist()) == {14.0}, "the missing tokens are in no denominator"
    assert prepared.num_samples == 7


def test_tokens_are_counted_by_how_far_behind_they_are(rollouts, prepare):
    """A learner at version 12 trains three tokens of version 12, one of 11, two of 4 and one of 1; another group is masked out."""
    versions = [np.array([1, 4, 11, 12], dtype=np.int32), np.array([4, 12, 12], dtype=np.int32)]
    group = rollouts.group([1.0, 0.0], lengths=[4, 3])
    completions = tuple(rollouts.completion(i, len(v), versions=v) for i, v in enumerate(versions))
    group = dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions))
    metrics = prepare(group, rollouts.group([None], lengths=[5]), version=12).metrics
    found = {name: value for name, value in metrics.items() if name.startswith("stale/frac_")}
    expected = {"stale/frac_lag_0": 3 / 7, "stale/frac_lag_1": 1 / 7, "stale/frac_lag_8_or_more": 3 / 7}
    assert found == pytest.approx(expected)


def test_what_estimators_see_of_a_score(rollouts):
    group = rollouts.group([1.0, 0.5, None], lengths=[3, 0, 2])
    parts = ({"main": 1.0, "style": 0.2}, {"main": 0.5}, {})
    scores = tuple(dataclasses.replace(score, parts=p) for score, p in zip(group.scores, parts, strict=True))
    table = tabulate(list_samples([dataclasses.replace(group, scores=scores)]), {"main": 1.0, "style": 2.0})
    assert table.values.tolist() == [1.0, 0.5, 0.0]
    assert table.accuracy.tolist() == [1.0, 0.5, 0.0]
    assert table.valid.tolist() == [True, True, False]
    assert table.num_tokens.tolist() == [3, 0, 2]
    assert table.parts["main"].nan_to_num(-1).tolist() == [1.0, 0.5, -1.0]
    assert table.parts["style"].nan_to_num(-1).tolist() == [0.2, -1.0, -1.0]  # it did not judge the others
    assert table.part_weights == {"main": 1.0, "style": 2.0}


def test_a_completion_without_a_loss_token_counts_in_the_statistics_only(rollouts, prepare):
    prepared = prepare(rollouts.group([1.0, 0.0, 0.0], lengths=[2, 3, 0]), aggregation=Aggregation.seq_mean_token_sum)
    ((micro,),) = prepared.steps
    assert (prepared.num_samples, prepared.metrics["batch/num_empty"]) == (2, 1)
    assert max(by_row(micro, micro.advantage)) == pytest.approx(2 / 3**0.5, abs=1e-5)  # as in a group of three
    assert set(micro.policy_denominator.tolist()) == {2.0}


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        (Aggregation.token_mean, 4.0, 4.0),
        (Aggregation.seq_mean_token_mean, 2.0, 6.0),
        (Aggregation.seq_mean_token_sum, 2.0, 2.0),
        (Aggregation.token_sum_norm, 16.0, 16.0),
    ],
)
def test_denominators_are_of_the_optimizer_step_whatever_the_micro_batch(aggregation, short, long, rollouts, prepare):
    """Two responses with 1 and 3 loss tokens; L_max is 8 (ALGORITHMS 0.1)."""
    group = rollouts.group([1.0, 0.0], lengths=[1, 3])
    for budget in (1, 1000):
        (step,) = prepare(group, aggregation=aggregation, tokens_per_micro_batch=budget).steps
        assert len(step) == (2 if budget == 1 else 1)
        assert torch.cat([micro.policy_denominator for micro in step]).tolist() == [long] * 3 + [short]


def test_the_kl_term_of_the_low_entropy_tokens_counts_those_alone(rollouts, prepare):
    """Of 1 and 6 tokens floor(0.5 (n - 1)) + 1 are low: 1 and 3."""
    kl = KlConfig(kind=KlKind.k3, beta=0.1, token_filter=KlFilter.low_entropy, entropy_quantile=0.5)
    settings = {"kl": kl, "reference": Reference.frozen, "aggregation": Aggregation.seq_mean_token_mean}
    ((micro,),) = prepare(rollouts.group([1.0, 0.0], lengths=[1, 6]), **settings).steps
    assert by_row(micro, micro.kl_denominator) == [6.0, 2.0]
    assert by_row(micro, micro.policy_denominator) == [12.0, 2.0]


def test_pruned_samples_leave_numerator_and_denominators(rollouts, prepare):
    """(1, 0, 0, 0) of 8, 1, 2 and 3 tokens: the lone success has the largest |A|; of the failures the earlier one stays."""
    group = rollouts.group([1.0, 0.0, 0.0, 0.0], lengths=[8, 1, 2, 3])
    prepared = prepare(group, weighting=Choice("cppo", {"pruning_rate": 0.5}))
    ((micro,),) = prepared.steps
    assert (prepared.num_samples, prepared.metrics["batch/num_pruned"]) == (2, 2)
    assert sorted(by_row(micro, micro.advantage)) == pytest.approx([-0.5, 1.5], abs=1e-5)
    assert set(micro.policy_denominator.tolist()) == {9.0}
    assert set(micro.sample_weight.tolist()) == {1.0}


def test_every_token_keeps_what_belongs_to_it(rollouts, prepare):
    versions = [np.array([2, 3, 3], dtype=np.int32), np.array([3, 3], dtype=np.int32)]
    group = rollouts.group([1.0, 0.0], lengths=[3, 2], prompt_length=2)
    completions = tuple(
        rollouts.completion(i, len(v), versions=v, mixed=np.arange(len(v)) == 2, roll_logp=np.float32([-1, -2, -3])[: len(v)])
        for i, v in enumerate(versions)
    )
    completions[0].loss_mask[1] = False
    group = dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions))
    other = rollouts.group([None], lengths=[4])
    ((micro,),) = prepare(other, group).steps
    assert micro.inputs.targets.tolist() == [*completions[0].token_ids[[0, 2]], *completions[1].token_ids]
    assert micro.inputs.positions.tolist() == [1, 3, 6, 7]  # rows of five, prompts of two
    assert micro.inputs.response.tolist() == [0, 0, 1, 1]
    assert micro.group.tolist() == [1, 1, 1, 1]
    assert micro.roll_logp.tolist() == [-1, -3, -1, -2]
    assert micro.gap.tolist() == [Gap.OLDER_VERSION, Gap.MIXED, Gap.SAME_VERSION, Gap.SAME_VERSION]
    assert (micro.lag.tolist(), micro.lags) == ([1, 0, 0, 0], (0, 1))
    assert micro.advantage.tolist() == pytest.approx([0.5**0.5] * 2 + [-(0.5**0.5)] * 2, abs=1e-5)


def test_an_advantage_a_token_stays_with_its_token(rollouts, prepare):
    """REINFORCE++, gamma 0.5, values 1 and 0 over 2 and 1 tokens: returns 0.5, 1, 0; mean 0.5, unbiased deviation 0.5."""
    group = rollouts.group([1.0, 0.0], lengths=[2, 1], prompt_length=2)
    for budget in (1, 1000):
        (step,) = prepare(group, advantage=Choice("reinforce_pp", {"gamma": 0.5}), tokens_per_micro_batch=budget).steps
        assert torch.cat([micro.advantage for micro in step]).tolist() == pytest.approx([0, 1, -1], abs=1e-6)


def test_versions_become_counts_of_optimizer_steps(spec_of):
    objective = Objective(spec_of(""))
    for version, steps in ((2, 5), (3, 9), (5, 13)):
        objective.note_version(version, steps)
    # Version 4 was never trained on, 1 is from before what is remembered.
    assert objective.steps_at(torch.tensor([1, 2, 3, 4, 5])).tolist() == [5, 5, 9, 9, 13]


def test_ranks_share_an_optimizer_step_and_run_the_same_number_of_micro_batches(rollouts, prepare):
    group = rollouts.group([1, 0, 1], lengths=[4, 4, 4])
    both = [prepare(group, rank=r, world_size=2, tokens_per_micro_batch=1) for r in (0, 1)]
    ranks = [prepared.steps[0] for prepared in both]
    assert [[micro.inputs.num_tokens > 0 for micro in step] for step in ranks] == [[True, True], [True, False]]
    assert {d for step in ranks for micro in step if micro.inputs.num_tokens for d in micro.policy_denominator.tolist()} == {12.0}
    width = len(group.group.prompt_token_ids) + 4
    assert both[0].metrics == both[1].metrics
    assert (both[0].num_rank_tokens, both[1].num_rank_tokens) == (2 * width, width)
    assert both[0].metrics["batch/rank_imbalance"] == 2 / 1.5
    assert both[0].metrics["batch/padding_frac"] == pytest.approx(1 / (3 * width + 1))


def test_a_batch_without_groups_has_nothing_to_train(prepare):
    prepared = prepare()
    assert (prepared.steps, prepared.num_samples, prepared.metrics["eff/sample_frac"]) == ([], 0, 0.0)
    assert all(math.isfinite(value) for value in prepared.metrics.values())
