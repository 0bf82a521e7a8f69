"""The ids of a prompt and of its completions are the same wherever they go: engine, learner, log, checkpoint. Nothing is encoded twice."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, Qwen3Config

from configs.compose import load_config
from configs.schema import DataConfig, RewardConfig, RewardPart, SourceConfig, SourceKind, TooLong
from learner.batching import pack_rows
from learner.samples import list_samples
from orchestrator.actors import RewardActor
from orchestrator.groups import group_json, read_group
from orchestrator.ledger import Pick
from orchestrator.material import request_maker
from orchestrator.pools import RayScorer
from orchestrator.stages import Address, Finished
from rollout.engine import OnSwap
from rollout.prompts import load_prompts, read_rows
from rollout.records import Consequence, Finish, Group, Outcome, Purpose, Score, ScoredGroup, Status, Visit, describe_group
from rollout.stepping import Produced, SteppingEngine
from rollout.tokenizer import character_tokenizer

pytestmark = pytest.mark.timeout(60)

BEGIN, END, NO_LOGP = 1, 2, -0.125
TWO = [[20, END], [21, 22]]
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


class Script:
    """An engine that gives the completions it was told to, a token a step, and keeps the prompt ids it was asked with."""

    def __init__(self, tokenizer, completions):
        self.tokenizer, self.completions = tokenizer, completions
        self.asked, self.running = [], {}

    def check(self, request):
        pass

    def add(self, key, prompt_token_ids, seed, sampling):
        self.asked.append(prompt_token_ids)
        self.running[key] = list(self.completions[key % len(self.completions)])

    def step(self):
        made = []
        for key, left in list(self.running.items()):
            token = left.pop(0)
            finish = None if left else Finish.STOP if token == END else Finish.LENGTH
            made.append(Produced(key, [token], [NO_LOGP * token], finish))
            if not left:
                del self.running[key]
        return made

    def decode(self, token_ids):
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def close(self):
        pass


@dataclass
class Journey:
    """Of every prompt: what the engine was asked with and the group it gave."""

    prompts: list
    asked: list[list[int]]
    groups: list[Group]

    def at_the_learner(self):
        """Rows as the learner packs them, each without its padding, and how many of them are prompt."""
        rows = []
        for group in self.groups:
            for sample in list_samples([ScoredGroup(group, (score(1.0),) * len(group.completions))]):
                packed = pack_rows([sample.row])
                rows.append((packed.input_ids[0].tolist(), len(group.prompt_token_ids)))
        return rows


def score(value):
    return Score(Status.OK, Outcome.NONE, value, value, {}, None, 0.0, "", {}, Consequence.NONE)


@pytest.fixture
def travel(tmp_path):
    """``travel(tokenizer, questions, completions, **data keys)``: prompts from a file through the run's own requests to an engine."""
    Qwen3Config(eos_token_id=END).save_pretrained(tmp_path / "model")

    def go(tokenizer, questions, completions, **keys):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"prompt": q, "answer": n}) + "\n" for n, q in enumerate(questions)))
        source = SourceConfig(kind=SourceKind.jsonl, path=str(file))
        data = DataConfig(sources={"rows": source}, held_out_per_stratum=0, **keys)
        prompts = load_prompts(data, tokenizer, read_rows(data, ())).train
        stuff = SimpleNamespace(
            tokenizer=tokenizer, model_path=str(tmp_path / "model"), num_gpus=0, by_id={prompt.id: prompt for prompt in prompts}
        )
        request = request_maker(load_config([f"batch.group_size={len(completions)}"]), stuff)
        script = Script(tokenizer, completions)
        engine = SteppingEngine("w", lambda: script, on_swap=OnSwap.RECOMPUTE, max_running=64, first_version=0)
        groups = []
        try:
            engine.submit([request(Visit(prompt.id, 0, Purpose.TRAIN)) for prompt in prompts])
            while len(groups) < len(prompts):
                groups += engine.poll(20.0)
        finally:
            engine.close()
        groups.sort(key=lambda group: [prompt.id for prompt in prompts].index(group.visit.prompt_id))
        return Journey(prompts, script.asked[:: len(completions)], groups)

    return go


