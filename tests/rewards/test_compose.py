"""From parts to one score. All numbers are worked by hand."""

import pytest

from configs.errors import ConfigError
from configs.policies import Policy, Then, parse_policy
from configs.schema import Combine, RewardConfig, RewardPart
from rewards.compose import applicable, compose, options_of, policies, settle
from rewards.contract import RewardError, failed
from rollout.records import Consequence, Outcome, Score, Status


def ok(value, accuracy=1.0, outcome=Outcome.RIGHT, extracted=None, measures=None, detail=""):
    return Score(Status.OK, outcome, value, accuracy, {}, extracted, 0.5, detail, measures or {}, Consequence.NONE)


def broken(status, consequence=Consequence.DROP_SAMPLE):
    return Score(status, Outcome.NONE, None, None, {}, None, 0.5, f"{status} here", {}, consequence)


def composed(parts, scores, combine="sum", **keys):
    reward = RewardConfig(parts=parts, combine=Combine(combine), **keys)
    return compose(reward, applicable(parts, None, None), scores)


PARTS = {"math": RewardPart(weight=2.0), "style": RewardPart(weight=-0.5), "length": RewardPart(weight=0.1, accuracy=False)}


def test_weighted_sum_and_mean_of_the_accuracies_that_count():
    scores = {"math": ok(1.0, 1.0), "style": ok(0.4, 0.5, Outcome.WRONG, "b"), "length": ok(30.0, 0.9, Outcome.CRASH, "c")}
    score = composed(PARTS, scores)
    assert score.value == pytest.approx(2.0 - 0.2 + 3.0)
    assert score.accuracy == 0.75
    assert score.parts == {"math": 1.0, "style": 0.4, "length": 30.0}
    assert (score.outcome, score.extracted, score.time_s) == (Outcome.WRONG, "b", 1.5)


@pytest.mark.parametrize(
    ("combine", "value", "accuracy"),
    [
        ("sum", 2 * 0.5 + 3 * 0.25, (0.5 + 0.25) / 2),
        ("min", 0.75, 0.25),  # the smaller of 1.0 and 0.75
        ("product", 1.0 * 0.75, 0.5 * 0.25),
    ],
)
def test_combinations(combine, value, accuracy):
    """The part of weight 0 is logged and takes no part: else every product would be 0."""
    parts = {"a": RewardPart(weight=2.0), "b": RewardPart(weight=3.0), "seen": RewardPart(weight=0.0, accuracy=False)}
    score = composed(parts, {"a": ok(0.5, 0.5), "b": ok(0.25, 0.25), "seen": ok(-7.0, 0.0)}, combine)
    assert (score.value, score.accuracy) == (value, accuracy)
    assert score.parts == {"a": 0.5, "b": 0.25, "seen": -7.0}


def test_a_product_is_no_pass_where_one_factor_fails():
    """Form 1, answer 0: the mean of the accuracies would be 0.5 and pass."""
    parts = {"form": RewardPart(), "math": RewardPart()}
    scores = {"form": ok(1.0), "math": ok(0.0, 0.0, Outcome.WRONG)}
    assert [composed(parts, scores, c).accuracy for c in ("sum", "min", "product")] == [0.5, 0.0, 0.0]


def test_clips():
    parts = {"long": RewardPart(weight=-2.0, clip_max=3.0), "short": RewardPart(clip_min=-1.0)}
    scores = {"long": ok(10.0), "short": ok(-4.0)}
    score = composed(parts, scores)
    assert (score.value, score.parts) == (-2 * 3 - 1, {"long": 3.0, "short": -1.0})
    assert composed(parts, scores, clip_min=-5.0).value == -5.0
    assert composed(parts, scores, clip_max=-9.0).value == -9.0


GATED = {
    "format": RewardPart(weight=0.25, accuracy=False),
    "math": RewardPart(weight=2.0, needs="format", clip_min=0.5),
    "style": RewardPart(weight=1.0, needs="math", accuracy=False),
}


def test_open_gates():
    score = composed(GATED, {"format": ok(1.0), "math": ok(1.0), "style": ok(0.5)})
    assert (score.value, score.accuracy) == (0.25 + 2 + 0.5, 1.0)


def test_a_closed_gate_gives_exactly_0_to_what_needs_it_and_to_what_needs_that():
    score = composed(GATED, {"format": ok(0.2, 0.49, Outcome.UNPARSED)})
    assert score.parts == {"format": 0.2, "math": 0.0, "style": 0.0}  # not clip_min
    assert (score.value, score.accuracy, score.outcome) == (0.25 * 0.2, 0.0, Outcome.UNPARSED)
    score = composed(GATED, {"format": ok(1.0, 0.5), "math": ok(0.6, 0.0, Outcome.WRONG)})
    assert (score.value, score.parts["style"]) == (0.25 + 2 * 0.6, 0.0)


