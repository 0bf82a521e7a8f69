"""How answers are written in well-known data sets and by models, and what a model might write to be paid without knowing.

`tests/cases/math_styles.jsonl`: the verdicts are a mathematician's, written down by hand. ``style``: GSM8K, MATH, AIME, olympiads, prose,
German and Chinese. ``label``: multiple choice. ``hedge``: several answers, taken back, or of another value. ``library``: what math-verify reads. ``domain``:
formulas that agree in some places alone.
"""

import json
from pathlib import Path

import pytest

from rewards.math_verifier import math

pytestmark = pytest.mark.timeout(60)

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "math_styles.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_styles(case):
    verdict = math(case["completion"], case["answer"])
    assert verdict.value == case["expect"], verdict


NUMBERS = ["1776", "-1,776", "1776.0", r"x = 1776", r"1776\text{ cm}", r"37 \cdot 48 = 1776", r"1.776 \times 10^3", r"\{1776\}"]
RESTATED = [
    r"37 \cdot 48",
    "37*48",
    r"2 \cdot 888",
    r"\frac{3552}{2}",
    "1777-1",
    r"\sqrt{3154176}",
    r"1776^1",
    r"\sum_{k=1}^{1776} 1",
]
RESTATED += [r"1776 = 37 \cdot 48", r"x = 37 \cdot 48", r"12 \cdot 148\text{ cm}", r"148 \text{ dozen}", r"|1776|", r"1776+x-x"]


@pytest.mark.parametrize("pred", NUMBERS)
def test_a_required_number(pred):
    gold = "-1776" if pred.startswith("-") else "1776"
    assert math(rf"\boxed{{{pred}}}", gold, require_number=True).value == 1.0


@pytest.mark.parametrize("pred", RESTATED)
def test_a_restated_question_is_no_number(pred):
    assert math(rf"\boxed{{{pred}}}", "1776").value == 1.0
    assert math(rf"\boxed{{{pred}}}", "1776", require_number=True).value == 0.0


@pytest.mark.parametrize(
    ("pred", "gold", "value"),
    [
        (r"\frac{2}{3}", "2/3", 1.0),
        (r"-\frac23", "-2/3", 1.0),
        ("4/6", "2/3", 0.0),
        ("4/6", r"\frac46", 1.0),
        (r"2\frac12", "2.5", 1.0),
        ("0.4", r"\frac25", 1.0),
        (r"40\%", r"\frac25", 1.0),
        (r"\frac{0.8}{2}", r"\frac25", 0.0),
        ("(1+1, 3)", "(2, 3)", 0.0),
        ("(2, 3)", "(2, 3)", 1.0),
        (r"[1+1, \infty)", r"x \ge 2", 0.0),
        (r"x \ge 2", r"[2, \infty)", 1.0),
        (r"\sqrt{8}", r"2\sqrt2", 1.0),  # the reference is no number
        ("(x+1)^2", "x^2+2x+1", 1.0),
        ("2^{10}", "2^{10}", 1.0),
        ("(B)", "B", 1.0),
    ],
)
def test_what_a_required_number_is(pred, gold, value):
    assert math(rf"\boxed{{{pred}}}", gold, require_number=True).value == value
