"""The learner: one rank that turns rollout batches into changed weights. Plain Python; whoever wants an actor wraps it.

    prepare(batch)   samples, advantages, weights, denominators; old_logp and ref_logp where they are needed
    train()          num_mini_batches x num_passes optimizer steps
    buckets(g)       the weights, bucket by bucket; manifest() afterwards

All ranks make every call, each with the whole rollout batch: it is small beside the activations, and then nothing but gradients,
weights and metrics travels between ranks. All return the same reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.functions import resolve_function
from configs.schema import AlgorithmConfig, BatchConfig, Choice, KlKind, LearnerConfig, ModelConfig, Reference
from learner.advantages import ADVANTAGES
from learner.batching import Row, fill_micro_batches, pack_rows
from learner.credit import Credit, token_credit
from learner.deepspeed_engine import DeepSpeedEngine, StepResult, frozen_forward, join_process_group
from learner.gather import gather_buckets
from learner.head import HeadOutput
from learner.loss_tokens import LossTokens
from learner.metric_sums import MetricSums, collect_sums
from learner.model import frozen_copy, load_model
from learner.samples import Gap, MicroBatch, Plan, make_samples, packed_tensors, plan_optimizer_steps
from learner.saving import export_model, force_to_disk, load_state, save_state
from learner.stopwatch import Stopwatch
from learner.surrogates import SURROGATES
from learner.weighting import WEIGHTINGS, sample_weights
from rollout.records import ScoredGroup
from rollout.tokenizer import load_tokenizer
from rollout.weights import Bucket, Manifest

_T = TypeVar("_T")


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row were not finite. Weights and moments are those of the last good step."""


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a learner is made from."""

    model: ModelConfig
    learner: LearnerConfig
    batch: BatchConfig
    algorithm: AlgorithmConfig
    advantage: Choice
    weighting: Choice
    correction: Choice
    model_path: str  # folder or Hugging Face name of the start weights, with a tokenizer
    temperature: float  # of sampling; the logits are divided by it
    seed: int
    total_optimizer_steps: int  # length of the schedule
    max_response_tokens: int


@dataclass(frozen=True)
class RolloutBatch:
    """The kept groups of one step. ``version`` is the learner's as it trains them."""

    step: int
    version: int
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True)
class PrepareReport:
    metrics: dict[str, float]
    num_samples: int
    num_rank_tokens: int  # of this rank in one pass, without padding
    num_mini_batches: int  # 0 where no group had a sample to train on


@dataclass(frozen=True)
class TrainReport:
    metrics: dict[str, float]
    num_optimizer_steps: int  # tried
    num_skipped: int  # of those: not finite
    moved: bool  # whether a step that was taken had a learning rate and a gradient above 0: then some weight must have changed


