# ruff: noqa: RUF001 - the characters are the ones that models write
r"""Kinds of mathematical answers: one value in two notations is right, its neighbour is wrong, whatever the value.

A kind draws ``(gold, same, other)``: ``same`` is the gold's value written otherwise, ``other`` a value that differs from it by
construction (Python's own integers and fractions decide, never the code under test). All three are checked in a box.
"""

import re
from fractions import Fraction
from math import comb, factorial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewards.math_verifier import math

pytestmark = pytest.mark.timeout(120)

MINUS = "\N{MINUS SIGN}"
SEPARATORS = [",", "{,}", r"\,", r",\!", r",\! ", r"\ ", " ", "\N{THIN SPACE}", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}"]
SMALL = st.integers(1, 9)
ANY_INTEGER = st.one_of(st.integers(-99, 99), st.integers(-(10**6), 10**6), st.integers(-(10**40), 10**40))


def forms(text: str) -> list[str]:
    """Notations, parted by ``;`` with a space on both sides; ``#`` stands for the value."""
    return text.split(" ; ")


AROUND = forms(r"# ; $#$ ; \(#\) ;  #  ; #. ; {#} ; \displaystyle # ; \!# ; \mathbf{#} ; \boldsymbol{#}")
PLAIN = forms(r"# ; \text{#} ; \mathrm{#} ; \textbf{#} ; \text{ # } ; \text{#}. ; \mbox{#}")
UNITS = forms(
    r"# cm ; #\text{ cm} ; #\,\mathrm{kg} ; #^\circ ; #^{\circ} ; #° ; #\text{ square units} ; #\text{ cm}^2 ; #\ \text{m/s}"
)
UNITS += forms(r"#\text{ hours} ; #~\text{inches} ; \$# ; \text{\$}# ; €#")
FACTORS = forms(r"#k ; # million ; #\text{ thousand}")  # no units
PERCENT = forms(r"#\% ; #% ; # \% ; #\,\% ; \text{#\%} ; #\text{ percent} ; # percent ; $#\%$")
CHOICE = forms(r"# ; (#) ; \text{#} ; \text{(#)} ; \textbf{(#)} ; \mathrm{#} ; #. ; #) ; \text{#}. ; (#). ; \textbf{#}")
WORDS = forms("Sunday ; blue whale ; Yes ; No ; isosceles triangle ; even ; odd ; Alice ; infinitely many")


def pick(draw, *choices):
    return draw(st.sampled_from(choices))


def put(template, text):
    return template.replace("#", text)


def near(draw, number: int) -> int:
    """An integer that is easily taken for ``number``."""
    digits = str(abs(number))
    place = draw(st.integers(0, len(digits) - 1))
    changed = digits[:place] + str((int(digits[place]) + draw(SMALL)) % 10) + digits[place + 1 :]
    texts = [digits + str(draw(st.integers(0, 9))), digits[1:] or "0", digits[:-1] or "0", changed]
    sign = -1 if number < 0 else 1
    numbers = {number + 1, number - 1, -number, *(sign * int(text) for text in texts)}
    return draw(st.sampled_from(sorted(numbers - {number})))


def spell_integer(draw, number: int) -> str:
    digits = str(abs(number))
    sign = pick(draw, "-", MINUS) if number < 0 else pick(draw, "", "+")
    how = pick(draw, "plain", "zeros", "point", *(["groups"] * 3 if len(digits) > 3 else []))
    if how == "zeros":
        digits = "0" * draw(st.integers(1, 3)) + digits
    elif how == "point":
        digits += "." + "0" * draw(st.integers(1, 3))
    elif how == "groups":
        digits = f"{int(digits):,}".replace(",", draw(st.sampled_from(SEPARATORS)))
    return sign + digits


def decimal(value: Fraction) -> str | None:
    """The finite decimal of a fraction, None where it has none."""
    places = next((n for n in range(12) if 10**n % value.denominator == 0), None)
    if places is None:
        return None
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return ("-" if value < 0 else "") + (f"{digits[:-places]}.{digits[-places:]}" if places else digits)


