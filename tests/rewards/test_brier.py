"""The reward of calibrated confidence, and the measures of calibration."""

import json
import math
from pathlib import Path

import pytest

from rewards import brier as module
from rewards.brier import (
    auroc,
    confidence_entropy,
    expected_calibration_error,
    mean_confidence,
    read_confidence,
    share_extreme,
    squared_error,
)
from rewards.contract import Abstain, InvalidItem, RewardError

pytestmark = pytest.mark.timeout(60)
CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "brier.jsonl").read_text().splitlines()]


def brier(completion, answer, prompt="", **settings):
    return module.brier(completion, answer, prompt, "id", None, **{"correctness": "exact_integer", **settings})


def written(answer="4", confidence="0.8", analysis=""):
    return f"<think>t</think><answer>{answer}</answer>{analysis}<confidence>{confidence}</confidence>"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
@pytest.mark.parametrize("correctness", ["math", "exact_integer"])
def test_cases(case, correctness):
    gold, correct, stated = (case["answer"][key] for key in ("gold", "correct", "confidence"))
    expected = pytest.approx(case["expect"]["squared_error"], abs=case["expect"]["tolerance"])
    confidence = read_confidence(str(stated))
    assert squared_error(bool(correct), confidence) == expected
    verdict = brier(case["completion"], gold, correctness=correctness)
    assert verdict.measures == {"well_formed": 1.0, "confidence": confidence, "squared_error": expected}
    assert verdict.accuracy == correct
    assert verdict.value == pytest.approx(correct - case["expect"]["squared_error"], abs=1e-9)
    assert verdict.extracted == "4"


# ALGORITHMS 6: R and the program's scale.
@pytest.mark.parametrize(
    ("answer", "confidence", "paper", "code"),
    [("4", "0.8", 0.96, 1.48), ("5", "0.8", -0.64, 0.68), ("5", "0", 0.0, 1.0), ("4", "1", 1.0, 1.5), ("4", "high", 0.0, 0.0)],
)
def test_worked_numbers(answer, confidence, paper, code):
    completion = written(answer, confidence)
    assert brier(completion, "4").value == pytest.approx(paper, abs=1e-12)
    assert brier(completion, "4", scale="code").value == pytest.approx(code, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "q", "expected"), [(0.5, 0.5, 0.25), (0.5, 1, 0), (0.2, 0.2, 0.04), (0.2, 1, -0.6), (0.9, 0.9, 0.81)]
)
def test_expected_reward(p, q, expected):
    right, wrong = (brier(written(answer, q), "4").value for answer in ("4", "5"))
    assert p * right + (1 - p) * wrong == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "completion",
    [
        "4",
        "",
        "<think>t</think><answer>4</answer>",
        "<answer>4</answer><confidence>0.8</confidence>",
        written() + " Sure.",
        "Sure. " + written(),
        written() + "<confidence>0.9</confidence>",
        written(confidence=""),
        written(answer=" "),
        written().replace("<think>t", "<think> "),
        written(analysis="<analysis> </analysis>"),
        "<think>t</think><confidence>0.8</confidence><answer>4</answer>",
        *(
            written(confidence=bad)
            for bad in ("0.9/1", "very sure", "0.8 0.9", "85", "1.01", "101%", "-0.1", "nan", "inf", "1e-1")
        ),
    ],
)
def test_malformed_pays_nothing_at_all(completion):
    for scale in ("paper", "code"):
        verdict = brier(completion, "4", scale=scale)
        assert (verdict.value, verdict.accuracy, verdict.outcome, verdict.measures) == (
            0.0,
            0.0,
            "unparsed",
            {"well_formed": 0.0},
        )


def test_the_analysis_is_optional_unless_the_grammar_is_rlcr():
    with_analysis = written(analysis="\n<analysis>a</analysis>\n")
    for completion, grammar, value in (
        (written(), "think_answer_confidence", 0.96),
        (with_analysis, "think_answer_confidence", 0.96),
        (with_analysis, "rlcr", 0.96),
        (written(), "rlcr", 0.0),
    ):
        assert brier(completion, "4", grammar=grammar).value == pytest.approx(value, abs=1e-12)
    assert brier(with_analysis.removeprefix("<think>"), "4", "<think>\n").value == pytest.approx(0.96, abs=1e-12)


@pytest.mark.parametrize("correctness", ["math", "exact", "numeric", "exact_integer"])
def test_the_answer_is_judged_behind_the_reasoning_that_the_prompt_has_opened(correctness):
    verdict = module.brier(written().removeprefix("<think>"), "4", "2+2? <think>\n", "id", None, correctness=correctness)
    assert (verdict.accuracy, verdict.outcome, verdict.value) == (1.0, "right", pytest.approx(0.96, abs=1e-12))


