"""The verifiers that ship, by name: where each is found. Only a chosen one is imported, so none costs a run that does not use it."""

from __future__ import annotations

from configs.functions import check_params, resolve_function
from configs.schema import RewardPart
from rewards.contract import GIVEN, Verifier, bind_verifier

VERIFIERS: dict[str, str] = {
    "brier": "rewards.brier.brier",
    "choice": "rewards.choice.choice",
    "code": "rewards.code_verifier.code",
    "exact": "rewards.exact.exact",
    "exact_integer": "rewards.exact.exact_integer",
    "format": "rewards.text_rewards.format_reward",
    "http": "rewards.http_verifier.http",
    "judge": "rewards.judge.judge",
    "length": "rewards.text_rewards.length",
    "math": "rewards.math_verifier.math",
    "numeric": "rewards.exact.numeric",
    "overlong": "rewards.text_rewards.overlong",
    "reasoning_gym": "rewards.gym.reasoning_gym",
    "repetition": "rewards.text_rewards.repetition_penalty",
    "reward_model": "rewards.reward_model.reward_model",
}

ENTRY_POINTS = "limen.verifiers"  # the group under which installed packages offer verifiers of their own


def load_verifier(name: str, part: RewardPart) -> Verifier:
    """The verifier of ``reward.parts.NAME``: one that ships, one that a package offers, a dotted path or ``file.py:function``.

    Raises ConfigError naming the key where there is no such function or its parameters do not fit.
    """
    key = f"reward.parts.{name}"
    function = resolve_function(part.function, VERIFIERS, f"{key}.function", entry_points=ENTRY_POINTS)
    check_params(function, part.params, f"{key}.params", GIVEN)
    return bind_verifier(function, part, key)
