"""The program in a completion.

1. Text after the last ``</think>`` is searched first, then the whole completion.
2. Fenced blocks (backquotes or tildes, at any indentation, ended by LF or CRLF) labelled ``python``, ``py``, ``python3`` or ``py3``; where
   there is none, blocks without a label. Blocks in other languages never count. Words may stand before a labelled opening fence of
   backquotes, such as ``<answer>``, and a tag after a closing one.
3. Of several the last; where the tests name a function, the last that defines it, so that an example of its use may follow.
   A last block that is never closed counts, up to the end of the text.
4. Without any such block the text after ``</think>`` is taken whole. Whether that is a program shows when it is compiled, which happens in
   the sandbox: source written to crash a parser must not meet the one of this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"(?P<indent>[ \t]*+)(?P<mark>`{3,}+|~{3,}+)(?P<info>[^`]*+)")
# With words before it.
_INLINE = re.compile(r"[^`]*+(?P<indent>)(?P<mark>`{3,}+)(?P<info>[ \t]*+(?:python|py)3?+[ \t]*+)", re.IGNORECASE)
_LABELS = ("python", "py", "python3", "py3")
_CLOSING_INDENT = 3  # Markdown's: a fence indented further, as in a docstring, belongs to the text of the block


@dataclass(frozen=True, slots=True)
class Program:
    """Python source, and whether it stood in a fenced block."""

    source: str
    fenced: bool


def find_program(completion: str, function: str | None = None) -> Program | None:
    """The program in ``completion`` by the rules above, or None where there is no text. ``function``: the name the tests call."""
    text = completion.replace("\r\n", "\n")
    after = text.rpartition("</think>")[2]
    for part in (after, text):
        blocks = list(_blocks(part))
        sources = [source for label, source in blocks if label in _LABELS] or [source for label, source in blocks if not label]
        if function is not None:
            defines = re.compile(rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(function)}\b", re.MULTILINE)
            sources = [source for source in sources if defines.search(source)] or sources
        if sources:
            return Program(sources[-1], fenced=True)
    return Program(after.strip("\n"), fenced=False) if after.strip() else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Label (lower case, empty without one) and source of each fenced block."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line)
        if opening is None:
            opening, lines = fence or _INLINE.fullmatch(line), []
        elif fence is not None and _closes(fence, opening):
            yield _label(opening), "\n".join(lines)
            opening = None
        else:
            common = len(line) - len(line.lstrip(" \t"))
            lines.append(line[min(common, len(opening["indent"])) :])
    if opening is not None:
        yield _label(opening), "\n".join(lines).rstrip().removesuffix(opening["mark"])


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    return (
        fence["mark"].startswith(opening["mark"])
        and fence["info"].strip()[:1] in ("", "<")
        and len(fence["indent"]) <= len(opening["indent"]) + _CLOSING_INDENT
    )


def _label(opening: re.Match[str]) -> str:
    words = opening["info"].split()
    return words[0].lower() if words else ""
