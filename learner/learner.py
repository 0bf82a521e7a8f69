"""The learner: one rank that turns rollout batches into changed weights. Plain Python; whoever wants an actor wraps it.

    prepare(batch)   samples, advantages, weights, denominators; old_logp and ref_logp where they are needed
    train()          num_mini_batches x num_passes optimizer steps
    buckets(g)       the weights, bucket by bucket; manifest() afterwards

All ranks make every call, each with the whole rollout batch: it is small beside the activations, and then nothing but gradients,
weights and metrics travels between ranks. All return the same reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.batching import Row, fill_micro_batches, pack_rows
from learner.deepspeed_engine import DeepSpeedEngine, StepResult, frozen_forward, join_process_group
from learner.gather import gather_buckets
from learner.head import HeadOutput
from learner.loss_tokens import LossTokens
from learner.metric_sums import MetricSums, collect_sums
from learner.model import ModelError, frozen_copy, load_model
from learner.objective import Objective
from learner.prepare import Rank, loss_tokens, prepare_batch
from learner.samples import Gap, Inputs, MicroBatch, lag_name, packed_tensors
from learner.saving import export_model, force_to_disk, load_state, save_state
from learner.spec import LearnerSpec, RolloutBatch
from learner.stopwatch import Stopwatch
from rollout.tokenizer import load_tokenizer
from rollout.weights import Bucket, Manifest

_T = TypeVar("_T")


class NonFiniteError(RuntimeError):
    """Too many optimizer steps in a row were not finite. Weights and moments are those of the last good step."""


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
        self.objective = Objective(spec)
        self.spec, self.rank, self.world_size = spec, rank, world_size
        join_process_group(rank, world_size)
        self.model = load_model(
            spec.model,
            spec.model_path,
            seed=spec.seed,
            chunk_rows=spec.learner.head_chunk_rows,
            gradient_checkpointing=spec.learner.gradient_checkpointing,
        )
        if spec.algorithm.aux_scale > 0 and self.model.policy.num_routed is None:
            raise ModelError(
                f"algorithm.aux_scale={spec.algorithm.aux_scale:g}: the model at {spec.model_path} has no routers whose scores can "
                "be read; algorithm.aux_scale=0 works"
            )
        self._parameters = dict(self.model.hf.named_parameters())
        self._reference: Callable[..., HeadOutput] | None = None
        if self.objective.needs_reference:  # before the engine, which splits the policy at ZeRO-3
            copy = frozen_copy(self.model.policy)
            self._reference = frozen_forward(copy, spec.learner, spec.model.dtype, world_size=world_size)
        self.engine = DeepSpeedEngine(
            self.model.policy, spec.learner, spec.model.dtype, world_size=world_size, total_steps=spec.total_optimizer_steps
        )
        self._stopwatch = Stopwatch(self.engine.device)
        self._steps: list[list[MicroBatch]] = []
        self._num_steps_before = 0  # optimizer steps taken when the prepared batch arrived
        self._manifest: Manifest | None = None

    # ---- a rollout batch --------------------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> PrepareReport:
        """Makes the batch ready to train, see ``prepare_batch``. Raises ValueError for what a chosen function cannot take."""
        self.engine.check_states_are_here("prepare")
        here = Rank(
            rank=self.rank,
            world_size=self.world_size,
            device=self.engine.device,
            cost=self.model.cost,
            policy=self._forward,
            reference=None if self._reference is None else partial(self._forward, policy=self._reference),
            of_all_ranks=self._of_all_ranks,
        )
        prepared = prepare_batch(batch, self.objective, here, self._num_steps_taken)
        self._steps, self._num_steps_before = prepared.steps, self._num_steps_taken
        return PrepareReport(prepared.metrics, prepared.num_samples, prepared.num_rank_tokens, len(prepared.steps))

    def train(self) -> TrainReport:
        """The optimizer steps of the prepared batch, which is used up; every pass goes over the same mini-batches in order.

        Raises NonFiniteError after more than ``learner.max_skipped_steps`` steps in a row that were not finite.
        """
        self.engine.check_states_are_here("train")
        steps, self._steps = self._steps, []
        sums = MetricSums({}, {})
        results: list[StepResult] = []
        for pass_number in range(self.spec.batch.num_passes):
            for micro_batches in steps:
                loss = 0.0
                for place, micro in enumerate(micro_batches):
                    more, added = self._accumulate(micro, pass_number, last=place == len(micro_batches) - 1)
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
            metrics["policy/entropy_beta"] = self.objective.entropy_beta
            self.objective.end_step(metrics.get("policy/entropy", math.nan))
        moved = any(not r.skipped and r.learning_rate > 0 and r.grad_norm > 0 for r in results)
        return TrainReport(metrics, len(results), sum(result.skipped for result in results), moved)

    @property
    def _num_steps_taken(self) -> int:
        return self.engine.num_steps - self.engine.num_skipped

    def _forward(self, inputs: Inputs, policy: Callable[..., HeadOutput] | None = None, *, router: bool = False) -> HeadOutput:
        """Of the policy that is trained, unless another is given. ``router``: with the loss of its routers."""
        with self._stopwatch.running():
            return (policy or self.engine.forward)(
                inputs.input_ids,
                inputs.positions,
                inputs.targets,
                self.spec.temperature,
                extras=self.objective.extras,
                response=inputs.response if router else None,
            )

    def _accumulate(self, micro: MicroBatch, pass_number: int, *, last: bool) -> tuple[MetricSums, float]:
        """One forward and backward; metrics, and this micro-batch's part of the step's loss."""
        aux_scale = self.spec.algorithm.aux_scale
        out = self._forward(micro.inputs, router=aux_scale > 0)
        if micro.inputs.num_tokens == 0:
            nothing = out.logp.sum() + out.entropy.sum()
            self.engine.backward(0.0 * (nothing if out.aux_loss is None else nothing + out.aux_loss), last=last)
            return MetricSums({}, {}), 0.0
        if micro.old_logp is None:
            micro.old_logp = out.logp.detach()
        tokens = loss_tokens(micro, out, pass_number, num_steps_before=self._num_steps_before, num_steps=self._num_steps_taken)
        credit = self.objective.credit(tokens)
        loss = (credit.logp * out.logp).sum() + (credit.entropy * out.entropy).sum()
        sums, logged = credit.sums, float(credit.loss)
        if out.aux_loss is not None:
            loss = loss + aux_scale / micro.num_responses * out.aux_loss
            aux_loss = float(out.aux_loss)
            sums += MetricSums({"policy/router_loss": (aux_loss, float(len(micro.inputs.input_ids)))}, {})
            logged += aux_scale / micro.num_responses * aux_loss
        self.engine.backward(loss, last=last)
        return (sums + _mismatch(micro, tokens) if pass_number == 0 else sums), logged

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

    # ---- its turn on a shared device --------------------------------------------------------------------------------

    def offload(self) -> int:
        """Ends its turn: lays aside what only training needs, and returns how many bytes of the device became free. The weights stay:
        ``buckets``, ``export`` and ``score_tokens`` work, while ``prepare``, ``train``, ``save`` and ``load`` raise RuntimeError."""
        return self.engine.offload()

    def reload(self) -> None:
        """Begins its turn."""
        self.engine.reload()

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
        """Writes masters, moments, counters and what the objective remembers, each rank its share. Returns the names of the files that
        this rank wrote, now on the disk. All ranks call it; none waits for the others to have written."""
        self.engine.check_states_are_here("save")
        memory = self.objective.memory()
        return save_state(self.engine, self._parameters, Path(folder), rank=self.rank, memory=memory)

    def load(self, folder: str | Path) -> None:
        """Goes on where ``save`` was called, by any number of ranks at any ZeRO stage; in the same layout bit for bit.

        Raises FileNotFoundError where there is nothing to restore, ValueError for another model, precision or optimizer.
        """
        self.engine.check_states_are_here("load")
        self.objective.restore(load_state(self.engine, self._parameters, Path(folder)))

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


def _mismatch(micro: MicroBatch, tokens: LossTokens) -> MetricSums:
    """Engine and learner apart: of the same version it is numerics, of an older one lag, of mixed tokens stale keys and values; the last
    two by how many versions they are behind as well."""
    difference = (tokens.old_logp - tokens.roll_logp).abs()
    of = {gap: micro.gap == gap for gap in Gap}
    means = {f"mismatch/{gap.name.lower()}": (difference, mask) for gap, mask in of.items()}
    for lag in micro.lags:
        behind = micro.lag == lag
        for gap in (Gap.OLDER_VERSION, Gap.MIXED):
            means[f"mismatch/{gap.name.lower()}_{lag_name(lag)}"] = (difference, behind & of[gap])
    return collect_sums(means, {})
