"""Errors about what a person gave, and the words that help to mend a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something given to the program that it cannot use. The message is one line that names the key or file and what would work;
    the command line prints it without a traceback and exits with 2."""


class ConfigError(InputError):
    """A configuration that cannot run."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of the choices, or nothing where none is near."""
    near = get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
