"""The verifiers of texts and of numbers with a tolerance."""

from decimal import Decimal
from functools import partial
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards import math_verifier
from rewards.answers import final_text
from rewards.choice import choice
from rewards.contract import InvalidItem, RewardError
from rewards.exact import exact, numeric

pytestmark = pytest.mark.timeout(30)
MINUS = "\N{MINUS SIGN}"
LOOSE = {"ignore_case": True, "ignore_punctuation": True}


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (" Paris\n", "Paris"),
        ("<think>Rome?</think>\nParis", "Paris"),
        ("Rome?</think>Paris", "Paris"),
        ("<think>a</think> <think>b</think> c", "c"),
        ("<think>Rome", ""),
        ("<think>a</think>b<think>c", "b"),
        ("<think><answer>Rome</answer></think> Paris", "Paris"),
        ("<think>x</think><answer> Paris </answer> bye", "Paris"),
        ("<answer>Rome</answer><answer>Paris</answer>", "Paris"),
        ("<Answer>Paris</ANSWER>", "Paris"),
        ("<answer>Rome</answer><answer> </answer>", ""),
        ("<answer>Paris", "<answer>Paris"),
        ("Paris</answer>", "Paris</answer>"),
        ("", ""),
    ],
)
def test_final_text(completion, text):
    assert final_text(completion) == text


@pytest.mark.parametrize("verifier", [exact, numeric, choice, partial(math_verifier.math, timeout_seconds=5.0)])
def test_reasoning_that_the_prompt_has_opened(verifier):
    """One rule for all that seek an answer: a reasoning part that does not end holds none, whoever began it."""
    answer = "B" if verifier is choice else "7"
    for completion, prompt, outcome in (
        (answer, "What is it?", "right"),
        (answer, "What is it?<think>\n", "unparsed"),
        (f"so</think> {answer}", "What is it?<think>\n", "right"),
        (f"{answer} <think> or", "What is it?", "right"),
    ):
        assert verifier(completion, answer, prompt).outcome == outcome, (completion, prompt)


