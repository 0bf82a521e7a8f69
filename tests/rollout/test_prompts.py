"""Rendering, the begin token, the length limit and the held-out split."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from configs.schema import DataConfig, SourceConfig, SourceKind, Template, TooLong
from rollout.held_out import held_out_places
from rollout.prompts import PromptSet, load_prompts, read_rows
from rollout.sources import DataError
from rollout.tokenizer import character_tokenizer, load_tokenizer

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
BEGIN = 1


def char_ids(text: str) -> list[int]:
    """Ids by hand: the space is 4, and printable ASCII follows in order."""
    return [ord(character) - 32 + 4 for character in text]


def chat_tokenizer(template: str = CHAT) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def self_adding_tokenizer() -> PreTrainedTokenizerFast:
    """One that writes the begin token by itself, as Llama's does."""
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BEGIN)])
    assert tokenizer("1")["input_ids"] == [BEGIN, 21]
    return tokenizer


def load(tmp_path: Path, questions: list[Any], tokenizer: PreTrainedTokenizerFast, **keys: Any) -> PromptSet:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": q, "answer": n}) + "\n" for n, q in enumerate(questions)))
    source = SourceConfig(kind=SourceKind.jsonl, path=str(file))
    data = DataConfig(sources={"rows": source}, held_out_per_stratum=0, **keys)
    return load_prompts(data, tokenizer, read_rows(data, ()))


# The character tokenizer


def test_the_character_tokenizer_returns_text_unchanged_after_a_reload(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    text = "".join(map(chr, range(32, 127))) + "\n\t a .  b ' s n't , ?  \n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*tokenizer("46")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "46"
    assert ids[:3] == char_ids(' !"')
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 128)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model\.path={tmp_path}: no tokenizer"):
        load_tokenizer(str(tmp_path))


# One begin token (B104)


@pytest.mark.parametrize("make", [character_tokenizer, self_adding_tokenizer])
def test_b104_a_raw_prompt_has_one_begin_token(tmp_path: Path, make: Any) -> None:
    (prompt,) = load(tmp_path, ["1+2="], make()).train
    assert prompt.token_ids.tolist() == [BEGIN, 21, 15, 22, 33]
    assert prompt.token_ids.dtype == "int32"
    assert prompt.text == "1+2="


@pytest.mark.parametrize("template", [CHAT, "{{ bos_token }}" + CHAT, "{{ bos_token }}{{ bos_token }}" + CHAT])
def test_b104_a_chat_prompt_has_one_begin_token_whoever_writes_it(tmp_path: Path, template: str) -> None:
    tokenizer = chat_tokenizer(template)
    (prompt,) = load(tmp_path, ["hi"], tokenizer).train
    assert prompt.token_ids.tolist() == [BEGIN, *char_ids("[user]hi[assistant]")]
    assert prompt.text.removeprefix("<bos>").removeprefix("<bos>") == "[user]hi[assistant]"


