"""The self-test at learning rate 0: figures by hand, and real runs at lag 1, one sound and one with a planted mismatch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from configs.schema import Dtype
from orchestrator.errors import RunStopped
from orchestrator.selftest import SelfTest

LIMEN = str(Path(sys.executable).with_name("limen"))
SOUND = {
    "ratio/max_pos": 1.00001,
    "ratio/max_neg": 1.0,
    "ratio/mean_pos": 1.0,
    "ratio/p01_neg": 0.99999,
    "mismatch/logp_absdiff": 2e-6,
    "mismatch/logp_absdiff_max": 7e-5,
    "mismatch/same_version": 1e-6,
    "mismatch/older_version": 3e-6,
    "mismatch/older_version_lag_1": 3e-6,
    "push/changed_frac": 0.0,
    "stale/max_versions": 1,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ratio/max_pos": 1.0002}, r"ratio/max_pos=1.0002, away from 1 by 0.0002 is above 0.0001: the learner computed one"),
        ({"ratio/p01_neg": 0.9}, r"ratio/p01_neg=0.9, away from 1 by 0.1 is above"),
        ({"ratio/mean_pos": math.nan}, "ratio/mean_pos=nan"),
        ({"mismatch/same_version": 0.2}, r"mismatch/same_version, in nats a token, 0.2 is above 0.001: .*rollout.top_p"),
        (
            {"mismatch/older_version_lag_1": 0.01},
            r"mismatch/older_version_lag_1.* 0.01 is above 0.001: tokens of an older version",
        ),
        ({"mismatch/mixed": 0.01}, r"mismatch/mixed.*: tokens made over keys"),
        (
            {"mismatch/logp_absdiff": 1e-4},
            r"logp_absdiff, in nats a token, 0.0001 is above 2e-05: it was 2e-06 in the first steps",
        ),
        ({"mismatch/logp_absdiff_max": 0.7}, r"mismatch/logp_absdiff_max, in nats, 0.7 is above 0.01: a token stands apart"),
        ({"push/changed_frac": 0.25}, "0.25 of the tensors changed at learning rate 0"),
    ],
)
def test_each_figure_has_its_limit_and_its_meaning(wrong, named):
    test = SelfTest(Dtype.float32)
    for step in range(1, 7):
        test.check(step, SOUND)
    with pytest.raises(RunStopped, match=f"selftest_lr0, step 7: .*{named}"):
        test.check(7, SOUND | wrong)


@pytest.mark.timeout(60)
def test_the_verdict_tells_what_was_seen():
    test = SelfTest(Dtype.float32)
    test.check(1, {"batch/num_groups": 0})
    with pytest.raises(RunStopped, match="no step trained anything"):
        test.verdict()
    test.check(2, SOUND)
    assert "over 1 steps ratios were within 1e-05 of 1" in test.verdict()
    assert "differed by 3e-06 nats a token at most (7e-05 on the worst one), on tokens up to 1 versions old" in test.verdict()


@pytest.mark.timeout(60)
def test_in_bfloat16_rounding_alone_passes():
    test = SelfTest(Dtype.bfloat16)
    for step in range(1, 12):
        test.check(
            step,
            {
                "ratio/max_pos": 1.01,
                "mismatch/logp_absdiff": 0.04,
                "mismatch/logp_absdiff_max": 0.25,
                "mismatch/same_version": 0.12,
            },
        )


def run(folder, *overrides):
    """A short self-test of the embedded model on one-digit sums."""
    small = ["model.embedded.steps=120", "data.sources.arithmetic.params.max_digits=1", "batch.groups_per_step=8"]
    command = [LIMEN, "train", "experiment=selftest_lr0", f"run_dir={folder}", "steps=6", "batch.num_mini_batches=2", *small]
    done = subprocess.run([*command, *overrides], check=False, capture_output=True, text=True, timeout=300, cwd=folder.parent)
    return done, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_sound_system_passes_at_lag_1(tmp_path):
    done, rows = run(tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "self-test at learning rate 0 passed: over 6 steps" in done.stdout
    assert len({row["weights"] for row in rows}) == 1, "nothing moved"
    assert sum(row.get("stale/frac_lag_1", 0.0) for row in rows) > 1, "most tokens were a version behind"
    assert all(row["correction/mean"] == pytest.approx(1, abs=1e-4) for row in rows), "corrections are on, and find nothing"


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_an_engine_that_samples_from_another_distribution_fails_it(tmp_path):
    """Planted: the engine cuts the tail off and renormalises, which the learner does not."""
    done, rows = run(tmp_path / "run", "rollout.top_p=0.7", "correction=none")
    assert done.returncode == 3, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "selftest_lr0, step 1: mismatch/same_version" in last
    assert f"{rows[0]['mismatch/same_version']:.3g} is above 0.001" in last
    assert "rollout.top_p" in last
