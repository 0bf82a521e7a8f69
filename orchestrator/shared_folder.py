"""Proof that the driver and every learner rank see one folder: all of them will write a checkpoint into it together.

The driver leaves a mark with a fresh token, each rank must read it and leave its own, and the driver must read those.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import RunStopped

WAIT_S = 10.0  # a network file system may show a new file only after its cache of the folder has aged
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class FolderView:
    """What one process sees of the folder."""

    name: str
    node: str
    fault: str | None  # None where it read the driver's mark and left its own


async def prove_shared(
    folder: Path, look: Callable[[Path, str, float], Awaitable[Sequence[FolderView]]], *, wait_s: float = WAIT_S
) -> None:
    """``look(place, token, wait_s)`` has every rank look. Raises RunStopped naming the rank, its node, the folder and the cure."""
    token = uuid.uuid4().hex
    place = folder / f"proof-{token}"
    place.mkdir()
    try:
        (place / "driver").write_text(token)
        views = list(await look(place, token, wait_s))
        unseen = await asyncio.gather(
            *(asyncio.to_thread(_await_mark, place / view.name, token, wait_s) for view in views if not view.fault)
        )
        good = [view for view in views if not view.fault]
        faults = [(view, str(view.fault)) for view in views if view.fault]
        faults += [
            (view, f"the driver does not see what it wrote: {fault}") for view, fault in zip(good, unseen, strict=True) if fault
        ]
        if faults:
            view, fault = faults[0]
            raise RunStopped(
                f"{folder}: learner {view.name} on node {view.node} does not share this folder with the driver ({fault}), but all ranks "
                "write checkpoints there; set run_dir to a folder of a file system that every node mounts at the same path"
            )
    finally:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


def look_from(place: Path, token: str, name: str, node: str, wait_s: float) -> FolderView:
    """A rank's part: it reads the driver's mark and leaves its own."""
    fault = _await_mark(place / "driver", token, wait_s)
    if fault is None:
        try:
            (place / name).write_text(token)
        except OSError as error:
            fault = f"it cannot write there: {error.strerror}"
    return FolderView(name, node, fault)


def _await_mark(mark: Path, token: str, wait_s: float) -> str | None:
    """None as soon as the mark holds the token, else what is wrong with it after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found = mark.read_text()
            fault = None if found == token else f"{mark} holds something else"
        except OSError as error:
            fault = f"{mark}: {error.strerror} after {wait_s:g} s"
        if fault is None or time.monotonic() > deadline:
            return fault
        time.sleep(POLL_S)
