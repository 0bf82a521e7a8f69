r"""Kinds of mathematical answers: one value in two notations is right, its neighbour is wrong, whatever the value.

A kind draws ``(gold, same, other)``: ``same`` is the gold's value written otherwise, ``other`` a value that differs from it by
construction (Python's own integers and fractions decide, never the code under test). All three are checked in a box.
"""

from fractions import Fraction
from math import comb, factorial

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rewards.math_verifier import math

from rewards.contract import Verdict

pytestmark = pytest.mark.timeout(120)

MINUS = "\N{MINUS SIGN}"
SEPARATORS = [",", "{,}", r"\,", r",\!", r",\! ", r"\ ", " ", "\N{THIN SPACE}", "\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}"]
AROUND = ["#", "$#$", r"\(#\)", " # ", "#.", "{#}", r"\displaystyle #", r"\!#", r"\mathbf{#}", r"\boldsymbol{#}"]
PLAIN = ["#", r"\text{#}", r"\mathrm{#}", r"\textbf{#}", r"\text{ # }", r"\text{#}.", r"\mbox{#}"]
UNITS = ["# cm", r"#\text{ cm}", r"#\,\mathrm{kg}", r"#^\circ", r"#^{\circ}", "#\N{DEGREE SIGN}", r"#\text{ square units}"]
UNITS += [r"#\text{ cm}^2", r"#\ \text{m/s}", r"#\text{ hours}", r"#~\text{inches}", r"\$#", r"\text{\$}#", "\N{EURO SIGN}#"]
FRACTIONS = ["frac", "dfrac", "tfrac", "cfrac"]
SMALL = st.integers(1, 9)
ANY_INTEGER = st.one_of(st.integers(-99, 99), st.integers(-(10**6), 10**6), st.integers(-(10**40), 10**40))


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
    name = draw(st.sampled_from(FRACTIONS))
    forms = [
        rf"{minus}\{name}{{{p}}}{{{q}}}",
        f"{minus}{p}/{q}",
        rf"{minus}{{{p} \over {q}}}",
        rf"{minus}\{name} {{{p}}} {{{q}}}",
    ]
    if minus:
        forms += [rf"\{name}{{{minus}{p}}}{{{q}}}", rf"\{name}{{{p}}}{{{minus}{q}}}"]
    if q == 1 and pick(draw, True, False):
        return f"{minus}{p}"
    if p < 10:
        forms += [rf"{minus}\{name}{p}{{{q}}}"] + ([rf"{minus}\{name}{p}{q}", rf"{minus}\{name}{{{p}}}{q}"] if q < 10 else [])
    return draw(st.sampled_from(forms))


def near_fraction(draw, value: Fraction) -> Fraction:
    p, q = value.numerator, value.denominator
    near = {-value, Fraction(p), Fraction(q), Fraction(p + 1, q), Fraction(p, q + 1), value + 1, value * 10, Fraction(f"{p}{q}")}
    if p:
        near.add(Fraction(q, p))
    return draw(st.sampled_from(sorted(near - {value})))


def fractions(low=-60, high=60, largest=24):
    return st.builds(Fraction, st.integers(low, high), st.integers(2, largest))


def polynomial(terms, variable="x") -> str:
    """``terms``: (coefficient, power) pairs in the order of writing."""
    text = ""
    for coefficient, power in terms:
        if coefficient:
            size = "" if abs(coefficient) == 1 and power else str(abs(coefficient))
            name = (
                ""
                if power == 0
                else variable
                if power == 1
                else f"{variable}^{{{power}}}"
                if power > 9
                else f"{variable}^{power}"
            )
            text += ("-" if coefficient < 0 else "+" if text else "") + size + name
    return text or "0"


# Kinds: each draws (gold, same, other).


