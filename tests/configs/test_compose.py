"""A key is found however it came in, a value has its type on every path, and whatever is open is found at the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from configs.build import build, to_plain
from configs.compose import REDACTED, ConfigError, dump_config, load_config, shipped_files
from configs.schema import Aggregation, Config, Console, Dtype, KlKind, Reference, RewardPart

pytestmark = pytest.mark.timeout(60)


def error_of(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, config_dir)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def own(tmp_path: Path):
    """Writes a user's experiment and gives its overrides."""

    def write(text: str, header: str = "# @package _global_\n") -> dict:
        folder = tmp_path / "mine" / "experiment"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "own.yaml").write_text(header + text)
        return {"overrides": ["experiment=own"], "config_dir": tmp_path / "mine"}

    return write


def test_the_defaults_are_the_embedded_job():
    config = load_config([])
    assert (config.model.path, config.steps, config.batch.groups_per_step, config.batch.group_size) == ("embedded", 150, 32, 8)
    assert config.learner.optimizer.learning_rate == 3e-4
    assert config.reward.parts == {"exact_integer": RewardPart(function="exact_integer")}
    assert config.data.sources["arithmetic"].params == {"max_digits": 3}


def test_aspo_is_the_paper_form():
    # ALGORITHMS 1.6: clip 0.2 both ways, c = 3, k3 with 0.001 on all tokens, the mean over each response first.
    for overrides in ([], ["algorithm=aspo"], ["algorithm=aspo_paper"]):
        config = load_config(overrides)
        assert config.algorithm.name == "aspo"
        assert config.algorithm.params == {"eps_low": 0.2, "eps_high": 0.2, "dual_c": 3.0}
        assert config.algorithm.aggregation is Aggregation.seq_mean_token_mean
        assert (config.algorithm.kl.kind, config.algorithm.kl.beta) == (KlKind.k3, 0.001)
        assert config.learner.reference is Reference.frozen


def test_several_files_of_a_map_by_name():
    parts = load_config(["reward=[exact_integer,format,overlong]", "rollout.max_new_tokens=100"]).reward.parts
    assert {name: part.accuracy for name, part in parts.items()} == {"exact_integer": True, "format": False, "overlong": False}
    assert parts["overlong"].params["limit"] == 100
    with pytest.raises(ConfigError, match=r"^reward=overlon: no such file; .* did you mean 'overlong'\?$"):
        load_config(["reward=[exact_integer,overlon]"])
    with pytest.raises(ConfigError, match=r"^algorithm=\[aspo,grpo\]: cannot be set"):
        load_config(["algorithm=[aspo,grpo]"])


UNKNOWN = {
    "rolout.n=8": ("rolout.n", "rollout"),
    "trainer.lerning_rate=1e-5": ("trainer.lerning_rate", "learner.optimizer.learning_rate"),
    "reward.parts.exact_integer.wieght=5": ("reward.parts.exact_integer.wieght", "reward.parts.exact_integer.weight"),
    "reward.timeout_sec=5": ("reward.timeout_sec", "reward.timeout_s"),
    "data.sources.arithmetic.kindd=jsonl": ("data.sources.arithmetic.kindd", "data.sources.arithmetic.kind"),
}


def test_a_checkpoint_brings_the_configuration_of_its_run(tmp_path: Path):
    """`limen eval checkpoint_dir=...` asks the run's own prompts with its own template; a model folder elsewhere has none."""
    model = tmp_path / "run" / "checkpoints" / "step-000004" / "model"
    model.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(load_config(["rollout.max_new_tokens=11"]), redact=True))
    for folder in (tmp_path / "run", model.parent, model):
        assert load_config([f"checkpoint_dir={folder}"]).rollout.max_new_tokens == 11
    assert load_config([f"checkpoint_dir={tmp_path}"]).rollout.max_new_tokens == 6


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize("override", UNKNOWN)
def test_an_unknown_key_is_named_with_the_nearest(override: str, prefix: str):
    """B154."""
    wrong, near = UNKNOWN[override]
    assert error_of(prefix + override) == f"{wrong}: unknown key; did you mean '{near}'?"


def test_an_unknown_key_of_an_experiment_and_of_a_stored_run(own, tmp_path: Path):
    expected = "rollout.max_lagg: unknown key; did you mean 'rollout.max_lag'?"
    arguments = own("rollout:\n  max_lagg: 1\n")
    assert error_of(*arguments["overrides"], config_dir=arguments["config_dir"]) == expected
    plain = to_plain(Config())
    plain["rollout"]["max_lagg"] = 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(plain))
    assert error_of(f"resume={tmp_path}/run") == expected


