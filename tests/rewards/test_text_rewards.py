"""Rewards of form and length."""

import json
from pathlib import Path

import pytest

from configs.schema import RewardPart
from rewards.contract import Abstain, RewardError, RewardItem, judge, prepare
from rewards.text_rewards import format_reward, length, overlong, repetition_penalty
from rewards.verifiers import load_verifier

pytestmark = pytest.mark.timeout(30)
CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "format.jsonl").read_text().splitlines()]
GOOD = "<think>a</think><answer>4</answer>"
RLCR = "<think>a</think> <answer>4</answer>\n<analysis>b</analysis>\n<confidence>0.8</confidence>"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_format_cases(case):
    verdict = format_reward(case["completion"], case.get("options", {}).get("prompt_end", ""))
    assert verdict.value == verdict.accuracy == case["expect"]


@pytest.mark.parametrize(
    ("completion", "prompt", "value"),
    [
        (GOOD, "", 1.0),
        (f"\n {GOOD}\n ", "", 1.0),
        (f"Sure! {GOOD}", "", 0.0),
        (f"{GOOD} Bye", "", 0.0),
        ("<think>a</think> so <answer>4</answer>", "", 0.0),
        (GOOD + GOOD, "", 0.0),
        (GOOD + "<answer>5</answer>", "", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", "", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", "", 0.0),
        ("<think>a</think></think><answer>4</answer>", "", 0.0),
        ("<think>is it <answer>3</answer>?</think><answer>4</answer>", "", 0.0),
        ("<think>a</think><answer><think>4</think></answer>", "", 0.0),
        ("<answer>4</answer><think>a</think>", "", 0.0),
        ("<think>a</think><answer>4", "", 0.0),
        ("<think>a</think>4</answer>", "", 0.0),
        ("<Think>a</Think><answer>4</answer>", "", 0.0),
        ("<think >a</think><answer>4</answer>", "", 0.0),
        ("<answer>4</answer>", "", 0.0),
        ("", "", 0.0),
        ("<think></think><answer>4</answer>", "", 0.0),
        ("<think> \n</think><answer>4</answer>", "", 0.0),
        ("<think>a</think><answer> </answer>", "", 0.0),
        ("a</think><answer>4</answer>", "Think.\n<think>", 1.0),
        ("a</think><answer>4</answer>", "<think>\n\n \t", 1.0),
        ("a</think><answer>4</answer>", "<think> well", 0.0),
        ("a</think><answer>4</answer>", "<think></think>", 0.0),
        ("a</think><answer>4</answer>", "<answer>", 0.0),
        (GOOD, "<think>", 0.0),  # opened twice
        ("</think><answer>4</answer>", "<think>", 0.0),
        ("think>a</think><answer>4</answer>", "<", 0.0),
    ],
)
def test_think_answer(completion, prompt, value):
    assert format_reward(completion, prompt).value == value


def test_empty_reasoning_by_setting():
    for reasoning in ("", " \n"):
        assert format_reward(f"<think>{reasoning}</think><answer>4</answer>", "", allow_empty_reasoning=True).value == 1.0
    assert format_reward("<think>a</think><answer></answer>", "", allow_empty_reasoning=True).value == 0.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (RLCR, 1.0),
        (RLCR.removeprefix("<think>"), 0.0),
        (RLCR + ".", 0.0),
        (RLCR.replace("<analysis>b</analysis>", ""), 0.0),
        (RLCR.replace("<analysis>b</analysis>", "<analysis> </analysis>"), 0.0),
        (RLCR + "<confidence>0.9</confidence>", 0.0),
        (GOOD, 0.0),
        ("<think>a</think><answer>4</answer><confidence>0.8</confidence><analysis>b</analysis>", 0.0),
    ],
)
def test_rlcr(completion, value):
    assert format_reward(completion, "", grammar="rlcr").value == value
    if value:
        assert format_reward(completion, "").value == 0.0
        assert format_reward(completion.removeprefix("<think>"), "<think>\n", grammar="rlcr").value == value


def test_a_pattern_matches_the_whole_completion():
    pattern = r"(?s).*\\boxed\{\d+\}\."
    assert format_reward("so\n\\boxed{4}.", "", pattern=pattern).value == 1.0
    assert format_reward("\\boxed{4}. Bye", "", pattern=pattern).value == 0.0
    assert format_reward(GOOD, "", pattern=pattern).value == 0.0
    assert format_reward(GOOD, "", pattern=pattern).outcome == "wrong"


def test_a_search_without_end_is_the_completions_fault():
    verdict = format_reward("a" * 5000 + "c", "", pattern=r"(?:a|aa|a{3})+b|(?:a?a?)*d", pattern_timeout_s=0.2)
    assert (verdict.value, verdict.accuracy, verdict.outcome) == (0.0, 0.0, "time_limit")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["<think>" * 10**5, "<think>" + "</think>" * 10**5, "<think>" + " " * 10**6 + "</think><answer>"]
)
def test_time_is_linear_in_the_text(text):
    assert format_reward(text, "").value == 0.0


