"""Run folders are made once and never shared; what is written parses strictly."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from configs.errors import ConfigError
from orchestrator.run_folder import JsonLines, forget_empty, locked, make_run_folder, to_json, write_json


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_runs_started_together_get_folders_of_their_own(tmp_path, monkeypatch):
    """B160."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: make_run_folder(None, "train"), range(8)))
    assert len(set(folders)) == 8


def test_a_used_folder_is_refused(tmp_path):
    folder = make_run_folder(str(tmp_path / "a" / "b"), "train")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="not empty; it has no checkpoint to go on from; name a new one"):
        make_run_folder(str(folder), "train")
    (folder / "checkpoints" / "step-000010").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not empty; go on with it by resume="):
        make_run_folder(str(folder), "train")


def test_a_folder_belongs_to_one_process(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigError, match="another process is writing"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
    folder = make_run_folder(str(tmp_path / "run"), "train")
    with locked(folder):
        forget_empty(folder)
    assert not folder.exists(), "a command that failed before it wrote anything leaves the name free"


def test_every_value_is_strict_json(tmp_path):
    """B172: NaN and infinities become null, numbers keep their type."""
    file = JsonLines(tmp_path / "m.jsonl")
    file.write({"a": float("nan"), "b": float("-inf"), "c": np.float32(0.5), "d": torch.tensor(3), "e": True, "f": np.int64(4)})
    file.write({"text": "half a \ud800 surrogate, NUL \0, \x1b[31m, [bold]", "list": (1, np.array([1.5, float("inf")]))})
    file.close()
    first, second = (strict(line) for line in (tmp_path / "m.jsonl").read_text("utf-8").splitlines())
    assert first == {"a": None, "b": None, "c": 0.5, "d": 3, "e": True, "f": 4}
    assert type(first["d"]) is int
    assert first["e"] is True
    assert second["list"] == [1, [1.5, None]]
    assert second["text"].startswith("half a ? surrogate, NUL \0")


def test_names_are_text_too(tmp_path):
    """A verifier's words stand as the key of how often they were said, and its measures by their names."""
    write_json(tmp_path / "a.json", {"messages": {"half a \ud800": 3}})
    assert strict((tmp_path / "a.json").read_text("utf-8")) == {"messages": {"half a ?": 3}}


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    file = JsonLines(path)
    file.write({"step": 3})
    file.close()
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_the_byte_budget_holds(tmp_path):
    path = tmp_path / "s.jsonl"
    file = JsonLines(path, budget_bytes=100)
    written = [file.write({"x": "y" * 30}) for _ in range(5)]
    file.close()
    assert written == [True, True, False, False, False]
    assert path.stat().st_size <= 100
    assert JsonLines(path, budget_bytes=100).write({"x": "y" * 30}) is False, "a resumed run has the same budget"


def test_write_json_leaves_no_partial(tmp_path):
    write_json(tmp_path / "s.json", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]
    assert to_json({1: {2, 3}})  # anything else is text
