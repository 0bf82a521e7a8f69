"""Learner groups: two ranks at any ZeRO stage train, save and send what one rank does.

Run by pytest, this file starts itself as two processes (see ``run_group`` in conftest.py), which go through all of ``cases``
together and leave their results; the tests compare them with one rank at stage 0, which ``test_learner.py`` holds against a plain
implementation.
"""

import importlib.util
import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Dtype, KlConfig, KlKind, Optimizer, Reference, Schedule
from learner import batching, deepspeed_engine, saving
from rollout.weights import tensor_bytes

pytestmark = pytest.mark.timeout(400)

STAGES = (0, 1, 2, 3)
LAYOUTS = [(stage, Dtype.float32) for stage in STAGES] + [(stage, Dtype.bfloat16) for stage in (1, 2, 3)]
TRAJECTORIES = {"llama": 24, "qwen3": 1, "gpt2": 10_000}  # model: tokens a micro-batch
ADAMW = {"optimizer": Optimizer.adamw, "learning_rate": 1e-3}
WITH_KL = {"reference": Reference.frozen, "kl": KlConfig(kind=KlKind.k3, beta=0.5)}


_SPEC = importlib.util.spec_from_file_location("learner_conftest", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conftest)

from learner.learner import Learner, RolloutBatch  # noqa: E402  after conftest has chosen DeepSpeed's accelerator


class Tools:
    """Learners of one rank of a group, and batches."""

    raw_gradients = staticmethod(conftest.collect_raw_gradients)
    weights = staticmethod(conftest.copy_weights)

    def __init__(self, models, rank=0, world_size=1):
        self.models, self.rank, self.world_size = models, rank, world_size

    def learner(self, model, **settings):
        return Learner(conftest.learner_spec(self.models[model], **settings), self.rank, self.world_size)

    def batches(self):
        """Three of unequal groups; the second has one sample in all, so that one of two ranks has none."""
        rollouts = conftest.Rollouts(np.random.default_rng(3))
        first = [rollouts.group(values) for values in ([1, 0, 0], [0, 1, None, 1], [0.5, 0, 1], [0, 0.25, 1, 1, 0])]
        single = [rollouts.group([1, 0], lengths=[7, 0])]
        last = [rollouts.group(values) for values in ([1, 0], [0, 1, 0, 0, 1, 1])]
        return [RolloutBatch(step, 0, tuple(groups)) for step, groups in enumerate((first, single, last))]

    def batch(self, lengths, prompt_length=3, step=0):
        """One group of the given lengths, right and wrong in turn."""
        rollouts = conftest.Rollouts(np.random.default_rng(5))
        return RolloutBatch(step, 0, (rollouts.group([i % 2 for i in range(len(lengths))], lengths, prompt_length),))


