"""A reward model: a Hugging Face sequence classifier from a local folder. The only file of this package that imports torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards.contract import Abstain, RewardError, Verdict
from rollout.records import Outcome

_APART = r"\1 "  # a space behind a special token's first character makes it ordinary text


@dataclass(frozen=True, slots=True)
class _Classifier:
    model: Any
    tokenizer: Any
    label: int | None  # whose probability is the value; None: the only output is
    control: re.Pattern[str]  # the first character of each special token of the tokenizer that is written as text
    max_tokens: int | None
    pads: bool  # whether texts of several lengths may go through the model together


def reward_model(  # noqa: PLR0913
    completions: Sequence[str],
    prompts: Sequence[str],
    *,
    path: str,
    label: str | int | None = None,
    text: Literal["chat", "joined"] = "chat",
    max_tokens: int | None = None,
    too_long: Literal["cut_left", "abstain"] = "cut_left",
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> list[Verdict | Exception]:
    """What a classifier makes of prompt and completion: its only output as it is, or the probability of one of its labels.

    The accuracy is that probability, and the sigmoid of an only output; the outcome is ``none``, for no answer was compared with anything.
    A special token that a completion spells out is read as text (``< |im_end|>``): as a token it would end the completion's turn. Each
    text gets the value that it would get alone.

    Args:
        path: folder with the model and its tokenizer, safetensors, no code of its own. Loaded once a process.
        label: name or number of the label; needed where the model has several.
        text: ``chat``: prompt and completion as two turns of the tokenizer's chat template. ``joined``: one text after the other, for
            prompts that are rendered already (a run's ``prompt`` is what the policy read) and tokenizers without a template.
        max_tokens: longest text; without one, the model's own limit.
        too_long: ``cut_left`` leaves out the beginning, so that the completion's end is always read (the measure ``cut`` is 1);
            ``abstain`` does not judge it.
        device: cpu, cuda or cuda:N, counted as on the whole machine: the pool hides GPUs from its processes, but this one names its own.
        dtype: of weights and arithmetic; the value is always read in float32.

    Raises `RewardError` where the folder or the settings do not fit.
    """
    judge = _load(path, label, max_tokens, device, dtype)
    texts = [_Text.encode(judge, text, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    results: list[Verdict | Exception | None] = [None] * len(texts)
    for place, encoded in enumerate(texts):
        if encoded.is_cut and too_long == "abstain":
            results[place] = Abstain(
                f"prompt and completion have {encoded.num_tokens} tokens; {judge.max_tokens} are read at most"
            )
    left = [place for place, result in enumerate(results) if result is None]
    for places in [left] if judge.pads and left else [[place] for place in left]:
        for place, (value, accuracy) in zip(places, _evaluate(judge, [texts[p].ids for p in places]), strict=True):
            results[place] = Verdict(value, accuracy, Outcome.NONE, measures={"cut": float(texts[place].is_cut)})
    return [result for result in results if result is not None]


def _prepare(*, path: str, label: str | int | None, text: str, max_tokens: int | None, device: str, dtype: str, **_: Any) -> None:
    judge = _load(path, label, max_tokens, device, dtype)
    if text == "chat" and judge.tokenizer.chat_template is None:
        raise RewardError("text: the tokenizer has no chat template; text: joined puts the completion behind the prompt")


reward_model.prepare = _prepare  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Text:
    ids: list[int]
    num_tokens: int  # before it was cut
    is_cut: bool

    @staticmethod
    def encode(judge: _Classifier, form: str, prompt: str, completion: str) -> _Text:
        completion = judge.control.sub(_APART, completion)
        if form == "chat":
            turns = [
                {"role": "user", "content": judge.control.sub(_APART, prompt)},
                {"role": "assistant", "content": completion},
            ]
            text = judge.tokenizer.apply_chat_template(turns, tokenize=False)
        else:
            text = prompt + completion
        # A template writes the begin token itself.
        ids = judge.tokenizer(text, add_special_tokens=form == "joined", verbose=False)["input_ids"]
        is_cut = judge.max_tokens is not None and len(ids) > judge.max_tokens
        if not is_cut:
            return _Text(ids, len(ids), False)
        # The tokenizer cuts, not a slice: it keeps the special tokens that it adds at the ends.
        kept = judge.tokenizer(text, add_special_tokens=form == "joined", truncation=True, max_length=judge.max_tokens)[
            "input_ids"
        ]
        return _Text(kept, len(ids), True)


def _evaluate(judge: _Classifier, texts: Sequence[list[int]]) -> list[tuple[float, float]]:
    """Value and accuracy of each text."""
    batch = (
        judge.tokenizer.pad({"input_ids": list(texts)}, padding_side="right", return_tensors="pt")
        if len(texts) > 1
        else {"input_ids": torch.tensor([texts[0]])}
    )
    inputs = {name: tensor.to(judge.model.device) for name, tensor in batch.items()}
    with torch.inference_mode():
        logits = judge.model(**inputs).logits.float().cpu()
    if judge.label is None:
        values = logits[:, 0]
        return list(zip(values.tolist(), values.sigmoid().tolist(), strict=True))
    shares = logits.softmax(dim=-1)[:, judge.label].tolist()
    return [(share, share) for share in shares]


@lru_cache(maxsize=2)
def _load(path: str, label: str | int | None, max_tokens: int | None, device: str, dtype: str) -> _Classifier:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise RewardError(f"path: {path!r} is no folder with a model (config.json is missing); download one first")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, truncation_side="left")
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # what transformers raises for folders that it can not read
        raise RewardError(f"path: {path!r} can not be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        # Such as a language model's: its head would be made up at random.
        raise RewardError(f"path: {path!r} is no trained classifier: it has no {', '.join(missing[:3])}")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_tokens is not None and (max_tokens < 1 or (limit is not None and max_tokens > limit)):
        raise RewardError(f"max_tokens: {max_tokens} must be 1 or more, and at most the model's own limit, {limit}")
    special = [re.escape(token) for token in tokenizer.all_special_tokens if len(token) > 1]
    pad = tokenizer.pad_token_id
    return _Classifier(
        model=model.eval().to(_device(device)),
        tokenizer=tokenizer,
        label=_label(model.config, label),
        control=re.compile(rf"(?={'|'.join(special)})(.)" if special else "(?!)"),
        max_tokens=limit if max_tokens is None else max_tokens,
        # The models take the last token that is no padding for the end. Where an end token pads, that would be another one.
        pads=pad is not None and pad != tokenizer.eos_token_id and pad == model.config.get_text_config().pad_token_id,
    )


def _label(config: Any, label: str | int | None) -> int | None:
    names = {int(number): str(name) for number, name in config.id2label.items()}
    if config.num_labels == 1 and label is None:
        return None
    for number, name in names.items():
        if label in (number, name) and config.num_labels > 1:
            return number
    known = "it has one output, so leave it out" if config.num_labels == 1 else f"the model has {', '.join(names.values())}"
    raise RewardError(f"label: {label!r} is none of the model's labels; {known}")


def _device(name: str) -> torch.device:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise RewardError(f"device: {name!r} is none of cpu, cuda, cuda:N")
    if name == "cpu":
        return torch.device(name)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # read when the first GPU is used
    number = int(name.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise RewardError(f"device: {name!r} is not there; this process sees {torch.cuda.device_count()} GPUs")
    return torch.device(f"cuda:{number}")
