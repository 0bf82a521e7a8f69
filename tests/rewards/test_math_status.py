"""The completion must not decide the status: whatever it says of a reference answer that can be read, it is right or wrong."""

import pytest

from rewards import math_child
from rewards.math_verifier import math

pytestmark = pytest.mark.timeout(120)

WITHOUT_VALUE = [
    r"\sqrt2+\ln 0",
    r"\frac{\sqrt2}{\sqrt2-\sqrt2}",
    r"\tan\frac{\pi}{2}",
    r"\sqrt2+(-1)!",
    r"\sqrt[0]{2}",
    r"\sqrt[\pi-\pi]{2}",
]
FOR_THE_LIBRARY = [r"\sum", r"\sum_{k=1}^{3} k", r"\int x", r"\begin{pmatrix}", r"\overline{", r"\operatorname{nan}"]
READ_BY_US_ALONE = [r"50\%", r"\langle 1,2\rangle", "9:30", "2:3", "1011_2", r"6\text{ cm}", r"\pm 6", "x=1, y=2"]


@pytest.mark.parametrize("pred", WITHOUT_VALUE)
@pytest.mark.parametrize("gold", ["3.14159265", r"\pi", "x+1", r"x<\sqrt{2}", r"\sqrt{x}+y=3"])
def test_formulas_without_a_value_are_wrong(pred, gold):
    for completion in (rf"\boxed{{{pred}}}", rf"\boxed{{x<{pred}}}", rf"\boxed{{\sqrt{{x}}+y={pred}}}"):
        verdict = math(completion, gold)
        assert (verdict.value, verdict.outcome) == (0.0, "wrong")


@pytest.mark.parametrize("gold", READ_BY_US_ALONE)
def test_what_only_the_library_reads_makes_no_readable_gold_invalid(gold):
    for pred in FOR_THE_LIBRARY:
        assert math(rf"\boxed{{{pred}}}", gold).value == 0.0
    assert math(rf"\boxed{{{gold}}}", gold).value == 1.0


def test_a_machine_without_proc(tmp_path):
    assert math_child._address_space() > 1 << 20
    assert math_child._address_space(tmp_path / "statm") == 512 << 20


def test_names_of_sets_are_no_numbers():
    for pred in (r"x+\mathbb{Z}", r"50\mathbb{Q}", r"\gcd(x,1)"):
        assert math(rf"\boxed{{{pred}}}", r"x+\sqrt{2}").outcome == "wrong"


def test_an_error_in_the_comparison_is_the_completions(monkeypatch):
    said = [["begun", "ready", "failed TypeError: something"], ["begun", "failed TypeError: something"]]
    monkeypatch.setattr(math_child._nursery, "ask", lambda *_: said.pop(0))
    crashed = math(r"\boxed{\sqrt8}", r"\sqrt2")
    assert (crashed.value, crashed.outcome) == (0.0, "crash")
    with pytest.raises(RuntimeError, match="TypeError: something"):
        math(r"\boxed{\sqrt8}", r"\sqrt2")
