"""Shared by the tests of the credit functions: loss tokens with every field at its neutral value, and the numeric cases."""

import json
from pathlib import Path

import pytest
import torch

from learner.loss_tokens import LossTokens

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
        tensors["response"] = tensors["response"].long()
        return LossTokens(**tensors)

    return make


@pytest.fixture(scope="session")
def numeric_cases():
    """The lines of cases/numeric.jsonl by id."""
    return {case["id"]: case for case in map(json.loads, NUMERIC.read_text().splitlines())}
