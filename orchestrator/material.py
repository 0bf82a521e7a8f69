"""What a run works on, known before Ray starts: prompts, tokenizer, model folder; and what is asked of an engine for a visit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from configs.errors import ConfigError
from configs.lag import correction_in_use
from configs.schema import Config, Placement, RolloutConfig, Seeds, Transport
from learner.warm_start import base_model_path
from orchestrator.ledger import Length
from orchestrator.replay import Record, check_source, open_record
from rollout.engine import GroupRequest, OnSwap, Sampling, Straggler
from rollout.prompts import PromptSet, load_prompts, read_rows, render
from rollout.records import Prompt, Purpose, Visit, sampling_seed
from rollout.sources import Row
from rollout.tokenizer import load_tokenizer

ASKED = "asked"  # source of the prompts a person gives to `limen sample`
PROOF_ROWS, PROOF_TOKENS = 4, 64  # of the proof of the first push
ENGINE_MODULES = {"in_process": "rollout.vllm_in_process", "async_core": "rollout.vllm_async_core"}


@dataclass(frozen=True, slots=True)
class Material:
    model_path: str  # a Hugging Face folder or name
    tokenizer: Any
    prompts: PromptSet
    by_id: Mapping[str, Prompt]
    num_parameters: int
    num_gpus: int  # seen by this process
    record: Record | None  # where the run replays another


def gather_material(config: Config, say: Callable[[str], None]) -> Material:
    """Reads the rows of the data, builds or finds the base model, and makes the prompts: of the rows, or of the run that is replayed.
    Raises DataError, ConfigError, ModelError."""
    quiet_libraries()
    source = config.rollout.source_run
    if source is not None:
        check_source(config)
    num_gpus = torch.cuda.device_count()  # seen by this process
    if config.rollout.transport is not Transport.local and num_gpus == 0:
        raise ConfigError(
            f"rollout.transport={config.rollout.transport.value} moves bytes between GPUs, and this machine has none; "
            "rollout.transport=local works"
        )
    rows = [] if source is not None else read_rows(config.data, list(config.reward.parts))
    path = str(base_model_path(config.model, progress=say))  # after the rows: a bad one is found before a model is built
    tokenizer = load_tokenizer(path, config.model.trust_remote_code)
    _check_length(config, path)
    record = open_record(Path(source), tokenizer) if source is not None else None
    prompts = record.prompts if record else load_prompts(config.data, tokenizer, rows)
    asked = ask_prompts(config.sample.prompts, config, tokenizer)
    return Material(
        model_path=path,
        tokenizer=tokenizer,
        prompts=prompts,
        by_id={prompt.id: prompt for prompt in (*prompts.train, *prompts.held_out, *asked)},
        num_parameters=count_parameters(path, trust_remote_code=config.model.trust_remote_code),
        num_gpus=num_gpus,
        record=record,
    )


def prompts_line(prompts: PromptSet, length: Length) -> str:
    """What the start of a run says of its prompts."""
    return (
        f"prompts: {len(prompts.train)} to train on, {len(prompts.held_out)} held out"
        + (f", {prompts.num_too_long} too long and left out" if prompts.num_too_long else "")
        + (f", {prompts.num_cut} cut at their beginning" if prompts.num_cut else "")
        + (f", {length.num_skipped} skipped in each epoch (data.last_batch=drop)" if length.num_skipped else "")
    )


def _check_length(config: Config, path: str) -> None:
    """Raises ConfigError where prompt and completion do not fit the positions that the model has."""
    limit = getattr(
        AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code), "max_position_embeddings", None
    )
    longest = max_model_tokens(config)
    if limit is not None and longest >= limit:  # one more: scoring a row of the greatest length samples a token after it
        raise ConfigError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_new_tokens={config.rollout.max_new_tokens}: the model "
            f"at {path} has {limit} positions, so at most {limit - 1} tokens fit; "
            f"rollout.max_new_tokens={max(1, limit - 1 - config.data.max_prompt_tokens)} works"
        )


def quiet_libraries() -> None:
    """Keeps the libraries' bars and notices off the terminal; what matters of them is an error and comes as one."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which transformers imports, tells what it did not find