@st.composite
def integers(draw):
    number = draw(ANY_INTEGER)
    around = draw(st.sampled_from(AROUND))
    same, other = spell_integer(draw, number), spell_integer(draw, near(draw, number))
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
    same, other = spell_fraction(draw, value), spell_fraction(draw, near_fraction(draw, value))
    if value.denominator == 1 and pick(draw, True, False):
        other, around = str(value), pick(draw, "#k", "# million", r"#\text{ thousand}")  # factors, no units
        return str(value), same, put(around, other)
    return str(value), put(around, same), put(around, other)


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
    other = near(draw, count)
    if pick(draw, True, False):
        return text, same, write(other)
    return text, same, text + str(draw(SMALL))


@st.composite
def fraction_notations(draw):
    value = draw(fractions())
    return f"{value}", spell_fraction(draw, value), spell_fraction(draw, near_fraction(draw, value))


@st.composite
def latex_fractions(draw):
    value = draw(fractions())
    return tuple(spell_fraction(draw, v, finite=False) for v in (value, value, near_fraction(draw, value)))


@st.composite
def mixed_numbers(draw):
    whole, q = draw(st.integers(1, 40)), draw(st.integers(2, 12))
    p = draw(st.integers(1, q - 1))
    value = Fraction(p, q) + whole
    sign = pick(draw, "", "-")
    template = sign + pick(
        draw, r"W\frac{P}{Q}", r"W \dfrac{P}{Q}", r"W\,\frac{P}{Q}", r"W\tfrac{P}{Q}", "W P/Q", r"W\ \frac{P}{Q}"
    )

    def write(whole, p, q):
        return template.replace("W", str(whole)).replace("P", str(p)).replace("Q", str(q))

    wrong = [rf"{sign}\frac{{{whole * p}}}{{{q}}}", f"{sign}{whole}", rf"{sign}\frac{{{p}}}{{{q}}}", write(whole + 1, p, q)]
    wrong += [
        write(whole, p, q + 1),
        rf"{sign}{whole}{p}/{q + (q == 10)}",
        write(whole, p, q).removeprefix("-") if sign else "-" + write(whole, p, q),
    ]
    golds = [f"{sign}{value}", rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}", write(whole, p, q)]
    return draw(st.sampled_from(golds)), write(whole, p, q), draw(st.sampled_from(wrong))


@st.composite
def percents(draw):
    hundredths = draw(st.one_of(st.integers(1, 200).map(lambda n: 100 * n), st.integers(1, 9999)))
    value, wrong = (decimal(Fraction(n, 100)) for n in (hundredths, near(draw, hundredths)))
    form = pick(draw, r"#\%", "#%", r"# \%", r"#\,\%", r"\text{#\%}", r"#\text{ percent}", "# percent", r"$#\%$")
    return put(pick(draw, r"#\%", "#%"), value), put(form, value), put(form, wrong)


@st.composite
def scientific(draw):
    first, rest, power = draw(SMALL), draw(st.integers(0, 999)), draw(st.integers(-12, 30))
    mantissa = f"{first}.{rest}" if rest % 10 else str(first)
    forms = [r"M \times 10^{E}", r"M\cdot 10^{E}", "MeE", "MEE", "M*10^{E}", "M\N{MULTIPLICATION SIGN}10^{E}", r"M\times10^{E}"]
    form = draw(st.sampled_from(forms)) if not 0 <= power <= 9 else pick(draw, *forms, r"M\times 10^E")

    def write(mantissa, power, form=form):
        head, _, tail = form.partition("M")
        return (
            head
            + mantissa
            + tail.replace("{E}", f"{{{power}}}").replace("eE", f"e{power}").replace("EE", f"E{power}").replace("^E", f"^{power}")
        )

    value = Fraction(mantissa) * Fraction(10) ** power
    gold = pick(draw, decimal(value) or write(mantissa, power, forms[0]), write(mantissa, power, r"M \times 10^{E}"))
    wrong = [
        write(mantissa, power + 1),
        write(mantissa, power - 1),
        write(mantissa + (".1" if "." not in mantissa else "1"), power),
    ]
    wrong += [write(f"-{mantissa}", power), *([mantissa, write(mantissa, -power)] if power else [])]
    return gold, write(mantissa, power), draw(st.sampled_from(wrong))


