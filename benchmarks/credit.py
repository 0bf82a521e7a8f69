"""What the credit of a token costs, in multiples of torch.exp over the same tokens, for every objective and correction.

    python benchmarks/credit.py [--tokens 1000000] [--threads 1]

Prints one JSON line. The bound is 60 for the credit. Its metrics are computed beside it, only when asked, and told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial

import torch

from configs.schema import KlKind, KlRatio
from learner.corrections import CORRECTIONS
from learner.credit import Credit, token_credit
from learner.entropy import is_low_entropy
from learner.loss_tokens import LossTokens
from learner.surrogates import SURROGATES

RESPONSE_TOKENS = 1000
REPEATS = 9


def make_tokens(count: int) -> LossTokens:
    torch.manual_seed(0)
    logp, one = -5 * torch.rand(count), torch.ones(count)
    old = logp + 0.1 * torch.randn(count)
    response = torch.arange(count) // RESPONSE_TOKENS
    return LossTokens(
        logp=logp,
        entropy=2 * torch.rand(count),
        old_logp=old,
        roll_logp=old + 0.01 * torch.randn(count),
        ref_logp=logp + 0.1 * torch.randn(count),
        advantage=torch.randn(int(response[-1]) + 1)[response],
        sample_weight=one,
        token_weight=one,
        correction=one,
        policy_denominator=one,
        kl_denominator=one,
        kl_mask=one,
        response=response,
    )


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of the cheapest of a few runs: what the work takes, whatever else runs."""
    call()
    times = []
    for _ in range(REPEATS):
        is_low_entropy.cache_clear()
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens = make_tokens(args.tokens)
    surrogates = {n: partial(f, eps_high=4.0) if n == "cispo_relative" else f for n, f in SURROGATES.items()}
    credit = partial(token_credit, tokens, kl_beta=0.1, entropy_beta=0.01)
    calls: dict[str, Callable[[], Credit]] = {
        f"algorithm={name}": partial(credit, surrogate=surrogate, kl_kind=KlKind.off) for name, surrogate in surrogates.items()
    }
    for name, correction in CORRECTIONS.items():
        calls[f"correction={name}"] = partial(credit, surrogate=surrogates["grpo"], correction=correction, kl_kind=KlKind.off)
    calls["kl=k3 through"] = partial(credit, surrogate=surrogates["grpo"], kl_kind=KlKind.k3, kl_ratio=KlRatio.through)
    archer = partial(credit, surrogate=surrogates["aspo_archer"], kl_kind=KlKind.k3, kl_entropy_quantile=0.8)
    calls["algorithm=aspo_archer with its kl"] = archer
    calls["kl=k3 of low-entropy tokens"] = partial(
        credit, surrogate=surrogates["grpo"], kl_kind=KlKind.k3, kl_entropy_quantile=0.8
    )
    unit = seconds(lambda: torch.exp(tokens.logp))
    costs = {name: round(seconds(call) / unit, 1) for name, call in calls.items()}
    beside = calls["algorithm=grpo"]()
    result = {
        "bench": "credit over torch.exp",
        "tokens": args.tokens,
        "threads": args.threads,
        "load": os.getloadavg()[0],
        "exp_s": round(unit, 6),
        "largest": max(costs.values()),
        "metrics": round(seconds(lambda: beside.sums) / unit, 1),
        **costs,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
