"""DeepSpeed, and nothing else knows it: one engine a rank, whose step boundary and gradient scale are ours.

DeepSpeed would divide the loss by its accumulation steps and average gradients over ranks; our losses already carry their global
denominator. So accumulation is told to be 1, the boundary is set by hand, and ``grad_scale`` undoes the averaging.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from configs.schema import Dtype, LearnerConfig, Optimizer, OptimizerConfig, Schedule

_STATE_FILE = "learner.json"
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
    """Trains one module. ``forward`` and ``backward`` any number of times, then ``step``; all ranks alike.

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
        _join_process_group()
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = _make_optimizer(config.optimizer, parameters)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._optimizer,
            model_parameters=parameters,
            config=_deepspeed_config(config, dtype, world_size),
            dist_init_required=False,
        )
        self.device = torch.device(self._engine.device)
        self.module: nn.Module = self._engine.module

    def forward(self, *inputs: Any) -> Any:
        """One forward through the engine, so that ZeRO's hooks see it."""
        return self._engine(*inputs)

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

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer states and counters, each rank its share. All ranks call it."""
        self._engine.save_checkpoint(str(folder), tag="engine", save_latest=False)
        if torch.distributed.get_rank() == 0:
            counters = {name: getattr(self, name) for name in _COUNTERS}
            (folder / _STATE_FILE).write_text(json.dumps(counters | self._layout()) + "\n")

    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote. Raises FileNotFoundError where there is nothing to restore, ValueError where what is there
        was written with another number of ranks, ZeRO stage or precision."""
        if not (folder / _STATE_FILE).is_file():
            raise FileNotFoundError(f"{folder} holds no learner state: {_STATE_FILE} is missing")
        state = json.loads((folder / _STATE_FILE).read_text())
        for key, value in self._layout().items():
            if state[key] != value:
                raise ValueError(f"{folder} was written with {key}={state[key]}, this run has {value}: resume with the former")
        self._engine.load_checkpoint(str(folder), tag="engine", load_lr_scheduler_states=False)
        for name in _COUNTERS:
            setattr(self, name, state[name])

    def _layout(self) -> dict[str, Any]:
        return {
            "learner.num_ranks": self.world_size,
            "learner.zero_stage": self._config.zero_stage,
            "model.dtype": self._dtype.value,
            "learner.optimizer.name": self._config.optimizer.name.value,
        }


def _join_process_group() -> None:
    """Joins the ranks that RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK name; a rank alone needs none of them."""
    # DeepSpeed would compile a shared-memory collective with gcc (half a minute, once a machine) that one rank never uses and
    # gloo replaces; with an empty table of usable ops it does not look for it.
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


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


def _deepspeed_config(config: LearnerConfig, dtype: Dtype, world_size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # nominal: our micro-batches are cut by tokens
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "gradient_clipping": config.optimizer.max_grad_norm if config.zero_stage > 0 else 0.0,
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype is Dtype.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
    }