@st.composite
def find_all(draw):
    """Lists and sets of solutions: all of them, in any order, none more."""
    values = draw(
        st.lists(st.one_of(st.integers(-40, 40).map(Fraction), fractions(-9, 9, 9)), min_size=2, max_size=4, unique=True)
    )
    forms = [
        "L, ",
        "L,",
        r"\{L, \}",
        r"\left\{L,\right\}",
        r"L\text{ and }",
        "L and ",
        r"L, \ ",
        r"L\text{ or }",
        "x=L, ",
        r"x\in\{L,\}",
    ]

    def write(values, form):
        head, separator = form.split("L")
        tail = next((t for t in (r"\right\}", r"\}") if separator.endswith(t)), "")
        separator = separator.removesuffix(tail)
        return head + separator.join(spell_fraction(draw, v, finite=False) for v in values) + tail

    gold_form, form = draw(st.sampled_from(forms)), draw(st.sampled_from(forms))
    shuffled = draw(st.permutations(values))
    place = draw(st.integers(0, len(values) - 1))
    new = next(
        v for v in (shuffled[place] + 1, shuffled[place] + 2, -shuffled[place], Fraction(41), Fraction(42)) if v not in values
    )
    missing = shuffled[:place] + shuffled[place + 1 :]
    changed = [*shuffled[:place], new, *shuffled[place + 1 :]]
    other = draw(st.sampled_from([missing, changed, [*shuffled, new]]))
    return write(values, gold_form), write(shuffled, form), write(other, form)


@st.composite
def tuples(draw):
    values = draw(st.lists(st.one_of(st.integers(-40, 40).map(Fraction), fractions(-9, 9, 9)), min_size=2, max_size=4))
    left, separator, right = pick(
        draw, ("(", ", ", ")"), ("(", ",", ")"), (r"\left(", r",\,", r"\right)"), ("( ", " , ", " )"), (r"\big(", ",", r"\big)")
    )

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
    a = draw(st.one_of(st.integers(-30, 30).map(Fraction), fractions(-30, 30, 9)))
    b = a + draw(st.one_of(st.integers(1, 20).map(Fraction), fractions(1, 30, 9)))
    ends = pick(draw, "both", "both", "left", "right")

    def number(value):
        return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    def interval(a, b, opened, closed):
        minus, plus = pick(draw, r"-\infty", "-\N{INFINITY}"), pick(draw, r"\infty", r"+\infty", "\N{INFINITY}")
        low = "(" + minus if ends == "right" else ("(" if opened else "[") + number(a)
        high = plus + ")" if ends == "left" else number(b) + (")" if closed else "]")
        left, right = pick(draw, ("", ""), (r"\left", r"\right"))
        return f"{left}{low}{pick(draw, ',', ', ')}{high[:-1]}{right}{high[-1]}"

    def relation(a, b, opened, closed):
        less, most = pick(draw, "<", r"\lt "), pick(draw, r"\le ", r"\leq ", r"\leqslant ", "\N{LESS-THAN OR EQUAL TO}")
        low, high = less if opened else most, less if closed else most
        if ends == "left":
            return pick(
                draw, f"{number(a)}{low}x", f"x{'>' if opened else pick(draw, chr(92) + 'ge ', chr(92) + 'geq ')}{number(a)}"
            )
        return f"x{high}{number(b)}" if ends == "right" else f"{number(a)}{low}x{high}{number(b)}"

    opened, closed = draw(st.booleans()), draw(st.booleans())
    wrong = [] if ends == "right" else [(a, b, not opened, closed), (a - 1, b, opened, closed)]
    wrong += [] if ends == "left" else [(a, b, opened, not closed), (a, b + 1, opened, closed)]
    gold_form, form = pick(draw, (relation, interval), (relation, relation), (interval, interval))
    return gold_form(a, b, opened, closed), form(a, b, opened, closed), form(*draw(st.sampled_from(wrong)))