# ALGORITHMS: DAPO's and Archer's numbers.
@pytest.mark.parametrize(
    ("num_tokens", "settings", "value"),
    [
        (18432, {"limit": 20480, "buffer": 4096}, -0.5),
        (16384, {"limit": 20480, "buffer": 4096}, 0.0),
        (20480, {"limit": 20480, "buffer": 4096}, -1.0),
        (1, {"limit": 20480, "buffer": 4096}, 0.0),
        (32760, {"limit": 32768, "buffer": 16}, -0.5),
        (18432, {"limit": 20480, "buffer": 4096, "factor": 0.2}, -0.1),
        (24576, {"limit": 20480, "buffer": 4096}, -2.0),
    ],
)
def test_overlong(num_tokens, settings, value):
    verdict = overlong(num_tokens, **settings)
    assert verdict.value == pytest.approx(value, abs=1e-12)
    assert verdict.outcome == "none"


@pytest.mark.parametrize(
    ("size", "settings", "value"),
    [
        (0, {"target": 100, "limit": 200}, 1.0),
        (100, {"target": 100, "limit": 200}, 1.0),
        (101, {"target": 100, "limit": 200}, 0.99),
        (175, {"target": 100, "limit": 200}, 0.25),
        (200, {"target": 100, "limit": 200}, 0.0),
        (900, {"target": 100, "limit": 200}, 0.0),
        (0, {"target": 100, "limit": 200, "at_least": 40}, 0.0),
        (10, {"target": 100, "limit": 200, "at_least": 40}, 0.25),
        (40, {"target": 100, "limit": 200, "at_least": 40}, 1.0),
        (1, {"target": 0, "limit": 2}, 0.5),
    ],
)
def test_length(size, settings, value):
    assert length("", size, **settings).value == pytest.approx(value, abs=1e-12)
    by_characters = length("x" * size, 7, unit="characters", **settings)
    assert by_characters.value == pytest.approx(value, abs=1e-12)
    assert by_characters.measures == {"length": size}


def test_a_count_that_is_missing():
    for call in (lambda: overlong(None, limit=10, buffer=2), lambda: length("x", None, target=1, limit=2)):
        with pytest.raises(Abstain, match="num_tokens"):
            call()
    assert length("x", None, target=1, limit=2, unit="characters").value == 1.0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("length", {"target": 2, "limit": 2}, "limit=2: length needs 0 <= at_least <= target < limit; at_least=0, target=2"),
        ("overlong", {"limit": 2, "buffer": 3}, "buffer=3: overlong needs 1 <= buffer <= limit, and limit=2"),
        ("repetition", {"num_words": 0}, "num_words=0 is not a whole number of at least 1"),
        ("overlong", {"limit": 9, "buffer": 3, "factor": -1.0}, "factor=-1.0 would reward length"),
        ("format", {"pattern": "a", "pattern_timeout_s": 0.0}, "pattern_timeout_s=0.0: wants seconds above 0"),
        ("format", {"pattern": "a", "pattern_timeout_s": -1.0}, "pattern_timeout_s=-1.0: wants"),
        ("format", {"pattern": "a", "pattern_timeout_s": 1e308}, "pattern_timeout_s=1e[+]308: wants"),
        ("format", {"pattern": "("}, r"pattern: '\(' is no regular expression: missing \)"),
    ],
)
def test_settings_without_sense_are_refused_before_the_first_item(name, params, message):
    verifier = load_verifier("mine", RewardPart(function=name, params=params))
    with pytest.raises(RewardError, match=rf"^reward\.parts\.mine\.params\.{message}"):
        prepare(verifier, "reward.parts.mine.params")
    scores = judge(verifier, [RewardItem("", "x", None, "id", None, None, 7, {})], {}, lambda _: None)
    assert [score.status for score in scores] == ["error"]


@pytest.mark.parametrize(
    ("completion", "num_words", "value", "most"),
    [
        ("a b a b a b", 2, -3 / 5, 3),  # ab ba ab ba ab: five runs, two kinds
        ("a b c d", 2, 0.0, 1),
        ("a a a a", 1, -3 / 4, 4),
        ("a", 2, 0.0, 0),
        ("", 20, 0.0, 0),
        ("so it goes " * 40, 20, -98 / 101, 34),  # 120 words, 101 runs of three kinds
    ],
)
def test_repetition(completion, num_words, value, most):
    verdict = repetition_penalty(completion, num_words=num_words)
    assert verdict.value == pytest.approx(value, abs=1e-12)
    assert verdict.measures == {"max_repeats": most}
    assert verdict.accuracy is None
