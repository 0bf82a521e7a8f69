"""A checkpoint is whole or is none; resume takes the newest whole one and says why it skipped another."""

from __future__ import annotations

import json

import pytest

from configs.errors import ConfigError
from orchestrator.checkpoint import find_checkpoint, write_checkpoint


async def save(learner, model):
    (learner / "state.pt").write_bytes(b"moments" * 100)
    (model / "model.safetensors").write_bytes(b"weights" * 100)


async def write(run, step, keep_last=2, save=save):
    return await write_checkpoint(run / "checkpoints", {"step": step, "version": step}, save, keep_last=keep_last)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


async def test_the_newest_is_found_and_old_ones_are_rotated(run):
    for step in (10, 20, 30):
        await write(run, step)
    assert find_checkpoint(run, print).step == 30
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000020", "step-000030"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model" / "model.safetensors").write_bytes(b"weights"), "model.safetensors has 7 bytes"),
        (lambda f: (f / "learner" / "state.pt").unlink(), "state.pt is missing"),
        (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "cannot be read"),
        (lambda f: [p.unlink() for p in sorted(f.rglob("*")) if p.is_file()], "no manifest.json"),
        (lambda f: f.rename(f.with_name(f.name + ".partial")), "its writing did not end"),
    ],
)
async def test_a_damaged_one_is_named_and_the_one_before_taken(run, damage, words):
    """B143."""
    await write(run, 10)
    damage(await write(run, 20))
    before = sorted(p for p in run.rglob("*"))
    said = []
    assert find_checkpoint(run, said.append).step == 10
    assert len(said) == 1
    assert "step-000020" in said[0]
    assert words in said[0]
    assert sorted(p for p in run.rglob("*")) == before, "nothing is deleted"


async def test_one_flipped_byte_is_found(run):
    folder = await write(run, 10)
    data = bytearray((folder / "learner" / "state.pt").read_bytes())
    data[50] ^= 1
    (folder / "learner" / "state.pt").write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="none of its 1 checkpoints is whole"):
        find_checkpoint(run, print)


async def test_a_failed_save_leaves_the_earlier_one(run):
    """B145: keep one; the save at 20 fails; 10 is still there."""

    async def broken(learner, model):
        (model / "model.safetensors").write_bytes(b"w")
        raise OSError(28, "No space left on device")

    await write(run, 10, keep_last=1)
    with pytest.raises(OSError, match="No space"):
        await write(run, 20, keep_last=1, save=broken)
    assert find_checkpoint(run, print).step == 10
    await write(run, 20, keep_last=1)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000020"]


async def test_the_manifest_lists_every_file(run):
    folder = await write(run, 10)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"learner/state.pt", "model/model.safetensors", "state.json"}


async def test_a_damaged_one_does_not_stand_in_the_way_of_its_step(run):
    """A resume goes on before it, reaches its step again, and saves; the damaged one is kept under another name."""
    await write(run, 10)
    folder = await write(run, 20)
    (folder / "manifest.json").unlink()
    await write(run, 20)
    assert find_checkpoint(run, print).step == 20
    assert any(path.name.startswith("damaged-step-000020") for path in (run / "checkpoints").iterdir())


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoints in this folder"):
        find_checkpoint(tmp_path, print)
