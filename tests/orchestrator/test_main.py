"""The command line: what it says, how it exits, and that nothing heavy is imported before the input is known to be good."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from configs.errors import ConfigError, InputError
from orchestrator.errors import RunStopped
from orchestrator.main import VERBS, Verb, describe, main, overview, parse

pytestmark = pytest.mark.timeout(120)

PROBE = """
import sys
from orchestrator.main import main
code = main(sys.argv[1:])
print("HEAVY", sorted({"torch", "ray", "vllm", "deepspeed"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def probe(*arguments: str, folder: Path) -> tuple[int, str, str, str]:
    """Exit code, stdout, the error lines and the list of heavy modules, from a process of its own in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    *errors, heavy = done.stderr.strip().splitlines()
    assert heavy.startswith("HEAVY"), done.stderr
    return done.returncode, done.stdout, "\n".join(errors), heavy.removeprefix("HEAVY ")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["doctor", "--help"], ["plan", "--help"], ["train", "--print-config"]]
)
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path):
    code, out, errors, heavy = probe(*arguments, folder=tmp_path)
    assert (code, errors, heavy) == (0, "", "[]")
    assert out.startswith(("usage: limen", "seed: 0\n"))


BAD = {
    # B154
    ("train", "rolout.n=8"): "limen: rolout.n: unknown key; did you mean 'rollout'?",
    (
        "train",
        "trainer.lerning_rate=1e-5",
    ): "limen: trainer.lerning_rate: unknown key; did you mean 'learner.optimizer.learning_rate'?",
    ("train", "reward.timeout_sec=5"): "limen: reward.timeout_sec: unknown key; did you mean 'reward.timeout_s'?",
    # B158
    (
        "train",
        "checkpoint.keep_last=${oc.env:LIMEN_NOT_SET_X}",
    ): "limen: checkpoint.keep_last: KeyError raised while resolving interpolation: \"Environment variable 'LIMEN_NOT_SET_X' not found\"",
    ("train", "checkpoint.every=???"): "limen: checkpoint.every: has no value yet (???); set it: checkpoint.every=...",
    ("train", "rollout.max_lag=${rollout.gone}"): "limen: rollout.max_lag: Interpolation key 'rollout.gone' not found",
    ("train", "run_dir=${checkpoint_dir}", "checkpoint_dir=${run_dir}"): "limen: run_dir: Recursive interpolation detected",
    (
        "train",
        "+learner.optimizer.lerning_rate=1e-5",
    ): "limen: learner.optimizer.lerning_rate: unknown key; did you mean 'learner.optimizer.learning_rate'?",
    (
        "train",
        "learner.optimizer.learning_rate=fast",
    ): "limen: learner.optimizer.learning_rate: 'fast' is not a number; example: learner.optimizer.learning_rate=1e-06",
    (
        "train",
        "batch.group_size=1",
    ): "limen: batch.group_size=1, advantage.name=grpo: it compares the completions of a group; batch.group_size=2 or more works, "
    "or advantage=reinforce",
    ("train", "data=jsonl", "data.sources.main.path=none.jsonl"): "limen: data.sources.main.path: no file '{folder}/none.jsonl'",
    ("train", "-m"): "limen: unknown option -m; there are --config-dir, --print-config, --help",
    ("train", "--config-dir"): "limen: --config-dir needs a folder: --config-dir DIR",
    (
        "trian",
    ): "limen: unknown verb 'trian'; there are train, build-model, eval, sample, score, serve-reward, explain, plan, doctor, ledger",
    (
        "steps=3",
    ): "limen: unknown verb 'steps=3'; there are train, build-model, eval, sample, score, serve-reward, explain, plan, doctor, ledger; overrides come after the verb",
    (): "limen: name a verb: train, build-model, eval, sample, score, serve-reward, explain, plan, doctor, ledger; `limen --help` explains them",
    ("doctor", "a", "b"): "limen: limen doctor takes the folder of a run and nothing else: limen doctor [RUN]",
    ("doctor", "steps=3"): "limen: steps=3: is not the folder of a run; name one that `limen train` printed as `run folder`",
    ("ledger",): "limen: limen ledger takes the folder of a run and nothing else: limen ledger RUN",
    ("ledger", "a", "b"): "limen: limen ledger takes the folder of a run and nothing else: limen ledger RUN",
    ("ledger", "none"): "limen: none: is not the folder of a run; name one that `limen train` printed as `run folder`",
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda a: " ".join(a) or "nothing")
def test_bad_input_is_one_line_and_exit_code_2_before_anything_heavy(arguments: tuple[str, ...], tmp_path: Path):
    code, out, errors, heavy = probe(*arguments, folder=tmp_path)
    assert (code, out, heavy) == (2, "", "[]")
    assert errors == BAD[arguments].format(folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_numbers_in_the_configuration_that_is_printed(tmp_path: Path):
    """B156: read as YAML 1.1, in which ``1e-6`` would be a text."""
    overrides = ["learner.optimizer={name: adamw, learning_rate: 1e-6}", "rollout.max_new_tokens=1e3"]
    code, out, errors, _ = probe("train", "--print-config", *overrides, folder=tmp_path)
    assert (code, errors) == (0, "")
    printed = yaml.safe_load(out)
    rate, limit = printed["learner"]["optimizer"]["learning_rate"], printed["rollout"]["max_new_tokens"]
    assert (rate, type(rate), limit, type(limit)) == (1e-6, float, 1000, int)


def test_a_chosen_function_is_checked_before_ray_is_imported(tmp_path: Path):
    code, _, errors, heavy = probe("train", "algorithm.params.eps_lo=0.1", folder=tmp_path)
    assert code == 2
    assert errors.splitlines()[-1].startswith("limen: algorithm.params.eps_lo: aspo has no such parameter")
    assert "ray" not in heavy
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A working directory whose packages carry our names and fail when imported."""
    for name in ("configs", "rewards", "rollout", "learner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the working directory was imported')\n")
    return tmp_path


SCRIPT = Path(sys.executable).parent / "limen"


@pytest.mark.parametrize("start", [[str(SCRIPT)], [sys.executable, "-m", "orchestrator"]], ids=["limen", "-m orchestrator"])
@pytest.mark.parametrize("plain", [False, True], ids=["packages", "plain folders"])
def test_it_runs_where_the_user_has_packages_of_our_names(start: list[str], plain: bool, shadowed: Path):
    if plain:  # a folder without __init__.py is a package too, if it is found first
        for path in shadowed.glob("*/__init__.py"):
            path.rename(path.with_name("mine.py"))
    done = subprocess.run(
        [*start, "train", "--print-config", "steps=7"], cwd=shadowed, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["steps"] == 7


def test_options_may_stand_anywhere_after_or_before_the_verb(tmp_path: Path):
    for arguments in (
        ["--config-dir", "d", "train", "a=1", "--print-config"],
        ["train", "--print-config", "a=1", "--config-dir=d"],
    ):
        call = parse(arguments)
        assert (call.verb, call.overrides, call.config_dir, call.print_config) == ("train", ["a=1"], Path("d"), True)


def test_a_config_dir_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text("# @package _global_\nsteps: 9\n")
    assert main(["train", "--config-dir", str(tmp_path), "experiment=own", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["steps"] == 9


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunStopped("no group was kept:\n  all hard"), 3, "limen: stopped: no group was kept: all hard"),
        (ConfigError("run_dir=x: the folder is not empty"), 2, "limen: run_dir=x: the folder is not empty"),
        (InputError("p.jsonl:3: not a JSON line"), 2, "limen: p.jsonl:3: not a JSON line"),
        (KeyboardInterrupt(), 130, "limen: interrupted"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails() -> int:
        print("some progress")
        raise error

    monkeypatch.setitem(sys.modules, "limen_fault", types.SimpleNamespace(fails=fails))
    monkeypatch.setitem(VERBS, "doctor", Verb("", "", "limen_fault:fails", takes_config=False))
    assert main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out == "some progress\n"
    assert captured.err == line + "\n"


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fails() -> int:
        raise ValueError("not about the input")

    monkeypatch.setitem(sys.modules, "limen_fault", types.SimpleNamespace(fails=fails))
    monkeypatch.setitem(VERBS, "doctor", Verb("", "", "limen_fault:fails", takes_config=False))
    with pytest.raises(ValueError, match="not about the input"):
        main(["doctor"])


def test_every_verb_has_its_function_and_help():
    text = overview()
    for name, verb in VERBS.items():
        assert callable(resolve_name(verb.function))
        assert f"  {name} " in text
        assert verb.detail in describe(name)
    for code in ("0 done", "2 bad", "3 the run", "130", "143"):
        assert code in text
    assert "group_size" not in describe("train").split("keys")[0]
    assert "  batch            batch sizes\n" in describe("train")
    assert "  algorithm=aspo|aspo_archer|aspo_paper|cispo|" in describe("train")


def test_secrets_are_not_printed(tmp_path: Path):
    code, out, errors, _ = probe(
        "train", "--print-config", "+reward.parts.exact_integer.params.api_key=sentinel456", folder=tmp_path
    )
    assert code == 0
    assert "sentinel456" not in out + errors
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(600)
def test_bad_input_found_by_a_verb_is_one_line_and_leaves_the_folder_free(tmp_path: Path):
    """What only the verb can find out (a used folder, bad rows, a model too short for the limits) still ends before Ray starts."""
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    random = ["model.random_weights=true", f"run_dir={tmp_path / 'new'}"]
    cases = {
        (f"run_dir={used}",): f"limen: run_dir={used}: the folder is not empty",
        (f"resume={used}",): "limen: resume: ",
        (*random, "data=jsonl", "data.sources.main.path=bad.jsonl", "rollout.max_new_tokens=6"): "bad.jsonl:2",
        (*random, "rollout.max_new_tokens=2000"): "positions",
        (
            *random,
            "data.last_batch=drop",
            "batch.groups_per_step=20000",
            "rollout.max_visits_per_step=null",
        ): "data.last_batch=drop",
    }
    for arguments, words in cases.items():
        command = [sys.executable, "-m", "orchestrator", "train", "log.console=off", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.strip().splitlines()
        assert words in line
    assert not (tmp_path / "runs").exists()
