"""A checkpoint is whole or is none; resume takes the newest whole one of its own run and says why it skipped another."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading

import numpy as np
import pytest

from configs.errors import ConfigError
from configs.schema import CheckpointConfig
from orchestrator import checkpoint
from orchestrator.checkpoint import Checkpoints, SaveFailed, describe_files, find_checkpoint
from orchestrator.errors import RunStopped
from orchestrator.shared_folder import look_from, prove_shared

WRITTEN = ["learner/rank-000.bin", "learner/rank-001.bin", "model/model.safetensors"]
ARRAYS = {"prompt": np.array([3, 2**64 - 1], dtype=np.uint64), "right": np.array([0.1, 0.0], dtype=np.float32)}
TEXTS = {"groups.jsonl": '{"order": 3}\n', "config.yaml": "seed: 7\n"}


async def save(partial):
    """What two ranks do: each file is written by one of them, and described by it."""
    for name in WRITTEN:
        (partial / name).write_bytes(name.encode() * 100)
    return describe_files(partial, WRITTEN)


@pytest.fixture
def run(tmp_path):
    return tmp_path


def open_run(run, keep_last=2, keep_best=False):
    return Checkpoints(run / "checkpoints", CheckpointConfig(keep_last=keep_last, keep_best=keep_best))


async def write(checkpoints, step, save=save, pass_at_1=None):
    return await checkpoints.write({"step": step, "version": step}, ARRAYS, TEXTS, save, pass_at_1=pass_at_1)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


async def test_the_newest_is_found_and_old_ones_are_rotated(run):
    for step in (10, 20, 30):
        await write(open_run(run), step)
    found = find_checkpoint(run, print)
    assert found.step == 30
    assert found.group_rows() == [{"order": 3}]
    read = found.ledger_arrays()
    assert read.keys() == ARRAYS.keys()
    assert all(read[name].dtype == array.dtype and (read[name] == array).all() for name, array in ARRAYS.items())
    assert (found.folder / "config.yaml").read_text() == "seed: 7\n"
    assert names(run) == ["step-000020", "step-000030"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model" / "model.safetensors").write_bytes(b"weights"), "model.safetensors has 7 bytes"),
        (lambda f: (f / "learner" / "rank-001.bin").unlink(), "rank-001.bin is missing"),
        (lambda f: (f / "groups.jsonl").write_text(""), "groups.jsonl has 0 bytes"),
        (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "manifest.json").rename(f / "other") and (f / "manifest.json").mkdir(), "cannot be read ([Errno 21]"),
        (lambda f: (f / "manifest.json").write_text("{}"), "cannot be read (no step, run"),
        (lambda f: [p.unlink() for p in sorted(f.rglob("*")) if p.is_file()], "no manifest.json"),
        (lambda f: f.rename(f.with_name(f.name + ".partial")), "its writing did not end"),
    ],
)
async def test_a_damaged_one_is_named_and_the_one_before_taken(run, damage, words):
    """B143."""
    checkpoints = open_run(run)
    await write(checkpoints, 10)
    damage(await write(checkpoints, 20))
    before = sorted(p for p in run.rglob("*"))
    said = []
    assert find_checkpoint(run, said.append).step == 10
    assert len(said) == 1
    assert "step-000020" in said[0]
    assert words in said[0]
    assert sorted(p for p in run.rglob("*")) == before, "nothing is deleted"


async def test_one_flipped_byte_is_found(run):
    folder = await write(open_run(run), 10)
    data = bytearray((folder / "learner" / "rank-000.bin").read_bytes())
    data[50] ^= 1
    (folder / "learner" / "rank-000.bin").write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="none of its 1 checkpoints is whole"):
        find_checkpoint(run, print)


FILES = [*WRITTEN, "state.json.partial", "ledger.npz", "groups.jsonl", "config.yaml", "manifest.json.partial"]


@pytest.mark.parametrize("name", FILES)
async def test_a_disk_that_is_full_at_any_file_leaves_the_earlier_one(run, monkeypatch, name):
    """B145: keep one; the save at 20 fails; 10 still stands, nothing of the failed one takes up room, and the next save works."""
    checkpoints = open_run(run, keep_last=1)
    await write(checkpoints, 10)
    opened = type(run).open

    def full(self, mode="r", *args, **kwargs):
        if "w" in mode and str(self).endswith(f".partial/{name}"):
            raise OSError(28, "No space left on device", str(self))
        return opened(self, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(run), "open", full)
        with pytest.raises(OSError, match="No space"):
            await write(checkpoints, 20)
    assert names(run) == ["step-000010"]
    assert find_checkpoint(run, print).step == 10
    await write(checkpoints, 20)
    assert names(run) == ["step-000020"]


@pytest.mark.parametrize("moment", ["fsync", "rename"])
async def test_a_kill_at_any_moment_leaves_a_partial_folder_that_the_next_save_replaces(run, monkeypatch, moment):
    """A killed process cleans nothing up: what it left is never loaded, and goes when its step is saved again."""
    checkpoints = open_run(run)
    await write(checkpoints, 10)
    real = getattr(os, moment)
    for number in range(200):
        left = number

        def killed(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, moment, killed)
            try:
                await write(checkpoints, 20)
            except KeyboardInterrupt:
                pass
            else:
                break
        found = find_checkpoint(run, lambda line: None)
        assert found.step in (10, 20)
        assert found.step == 10 or not (run / "checkpoints" / "step-000020.partial").exists()
        shutil.rmtree(run / "checkpoints" / "step-000020", ignore_errors=True)
    assert number > 1, "no moment was met"
    assert find_checkpoint(run, print).step == 20
    assert names(run) == ["step-000010", "step-000020"]


async def test_what_a_rank_wrote_elsewhere_is_missed(run):
    """A rank on a node that does not share the folder says what it wrote, but the driver does not find it."""

    async def elsewhere(partial):
        files = await save(partial)
        (partial / WRITTEN[1]).unlink()
        return files

    with pytest.raises(SaveFailed, match=r"a rank wrote learner/rank-001.bin with 2000 bytes, but it is not there"):
        await write(open_run(run), 10, save=elsewhere)
    assert names(run) == []


async def test_another_runs_steps_are_neither_resumed_nor_counted_nor_removed(run, tmp_path_factory):
    """B145: keep 1; step 1000 of another run lies there; 10 is there after its save, and after a failed save at 20."""
    other = tmp_path_factory.mktemp("other")
    foreign = await write(open_run(other), 1000)
    checkpoints = open_run(run, keep_last=1)
    shutil.copytree(foreign, run / "checkpoints" / foreign.name)
    (run / "checkpoints" / "step-000005").mkdir()
    (run / "checkpoints" / "step-mine").mkdir()

    async def broken(partial):
        raise OSError(28, "No space left on device")

    await write(checkpoints, 10)
    with pytest.raises(OSError, match="No space"):
        await write(checkpoints, 20, save=broken)
    said = []
    assert find_checkpoint(run, said.append).step == 10
    assert "step-001000 is skipped: it belongs to another run" in said[0]
    await write(open_run(run, keep_last=1), 20)
    assert names(run) == ["step-000005", "step-000020", "step-001000", "step-mine"]


async def test_the_best_is_kept_beside_the_last(run):
    """By hand: 0.3, 0.5, -, 0.5, 0.2, - at steps 1 to 6; two last: 5 and 6; best 0.5, the newer of two: 4."""
    checkpoints = open_run(run, keep_best=True)
    for step, result in enumerate([0.3, 0.5, None, 0.5, 0.2, None], 1):
        await write(checkpoints, step, pass_at_1=result)
    assert names(run) == ["step-000004", "step-000005", "step-000006"]
    assert checkpoints.best().name == "step-000004"
    await checkpoints.note(6, 0.6)  # an evaluation after the last save
    assert names(run) == ["step-000005", "step-000006"]
    assert open_run(run).best().name == "step-000006"
    assert find_checkpoint(run, print).step == 6, "a noted result does not damage it"


async def test_the_best_is_one_that_the_run_stands_on(run):
    """A resume passed over the damaged 20: its result must not cost 10, the best of those that are left, its place."""
    await write(open_run(run, keep_best=True), 10, pass_at_1=0.5)
    folder = await write(open_run(run, keep_best=True), 20, pass_at_1=0.6)
    (folder / "model" / "model.safetensors").write_bytes(b"")
    checkpoints = open_run(run, keep_last=1, keep_best=True)
    await write(checkpoints, 12, pass_at_1=0.1)
    await write(checkpoints, 14, pass_at_1=0.2)
    assert names(run) == ["step-000010", "step-000014", "step-000020"]


async def test_an_old_one_that_cannot_be_taken_away_yet_goes_with_the_next_save(run, monkeypatch):
    """As on a network file system while another process reads its model: the new one stands all the same."""
    checkpoints = open_run(run, keep_last=1)
    await write(checkpoints, 10)

    def busy(path, *args, **kwargs):
        raise OSError(39, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        folder = await write(checkpoints, 20)
    assert find_checkpoint(run, print).folder == folder
    left, new = names(run)
    assert left.startswith("removed-step-000010")
    assert new == "step-000020"
    await write(checkpoints, 30)
    assert names(run) == ["step-000030"]


async def test_what_was_left_half_written_goes_with_the_next_save_whatever_its_step(run):
    """The last save of a run that is asked to end is of any step: where it was cut short, none of that step may ever come again."""
    (run / "checkpoints" / "step-000017.partial" / "learner").mkdir(parents=True)
    (run / "checkpoints" / "step-000017.partial" / "learner" / "rank-000.bin").write_bytes(b"x" * 1000)
    await write(open_run(run), 10)
    assert names(run) == ["step-000010"]


async def test_a_seal_that_outlives_its_deadline_makes_no_checkpoint_later(run, monkeypatch):
    """The disk hangs, the run goes back and writes the same step again: the thread of the first save must not take that for its own."""
    checkpoints, hangs, goes_on, over = open_run(run), threading.Event(), threading.Event(), threading.Event()
    seal = Checkpoints._seal

    def slow(self, *rest):
        hangs.set()
        goes_on.wait(20)
        seal(self, *rest)
        over.set()

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_seal", slow)
        saving = asyncio.create_task(write(checkpoints, 10))
        await asyncio.to_thread(hangs.wait, 20)
        saving.cancel()
        goes_on.set()
        await asyncio.to_thread(over.wait, 20)
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert names(run) == ["step-000010.partial"]
    await write(checkpoints, 10)
    assert names(run) == ["step-000010"]


async def test_the_manifest_lists_every_file(run):
    folder = await write(open_run(run), 10)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {*WRITTEN, *TEXTS, "state.json", "ledger.npz"}


async def test_a_damaged_one_neither_stands_in_the_way_of_its_step_nor_counts(run):
    """A resume goes on before it: its saves are kept although the damaged one is later, and it makes room when its step comes."""
    await write(open_run(run, keep_last=1), 10)
    folder = await write(open_run(run, keep_last=2), 20)
    (folder / "model" / "model.safetensors").write_bytes(b"")
    checkpoints = open_run(run, keep_last=1)
    await write(checkpoints, 15)
    assert find_checkpoint(run, lambda line: None).step == 15
    await write(checkpoints, 20)
    assert find_checkpoint(run, print).step == 20
    assert any(name.startswith("replaced-step-000020") for name in names(run))


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoints in this folder"):
        find_checkpoint(tmp_path, print)
    open_run(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoints in this folder"):
        find_checkpoint(tmp_path, print)


# ---- one folder for all ---------------------------------------------------------------------------------------------


async def prove(folder, *places):
    async def look(place, token, wait_s):
        return [look_from(at / place.name, token, f"rank-{i}", f"10.0.0.{i}", wait_s) for i, at in enumerate(places)]

    await prove_shared(folder, look, wait_s=0.2)


async def test_a_shared_folder_is_proven_and_left_as_it_was(tmp_path):
    await prove(tmp_path, tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_rank_without_the_folder_is_named(tmp_path):
    with pytest.raises(RunStopped, match=r"learner rank-1 on node 10.0.0.1 does not share .*No such file .*set run_dir"):
        await prove(tmp_path, tmp_path, tmp_path / "elsewhere")
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_only_looks_shared_is_found(tmp_path, tmp_path_factory):
    """The rank sees a copy of the driver's mark; what it writes itself never reaches the driver."""
    copy = tmp_path_factory.mktemp("copy")

    async def look(place, token, wait_s):
        shutil.copytree(place, copy / place.name)
        return [look_from(copy / place.name, token, "rank-0", "10.0.0.9", wait_s)]

    with pytest.raises(RunStopped, match=r"rank-0 on node 10.0.0.9 .*the driver does not see what it wrote"):
        await prove_shared(tmp_path, look, wait_s=0.2)
