"""Prepare: from a rollout batch to the micro-batches of its optimizer steps.

    samples -> [forwards, where KL is in the reward or token weights compare a group's responses] -> advantages -> sample weights,
    pruning -> mini-batches -> ranks -> denominators -> old_logp and ref_logp, where they are needed

Pruning comes before mini-batches are cut, since what is pruned is in no denominator. Without KL in the reward neither needs a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from learner.advantages import Advantages, Samples
from learner.aggregation import count_step, denominators
from learner.batching import RowCost
from learner.entropy import low_entropy_count
from learner.head import HeadOutput
from learner.loss_tokens import LossTokens
from learner.objective import Objective
from learner.samples import (
    BatchCounts,
    Cut,
    EngineTokens,
    Inputs,
    MicroBatch,
    Plan,
    Sample,
    choose,
    count_dealt,
    cut_steps,
    engine_tokens,
    first_places,
    lag_name,
    list_samples,
    pack,
    tabulate,
)
from learner.spec import RolloutBatch
from learner.weighting import Weights, weight_metrics


@dataclass(frozen=True, eq=False)
class Rank:
    """The rank that prepares, and its forwards. All ranks make the same number of each."""

    rank: int
    world_size: int
    device: torch.device
    cost: RowCost
    policy: Callable[[Inputs], HeadOutput]
    reference: Callable[[Inputs], HeadOutput] | None
    of_all_ranks: Callable[[Any], list[Any]]  # every rank's, in the order of ranks


@dataclass(frozen=True, eq=False)
class Prepared:
    steps: list[list[MicroBatch]]  # of one pass, this rank's
    metrics: dict[str, float]
    num_samples: int
    num_rank_tokens: int  # of this rank in one pass, without padding


@torch.no_grad()
def prepare_batch(batch: RolloutBatch, objective: Objective, here: Rank, num_steps: int) -> Prepared:
    """Makes a rollout batch ready to train; ``num_steps``: optimizer steps taken so far.

    ``old_logp`` is computed for all but the first mini-batch. That one meets the weights unchanged, so its ``old_logp`` is
    ``logp.detach()`` of its own forward: the ratio is exactly 1 and no forward is spent, in a batch of one optimizer step none at
    all. With fewer groups than ``num_mini_batches`` there are fewer mini-batches, with no trainable sample none.
    """
    spec = objective.spec
    objective.note_version(batch.version, num_steps)
    samples = list_samples(batch.groups)
    table = tabulate(samples, spec.part_weights)
    plan = Plan(spec.batch.num_mini_batches, spec.batch.tokens_per_micro_batch, here.cost, here.world_size)
    seed = (spec.seed, batch.step)
    scored: dict[str, Tensor] = {}
    scored_cut: Cut | None = None
    if objective.scores_first:
        scorable = [n for n, sample in enumerate(samples) if table.valid[n] and sample.num_loss_tokens]
        scored_cut = cut_steps(samples, scorable, plan, seed)
        scored = _score(samples, scored_cut, objective.extras, here)
        if objective.kl_in_reward:
            table = objective.take_kl(table, scored["logp"], scored["ref_logp"])
    advantages = objective.estimate(table)
    weights = objective.weigh(table, advantages.sample)
    chosen, counts = choose(samples, table.valid, weights.kept, mask_truncated=spec.algorithm.mask_truncated)
    cut = cut_steps(samples, chosen, plan, seed)
    engine = engine_tokens(samples, batch.version)
    known = _Known(objective, table, advantages, weights, engine, cut)
    if objective.whole_batch is not None:
        known.token_weight = _whole_batch_weights(objective.whole_batch, known, chosen, scored)
    starts = first_places(samples)
    inputs = [[pack(samples, starts, numbers, here.device) for numbers in step[here.rank]] for step in cut]
    steps = [[known.micro_batch(one, here.device) for one in step] for step in inputs]
    _add_logps(steps, scored, same_packing=cut == scored_cut, objective=objective, here=here)
    metrics = _metrics(known, samples, chosen, counts, num_steps)
    dealt = count_dealt(samples, cut, here.world_size)
    metrics |= {
        "batch/num_mini_batches": len(steps),
        "batch/num_micro_batches": sum(map(len, steps)),
        "batch/padding_frac": dealt.padding_frac,
        "batch/rank_imbalance": dealt.imbalance,
    }
    return Prepared(steps, {name: float(value) for name, value in metrics.items()}, len(chosen), dealt.num_tokens[here.rank])


def _score(samples: Sequence[Sample], cut: Cut, extras: bool, here: Rank) -> dict[str, Tensor]:
    """What policy and reference say of the tokens in the cut, gathered over ranks: float32 [N] by name, 0 for the other tokens."""
    starts = first_places(samples)
    mine = []
    for numbers in (numbers for step in cut for numbers in step[here.rank]):
        inputs = pack(samples, starts, numbers, here.device)
        out = here.policy(inputs)
        values = {"logp": out.logp, "entropy": out.entropy, "max_logp": out.max_logp}
        if here.reference is not None:
            values["ref_logp"] = here.reference(inputs).logp
        if numbers:
            mine.append((inputs.places, {name: value.cpu() for name, value in values.items() if value is not None}))
    everyone = [part for parts in here.of_all_ranks(mine) for part in parts]
    names = ["logp", "entropy"] + ["max_logp"] * extras + ["ref_logp"] * (here.reference is not None)
    num_tokens = sum(sample.num_loss_tokens for sample in samples)
    scored = {name: torch.zeros(num_tokens) for name in names}
    for places, values in everyone:
        for name, value in values.items():
            scored[name][places] = value
    return scored


class _Known:
    """What is known of all S samples and N loss tokens before training; on the CPU."""

    def __init__(
        self,
        objective: Objective,
        table: Samples,
        advantages: Advantages,
        weights: Weights,
        engine: EngineTokens,
        cut: Cut,
    ) -> None:
        self.table, self.weights, self.engine = table, weights, engine
        self.lengths = table.need("num_tokens")
        self.owner = table.token_sample()
        self.advantage = advantages.sample[self.owner] if advantages.token is None else advantages.token
        self.of_sample = advantages.sample
        self.token_weight = torch.ones(len(self.owner))
        self.behave_step = objective.steps_at(engine.version)
        spec = objective.spec
        self.policy_denominator, self.kl_denominator = torch.ones(2, len(self.lengths)).unbind()
        self.num_responses = torch.ones(len(self.lengths))
        for step in cut:
            mine = torch.tensor([number for rank in step for numbers in rank for number in numbers])
            lengths = self.lengths[mine]
            in_kl = lengths if objective.kl_quantile is None else low_entropy_count(lengths, objective.kl_quantile)
            for into, counted in ((self.policy_denominator, lengths), (self.kl_denominator, in_kl)):
                into[mine] = denominators(spec.algorithm.aggregation, counted, count_step(counted), spec.max_response_tokens)
            self.num_responses[mine] = float(len(mine))

    def micro_batch(self, inputs: Inputs, device: torch.device) -> MicroBatch:
        """The tokens of one micro-batch, on the device."""

        def tokens(values: Tensor) -> Tensor:
            return values[inputs.places].to(device)

        def owners(values: Tensor) -> Tensor:
            return values[inputs.owners].to(device)

        return MicroBatch(
            inputs=inputs,
            advantage=tokens(self.advantage),
            sample_weight=owners(self.weights.weight),
            token_weight=tokens(self.token_weight),
            policy_denominator=owners(self.policy_denominator),
            kl_denominator=owners(self.kl_denominator),
            roll_logp=tokens(self.engine.roll_logp),
            old_logp=None,
            ref_logp=None,
            behave_step=tokens(self.behave_step),
            group=owners(self.table.group),
            gap=tokens(self.engine.gap),
            lag=tokens(self.engine.lag),
            lags=tuple(self.engine.lag[inputs.places].unique().tolist()),
            num_responses=float(self.num_responses[inputs.owners[0]]),
        )


def _whole_batch_weights(
    scheme: Callable[[LossTokens], Tensor], known: _Known, chosen: Sequence[int], scored: dict[str, Tensor]
) -> Tensor:
    """Token weights float32 [N] of a scheme that compares the responses of a group: from the policy as the batch arrives, once,
    over the tokens that are trained on; 1 for the others."""
    trained = torch.zeros(len(known.lengths), dtype=torch.bool)
    trained[list(chosen)] = True
    places = trained[known.owner].nonzero()[:, 0]
    owner = known.owner[places]
    ones, values = torch.ones(len(places)), {name: value[places] for name, value in scored.items()}
    weight = scheme(
        LossTokens(
            logp=values["logp"],
            entropy=values["entropy"],
            old_logp=values["logp"],
            roll_logp=known.engine.roll_logp[places],
            ref_logp=values.get("ref_logp"),
            advantage=known.advantage[places],
            sample_weight=known.weights.weight[owner],
            token_weight=ones,
            correction=ones,
            policy_denominator=known.policy_denominator[owner],
            kl_denominator=known.kl_denominator[owner],
            kl_mask=ones,
            response=owner.unique(return_inverse=True)[1],
            max_logp=values.get("max_logp"),
            group=known.table.group[owner],
        )
    )
    if weight.shape != ones.shape or not (weight >= 0).all():
        raise ValueError(f"token_weighting must give one number of 0 or more a token, [{len(ones)}], got {list(weight.shape)}")
    return known.token_weight.index_copy(0, places, weight.float())


def _add_logps(
    steps: list[list[MicroBatch]], scored: dict[str, Tensor], *, same_packing: bool, objective: Objective, here: Rank
) -> None:
    """Adds ``old_logp`` and ``ref_logp``, by forwards in the packing of training unless those were made in it already."""
    if objective.needs_old_logp:
        for micro in (micro for step in steps[1:] for micro in step):
            if same_packing:
                micro.old_logp = scored["logp"][micro.inputs.places].to(here.device)
            else:
                micro.old_logp = here.policy(micro.inputs).logp
    if here.reference is not None:
        for micro in (micro for step in steps for micro in step):
            if scored:
                micro.ref_logp = scored["ref_logp"][micro.inputs.places].to(here.device)
            else:
                micro.ref_logp = here.reference(micro.inputs).logp


def _metrics(
    known: _Known, samples: Sequence[Sample], chosen: Sequence[int], counts: BatchCounts, num_steps: int
) -> dict[str, float]:
    """Counts of the batch, and what the tokens and samples that are trained on say before any forward."""
    metrics: dict[str, float] = {
        "batch/num_samples": counts.num_samples,
        "batch/num_invalid": counts.num_invalid,
        "batch/num_truncated": counts.num_truncated,
        "batch/num_empty": counts.num_empty,
        "batch/num_pruned": counts.num_pruned,
        "batch/num_loss_tokens": int(known.lengths[list(chosen)].sum()),
    }
    live = known.table.sum_tokens(known.advantage.abs())[list(chosen)] > 0
    metrics["eff/sample_frac"] = int(live.sum()) / len(samples) if samples else 0.0
    if not chosen:
        return metrics
    advantage = known.of_sample[list(chosen)].double()
    metrics |= {"adv/mean": float(advantage.mean()), "adv/std": float(advantage.std(correction=0))}
    metrics |= weight_metrics(known.table, known.weights.weight, known.of_sample, chosen)
    trained = torch.zeros(len(samples), dtype=torch.bool)
    trained[list(chosen)] = True
    of_trained = trained[known.owner]
    by_lag = known.engine.lag[of_trained].bincount().tolist()
    metrics |= {f"stale/frac_{lag_name(lag)}": num / sum(by_lag) for lag, num in enumerate(by_lag) if num}
    metrics["stale/updates"] = num_steps - float(known.behave_step[of_trained].double().mean())
    if known.table.kl is not None:
        metrics["kl/in_reward"] = float(known.table.sum_tokens(known.table.kl)[known.table.valid].mean())
    return metrics


def loss_tokens(micro: MicroBatch, out: HeadOutput, pass_number: int, *, num_steps_before: int, num_steps: int) -> LossTokens:
    """What the credit functions see of a micro-batch, whose ``old_logp`` is there. The numbers of optimizer steps taken: when its rollout
    batch arrived, and now."""
    ones = torch.ones_like(out.logp.detach())
    return LossTokens(
        logp=out.logp.detach(),
        entropy=out.entropy.detach(),
        old_logp=out.logp.detach() if micro.old_logp is None else micro.old_logp,
        roll_logp=micro.roll_logp,
        ref_logp=micro.ref_logp,
        advantage=micro.advantage,
        sample_weight=micro.sample_weight,
        token_weight=micro.token_weight,
        correction=ones,
        policy_denominator=micro.policy_denominator,
        kl_denominator=micro.kl_denominator,
        kl_mask=ones,
        response=micro.inputs.response,
        max_logp=out.max_logp,
        group=micro.group,
        pass_number=torch.full_like(micro.group, pass_number),
        behave_step=micro.behave_step,
        prox_step=ones * num_steps_before,
        current_step=ones * num_steps,
    )