class Learner:
    """One learner rank. Raises ValueError where the spec asks for what is not built, ModelError for an unfit model."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int) -> None:
        if spec.correction.name != "none":
            raise ValueError(f"correction={spec.correction.name} is not built yet; use correction=none")
        with_kl = spec.algorithm.kl.kind is not KlKind.off
        if with_kl and spec.learner.reference is Reference.off:
            raise ValueError("algorithm.kl needs a reference: set learner.reference=frozen, or algorithm.kl.kind=off")
        self.spec, self.rank, self.world_size = spec, rank, world_size
        join_process_group(rank, world_size)
        self.model = load_model(
            spec.model,
            spec.model_path,
            seed=spec.seed,
            chunk_rows=spec.learner.head_chunk_rows,
            gradient_checkpointing=spec.learner.gradient_checkpointing,
        )
        self._parameters = dict(self.model.hf.named_parameters())
        self._reference: Callable[..., HeadOutput] | None = None
        if with_kl:  # before the engine, which splits the policy at ZeRO-3
            copy = frozen_copy(self.model.policy)
            self._reference = frozen_forward(copy, spec.learner, spec.model.dtype, world_size=world_size)
        self.engine = DeepSpeedEngine(
            self.model.policy, spec.learner, spec.model.dtype, world_size=world_size, total_steps=spec.total_optimizer_steps
        )
        self._credit: Callable[[LossTokens], Credit] = partial(
            token_credit,
            surrogate=partial(resolve_function(spec.algorithm.name, SURROGATES, "algorithm"), **spec.algorithm.params),
            kl_kind=spec.algorithm.kl.kind,
            kl_beta=spec.algorithm.kl.beta,
            entropy_beta=spec.algorithm.entropy_beta,
        )
        self._stopwatch = Stopwatch(self.engine.device)
        self._steps: list[list[MicroBatch]] = []
        self._manifest: Manifest | None = None

    # ---- a rollout batch --------------------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> PrepareReport:
        """Makes the batch ready to train, in the packing it will be trained in.

        ``old_logp`` is computed for all but the first mini-batch. That one meets the weights unchanged, so its ``old_logp`` is
        ``logp.detach()`` of its own forward: the ratio is exactly 1 and no forward is spent, in a batch of one optimizer step
        none at all. With fewer groups than ``num_mini_batches`` there are fewer mini-batches, with no trainable sample none.
        """
        spec = self.spec
        samples, counts = make_samples(
            batch.groups,
            partial(resolve_function(spec.advantage.name, ADVANTAGES, "advantage"), **spec.advantage.params),
            partial(
                sample_weights,
                resolve_function(spec.weighting.name, WEIGHTINGS, "weighting"),
                params=spec.weighting.params,
            ),
            mask_truncated=spec.algorithm.mask_truncated,
        )
        plan = Plan(
            num_mini_batches=spec.batch.num_mini_batches,
            tokens_per_micro_batch=spec.batch.tokens_per_micro_batch,
            aggregation=spec.algorithm.aggregation,
            max_response_tokens=spec.max_response_tokens,
            cost=self.model.cost,
            version=batch.version,
            rank=self.rank,
            world_size=self.world_size,
            device=self.engine.device,
        )
        self._steps, dealt = plan_optimizer_steps(samples, plan, (spec.seed, batch.step))
        micro_batches = [micro for step in self._steps for micro in step]
        with torch.no_grad():
            for micro in (micro for step in self._steps[1:] for micro in step):
                micro.old_logp = self._forward(micro).logp
            if self._reference is not None:
                for micro in micro_batches:
                    micro.ref_logp = self._forward(micro, self._reference).logp
        metrics = {
            "batch/num_samples": counts.num_samples,
            "batch/num_invalid": counts.num_invalid,
            "batch/num_truncated": counts.num_truncated,
            "batch/num_empty": counts.num_empty,
            "batch/num_loss_tokens": sum(sample.num_loss_tokens for sample in samples),
            "batch/num_mini_batches": len(self._steps),
            "batch/num_micro_batches": len(micro_batches),
            "batch/padding_frac": dealt.padding_frac,
            "batch/rank_imbalance": dealt.imbalance,
            "eff/sample_frac": _share(sum(s.advantage != 0 for s in samples), sum(len(g.scores) for g in batch.groups)),
        }
        return PrepareReport(
            {name: float(value) for name, value in metrics.items()},
            counts.num_samples,
            sum(micro.num_tokens for micro in micro_batches),
            len(self._steps),
        )

    def train(self) -> TrainReport:
        """The optimizer steps of the prepared batch, which is used up; every pass goes over the same mini-batches in order.

        Raises NonFiniteError after more than ``learner.max_skipped_steps`` steps in a row that were not finite.
        """
        steps, self._steps = self._steps, []
        sums = MetricSums({}, {})
        results: list[StepResult] = []
        for number_of_pass in range(self.spec.batch.num_passes):
            for micro_batches in steps:
                loss = 0.0
                for place, micro in enumerate(micro_batches):
                    more, added = self._accumulate(micro, last=place == len(micro_batches) - 1, first_pass=number_of_pass == 0)
                    sums += more
                    loss += added
                sums += MetricSums({"update/loss": (loss, 1 / self.world_size)}, {})
                results.append(self.engine.step())
                self._check_streak()
        ranks = self._of_all_ranks((sums, self._stopwatch.read()))
        metrics = sum((of_rank for of_rank, _ in ranks), MetricSums({}, {})).values()
        if results:
            seconds = [of_rank for _, of_rank in ranks]
            metrics["time/rank_imbalance"] = max(seconds) * len(seconds) / sum(seconds)
            norms = [result.grad_norm for result in results if not result.skipped]
            metrics["update/learning_rate"] = results[-1].learning_rate
            metrics["update/skipped_nonfinite"] = float(len(results) - len(norms))
            if norms:
                metrics["update/grad_norm"] = sum(norms) / len(norms)
        moved = any(not r.skipped and r.learning_rate > 0 and r.grad_norm > 0 for r in results)
        return TrainReport(metrics, len(results), sum(result.skipped for result in results), moved)

    def _forward(self, micro: MicroBatch, policy: Callable[..., HeadOutput] | None = None) -> HeadOutput:
        """Of the policy that is trained, unless another is given."""
        with self._stopwatch.running():
            return (policy or self.engine.forward)(micro.input_ids, micro.positions, micro.targets, self.spec.temperature)

    def _accumulate(self, micro: MicroBatch, *, last: bool, first_pass: bool) -> tuple[MetricSums, float]:
        """One forward and backward; metrics, and this micro-batch's part of the step's loss."""
        out = self._forward(micro)
        if micro.num_tokens == 0:
            self.engine.backward(0.0 * (out.logp.sum() + out.entropy.sum()), last=last)
            return MetricSums({}, {}), 0.0
        if micro.old_logp is None:
            micro.old_logp = out.logp.detach()
        tokens = _loss_tokens(micro, micro.old_logp, out)
        credit = self._credit(tokens)
        self.engine.backward((credit.logp * out.logp).sum() + (credit.entropy * out.entropy).sum(), last=last)
        return (credit.sums + _mismatch(micro, tokens) if first_pass else credit.sums), float(credit.loss)

    def _check_streak(self) -> None:
        streak, limit = self.engine.num_skipped_in_a_row, self.spec.learner.max_skipped_steps
        if streak > limit:
            raise NonFiniteError(
                f"{streak} optimizer steps in a row had a gradient that is not finite (learner.max_skipped_steps={limit}); "
                "the weights are those of the last good step: lower learner.optimizer.learning_rate or max_grad_norm"
            )

    def _of_all_ranks(self, mine: _T) -> list[_T]:
        """Every rank's, in the order of ranks."""
        parts = [mine] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(parts, mine)
        return parts

    # ---- its weights ------------------------------------------------------------------------------------------------

    def score_tokens(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> list[NDArray[np.float32]]:
        """Teacher-forced log-probabilities of rows of at least two tokens: [n - 1] each, the first belongs to the second token."""
        scores: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for numbers in fill_micro_batches([len(row) for row in rows], self.spec.batch.tokens_per_micro_batch):
                packed = pack_rows([Row(rows[i], np.arange(len(rows[i])) > 0) for i in numbers])
                logp: Tensor = self.engine.forward(*packed_tensors(packed, self.engine.device), temperature).logp
                ends = np.cumsum([len(rows[i]) - 1 for i in numbers])[:-1]
                scores |= dict(zip(numbers, np.split(logp.cpu().numpy(), ends), strict=True))
        return [scores[i] for i in range(len(rows))]

    def buckets(self, generation: int, scale: float = 1.0) -> Iterator[Bucket]:
        """The weights under checkpoint names, in compute precision, at most two buckets of memory above the model.

        All ranks read it to the end; only rank 0 yields, the others take part in the gathers. ``scale``: what is sent, not what
        the learner holds, is multiplied by it.
        """
        self._manifest = None
        bucket_bytes = self.spec.learner.bucket_mib * 2**20
        self._manifest = yield from gather_buckets(
            self.model, self.engine.gathered, generation, bucket_bytes, rank=self.rank, scale=scale
        )

    def manifest(self) -> Manifest:
        """What the last ``buckets`` consisted of. Raises RuntimeError while they were not read to the end."""
        if self._manifest is None:
            raise RuntimeError("there is no manifest before the last bucket has been read")
        return self._manifest

    def save(self, folder: str | Path) -> list[str]:
        """Writes masters, moments and counters, each rank its share. Returns the names of the files that this rank wrote, now on
        the disk. All ranks call it; none waits for the others to have written."""
        return save_state(self.engine, self._parameters, Path(folder), rank=self.rank)

    def load(self, folder: str | Path) -> None:
        """Goes on where ``save`` was called, by any number of ranks at any ZeRO stage; in the same layout bit for bit.

        Raises FileNotFoundError where there is nothing to restore, ValueError for another model, precision or optimizer.
        """
        load_state(self.engine, self._parameters, Path(folder))

    def export(self, folder: str | Path) -> list[str]:
        """Writes a model folder with tokenizer, as vLLM and transformers read it, in shards of ``learner.export_shard_mib``.

        Returns the names of the files that this rank wrote, now on the disk: all on rank 0. All ranks call it.
        """
        folder, mib = Path(folder), 2**20
        shard_bytes, bucket_bytes = self.spec.learner.export_shard_mib * mib, self.spec.learner.bucket_mib * mib
        export_model(self.model, self.engine.gathered, folder, rank=self.rank, shard_bytes=shard_bytes, bucket_bytes=bucket_bytes)
        if self.rank != 0:
            return []
        load_tokenizer(self.spec.model_path, self.spec.model.trust_remote_code).save_pretrained(folder)
        return force_to_disk(folder, sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))


def _loss_tokens(micro: MicroBatch, old_logp: Tensor, out: HeadOutput) -> LossTokens:
    ones = torch.ones_like(old_logp)
    return LossTokens(
        logp=out.logp.detach(),
        entropy=out.entropy.detach(),
        old_logp=old_logp,
        roll_logp=micro.roll_logp,
        ref_logp=micro.ref_logp,
        advantage=micro.advantage,
        sample_weight=micro.sample_weight,
        token_weight=ones,
        correction=ones,
        policy_denominator=micro.policy_denominator,
        kl_denominator=micro.policy_denominator,
        kl_mask=ones,
        response=micro.response,
    )


def _mismatch(micro: MicroBatch, tokens: LossTokens) -> MetricSums:
    """Engine and learner apart: of the same version it is numerics, of an older one lag, of mixed tokens stale keys and values."""
    difference = (tokens.old_logp - tokens.roll_logp).abs()
    return collect_sums({f"mismatch/{gap.name.lower()}": (difference, micro.gap == gap) for gap in Gap}, {})


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
