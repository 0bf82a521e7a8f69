"""The exact-integer verifier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.contract import InvalidItem
from rewards.exact import exact_integer
from rollout.records import Outcome

MINUS = "\N{MINUS SIGN}"


@pytest.mark.parametrize(
    ("completion", "answer", "outcome"),
    [
        ("42", "42", "right"),
        ("42", 42, "right"),
        (" 42\n", "42", "right"),
        ("42", "43", "wrong"),
        ("0042", "42", "right"),
        ("42", "0042", "right"),
        ("+5", "5", "right"),
        ("5", "+5", "right"),
        ("-5", "5", "wrong"),
        ("-5", -5, "right"),
        (f"{MINUS}5", "-5", "right"),
        ("-0", "0", "right"),
        ("0", "-0", "right"),
        ("000", 0, "right"),
        ("", "0", "unparsed"),
        ("no number", "0", "unparsed"),
        ("-", "0", "unparsed"),
        ("first 3, then 4.", "4", "right"),
        ("first 3, then 4.", "3", "wrong"),
        ("12-5", "5", "right"),  # the sign after a digit is an operator
        ("12 -5", "-5", "right"),
        ("(12)-5", "5", "right"),
        ("12+30=42", "42", "right"),
        ("x=-3", "-3", "right"),
        ("Answer:5", "5", "right"),
        (r"so $\boxed{-17}$", "-17", "right"),
        ("**73**", "73", "right"),
        ("it is 3.14", "14", "unparsed"),  # each of these ends in a number that is no integer
        ("it is 42.0", "42", "unparsed"),
        ("it is .5", "5", "unparsed"),
        ("1,234", "234", "unparsed"),
        ("1/2", "2", "unparsed"),
        ("12:30", "30", "unparsed"),
        ("2^10", "10", "unparsed"),
        ("1e5", "5", "unparsed"),
        ("1e-5", "5", "unparsed"),
        ("7kg", "7", "unparsed"),
        ("x2", "2", "unparsed"),
        ("\N{ARABIC-INDIC DIGIT FIVE}", "5", "unparsed"),
        ("5\N{SUPERSCRIPT TWO}", "5", "unparsed"),
    ],
)
def test_last_number(completion, answer, outcome):
    verdict = exact_integer(completion, answer)
    assert verdict.outcome == outcome
    assert verdict.value == verdict.accuracy == float(outcome == "right")


@pytest.mark.parametrize(
    ("completion", "outcome"),
    [
        ("42", "right"),
        (" +042 ", "right"),
        ("it is 42", "unparsed"),
        ("42.", "unparsed"),
        ("4 2", "unparsed"),
        ("42 42", "unparsed"),
    ],
)
def test_whole_text(completion, outcome):
    assert exact_integer(completion, "42", last=False).outcome == outcome


def test_extracted_is_canonical():
    assert exact_integer(f"it is {MINUS}007", "8").extracted == "-7"
    assert exact_integer("none", "8").extracted is None


@pytest.mark.parametrize("answer", ["", "seven", "1,234", "4.0", "1 2", 4.0, True, None, [4], {"a": 4}])
def test_unusable_answer(answer):
    with pytest.raises(InvalidItem, match="not an integer"):
        exact_integer("4", answer)


def test_integers_beyond_every_limit():
    """Python refuses to print more than 4,300 digits; doubles merge neighbours from 2**53 on."""
    many = "7" * 100_000
    assert exact_integer(many, many).outcome == Outcome.RIGHT
    assert exact_integer(many[:-1] + "8", many).outcome == Outcome.WRONG
    assert exact_integer("1" + "0" * 5000, 10**5000).outcome == Outcome.RIGHT
    assert exact_integer("-1" + "0" * 5000, -(10**5000)).outcome == Outcome.RIGHT
    assert exact_integer(str(2**53), 2**53 + 1).outcome == Outcome.WRONG


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["1" * 10**6, "1," * 10**6, "1-" * 10**6, "1e" * 10**6, " " * 10**6 + "x", "+" * 10**6, "1.+" * 10**6]
)
def test_time_is_linear_in_the_text(text):
    exact_integer(text, "1")
    exact_integer(text, "1", last=False)


@given(
    st.integers(),
    st.integers(0, 5),
    st.sampled_from(["", "It is ", "x = ", "(", "3 + 4 -> "]),
    st.sampled_from(["", ".", " ", ")", "\n"]),
)
def test_equal_notations_are_right_and_neighbours_wrong(number, zeros, before, after):
    sign = "-" if number < 0 else "+" if zeros % 2 else ""
    for minus in ("-", MINUS):
        text = f"{before}{sign.replace('-', minus)}{'0' * zeros}{abs(number)}{after}"
        assert exact_integer(text, number).outcome == Outcome.RIGHT
        assert exact_integer(text, str(number)).outcome == Outcome.RIGHT
        assert exact_integer(text, number + 1).outcome == Outcome.WRONG
        assert exact_integer(text, number - 1).outcome == Outcome.WRONG