def spell_fraction(draw, value: Fraction, finite: bool = True) -> str:
    factor = draw(st.integers(1, 4))
    p, q = abs(value.numerator) * factor, value.denominator * factor
    if finite and (text := decimal(value)) and pick(draw, True, False, False):
        return text.replace("0.", ".", 1) if abs(value) < 1 and pick(draw, True, False) else text
    minus = pick(draw, "-", MINUS) if value < 0 else ""
    name = pick(draw, "frac", "dfrac", "tfrac", "cfrac")
    if q == 1 and pick(draw, True, False):
        return f"{minus}{p}"
    spelled = [
        rf"{minus}\{name}{{{p}}}{{{q}}}",
        rf"{minus}\{name} {{{p}}} {{{q}}}",
        rf"{minus}{{{p} \over {q}}}",
        f"{minus}{p}/{q}",
    ]
    spelled += [rf"\{name}{{{minus}{p}}}{{{q}}}", rf"\{name}{{{p}}}{{{minus}{q}}}"]
    spelled += [rf"{minus}\{name}{p}{{{q}}}"] if p < 10 else []
    spelled += [rf"{minus}\{name}{p}{q}", rf"{minus}\{name}{{{p}}}{q}"] if max(p, q) < 10 else []
    return draw(st.sampled_from(spelled))


def near_fraction(draw, value: Fraction) -> Fraction:
    p, q = value.numerator, value.denominator
    near = {-value, Fraction(p), Fraction(q), Fraction(p + 1, q), Fraction(p, q + 1), value + 1, value * 10, Fraction(f"{p}{q}")}
    if p:
        near.add(Fraction(q, p))
    return draw(st.sampled_from(sorted(near - {value})))


def fractions(low=-60, high=60, largest=24):
    return st.builds(Fraction, st.integers(low, high), st.integers(2, largest))


SHORT = st.one_of(st.integers(-40, 40).map(Fraction), fractions(-9, 9, 9))


def fill(template: str, numbers: dict[str, int]) -> str:
    """``<expression:format>`` in a template becomes its value."""
    known = {"comb": comb, "factorial": factorial}
    return re.sub("<([^<>:]+):?([^<>]*)>", lambda found: format(eval(found[1], known, numbers), found[2]), template)


def family(golds: str, sames: str, wrongs: str, **numbers):
    """A kind of templates: each of ``golds`` equals each of ``sames`` and none of ``wrongs``, whatever the numbers."""

    @st.composite
    def kind(draw):
        drawn = {name: draw(strategy) for name, strategy in numbers.items()}
        return tuple(fill(draw(st.sampled_from(forms(templates))), drawn) for templates in (golds, f"{golds} ; {sames}", wrongs))

    return kind()


# Kinds: each draws (gold, same, other).


@st.composite
def integers(draw):
    number = draw(ANY_INTEGER)
    around = draw(st.sampled_from(AROUND))
    same, other = spell_integer(draw, number), spell_integer(draw, near(draw, number))
    if around == "{#}" and re.search(r"\d,\d", same):
        around = "#"  # {1,234} may be a set of two
    return str(number), put(around, same), put(around, other)


@st.composite
def integers_as_text(draw):
    number = draw(ANY_INTEGER)
    around = draw(st.sampled_from(PLAIN))
    return str(number), put(around, str(number)), put(around, str(near(draw, number)))


@st.composite
def with_units(draw):
    value = draw(st.one_of(st.integers(1, 99999).map(Fraction), fractions(1)))
    around = draw(st.sampled_from(UNITS))
    wrong = put(around, spell_fraction(draw, near_fraction(draw, value)))
    if value.denominator == 1:
        wrong = pick(draw, wrong, put(draw(st.sampled_from(FACTORS)), str(value)))
    return str(value), put(around, spell_fraction(draw, value)), wrong


@st.composite
def decimals(draw):
    places = draw(st.integers(1, 17))
    count = draw(st.integers(-(10**19), 10**19) if places > 9 else st.integers(-(10**7), 10**7))

    def write(count: int) -> str:
        digits = str(abs(count)).rjust(places + 1, "0")
        return ("-" if count < 0 else "") + f"{digits[:-places]}.{digits[-places:]}"

    text = same = write(count)
    how = pick(draw, "as it is", "zeros", "point", "groups", "sign", "fraction", "exponent")
    if how == "zeros":
        same += "0" * draw(SMALL)
    elif how == "point" and abs(count) < 10**places:
        same = same.replace("0.", ".", 1)
    elif how == "groups":
        whole, rest = same.split(".")
        same = f"{int(whole):,}" + "." + rest if int(whole) else same
    elif how == "sign":
        same = same.replace("-", MINUS) if count < 0 else f"+{same}"
    elif how == "fraction":
        same = rf"\frac{{{count}}}{{{10**places}}}"
    elif how == "exponent":
        same = rf"{count} \times 10^{{-{places}}}"
    return text, same, pick(draw, write(near(draw, count)), text + str(draw(SMALL)))


