"""A run whose reward is composed of ours and of functions in a file of the user's own, which fail, decline and kill their pool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(300)]

LIMEN = str(Path(sys.executable).with_name("limen"))
REWARD = '''
import signal
from pathlib import Path

import psutil

from rewards.contract import Abstain, Verdict

KILLED = Path(__file__).with_name("killed")


def brief(completion, answer, num_tokens, *, most: int) -> float:
    """1 for one token, 0 for ``most``."""
    return Verdict(1 - (num_tokens - 1) / (most - 1), measures={"num_tokens": num_tokens})


def moody(completion, answer, prompt_id, *, isolation: str = "rlimits"):
    """Fails on odd answers, declines all of prompts that end in 3; the first call kills the pool's actor."""
    if not KILLED.exists():
        KILLED.touch()
        next(p for p in psutil.Process().parents() if "RewardActor" in " ".join(p.cmdline())).send_signal(signal.SIGKILL)
        signal.pause()
    if prompt_id.endswith("3"):
        raise Abstain("not on a day like this")
    if int(answer) % 2:
        raise ConnectionError("the grader is away")
    return 1.0
'''
RUN = [
    "model.embedded.steps=120",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=8",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "selection=none",
    "evaluation.before=false",
    "evaluation.after=false",
    "rollout.max_new_tokens=4",
    "rollout.record=true",
    "steps=2",
    "checkpoint.every=1",
    "reward.max_failed_share=0.9",
    "reward.parts.brief.function=my_reward.py:brief",
    "reward.parts.brief.params.most=5",
    "reward.parts.brief.weight=0.5",
    "reward.parts.brief.needs=exact_integer",
    "reward.parts.brief.accuracy=false",
    "reward.parts.moody.function=my_reward.py:moody",
    "reward.parts.moody.num_processes=1",
    "reward.parts.moody.weight=0.25",
    "reward.parts.moody.accuracy=false",
    "reward.parts.moody.on_error=zero",
    "reward.parts.moody.on_abstain=drop_group",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run's folder, and what was printed."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_reward.py").write_text(REWARD)
    command = [LIMEN, "train", *RUN, f"run_dir={folder / 'run'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run", done.stdout


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_parts_make_one_value_and_each_is_a_metric(run):
    folder, _ = run
    for number, metrics in enumerate(rows(folder / "metrics.jsonl"), 1):
        scores = [c["score"] for group in rows(folder / "groups" / f"step-{number:06d}.jsonl") for c in group["completions"]]
        assert len(scores) == 8 * 4
        for score in scores:
            right, brief, moody = (score["parts"][name] for name in ("exact_integer", "brief", "moody"))
            assert score["value"] == pytest.approx(right + 0.5 * brief + 0.25 * moody)
            assert score["accuracy"] == right
            assert brief == (1 - (score["measures"]["brief.num_tokens"] - 1) / 4 if right else 0), "it needs a right answer"
            assert (score["consequence"] == "zero") == ("the grader is away" in score["detail"]) == (moody == 0)
        assert 0 <= metrics["reward/brief_mean"] <= metrics["reward/exact_integer_mean"] <= 1
        assert 1 <= metrics["reward/brief.num_tokens"] <= 4
        assert metrics["verifier/zeroed"] >= sum(score["consequence"] == "zero" for score in scores)
        assert metrics["time/verifier_max_s"] >= metrics["time/verifier_p95_s"] > 0
        assert metrics["verifier/num_lost"] == 0, "of the pool that is now"


def test_a_missing_verdict_goes_by_its_policy_and_is_counted(run):
    folder, _ = run
    metrics = rows(folder / "metrics.jsonl")
    assert sum(row.get("drop/verifier_abstain", 0) for row in metrics) > 0
    assert sum(row["verifier/abstain"] for row in metrics) == 4 * sum(row.get("drop/verifier_abstain", 0) for row in metrics)
    assert sum(row["verifier/zeroed"] for row in metrics) > 0
    trained = [group["prompt_id"] for path in (folder / "groups").iterdir() for group in rows(path)]
    assert not any(name.endswith("3") for name in trained)
    visits = json.loads((folder / "summary.json").read_text())["visits"]
    assert visits["dropped/verifier_abstain"] == sum(row.get("drop/verifier_abstain", 0) for row in metrics)
    worst = json.loads((folder / "rewards.json").read_text())
    assert len(worst["slowest"]) == 20
    times = [row["time_s"] for row in worst["slowest"]]
    assert times == sorted(times, reverse=True)
    failing = worst["most_failing"]
    assert {"the grader is away", "not on a day like this"} == {
        words for words in ("the grader is away", "not on a day like this") for row in failing if words in row["detail"]
    }
    assert failing[0]["num_failed"] >= failing[-1]["num_failed"] >= 1
    assert all(row["prompt_id"] and row["step"] in (1, 2) and 0 <= row["index"] < 4 for row in failing)


def test_the_pool_that_was_killed_is_made_anew_once_and_the_log_tells(run):
    folder, out = run
    events = rows(folder / "events.jsonl")
    (replaced,) = [event for event in events if event["event"] == "reward_pool_replaced"]
    assert "died" in replaced["reason"].lower()
    assert f"warning: the reward pool of node {replaced['node']} was lost and is made anew" in out
    (isolation,) = [event for event in events if event["event"] == "isolation"]
    assert isolation["nodes"] == {replaced["node"]: {"moody": "rlimits"}}
    assert "isolation of reward.parts.moody: rlimits" in out
