"""The second stage of checking a configuration: the functions it chooses, which takes importing them, and torch with them.

It runs before Ray starts, so a misspelt parameter or an error in a user's file costs seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from configs.errors import ConfigError
from configs.functions import check_params, resolve_function
from configs.lag import correction_in_use
from configs.refusals import Facts, check_combinations
from configs.schema import Combine, Config
from learner.advantages import ADVANTAGES, Samples, estimate, is_group_relative, is_per_token
from learner.corrections import CORRECTIONS
from learner.loss_tokens import no_tokens
from learner.objective import refuse_missing_fields
from learner.selection import SELECTIONS
from learner.surrogates import SURROGATES, is_ratio_based
from learner.token_weights import TOKEN_WEIGHTINGS
from learner.weighting import WEIGHTINGS, weigh_samples
from rewards.compose import applicable
from rewards.verifiers import load_verifier


def check_functions(config: Config) -> None:
    """Resolve every chosen function and check its parameters. Raises ConfigError naming the key and what would work."""
    surrogate = _chosen("algorithm", config.algorithm.name, config.algorithm.params, SURROGATES)
    advantage = _chosen("advantage", config.advantage.name, config.advantage.params, ADVANTAGES)
    weighting = _chosen("weighting", config.weighting.name, config.weighting.params, WEIGHTINGS)
    token_weighting = _chosen("token_weighting", config.token_weighting.name, config.token_weighting.params, TOKEN_WEIGHTINGS)
    _chosen("selection", config.selection.name, config.selection.params, SELECTIONS)
    corrects = correction_in_use(config)
    correction = _chosen("correction", corrects.name, corrects.params, CORRECTIONS)
    for name, part in config.reward.parts.items():
        load_verifier(name, part)
    _warn_of_mean_accuracy(config)
    facts = Facts(
        ratio_based=is_ratio_based(surrogate), group_relative=is_group_relative(advantage), per_token=is_per_token(advantage)
    )
    check_combinations(config, facts)
    refuse_missing_fields(surrogate, "algorithm", config.algorithm.name)
    refuse_missing_fields(token_weighting, "token_weighting", config.token_weighting.name)
    refuse_missing_fields(correction, "correction", corrects.name)
    if config.algorithm.name in SURROGATES:
        _try_values("algorithm", lambda: surrogate(no_tokens(), **config.algorithm.params))
    if config.advantage.name in ADVANTAGES:
        _try_values("advantage", lambda: estimate(advantage, _no_samples(), config.advantage.params))
    if config.weighting.name in WEIGHTINGS:
        _try_values("weighting", lambda: weigh_samples(weighting, _no_samples(), torch.zeros(0), config.weighting.params))
    if corrects.name in CORRECTIONS:
        _try_values("correction", lambda: correction(no_tokens(), **corrects.params))
    if config.token_weighting.name in TOKEN_WEIGHTINGS:
        _try_values("token_weighting", lambda: token_weighting(no_tokens(), **config.token_weighting.params))


def _chosen(group: str, name: str, params: Mapping[str, Any], table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    function = resolve_function(name, table, f"{group}.name")
    check_params(function, params, f"{group}.params")
    if getattr(function, "experimental", False):
        logging.getLogger(__name__).warning(
            "%s=%s is experimental: it stands in for formulas that are not public, and no result was ever compared", group, name
        )
    return function


def _warn_of_mean_accuracy(config: Config) -> None:
    """Under `sum` the accuracy of several parts is their mean, and half of them right counts as solved: rarely what was meant."""
    parts = config.reward.parts
    if config.reward.combine is not Combine.sum:
        return
    for name, source in config.data.sources.items():
        routes = [source.reward] if source.reward_column is None else list(parts)
        for judging in (applicable(parts, route, name) for route in routes):
            counting = [part for part in judging if parts[part].accuracy]
            if len(counting) > 1:
                logging.getLogger(__name__).warning(
                    "reward.parts: %s all count for accuracy, which under reward.combine=sum is their mean, and 0.5 counts as solved: a "
                    "completion can be solved with some of them at 0; reward.parts.%s.accuracy=false leaves one out, reward.combine=min "
                    "wants all",
                    ", ".join(counting),
                    counting[-1],
                )
                return


def _try_values(group: str, call: Callable[[], Any]) -> None:
    """Our functions refuse values out of range when called; a call without samples or tokens finds that now."""
    try:
        call()
    except ValueError as error:
        raise ConfigError(f"{group}.params: {error}") from error


def _no_samples() -> Samples:
    numbers, integers = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    return Samples(
        values=numbers,
        group=integers,
        valid=torch.zeros(0, dtype=torch.bool),
        accuracy=numbers,
        num_tokens=integers,
        parts={"part": numbers},
        part_weights={"part": 1.0},
    )
