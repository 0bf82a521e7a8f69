"""``limen serve-reward``: a reward as an HTTP service."""

from __future__ import annotations

from configs.schema import Config
from rewards.service import serve


def serve_reward(config: Config) -> int:
    """Serves until it is told to end. Raises ConfigError where the verifiers cannot be loaded."""
    return serve(config.reward, config.serve)
