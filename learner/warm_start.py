"""The base model of a run: the embedded model built here, a model warm-started from a file, or one that is used as it is.

The embedded model is a Qwen3 architecture of under a million parameters that was shown additions until it is good at one digit,
middling at two and nearly hopeless at three: easy, boundary and hard prompts for a run of minutes. Two digits are learned within
some hundred steps of each other, so a warm-up that merely ended early would be good or bad at them by chance, and sure of its
mistakes; instead the last steps mix wrong answers in (``noise``), which leaves it unsure and sampling worth while. It never sees
the sums that the arithmetic source holds out by default, so a later rise on them is not memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from configs.schema import DataConfig, EmbeddedModel, ModelConfig
from learner.model_cache import cached_folder
from learner.smollm2 import smollm2_path
from rollout.held_out import held_out_places
from rollout.prompts import render
from rollout.sources import DataError, Row, arithmetic
from rollout.tokenizer import character_tokenizer, load_tokenizer

SOURCE_VERSION = 1  # raise it when this file makes other weights from the same recipe
IGNORED = -100  # cross_entropy's mark of a position without a loss
INITIALIZER_RANGE = 0.08  # about hidden_size ** -0.5: at the usual 0.02 so narrow a model takes half as long again to learn
MAX_GRAD_NORM = 1.0
FILE_BATCH_SIZE = 16  # examples a step of a warm start from a file

Progress = Callable[[str], None]
Example = tuple[list[int], list[int]]  # token ids of the prompt, and of the completion with its end token


def base_model_path(model: ModelConfig, *, progress: Progress) -> Path:
    """Folder (or Hugging Face name, as given) of the model a run starts from; tokenizer included.

    ``path`` is ``embedded`` (built here), ``smollm2-135m`` (SmolLM2-135M-Instruct, from its package on the index), or any
    folder or name. With ``warm_start_file`` that model is fine-tuned on it first. Whatever is made is made once and cached, see
    ``learner.model_cache``. ``progress`` gets one line of text at a time.
    Raises DataError for a warm-start file that cannot be used.
    """
    if model.path == "embedded":
        base = _embedded(model.embedded, model.random_weights, progress)
    elif model.path == "smollm2-135m":
        base = smollm2_path(progress)
    else:
        base = Path(model.path)
    return base if model.warm_start_file is None else _from_file(model, base, progress)


# The embedded model -------------------------------------------------------------------------------------------------------------


def _embedded(recipe: EmbeddedModel, random_weights: bool, progress: Progress) -> Path:
    if random_weights:  # the weights will be thrown away: no need to train them
        recipe = dataclasses.replace(recipe, steps=0)
    key = {"kind": "embedded", "source_version": SOURCE_VERSION, **dataclasses.asdict(recipe)}
    return cached_folder("embedded", key, lambda folder: _build_embedded(recipe, folder, progress))


def _build_embedded(recipe: EmbeddedModel, folder: Path, progress: Progress) -> None:
    tokenizer = character_tokenizer()
    with _repeatable(recipe.seed):
        model = _random_model(recipe, tokenizer)
        num_parameters = sum(p.numel() for p in model.parameters())
        progress(f"building the embedded model: {num_parameters:,} parameters, {recipe.steps} warm-up steps")
        batches = _addition_batches(recipe, tokenizer)
        _train(model, batches, recipe.steps, recipe.learning_rate, tokenizer.pad_token_id, progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _random_model(recipe: EmbeddedModel, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.hidden_size // recipe.num_heads,
        intermediate_size=recipe.intermediate_size,
        tie_word_embeddings=recipe.tie_word_embeddings,
        max_position_embeddings=1024,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def _addition_batches(recipe: EmbeddedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[Example]]:
    """The batches of the warm-up: sums never held out by default, the number of digits drawn by ``digit_weights``; from
    ``noise_from`` on, some with the answer of another sum of as many digits."""
    rng = np.random.default_rng(recipe.seed)
    weights = np.asarray(recipe.digit_weights, dtype=np.float64)
    held = held_out_sums(recipe.max_digits)
    ids = tokenizer.get_vocab()
    for step in range(recipe.steps):
        noisy = step >= recipe.noise_from * recipe.steps
        batch: list[Example] = []
        for digits in 1 + rng.choice(recipe.max_digits, size=recipe.batch_size, p=weights / weights.sum()):
            a, b = _draw_sum(rng, int(digits), held)
            prompt = [tokenizer.bos_token_id, *(ids[c] for c in f"{a}+{b}=")]
            if noisy and digits > 1 and rng.random() < recipe.noise:
                a, b = _draw_sum(rng, int(digits), held)
            batch.append((prompt, [*(ids[c] for c in str(a + b)), tokenizer.eos_token_id]))
        yield batch


def _draw_sum(rng: np.random.Generator, digits: int, held: set[tuple[int, int]]) -> tuple[int, int]:
    low = 10 ** (digits - 1) if digits > 1 else 0
    while True:
        a, b = (int(x) for x in rng.integers(low, 10**digits, size=2))
        if (min(a, b), max(a, b)) not in held:
            return a, b


def held_out_sums(max_digits: int) -> set[tuple[int, int]]:
    """The sums (smaller operand first) that a run with the arithmetic source's default parameters holds out.

    The same rule as ``rollout.prompts.load_prompts``, so the two agree by construction. A source with another ``num_prompts``
    holds out others, of which the warm start may have seen some.
    """
    rows = arithmetic(name="arithmetic", reward=None, max_digits=max_digits)
    places = held_out_places([r.stratum for r in rows], [r.split_key for r in rows], DataConfig().held_out_per_stratum)
    pairs = ([int(operand) for operand in rows[place].split_key.split("+")] for place in places)
    return {(a, b) for a, b in pairs}


# A warm start from a file -------------------------------------------------------------------------------------------------------


def _from_file(model: ModelConfig, base: Path, progress: Progress) -> Path:
    """Fine-tunes ``base`` on JSON lines {prompt, completion}; the prompt is rendered as a run would by default."""
    file = Path(str(model.warm_start_file)).expanduser()
    if not file.is_file():
        raise DataError(f"model.warm_start_file: there is no file {file}")
    key = {
        "kind": "warm_start",
        "source_version": SOURCE_VERSION,
        "base": _identity(base),
        "file": hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest(),
        "steps": model.warm_start_steps,
        "learning_rate": model.warm_start_learning_rate,
    }

    def build(folder: Path) -> None:
        tokenizer = load_tokenizer(str(base), model.trust_remote_code)
        examples = _file_examples(file, tokenizer)
        progress(f"warm start of {base.name}: {len(examples)} examples, {model.warm_start_steps} steps")
        with _repeatable(0):
            network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=model.trust_remote_code)
            pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
            batches = _shuffled_batches(examples)
            _train(network, batches, model.warm_start_steps, model.warm_start_learning_rate, pad, progress)
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached_folder("warm-start", key, build)


def _identity(base: Path) -> list[str]:
    """What tells one base from another: its name, and for a folder the size and time of its files."""
    files = sorted(file for file in base.rglob("*") if file.is_file()) if base.is_dir() else []
    return [str(base), *(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]


def _file_examples(file: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    rows, completions = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{file}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not a JSON line: {error}") from error
        prompt, completion = (record.get("prompt"), record.get("completion")) if isinstance(record, dict) else (None, None)
        if not (isinstance(prompt, str) and prompt and isinstance(completion, str) and completion):
            raise DataError(f"{where}: needs the texts prompt and completion")
        rows.append(Row(str(number), prompt, "", "", None, str(number), where))
        completions.append(completion)
    if not rows:
        raise DataError(f"model.warm_start_file: {file} has no lines")
    prompts = [token_ids for _, token_ids in render(DataConfig(), tokenizer, rows)]
    answers = tokenizer(completions, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [(prompt, [*answer, tokenizer.eos_token_id]) for prompt, answer in zip(prompts, answers, strict=True)]


def _shuffled_batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(examples))
        for start in range(0, len(order), FILE_BATCH_SIZE):
            yield [examples[place] for place in order[start : start + FILE_BATCH_SIZE]]


# Supervision --------------------------------------------------------------------------------------------------------------------


def _train(
    model: PreTrainedModel, batches: Iterator[list[Example]], steps: int, peak: float, pad: int, progress: Progress
) -> None:
    """AdamW on the completion tokens: mean cross-entropy over them, 20 steps of linear warm-up, then a cosine to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.01)
    model.train()
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        token_ids, labels = _pad(next(batches), pad)
        logits = model(input_ids=torch.from_numpy(token_ids), use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels[:, 1:]).flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if (step + 1) % max(1, steps // 8) == 0:
            progress(f"warm-up step {step + 1} of {steps}, loss {loss.item():.3f}")
    model.eval()


def _pad(batch: Sequence[Example], pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids and labels, int64 [rows, longest]. Padding is on the right, where causal attention never looks."""
    longest = max(len(prompt) + len(completion) for prompt, completion in batch)
    token_ids = np.full((len(batch), longest), pad, dtype=np.int64)
    labels = np.full((len(batch), longest), IGNORED, dtype=np.int64)
    for row, (prompt, completion) in enumerate(batch):
        end = len(prompt) + len(completion)
        token_ids[row, :end] = prompt + completion
        labels[row, len(prompt) : end] = completion
    return token_ids, labels


@contextmanager
def _repeatable(seed: int) -> Iterator[None]:
    """Seeds torch and fixes its threads, so that a recipe gives the same bytes; leaves the caller's state as it was.

    One thread: the order of sums in a matrix product depends on the number of threads, and tiny models gain little from more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