def ask_prompts(questions: Sequence[str], config: Config, tokenizer: Any) -> list[Prompt]:
    """Prompts of a person's own, rendered like those of the data."""
    rows = [Row(str(i), text, "", ASKED, None, str(i), f"sample.prompts[{i}]") for i, text in enumerate(questions)]
    rendered = render(config.data, tokenizer, rows)
    return [
        Prompt(f"{ASKED}/{row.id}", ASKED, ASKED, text, np.asarray(ids, dtype=np.int32), "", None)
        for row, (text, ids) in zip(rows, rendered, strict=True)
    ]


def count_parameters(path: str, *, trust_remote_code: bool) -> int:
    """Parameters of a model, from its configuration alone: nothing is loaded or allocated."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def stop_token_ids(tokenizer: Any, model_path: str, *, trust_remote_code: bool) -> tuple[int, ...]:
    """Where a completion ends: the tokenizer's end token and those the model's own configuration names."""
    ids = {tokenizer.eos_token_id}
    named = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code).eos_token_id
    ids |= set(named) if isinstance(named, list) else {named}
    return tuple(sorted(i for i in ids if i is not None))


def make_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_ids,
    )


def request_maker(config: Config, material: Material) -> Callable[[Visit], GroupRequest]:
    """The request of a visit. A completion's seed hashes run seed, purpose, prompt, visit and index; without seeds on a GPU by
    default, where a seed a request is costly in the sampler."""
    trust = config.model.trust_remote_code
    sampling = make_sampling(config.rollout, stop_token_ids(material.tokenizer, material.model_path, trust_remote_code=trust))
    late = config.rollout.straggler
    straggler = None if late.after_s is None else Straggler(late.after_s, late.min_finished)
    seeded = config.rollout.seeds is Seeds.always or (config.rollout.seeds is Seeds.auto and material.num_gpus == 0)

    def request(visit: Visit) -> GroupRequest:
        size = config.evaluation.num_samples if visit.purpose is Purpose.EVAL else config.batch.group_size
        seeds = tuple(sampling_seed(config.seed, visit, index) for index in range(size)) if seeded else None
        rule = straggler if visit.purpose is Purpose.TRAIN else None
        return GroupRequest(visit, material.by_id[visit.prompt_id].token_ids, seeds, size, sampling, rule)

    return request


def max_model_tokens(config: Config) -> int:
    """Longest prompt plus completion that an engine takes."""
    return config.rollout.max_model_tokens or config.data.max_prompt_tokens + config.rollout.max_new_tokens


def proof_rows(config: Config, material: Material) -> list[np.ndarray[Any, Any]]:
    """Fixed token ids for the proof of the first push: prompts, filled up with tokens drawn from the vocabulary."""
    random = np.random.default_rng(0)
    rows = []
    for prompt in material.prompts.train[:PROOF_ROWS]:
        filling = random.integers(0, len(material.tokenizer), size=PROOF_TOKENS, dtype=np.int32)
        row = np.concatenate([prompt.token_ids, filling])[: min(PROOF_TOKENS, max_model_tokens(config))]
        rows.append(row.astype(np.int32))
    return rows


def engine_spec(config: Config, material: Material, *, name: str, model_path: str, load_format: str) -> dict[str, Any]:
    """Fields of EngineSpec. Engines of a training run start from random weights (``load_format="dummy"``)."""
    return {
        "name": name,
        "model_path": model_path,
        "tokenizer_path": material.model_path,
        "dtype": config.model.dtype.value,
        "seed": config.seed,
        "max_model_tokens": max_model_tokens(config),
        "max_running": config.rollout.max_running,
        "cache_gib": config.rollout.cache_gib,
        "gpu_memory_share": config.rollout.gpu_memory_share,
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "on_swap": OnSwap(config.rollout.on_swap.value),
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": load_format,
        "sleeps": config.cluster.placement is Placement.colocated,
    }


def learner_spec(config: Config, model_path: str, *, total_optimizer_steps: int) -> dict[str, Any]:
    """Fields of LearnerSpec."""
    return {
        "model": config.model,
        "learner": config.learner,
        "batch": config.batch,
        "algorithm": config.algorithm,
        "advantage": config.advantage,
        "weighting": config.weighting,
        "token_weighting": config.token_weighting,
        "correction": correction_in_use(config),
        "part_weights": {name: part.weight for name, part in config.reward.parts.items()},
        "model_path": model_path,
        "temperature": config.rollout.temperature,
        "seed": config.seed,
        "total_optimizer_steps": total_optimizer_steps,
        "max_response_tokens": config.rollout.max_new_tokens,
    }
