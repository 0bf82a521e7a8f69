"""Finding the answer in a text."""

import json
from pathlib import Path

import pytest

from rewards.answers import clean, find_answer

pytestmark = pytest.mark.timeout(60)

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "math.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{x = \boxed{5}}", r"x = \boxed{5}"),
        (r"\boxed{5} then \boxed{7}", "7"),
        (r"\boxed{5} then \fbox{7}", "7"),
        (r"\fbox{5} then \boxed{7}", "7"),
        (r"\boxed{5} then \boxed{7", "5"),  # cut in the middle of a box
        (r"\boxed{5} then \boxed{}", "5"),
        (r"\boxed{5} then \boxed{ }", "5"),
        (r"a } stray { brace \boxed{5} and } more", "5"),
        (r"\boxed{5} but the answer is 7", "5"),
        (r"\boxed{5", None),
        (r"\boxed", None),
        ("boxed{5}", None),
        ("5", None),
        ("", None),
        (r"<think>\boxed{5}</think> It is \boxed{7}.", "7"),
        (r"<think>\boxed{5}</think> So it is.", None),
        (r"<think>\boxed{5}</think> <think>\boxed{6}</think> \boxed{7}", "7"),
        (r"<think>\boxed{5}", None),
        (r"\boxed{5} <think> \boxed{6}", "5"),
    ],
)
def test_boxes(text, answer):
    assert find_answer(text, require_box=True) == answer


def test_a_prompt_that_opens_the_reasoning_part():
    assert find_answer(r"hm, \boxed{5}", require_box=False, prompt="2 + 3?\n<think>\n") is None
    assert find_answer(r"hm, \boxed{5}</think>\boxed{7}", require_box=False, prompt="2 + 3?\n<think>\n") == "7"
    assert find_answer(r"hm, \boxed{5}", require_box=False, prompt="<think></think>") == "5"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2+40=42\n#### 42", "42"),
        ("#### 41\nno\n#### 42\nchatter 7", "42"),
        ("Final Answer: **73**", "73"),
        ("**Final Answer:** 73", "73"),
        ("**Final Answer**: $73$.", "73"),
        ("Final answer:\n\n73", "73"),
        ("The answer is 42.", "42"),
        ("The answer is $x=5$ where $y=7$.", "x=5"),
        ("So the answer is 42 because 6*7=42.", "42"),
        ("The answer is 3.14. Done.", "3.14"),
        ("The answer is: (B)", "(B)"),
        (r"The answer is \(\frac{1}{2}\).", r"\frac{1}{2}"),
        ("The answer is 5. No, wait: the answer is 7.", "7"),
        ("<answer> 42 </answer>", "42"),
        ("<answer>41</answer> oh <answer>42</answer>", "42"),
        ("<answer>The answer is 42.</answer>", "42"),
        (r"<answer>so \boxed{42}</answer>", "42"),
        ("We get\n$$x = 42$$", "x = 42"),
        ("It is **42**.", "42"),
        ("(73 + 161) = 234 and so we have 73 apples", "73"),
        ("Sunday", "Sunday"),
        ("(1,2)", "(1,2)"),
        ("x^2 + 1", "x^2 + 1"),
        ("1 and 2", "1 and 2"),
        ("= 42", "42"),
        ("It costs $1,234.50 in all.", "1,234.50"),
        ("There are 35 apples.\nI hope this helps!", "35"),
        ("It grows by 12%.", "12%"),
        ("We meet at 12:30.", "12:30"),
        ("3 - 7 = -4, so -4", "-4"),
        ("I don't know.", None),
        ("", None),
        ("   \n ", None),
        ("...", None),
    ],
)
def test_without_a_box(text, answer):
    assert find_answer(text, require_box=False) == answer
    assert find_answer(text, require_box=True) == (answer if "boxed" in text else None)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("**73**", "73"),
        (" $73$. ", "73"),
        ("$$73$$", "73"),
        ('"73"', "73"),
        (r"\(73\).", "73"),
        (r"5\,", r"5\,"),
        ("1.", "1"),
        ("$1 + $2", "$1 + $2"),
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned


def test_b03_one_extractor():
    """Training and evaluation score through the same function; on every case its answer is the same when asked again."""
    for case in CASES:
        for require_box in (False, True):
            first = find_answer(case["completion"], require_box=require_box)
            assert first == find_answer(case["completion"], require_box=require_box)
            assert first is None or first == first.strip()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "\\boxed{}",
        "{",
        "}",
        "$",
        "$$",
        "\\(",
        "\\[",
        "**",
        "__",
        "1",
        "1,",
        "-",
        "the answer is ",
        "#### ",
        "<answer>",
        "\n",
        " ",
        "a ",
        "1 ",
        "\\",
        "</think>",
    ],
)
def test_time_is_linear_in_the_text(piece):
    text = piece * (10**6 // len(piece))
    for require_box in (False, True):
        find_answer(text, require_box=require_box)
        find_answer(f"{text} so it is 5", require_box=require_box)