def state_of(learner):
    """Masters and moments by parameter and part, whole."""
    named = dict(learner.model.hf.named_parameters())
    states = learner.engine.states(list(named.values()))
    return {f"{name}/{part}": t.clone() for name, state in zip(named, states, strict=True) for part, t in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- what the two processes go through ------------------------------------------------------------------------------


def trajectory(tools, stage, model, budget, **settings):
    """Three optimizer steps: gradients, weights and reports."""
    learner = tools.learner(model, zero_stage=stage, tokens_per_micro_batch=budget, **settings)
    start, gradients, metrics = tools.weights(learner), [], []
    for batch in tools.batches():
        metrics.append(learner.prepare(batch).metrics)
        gradients += tools.raw_gradients(learner)
    return {"start": start, "gradients": gradients, "weights": tools.weights(learner), "metrics": metrics}


def nan_on_one_rank(tools, stage, dtype):
    learner = tools.learner("llama", zero_stage=stage, dtype=dtype, **ADAMW)
    first, _, last = tools.batches()
    learner.prepare(first)
    learner.train()
    before, weights = state_of(learner), tools.weights(learner)
    learner.prepare(last)
    if tools.rank == 1:
        learner._steps[0][0].advantage.fill_(math.nan)
    report = learner.train()
    untouched = same(before, state_of(learner)) and same(weights, tools.weights(learner))
    learner.prepare(last)
    learner._stopwatch.read = lambda: [1.0, 3.0][tools.rank]
    again = learner.train()
    return {
        "metrics": again.metrics,
        "skipped": report.num_skipped,
        "moved": report.moved,
        "untouched": untouched,
        "skipped again": again.num_skipped,
        "moved again": again.moved and not same(before, state_of(learner)),
    }


def b129(tools, hands):
    """Rows of 10, 10, 10, 10 for rank 0 and of 40, 40, 2, 2 for rank 1 (a row of one token has nothing to score)."""
    learner = tools.learner("qwen3", zero_stage=2, tokens_per_micro_batch=45)
    passes = {"forward": 0, "backward": 0}

    def counted(name, call):
        def count(*args, **kwargs):
            passes[name] += 1
            return call(*args, **kwargs)

        return count

    for name in passes:
        setattr(learner.engine, name, counted(name, getattr(learner.engine, name)))
    deal = batching.deal
    batching.deal = lambda costs, num_ranks: hands
    try:
        metrics = learner.prepare(tools.batch([9, 9, 9, 9, 39, 39, 1, 1], prompt_length=1)).metrics
    finally:
        batching.deal = deal
    return {"gradients": tools.raw_gradients(learner), "passes": passes, "metrics": metrics}


def b132(tools, stage):
    """Updates of 2, 3 and 1 micro-batches on each of two ranks."""
    schedule = {"schedule": Schedule.linear, "total_optimizer_steps": 4, "warmup_steps": 0, "learning_rate": 0.1}
    learner = tools.learner("llama", zero_stage=stage, tokens_per_micro_batch=1, **schedule)
    rates, counts, gradients = [], [], []
    for step, num_rows in enumerate((4, 6, 2)):
        counts.append(learner.prepare(tools.batch([4] * num_rows, step=step)).metrics["batch/num_micro_batches"])
        gradients += tools.raw_gradients(learner)
        rates.append(learner.engine._optimizer.param_groups[0]["lr"])
    return {"rates": rates, "counts": counts, "gradients": gradients, "steps": learner.engine.num_steps}


def with_reference(tools, stage):
    """The second batch meets weights that have left the reference."""
    learner = tools.learner("llama", zero_stage=stage, tokens_per_micro_batch=24, **WITH_KL)
    first, _, last = tools.batches()
    learner.prepare(first)
    learner.train()
    learner.prepare(last)
    ref_logps = [micro.ref_logp.clone() for micro in learner._steps[0]]
    held = sum(p.ds_tensor.numel() for p in learner._reference.parameters()) if stage == 3 else None
    return {"ref_logps": ref_logps, "gradients": tools.raw_gradients(learner), "held": held}


def send_and_export(tools, stage, folder):
    learner = tools.learner("llama", zero_stage=stage, export_shard_mib=1 / 32)
    learner.prepare(tools.batches()[0])
    learner.train()
    folder.mkdir(exist_ok=True)
    sent = {spec.name: tensor_bytes(b, i).tobytes() for b in learner.buckets(1) for i, spec in enumerate(b.specs)}
    scaled = {spec.name: tensor_bytes(b, i).tobytes() for b in learner.buckets(2, 2.0) for i, spec in enumerate(b.specs)}
    error = fail_on_one_rank(tools, learner.export, rank=0)
    files = learner.export(folder)
    rows = [np.arange(4, 4 + n, dtype=np.int32) for n in (9, 3, 20)]
    scores = learner.score_tokens(rows, 0.7)
    return {"sent": sent, "scaled": scaled, "error": error, "files": files, "scores": scores, "weights": tools.weights(learner)}


def go_on(learner, tools):
    """Three steps; what they ended at."""
    for batch in tools.batches():
        learner.prepare(batch)
        learner.train()
    return state_of(learner) | {f"{name}/weight": w for name, w in tools.weights(learner).items()}


def fail_on_one_rank(tools, write, rank):
    """Has ``rank`` write into a folder that does not exist, at the first of many files; the name of the error here."""
    file_bytes, saving.STATE_FILE_BYTES = saving.STATE_FILE_BYTES, 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            write(Path(folder) / "gone" if tools.rank == rank else folder)
        except Exception as error:
            return type(error).__name__
        finally:
            saving.STATE_FILE_BYTES = file_bytes
    return None


def save_and_go_on(tools, stage, dtype, folder):
    """Saves in the middle of a run and goes on; resumes there in the same layout. Before that a rank of two fails to save."""
    folder.mkdir(exist_ok=True)
    settings = {"zero_stage": stage, "dtype": dtype, **ADAMW}
    learner = tools.learner("odd", **settings)
    go_on(learner, tools)
    error = fail_on_one_rank(tools, learner.save, rank=1)
    files, saved = learner.save(folder), state_of(learner)
    unbroken = go_on(learner, tools)
    resumed = tools.learner("odd", **settings)
    resumed.load(folder)
    loaded = state_of(resumed)
    resumed_to = go_on(resumed, tools)
    return {"error": error, "files": files, "saved": saved, "loaded": loaded, "unbroken": unbroken, "resumed": resumed_to}


def load_and_go_on(tools, stage, dtype, folder):
    learner = tools.learner("odd", zero_stage=stage, dtype=dtype, **ADAMW)
    learner.load(folder)
    return {"loaded": state_of(learner), "steps": learner.engine.num_steps, "after": go_on(learner, tools)}


def cases(folder):
    """Every case by name; each takes the tools."""
    named = {}
    for stage in STAGES:
        for model, budget in TRAJECTORIES.items():
            named[f"sgd {model} {stage}"] = partial(trajectory, stage=stage, model=model, budget=budget)
        named[f"adamw {stage}"] = partial(trajectory, stage=stage, model="qwen3", budget=40, **ADAMW)
    for stage, dtype in LAYOUTS:
        key = f"{stage} {dtype.value}"
        named[f"nan {key}"] = partial(nan_on_one_rank, stage=stage, dtype=dtype)
        named[f"save {key}"] = partial(save_and_go_on, stage=stage, dtype=dtype, folder=folder / f"two {key}")
        named[f"load {key}"] = partial(load_and_go_on, stage=stage, dtype=dtype, folder=folder / f"one {dtype.value}")
    named["b129"] = partial(b129, hands=[[0, 1, 2, 3], [4, 5, 6, 7]])
    for stage in (1, 2):
        named[f"b132 {stage}"] = partial(b132, stage=stage)
    for stage in (0, 2, 3):
        named[f"reference {stage}"] = partial(with_reference, stage=stage)
    for stage in (1, 3):
        named[f"send {stage}"] = partial(send_and_export, stage=stage, folder=folder / f"export {stage}")
    return named


def main(folder, rank, world_size):
    split_everything()
    tools = Tools(json.loads((folder / "models.json").read_text()), rank, world_size)
    torch.save({name: case(tools) for name, case in cases(folder).items()}, folder / f"rank-{rank}.pt")


def split_everything():
    """DeepSpeed would keep every parameter of so small a model whole at stage 3."""
    config = deepspeed_engine._deepspeed_config

    def changed(*args):
        settings = config(*args)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return settings

    deepspeed_engine._deepspeed_config = changed


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))


