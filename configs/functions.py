"""Functions chosen in a configuration: by a name of ours, by dotted path, or as ``file.py:function``; and their parameters."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import re
import sys
import traceback
import types
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from configs.errors import ConfigError, did_you_mean

_KINDS = {float: "a number", int: "a whole number", bool: "a bool (true or false)", str: "a text"}


def resolve_function(
    name: str, table: Mapping[str, Callable[..., Any] | str], kind: str, *, entry_points: str = ""
) -> Callable[..., Any]:
    """The function that ``name`` stands for.

    Args:
        name: a key of ``table``; a name that an installed package offers; a dotted path, importable where this runs; or
            ``file.py:function``, relative to the working directory. A file is run once a process, under a module name of its
            own, so functions of one file share its state.
        table: the names that ship, with the function or its dotted path, which is then imported here and no earlier.
        kind: what is chosen, for the message: a configuration key such as ``algorithm``, or a word such as "surrogate".
        entry_points: the group under which packages offer functions; without one, none are looked for.

    Raises:
        ConfigError: naming ``kind`` and ``name``, and the nearest name, the missing file, or the error in the user's file.
    """
    found = table.get(name)
    if callable(found):
        return found
    offered = _offered(entry_points) if entry_points else {}
    if name in offered and found is None:
        return _load(offered[name], f"{kind}: {name!r}")
    if name in offered:
        _tell_shadowed(name, _package(offered[name]), offered[name].value.replace(":", "."))
    path, colon, attribute = (found or name).rpartition(":")
    if colon:
        module = _file_module(Path(path).expanduser(), f"{kind}: {name!r}")
    elif "." in (found or name):
        path, _, attribute = (found or name).rpartition(".")
        module = _module(path, f"{kind}: {name!r}")
    else:
        names = sorted({*table, *offered})
        raise ConfigError(
            f"{kind}: there is no {name!r}; there are {', '.join(names)}; your own is a dotted path or file.py:function"
            + did_you_mean(name, names)
        )
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        state = "is not a function" if hasattr(module, attribute) else "is not there"
        there = ""
        if colon:
            own = [key for key in public if getattr(vars(module)[key], "__module__", None) == module.__name__]
            there = f"; there are {', '.join(own)}" if own else "; it has no public function of its own"
        raise ConfigError(f"{kind}: {name!r}: {attribute!r} {state} in {path}{there}{did_you_mean(attribute, public)}")
    return function


def check_params(function: Callable[..., Any], params: Mapping[str, Any], key: str, given: Collection[str] = ()) -> None:
    """Raise ConfigError unless ``params`` fit the keyword-only parameters of ``function``.

    Args:
        function: its keyword-only parameters are its settings; simple annotations (float, int, bool, str, Literal, and any of
            these or None) are checked.
        params: the values from the configuration.
        key: where they came from, such as ``algorithm.params``.
        given: keyword-only parameters that the caller supplies, which a configuration may not set.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: the parameters of {function!r} cannot be read; wrap it in a Python function") from error
    own = {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and n not in given}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    hints = _hints(function)
    for name, value in params.items():
        if name in own:
            _check_type(hints.get(name, Any), value, f"{key}.{name}")
        elif name in given or not open_ended:
            raise ConfigError(f"{key}.{name}: " + _refusal(name, function, own, parameters, given))
    missing = [name for name, p in own.items() if p.default is inspect.Parameter.empty and name not in params]
    if missing:
        raise ConfigError(f"{key}.{missing[0]}: {_name(function)} needs it; set {key}.{missing[0]}=...")


def _refusal(
    name: str,
    function: Callable[..., Any],
    own: Collection[str],
    parameters: Mapping[str, inspect.Parameter],
    given: Collection[str],
) -> str:
    if name in given:
        return "is supplied by the framework and cannot be set"
    if name in parameters:
        return f"is not a keyword-only parameter of {_name(function)}; put a * before it in the signature"
    takes = f"it takes {', '.join(sorted(own))}" if own else "it takes none"
    return f"{_name(function)} has no such parameter; {takes}{did_you_mean(name, own)}"


def _check_type(hint: Any, value: Any, key: str) -> None:
    choices = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    if not all(c in _KINDS or c is type(None) or get_origin(c) is Literal for c in choices):
        return
    words = []
    for choice in choices:
        if _fits(choice, value):
            return
        if choice is not type(None):
            words.append(" or ".join(map(repr, get_args(choice))) if get_origin(choice) is Literal else _KINDS[choice])
    quoted = isinstance(value, str) and re.fullmatch(r"[-+\d.eE]+|true|false", value) and str not in choices
    unquote = "; write it without quotes" if quoted else ""
    raise ConfigError(f"{key}: {value!r} is not {' or '.join(words)}{unquote}")


def _fits(kind: Any, value: Any) -> bool:
    if kind is type(None):
        return value is None
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, kind)


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    target = function.__init__ if isinstance(function, type) else getattr(function, "func", function)  # type: ignore[misc]
    try:
        return get_type_hints(target)
    except (NameError, TypeError, AttributeError):  # annotations of a user's function that only a type checker can read
        return {}


def _offered(group: str) -> dict[str, metadata.EntryPoint]:
    """The functions that installed packages offer under ``group``, by name."""
    return {entry.name: entry for entry in metadata.entry_points(group=group)}


@cache  # once a process
def _tell_shadowed(name: str, package: str, path: str) -> None:
    logging.getLogger(__name__).warning(
        "%s: the one that ships is used; %s offers another of this name, which is to be had as %s", name, package, path
    )


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "a package"


def _load(entry: metadata.EntryPoint, where: str) -> Callable[..., Any]:
    package = _package(entry)
    try:
        function = entry.load()
    except Exception as error:  # the package's module may raise anything while it runs
        raise ConfigError(f"{where}: {package} offers {entry.value}, which fails: {_where_it_failed(error)}") from error
    if not callable(function):
        raise ConfigError(f"{where}: {package} offers {entry.value}, which is not a function")
    return function


def _module(path: str, where: str) -> types.ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{where}: no module {error.name!r} is installed here; a file is given as file.py:function"
            ) from error
        raise ConfigError(f"{where}: {_where_it_failed(error)}") from error
    except Exception as error:  # the user's module may raise anything while it runs
        raise ConfigError(f"{where}: {_where_it_failed(error)}") from error


def _file_module(path: Path, where: str) -> types.ModuleType:
    if not path.is_file():
        raise ConfigError(f"{where}: no file {str(path.absolute())!r}{_other_file(path)}")
    name = f"limen_file_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path.name} is not a Python file; name it ...py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look the module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything while it runs
        del sys.modules[name]
        raise ConfigError(f"{where}: {_where_it_failed(error)}") from error
    return module


def _other_file(path: Path) -> str:
    """What may have been meant by a file that is not there."""
    beside = [file.name for file in path.parent.glob("*.py")]
    if f"{path.name}.py" in beside:
        return f"; did you mean {path.name + '.py'!r}?"
    if path.suffix == ".py":
        return did_you_mean(path.name, beside)
    return f"; a file's name ends in .py, and a function of a module is written MODULE.FUNCTION{did_you_mean(path.name, beside)}"


def _where_it_failed(error: Exception) -> str:
    """What was raised and where; of a module or a name that is not there no more than its name, not the line of importlib."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: SyntaxError: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {text[0] if text else ''}"
    if frame.filename.startswith(("<frozen importlib", str(Path(importlib.__file__).parent))):
        return what
    return f"{frame.filename}, line {frame.lineno}: {what}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
