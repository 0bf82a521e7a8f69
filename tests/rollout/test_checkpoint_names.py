"""A push against the file: an engine that was pushed to scores like one that loaded the folder of ``save_pretrained`` itself.

vLLM's own loading of the folder is the independent implementation. Tied embeddings and fused experts are where names differ
between what a model holds, what a checkpoint says, and what an engine fills.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from rollout.engine import Engine, OnSwap, PushError, TokenScores, engine_environment

os.environ.update(engine_environment(num_threads=int(os.environ.get("OMP_NUM_THREADS", "1"))))  # before vLLM is imported
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from safetensors import safe_open
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.schema import ModelConfig
from learner.gather import gather_buckets
from learner.model import load_model
from rollout.tokenizer import character_tokenizer
from rollout.vllm_in_process import EngineSpec, make_engine
from rollout.weights import Bucket, Manifest, tensor_bytes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least the CPU attention kernel takes
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # far from uniform, so that a wrong tensor shows
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,  # not a multiple of 32: the CPU kernel pads it
    "norm_topk_prob": True,
}
RANDOM = np.random.default_rng(0)
ROWS = [RANDOM.integers(3, 100, size=length).astype(np.int32) for length in (2, 17, 40, 90)]


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    if kind == "tied llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False))


@contextmanager
def engine(folder: Path, load_format: str) -> Iterator[Engine]:
    made = make_engine(
        EngineSpec(
            name=load_format,
            model_path=str(folder),
            tokenizer_path=str(folder),
            dtype="float32",
            seed=0,
            max_model_tokens=96,
            max_running=4,
            cache_gib=0.05,
            gpu_memory_share=0.5,
            tensor_parallel_size=1,
            on_swap=OnSwap.RECOMPUTE,
            trust_remote_code=False,
            load_format=load_format,
        )
    )
    try:
        yield made
    finally:
        made.close()


def gather(folder: Path, generation: int) -> tuple[list[Bucket], Manifest]:
    """The learner's own buckets of the model in ``folder``; small, so that there are several."""
    model = load_model(ModelConfig(path=str(folder)), str(folder), seed=0, chunk_rows=16, gradient_checkpointing=False)
    buckets = []
    generator = gather_buckets(model, lambda _: nullcontext(), generation, 40_000, rank=0)
    while True:
        try:
            buckets.append(next(generator))
        except StopIteration as end:
            return buckets, end.value


def push(to: Engine, version: int, buckets: list[Bucket]) -> None:
    for bucket in buckets:
        to.receive(bucket)
    specs = tuple(spec for bucket in buckets for spec in bucket.specs)
    to.swap(version, Manifest(buckets[0].generation, len(buckets), specs))


def largest_gap(scores: list[TokenScores], others: list[TokenScores]) -> float:
    return max(float(np.abs(one.logp - other.logp).max()) for one, other in zip(scores, others, strict=True))


def without(buckets: list[Bucket], name: str, generation: int) -> list[Bucket]:
    """The same buckets under another generation, one tensor less."""
    left = []
    for bucket in buckets:
        places = [place for place, spec in enumerate(bucket.specs) if spec.name != name]
        specs, offsets = tuple(bucket.specs[i] for i in places), tuple(bucket.offsets[i] for i in places)
        left.append(Bucket(generation, bucket.index, specs, offsets, bucket.data))
    return left


@pytest.mark.parametrize("kind", ["qwen3", "tied llama", "qwen3 moe"])
def test_a_push_equals_the_saved_folder_as_vllm_loads_it(kind: str, tmp_path: Path) -> None:
    make_model(kind).eval().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with engine(tmp_path, "auto") as loaded:
        expected = loaded.score_tokens(ROWS, 1.0)
    buckets, manifest = gather(tmp_path, 1)
    assert len(buckets) > 2
    with safe_open(tmp_path / "model.safetensors", "np") as saved:
        assert {spec.name for spec in manifest.specs} == set(saved.keys())
        for bucket in buckets:
            for place, spec in enumerate(bucket.specs):
                assert tensor_bytes(bucket, place).tobytes() == saved.get_tensor(spec.name).tobytes(), spec.name
    with engine(tmp_path, "dummy") as pushed:
        assert largest_gap(pushed.score_tokens(ROWS, 1.0), expected) > 0.5
        push(pushed, 0, buckets)
        assert largest_gap(pushed.score_tokens(ROWS, 1.0), expected) < 1e-6
        if kind == "qwen3 moe":
            for generation, part in enumerate(("gate_proj", "up_proj", "down_proj"), start=2):
                name = f"model.layers.1.mlp.experts.2.{part}.weight"
                with pytest.raises(PushError, match=rf"untouched.*missing {re.escape(name)}"):
                    push(pushed, 1, without(buckets, name, generation))
            assert largest_gap(pushed.score_tokens(ROWS, 1.0), expected) < 1e-6
        push(pushed, 1, without(buckets, "", generation=9))
        assert largest_gap(pushed.score_tokens(ROWS, 1.0), expected) < 1e-6
