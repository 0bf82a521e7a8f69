"""The multiple-choice verifier."""

import pytest

from rewards.choice import choice
from rewards.contract import InvalidItem, RewardError

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) Paris", "B"),
        ("(b) Paris", "B"),
        ("B: Paris", "B"),
        ("**B**", "B"),
        (r"$\text{B}$", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\textbf{(B) }12}", "B"),
        (r"so \[\boxed{\mathrm{b}}\]", "B"),
        (r"\boxed{A}, no, \boxed{B}", "B"),
        (r"\boxed{B}; (A) is wrong", "B"),
        ("Answer: B", "B"),
        ("answer: b", "B"),
        ("The final answer is: **(B)**.", "B"),
        ("The answer is B because I checked.", "B"),
        ("The answer is A because I checked.", "A"),
        ("Answer: B, I think", "B"),
        ("Answer: B, a mammal", "B"),
        ("The correct option is B", "B"),
        ("Answer:\nB", "B"),
        ("Answer: A. No. Answer: B", "B"),
        ("Answer: B, since (A) and (C) are wrong", "B"),
        ("(A) is wrong, so (B)", "B"),
        ("(A), (C) and (D) are wrong; it is (B)", "B"),
        ("It must be B.", "B"),
        ("It is A", "A"),
        ("Not A, but B.", "B"),
        ("I think that\nB. Paris\nfits", "B"),
        ("<think>(A)? (C)?</think>\n(B)", "B"),
        ("<think>x</think><answer>B</answer> or (A)", "B"),
        ("", None),
        ("Because", None),
        ("A cat sat there.", None),
        ("I do not know", None),
        ("Answer: I do not know", None),
        ("Answer: a cat", None),
        ("It's what I'd call a B-movie", None),
        ("Apple, Banana", None),
        ("K", None),
        ("(K)", None),
        (r"\boxed{A cat}", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{7} (B)", None),
        (r"\boxed{B", None),
        ("Answer: A or B", None),
        ("Answer: A, B, C, D", None),
        ("(A), (B), (C), (D)", None),
        ("(A)/(B)", None),
        ("either A or B", None),
        ("Answer: A  or  B", None),
        ("Answer: B OR A", None),
        ("Answer: B (or A)", None),
        ("Answer: B | A", None),
        ("Answer: B; or A", None),
        ("Answer: not B", None),
        ("The answer is not B.", None),
        ("Answer: neither (B)", None),
        ("The answer is not A but B", "B"),
        ('"B"', "B"),
        ("Answer: \N{LEFT DOUBLE QUOTATION MARK}B\N{RIGHT DOUBLE QUOTATION MARK}.", "B"),
        ("<think>it is (B)", None),
    ],
)
def test_the_letter_chosen(completion, letter):
    verdict = choice(completion, "B")
    assert verdict.extracted == letter
    assert verdict.outcome == ("unparsed" if letter is None else "right" if letter == "B" else "wrong")
    assert verdict.value == verdict.accuracy == float(letter == "B")


def test_the_choices_bound_the_letters():
    assert choice("(E)", "A", choices="ABCD").outcome == "unparsed"
    assert choice("(E)", "E").outcome == "right"
    assert choice("Answer: (c)", "(C)", choices="ABCD").outcome == "right"


@pytest.mark.parametrize("choices", ["", "A,B", "A B", "[A-D]"])
def test_choices_that_are_no_letters_are_refused(choices):
    with pytest.raises(RewardError, match=r"^choices="):
        choice.prepare(choices=choices)
    choice.prepare(choices="ABCD")


@pytest.mark.parametrize("answer", ["K", "", "AB", "Paris", 2, None, ["A"]])
def test_unusable_answer(answer):
    with pytest.raises(InvalidItem, match="none of the choices ABCDEFGHIJ"):
        choice("A", answer)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "answer " * 10**5,
        "answer" + " " * 10**6 + "x",
        "(A) " * 10**5 + "x",
        "\\boxed{" * 10**5,
        "\n" * 10**6 + "x",
        "A, " * 10**5 + "x",
    ],
)
def test_time_is_linear_in_the_text(text):
    choice(text, "A")
