"""Folders that are built once and kept: models made here, under a key of everything that went into them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

MANIFEST = "limen_model.json"


def cached_folder(name: str, recipe: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder for ``recipe``, built by ``build(folder)`` unless it is there.

    The key is a hash of the recipe (any JSON) and of the versions of torch and transformers. Folders lie under
    ``$LIMEN_CACHE/models`` (default ``~/.cache/limen/models``).

    A folder is built under another name and renamed when it is whole, so a half-written one is never found, and of several
    processes that build at once the first wins and the others take its folder. Its manifest lists the size of every file: a
    folder that lost something since is built again.
    """
    full = {"recipe": dict(recipe), "torch": version("torch"), "transformers": version("transformers")}
    digest = hashlib.blake2b(json.dumps(full, sort_keys=True).encode(), digest_size=8).hexdigest()
    root = Path(os.environ.get("LIMEN_CACHE") or "~/.cache/limen").expanduser() / "models"
    folder = root / f"{name}-{digest}"
    if is_whole(folder):
        return folder
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # damaged, or not there
    work = Path(tempfile.mkdtemp(dir=root, prefix=f".{folder.name}."))
    try:
        build(work)
        sizes = {str(file.relative_to(work)): file.stat().st_size for file in work.rglob("*") if file.is_file()}
        (work / MANIFEST).write_text(json.dumps({**full, "files": sizes}, indent=1, sort_keys=True) + "\n")
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not is_whole(folder):  # else another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the folder has its manifest and every file in it at its size."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())