@st.composite
def unions(draw):
    a, b, c = sorted(draw(st.lists(st.integers(-30, 30), min_size=3, max_size=3, unique=True)))
    first, second = rf"(-\infty,{a})", pick(draw, f"[{b},{c}]", f"({b},{c}]", rf"({c},\infty)")
    cup = pick(draw, r"\cup", r" \cup ", "\N{UNION}")
    wrong = [first, second, rf"(-\infty,{a}]{cup}{second}", rf"(-\infty,{a - 1}){cup}{second}", rf"{first}\cap{second}"]
    return rf"{first}\cup {second}", f"{second}{cup}{first}", draw(st.sampled_from(wrong))


@st.composite
def assignments(draw):
    value, name = draw(st.one_of(st.integers(-99, 9999).map(Fraction), fractions())), pick(draw, "x", "n", "y", r"\theta", "x_1")
    gold = pick(draw, f"{name}={value}", f"{name} = {value}", f"{value}")
    form = pick(draw, "#", f"{name}=#", f"{name} = #", f"${name}=#$")
    return gold, put(form, spell_fraction(draw, value)), put(form, spell_fraction(draw, near_fraction(draw, value)))


@st.composite
def plus_minus(draw):
    n = draw(st.integers(1, 99))
    gold = pick(draw, rf"\pm {n}", rf"x=\pm{n}", f"{n}, -{n}")
    same = pick(draw, rf"\pm{n}", rf"\pm {n}", f"-{n}, {n}", f"{n},-{n}", f"{n} and -{n}", f"\N{PLUS-MINUS SIGN}{n}")
    return gold, same, pick(draw, f"{n}", f"-{n}", rf"\pm {n + 1}", f"{n}, {-n - 1}", f"{n}, -{n}, 0")


@st.composite
def choices(draw):
    letter = draw(st.sampled_from("ABCDE"))
    form = pick(
        draw,
        "#",
        "(#)",
        r"\text{#}",
        r"\text{(#)}",
        r"\textbf{(#)}",
        r"\mathrm{#}",
        "#.",
        "#)",
        r"\text{#}.",
        "(#).",
        r"\textbf{#}",
    )
    wrong = draw(st.sampled_from([other for other in "ABCDE" if other != letter]))
    return (
        pick(draw, letter, f"({letter})", rf"\text{{{letter}}}"),
        put(form, letter),
        put(form, pick(draw, wrong, f"{letter}, {wrong}")),
    )


@st.composite
def words(draw):
    names = ["Sunday", "blue whale", "Yes", "No", "isosceles triangle", "even", "odd", "Alice", "infinitely many"]
    word = draw(st.sampled_from(names))
    same = pick(draw, word, word.lower(), word.upper(), f" {word} ", word.replace(" ", "  "))
    wrong = draw(st.sampled_from([name for name in names if name != word]))
    form = draw(st.sampled_from(PLAIN))
    return pick(draw, word, rf"\text{{{word}}}"), put(form, same), put(form, pick(draw, wrong, f"not {word}", f"{word} {wrong}"))


@st.composite
def times(draw):
    hour, minute = draw(st.integers(1, 23)), draw(st.integers(0, 59))
    form = pick(draw, "#", r"\text{#}", " # ", "$#$", "#.")
    wrong = [f"{hour}:{(minute + 1) % 60:02}", f"{hour + 1}:{minute:02}", f"{hour}", f"{minute:02}"]
    wrong += [f"{minute}:{hour:02}"] if hour != minute else []
    return f"{hour}:{minute:02}", put(form, f"{hour}:{minute:02}"), put(form, draw(st.sampled_from(wrong)))