def char_ids(text):
    """Ids by hand: the space is 4, and printable ASCII follows in order."""
    return [ord(character) - 32 + 4 for character in text]


def with_template(template):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def self_adding():
    """One that writes the begin token by itself, as Llama's does."""
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BEGIN)])
    return tokenizer


TOKENIZERS = {
    "raw": (character_tokenizer, "hi"),
    "raw, tokenizer adds it": (self_adding, "hi"),
    "chat": (lambda: with_template(CHAT), "[user]hi[assistant]"),
    "chat, template writes it": (lambda: with_template("{{ bos_token }}" + CHAT), "[user]hi[assistant]"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_b104_one_begin_token_and_the_same_ids_at_engine_learner_and_log(name, travel):
    make, text = TOKENIZERS[name]
    expected = [BEGIN, *char_ids(text)]
    journey = travel(make(), ["hi"], TWO)
    assert journey.asked == [expected]
    assert journey.at_the_learner() == [([*expected, *sampled], len(expected)) for sampled in TWO]
    assert logged(journey)["prompt_token_ids"] == expected


def logged(journey):
    (group,) = journey.groups
    return group_json(Pick(0, group.visit), (score(1.0),) * len(group.completions), group)


# 14, 15, 16 and 39 characters behind a begin token
QUESTIONS = ["a" * 14, "b" * 15, "c" * 16, "d" * 35 + "tail"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"too_long": TooLong.drop}, [[BEGIN, *char_ids("a" * 14)], [BEGIN, *char_ids("b" * 15)]]),
        (
            {"too_long": TooLong.cut_left},
            [[BEGIN, *char_ids("a" * 14)], [BEGIN, *char_ids("b" * 15)], char_ids("c" * 16), char_ids("d" * 12 + "tail")],
        ),
    ],
    ids=["drop", "cut left"],
)
def test_b106_what_is_left_of_long_prompts_is_the_same_at_engine_and_learner(keys, expected, travel):
    journey = travel(character_tokenizer(), QUESTIONS, TWO, max_prompt_tokens=16, **keys)
    assert journey.asked == expected
    assert [row[:length] for row, length in journey.at_the_learner()[:: len(TWO)]] == expected


def test_b106_the_end_of_a_template_stays_whole_at_the_engine(travel):
    journey = travel(with_template(CHAT), ["x" * 40], TWO, max_prompt_tokens=16, too_long=TooLong.cut_left)
    assert journey.asked == [char_ids("xxxxx[assistant]")]


def test_b115_masks_come_from_lengths_and_not_from_ids(travel):
    """3 tokens and no stop, 2 with one, 5 to the limit; and one whose ids are those of padding and of the end token, sampled in its
    middle."""
    completions = [[5, 6, 7], [5, END], [5, 6, 7, 8, 9], [0, END, 0]]
    (group,) = travel(character_tokenizer(), ["hi"], completions).groups
    samples = list_samples([ScoredGroup(group, (score(1.0),) * 4)])
    packed = pack_rows([sample.row for sample in samples])
    width = packed.input_ids.shape[1]
    mask = np.zeros(packed.input_ids.shape, dtype=int)
    mask[packed.responses, packed.positions % width + 1] = 1
    assert mask[:, : len(group.prompt_token_ids)].sum() == 0
    rows = ["".join(map(str, row)) for row in mask[:, len(group.prompt_token_ids) :].tolist()]
    assert rows == ["11100", "11000", "11111", "11100"]
    assert packed.targets.tolist() == [token for completion in completions for token in completion]


HE, LLO, HELLO = 4, 5, 6


