"""The learner on real DeepSpeed engines: its gradients are those of a plain implementation, whatever the packing and the ZeRO stage."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import Aggregation, Dtype, KlConfig, KlKind, Optimizer, Reference, Schedule
from learner.learner import NonFiniteError
from rollout.records import Finish

LR = 0.1


def mixed_batch(rollouts, batch_of):
    """Six groups of unequal lengths; one member without a score, one with a hole in its loss mask, one whole group without scores."""
    groups = [
        rollouts.group(values) for values in ([1, 0, 0], [0, 1, None, 1], [0.5, 0, 1], [None, None], [1, 0], [0, 0.25, 1, 1])
    ]
    holed = groups[4].group.completions[0]
    mask = np.array([True, False, True, True])
    holed = dataclasses.replace(rollouts.completion(0, 4), loss_mask=mask, index=holed.index)
    inner = dataclasses.replace(groups[4].group, completions=(holed, groups[4].group.completions[1]))
    groups[4] = dataclasses.replace(groups[4], group=inner)
    return batch_of(*groups)


class Plain:
    """GRPO written once more, from the papers: float64, autograd, every row alone, full batch, plain SGD."""

    def __init__(self, path, batch, *, aggregation, temperature=1.0, eps=0.2, kl_beta=0.0, entropy_beta=0.0):
        self.policy, self.start = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for _ in range(2))
        self.aggregation, self.temperature, self.eps = aggregation, temperature, eps
        self.kl_beta, self.entropy_beta = kl_beta, entropy_beta
        self.rows = []
        for group in batch.groups:
            values = torch.tensor([s.value for s in group.scores if s.value is not None], dtype=torch.float64)
            for completion, score in zip(group.group.completions, group.scores, strict=True):
                if score.value is not None:
                    advantage = (score.value - values.mean()) / (values.std() + 1e-6)
                    self.rows.append((group.group.prompt_token_ids, completion, advantage))

    def token_logps(self, model, prompt, completion):
        ids = torch.tensor(np.concatenate([prompt, completion.token_ids])).long()
        log_p = torch.log_softmax(model(ids[None]).logits[0] / self.temperature, -1)[len(prompt) - 1 : -1]
        keep = torch.tensor(completion.loss_mask)
        return log_p.gather(1, ids[len(prompt) :, None])[:, 0][keep], -(log_p.exp() * log_p).sum(-1)[keep]

    def gradients(self):
        """Of the next step, by name; then takes it."""
        losses = []
        for prompt, completion, advantage in self.rows:
            logp, entropy = self.token_logps(self.policy, prompt, completion)
            with torch.no_grad():
                old, _ = self.token_logps(self.start, prompt, completion)
            ratio = (logp - old).exp()
            loss = -torch.min(advantage * ratio, advantage * ratio.clamp(1 - self.eps, 1 + self.eps))
            loss = loss + self.kl_beta * ((old - logp).exp() - 1 + logp - old) - self.entropy_beta * entropy
            losses.append(loss)
        if self.aggregation is Aggregation.token_mean:
            total = torch.cat(losses).mean()
        else:
            total = torch.stack([loss.mean() for loss in losses]).mean()
        self.policy.zero_grad()
        total.backward()
        taken = {name: p.grad.clone() for name, p in self.policy.named_parameters()}
        with torch.no_grad():
            for p in self.policy.parameters():
                p.sub_(LR * p.grad)
        return taken


def assert_close(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name in got:
        largest = expected[name].abs().max().item()
        assert largest > 0, name
        error = (got[name].double() - expected[name].double()).abs().max().item()
        assert error <= tolerance * largest, f"{name}: off by {error / largest:.1e} of its largest entry"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["qwen3", "llama"])
def test_raw_gradients_are_those_of_a_plain_implementation(
    stage, model, make_learner, rollouts, batch_of, raw_gradients, tiny_models
):
    batch = mixed_batch(rollouts, batch_of)
    learner = make_learner(model, zero_stage=stage, num_passes=2, learning_rate=LR, tokens_per_micro_batch=24)
    learner.prepare(batch)
    taken = raw_gradients(learner)
    plain = Plain(tiny_models[model], batch, aggregation=Aggregation.seq_mean_token_mean)
    assert_close(taken[0], plain.gradients())
    assert_close(taken[1], plain.gradients())  # the ratio is not 1 any more


def test_kl_entropy_and_temperature_are_in_the_gradient(make_learner, rollouts, batch_of, raw_gradients, tiny_models):
    batch = mixed_batch(rollouts, batch_of)
    with_kl = {"reference": Reference.frozen, "kl": KlConfig(kind=KlKind.k3, beta=0.5), "entropy_beta": 0.1}
    plain = Plain(tiny_models["qwen3"], batch, aggregation=Aggregation.token_mean, kl_beta=0.5, entropy_beta=0.1, temperature=0.8)
    learner = make_learner(num_passes=2, learning_rate=LR, aggregation=Aggregation.token_mean, temperature=0.8, **with_kl)
    learner.prepare(batch)
    taken = raw_gradients(learner)
    assert_close(taken[0], plain.gradients())
    assert_close(taken[1], plain.gradients())


@pytest.fixture
def whole_batch_gradient(make_learner, rollouts, batch_of, raw_gradients):
    batch = mixed_batch(rollouts, batch_of)
    learner = make_learner(tokens_per_micro_batch=10_000)
    report = learner.prepare(batch)
    assert report.metrics["batch/num_micro_batches"] == 1
    return batch, raw_gradients(learner)[0]


@pytest.mark.parametrize(("budget", "at_least"), [(1, 15), (16, 8), (40, 4)])
def test_raw_gradients_do_not_depend_on_the_micro_batch_budget(
    budget, at_least, whole_batch_gradient, make_learner, raw_gradients
):
    batch, expected = whole_batch_gradient
    learner = make_learner(tokens_per_micro_batch=budget)
    assert learner.prepare(batch).metrics["batch/num_micro_batches"] >= at_least
    assert_close(raw_gradients(learner)[0], expected)


def test_raw_gradients_do_not_depend_on_order(whole_batch_gradient, make_learner, raw_gradients):
    batch, expected = whole_batch_gradient
    learner = make_learner(tokens_per_micro_batch=30, seed=5)
    learner.prepare(dataclasses.replace(batch, groups=batch.groups[::-1]))
    assert_close(raw_gradients(learner)[0], expected)


def test_raw_gradients_do_not_depend_on_padding(whole_batch_gradient, make_learner, raw_gradients, batch_of):
    """One long row that is masked but for one token widens every other row of its micro-batch; its own part is taken off again."""
    batch, expected = whole_batch_gradient
    long_prompt = np.arange(4, 64, dtype=np.int32)
    widener = dataclasses.replace(batch.groups[3].group, prompt_token_ids=long_prompt)
    score = dataclasses.replace(batch.groups[0].scores[0], value=1.0)  # a group of one valid member has advantage 0
    wide = dataclasses.replace(batch.groups[3], group=widener, scores=(score, batch.groups[3].scores[1]))
    learner = make_learner(tokens_per_micro_batch=10_000)
    report = learner.prepare(batch_of(*batch.groups[:3], wide, *batch.groups[4:]))
    assert report.metrics["batch/padding_frac"] > 0.5
    n = report.num_samples
    (taken,) = raw_gradients(learner)
    assert_close({name: g * n / (n - 1) for name, g in taken.items()}, expected)


def test_gradient_checkpointing_changes_no_gradient(whole_batch_gradient, make_learner, raw_gradients):
    batch, expected = whole_batch_gradient
    learner = make_learner(gradient_checkpointing=True)
    learner.prepare(batch)
    assert_close(raw_gradients(learner)[0], expected, tolerance=1e-6)


def test_b103_groups_without_scores_leave_no_trace(make_learner, rollouts, batch_of, raw_gradients, weights_of):
    kept = [rollouts.group([1, 0, 1]) for _ in range(3)]
    dropped = [rollouts.group([None, None, None]) for _ in range(5)]
    learner = make_learner()
    learner.prepare(batch_of(*kept))
    (expected,) = raw_gradients(learner)
    learner = make_learner()
    report = learner.prepare(batch_of(dropped[0], kept[0], *dropped[1:4], kept[1], dropped[4], kept[2]))
    assert (report.num_samples, report.metrics["batch/num_invalid"]) == (9, 15)
    assert_close(raw_gradients(learner)[0], expected)

    before = weights_of(learner)
    assert learner.prepare(batch_of(*dropped)).num_mini_batches == 0
    report = learner.train()
    assert (report.num_optimizer_steps, report.moved) == (0, False)
    assert all(torch.equal(before[name], after) for name, after in weights_of(learner).items())


def test_truncated_completions_leave_loss_and_denominator_but_not_the_statistics(make_learner, rollouts, batch_of, raw_gradients):
    group = rollouts.group([1, 0, 0], lengths=[3, 4, 8])
    cut = dataclasses.replace(group.group.completions[2], finish=Finish.LENGTH)
    group = dataclasses.replace(group, group=dataclasses.replace(group.group, completions=(*group.group.completions[:2], cut)))
    learner = make_learner(mask_truncated=True)
    report = learner.prepare(batch_of(group))
    assert (report.num_samples, report.metrics["batch/num_truncated"], report.metrics["batch/num_loss_tokens"]) == (2, 1, 7)
    (taken,) = raw_gradients(learner)

    # Values (1, 0, 0): mean 1/3, unbiased deviation 1/sqrt(3), so A = 2/sqrt(3) and -1/sqrt(3); mean over two responses.
    loss = 0.0
    for completion, advantage in zip(group.group.completions[:2], (2 / math.sqrt(3), -1 / math.sqrt(3)), strict=True):
        ids = torch.tensor(np.concatenate([group.group.prompt_token_ids, completion.token_ids])).long()
        log_p = torch.log_softmax(start_model(learner)(ids[None]).logits[0], -1)
        start = len(group.group.prompt_token_ids)
        loss = loss - advantage * log_p[range(start - 1, len(ids) - 1), ids[start:]].mean() / 2
    names, parameters = zip(*start_model(learner).named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    assert_close(taken, expected)


_STARTS: dict = {}


def start_model(learner):
    path = learner.spec.model_path
    if path not in _STARTS:
        _STARTS[path] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return _STARTS[path]


def test_with_one_optimizer_step_the_ratio_is_exactly_one(make_learner, rollouts, batch_of):
    learner = make_learner()
    learner.prepare(batch_of(*[rollouts.group([1, 0, 1]) for _ in range(3)]))
    metrics = learner.train().metrics
    assert {metrics[f"ratio/{kind}_{sign}"] for kind in ("mean", "max") for sign in ("pos", "neg")} == {1.0}


@pytest.mark.parametrize(("values", "rate", "moved"), [([1, 0, 1], 0.1, True), ([1, 0, 1], 0.0, False), ([1, 1, 1], 0.1, False)])
def test_a_step_says_whether_it_moved_the_weights(values, rate, moved, make_learner, rollouts, batch_of, weights_of):
    learner = make_learner(learning_rate=rate)
    before = weights_of(learner)
    learner.prepare(batch_of(rollouts.group(values)))
    assert learner.train().moved is moved
    assert any(not torch.equal(before[name], now) for name, now in weights_of(learner).items()) is moved


def test_the_first_mini_batch_has_ratio_exactly_one_also_where_old_logp_is_computed(make_learner, rollouts, batch_of):
    learner = make_learner(num_passes=2, learning_rate=0.0, tokens_per_micro_batch=30)
    learner.prepare(batch_of(*[rollouts.group([1, 0, 1]) for _ in range(5)]))
    metrics = learner.train().metrics
    assert {metrics[f"ratio/{kind}_{sign}"] for kind in ("mean", "max") for sign in ("pos", "neg")} == {1.0}


def train_once(learner, batch, weights_of):
    learner.prepare(batch)
    learner.train()
    return weights_of(learner)


def test_aspo_is_grpo_bit_for_bit_in_one_step_and_only_there(make_learner, rollouts, batch_of, weights_of):
    batch = batch_of(*[rollouts.group([1, 0, 1, 0]) for _ in range(4)])

    def weights(algorithm, num_passes):
        return train_once(make_learner(algorithm=algorithm, num_passes=num_passes, optimizer=Optimizer.adamw), batch, weights_of)

    one = [weights(algorithm, 1) for algorithm in ("aspo", "grpo")]
    two = [weights(algorithm, 2) for algorithm in ("aspo", "grpo")]
    assert all(torch.equal(one[0][name], one[1][name]) for name in one[0])
    assert not any(torch.equal(two[0][name], two[1][name]) for name in two[0])


def rows_of(group):
    return [np.concatenate([group.group.prompt_token_ids, c.token_ids]) for c in group.group.completions]


def test_b91_the_good_sample_rises_and_the_bad_one_falls(make_learner, rollouts, batch_of):
    group = rollouts.group([1, 0], lengths=[6, 6], prompt_length=3)
    learner = make_learner(learning_rate=0.01)
    before = [scores[2:].sum() for scores in learner.score_tokens(rows_of(group), 1.0)]
    learner.prepare(batch_of(group))
    metrics = learner.train().metrics
    after = [scores[2:].sum() for scores in learner.score_tokens(rows_of(group), 1.0)]
    assert abs(metrics["update/loss"]) < 1e-6
    assert metrics["update/grad_norm"] > 0.1
    assert after[0] > before[0] + 1e-3
    assert after[1] < before[1] - 1e-3


def with_roll_logps(group, learner, temperature, change=lambda completion, logp: completion):
    """The group as an engine with the learner's start weights would have sampled it: its log-probabilities by plain transformers."""
    completions = []
    for row, completion in zip(rows_of(group), group.group.completions, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(start_model(learner)(torch.tensor(row[None]).long()).logits[0] / temperature, -1)
        start = len(group.group.prompt_token_ids)
        logp = log_p[range(start - 1, len(row) - 1), row[start:].astype(int)].numpy()
        completions.append(change(dataclasses.replace(completion, roll_logp=logp), logp))
    return dataclasses.replace(group, group=dataclasses.replace(group.group, completions=tuple(completions)))


def test_b88_a_step_at_temperature_07_with_unchanged_weights_has_ratio_one(make_learner, rollouts, batch_of):
    learner = make_learner(temperature=0.7, learning_rate=0.0, num_mini_batches=3)
    groups = [with_roll_logps(rollouts.group([1, 0, 1]), learner, 0.7) for _ in range(6)]
    learner.prepare(batch_of(*groups))
    metrics = learner.train().metrics
    assert metrics["mismatch/logp_absdiff_max"] < 1e-5
    assert metrics["mismatch/same_version"] < 1e-5
    assert max(metrics["ratio/max_pos"], metrics["ratio/max_neg"]) < 1 + 1e-5
    assert metrics["kl/old_new"] < 1e-9


def test_mismatch_is_told_apart_by_version(make_learner, rollouts, batch_of):
    """Tokens of version 2 are left as they are, older ones moved by 0.5 nats, mixed ones by 2."""

    def change(completion, logp):
        versions = np.where(np.arange(len(logp)) < 2, 1, 2).astype(np.int32)
        mixed = np.arange(len(logp)) >= 4
        moved = np.where(mixed, 2.0, np.where(versions < 2, 0.5, 0.0)).astype(np.float32)
        return dataclasses.replace(completion, versions=versions, mixed=mixed, roll_logp=logp - moved)

    learner = make_learner()
    group = with_roll_logps(rollouts.group([1, 0], lengths=[6, 5]), learner, 1.0, change)
    learner.prepare(batch_of(group, version=2))
    metrics = learner.train().metrics
    assert metrics["mismatch/same_version"] < 1e-5
    assert metrics["mismatch/older_version"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["mismatch/mixed"] == pytest.approx(2.0, abs=1e-5)


def test_mismatch_is_told_apart_by_how_many_versions_behind(make_learner, rollouts, batch_of):
    """Of a learner at version 12: one version behind is moved by 0.25 nats, two by 0.5, nine by 1; mixed ones by 2 on top. However the
    rows are packed, the means are the same."""
    made = np.array([3, 10, 11, 12, 11, 12], dtype=np.int32)
    mixed = np.arange(6) >= 4
    moved = np.select([made == 3, made == 10, made == 11], [1.0, 0.5, 0.25], 0.0) + 2.0 * mixed

    def change(completion, logp):
        n = len(logp)
        return dataclasses.replace(
            completion, versions=made[:n], mixed=mixed[:n], roll_logp=(logp - moved[:n]).astype(np.float32)
        )

    expected = {
        "older_version": (1 * 2 + 0.5 * 2 + 0.25 * 2) / 6,
        "older_version_lag_1": 0.25,
        "older_version_lag_2": 0.5,
        "older_version_lag_8_or_more": 1.0,
        "mixed": (2.25 * 2 + 2.0) / 3,
        "mixed_lag_0": 2.0,
        "mixed_lag_1": 2.25,
    }
    for budget in (1, 1000):
        learner = make_learner(tokens_per_micro_batch=budget)
        learner.prepare(batch_of(with_roll_logps(rollouts.group([1, 0], lengths=[6, 5]), learner, 1.0, change), version=12))
        metrics = learner.train().metrics
        found = {name.removeprefix("mismatch/"): value for name, value in metrics.items() if "mismatch/" in name}
        assert {name: value for name, value in found.items() if "lag_" in name or name in expected} == pytest.approx(
            expected, abs=1e-5
        )


POISON = """
import torch
from learner.surrogates import Surrogate, grpo

calls = 0

def poisoned(tokens, *, first: int, last: int):
    global calls
    calls += 1
    plain = grpo(tokens)
    bad = torch.nan if first <= calls <= last else 1.0
    return Surrogate(factor=plain.factor * bad, value=plain.value, regions=plain.regions)
"""


@pytest.fixture
def poison(tmp_path):
    """Name of a surrogate whose factor is NaN in its first .. last call; a fresh count every time."""
    made = []

    def make():
        made.append(tmp_path / f"poison_{len(made)}.py")
        made[-1].write_text(POISON)
        return f"{made[-1]}:poisoned"

    return make


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, Dtype.float32), (1, Dtype.float32), (2, Dtype.float32), (3, Dtype.float32), (1, Dtype.bfloat16)]
)
def test_b93_a_nan_step_is_skipped_counted_and_leaves_weights_and_moments(
    stage, dtype, make_learner, rollouts, batch_of, poison, weights_of
):
    batches = [batch_of(rollouts.group([1, 0, 1]), step=i) for i in range(4)]

    def run(first, last, numbers):
        settings = {"zero_stage": stage, "dtype": dtype, "optimizer": Optimizer.adamw, "learning_rate": 0.01}
        learner = make_learner(algorithm=poison(), algorithm_params={"first": first, "last": last}, **settings)
        weights, skipped = [], []
        for number in numbers:
            learner.prepare(batches[number])
            skipped.append(learner.train().metrics["update/skipped_nonfinite"])
            weights.append(weights_of(learner))
        return weights, skipped

    with_nan, skipped = run(3, 3, [0, 1, 2, 3])
    without, _ = run(0, 0, [0, 1, 3])
    assert skipped == [0, 0, 1, 0]
    assert all(torch.equal(with_nan[1][name], with_nan[2][name]) for name in with_nan[1])
    # Moments and their step count are untouched: the next step is that of a run which never saw the bad batch.
    assert all(torch.equal(with_nan[3][name], without[2][name]) for name in without[2])
    assert not any(torch.equal(with_nan[3][name], with_nan[2][name]) for name in without[2] if "norm" not in name)