def test_hydras_own_keys_are_unknown_too():
    assert error_of("hydra.run.dir=elsewhere").startswith("hydra.run.dir: unknown key")
    assert "unknown key" in error_of("hydra/launcher=basic")


@pytest.mark.parametrize("text", ["1e-6", '"1e-6"', "0.000001", "1.0E-6"])
def test_a_learning_rate_is_a_float_on_every_path(own, text: str):
    """B156."""
    key = "learner.optimizer.learning_rate"
    as_yaml = own(f"learner:\n  optimizer:\n    learning_rate: {text}\n")
    as_dict = ["learner.optimizer={name: adamw, learning_rate: " + text + "}"]
    for config in (load_config([f"{key}={text}"]), load_config(**as_yaml), load_config(as_dict)):
        assert config.learner.optimizer.learning_rate == 1e-6
        assert type(config.learner.optimizer.learning_rate) is float


def test_whole_numbers():
    """B156."""
    for text in ("1e3", "1000", '"1000"', "1000.0"):
        value = load_config([f"rollout.max_new_tokens={text}"]).rollout.max_new_tokens
        assert value == 1000
        assert type(value) is int


WRONG_TYPE = {
    "learner.optimizer.learning_rate=fast": "learner.optimizer.learning_rate: 'fast' is not a number; example: learner.optimizer.learning_rate=1e-06",
    "learner.optimizer.learning_rate=nan": "learner.optimizer.learning_rate: nan is not a number",
    "learner.optimizer.learning_rate=true": "learner.optimizer.learning_rate: True is not a number",
    "rollout.max_new_tokens=2.5": "rollout.max_new_tokens: 2.5 is not a whole number; example: rollout.max_new_tokens=16",
    "steps=true": "steps: True is not a whole number; example: steps=8",
    "seed=null": "seed: None is not a whole number; example: seed=0",
    "model.trust_remote_code=2": "model.trust_remote_code: 2 is not a bool (true or false); example: model.trust_remote_code=false",
    "model.trust_remote_code=yes": "model.trust_remote_code: 'yes' is not a bool",
    "model.path=3.5": "model.path: 3.5 is not a text; example: model.path=embedded",
    "data.instruction=true": "data.instruction: True is not a text",
    "model.dtype=BFLOAT16": "model.dtype: 'BFLOAT16' is not one of float32, bfloat16; did you mean 'bfloat16'?",
    "model.dtype=fp16": "model.dtype: 'fp16' is not one of float32, bfloat16",
    "algorithm.params=3": "algorithm.params: 3 is not a mapping by name; example: algorithm.params.NAME=...",
    "rollout=3": "rollout: 3 is not a mapping; set its own keys, such as rollout.num_workers=...",
    "reward.parts.x=exact_integer": "reward.parts.x: 'exact_integer' is not a mapping; set its own keys, such as reward.parts.x.function=...",
    "model.embedded.digit_weights=3": "model.embedded.digit_weights: 3 is not a list; example: model.embedded.digit_weights=[2.0, 6.0, 3.0]",
    "model.embedded.digit_weights=[1,b,1]": "model.embedded.digit_weights[1]: 'b' is not a number; example: model.embedded.digit_weights=[2.0, 6.0, 3.0]",
    "reward.parts.exact_integer.sources=a": "reward.parts.exact_integer.sources: 'a' is not a list; example: reward.parts.exact_integer.sources=[a]",
    "reward.parts.exact_integer.sources=[1.5]": "reward.parts.exact_integer.sources[0]: 1.5 is not a text; example: reward.parts.exact_integer.sources=[text]",
    "sample.prompts=3": "sample.prompts: 3 is not a list; example: sample.prompts=[text]",
    "reward.parts.exact_integer.function=null": "reward.parts.exact_integer.function: None is not a text; example: reward.parts.exact_integer.function=text",
    "data.sources={1: {kind: jsonl}}": "data.sources: the name 1 is not a text; quote it",
    "steps.x=1": "steps: {'x': 1} is not a whole number",
}


@pytest.mark.parametrize("override", WRONG_TYPE)
def test_a_wrong_type_names_key_value_and_what_works(override: str):
    assert error_of(override).startswith(WRONG_TYPE[override])