@st.composite
def roots(draw):
    a, b = draw(st.integers(2, 12)), pick(draw, 2, 3, 5, 6, 7, 10, 11, 13, 15, 21)
    if pick(draw, True, True, False):
        same = pick(draw, rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}", rf"\sqrt{{{b}}}\cdot {a}",
                    rf"{a}*\sqrt{{{b}}}", rf"{a}\cdot {b}^{{1/2}}", rf"{a}\cdot{b}^{{\frac{{1}}{{2}}}}", rf"{2 * a}\frac{{\sqrt{{{b}}}}}{{2}}",
                    rf"{a}\sqrt{b}" if b < 10 else rf"{a} \sqrt {{{b}}}", rf"\sqrt[4]{{{a**4 * b * b}}}")  # fmt: skip
        wrong = [
            rf"{a + 1}\sqrt{{{b}}}",
            rf"{a}\sqrt{{{b + 1}}}",
            rf"\sqrt{{{b}}}",
            rf"{a}\sqrt[3]{{{b}}}",
            f"{a * b}",
            rf"-{a}\sqrt{{{b}}}",
        ]
        wrong += [rf"{a}+\sqrt{{{b}}}", rf"\sqrt{{{a * b}}}", rf"\frac{{{a}}}{{\sqrt{{{b}}}}}"]
        return rf"{a}\sqrt{{{b}}}", same, draw(st.sampled_from(wrong))
    if pick(draw, True, False):
        same = pick(draw, rf"\sqrt[3]{{{a**3 * b}}}", rf"{a}\cdot {b}^{{1/3}}", rf"\sqrt[3]{{{b}}}\cdot{a}")
        return rf"{a}\sqrt[3]{{{b}}}", same, pick(draw, rf"{a}\sqrt{{{b}}}", rf"\sqrt[3]{{{a * b}}}", rf"{a + 1}\sqrt[3]{{{b}}}")
    c = a * a + b  # sqrt(c + 2 a sqrt(b)) = a + sqrt(b)
    nested = rf"\sqrt{{{c}+{2 * a}\sqrt{{{b}}}}}"
    return (
        rf"{a}+\sqrt{{{b}}}",
        nested,
        pick(draw, rf"\sqrt{{{c}-{2 * a}\sqrt{{{b}}}}}", rf"\sqrt{{{c + 1}+{2 * a}\sqrt{{{b}}}}}"),
    )


@st.composite
def polynomials(draw):
    p, q = draw(st.integers(-9, 9).filter(bool)), draw(st.integers(-9, 9).filter(bool))
    a = draw(st.integers(1, 5))
    terms = [(a, 2), (a * (p + q), 1), (a * p * q, 0)]  # a (x + p) (x + q)
    same = pick(
        draw, polynomial(draw(st.permutations(terms))), f"{a if a > 1 else ''}(x{p:+})(x{q:+})", f"({a}x{a * p:+})(x{q:+})"
    )
    place = draw(st.integers(0, 2))
    wrong = [(c + (i == place), power) for i, (c, power) in enumerate(terms)]
    other = pick(
        draw, polynomial(wrong), f"{a if a > 1 else ''}(x{p:+})(x{q + 1:+})", polynomial([(-c, power) for c, power in terms])
    )
    return polynomial(terms), same, other


@st.composite
def several_variables(draw):
    a, b = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    gold = f"{a * a}a^2+{2 * a * b}ab+{b * b}b^2"
    same = pick(
        draw,
        f"({a}a+{b}b)^2",
        f"{b * b}b^2+{2 * a * b}ba+{a * a}a^{{2}}",
        rf"({b}b+{a}a)^{{2}}",
        rf"{a * a}a^2 + {2 * a * b}a \cdot b + {b * b}b^2",
    )
    return (
        gold,
        same,
        pick(draw, f"({a}a-{b}b)^2", f"{a * a}a^2+{b * b}b^2", f"({a}a+{b + 1}b)^2", f"{a * a}a^2+{2 * a * b + 1}ab+{b * b}b^2"),
    )


@st.composite
def equations(draw):
    a, b = draw(st.integers(2, 9)), draw(st.integers(1, 20))
    same = pick(draw, f"y={b}+{a}x", f"{a}x+{b}=y", f"y = {a} x + {b}", f"y-{a}x={b}", rf"y={a}\cdot x+{b}")
    return f"y={a}x+{b}", same, pick(draw, f"y={a + 1}x+{b}", f"y={a}x-{b}", f"y=-{a}x+{b}", f"y={a}x+{b + 1}", f"y={b}x^2+{a}")