def merging_tokenizer():
    """Encodes ``hello`` as one token, although ``he`` and ``llo`` are tokens too."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", "he", "llo", "hello", *"[]userahit?"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"hello|he|llo|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template="{{ bos_token }}" + CHAT.replace("assistant", "a"), **names
    )
    assert made("hello")["input_ids"] == [HELLO]
    return made


def test_b119_generated_text_is_never_encoded_again(travel, monkeypatch):
    """Two turns of a chat; the engine spells `hello` as `he` and `llo`. Its ids and log-probabilities reach the learner and come back
    out of a checkpoint as they were sampled. Only the prompts were encoded, once and before anything was asked."""
    encoded = []
    plain = PreTrainedTokenizerFast._encode_plus

    def spy(self, text, *args, **kwargs):
        encoded.append(text)
        return plain(self, text, *args, **kwargs)

    tokenizer = merging_tokenizer()
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", spy)
    turns = [{"role": "user", "content": "hi"}, {"role": "a", "content": "hello"}, {"role": "user", "content": "hi?"}]
    journey = travel(tokenizer, [turns], [[HE, LLO, END], [HELLO, END]])
    row = logged(journey)
    _, _, group = read_group(json.loads(json.dumps(row)))
    at_the_learner = Journey(journey.prompts, journey.asked, [group]).at_the_learner()
    assert encoded == [["<bos>[user]hi[a]hello[user]hi?[a]"]]
    assert [completion.text for completion in group.completions] == ["hello", "hello"]
    assert [ids[length:] for ids, length in at_the_learner] == [[HE, LLO, END], [HELLO, END]]
    samples = list_samples([ScoredGroup(group, (score(1.0), score(0.0)))])
    for sample, sampled in zip(samples, ([HE, LLO, END], [HELLO, END]), strict=True):
        assert sample.completion.token_ids.tolist() == sampled
        assert sample.completion.roll_logp.tolist() == [NO_LOGP * token for token in sampled]


class Parcel(list):
    """Groups under one reference, as Ray's store holds them."""

    __hash__ = object.__hash__


class Call:
    def __init__(self, call):
        self._call = call

    async def remote(self, *arguments):
        return self._call(*arguments)


async def test_b110_equal_ids_of_two_sources_are_judged_by_their_own_answers(tmp_path):
    """Both files have a row `7`; the model answers 4 to 2+2 and 6 to 3+3."""
    sources = {}
    for name, question, gold in [("first", "2+2", 4), ("second", "3+3", 6)]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"prompt": question, "answer": gold, "id": 7}))
        sources[name] = SourceConfig(kind=SourceKind.jsonl, path=str(file), id_column="id")
    data = DataConfig(sources=sources)
    tokenizer = character_tokenizer()
    prompts = load_prompts(data, tokenizer, read_rows(data, ())).train
    script = Script(tokenizer, [[*char_ids("4"), END], [*char_ids("6"), END]])
    engine = SteppingEngine("w", lambda: script, on_swap=OnSwap.RECOMPUTE, max_running=8, first_version=0)
    stuff = SimpleNamespace(tokenizer=tokenizer, model_path=str(tmp_path), num_gpus=0, by_id={p.id: p for p in prompts})
    Qwen3Config(eos_token_id=END).save_pretrained(tmp_path)
    request = request_maker(load_config(["batch.group_size=2"]), stuff)
    pool = RewardActor(RewardConfig(parts={"exact_integer": RewardPart(function="exact_integer")}))
    finished = []
    try:
        engine.submit([request(Visit(prompt.id, 0, Purpose.TRAIN)) for prompt in prompts])
        while len(finished) < 2:
            parcel = Parcel(engine.poll(20.0))
            finished += [Finished(describe_group(group), Address(parcel, place)) for place, group in enumerate(parcel)]
        scorer = RayScorer({"node": SimpleNamespace(score=Call(pool.score))}, lambda worker: "node", stuff.by_id, replace=None)
        scored = {item.meta.visit.prompt_id: [score.value for score in item.scores] for item in await scorer.score(finished)}
    finally:
        pool.close()
        engine.close()
    assert scored == {"first/7": [1.0, 0.0], "second/7": [0.0, 1.0]}