@st.composite
def fraction_notations(draw):
    value = draw(fractions())
    return f"{value}", spell_fraction(draw, value), spell_fraction(draw, near_fraction(draw, value))


@st.composite
def latex_fractions(draw):
    value = draw(fractions())
    return tuple(spell_fraction(draw, v, finite=False) for v in (value, value, near_fraction(draw, value)))


@st.composite
def percents(draw):
    hundredths = draw(st.one_of(st.integers(1, 200).map(lambda n: 100 * n), st.integers(1, 9999)))
    value, wrong = (decimal(Fraction(n, 100)) for n in (hundredths, near(draw, hundredths)))
    form = draw(st.sampled_from(PERCENT))
    return put(pick(draw, r"#\%", "#%"), value), put(form, value), put(form, wrong)


@st.composite
def scientific(draw):
    first, rest, power = draw(SMALL), draw(st.integers(0, 999)), draw(st.integers(-12, 30))
    mantissa = f"{first}.{rest}" if rest % 10 else str(first)
    form = draw(st.sampled_from(forms(r"M\times 10^{E} ; M \cdot 10^{E} ; MeE ; MEE ; M*10^{E} ; M×10^{E} ; M \times 10^E")))
    form = form if 0 <= power < 9 else form.replace("^E", "^{E}")

    def write(mantissa: str, power: int, form: str = form) -> str:
        head, tail = form.rsplit("E", 1)
        return f"{head}{power}{tail}".replace("M", mantissa)

    value = Fraction(mantissa) * Fraction(10) ** power
    gold = pick(draw, decimal(value) or write(mantissa, power, "MeE"), write(mantissa, power, r"M \times 10^{E}"))
    wrong = [
        write(mantissa, power + 1),
        write(mantissa + ("1" if "." in mantissa else ".1"), power),
        write(f"-{mantissa}", power),
    ]
    wrong += [mantissa, write(mantissa, -power, form.replace("^E", "^{E}"))] if power else []
    return gold, write(mantissa, power), draw(st.sampled_from(wrong))


@st.composite
def find_all(draw):
    """Lists and sets of solutions: all of them, in any order, none more."""
    values = draw(st.lists(SHORT, min_size=2, max_size=4, unique=True))
    joined = forms(r"L,  ; L, ; \{L, \} ; \left\{L,\right\} ; L\text{ and } ; L and  ; L, \  ; L\text{ or } ; x=L,  ; x\in\{L,\}")

    def write(values, form):
        head, separator = form.split("L")
        tail = next((t for t in (r"\right\}", r"\}") if separator.endswith(t)), "")
        separator = separator.removesuffix(tail)
        return head + separator.join(spell_fraction(draw, v, finite=False) for v in values) + tail

    gold_form, form = draw(st.sampled_from(joined)), draw(st.sampled_from(joined))
    shuffled = draw(st.permutations(values))
    place = draw(st.integers(0, len(values) - 1))
    new = next(v for v in (shuffled[place] + 1, shuffled[place] + 2, -shuffled[place], Fraction(99)) if v not in values)
    missing = shuffled[:place] + shuffled[place + 1 :]
    changed = [*shuffled[:place], new, *shuffled[place + 1 :]]
    other = draw(st.sampled_from([missing, changed, [*shuffled, new]]))
    return write(values, gold_form), write(shuffled, form), write(other, form)


@st.composite
def tuples(draw):
    values = draw(st.lists(SHORT, min_size=2, max_size=4))
    left, right = draw(st.sampled_from(forms(r"(,) ; ( , ) ; \left(,\right) ; \left(\ ,\ \right) ; \big(,\big)"))).split(",")
    separator = pick(draw, ",", ", ", r",\,")

    def write(values):
        return left + separator.join(spell_fraction(draw, v, finite=False) for v in values) + right

    place = draw(st.integers(0, len(values) - 1))
    wrong = [[*values[:place], near_fraction(draw, values[place]), *values[place + 1 :]], [*values, Fraction(1)]]
    if len(values) > 2:
        wrong.append(values[:-1])
    if values != values[::-1]:
        wrong += [values[::-1]] * 3
    gold = "(" + ", ".join(str(v) for v in values) + ")"
    return gold, write(values), write(draw(st.sampled_from(wrong)))