def test_a_closed_gate_under_product_and_min():
    parts = {"format": RewardPart(), "math": RewardPart(needs="format")}
    for combine in ("product", "min"):
        score = composed(parts, {"format": ok(0.3, 0.3, Outcome.WRONG)}, combine)
        assert (score.value, score.accuracy) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("math", "style", "worst"),
    [
        (Status.ABSTAIN, Status.OK, Status.ABSTAIN),
        (Status.OK, Status.TIMEOUT, Status.TIMEOUT),
        (Status.ABSTAIN, Status.INVALID, Status.INVALID),
        (Status.INVALID, Status.TIMEOUT, Status.TIMEOUT),
        (Status.TIMEOUT, Status.ERROR, Status.ERROR),
    ],
)
def test_one_failed_part_leaves_no_value(math, style, worst):
    math, style = (ok(1.0) if status is Status.OK else broken(status) for status in (math, style))
    merged = composed(PARTS, {"math": math, "style": style, "length": ok(7.0)})
    assert (merged.status, merged.value, merged.accuracy, merged.outcome) == (worst, None, None, Outcome.NONE)
    assert merged.parts["length"] == 7.0
    assert ("'math'" in merged.detail) == (math.status is not Status.OK)
    assert ("'style'" in merged.detail) == (style.status is not Status.OK)


def test_the_hardest_consequence_stands():
    hard = {"math": broken(Status.ABSTAIN, Consequence.DROP_GROUP), "style": broken(Status.ERROR), "length": ok(1.0)}
    score = composed(PARTS, hard)
    assert (score.status, score.consequence) == (Status.ERROR, Consequence.DROP_GROUP)
    assert composed(PARTS, hard | {"style": broken(Status.ERROR, Consequence.FAIL)}).consequence is Consequence.FAIL


def test_zero_by_policy_counts_and_is_told():
    zero = settle(failed(Status.TIMEOUT, "was slow", 0.5), Then.zero)
    parts = {"math": RewardPart(weight=2.0, clip_min=0.5), "style": RewardPart(weight=0.5)}
    score = composed(parts, {"math": zero, "style": ok(1.0)})
    assert (score.status, score.value, score.accuracy) == (Status.OK, 0.5, 0.5)
    assert score.parts == {"math": 0.0, "style": 1.0}
    assert score.consequence is Consequence.ZERO
    assert score.detail == "reward part 'math': counted as 0 by on_timeout=zero: was slow"


def test_measures_stand_apart_from_the_parts():
    scores = {"math": ok(1.0, measures={"symbols": 1.0}, detail="by sympy"), "style": ok(0.0, measures={"symbols": 2.0})}
    score = composed({"math": RewardPart(), "style": RewardPart()}, scores)
    assert score.measures == {"math.symbols": 1.0, "style.symbols": 2.0}
    assert score.parts == {"math": 1.0, "style": 0.0}
    assert score.detail == "reward part 'math': by sympy"


def test_routing_takes_one_part_and_counts_its_accuracy():
    judging = applicable(PARTS, "length", "any")
    assert compose(RewardConfig(parts=PARTS), judging, {"length": ok(30.0, 0.25)}).accuracy == 0.25
    assert applicable(PARTS, None, None) == PARTS
    with pytest.raises(RewardError, match=r"'maths' is unknown; reward\.parts has: math, style, length"):
        applicable(PARTS, "maths", None)


def test_routing_by_source_brings_the_gates_along_and_first():
    parts = {
        "math": RewardPart(sources=["gsm", "aime"], needs="format"),
        "code": RewardPart(sources=["apps"]),
        "length": RewardPart(),
        "format": RewardPart(),
    }
    assert list(applicable(parts, None, "aime")) == ["format", "math", "length"]
    assert list(applicable(parts, None, "apps")) == ["code", "length", "format"]
    assert list(applicable(parts, "math", "apps")) == ["format", "math"]
    own = {"math": RewardPart(sources=["gsm"])}
    for source, told in (("aime", "the source 'aime'"), (None, "an item without a source")):
        with pytest.raises(RewardError, match=f"no reward part judges {told}"):
            applicable(own, None, source)


def test_options_are_bare_for_one_part_and_by_name_for_several():
    one, two = {"math": RewardPart()}, {"math": RewardPart(), "code": RewardPart()}
    assert options_of({"digits": 3}, one) == {"math": {"digits": 3}}
    assert options_of({"math": {"digits": 3}}, one) == {"math": {"digits": 3}}
    assert options_of({"code": {"tests": 1}}, two) == {"code": {"tests": 1}}
    with pytest.raises(RewardError, match="math, code judge this item"):
        options_of({"digits": 3}, two)


def test_a_sum_beyond_all_floats_is_an_error():
    score = composed({"a": RewardPart(weight=10.0)}, {"a": ok(1e308)})
    assert (score.status, score.value, score.consequence) == (Status.ERROR, None, Consequence.DROP_SAMPLE)


def test_policies():
    assert parse_policy("zero", "k") == Policy(0, Then.zero)
    assert parse_policy(" retry(3) ", "k") == Policy(3, Then.drop_sample)
    assert parse_policy("retry( 1 , fail )", "k") == Policy(1, Then.fail)
    part = RewardPart(on_error="retry(2, drop_group)", on_abstain="zero")
    assert policies("math", part) == {
        Status.ERROR: Policy(2, Then.drop_group),
        Status.TIMEOUT: Policy(0, Then.drop_sample),
        Status.INVALID: Policy(0, Then.drop_sample),
        Status.ABSTAIN: Policy(0, Then.zero),
    }
    for text in ("", "retry", "retry(0)", "retry(-1)", "retry(2, retry(3))", "retry(1, drop)", "drop_sampel"):
        with pytest.raises(
            ConfigError, match=r"reward\.parts\.math\.on_error: .* is none of drop_sample, drop_group, zero, fail, retry"
        ):
            policies("math", RewardPart(on_error=text))
    with pytest.raises(ConfigError, match="did you mean 'drop_sample'"):
        parse_policy("drop_sampel", "k")
