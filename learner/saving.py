"""What a learner leaves on disk: its training state, in a form that shows no layout, and the model as others read it.

    learner.json                            counters, precision, optimizer, and which file holds which parameters
    rank-000-of-002-part-000.safetensors    NAME/master and NAME/<moment> of some parameters, each a whole float32 tensor

Any number of ranks at any ZeRO stage reads what any other wrote. State and model are gathered a piece at a time on all ranks and
written whenever a file is full. A rank that cannot write goes on gathering to the end and raises then: the others take part in every
gather, would wait in them for ever, and a run goes on after a save that failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from learner.batching import deal
from learner.deepspeed_engine import DeepSpeedEngine
from learner.gather import Gathered, checkpoint_tensors, plan_gathers, whole_numel, whole_shape
from learner.model import LoadedModel

STATE_FILE = "learner.json"
STATE_FILE_BYTES = 2**30  # about as much as a rank holds of the state before it writes it
_FLOAT32_BYTES = 4

Files = dict[str, list[str]]  # names of files, each with the names of what it holds


class _Writer:
    """Writes files of tensors until one fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: Exception | None = None

    def write(self, file: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        if self._error is None:
            try:
                save_file(tensors, self._folder / file, metadata)
            except Exception as error:  # safetensors has its own for a full disk; raised by ``finish``
                self._error = error

    def finish(self) -> None:
        """Raises what the first failure raised."""
        if self._error is not None:
            raise self._error


def save_state(
    engine: DeepSpeedEngine, parameters: Mapping[str, nn.Parameter], folder: Path, *, rank: int, memory: Mapping[str, Any]
) -> list[str]:
    """Writes masters, moments and counters, each rank the parameters dealt to it, and ``memory``, any JSON. All ranks call it.

    Returns the names of the files that this rank wrote; they are on the disk.
    """
    dealt = _deal_files(engine, parameters)
    hands = [[(owner, file, name) for file, names in files.items() for name in names] for owner, files in enumerate(dealt)]
    turns = [entry for turn in zip_longest(*hands) for entry in turn if entry is not None]  # so that all ranks fill files alike
    held: dict[str, Tensor] = {}
    writer = _Writer(folder)
    states = engine.states([parameters[name] for *_, name in turns])
    for (owner, file, name), state in zip(turns, states, strict=True):
        if owner != rank:
            continue
        held |= {f"{name}/{part}": tensor.to("cpu", copy=True).contiguous() for part, tensor in state.items()}
        if name == dealt[rank][file][-1]:
            writer.write(file, held)
            held = {}
    writer.finish()
    written = list(dealt[rank])
    if rank == 0:
        files = {file: names for files in dealt for file, names in files.items()}
        description = engine.description() | {"memory": memory, "files": files}
        (folder / STATE_FILE).write_text(json.dumps(description) + "\n", encoding="utf-8")
        written.append(STATE_FILE)
    return force_to_disk(folder, written)


def load_state(engine: DeepSpeedEngine, parameters: Mapping[str, nn.Parameter], folder: Path) -> dict[str, Any]:
    """Restores what ``save_state`` wrote, whatever the number of ranks and the ZeRO stage then; its ``memory``. All ranks call it.

    Raises FileNotFoundError where there is nothing to restore, ValueError where it is of another model, precision or optimizer.
    """
    if not (folder / STATE_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no learner state: {STATE_FILE} is missing")
    description: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    files: Files = description["files"]
    odd = parameters.keys() ^ {name for names in files.values() for name in names}
    if odd:
        raise ValueError(f"{folder} is the state of another model: only one of the two has {', '.join(sorted(odd)[:3])}")
    engine.restore(_read_states(folder, files, parameters, engine.state_parts), description)
    memory: dict[str, Any] = description["memory"]
    return memory


def _read_states(
    folder: Path, files: Files, parameters: Mapping[str, nn.Parameter], parts: Sequence[str]
) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
    for file, names in files.items():
        with safe_open(folder / file, framework="pt") as tensors:  # mapped: a rank reads the pages of its own share
            for name in names:
                state = {part: tensors.get_tensor(f"{name}/{part}") for part in parts}
                saved, here = state[parts[0]].shape, whole_shape(parameters[name])
                if saved != here:
                    raise ValueError(f"{folder} is the state of another model: {name} is {list(saved)}, here {list(here)}")
                yield parameters[name], state


def _deal_files(engine: DeepSpeedEngine, parameters: Mapping[str, nn.Parameter]) -> list[Files]:
    """For each rank the files it writes. Parameters are dealt by size, each to one rank."""
    names = list(parameters)
    sizes = [whole_numel(p) * _FLOAT32_BYTES * len(engine.state_parts) for p in parameters.values()]
    dealt = []
    for rank, hand in enumerate(deal(sizes, engine.world_size)):
        parts: list[list[str]] = []
        room = 0
        for i in hand:
            if not parts or sizes[i] > room:
                parts.append([])
                room = STATE_FILE_BYTES
            parts[-1].append(names[i])
            room -= sizes[i]
        prefix = f"rank-{rank:03d}-of-{engine.world_size:03d}"
        dealt.append({f"{prefix}-part-{k:03d}.safetensors": part for k, part in enumerate(parts)})
    return dealt


def export_model(model: LoadedModel, gathered: Gathered, folder: Path, *, rank: int, shard_bytes: int, bucket_bytes: int) -> None:
    """Writes weights under checkpoint names, config and generation config, as ``save_pretrained`` would. All ranks call it.

    Rank 0 writes, a shard at a time: its memory above the model is one shard of ``shard_bytes`` and one bucket.
    """
    shards = plan_gathers(model, model.saved_keys, shard_bytes)
    file_of: dict[str, str] = {}
    writer = _Writer(folder)
    for number, keys in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard: dict[str, Tensor] = {}
        for bucket in plan_gathers(model, keys, bucket_bytes):
            with gathered([model.tensor(key) for key in bucket]):
                if rank == 0:
                    shard |= {n: t.to("cpu", copy=True).contiguous() for n, t in checkpoint_tensors(model, bucket).items()}
        if rank == 0:
            writer.write(file, shard, {"format": "pt"})
            file_of |= dict.fromkeys(shard, file)
    writer.finish()
    if rank == 0:
        if len(shards) > 1:
            size = sum(whole_numel(t) * t.element_size() for t in map(model.tensor, model.saved_keys))
            index = {"metadata": {"total_size": size}, "weight_map": file_of}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        _write_config(model.hf, folder)


def _write_config(hf: PreTrainedModel, folder: Path) -> None:
    hf.config.dtype = str(hf.dtype).removeprefix("torch.")
    hf.config.architectures = [type(hf).__name__]
    if hf.is_remote_code():
        custom_object_save(hf, folder, config=hf.config)
    hf.config.save_pretrained(folder)
    if hf.can_generate():
        hf.generation_config.save_pretrained(folder)


def force_to_disk(folder: Path, names: Sequence[str]) -> list[str]:
    """The names again, once the files of these names in ``folder`` are on the disk."""
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    return list(names)