@st.composite
def intervals(draw):
    a, ends = draw(SHORT), pick(draw, "both", "both", "left", "right")
    b = a + draw(st.one_of(st.integers(1, 20).map(Fraction), fractions(1, 30, 9)))

    def number(value: Fraction) -> str:
        return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    def interval(a, b, opened, closed):
        minus, plus = pick(draw, r"-\infty", "-∞"), pick(draw, r"\infty", r"+\infty", "∞")
        low = "(" + minus if ends == "right" else "(["[not opened] + number(a)
        high = plus + ")" if ends == "left" else number(b) + ")]"[not closed]
        left, right = pick(draw, ("", ""), (r"\left", r"\right"))
        return f"{left}{low}{pick(draw, ',', ', ')}{high[:-1]}{right}{high[-1]}"

    def relation(a, b, opened, closed):
        less, most, more, least = pick(
            draw, ("<", r"\le ", ">", r"\ge "), (r"\lt ", r"\leq ", r"\gt ", r"\geq "), ("<", "≤", ">", "≥")
        )
        low, high = less if opened else most, less if closed else most
        if ends == "left":
            return pick(draw, f"{number(a)}{low}x", f"x{more if opened else least}{number(a)}")
        return f"x{high}{number(b)}" if ends == "right" else f"{number(a)}{low}x{high}{number(b)}"

    opened, closed = draw(st.booleans()), draw(st.booleans())
    wrong = [] if ends == "right" else [(a, b, not opened, closed), (a - 1, b, opened, closed)]
    wrong += [] if ends == "left" else [(a, b, opened, not closed), (a, b + 1, opened, closed)]
    gold_form, form = pick(draw, (relation, interval), (relation, relation), (interval, interval))
    return gold_form(a, b, opened, closed), form(a, b, opened, closed), form(*draw(st.sampled_from(wrong)))


@st.composite
def assignments(draw):
    value, name = draw(st.one_of(st.integers(-99, 9999).map(Fraction), fractions())), pick(draw, "x", "n", "y", r"\theta", "x_1")
    gold = pick(draw, f"{name}={value}", f"{name} = {value}", f"{value}")
    form = pick(draw, "#", f"{name}=#", f"{name} = #", f"${name}=#$")
    return gold, put(form, spell_fraction(draw, value)), put(form, spell_fraction(draw, near_fraction(draw, value)))


@st.composite
def choices(draw):
    letter, wrong = draw(st.permutations("ABCDE"))[:2]
    form = draw(st.sampled_from(CHOICE))
    gold = pick(draw, letter, f"({letter})", rf"\text{{{letter}}}")
    return gold, put(form, letter), put(form, pick(draw, wrong, f"{letter}, {wrong}"))


@st.composite
def words(draw):
    word, wrong = draw(st.permutations(WORDS))[:2]
    same = pick(draw, word, word.lower(), word.upper(), f" {word} ", word.replace(" ", "  "))
    form = draw(st.sampled_from(PLAIN))
    return pick(draw, word, rf"\text{{{word}}}"), put(form, same), put(form, pick(draw, wrong, f"not {word}", f"{word} {wrong}"))


