"""Checkpoints: a folder that is whole or is none.

checkpoints/run.json                which run these are; the steps of another run are never counted, resumed or removed
checkpoints/step-000050.partial/    being written: never loaded, never counted
checkpoints/step-000050/
    learner/        weights, optimizer and counters; every rank wrote its share
    model/          the policy as a Hugging Face folder, for `limen eval`, `limen sample`, vLLM and transformers
    config.yaml     the run's configuration as it was
    groups.jsonl    kept groups that no step has trained, and those judged for the step in hand
    state.json      step, version, incarnation, visits of the prompt ledger that have not ended, what the loop had in hand
    ledger.npz      what the ledger knows of every prompt that was asked
    manifest.json   step, run, held-out pass@1 where it is known, and every file with its size and digest; written last

All ranks write into the partial folder, and each digests and syncs what it wrote; their answers are the barrier. Then come the
driver's own files, the manifest, the rename. Whatever fails before that leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from configs.errors import ConfigError
from configs.schema import CheckpointConfig
from orchestrator.errors import RunStopped
from orchestrator.run_folder import write_json

MANIFEST, RUN_FILE = "manifest.json", "run.json"
STATE, GROUPS, LEDGER = "state.json", "groups.jsonl", "ledger.npz"
READERS = 4  # files digested at once when a checkpoint is verified
_NAME = re.compile(r"step-(\d+)(\.partial)?")
_REMOVED = "removed-"

Files = dict[str, dict[str, Any]]  # name within the checkpoint -> its size and digest, as in the manifest


class SaveFailed(RunStopped):
    """A checkpoint could not be written. The earlier ones stand."""


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

    def group_rows(self) -> list[dict[str, Any]]:
        """The lines of ``groups.jsonl``."""
        with (self.folder / GROUPS).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def ledger_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the prompt ledger."""
        with np.load(self.folder / LEDGER) as arrays:
            return dict(arrays)


class Checkpoints:
    """The checkpoints of one run: writes them, keeps the last few and the best, and touches none of another run."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        """Makes the folder, and the run's identity where it has none yet."""
        self.folder = folder
        self._config = config
        folder.mkdir(parents=True, exist_ok=True)
        known = _run_of(folder)
        self.run = known or uuid.uuid4().hex
        if known is None:
            write_json(folder / RUN_FILE, {"run": self.run})

    async def write(
        self,
        state: dict[str, Any],
        arrays: Mapping[str, NDArray[Any]],
        texts: Mapping[str, str],
        save: Callable[[Path], Awaitable[Files]],
        *,
        pass_at_1: float | None,
    ) -> Path:
        """Writes the checkpoint of ``state["step"]``.

        ``save(partial)`` has all ranks write below ``partial/learner`` and ``partial/model`` and tells what they wrote; ``arrays`` (of
        the ledger) and ``texts`` are the driver's own files. ``pass_at_1`` is the held-out result of this step where there is one.
        Whatever fails is raised as it is; the partial folder is then taken away, for a full disk must not stay full. Where its deadline
        passes the ranks may write on: then it goes with the next save.
        """
        partial = self.folder / (checkpoint_name(state["step"]) + ".partial")
        try:
            await asyncio.to_thread(_make_anew, partial)
            written = await save(partial)
            await asyncio.to_thread(self._seal, partial, written, arrays, texts, state, pass_at_1)
            # A thread of its own: that of a seal which outlives its deadline, on a disk that hangs, must make nothing of it later.
            await asyncio.to_thread(self._publish, partial)
        except Exception:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            raise
        await asyncio.to_thread(self._rotate, state["step"])
        return partial.with_suffix("")

    async def note(self, step: int, pass_at_1: float) -> None:
        """Adds the result of an evaluation that came after the checkpoint of ``step``, which may be the best now."""
        await asyncio.to_thread(self._note, step, pass_at_1)

    def best(self) -> Path | None:
        """The checkpoint with the best held-out pass@1, the newest among equals; None where none was evaluated."""
        return _best(self._own())

    def _seal(
        self,
        partial: Path,
        written: Files,
        arrays: Mapping[str, NDArray[Any]],
        texts: Mapping[str, str],
        state: dict[str, Any],
        pass_at_1: float | None,
    ) -> None:
        _check_arrived(partial, written)
        write_json(partial / STATE, state)
        with (partial / LEDGER).open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        others = [str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()]
        files = written | describe_files(partial, (name for name in others if name not in written))
        for folder in [path for path in partial.rglob("*") if path.is_dir()]:
            _sync_folder(folder)
        write_json(partial / MANIFEST, {"step": state["step"], "run": self.run, "pass_at_1": pass_at_1, "files": files})
        _sync_folder(partial)

    def _publish(self, partial: Path) -> None:
        folder = partial.with_suffix("")
        if folder.exists():  # a damaged one of the same step, which a resume passed over, or another run's: nothing is deleted
            folder.rename(folder.with_name(f"replaced-{folder.name}-{time.time_ns()}"))
        partial.rename(folder)
        _sync_folder(self.folder)

    def _rotate(self, step: int) -> None:
        """Takes away what is neither among the last ones up to ``step`` nor the best. Later steps are not counted: a resume passed
        them over because they are damaged."""
        own = [(folder, manifest) for folder, manifest in self._own() if manifest["step"] <= step]
        kept = {*(folder for folder, _ in own[-self._config.keep_last :]), *([_best(own)] if self._config.keep_best else [])}
        for folder, _ in own:
            if folder not in kept:
                removed = folder.with_name(f"{_REMOVED}{folder.name}-{time.time_ns()}")
                with contextlib.suppress(OSError):  # a full disk may refuse even this; the new one stands all the same
                    folder.rename(removed)  # first, so that half of it is none
        # What another process still reads may stay until the next save. What a process that was killed, or a save past its deadline, left
        # half written may be of a step that is never saved again; by now nobody writes into it any more.
        for folder in [*self.folder.glob(_REMOVED + "step-*"), *self.folder.glob("step-*.partial")]:
            shutil.rmtree(folder, ignore_errors=True)

    def _note(self, step: int, pass_at_1: float) -> None:
        path = self.folder / checkpoint_name(step) / MANIFEST
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | {"pass_at_1": pass_at_1})
        self._rotate(step)

    def _own(self) -> list[tuple[Path, dict[str, Any]]]:
        """The run's checkpoints that have a manifest, in the order of their steps."""
        own = []
        for folder in _step_folders(self.folder):
            manifest = None if folder.suffix else _read_manifest(folder)
            if isinstance(manifest, dict) and manifest["run"] == self.run:
                own.append((folder, manifest))
        return own