def test_b93_a_streak_of_nan_steps_stops_the_run_with_good_weights(make_learner, rollouts, batch_of, poison, weights_of):
    learner = make_learner(algorithm=poison(), algorithm_params={"first": 2, "last": 99}, max_skipped_steps=2)
    good = train_once(learner, batch_of(rollouts.group([1, 0])), weights_of)
    for _ in range(2):
        learner.prepare(batch_of(rollouts.group([1, 0])))
        report = learner.train()
        assert (report.num_skipped, report.moved) == (1, False)
    learner.prepare(batch_of(rollouts.group([1, 0])))
    with pytest.raises(NonFiniteError, match=r"3 optimizer steps in a row.*max_skipped_steps=2"):
        learner.train()
    assert all(torch.equal(good[name], now) for name, now in weights_of(learner).items())
    assert all(w.isfinite().all() for w in good.values())


def test_clipping_sees_the_whole_gradient(make_learner, rollouts, batch_of, weights_of):
    """With SGD the weights move by learning rate x clipped norm, the same at every stage."""
    batch = mixed_batch(rollouts, batch_of)
    for stage in (0, 1, 2, 3):
        learner = make_learner(zero_stage=stage, max_grad_norm=0.05, learning_rate=0.1, tokens_per_micro_batch=24)
        before = weights_of(learner)
        learner.prepare(batch)
        assert learner.train().metrics["update/grad_norm"] > 1
        moved = math.sqrt(sum(((after - before[name]) ** 2).sum().item() for name, after in weights_of(learner).items()))
        assert moved == pytest.approx(0.1 * 0.05, rel=1e-3)