@st.composite
def times(draw):
    hour, minute = draw(st.integers(1, 23)), draw(st.integers(0, 59))
    form = draw(st.sampled_from(forms(r"# ; \text{#} ;  #  ; $#$ ; #.")))
    wrong = [f"{hour}:{(minute + 1) % 60:02}", f"{hour + 1}:{minute:02}", f"{hour}", f"{minute:02}"]
    wrong += [f"{minute}:{hour:02}"] if hour != minute else []
    return f"{hour}:{minute:02}", put(form, f"{hour}:{minute:02}"), put(form, draw(st.sampled_from(wrong)))


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grid = draw(st.lists(st.lists(st.integers(-20, 20), min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    name, gold_name = pick(draw, "pmatrix", "bmatrix"), pick(draw, "pmatrix", "bmatrix")

    def write(grid, name):
        return rf"\begin{{{name}}}" + r" \\ ".join(" & ".join(map(str, row)) for row in grid) + rf"\end{{{name}}}"

    place = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    changed = [[v + ((i, j) == place) for j, v in enumerate(line)] for i, line in enumerate(grid)]
    transposed = [list(line) for line in zip(*grid, strict=True)]
    wrong = pick(draw, changed, transposed if transposed != grid else changed)
    return write(grid, gold_name), write(grid, name), write(wrong, name)


def between(low: int, high: int):
    return st.integers(low, high)


EXACT = {
    "integers": integers(),
    "integers as text": integers_as_text(),
    "with units": with_units(),
    "decimals": decimals(),
    "fractions": fraction_notations(),
    "fractions in LaTeX": latex_fractions(),
    "mixed numbers": family(
        r"<s>\frac{<w*q+p>}{<q>} ; <s><w*q+p>/<q> ; <s><w>\frac{<p>}{<q>}",
        r"<s><w> \dfrac{<p>}{<q>} ; <s><w>\,\frac{<p>}{<q>} ; <s><w>\tfrac<p>{<q>} ; <s><w> <p>/<q> ; <s><w>\ \frac{<p>}{<q>}",
        r"<s><w> ; <s>\frac{<w*p>}{<q>} ; <s>\frac{<p>}{<q>} ; <s><w+1>\frac{<p>}{<q>} ; <s><w>\frac{<p>}{<q+1>} ; <s><w><p>/<q>"
        r" ; <s><w>\frac{<p+1>}{<q>} ; <'' if s else '-'><w>\frac{<p>}{<q>}",
        s=st.sampled_from(["", "-"]),
        w=between(1, 40),
        p=between(1, 5),
        q=st.sampled_from([6, 7, 8, 9, 11, 12]),
    ),
    "percents": percents(),
    "scientific": scientific(),
    "find all": find_all(),
    "plus minus": family(
        r"\pm <n> ; x=\pm<n> ; <n>, -<n>",
        r"\pm<n> ; -<n>, <n> ; <n>,-<n> ; <n> and -<n> ; ±<n>",
        r"<n> ; -<n> ; \pm <n+1> ; <n>, -<n+1> ; <n>, -<n>, 0",
        n=between(1, 99),
    ),
    "tuples": tuples(),
    "intervals": intervals(),
    "assignments": assignments(),
    "choices": choices(),
    "words": words(),
    "times": times(),
}
SYMBOLIC = {
    "unions": family(
        r"(-\infty,<a>)\cup [<a+b>,<a+b+c>)",
        r"[<a+b>,<a+b+c>)\cup(-\infty,<a>) ; (-\infty, <a>) ∪ [<a+b>, <a+b+c>)",
        r"(-\infty,<a>) ; [<a+b>,<a+b+c>) ; (-\infty,<a>]\cup[<a+b>,<a+b+c>) ; (-\infty,<a>)\cup[<a+b>,<a+b+c>]"
        r" ; (-\infty,<a-1>)\cup[<a+b>,<a+b+c>) ; (-\infty,<a>)\cap[<a+b>,<a+b+c>)",
        a=between(-30, 30),
        b=between(1, 20),
        c=between(1, 20),
    ),
    "roots": family(
        r"<a>\sqrt{<b>}",
        r"\sqrt{<a*a*b>} ; \frac{<a*b>}{\sqrt{<b>}} ; \sqrt{<b>}\cdot <a> ; <a>*\sqrt{<b>} ; <a>\cdot <b>^{1/2} ; <a>\sqrt {<b>}"
        r" ; <a>\cdot<b>^{\frac{1}{2}} ; <2*a>\frac{\sqrt{<b>}}{2} ; \sqrt[4]{<a**4*b*b>} ; \sqrt{\frac{<4*a*a*b>}{4}}",
        r"<a+1>\sqrt{<b>} ; <a>\sqrt{<b+1>} ; \sqrt{<b>} ; <a>\sqrt[3]{<b>} ; <a*b> ; -<a>\sqrt{<b>} ; <a>+\sqrt{<b>} ; \sqrt{<a*b>}"
        r" ; \frac{<a>}{\sqrt{<b>}}",
        a=between(2, 12),
        b=st.sampled_from([2, 3, 5, 6, 7, 10, 11, 13, 15, 21]),
    ),
    "roots of a digit": family(
        r"<a>\sqrt<b>",
        r"<a>\sqrt{<b>} ; <a>√<b> ; \sqrt <b>\cdot <a>",
        r"<a>\sqrt<b+1> ; <a><b>",
        a=between(2, 12),
        b=between(2, 7),
    ),
    "cube roots": family(
        r"<a>\sqrt[3]{<b>}",
        r"\sqrt[3]{<a**3*b>} ; <a>\cdot <b>^{1/3} ; \sqrt[3]{<b>}\cdot<a>",
        r"<a>\sqrt{<b>} ; \sqrt[3]{<a*b>} ; <a+1>\sqrt[3]{<b>} ; 3<a>\sqrt{<b>}",
        a=between(2, 9),
        b=st.sampled_from([2, 3, 5, 7]),
    ),
    "nested roots": family(  # (a + sqrt b)^2 = a^2 + b + 2 a sqrt b
        r"<a>+\sqrt{<b>}",
        r"\sqrt{<a*a+b>+<2*a>\sqrt{<b>}} ; \sqrt{<b>}+<a>",
        r"\sqrt{<a*a+b>-<2*a>\sqrt{<b>}} ; \sqrt{<a*a+b+1>+<2*a>\sqrt{<b>}} ; <a>-\sqrt{<b>}",
        a=between(2, 12),
        b=st.sampled_from([2, 3, 5, 6, 7]),
    ),
    "polynomials": family(  # a (x + p) (x - p - s)
        "<a>x^2-<a*s>x-<a*p*(p+s)>",
        r"<a>(x+<p>)(x-<p+s>) ; (<a>x+<a*p>)(x-<p+s>) ; -<a*s>x+<a>x^{2}-<a*p*(p+s)> ; -<a*p*(p+s)> - <a*s>x + <a>\cdot x^2",
        "<a+1>x^2-<a*s>x-<a*p*(p+s)> ; <a>x^2-<a*s+1>x-<a*p*(p+s)> ; <a>x^2-<a*s>x-<a*p*(p+s)+1> ; <a>x^2+<a*s>x-<a*p*(p+s)>"
        " ; <a>(x+<p>)(x-<p+s+1>) ; <a>(x+<p>)(x+<p+s>) ; (x+<p>)(x-<p+s>) ; -<a>x^2+<a*s>x+<a*p*(p+s)>",
        a=between(2, 5),
        p=between(1, 9),
        s=between(1, 9),
    ),
    "several variables": family(
        "<m*m>a^2+<2*m*n>ab+<n*n>b^2 ; (<m>a+<n>b)^2",
        r"<n*n>b^2+<2*m*n>ba+<m*m>a^{2} ; (<n>b+<m>a)^{2} ; <m*m>a^2 + <2*m*n>a \cdot b + <n*n>b^2",
        "(<m>a-<n>b)^2 ; <m*m>a^2+<n*n>b^2 ; (<m>a+<n+1>b)^2 ; <m*m>a^2+<2*m*n+1>ab+<n*n>b^2",
        m=between(2, 9),
        n=between(2, 9),
    ),
    "equations": family(
        "y=<a>x+<b>",
        r"y=<b>+<a>x ; <a>x+<b>=y ; y = <a> x + <b> ; y-<a>x=<b> ; y=<a>\cdot x+<b>",
        "y=<a+1>x+<b> ; y=<a>x-<b> ; y=-<a>x+<b> ; y=<a>x+<b+1> ; y=<a>x^2+<b> ; x=<a>y+<b>",
        a=between(2, 9),
        b=between(1, 20),
    ),
    "pi": family(
        r"\frac{<k>\pi}{<m>}",
        r"\frac{<k>}{<m>}\pi ; <k>\pi/<m> ; \frac{<2*k>\pi}{<2*m>} ; \dfrac{<k> \pi}{<m>} ; <k>π/<m> ; \frac{\pi\cdot <k>}{<m>}",
        r"\frac{<k+1>\pi}{<m>} ; \frac{<k>\pi}{<m+1>} ; \frac{<k>}{<m>} ; -\frac{<k>\pi}{<m>} ; \frac{<k>\pi^2}{<m>} ; \frac{<k>e}{<m>}"
        r" ; \frac{<k>}{<m>\pi}",
        k=between(1, 30),
        m=between(2, 12),
    ),
    "e": family(
        r"<k>e^{-<m>} ; \frac{<k>}{e^{<m>}}",
        r"e^{-<m>}\cdot <k> ; <k>\left(\frac{1}{e}\right)^{<m>} ; <k>\exp(-<m>)",
        r"<k>e^{<m>} ; <k>e^{-<m+1>} ; <k+1>e^{-<m>} ; <k> ; -<k>e^{-<m>} ; <k>\pi^{-<m>}",
        k=between(2, 30),
        m=between(2, 12),
    ),
    "powers": family(
        "<b>^{<n>} ; <b**n>",
        r"<b>\cdot <b>^{<n-1>} ; <b*b>^{<n//2>}\cdot <b>^{<n%2>} ; <b*b**n>/<b>",
        "<b>^{<n+1>} ; <b**n+1> ; <b**n-1> ; <b+1>^{<n>} ; <b*n>",
        b=between(2, 12),
        n=between(10, 300),
    ),
    "small powers": family(
        r"\frac{1}{2^{<n>}} ; 2^{-<n>}",
        r"\frac{2}{2^{<n+1>}} ; \left(\frac{1}{2}\right)^{<n>} ; \frac{1}{<2**n>}",
        r"2^{-<n+1>} ; \frac{1}{2^{<n>}+1} ; 0 ; 2^{<n>} ; \frac{1}{<2**n+1>}",
        n=between(5, 200),
    ),
    "factorials": family(
        "<n>! ; <factorial(n)>", r"<n>\cdot <n-1>!", "<n+1>! ; <factorial(n)+1> ; <n> ; <n-1>! ; <n>^{<n>}", n=between(5, 60)
    ),
    "binomials": family(
        r"\binom{<n>}{<k>} ; <comb(n,k)>",
        r"\dbinom{<n>}{<n-k>} ; \frac{<n>!}{<k>!<n-k>!} ; {<n> \choose <k>}",
        r"\binom{<n+1>}{<k>} ; <comb(n,k)+1> ; \frac{<n>}{<k>}",
        n=between(7, 60),
        k=between(2, 5),
    ),
    "logarithms": family(
        r"\ln <b**k> ; <k>\ln <b>",
        r"<k>\ln(<b>) ; \ln <b>^{<k>}",
        r"<k+1>\ln <b> ; \ln <b**k+1> ; \ln <b>",
        b=SMALL.map(lambda n: n + 1),
        k=between(2, 6),
    ),
    "logarithms that are numbers": family(
        "<k>",
        r"\log_{<b>}{<b**k>} ; \log_<b> <b**k>",
        r"\log_{<b>}{<b**(k+1)>} ; \log_{<b>}{<b**k+1>}",
        b=between(2, 9),
        k=between(2, 6),
    ),
    "sines": family(
        r"\frac{1}{2}",
        r"\sin\frac{\pi}{6} ; \sin(\pi/6) ; \cos 60^\circ ; \sin 30^\circ ; \cos\left(\frac{\pi}{3}\right)",
        r"\sin\frac{\pi}{3} ; -\sin\frac{\pi}{6} ; \cos 30^\circ ; \tan\frac{\pi}{6}",
    ),
    "complex numbers": family(
        "<a>+<b>i",
        r"<b>i<a:+> ; <a> + <b> i ; <a>+<b>\cdot i ; \frac{<2*a>+<2*b>i}{2}",
        "<a>-<b>i ; <-a>+<b>i ; <a+1>+<b>i ; <b>i ; <a> ; <a>+<b>",
        a=st.integers(-20, 20).filter(bool),
        b=between(2, 20),
    ),
    "matrices": matrices(),
}


def value(answer: str, gold: str) -> float:
    return math(rf"Therefore the answer is \boxed{{{answer}}}", gold).value


def check(case: tuple[str, str, str]) -> None:
    gold, same, other = case
    assert value(same, gold) == 1.0
    assert value(other, gold) == 0.0
    assert value(gold, gold) == 1.0
    assert value(gold, same) == 1.0  # the other notation as the reference answer


def examples(count: int) -> settings:
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("kind", EXACT.values(), ids=EXACT)
def test_a_notation_is_right_and_a_neighbour_wrong(kind):
    examples(100)(given(kind)(check))()


@pytest.mark.parametrize("kind", SYMBOLIC.values(), ids=SYMBOLIC)
def test_a_notation_that_needs_symbols_is_right_and_a_neighbour_wrong(kind):
    examples(20)(given(kind)(check))()
