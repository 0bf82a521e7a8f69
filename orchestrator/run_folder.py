"""A run's folder: made once, never shared, every file in it written so that a crash leaves whole lines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import ConfigError

LOCK = ".lock"
HEARTBEAT = "heartbeat.json"  # the last one
STACKS = "stacks"  # folder of what processes did when a deadline passed


def make_run_folder(run_dir: str | None, name: str) -> Path:
    """The folder of a new run. Without ``run_dir`` a new one under ./runs, named by time; making it is atomic, so runs that
    start together get folders of their own. Raises ConfigError for a folder that is in use."""
    if run_dir is not None:
        folder = Path(run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir={run_dir}: cannot make this folder ({error.strerror})") from error
        if any(path.name != LOCK for path in folder.iterdir()):
            saved = any((folder / "checkpoints").glob("step-*"))
            cure = (
                f"go on with it by resume={run_dir}, or name a new one"
                if saved
                else "it has no checkpoint to go on from; name a new one"
            )
            raise ConfigError(f"run_dir={run_dir}: the folder is not empty; {cure}")
        return folder
    parent = Path("runs").resolve()
    parent.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = parent / (f"{stamp}-{name}" if number == 0 else f"{stamp}-{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"no free folder name under {parent.resolve()} for {stamp}-{name}; name one with run_dir=FOLDER")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a run's folder for this process; the lock goes with the process. Raises ConfigError where another one holds it."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{folder}: another process is writing into this run; wait for it to end, or name another run_dir"
            ) from error
        yield


def forget_empty(folder: Path) -> None:
    """Takes away a folder in which nothing was written, so that the corrected command may use it."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        folder.rmdir()


def to_json(value: Any) -> Any:
    """A JSON value. Numbers keep their type (numpy's and 0-dimensional tensors too); what is not finite becomes null."""
    if isinstance(value, dict):
        return {to_json(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray) and value.ndim:
        return to_json(value.tolist())
    if not isinstance(value, (bool, int, float, str, type(None))) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # a lone surrogate is not UTF-8
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def json_line(row: dict[str, Any]) -> str:
    return json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"


class JsonLines:
    """A file of JSON objects, one a line, written line by line. A line that the disk refuses is kept and written ahead of the next."""

    def __init__(self, path: Path, *, budget_bytes: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_half_line(path)
        self.name = path.name
        self._file = path.open("ab", buffering=0)
        self._left = None if budget_bytes is None else budget_bytes - path.stat().st_size
        self._waiting: deque[bytes] = deque()

    @property
    def num_waiting(self) -> int:
        """Rows that the disk refused so far."""
        return len(self._waiting)

    def write(self, row: dict[str, Any]) -> bool:
        """Writes a row; False where the file's byte budget is used up. Raises OSError where the disk refuses it."""
        line = json_line(row).encode()
        if self._left is not None:
            self._left -= len(line)
            if self._left < 0:
                return False
        self._waiting.append(line)
        self.flush()
        return True

    def flush(self) -> None:
        """Writes what waits. Raises OSError where the disk refuses it still."""
        while self._waiting:
            _append_whole(self._file, self._waiting[0])
            self._waiting.popleft()

    def close(self) -> None:
        """What waits is lost."""
        self._file.close()


def _append_whole(file: FileIO, line: bytes) -> None:
    """A disk that fills up within the line takes none of it."""
    end = os.fstat(file.fileno()).st_size
    try:
        left = memoryview(line)
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise


def _drop_half_line(path: Path) -> None:
    """A process killed while it wrote leaves half a line at the end; the file stays readable without it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all: see ``write_whole``."""
    write_whole(path, json.dumps(to_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all: to a temporary name, to the disk, then renamed. What a full disk took of it is given back."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
