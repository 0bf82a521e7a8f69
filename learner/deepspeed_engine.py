"""DeepSpeed, and nothing else knows it: one engine a rank, whose step boundary and gradient scale are ours.

DeepSpeed would divide the loss by its accumulation steps and average gradients over ranks; our losses already carry their global
denominator. So accumulation is told to be 1, the boundary is set by hand, and ``grad_scale`` undoes the averaging.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import deepspeed
import torch
from torch import Tensor, nn

from configs.schema import Dtype, LearnerConfig, Optimizer, OptimizerConfig, Schedule
from learner.aside import Aside

_MOMENTS = {Optimizer.adamw: ("exp_avg", "exp_avg_sq"), Optimizer.sgd: ()}
REDUCE_ELEMENTS = 500_000_000  # DeepSpeed's default size of the buffer that reduces gradients
_COUNTERS = ("num_steps", "num_skipped", "num_skipped_in_a_row")


def grad_scale(world_size: int) -> float:
    """The factor that undoes DeepSpeed's averaging of gradients over ranks, the same at every ZeRO stage."""
    return float(world_size)


def check_precision(dtype: Dtype, zero_stage: int) -> None:
    """Raises ValueError where this precision would train wrongly."""
    if dtype is Dtype.bfloat16 and zero_stage == 0:
        raise ValueError(
            "model.dtype=bfloat16 needs learner.zero_stage of 1 or higher: at stage 0 DeepSpeed keeps no float32 master weights, "
            "and small updates would be rounded away"
        )


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step`` of ``total_steps``, counted from 1.

    It rises linearly to the peak at step W, the last of the warm-up, and is at the floor in the last step:
    peak * step / W up to W; then with x = (step - W) / (total_steps - W), peak * (floor + (1 - floor) * f(x)), where f is 1
    (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine).
    """
    warmup = config.warmup_steps or round(config.warmup_ratio * total_steps)
    if step <= warmup:
        return config.learning_rate * step / warmup
    x = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = {Schedule.constant: 1.0, Schedule.linear: 1.0 - x, Schedule.cosine: 0.5 * (1.0 + math.cos(math.pi * x))}[
        config.schedule
    ]
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1.0 - floor) * shape)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. A skipped one left weights and moments as they were."""

    skipped: bool
    grad_norm: float  # global, before clipping; not finite where skipped
    learning_rate: float


