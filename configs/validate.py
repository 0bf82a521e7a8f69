"""Checks across keys. They only raise, naming the keys and a value that works; nothing is changed here."""

from __future__ import annotations

from configs.schema import Config


def check_values(config: Config) -> None:
    """Raise ConfigError for the first value or combination that cannot run."""
