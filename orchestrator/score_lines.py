"""What ``limen score`` reads: JSON lines, each one completion to be judged, checked before a verifier sees it."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError, InputError, did_you_mean
from configs.functions import check_params
from configs.schema import RewardConfig, RewardPart
from rewards.compose import applicable, options_of
from rewards.contract import GIVEN, PLURALS, RewardError, RewardItem
from rewards.strict_json import read_json
from rewards.verifiers import load_verifier

READ_BYTES = 1 << 18
KNOWN = ("completion", "answer", "prompt", "options", "source", "num_tokens", "id")
JUDGED = ("completion", "answer", "prompt", "options")  # what is judged: the output does not repeat it
WRITTEN = ("value", "accuracy", "status", "outcome", "parts", "extracted", "time_s", "detail")  # what the output adds
_MOST_REMEMBERED = 10_000  # different options and sources that are remembered as checked


@dataclass(frozen=True, slots=True)
class Line:
    """One line of input."""

    number: int  # from 1
    num_bytes: int
    items: tuple[RewardItem, ...]  # one for each reward that judges it; they differ in their options
    rest: Mapping[str, Any]  # all other keys


def read_lines(descriptor: int) -> Iterator[list[bytes]]:
    """The whole lines of a file or pipe, in lists as they arrive: whoever writes one line and waits for its score gets it."""
    pieces: list[bytes] = []
    while data := os.read(descriptor, READ_BYTES):
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*pieces, whole[0]])
            pieces = []
            yield whole
        pieces.append(rest)
    if last := b"".join(pieces):
        yield [last]


class LineParser:
    """Checks lines. Every refusal is an InputError that names the file and the line."""

    def __init__(self, file: str, rewards: Sequence[RewardConfig]) -> None:
        """Loads the verifiers of the ``rewards``, to know their parameters. Raises ConfigError where one cannot be loaded."""
        self._file = file
        self._rewards = rewards
        self._functions = [{name: load_verifier(name, p).function for name, p in r.parts.items()} for r in rewards]
        self._checked: dict[
            str, tuple[Mapping[str, Any], ...]
        ] = {}  # options as each reward takes them, by their text and the source
        self._answered: dict[str | None, str | None] = {}  # of a source: a part that must be given the answer, if there is one
        self._number = 0

    def parse(self, line: bytes) -> Line | None:
        """None for a blank line, which counts as a line."""
        self._number += 1
        if not line.strip():
            return None
        row = self._row(line)
        for key in WRITTEN:
            if key in row:
                raise self._error(f"the key {key!r} is one that limen score writes; rename it in the input")
        prompt_id = row.get("id", self._number)
        texts = {key: self._text(row, key) for key in ("completion", "prompt", "source")}
        if texts["completion"] is None:
            raise self._error("has no 'completion'" + did_you_mean("completion", row))
        everything = self._options(row.get("options"), texts["source"])
        num_tokens = self._num_tokens(row)
        if "answer" not in row and (part := self._needs_answer(texts["source"])) is not None:
            near = did_you_mean("answer", (key for key in row if key not in KNOWN))
            raise self._error(
                "has no 'answer'" + (near or f', which the reward part {part!r} takes; where there is none write "answer": null')
            )
        items = tuple(
            RewardItem(
                prompt=texts["prompt"] or "",
                completion=texts["completion"],
                answer=row.get("answer"),
                prompt_id=prompt_id if isinstance(prompt_id, str) else json.dumps(prompt_id),
                part=None,
                source=texts["source"],
                num_tokens=num_tokens,
                options=options,
            )
            for options in everything
        )
        rest = {key: value for key, value in row.items() if key not in JUDGED}
        return Line(self._number, len(line) + 1, items, rest)

    def _row(self, line: bytes) -> dict[str, Any]:
        try:
            row = read_json(line)
        except UnicodeDecodeError as error:
            raise self._error(f"is not UTF-8 (byte {error.start + 1})") from error
        except ValueError as error:
            raise self._error(f"is not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._error('is not a JSON object; write {"completion": ..., "answer": ...}')
        return row

    def _text(self, row: Mapping[str, Any], key: str) -> str | None:
        value = row.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._error(f"{key!r} is {_kind(value)}, not a text")

    def _num_tokens(self, row: Mapping[str, Any]) -> int | None:
        value = row.get("num_tokens")
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise self._error("'num_tokens' is not a whole number from 0")

    def _options(self, options: Any, source: str | None) -> tuple[Mapping[str, Any], ...]:
        """As each reward takes them. Where two are compared, one that does not know them goes without; one must."""
        if options is not None and not isinstance(options, dict):
            raise self._error(f"'options' is {_kind(options)}, not an object")
        key = json.dumps([options, source])
        if key not in self._checked:
            if len(self._checked) >= _MOST_REMEMBERED:
                self._checked.clear()
            try:
                judging = [applicable(reward.parts, None, source) for reward in self._rewards]
            except RewardError as error:
                raise self._error(str(error)) from error
            refusals = [_refusal(options or {}, *known) for known in zip(judging, self._functions, strict=True)]
            if all(refusals):
                raise self._error(str(refusals[0]))
            self._checked[key] = tuple({} if refusal else options or {} for refusal in refusals)
        return self._checked[key]

    def _needs_answer(self, source: str | None) -> str | None:
        """A part that judges such a line, and whose verifier has no default for the answer. The source has passed ``_options``."""
        if source not in self._answered:
            if len(self._answered) >= _MOST_REMEMBERED:
                self._answered.clear()
            self._answered[source] = next(
                (
                    name
                    for reward, functions in zip(self._rewards, self._functions, strict=True)
                    for name, part in applicable(reward.parts, None, source).items()
                    if _takes_answer(functions[name])
                ),
                None,
            )
        return self._answered[source]

    def _error(self, what: str) -> InputError:
        return InputError(f"{self._file}, line {self._number}: {what}")


def _refusal(
    options: Mapping[str, Any], parts: Mapping[str, RewardPart], functions: Mapping[str, Callable[..., Any]]
) -> str | None:
    """Why the verifiers of the parts that judge a line do not take its options."""
    try:
        for name, own in options_of(options, parts).items():
            key = "options" if own is options else f"options.{name}"
            check_params(functions[name], {**parts[name].params, **own}, key, GIVEN)
    except ConfigError as error:
        return str(error)
    return None


def _takes_answer(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return any(
        name in parameters and parameters[name].default is inspect.Parameter.empty for name in ("answer", PLURALS["answer"])
    )


def _kind(value: Any) -> str:
    names = {bool: "a bool", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