@st.composite
def pi_and_e(draw):
    k, m = draw(st.integers(1, 30)), draw(st.integers(2, 12))
    if pick(draw, True, True, False):
        same = pick(draw, rf"\frac{{{k}\pi}}{{{m}}}", rf"\frac{{{k}}}{{{m}}}\pi", rf"{k}\pi/{m}", rf"\frac{{{2 * k}\pi}}{{{2 * m}}}",
                    rf"\dfrac{{{k} \pi}}{{{m}}}", f"{k}\N{GREEK SMALL LETTER PI}/{m}", rf"\frac{{\pi\cdot {k}}}{{{m}}}")  # fmt: skip
        wrong = [
            rf"\frac{{{k + 1}\pi}}{{{m}}}",
            rf"\frac{{{k}\pi}}{{{m + 1}}}",
            rf"\frac{{{k}}}{{{m}}}",
            rf"-\frac{{{k}\pi}}{{{m}}}",
            rf"\frac{{{k}\pi^2}}{{{m}}}",
        ]
        return (
            rf"\frac{{{k}\pi}}{{{m}}}",
            same,
            draw(st.sampled_from([*wrong, rf"\frac{{{k}e}}{{{m}}}", rf"\frac{{{k}}}{{{m}\pi}}"])),
        )
    same = pick(
        draw,
        rf"\frac{{{k}}}{{e^{{{m}}}}}",
        rf"{k}e^{{-{m}}}",
        rf"e^{{-{m}}}\cdot {k}",
        rf"{k}\left(\frac{{1}}{{e}}\right)^{{{m}}}",
        rf"{k}\exp(-{m})",
    )
    return (
        rf"{k}e^{{-{m}}}",
        same,
        pick(draw, rf"{k}e^{{{m}}}", rf"{k}e^{{-{m + 1}}}", rf"{k + 1}e^{{-{m}}}", f"{k}", rf"-{k}e^{{-{m}}}"),
    )


@st.composite
def powers(draw):
    """Big numbers written as powers, factorials or binomials, and in full."""
    kind = pick(draw, "power", "factorial", "binomial", "inverse")
    if kind == "power":
        base, n = draw(st.integers(2, 12)), draw(st.integers(10, 300))
        golds = [f"{base}^{{{n}}}", str(base**n)]
        same = pick(
            draw, *golds, rf"{base}\cdot {base}^{{{n - 1}}}", f"{base**2}^{{{n // 2}}}" if n % 2 == 0 else f"{base}^{{{n}}}"
        )
        return (
            draw(st.sampled_from(golds)),
            same,
            pick(draw, f"{base}^{{{n + 1}}}", str(base**n + 1), str(base**n - 1), f"{base + 1}^{{{n}}}", f"{base * n}"),
        )
    n = draw(st.integers(5, 60))
    if kind == "factorial":
        golds = [f"{n}!", str(factorial(n))]
        return (
            draw(st.sampled_from(golds)),
            pick(draw, *golds, rf"{n}\cdot {n - 1}!"),
            pick(draw, f"{n + 1}!", str(factorial(n) + 1), f"{n}", f"{n - 1}!"),
        )
    if kind == "binomial":
        k = draw(st.integers(2, n - 2))
        golds = [rf"\binom{{{n}}}{{{k}}}", str(comb(n, k))]
        same = pick(draw, *golds, rf"\dbinom{{{n}}}{{{n - k}}}", rf"\frac{{{n}!}}{{{k}!{n - k}!}}", rf"{{{n} \choose {k}}}")
        return (
            draw(st.sampled_from(golds)),
            same,
            pick(draw, rf"\binom{{{n + 1}}}{{{k}}}", str(comb(n, k) + 1), rf"\frac{{{n}}}{{{k}}}"),
        )
    same = pick(
        draw,
        rf"2^{{-{n}}}",
        rf"\frac{{1}}{{2^{{{n}}}}}",
        rf"\frac{{2}}{{2^{{{n + 1}}}}}",
        rf"\left(\frac{{1}}{{2}}\right)^{{{n}}}",
    )
    return rf"\frac{{1}}{{2^{{{n}}}}}", same, pick(draw, rf"2^{{-{n + 1}}}", rf"\frac{{1}}{{2^{{{n}}}+1}}", "0", rf"2^{{{n}}}")


