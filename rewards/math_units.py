"""Units of an answer: which words are units, and which of them are one."""

from __future__ import annotations

from collections.abc import Sequence

from rewards.math_tokens import SINGLE_UNITS, Token

# One unit a line: all its spellings; plurals in -s are found by themselves.
_SPELLINGS = """
mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre; km kilometer kilometre
inch in inches; foot ft feet; yard yd; mile mi; nm nanometer; mg milligram; g gram gm; kg kilogram kilo; ton tonne; lb pound lbs; oz ounce
s sec second; ms millisecond; min minute mins; hour h hr hrs; day; week; month; year yr yrs
ml mL milliliter millilitre; l L liter litre; gallon gal; quart; pint; cup; mph; kph kmh kmph; N newton; J joule; kJ; W watt; kW; V volt; A amp ampere
K kelvin; C Celsius celsius; F Fahrenheit fahrenheit; Pa pascal; Hz hertz; ohm; mol mole
dollar usd USD buck; cent; euro EUR eur; gbp GBP; yen; rupee rs Rs; degree deg; radian rad; unit; acre; hectare
"""
UNITS = {word: words.split()[0] for words in _SPELLINGS.replace("\n", ";").split(";") if words.strip() for word in words.split()}
CURRENCY = {"\\$": "dollar", "\\pounds": "gbp", "\\euro": "euro", "\\pound": "gbp"}
FACTORS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PERCENT = frozenset(("percent", "percentage", "pct"))
SEPARATORS = frozenset(("and", "or"))

_PER_HOUR = {"kph": "km", "mph": "mile"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_ENDS = frozenset([",", ";", ")", "]", "}", "\\}", "=", "<", ">", "<=", ">=", "!=", "\\approx", "\\in", "\\and", "\\or"])
# After a number these change what is said; the answer is then no number with a unit.
_NO_UNITS = frozenset(
    [
        "not",
        "no",
        "nor",
        "never",
        "none",
        "isn",
        "wrong",
        "false",
        "is",
        "are",
        "was",
        "equals",
        "than",
        "less",
        "more",
        "least",
        "most",
        "about",
        "or",
        "and",
        "if",
        "when",
        "where",
        "but",
        "except",
        "plus",
        "minus",
        "times",
        "over",
        "to",
        "between",
        "mod",
        "modulo",
        "base",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "log",
        "ln",
        "exp",
        "sqrt",
        "pi",
        "max",
        "gcd",
        "lcm",
    ]
)
# These make another number or a condition of it: 4 fifths, 4 point five, n even.
_CHANGES = frozenset(
    [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "half",
        "halves",
        "thirds",
        "fourths",
        "fifths",
        "sixths",
        "sevenths",
        "eighths",
        "ninths",
        "tenths",
        "hundredths",
        "thousandths",
        "negative",
        "below",
        "factorial",
        "lakh",
        "lakhs",
        "crore",
        "crores",
    ]
)
_SMALL = frozenset(("of", "the", "per", "a", "an", "th", "st", "nd", "rd"))


def unit_at(tokens: Sequence[Token], start: int) -> tuple[int, str] | None:
    """The unit that fills the tokens from ``start`` to the next separator, bracket or relation: where it ends and its name.

    The name is empty where a word is no unit known here (``35 apples``): such words are no part of the comparison.
    None where the tokens are no unit.
    """
    unit, position = _Unit(), start
    while position < len(tokens):
        kind, text, spaced = tokens[position]
        if kind == "text" or (kind == "word" and (len(text) > 1 or ((spaced or unit.is_divided) and text in SINGLE_UNITS))):
            if kind == "word" and text in SEPARATORS:
                break
            words = text.replace("/", " per ").replace(".", " ").replace("^", " ").replace("-", " ").split()
            if not all(unit.add(word, in_text=kind == "text", spaced=spaced) for word in words):
                return None
        elif text == "/" and not unit.is_empty:
            unit.add("per", in_text=False, spaced=spaced)
        elif text == "^" and unit.parts:
            exponent, position = _exponent(tokens, position + 1)
            if exponent is None:
                return None
            unit.raise_last(exponent)
        elif text in _ENDS:
            break
        elif text not in (".", "\\cdot", "*") or not unit.parts:
            return None
        position += 1
    return None if position == start else (position, unit.name)


class _Unit:
    """What has been read of a unit."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int]] = []
        self._known, self._sign, self._power = True, 1, 1

    @property
    def is_empty(self) -> bool:
        return self._known and not self.parts

    @property
    def is_divided(self) -> bool:
        return self._sign < 0

    @property
    def name(self) -> str:
        if not self._known:
            return ""
        return " ".join(f"{unit}^{power}" if power != 1 else unit for unit, power in sorted(self.parts))

    def raise_last(self, power: int) -> None:
        self.parts[-1] = (self.parts[-1][0], self.parts[-1][1] * power)

    def add(self, word: str, *, in_text: bool, spaced: bool) -> bool:
        """Whether the word can be part of a unit."""
        lower = word.lower()
        if word in ("2", "3") and self.parts:
            self.raise_last(int(word))
        elif word == "per":
            self._sign = -1
        elif lower in ("squared", "cubed") and self.parts:
            self.raise_last(_POWERS[lower])
        elif lower in ("square", "sq", "cubic", "cu"):
            self._power = _POWERS[lower]
        elif lower in _POWERS:  # of a number
            return False
        elif (unit := _unit(word)) is not None:
            self.parts += [(unit, self._sign * self._power)] if unit not in _PER_HOUR else [(_PER_HOUR[unit], 1), ("hour", -1)]
            self._power = 1
        elif _is_unknown_unit(word, in_text=in_text, after_blank=spaced or not self.is_empty):
            self._known = False
        else:
            return False
        return True


def _unit(word: str) -> str | None:
    for spelling in (word, word.lower(), word.lower().removesuffix("s"), word.lower().removesuffix("es")):
        if spelling in UNITS and (len(spelling) > 1 or spelling == word):
            return UNITS[spelling]
    return None


def _is_unknown_unit(word: str, *, in_text: bool, after_blank: bool) -> bool:
    if not word.isalpha() or any(word.lower() in words for words in (_NO_UNITS, _CHANGES, FACTORS)):
        return False
    if in_text or word.lower() in _SMALL:
        return True
    # A run of letters right after a number is a product; as a word after a blank it must look like one.
    return after_blank and len(word) >= 3 and not set("aeiouy").isdisjoint(word.lower()) and not set(word) <= set("abcxyz")


def _exponent(tokens: Sequence[Token], position: int) -> tuple[int | None, int]:
    """The exponent that starts there and where its last token stands."""
    digits = ""
    braced = position < len(tokens) and tokens[position].text == "{"
    last = position
    for last in range(position, min(position + 4, len(tokens))):
        text = tokens[last].text
        if text in "{-" or text.isdigit():
            digits += text.strip("{")
            if not braced and text.isdigit():
                break
        elif text == "}" and braced:
            break
        else:
            return None, position
    return (int(digits), last) if digits.lstrip("-").isdigit() and len(digits) < 3 else (None, position)
