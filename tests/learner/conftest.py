"""Shared by the tests of the learner's parts.

For the credit functions: loss tokens with every field at its neutral value, and the numeric cases. For the learner itself: tiny
models on disk, made-up rollout batches, and learners over them; several DeepSpeed engines live in one process, one after another.
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported

import numpy as np
import pytest
import torch

from configs.schema import (
    Aggregation,
    AlgorithmConfig,
    BatchConfig,
    Choice,
    LearnerConfig,
    ModelConfig,
    Optimizer,
    OptimizerConfig,
)
from learner.loss_tokens import INTEGER_FIELDS, LossTokens
from rollout.records import Completion, Consequence, Finish, Group, Outcome, Purpose, Score, ScoredGroup, Status, Visit

NUMERIC = Path(__file__).parents[1] / "cases" / "numeric.jsonl"


@pytest.fixture
def make_tokens():
    """``make_tokens(logp=..., old_logp=..., advantage=..., ...)`` from lists or tensors; what is left out is neutral."""

    def make(logp, **fields):
        given = {"logp": logp, **fields}
        tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in given.items() if value is not None}
        ones, zeros = torch.ones(len(tensors["logp"])), torch.zeros(len(tensors["logp"]))
        neutral = {
            "entropy": zeros,
            "old_logp": tensors["logp"],
            "roll_logp": tensors.get("old_logp", tensors["logp"]),
            "ref_logp": None,
            "advantage": ones,
            "sample_weight": ones,
            "token_weight": ones,
            "correction": ones,
            "policy_denominator": ones,
            "kl_denominator": ones,
            "kl_mask": ones,
            "response": zeros,
        }
        tensors = neutral | tensors
        return LossTokens(**{name: t.long() if name in INTEGER_FIELDS and t is not None else t for name, t in tensors.items()})

    return make


@pytest.fixture(scope="session")
def numeric_cases():
    """The lines of cases/numeric.jsonl by id."""
    return {case["id"]: case for case in map(json.loads, NUMERIC.read_text().splitlines())}


# ---- the learner itself ---------------------------------------------------------------------------------------------

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # far from uniform, so that a wrong token shows
}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, str]:
    """Folders of a tied Llama, an untied Qwen3, a GPT-2 (learned positions, dropout) and a model that two ranks do not divide
    evenly, random, with a character tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from rollout.tokenizer import character_tokenizer

    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)),
        "gpt2": GPT2LMHeadModel(gpt2),
        "odd": Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"hidden_size": 33}, tie_word_embeddings=True)),
    }
    root = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(root / name)
        character_tokenizer().save_pretrained(root / name)
    return {name: str(root / name) for name in models}


@dataclass
class Rollouts:
    """Makes groups of random tokens. Every group of one generator is another."""

    rng: np.random.Generator

    def completion(self, index: int, length: int, *, finish=Finish.STOP, versions=None, mixed=None, roll_logp=None) -> Completion:
        return Completion(
            index=index,
            token_ids=self.rng.integers(4, 128, length, dtype=np.int32),
            roll_logp=np.full(length, -4.0, dtype=np.float32) if roll_logp is None else roll_logp,
            loss_mask=np.ones(length, dtype=bool),
            versions=np.zeros(length, dtype=np.int32) if versions is None else versions,
            mixed=np.zeros(length, dtype=bool) if mixed is None else mixed,
            text="",
            finish=finish,
        )

    def group(self, values, lengths=None, prompt_length=None) -> ScoredGroup:
        """One member a value; None is a verifier that failed."""
        lengths = self.rng.integers(1, 9, len(values)).tolist() if lengths is None else lengths
        prompt = self.rng.integers(4, 128, prompt_length or int(self.rng.integers(2, 6)), dtype=np.int32)
        completions = tuple(self.completion(i, n) for i, n in enumerate(lengths))
        visit = Visit(f"p{self.rng.integers(1 << 40)}", 0, Purpose.TRAIN)
        return ScoredGroup(Group(visit, prompt, completions, "w0", 0.0, ()), tuple(map(score, values)))


def score(value) -> Score:
    status = Status.ERROR if value is None else Status.OK
    return Score(status, Outcome.NONE, value, value, {}, None, 0.0, "", {}, Consequence.NONE)


@pytest.fixture
def rollouts() -> Rollouts:
    return Rollouts(np.random.default_rng(7))


