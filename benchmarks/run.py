"""`make bench`: the embedded job's step time over its floor, in one run and with the same thread budgets; the head; the credit; the
verifiers and their pool; a push.

    python benchmarks/run.py [--steps 30] [--busy] [--skip-head] [--skip-push]

The floor is the same prompts through the raw engine, the same tokens through a raw forward and backward, and one copy of the
weights. Machines are noisy, so figures are ratios of medians within one run; the target is 1.25 on two idle cores.
``--busy`` puts one endless Python loop beside both, and tells the ratio with it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout.engine import engine_environment

HERE = Path(__file__).parent
WARM_UP_STEPS = 5


def run_job(folder: Path, steps: int) -> dict[str, float]:
    """Median seconds of each stage of the embedded job. Nothing is dropped, so the floor sees the same prompts and tokens."""
    limen = Path(sys.executable).with_name("limen")
    overrides = [
        "selection=none",  # every group asked is trained on,
        "rollout.oversample=1",  # and none is asked beyond the batch
        "batch.groups_per_step=64",
        "rollout.record=true",
        "evaluation.before=false",
        "evaluation.after=false",
        "checkpoint.every=0",
    ]
    subprocess.run(
        [limen, "train", f"steps={steps}", f"run_dir={folder}", "log.console=off", *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM_UP_STEPS:]
    names = [f"time/{name}_s" for name in ("step", "generate", "prepare", "train", "push")]
    return {name: statistics.median(row[name] for row in rows) for name in names}


def run_floor(folder: Path) -> dict[str, float]:
    """Median seconds of each part of the floor, from a process of its own with the engine's thread budget."""
    environment = os.environ | engine_environment(num_threads=1)
    out = subprocess.run(
        [sys.executable, str(HERE / "floor.py"), str(folder)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
    floor: dict[str, float] = json.loads(out.splitlines()[-1])
    return floor


def compare(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        job, floor = run_job(folder, steps), run_floor(folder)
    total = sum(floor.values())
    return {"ratio": job["time/step_s"] / total, "floor_s": total, **{f"floor/{k}": v for k, v in floor.items()}, **job}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--busy", action="store_true", help="one endless Python loop beside job and floor")
    parser.add_argument("--skip-head", action="store_true")
    parser.add_argument("--skip-push", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps({"bench": "step over floor", "load": os.getloadavg()[0], **compare(arguments.steps)}), flush=True)
    if arguments.busy:
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            print(json.dumps({"bench": "step over floor beside one busy core", **compare(arguments.steps)}), flush=True)
        finally:
            loop.kill()
    if not arguments.skip_head:
        subprocess.run([sys.executable, str(HERE / "head.py")], check=True)
    subprocess.run([sys.executable, str(HERE / "credit.py")], check=True)
    subprocess.run([sys.executable, str(HERE / "verifiers.py")], check=True)
    if not arguments.skip_push:
        subprocess.run([sys.executable, str(HERE / "push.py")], check=True)


if __name__ == "__main__":
    main()
