"""Every combination that cannot run is refused with both keys, and the value that the message proposes does run."""

from __future__ import annotations

import dataclasses
import re

import pytest

from configs import validate
from configs.build import schema_keys, to_plain
from configs.compose import ConfigError, load_config
from configs.lag import correction_in_use, oldest_token
from configs.schema import Auto, Config

pytestmark = pytest.mark.timeout(60)


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return str(caught.value)


# What is wrong: (words of the message, overrides that follow its advice).
COMBINATIONS = {
    ("batch.groups_per_step=50",): (
        "batch.num_mini_batches=4",
        [["batch.groups_per_step=48"], ["batch.groups_per_step=52"], ["batch.num_mini_batches=2"]],
    ),
    ("batch.groups_per_step=3",): ("batch.num_mini_batches=4", [["batch.groups_per_step=4"], ["batch.num_mini_batches=3"]]),
    ("batch.group_size=1",): ("advantage.name=grpo", [["batch.group_size=2"]]),
    ("model.dtype=bfloat16",): ("learner.zero_stage=0", [["learner.zero_stage=1"]]),
    ("learner.reference=off",): ("algorithm.kl.kind=k3", [["learner.reference=frozen"], ["algorithm.kl.kind=off"]]),
    ("algorithm.kl.beta=0",): ("algorithm.kl.kind=k3", [["algorithm.kl.beta=0.001"], ["algorithm.kl.kind=off"]]),
    ("data.num_epochs=2",): ("steps=150", [["steps=null"]]),
    ("deadlines.receive_s=300",): ("deadlines.push_s=300", [["deadlines.receive_s=60"], ["deadlines.push_s=1500"]]),
    ("steps=null",): ("data.num_epochs", [["steps=400"], ["data.num_epochs=1"]]),
    ("learner.optimizer.warmup_steps=10", "learner.optimizer.warmup_ratio=0.1"): (
        "learner.optimizer.warmup_ratio=0.1",
        [["learner.optimizer.warmup_steps=0"], ["learner.optimizer.warmup_ratio=0"]],
    ),
    ("rollout.max_lag=1", "rollout.late=wait"): (
        "rollout.oversample=2",
        [["rollout.oversample=1"], ["rollout.late=correct"]],
    ),
    ("rollout.max_lag=1", "rollout.oversample=auto"): (
        "rollout.oversample=auto",
        [["rollout.oversample=1"], ["rollout.max_lag=0"]],
    ),
    ("rollout.max_token_lag=2",): ("rollout.late=correct", [["rollout.late=drop"], ["rollout.max_token_lag=null"]]),
    ("rollout.straggler.after_s=5", "rollout.straggler.min_finished=8"): (
        "batch.group_size=8",
        [["rollout.straggler.min_finished=7"]],
    ),
    ("rollout.straggler.after_s=5", "rollout.engine=async_core"): (
        "rollout.engine=async_core",
        [["rollout.engine=in_process"], ["rollout.straggler.after_s=null"]],
    ),
    ("selftest_lr0=true",): (
        "learner.optimizer.learning_rate=0.0003",
        [["learner.optimizer.learning_rate=0"], ["selftest_lr0=false"]],
    ),
    ("data.last_batch=keep", "rollout.max_lag=1", "rollout.oversample=1"): (
        "data.last_batch=keep",
        [["rollout.max_lag=0"], ["data.last_batch=drop"]],
    ),
    ("cluster.placement=colocated", "rollout.max_lag=1", "rollout.oversample=1"): (
        "cluster.placement=colocated",
        [["cluster.placement=split"], ["rollout.max_lag=0"]],
    ),
    ("cluster.placement=colocated", "rollout.num_workers=2", "learner.num_ranks=4"): (
        "learner.num_ranks=4: every device has one",
        [["learner.num_ranks=2"], ["rollout.num_workers=4"]],
    ),
    ("cluster.placement=colocated", "rollout.tensor_parallel_size=2", "learner.num_ranks=2"): (
        "rollout.tensor_parallel_size=2",
        [["cluster.placement=split"], ["rollout.tensor_parallel_size=1", "learner.num_ranks=1"]],
    ),
    ("cluster.placement=colocated", "rollout.transport=nccl"): (
        "rollout.transport=nccl",
        [["rollout.transport=local"], ["rollout.transport=ipc"]],
    ),
    ("rollout.max_model_tokens=37",): ("data.max_prompt_tokens=32 + rollout.max_new_tokens=6", [["rollout.max_model_tokens=38"]]),
    ("rollout.transport=ipc", "rollout.num_workers=2"): (
        "rollout.num_workers=2",
        [["rollout.transport=nccl"], ["rollout.transport=local"], ["rollout.num_workers=1"]],
    ),
    ("rollout.max_visits_per_step=31",): ("batch.groups_per_step=32", [["rollout.max_visits_per_step=32"]]),
    ("model.embedded.num_heads=5",): ("num_kv_heads=3", [["model.embedded.num_heads=6"]]),
    ("model.embedded.max_digits=2",): ("model.embedded.digit_weights", [["model.embedded.digit_weights=[1.0, 1.0]"]]),
    ("~data.sources.arithmetic",): ("data.sources", [["data=jsonl", "data.sources.main.path=pyproject.toml"]]),
    ("~reward.parts.exact_integer",): ("reward.parts", [["reward.parts.mine.function=file.py:function"]]),
    ("reward=[format,repetition]",): ("accuracy", [["reward.parts.format.accuracy=true"]]),
    ("reward.parts.exact_integer.weight=0",): ("weight", [["reward.parts.exact_integer.weight=1"]]),
    ("reward.clip_min=2", "reward.clip_max=1"): ("reward.clip_max=1", [["reward.clip_min=1"]]),
    ("reward.parts.exact_integer.clip_min=0", "reward.parts.exact_integer.clip_max=-1"): (
        "reward.parts.exact_integer.clip_max=-1",
        [["reward.parts.exact_integer.clip_min=-1"]],
    ),
    ("reward.parts.exact_integer.needs=frmat",): ("there is no reward.parts.frmat", [["reward.parts.exact_integer.needs=null"]]),
    ("reward.parts.exact_integer.needs=a", "reward.parts.a={function: exact, needs: exact_integer}"): (
        "exact_integer needs a needs exact_integer",
        [["reward.parts.exact_integer.needs=null"]],
    ),
    ("reward.parts.exact_integer.needs=a", "reward.parts.a={function: exact, sources: [arithmetic]}"): (
        "reward.parts.a judges the sources arithmetic alone",
        [["reward.parts.exact_integer.sources=[arithmetic]"]],
    ),
    ("reward.parts.exact_integer.confined=true",): ("num_processes", [["reward.parts.exact_integer.num_processes=1"]]),
    ("reward.parts.exact_integer.concurrency=4",): ("num_processes", [["reward.parts.exact_integer.num_processes=1"]]),
    ("reward.parts.exact_integer.memory_gib=1",): ("num_processes", [["reward.parts.exact_integer.num_processes=1"]]),
    ("reward.parts.exact_integer.sources=[arithmetics]",): (
        "did you mean 'arithmetic'",
        [["reward.parts.exact_integer.sources=[arithmetic]"]],
    ),
    ("reward.parts.exact_integer.sources=[b]", "data.sources.b.kind=arithmetic"): (
        "data.sources.arithmetic: no reward part judges it",
        [["reward.parts.exact_integer.sources=[]"]],
    ),
    ("data.sources.arithmetic.reward=exact_intege",): ("'exact_integer'", [["data.sources.arithmetic.reward=exact_integer"]]),
}


