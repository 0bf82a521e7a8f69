"""A recorded run without a run: a tiny random model, and groups of random tokens with its own log-probabilities, written as a run
writes them. What a replay and `limen explain --on` read is real; only nobody had to generate it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported

import numpy as np
import pytest
import torch

from configs.compose import dump_config, load_config
from orchestrator.groups import group_json
from orchestrator.ledger import Pick
from rollout.records import Completion, Consequence, Finish, Group, Outcome, Purpose, Score, Status, Visit

STEPS, GROUPS, MEMBERS = 2, 4, 4
PARTS = {"math": 1.0, "style": 0.25}


@dataclass(frozen=True)
class Recorded:
    """A run's folder, and the overrides of its configuration."""

    folder: Path
    model: str
    overrides: list[str]

    def load(self, *overrides, config_dir=None):
        return load_config([*self.overrides, *overrides], config_dir)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Recorded:
    """Two steps of four groups of four; of each group some are right, one is truncated, and one of the run has no valid score.

    The engine's log-probabilities are the model's own but for rounding; of one member of each group they are off by hundredths, of
    another one token is off by far more.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollout.tokenizer import character_tokenizer

    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    root = tmp_path_factory.mktemp("recorded")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=128, num_key_value_heads=1, initializer_range=0.2, **shape)).eval()
    model.save_pretrained(root / "model")
    character_tokenizer().save_pretrained(root / "model")
    overrides = [
        "model=pretrained",
        f"model.path={root / 'model'}",
        f"batch.groups_per_step={GROUPS}",
        f"batch.group_size={MEMBERS}",
        "batch.num_mini_batches=2",
        "batch.num_passes=2",
        "batch.tokens_per_micro_batch=64",
        "learner.optimizer.name=sgd",
        "learner.optimizer.learning_rate=0.05",
        "steps=2",
        *(f"reward.parts.{name}={{function: exact_integer, weight: {weight}}}" for name, weight in PARTS.items()),
        "~reward.parts.exact_integer",
    ]
    folder = root / "run"
    (folder / "groups").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / "config.yaml").write_text(dump_config(load_config(overrides), redact=True))
    for step in range(STEPS):
        lines = [json.dumps(_group(model, rng, step * GROUPS + i, step)) for i in range(GROUPS)]
        (folder / "groups" / f"step-{step + 1:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return Recorded(folder, str(root / "model"), overrides)


def _group(model, rng, order, step):
    prompt = rng.integers(4, 128, int(rng.integers(3, 6)), dtype=np.int32)
    completions = tuple(_completion(model, rng, prompt, i, step) for i in range(MEMBERS))
    scores = tuple(_score(rng, order, i) for i in range(MEMBERS))
    visit = Visit(f"s/{order}", 0, Purpose.TRAIN)
    return group_json(Pick(order, visit), scores, Group(visit, prompt, completions, "w0", 0.1, ()))


def _completion(model, rng, prompt, index, step):
    ids = rng.integers(4, 128, int(rng.integers(3, 9)), dtype=np.int32)
    with torch.no_grad():
        row = torch.from_numpy(np.concatenate([prompt, ids])).long()
        logp = torch.log_softmax(model(row[None]).logits[0].float(), -1)[len(prompt) - 1 : -1]
        logp = logp.gather(1, row[len(prompt) :, None])[:, 0].numpy()
    off = rng.normal(0, 0.02 if index == 1 else 0.0003, len(ids))
    off[-1] -= 1.2 * (index == 2)
    return Completion(
        index=index,
        token_ids=ids,
        roll_logp=(logp + off).astype(np.float32),
        loss_mask=np.ones(len(ids), dtype=bool),
        versions=np.full(len(ids), max(0, step - (index == 1)), dtype=np.int32),
        mixed=np.zeros(len(ids), dtype=bool),
        text="x" * len(ids),
        finish=Finish.LENGTH if index == 3 else Finish.STOP,
    )


def _score(rng, order, index):
    if (order, index) == (1, 2):
        return Score(Status.TIMEOUT, Outcome.NONE, None, None, {}, None, 0.1, "too slow", {}, Consequence.DROP_SAMPLE)
    right = float(index <= order % 3)
    parts = {"math": right, "style": round(float(rng.uniform()), 3)}
    value = sum(PARTS[name] * v for name, v in parts.items())
    return Score(Status.OK, Outcome.RIGHT if right else Outcome.WRONG, value, right, parts, None, 0.1, "", {}, Consequence.NONE)
