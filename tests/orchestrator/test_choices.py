"""Chosen functions and their parameters are checked before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.compose import ConfigError, load_config, shipped_files
from learner.advantages import ADVANTAGES
from learner.token_weights import TOKEN_WEIGHTINGS
from learner.weighting import WEIGHTINGS
from orchestrator.choices import check_functions

pytestmark = pytest.mark.timeout(60)


def check(*overrides: str) -> None:
    check_functions(load_config(overrides))


WRONG = {
    "algorithm.name=aspoo": "algorithm.name: there is no 'aspoo'; there are aspo, ",
    "algorithm.params.eps_lo=1": "algorithm.params.eps_lo: aspo has no such parameter; it takes dual_c, eps_high, eps_low; did you mean 'eps_low'?",
    'algorithm.params.eps_low="0.2"': "algorithm.params.eps_low: '0.2' is not a number; write it without quotes",
    "algorithm.params.dual_c=0.5": "algorithm.params: dual_c must be above 1, got 0.5; 3 is usual",
    "advantage.params.std_mode=x": "advantage.params.std_mode: 'x' is not 'unbiased' or 'population' or 'none'",
    "selection.params.low=0.1": "selection.params.low: zero_variance has no such parameter; it takes none",
    "weighting.name=magnitud": "weighting.name: there is no 'magnitud'; there are cppo, dgpo_question, ha_dw, length, magnitude, none, pods, sign; your own is a dotted path or file.py:function; did you mean 'magnitude'?",
    "weighting=cppo weighting.params.pruning_rate=1": "weighting.params: pruning_rate must lie in [0, 1), got 1",
    "weighting=ha_dw weighting.params.window=1": "weighting.params: eta must be at least 0 and window at least 2",
    "advantage=mad advantage.params.eps=0": "advantage.params: eps must be above 0, got 0",
    "advantage=reinforce_pp advantage.params.gamma=2": "advantage.params: gamma must lie in (0, 1], got 2",
    "token_weighting=acpo token_weighting.params.surrogate=mode_logp": "token_weighting.params: surrogate=mode_logp needs vocab_size",
    "token_weighting.name=entropy": "token_weighting.name: there is no 'entropy'; there are acpo, act_focus, ar, craft, entropy_split, lopti, none;",
    "correction.name=tis": "correction.name: there is no 'tis'; there are bypass, decoupled, ",
    "correction=tis_token correction.params.cap=0": "correction.params: the bounds must satisfy 0 <= lower < upper, got 0.0 and 0;",
    "reward.parts.exact_integer.params.lst=true": "reward.parts.exact_integer.params.lst: exact_integer has no such parameter; it takes last; did you mean 'last'?",
    "reward.parts.exact_integer.function=nowhere.py:f": "reward.parts.exact_integer.function: '{folder}/nowhere.py:f': no file '{folder}/nowhere.py'",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_choice_is_one_line(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(*override.split())
    assert str(caught.value).startswith(WRONG[override].format(folder=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_users_reward_is_bound_as_the_pool_binds_it(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("def f(completion, answer, *, bonus: float = 0.0):\n    return bonus\ndef g(text, answer):\n    return 0.0\n")
    check(f"reward.parts.m.function={path}:f", "reward.parts.m.params.bonus=1")
    with pytest.raises(ConfigError, match="bonus: 'x' is not a number"):
        check(f"reward.parts.m.function={path}:f", "reward.parts.m.params.bonus=x")
    with pytest.raises(ConfigError, match=r"reward\.parts\.m\.function: .* has the parameter 'text', which is none of"):
        check(f"reward.parts.m.function={path}:g")


ONE_STEP = ("batch.num_mini_batches=1", "batch.num_passes=1")


def test_a_ratio_that_is_always_one_is_refused(tmp_path: Path):
    for cure in ((), ("batch.num_mini_batches=4",), ("batch.num_passes=2",), ("allow_inert=true",)):
        if not cure:
            with pytest.raises(ConfigError, match=r"aspo: with batch\.num_mini_batches=1 .*=4 works, or allow_inert=true"):
                check(*ONE_STEP)
        else:
            check(*ONE_STEP, *cure)
    # Five groups cannot be cut into four, two or three mini-batches.
    with pytest.raises(ConfigError, match=r"batch\.num_passes=2 works"):
        check(*ONE_STEP, "batch.groups_per_step=5")
    path = tmp_path / "plain.py"
    path.write_text("def f(tokens): ...\nf.ratio_based = False\ndef g(tokens): ...\n")
    arguments = ["algorithm.params=null", "~algorithm.params"]
    check(*ONE_STEP, f"algorithm.name={path}:f", *arguments)
    with pytest.raises(ConfigError, match="its ratio is always 1"):
        check(*ONE_STEP, f"algorithm.name={path}:g", *arguments)


NOT_GIVEN = {"act_focus": "role", "craft": "teacher_logp"}  # what no run has yet
SHIPPED = [(group, name) for group in ("advantage", "weighting", "token_weighting") for name in shipped_files()[group]]


@pytest.mark.parametrize(("group", "name"), SHIPPED, ids="=".join)
def test_every_shipped_file_passes_or_is_refused_by_what_it_needs(group: str, name: str):
    if name not in NOT_GIVEN:
        check(f"{group}={name}")
        return
    with pytest.raises(ConfigError, match=f"{group}={name} needs LossTokens.{NOT_GIVEN[name]}: .*; {group}=none works"):
        check(f"{group}={name}")


def test_every_function_has_a_file():
    tables = {"advantage": ADVANTAGES, "weighting": WEIGHTINGS, "token_weighting": TOKEN_WEIGHTINGS}
    for group, table in tables.items():
        assert sorted(table) == sorted(shipped_files()[group])


def test_what_is_experimental_is_logged(caplog: pytest.LogCaptureFixture):
    check("token_weighting=ar")
    assert caplog.text == ""
    check("token_weighting=acpo")
    assert "token_weighting=acpo is experimental" in caplog.text


def test_a_users_advantage_may_compare_the_members_of_a_group(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("def f(samples, *, shift: float = 0.0): ...\nf.group_relative = True\ndef g(samples): ...\n")
    single = "batch.group_size=1"
    check(single, f"advantage.name={path}:g")
    check(f"advantage.name={path}:f", "advantage.params.shift=1")
    with pytest.raises(ConfigError, match=r"batch\.group_size=1, .* compares the completions of a group; batch\.group_size=2"):
        check(single, f"advantage.name={path}:f")
    for scheme in ("reinforce", "reinforce_pp"):
        check(single, f"advantage={scheme}")
    with pytest.raises(ConfigError, match=r"advantage\.name=rloo: it compares the completions of a group"):
        check(single, "advantage=rloo")


def test_a_users_weightings_are_checked_like_ours(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("def f(tokens, *, power: float = 1.0): ...\ndef g(samples, advantage, *, power: float = 1.0): ...\n")
    for group, function in (("token_weighting", "f"), ("weighting", "g")):
        check(f"{group}.name={path}:{function}", f"{group}.params.power=2")
        with pytest.raises(ConfigError, match=rf"{group}\.params\.powr: {function} has no such parameter; it takes power"):
            check(f"{group}.name={path}:{function}", f"{group}.params.powr=2")


SEVERAL = "reward=[exact_integer,numeric,format]"
MEAN = {  # overrides: the parts whose accuracies make a mean, and the last, which the advice leaves out
    (SEVERAL,): ("exact_integer, numeric", "numeric"),
    (SEVERAL, "reward.parts.numeric.sources=[b]", "data.sources.b.kind=arithmetic"): ("exact_integer, numeric", "numeric"),
    ("reward=[exact_integer,format]", "reward.parts.format.accuracy=true", "data.sources.arithmetic.reward=format"): None,
    (
        "reward=[exact_integer,format]",
        "reward.parts.format.accuracy=true",
        "reward.parts.exact_integer.needs=format",
        "data.sources.arithmetic.reward=exact_integer",
    ): ("format, exact_integer", "exact_integer"),
    (SEVERAL, "reward.combine=min"): None,
    (SEVERAL, "reward.combine=product"): None,
    (SEVERAL, "reward.parts.numeric.accuracy=false"): None,
    (
        SEVERAL,
        "reward.parts.exact_integer.sources=[arithmetic]",
        "reward.parts.numeric.sources=[b]",
        "data.sources.b.kind=arithmetic",
    ): None,
    (): None,
}


@pytest.mark.parametrize("overrides", MEAN, ids=" ".join)
def test_a_mean_of_accuracies_is_warned_of_once(overrides: tuple[str, ...], caplog: pytest.LogCaptureFixture):
    check(*overrides)
    if MEAN[overrides] is None:
        assert caplog.messages == []
        return
    names, last = MEAN[overrides]
    (message,) = caplog.messages
    assert message.startswith(f"reward.parts: {names} all count for accuracy, which under reward.combine=sum is their mean,")
    caplog.clear()
    check(*overrides, f"reward.parts.{last}.accuracy=false")
    check(*overrides, "reward.combine=min")
    assert caplog.messages == []
