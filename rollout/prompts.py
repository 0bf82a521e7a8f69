"""From rows to prompts: rendered, tokenized once, measured against the limit, and split into training and held-out.

The ids made here are the only ones: the engine, the learner and the log all get them, and nothing is encoded a second time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.schema import DataConfig, Template, TooLong
from rollout.held_out import held_out_places
from rollout.records import Prompt
from rollout.sources import DataError, Question, Row, load_rows

ROWS_AT_ONCE = 8192  # rows rendered and tokenized together: enough for the tokenizer's threads, little in memory


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a run. Both parts keep the order of the sources and of their rows."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    num_too_long: int  # prompts left out for being longer than the limit (``too_long: drop``)
    num_cut: int  # prompts that lost their beginning (``too_long: cut_left``)


def read_rows(data: DataConfig, reward_parts: Collection[str]) -> list[tuple[str, Row]]:
    """The rows of all sources, each with the name of its source. No model is needed, so a run reads them before it builds one.

    Raises DataError, see ``rollout.sources.load_rows``.
    """
    if not data.sources:
        raise DataError("data.sources: there is no prompt source; data=arithmetic has one")
    return [(name, row) for name, source in data.sources.items() for row in load_rows(name, source, reward_parts)]


def load_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[str, Row]]) -> PromptSet:
    """The prompts of the rows that ``read_rows`` gave; ids are ``source/id``, so that equal ids of two sources stay apart.

    A prompt as long as ``max_prompt_tokens`` is allowed. ``cut_left`` keeps exactly the last ``max_prompt_tokens`` ids: the end
    of the template stays whole, and what is cut away includes the begin token.
    Raises DataError for a prompt that is too long under ``too_long: error``, where all are left out, and see :func:`render`.
    """
    prompts, keys = [], []
    num_too_long = num_cut = 0
    for (name, row), (full_text, full_ids) in zip(rows, render(data, tokenizer, [row for _, row in rows]), strict=True):
        text, token_ids = full_text, full_ids
        if len(full_ids) > data.max_prompt_tokens:
            if data.too_long is TooLong.error:
                raise DataError(
                    f"{row.where}: the prompt has {len(full_ids)} tokens, data.max_prompt_tokens is {data.max_prompt_tokens}; "
                    "raise it, or set data.too_long to drop or cut_left"
                )
            if data.too_long is TooLong.drop:
                num_too_long += 1
                continue
            num_cut += 1
            token_ids = full_ids[-data.max_prompt_tokens :]
            text = tokenizer.decode(token_ids)
        ids = np.asarray(token_ids, dtype=np.int32)
        prompts.append(Prompt(f"{name}/{row.id}", name, row.stratum, text, ids, row.answer, row.reward))
        keys.append(row.split_key)
    if not prompts:
        raise DataError(f"data.max_prompt_tokens: all {num_too_long} prompts are longer than {data.max_prompt_tokens} tokens")
    held = held_out_places([prompt.stratum for prompt in prompts], keys, data.held_out_per_stratum)
    return PromptSet(
        train=tuple(prompt for place, prompt in enumerate(prompts) if place not in held),
        held_out=tuple(prompt for place, prompt in enumerate(prompts) if place in held),
        num_too_long=num_too_long,
        num_cut=num_cut,
    )


def render(data: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> Iterator[tuple[str, list[int]]]:
    """Text and token ids of each row: through the chat template, or raw.

    Either way the ids start with exactly one begin token where the tokenizer has one, whether or not the template or the
    tokenizer writes it. The text of a raw prompt does not show it.
    Raises DataError for chat messages or a system prompt without a chat template, for a row that the template refuses, and for
    characters that the tokenizer does not know.
    """
    chat = data.template is Template.chat or (data.template is Template.auto and bool(tokenizer.chat_template))
    if chat and not tokenizer.chat_template:
        raise DataError("data.template=chat: the tokenizer has no chat template; set data.template=raw")
    if data.system_prompt is not None and not chat:
        raise DataError(
            "data.system_prompt: raw prompts have no system message; use data.instruction, or a model with a chat template"
        )
    begin, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    if unknown in (begin, tokenizer.eos_token_id, tokenizer.pad_token_id):  # such a tokenizer knows every byte
        unknown = None
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        texts = [_chat_text(data, tokenizer, row) if chat else _raw_text(data, row) for row in part]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for row, text, token_ids in zip(part, texts, encoded, strict=True):
            if unknown is not None and unknown in token_ids:
                raise DataError(f"{row.where}: the prompt has characters that the tokenizer does not know: {text[:60]!r}")
            yield text, _with_one_begin_token(token_ids, begin)


def _with_one_begin_token(token_ids: list[int], begin: int | None) -> list[int]:
    if begin is None:
        return token_ids
    start = 0
    while start < len(token_ids) and token_ids[start] == begin:
        start += 1
    return [begin, *token_ids[start:]]


def _raw_text(data: DataConfig, row: Row) -> str:
    if not isinstance(row.question, str):
        raise DataError(f"{row.where}: the prompt is a list of chat messages, which needs a tokenizer with a chat template")
    return _instructed(row.question, data.instruction)


def _chat_text(data: DataConfig, tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    messages: list[dict[str, Any]] = _messages(row.question, data.instruction)
    if data.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError(f"{row.where}: the row has a system message of its own; unset data.system_prompt")
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise DataError(f"{row.where}: the tokenizer's chat template refused the messages: {error}") from error


def _messages(question: Question, instruction: str | None) -> list[dict[str, Any]]:
    if isinstance(question, str):
        return [{"role": "user", "content": _instructed(question, instruction)}]
    *before, last = question
    return [*before, {**last, "content": _instructed(last["content"], instruction)}]


def _instructed(question: str, instruction: str | None) -> str:
    return question if instruction is None else f"{question}\n{instruction}"
