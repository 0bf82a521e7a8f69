"""Shapes of models: what `limen plan` counts parameters, bytes and cache from. No model and no library of models is loaded.

Known models stand in a literal table, the embedded one follows from its recipe, and any other is read from the ``config.json`` of
its folder or of the local Hugging Face cache. The decoder meant is Llama's: root-mean-square norms, rotary positions, grouped
attention, a gated feed-forward layer; with norms on queries and keys (Qwen3), biases (Qwen2), or experts in place of the
feed-forward layer (Qwen3-MoE).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from configs.errors import InputError
from configs.schema import EmbeddedModel, ModelConfig

EMBEDDED_VOCAB = 128  # the character tokenizer's size
KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")  # model types that these formulas count exactly


@dataclass(frozen=True)
class Shape:
    """A decoder. With experts, ``intermediate`` is the width of one, and every layer has them."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool  # the output matrix is the embedding
    num_experts: int  # 0: a dense feed-forward layer
    experts_per_token: int
    qk_norm: bool  # a norm on each head's queries and keys
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of keys alone; values have as much."""
        return self.num_kv_heads * self.head_dim

    def layer_tensors(self) -> list[int]:
        """Elements of each tensor of one layer, as a checkpoint holds them: experts one by one."""
        h, i, q, kv = self.hidden, self.intermediate, self.q_width, self.kv_width
        tensors = [h, h, h * q, h * kv, h * kv, q * h]  # two norms, then attention
        tensors += [self.head_dim] * 2 if self.qk_norm else []
        tensors += [q, kv, kv] if self.qkv_bias else []
        tensors += [h] if self.o_bias else []
        if self.num_experts:
            return [*tensors, self.num_experts * h, *[h * i] * (3 * self.num_experts)]  # the router, then gate, up, down
        return tensors + [h * i] * 3 + ([i, i, h] if self.mlp_bias else [])

    def end_tensors(self) -> list[int]:
        """Elements of the tensors outside the layers: embedding, last norm, and the output matrix where it is not tied."""
        table = self.vocab * self.hidden
        return [table, self.hidden] if self.tied else [table, self.hidden, table]

    @cached_property
    def num_parameters(self) -> int:
        return self.num_layers * sum(self.layer_tensors()) + sum(self.end_tensors())

    @cached_property
    def num_tensors(self) -> int:
        """Of a checkpoint, and so of a push."""
        return self.num_layers * len(self.layer_tensors()) + len(self.end_tensors())

    @property
    def largest_parameter(self) -> int:
        """Elements of the learner's largest: there the gate and up matrices of all experts of a layer are one."""
        return max(self.vocab * self.hidden, max(1, 2 * self.num_experts) * self.hidden * self.intermediate)

    @cached_property
    def largest_unit(self) -> int:
        """Elements that a push never splits: a tensor, or a whole layer where experts are fused (learner/gather.py)."""
        layer = sum(self.layer_tensors()) if self.num_experts else max(self.layer_tensors())
        return max(self.vocab * self.hidden, layer)


def _dense(sizes: tuple[int, int, int, int, int, int, int], *, tied: bool, qk_norm: bool) -> Shape:
    return Shape(*sizes, tied, 0, 0, qk_norm, False, False, False)


# Layers, hidden, heads, key and value heads, head width, feed-forward width, vocabulary
KNOWN: dict[str, Shape] = {
    "smollm2-135m": _dense((30, 576, 9, 3, 64, 1536, 49152), tied=True, qk_norm=False),
    "Qwen/Qwen3-0.6B": _dense((28, 1024, 16, 8, 128, 3072, 151936), tied=True, qk_norm=True),
    "Qwen/Qwen3-4B": _dense((36, 2560, 32, 8, 128, 9728, 151936), tied=True, qk_norm=True),
    "Qwen/Qwen3-8B": _dense((36, 4096, 32, 8, 128, 12288, 151936), tied=False, qk_norm=True),
    "Qwen/Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151936, False, 128, 8, True, False, False, False),
}


def model_shape(model: ModelConfig) -> Shape:
    """The shape of ``model.path``. Raises InputError for a name that is neither known nor in the local cache, and for a
    configuration that is not of this kind of decoder."""
    if model.path == "embedded":
        return _embedded(model.embedded)
    if model.path in KNOWN:
        return KNOWN[model.path]
    file = _config_file(model.path)
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: not readable as JSON: {error}") from error
    return read_shape(values, str(file))


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """The shape from the values of a ``config.json``; ``where`` names it in errors."""
    kind, experts = (
        config.get("model_type"),
        config.get("num_experts") or config.get("num_local_experts") or 0,
    )  # transformers 5 saves the latter
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
    needed += ["moe_intermediate_size", "num_experts_per_tok"] if experts else ["intermediate_size"]
    missing = [key for key in needed if not isinstance(config.get(key), int)]
    if kind not in KINDS:
        raise InputError(f"{where}: model_type={kind}: plan counts {', '.join(KINDS)}")
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} is missing")
    if config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1:
        raise InputError(f"{where}: some layers have experts and some have none: plan counts models whose layers are alike")
    bias = bool(config.get("attention_bias", False))
    return Shape(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        intermediate=config["moe_intermediate_size" if experts else "intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        num_experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        qk_norm=kind.startswith("qwen3"),
        qkv_bias=bias or kind.startswith("qwen2"),
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _embedded(recipe: EmbeddedModel) -> Shape:
    width = recipe.hidden_size // recipe.num_heads
    heads = (recipe.num_layers, recipe.hidden_size, recipe.num_heads, recipe.num_kv_heads, width)
    return _dense((*heads, recipe.intermediate_size, EMBEDDED_VOCAB), tied=recipe.tie_word_embeddings, qk_norm=True)


def _config_file(path: str) -> Path:
    if Path(path).is_dir():
        file = Path(path) / "config.json"
        if not file.is_file():
            raise InputError(f"model.path={path}: the folder has no config.json")
        return file
    found = try_to_load_from_cache(path, "config.json")
    if not isinstance(found, str):
        raise InputError(
            f"model.path={path}: neither a folder, nor in the local Hugging Face cache, nor known here ({', '.join(KNOWN)}); plan is "
            "offline: download the model's config.json into a folder and give that"
        )
    return Path(found)