def test_bfloat16_keeps_float32_master_weights_that_move(make_learner, rollouts, batch_of, weights_of):
    import deepspeed

    learner = make_learner(zero_stage=1, dtype=Dtype.bfloat16, optimizer=Optimizer.adamw, learning_rate=1e-6)
    named = dict(learner.model.hf.named_parameters())
    masters = {name: deepspeed.utils.safe_get_full_fp32_param(p).clone() for name, p in named.items()}
    weights = train_once(learner, batch_of(*[rollouts.group([1, 0, 1]) for _ in range(3)]), weights_of)
    moved = torch.cat([(deepspeed.utils.safe_get_full_fp32_param(p) - masters[name]).flatten() for name, p in named.items()])
    # Adam's first step is the learning rate for every weight with a gradient: far below what bfloat16 can add to a weight near 0.2.
    assert moved.dtype == torch.float32
    assert moved.abs().median().item() == pytest.approx(1e-6, rel=0.1)
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, Dtype.float32), (1, Dtype.float32), (1, Dtype.bfloat16), (2, Dtype.float32), (3, Dtype.float32)]
)
def test_b147_a_loaded_learner_goes_on_bit_for_bit(stage, dtype, make_learner, rollouts, batch_of, weights_of, tmp_path):
    batches = [batch_of(*[rollouts.group([1, 0, 1]) for _ in range(4)], step=i) for i in range(5)]
    settings = {
        "zero_stage": stage,
        "dtype": dtype,
        "optimizer": Optimizer.adamw,
        "schedule": Schedule.linear,
        "warmup_steps": 4,
        "num_mini_batches": 2,
        "learning_rate": 0.01,
    }

    def go(learner, numbers):
        rates = []
        for number in numbers:
            learner.prepare(batches[number])
            rates.append(learner.train().metrics["update/learning_rate"])
        return rates

    learner = make_learner(**settings)
    go(learner, [0, 1, 2])
    learner.save(tmp_path)
    unbroken = go(learner, [3, 4])
    expected = weights_of(learner)

    resumed = make_learner(**settings)
    resumed.load(str(tmp_path))
    assert go(resumed, [3, 4]) == unbroken == pytest.approx([0.01 * (1 - 4 / 6), 0.0], abs=1e-12)
    assert resumed.engine.num_steps == 10
    assert all(torch.equal(expected[name], now) for name, now in weights_of(resumed).items())


def test_load_says_what_is_missing(make_learner, tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        make_learner().load(tmp_path)
    make_learner(zero_stage=1).save(tmp_path)
    with pytest.raises(ValueError, match=r"saved with model.dtype=float32, this run has bfloat16"):
        make_learner(zero_stage=1, dtype=Dtype.bfloat16).load(tmp_path)
    with pytest.raises(ValueError, match=r"saved with learner.optimizer.name=sgd, this run has adamw"):
        make_learner(optimizer=Optimizer.adamw).load(tmp_path)
    with pytest.raises(ValueError, match=r"another model: only one of the two has lm_head.weight"):
        make_learner("llama").load(tmp_path)


def test_scored_tokens_are_those_of_plain_transformers(make_learner, rollouts):
    learner = make_learner(tokens_per_micro_batch=30)
    rows = [rollouts.rng.integers(4, 128, n, dtype=np.int32) for n in (7, 2, 12, 5, 9)]
    for row, scores in zip(rows, learner.score_tokens(rows, 0.7), strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(start_model(learner)(torch.tensor(row[None]).long()).logits[0] / 0.7, -1)
        np.testing.assert_allclose(scores, log_p[range(len(row) - 1), row[1:].astype(int)].numpy(), atol=1e-5)