class DeepSpeedEngine:
    """Trains one module. ``forward`` and ``backward`` any number of times, then ``step``; all ranks alike, in one process group.

    ``num_steps`` counts optimizer steps that were tried, ``num_skipped`` those that were not finite. The schedule follows
    ``num_steps``, so a run ends at the floor of its schedule whatever was skipped.
    """

    def __init__(self, module: nn.Module, config: LearnerConfig, dtype: Dtype, *, world_size: int, total_steps: int):
        check_precision(dtype, config.zero_stage)
        self._config = config
        self._dtype = dtype
        self._total_steps = total_steps
        self.world_size = world_size
        self.num_steps = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = _make_optimizer(config.optimizer, parameters)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            model_parameters=parameters,
            config=_deepspeed_config(config, dtype, world_size, module),
            dist_init_required=False,
        )
        self.device = torch.device(self._engine.device)
        self.module: nn.Module = self._engine.module
        self._aside: Aside | None = None

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """One forward through the engine, so that ZeRO's hooks see it."""
        return self._engine(*inputs, **options)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of ``loss``, whose denominator is already global. ``last``: the step follows."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(grad_scale(self.world_size) * loss, scale_wrt_gas=False)

    def raw_gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Full gradients by name, summed over micro-batches and ranks, before clipping: after the last ``backward``, before
        ``step``. Under ZeRO every rank must call it."""
        return {name: deepspeed.utils.safe_get_full_grad(p).detach().float().clone() for name, p in named}

    def step(self) -> StepResult:
        """Clips, steps, clears the gradients. A gradient norm that is not finite skips the step, on every rank alike, since
        the norm is taken over all ranks' gradients.

        The norm is also the guard for a bad loss: the loss is linear in the log-probabilities, so a credit that is not finite makes
        a gradient that is not.
        """
        self.num_steps += 1
        rate = learning_rate(self._config.optimizer, self.num_steps, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        if self._config.zero_stage == 0:
            norm, skipped = self._step_plain()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            skipped = bool(self._engine.optimizer.overflow)
        self.num_skipped += skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        return StepResult(skipped, norm, rate)

    def _step_plain(self) -> tuple[float, bool]:
        # At stage 0 DeepSpeed computes the norm only to clip, does not tell it, and steps on whatever it is.
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            self._engine.zero_grad()
            return float(norm), True
        if self._config.optimizer.max_grad_norm > 0:
            scale = self._config.optimizer.max_grad_norm / (norm + 1e-6)
            if scale < 1:
                torch._foreach_mul_(gradients, scale)
        self._engine.step()
        return float(norm), False

    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Inside it the parameters are whole, on every rank; every rank must enter it. Costs nothing below ZeRO-3."""
        if self._config.zero_stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters([p for p in parameters if hasattr(p, "ds_id")], modifier_rank=None)

    def offload(self) -> int:
        """Lays aside what only training needs: masters, moments, gradients and the buffers that reduce them. Weights stay, so that they can
        be gathered and scored. Returns how many bytes of this rank's device became free. DeepSpeed's own way takes no other optimizer
        than its FusedAdam at stage 3, and moves no bfloat16 at stage 1."""
        self.check_states_are_here("offload")
        weights = [tensor for p in self.module.parameters() for tensor in (p, getattr(p, "ds_tensor", p))]
        self._aside = Aside(self._held_for_training(), scratch=self._scratch(), but=weights)
        deepspeed.get_accelerator().empty_cache()
        return self._aside.num_bytes

    def reload(self) -> None:
        """Takes back what ``offload`` laid aside. Raises RuntimeError where nothing is."""
        if self._aside is None:
            raise RuntimeError("reload() comes after offload(): no states are laid aside")
        self._aside.put_back()
        self._aside = None

    def check_states_are_here(self, what: str) -> None:
        """Raises RuntimeError where they are laid aside."""
        if self._aside is not None:
            raise RuntimeError(f"{what}() comes after reload(): the states are laid aside while the engines have the device")

    def _held_for_training(self) -> Iterator[Tensor]:
        zero, stage = self._engine.optimizer, self._config.zero_stage
        for master in self._masters():
            yield master
            yield from (
                part for part in self._optimizer.state.get(master, {}).values() if torch.is_tensor(part) and part.dim() > 0
            )
        if stage == 1 and self._dtype is Dtype.bfloat16:
            yield from zero.fp32_groups_gradients_flat
        elif stage == 3:
            yield zero.grad_partitions_flat_buffer

    def _scratch(self) -> Iterator[Tensor]:
        """Between steps nothing is in the buffers that reduce gradients; only ZeRO-3 keeps them then."""
        if self._config.zero_stage == 3:
            yield from (bucket.buffer for bucket in self._engine.optimizer.ipg_buckets.values())

    @property
    def state_parts(self) -> tuple[str, ...]:
        """What is kept of every parameter: the float32 master and the optimizer's moments."""
        return ("master", *_MOMENTS[self._config.optimizer.name])

    def states(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[str, Tensor]]:
        """For each parameter its state by part, whole, in float32, on every rank. All ranks read it to the end."""
        self._make_moments()
        for p in parameters:
            if self._config.zero_stage == 0:
                yield {"master": p.detach()} | {part: self._optimizer.state[p][part] for part in self.state_parts[1:]}
            else:
                moments = {part: deepspeed.utils.safe_get_full_optimizer_state(p, part) for part in self.state_parts[1:]}
                yield {"master": deepspeed.utils.safe_get_full_fp32_param(p)} | moments

    @torch.no_grad()
    def restore(self, states: Iterable[tuple[nn.Parameter, Mapping[str, Tensor]]], description: Mapping[str, Any]) -> None:
        """Takes over states as ``states`` gave them, of every parameter, and the counters of ``description``. All ranks call it.

        Raises ValueError for states of another precision or optimizer.
        """
        for key, value in self._kind().items():
            if description[key] != value:
                raise ValueError(
                    f"the state was saved with {key}={description[key]}, this run has {value}: resume with the former"
                )
        for name in _COUNTERS:
            setattr(self, name, description[name])
        self._make_moments()
        for master in self._masters() if len(self.state_parts) > 1 else ():
            self._optimizer.state[master]["step"].fill_(self.num_steps - self.num_skipped)
        for parameter, state in states:
            self._restore_parameter(parameter, state)
        if self._config.zero_stage in (1, 2):
            self._engine.optimizer.update_lp_params()  # the weights anew from the masters

    def _restore_parameter(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        utils, stage = deepspeed.utils, self._config.zero_stage
        moments = {part: state[part] for part in self.state_parts[1:]}
        if stage == 0:
            parameter.copy_(state["master"])
            for part, value in moments.items():
                self._optimizer.state[parameter][part].copy_(value)
        elif stage < 3:
            utils.safe_set_full_fp32_param(parameter, state["master"])
            for part, value in moments.items():
                utils.safe_set_full_optimizer_state(parameter, value, part)
        else:  # not safe_set_full_*: those fail where the ranks do not divide the parameter
            utils.safe_set_local_fp32_param(parameter, _own_part(parameter, state["master"]))
            for part, value in moments.items():
                utils.safe_set_local_optimizer_state(parameter, _own_part(parameter, value), part)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    parameter.copy_(state["master"])

    def _masters(self) -> list[Tensor]:
        """What the optimizer steps on: at stage 0 the parameters themselves, else this rank's flat parts of all of them."""
        zero = self._engine.optimizer
        if self._config.zero_stage == 3:
            return list(zero.fp32_partitioned_groups_flat)
        if self._config.zero_stage == 1 and self._dtype is Dtype.bfloat16:  # another class of DeepSpeed's
            return list(zero.fp32_groups_flat_partition)
        return [master for group in self._optimizer.param_groups for master in group["params"]]

    def _make_moments(self) -> None:
        """The moments that the optimizer would make in its first step, so that states can be read and restored before it."""
        moments = self.state_parts[1:]
        if not moments:
            return
        for master in self._masters():
            state = self._optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state.update({part: torch.zeros_like(master) for part in moments})
        if self._config.zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def description(self) -> dict[str, Any]:
        """Counters, and how the state came to be."""
        layout = {"learner.num_ranks": self.world_size, "learner.zero_stage": self._config.zero_stage}
        return {name: getattr(self, name) for name in _COUNTERS} | self._kind() | layout

    def _kind(self) -> dict[str, str]:
        return {"model.dtype": self._dtype.value, "learner.optimizer.name": self._config.optimizer.name.value}


def _own_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor as ZeRO-3 cuts it: equal parts, the last ones filled up."""
    size = parameter.ds_tensor.numel()
    part = value.flatten()[torch.distributed.get_rank() * size :][:size]
    return nn.functional.pad(part, (0, size - part.numel()))


def frozen_forward(module: nn.Module, config: LearnerConfig, dtype: Dtype, *, world_size: int) -> Callable[..., Any]:
    """The module for forwards only. Below ZeRO-3 it lies whole on this rank's device; at ZeRO-3 it is split over the ranks, on GPUs
    with the parts in main memory, fetched layer by layer for a forward: all ranks then make the same forwards."""
    if config.zero_stage < 3:
        return module.to(deepspeed.get_accelerator().current_device_name())
    settings = _deepspeed_config(config, dtype, world_size, module)
    if torch.cuda.is_available():
        settings["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    engine, *_ = deepspeed.initialize(model=module, config=settings, dist_init_required=False)
    return cast(Callable[..., Any], engine)


def join_process_group(rank: int, world_size: int) -> None:
    """Joins the other ranks where MASTER_ADDR and MASTER_PORT say; a rank alone needs neither.

    Raises ValueError where they are missing.
    """
    # DeepSpeed would compile a shared-memory collective with gcc (half a minute, once a machine) that gloo replaces; with an empty
    # table of usable ops it does not look for it.
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.distributed.is_initialized():
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if world_size > 1 and missing:
            raise ValueError(
                f"rank {rank} of {world_size} does not know where to meet the others: {' and '.join(missing)} not set"
            )
        store = torch.distributed.HashStore() if world_size == 1 else None
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _make_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Torch's own: DeepSpeed's AdamW compiles an op at first use and is no faster here.
    if config.name is Optimizer.sgd:
        return torch.optim.SGD(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _deepspeed_config(config: LearnerConfig, dtype: Dtype, world_size: int, module: nn.Module) -> dict[str, Any]:
    # The buffer that reduces gradients is made whole: for a small model never larger than the model. The default, 2 GB a buffer, is
    # only address space until it is written, but a process with a few of them can no longer be forked.
    bucket = min(REDUCE_ELEMENTS, sum(parameter.numel() for parameter in module.parameters()))
    return {
        "train_micro_batch_size_per_gpu": 1,  # nominal: our micro-batches are cut by tokens
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "gradient_clipping": config.optimizer.max_grad_norm if config.zero_stage > 0 else 0.0,
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False, "reduce_bucket_size": bucket},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype is Dtype.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
    }