# ---- what must be true of it ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tiny_models):
    """The tools of a single rank in this process."""
    return Tools(tiny_models)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def saved_by_one(one, folder):
    """States that a single rank saved, in the dtypes, at stage 1; what it held and what it went on to."""
    return {dtype: save_and_go_on(one, 1, dtype, folder / f"one {dtype.value}") for dtype in (Dtype.float32, Dtype.bfloat16)}


@pytest.fixture(scope="module")
def two(tiny_models, folder, saved_by_one):
    """The results of both ranks, by case."""
    (folder / "models.json").write_text(json.dumps(tiny_models))
    results = conftest.run_group(__file__, folder, 2, timeout_s=300)
    return {name: [result[name] for result in results] for name in results[0]}


@pytest.fixture(scope="module")
def expected(one):
    """The trajectories of one rank at stage 0."""
    by_model = {model: trajectory(one, 0, model, budget) for model, budget in TRAJECTORIES.items()}
    return by_model | {"adamw": trajectory(one, 0, "qwen3", 40, **ADAMW)}


def assert_close(got, expected, tolerance=1e-5):
    """Within ``tolerance`` of each tensor's largest entry."""
    assert got.keys() == expected.keys()
    for name in got:
        largest = expected[name].abs().max().item()
        assert largest > 0, name
        error = (got[name].double() - expected[name].double()).abs().max().item()
        assert error <= tolerance * largest, f"{name}: off by {error / largest:.1e} of its largest entry"


