r"""Where the answer stands, arbitrary text, and monsters: expressions whose value or spelling is too large to work out."""

import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rewards.contract import InvalidItem, Verdict
from rewards.math_verifier import math

pytestmark = pytest.mark.timeout(60)

STEADY = settings(derandomize=True, deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
VALUES = [
    ("137", "137", "138"),
    ("-5", "-5", "5"),
    ("0.25", r"\frac{1}{4}", "0.52"),
    (r"\frac{2}{3}", "2/3", "2"),
    ("1,000", "1000", "100"),
]
VALUES += [
    (r"2\sqrt{3}", r"\sqrt{12}", r"\sqrt{3}"),
    (r"\text{Sunday}", "Sunday", "Monday"),
    ("(1, 2)", "(1,2)", "(2, 1)"),
    ("x=7", "7", "8"),
]
triples = st.sampled_from(VALUES)  # (as written, gold, another gold)
any_text = st.text(st.characters(exclude_categories=()))  # surrogates too
SOUP = [
    r"\frac",
    r"\sqrt",
    r"\text",
    r"\left(",
    r"\right",
    r"\begin{matrix}",
    r"\end{pmatrix}",
    r"\boxed{",
    r"\in",
    r"\pm",
    r"\times",
    r"\{",
    r"\}",
    r"\cup",
]
SOUP += [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "^",
    "_",
    "=",
    "<",
    ",",
    ".",
    "!",
    "%",
    "$",
    "&",
    r"\\",
    "\\",
    "|",
    "-",
    "+",
    "/",
    ":",
    "1",
    "23",
    "x",
    "e",
    "i",
    " ",
]
SOUP += [
    r"\infty",
    r"\int",
    r"\sum",
    r"\lim",
    r"\log",
    r"\pi",
    r"\over",
    r"\cdot",
    r"\circ",
    r"\le",
    "#",
    "*",
    "'",
    '"',
    "\n",
    "\0",
]
latex_soup = st.lists(st.sampled_from(SOUP), max_size=20).map("".join)


def value(completion: str, gold: str, **settings: object) -> float:
    return math(completion, gold, **settings).value


@STEADY
@given(triples, triples, any_text.filter(lambda text: "box" not in text and "think>" not in text))
def test_text_before_and_after_the_box_changes_nothing(triple, decoy, text):
    written, gold, another = triple
    prefix = f"{text}\nFirst 12 and ${decoy[0]}$, so the answer is {decoy[0]}.\n"
    for completion in (rf"{prefix}\boxed{{{written}}}", rf"\boxed{{{written}}}{prefix}", rf"{prefix}$$\fbox{{ {written} }}$$."):
        for require_box in (True, False):
            assert value(completion, gold, require_box=require_box) == 1.0
            assert value(completion, another, require_box=require_box) == 0.0


@STEADY
@given(triples, st.lists(triples, min_size=1, max_size=4))
def test_the_last_box_counts(last, earlier):
    written, gold, another = last
    boxes = "".join(rf"Maybe \boxed{{{decoy[0]}}}, but no." for decoy in earlier)
    completion = rf"{boxes} Finally \boxed{{{written}}}"
    assert value(completion, gold) == 1.0
    assert value(completion, another) == 0.0
    assert value(f"<think>{boxes}</think>\nIt is \\boxed{{{written}}}.", gold) == 1.0
    assert value(f"<think>{completion}", gold) == 0.0  # thinking that never ends hides what it holds


@pytest.mark.parametrize(
    "template",
    [
        "The answer is @.",
        "The final answer is: @",
        "2 + 2 = 4\n#### @",
        "So 12 - 3 = 9.\n\nFinal Answer: **@**",
        "**Answer:** @",
        "Therefore the result is 12 or so.\nFinal answer: $@$.",
        "<think>perhaps the answer is 99</think>\nThe answer is $@$.",
    ],
)
@pytest.mark.parametrize("triple", VALUES, ids=lambda triple: triple[0])
def test_an_answer_without_a_box_counts_where_none_is_required(template, triple):
    written, gold, another = triple
    completion = template.replace("@", written if "$" in template or "\\" not in written else f"${written}$")
    assert value(completion, gold, require_box=False) == 1.0
    assert value(completion, another, require_box=False) == 0.0
    assert value(completion, gold, require_box=True) == 0.0


def verdict_or_invalid(completion: str, gold: str) -> Verdict | None:
    try:
        return math(completion, gold, timeout_seconds=1.0)
    except InvalidItem:
        return None


@STEADY
@given(st.one_of(any_text, latex_soup), st.one_of(any_text, latex_soup))
def test_arbitrary_text_in_both_slots_is_a_verdict_or_an_invalid_answer(text, gold):
    for completion in (text, rf"\boxed{{{text}}}", rf"$\boxed{{{gold}}}"):
        verdict = verdict_or_invalid(completion, gold)
        assert verdict is None or verdict.value in (0.0, 1.0)


@STEADY
@given(any_text.filter(lambda text: not set(text) & set("{}\\")))
def test_any_plain_text_equals_itself(text):
    assume(text.strip())
    verdict = verdict_or_invalid(rf"\boxed{{{text}}}", text)
    assert verdict is None or verdict.value == 1.0


MILLION = "7" * 10**6
MONSTERS = {
    "tower": "9^{9^{9}}",
    "tower of ten": "10^{10^{10}}",
    "tower in a fraction": r"\frac{1}{3^{3^{3^{3^3}}}}",
    "tower of many floors": "2^{" * 200 + "2" + "}" * 200,
    "huge power": "7^{123456789}",
    "huge power of a sum": "(x+1)^{10^{10}}",
    "expanded power": "(a+b+c+d)^{400}",
    "factorial": "123456789!",
    "factorial of a factorial": "((30!)!)!",
    "many factorials": "5" + "!" * 60,
    "binomial": r"\binom{10^9}{5\cdot 10^8}",
    "deep braces": "{" * 10**4 + "1" + "}" * 10**4,
    "deep brackets": "(" * 10**4 + "1" + ")" * 10**4,
    "deep fractions": r"\frac{1}{1+" * 3000 + "1" + "}" * 3000,
    "deep roots": r"\sqrt{2+" * 300 + "2" + "}" * 300,
    "many digits": MILLION,
    "many decimals": f"0.{MILLION}",
    "large exponent": "1e999999999",
    "large exponent in LaTeX": r"3\times10^{999999999999}",
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}",
    "endless sum": r"\sum_{n=1}^{\infty} \frac{\sin(n^2)}{n^3+\cos(n)}",
    "product": r"\prod_{n=1}^{10^{9}} (n^2+1)",
    "integral": r"\int_0^1 x^{x^{x^{\sin(x)}}} \tan(e^{x}) dx",
    "limit": r"\lim_{x\to 0} \frac{\sin(\tan(x))-\tan(\sin(x))}{x^{7}\Gamma(x)}",
    "long polynomial": "+".join(f"{n}x^{{{n}}}" for n in range(1, 10**5)),
    "many variables": "".join(f"(x_{{{n}}}+1)" for n in range(2000)),
    "long list": ",".join(str(n) for n in range(10**5)),
    "long text": r"\text{" + "word " * 10**5 + "}",
    "large matrix": r"\begin{pmatrix}" + r"\\".join("&".join(["12"] * 1000) for _ in range(1000)) + r"\end{pmatrix}",
    "power of a matrix": r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^{9}}",
    "trigonometry": r"\sin(" * 200 + "x" + ")" * 200,
    "equation": r"x^{x^{x}}+\sin(x^{5})=\log(x)^{x}",
    "inequality": r"x^5-x^3+7x+\sin x<e^{x^2}",
    "many signs": "-" * 10**5 + "1",
    "repeated fraction command": r"\frac" * 10**5,
    "many boxes": r"\boxed{" * 10**4 + "1" + "}" * 10**4,
}
TIMEOUT_S = 0.25
AFTER_S = 5.0  # the cases allow this much beyond the timeout


@pytest.mark.parametrize("monster", MONSTERS.values(), ids=MONSTERS)
def test_a_monster_ends_in_time_and_is_not_one(monster):
    begun = time.monotonic()
    verdict = math(rf"\boxed{{{monster}}}", "1234567", timeout_seconds=TIMEOUT_S)
    assert time.monotonic() - begun < TIMEOUT_S + AFTER_S
    assert verdict.value == 0.0
    assert math(r"\boxed{4}", "4").value == 1.0


@pytest.mark.parametrize("monster", MONSTERS.values(), ids=MONSTERS)
def test_a_monster_as_the_reference_answer_ends_in_time(monster):
    begun = time.monotonic()
    try:
        itself = monster if "boxed" in monster else rf"\boxed{{{monster}}}"
        verdicts = [math(completion, monster, timeout_seconds=TIMEOUT_S) for completion in (r"\boxed{1234567}", itself)]
    except InvalidItem:
        return
    finally:
        assert time.monotonic() - begun < 2 * (TIMEOUT_S + AFTER_S)
    assert [verdict.value for verdict in verdicts] == [0.0, 1.0]
