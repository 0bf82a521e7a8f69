"""What a learner is made from, and what it is given each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import AlgorithmConfig, BatchConfig, Choice, LearnerConfig, ModelConfig
from rollout.records import ScoredGroup


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a learner is made from."""

    model: ModelConfig
    learner: LearnerConfig
    batch: BatchConfig
    algorithm: AlgorithmConfig
    advantage: Choice
    weighting: Choice
    token_weighting: Choice
    correction: Choice
    part_weights: Mapping[str, float]  # of the reward's parts
    model_path: str  # folder or Hugging Face name of the start weights, with a tokenizer
    temperature: float  # of sampling; the logits are divided by it
    seed: int
    total_optimizer_steps: int  # length of the schedule
    max_response_tokens: int


@dataclass(frozen=True)
class RolloutBatch:
    """The kept groups of one step. ``version`` is the learner's as it trains them."""

    step: int
    version: int
    groups: tuple[ScoredGroup, ...]
