"""Functions of the user's own, from a folder outside the package, through replay: each is named by explain, and trains bit for bit
as the shipped function of the same formula does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.errors import ConfigError
from learner.learner import Learner
from learner.spec import LearnerSpec, RolloutBatch
from orchestrator.choices import check_functions
from orchestrator.explain import explanation
from orchestrator.material import learner_spec
from orchestrator.replay import open_record
from rollout.tokenizer import character_tokenizer

pytestmark = pytest.mark.timeout(300)

LIMEN = str(Path(sys.executable).with_name("limen"))
FUNCTIONS = '''
import torch

from learner.corrections import Correction
from learner.surrogates import Surrogate


def level(tokens, *, height: float = 1.0) -> Surrogate:
    """{height} for every token, from a notebook of mine."""
    factor = height * (tokens.advantage != 0).float()
    return Surrogate(factor, -tokens.advantage * tokens.logp * height, {"high_pos": tokens.advantage > 0})


level.ratio_based = False
level.formula = "{height} for every token"
level.source = "a notebook of mine"


def centred(samples, *, scale: float = 1.0):
    """scale (R - mean of the batch)"""
    values = samples.values[samples.valid]
    result = torch.zeros(len(samples.values), dtype=torch.float64)
    result[samples.valid] = scale * (values - values.mean())
    return result.float()


def successes_less(samples, advantage, *, factor: float = 1.0):
    """factor where A > 0, else 1"""
    return torch.where(advantage > 0, factor, 1.0)


def sure(tokens, *, share: float = 0.0):
    """1 - share (1 - pi_old)"""
    return share * tokens.old_logp.exp() + (1 - share)


def capped(tokens, *, most: float = 100.0) -> Correction:
    """min(rho, most)"""
    return Correction((tokens.old_logp - tokens.roll_logp).exp().clamp(max=most))
'''
# group: the user's function and parameters, and the shipped one of the same formula
SAME = {
    "algorithm": ("level", {"height": 1.0}, "reinforce", {}),
    "advantage": ("centred", {"scale": 1.0}, "reinforce", {"baseline": "batch_mean"}),
    "weighting": ("successes_less", {"factor": 0.5}, "sign", {"positive": 0.5, "negative": 1.0}),
    "token_weighting": ("sure", {"share": 0.3}, "ar", {"alpha": 0.3}),
    "correction": ("capped", {"most": 1.5}, "tis_token", {"cap": 1.5}),
}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The user's folder, from which the command is run: functions, a YAML of the algorithm, and one that chooses the rest."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "functions.py").write_text(FUNCTIONS)
    choices = {group: {"name": f"mine.py:{name}", "params": params} for group, (name, params, *_) in SAME.items()}
    for group in ("algorithm", "experiment"):
        (tmp_path / "yaml" / group).mkdir(parents=True)
    (tmp_path / "yaml" / "algorithm" / "level.yaml").write_text(json.dumps(choices.pop("algorithm")) + "\n")
    (tmp_path / "yaml" / "experiment" / "mine.yaml").write_text("# @package _global_\n" + json.dumps(choices) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def choose(group, name, params):
    return [f"{group}.name='{name}'", f"{group}.params={{{', '.join(f'{k}: {v}' for k, v in params.items())}}}"]


def without_params(group):
    """The default algorithm has parameters of its own, which another function does not take."""
    return [f"~{group}.params.{name}" for name in ("eps_low", "eps_high", "dual_c")] if group == "algorithm" else []


def trained_weights(recorded, config):
    """The weights after one step on the record's first batch: two mini-batches, twice."""
    check_functions(config)
    learner = Learner(LearnerSpec(**learner_spec(config, recorded.model, total_optimizer_steps=4)), 0, 1)
    record = open_record(recorded.folder, character_tokenizer())
    learner.prepare(RolloutBatch(1, 0, tuple(record.step_groups(1))))
    report = learner.train()
    assert report.num_optimizer_steps == 4
    assert report.num_skipped == 0
    return torch.cat([p.detach().flatten() for p in learner.model.hf.parameters()]), report.metrics


@pytest.fixture(scope="module")
def default_weights(recorded):
    return trained_weights(recorded, recorded.load())[0]


@pytest.mark.parametrize("form", ["mine.py:{}", "my_package.functions.{}"])
@pytest.mark.parametrize("group", SAME)
def test_it_trains_as_the_shipped_function_of_the_same_formula(group, form, recorded, outside, default_weights):
    mine, params, ours, our_params = SAME[group]
    config = recorded.load(*without_params(group), *choose(group, form.format(mine), params))
    weights, metrics = trained_weights(recorded, config)
    shipped, _ = trained_weights(recorded, recorded.load(*without_params(group), *choose(group, ours, our_params)))
    assert torch.equal(weights, shipped)
    assert not torch.equal(weights, default_weights)
    if group == "algorithm":
        assert metrics["clip/high_pos"] == 1, "its regions are metrics"


def test_explain_names_it_and_says_its_formula(recorded, outside):
    config = recorded.load("algorithm=level", "experiment=mine", config_dir=outside / "yaml")
    lines = explanation(config)
    assert "of [ -A W v omega w l ]" in lines[0]
    for group, (name, *_) in SAME.items():
        (line,) = [line for line in lines if f"{group}={outside / 'mine.py'}:{name} " in line and line.startswith("  ")]
        assert "a function of your own" in line
    text = "\n".join(lines)
    assert "1 for every token  [a function of your own; a notebook of mine]" in text
    assert "1 - share (1 - pi_old)" in text, "without a formula the docstring"
    assert "no rule refuses" in lines[-1]


@pytest.mark.parametrize(
    ("group", "params", "named"),
    [
        (
            "algorithm",
            {"hight": 1.0},
            r"algorithm.params.hight: level has no such parameter; it takes height; did you mean 'height'",
        ),
        ("advantage", {"scale": "big"}, r"advantage.params.scale: 'big' is not a number"),
        ("weighting", {"samples": 1}, r"weighting.params.samples: is not a keyword-only parameter of successes_less"),
        ("token_weighting", {"share": "true"}, r"token_weighting.params.share: True is not a number"),
        ("correction", {"most": "null"}, r"correction.params.most: None is not a number"),
    ],
)
def test_its_parameters_are_checked_like_ours(group, params, named, recorded, outside):
    config = recorded.load(*without_params(group), *choose(group, f"mine.py:{SAME[group][0]}", params))
    for check in (check_functions, explanation):
        with pytest.raises(ConfigError, match=named):
            check(config)


@pytest.mark.cluster
def test_one_yaml_outside_the_package_trains_through_replay(recorded, outside):
    """The whole command, where actors run in other folders."""
    run = outside / "run"
    command = [
        LIMEN,
        "train",
        "--config-dir",
        "yaml",
        "algorithm=level",
        "experiment=mine",
        "rollout=replay",
        f"rollout.source_run={recorded.folder}",
    ]
    command += [*(o for o in recorded.overrides if not o.startswith("~")), f"run_dir={run}", "~reward.parts.exact_integer"]
    done = subprocess.run(command, check=False, cwd=outside, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert first["clip/high_pos"] == second["clip/high_pos"] == 1
    assert first["correction/max"] == pytest.approx(1.5)
    assert first["weights"] != second["weights"]
