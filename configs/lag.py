"""What follows from ``rollout.max_lag`` where a key is left to it. Pure over the configuration."""

from __future__ import annotations

from configs.schema import Choice, Config, Late, RolloutConfig


def correction_in_use(config: Config) -> Choice:
    """What ``correction=auto`` stands for, else what is chosen: at lag 0 every token is the learner's own but for rounding; above it
    late tokens came from other weights."""
    if config.correction.name != "auto":
        return config.correction
    return Choice("tis_token" if config.rollout.max_lag > 0 else "none")


def oldest_token(rollout: RolloutConfig) -> int | None:
    """How many versions behind the learner a trained token may be; None where nothing bounds it."""
    match rollout.late:
        case Late.correct:
            return None if rollout.max_lag else 0
        case Late.wait:
            return rollout.max_lag
        case Late.drop:
            return rollout.max_lag if rollout.max_token_lag is None else rollout.max_token_lag
