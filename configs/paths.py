"""Paths of a configuration, made absolute once, against the working directory of the command.

Ray's workers run in other folders, and a stored run is resumed from any: a relative path would mean something else there.
"""

from __future__ import annotations

from pathlib import Path

from configs.schema import Config, SourceKind

BUILT_IN = ("embedded", "smollm2-135m")  # values of model.path that name a model made here


def make_absolute(config: Config) -> None:
    """Replace every relative path in ``config`` by its absolute form, in place. Names of models and data sets that are no folder
    here are hub names and stay; so do function names other than ``file.py:function``."""
    config.run_dir = _path(config.run_dir)
    config.resume = _path(config.resume)
    config.checkpoint_dir = _path(config.checkpoint_dir)
    config.input, config.output = (None if path == "-" else _path(path) for path in (config.input, config.output))
    config.rollout.source_run = _path(config.rollout.source_run)
    config.model.path = _path_or_name(config.model.path)
    config.model.warm_start_file = _path(config.model.warm_start_file)
    for source in config.data.sources.values():
        if source.path is not None:
            is_file = source.kind in (SourceKind.jsonl, SourceKind.parquet)
            source.path = _path(source.path) if is_file else _path_or_name(source.path)
    for part in config.reward.parts.values():
        part.function = _function(part.function)
    chosen = (config.advantage, config.weighting, config.token_weighting, config.selection, config.correction)
    for choice in (config.algorithm, *chosen):
        choice.name = _function(choice.name)


def _path(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _path_or_name(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.exists() and path not in BUILT_IN else path


def _function(name: str) -> str:
    path, colon, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{attribute}" if colon else name
