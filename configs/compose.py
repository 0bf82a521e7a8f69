"""Compose a run's configuration: the packaged YAML, the user's YAML, then single keys; then check it.

Hydra picks the files. Single keys are applied here, on the plain container and always by force, so that an unknown key is found
by one check however it came in: ``k=v``, ``+k=v``, ``++k=v``, a YAML, an experiment or a stored run. Hydra's compose API writes no
folders and sets up no logging.

Nothing is read from the working directory. A folder of the user's own YAML is named with ``--config-dir``; it may add files to any
group, and groups of its own, but may not reuse the name of a file that ships: which of the two ran would be a guess.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from configs.build import build, schema_keys, to_plain
from configs.errors import ConfigError, did_you_mean
from configs.paths import make_absolute
from configs.schema import Config
from configs.validate import check_values

__all__ = ["ConfigError", "dump_config", "load_config", "shipped_files"]

_OURS = Path(__file__).parent
_ROOT = "config"
_SEVERAL = {"data", "reward"}  # groups whose files fill a map by name: reward=[math,overlong] takes the parts of both
_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "authorization", "credential", "credentials"}
_OF_PATHS = {
    "data": "a file of yours is data=jsonl data.sources.main.path=",
    "model": "a folder or a name on the hub is model=pretrained model.path=",
}
_KEYS = {key for key, _ in schema_keys(Config)}
_OWN_KEYS = {field.name for _, field in schema_keys(Config)}
_URL_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")
REDACTED = "*** redacted ***"


def load_config(overrides: Sequence[str], config_dir: Path | None = None, *, combinations: bool = True) -> Config:
    """The checked configuration of a run.

    Args:
        overrides: in Hydra's grammar: ``group=file`` picks a YAML (of ``reward`` and ``data`` several, ``reward=[math,overlong]``),
            ``key=value`` sets one key, ``~key`` removes one from a map. With ``resume=RUN_DIR`` among them, or ``checkpoint_dir`` in a
            run's folder, they apply to the configuration stored with that run.
        config_dir: a folder of the user's own YAML groups.
        combinations: whether refused combinations raise.

    Raises:
        ConfigError: one line that names the key, and what would work.
    """
    parsed = [_parse(text) for text in overrides]
    files = _yaml_files(config_dir)
    picks = [o for o in parsed if o.key_or_group in files and _is_pick(o)]
    keys = [o for o in parsed if o not in picks]
    stored = _stored_run(keys)
    config = _compose(picks, files, config_dir) if stored is None else _read_stored(stored, picks)
    for override in keys:
        _apply(config, override)
    built = build(Config, _resolve(config))
    make_absolute(built)
    check_values(built, combinations=combinations)
    return built


def dump_config(config: Config, *, redact: bool) -> str:
    """The configuration as YAML that ``load_config`` reads back; with ``redact``, texts under keys that name a secret are hidden."""
    plain = to_plain(config)
    return yaml.safe_dump(_redact(plain) if redact else plain, sort_keys=False, allow_unicode=True, width=1000)


def shipped_files() -> dict[str, list[str]]:
    """The YAML files that ship, by group."""
    return _yaml_files(None)


def _parse(text: str) -> Override:
    if text.startswith("-"):
        raise ConfigError(f"unknown option {text}; overrides are written key=value")
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"{text!r} is not an override; write key=value")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key = text.split("=", 1)[0]
        raise ConfigError(f"cannot read the override {text!r}; quote a text with special characters: {key}='\"...\"'") from error
    if override.is_sweep_override():
        key, given = override.key_or_group, text.split("=", 1)[1]
        works = (
            f"a list is {shlex.quote(f'{key}=[{given}]')}" if _holds_list(key) else f"quote a text with a comma: {key}='\"...\"'"
        )
        raise ConfigError(f"{text!r} has several values; {works}")
    return override


def _holds_list(key: str) -> bool:
    lists = (
        re.escape(known).replace("NAME", r"[^.]+") for known, field in schema_keys(Config) if str(field.type).startswith("list")
    )
    return key in _SEVERAL or any(re.fullmatch(known, key) for known in lists)


def _is_pick(override: Override) -> bool:
    """Whether a group's key names files, rather than setting the keys they hold."""
    several = isinstance(override.value(), list) and override.key_or_group in _SEVERAL
    return override.is_delete() or several or isinstance(override.value(), (str, type(None)))