def learner_spec(path, **settings):
    """The spec of a learner over the model at ``path``, from the few settings that a test cares about; SGD and one optimizer step
    unless it says otherwise."""
    from learner.learner import LearnerSpec

    get = settings.pop
    spec = LearnerSpec(
        model=ModelConfig(path=path, dtype=get("dtype", ModelConfig().dtype)),
        learner=LearnerConfig(
            zero_stage=get("zero_stage", 0),
            head_chunk_rows=16,
            max_skipped_steps=get("max_skipped_steps", 3),
            reference=get("reference", LearnerConfig().reference),
            export_shard_mib=get("export_shard_mib", 4096),
            gradient_checkpointing=get("gradient_checkpointing", False),
            optimizer=OptimizerConfig(
                name=get("optimizer", Optimizer.sgd),
                learning_rate=get("learning_rate", 0.1),
                max_grad_norm=get("max_grad_norm", 0.0),
                schedule=get("schedule", OptimizerConfig().schedule),
                warmup_steps=get("warmup_steps", 0),
            ),
        ),
        batch=BatchConfig(
            num_mini_batches=get("num_mini_batches", 1),
            num_passes=get("num_passes", 1),
            tokens_per_micro_batch=get("tokens_per_micro_batch", 64),
        ),
        algorithm=AlgorithmConfig(
            name=get("algorithm", "grpo"),
            params=get("algorithm_params", {}),
            aggregation=get("aggregation", Aggregation.seq_mean_token_mean),
            entropy_beta=get("entropy_beta", 0.0),
            adaptive_entropy=get("adaptive_entropy", AlgorithmConfig().adaptive_entropy),
            aux_scale=get("aux_scale", 0.0),
            mask_truncated=get("mask_truncated", False),
            kl=get("kl", AlgorithmConfig().kl),
        ),
        advantage=get("advantage", Choice(name="grpo")),
        weighting=get("weighting", Choice(name="none")),
        token_weighting=get("token_weighting", Choice(name="none")),
        correction=get("correction", Choice(name="none")),
        part_weights=get("part_weights", {}),
        model_path=path,
        temperature=get("temperature", 1.0),
        seed=get("seed", 0),
        total_optimizer_steps=get("total_optimizer_steps", 10),
        max_response_tokens=8,
    )
    assert not settings, settings
    return spec


@pytest.fixture
def spec_of():
    return learner_spec


@pytest.fixture
def make_learner(tiny_models):
    """A learner that is the only rank, see ``learner_spec``."""
    from learner.learner import Learner

    return lambda model="qwen3", **settings: Learner(learner_spec(tiny_models[model], **settings), 0, 1)


@pytest.fixture
def batch_of():
    from learner.learner import RolloutBatch

    return lambda *groups, step=0, version=0: RolloutBatch(step, version, tuple(groups))


def collect_raw_gradients(learner) -> list[dict]:
    """Gradients of a prepared learner's optimizer steps, before clipping, by state-dict name, as each step was about to be taken."""
    taken = []
    step = learner.engine.step

    def spy():
        taken.append(learner.engine.raw_gradients(list(learner.model.hf.named_parameters())))
        return step()

    learner.engine.step = spy
    try:
        learner.train()
    finally:
        learner.engine.step = step
    return taken


def copy_weights(learner) -> dict:
    """Copies of a learner's weights by state-dict name, whole under any ZeRO stage."""
    named = dict(learner.model.hf.named_parameters())
    with learner.engine.gathered(list(named.values())):
        return {name: p.detach().clone() for name, p in named.items()}


@pytest.fixture
def raw_gradients():
    return collect_raw_gradients


@pytest.fixture
def weights_of():
    return copy_weights


def run_group(script, folder, world_size, timeout_s) -> list:
    """Runs ``script FOLDER RANK WORLD_SIZE`` as the ranks of a group; what each left as FOLDER/rank-RANK.pt.

    Each has one thread. When one fails or the time is up, all are ended, and the last lines of each are in the error.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    environment = os.environ | meeting | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}
    logs = [folder / f"log-{rank}.txt" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, script, folder, str(rank), str(world_size)]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + timeout_s
    try:
        while any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        codes = [r.poll() for r in ranks]
    finally:
        for r in ranks:
            r.kill()
            r.wait()
    assert codes == [0] * world_size, "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(world_size)]
