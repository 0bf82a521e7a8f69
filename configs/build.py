"""From plain values to the typed schema, and back.

OmegaConf's own conversion lets too much through (a bool takes 2 and "yes"), and some of its errors name no key. So the
composed container is resolved first and then built into dataclasses here, where every error has the full key, the value, the
expected type and an example that works.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from configs.errors import ConfigError, did_you_mean

T = TypeVar("T")

_WHOLE = re.compile(r"[+-]?\d+")
_EXAMPLES = {bool: "true", int: "8", float: "0.5", str: "text"}
_NAMES = {bool: "a bool (true or false)", int: "a whole number", float: "a number", str: "a text"}


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass ``kind`` from a plain, fully resolved container; keys left out keep their default.

    Raises ConfigError for an unknown key (with the nearest one) and for a value of the wrong type.
    """
    return _dataclass(kind, values, "", kind)


def to_plain(value: Any) -> Any:
    """The inverse of :func:`build`: dataclasses become dicts, enums their lower-case name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def schema_keys(kind: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every dotted key below a dataclass with its field, branches included. Maps by name show as ``parts.NAME``."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key = f"{prefix}{field.name}"
        yield key, field
        inner, below = hints[field.name], f"{key}."
        if get_origin(inner) is dict:
            inner, below = get_args(inner)[1], f"{key}.NAME."
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from schema_keys(inner, below)


def _dataclass(kind: type, value: Any, key: str, root: type) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: {value!r} is not a mapping; set its own keys, such as {key}.{dataclasses.fields(kind)[0].name}=..."
        )
    hints = get_type_hints(kind)
    for name, item in value.items():
        if name not in hints:
            raise ConfigError(_unknown(kind, key, name, item, root))
    built = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            built[field.name] = _convert(hints[field.name], value[field.name], _join(key, field.name), field, root)
    return kind(**built)


def _convert(kind: Any, value: Any, key: str, field: dataclasses.Field[Any], root: type) -> Any:
    if get_origin(kind) is types.UnionType:
        kinds = get_args(kind)
        if value is None and type(None) in kinds:
            return None
        kind, *words = sorted((arg for arg in kinds if arg is not type(None)), key=lambda arg: issubclass(arg, Enum))
        if words:
            return _number_or_word(kind, words[0], value, key)
    if kind is Any:
        return value
    if get_origin(kind) is not None:
        return _container(kind, value, key, field, root)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, key, root)
    if issubclass(kind, Enum):
        return _enum(kind, value, key)
    converted = _scalar(kind, value)
    if converted is None:
        whole = key.partition("[")[0]  # of an item of a list no key of its own can be set
        raise ConfigError(f"{key}: {value!r} is not {_NAMES[kind]}; example: {whole}={_example(kind, field)}")
    return converted


def _number_or_word(kind: type, words: type[Enum], value: Any, key: str) -> Any:
    names = [word.value for word in words]
    converted = words(value) if value in names else _scalar(kind, value)
    if converted is None:
        raise ConfigError(f"{key}: {value!r} is neither {_NAMES[kind]} nor {' nor '.join(names)}; example: {key}={names[0]}")
    return converted


def _container(kind: Any, value: Any, key: str, field: dataclasses.Field[Any], root: type) -> Any:
    if get_origin(kind) is list:
        if not isinstance(value, list):
            example = f"[{value}]" if isinstance(value, str) and not _default(field) else _example(get_args(kind)[0], field)
            raise ConfigError(f"{key}: {value!r} is not a list; example: {key}={example}")
        return [_convert(get_args(kind)[0], item, f"{key}[{i}]", field, root) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: {value!r} is not a mapping by name; example: {key}.NAME=...")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{key}: the name {name!r} is not a text; quote it")
    _check_needed(get_args(kind)[1], value, key)
    return {name: _convert(get_args(kind)[1], item, _join(key, name), field, root) for name, item in value.items()}


def _check_needed(kind: Any, entries: Mapping[str, Any], key: str) -> None:
    """Refuse an entry without a key that every entry needs: its name may be a typo for that of another."""
    for needed in (f.name for f in dataclasses.fields(kind) if f.metadata["needed"]) if dataclasses.is_dataclass(kind) else ():
        whole = [name for name, entry in entries.items() if isinstance(entry, Mapping) and needed in entry]
        for name, entry in entries.items():
            if isinstance(entry, Mapping) and needed not in entry:
                others = f"; there {'is' if len(whole) == 1 else 'are'} {', '.join(whole)}" if whole else ""
                raise ConfigError(
                    f"{key}.{name}: has no {needed}; a new one needs {key}.{name}.{needed}=...{others}{did_you_mean(name, whole)}"
                )


def _scalar(kind: type, value: Any) -> Any:
    """The value as ``kind``, or None where that would lose or invent something.

    Texts are read as numbers, since YAML 1.1 and environment variables give ``1e-6`` as text. A float that is a whole number,
    such as 1e3, is taken as that integer; a bool is never a number, nor a number a bool.
    """
    if kind is bool:
        return {"true": True, "false": False}.get(str(value).lower()) if isinstance(value, (bool, str)) else None
    if isinstance(value, bool) or value is None:
        return None
    if kind is str:
        return value if isinstance(value, str) else str(value) if isinstance(value, int) else None
    if kind is int and isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    if kind is int and isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        return None
    return int(number) if kind is int else number


def _enum(kind: type[Enum], value: Any, key: str) -> Enum:
    names = [member.value for member in kind]
    if value is False and "off" in names:  # YAML 1.1 reads an unquoted `off` as false
        value = "off"
    if value not in names:
        raise ConfigError(f"{key}: {value!r} is not one of {', '.join(names)}{did_you_mean(str(value).lower(), names)}")
    return kind(value)


def _example(kind: Any, field: dataclasses.Field[Any]) -> str:
    """A value that works for a field of this kind, or whose items are of this kind."""
    default = _default(field)
    if isinstance(default, list):
        return str(default) if default else f"[{_EXAMPLES[kind]}]"
    if type(default) is kind and default != "":
        return str(default).lower() if isinstance(default, bool) else str(default)
    return _EXAMPLES[kind]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _unknown(kind: type, key: str, name: Any, item: Any, root: type) -> str:
    rest = []
    while isinstance(item, Mapping) and len(item) == 1:  # the whole key as it was typed
        ((inner, item),) = item.items()
        rest.append(str(inner))
    wrong = ".".join([_join(key, name), *rest])
    siblings = {field.name for field in dataclasses.fields(kind)}
    near = get_close_matches(str(name), siblings, n=1, cutoff=0.6)
    if near:
        return f"{wrong}: unknown key; did you mean {_join(key, near[0])!r}?"
    # A key in the wrong place: look for its last name anywhere, and of those take the one that reads most like what was typed.
    leaf = wrong.rsplit(".", 1)[-1]
    same = [known for known, _ in schema_keys(root) if SequenceMatcher(None, leaf, known.rsplit(".", 1)[-1]).ratio() >= 0.8]
    if same:
        best = max(same, key=lambda known: SequenceMatcher(None, wrong, known).ratio())
        return f"{wrong}: unknown key; did you mean {best!r}?"
    return f"{wrong}: unknown key; {key or 'the config'} has {', '.join(sorted(siblings))}"
