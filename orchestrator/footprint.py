"""Bytes that one learner rank and one engine take on a device. The formulas stand in docs/plan.md with their sources.

N parameters, b bytes of a compute weight (4 or 2), R ranks, P = N / R. What DeepSpeed 0.19 and vLLM 0.32 allocate was read in their
sources; items marked *estimate* follow from what the operations must keep and were not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Attention, BatchConfig, Config, Dtype, KlKind, LearnerConfig, Optimizer, Reference
from orchestrator.shapes import Shape

MIB, GIB = 2**20, 2**30
REDUCE_ELEMENTS = 500_000_000  # DeepSpeed's reduce_bucket_size, allocated whole; of a smaller model as many as it has
LIVE_ELEMENTS = 1_000_000_000  # ZeRO-3: parameters kept gathered at once (max_live_parameters), and elements stepped at once
RUNTIME_BYTES = {True: 2 * GIB, False: 1 * GIB}  # on a GPU: context, communicators, allocator slack; on CPU: the process itself
PREFILL_TOKENS = 8192  # rollout/vllm_in_process.py: least tokens of one prefill step
SCORE_ROWS = 16  # rows scored beside the running completions
BLOCK_TOKENS = {True: 16, False: 32}  # of one block of vLLM's cache, on a GPU and on CPU


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    num_bytes: int
    estimate: bool


@dataclass(frozen=True, slots=True)
class Use:
    """What one role takes on one device."""

    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    def of(self, *names: str) -> int:
        return sum(item.num_bytes for item in self.items if item.name in names)


def weight_bytes(config: Config) -> int:
    """Bytes of one compute weight, on the learner and on the engine."""
    return 2 if config.model.dtype is Dtype.bfloat16 else 4


def longest_row(config: Config) -> int:
    """Longest prompt plus completion, in tokens."""
    return config.rollout.max_model_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens


def micro_batch_tokens(config: Config) -> int:
    """Padded tokens of the largest micro-batch: the budget, or one row beyond it, but no more than a mini-batch has."""
    longest = longest_row(config)
    return min(max(config.batch.tokens_per_micro_batch, longest), mini_batch_samples(config.batch) * longest)


def has_reference(config: Config) -> bool:
    """Whether ranks hold a frozen copy of the model: only a KL term reads it."""
    return config.learner.reference is Reference.frozen and config.algorithm.kl.kind is not KlKind.off


def reference_bytes(shape: Shape, config: Config, *, gpu: bool) -> tuple[int, int]:
    """Of one rank, on its device and in main memory: whole below ZeRO-3; there its part, on GPUs kept in main memory."""
    width, num, learner = weight_bytes(config), shape.num_parameters, config.learner
    if not has_reference(config):
        return 0, 0
    if learner.zero_stage < 3:
        return width * num, 0
    part = width * -(-num // learner.num_ranks)
    return (0, part) if gpu else (part, 0)


def mini_batch_samples(batch: BatchConfig) -> int:
    """Completions of one optimizer step, over all ranks."""
    return -(-batch.groups_per_step // batch.num_mini_batches) * batch.group_size


def bucket_bytes(shape: Shape, config: Config) -> int:
    """Largest bucket of a push: the setting, or what is never split where that is larger."""
    return max(config.learner.bucket_mib * MIB, shape.largest_unit * weight_bytes(config))


# ---- a learner rank -------------------------------------------------------------------------------------------------------------


def learner_use(shape: Shape, config: Config, *, gpu: bool) -> Use:
    """One learner rank: weights and optimizer states by ZeRO stage and ranks, gradients, activations, head, reference, push."""
    learner, num, width = config.learner, shape.num_parameters, weight_bytes(config)
    part = -(-num // learner.num_ranks)
    sharded = part if learner.zero_stage == 3 else num
    stepped = part if learner.zero_stage > 0 else num
    items = [Item("weights", width * sharded, False)]
    if learner.zero_stage == 3:
        items.append(Item("gathered weights", width * min(num, LIVE_ELEMENTS), False))
    if learner.zero_stage > 0:  # also of float32 weights: DeepSpeed steps on a copy
        items.append(Item("master weights", 4 * part, False))
    items.append(Item("moments", 8 * stepped if learner.optimizer.name is Optimizer.adamw else 0, False))
    items += _gradients(shape, learner, width, part)
    tokens = micro_batch_tokens(config)
    items.append(Item("activations", activation_bytes(shape, config, tokens), True))
    rows = min(learner.head_chunk_rows, tokens)
    buffers = 4 * 2 * rows * shape.vocab + (2 * rows * shape.vocab if gpu and width == 2 else 0)
    items.append(Item("head workspace", buffers, False))
    items.append(Item("reference", reference_bytes(shape, config, gpu=gpu)[0], False))
    items.append(Item("push buckets", 2 * bucket_bytes(shape, config), False))
    items.append(Item("runtime", RUNTIME_BYTES[gpu], True))
    return Use(tuple(items))


def _gradients(shape: Shape, learner: LearnerConfig, width: int, part: int) -> list[Item]:
    """Gradients at their peak, and DeepSpeed's buffers that reduce them over ranks."""
    num, stage = shape.num_parameters, learner.zero_stage
    reduced = min(num, REDUCE_ELEMENTS)
    flat = 4 * reduced if learner.num_ranks > 1 else 0
    if stage == 0:
        gradients, buffers = 4 * num, flat
    elif stage == 1 and width == 2:  # float32 sums whole, beside bfloat16 gradients whole until the backward ends
        gradients, buffers = (4 + 2) * num, flat
    elif stage == 1:  # whole, and the rank's part once more, flattened for the step
        gradients, buffers = 4 * num + 4 * part, 4 * reduced
    elif stage == 2 and width == 2:  # the bfloat16 bucket and its float32 copy that travels
        gradients, buffers = 4 * part + 2 * shape.largest_parameter, (2 + 4) * reduced
    elif stage == 2:
        gradients, buffers = 2 * 4 * part + 4 * shape.largest_parameter, 4 * reduced
    else:  # one part of the model at a time is flattened for the step
        flattened = -(-min(num, LIVE_ELEMENTS) // learner.num_ranks)
        gradients, buffers = 4 * part + 4 * flattened + width * shape.largest_parameter, 4 * reduced
    output_matrix = width * shape.vocab * shape.hidden  # learner/head.py makes its gradient whole, then it is added
    return [Item("gradients", gradients + output_matrix, False), Item("reduction buffers", buffers, False)]


def activation_bytes(shape: Shape, config: Config, tokens: int) -> int:
    """What the backward of ``tokens`` padded tokens needs kept. An estimate, by counting the tensors that each operation saves."""
    b, hidden = weight_bytes(config), shape.hidden
    layer = _layer_activations(shape, b)
    if config.model.attention is Attention.eager:  # scores and their softmax in float32, for every token before
        layer += shape.num_heads * min(longest_row(config), tokens) * (b + 4)
    ends = (3 * b + 8) * hidden  # embeddings, the last norm, the head's input and its gradient
    if config.learner.gradient_checkpointing:  # the input of every layer, and one layer computed again
        return tokens * (shape.num_layers * b * hidden + layer + ends)
    return tokens * (shape.num_layers * layer + ends)


def _layer_activations(shape: Shape, b: int) -> int:
    """Bytes a token of one layer. A norm keeps its input in float32, its output, and the next product keeps its own input."""
    h, q, kv, i = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    norms = 2 * (4 + 2 * b) * h
    attention = b * (q + 2 * kv) + 2 * b * q + ((4 + b) * (q + kv) if shape.qk_norm else 0)  # queries, keys, values; output twice
    if not shape.num_experts:
        return norms + attention + 4 * b * i  # gate, its activation, up, their product
    k = shape.experts_per_token  # each token's input and weighted output once an expert; the router's scores in float32
    return norms + attention + k * b * (4 * i + 3 * h) + 8 * shape.num_experts


# ---- an engine ------------------------------------------------------------------------------------------------------------------


def cache_token_bytes(shape: Shape, config: Config) -> int:
    """Keys and values of one token on one device. With more devices than key and value heads, heads are kept twice."""
    heads = -(-shape.num_kv_heads // config.rollout.tensor_parallel_size)
    return 2 * shape.num_layers * heads * shape.head_dim * weight_bytes(config)


def completion_cache_bytes(shape: Shape, config: Config, *, gpu: bool) -> int:
    """Cache of one completion of the greatest length on one device, in whole blocks."""
    block = BLOCK_TOKENS[gpu]
    return -(-(longest_row(config) + 1) // block) * block * cache_token_bytes(shape, config)


def engine_use(shape: Shape, config: Config, *, device_bytes: int, gpu: bool) -> Use:
    """One device of an engine. On a GPU the cache is what the engine's share of the device leaves, as in vLLM; on CPU it is set."""
    rollout, b = config.rollout, weight_bytes(config)
    split = rollout.tensor_parallel_size
    weights = b * -(-shape.num_parameters // split)
    tokens = max(longest_row(config) + 1, PREFILL_TOKENS)
    widths = (shape.q_width + 2 * shape.kv_width + 3 * shape.intermediate * max(1, shape.experts_per_token)) // split
    logits = 3 * 4 * (rollout.max_running + SCORE_ROWS) * shape.vocab  # logits, log-probabilities, and the sampler's copy
    work = b * tokens * (4 * shape.hidden + widths) + logits
    if gpu:
        cache = max(0, int(rollout.gpu_memory_share * device_bytes) - weights - work - RUNTIME_BYTES[gpu])
    else:
        cache = int(rollout.cache_gib * GIB)
    return Use(
        (
            Item("weights", weights, False),
            Item("work space", work, True),
            Item("runtime", RUNTIME_BYTES[gpu], True),
            Item("cache", cache, False),
            Item("push buckets", 2 * bucket_bytes(shape, config), False),
        )
    )
