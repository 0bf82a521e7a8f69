"""The verifier ``math``: the given cases, the rules of its documentation, and where it is called."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from rewards import math_child, math_compare, math_verifier
from rewards.contract import InvalidItem
from rewards.math_verifier import math

pytestmark = pytest.mark.timeout(120)

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "math.jsonl").read_text().splitlines()]


def value(pred, gold, **settings):
    return math(rf"\boxed{{{pred}}}", gold, **settings).value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_given_cases(case):
    options = {key: option for key, option in case.get("options", {}).items() if key != "run_in"}
    expected = case["expect"]
    for require_box in (options.pop("require_box"),) if "require_box" in options else (False, True):
        begun = time.monotonic()
        verdict = math(case["completion"], case["answer"], require_box=require_box, **options)
        assert time.monotonic() - begun < case.get("max_seconds", 30) + 3  # the first question starts a process
        assert verdict.value == (1.0 if isinstance(expected, dict) else expected)  # one_of: symmetric, as documented
        assert verdict.accuracy == verdict.value


EQUAL = r"""
3\frac12 ~ 3.5 ; -3\frac{1}{2} ~ -3.5 ; 3 1/2 ~ 7/2 ; 2\frac32 ~ 3 ; 0.\overline{3} ~ 1/3 ; 0.1\overline{6} ~ 1/6 ; 3{,}14 ~ 3.14
1.2\times10^{5} ~ 120000 ; 1.2 \cdot 10^{-3} ~ 0.0012 ; 1e5 ~ 100000 ; 2^{10} ~ 1024 ; 10! ~ 3628800 ; 5!! ~ 15 ; \binom{5}{2} ~ 10
1,234,567.89 ~ 1234567.89 ; 1.000.000 ~ 1000000 ; 1'000 ~ 1000 ; (1,000) ~ 1000 ; (100,200) ~ (100, 200) ; 12 345 678 ~ 12345678
50\% ~ 50 ; 50\% ~ 0.5 ; 50 ~ 50\% ; \frac{1}{2} ~ 50\% ; 12.5 percent ~ 0.125
35 dollars ~ \$35 ; 35 cm^2 ~ 35\text{ square centimeters} ; 90^\circ ~ 90 degrees ; 5 apples ~ 5 ; 7 km/h ~ 7 kph ; 5\text{m} ~ 5\text{ metres}
3 million ~ 3000000 ; 100^{\text{th}} ~ 100 ; 5th ~ 5 ; 2 m ~ 2m ; 6\pi\text{ cm}^2 ~ 6\pi
x=5 ~ 5 ; 5 ~ x=5 ; 5=x ~ 5 ; f(x)=x^2 ~ x^2 ; \text{Area} = 5 ~ 5 ; 3+4=7 ~ 7 ; x=\frac12=0.5 ~ 0.5 ; \sqrt2\approx1.414 ~ \sqrt2
1, 2 ~ 2, 1 ; 1 and 2 ~ \{1,2\} ; x=1 or x=2 ~ 1, 2 ; x\in\{1,2\} ~ \{2,1\} ; \{1,1,2\} ~ \{1,2\} ; \{5\} ~ 5 ; \pm3 ~ 3, -3
2\pm\sqrt3 ~ 2-\sqrt3, 2+\sqrt3 ; 1,2 ~ (1,2) ; \langle1,2\rangle ~ (1,2) ; \begin{pmatrix}1\\2\end{pmatrix} ~ (1,2)
a=1, b=2 ~ (1,2) ; (a,b)=(1,2) ~ b=2, a=1 ; \{x : x>2\} ~ (2,\infty) ; \{x\in\mathbb{R} \mid x>2\} ~ x>2 ; x\ge2, x\le5 ~ [2,5]
[0,1) ~ 0\le x<1 ; 1>x\ge0 ~ [0,1) ; (-\infty,1)\cup(2,\infty) ~ x>2 \text{ or } x<1 ; x\ne2 ~ (-\infty,2)\cup(2,\infty) ; \mathbb{R} ~ (-\infty,\infty)
x^2+2x+1 ~ (x+1)^2 ; y-2x=1 ~ y=2x+1 ; x^2-4=0 ~ 2x^2=8 ; x+y<3 ~ y<3-x ; n(n+1)/2 ~ \frac{n^2+n}{2} ; 2^{n+1} ~ 2\cdot2^n ; (n+1)! ~ (n+1)n!
\sqrt{12} ~ 2\sqrt3 ; \sqrt{3+2\sqrt2} ~ 1+\sqrt2 ; \frac{1}{1+\sqrt2} ~ \sqrt2-1 ; \sqrt[3]{-8} ~ -2 ; |x| ~ \sqrt{x^2} ; 5\sqrt{\frac34} ~ \frac{5\sqrt3}{2}
\log_2 8 ~ 3 ; \ln 8 ~ 3\ln2 ; e^{i\pi} ~ -1 ; \sin^2x+\cos^2x ~ 1 ; \sin2x ~ 2\sin x\cos x ; \sin15^\circ ~ \frac{\sqrt6-\sqrt2}{4} ; \arctan1 ~ \pi/4
C_1e^x+C_2 ~ C_2+C_1e^{x} ; 3+2i ~ 2i+3 ; \int_0^1 x\,dx ~ \frac12 ; \sum_{k=1}^{3}k ~ 6 ; \mathbb{R}\setminus\{0\} ~ (-\infty,0)\cup(0,\infty)
1011_2 ~ 1011_{2} ; 1011_2 ~ 1011 ; 09:30 ~ 9:30 ; 9:30\text{ a.m.} ~ 9:30 ; 2:3 ~ 4:6 ; 2:3 ~ \frac23 ; 1:2:3 ~ 2:4:6
(E) ~ E ; \text{(E)} ~ E ; E. ~ \text{E} ; (e) ~ E ; (E) 35 ~ E ; E: 35 ~ E ; A, B ~ B, A ; xy ~ yx ; True ~ yes ; \text{no solution} ~ \emptyset
\text{The answer is } 4 ~ 4 ; \boxed{5} ~ 5 ; north east ~ North  East ; \frac{-b\pm\sqrt{b^2-4ac}}{2a} ~ \frac{-b\mp\sqrt{b^2-4ac}}{2a}
\frac{\pi}{4} ~ 0.785398 ; 0.333333 ~ 1/3 ; 0.666666 ~ 2/3 ; 0.666667 ~ 2/3 ; 1.41421 ~ \sqrt2
"""
DIFFERENT = r"""
3\frac12 ~ 1.5 ; 0.333 ~ 1/3 ; 0.333334 ~ 1/3 ; 0.785 ~ \pi/4 ; 0.333333 ~ 0.333334 ; 0.1250001 ~ 1/8 ; 3.14 ~ \pi ; 3,14 ~ 3.14
1e5 ~ 10000 ; 50\% ~ 51 ; 0.5 ~ 50 ; 35 cm ~ 35 m ; 35 cm ~ 35\text{ cm}^2 ; 50 cents ~ \$50 ; 3 million ~ 3 ; 35k ~ 35 ; not 4 ~ 4 ; approximately 4 ~ 4
4 or 5 ~ 4 ; 4 is wrong ~ 4 ; at most 5 ~ 5 ; y=5 ~ x=5 ; 3+4=8 ~ 8 ; 9=7 ~ 7 ; x=7 or 8 ~ 7 ; x+1=5 ~ 4
(2,1) ~ (1,2) ; (1,2) ~ 1, 2 ; 1 ~ 1, 2 ; 1,2,3 ~ 1,2 ; \{1,2\} ~ (1,2) ; 1,1,2 ~ 1,2 ; 3 ~ \pm3 ; (1,2,3) ~ (1,2)
[0,1] ~ [0,1) ; (0,1) ~ [0,1] ; x\le3 ~ x<3 ; x>3 ~ x<3 ; (0,1)\cup(2,3) ~ (0,3) ; x<3 ~ y<3 ; 3 ~ x<3 ; x+y<3 ~ y>3-x
x^2+2x+1 ~ (x+1)^3 ; x ~ \sqrt{x^2} ; x ~ y ; y=2x+1 ~ y=2x-1 ; \sqrt2+10^{-50} ~ \sqrt2 ; 1+10^{-50} ~ 1 ; e^{-1000}+1 ~ 1 ; \tanh1000 ~ 1
1/(2^{123}+1) ~ 1/2^{123} ; e^{\pi\sqrt{163}} ~ 262537412640768744 ; 9^{9^9}+1 ~ 9^{9^9} ; \log2 ~ \ln2 ; \sin x ~ \cos x ; 1+i ~ 1-i
1011_2 ~ 11 ; 1011_2 ~ 1011_3 ; 9:30\text{ pm} ~ 9:30\text{ am} ; 1 ~ 1:01 ; D ~ E ; (A) and (B) ~ A ; AB ~ A ; a ~ A ; on ~ no ; yes ~ no
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix}1&3\\2&4\end{pmatrix} ; \int_0^1 x\,dx ~ \frac13 ; \frac{0}{0} ~ 0 ; \frac10 ~ \infty ; -\infty ~ \infty
"""


DIFFERENT += r"""
5 \text{ or maybe 6} ~ 5 ; 5 \text{ or } 6 \text{ whatever is right} ~ 5 ; \text{not } 5 ~ 5 ; \text{either }5\text{ or }7 ~ 5 ; 5 \ldots ~ 5 ; \cancel{7}5 ~ 5
5 \to 7 ~ 7 ; 5\Rightarrow7 ~ 7 ; 5\; \text{if } x>0 ~ 5
"""


def pairs(table):
    return [
        tuple(side.strip() for side in pair.split(" ~ ")) for line in table.splitlines() if line for pair in line.split(" ; ")
    ]


@pytest.mark.parametrize(("pred", "gold"), pairs(EQUAL))
def test_the_same(pred, gold):
    assert value(pred, gold) == 1.0


@pytest.mark.parametrize(("pred", "gold"), pairs(DIFFERENT))
def test_not_the_same(pred, gold):
    assert value(pred, gold) == 0.0


@pytest.mark.parametrize("text", sorted({side for pair in pairs(EQUAL + DIFFERENT) for side in pair}))
def test_every_answer_equals_itself(text):
    assert value(text, text) == 1.0


def test_digits_of_a_decimal_are_a_setting():
    assert value("0.333", "1/3", decimal_digits=3) == 1.0
    assert value("0.33", "1/3", decimal_digits=3) == 0.0
    assert value("0.3333333333", "1/3", decimal_digits=0) == 0.0
    assert value("1.41421356", r"\sqrt2", decimal_digits=0) == 0.0
    assert value("0.5", "1/2", decimal_digits=0) == 1.0


def test_the_reference_answer_may_be_a_number_or_a_solution():
    assert value("42", 42) == value("42.0", 42) == value("0.5", 0.5) == 1.0
    assert value("1" + "0" * 5000, 10**5000) == 1.0
    assert value("yes", True) == 1.0
    assert value("42", "6 * 7 = 42\n#### 42") == 1.0
    assert value("42", r"As $6 \cdot 7 = 42$, it is $\boxed{42}$.") == 1.0
    assert value("42", "$42$.") == 1.0


@pytest.mark.parametrize("answer", ["", "  ", "$$", None, [42], {"a": 1}, float("nan"), r"\frac{1}{2", r"\nonsense{4"])
def test_an_unusable_reference_answer_is_invalid(answer):
    with pytest.raises(InvalidItem, match="reference answer"):
        value("4", answer)


def test_outcomes():
    assert math("no idea", "4").outcome == "unparsed"
    assert math(r"\boxed{5}", "4").outcome == "wrong"
    assert math(r"\boxed{4}", "4").outcome == "right"
    endless = math(r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}", "4", timeout_seconds=0.5)
    assert (endless.value, endless.outcome, endless.measures) == (0.0, "time_limit", {"symbolic": 1.0})
    huge = math(r"\boxed{9^{9^{9^{9^9}}} - 9^{9^{9^{9^9}}} + 4}", "4")
    assert (huge.value, huge.outcome) == (0.0, "memory_limit")
    wide = math(r"\boxed{\int_0^1 2^{10^{10}} dx}", r"\sqrt{5}", memory_limit_mb=64)
    assert (wide.value, wide.outcome) == (0.0, "memory_limit")
    with pytest.raises(InvalidItem, match="reference answer"):
        math(r"\boxed{4}", r"\sum_{k=1}^{10^9} \frac{1}{k}", timeout_seconds=0.5)


def test_symbols_are_counted():
    assert math(r"\boxed{1/2}", "0.5").measures == {"symbolic": 0.0}
    assert math(r"\boxed{\sqrt8}", r"2\sqrt2").measures == {"symbolic": 1.0}


def test_b15_the_setting_alone_decides():
    text = "(73 + 161) = 234. Final Answer: **73**"
    free, boxed = math(text, "73"), math(text, "73", require_box=True)
    assert (free.value, free.extracted) == (1.0, "73")
    assert (boxed.value, boxed.extracted, boxed.outcome) == (0.0, None, "unparsed")


def test_b23_the_gold_is_in_its_place(monkeypatch):
    seen = []

    def recording(pred, gold, values):
        seen.append((pred, gold))
        return math_compare.same(pred, gold, values)

    monkeypatch.setattr(math_verifier, "same", recording)
    assert value("(7, 8)", "(8, 7)") == 0.0
    assert [[node.args[2:] for node in pair] for pair in seen] == [[ints(7, 8), ints(8, 7)]]


def ints(*numbers):
    return tuple(math_verifier.read(str(number)) for number in numbers)


def test_b34_towers_beside_a_normal_answer():
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from rewards.math_verifier import math\n"
        r"texts = ['\\boxed{9^{9^{9}}}', '\\boxed{10^{10^{10}}}', '\\boxed{4}', '\\boxed{\\sqrt{16}}']" + "\n"
        "print([math(text, answer, timeout_seconds=5.0).value for text, answer in zip(texts, ['1', '1', '4', '4'])])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15, check=True)
    assert done.stdout.strip() == "[0.0, 0.0, 1.0, 1.0]", done.stderr


def test_b39_order_is_kept():
    rows = [(r"\boxed{4}", "4"), ("I don't know.", "5"), (r"\boxed{6}", "6"), ("", "7"), (r"\boxed{8}", "8")]
    verdicts = [math(*row) for row in rows]
    assert [verdict.value for verdict in verdicts] == [1, 0, 1, 0, 1]
    assert [verdict.extracted for verdict in verdicts] == ["4", None, "6", None, "8"]


def test_b176_answers_are_told_in_full():
    answers = ["137", "12", "-5", r"\frac{1}{2}"]
    assert [math(rf"So \boxed{{{answer}}}.", "1").extracted for answer in answers] == answers


def test_b177_answers_are_never_executed(tmp_path):
    mark = tmp_path / "MARK"
    program = (
        "import sys\nfrom rewards.math_verifier import math\nmark = sys.argv[1]\n"
        """attacks = [f"__import__('os').system('touch {mark}')", f"open('{mark}','w')", f"exec('open(\\"{mark}\\", \\"w\\")')"]\n"""
        "attacks += [f'\\\\sqrt{{{a}}}' for a in attacks] + [f'\\\\int {a} dx' for a in attacks]\n"
        "print([math(f'\\\\boxed{{{a}}}', g).value for a in attacks for g in ('1', '\\\\sqrt{2}', '\\\\int_0^1 x dx')], math('\\\\boxed{1}', '1').value)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(mark)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{[0.0] * 27} 1.0", done.stderr
    assert not mark.exists()


# Where it is called


def test_b36_many_threads_at_once():
    """Both kinds of question, and one that is killed, side by side."""
    questions = [
        (r"\frac{1}{3}", "1/3", 1.0),
        (r"\sqrt{8}", r"2\sqrt2", 1.0),
        (r"\sqrt{8}", r"2\sqrt3", 0.0),
        (r"\int_0^1 x dx", "1/2", 1.0),
    ]
    questions = questions * 5 + [(r"\sum_{k=1}^{10^9} \frac{1}{k}", "4", 0.0)]
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda question: value(question[0], question[1], timeout_seconds=3.0), questions))
    assert values == [expected for _, _, expected in questions]
    assert threading.active_count() < 50


def test_a_lost_nursery_and_lost_children_are_replaced():
    assert value(r"\sqrt8", r"2\sqrt2") == 1.0
    for victims in (
        lambda nursery: [nursery],
        lambda nursery: nursery.children(),
        lambda nursery: [*nursery.children(), nursery],
    ):
        nursery = psutil.Process(math_child._nursery._process.pid)
        for victim in victims(nursery):
            victim.kill()
        assert value(r"\sqrt8", r"2\sqrt2") == 1.0
        assert value(r"\sqrt8", r"2\sqrt3") == 0.0


def test_nothing_outlives_the_caller():
    program = (
        "import os, threading\nfrom rewards import math_child\nfrom rewards.math_verifier import math\n"
        r"assert math('\\boxed{\\sqrt8}', '2\\sqrt2').value == 1.0" + "\n"
        r"ask = lambda: math('\\boxed{\\sum_{k=1}^{10^9} \\frac{1}{k}}', '4', timeout_seconds=60.0)" + "\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "print(math_child._nursery._process.pid, flush=True)\n"
        "threading.Event().wait(30)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as caller:
        nursery = psutil.Process(int(caller.stdout.readline()))
        deadline = time.monotonic() + 20
        while len(nursery.children()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        family = [nursery, *nursery.children()]
        assert len(family) == 3
        caller.kill()
        gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert len(gone) == 3


def test_a_fork_of_the_caller_has_its_own_nursery():
    assert value(r"\sqrt8", r"2\sqrt2") == 1.0
    before = math_child._nursery._process.pid
    pid = os.fork()
    if pid == 0:
        os._exit(0 if value(r"\sqrt8", r"2\sqrt2") == 1.0 and math_child._nursery._process.pid != before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert value(r"\sqrt8", r"2\sqrt2") == 1.0
    assert math_child._nursery._process.pid == before


def test_the_children_hold_to_their_limit_of_memory():
    """The parent's own limits stay as they are."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert value(r"\sqrt8", r"2\sqrt2", memory_limit_mb=64) == 1.0
    assert resource.getrlimit(resource.RLIMIT_AS) == before
