"""What a reward takes before it runs: processes, memory, time, and the sandbox it will use. Plain arithmetic over its configuration: the
launch and `limen plan` use it alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from configs.schema import RewardConfig, RewardPart
from rewards.compose import policies
from rewards.lane import GRACE_S, MAX_TRIES, RESTART_S
from rewards.process import START_S
from rewards.verifiers import load_verifier


def num_processes(reward: RewardConfig) -> int:
    """Verifier processes of one node: those the parts share, and those of their own."""
    return sum(_by_lane(reward).values())


def memory_limits(reward: RewardConfig) -> list[float]:
    """GiB that each verifier process of a node may take, of those with a limit."""
    limits = []
    for name, processes in _by_lane(reward).items():
        limit = reward.parts[name].memory_gib if name else None
        limits += [limit or reward.memory_gib] * processes
    return [limit for limit in limits if limit is not None]


def longest_s(reward: RewardConfig, num_completions: int) -> float:
    """Seconds that so many completions may take in one pool at most, each call at its deadline and ended with its process.

    One completion's own calls come one after the other, however many processes there are: of n on m processes the last may end
    1 + (n - 1) / m times as late as one alone (Graham 1966, bounds on multiprocessing anomalies).
    """
    return sum(
        _most_calls(name, part)
        * ((part.timeout_s or reward.timeout_s) + GRACE_S)
        * (1 + (num_completions - 1) / (part.num_processes or reward.num_workers))
        for name, part in reward.parts.items()
    )


def still_s(reward: RewardConfig) -> float:
    """Seconds in which a pool that has completions to judge ends some call at least: the longest a call may take, after a process was
    lost and the next ones failed to start."""
    longest = max(part.timeout_s or reward.timeout_s for part in reward.parts.values())
    return longest + GRACE_S + MAX_TRIES * (START_S + RESTART_S)


def isolation_levels(reward: RewardConfig) -> dict[str, str]:
    """The isolation that each part with such a parameter asks for. Imports the verifiers."""
    levels = {}
    for name, part in reward.parts.items():
        parameter = inspect.signature(load_verifier(name, part).function).parameters.get("isolation")
        if parameter is not None:
            levels[name] = part.params.get("isolation", parameter.default)
    return levels


def _by_lane(reward: RewardConfig) -> Mapping[str, int]:
    """Processes by the part that they are for; the shared ones by no name."""
    own = {name: part.num_processes for name, part in reward.parts.items() if part.num_processes is not None}
    return own if len(own) == len(reward.parts) else {"": reward.num_workers, **own}


def _most_calls(name: str, part: RewardPart) -> int:
    """One in a batch that another completion spoils, one alone, and those of a policy."""
    return 2 + max(policy.num_retries for policy in policies(name, part).values())
