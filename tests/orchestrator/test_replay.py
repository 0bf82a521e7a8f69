"""Replay: a real run is recorded once; what is trained on its record is what it trained on, without an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.compose import load_config
from configs.errors import ConfigError
from orchestrator.groups import read_group
from orchestrator.replay import check_length, check_source, open_record
from rollout.tokenizer import character_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

LIMEN = str(Path(sys.executable).with_name("limen"))
SMALL = [
    "model.embedded.steps=120",
    "data.sources.arithmetic.params.max_digits=1",
    "batch.groups_per_step=8",
    "batch.num_mini_batches=2",
    "evaluation.before=false",
    "evaluation.after=false",
    "steps=3",
    "seed=5",
]
NO_VLLM = "raise ImportError('a replay must not import vllm')\n"


def train(folder, *overrides, hide_vllm=False):
    """Runs `limen train`; with ``hide_vllm`` importing vllm anywhere in the run is an error."""
    env = dict(os.environ)
    if hide_vllm:
        (folder / "hidden" / "vllm").mkdir(parents=True, exist_ok=True)
        (folder / "hidden" / "vllm" / "__init__.py").write_text(NO_VLLM)
        env["PYTHONPATH"] = os.pathsep.join([str(folder / "hidden"), env.get("PYTHONPATH", "")])
    command = [LIMEN, "train", *SMALL, *overrides]
    return subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def lines(run_dir):
    return [json.loads(line) for path in sorted((run_dir / "groups").iterdir()) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    done = train(folder, f"run_dir={folder / 'run'}", "rollout.record=true")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def replayed(source):
    """The same objective on the record, itself recorded, where vllm cannot be imported."""
    folder = source.parent
    overrides = ["rollout=replay", f"rollout.source_run={source}", f"run_dir={folder / 'again'}", "rollout.record=true"]
    done = train(folder, *overrides, "evaluation.after=true", hide_vllm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "again", done.stdout


def test_the_same_objective_gives_the_same_weights_bit_for_bit(source, replayed):
    made, again = rows(source), rows(replayed[0])
    assert [row["step"] for row in again] == [1, 2, 3]
    assert [row["weights"] for row in again] == [row["weights"] for row in made]
    assert len({row["weights"] for row in again}) == 3, "every step moved the weights"
    for mine, theirs in zip(again, made, strict=True):
        assert mine["update/grad_norm"] == theirs["update/grad_norm"] > 0
        assert mine["mismatch/same_version"] == theirs["mismatch/same_version"] < 1e-4
        assert mine["push/num_replayed"] == 1


def test_the_record_is_whole(source, replayed):
    """Ids, log-probabilities, versions and scores come through a replay unchanged."""
    made, again = lines(source), lines(replayed[0])
    assert len(made) == 24
    for mine, theirs in zip(again, made, strict=True):
        assert mine["prompt_id"] == f"{theirs['prompt_id']}#{theirs['visit']}"
        assert mine["completions"] == theirs["completions"]
    assert {v for row in again for c in row["completions"] for v in c["versions"]} == {0, 1, 2}


def test_evaluation_is_skipped_with_a_line(replayed):
    assert "a replay has no engine, so no evaluation" in replayed[1]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """A run folder with a record of three groups by hand, the second of which was trained again after a crash."""
    run = tmp_path / "run"
    (run / "groups").mkdir(parents=True)
    config = load_config(["rollout.record=true", "batch.group_size=2"])
    from configs.compose import dump_config

    (run / "config.yaml").write_text(dump_config(config, redact=True))
    for step, orders in ((1, (0,)), (2, (1, 4))):
        text = "".join(json.dumps(row(order, value=0.0)) + "\n" for order in orders)
        (run / "groups" / f"step-{step:06d}.jsonl").write_text(text)
    with (run / "groups" / "step-000002.jsonl").open("a") as file:
        file.write(json.dumps(row(1, value=1.0)) + "\n")
    return run


def row(order, value, token=5):
    score = {
        "value": value,
        "accuracy": value,
        "status": "ok",
        "outcome": "none",
        "parts": {},
        "extracted": None,
        "time_s": 0.0,
        "detail": "",
        "measures": {},
        "consequence": "none",
    }
    completion = {"token_ids": [token, 7], "roll_logp": [-1.0, -0.5], "loss_mask": [True, True], "versions": [3, 4]}
    completion |= {"mixed": [False, False], "text": "x", "finish": "stop", "score": score}
    completions = [completion | {"index": i} for i in (0, 1)]
    group = {
        "order": order,
        "prompt_id": f"s/{order}",
        "visit": 2,
        "worker": "w",
        "time_s": 0.5,
        "unfinished": [],
        "prompt_token_ids": [4, 6],
    }
    return group | {"completions": completions}


def config_of(run, *overrides):
    return load_config(["rollout=replay", f"rollout.source_run={run}", "batch.group_size=2", *overrides])


def test_a_step_done_again_counts_once_with_its_last_record(written):
    record = open_record(written, character_tokenizer())
    assert list(record.places) == ["s/0#2", "s/4#2", "s/1#2"]
    assert [group.scores[0].value for group in record.step_groups()] == [0.0, 0.0, 1.0]
    group, _ = record.read("s/1#2")
    assert group.completions[0].versions.tolist() == [3, 4]
    np.testing.assert_array_equal(group.completions[1].roll_logp, np.array([-1.0, -0.5], dtype=np.float32))
    assert len(record.step_groups(1)) == 1
    assert read_group(row(0, 0.0))[2].prompt_token_ids.tolist() == record.prompts.train[0].token_ids.tolist()


def test_steps_that_the_run_went_back_from_and_never_did_again_are_none_of_its_record(written):
    """It had come to step 2, went back to its beginning and was ended after step 1, with half a row of the next."""
    steps = "".join(json.dumps({"step": step, "incarnation": life}) + "\n" for step, life in ((1, 0), (2, 0), (1, 1)))
    (written / "metrics.jsonl").write_text(steps + '{"step": 2, "inc')
    assert list(open_record(written, character_tokenizer()).places) == ["s/0#2"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["batch.group_size=4"], "batch.group_size=4: .* was recorded with batch.group_size=2"),
        (["rollout.temperature=0.7"], "rollout.temperature=0.7: .* recorded with rollout.temperature=1.0"),
        (["model.embedded.num_layers=2"], "model.embedded.num_layers=2: .* recorded with model.embedded.num_layers=3"),
        (["model=pretrained", "model.path=some/model"], "model.path=some/model: .* recorded with model.path=embedded"),
    ],
)
def test_another_run_shape_is_refused_by_its_key(written, overrides, named):
    check_source(config_of(written))
    with pytest.raises(ConfigError, match=named):
        check_source(config_of(written, *overrides))


def test_what_is_no_record_is_told(written, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text(yaml.safe_dump({}))
    with pytest.raises(
        ConfigError, match=r"bare' holds no groups; give the folder of a run that was made with rollout.record=true"
    ):
        open_record(tmp_path / "bare", character_tokenizer())
    with pytest.raises(ConfigError, match="nowhere' does not exist"):
        check_source(config_of(tmp_path / "nowhere"))
    path = written / "groups" / "step-000001.jsonl"
    path.write_text(path.read_text() + '{"order": 9}\n')
    with pytest.raises(ConfigError, match=r"step-000001.jsonl, line 2: is not a recorded group"):
        open_record(written, character_tokenizer())
    path.write_text(json.dumps(row(0, 0.0, token=4096)) + "\n")
    with pytest.raises(ConfigError, match="line 1: token 4096 is not in this model's vocabulary"):
        open_record(written, character_tokenizer())


def test_a_record_shorter_than_the_run_is_told_with_what_works(written):
    record = open_record(written, character_tokenizer())
    check_length(record, num_steps=3, groups_per_step=1)
    with pytest.raises(ConfigError, match="has 3 recorded groups, which are 1 steps; steps=1 works"):
        check_length(record, num_steps=2, groups_per_step=2)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.max_lag=1", "rollout.oversample=1"], "rollout.max_lag=0 works"),
        (["rollout.transport=nccl"], "transport=local works"),
    ],
)
def test_what_makes_no_sense_in_a_replay_is_refused(written, overrides, named):
    with pytest.raises(ConfigError, match=named):
        config_of(written, *overrides)


def test_a_replay_names_its_run():
    with pytest.raises(ConfigError, match=r"rollout.source_run: has no value yet"):
        load_config(["rollout=replay"])