def check_trajectory(got, expected):
    assert len(got["gradients"]) == len(expected["gradients"]) == 3
    assert_close(got["gradients"][0], expected["gradients"][0])
    for later, wanted in zip(got["gradients"][1:], expected["gradients"][1:], strict=True):
        assert_close(later, wanted, tolerance=5e-5)  # from weights that may already differ in the last bits
    gaps = {name: (w - expected["weights"][name]).abs().max().item() for name, w in got["weights"].items()}
    assert max(gaps.values()) <= 3e-6, gaps
    assert max((w - got["start"][name]).abs().max().item() for name, w in got["weights"].items()) > 0.05


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", TRAJECTORIES)
def test_two_ranks_make_the_gradients_and_weights_of_one(model, stage, two, expected):
    for got in two[f"sgd {model} {stage}"]:
        check_trajectory(got, expected[model])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", TRAJECTORIES)
def test_one_rank_makes_them_at_every_stage(model, stage, one, expected):
    check_trajectory(trajectory(one, stage, model, 33), expected[model])


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_makes_the_update_of_one_rank(stage, two, expected, one):
    wanted = expected["adamw"]
    for got in [*two[f"adamw {stage}"], trajectory(one, stage, "qwen3", 24, **ADAMW)]:
        for name, start in wanted["start"].items():
            update = wanted["weights"][name] - start
            assert (got["weights"][name] - wanted["weights"][name]).norm() < 0.01 * update.norm(), name
            assert update.norm() > 0


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_report_the_same(stage, two):
    first, second = two[f"sgd qwen3 {stage}"]
    assert first["metrics"] == second["metrics"]
    assert [m["batch/num_samples"] for m in first["metrics"]] == [14, 1, 8]
    assert first["metrics"][1]["batch/rank_imbalance"] == 2  # one rank has the only sample
    first, second = two[f"nan {stage} float32"]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["time/rank_imbalance"] == 1.5  # forwards of 1 and 3 seconds


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_nan_on_one_rank_skips_the_step_on_all_and_changes_nothing(stage, dtype, two):
    for got in two[f"nan {stage} {dtype.value}"]:
        outcome = {name: value for name, value in got.items() if name != "metrics"}
        assert outcome == {"skipped": 1, "moved": False, "untouched": True, "skipped again": 0, "moved again": True}


def test_b127_a_single_sample_is_trained_exactly_once(two, expected):
    """The second batch of every trajectory; two ranks would train it twice, or half, if they did not know of each other."""
    for stage in STAGES:
        for got in two[f"sgd llama {stage}"]:
            assert got["metrics"][1]["batch/num_samples"] == 1
            assert_close(got["gradients"][1], expected["llama"]["gradients"][1], tolerance=5e-5)


def test_b129_padding_micro_batches_keep_ranks_in_step_and_add_nothing(two, one):
    wanted = b129(one, [[0, 1, 2, 3, 4, 5, 6, 7]])
    for got in two["b129"]:
        assert got["passes"] == {"forward": 3, "backward": 3}
        assert_close(got["gradients"][0], wanted["gradients"][0])
        assert got["metrics"]["batch/rank_imbalance"] == pytest.approx(84 / 62)  # tokens: 40 and 84
        assert got["metrics"]["batch/padding_frac"] == pytest.approx(2 / 126)  # two padding micro-batches of one token


@pytest.mark.parametrize("stage", [1, 2])
def test_b132_updates_of_two_three_and_one_micro_batches(stage, two, one):
    wanted = b132(one, 0)
    for got in two[f"b132 {stage}"]:
        assert got["counts"] == [2, 3, 1]
        assert got["rates"] == pytest.approx([0.075, 0.05, 0.025])  # one move of the schedule for each update
        assert got["steps"] == 3
        for taken, gradient in zip(got["gradients"], wanted["gradients"], strict=True):
            assert_close(taken, gradient, tolerance=5e-5)