@pytest.mark.parametrize("wrong", COMBINATIONS, ids=" ".join)
def test_a_combination_is_refused_with_a_value_that_works(wrong: tuple[str, ...]):
    words, cures = COMBINATIONS[wrong]
    message = error_of(*wrong)
    assert words in message
    assert "\n" not in message
    for cure in cures:
        keys = [o for o in wrong if not (o.startswith("~data") and "data=jsonl" in cure)]
        load_config([*keys, *cure])  # as on a command line: what comes later wins


def test_bounds_and_policies_of_a_part_name_it():
    key = "reward.parts.exact_integer"
    assert error_of(f"{key}.batch_size=0") == f"{key}.batch_size: 0 must be 1 or more"
    assert error_of(f"{key}.timeout_s=0") == f"{key}.timeout_s: 0.0 must be above 0"
    assert error_of(f"{key}.on_error=drop_grup").startswith(f"{key}.on_error: 'drop_grup' is none of drop_sample, drop_group,")
    assert error_of(f"{key}.on_error=drop_grup").endswith("did you mean 'drop_group'?")
    assert load_config([f"{key}.on_timeout='retry(2, zero)'"]).reward.parts["exact_integer"].on_timeout == "retry(2, zero)"


def test_the_proposed_batch_is_in_the_message():
    assert "batch.groups_per_step=48 or 52 works, or batch.num_mini_batches=2" in error_of("batch.groups_per_step=50")
    assert "batch.groups_per_step=4 works, or batch.num_mini_batches=3" in error_of("batch.groups_per_step=3")


