"""What a configuration chose to train on: its functions with their parameters bound, and what they remember between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.functions import resolve_function
from configs.schema import Choice, KlFilter, KlKind, KlPlace, Reference
from learner.advantages import ADVANTAGES, Advantages, Samples, estimate
from learner.corrections import CORRECTIONS
from learner.credit import Credit, token_credit
from learner.entropy import adapt_entropy, initial_entropy_state
from learner.kl import KL_TERMS
from learner.loss_tokens import LossTokens
from learner.spec import LearnerSpec
from learner.surrogates import SURROGATES
from learner.token_weights import TOKEN_WEIGHTINGS, is_whole_batch, needed_fields
from learner.weighting import WEIGHTINGS, Weights, weigh_samples

_KNOWN_VERSIONS = 256  # of which the count of optimizer steps is remembered
_NOT_GIVEN = {
    "role": "roles of tokens come from an environment with actions, and none is built",
    "teacher_logp": "log-probabilities under a teacher need one, and none is built",
}


def refuse_missing_fields(function: Callable[..., Any], key: str, name: str) -> None:
    """Raises ConfigError where a function of loss tokens needs a field that no run can give it."""
    for field in needed_fields(function):
        if field in _NOT_GIVEN:
            works = "grpo" if key == "algorithm" else "none"
            raise ConfigError(f"{key}={name} needs LossTokens.{field}: {_NOT_GIVEN[field]}; {key}={works} works")


def needs_old_logp(choice: Choice) -> bool:
    """Whether the learner's own log-probabilities at the start of the update are in the ratio under this correction."""
    return choice.name != "bypass" and choice.params.get("prox") != "interpolated"


