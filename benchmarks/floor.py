"""The floor of one recorded run, without Limen's loop, Ray or DeepSpeed: python benchmarks/floor.py RUN_DIR

For every recorded step: its prompts through vLLM's own engine, its tokens through a plain transformers model forward and
backward in the same micro-batches, and one copy of the weights. Prints one JSON line of median seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.llm_engine import LLMEngine

from rollout.engine import OnSwap
from rollout.vllm_in_process import EngineSpec, engine_args

WARM_UP_STEPS = 5


def read_steps(folder: Path) -> list[list[dict[str, Any]]]:
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted((folder / "groups").iterdir())]


def start_engine(model: Path, config: dict[str, Any]) -> LLMEngine:
    spec = EngineSpec(
        name="floor",
        model_path=str(model),
        tokenizer_path=str(model),
        dtype="float32",
        seed=0,
        max_model_tokens=config["data"]["max_prompt_tokens"] + config["rollout"]["max_new_tokens"],
        max_running=config["rollout"]["max_running"],
        cache_gib=config["rollout"]["cache_gib"],
        gpu_memory_share=0.8,
        tensor_parallel_size=1,
        on_swap=OnSwap.RECOMPUTE,
        trust_remote_code=False,
        load_format="auto",
    )
    return LLMEngine.from_engine_args(engine_args(spec), enable_multiprocessing=False)


def generate(engine: LLMEngine, groups: list[dict[str, Any]], max_new_tokens: int, stop: list[int]) -> float:
    started = time.perf_counter()
    for number, group in enumerate(groups):
        for completion in group["completions"]:
            params = SamplingParams(
                temperature=1.0,
                max_tokens=max_new_tokens,
                stop_token_ids=stop,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=1000 * number + completion["index"],
            )
            prompt = TokensPrompt(prompt_token_ids=group["prompt_token_ids"])
            engine.add_request(f"{started}-{number}-{completion['index']}", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


def learn(model: torch.nn.Module, rows: list[list[int]], num_mini_batches: int) -> float:
    started = time.perf_counter()
    size = -(-len(rows) // num_mini_batches)
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        longest = max(map(len, part))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in part])
        logp = torch.log_softmax(model(ids).logits[:, :-1].float(), -1)
        logp.gather(-1, ids[:, 1:, None]).sum().backward()
        model.zero_grad()
    return time.perf_counter() - started


def copy_weights(model: torch.nn.Module) -> float:
    started = time.perf_counter()
    copies = [parameter.detach().clone() for parameter in model.parameters()]
    del copies
    return time.perf_counter() - started


def main(folder: Path) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    model_path = max((folder / "checkpoints").iterdir()) / "model"
    model = AutoModelForCausalLM.from_pretrained(model_path)
    torch.set_num_threads(1)
    engine = start_engine(model_path, config)
    stop = [model.config.eos_token_id]
    seconds: dict[str, list[float]] = defaultdict(list)
    for groups in read_steps(folder):
        rows = [group["prompt_token_ids"] + c["token_ids"] for group in groups for c in group["completions"]]
        seconds["generate_s"].append(generate(engine, groups, config["rollout"]["max_new_tokens"], stop))
        seconds["learn_s"].append(learn(model, rows, config["batch"]["num_mini_batches"]))
        seconds["copy_s"].append(copy_weights(model))
    print(json.dumps({name: statistics.median(values[WARM_UP_STEPS:]) for name, values in seconds.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