def test_an_unquoted_off_in_yaml_is_the_choice_off(own):
    # YAML 1.1 reads it as false.
    config = load_config(**own("learner: {reference: off}\nalgorithm: {kl: {kind: off}}\nlog: {console: off}\n"))
    assert config.learner.reference is Reference.off
    assert config.algorithm.kl.kind is KlKind.off
    assert config.log.console is Console.off


OPEN = {
    "model.path=${oc.env:LIMEN_NOT_SET_X}": ("model.path", "LIMEN_NOT_SET_X"),
    "reward.parts.exact_integer.params.url=${oc.env:LIMEN_NOT_SET_X}": (
        "reward.parts.exact_integer.params.url",
        "LIMEN_NOT_SET_X",
    ),
    "rollout.max_lag=${rollout.removed_key}": ("rollout.max_lag", "rollout.removed_key"),
    "checkpoint.every=???": ("checkpoint.every", "???"),
    "data=jsonl": ("data.sources.main.path", "???"),
}


@pytest.mark.parametrize("override", OPEN)
def test_whatever_is_open_is_found_with_its_full_key(override: str):
    """B158."""
    key, reason = OPEN[override]
    message = error_of(override)
    assert message.startswith(f"{key}: ")
    assert reason in message


def test_a_cycle_is_found():
    """B158."""
    message = error_of("run_dir=${checkpoint_dir}", "checkpoint_dir=${run_dir}")
    assert message.startswith("run_dir: ")
    assert "Recursive" in message


def test_interpolations_reach_defaults_that_no_yaml_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIMEN_TEST_STEPS", "12")
    config = load_config(["steps=${oc.env:LIMEN_TEST_STEPS}", "rollout.num_workers=${checkpoint.keep_last}"])
    assert (config.steps, config.rollout.num_workers) == (12, 2)
    assert load_config(["model.trust_remote_code=${oc.decode:'true'}"]).model.trust_remote_code is True
    assert "2 is not a bool" in error_of("model.trust_remote_code=${checkpoint.keep_last}")


REFUSED = {
    "-m": "unknown option -m",
    "foo": "'foo' is not an override; write key=value",
    "seed=1,2": "'seed=1,2' has several values; quote a text with a comma: seed='\"...\"'",
    "reward=math,format": "'reward=math,format' has several values; a list is 'reward=[math,format]'",
    "+reward.parts.exact_integer.sources=a,b": "'+reward.parts.exact_integer.sources=a,b' has several values; a list is 'reward.parts.exact_integer.sources=[a,b]'",
    "run_dir=a (b": "cannot read the override 'run_dir=a (b'; quote a text",
    "algorithm=asp": "algorithm=asp: no such file; there are aspo, aspo_archer, aspo_paper, cispo,",
    "algorithm=my.py:f": "algorithm=my.py:f: no such file; there are aspo, aspo_archer, aspo_paper, cispo,",
    "model=null": "model=null: name a file; there are embedded, pretrained, qwen3_0_6b, qwen3_30b_a3b, qwen3_4b, qwen3_8b, smollm2_135m",
    "~reward.parts.maths": "~reward.parts.maths: there is no 'reward.parts.maths' to remove",
    "algorithm@x=grpo": "Could not override 'algorithm@x'",
    "resume=no_such_run": "resume: 'no_such_run/config.yaml' does not exist",
}


@pytest.mark.parametrize("override", REFUSED)
def test_other_overrides_are_refused_with_a_reason(override: str):
    error = error_of(override)
    assert error.startswith(REFUSED[override])
    if override.startswith("algorithm="):
        assert error.endswith(("; did you mean 'aspo'?", "; a function of your own is algorithm.name=my.py:f"))


NO_FILE = {
    "reward=my_reward.py:score": "; a function of your own or of a package is reward.parts.NAME.function=my_reward.py:score",
    "reward=[exact,shiny]": "; a function of your own or of a package is reward.parts.NAME.function=shiny",
    "reward=maht": "; a function of your own or of a package is reward.parts.NAME.function=maht; did you mean 'math'?",
    "data=my.jsonl": "; a file of yours is data=jsonl data.sources.main.path=my.jsonl",
    "model=owner/name-0.6B": "; a folder or a name on the hub is model=pretrained model.path=owner/name-0.6B",
    "correction=mine.f": "; a function of your own is correction.name=mine.f",
    "rollout=mine.py:f": "there are engine, replay",  # no group of functions
}