@st.composite
def functions(draw):
    base, k = draw(st.integers(2, 9)), draw(st.integers(2, 6))
    angles = [
        (r"\sin\frac{\pi}{6}", r"\frac{1}{2}"),
        (r"\cos(\pi/4)", r"\frac{\sqrt{2}}{2}"),
        (r"\tan\frac{\pi}{3}", r"\sqrt{3}"),
        (r"\cos 60^\circ", r"\frac12"),
    ]
    if pick(draw, True, False):
        same, gold = draw(st.sampled_from(angles))
        return (
            gold,
            same,
            draw(
                st.sampled_from(
                    [left for left, right in angles if right not in (gold, r"\frac12", r"\frac{1}{2}")] + ["0", f"-{same}"]
                )
            ),
        )
    return pick(draw, (str(k), rf"\log_{{{base}}}{{{base**k}}}", rf"\log_{{{base}}}{{{base ** (k + 1)}}}"),
                (rf"\ln {base**k}", rf"{k}\ln {base}", rf"{k + 1}\ln {base}"), (rf"\ln({base})+\ln({k})", rf"\ln({base * k})", rf"\ln({base * k + 1})"))  # fmt: skip


@st.composite
def complex_numbers(draw):
    a, b = draw(st.integers(-20, 20).filter(bool)), draw(st.integers(2, 20))
    same = pick(draw, f"{a}+{b}i", f"{b}i{a:+}", f"{a} + {b} i", rf"{a}+{b}\cdot i", rf"\frac{{{2 * a}+{2 * b}i}}{{2}}")
    return (
        f"{a}+{b}i",
        same,
        pick(draw, f"{a}-{b}i", f"{-a}+{b}i", f"{b}{a:+}i" if a != b else f"{a}", f"{a + 1}+{b}i", f"{b}i", f"{a}"),
    )


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grid = draw(st.lists(st.lists(st.integers(-20, 20), min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    name, gold_name = pick(draw, "pmatrix", "bmatrix"), pick(draw, "pmatrix", "bmatrix")

    def write(grid, name):
        return rf"\begin{{{name}}}" + r" \\ ".join(" & ".join(map(str, row)) for row in grid) + rf"\end{{{name}}}"

    row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
    changed = [[v + ((i, j) == (row, column)) for j, v in enumerate(line)] for i, line in enumerate(grid)]
    transposed = [list(line) for line in zip(*grid, strict=True)]
    return (
        write(grid, gold_name),
        write(grid, name),
        write(pick(draw, changed, transposed if transposed != grid else changed), name),
    )


EXACT = [
    integers,
    integers_as_text,
    with_units,
    decimals,
    fraction_notations,
    latex_fractions,
    mixed_numbers,
    percents,
    scientific,
]
EXACT += [find_all, tuples, intervals, assignments, plus_minus, choices, words, times]
SYMBOLIC = [unions, roots, polynomials, several_variables, equations, pi_and_e, powers, functions, complex_numbers, matrices]


def value(answer: str, gold: str, **settings: object) -> float:
    verdict: Verdict = math(rf"Therefore the answer is \boxed{{{answer}}}", gold, **settings)
    return verdict.value


def check(gold: str, same: str, other: str) -> None:
    assert value(same, gold) == 1.0
    assert value(other, gold) == 0.0
    assert value(gold, gold) == 1.0
    assert value(gold, same) == 1.0  # the other notation as the reference answer


STEADY = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
def test_a_notation_is_right_and_a_neighbour_wrong(kind):
    @settings(max_examples=100, **STEADY)
    @given(kind())
    def run(case):
        check(*case)

    run()


@pytest.mark.parametrize("kind", SYMBOLIC, ids=lambda kind: kind.__name__)
def test_a_notation_that_needs_symbols_is_right_and_a_neighbour_wrong(kind):
    @settings(max_examples=20, phases=[Phase.generate, Phase.shrink], **STEADY)
    @given(kind())
    def run(case):
        check(*case)

    run()