class Objective:
    """The objective of a run, the same on every rank. Raises ConfigError where a chosen function needs what no run can give."""

    def __init__(self, spec: LearnerSpec) -> None:
        self.spec = spec
        kl = spec.algorithm.kl
        self._estimator = resolve_function(spec.advantage.name, ADVANTAGES, "advantage")
        self._weighting = resolve_function(spec.weighting.name, WEIGHTINGS, "weighting")
        surrogate = resolve_function(spec.algorithm.name, SURROGATES, "algorithm")
        scheme = resolve_function(spec.token_weighting.name, TOKEN_WEIGHTINGS, "token_weighting")
        correction = resolve_function(spec.correction.name, CORRECTIONS, "correction")
        needed: set[str] = set()
        for function, key, name in (
            (surrogate, "algorithm", spec.algorithm.name),
            (scheme, "token_weighting", spec.token_weighting.name),
            (correction, "correction", spec.correction.name),
        ):
            refuse_missing_fields(function, key, name)
            needed |= set(needed_fields(function))
        with_kl, in_reward = kl.kind is not KlKind.off, kl.place is KlPlace.reward
        self.needs_reference = with_kl or "ref_logp" in needed
        if self.needs_reference and spec.learner.reference is Reference.off:
            raise ConfigError(
                "algorithm.kl, or a function that reads ref_logp, needs a reference: set learner.reference=frozen, or "
                "algorithm.kl.kind=off"
            )
        self.extras = "max_logp" in needed
        self.kl_in_reward = with_kl and in_reward
        self.kl_quantile = kl.entropy_quantile if kl.token_filter is KlFilter.low_entropy else None
        self.needs_old_logp = needs_old_logp(spec.correction)
        bound = partial(scheme, **spec.token_weighting.params) if spec.token_weighting.name != "none" else None
        self.whole_batch: Callable[[LossTokens], Tensor] | None = bound if is_whole_batch(scheme) else None
        self._credit: Callable[..., Credit] = partial(
            token_credit,
            surrogate=partial(surrogate, **spec.algorithm.params),
            kl_kind=KlKind.off if in_reward else kl.kind,
            kl_beta=kl.beta,
            kl_ratio=kl.ratio,
            kl_entropy_quantile=self.kl_quantile,
            correction=partial(correction, **spec.correction.params) if spec.correction.name != "none" else None,
            token_weighting=None if self.whole_batch is not None else bound,
        )
        self._entropy = initial_entropy_state(spec.algorithm.entropy_beta)
        self._weighting_state: Any = None
        self._steps_at: dict[int, int] = {}  # optimizer steps taken when the learner was at a version

    # ---- the rollout batch ------------------------------------------------------------------------------------------

    @property
    def scores_first(self) -> bool:
        """Whether advantages or token weights need a forward of the whole rollout batch."""
        return self.kl_in_reward or self.whole_batch is not None

    def take_kl(self, table: Samples, logp: Tensor, ref_logp: Tensor) -> Samples:
        """The samples with what KL in the reward takes from each of their tokens; one whose KL is not finite is not valid.

        ``logp`` and ``ref_logp`` float32 [N], of the learner as the batch arrives and of the reference.
        """
        kl = self.spec.algorithm.kl
        owner = table.token_sample()
        taken = torch.where(table.valid[owner], kl.beta * KL_TERMS[kl.kind](logp - ref_logp).value, 0.0)
        finite = table.sum_tokens(taken).isfinite()
        return replace(table, kl=torch.where(finite[owner], taken, 0.0), valid=table.valid & finite)

    def estimate(self, table: Samples) -> Advantages:
        """The advantages of the rollout batch."""
        return estimate(self._estimator, table, self.spec.advantage.params)

    def weigh(self, table: Samples, advantage: Tensor) -> Weights:
        """Sample weights from the advantages [S]. A weighting that remembers has then seen this batch."""
        weights, self._weighting_state = weigh_samples(
            self._weighting, table, advantage, self.spec.weighting.params, self._weighting_state
        )
        return weights

    def note_version(self, version: int, num_steps: int) -> None:
        """The learner is at ``version`` after ``num_steps`` optimizer steps that were taken."""
        self._steps_at[version] = num_steps
        for old in sorted(self._steps_at)[:-_KNOWN_VERSIONS]:
            del self._steps_at[old]

    def steps_at(self, version: Tensor) -> Tensor:
        """Optimizer steps taken at each of these versions, float32; of one that was never noted those of the last before it, or of
        the first of all."""
        known = torch.tensor(sorted(self._steps_at))
        steps = torch.tensor([self._steps_at[v] for v in known.tolist()], dtype=torch.float32)
        return steps[(torch.searchsorted(known, version, right=True) - 1).clamp(min=0)]

    # ---- the tokens of a micro-batch --------------------------------------------------------------------------------

    @property
    def entropy_beta(self) -> float:
        """The coefficient of the entropy bonus in this step."""
        return self._entropy.beta

    def credit(self, tokens: LossTokens) -> Credit:
        return self._credit(tokens, entropy_beta=self._entropy.beta)

    def end_step(self, entropy: float) -> None:
        """Moves the entropy bonus towards its target, where it has one. ``entropy``: the batch's, over all ranks."""
        adaptive = self.spec.algorithm.adaptive_entropy
        if adaptive.target is not None:
            self._entropy = adapt_entropy(
                self._entropy, entropy, target=adaptive.target, gain=adaptive.gain, max_beta=adaptive.max_beta
            )

    # ---- memory -----------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """What the objective remembers between steps, as JSON has it."""
        state = self._weighting_state
        return {
            "weighting": asdict(state) if is_dataclass(state) and not isinstance(state, type) else state,
            "entropy_beta": self._entropy.beta,
            "steps_at": {str(version): steps for version, steps in self._steps_at.items()},
        }

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Takes over what ``memory`` gave. A weighting or an adaptive entropy that was not there then starts afresh."""
        first, state = getattr(self._weighting, "initial", None), memory["weighting"]
        if first is not None and state is not None:
            self._weighting_state = replace(first, **state) if is_dataclass(first) and not isinstance(first, type) else state
        if self.spec.algorithm.adaptive_entropy.target is not None:
            self._entropy = replace(self._entropy, beta=memory["entropy_beta"])
        self._steps_at = {int(version): steps for version, steps in memory["steps_at"].items()}
