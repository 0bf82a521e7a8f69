"""The schema of a run: every key, its type, its default and what it means.

Plain dataclasses for OmegaConf, whose limits shape them: no ``Literal``, no unions, no tuples; a choice is an enum whose
members are written in lower case, and what a sweep may touch is a map by name, never a list. Choosing among functions
(``algorithm``, ``advantage``, ``weighting`` ...) is always ``{name, params}``; ``params`` is checked against the chosen function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def knob(default: Any, help: str, *, needed: bool = False) -> Any:
    """A documented field. A list, a dict or a factory (a dataclass type, say) becomes a fresh value for each instance.

    ``needed``: an entry of a map by name is refused without it, so that a typo in a name makes no entry of its own.
    """
    metadata = {"help": help, "needed": needed}
    if isinstance(default, type) or (callable(default) and not isinstance(default, Enum)):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        kind: Callable[[], Any] = lambda: type(default)(default)  # noqa: E731
        return field(default_factory=kind, metadata=metadata)
    return field(default=default, metadata=metadata)


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Attention(Enum):
    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


class SourceKind(Enum):
    arithmetic = "arithmetic"
    jsonl = "jsonl"
    parquet = "parquet"
    datasets = "datasets"
    reasoning_gym = "reasoning_gym"


class Template(Enum):
    auto = "auto"
    chat = "chat"
    raw = "raw"


class TooLong(Enum):
    error = "error"
    drop = "drop"
    cut_left = "cut_left"


class LastBatch(Enum):
    wrap = "wrap"
    keep = "keep"
    drop = "drop"


class EngineForm(Enum):
    in_process = "in_process"
    async_core = "async_core"


class Transport(Enum):
    local = "local"
    nccl = "nccl"
    ipc = "ipc"


class OnSwap(Enum):
    recompute = "recompute"
    keep = "keep"
    finish = "finish"


class Late(Enum):
    correct = "correct"
    wait = "wait"
    drop = "drop"


class Auto(Enum):
    auto = "auto"


class WhenShort(Enum):
    train = "train"
    carry = "carry"
    stop = "stop"


class Seeds(Enum):
    auto = "auto"
    always = "always"
    never = "never"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Combine(Enum):
    sum = "sum"
    min = "min"
    product = "product"


class Optimizer(Enum):
    adamw = "adamw"
    sgd = "sgd"


class Reference(Enum):
    off = "off"
    frozen = "frozen"


class KlKind(Enum):
    off = "off"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_plus = "k3_plus"


class KlPlace(Enum):
    loss = "loss"
    reward = "reward"


class KlRatio(Enum):
    none = "none"
    through = "through"
    detached = "detached"


class KlFilter(Enum):
    all = "all"
    low_entropy = "low_entropy"


class Aggregation(Enum):
    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    token_sum_norm = "token_sum_norm"


class Placement(Enum):
    split = "split"
    colocated = "colocated"


class Console(Enum):
    auto = "auto"
    live = "live"
    plain = "plain"
    off = "off"


@dataclass
class EmbeddedModel:
    """The tiny model that `limen build-model` makes: a Qwen3 architecture with a character tokenizer."""

    hidden_size: int = knob(96, "width of the model")
    num_layers: int = knob(3, "transformer layers")
    num_heads: int = knob(3, "attention heads")
    num_kv_heads: int = knob(3, "key and value heads")
    intermediate_size: int = knob(256, "width of the feed-forward layers")
    tie_word_embeddings: bool = knob(True, "whether the output head is the input embedding")
    steps: int = knob(1000, "supervised warm-up steps; 0 leaves the model random")
    batch_size: int = knob(64, "examples a warm-up step")
    learning_rate: float = knob(3.0e-3, "peak learning rate of the warm-up (AdamW, cosine to a tenth)")
    max_digits: int = knob(3, "additions of 1 to this many digits")
    digit_weights: list[float] = knob([2.0, 6.0, 3.0], "how often each number of digits is drawn in the warm-up")
    noise: float = knob(0.4, "share of the sums beyond one digit that get a wrong answer at the end of the warm-up")
    noise_from: float = knob(0.85, "share of the warm-up after which that noise begins")
    seed: int = knob(0, "of the initial weights and of the warm-up's examples")


@dataclass
class ModelConfig:
    path: str = knob("embedded", "`embedded`, a folder, or a Hugging Face name of a causal language model")
    dtype: Dtype = knob(Dtype.float32, "of the learner's compute weights and of the engine")
    attention: Attention = knob(Attention.sdpa, "attention kernel of the learner")
    trust_remote_code: bool = knob(False, "whether code that comes with a model may run")
    random_weights: bool = knob(False, "start from random weights in the shape of the model (tests and benchmarks)")
    warm_start_file: str | None = knob(None, "JSONL of {prompt, completion}: `limen build-model` fine-tunes `path` on it first")
    warm_start_steps: int = knob(200, "supervised steps over `warm_start_file`")
    warm_start_learning_rate: float = knob(1.0e-4, "learning rate of that warm start")
    embedded: EmbeddedModel = knob(EmbeddedModel, "recipe of the embedded model, used when path is `embedded`")


@dataclass
class SourceConfig:
    """One prompt source. Columns that do not apply to its kind are ignored only where they keep their default."""

    kind: SourceKind = knob(SourceKind.arithmetic, "where the prompts come from", needed=True)
    path: str | None = knob(None, "file, folder or hub name (jsonl, parquet, datasets)")
    subset: str | None = knob(None, "configuration name of a Hugging Face dataset")
    split: str = knob("train", "split of a Hugging Face dataset")
    prompt_column: str = knob("prompt", "column of the question: a string, or a list of chat messages")
    answer_column: str = knob("answer", "column of the reference answer")
    id_column: str | None = knob(None, "column of a stable id; without one the id is a hash of prompt and answer")
    stratum_column: str | None = knob(None, "column of the stratum; without one the stratum is the source's name")
    reward: str | None = knob(None, "name of the one reward part that judges this source; without one, all of them")
    reward_column: str | None = knob(
        None, "column with the name of the one reward part that judges the row, in place of `reward`"
    )
    params: dict[str, Any] = knob(
        {}, "of the generator: arithmetic {max_digits, num_prompts}, reasoning_gym {task, num_prompts, ...}"
    )


@dataclass
class DataConfig:
    sources: dict[str, SourceConfig] = knob({}, "prompt sources by name")
    template: Template = knob(
        Template.auto,
        "`chat` applies the tokenizer's chat template, `raw` puts one begin token first, `auto` takes chat where the tokenizer has one",
    )
    system_prompt: str | None = knob(None, "system message of the chat template")
    instruction: str | None = knob(None, "text put after every question, such as 'Answer with just the number.'")
    max_prompt_tokens: int = knob(512, "longest prompt, in tokens, after the template")
    too_long: TooLong = knob(TooLong.drop, "what happens to a longer one; drops are counted")
    held_out_per_stratum: int = knob(200, "held-out prompts a stratum, by hash of the id; at most a fifth of the stratum")
    shuffle: bool = knob(True, "whether each epoch has its own seeded order")
    num_epochs: float | None = knob(None, "length of the run in passes over the training prompts, in place of `steps`")
    last_batch: LastBatch = knob(LastBatch.wrap, "the end of an epoch: go on into the next, keep a short batch, or drop it")


@dataclass
class BatchConfig:
    groups_per_step: int = knob(64, "kept groups a step")
    group_size: int = knob(8, "completions a group")
    num_mini_batches: int = knob(4, "optimizer steps a pass over the rollout batch")
    num_passes: int = knob(1, "passes over the rollout batch")
    tokens_per_micro_batch: int = knob(8192, "padded tokens of one forward and backward")


@dataclass
class StragglerConfig:
    """Groups that are trained without their last members. Which these are depends on the clock."""

    after_s: float | None = knob(
        None,
        "seconds that all members of a group may run before it is given out without the unfinished ones; without one, never: a run "
        "with it does not repeat, and learns from short answers first",
    )
    min_finished: int = knob(2, "how many members must have finished before that")


@dataclass
class RolloutConfig:
    num_workers: int = knob(1, "rollout workers, one engine each")
    engine: EngineForm = knob(EngineForm.in_process, "form of the engine; `async_core` is written but untested")
    tensor_parallel_size: int = knob(1, "devices of one engine")
    max_new_tokens: int = knob(16, "token limit of a completion")
    temperature: float = knob(1.0, "sampling temperature; the learner divides its logits by the same")
    top_p: float = knob(1.0, "nucleus sampling; 1 is off")
    top_k: int = knob(0, "0 is off")
    min_p: float = knob(0.0, "0 is off")
    seeds: Seeds = knob(Seeds.auto, "a sampling seed for every completion; auto is always on CPU")
    max_lag: int = knob(0, "how many versions ahead of its generation a group may be consumed; 0 is synchronous")
    late: Late = knob(
        Late.correct,
        "groups with tokens older than `max_lag`: trained all the same (see `correction`), kept from becoming so by a batch that waits for "
        "visits whose turn it is, or dropped, which loses long answers first",
    )
    max_token_lag: int | None = knob(
        None, "for `late=drop`: versions behind at which a token's group is still trained; without one, `max_lag`"
    )
    on_swap: OnSwap = knob(OnSwap.recompute, "what happens to running requests when weights are swapped")
    transport: Transport = knob(
        Transport.local,
        "how pushed weights travel: `local` through Ray's object store; between GPUs `nccl`, or `ipc` on one GPU: both written, never run",
    )
    oversample: float | Auto = knob(
        1.0,
        "open visits beyond `max_lag`, in batches: above 1 keeps the engines full while a filtered batch fills, and above lag 0 makes as much older "
        "what is trained; `auto`: one over the share of groups that was kept lately, at most 4",
    )
    max_visits_per_step: int | None = knob(None, "bound on the visits of one step, refills included; without one, 8 batches")
    when_short: WhenShort = knob(
        WhenShort.carry,
        "when that bound is met before the batch is full: train on what there is, carry it into the next step, or stop",
    )
    max_running: int = knob(256, "completions an engine decodes at once")
    cache_gib: float = knob(0.5, "key and value cache of one engine on CPU, in GiB")
    gpu_memory_share: float = knob(0.85, "share of a GPU's memory an engine may take")
    max_model_tokens: int | None = knob(None, "longest prompt plus completion; without one, max_prompt_tokens + max_new_tokens")
    num_threads: int | None = knob(None, "threads of an engine on CPU; without one, set by the plan")
    straggler: StragglerConfig = knob(StragglerConfig, "groups that are trained without their last members")
    record: bool = knob(False, "whether every kept group is written whole to the run's folder")
    source_run: str | None = knob(
        None, "folder of a run made with `rollout.record=true`: its groups are trained on, and no engine runs"
    )


@dataclass
class OptimizerConfig:
    name: Optimizer = knob(Optimizer.adamw, "adamw or sgd")
    learning_rate: float = knob(1.0e-6, "peak learning rate")
    beta1: float = knob(0.9, "AdamW's first moment decay")
    beta2: float = knob(0.999, "AdamW's second moment decay")
    eps: float = knob(1.0e-8, "AdamW's epsilon")
    weight_decay: float = knob(0.0, "decoupled weight decay")
    schedule: Schedule = knob(Schedule.constant, "of the learning rate after the warm-up")
    warmup_steps: int = knob(0, "optimizer steps of linear warm-up")
    warmup_ratio: float = knob(0.0, "warm-up as a share of all optimizer steps, in place of `warmup_steps`")
    min_learning_rate_ratio: float = knob(0.0, "floor of the schedule, as a share of the peak")
    max_grad_norm: float = knob(1.0, "gradient clipping; 0 is off")


@dataclass
class LearnerConfig:
    num_ranks: int = knob(1, "learner ranks, one device each")
    zero_stage: int = knob(0, "DeepSpeed ZeRO stage, 0 to 3; bfloat16 needs 1 or higher")
    gradient_checkpointing: bool = knob(False, "recompute activations in the backward")
    head_chunk_rows: int = knob(256, "rows of the token-logprob head computed at once")
    reference: Reference = knob(Reference.off, "frozen reference policy for the KL term")
    num_threads: int | None = knob(None, "threads of a rank on CPU; without one, set by the plan")
    max_skipped_steps: int = knob(3, "non-finite optimizer steps in a row before the run stops")
    bucket_mib: int = knob(64, "size of one bucket of a weight push, in MiB")
    export_shard_mib: int = knob(4096, "size of one file of the model in a checkpoint, in MiB")
    optimizer: OptimizerConfig = knob(OptimizerConfig, "optimizer and schedule")


@dataclass
class KlConfig:
    kind: KlKind = knob(KlKind.off, "estimator; needs `learner.reference=frozen`")
    beta: float = knob(0.0, "its coefficient")
    place: KlPlace = knob(KlPlace.loss, "a term of the loss, or taken from the reward before the advantage")
    ratio: KlRatio = knob(KlRatio.none, "in the loss: multiplied by pi / pi_old or not, with the gradient through it or not")
    token_filter: KlFilter = knob(KlFilter.all, "in the loss: of all tokens, or of the low-entropy ones of each response")
    entropy_quantile: float = knob(0.8, "share of a response's tokens that count as low-entropy for `token_filter`")


@dataclass
class AdaptiveEntropyConfig:
    target: float | None = knob(None, "entropy in nats a token that the bonus steers to; without one, it stays `entropy_beta`")
    gain: float = knob(0.001, "change of the coefficient a step and nat below the target")
    max_beta: float = knob(0.01, "bound of the coefficient")


@dataclass
class AlgorithmConfig:
    name: str = knob("aspo", "surrogate: a name, a dotted path, or `file.py:function`")
    params: dict[str, Any] = knob({}, "keyword parameters of the surrogate")
    aggregation: Aggregation = knob(Aggregation.seq_mean_token_mean, "how token losses become one number")
    kl: KlConfig = knob(KlConfig, "KL to the reference")
    entropy_beta: float = knob(0.0, "coefficient of the exact entropy bonus")
    adaptive_entropy: AdaptiveEntropyConfig = knob(AdaptiveEntropyConfig, "moves that coefficient towards a target entropy")
    aux_scale: float = knob(0.0, "coefficient of the load-balancing loss of a mixture of experts' routers")
    mask_truncated: bool = knob(False, "leave completions that hit the token limit out of the loss")


@dataclass
class Choice:
    """A function chosen by name, by dotted path or as `file.py:function`, and its keyword parameters."""

    name: str = knob("none", "name, dotted path, or `file.py:function`")
    params: dict[str, Any] = knob({}, "keyword parameters of the function")


@dataclass
class RewardPart:
    function: str = knob("", "a verifier's name, a dotted path, or `file.py:function`", needed=True)
    params: dict[str, Any] = knob({}, "keyword parameters of the verifier")
    weight: float = knob(
        1.0, "factor of its value in the value that trains; 0 leaves it out: it gates, filters or is logged only"
    )
    accuracy: bool = knob(True, "whether its accuracy counts in the one that filters")
    sources: list[str] = knob([], "data sources whose completions it judges; empty is all")
    needs: str | None = knob(
        None, "another part as a gate: where its accuracy is below 0.5 this one is not called and has value 0 and accuracy 0"
    )
    clip_min: float | None = knob(None, "lower bound of its own value, before the weight")
    clip_max: float | None = knob(None, "upper bound of its own value, before the weight")
    timeout_s: float | None = knob(None, "deadline of one of its calls; without one, reward.timeout_s")
    num_processes: int | None = knob(None, "processes of its own on each node; without any it shares reward.num_workers")
    memory_gib: float | None = knob(None, "address space of one of its own processes, in GiB; without one, reward.memory_gib")
    concurrency: int = knob(1, "calls of an async verifier under way at once in one of its own processes")
    batch_size: int = knob(32, "most completions in one call of a batch verifier")
    confined: bool = knob(
        False,
        "once loaded, its own processes give up the network, writing files and starting processes: for verifiers that run answers",
    )
    on_error: str = knob(
        "drop_sample", "drop_sample, drop_group, zero, fail, retry(N) or retry(N, one of these): the verifier failed"
    )
    on_timeout: str = knob("drop_sample", "the same where a call passed its deadline")
    on_invalid: str = knob("drop_sample", "the same where the reference answer is unusable")
    on_abstain: str = knob("drop_sample", "the same where the verifier declined to judge")


@dataclass
class RewardConfig:
    parts: dict[str, RewardPart] = knob({}, "reward parts by name")
    combine: Combine = knob(Combine.sum, "the parts' weighted values become one by their sum, the smallest, or their product")
    clip_min: float | None = knob(None, "lower bound of the combined value")
    clip_max: float | None = knob(None, "upper bound of the combined value")
    num_workers: int = knob(1, "verifier processes a node, shared by the parts without processes of their own")
    timeout_s: float = knob(10.0, "deadline of one call of a verifier; the clock starts when the call starts")
    memory_gib: float | None = knob(
        None, "address space of one verifier process, in GiB; what asks for more fails; without one, no limit"
    )
    items_per_process: int | None = knob(None, "a verifier process is replaced after so many completions; without one, never")
    max_failed_share: float = knob(
        0.5,
        "share of the completions of a step, or of an evaluation, that may be without a verdict, zeroed ones included, before the run "
        "stops",
    )


@dataclass
class ServeConfig:
    """`limen serve-reward`."""

    host: str = knob("127.0.0.1", "address to listen on; one that other machines can reach needs serve.token_env")
    port: int = knob(8400, "port to listen on; 0 takes a free one, which the first line of output names")
    token_env: str | None = knob(
        None, "environment variable that holds the token callers must send; without one, none is asked for"
    )
    max_body_mib: float = knob(32.0, "largest request, in MiB")
    max_requests: int = knob(32, "requests under way at once; further ones are told to come back (503)")


@dataclass
class EvaluationConfig:
    every: int = knob(0, "steps between evaluations during training; 0 is none")
    before: bool = knob(True, "evaluate version 0")
    after: bool = knob(True, "evaluate the last version")
    num_samples: int = knob(4, "completions a held-out prompt; pass@k and avg@k are computed for k up to this")
    max_prompts_per_stratum: int | None = knob(None, "take only this many held-out prompts of each stratum")


@dataclass
class SampleConfig:
    """What `limen sample` asks."""

    prompts: list[str] = knob([], "questions to complete, rendered like those of the data; without any, held-out prompts")
    num_prompts: int = knob(5, "how many held-out prompts, where no questions are given")


@dataclass
class CheckpointConfig:
    every: int = knob(50, "steps between checkpoints; 0 saves only at the end")
    keep_last: int = knob(2, "newest checkpoints kept")
    keep_best: bool = knob(True, "keep beside them the one with the best held-out pass@1, among those whose step was evaluated")


@dataclass
class LedgerConfig:
    """What is remembered of the prompts and their visits."""

    half_life_versions: float = knob(50.0, "versions after which what a prompt has shown weighs half: the policy moves")
    stuck_after_steps: int = knob(20, "steps after which a visit that is still open is told of in events.jsonl")


@dataclass
class DeadlinesConfig:
    """How long the driver waits for each stage before it names the owner and acts."""

    start_s: float = knob(300.0, "actors to start, models to load, the first push to be proven")
    generate_s: float = knob(600.0, "the next finished group while visits are running")
    score_s: float = knob(300.0, "a group's scores")
    prepare_s: float = knob(600.0, "log-probabilities, advantages and weights of a batch")
    train_s: float = knob(1800.0, "the optimizer steps of a batch")
    receive_s: float = knob(
        60.0, "an engine to take one bucket of a push, to swap, or to score the tokens of a proof: one that does not is replaced"
    )
    push_s: float = knob(300.0, "weights to be gathered, received, swapped and proven")
    turn_s: float = knob(120.0, "colocated: engines to sleep or wake, or the learner to lay its states aside or take them back")
    evaluate_s: float = knob(1800.0, "one evaluation")
    checkpoint_s: float = knob(600.0, "one checkpoint")
    close_s: float = knob(30.0, "an actor to end")
    grace_s: float | None = knob(
        None,
        "from SIGTERM or Ctrl-C until the process is gone, the last whole step saved: a little less than the scheduler allows; the step in "
        "hand is abandoned when only the time for that is left. Without one it is ended first, however long it takes",
    )
    heartbeat_s: float = knob(
        60.0, "an actor to give a sign of life: a silent rollout worker is replaced, a process that is stopped (SIGSTOP) is ended"
    )


@dataclass
class ClusterConfig:
    address: str = knob(
        "auto",
        "`auto` joins where RAY_ADDRESS is set or inside a Ray job, else starts a private instance; `local` always starts one; or an address",
    )
    num_cpus: int | None = knob(None, "CPUs of a private instance; without one, those this process may use")
    placement: Placement = knob(
        Placement.split,
        "`split`: engines and learner have devices of their own; `colocated`: one engine and one rank on each, in turn, at rollout.max_lag 0",
    )


@dataclass
class PlanConfig:
    """The machines that `limen plan` reckons with. A run does not read them: it has the machines it finds."""

    num_gpus: int | None = knob(None, "GPUs in all; 0 is CPU alone; without one, those of this machine")
    gpus_per_node: int = knob(8, "GPUs of one node")
    gpu_gib: float = knob(80.0, "memory of one GPU, in GiB")
    node_memory_gib: float | None = knob(
        None, "main memory of one node, in GiB; without one, this machine's for a plan on CPU, and not checked for one on GPUs"
    )
    cpus: int | None = knob(None, "cores of one node; without one, those this process may use")
    bandwidth_gb_per_s: float = knob(10.0, "speed at which weights travel to an engine, in 10^9 bytes a second")


@dataclass
class LogConfig:
    console: Console = knob(Console.auto, "live view on a terminal, plain lines elsewhere")
    tensorboard: bool = knob(True, "write TensorBoard files")
    samples_mib: float = knob(16.0, "byte budget of the sample files of a run, in MiB")
    samples_per_step: int = knob(8, "completions written a step, stratified by stratum and accuracy")
    heartbeat_every_s: float = knob(
        30.0, "seconds from one heartbeat in events.jsonl to the next, which tells step, stage, waits and processes"
    )


@dataclass
class Config:
    """One run."""

    seed: int = knob(0, "of every random choice of the run")
    steps: int | None = knob(None, "length of the run in steps; or use data.num_epochs")
    run_dir: str | None = knob(None, "folder of the run; without one, a new one under ./runs")
    resume: str | None = knob(None, "folder of a run to go on with")
    checkpoint_dir: str | None = knob(
        None, "checkpoint or model folder that `eval` and `sample` use; without one, the base model"
    )
    input: str | None = knob(None, "JSON lines that `limen score` reads; without one, or with `-`, standard input")
    output: str | None = knob(None, "new file that `limen score` writes; without one, or with `-`, standard output")
    allow_inert: bool = knob(False, "allow a ratio-based algorithm with one optimizer step a batch, where it does nothing")
    selftest_lr0: bool = knob(
        False, "a run that must not move: learning rate 0, and it fails where a ratio is not 1 or engine and learner come apart"
    )
    shuffle_rewards: bool = knob(False, "shuffle scores within each group: a control that must not learn")
    model: ModelConfig = knob(ModelConfig, "the policy")
    data: DataConfig = knob(DataConfig, "prompts")
    batch: BatchConfig = knob(BatchConfig, "batch sizes")
    rollout: RolloutConfig = knob(RolloutConfig, "generation")
    learner: LearnerConfig = knob(LearnerConfig, "training")
    algorithm: AlgorithmConfig = knob(AlgorithmConfig, "policy objective")
    advantage: Choice = knob(lambda: Choice(name="grpo"), "advantage estimator")
    weighting: Choice = knob(Choice, "sample weights")
    selection: Choice = knob(lambda: Choice(name="zero_variance"), "which groups are kept")
    token_weighting: Choice = knob(Choice, "token weights")
    correction: Choice = knob(
        lambda: Choice(name="auto"),
        "engine and learner mismatch, and late tokens; `auto`: `tis_token` where rollout.max_lag is above 0",
    )
    reward: RewardConfig = knob(RewardConfig, "verifiers")
    serve: ServeConfig = knob(ServeConfig, "`limen serve-reward`")
    evaluation: EvaluationConfig = knob(EvaluationConfig, "held-out prompts")
    sample: SampleConfig = knob(SampleConfig, "`limen sample`")
    checkpoint: CheckpointConfig = knob(CheckpointConfig, "checkpoints")
    ledger: LedgerConfig = knob(LedgerConfig, "what is remembered of prompts and visits")
    deadlines: DeadlinesConfig = knob(DeadlinesConfig, "how long each wait may last")
    cluster: ClusterConfig = knob(ClusterConfig, "Ray")
    plan: PlanConfig = knob(PlanConfig, "machines that `limen plan` reckons with")
    log: LogConfig = knob(LogConfig, "what is written and shown")
