"""What the maths verifier and the pool cost: answers a second through the exact path and over the cases, the pool's share, one that hangs.

    python benchmarks/verifiers.py [--items 5000]

Prints one JSON line a measurement. Targets: 5,000 exact answers and 300 cases (without the monsters) a second on one core, under
1 ms an item for the pool, and its processes busy while one item of a thousand hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.schema import RewardConfig, RewardPart
from rewards.contract import RewardItem, Verdict
from rewards.math_verifier import math
from rewards.pool import RewardPool

CASES = Path(__file__).parents[1] / "tests" / "cases" / "math.jsonl"
MONSTERS = ("B34-1", "B34-2")
ROUNDS = 5
WORK_S = 0.005
HANG_S = 2.0

Pair = tuple[str, str]


def spin(completion: str) -> float:
    """The verifier of the hanging benchmark: a fixed amount of work, or none and no end."""
    if completion == "hang":
        time.sleep(3600)
    until = time.process_time() + WORK_S
    while time.process_time() < until:
        pass
    return 1.0


def exact_pairs(kind: str, count: int) -> list[Pair]:
    """Half of them right. The completion ends in a box, after some reasoning."""
    rng = random.Random(0)
    pairs = []
    for index in range(count):
        a, b = rng.randrange(1, 100_000), rng.randrange(2, 1000)
        written, gold = {
            "integers": (f"{a:,}", str(a)),
            "decimals": (f"{a / 100:.3f}", f"{a / 100:.2f}"),
            "fractions": (rf"\frac{{{3 * a}}}{{{3 * b}}}", f"{a}/{b}"),
        }[kind]
        reasoning = "We add both sides and simplify. " * 20
        pairs.append((rf"{reasoning} The answer is $\boxed{{{written}}}$.", gold if index % 2 else f"1{gold}"))
    return pairs


def judge(pairs: Sequence[Pair], **options: Any) -> list[Verdict]:
    return [math(completion, answer, **options) for completion, answer in pairs]


def exact_path(count: int) -> dict[str, float]:
    """Answers a second of CPU time, the best of a few rounds; and the share that needed symbols after all."""
    figures: dict[str, float] = {}
    for kind in ("integers", "decimals", "fractions"):
        pairs = exact_pairs(kind, count)
        verdicts = judge(pairs[:100])  # warm
        assert [v.value for v in verdicts] == [float(index % 2) for index in range(len(verdicts))]
        seconds = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            verdicts = judge(pairs)
            seconds.append(time.process_time() - begun)
        figures[f"{kind}_per_s"] = round(count / min(seconds))
        figures[f"{kind}_symbolic"] = statistics.fmean(v.measures["symbolic"] for v in verdicts)
    return figures


def cases() -> dict[str, float]:
    """Cases a second of wall time, the work of the child that has the symbols included: at first sight, and when seen before."""
    lines = [json.loads(line) for line in CASES.read_text().splitlines()]
    lines = [line for line in lines if line["id"] not in MONSTERS]
    options = [{k: v for k, v in line.get("options", {}).items() if k != "run_in"} for line in lines]
    judge([(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), (r"\boxed{\int_0^1 x dx}", r"\sin\frac{\pi}{6}")])  # starts the child
    seconds, verdicts = [], []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        verdicts = [math(line["completion"], line["answer"], **own) for line, own in zip(lines, options, strict=True)]
        seconds.append(time.perf_counter() - begun)
    wanted = [e["one_of"] if isinstance(e := line["expect"], dict) else [e] for line in lines]
    return {
        "cases": len(lines),
        "right": sum(verdict.value in values for verdict, values in zip(verdicts, wanted, strict=True)),
        "first_per_s": round(len(lines) / seconds[0]),
        "again_per_s": round(len(lines) / statistics.median(seconds[1:])),
        "symbolic": round(statistics.fmean(v.measures["symbolic"] for v in verdicts), 3),
    }


def items(pairs: Sequence[Pair]) -> list[RewardItem]:
    return [
        RewardItem(prompt="", completion=c, answer=a, prompt_id=str(n), part=None, source=None, num_tokens=None, options={})
        for n, (c, a) in enumerate(pairs)
    ]


def pool_overhead(count: int) -> dict[str, float]:
    """The same answers directly and through a pool of one process, in turn; medians, so the machine's noise falls on both."""
    pairs = exact_pairs("integers", count)
    reward = RewardConfig(parts={"math": RewardPart(function="rewards.math_verifier.math")}, num_workers=1)
    direct, pooled = [], []
    with RewardPool(reward) as pool:
        pool.score(items(pairs[:100]))
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            judge(pairs)
            middle = time.perf_counter()
            scores = pool.score(items(pairs))
            direct.append(middle - begun)
            pooled.append(time.perf_counter() - middle)
    assert [s.value for s in scores] == [float(index % 2) for index in range(count)]
    inside, outside = statistics.median(pooled), statistics.median(direct)
    return {
        "items": count,
        "pool_over_direct": round(inside / outside, 2),
        "direct_ms_per_item": round(1e3 * outside / count, 4),
        "added_ms_per_item": round(1e3 * (inside - outside) / count, 4),
    }


def one_hangs(count: int, num_workers: int = 2) -> dict[str, float]:
    """Share of the pool's time in which its processes judged, while one item of ``count`` hangs until its deadline."""
    part = RewardPart(function=f"{Path(__file__).resolve()}:spin")
    reward = RewardConfig(parts={"spin": part}, num_workers=num_workers, timeout_s=HANG_S)
    with RewardPool(reward) as pool:
        pool.score(items([("", "")] * 100))
        begun = time.perf_counter()
        without = pool.score(items([("", "")] * count))
        middle = time.perf_counter()
        scores = pool.score(items([("hang" if n == count // 3 else "", "") for n in range(count)]))
        ended = time.perf_counter()
    assert sum(score.status != "ok" for score in scores) == 1
    return {
        "items": count,
        "processes": num_workers,
        "busy_share_without": round(sum(s.time_s for s in without) / (num_workers * (middle - begun)), 3),
        "busy_share_with": round(sum(s.time_s for s in scores) / (num_workers * (ended - middle)), 3),
        "wall_with_over_without": round((ended - middle) / (middle - begun), 2),
        "lost_s": round((ended - middle) - (middle - begun) - HANG_S / num_workers, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5000)
    arguments = parser.parse_args()
    for name, figures in (
        ("math, exact path", lambda: exact_path(arguments.items)),
        ("math, the cases", cases),
        ("pool over direct calls", lambda: pool_overhead(arguments.items)),
        ("pool with one item that hangs", lambda: one_hangs(1000)),
    ):
        print(json.dumps({"bench": name, "load": os.getloadavg()[0], **figures()}), flush=True)


if __name__ == "__main__":
    main()