@pytest.mark.parametrize("override", NO_FILE)
def test_the_name_of_no_file_is_answered_with_a_key_that_there_is(override: str):
    error = error_of(override)
    assert error.endswith(NO_FILE[override])
    advised = re.search(r" is ((?:[\w.]+=\S+ ?)+?)(?:;|$)", error)
    if advised is not None and "jsonl" not in override:  # that file would have to be there
        load_config(advised[1].replace("NAME", "mine").split())


NEEDED = {
    "reward.parts.mien.weight=0.2": "reward.parts.mien: has no function; a new one needs reward.parts.mien.function=...; there are exact_integer, mine; did you mean 'mine'?",
    "reward.parts.other={}": "reward.parts.other: has no function; a new one needs reward.parts.other.function=...; there are exact_integer, mine",
    "data.sources.arithmetics.params.num_prompts=9": "data.sources.arithmetics: has no kind; a new one needs data.sources.arithmetics.kind=...; there is arithmetic; did you mean 'arithmetic'?",
}


@pytest.mark.parametrize("override", NEEDED)
def test_a_typo_in_a_name_makes_no_entry_of_its_own(override: str):
    assert error_of("reward.parts.mine.function=exact", override) == NEEDED[override]


def test_an_entry_without_what_it_needs_among_no_others():
    expected = "reward.parts.mien: has no function; a new one needs reward.parts.mien.function=..."
    assert error_of("~reward.parts.exact_integer", "reward.parts.mien.weight=2") == expected
    expected = "reward.parts.brief: has no function; a new one needs reward.parts.brief.function=...; there is brier; did you mean 'brier'?"
    assert error_of("reward=brier", "reward.parts.brief.params.grammar=foo") == expected


def test_a_group_of_ours_is_picked_with_or_without_a_plus():
    for override in ("algorithm=grpo", "+algorithm=grpo", "++algorithm=grpo"):
        assert load_config([override]).algorithm.name == "grpo"
    assert load_config(["+experiment=shuffled_rewards"]).shuffle_rewards is True


def test_single_keys_win_over_experiments_and_maps_are_edited_by_name(own):
    arguments = own("defaults:\n  - override /algorithm: grpo\nsteps: 7\nrollout: {max_new_tokens: 9}\n")
    arguments["overrides"] += [
        "rollout.max_new_tokens=11",
        "reward.parts.second={function: exact, weight: 2}",
        "~reward.parts.exact_integer",
    ]
    config = load_config(**arguments)
    assert (config.algorithm.name, config.steps, config.rollout.max_new_tokens) == ("grpo", 7, 11)
    assert config.reward.parts == {"second": RewardPart(function="exact", weight=2.0)}


def test_a_folder_of_the_users_own(own, tmp_path: Path):
    own("steps: 3\n")
    folder = tmp_path / "mine"
    for group, text in {"algorithm": "name: aspo\nkl: {kind: off}\n", "flavour": "# @package _global_\nsteps: 5\n"}.items():
        (folder / group).mkdir()
        (folder / group / "plain.yaml").write_text(text)
    assert load_config(["experiment=own"], folder).steps == 3
    assert load_config(["algorithm=plain"], folder).algorithm.kl.kind is KlKind.off
    assert load_config(["flavour=plain"], folder).steps == 5
    (folder / "algorithm" / "grpo.yaml").write_text("name: grpo\n")
    assert error_of(config_dir=folder).endswith("algorithm/grpo.yaml: a file algorithm/grpo.yaml ships with limen; rename yours")
    assert error_of(config_dir=tmp_path / "none").startswith("--config-dir: no folder")


def test_mistakes_in_the_users_yaml(own):
    arguments = own("steps: 3\n", header="")
    assert "# @package _global_" in error_of(*arguments["overrides"], config_dir=arguments["config_dir"])
    arguments = own("steps: 3\n  rollout: [\n")
    message = error_of(*arguments["overrides"], config_dir=arguments["config_dir"])
    assert "experiment/own.yaml, line 3: not readable as YAML" in message


def test_the_working_directory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "configs" / "algorithm").mkdir(parents=True)
    (tmp_path / "configs" / "algorithm" / "aspo.yaml").write_text("name: theirs\n")
    (tmp_path / "configs" / "config.yaml").write_text("steps: 1\n")
    monkeypatch.chdir(tmp_path)
    config = load_config([])
    assert (config.steps, config.algorithm.name) == (150, "aspo")