def _best(checkpoints: Iterable[tuple[Path, dict[str, Any]]]) -> Path | None:
    judged = [(m["pass_at_1"], m["step"], folder) for folder, m in checkpoints if m["pass_at_1"] is not None]
    return max(judged)[2] if judged else None


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def find_checkpoint(run_dir: Path, log: Callable[[str], None]) -> Checkpoint:
    """The newest whole checkpoint of a run; one that is damaged or another run's is named through ``log`` and passed over.

    Where ``run.json`` is gone, every whole checkpoint counts. Raises ConfigError where there is none.
    """
    parent = run_dir / "checkpoints"
    candidates = _step_folders(parent)[::-1]
    if not candidates:
        raise ConfigError(f"resume={run_dir}: no checkpoints in this folder; name the folder of a run that saved one")
    run = _run_of(parent)
    for folder in candidates:
        fault = _fault(folder, run)
        if fault is None:
            return Checkpoint(folder, json.loads((folder / STATE).read_text(encoding="utf-8")))
        log(f"checkpoint {folder.name} is skipped: {fault}")
    raise ConfigError(f"resume={run_dir}: none of its {len(candidates)} checkpoints is whole; start a new run")


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest one that was sealed, its files unread: to look at a run that may go on meanwhile, not to train from."""
    parent = run_dir / "checkpoints"
    run = _run_of(parent)
    for folder in _step_folders(parent)[::-1]:
        manifest = None if folder.suffix else _read_manifest(folder)
        if isinstance(manifest, dict) and run in (None, manifest["run"]):
            return Checkpoint(folder, json.loads((folder / STATE).read_text(encoding="utf-8")))
    return None


def _run_of(parent: Path) -> str | None:
    path = parent / RUN_FILE
    return str(json.loads(path.read_text(encoding="utf-8"))["run"]) if path.is_file() else None


def _step_folders(parent: Path) -> list[Path]:
    """Folders named like a checkpoint, whole, partial or foreign, in the order of their steps."""
    if not parent.is_dir():
        return []
    found = [(int(match[1]), path) for path in parent.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def _read_manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest, or what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, OSError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    missing = [key for key in ("step", "run", "pass_at_1", "files") if key not in manifest]
    return f"its {MANIFEST} cannot be read (no {', '.join(missing)})" if missing else dict(manifest)


def _fault(folder: Path, run: str | None) -> str | None:
    if folder.suffix == ".partial":
        return "its writing did not end"
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if run is not None and manifest["run"] != run:
        return f"it belongs to another run ({manifest['run']}, this one is {run})"
    names = list(manifest["files"])
    with ThreadPoolExecutor(READERS) as pool:
        for name, fault in zip(
            names, pool.map(lambda name: _file_fault(folder, name, manifest["files"][name]), names), strict=True
        ):
            if fault:
                return f"{name} {fault}"
    return None


def _file_fault(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    try:
        found = _describe(folder / name)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found == expected:
        return None
    return f"has {found['bytes']} bytes with digest {found['digest']}, the manifest says {expected}"


def _make_anew(partial: Path) -> None:
    """What an earlier attempt at this step left goes."""
    if partial.exists():
        shutil.rmtree(partial)
    (partial / "learner").mkdir(parents=True)
    (partial / "model").mkdir()


def _check_arrived(partial: Path, written: Files) -> None:
    """What the ranks wrote must lie here as they say: by size; their digests are of what they read back themselves."""
    for name, entry in written.items():
        path = partial / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            there = "is not there" if size is None else f"has {size} bytes"
            raise SaveFailed(f"{partial}: a rank wrote {name} with {entry['bytes']} bytes, but it {there}")


def describe_files(folder: Path, names: Iterable[str]) -> Files:
    """Size and digest of files of ``folder``; each is forced to the disk first."""
    files: Files = {}
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        files[name] = _describe(folder / name)
    return files


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_64()
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "digest": digest.hexdigest()}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