def _yaml_files(config_dir: Path | None) -> dict[str, list[str]]:
    """Names of the YAML files of every group: ours, then the user's."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir: no folder {str(config_dir)!r}")
    groups: dict[str, list[str]] = {}
    for folder in [_OURS] if config_dir is None else [_OURS, config_dir]:
        for path in sorted(folder.rglob("*.yaml")):
            group, name = path.parent.relative_to(folder).as_posix(), path.stem
            if name in groups.get(group, ()):
                raise ConfigError(f"{path}: a file {group}/{name}.yaml ships with limen; rename yours")
            groups.setdefault(group, []).append(name)
    del groups["."]
    return groups


def _compose(picks: list[Override], files: Mapping[str, list[str]], config_dir: Path | None) -> DictConfig:
    arguments = [] if config_dir is None else [f"hydra.searchpath=[file://{config_dir.resolve()}]"]
    for pick in picks:
        group, name = pick.key_or_group, pick.value()
        if name is None and group != "experiment" and not pick.is_delete():
            raise ConfigError(f"{group}=null: name a file; there are {', '.join(files[group])}")
        named = name if isinstance(name, list) else [] if name is None else [name]
        for missing in (str(n) for n in named if n not in files[group]):
            raise ConfigError(
                f"{group}={missing}: no such file; there are {', '.join(files[group])}{_hint(group, missing, files[group])}"
            )
        ours = (_OURS / group).is_dir()  # all our groups are in the defaults list; one of the user's is added to it
        arguments.append(("" if ours or pick.is_delete() else "+") + pick.input_line.lstrip("+"))
    try:
        with initialize_config_dir(str(_OURS), version_base="1.3"):
            config = compose(_ROOT, arguments)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        raise ConfigError(f"{where}: not readable as YAML: {error.problem}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from error
    OmegaConf.set_struct(config, False)
    if "experiment" in config:
        raise ConfigError(
            "experiment: put the line `# @package _global_` first in its YAML, so that its keys are those of the run"
        )
    return config


def _hint(group: str, missing: str, files: Sequence[str]) -> str:
    """What may have been meant by the name of no file: that of another file, or what is no file but set by a key."""
    near = did_you_mean(missing, files)
    if group == "reward":
        return f"; a function of your own or of a package is reward.parts.NAME.function={missing}{near}"
    if not re.search(r"[.:/]", missing):
        return near
    if group in _OF_PATHS:
        return f"; {_OF_PATHS[group]}{missing}"
    return f"; a function of your own is {group}.name={missing}" if f"{group}.name" in _KEYS else near


def _stored_run(keys: list[Override]) -> Path | None:
    """The run whose stored configuration is the base: the one resumed, or the one that made the checkpoint asked for."""
    values = {o.key_or_group: Path(str(o.value())).expanduser() for o in keys if not o.is_delete() and o.value() is not None}
    if "resume" in values:
        return values["resume"]
    checkpoint = values.get("checkpoint_dir")
    if checkpoint is None:
        return None
    runs = [folder for folder in (checkpoint, *checkpoint.absolute().parents[:3]) if (folder / "checkpoints").is_dir()]
    return next((folder for folder in runs if (folder / "config.yaml").is_file()), None)


def _read_stored(folder: Path, picks: list[Override]) -> DictConfig:
    if picks:
        raise ConfigError(f"{picks[0].input_line}: a stored run keeps its files; set single keys, such as steps=800")
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"resume: {str(path)!r} does not exist; give the folder of a run")
    try:
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"resume: {str(path)!r} is not readable as YAML") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"resume: {str(path)!r} is not a mapping of keys")
    return config


def _apply(config: DictConfig, override: Override) -> None:
    key = override.key_or_group
    if override.package is not None or "/" in key:
        raise ConfigError(f"{override.input_line}: unknown key")
    try:
        if not override.is_delete():
            OmegaConf.update(config, key, override.value(), force_add=True)
            return
        parent, _, name = key.rpartition(".")
        holder = OmegaConf.select(config, parent) if parent else config
        if not isinstance(holder, DictConfig) or name not in holder:
            raise ConfigError(f"{override.input_line}: there is no {key!r} to remove")
        del holder[name]
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{override.input_line}: cannot be set: {_first_line(error)}") from error


def _resolve(config: DictConfig) -> dict[str, Any]:
    """The plain container with the schema's defaults below it, so that interpolations find them too, and nothing left open."""
    try:
        OmegaConf.to_container(config, throw_on_missing=True)  # before merging: `???` gives way to a default
        merged = OmegaConf.merge(OmegaConf.create(to_plain(Config())), config)
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: has no value yet (???); set it: {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {_first_line(error)}") from error
    _refuse_redacted(plain, "")
    return plain  # type: ignore[return-value]


def _refuse_redacted(value: Any, key: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_redacted(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and REDACTED in value:
        raise ConfigError(f"{key}: was redacted when the run was stored; give it again: {key}=...")


def _redact(value: Any, *, secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {name: _redact(item, secret=secret or _is_secret(str(name), item)) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact(item, secret=secret) for item in value]
    if not isinstance(value, str):
        return value
    return REDACTED if secret else _URL_LOGIN.sub(rf"\1{REDACTED}@", value)


def _is_secret(name: str, value: Any) -> bool:
    # `api_key_env: OPENAI_API_KEY` tells where the secret is, and a resumed run must find it there again. A secret that stands there
    # by mistake does not look like the name of a variable.
    names_variable = name.endswith("_env") and isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9_]*", value)
    return _names_secret(name) and not names_variable


def _names_secret(name: str) -> bool:
    """Whether a word of the key names a secret: ``api_key`` and ``Authorization`` do, ``max_new_tokens`` and the schema's own keys,
    such as ``token_weighting``, do not, unless they name where a secret is."""
    words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    return bool(_SECRET_WORDS & set(words)) and (name not in _OWN_KEYS or name.endswith("_env"))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
