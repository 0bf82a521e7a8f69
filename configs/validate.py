"""Checks of values and across keys. They only raise, naming the keys and a value that works; nothing is changed here.

What needs the learner's functions (their parameters, whether an algorithm uses the ratio) is checked one stage later, in
orchestrator/choices.py: this package imports nothing above it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.build import schema_keys
from configs.errors import ConfigError, did_you_mean
from configs.paths import BUILT_IN
from configs.policies import parse_policy
from configs.refusals import check_combinations
from configs.schema import (
    Auto,
    Config,
    Dtype,
    EngineForm,
    LastBatch,
    Late,
    Placement,
    RewardConfig,
    RewardPart,
    SourceKind,
    Transport,
)

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Bounds of single keys: (smallest, whether it is allowed itself, largest). A key that is None passes.
_ABOVE_0 = (0.0, False, None)
_FROM_0 = (0.0, True, None)
_FROM_1 = (1.0, True, None)
_SHARE = (0.0, True, 1.0)
_BETA = (0.0, True, 0.99999)
_POSITIVE_SHARE = (0.0, False, 1.0)
_BOUNDS: dict[str, tuple[float, bool, float | None]] = {
    "steps": _FROM_0,
    "seed": _FROM_0,
    "model.warm_start_steps": _FROM_1,
    "model.warm_start_learning_rate": _ABOVE_0,
    "model.embedded.hidden_size": _FROM_1,
    "model.embedded.num_layers": _FROM_1,
    "model.embedded.num_heads": _FROM_1,
    "model.embedded.num_kv_heads": _FROM_1,
    "model.embedded.intermediate_size": _FROM_1,
    "model.embedded.steps": _FROM_0,
    "model.embedded.batch_size": _FROM_1,
    "model.embedded.learning_rate": _ABOVE_0,
    "model.embedded.max_digits": _FROM_1,
    "model.embedded.noise": _SHARE,
    "model.embedded.noise_from": _SHARE,
    "data.max_prompt_tokens": _FROM_1,
    "data.held_out_per_stratum": _FROM_0,
    "data.num_epochs": _ABOVE_0,
    "batch.groups_per_step": _FROM_1,
    "batch.group_size": _FROM_1,
    "batch.num_mini_batches": _FROM_1,
    "batch.num_passes": _FROM_1,
    "batch.tokens_per_micro_batch": _FROM_1,
    "rollout.num_workers": _FROM_1,
    "rollout.tensor_parallel_size": _FROM_1,
    "rollout.max_new_tokens": _FROM_1,
    "rollout.temperature": _ABOVE_0,
    "rollout.top_p": _POSITIVE_SHARE,
    "rollout.top_k": _FROM_0,
    "rollout.min_p": _SHARE,
    "rollout.max_lag": _FROM_0,
    "rollout.max_token_lag": _FROM_0,
    "rollout.oversample": _FROM_1,
    "rollout.straggler.after_s": _ABOVE_0,
    "rollout.straggler.min_finished": _FROM_1,
    "rollout.max_visits_per_step": _FROM_1,
    "rollout.max_running": _FROM_1,
    "rollout.cache_gib": _ABOVE_0,
    "rollout.gpu_memory_share": _POSITIVE_SHARE,
    "rollout.max_model_tokens": _FROM_1,
    "rollout.num_threads": _FROM_1,
    "learner.num_ranks": _FROM_1,
    "learner.zero_stage": (0.0, True, 3.0),
    "learner.head_chunk_rows": _FROM_1,
    "learner.num_threads": _FROM_1,
    "learner.max_skipped_steps": _FROM_0,
    "learner.bucket_mib": _FROM_1,
    "learner.export_shard_mib": _FROM_1,
    "learner.optimizer.learning_rate": _FROM_0,
    "learner.optimizer.beta1": _BETA,
    "learner.optimizer.beta2": _BETA,
    "learner.optimizer.eps": _ABOVE_0,
    "learner.optimizer.weight_decay": _FROM_0,
    "learner.optimizer.warmup_steps": _FROM_0,
    "learner.optimizer.warmup_ratio": _SHARE,
    "learner.optimizer.min_learning_rate_ratio": _SHARE,
    "learner.optimizer.max_grad_norm": _FROM_0,
    "algorithm.kl.beta": _FROM_0,
    "algorithm.kl.entropy_quantile": _SHARE,
    "algorithm.adaptive_entropy.target": _ABOVE_0,
    "algorithm.adaptive_entropy.gain": _ABOVE_0,
    "algorithm.adaptive_entropy.max_beta": _ABOVE_0,
    "algorithm.aux_scale": _FROM_0,
    "reward.num_workers": _FROM_1,
    "reward.timeout_s": _ABOVE_0,
    "reward.memory_gib": _ABOVE_0,
    "reward.max_failed_share": _SHARE,
    "reward.items_per_process": _FROM_1,
    "reward.parts.NAME.timeout_s": _ABOVE_0,
    "reward.parts.NAME.num_processes": _FROM_1,
    "reward.parts.NAME.memory_gib": _ABOVE_0,
    "reward.parts.NAME.concurrency": _FROM_1,
    "reward.parts.NAME.batch_size": _FROM_1,
    "serve.port": (0.0, True, 65535.0),
    "serve.max_body_mib": _ABOVE_0,
    "serve.max_requests": _FROM_1,
    "evaluation.every": _FROM_0,
    "evaluation.num_samples": _FROM_1,
    "evaluation.max_prompts_per_stratum": _FROM_1,
    "sample.num_prompts": _FROM_1,
    "checkpoint.every": _FROM_0,
    "checkpoint.keep_last": _FROM_1,
    "ledger.half_life_versions": _ABOVE_0,
    "ledger.stuck_after_steps": _FROM_1,
    "cluster.num_cpus": _FROM_1,
    "plan.num_gpus": _FROM_0,
    "plan.gpus_per_node": _FROM_1,
    "plan.gpu_gib": _ABOVE_0,
    "plan.node_memory_gib": _ABOVE_0,
    "plan.cpus": _FROM_1,
    "plan.bandwidth_gb_per_s": _ABOVE_0,
    "log.samples_mib": _FROM_0,
    "log.samples_per_step": _FROM_0,
    "log.heartbeat_every_s": _ABOVE_0,
} | {key: _ABOVE_0 for key, _ in schema_keys(Config) if key.startswith("deadlines.")}


def check_values(config: Config, *, combinations: bool = True) -> None:
    """Raise ConfigError for the first value or combination of values that cannot run; ``combinations`` False leaves out the table of
    refused combinations, for who only reads a configuration."""
    for key, (low, inclusive, high) in _BOUNDS.items():
        _check_bounds(config, key, low, inclusive, high)
    for check in _CHECKS:
        check(config)
    if combinations:
        check_combinations(config)
        _check_routes(config)


def _check_bounds(config: Config, bounded: str, low: float, inclusive: bool, high: float | None) -> None:
    for key, value in _values(config, "", bounded.split(".")):
        if value < low or (value == low and not inclusive) or (high is not None and value > high):
            bound = f"{low:g} or more" if inclusive else f"above {low:g}"
            raise ConfigError(f"{key}: {value} must be {bound}" + (f", at most {high:g}" if high is not None else ""))


def _values(value: Any, key: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """What stands under a dotted key and is set to a number; ``NAME`` in it is every name of a map."""
    if not names:
        if value is not None and not isinstance(value, Auto):
            yield key.removeprefix("."), value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(item, f"{key}.{name}", names[1:])
    else:
        yield from _values(getattr(value, names[0]), f"{key}.{names[0]}", names[1:])


def _check_length(config: Config) -> None:
    steps, epochs = config.steps, config.data.num_epochs
    if steps is None and epochs is None:
        raise ConfigError("steps, data.num_epochs: neither is set; set one, such as steps=400")
    if steps is not None and epochs is not None:
        raise ConfigError(f"steps={steps}, data.num_epochs={epochs:g}: both are set; for epochs add steps=null")


def _check_batch(config: Config) -> None:
    batch = config.batch
    if batch.groups_per_step % batch.num_mini_batches:
        below = batch.groups_per_step // batch.num_mini_batches * batch.num_mini_batches
        works = [n for n in (below, below + batch.num_mini_batches) if n]
        divisors = [n for n in range(1, batch.num_mini_batches) if batch.groups_per_step % n == 0]
        raise ConfigError(
            f"batch.groups_per_step={batch.groups_per_step} is not divisible by batch.num_mini_batches={batch.num_mini_batches}; "
            f"batch.groups_per_step={' or '.join(map(str, works))} works, or batch.num_mini_batches={divisors[-1]}"
        )


def _check_rollout(config: Config) -> None:
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    longest = prompt + rollout.max_new_tokens
    if rollout.max_model_tokens is not None and rollout.max_model_tokens < longest:
        raise ConfigError(
            f"rollout.max_model_tokens={rollout.max_model_tokens} is less than data.max_prompt_tokens={prompt} + "
            f"rollout.max_new_tokens={rollout.max_new_tokens}; rollout.max_model_tokens={longest} works"
        )
    if rollout.max_lag > 0 and config.data.last_batch is LastBatch.keep:
        raise ConfigError(
            f"data.last_batch=keep, rollout.max_lag={rollout.max_lag}: above lag 0 a batch has no epoch of its own to end with; "
            "data.last_batch=wrap or drop works, or rollout.max_lag=0"
        )
    if rollout.max_lag > 0 and isinstance(rollout.oversample, Auto):
        raise ConfigError(
            f"rollout.oversample=auto, rollout.max_lag={rollout.max_lag}: it follows what batches at lag 0 keep; "
            "a number works, such as rollout.oversample=1, or rollout.max_lag=0"
        )
    if rollout.max_lag > 0 and rollout.oversample != 1 and rollout.late is Late.wait:
        raise ConfigError(
            f"rollout.oversample={rollout.oversample:g}, rollout.max_lag={rollout.max_lag}, rollout.late=wait: with more open than "
            "max_lag + 1 batches some must be trained later than that, whoever waits; rollout.oversample=1 works, or rollout.late=correct"
        )
    if rollout.max_token_lag is not None and rollout.late is not Late.drop:
        raise ConfigError(
            f"rollout.max_token_lag={rollout.max_token_lag}, rollout.late={rollout.late.value}: it bounds what late=drop trains; "
            "rollout.late=drop works, or rollout.max_token_lag=null"
        )
    if rollout.transport is Transport.ipc and rollout.num_workers > 1:
        raise ConfigError(
            f"rollout.transport=ipc, rollout.num_workers={rollout.num_workers}: handles open on the learner's own GPU only, where one "
            "engine runs; rollout.transport=nccl or local works, or rollout.num_workers=1"
        )
    if rollout.source_run is not None and rollout.max_lag > 0:
        raise ConfigError(
            f"rollout.source_run is set, rollout.max_lag={rollout.max_lag}: a replay has nothing to generate ahead; rollout.max_lag=0 works"
        )
    if rollout.source_run is not None and rollout.transport is not Transport.local:
        raise ConfigError(
            f"rollout.source_run is set, rollout.transport={rollout.transport.value}: a replay has no engine to send to; "
            "rollout.transport=local works"
        )
    bound = rollout.max_visits_per_step
    if bound is not None and bound < config.batch.groups_per_step:
        groups = config.batch.groups_per_step
        raise ConfigError(
            f"rollout.max_visits_per_step={bound} can never fill batch.groups_per_step={groups}; {groups} or more works"
        )


def _check_straggler(config: Config) -> None:
    rollout, size = config.rollout, config.batch.group_size
    straggler = rollout.straggler
    if straggler.after_s is None:
        return
    if straggler.min_finished >= size:
        raise ConfigError(
            f"rollout.straggler.min_finished={straggler.min_finished}, batch.group_size={size}: a group that has so many has them all; "
            + (f"rollout.straggler.min_finished={size - 1} works" if size > 1 else "rollout.straggler.after_s=null works")
        )
    if rollout.engine is not EngineForm.in_process:
        raise ConfigError(
            f"rollout.straggler.after_s={straggler.after_s:g}, rollout.engine={rollout.engine.value}: only the step loop gives out a group "
            "without its last members; rollout.engine=in_process works, or rollout.straggler.after_s=null"
        )
    if rollout.source_run is not None:
        raise ConfigError(
            f"rollout.straggler.after_s={straggler.after_s:g}, rollout.source_run is set: a replay waits for nobody; "
            "rollout.straggler.after_s=null works"
        )


def _check_selftest(config: Config) -> None:
    rate = config.learner.optimizer.learning_rate
    if config.selftest_lr0 and rate > 0:
        raise ConfigError(
            f"selftest_lr0=true, learner.optimizer.learning_rate={rate:g}: its run must not move; learner.optimizer.learning_rate=0 works, "
            "or selftest_lr0=false"
        )
    if config.selftest_lr0 and config.rollout.source_run is not None:
        raise ConfigError(
            "selftest_lr0=true, rollout.source_run is set: a replay has no engine to compare the learner with; rollout.source_run=null works"
        )


def _check_colocated(config: Config) -> None:
    rollout, num_ranks = config.rollout, config.learner.num_ranks
    if config.cluster.placement is not Placement.colocated:
        return
    if rollout.source_run is not None:
        raise ConfigError(
            "rollout.source_run is set, cluster.placement=colocated: a replay has no engine to share a device with; "
            "cluster.placement=split works"
        )
    if rollout.max_lag > 0:
        raise ConfigError(
            f"cluster.placement=colocated, rollout.max_lag={rollout.max_lag}: above lag 0 engines generate while the learner trains, which "
            "needs devices of their own; cluster.placement=split works, or rollout.max_lag=0"
        )
    if rollout.tensor_parallel_size > 1:
        raise ConfigError(
            f"cluster.placement=colocated, rollout.tensor_parallel_size={rollout.tensor_parallel_size}: an engine and a rank take half of one "
            "GPU each in Ray's books, and Ray has no halves of several; rollout.tensor_parallel_size=1 works, or cluster.placement=split"
        )
    if rollout.num_workers != num_ranks:
        raise ConfigError(
            f"cluster.placement=colocated, rollout.num_workers={rollout.num_workers}, learner.num_ranks={num_ranks}: every device has one "
            f"engine and one rank; learner.num_ranks={rollout.num_workers} works, or rollout.num_workers={num_ranks}"
        )
    if rollout.transport is Transport.nccl:
        raise ConfigError(
            "cluster.placement=colocated, rollout.transport=nccl: NCCL has no two ends on one GPU; rollout.transport=local works"
        )


def _check_learner(config: Config) -> None:
    learner = config.learner
    if config.model.dtype is Dtype.bfloat16 and learner.zero_stage == 0:
        raise ConfigError(
            "model.dtype=bfloat16, learner.zero_stage=0: without a stage DeepSpeed accumulates gradients in bfloat16; "
            "learner.zero_stage=1 works"
        )
    optimizer = learner.optimizer
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        raise ConfigError(
            f"learner.optimizer.warmup_steps={optimizer.warmup_steps}, learner.optimizer.warmup_ratio="
            f"{optimizer.warmup_ratio:g}: both are set; set one of them to 0"
        )


def _check_model(config: Config) -> None:
    model, embedded = config.model, config.model.embedded
    if model.path not in BUILT_IN:
        _check_model_path("model.path", model.path, hub=True)
    if embedded.hidden_size % embedded.num_heads or embedded.num_heads % embedded.num_kv_heads:
        raise ConfigError(
            f"model.embedded: hidden_size={embedded.hidden_size} must be divisible by num_heads={embedded.num_heads}, and that by "
            f"num_kv_heads={embedded.num_kv_heads}; 96, 3 and 3 work"
        )
    weights = embedded.digit_weights
    if len(weights) != embedded.max_digits or min(weights) < 0 or sum(weights) == 0:
        raise ConfigError(
            f"model.embedded.digit_weights={weights}: needs model.embedded.max_digits={embedded.max_digits} numbers, none below 0 "
            f"and one above; {[1.0] * embedded.max_digits} works"
        )
    if model.warm_start_file is not None:
        _check_file("model.warm_start_file", model.warm_start_file)
    if config.checkpoint_dir is not None:
        _check_model_path("checkpoint_dir", config.checkpoint_dir, hub=False)


def _check_data(config: Config) -> None:
    if not config.data.sources:
        raise ConfigError("data.sources: is empty; data=arithmetic works, or data=jsonl data.sources.main.path=FILE")
    for name, source in config.data.sources.items():
        key = f"data.sources.{name}"
        if source.kind in (SourceKind.jsonl, SourceKind.parquet, SourceKind.datasets) and source.path is None:
            raise ConfigError(f"{key}.path: kind={source.kind.value} reads a file; set {key}.path=...")
        if source.kind in (SourceKind.jsonl, SourceKind.parquet) and source.path is not None:
            _check_file(f"{key}.path", source.path)
        if source.kind is SourceKind.reasoning_gym and not source.params.get("task"):
            raise ConfigError(f"{key}.params.task: reasoning_gym needs the name of a task; set {key}.params.task=gcd")
        if source.reward is not None and source.reward not in config.reward.parts:
            raise ConfigError(
                f"{key}.reward: there is no reward.parts.{source.reward}; there are {', '.join(sorted(config.reward.parts))}"
                + did_you_mean(source.reward, config.reward.parts)
            )


def _check_reward(config: Config) -> None:
    parts = config.reward.parts
    if not parts:
        raise ConfigError("reward.parts: is empty; reward=exact_integer works, or reward.parts.mine.function=FILE.py:FUNCTION")
    if len(parts) > 1 and not any(part.accuracy for part in parts.values()):  # of one alone it counts in any case
        raise ConfigError(f"reward.parts: no part counts for accuracy; reward.parts.{next(iter(parts))}.accuracy=true works")
    if all(part.weight == 0 for part in parts.values()):
        raise ConfigError(f"reward.parts: every weight is 0; reward.parts.{next(iter(parts))}.weight=1 works")
    _check_clip("reward", config.reward)
    for name, part in parts.items():
        key = f"reward.parts.{name}"
        _check_clip(key, part)
        _check_gate(key, name, parts)
        for policy in ("on_error", "on_timeout", "on_invalid", "on_abstain"):
            parse_policy(getattr(part, policy), f"{key}.{policy}")
        if part.num_processes is None:
            for own in ("memory_gib", "concurrency", "confined"):
                if getattr(part, own) != getattr(RewardPart(), own):
                    raise ConfigError(f"{key}.{own}: is about processes of its own; {key}.num_processes=1 works")


def _check_clip(key: str, bounded: RewardPart | RewardConfig) -> None:
    low, high = bounded.clip_min, bounded.clip_max
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{key}.clip_min={low:g} is above {key}.clip_max={high:g}; {key}.clip_min={high:g} works")


def _check_gate(key: str, name: str, parts: Mapping[str, RewardPart]) -> None:
    passed, gate = [name], parts[name].needs
    while gate is not None:
        if gate not in parts:
            named = f"reward.parts.{passed[-1]}.needs"
            raise ConfigError(
                f"{named}: there is no reward.parts.{gate}; there are {', '.join(sorted(parts))}{did_you_mean(gate, parts)}"
            )
        if gate in passed:
            raise ConfigError(
                f"{key}.needs: {' needs '.join([*passed, gate])}, so that none can be first; {key}.needs=null works"
            )
        passed, gate = [*passed, gate], parts[gate].needs
    judged, gated = parts[name], parts[name].needs
    if gated is not None and parts[gated].sources and not set(judged.sources or ["any"]) <= set(parts[gated].sources):
        listed = ", ".join(parts[gated].sources)
        raise ConfigError(
            f"{key}.needs={gated}: reward.parts.{gated} judges the sources {listed} alone, and this part others too; "
            f"{key}.sources=[{listed}] works"
        )


def _check_routes(config: Config) -> None:
    """Which part judges which source. Not for who scores lines of his own: their sources are no data of the run."""
    parts, sources = config.reward.parts, config.data.sources
    for name, part in parts.items():
        for judged in part.sources:
            if judged not in sources:
                raise ConfigError(
                    f"reward.parts.{name}.sources: there is no data.sources.{judged}; there are {', '.join(sorted(sources))}"
                    + did_you_mean(judged, sources)
                )
    for name, source in sources.items():
        routed = source.reward is not None or source.reward_column is not None
        if not routed and not any(not part.sources or name in part.sources for part in parts.values()):
            raise ConfigError(
                f"data.sources.{name}: no reward part judges it; reward.parts.{next(iter(parts))}.sources=[] judges all sources"
            )


def _check_file(key: str, path: str) -> None:
    if not Path(path).expanduser().exists():
        raise ConfigError(f"{key}: no file {str(Path(path).expanduser().absolute())!r}")


def _check_model_path(key: str, path: str, *, hub: bool) -> None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return
    if not hub or folder.is_absolute() or path.startswith((".", "~")) or not _HUB_NAME.fullmatch(path):
        names = ", nor a Hugging Face name such as owner/model; `embedded` works" if hub else ""
        raise ConfigError(f"{key}: {path!r} is not a folder{names}")


def _check_deadlines(config: Config) -> None:
    receive_s, push_s = config.deadlines.receive_s, config.deadlines.push_s
    if receive_s >= push_s:
        raise ConfigError(
            f"deadlines.receive_s={receive_s:g} is not below deadlines.push_s={push_s:g}: a push would end the run before a silent engine "
            f"is replaced; deadlines.receive_s={push_s / 5:g} works, or deadlines.push_s={5 * receive_s:g}"
        )


_CHECKS: tuple[Callable[[Config], None], ...] = (
    _check_length,
    _check_batch,
    _check_rollout,
    _check_straggler,
    _check_selftest,
    _check_colocated,
    _check_learner,
    _check_model,
    _check_data,
    _check_reward,
    _check_deadlines,
)
