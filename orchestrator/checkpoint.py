"""Checkpoints: a folder that is whole or is none.

checkpoints/step-000050.partial/   being written: never loaded, never counted
checkpoints/step-000050/
    model/          the policy as a Hugging Face folder, for `limen eval`, `limen sample`, vLLM and transformers
    learner/        weights, optimizer, schedule and counters, as the learner wrote them
    state.json      step, version, incarnation, prompt ledger
    manifest.json   every file with its size and digest; written last, before the rename
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from configs.errors import ConfigError
from orchestrator.run_folder import write_json

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def learner(self) -> Path:
        return self.folder / "learner"

    @property
    def model(self) -> Path:
        return self.folder / "model"


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


async def write_checkpoint(parent: Path, state: dict[str, Any], save: Callable[[Path, Path], Any], *, keep_last: int) -> Path:
    """Writes the checkpoint of ``state["step"]``: ``save(learner_folder, model_folder)`` is awaited, then state and manifest.

    Older ones are removed only after this one stands. A failed write leaves the earlier ones as they were.
    """
    folder = parent / checkpoint_name(state["step"])
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    (partial / "learner").mkdir(parents=True)
    (partial / "model").mkdir()
    await save(partial / "learner", partial / "model")
    await asyncio.to_thread(_seal, partial, folder, state)  # gigabytes are digested: not in the event loop
    for old in _whole_folders(parent)[:-keep_last]:
        await asyncio.to_thread(shutil.rmtree, old)
    return folder


def _seal(partial: Path, folder: Path, state: dict[str, Any]) -> None:
    write_json(partial / "state.json", state)
    write_json(partial / MANIFEST, {"step": state["step"], "files": _describe_files(partial)})
    _sync_folder(partial)
    if folder.exists():  # a damaged one of the same step, which a resume passed over: nothing is deleted
        folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
    partial.rename(folder)
    _sync_folder(folder.parent)


def find_checkpoint(run_dir: Path, log: Callable[[str], None]) -> Checkpoint:
    """The newest whole checkpoint of a run; a damaged one is named through ``log`` and the one before it taken.

    Raises ConfigError where there is none.
    """
    parent = run_dir / "checkpoints"
    if not parent.is_dir():
        raise ConfigError(f"resume={run_dir}: no checkpoints in this folder; name the folder of a run that saved one")
    candidates = sorted((p for p in parent.iterdir() if p.name.startswith("step-")), key=_step_of, reverse=True)
    for folder in candidates:
        fault = _fault(folder)
        if fault is None:
            return Checkpoint(folder, json.loads((folder / "state.json").read_text(encoding="utf-8")))
        log(f"checkpoint {folder.name} is skipped: {fault}")
    raise ConfigError(f"resume={run_dir}: none of its {len(candidates)} checkpoints is whole; start a new run")


def _whole_folders(parent: Path) -> list[Path]:
    whole = (p for p in parent.glob("step-*") if p.suffix != ".partial" and (p / MANIFEST).is_file())
    return sorted(whole, key=_step_of)


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-").split(".")[0]
    return int(digits) if digits.isdigit() else -1


def _fault(folder: Path) -> str | None:
    if folder.suffix == ".partial":
        return "its writing did not end"
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    found = _describe_files(folder)
    for name, expected in files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != expected:
            return f"{name} has {found[name]['bytes']} bytes with digest {found[name]['digest']}, the manifest says {expected}"
    return None


def _describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and digest of every file but the manifest. Each is forced to the disk on the way."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        digest = xxhash.xxh3_64()
        with path.open("rb") as file:
            os.fsync(file.fileno())
            while block := file.read(1 << 22):
                digest.update(block)
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "digest": digest.hexdigest()}
    return files


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