@pytest.mark.parametrize(
    ("override", "rest"),
    [
        ("rollout.temperature=0", "0.0 must be above 0"),
        ("rollout.top_p=1.5", "1.5 must be above 0, at most 1"),
        ("rollout.oversample=0.5", "0.5 must be 1 or more"),
        ("batch.group_size=0", "0 must be 1 or more"),
        ("learner.zero_stage=4", "4 must be 0 or more, at most 3"),
        ("learner.optimizer.warmup_ratio=1.1", "1.1 must be 0 or more, at most 1"),
        ("learner.optimizer.beta1=1", "1.0 must be 0 or more, at most 0.99999"),
        ("deadlines.push_s=0", "0.0 must be above 0"),
        ("evaluation.max_prompts_per_stratum=0", "0 must be 1 or more"),
    ],
)
def test_bounds(override: str, rest: str):
    assert error_of(override) == f"{override.split('=', maxsplit=1)[0]}: {rest}"


def test_every_number_of_the_schema_is_bounded():
    # These may be anything: a bonus may be a penalty, and so may a reward part.
    free = {"algorithm.entropy_beta", "reward.parts.NAME.weight", "model.embedded.seed"}
    free |= {f"reward.{branch}clip_{end}" for branch in ("", "parts.NAME.") for end in ("min", "max")}
    numbers = {key for key, field in schema_keys(Config) if re.match(r"(int|float)\b", str(field.type))}
    assert numbers - free == set(validate._BOUNDS)


def test_every_key_of_the_schema_says_what_it_means():
    for key, field in schema_keys(Config):
        assert len(field.metadata.get("help", "")) > 2, key


def test_files_must_exist_and_models_be_a_folder_or_a_hub_name(tmp_path):
    path = tmp_path / "prompts.jsonl"
    arguments = ["data=jsonl", f"data.sources.main.path={path}"]
    assert error_of(*arguments) == f"data.sources.main.path: no file '{path}'"
    path.touch()
    load_config(arguments)
    assert error_of(f"model.warm_start_file={tmp_path}/x").startswith("model.warm_start_file: no file")
    for name in ("./model", "a/b/c", f"{tmp_path}/none", "two words"):
        assert error_of(f"model.path={name}").startswith("model.path: ")
    assert error_of("model.path='~/none'").startswith("model.path: '~/none' is not a folder")
    for name in ("owner/model-1.5B", "gpt2", "smollm2-135m", str(tmp_path)):
        assert load_config([f"model.path={name}"]).model.path == name
    assert "is not a folder" in error_of("checkpoint_dir=owner/model")


def test_nothing_is_changed_by_checking():
    config = load_config([])
    before = to_plain(config)
    validate.check_values(config)
    assert to_plain(config) == before
    assert dataclasses.is_dataclass(config)


def test_a_number_or_the_word_auto():
    assert load_config(["rollout.oversample=1.5"]).rollout.oversample == 1.5
    config = load_config(["rollout.oversample=auto"])
    assert config.rollout.oversample is Auto.auto
    assert load_config([f"rollout.oversample={to_plain(config)['rollout']['oversample']}"]) == config
    for wrong in ("much", "null", "true"):
        assert "is neither a number nor auto" in error_of(f"rollout.oversample={wrong}")
    assert "must be 1 or more" in error_of("rollout.oversample=0.5")


@pytest.mark.parametrize(
    ("overrides", "correction", "oldest"),
    [
        ([], "none", 0),
        (["rollout.max_lag=2"], "tis_token", None),
        (["rollout.max_lag=2", "correction=none"], "none", None),
        (["rollout.max_lag=2", "correction=icepop", "rollout.late=wait"], "icepop", 2),
        (["rollout.max_lag=2", "rollout.late=drop"], "tis_token", 2),
        (["rollout.max_lag=2", "rollout.late=drop", "rollout.max_token_lag=3"], "tis_token", 3),
        (["rollout.late=wait"], "none", 0),
    ],
)
def test_what_a_lag_brings(overrides, correction, oldest):
    config = load_config(["rollout.oversample=1", *overrides])
    assert correction_in_use(config).name == correction
    assert oldest_token(config.rollout) == oldest