def test_a_tokenizer_without_a_begin_token_gets_none(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.bos_token = None
    (prompt,) = load(tmp_path, ["1"], tokenizer).train
    assert prompt.token_ids.tolist() == [21]


# Templates


def test_template_system_prompt_and_instruction(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chat = load(tmp_path, ["q", messages], tokenizer, system_prompt="s", instruction="i").train
    assert [prompt.text for prompt in chat] == [
        "[system]s[user]q\ni[assistant]",
        "[system]s[user]a[assistant]b[user]c\ni[assistant]",
    ]
    (raw,) = load(tmp_path, ["q"], tokenizer, template=Template.raw, instruction="i").train
    assert raw.text == "q\ni"


def test_what_needs_a_chat_template_says_so(tmp_path: Path) -> None:
    plain = character_tokenizer()
    with pytest.raises(DataError, match=r"data\.template=chat: the tokenizer has no chat template"):
        load(tmp_path, ["q"], plain, template=Template.chat)
    with pytest.raises(DataError, match=r"data\.system_prompt: raw prompts have no system message"):
        load(tmp_path, ["q"], plain, system_prompt="s")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the prompt is a list of chat messages"):
        load(tmp_path, [[{"role": "user", "content": "q"}]], plain)
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row has a system message of its own"):
        load(tmp_path, [own], chat_tokenizer(), system_prompt="s")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the tokenizer's chat template refused the messages: no system"):
        load(tmp_path, [own], chat_tokenizer("{{ raise_exception('no system') }}"))


def test_characters_that_the_tokenizer_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has characters that the tokenizer does not know: 'caf"):
        load(tmp_path, ["cafe", "caf\u00e9"], character_tokenizer())


# Length (B106): 14, 15, 16 and 39 characters and one begin token


LENGTHS = {15: "a" * 14, 16: "b" * 15, 17: "c" * 16, 40: "d" * 35 + "tail"}


def test_b106_error_names_row_and_length(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:3: the prompt has 17 tokens, data\.max_prompt_tokens is 16"):
        load(tmp_path, list(LENGTHS.values()), character_tokenizer(), max_prompt_tokens=16, too_long=TooLong.error)


def test_b106_drop_keeps_sixteen_and_counts(tmp_path: Path) -> None:
    loaded = load(tmp_path, list(LENGTHS.values()), character_tokenizer(), max_prompt_tokens=16, too_long=TooLong.drop)
    assert [len(prompt.token_ids) for prompt in loaded.train] == [15, 16]
    assert (loaded.num_too_long, loaded.num_cut) == (2, 0)
    with pytest.raises(DataError, match=r"all 4 prompts are longer than 8 tokens"):
        load(tmp_path, list(LENGTHS.values()), character_tokenizer(), max_prompt_tokens=8)


def test_b106_cut_left_keeps_the_last_ids(tmp_path: Path) -> None:
    loaded = load(tmp_path, list(LENGTHS.values()), character_tokenizer(), max_prompt_tokens=16, too_long=TooLong.cut_left)
    rows = [prompt.token_ids.tolist() for prompt in loaded.train]
    assert rows == [[BEGIN, *char_ids("a" * 14)], [BEGIN, *char_ids("b" * 15)], char_ids("c" * 16), char_ids("d" * 12 + "tail")]
    assert loaded.train[3].text == "d" * 12 + "tail"
    assert (loaded.num_too_long, loaded.num_cut) == (0, 2)
    (chat,) = load(tmp_path, ["x" * 40], chat_tokenizer(), max_prompt_tokens=16, too_long=TooLong.cut_left).train
    assert chat.text == "xxxxx[assistant]"


# Ids (B110)


def test_b110_equal_ids_of_two_sources_stay_apart(tmp_path: Path) -> None:
    sources = {}
    for name, question, gold in [("first", "2+2", 4), ("second", "3+3", 6)]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"prompt": question, "answer": gold, "id": 7}))
        sources[name] = SourceConfig(kind=SourceKind.jsonl, path=str(file), id_column="id")
    data = DataConfig(sources=sources)
    loaded = load_prompts(data, character_tokenizer(), read_rows(data, ()))
    assert [(p.id, p.source, p.text, p.answer) for p in loaded.train] == [
        ("first/7", "first", "2+2", 4),
        ("second/7", "second", "3+3", 6),
    ]


def test_no_source_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.sources: there is no prompt source"):
        read_rows(DataConfig(), ())


# The held-out split


def arithmetic_prompts(**keys: Any) -> PromptSet:
    params = {name: keys.pop(name) for name in ("max_digits", "num_prompts") if name in keys}
    data = DataConfig(sources={keys.pop("name", "sums"): SourceConfig(params=params)}, **keys)
    return load_prompts(data, character_tokenizer(), read_rows(data, ()))


def test_the_default_arithmetic_split() -> None:
    loaded = arithmetic_prompts()
    assert Counter(p.stratum for p in loaded.held_out) == {"digits_1": 20, "digits_2": 200, "digits_3": 200}
    assert Counter(p.stratum for p in loaded.train) == {"digits_1": 80, "digits_2": 4800, "digits_3": 4800}
    trained = {p.text for p in loaded.train}
    for prompt in loaded.held_out:
        a, b = prompt.text.rstrip("=").split("+")
        assert f"{b}+{a}=" not in trained
    assert not trained & {p.text for p in loaded.held_out}


def test_the_split_does_not_depend_on_names_or_other_strata() -> None:
    one = {p.text for p in arithmetic_prompts(max_digits=2).held_out}
    two = {p.text for p in arithmetic_prompts(max_digits=3, name="other").held_out}
    assert one == {text for text in two if len(text) < 7}


def test_the_split_pins_known_prompts() -> None:
    """A change of the rule would move trained prompts into the held-out set of an older run."""
    held = sorted(p.text for p in arithmetic_prompts(max_digits=1).held_out)
    texts = "0+4 0+9 1+2 1+4 1+5 2+1 2+6 2+9 4+0 4+1 5+1 6+2 6+6 6+7 7+6 7+7 7+8 8+7 9+0 9+2"
    assert held == [f"{text}=" for text in texts.split()]


KEYS = st.lists(st.sampled_from([f"k{n}" for n in range(30)]), max_size=60)


@given(keys=KEYS, limit=st.integers(0, 12), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_split_properties(keys: list[str], limit: int, shuffle: random.Random) -> None:
    held = {place: keys[place] for place in held_out_places(["s"] * len(keys), keys, limit)}
    assert len(held) <= min(limit, len(keys) // 5)
    held_keys = set(held.values())
    assert all((key in held_keys) == (place in held) for place, key in enumerate(keys))  # a key is never on both sides
    if len(set(keys)) == len(keys):
        assert len(held) == min(limit, len(keys) // 5)

    order = list(range(len(keys)))
    shuffle.shuffle(order)
    mixed = [("s", keys[place]) for place in order] + [("other", key) for key in keys]
    shuffle.shuffle(mixed)
    again = held_out_places([stratum for stratum, _ in mixed], [key for _, key in mixed], limit)
    assert Counter(mixed[place][1] for place in again if mixed[place][0] == "s") == Counter(held.values())