def test_relative_paths_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").touch()
    (tmp_path / "model").mkdir()
    config = load_config(
        [
            "data=jsonl",
            "data.sources.main.path=p.jsonl",
            "run_dir=r",
            "model.path=model",
            "algorithm.name=a.py:f",
            "advantage.name=m.f",
        ]
    )
    assert config.data.sources["main"].path == f"{tmp_path}/p.jsonl"
    assert config.run_dir == f"{tmp_path}/r"
    assert config.model.path == f"{tmp_path}/model"
    assert config.algorithm.name == f"{tmp_path}/a.py:f"
    assert config.advantage.name == "m.f"
    assert load_config(["model.path=owner/model"]).model.path == "owner/model"
    (tmp_path / "embedded").mkdir()
    assert load_config([]).model.path == "embedded"


def test_a_stored_run_is_read_back_and_changed_by_key(tmp_path: Path):
    first = load_config(["model.dtype=bfloat16", "learner.zero_stage=1", "algorithm=grpo", "learner.optimizer.eps=1e-9"])
    assert first.model.dtype is Dtype.bfloat16
    (tmp_path / "config.yaml").write_text(dump_config(first, redact=True))
    again = load_config([f"resume={tmp_path}", "steps=800"])
    expected = to_plain(first) | {"resume": str(tmp_path), "steps": 800}
    assert to_plain(again) == expected
    assert error_of(f"resume={tmp_path}", "algorithm=aspo").startswith("algorithm=aspo: a stored run keeps its files")


@pytest.mark.parametrize("group", shipped_files())
def test_every_shipped_file_composes_and_reads_back(group: str):
    needs = {
        "jsonl": ["data.sources.main.path=pyproject.toml"],
        "parquet": ["data.sources.main.path=pyproject.toml"],
        "datasets": ["data.sources.main.path=owner/name"],
        "data/reasoning_gym": ["data.sources.main.params.task=gcd"],
        "pretrained": ["model.path=owner/name"],
        "replay": ["rollout.source_run=some_run"],
        "bypass": ["algorithm=grpo"],
        "http": ["reward.parts.http.params.urls=http://localhost/score"],
        "judge": ["reward.parts.judge.params.base_url=http://localhost/v1", "reward.parts.judge.params.model=m"],
        "reward_model": ["reward.parts.reward_model.params.path=folder"],
    }
    for name in shipped_files()[group]:
        config = load_config([f"{group}={name}", *needs.get(name, needs.get(f"{group}/{name}", []))])
        assert build(Config, yaml.safe_load(dump_config(config, redact=False))) == config


def test_secrets_are_hidden_and_nothing_else(tmp_path: Path):
    part = "reward.parts.exact_integer.params"
    config = load_config(
        [
            f"+{part}.api_key=sentinel456",
            f"+{part}.headers={{Authorization: Bearer sentinel456, accept: json}}",
            f"+{part}.accessToken=[sentinel456]",
            f"+{part}.url='\"https://me:sentinel456@host/x\"'".replace("'", ""),
            f"+{part}.monkey=banana",
            f"+{part}.api_key_env=JUDGE_KEY",
            f"+{part}.token_env=sentinel456",  # the secret itself, where its variable should be named
        ]
    )
    shown = dump_config(config, redact=True)
    assert "sentinel456" not in shown
    params = yaml.safe_load(shown)["reward"]["parts"]["exact_integer"]["params"]
    assert params["api_key"] == REDACTED
    assert params["monkey"] == "banana"
    assert params["api_key_env"] == "JUDGE_KEY"
    assert params["token_env"] == REDACTED
    assert params["headers"]["accept"] == "json"
    assert params["url"] == f"https://{REDACTED}@host/x"
    assert "max_new_tokens: 6\n" in shown  # the words of the schema are no secrets
    assert yaml.safe_load(shown)["token_weighting"] == {"name": "none", "params": {}}
    assert dump_config(config, redact=False).count("sentinel456") == 5
    # A resumed run does not send the placeholder to anybody: it asks for the secret again.
    (tmp_path / "config.yaml").write_text(shown)
    assert error_of(f"resume={tmp_path}").startswith(f"{part}.api_key: was redacted when the run was stored; give it again")
