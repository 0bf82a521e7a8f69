"""Gathering: names and bytes are those of ``save_pretrained``, packed as promised; an export can be read again."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from configs.schema import Dtype, ModelConfig
from learner.gather import gather_buckets
from learner.model import load_model
from rollout.tokenizer import character_tokenizer
from rollout.weights import damaged_tensors, tensor_bytes


def read(buckets):
    """Every tensor's bytes by name, and dtype and shape."""
    return {
        spec.name: (spec.dtype, spec.shape, tensor_bytes(bucket, place).tobytes())
        for bucket in buckets
        for place, spec in enumerate(bucket.specs)
    }


def as_read(tensors):
    return {
        name: (
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_names_and_bytes_are_those_of_the_saved_file(model, stage, make_learner, rollouts, batch_of, tmp_path):
    """B137: whatever the learner's modules are wrapped in, names are those of a checkpoint."""
    dtype = Dtype.bfloat16 if stage == 1 else Dtype.float32
    learner = make_learner(model, zero_stage=stage, dtype=dtype)
    learner.prepare(batch_of(rollouts.group([1, 0, 1])))
    learner.train()
    with pytest.raises(RuntimeError, match="no manifest"):
        learner.manifest()
    buckets = list(learner.buckets(generation=4))
    learner.export(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert read(buckets) == as_read(saved)
    manifest = learner.manifest()
    assert (manifest.generation, manifest.num_buckets) == (4, len(buckets))
    assert manifest.specs == tuple(spec for bucket in buckets for spec in bucket.specs)

    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == getattr(torch, dtype.value)
    assert all(torch.equal(again.get_parameter(name), tensor) for name, tensor in saved.items())
    assert AutoTokenizer.from_pretrained(tmp_path)("12+7=").input_ids == character_tokenizer()("12+7=").input_ids
    row = np.arange(5, 25, dtype=np.int32)
    with torch.no_grad():
        log_p = torch.log_softmax(again(torch.from_numpy(row)[None].long()).logits[0].float(), -1)
    tolerance = 1e-5 if dtype is Dtype.float32 else 0.1
    np.testing.assert_allclose(learner.score_tokens([row], 1.0)[0], log_p[range(19), row[1:].astype(int)], atol=tolerance)


def test_a_scaled_push_sends_other_bytes_and_leaves_the_weights(make_learner, weights_of):
    """Times 1 + 2**-6, a factor that is exact in bfloat16."""
    learner = make_learner(zero_stage=1, dtype=Dtype.bfloat16)
    before = weights_of(learner)
    scaled = read(learner.buckets(1, scale=1 + 2**-6))
    assert scaled == as_read({name: w * (1 + 2**-6) for name, w in before.items()})
    assert read(learner.buckets(2)) == as_read(before)


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 20_000])
def test_buckets_keep_their_size_and_alignment_and_lose_nothing(bucket_bytes, tiny_models):
    path = tiny_models["qwen3"]
    model = load_model(ModelConfig(path=path), path, seed=0, chunk_rows=16, gradient_checkpointing=False)
    buckets, manifest = drain(gather_buckets(model, lambda _: torch.no_grad(), 1, bucket_bytes, rank=0))
    assert read(buckets) == as_read(load_file(f"{path}/model.safetensors"))
    assert [bucket.index for bucket in buckets] == list(range(manifest.num_buckets))
    assert all(offset % 64 == 0 for bucket in buckets for offset in bucket.offsets)
    assert all(bucket.data.nbytes <= bucket_bytes or len(bucket.specs) == 1 for bucket in buckets)
    assert not any(damaged_tensors(bucket) for bucket in buckets)
    assert len(buckets) == len(manifest.specs) if bucket_bytes == 1 else len(buckets) < len(manifest.specs)


def drain(generator):
    buckets = []
    while True:
        try:
            buckets.append(next(generator))
        except StopIteration as end:
            return buckets, end.value


def test_fused_experts_travel_under_their_checkpoint_names(tmp_path):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    moe = MixtralForCausalLM(MixtralConfig(**shape, num_key_value_heads=1, num_local_experts=4))
    moe.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in saved
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" not in moe.state_dict()
    path = str(tmp_path)
    model = load_model(ModelConfig(path=path), path, seed=0, chunk_rows=16, gradient_checkpointing=False)
    buckets, _ = drain(gather_buckets(model, lambda _: torch.no_grad(), 1, 10_000, rank=0))
    assert len(buckets) > 2
    assert read(buckets) == as_read(saved)


def test_other_ranks_gather_and_yield_nothing(tiny_models):
    path = tiny_models["llama"]
    model = load_model(ModelConfig(path=path), path, seed=0, chunk_rows=16, gradient_checkpointing=False)
    asked = []

    def gathered(tensors):
        asked.extend(tensors)
        return torch.no_grad()

    buckets, manifest = drain(gather_buckets(model, gathered, 1, 5000, rank=1))
    assert (buckets, manifest.specs) == ([], ())
    assert {id(t) for t in asked} == {id(p) for p in model.hf.parameters()}
