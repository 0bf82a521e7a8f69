"""GRPO by hand: the whole algorithm in one file and plain PyTorch, to be read from top to bottom.

A tiny transformer, half taught to add two digits ("7+5=" -> "12$"), practises on its own answers and gets better. About 40 seconds
on one core:

    python examples/grpo_by_hand.py                      # GRPO
    python examples/grpo_by_hand.py --surrogate aspo     # the same with ASPO's ratio

Limen does these steps at scale: vLLM samples, worker processes score, DeepSpeed trains, Ray places them. The steps are the same.
"""

import argparse
import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

ALPHABET = "0123456789+=$"  # "$" ends an answer
END = ALPHABET.index("$")
PROMPT_TOKENS, ANSWER_TOKENS = 4, 3  # "7+5=" and at most "12$"

NUM_PROMPTS, GROUP_SIZE = 32, 8  # a step: 32 questions, 8 answers to each
NUM_MINI_BATCHES = 4  # optimizer steps a step; with a single one every ratio is 1, and GRPO and ASPO are the same
EPS_LOW, EPS_HIGH, DUAL_CLIP = 0.2, 0.2, 3.0


def encode(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[ALPHABET.index(char) for char in text] for text in texts])


def make_model() -> Qwen3ForCausalLM:
    """A randomly initialized Qwen3 of 0.1 million parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(ALPHABET),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=128,
            max_position_embeddings=PROMPT_TOKENS + ANSWER_TOKENS,
        )
    )


def answer_logps(model: Qwen3ForCausalLM, sequences: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answer tokens: [num_sequences, ANSWER_TOKENS]."""
    logps = model(sequences).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
    return logps.gather(-1, sequences[:, PROMPT_TOKENS:, None]).squeeze(-1)


def warm_start(model: Qwen3ForCausalLM, steps: int, rng: random.Random) -> None:
    """Supervised learning, stopped early: GRPO only improves on what is sampled right now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(64)]
        loss = -answer_logps(model, encode([f"{a}+{b}={a + b}$".ljust(7, "$") for a, b in pairs])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Every prompt with ANSWER_TOKENS tokens sampled behind it, at temperature 1."""
    sequences = prompts
    for _ in range(ANSWER_TOKENS):
        probabilities = model(sequences).logits[:, -1].softmax(-1)
        sequences = torch.cat([sequences, probabilities.multinomial(1)], dim=1)
    return sequences


def score(sequences: torch.Tensor, sums: list[int]) -> torch.Tensor:
    """The verifier: 1 where the answer, up to its end token, is the sum, else 0."""
    answers = ["".join(ALPHABET[i] for i in row) for row in sequences[:, PROMPT_TOKENS:].tolist()]
    return torch.tensor(
        [float("$" in text and text.split("$")[0] == str(total)) for text, total in zip(answers, sums, strict=True)]
    )


def loss_mask(sequences: torch.Tensor) -> torch.Tensor:
    """1 for the tokens of the answer up to and including the first end token, 0 behind it."""
    ended = (sequences[:, PROMPT_TOKENS:] == END).int()
    return (ended.cumsum(1) - ended == 0).float()


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Each answer against its own group: (reward - mean) / standard deviation. A group of equal rewards teaches nothing: 0."""
    groups = rewards.view(-1, GROUP_SIZE)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def surrogate_factor(ratio: torch.Tensor, advantage: torch.Tensor, name: str) -> torch.Tensor:
    """How much of its advantage a token's log-probability is given.

    Both stop where the token has already moved far enough in the wanted direction. Else GRPO gives the ratio, so a token that
    has become likely gets more. ASPO turns the ratio over where the advantage is positive, so one that lags behind gets more, and
    limits either sign to DUAL_CLIP (arXiv 2510.06062).
    """
    far_enough = ((advantage > 0) & (ratio > 1 + EPS_HIGH)) | ((advantage < 0) & (ratio < 1 - EPS_LOW))
    if name == "aspo":
        ratio = torch.where(advantage > 0, 1 / ratio, ratio).clamp(max=DUAL_CLIP)
    return ratio.masked_fill(far_enough, 0.0)


def grpo_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, surrogate: str, rng: random.Random) -> float:
    """Sample, score, compare within the group, update. Returns the mean reward."""
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(NUM_PROMPTS)]
    prompts = encode([f"{a}+{b}=" for a, b in pairs]).repeat_interleave(GROUP_SIZE, dim=0)
    sequences = sample(model, prompts)
    rewards = score(sequences, [a + b for a, b in pairs for _ in range(GROUP_SIZE)])
    advantages = group_advantages(rewards)
    mask = loss_mask(sequences)
    with torch.no_grad():
        old_logps = answer_logps(model, sequences)  # of the policy before this step's updates

    for rows in torch.arange(len(sequences)).chunk(NUM_MINI_BATCHES):
        logps = answer_logps(model, sequences[rows])
        ratio = (logps.detach() - old_logps[rows]).exp()
        advantage = advantages[rows, None].expand_as(ratio)
        credit = advantage * surrogate_factor(ratio, advantage, surrogate)
        # The mean over an answer's tokens, then over answers. Its gradient is that of the clipped objective of the paper.
        loss = -((credit * logps * mask[rows]).sum(1) / mask[rows].sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return rewards.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO and ASPO in one file, on sums of two digits.")
    parser.add_argument("--surrogate", choices=["grpo", "aspo"], default="grpo")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    model = make_model()
    warm_start(model, options.warm_steps, rng)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    rewards = []
    for step in range(1, options.steps + 1):
        rewards.append(grpo_step(model, optimizer, options.surrogate, rng))
        if step % 10 == 0:
            mean = sum(rewards[-10:]) / 10
            print(f"step {step:4d}   mean reward of the last 10 steps {mean:.3f}   {'#' * round(40 * mean)}", flush=True)


if __name__ == "__main__":
    main()
