"""The second stage of checking a configuration: the functions it chooses, which takes importing them, and torch with them.

It runs before Ray starts, so a misspelt parameter or an error in a user's file costs seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from configs.errors import ConfigError
from configs.functions import check_params, resolve_function
from configs.schema import Config
from learner.advantages import ADVANTAGES
from learner.loss_tokens import INTEGER_FIELDS, LossTokens
from learner.selection import SELECTIONS
from learner.surrogates import SURROGATES, is_ratio_based
from learner.weighting import WEIGHTINGS
from rewards.contract import GIVEN, bind_verifier
from rewards.verifiers import VERIFIERS


def check_functions(config: Config) -> None:
    """Resolve every chosen function and check its parameters. Raises ConfigError naming the key and what would work."""
    surrogate = _chosen("algorithm", config.algorithm.name, config.algorithm.params, SURROGATES)
    _chosen("advantage", config.advantage.name, config.advantage.params, ADVANTAGES)
    _chosen("weighting", config.weighting.name, config.weighting.params, WEIGHTINGS)
    _chosen("selection", config.selection.name, config.selection.params, SELECTIONS)
    if config.correction.name != "none" or config.correction.params:
        raise ConfigError(f"correction.name: there is no {config.correction.name!r} yet; correction=none works")
    for name, part in config.reward.parts.items():
        key = f"reward.parts.{name}"
        function = resolve_function(part.function, VERIFIERS, f"{key}.function")
        check_params(function, part.params, f"{key}.params", GIVEN)
        bind_verifier(part.function, function, part.params, key)
    _check_inert(config, surrogate)
    if config.algorithm.name in SURROGATES:
        _try_values(surrogate, config.algorithm.params)


def _chosen(group: str, name: str, params: Mapping[str, Any], table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    function = resolve_function(name, table, f"{group}.name")
    check_params(function, params, f"{group}.params")
    return function


def _check_inert(config: Config, surrogate: Callable[..., Any]) -> None:
    """With one optimizer step a batch the ratio is exactly 1, and every algorithm that acts through it is the same."""
    batch = config.batch
    if batch.num_mini_batches * batch.num_passes > 1 or config.allow_inert or not is_ratio_based(surrogate):
        return
    works = next((n for n in (4, 2, 3) if batch.groups_per_step % n == 0), 1)
    more = f"batch.num_mini_batches={works}" if works > 1 else "batch.num_passes=2"
    raise ConfigError(
        f"algorithm.name={config.algorithm.name}: with batch.num_mini_batches=1 and batch.num_passes=1 its ratio is always 1 and it "
        f"does nothing; {more} works, or allow_inert=true"
    )


def _try_values(surrogate: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Our surrogates refuse values out of range when called; a call without tokens finds that now."""
    empty, no_response = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    names = [field.name for field in dataclasses.fields(LossTokens)]
    tokens = LossTokens(**{name: no_response if name in INTEGER_FIELDS else empty for name in names})
    try:
        surrogate(tokens, **params)
    except ValueError as error:
        raise ConfigError(f"algorithm.params: {error}") from error
