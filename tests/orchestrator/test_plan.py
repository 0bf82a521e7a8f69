"""The plan's numbers against arithmetic worked by hand, its shapes against transformers, and every refusal's advice against itself."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion

from configs.compose import load_config
from configs.errors import ConfigError, InputError
from configs.schema import Attention, Config, Dtype, EmbeddedModel, ModelConfig, Placement
from configs.validate import check_values
from orchestrator.changes import smallest_change
from orchestrator.fitting import Here, fit, with_key
from orchestrator.footprint import GIB, LIVE_ELEMENTS, REDUCE_ELEMENTS, activation_bytes, completion_cache_bytes, learner_use
from orchestrator.job import DEFAULT_BATCHES_PER_STEP
from orchestrator.plan import VISITS_BOUND_BATCHES, Plan, count_prompts, describe, gpus_here, make_plan
from orchestrator.shapes import EMBEDDED_VOCAB, KNOWN, Shape, model_shape, read_shape
from rollout.tokenizer import VOCABULARY_SIZE

pytestmark = pytest.mark.timeout(120)

HERE = Here(num_gpus=0, memory_bytes=24 * GIB, cpus=2)


@cache
def config_of(*overrides: str) -> Config:
    return load_config(overrides)


def plan_of(*overrides: str, num_prompts: int | None = None) -> Plan:
    return make_plan(config_of(*overrides), HERE, num_prompts)


# ---- shapes ---------------------------------------------------------------------------------------------------------------------


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def qwen3(shape: Shape):
    """The transformers configuration of a shape of the table."""
    common = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }
    if shape.num_experts:
        experts = {"num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        return Qwen3MoeConfig(**common, **experts, moe_intermediate_size=shape.intermediate, intermediate_size=6144)
    return (Qwen3Config if shape.qk_norm else LlamaConfig)(**common, intermediate_size=shape.intermediate)


@pytest.mark.parametrize("name", [*KNOWN, "embedded"])
def test_parameters_are_those_of_transformers(name: str):
    shape = model_shape(ModelConfig(path=name))
    parameters = [p.numel() for p in on_meta(qwen3(shape)).parameters()]
    assert shape.num_parameters == sum(parameters)
    assert shape.largest_parameter == max(parameters)


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
}
FOLDERS = {
    "llama": LlamaConfig(**SMALL),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, head_dim=16),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_any_folder_is_counted_from_its_config(name: str, tmp_path: Path):
    FOLDERS[name].save_pretrained(tmp_path)
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    model = on_meta(FOLDERS[name])
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    state = {key: tensor for key, tensor in model.state_dict().items() if not (shape.tied and key == "lm_head.weight")}
    written = revert_weight_conversion(model, state)  # as save_pretrained does, and so a push
    assert shape.num_tensors == len(written)
    assert sorted(shape.layer_tensors() * 3 + shape.end_tensors()) == sorted(t.numel() for t in written.values())


def test_the_embedded_model_is_its_recipe_and_constants_are_those_of_the_run():
    assert EMBEDDED_VOCAB == VOCABULARY_SIZE
    assert VISITS_BOUND_BATCHES == DEFAULT_BATCHES_PER_STEP
    # Embedding 128 x 96; a layer: two norms, four square matrices, two norms of 32, three of 96 x 256; a last norm.
    assert model_shape(ModelConfig()).num_parameters == 12_288 + 3 * (192 + 4 * 9_216 + 64 + 3 * 24_576) + 96 == 344_928
    wide = EmbeddedModel(
        hidden_size=128, num_heads=4, num_kv_heads=2, num_layers=1, intermediate_size=100, tie_word_embeddings=False
    )
    # Queries and output 128 x 128, keys and values 128 x 64, norms of 32.
    layer = 256 + 2 * 16_384 + 2 * 8_192 + 64 + 3 * 12_800
    assert model_shape(ModelConfig(embedded=wide)).num_parameters == 2 * 16_384 + layer + 128


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gemma3"}, "model_type=gemma3: plan counts llama, mistral, qwen2, qwen3, qwen3_moe"),
        (
            {"model_type": "llama", "hidden_size": 8},
            "num_hidden_layers, num_attention_heads, vocab_size, intermediate_size is missing",
        ),
        (FOLDERS["qwen3_moe"].to_dict() | {"mlp_only_layers": [0]}, "some layers have experts and some have none"),
    ],
)
def test_a_config_that_cannot_be_counted_is_named(values: dict, words: str):
    with pytest.raises(InputError, match=f"^here: {words}"):
        read_shape(values, "here")


def test_a_name_that_is_not_known_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"model.path=nobody/nothing: neither a folder.*Qwen/Qwen3-8B.*offline"):
        model_shape(ModelConfig(path="nobody/nothing"))
    with pytest.raises(InputError, match=r"the folder has no config\.json"):
        model_shape(ModelConfig(path=str(tmp_path)))


# ---- numbers by hand ------------------------------------------------------------------------------------------------------------


def items(use) -> dict[str, int]:
    return {item.name: item.num_bytes for item in use.items}


def test_embedded_on_cpu():
    made = plan_of(num_prompts=1100)
    # 344,928 parameters in float32 at stage 0: the weights are stepped themselves, so there is no master.
    learner = items(made.fit.learner)
    assert learner["weights"] == learner["reference"] == 4 * 344_928 == 1_379_712
    assert "master weights" not in learner
    assert learner["moments"] == 8 * 344_928
    assert learner["gradients"] == 4 * 344_928 + 4 * 128 * 96  # and that of the output matrix, made whole by the head
    assert learner["reduction buffers"] == 0  # one rank
    assert learner["head workspace"] == 2 * 256 * 128 * 4
    assert learner["push buckets"] == 2 * 64 * 2**20
    # Keys and values: 2 x 3 layers x 3 heads x 32 wide x 4 bytes. 38 tokens and one more take two blocks of 32.
    assert made.cache_token_bytes == 2_304
    assert items(made.fit.engine)["cache"] == GIB // 2
    assert made.completions_that_fit == (GIB // 2) // (64 * 2_304) == 3_640
    assert made.fit.nodes == ((("rollout-0", "learner-0"),),)
    assert made.fit.fullest == made.fit.node.total == made.fit.learner.total + made.fit.engine.total + 1_379_712
    batch = made.batch
    assert (batch.groups, batch.completions, batch.visits_bound, batch.tokens_bound) == (32, 256, 64, 256 * 38)
    # 64 completions an optimizer step; 8,192 tokens hold 215 rows of 38.
    assert (batch.optimizer_steps, batch.samples, batch.rows_per_micro_batch, batch.micro_batches) == (4, 64, 215, 1)
    assert (batch.steps, batch.open_bound) == (150, 64)  # (0 + 2) x 32
    assert batch.epochs == pytest.approx(150 * 32 / 1100)
    assert (made.push.num_bytes, made.push.num_tensors, made.push.proof_bytes) == (1_379_712, 35, 280)
    assert made.push.seconds == pytest.approx(1.379712e-4)
    assert (made.threads.engine, made.threads.learner) == (1, 1)
    assert made.fit.problems == ()


def test_smollm2_on_cpu():
    made = plan_of("model=smollm2_135m", "plan.cpus=8", "rollout.num_workers=2")
    # 49,152 x 576, and 30 layers of norms 2 x 576, queries and output 576 x 576, keys and values 576 x 192, three of 576 x 1,536.
    assert made.shape.num_parameters == 28_311_552 + 30 * (1_152 + 2 * 331_776 + 2 * 110_592 + 3 * 884_736) + 576 == 134_515_008
    assert made.push.num_bytes == 538_060_032
    assert made.push.num_tensors == 1 + 30 * 9 + 1
    assert made.cache_token_bytes == 2 * 30 * 3 * 64 * 4 == 46_080
    assert (made.threads.engine, made.threads.learner) == (4, 8)  # at lag 0 in turn


def test_qwen3_0_6b_on_two_gpus():
    made = plan_of("model=qwen3_0_6b", "plan.num_gpus=2", "plan.bandwidth_gb_per_s=20")
    learner = items(made.fit.learner)
    # 596,049,920 parameters, bfloat16 at stage 1: 2 + 4 + 8 bytes, and gradients of 4 (sums) + 2, and the embedding's once more.
    assert learner["weights"] == 1_192_099_840
    assert learner["master weights"] == 2_384_199_680
    assert learner["moments"] == 4_768_399_360
    assert learner["gradients"] == 6 * 596_049_920 + 2 * 151_936 * 1_024 == 3_887_464_448
    assert made.cache_token_bytes == 2 * 28 * 8 * 128 * 2 == 114_688
    assert made.push.seconds == pytest.approx(1.19209984 / 20)
    assert made.fit.nodes == ((("learner-0",), ("rollout-0",)),)
    assert made.fit.problems == ()


def test_qwen3_4b_on_four_gpus():
    made = plan_of("model=qwen3_4b", "plan.num_gpus=4")
    learner, part = items(made.fit.learner), 4_022_468_096 // 2
    assert made.proposed == ("rollout.num_workers=2", "learner.num_ranks=2")
    assert learner["weights"] == 8_044_936_192
    assert learner["master weights"] == 4 * part == 8_044_936_192
    assert learner["moments"] == 8 * part
    # The rank's part in float32, and twice the embedding's in bfloat16: on its way to its part, and as the head makes it.
    assert learner["gradients"] == 4 * part + 2 * 2 * 151_936 * 2_560 == 9_600_760_832
    assert learner["reduction buffers"] == 500_000_000 * (2 + 4)
    assert made.cache_token_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert made.fit.problems == ()


def test_qwen3_8b_on_eight_gpus():
    made = plan_of("model=qwen3_8b", "plan.num_gpus=8")
    learner, engine, part = items(made.fit.learner), items(made.fit.engine), 8_190_735_360 // 4
    assert made.proposed == ("rollout.num_workers=4", "learner.num_ranks=4")
    assert learner["weights"] == learner["reference"] == 16_381_470_720
    assert learner["master weights"] == 4 * part == 8_190_735_360
    assert learner["moments"] == 16_381_470_720
    assert learner["gradients"] == 8_190_735_360 + 2 * 2 * 151_936 * 4_096 == 10_680_054_784
    # 256 rows of 151,936 logits: two buffers in float32 and one in bfloat16.
    assert learner["head workspace"] == 256 * 151_936 * (4 + 4 + 2) == 388_956_160
    # 128 completions of 38 tokens are less than 8,192. A token of a layer: two norms of (4 + 2 + 2) x 4,096; queries, keys and
    # values 2 x 6,144, the output twice 4 x 4,096, their norms 6 x 5,120; four times 2 x 12,288. Kept: 36 inputs and one layer.
    layer = 65_536 + 12_288 + 16_384 + 30_720 + 98_304
    assert learner["activations"] == 128 * 38 * (36 * 8_192 + layer + 14 * 4_096) == 2_799_173_632
    # 0.85 of 80 GiB less the weights, 8,192 tokens of prefill, 272 rows of logits three times, and 2 GiB.
    work = 2 * 8_192 * (4 * 4_096 + 4_096 + 2_048 + 3 * 12_288) + 3 * 4 * 272 * 151_936
    assert engine["work space"] == work == 1_468_997_632
    assert engine["cache"] == 73_014_444_032 - 16_381_470_720 - 1_468_997_632 - 2 * GIB == 53_016_492_032
    assert made.cache_token_bytes == 147_456
    assert made.completions_that_fit == 53_016_492_032 // (48 * 147_456) == 7_490
    assert made.push.bucket_bytes == 151_936 * 4_096 * 2  # the embedding is never split
    assert made.push.seconds == pytest.approx(1.638147072)
    assert made.push.first_bytes == 3 * 16_381_470_720
    assert made.push.num_fetches == 0  # one node
    assert made.batch.micro_batches == 1  # 32 rows a rank, 215 at once
    # Main memory: a push, and four ranks that load the model and copy it for the reference.
    assert made.fit.node.total == 16_381_470_720 * (1 + 4 * 2)
    assert made.fit.problems == ()


def test_qwen3_30b_a3b_on_sixteen_gpus():
    made = plan_of("model=qwen3_30b_a3b", "plan.num_gpus=16")
    learner, part = items(made.fit.learner), 30_532_122_624 // 8
    assert made.proposed == ("rollout.num_workers=8", "learner.num_ranks=8")
    assert learner["weights"] == 2 * part == 7_633_030_656
    assert learner["gathered weights"] == 2_000_000_000
    assert learner["master weights"] == 15_266_061_312
    assert learner["moments"] == 30_532_122_624
    # A part; an eighth of 10^9 flattened at a time; the fused gate and up of a layer's 128 experts; the output matrix.
    assert learner["gradients"] == 4 * part + 500_000_000 + 2 * 128 * 2 * 2_048 * 768 + 2 * 151_936 * 2_048 == 17_193_697_536
    assert learner["reference"] == 0  # its parts lie in main memory
    assert made.cache_token_bytes == 2 * 48 * 4 * 128 * 2 == 98_304
    # A layer is never split: 3 x 128 x 2,048 x 768, the router, queries and output 4,096 wide, keys and values 512, four norms.
    layer = 3 * 128 * 2_048 * 768 + 128 * 2_048 + 2 * 2_048 * 4_096 + 2 * 2_048 * 512 + 2 * 2_048 + 2 * 128
    assert made.push.bucket_bytes == 2 * layer == 1_246_241_280
    assert made.push.num_bytes == 61_064_245_248
    assert made.push.num_fetches == 1  # the ranks fill the first node, the engines the second
    assert made.fit.problems == ()


def test_states_by_precision_and_stage():
    """344,928 parameters on two ranks: 172,464 a rank. The output matrix has 12,288, the largest 96 x 256."""
    n, part, head, most = 344_928, 172_464, 12_288, 24_576
    expected = {  # weights, gathered, master, gradients, reduction
        (Dtype.float32, 0): (4 * n, 0, 0, 4 * n + 4 * head, 4 * n),
        (Dtype.float32, 1): (4 * n, 0, 4 * part, 4 * n + 4 * part + 4 * head, 4 * n),
        (Dtype.float32, 2): (4 * n, 0, 4 * part, 8 * part + 4 * most + 4 * head, 4 * n),
        (Dtype.float32, 3): (4 * part, 4 * n, 4 * part, 4 * part + 4 * part + 4 * most + 4 * head, 4 * n),
        (Dtype.bfloat16, 1): (2 * n, 0, 4 * part, 6 * n + 2 * head, 4 * n),
        (Dtype.bfloat16, 2): (2 * n, 0, 4 * part, 4 * part + 2 * most + 2 * head, 6 * n),
        (Dtype.bfloat16, 3): (2 * part, 2 * n, 4 * part, 4 * part + 4 * part + 2 * most + 2 * head, 4 * n),
    }
    shape = model_shape(ModelConfig())
    assert shape.largest_parameter == most
    for (dtype, stage), numbers in expected.items():
        config = with_key(config_of(), "model.dtype", dtype)
        config = with_key(with_key(config, "learner.zero_stage", stage), "learner.num_ranks", 2)
        found = items(learner_use(shape, config, gpu=False))
        names = ("weights", "gathered weights", "master weights", "gradients", "reduction buffers")
        assert tuple(found.get(name, 0) for name in names) == numbers, (dtype, stage)
        assert found["moments"] == 8 * (n if stage == 0 else part)


HELD = """
import gc, os, sys, warnings
import torch
warnings.simplefilter("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"
from configs.compose import load_config
from learner.deepspeed_engine import DeepSpeedEngine, join_process_group
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from learner.model import load_model

zero = DeepSpeedZeroConfig()
print("DEFAULTS", zero.reduce_bucket_size, zero.max_live_parameters, zero.sub_group_size)

def storages():
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    kept = {t.untyped_storage().data_ptr(): t for t in tensors}  # alive until they are compared, so that no address is used twice
    return {place: t.untyped_storage().nbytes() for place, t in kept.items()}, kept

join_process_group(0, 1)
kept_alive = []
for overrides in sys.argv[2:]:
    before, _ = storages()
    config = load_config(["model.random_weights=true", *overrides.split()])
    model = load_model(config.model, sys.argv[1], seed=0, chunk_rows=256, gradient_checkpointing=False)
    num = sum(p.numel() for p in model.hf.parameters())
    engine = DeepSpeedEngine(model.policy, config.learner, config.model.dtype, world_size=1, total_steps=9)
    ids, places = torch.arange(40).view(2, 20), torch.arange(30)
    for last in (True, False):
        engine.backward(engine.forward(ids, places, places, 1.0).logp.sum(), last=last)
        if last:
            engine.step()
    after, kept = storages()
    buckets = [bucket.buffer for bucket in getattr(engine._engine.optimizer, "ipg_buckets", {}).values()]
    scratch = [buffer for held in buckets for buffer in ([held] if isinstance(held, torch.Tensor) else held or [])]
    seen = before.keys() | {buffer.untyped_storage().data_ptr() for buffer in scratch}
    print("HELD", num, sum(size for place, size in after.items() if place not in seen))
    kept_alive += [engine, kept]
"""
STAGES = ["float32 0", "float32 1", "float32 2", "float32 3", "bfloat16 1", "bfloat16 2", "bfloat16 3"]


def test_the_states_are_those_that_deepspeed_holds(tmp_path: Path):
    """One rank after its first step and one more backward: weights, masters, moments and gradients, a parameter. What lives only
    within a step or a product is not seen: flattened gradients, gathered weights, buffers."""
    Qwen3Config(**SMALL, head_dim=16).save_pretrained(tmp_path)
    cases = [f"model.dtype={stage.split()[0]} learner.zero_stage={stage.split()[1]}" for stage in STAGES]
    done = subprocess.run(
        [sys.executable, "-c", HELD, str(tmp_path), *cases], capture_output=True, text=True, timeout=110, check=True
    )
    assert f"DEFAULTS {REDUCE_ELEMENTS} {LIVE_ELEMENTS} {LIVE_ELEMENTS}\n" in done.stdout
    held = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HELD")]
    for case, (num, num_bytes) in zip(STAGES, held, strict=True):
        config = config_of(f"model.path={tmp_path}", *cases[STAGES.index(case)].split())
        use = items(learner_use(model_shape(config.model), config, gpu=False))
        assert int(num) == model_shape(config.model).num_parameters
        # Gradients as they lie between steps: in float32, and whole in bfloat16 at stage 1.
        expected = use["weights"] + use.get("master weights", 0) + use["moments"] + int(num) * (6 if case == "bfloat16 1" else 4)
        assert int(num_bytes) == pytest.approx(expected, rel=0.02), case


# ---- what does not fit ----------------------------------------------------------------------------------------------------------

REFUSED = {
    # One GPU for an engine and a rank, which in turn have room on it.
    "model=qwen3_0_6b plan.num_gpus=1": ("do not go onto 1, ", "cluster.placement=colocated"),
    # 2 + 16 / R bytes a parameter, and 2 for the reference: 4 ranks are the least.
    "model=qwen3_8b plan.num_gpus=2": ("a learner rank takes 165.0 GiB of a GPU's 80.0 GiB", "plan.num_gpus=5"),
    "model=qwen3_8b plan.num_gpus=4": ("a learner rank takes 103.9 GiB", "learner.zero_stage=3"),
    "model=qwen3_8b plan.num_gpus=8 rollout.num_workers=4 learner.num_ranks=4 learner.zero_stage=1": (
        "a learner rank takes 109.5 GiB",
        "learner.zero_stage=2",
    ),
    "model=qwen3_8b plan.num_gpus=8 rollout.num_workers=8 learner.num_ranks=8 cluster.placement=colocated": (
        "the engine's turn takes",
        "learner.zero_stage=3",
    ),
    "model=qwen3_8b plan.num_gpus=8 rollout.num_workers=6 learner.num_ranks=4": (
        "engines on 6 x 1 GPUs, each on one node, and learner ranks on 4",
        "rollout.num_workers=4",
    ),
    "model=qwen3_4b plan.num_gpus=4 learner.gradient_checkpointing=false rollout.max_new_tokens=8000": (
        "a learner rank takes",
        "learner.gradient_checkpointing=true",
    ),
    "model=qwen3_0_6b plan.num_gpus=2 plan.gpu_gib=24 batch.tokens_per_micro_batch=65536 learner.gradient_checkpointing=true "
    "data.max_prompt_tokens=2048 rollout.max_new_tokens=2000": ("a learner rank takes", "batch.tokens_per_micro_batch=32768"),
    "model=qwen3_30b_a3b plan.num_gpus=16 learner.num_ranks=12 learner.reference=off algorithm.kl.kind=off data.max_prompt_tokens=2048 "
    "rollout.max_new_tokens=30000 rollout.gpu_memory_share=0.75": (
        "a completion of 32048 tokens takes",
        "rollout.gpu_memory_share=0.9",
    ),
    # 56.9 GiB of weights and 3 beside them in 0.9 of 64 GiB.
    "model=qwen3_30b_a3b plan.num_gpus=16 plan.gpu_gib=64 learner.num_ranks=14": (
        "a completion of 38 tokens takes 4.5 MiB of cache, of which an engine has 0.0 GiB",
        "rollout.tensor_parallel_size=2",
    ),
    "rollout.tensor_parallel_size=2 plan.num_gpus=4": (
        "does not divide the model's 3 attention heads",
        "rollout.tensor_parallel_size=1",
    ),
    "model=qwen3_8b plan.num_gpus=8 plan.node_memory_gib=64": (
        "a node takes 137.3 GiB of main memory",
        "plan.node_memory_gib=256",
    ),
    "model=qwen3_8b plan.num_gpus=0": ("of main memory and has 24.0 GiB", "plan.node_memory_gib=256"),
    # Two cores carry four actors in turn: an engine, a rank, and a verifier for both.
    "rollout.num_workers=5": ("7 CPUs are asked of Ray, which has 4 on 2 cores", "rollout.num_workers=2"),
    "rollout.num_workers=5 plan.cpus=8 cluster.num_cpus=6": ("7 CPUs are asked of Ray, which has 6", "rollout.num_workers=4"),
    "reward.parts.exact_integer.num_processes=3": ("5 CPUs are asked of Ray, which has 4 on 2 cores", "cluster.num_cpus=5"),
    "reward.num_workers=3": ("5 CPUs are asked of Ray, which has 4 on 2 cores", "cluster.num_cpus=5"),
    # No GPU that is built keeps the keys and values of a million tokens whole: the one case in which another is named.
    "model=qwen3_8b plan.num_gpus=8 rollout.max_new_tokens=1000000": (
        "a completion of 1000032 tokens takes",
        "plan.gpu_gib=1024",
    ),
    "rollout.cache_gib=0.00001": ("a completion of 38 tokens takes", "rollout.cache_gib=0.25"),
    "model=qwen3_4b plan.num_gpus=1 plan.gpus_per_node=1 plan.gpu_gib=16 plan.node_memory_gib=16 rollout.tensor_parallel_size=2": (
        "do not go onto 1, ",
        "rollout.tensor_parallel_size=1 plan.num_gpus=2 plan.gpu_gib=96 plan.node_memory_gib=32",
    ),
    "model=qwen3_8b plan.num_gpus=1 plan.gpu_gib=24": ("do not go onto 1, ", "learner.zero_stage=3 plan.num_gpus=15"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_fit_names_the_change_that_makes_it_fit(overrides: str):
    words, change = REFUSED[overrides]
    refused = plan_of(*overrides.split())
    assert any(words in problem for problem in refused.fit.problems), refused.fit.problems
    assert " ".join(smallest_change(config_of(*overrides.split()), refused.shape, HERE)[0]) == change
    assert plan_of(*overrides.split(), *change.split()).fit.problems == ()


BASES = ["embedded", "smollm2_135m", "qwen3_0_6b", "qwen3_4b", "qwen3_8b", "qwen3_30b_a3b"]
DRAWN = {
    "plan.num_gpus": st.integers(0, 64),
    "plan.gpus_per_node": st.sampled_from([1, 2, 4, 8]),
    "plan.gpu_gib": st.sampled_from([16.0, 24.0, 80.0, 141.0]),
    "plan.node_memory_gib": st.sampled_from([None, 16.0, 512.0, 2048.0]),
    "learner.zero_stage": st.integers(1, 3),
    "learner.gradient_checkpointing": st.booleans(),
    "learner.num_ranks": st.sampled_from([1, 1, 2, 8]),
    "rollout.num_workers": st.sampled_from([1, 1, 3, 8]),
    "rollout.tensor_parallel_size": st.sampled_from([1, 1, 2, 3]),
    "rollout.max_new_tokens": st.sampled_from([16, 4096, 32768]),
    "batch.tokens_per_micro_batch": st.sampled_from([1024, 8192, 65536]),
    "cluster.placement": st.sampled_from(list(Placement)),
}


@settings(max_examples=60, deadline=None)
@given(base=st.sampled_from(BASES), values=st.fixed_dictionaries(DRAWN))
def test_no_plan_exceeds_a_device_and_every_refusal_names_a_way(base: str, values: dict):
    config = config_of(f"model={base}")
    for key, value in values.items():
        config = with_key(config, key, value)
    shape = model_shape(config.model)
    found = fit(config, shape, HERE)
    if found.problems:
        changes, changed = smallest_change(config, shape, HERE)
        assert changes
        for change in changes:
            key, _, text = change.partition("=")
            value = Placement.colocated if text == "colocated" else json.loads(text)
            config = with_key(config, key, value)
        assert config == changed
        found = fit(config, shape, HERE)
    assert found.problems == ()
    machines, counts = found.machines, found.config
    assert found.fullest <= (machines.gpu_bytes if machines.num_gpus else machines.node_bytes or 0)
    assert machines.node_bytes is None or found.node.total <= machines.node_bytes
    assert found.engine.of("cache") >= completion_cache_bytes(shape, counts, gpu=machines.num_gpus > 0)
    devices = [device for node in found.nodes for device in node]
    assert len(devices) == max(1, machines.num_gpus)
    for i in range(counts.rollout.num_workers):  # a bundle of devices on one node
        on = [sum(f"rollout-{i}" in device for device in node) for node in found.nodes]
        assert sorted(on)[-1] == sum(on) == (counts.rollout.tensor_parallel_size if machines.num_gpus else 1)
    for i in range(counts.learner.num_ranks):
        assert sum(f"learner-{i}" in device for device in devices) == 1
    if machines.num_gpus:
        most = 1 if counts.cluster.placement is Placement.split else 2
        assert max(map(len, devices)) <= most


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("num_gpus", [2, 5, 8, 24, 64])
def test_counts_are_proposed_for_all_gpus_and_explicit_ones_stand(base: str, num_gpus: int):
    config = with_key(config_of(f"model={base}"), "plan.num_gpus", num_gpus)
    found = make_plan(config, HERE, None).fit
    counts = found.config
    assert counts.rollout.num_workers * counts.rollout.tensor_parallel_size + counts.learner.num_ranks == num_gpus
    explicit = make_plan(with_key(config, "learner.num_ranks", 2), HERE, None)
    assert (explicit.fit.config.rollout.num_workers, explicit.fit.config.learner.num_ranks) == (1, 2)
    assert explicit.proposed == ()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("placement", list(Placement))
def test_a_run_accepts_what_is_proposed(base: str, placement: Placement):
    """Counts and changes alike: what the plan recommends is nothing that `limen train` refuses."""
    for num_gpus in (1, 8):
        config = config_of(f"model={base}", f"plan.num_gpus={num_gpus}", f"cluster.placement={placement.value}")
        shape = model_shape(config.model)
        found = fit(config, shape, HERE)
        if found.problems:
            _, config = smallest_change(config, shape, HERE)
            found = fit(config, shape, HERE)
        assert found.problems == ()
        check_values(found.config)
        if found.config.cluster.placement is Placement.colocated:
            devices = [device for node in found.nodes for device in node]
            assert all(device == (f"rollout-{i}", f"learner-{i}") for i, device in enumerate(devices))


def test_activations_follow_checkpointing_attention_and_experts():
    shape, config = model_shape(ModelConfig(path="Qwen/Qwen3-0.6B")), config_of("model=qwen3_0_6b")
    # A token of a layer, bfloat16: norms 2 x 8 x 1,024; attention 2 x 4,096 + 4 x 2,048 + 6 x 3,072; feed-forward 8 x 3,072.
    layer = 16_384 + 8_192 + 8_192 + 18_432 + 24_576
    assert activation_bytes(shape, config, 10) == 10 * (28 * layer + 14 * 1_024)
    checkpointed = with_key(config, "learner.gradient_checkpointing", True)
    assert activation_bytes(shape, checkpointed, 10) == 10 * (28 * 2 * 1_024 + layer + 14 * 1_024)
    experts = KNOWN["Qwen/Qwen3-30B-A3B"]
    # Eight experts: four times 2 x 768 and three times 2 x 2,048 each; 128 scores twice in float32.
    layer = 8 * 2 * 2_048 + (2 * 5_120 + 4 * 4_096 + 6 * 4_608) + 8 * 2 * (4 * 768 + 3 * 2_048) + 8 * 128
    assert activation_bytes(experts, config, 10) == 10 * (48 * layer + 14 * 2_048)


def test_attention_that_keeps_its_scores():
    """A row of 38 scores a head, in float32 and in bfloat16, for each token of a layer: 16 x 38 x (4 + 2)."""
    shape, config = model_shape(ModelConfig(path="Qwen/Qwen3-0.6B")), config_of("model=qwen3_0_6b")
    eager = with_key(config, "model.attention", Attention.eager)
    more = activation_bytes(shape, eager, 100) - activation_bytes(shape, config, 100)
    assert more == 100 * 28 * 16 * 38 * 6


def test_sizes_at_their_edges():
    # 31 tokens and the one that scoring samples are one block of 32 on CPU; 32 and one more are two.
    for longest, blocks in ((31, 1), (32, 2)):
        made = plan_of("data.max_prompt_tokens=25", f"rollout.max_new_tokens={longest - 25}")
        assert made.completions_that_fit == GIB // 2 // (32 * blocks * 2_304)
    # 2 groups of 2 rows of 38 tokens are fewer than the head's 256 rows.
    few = plan_of("batch.groups_per_step=2", "batch.group_size=2", "batch.num_mini_batches=1")
    assert items(few.fit.learner)["head workspace"] == 2 * 4 * 38 * 128 * 4
    assert few.batch.visits_bound == 64  # set by the job; without it 8 batches
    assert plan_of("rollout.max_visits_per_step=null").batch.visits_bound == 8 * 32
    # 256 completions at once over 2 ranks: 128, in micro-batches of 38 tokens' rows, 100 // 38 = 2 at a time.
    wide = plan_of("batch.num_mini_batches=1", "batch.tokens_per_micro_batch=100", "learner.num_ranks=2")
    assert wide.batch.micro_batches == 64
    # The buffer has 500,000,000 elements, or as many as a smaller model.
    small = plan_of("plan.num_gpus=2", "learner.zero_stage=2")
    assert items(small.fit.learner)["reduction buffers"] == 4 * 344_928
    assert items(plan_of("reward.memory_gib=2", "reward.num_workers=2").fit.node)["2 verifiers at their limit"] == 4 * GIB
    # Two parts share two processes of 2 GiB; a third has three of its own, of half a GiB.
    own = "reward.parts={a: {function: exact}, b: {function: exact}, c: {function: exact, num_processes: 3, memory_gib: 0.5}}"
    assert items(plan_of("reward.memory_gib=2", "reward.num_workers=2", own).fit.node)["5 verifiers at their limit"] == 5.5 * GIB


def test_colocated_roles_take_turns_on_a_device_and_lay_aside_in_main_memory():
    made = plan_of("model=qwen3_8b", "plan.num_gpus=8", "cluster.placement=colocated", "learner.zero_stage=3")
    learner, engine, node = items(made.fit.learner), items(made.fit.engine), items(made.fit.node)
    learners = made.fit.learner.total + engine["runtime"]
    engines = made.fit.engine.total + learner["weights"] + learner["runtime"]  # the reference's parts lie in main memory
    assert made.fit.fullest == max(learners, engines)
    # Loading takes a copy of the model and one for the reference; later a rank keeps what it laid aside and its part of the reference.
    num, part = 8_190_735_360, 8_190_735_360 // 8
    kept = 2 * part + learner["master weights"] + learner["moments"] + learner["gradients"]
    assert node["8 ranks, as they load the model"] == 8 * 2 * 2 * num
    assert node["8 ranks, what they keep beyond that"] == 8 * max(0, kept - 4 * num) == 0
    alone = with_key(
        with_key(config_of("model=qwen3_0_6b", "cluster.placement=colocated"), "plan.num_gpus", 1), "plan.gpu_gib", 141.0
    )
    made = make_plan(alone, HERE, None)
    learner, node = items(made.fit.learner), items(made.fit.node)
    beyond = learner["master weights"] + learner["moments"] + learner["gradients"] - 4 * 596_049_920
    assert node["1 ranks, what they keep beyond that"] == beyond > 0
    assert made.fit.fullest >= made.fit.engine.total + learner["weights"] + learner["reference"] + learner["runtime"]


# ---- the command ----------------------------------------------------------------------------------------------------------------

PROBE = """
import sys
from orchestrator.main import main
code = main(sys.argv[1:])
print("HEAVY", sorted({"torch", "ray", "vllm", "deepspeed", "transformers"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def command(*arguments: str) -> tuple[int, str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, "plan", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr.strip().splitlines()


def test_the_command_prints_the_plan_and_imports_nothing_heavy():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, out, errors = command("model=qwen3_8b", "plan.num_gpus=12", "rollout.max_lag=2")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (code, errors) == (0, ["HEAVY []"])
    assert after.ru_utime - before.ru_utime < 2
    lines = out.splitlines()
    assert lines[0] == "Qwen/Qwen3-8B: 8,190,735,360 parameters in 399 tensors, bfloat16; 12 GPUs of 80.0 GiB, 8 a node"
    assert "           gpu 5  learner-5" in lines  # ranks fill up from the first node, engines go where most is free
    assert "           gpu 6  rollout-2" in lines
    assert "  node 1   gpu 0  rollout-0" in lines
    assert any(line.endswith("for the run: rollout.num_workers=6 learner.num_ranks=6") for line in lines)
    assert any("(max_lag + oversample) x groups_per_step = 192" in line for line in lines)  # (2 + 1) x 64
    assert any("at most 2 for one that is trained in its turn; no bound for one that others overtake" in line for line in lines)


def test_the_command_refuses_with_the_change_and_exit_code_2():
    code, out, errors = command("model=qwen3_8b", "plan.num_gpus=2")
    assert code == 2
    assert "165.0 GiB of 80.0 GiB, 85.0 GiB too much" in out
    assert errors == [
        "limen: this does not fit: a learner rank takes 165.0 GiB of a GPU's 80.0 GiB; with plan.num_gpus=5 it fits; for the run: "
        "plan.num_gpus=5 learner.num_ranks=4",
        "HEAVY []",
    ]


def test_every_item_of_the_plan_is_printed():
    made = plan_of("model=qwen3_30b_a3b", "plan.num_gpus=16", "reward.memory_gib=2", num_prompts=1000)
    text = "\n".join(describe(made))
    for use in (made.fit.learner, made.fit.engine, made.fit.node):
        assert all(item.name in text for item in use.items if item.num_bytes)
    for words in (
        "98,304 bytes",
        "61,064,245,248, in buckets of at most 1,246,241,280",
        "6.11; fetched over the network once a node, by 1",
        "18,867 digests",
    ):
        assert words in text
    assert "at least 9.60" in text  # 150 x 64 / 1,000


def test_a_plan_for_a_local_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FOLDERS["qwen3"].to_dict()))
    made = plan_of(f"model.path={tmp_path}", "data.num_epochs=2", "steps=null", num_prompts=100)
    assert made.shape.num_layers == 3
    assert made.batch.steps == 7  # 200 groups of 32 a step


@pytest.mark.parametrize(
    ("last", "updates", "skipped"), [("keep", 28, None), ("drop", 24, "2 (data.last_batch=drop)"), ("wrap", 26, None)]
)
def test_b108_b162_planned_steps_are_those_of_the_run(last: str, updates: int, skipped: str | None, tmp_path: Path):
    """50 prompts to train on, 8 groups a step, 2 epochs, 2 mini-batches: 7 steps an epoch with the partial one, 6 without; wrapped
    100 visits make 13. Twelve rows of 62 are held out: a fifth of them."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(62)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["data=jsonl", f"data.sources.main.path={tmp_path}/rows.jsonl", "data.num_epochs=2", "steps=null"]
    overrides += [f"data.last_batch={last}", "batch.groups_per_step=8", "batch.num_mini_batches=2"]
    config = config_of(*overrides)
    assert count_prompts(config) == 50
    made = make_plan(config, HERE, count_prompts(config))
    assert made.batch.steps * made.batch.optimizer_steps == updates
    (said,) = [line.split(maxsplit=5)[5] for line in describe(made) if "prompts skipped in each pass" in line] or [None]
    assert said == skipped


def test_a_plan_whose_prompts_do_not_fill_a_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"data\.last_batch=drop: 5 prompts .* batch\.groups_per_step=32; data\.last_batch=wrap"
    ):
        plan_of("data.last_batch=drop", num_prompts=5)


def test_gpus_are_those_a_run_would_see(monkeypatch: pytest.MonkeyPatch):
    for value, num in (("", 0), ("-1", 0), ("0", 1), ("2,3,5", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert gpus_here() == num
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("orchestrator.plan.shutil.which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr("orchestrator.plan.command_output", lambda command: "GPU 0: A\nGPU 1: B\n")
    assert gpus_here() == 2
    monkeypatch.setattr("orchestrator.plan.command_output", lambda command: None)
    assert gpus_here() == 0


@pytest.mark.parametrize(
    ("overrides", "behind", "correction"),
    [
        ([], "0: what is trained was made by the weights it meets", "none, since rollout.max_lag is 0"),
        (
            ["rollout.max_lag=2"],
            "at most 2 for one that is trained in its turn; no bound for one that others overtake (rollout.late=correct)",
            "tis_token, since rollout.max_lag is above 0; correction=none turns it off",
        ),
        (
            ["rollout.max_lag=2", "rollout.oversample=1.5"],
            "at most 3 for one that is trained in its turn; no bound for one that others overtake (rollout.late=correct)",
            "tis_token, since rollout.max_lag is above 0; correction=none turns it off",
        ),
        (
            ["rollout.max_lag=2", "rollout.late=wait", "correction=icepop"],
            "at most 2 for one that is trained in its turn; 2 for any token (rollout.late=wait)",
            "icepop (low=0.5, high=5.0)",
        ),
    ],
)
def test_a_plan_says_how_old_tokens_get_and_what_corrects_them(overrides, behind, correction):
    lines = list(describe(plan_of("rollout.oversample=1", *overrides)))
    assert any(line.endswith(f" {behind}") for line in lines)
    assert any(line.endswith(f" {correction}") for line in lines)
