"""What becomes of a completion that a verifier gave no verdict on: the texts of `reward.parts.NAME.on_error` and its like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from configs.errors import ConfigError, did_you_mean

_RETRY = re.compile(r"retry\(\s*(\d+)\s*(?:,\s*(\w+)\s*)?\)")


class Then(StrEnum):
    drop_sample = "drop_sample"  # it takes no part in its group
    drop_group = "drop_group"
    zero = "zero"  # value 0 and accuracy 0
    fail = "fail"  # the run stops


@dataclass(frozen=True, slots=True)
class Policy:
    num_retries: int  # calls after the first
    then: Then


def parse_policy(text: str, key: str) -> Policy:
    """``drop_sample``, ``drop_group``, ``zero``, ``fail``, ``retry(N)`` (then drop_sample) or ``retry(N, THEN)`` with one of these.

    Raises ConfigError, naming ``key``, for any other text.
    """
    words = [then.value for then in Then]
    retry = _RETRY.fullmatch(text.strip())
    then = text.strip() if retry is None else retry[2] or Then.drop_sample
    num_retries = 0 if retry is None else int(retry[1])
    if then not in words or (retry is not None and num_retries < 1):
        raise ConfigError(
            f"{key}: {text!r} is none of {', '.join(words)}, retry(N), retry(N, one of these), with N from 1"
            + did_you_mean(then, words)
        )
    return Policy(num_retries=num_retries, then=Then(then))
