"""The policy module: what it scores, whatever the layout; what it refuses."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from configs.schema import Dtype, ModelConfig
from learner.batching import Row, pack_rows
from learner.model import ModelError, frozen_copy, load_model
from learner.samples import packed_tensors

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def load(path, **changes):
    config = ModelConfig(path=path, **{"dtype": Dtype.float32} | changes)
    return load_model(config, path, seed=3, chunk_rows=16, gradient_checkpointing=False)


def plain_logps(path, row, temperature=1.0):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        log_p = torch.log_softmax(model(row[None]).logits[0] / temperature, -1)
    return log_p[range(len(row) - 1), row[1:]]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "llama"])
def test_b117_scores_do_not_depend_on_the_batch_partner_or_the_padding(name, tiny_models):
    """GPT-2 has learned positions, so a wrong position id shows; in its training mode, so dropout would show as well."""
    policy = load(tiny_models[name]).policy
    torch.manual_seed(1)
    short, long = torch.randint(4, 128, (5,)), torch.randint(4, 128, (11,))
    expected = plain_logps(tiny_models[name], short)

    def row(ids):
        return Row(ids.int().numpy(), (torch.arange(len(ids)) > 0).numpy())

    with torch.no_grad():
        alone = policy(*packed_tensors(pack_rows([row(short)]), torch.device("cpu")), 1.0).logp
        right = policy(*packed_tensors(pack_rows([row(long), row(short)]), torch.device("cpu")), 1.0).logp[10:]
        ids = torch.stack([torch.cat([torch.zeros(6, dtype=torch.int64), short]), long])
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        places = (mask.cumsum(1) - 1).clamp(min=0)
        left = policy(ids, torch.arange(6, 10), short[1:], 1.0, attention_mask=mask, position_ids=places).logp
    for layout in (alone, right, left):
        torch.testing.assert_close(layout, expected, atol=1e-5, rtol=0)


def test_the_head_is_the_embedding_where_they_are_tied(tiny_models):
    tied, untied = load(tiny_models["llama"]), load(tiny_models["qwen3"])
    assert tied.policy.head.weight is tied.hf.get_input_embeddings().weight
    assert untied.policy.head.weight is untied.hf.lm_head.weight
    assert ("lm_head.weight" in tied.saved_keys, "lm_head.weight" in untied.saved_keys) == (False, True)


def test_the_cost_of_a_row_comes_from_the_shapes(tiny_models, tmp_path):
    """Qwen3 by hand: queries and output 32 x 32, keys and values 32 x 16, three matrices 32 x 48, norms 2 x 32 + 2 x 16 a layer."""
    cost = load(tiny_models["qwen3"]).cost
    assert cost.per_token == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32 + 2 * 16) + 32
    assert (cost.per_pair, cost.per_scored) == (2 * 2 * 32, 128 * 32)  # two layers, one product for scores and one for values
    assert load(tiny_models["llama"]).cost.per_scored == 128 * 32  # tied: the embedding is a product as well
    shape = SMALL | {"num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)).save_pretrained(tmp_path)
    # Four matrices 32 x 32, three 32 x 48 of each of the two experts that a token meets, the router 4 x 32, norms 2 x 32 + 32.
    assert load(str(tmp_path)).cost.per_token == 4 * 32 * 32 + 2 * 3 * 32 * 48 + 4 * 32 + 3 * 32


def test_random_weights_repeat_for_a_seed_and_leave_the_callers_generator_alone(tiny_models):
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    first, second = (load(tiny_models["qwen3"], random_weights=True).policy.head.weight for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, second)
    assert not torch.equal(first, load(tiny_models["qwen3"]).policy.head.weight)


def test_a_frozen_copy_shares_nothing_and_stays_tied(tiny_models):
    policy = load(tiny_models["llama"]).policy
    copy = frozen_copy(policy)
    before = copy.head.weight.clone()
    with torch.no_grad():
        policy.head.weight.add_(1)
    assert torch.equal(copy.head.weight, before)
    assert copy.head.weight is copy.backbone.embed_tokens.weight
    assert not any(p.requires_grad for p in copy.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: PhiForCausalLM(PhiConfig(**SMALL)), "PhiForCausalLM has a bias on its output head"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=16)), "final_logit_softcapping=30.0"),
        (lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.0625)), "logit_scale=0.0625"),
    ],
)
def test_heads_that_do_more_than_a_matrix_product_are_refused(model, message, tmp_path):
    model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(str(tmp_path))


def test_a_head_that_hides_what_it_does_is_found_out_by_its_numbers(tiny_models, monkeypatch):
    from transformers import Qwen3ForCausalLM

    plain = Qwen3ForCausalLM.forward

    def scaled(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * 1.001
        return out

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", scaled)
    with pytest.raises(ModelError, match="not its hidden states times its output matrix"):
        load(tiny_models["qwen3"])
