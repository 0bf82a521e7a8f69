r"""Where the answer stands in a model's text. One extractor for training, evaluation and ``limen score``.

The rules, in order:

1. Nothing inside a reasoning part counts: the answer is sought after the last ``</think>``. A ``<think>`` that is never closed, in
   the completion or at the end of the prompt, hides all that follows it.
2. The last closed ``\boxed{...}`` or ``\fbox{...}`` wins, wherever it stands; what a text says after it does not change it. Braces are
   balanced, ``\{`` is no brace. A box that is not closed, or is blank, is no box. Boxes are never joined.
3. Only where a box is not required: the last ``<answer>...</answer>``, else the last line that begins with ``####``, else what follows
   the last "answer:", "answer is" or "answer =", else what the last line with an answer in it ends on: bold, formula, the whole line
   where it is nothing but an answer, its last number.

Every rule takes time linear in the text.
"""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*+(?:\{|(?P<short>[0-9A-Za-z])(?![0-9A-Za-z]))|\\.|[{}]", re.DOTALL)
_TAGGED = re.compile(r"<answer>|</answer>", re.IGNORECASE)
_HASHES = re.compile(r"(?m)^[ \t]*+####[ \t]*+([^\n]*+)")
_SAID = re.compile(
    r"(?i)(?:\banswer\b|\bAntwort\b|\N{CJK UNIFIED IDEOGRAPH-7B54}\N{CJK UNIFIED IDEOGRAPH-6848})[ \t*_]*+"
    r"(?:is\b|ist\b|lautet\b|[:=]|\N{FULLWIDTH COLON}|\N{CJK UNIFIED IDEOGRAPH-662F}|\N{CJK UNIFIED IDEOGRAPH-4E3A})[ \t]*+(?:that\b)?[:*_]*+"
    r"|\b(?:option|choice) is:?(?=[ \t*_]*+\(?[A-J]\b)"
)
_BOLD = re.compile(r"(?<!\*)\*\*++([^*\n]++)\*\*++|(?<!_)__([^_\n]++)__")
# No formula holds another's beginning: so signs that are never closed are each read once.
_FORMULA = re.compile(
    r"\$\$([^$]++)\$\$|(?<!\\)\$((?:\\\$|[^$\n])++)(?<!\\)\$"
    r"|\\\(((?:[^\\\n]|\\[^()\[\]\n])*+)\\\)|\\\[((?:[^\\]|\\[^()\[\]])*+)\\\]"
)
_SENTENCE_END = re.compile(
    r"[.!?](?=\s|$)|\n|[\u3002\uff01\uff1b]|\b(?:because|since|which|where)\b|,(?=\s+(?:so|as|and\s+(?:this|that|it|we))\b)"
)
# "42 (forty-two)": the answer once more, in words; not "42 (or maybe not)".
_GLOSS = re.compile(r"\s\((?!(?:or|not|maybe|perhaps|if)\b)[A-Za-z][A-Za-z -]*+\)$")
_WORD = re.compile(r"[^\W\d_]{2,}")
_MATH_WORDS = frozenset(
    ["and", "or", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "mod", "gcd", "lcm", "max", "min"]
)
# A number may touch the letters of a script that is written without blanks.
_UNSPACED = "\u3040-\u30ff\u4e00-\u9fff"
_LETTER = rf"[^\W{_UNSPACED}]"
_DIGIT = "[0-9\uff10-\uff19]"
_NUMBER = re.compile(
    rf"(?<!{_LETTER})(?<![.,:/^])(?:(?<![)\]}}])[-+\u2212])?[$]?(?:{_DIGIT}++(?:,[0-9]{{3}})*+(?:\.[0-9]++)?+|\.[0-9]++)"
    rf"(?:[eE][-+]?[0-9]++|(?: [0-9]++)?/[0-9]++|(?::[0-9]{{2}})++)?+(?:\s?\\?%)?(?!{_LETTER}|\^)"
)
_UNSPACED_TEXT = re.compile(f"[{_UNSPACED}]")
_EDGES = ' \t\r\n*_`"\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}'


def find_answer(completion: str, *, require_box: bool, prompt: str = "") -> str | None:
    """The answer as written, without the marks around it (``73``, never ``**73**``), or None."""
    text = after_reasoning(completion, prompt)
    box = last_box(text)
    if box is not None or require_box:
        return box
    return _unboxed(text)


def final_text(completion: str, prompt: str = "") -> str:
    """Where the verifiers of plain text seek an answer: what follows the reasoning (rule 1), and of that the last ``<answer>`` block
    where there is one, blank or not. Empty where nothing follows it."""
    text = after_reasoning(completion, prompt)
    tagged = last_tagged(text)
    return (text if tagged is None else tagged).strip()


def last_box(text: str) -> str | None:
    """The content of the last closed box that is not blank; of boxes inside each other the outer one."""
    starts = [start for start in (text.find("\\boxed"), text.find("\\fbox")) if start >= 0]
    if not starts:
        return None
    last: str | None = None
    open_braces: list[int] = []  # where the content begins, -1 for a brace that is no box
    for match in _BRACES.finditer(text, min(starts)):
        token = match[0]
        if token == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0 and (content := text[start : match.start()].strip()):
                last = content
        elif token.endswith("{") and token != "\\{":
            open_braces.append(match.end() if len(token) > 1 else -1)
        elif match["short"]:
            last = match["short"]
    return last


def clean(text: str) -> str:
    """Without blanks, emphasis, formula signs and a closing full stop around it."""
    while True:
        before = text
        text = text.strip(_EDGES)
        formula = _FORMULA.fullmatch(text)
        if formula is not None:
            text = next(group for group in formula.groups() if group is not None)
        elif text.startswith("$") and text.count("$") == 1:  # dollars
            text = text[1:]
        elif text.endswith((".", ";", ",", ":", "\u3002")) and not text.endswith(("\\.", "\\;", "\\,", "\\:")):
            text = text[:-1]
        if text == before:
            return text


def after_reasoning(completion: str, prompt: str) -> str:
    """What rule 1 leaves."""
    _, closed, text = completion.rpartition("</think>")
    return "" if not closed and prompt.rstrip().endswith("<think>") else text.partition("<think>")[0]


def _unboxed(text: str) -> str | None:
    tagged = last_tagged(text)
    if tagged is not None and tagged.strip():
        return _said(tagged) or _plain(tagged) or clean(tagged) or None
    hashes = None
    for hashes in _HASHES.finditer(text):  # noqa: B007 - the last one is used
        pass
    if hashes is not None and (found := clean(hashes[1])):
        return found
    return _said(text) or _plain(text)


def last_tagged(text: str) -> str | None:
    """What the last closed ``<answer>`` block holds."""
    found, start = None, None
    for tag in _TAGGED.finditer(text):
        if tag[0][1] != "/":
            start = tag.end()
        elif start is not None:
            found, start = text[start : tag.start()], None
    return found


def _said(text: str) -> str | None:
    """What follows the last "answer is" or "answer:"."""
    match = None
    for match in _SAID.finditer(text):  # noqa: B007
        pass
    if match is None:
        return None
    rest = text[match.end() :].lstrip(" \t\r\n*_:")
    line, _, _ = rest.partition("\n")
    for marked in (_BOLD, _FORMULA):  # the formula may go on below
        found = marked.match(rest)
        if found is not None:
            return clean(found[0]) or None
    found = _BOLD.search(line) or _FORMULA.search(line)
    if found is not None and _WORD.search(line[: found.start()]) and not _NUMBER.search(line[: found.start()]):
        return clean(found[0]) or None
    end = _SENTENCE_END.search(line)
    return _GLOSS.sub("", clean(line[: end.start()] if end is not None else line)) or None


def _plain(text: str) -> str | None:
    """What the last line that holds an answer ends on."""
    single = clean(text)
    if single and not re.search(r"\s", single) and not (_UNSPACED_TEXT.search(single) and _NUMBER.search(single)):
        return single
    for line in reversed(text.splitlines()):
        if not line.strip():
            continue
        for marked in (_BOLD, _FORMULA):
            found = [
                content for match in marked.finditer(line) if (content := clean(match[0])) and match[0].strip(_EDGES)[-1:] != ":"
            ]
            if found:
                return found[-1]
        bare = clean(line).lstrip("=").lstrip()
        if bare and re.search(r"[0-9=<>^\\]", bare) and all(word.lower() in _MATH_WORDS for word in _WORD.findall(bare)):
            return bare
        numbers = _NUMBER.findall(line)
        if numbers:
            return clean(numbers[-1])
    return None
