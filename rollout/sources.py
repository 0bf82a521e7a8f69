"""Prompt sources: rows of question and answer from a generator, a file, or a data set, checked where they are read.

Every source gives :class:`Row` objects that already hold what a prompt needs but its rendering. Whatever is wrong with a row is
found here, before any model starts, and named by file and line (or row) and by the key of the configuration that asked for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from configs.errors import InputError, did_you_mean
from configs.functions import check_params
from configs.schema import SourceConfig, SourceKind

Question = str | list[dict[str, str]]

FILE_KEYS = {"path", "prompt_column", "answer_column", "id_column", "stratum_column", "reward_column"}
KEYS_OF = {
    SourceKind.arithmetic: {"params"},
    SourceKind.jsonl: FILE_KEYS,
    SourceKind.parquet: FILE_KEYS,
    SourceKind.datasets: {*FILE_KEYS, "subset", "split"},
    SourceKind.reasoning_gym: {"params"},
}


class DataError(InputError):
    """Prompt data that cannot be used. The message names the file and line, or the key, and what would work."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question of a source, not yet rendered."""

    id: str  # unique in its source
    question: Question  # a text, or chat messages {role, content} that end with the user's turn
    answer: Any  # any JSON value but null
    stratum: str
    reward: str | None  # the one reward part that judges it, or None for all of them
    split_key: str  # rows of one key are on the same side of the held-out split
    where: str  # file and line, for messages


def load_rows(name: str, source: SourceConfig, reward_parts: Collection[str]) -> list[Row]:
    """The rows of the source ``name``, in their order.

    Raises ConfigError for wrong ``params``, and DataError for a key that does not apply to the kind of source, a missing file, an unreadable line, a missing column,
    a value of the wrong type, a duplicate id, a reward part that is not in ``reward_parts``, and an empty source.
    """
    key = f"data.sources.{name}"
    _check_keys(key, source)
    if source.reward is not None:
        _check_reward(source.reward, f"{key}.reward", reward_parts)
    if source.kind is SourceKind.arithmetic:
        rows = _generate(arithmetic, name, source)
    elif source.kind is SourceKind.reasoning_gym:
        rows = _generate(reasoning_gym, name, source)
    else:
        rows = [_row_of(name, source, where, record, reward_parts) for where, record in _records(key, source)]
    if not rows:
        raise DataError(f"{key}: the source has no rows" + (f" ({source.path})" if source.path else ""))
    _check_unique(key, rows)
    return rows


# Generators ---------------------------------------------------------------------------------------------------------------------