@pytest.mark.parametrize(
    ("completion", "answer", "settings", "outcome"),
    [
        ("Paris", "Paris", {}, "right"),
        (" Paris \n", "Paris", {}, "right"),
        ("paris", "Paris", {}, "wrong"),
        ("paris", "Paris", {"ignore_case": True}, "right"),
        ("STRASSE", "stra\N{LATIN SMALL LETTER SHARP S}e", {"ignore_case": True}, "right"),
        ("New \n York", "New York", {}, "right"),
        ("New  York", "New York", {"ignore_whitespace": False}, "wrong"),
        (" New York ", "New York", {"ignore_whitespace": False}, "right"),
        ("NewYork", "New York", {}, "wrong"),
        ("Paris.", "Paris", {}, "wrong"),
        ("Paris!", "Paris", {"ignore_punctuation": True}, "right"),
        ("the U.S.A.", "The USA", LOOSE, "right"),
        ("-5", "5", LOOSE, "wrong"),
        ("3.14", "314", LOOSE, "wrong"),
        ("5.", "5", LOOSE, "right"),
        ("(42)", "42", LOOSE, "right"),
        ("**42**", "42", LOOSE, "right"),
        ('"42"', "42", LOOSE, "right"),
        ("#42!", "42", LOOSE, "right"),
        ("1:30", "130", LOOSE, "wrong"),
        ("1/2", "12", LOOSE, "wrong"),
        ("1-2", "12", LOOSE, "wrong"),
        ("4.0", "4", {}, "wrong"),
        ("4", 4, {}, "right"),
        ("cafe\N{COMBINING ACUTE ACCENT}", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", {}, "right"),
        ("Rome", ["Paris", "Rome"], {}, "right"),
        ("Bern", ["Paris", "Rome"], {}, "wrong"),
        ("Paris Rome", ["Paris", "Rome"], {}, "wrong"),  # a cheat that lists them
        ("", "Paris", {}, "unparsed"),
        ("?!", "Paris", LOOSE, "unparsed"),
        ("<think>Paris", "Paris", {}, "unparsed"),
        ("\ud800", "Paris", {}, "wrong"),
    ],
)
def test_exact(completion, answer, settings, outcome):
    verdict = exact(completion, answer, **settings)
    assert verdict.outcome == outcome
    assert verdict.value == verdict.accuracy == float(outcome == "right")
    assert (verdict.extracted is None) == (outcome == "unparsed")


@pytest.mark.timeout(10)
def test_marks_without_end_are_not_composed():
    marks = "\N{COMBINING ACUTE ACCENT}\N{COMBINING CEDILLA}" * 500_000  # composing them all takes an hour
    assert exact("a" + marks, "a").outcome == "wrong"
    assert exact("e" + marks, ["e", "cafe\N{COMBINING ACUTE ACCENT}"], **LOOSE).outcome == "wrong"
    # Four code points that are one letter, the longest decomposition there is.
    letter = "\N{GREEK SMALL LETTER ALPHA WITH PSILI AND VARIA AND YPOGEGRAMMENI}"
    assert len(normalize("NFD", letter)) == 4
    assert exact(normalize("NFD", letter * 3), letter * 3).outcome == "right"
    assert exact(normalize("NFD", letter * 3), letter * 3, **LOOSE).outcome == "right"


@pytest.mark.parametrize("answer", ["", " ", "?!", None, 4.5, True, [], ["Paris", ""], [["Paris"]], {"a": 1}])
def test_exact_unusable_answer(answer):
    with pytest.raises(InvalidItem, match="no text to compare with"):
        exact("?!", answer, ignore_punctuation=True)


@pytest.mark.parametrize(
    ("completion", "answer", "outcome"),
    [
        ("it is 42.", "42", "right"),
        ("42.0", 42, "right"),
        ("42", 42.0, "right"),
        ("0.5", "1/2", "right"),
        ("3/6", 0.5, "right"),
        ("1/3", "0.333", "wrong"),
        (".5", "0.5", "right"),
        (f"{MINUS}2.50", "-2.5", "right"),
        ("x = -3", "-3", "right"),
        ("12 - 5", "5", "right"),
        ("12-5", "-5", "wrong"),
        ("$1,234.50", "1234.5", "right"),
        ("1,234,567", 1234567, "right"),
        ("1e3", "1000", "right"),
        (f"2.5e{MINUS}3", "0.0025", "right"),
        ("50%", "0.5", "right"),
        (r"50 \%", "50%", "right"),
        ("50%", "50", "wrong"),
        ("first 3, then 4", "3", "wrong"),
        ("9007199254740993", "9007199254740992", "wrong"),
        ("0.1000000000000000000001", "0.1", "wrong"),
        ("1e-999", "0", "wrong"),
        ("1" + "0" * 999, "1e999", "right"),
        ("1,23", "123", "unparsed"),
        ("0,123", "123", "unparsed"),
        ("1,2345", "12345", "unparsed"),
        ("7kg", "7", "unparsed"),
        ("12:30", "30", "unparsed"),
        ("2^10", "10", "unparsed"),
        ("1/2/3", "3", "unparsed"),
        ("5/0", "5", "unparsed"),
        ("1e9999", "1", "unparsed"),
        ("1e99999999999999999999", "1", "unparsed"),
        ("1" * 1001, "1", "unparsed"),
        ("nan", "1", "unparsed"),
        ("inf", "1", "unparsed"),
        ("", "0", "unparsed"),
        ("<think>42", "42", "unparsed"),
        ("<think>41</think><answer>42</answer> 43", "42", "right"),
        ("\N{ARABIC-INDIC DIGIT FIVE}", "5", "unparsed"),
    ],
)
def test_numbers_without_tolerance(completion, answer, outcome):
    verdict = numeric(completion, answer)
    assert verdict.outcome == outcome
    assert verdict.value == verdict.accuracy == float(outcome == "right")


@pytest.mark.parametrize(
    ("found", "gold", "settings", "right"),
    [
        ("1.1", "1", {"absolute": 0.1}, True),  # as doubles the difference is 0.1000000000000000888
        ("1.1000001", "1", {"absolute": 0.1}, False),
        ("0.7", "0", {"absolute": 0.7}, True),  # the double 0.7 is a little less
        ("101", "100", {"relative": 0.01}, True),
        ("101.01", "100", {"relative": 0.01}, False),
        ("-101", "-100", {"relative": 0.01}, True),
        ("0.001", "0", {"relative": 0.5}, False),  # nothing is near 0 relatively
        ("105", "100", {"relative": 0.01, "absolute": 5.0}, True),
        ("50", "50%", {"percent": "strip"}, True),
        ("50%", "0.5", {"percent": "strip"}, False),
        ("it is 42", "42", {"last": False}, False),
        (" 42 ", "42", {"last": False}, True),
        ("42 43", "43", {"last": False}, False),
    ],
)
def test_settings(found, gold, settings, right):
    assert numeric(found, gold, **settings).value == float(right)


def test_numbers_are_spelled_one_way():
    """So that votes over answers count equal ones together."""
    assert [numeric(text, 0).extracted for text in ("1,200.50", "1200.5", "2401/2", "50%", "1/3", "-2/6", "1e2", "0.0")] == [
        *("1200.5", "1200.5", "1200.5", "0.5", "1/3", "-1/3", "100", "0")
    ]


@pytest.mark.parametrize(
    "answer", ["", "seven", "1,23", "1 2", "7kg", "1/0", float("nan"), float("inf"), True, None, [4], {"a": 4}]
)
def test_numeric_unusable_answer(answer):
    with pytest.raises(InvalidItem, match="is not a number"):
        numeric("4", answer)


def test_a_negative_tolerance_is_refused():
    for call in (lambda: numeric("4", 4, relative=-1.0), lambda: numeric.prepare(last=True, absolute=0.0, relative=-1.0)):
        with pytest.raises(RewardError, match=r"^relative=-1.0 is negative"):
            call()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["1" * 10**6, "1," * 10**6, "1-" * 10**6, "1e" * 10**6, "." * 10**6, " " * 10**6 + "x", "1.+" * 10**6, "<answer>" * 10**5],
)
def test_time_is_linear_in_the_text(text):
    numeric(text, "1")
    numeric(text, "1", last=False)
    exact(text, "1", ignore_punctuation=True, ignore_case=True)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=4), st.booleans())
def test_equal_notations_are_right_and_neighbours_wrong(number: Decimal, scientific: bool):
    text = f"so {number:e}." if scientific else f"so {number:,f}"
    assert numeric(text, f"{number:f}").value == 1.0
    assert numeric(text, f"{number + Decimal('0.0001'):f}").value == 0.0
    assert numeric(text, f"{number + Decimal('0.0001'):f}", absolute=0.0001).value == 1.0
