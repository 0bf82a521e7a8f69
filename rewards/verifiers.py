"""The verifiers that ship, by name: where each is found. Only a chosen one is imported, so none costs a run that does not use it."""

from __future__ import annotations

VERIFIERS: dict[str, str] = {
    "exact_integer": "rewards.exact.exact_integer",
}
