"""Whole runs through the command line: real Ray, vLLM and DeepSpeed, started from a folder with packages that would shadow ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LIMEN = str(Path(sys.executable).with_name("limen"))
SMALL = [
    "model.embedded.steps=120",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=2",
    "evaluation.before=false",
    "evaluation.after=false",
]
NAN = """
import torch

from learner.surrogates import Surrogate, grpo


def poisoned(tokens) -> Surrogate:
    plain = grpo(tokens)
    return Surrogate(factor=plain.factor * torch.nan, value=plain.value, regions=plain.regions)


poisoned.ratio_based = False
"""
REWARD = """
def score(completion, answer):
    return float(completion.strip() == str(answer))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: a reward of their own, and packages named like ours that must not be taken for them."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("configs", "rewards", "learner"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('the user folder was imported')\n")
    (folder / "my_reward.py").write_text(REWARD)
    return folder


def start(folder, *overrides):
    return subprocess.Popen(
        [LIMEN, "train", *(SMALL if not any(o.startswith("resume=") for o in overrides) else []), *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=240):
    out, _ = process.communicate(timeout=timeout)
    return out


def rows(run_dir):
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def wait_for(condition, process, timeout=200):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.05)


def test_two_workers_share_the_run_and_no_token_lies_about_its_version(folder):
    """At lag 1 both engines make groups while the learner works; each token's log-probability is that of the weights it names."""
    run_dir = folder / "two"
    process = start(
        folder,
        f"run_dir={run_dir}",
        "steps=6",
        "rollout.num_workers=2",
        "rollout.max_lag=1",
        "rollout.oversample=1",
        "rollout.record=true",
        "checkpoint.every=1",
        "checkpoint.keep_last=100",
        "reward.parts.exact_integer.function=my_reward.py:score",
    )
    out = finish(process)
    assert process.returncode == 0, out
    summary = json.loads((run_dir / "summary.json").read_text())
    made = summary["num_groups_by_worker"]
    assert len(made) == 2
    assert min(made.values()) >= sum(made.values()) / 3, made
    check_versions(run_dir)
    mismatch = [row["mismatch/same_version"] for row in rows(run_dir) if "mismatch/same_version" in row]
    assert mismatch
    assert max(mismatch) < 1e-4


def check_versions(run_dir):
    """Recomputes every recorded token with the saved weights of the version it carries."""
    models = {row["version"]: run_dir / "checkpoints" / f"step-{row['step']:06d}" / "model" for row in rows(run_dir)}
    versions = set()
    for path in sorted((run_dir / "groups").iterdir()):
        for line in path.read_text().splitlines():
            group = json.loads(line)
            for completion in group["completions"]:
                assert completion["versions"] == sorted(completion["versions"]), "versions never go back"
                assert not any(completion["mixed"])
                versions |= set(completion["versions"])
    assert len(versions) > 1
    for version in versions - {0}:
        compare(AutoModelForCausalLM.from_pretrained(models[version]), version, run_dir)


@torch.no_grad()
def compare(model, version, run_dir):
    for path in (run_dir / "groups").iterdir():
        for line in path.read_text().splitlines():
            group = json.loads(line)
            for completion in group["completions"]:
                made = np.array(completion["versions"]) == version
                if not made.any():
                    continue
                ids = torch.tensor([group["prompt_token_ids"] + completion["token_ids"]])
                logp = torch.log_softmax(model(ids).logits[0].float(), -1)
                start = len(group["prompt_token_ids"]) - 1
                mine = logp[range(start, start + len(made)), completion["token_ids"]].numpy()
                np.testing.assert_allclose(mine[made], np.array(completion["roll_logp"])[made], atol=1e-4)


def test_a_run_of_steps_without_a_finite_gradient_stops_before_it_saves_one(folder):
    """B93: two steps are skipped, the third in a row is one too many. The run goes back to its checkpoint once, which knows of the two,
    and ends with 3; nothing that it saved has a weight or a moment that is not finite."""
    (folder / "my_surrogate.py").write_text(NAN)
    run_dir = folder / "nan"
    process = start(
        folder,
        f"run_dir={run_dir}",
        "steps=6",
        "checkpoint.every=1",
        "selection=none",
        "batch.num_mini_batches=1",
        "learner.max_skipped_steps=2",
        "algorithm=reinforce",
        "algorithm.name=my_surrogate.py:poisoned",
    )
    out = finish(process)
    assert process.returncode == 3, out
    assert "3 optimizer steps in a row had a gradient that is not finite (learner.max_skipped_steps=2)" in out
    told = rows(run_dir)
    assert [(row["step"], row["update/skipped_nonfinite"]) for row in told] == [(1, 1), (2, 1)], out
    assert newest(run_dir) == 2
    files = list((run_dir / "checkpoints").rglob("*.safetensors"))
    assert len(files) >= 4, "weights and training state of both"
    for file in files:
        assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values()), file


def test_killed_resumed_interrupted_terminated_finished(folder):
    """One run through every ending: it always goes on at the right step, and every incarnation says which it is."""
    run_dir = folder / "endings"
    process = start(folder, f"run_dir={run_dir}", "steps=5000", "checkpoint.every=2")
    wait_for(lambda: len(rows(run_dir)) >= 5 and (run_dir / "checkpoints" / "step-000004").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    agents = [child for child in children if child.is_running() and "Agent" in child.name()]
    _, alive = psutil.wait_procs([child for child in children if child not in agents], timeout=60)
    assert not alive, f"left behind: {alive}"

    last = newest(run_dir)
    process = start(folder, f"resume={run_dir}")
    wait_for(lambda: rows(run_dir)[-1]["incarnation"] == 1 and rows(run_dir)[-1]["step"] >= last + 3, process)
    second = [row["step"] for row in rows(run_dir) if row["incarnation"] == 1]
    assert second[0] == last + 1, "goes on after the newest checkpoint"
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole group
    out = finish(process)
    assert process.returncode == 130, out
    saved_and_listed(run_dir, out)

    last = newest(run_dir)
    process = start(folder, f"resume={run_dir}")
    wait_for(lambda: rows(run_dir)[-1]["incarnation"] == 2, process)
    process.terminate()
    out = finish(process)
    assert process.returncode == 143, out
    assert next(row["step"] for row in rows(run_dir) if row["incarnation"] == 2) == last + 1
    saved_and_listed(run_dir, out)

    last = newest(run_dir)
    process = start(folder, f"resume={run_dir}", f"steps={last + 2}")
    out = finish(process)
    assert process.returncode == 0, out
    steps = [row["step"] for row in rows(run_dir) if row["incarnation"] == 3]
    assert steps == [last + 1, last + 2]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "done"
    assert summary["checkpoint"] == f"step-{last + 2:06d}"
    _, alive = psutil.wait_procs(agents, timeout=120)  # Ray's own two take a minute to notice that their raylet is gone
    assert not alive, f"left behind: {alive}"


def newest(run_dir):
    return max(int(p.name.removeprefix("step-")) for p in (run_dir / "checkpoints").glob("step-*") if not p.suffix)


def saved_and_listed(run_dir, out):
    """The last whole step is saved: the newest checkpoint is that of the last row."""
    assert newest(run_dir) == rows(run_dir)[-1]["step"], out
    assert json.loads((run_dir / "summary.json").read_text())["exit_reason"] == "stopped"