def test_the_reference_that_is_split_gives_the_numbers_of_the_whole_copy(two, one):
    wanted = with_reference(one, 0)
    for rank in (0, 1):
        whole, split = two["reference 2"][rank], two["reference 3"][rank]
        assert len(whole["ref_logps"]) > 1
        assert all(torch.equal(a, b) for a, b in zip(whole["ref_logps"], split["ref_logps"], strict=True))
        assert split["held"] == sum(w.numel() for w in split["gradients"][0].values()) / 2
        for stage in (0, 2, 3):
            assert_close(two[f"reference {stage}"][rank]["gradients"][0], wanted["gradients"][0], tolerance=5e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_sent_and_exported_are_those_of_the_model(stage, two, one, folder):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    first, second = two[f"send {stage}"]
    assert (second["sent"], second["scaled"], second["files"]) == ({}, {}, [])
    weights = first["weights"]
    assert same(weights, second["weights"])
    assert first["sent"] == {name: w.numpy().tobytes() for name, w in weights.items()}
    assert first["scaled"] == {name: (2 * w).numpy().tobytes() for name, w in weights.items()}
    exported = folder / f"export {stage}"
    shards = sorted(path.name for path in exported.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 2
    held = {name: tensor for shard in shards for name, tensor in load_file(exported / shard).items()}
    assert same(held, weights)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert {name: shard for shard in shards for name in load_file(exported / shard)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(w.numel() * 4 for w in weights.values())
    assert sorted(first["files"]) == sorted(path.name for path in exported.iterdir())
    again = AutoModelForCausalLM.from_pretrained(exported)
    assert same(dict(again.named_parameters()), weights)
    for row, mine, other in zip((9, 3, 20), first["scores"], second["scores"], strict=True):
        ids = torch.arange(4, 4 + row)
        with torch.no_grad():
            log_p = torch.log_softmax(again(ids[None]).logits[0] / 0.7, -1)
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, log_p[range(row - 1), ids[1:]], atol=1e-5)


def test_a_rank_that_cannot_write_leaves_no_other_waiting(two):
    """It fails at the first of many files, and the others still gather with it to the end; what follows is as if nothing had been."""
    for stage, dtype in LAYOUTS:
        first, second = two[f"save {stage} {dtype.value}"]
        assert (first["error"], second["error"]) == (None, "SafetensorError")
    for stage in (1, 3):
        first, second = two[f"send {stage}"]
        assert (first["error"], second["error"]) == ("SafetensorError", None)


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_a_group_that_resumes_in_its_layout_goes_on_bit_for_bit(stage, dtype, two):
    first, second = two[f"save {stage} {dtype.value}"]
    for got in (first, second):
        assert same(got["saved"], got["loaded"])
        assert same(got["unbroken"], got["resumed"])
        assert not same(got["saved"], {name: t for name, t in got["unbroken"].items() if name in got["saved"]})
    assert first["files"] == ["rank-000-of-002-part-000.safetensors", "learner.json"]
    assert second["files"] == ["rank-001-of-002-part-000.safetensors"]


def check_next_steps(got, unbroken, saved, dtype):
    """The steps that follow are those of the run that was not broken, up to the order of sums."""
    for name in saved:
        if name.endswith("/master"):
            update = unbroken[name] - saved[name]
            tolerance = 0.01 if dtype is Dtype.float32 else 0.1
            assert (got[name] - unbroken[name]).norm() < tolerance * update.norm(), name


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_what_two_ranks_saved_one_rank_loads_at_another_stage(stage, dtype, two, one, folder):
    saved = two[f"save {stage} {dtype.value}"][0]
    others = [s for s, d in LAYOUTS if d is dtype and s != stage]
    got = load_and_go_on(one, others[stage % len(others)], dtype, folder / f"two {stage} {dtype.value}")
    assert same(got["loaded"], saved["saved"])
    assert got["steps"] == 3
    check_next_steps(got["after"], saved["unbroken"], saved["saved"], dtype)


@pytest.mark.parametrize(("stage", "dtype"), LAYOUTS)
def test_what_one_rank_saved_two_ranks_load(stage, dtype, two, saved_by_one):
    saved = saved_by_one[dtype]
    for got in two[f"load {stage} {dtype.value}"]:
        assert same(got["loaded"], saved["saved"])
        assert got["steps"] == 3
        check_next_steps(got["after"], saved["unbroken"], saved["saved"], dtype)
