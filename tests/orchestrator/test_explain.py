"""`limen explain`: the formula, and a table computed by the real functions that agrees with the truth tables worked by hand."""

import re
from functools import partial

import pytest

from configs.compose import load_config, shipped_files
from configs.errors import ConfigError
from learner.advantages import ADVANTAGES
from learner.corrections import CORRECTIONS
from learner.formulas import all_params, formula, formula_of, source_of
from learner.surrogates import SURROGATES, Surrogate
from learner.token_weights import TOKEN_WEIGHTINGS
from learner.weighting import WEIGHTINGS
from orchestrator.credit_table import RATIOS, credit_tables
from orchestrator.explain import explanation
from orchestrator.main import main

pytestmark = pytest.mark.timeout(60)

# ratio: factor at A > 0 and its region, factor at A < 0 and its region; both clip ranges 0.2 (ALGORITHMS 1.3 and 1.9)
ASPO = {
    0.2: (3, "dual_pos", 0, "hard_neg"),  # 1 / 0.2 = 5 is capped
    0.5: (2, None, 0, "hard_neg"),
    0.8: (1.25, None, 0.8, None),  # an edge belongs to the active side
    1.0: (1, None, 1, None),
    1.2: (0.833333, None, 1.2, None),
    1.5: (0, "hard_pos", 1.5, None),
    4.0: (0, "hard_pos", 3, "dual_neg"),
}
GRPO = {
    0.2: (0.2, None, 0, "hard_neg"),
    0.5: (0.5, None, 0, "hard_neg"),
    0.8: (0.8, None, 0.8, None),
    1.0: (1, None, 1, None),
    1.2: (1.2, None, 1.2, None),
    1.5: (0, "hard_pos", 1.5, None),
    4.0: (0, "hard_pos", 4, None),
}


def rows_of(name, **params):
    (rows,) = credit_tables(partial(SURROGATES[name], **params)).values()
    return {row.label: row for row in rows}


def check(rows, truth):
    assert [float(label) for label in rows if not label.startswith("just")] == list(RATIOS) == list(truth)
    for ratio, (pos, pos_region, neg, neg_region) in truth.items():
        row = rows[f"{ratio:g}"]
        assert row.positive.factor == pytest.approx(pos, abs=1e-6)
        assert row.positive.credit == pytest.approx(-pos, abs=1e-6)
        assert row.negative.factor == pytest.approx(neg, abs=1e-6)
        assert row.negative.credit == pytest.approx(neg, abs=1e-6)
        assert row.positive.regions == ((pos_region,) if pos_region else ())
        assert row.negative.regions == ((neg_region,) if neg_region else ())


def test_aspo_agrees_with_the_truth_table():
    check(rows_of("aspo", eps_low=0.2, eps_high=0.2, dual_c=3.0), ASPO)


def test_grpo_agrees_with_the_truth_table():
    check(rows_of("grpo", eps_low=0.2, eps_high=0.2), GRPO)
    check(rows_of("ppo", dual_c=3.0), GRPO | {4.0: (0, "hard_pos", 0, "dual_neg")})


@pytest.mark.parametrize(
    ("name", "params", "edge", "sign", "below", "above"),
    [
        ("aspo", {}, "0.333333", "positive", 3, 3),
        ("aspo", {}, "0.8", "negative", 0, 0.8),
        ("aspo", {}, "1.2", "positive", 1 / 1.2, 0),
        ("aspo", {}, "3", "negative", 3, 3),
        ("grpo", {"eps_low": 0.3, "eps_high": 0.28}, "0.7", "negative", 0, 0.7),
        ("grpo", {"eps_low": 0.3, "eps_high": 0.28}, "1.28", "positive", 1.28, 0),
        ("gspo", {}, "0.9997", "negative", 0, 0.9997),
        ("gspo", {}, "1.0004", "positive", 1.0004, 0),
        ("cispo", {"cap": 5.0}, "5", "positive", 5, 5),
        ("cispo", {"cap": 5.0, "floor": 0.5}, "0.5", "negative", 0.5, 0.5),
        ("cispo_relative", {"eps_high": 0.28}, "1.28", "positive", 1.28, 1.28),
        ("tv_mask", {"max_shift": 0.2}, "3", "positive", 3, 0),  # pi_old 0.1, so pi - pi_old passes 0.2 at r = 3
    ],
)
def test_rows_just_inside_and_outside_each_edge(name, params, edge, sign, below, above):
    rows = rows_of(name, **params)
    inside, outside = (getattr(rows[f"just {side} {edge}"], sign) for side in ("below", "above"))
    assert inside.factor == pytest.approx(below, rel=2e-5)
    assert outside.factor == pytest.approx(above, rel=2e-5)
    assert (inside.regions, inside.factor == 0) != (outside.regions, outside.factor == 0)