def test_the_verifier_of_the_answer_is_chosen_and_its_failures_stay_failures(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from rewards.contract import Abstain\n"
        "def judge(completion, answer, prompt_id, *, pays=1.0):\n"
        "    if completion == 'slow': raise TimeoutError('too slow')\n"
        "    if completion == 'shy': raise Abstain('no')\n"
        "    if completion == 'bug': return None\n"
        "    return {'value': pays, 'extracted': prompt_id}\n"
        "async def later(completion): return 1.0\n"
        "def many(completions): return [1.0] * len(completions)\n"
    )
    own = {"correctness": f"{path}:judge"}
    assert brier(written(), None, **own).value == pytest.approx(0.96)
    assert brier(written(), None, **own).extracted == "id"
    assert brier(written(), None, **own, correctness_params={"pays": 0.4}).accuracy == 0.0
    assert brier(written(), None, correctness=f"{path}:many").accuracy == 1.0
    for answer, error in (("slow", TimeoutError), ("shy", Abstain), ("bug", RuntimeError)):
        with pytest.raises(error, match=r"own\.py:judge"):
            brier(written(answer), None, **own)
    with pytest.raises(InvalidItem, match="not an integer"):
        brier(written(), "four")
    with pytest.raises(RewardError, match=r"correctness: there is no 'exact_intege'.* did you mean 'exact_integer'"):
        brier(written(), "4", correctness="exact_intege")
    with pytest.raises(RewardError, match=r"correctness_params\.lst"):
        brier(written(), "4", correctness_params={"lst": True})
    with pytest.raises(RewardError, match=r"^correctness_params\.relative=-1\.0 is negative"):
        module.brier.prepare(correctness="numeric", correctness_params={"relative": -1.0}, grammar="rlcr", scale="paper")
    with pytest.raises(RewardError, match="is async; brier needs a plain function"):
        brier(written(), "4", correctness=f"{path}:later")


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        *(("0", 0.0), ("1", 1.0), ("0.83", 0.83), (".5", 0.5), ("1.", 1.0), ("1.000", 1.0), (" 0.5\n", 0.5), ("0.0", 0.0)),
        *(("0%", 0.0), ("100%", 1.0), ("85 %", 0.85), ("12.5%", 0.125), ("100.0%", 1.0), ("0.5%", 0.005), ("29%", 0.29)),
        *(
            (bad, None)
            for bad in ("", " ", "1.0001", "100.1%", "85", "0.9/1", "9/10", "0,9", "+0.5", "-0", "%", ".", "0.5.", "1e-1")
        ),
        *(
            (bad, None)
            for bad in ("high", "0.8 or so", "0.8 0.9", "0.8%%", "nan", "inf", "\N{ARABIC-INDIC DIGIT ONE}", "1" * 5000)
        ),
    ],
)
def test_read_confidence(text, confidence):
    assert read_confidence(text) == confidence


def test_calibration_error():
    # Bin 0.8: three statements of 0.8, two right: gap 3 x 0.8 - 2 = 0.4. Bin 0.2: two of 0.25, none right: 0.5. Last bin: 1.0, wrong: 1.
    confidence = [0.8, 0.8, 0.8, 0.25, 0.25, 1.0]
    correct = [True, True, False, False, False, False]
    assert expected_calibration_error(confidence, correct) == pytest.approx(1.9 / 6)
    # One bin: 3.9 stated, 2 right. Two bins: 0.5 below the half; 3.4 stated, 2 right above.
    assert expected_calibration_error(confidence, correct, num_bins=1) == pytest.approx(1.9 / 6)
    assert expected_calibration_error([0.0, 0.9], [True, False], num_bins=1) == pytest.approx(0.05)
    assert expected_calibration_error([0.0, 0.9], [True, False]) == pytest.approx(0.95)
    assert expected_calibration_error([0.5, 0.5], [True, False]) == 0.0
    assert expected_calibration_error([], []) is None


def test_auroc():
    # Pairs (right, wrong): .9>.8 .9>.3 .3<.8 .3=.3: 2.5 of 4.
    assert auroc([0.9, 0.3, 0.8, 0.3], [True, True, False, False]) == 0.625
    assert auroc([0.9, 0.1], [True, False]) == 1.0
    assert auroc([0.9, 0.1], [False, True]) == 0.0
    assert auroc([0.5, 0.5], [False, True]) == 0.5
    assert auroc([0.5, 0.6], [True, True]) is None
    assert auroc([], []) is None


def test_the_distribution_of_confidence():
    assert mean_confidence([0.5, 1.0]) == 0.75
    assert confidence_entropy([0.7, 0.71, 0.79]) == 0.0
    assert confidence_entropy([0.1, 0.3, 0.5, 0.9]) == pytest.approx(math.log(4))
    # Halves and quarters: 0.5 ln 2 + 2 x 0.25 ln 4 = 1.5 ln 2.
    assert confidence_entropy([0.95, 1.0, 0.1, 0.3]) == pytest.approx(1.5 * math.log(2))
    assert share_extreme([0.0, 1.0, 0.5, 0.999]) == 0.5
    assert mean_confidence([]) is confidence_entropy([]) is share_extreme([]) is None