def arithmetic(*, name: str, reward: str | None, max_digits: int = 3, num_prompts: int = 5000) -> list[Row]:
    """Additions ``a+b=`` of two operands with the same number of digits, 1 to ``max_digits``; that number is the stratum.

    ``num_prompts`` bounds each stratum: one digit has only 100 sums, larger strata are drawn without replacement by a seed of
    their own, so neither the run's seed nor the other strata change them. The id is the sum itself (``12+34``); ``a+b`` and
    ``b+a`` have one split key, so the answer to a held-out sum is never trained under its mirror image.
    """
    _check_counts(max_digits=max_digits, num_prompts=num_prompts)
    rows = []
    for digits in range(1, max_digits + 1):
        low = 10 ** (digits - 1) if digits > 1 else 0
        span = 10**digits - low  # operands of this many digits
        picks = random.Random(f"arithmetic {digits}").sample(range(span**2), min(num_prompts, span**2))
        for a, b in ((low + pick // span, low + pick % span) for pick in picks):
            rows.append(
                Row(
                    id=f"{a}+{b}",
                    question=f"{a}+{b}=",
                    answer=str(a + b),
                    stratum=f"digits_{digits}",
                    reward=reward,
                    split_key=f"{min(a, b)}+{max(a, b)}",
                    where=f"{name} {a}+{b}",
                )
            )
    return rows


def reasoning_gym(
    *, name: str, reward: str | None, task: str, num_prompts: int = 1000, seed: int = 0, entry: bool = False, **settings: Any
) -> list[Row]:
    """Items of one reasoning-gym task; ``settings`` are the task's own. A question drawn twice is one row.

    The answer is the item's reference answer or, with ``entry``, all that the verifier ``reasoning_gym`` needs to score by the task's
    own rules: {task, settings, question, answer, metadata}. Ids are the same either way.

    Raises DataError without the package, for an unknown task or setting, and for a task that has no reference answer, which takes
    ``entry``.
    """
    _check_counts(num_prompts=num_prompts)
    gym = _optional_module("reasoning_gym", "limen[reasoning-gym]")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if task not in known:
        raise DataError(f"reasoning-gym has no task {task!r}{did_you_mean(task, known)}")
    try:
        items = gym.create_dataset(task, size=num_prompts, seed=seed, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym task {task!r} refused its settings {settings}: {error}") from error
    rows = {}
    for index, item in enumerate(items):
        if item["answer"] is None and not entry:
            raise DataError(
                f"reasoning-gym task {task!r} has no reference answer (item {index}); its own scorer judges it: set entry=true "
                "with reward=reasoning_gym, or choose a task that has one"
            )
        question_id = stable_id(item["question"], item["answer"])
        rows[question_id] = Row(
            id=question_id,
            question=item["question"],
            answer=json.loads(json.dumps({"task": task, "settings": settings, **item})) if entry else item["answer"],
            stratum=name,
            reward=reward,
            split_key=item["question"],
            where=f"{name} item {index}",
        )
    return list(rows.values())


def _generate(generator: Callable[..., list[Row]], name: str, source: SourceConfig) -> list[Row]:
    key = f"data.sources.{name}.params"
    check_params(generator, source.params, key, given=("name", "reward"))
    try:
        return generator(name=name, reward=source.reward, **source.params)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise DataError(f"{name}={count!r} is not a whole number of at least 1")


# Files and data sets ------------------------------------------------------------------------------------------------------------


def _records(key: str, source: SourceConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Pairs (where, record). Tables come with the columns in use only; they are checked here, JSON objects one by one later."""
    if source.path is None:
        raise DataError(f"{key}.path: a {source.kind.value} source needs one")
    if source.kind is SourceKind.datasets:
        table = _load_dataset(key, source)
        _check_columns(f"{key} ({source.path})", source, table.column_names)
        for place, record in enumerate(table.select_columns(_columns(source))):
            yield f"{source.path} row {place}", record
        return
    for file in _files(key, source):
        if source.kind is SourceKind.jsonl:
            yield from _json_lines(file)
        else:
            yield from _parquet_rows(file, source)


def _files(key: str, source: SourceConfig) -> list[Path]:
    path = Path(str(source.path)).expanduser()
    if path.is_dir():
        files = sorted(path.glob(f"*.{source.kind.value}"))
        if not files:
            raise DataError(f"{key}.path: the folder {path} has no *.{source.kind.value} file")
        return files
    if not path.is_file():
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{key}.path: there is no file {path}{did_you_mean(path.name, siblings)}")
    return [path]


def _json_lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}:{number}: not a JSON line: {error.msg} at character {error.pos + 1}") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{file}:{number}: not UTF-8: {error.reason}") from error
            if not isinstance(record, dict):
                raise DataError(f"{file}:{number}: a {type(record).__name__}, where a JSON object is needed")
            yield f"{file}:{number}", record


def _parquet_rows(file: Path, source: SourceConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a Parquet file: {error}") from error
    with table:
        _check_columns(str(file), source, table.schema_arrow.names)
        place = 0
        for batch in table.iter_batches(columns=_columns(source)):
            for record in batch.to_pylist():
                yield f"{file} row {place}", record
                place += 1


def _load_dataset(key: str, source: SourceConfig) -> Any:
    """The split as a ``datasets.Dataset``: a folder written by ``save_to_disk``, else whatever ``load_dataset`` takes."""
    datasets = _optional_module("datasets", "datasets")
    folder = Path(str(source.path)).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError) as error:
        first_line = str(error).split("\n", 1)[0]
        raise DataError(f"{key}.path: cannot load the data set {source.path!r}: {first_line}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise DataError(f"{key}.split: {source.path} has no split {source.split!r}; it has {', '.join(loaded)}")
        loaded = loaded[source.split]
    return loaded


def _columns(source: SourceConfig) -> list[str]:
    named = (source.prompt_column, source.answer_column, source.id_column, source.stratum_column, source.reward_column)
    return list(dict.fromkeys(column for column in named if column is not None))


def _check_columns(where: str, source: SourceConfig, present: Collection[str]) -> None:
    for column in _columns(source):
        if column not in present:
            near = did_you_mean(column, present)
            raise DataError(f"{where}: no column {column!r}{near}; the columns are {', '.join(sorted(present)) or 'none'}")


def _row_of(name: str, source: SourceConfig, where: str, record: Mapping[str, Any], reward_parts: Collection[str]) -> Row:
    _check_columns(where, source, record)
    question = _question(record[source.prompt_column], f"{where}: column {source.prompt_column!r}")
    answer = record[source.answer_column]
    if not isinstance(answer, (str, int, float, list, dict)):
        kind = "is missing (null)" if answer is None else f"is a {type(answer).__name__}, which is no JSON value"
        raise DataError(f"{where}: column {source.answer_column!r}: the answer {kind}")
    row_id = stable_id(question, answer) if source.id_column is None else _label(record, source.id_column, where)
    reward = source.reward
    if source.reward_column is not None:
        reward = record[source.reward_column]
        _check_reward(reward, f"{where}: column {source.reward_column!r}", reward_parts)
    stratum = name if source.stratum_column is None else _label(record, source.stratum_column, where)
    return Row(row_id, question, answer, stratum, reward, split_key=row_id, where=where)


def _question(value: Any, where: str) -> Question:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: the prompt is empty")
        return value
    if not isinstance(value, Sequence) or not value:
        raise DataError(f"{where}: {_shown(value)} is neither a text nor a list of chat messages")
    messages = []
    for message in value:
        texts = {part: message.get(part) for part in ("role", "content")} if isinstance(message, Mapping) else {}
        if not texts or not all(isinstance(text, str) for text in texts.values()):
            raise DataError(f"{where}: the message {_shown(message)} is not {{role: text, content: text}}")
        messages.append({"role": str(texts["role"]), "content": str(texts["content"])})
    if messages[-1]["role"] != "user":
        raise DataError(f"{where}: the last message is the {messages[-1]['role']}'s; a prompt ends with the user's")
    return messages


def _label(record: Mapping[str, Any], column: str, where: str) -> str:
    """An id or a stratum: a text or a whole number."""
    value = record[column]
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{where}: column {column!r}: {_shown(value)} is neither a text nor a whole number")
    return str(value)


# Checks -------------------------------------------------------------------------------------------------------------------------


def stable_id(question: Question, answer: Any) -> str:
    """The id of a row that brings none: 64 bits of a hash over question and answer."""
    text = json.dumps([question, answer], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _check_keys(key: str, source: SourceConfig) -> None:
    default = SourceConfig()
    for field in dataclasses.fields(source):
        applies = field.name in KEYS_OF[source.kind] or field.name in ("kind", "reward")
        if not applies and getattr(source, field.name) != getattr(default, field.name):
            usable = ", ".join(sorted(KEYS_OF[source.kind]))
            raise DataError(f"{key}.{field.name}: does not apply to kind={source.kind.value}, which takes {usable}")
    if source.reward is not None and source.reward_column is not None:
        raise DataError(f"{key}: reward and reward_column are both set; a row has one reward part, so keep one of the two keys")


def _check_reward(value: Any, where: str, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        parts = ", ".join(sorted(known)) or "none"
        raise DataError(f"{where}: no reward part {_shown(value)}{did_you_mean(str(value), known)}; reward.parts has {parts}")


def _check_unique(key: str, rows: Sequence[Row]) -> None:
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.id, row)
        if other is not row:
            same = other.question == row.question and other.answer == row.answer
            what = "are the same prompt and answer" if same else f"have the same id {row.id!r}"
            cure = "remove one of them" if same else "ids must be unique in a source"
            num_more = len(rows) - len({r.id for r in rows}) - 1
            more = f" ({num_more} more rows repeat others)" if num_more else ""
            raise DataError(
                f"{key}: {other.where} and {row.where} {what}{more}; {cure}, or name a column of ids: {key}.id_column=..."
            )


def _optional_module(module: str, requirement: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise DataError(f"the package {module} is not installed: pip install '{requirement}'") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