def test_an_edge_is_found_whatever_its_place():
    for eps in (0.013, 0.1, 0.37, 0.9):
        labels = rows_of("grpo", eps_low=eps, eps_high=2 * eps)
        assert {f"just above {1 - eps:.6g}", f"just below {1 + 2 * eps:.6g}"} <= set(labels)
        assert len(labels) == len(RATIOS) + 4


def test_factors_of_the_gate_and_of_no_ratio():
    """SAPO: ALGORITHMS 2.7."""
    sapo = rows_of("sapo", tau_pos=1.0, tau_neg=1.05)
    assert sapo["1.5"].positive.factor == pytest.approx(1.410022, abs=1e-6)
    assert sapo["0.5"].positive.factor == pytest.approx(0.470007, abs=1e-6)
    assert sapo["1.5"].negative.factor == pytest.approx(1.401210, abs=1e-6)
    assert list(sapo) == [f"{ratio:g}" for ratio in RATIOS], "a smooth gate has no edge"
    assert {(row.positive.factor, row.negative.factor) for row in rows_of("reinforce").values()} == {(1.0, 1.0)}


def test_tokens_that_a_surrogate_tells_apart_by_entropy_have_tables_of_their_own():
    tables = credit_tables(SURROGATES["aspo_archer"])
    assert list(tables) == ["low-entropy", "high-entropy"]
    low, high = ({row.label: row for row in rows} for rows in tables.values())
    assert low["just above 1.2"].positive.factor == 0
    assert high["just above 1.2"].positive.factor == pytest.approx(1 / 1.2, rel=1e-4)
    assert high["just above 1.4"].positive.factor == 0


# ---- the formula ----------------------------------------------------------------------------------------------------

TABLES = {
    "algorithm": SURROGATES,
    "advantage": ADVANTAGES,
    "weighting": WEIGHTINGS,
    "token_weighting": TOKEN_WEIGHTINGS,
    "correction": CORRECTIONS,
}


def text_of(*overrides):
    return "\n".join(explanation(load_config(overrides, combinations=False)))


def test_the_formula_of_the_default_has_its_numbers_and_sources():
    lines = explanation(load_config([]))
    assert lines[0] == (
        "minimise  mean over responses of the mean over their tokens of [ -A w l ]  +  0.001 x the same of [ (exp(-d) - 1 + d) ]"
    )
    assert lines[1] == "so that   each token's l gets the credit  c = -A w / D + 0.001 (1 - exp(-d)) / D"
    (surrogate,) = [line for line in lines if "algorithm=aspo " in line and line.startswith("  w")]
    assert "min(1/r, 3) where A > 0, but 0 where r > 1 + 0.2" in surrogate
    assert "2510.06062" in surrogate
    assert lines[-1] == "no rule refuses this combination"


def test_every_factor_in_use_is_in_the_formula():
    text = text_of(
        "algorithm=grpo",
        "weighting=magnitude",
        "token_weighting=entropy_split",
        "correction.name=tis_token",
        "correction.params={cap: 2.5}",
        "algorithm.aggregation=token_sum_norm",
        "rollout.max_new_tokens=12",
        "algorithm.entropy_beta=0.02",
        "algorithm.kl.kind=k2",
        "algorithm.kl.ratio=detached",
        "algorithm.kl.token_filter=low_entropy",
        "batch.num_passes=2",
    )
    assert "sum over all loss tokens / (responses x 12) of [ -A W v omega w l ]" in text
    assert "0.001 x the same, low-entropy tokens alone, of [ r d^2 / 2 ]  -  0.02 x the same of [ H ]" in text
    assert "c = -A W v omega w / D + 0.001 r d / D_kl" in text
    assert "e = -0.02 / D" in text
    assert "min(rho, 2.5)" in text
    assert "4 mini-batches x 2 passes = 8 optimizer steps" in text
    assert (
        "correction=tis_token -> token_weighting=entropy_split -> algorithm=grpo -> aggregation=token_sum_norm -> KL k2" in text
    )


def test_kl_in_the_reward_is_where_it_acts():
    text = text_of("algorithm=grpo", "algorithm.kl.place=reward", "algorithm.kl.kind=k1")
    assert "R less 0.001 x the sum over tokens of d, before the advantage" in text
    assert "prepare   KL k1 from the rewards -> advantage=grpo" in text
    assert "of [ -A w l ]\n" in text


@pytest.mark.parametrize("group", sorted(TABLES))
def test_every_function_has_a_formula_that_takes_its_parameters(group):
    for name, function in TABLES[group].items():
        assert hasattr(function, "formula"), f"{group}={name} has no formula"
        words = formula_of(function, {"eps_high": 0.28} if name == "cispo_relative" else {})
        assert words
        assert not re.search(r"[{}]", words), words
        if name != "none":
            assert source_of(function), f"{group}={name} names no source"


