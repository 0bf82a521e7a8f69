"""The real vLLM engine on CPU, untied and tied, against transformers as the independent implementation."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from configs.compose import dump_config, load_config
from rollout.engine import Engine, EngineError, OnSwap, PushError, Sampling, Wake, engine_environment

os.environ.update(engine_environment(num_threads=int(os.environ.get("OMP_NUM_THREADS", "1"))))  # before vLLM is imported

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import rollout.vllm_in_process
import rollout.vllm_weights
from orchestrator.material import make_sampling
from rollout.engine import GroupRequest
from rollout.records import Completion, Finish, Group, Purpose, Visit, sampling_seed
from rollout.tokenizer import character_tokenizer
from rollout.vllm_in_process import EngineSpec, engine_args, make_engine, sampling_params
from rollout.weights import Bucket, Manifest, TensorSpec, digest_bytes

pytestmark = pytest.mark.engine
SIZES = {
    "vocab_size": 100,  # not a multiple of 64: the engine pads it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least the CPU attention kernel takes
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPERATURE = 0.7


@dataclass
class Policy:
    """A learner stand-in: a transformers model, and pushes of it to one engine."""

    model: PreTrainedModel
    engine: Engine
    tied: bool
    generation: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Names and values as ``save_pretrained`` writes them: a tied head is left out."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self.tied:
            del state["lm_head.weight"]
        return state

    def push(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """Sends ``tensors`` (by default the model's) in three buckets and swaps."""
        self.generation += 1
        tensors = self.tensors() if tensors is None else tensors
        names = list(tensors)
        buckets = [pack(self.generation, index, {name: tensors[name] for name in names[index::3]}) for index in range(3)]
        for bucket in buckets:
            self.engine.receive(bucket)
        self.engine.swap(version, Manifest(self.generation, 3, tuple(spec for bucket in buckets for spec in bucket.specs)))

    def perturb(self, share: float, seed: int) -> None:
        """Moves every tensor by ``share`` of its own spread (of one, where it has none)."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                spread = parameter.std() if parameter.std() > 0 else 1.0
                parameter.add_(share * spread * torch.randn_like(parameter))

    def logp(self, row: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probabilities of row[1:], by transformers."""
        with torch.no_grad():
            logits = self.model(torch.tensor(row[None], dtype=torch.long)).logits[0, :-1]
        logp = torch.log_softmax(logits.double() / temperature, -1)
        return logp.gather(1, torch.tensor(row[1:, None], dtype=torch.long))[:, 0].numpy()

    def error(self, temperature: float = 1.0) -> float:
        """Largest difference between the engine's teacher-forced log-probabilities and transformers'."""
        scores = self.engine.score_tokens(ROWS, temperature)
        return max(float(np.abs(score.logp - self.logp(row, temperature)).max()) for score, row in zip(scores, ROWS, strict=True))


def pack(generation: int, index: int, tensors: dict[str, torch.Tensor]) -> Bucket:
    specs, offsets, chunks, at = [], [], [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        specs.append(
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data.nbytes, digest_bytes(data))
        )
        offsets.append(at)
        chunks += [data, np.zeros(-data.nbytes % 64, np.uint8)]
        at += data.nbytes + (-data.nbytes % 64)
    data = np.concatenate(chunks)
    data.flags.writeable = False  # as it comes out of Ray's store
    return Bucket(generation, index, tuple(specs), tuple(offsets), data)


LETTERS = [""] * 4 + [chr(code) for code in range(32, 127)] + ["\n"]  # four special tokens first
RANDOM = np.random.default_rng(0)
ROWS = [RANDOM.integers(3, 100, size=length).astype(np.int32) for length in (2, 17, 40, 96, *[9] * 18)]


def start(kind: str, folder: Path) -> Policy:
    torch.manual_seed(1)
    tied = kind == "tied"
    model: PreTrainedModel
    if tied:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, initializer_range=0.1))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False, initializer_range=0.1))
    model.eval().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    # A generation config that would change every distribution, were it read (scenario B121).
    (folder / "generation_config.json").write_text(
        '{"repetition_penalty": 1.9, "top_k": 2, "temperature": 0.2, "eos_token_id": [2, 50, 51, 52, 53]}'
    )
    spec = EngineSpec(
        name="worker-0",
        model_path=str(folder),
        tokenizer_path=str(folder),
        dtype="float32",
        seed=0,
        max_model_tokens=96,
        max_running=64,
        cache_gib=0.05,
        gpu_memory_share=0.5,
        tensor_parallel_size=1,
        on_swap=OnSwap.RECOMPUTE,
        trust_remote_code=False,
    )
    return Policy(model, make_engine(spec), tied)


