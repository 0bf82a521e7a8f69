r"""From an answer as written to the tokens of `rewards.math_grammar`: spellings of one thing become one token here.

- Numbers: digits are grouped by ``{,}`` ``\,`` ``\!`` ``\;`` ``'``, thin, no-break and plain blanks, and by a bare comma: ``1,000`` is one
  thousand, never a pair. Inside brackets a bare comma separates, ``(100,200)``, unless a group starts with 0 or other commas there
  are followed by a blank. ``1.000.000`` is a million, ``3{,}14`` is 3.14, and ``3,14`` is two numbers.
- Unicode signs, superscripts, fractions and full-width letters are read as their LaTeX or ASCII spelling.
- ``\text{...}`` holding numbers or formulas is read as if it were not there; with words it is one word token.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

SINGLE_UNITS = frozenset(
    ["m", "g", "s", "h", "l", "L", "N", "J", "W", "V", "A", "K", "C", "F"]
)  # units only in \\text or after a blank: 35m is a product
MAX_LENGTH = 10_000  # characters of an answer that is read as a formula
MAX_DIGITS = 4_000  # of one number in it; a longer integer is compared digit by digit


class Unreadable(Exception):
    """The text is no formula that this grammar knows."""


class Token(NamedTuple):
    kind: str  # num, word (a run of letters), text (the words of \text), cmd, sym
    text: str
    spaced: bool  # a blank stands before it


_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00b7\u22c5\u2219\u2217\u00d7\u2715", r"\times "),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("\u2009\u200a\u2006\u202f\u00a0\u2007", r"\,"),
        **dict.fromkeys("\u2018\u2019\u2032", "'"),
        **dict.fromkeys("\u200b\u2060\ufeff\u2061\u2062", ""),
        "\u00f7": r"\div ",
        "\u221a": r"\sqrt ",
        "\u221b": r"\sqrt[3] ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2a7d": r"\le ",
        "\u2265": r"\ge ",
        "\u2a7e": r"\ge ",
        "\u2260": r"\ne ",
        "\u2248": r"\approx ",
        "\u2261": r"\equiv ",
        "\u2216": r"\setminus ",
        "\u2229": r"\cap ",
        "\u3002": ".",
        "\u3001": ",",
        "\u2208": r"\in ",
        "\u222a": r"\cup ",
        "\u2205": r"\emptyset ",
        "\u00b1": r"\pm ",
        "\u2213": r"\mp ",
        "\u00b0": r"^\circ ",
        "\u03c0": r"\pi ",
        "\u2124": r"\mathbb{Z}",
        "\u211d": r"\mathbb{R}",
        "\u27e8": r"\langle ",
        "\u27e9": r"\rangle ",
        "\u00a3": r"\pounds ",
        "\u20ac": r"\euro ",
    }
)
_GREEK = {
    chr(code): "\\" + unicodedata.name(chr(code)).split()[-1].lower() + " "
    for code in range(0x3B1, 0x3CA)
    if code not in (0x3C0, 0x3C2)
}
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207f]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")

_SEPARATOR = r"(?:\{,\}|\\[,;:!]|\\ |~|'|,\\!| )"
_GROUPED = re.compile(
    rf"(?<![\d.,_^])(?P<head>[1-9]\d{{0,2}})(?P<sep>{_SEPARATOR})\s*+(?P<tail>\d{{3}}(?:(?P=sep)\s*+\d{{3}})*+)(?!\d|\s*(?:/|\\[dt]?frac))"
)
_COMMAS = re.compile(r"(?<![\d.,_^])[1-9]\d{0,2}(?:,\d{3})++(?!,?\d)")
_DOTS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3}){2,}+(?!\.?\d)")
_MODULUS = re.compile(
    r"\\pod(?![A-Za-z])|\((?:\\text\s*\{\s*)?\\?[bp]?mod\b(?:\s*\}|\\?\s)*(?P<bracketed>\{[^{}()]*\}|[^{}()]*)\)"
    r"|(?<=\\equiv)(?P<before>[^()]*?)\\?\bb?mod\b"
)
_WITHOUT = re.compile(r"(\\mathbb\s*\{?\s*[A-Z]\s*\}?)\s*(?:-|\\backslash)\s*(?=\\\{)")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")

_UNITS = re.compile(rf"[{''.join(sorted(SINGLE_UNITS))}](?:\^?[23]|/[{''.join(sorted(SINGLE_UNITS))}])*+")

_TOKEN = re.compile(
    r"(?P<num>\d++(?:\.\d+)?+(?:[eE][-+]?\d++(?![\w.]))?+|\.\d++)"
    r"|(?P<text>\\(?:text|textbf|textit|textrm|textnormal|textsf|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|vec|operatorname\*?|mbox|hbox|boxed|fbox|underline)\s*\{)"
    r"|(?P<cmd>\\[A-Za-z]++|\\.)"
    r"|(?P<word>[A-Za-z]++)"
    r"|(?P<sym>\*\*|<=|>=|!=|==|<>|.)",
    re.DOTALL,
)
_BLANK = frozenset(
    [
        "\\left",
        "\\right",
        "\\big",
        "\\Big",
        "\\bigg",
        "\\Bigg",
        "\\bigl",
        "\\bigr",
        "\\Bigl",
        "\\Bigr",
        "\\biggl",
        "\\biggr",
        "\\displaystyle",
        "\\textstyle",
        "\\limits",
        "\\nolimits",
        "\\,",
        "\\;",
        "\\:",
        "\\!",
        "\\",
        "\\quad",
        "\\qquad",
        "\\hfill",
        "\\mathstrut",
        "\\rm",
        "\\bf",
        "\\it",
    ]
) | {"\\ ", "~", "$"}
_SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\leq": "<=", "\\le": "<=", "\\leqslant": "<=", "\\geq": ">=",
    "\\ge": ">=", "\\geqslant": ">=", "\\lt": "<", "\\gt": ">", "\\neq": "!=", "\\ne": "!=", "<>": "!=", "==": "=", "**": "^",
    "\\times": "*", "\\cdot": "*", "\\ast": "*", "\\div": "/", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]",
    "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\mid": "|", "\\tbinom": "\\binom", "\\dbinom": "\\binom", "\\varnothing": "\\emptyset",
    "\\simeq": "\\approx", "\\degree": "\\circ", "\\percent": "%", "\\%": "%", "\\colon": ":", "\\land": "\\and", "\\lor": "\\or",
    "\\varphi": "\\phi", "\\varepsilon": "\\epsilon", "\\dollar": "\\$", "\\textdollar": "\\$", "\\equiv": "=", "\\imath": "i", "\\union": "\\cup", "\\lor ": "\\or",
}  # fmt: skip
FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "sinh",
        "cosh",
        "tanh",
        "arcsin",
        "arccos",
        "arctan",
        "arsinh",
        "arcosh",
        "artanh",
        "log",
        "ln",
        "lg",
        "exp",
        "max",
        "min",
        "gcd",
        "lcm",
        "abs",
        "floor",
        "ceil",
    ]
)
# In a text: "floor" and "ceil" are words there.
_FORMULA_WORDS = (FUNCTIONS - {"floor", "ceil"}) | {"sqrt", "pi", "inf", "infinity"}


def tokens(text: str) -> list[Token]:
    """Raises `Unreadable` for a text that is too long or holds a number that is."""
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    found: list[Token] = []
    _read(normalize(text), found, spaced=False, depth=0)
    return found


def normalize(text: str) -> str:
    """One spelling for Unicode signs and for the digits of a number."""
    if not text.isascii():
        text = _VULGAR.sub(lambda m: _vulgar(m[0]), text)
        text = _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}", text)
        text = _LOWERED.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
        text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
        text = text.translate(_CHARACTERS)
        for letter, name in _GREEK.items():
            text = text.replace(letter, name)
    if "mod" in text or "\\pod" in text:
        text = _MODULUS.sub(_modulus, text)
    if "\\mathbb" in text:
        text = _WITHOUT.sub(r"\1\\setminus ", text)
    if "\\\\" in text and "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # a text that was escaped once too often
    if "," in text or "." in text or "\\" in text or " " in text or "~" in text or "'" in text:
        text = _ungroup(text)
    return text


def _ungroup(text: str) -> str:
    text = re.sub(r"\\!\s*", "", re.sub(r"(?<=\d),?\\!\s*(?=\d{3}(?!\d))", "{,}", text))
    text = _GROUPED.sub(lambda m: m["head"] + re.sub(r"\D", "", m["tail"]), text)
    if "," in text:
        bracketed, spaced = text.startswith("{"), re.search(r",\s|;", text) is not None
        text = _COMMAS.sub(lambda m: _ungroup_commas(m, text, bracketed, spaced), text)
        text = _DECIMAL_COMMA.sub(".", text)
    text = _DOTS.sub(lambda m: m[0].replace(".", ""), text)
    return _REPEATING.sub(_fraction_of_repeating, text) if "\\" in text else text


def _modulus(match: re.Match[str]) -> str:
    """Every spelling of a modulus as ``\\pmod``; an operator, ``17 \\bmod 5``, stays what it is."""
    if match["bracketed"] is not None:
        return rf"\pmod{{{match['bracketed'].strip('{} ')}}}"
    return rf"{match['before'] or ''}\pmod "


def _ungroup_commas(match: re.Match[str], text: str, bracketed: bool, spaced: bool) -> str:
    digits = match[0].replace(",", "")
    if spaced or ",0" in match[0]:
        return digits
    before = text[: match.start()]
    inside = bracketed or any(
        before.count(left) > before.count(right) for left, right in (("(", ")"), ("[", "]"), ("\\{", "\\}"))
    )
    return match[0] if inside else digits


def _fraction_of_repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    if len(match[0]) > 100:
        return match[0]
    denominator = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    return rf"\frac{{{int(whole + fixed + repeated) - int((whole + fixed) or '0')}}}{{{denominator}}}"


def _vulgar(character: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{above}}}{{{below}}}"


def _read(text: str, found: list[Token], *, spaced: bool, depth: int) -> None:
    if depth > 20:
        raise Unreadable("nested too deep")
    position, end = 0, len(text)
    while position < end:
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        kind, token = match.lastgroup or "", match[0]
        position = match.end()
        if kind == "text":
            inner_end = _closing_brace(text, position)
            _read_text(token, text[position:inner_end], found, spaced, depth)
            position, spaced = inner_end + 1, False
            continue
        token = _SAME.get(token, token)
        if token.isspace() or token in _BLANK:
            spaced = True
            continue
        if kind == "num" and len(token) > MAX_DIGITS:
            raise Unreadable("a number that is too long")
        if token in ("\\tag", "\\label"):
            raise Unreadable(token)
        found.append(
            Token(
                "cmd" if token.startswith("\\") else "word" if token.isalpha() else kind if kind == "num" else "sym",
                token,
                spaced,
            )
        )
        spaced = False


def _read_text(command: str, content: str, found: list[Token], spaced: bool, depth: int) -> None:
    words = re.findall(r"[^\W\d_]+", re.sub(r"\\[A-Za-z]+", "", content))
    if re.fullmatch(r"\s*[ap]\.?m\.?\s*", content, re.IGNORECASE):
        found.append(Token("text", content.strip(), spaced=True))
        return
    if _UNITS.fullmatch(content.strip()) and found and (found[-1].kind == "num" or found[-1].text in ("}", ")")):
        found.append(Token("text", content.strip(), spaced=True))
        return
    plain = command.startswith(("\\boxed", "\\fbox", "\\underline", "\\boldsymbol", "\\bm", "\\vec", "\\mathbf", "\\textbf"))
    if (
        plain
        or content.lstrip(" $")[:1].isdigit()
        or all((len(word) == 1 and word.isascii()) or word in _FORMULA_WORDS for word in words)
    ):
        _read(content, found, spaced=spaced or content[:1].isspace(), depth=depth + 1)
    elif content.strip():
        found.append(Token("text", " ".join(content.split()), spaced or content[:1].isspace()))


def _closing_brace(text: str, position: int) -> int:
    depth = 1
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    raise Unreadable("a brace is not closed")