def test_the_numbers_in_a_formula_are_those_given():
    assert formula_of(SURROGATES["aspo"], {"dual_c": 7.5, "eps_high": 0.31}).count("7.5") == 2
    assert "r > 1 + 0.31" in formula_of(SURROGATES["aspo"], {"eps_high": 0.31})
    assert "A < 0 and r > 4" in formula_of(SURROGATES["grpo"], {"dual_c": 4.0})
    assert "r > 4" not in formula_of(SURROGATES["grpo"], {})


PRESETS = [
    (group, name)
    for group, names in shipped_files().items()
    if group in ("algorithm", "advantage", "weighting", "token_weighting", "correction")
    for name in names
    if name != "auto"
]


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_shipped_preset_explains_itself(group, name):
    """Some are refused alone; they are explained all the same, and the rule is named."""
    config = load_config([f"{group}={name}"], combinations=False)
    lines = explanation(config)
    choice = config.algorithm if group == "algorithm" else getattr(config, group)
    assert any(f"{group}={choice.name}" in line for line in lines)
    if choice.name != "none":
        (where,) = [line for line in lines if re.match(rf"  (A|W|v|w|omega) +{group}={re.escape(choice.name)} ", line)]
        numbers = [v for v in all_params(TABLES[group][choice.name], choice.params).values() if type(v) is float]
        assert formula_of(TABLES[group][choice.name], choice.params) in where
        assert not numbers or any(f"{number:g}" in where for number in numbers)
    assert lines[-1].startswith(("refused", "no rule"))


def test_a_refused_combination_is_explained_and_the_rule_named():
    text = text_of("batch.num_mini_batches=1")
    assert "one optimizer step a batch: r is exactly 1" in text
    assert "refused   algorithm.name=aspo: with batch.num_mini_batches=1 and batch.num_passes=1 its ratio is always 1" in text


def test_every_rule_that_refuses_is_named_in_the_validators_words(capsys):
    overrides = ["correction=bypass", "algorithm.kl.kind=k1", "rollout.top_p=0.9"]
    with pytest.raises(ConfigError) as error:
        load_config(overrides)
    refused = [line for line in text_of(*overrides).splitlines() if line.startswith("refused   ")]
    assert len(refused) == 3
    assert refused[0] == f"refused   {error.value}"
    assert "algorithm.name=aspo, correction.name=bypass" in refused[0]
    assert "rollout.top_p=0.9" in refused[1]
    assert "the gradient of k1 is 0 on average" in refused[2]
    assert main(["explain", *overrides]) == 0
    assert refused[2] in capsys.readouterr().out


def test_a_value_out_of_range_is_one_error():
    with pytest.raises(ConfigError, match=r"algorithm.params: eps_low must lie in \[0, 1\], got 2"):
        explanation(load_config(["algorithm.params.eps_low=2.0"]))
    with pytest.raises(ConfigError, match=r"algorithm.params.eps_lo: aspo has no such parameter"):
        explanation(load_config(["algorithm.params={eps_lo: 0.1}"]))


# ---- a function of the user's ---------------------------------------------------------------------------------------


def test_without_a_formula_the_docstring_stands_in():
    def mine(tokens, *, slope: float = 2.0) -> Surrogate:
        """slope r, from my own
        notebook (after Author 2401.00001).

        More words.
        """

    assert formula_of(mine, {}) == "slope r, from my own notebook (after Author 2401.00001)."
    assert source_of(mine) == "Author 2401.00001"
    mine.formula = "{slope} r"
    assert formula_of(mine, {"slope": 0.25}) == "0.25 r"
    assert source_of(formula("r", "me")(mine)) == "me"
    mine.formula = "broken {nothing}"
    assert formula_of(mine, {}) == "broken {nothing}"


def test_the_verb(capsys):
    assert main(["explain", "algorithm=grpo", "algorithm.params.eps_high=0.28"]) == 0
    out = capsys.readouterr().out
    assert "r > 1 + 0.28" in out
    assert re.search(r"just above 1.28 +0 +0 +hard", out)
    assert main(["train", "--on", "somewhere"]) == 2
    assert "unknown option --on" in capsys.readouterr().err
    assert main(["explain", "--on"]) == 2
    assert "--on needs a value" in capsys.readouterr().err


def test_the_correction_that_a_lag_brings_is_explained():
    assert "correction=none (auto, at rollout.max_lag=0) ->" in text_of()
    text = text_of("rollout.max_lag=1", "rollout.oversample=1")
    assert "correction=tis_token (auto, at rollout.max_lag=1) ->" in text
    assert "omega" in text
    assert formula_of(CORRECTIONS["tis_token"], {}) in text
    assert "omega" not in text_of("rollout.max_lag=1", "rollout.oversample=1", "correction=none")
