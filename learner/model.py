"""The policy as the learner holds it: a Hugging Face backbone and the token-logprob head, in one module.

DeepSpeed's hooks act on modules that are called through its engine, so backbone and head are one module with one forward,
and the head holds the very Parameter object of the model's output matrix (with tied embeddings: the embedding's).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from configs.errors import InputError
from configs.schema import ModelConfig
from learner.batching import RowCost
from learner.head import HeadOutput, TokenLogpHead

# Config entries that change the logits after the matrix product, and the value that means "does nothing".
_LOGIT_CHANGES = {
    "final_logit_softcapping": None,
    "logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "output_multiplier_scale": 1.0,
    "lm_head_multiplier": 1.0,
}


class ModelError(InputError):
    """A model that cannot be trained here; the message says why and what would work."""


class PolicyModule(nn.Module):
    """Token ids in, log-probabilities and entropies of the loss tokens out.

    The hidden states are picked *before* the head, so what the loss mask leaves out costs no logits and can leak no NaN.
    """

    def __init__(self, backbone: nn.Module, weight: nn.Parameter, *, chunk_rows: int, num_routed: int | None):
        super().__init__()
        self.backbone = backbone
        self.num_routed = num_routed  # experts a token, in a mixture of experts whose router scores can be read
        self.head = TokenLogpHead(weight, chunk_rows=chunk_rows)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        extras: bool = False,
        response: Tensor | None = None,
    ) -> HeadOutput:
        """Scores ``targets`` given the tokens up to ``positions``.

        input_ids [rows, width]; positions [n], flat places of the tokens *before* the targets; targets [n]. Rows padded on
        the right need neither mask nor position ids: under causal attention no token sees what stands to its right.
        Returns fp32 [n] at ``temperature``, with gradient. ``extras``: the likeliest token's as well. ``response`` [n], the row of each
        target: with the loss of the routers, summed over the rows.
        """
        options = {} if response is None else {"output_router_logits": True}
        out = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **options
        )
        hidden = out.last_hidden_state
        picked = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        scored = cast(HeadOutput, self.head(picked, targets, temperature, extras=extras))
        if response is None or self.num_routed is None:
            return scored
        layers = [router_loss(logits[positions], response, len(input_ids), self.num_routed) for logits in out.router_logits]
        return scored._replace(aux_loss=torch.stack(layers).mean())


def router_loss(logits: Tensor, response: Tensor, num_responses: int, num_routed: int) -> Tensor:
    """The load-balancing loss of one router, summed over responses: of each E / K sum_i f_i P_i, 1 where all experts get alike.

    Of the n tokens of a response f_i is the share that expert i is among the K highest of, P_i the mean of its probability: the
    sequence-wise form (DeepSeek-V3 2412.19437, eq. 17 to 20, with a softmax). A response is in one micro-batch, so no split of the
    step changes it; over a batch it would. ``logits`` [n, E] at the tokens that are scored, ``response`` int64 [n].
    """
    probs = torch.softmax(logits.float(), -1)
    among = torch.zeros_like(probs).scatter(1, logits.topk(num_routed, -1).indices, 1.0)
    count = torch.bincount(response, minlength=num_responses)[:, None].clamp(min=1)
    share, mean = (
        torch.zeros(num_responses, x.shape[1], device=x.device).index_add(0, response, x) / count for x in (among, probs)
    )
    return logits.shape[1] / num_routed * (share * mean).sum()


@dataclass(frozen=True)
class LoadedModel:
    """A policy beside the Hugging Face model whose Parameter objects it shares; the latter is never called in training."""

    hf: PreTrainedModel
    policy: PolicyModule
    saved_keys: tuple[str, ...]  # the state-dict keys that save_pretrained writes; a tied head is not among them
    converts_names: bool  # whether it writes them under other names, as with fused experts
    cost: RowCost

    def tensor(self, key: str) -> Tensor:
        """The live Parameter or buffer behind a state-dict key."""
        return self.hf.get_parameter_or_buffer(key)


def load_model(config: ModelConfig, path: str, *, seed: int, chunk_rows: int, gradient_checkpointing: bool) -> LoadedModel:
    """Loads the causal language model at ``path``, or random weights in its shape (``model.random_weights``, from ``seed``).

    Every rank loads the whole model and ZeRO-3 splits it afterwards: the proof of the head runs a forward of the whole. Dropout is off: with it a ratio of 1 would not be 1.
    Raises ModelError for a model whose logits are more than hidden states times a matrix.
    """
    dtype = getattr(torch, config.dtype.value)
    options = {"attn_implementation": config.attention.value, "trust_remote_code": config.trust_remote_code}
    if config.random_weights:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            shape = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
            hf = AutoModelForCausalLM.from_config(shape, dtype=dtype, **options)
    else:
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    _turn_dropout_off(hf)
    weight = _output_matrix(hf)
    if gradient_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModule(hf.base_model, weight, chunk_rows=chunk_rows, num_routed=_num_routed(hf)).train()
    ignored = hf._keys_to_ignore_on_save or ()
    saved = [key for key in remove_tied_weights_from_state_dict(dict(hf.state_dict()), hf) if key not in ignored]
    written = revert_weight_conversion(hf, {key: hf.get_parameter_or_buffer(key).detach().to("meta") for key in saved})
    return LoadedModel(hf, policy, tuple(saved), converts_names=set(written) != set(saved), cost=_row_cost(hf, weight))


def frozen_copy(policy: PolicyModule) -> PolicyModule:
    """The policy as it is now, for good: the reference of the KL term."""
    return copy.deepcopy(policy).eval().requires_grad_(False)


def _row_cost(hf: PreTrainedModel, head: nn.Parameter) -> RowCost:
    """From the shapes. Of fused experts [experts, ...] a token meets only those it is routed to; embeddings are looked up, not multiplied."""
    config = hf.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    routed = getattr(config, "num_experts_per_tok", None)
    looked_up = {id(module.weight) for module in hf.modules() if isinstance(module, nn.Embedding)} | {id(head)}
    per_token = sum(
        p.numel() * (routed / len(p) if routed and p.dim() == 3 else 1.0) for p in hf.parameters() if id(p) not in looked_up
    )
    return RowCost(per_token, per_pair=2.0 * config.num_hidden_layers * width, per_scored=float(head.numel()))


def _num_routed(hf: PreTrainedModel) -> int | None:
    """Experts a token, where the backbone tells the scores of its routers."""
    readable = "router_logits" in (getattr(hf.base_model, "_can_record_outputs", None) or {})
    return getattr(hf.config.get_text_config(), "num_experts_per_tok", None) if readable else None


def _turn_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _output_matrix(hf: PreTrainedModel) -> nn.Parameter:
    """The matrix [vocabulary, hidden] that makes the logits, after a proof that nothing else takes part in them."""
    name = type(hf).__name__
    config = hf.config.get_text_config()
    for key, neutral in _LOGIT_CHANGES.items():
        value = getattr(config, key, neutral)
        if value is not None and value != neutral:
            raise ModelError(
                f"{name} changes its logits ({key}={value}): its log-probabilities would be wrong here; use a model without it"
            )
    head = hf.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), nn.Parameter):
        raise ModelError(f"{name} has no output matrix; use a causal language model with a plain linear head")
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            f"{name} has a bias on its output head: its log-probabilities would be wrong here; use a model without one"
        )
    weight = cast(nn.Parameter, head.weight)
    with torch.no_grad():
        ids = torch.arange(2, 10).remainder(weight.shape[0])[None]
        hidden = hf.base_model(input_ids=ids, use_cache=False).last_hidden_state
        gap = (hf(input_ids=ids, use_cache=False).logits - nn.functional.linear(hidden, weight)).abs().max()
    if not gap <= 1e-5 * hidden.float().abs().max():
        raise ModelError(
            f"the logits of {name} are not its hidden states times its output matrix (off by {gap:.3g}): use another model"
        )
    return weight