@pytest.fixture(scope="module", params=["untied", "tied"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    made = start(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.engine.close()


def ask(
    number: int, *, group_size: int = 4, max_new_tokens: int = 24, seeded: bool = True, prompt_tokens: int = 12
) -> GroupRequest:
    visit = Visit(f"prompt-{number}", 0, Purpose.TRAIN)
    return GroupRequest(
        visit=visit,
        prompt_token_ids=np.random.default_rng(number).integers(3, 100, size=prompt_tokens).astype(np.int32),
        seeds=tuple(sampling_seed(7, visit, index) for index in range(group_size)) if seeded else None,
        group_size=group_size,
        sampling=Sampling(TEMPERATURE, 1.0, 0, 0.0, max_new_tokens, (2,)),
        straggler=None,
    )


def collect(engine: Engine, num: int) -> dict[str, Group]:
    groups: dict[str, Group] = {}
    while len(groups) < num:
        for group in engine.poll(30.0):
            groups[group.visit.prompt_id] = group
    return groups


def forced(policy: Policy, group: Group, completion: Completion) -> np.ndarray:
    """transformers' log-probabilities of a completion's tokens under the policy's present weights."""
    row = np.concatenate([group.prompt_token_ids, completion.token_ids])
    return policy.logp(row, TEMPERATURE)[len(group.prompt_token_ids) - 1 :]


@pytest.mark.timeout(300)
def test_a_push_makes_the_engine_agree_and_random_start_weights_do_not(policy: Policy) -> None:
    assert policy.engine.health().version == -1
    assert policy.error() > 0.5
    policy.push(0)
    assert policy.error() < 1e-4
    assert policy.error(TEMPERATURE) < 1e-4
    for version in (1, 2, 3):
        policy.perturb(0.1, seed=version)
        assert policy.error() > 1e-2  # the engine still has the old weights
        policy.push(version)
        assert policy.error() < 1e-4
    assert policy.engine.health().version == 3


def fresh(policy: Policy) -> None:
    """Pushes the model as it is: what a test before this one left behind does not matter."""
    policy.push(policy.engine.health().version + 1)


def test_what_is_sampled_is_what_the_policy_says_and_no_generation_config_is_read(policy: Policy) -> None:
    """B121, of the tokens themselves."""
    fresh(policy)
    policy.engine.submit([ask(number, group_size=8, seeded=number % 2 == 0) for number in range(6)])
    groups = collect(policy.engine, 6).values()
    tokens = np.concatenate([one.token_ids for group in groups for one in group.completions])
    assert set(range(50, 54)) <= set(tokens.tolist())  # the file calls these stop tokens: they neither stop nor are rare
    for group in groups:
        assert len({tuple(one.token_ids.tolist()) for one in group.completions}) == 8
        for one in group.completions:
            np.testing.assert_allclose(one.roll_logp, forced(policy, group, one), atol=1e-4)
            stopped = 2 in one.token_ids.tolist()
            assert one.finish is (Finish.STOP if stopped else Finish.LENGTH)
            assert one.num_tokens == (one.token_ids.tolist().index(2) + 1 if stopped else 24)
            assert one.text == "".join(LETTERS[token] for token in one.token_ids.tolist())
            assert set(one.versions.tolist()) == {policy.engine.health().version}
    assert any(one.finish is Finish.STOP for group in groups for one in group.completions)


def test_a_request_spells_out_what_a_model_folder_would_set() -> None:
    """B121: only a temperature is configured; a model's own file may name a penalty, top_k, top_p and another temperature."""
    config = load_config(["rollout.temperature=1"])
    params = sampling_params(make_sampling(config.rollout, (2,)), None)
    assert (params.temperature, params.top_p, params.min_p, params.repetition_penalty) == (1.0, 1.0, 0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty, params.min_tokens) == (0.0, 0.0, 0)
    assert params.top_k in (0, -1), "off"
    assert (params.ignore_eos, params.stop_token_ids) == (True, [2])
    stored = yaml.safe_load(dump_config(config, redact=True))["rollout"]
    assert [stored[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [1.0, 1.0, 0, 0.0], (
        "they are stored with the run"
    )


def test_the_same_seeds_give_the_same_tokens_in_another_batching(policy: Policy) -> None:
    fresh(policy)
    policy.engine.submit([ask(number) for number in range(8)])
    together = collect(policy.engine, 8)
    for number in (5, 2, 7):
        policy.engine.submit([ask(number)])
        (alone,) = collect(policy.engine, 1).values()
        for one, other in zip(alone.completions, together[alone.visit.prompt_id].completions, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.roll_logp, other.roll_logp, atol=1e-5)


def check_spans(policy: Policy, before: PreTrainedModel, groups: dict[str, Group], old: int) -> tuple[int, float]:
    """Tokens up to the swap must be the old policy's. Returns the number after it, and their largest distance from the new."""
    worst, num_after = 0.0, 0
    after = policy.model
    for group in groups.values():
        for one in group.completions:
            policy.model = before
            np.testing.assert_allclose(
                one.roll_logp[one.versions == old], forced(policy, group, one)[one.versions == old], atol=1e-4
            )
            policy.model = after
            late = one.versions == old + 1
            num_after += int(late.sum())
            worst = max(worst, float(np.abs(one.roll_logp - forced(policy, group, one))[late].max(initial=0.0)))
    return num_after, worst


@pytest.mark.parametrize("on_swap", [OnSwap.RECOMPUTE, OnSwap.KEEP])
def test_an_in_flight_swap_changes_the_policy_between_two_tokens(
    policy: Policy, on_swap: OnSwap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.engine, "_on_swap", on_swap)
    fresh(policy)
    old = policy.engine.health().version
    before = copy.deepcopy(policy.model)
    start = policy.engine.health().num_tokens
    asked = [ask(number, max_new_tokens=60) for number in range(8)]
    policy.engine.submit(asked)
    while policy.engine.health().num_tokens < start + 200:
        pass
    policy.engine.pause()
    policy.perturb(0.1, seed=99)
    policy.push(old + 1)
    policy.engine.resume()
    num_after, worst = check_spans(policy, before, groups := collect(policy.engine, 8), old)
    spanning = [one for group in groups.values() for one in group.completions if len(set(one.versions.tolist())) == 2]
    assert num_after > 100
    assert len(spanning) > 10
    if on_swap is OnSwap.RECOMPUTE:
        assert worst < 1e-4
        assert not any(one.mixed.any() for one in spanning)
    else:
        assert worst > 1e-2  # from neither policy, and flagged
        assert all(one.mixed.tolist() == (one.versions == old + 1).tolist() for one in spanning)
    # The same prompts again find nothing of the old weights in the prefix cache.
    policy.engine.submit(asked)
    for group in collect(policy.engine, 8).values():
        for one in group.completions:
            np.testing.assert_allclose(one.roll_logp, forced(policy, group, one), atol=1e-4)


@pytest.mark.parametrize("turns", [False, True], ids=["split", "colocated"])
def test_a_cached_prompt_is_not_served_from_before_a_push(policy: Policy, turns: bool) -> None:
    """B133: the same prompt before and after each of two pushes; in turns the engine slept meanwhile."""
    fresh(policy)
    for seed in (1, 2, 3):
        policy.engine.submit([ask(0, prompt_tokens=70)])  # two whole cache blocks, shared by the group
        (group,) = collect(policy.engine, 1).values()
        for one in group.completions:
            np.testing.assert_allclose(one.roll_logp, forced(policy, group, one), atol=1e-4)
        policy.perturb(0.1, seed=seed)
        if turns:
            policy.engine.sleep()
            policy.engine.wake(Wake.WEIGHTS)
        fresh(policy)
        if turns:
            policy.engine.wake(Wake.CACHE)


def read_ends(worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the embedding and of the head, which are one tensor where they are tied."""
    model = worker.model_runner.get_model()
    return model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()


def test_after_a_push_embedding_and_head_are_the_policys(policy: Policy) -> None:
    """B135: the policy's embedding changes; tied or two tensors, the engine has both as the policy has them, and the same scores."""
    fresh(policy)
    before = policy.model.get_input_embeddings().weight.detach().clone()
    policy.perturb(0.1, seed=3)
    fresh(policy)
    ((embedding, head),) = policy.engine._stepper._core.collective_rpc(read_ends)
    mine = policy.model.get_input_embeddings().weight
    assert not torch.equal(mine, before)
    assert torch.equal(embedding[: SIZES["vocab_size"]], mine)
    assert torch.equal(head[: SIZES["vocab_size"]], policy.model.lm_head.weight)
    assert torch.equal(embedding, head) == policy.tied
    assert policy.error() < 1e-5


def test_scoring_at_a_temperature_leaves_running_completions_alone(policy: Policy) -> None:
    fresh(policy)
    policy.engine.submit([ask(number, max_new_tokens=60) for number in range(8)])
    assert policy.error(0.4) < 2e-4
    assert policy.engine.health().num_running > 0
    for group in collect(policy.engine, 8).values():
        for one in group.completions:
            np.testing.assert_allclose(one.roll_logp, forced(policy, group, one), atol=1e-4)
    (scores,) = policy.engine.score_tokens([ROWS[1]], 0.4)
    with torch.no_grad():
        logits = policy.model(torch.tensor(ROWS[1][None], dtype=torch.long)).logits[0, :-1]
    chosen = logits.gather(1, torch.tensor(ROWS[1][1:, None], dtype=torch.long))
    assert scores.rank.tolist() == ((logits > chosen).sum(-1) + 1).tolist()


def test_batches_of_ever_other_sizes_do_not_take_ever_more_memory(policy: Policy) -> None:
    """Every other number of tokens is another shape of every matrix product, and kept code for all shapes would be tens of MiB."""
    for length in range(4, 97, 2):
        policy.engine.score_tokens([ROWS[3][:length]], 1.0)
    before = psutil.Process().memory_info().rss
    for length in range(5, 97, 2):
        policy.engine.score_tokens([ROWS[3][:length]], 1.0)
    assert psutil.Process().memory_info().rss - before < 8 * 2**20


Q, K, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"
SABOTAGE = {
    "a part of a fused tensor": (lambda t: t.pop(K), rf"qkv_proj.*missing {K}"),
    "another": (lambda t: t.pop(UP), rf"gate_up_proj.*missing {UP}"),
    "a norm": (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: 0 of 64 .*missing model\.norm\.weight"),
    "the embedding": (lambda t: t.pop("model.embed_tokens.weight"), "embed_tokens"),
    "a layer too many": (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[UP]}), r"layers\.2|layers"),
    "a wrong shape": (lambda t: t.update({Q: t[Q][:-1]}), "loader objects|elements arrived"),
    "a wrong name": (lambda t: t.update({"model.norm.wait": t.pop("model.norm.weight")}), "norm"),
}


@pytest.mark.parametrize("defect", SABOTAGE)
def test_tensors_that_do_not_fill_the_model_are_named_and_nothing_is_touched(policy: Policy, defect: str) -> None:
    """The manifest agrees with what is sent: only the engine can know that something is missing."""
    fresh(policy)
    version = policy.engine.health().version
    before = policy.engine.score_tokens(ROWS, 1.0)
    policy.perturb(0.1, seed=5)
    spoil, message = SABOTAGE[defect]
    spoil(tensors := policy.tensors())
    with pytest.raises(PushError, match=f"untouched.*({message})"):
        policy.push(version + 1, tensors)
    after = policy.engine.score_tokens(ROWS, 1.0)
    assert all(one.logp.tolist() == other.logp.tolist() for one, other in zip(before, after, strict=True))
    assert policy.engine.health().version == version
    policy.push(version + 1)
    assert policy.error() < 1e-4


def test_a_tied_engine_refuses_a_head_and_an_untied_one_demands_it(policy: Policy) -> None:
    tensors = policy.tensors()
    if policy.tied:
        tensors["lm_head.weight"] = policy.model.lm_head.weight.detach() * 2
    else:
        del tensors["lm_head.weight"]
    with pytest.raises(PushError, match=r"untouched.*lm_head\.weight"):
        policy.push(0, tensors)


def test_scores_show_what_no_count_can_see(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(policy)
    assert policy.error() < 1e-4
    tensors = policy.tensors()
    other = Q.replace("layers.1", "layers.0")
    tensors[Q], tensors[other] = tensors[other], tensors[Q]
    policy.push(0, tensors)
    assert policy.error() > 1e-2  # two tensors of one shape swapped
    fresh(policy)
    assert policy.error() < 1e-4
    if policy.tied:
        monkeypatch.setattr(rollout.vllm_weights, "repack_tied_heads", lambda model, tied: None)
        policy.perturb(0.1, seed=6)
        fresh(policy)
        assert policy.error() > 1e-2  # a stale tied head
        monkeypatch.undo()
        fresh(policy)
        assert policy.error() < 1e-4


def test_a_push_away_and_back_restores_every_bit(policy: Policy) -> None:
    fresh(policy)
    before = policy.engine.score_tokens(ROWS, 1.0)
    policy.push(0, {name: tensor * (1 + 2**-6) for name, tensor in policy.tensors().items()})
    assert policy.error() > 1e-2
    fresh(policy)
    after = policy.engine.score_tokens(ROWS, 1.0)
    assert all(one.logp.tolist() == other.logp.tolist() for one, other in zip(before, after, strict=True))


def test_requests_that_the_engine_could_not_run_are_refused_by_the_caller(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"90 prompt tokens and 24 new ones do not fit.*96"):
        policy.engine.submit([ask(0, prompt_tokens=90)])
    with pytest.raises(ValueError, match="vocabulary has 100"):
        policy.engine.score_tokens([np.array([5, 100], np.int32)], 1.0)
    with pytest.raises(ValueError, match="97 tokens cannot be scored"):
        policy.engine.score_tokens([np.full(97, 5, np.int32)], 1.0)
    request = ask(0)
    object.__setattr__(request, "sampling", Sampling(1.0, 1.5, 0, 0.0, 4, ()))
    with pytest.raises(ValueError, match="top_p"):
        policy.engine.submit([request])
    assert policy.engine.health().num_running == policy.engine.health().num_waiting == 0


def test_an_environment_that_would_start_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    spec = EngineSpec("w", "m", "m", "float32", 0, 8, 1, 0.1, 0.5, 1, OnSwap.KEEP, False)
    with pytest.raises(EngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        make_engine(spec)


@pytest.mark.parametrize(("cpu", "sleeps", "enabled"), [(True, True, False), (False, True, True), (False, False, False)])
def test_only_an_engine_that_shares_a_gpu_asks_for_sleep_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: bool, sleeps: bool, enabled: bool
) -> None:
    """On CPU vLLM refuses the mode, while sleep and wake themselves are taken and do nothing."""
    monkeypatch.setattr(type(rollout.vllm_in_process.current_platform), "is_cpu", lambda self: cpu)
    spec = EngineSpec("w", str(tmp_path), "m", "float32", 0, 8, 1, 0.1, 0.5, 1, OnSwap.KEEP, False, sleeps=sleeps)
    assert engine_args(spec).enable_sleep_mode is enabled
