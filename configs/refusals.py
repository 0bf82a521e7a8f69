"""Combinations that cannot mean what they say: one table, with the reason and what works instead.

Pure over the configuration. The validator refuses by it before anything is imported, the check of the chosen functions once more
with what these say of themselves, and ``limen explain`` names the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from configs.errors import ConfigError
from configs.lag import correction_in_use
from configs.schema import Aggregation, Combine, Config, KlFilter, KlKind, KlPlace, KlRatio, Reference

GROUP_RELATIVE = {"grpo", "dr_grpo", "rloo", "mad", "batch_norm", "gdpo", "reinforce_pp_baseline"}
PER_TOKEN = {"reinforce_pp", "reinforce_pp_baseline"}
RATIO_FREE = {"no_ratio", "reinforce"}
FLIPPED = ("aspo", "aspo_archer")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the chosen functions say of themselves; of ours it is known by name."""

    ratio_based: bool
    group_relative: bool
    per_token: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row of the table."""

    keys: tuple[str, ...]  # named with their values
    when: Callable[[Config, Facts], bool]
    reason: str
    cure: str | Callable[[Config], str]  # what works
    of_functions: bool = False  # only once the chosen functions are known

    def message(self, config: Config) -> str:
        named = ", ".join(f"{key}={_shown(config, key)}" for key in self.keys)
        return f"{named}: {self.reason}; {self.cure if isinstance(self.cure, str) else self.cure(config)}"


def refused(config: Config, facts: Facts | None = None) -> Iterator[str]:
    """The message of every rule that refuses this configuration; without ``facts`` only of those that names alone can tell."""
    known = facts or Facts(
        ratio_based=config.algorithm.name not in RATIO_FREE,
        group_relative=config.advantage.name in GROUP_RELATIVE,
        per_token=config.advantage.name in PER_TOKEN,
    )
    for row in REFUSALS:
        if (facts is not None or not row.of_functions) and row.when(config, known):
            yield row.message(config)


def check_combinations(config: Config, facts: Facts | None = None) -> None:
    """Raise ConfigError for the first combination of the table that holds."""
    for message in refused(config, facts):
        raise ConfigError(message)


def _shown(config: Config, key: str) -> str:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return str(value.value) if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else str(value)


def _with_kl(config: Config, facts: Facts) -> bool:
    return config.algorithm.kl.kind is not KlKind.off


def _is_inert(config: Config, facts: Facts) -> bool:
    one_step = config.batch.num_mini_batches * config.batch.num_passes == 1
    return one_step and facts.ratio_based and not config.allow_inert and config.correction.name != "bypass"


def _more_steps(config: Config) -> str:
    works = next((n for n in (4, 2, 3) if config.batch.groups_per_step % n == 0), 1)
    more = f"batch.num_mini_batches={works}" if works > 1 else "batch.num_passes=2"
    return f"{more} works, or allow_inert=true"


def _is_truncated(config: Config) -> bool:
    rollout = config.rollout
    return rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0


_TRUNCATED = "the engine samples from a truncated distribution, so its log-probabilities are not those of the learner's full one"
_PER_SEQUENCE = "the mean over a response's tokens is part of the objective"

REFUSALS: tuple[Refusal, ...] = (
    # ---- algorithm ----
    Refusal(
        ("algorithm.name",),
        _is_inert,
        "with batch.num_mini_batches=1 and batch.num_passes=1 its ratio is always 1 and it does nothing",
        _more_steps,
        of_functions=True,
    ),
    Refusal(
        ("algorithm.name", "correction.name"),
        lambda c, _: c.algorithm.name in FLIPPED and c.correction.name == "bypass",
        "the flipped ratio turns every token that the engine finds likelier than the learner into extra weight, up to dual_c",
        "correction=tis_token works, or algorithm=grpo",
    ),
    Refusal(
        ("algorithm.name", "correction.name"),
        lambda c, _: c.algorithm.name == "reinforce" and c.correction.name == "bypass",
        "no ratio is used, so nothing can stand in for old_logp",
        "correction=none works, or correction=tis_token",
    ),
    Refusal(
        ("algorithm.name", "correction.name"),
        lambda c, _: c.algorithm.name == "sapo" and c.correction.name == "decoupled",
        "the soft gate is centred on the policy that sampled, not on a proximal one",
        "correction=tis_token works, or algorithm=grpo",
    ),
    Refusal(
        ("algorithm.name", "algorithm.aggregation"),
        lambda c, _: (
            c.algorithm.name in ("gspo", "gspo_token")
            and c.algorithm.aggregation in (Aggregation.seq_mean_token_sum, Aggregation.token_sum_norm)
        ),
        f"{_PER_SEQUENCE}, and a sum would count long responses by their length",
        "algorithm.aggregation=seq_mean_token_mean works",
    ),
    Refusal(
        ("algorithm.name", "advantage.name"),
        lambda c, facts: c.algorithm.name == "gspo" and facts.per_token,
        "tokens of a response have advantages of their own, and its one ratio is clipped by one sign",
        "algorithm.name=gspo_token works",
    ),
    # ---- advantage ----
    Refusal(
        ("batch.group_size", "advantage.name"),
        lambda c, facts: c.batch.group_size < 2 and facts.group_relative,
        "it compares the completions of a group",
        "batch.group_size=2 or more works, or advantage=reinforce",
    ),
    Refusal(
        ("advantage.name",),
        lambda c, _: c.advantage.name in ("gae", "vtrace"),
        "it needs a critic, whose value loss is no sum of credits and is not built",
        "advantage=reinforce_pp works",
    ),
    # ---- correction ----
    Refusal(
        ("correction.name", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
        lambda c, _: c.correction.name not in ("none", "auto") and _is_truncated(c),
        _TRUNCATED,
        "rollout.top_p=1 rollout.top_k=0 rollout.min_p=0 works, or correction=none",
    ),
    # ---- KL ----
    Refusal(
        ("algorithm.kl.kind", "learner.reference"),
        lambda c, facts: _with_kl(c, facts) and c.learner.reference is Reference.off,
        "it needs a reference",
        "learner.reference=frozen works, or algorithm.kl.kind=off",
    ),
    Refusal(
        ("algorithm.kl.kind", "algorithm.kl.beta"),
        lambda c, facts: _with_kl(c, facts) and c.algorithm.kl.beta == 0,
        "the term does nothing",
        "algorithm.kl.beta=0.001 works, or algorithm.kl.kind=off",
    ),
    Refusal(
        ("algorithm.kl.kind", "algorithm.kl.place"),
        lambda c, _: c.algorithm.kl.kind is KlKind.k1 and c.algorithm.kl.place is KlPlace.loss,
        "the gradient of k1 is 0 on average",
        "algorithm.kl.kind=k2 or k3 works, or algorithm.kl.place=reward",
    ),
    Refusal(
        ("algorithm.kl.place", "algorithm.kl.kind"),
        lambda c, _: c.algorithm.kl.place is KlPlace.reward and c.algorithm.kl.kind is KlKind.k3_plus,
        "only its gradient differs from k3's, and the reward has none",
        "algorithm.kl.kind=k1 or k3 works",
    ),
    Refusal(
        ("algorithm.kl.place", "algorithm.kl.ratio"),
        lambda c, _: c.algorithm.kl.place is KlPlace.reward and c.algorithm.kl.ratio is not KlRatio.none,
        "in the reward there is no ratio and no gradient: it is taken where the batch arrives",
        "algorithm.kl.ratio=none works, or algorithm.kl.place=loss",
    ),
    Refusal(
        ("algorithm.kl.place", "algorithm.kl.token_filter"),
        lambda c, _: c.algorithm.kl.place is KlPlace.reward and c.algorithm.kl.token_filter is not KlFilter.all,
        "the entropies are those of the policy in training, not of the one that is rewarded",
        "algorithm.kl.token_filter=all works, or algorithm.kl.place=loss",
    ),
    # ---- entropy ----
    Refusal(
        ("algorithm.adaptive_entropy.target", "algorithm.entropy_beta", "algorithm.adaptive_entropy.max_beta"),
        lambda c, _: (
            c.algorithm.adaptive_entropy.target is not None
            and not 0 <= c.algorithm.entropy_beta <= c.algorithm.adaptive_entropy.max_beta
        ),
        "the coefficient must start within the bounds in which it is steered",
        "algorithm.entropy_beta=0 works",
    ),
    Refusal(
        ("advantage.name", "algorithm.kl.place"),
        lambda c, facts: c.advantage.name == "gdpo" and _with_kl(c, facts) and c.algorithm.kl.place is KlPlace.reward,
        "it normalises each reward part alone, and KL in the reward belongs to none",
        "algorithm.kl.place=loss works, or advantage=grpo",
    ),
    Refusal(
        ("advantage.name", "reward.combine"),
        lambda c, _: c.advantage.name == "gdpo" and c.reward.combine is not Combine.sum,
        "it adds up the parts' own advantages by their weights, as the sum does the values",
        "reward.combine=sum works, or advantage=grpo",
    ),
    Refusal(
        ("advantage.name", "reward.clip_min", "reward.clip_max"),
        lambda c, _: c.advantage.name == "gdpo" and (c.reward.clip_min, c.reward.clip_max) != (None, None),
        "it never looks at the parts' sum, which these bound",
        "reward.clip_min=null with reward.clip_max=null works, the parts' own bounds do too, or advantage=grpo",
    ),
    # ---- lag ----
    Refusal(
        ("rollout.max_lag", "correction.name", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
        lambda c, _: c.correction.name == "auto" and correction_in_use(c).name != "none" and _is_truncated(c),
        f"above lag 0 late tokens are corrected, but {_TRUNCATED}",
        "rollout.top_p=1 rollout.top_k=0 rollout.min_p=0 works, or correction=none",
    ),
    Refusal(
        ("correction.name", "correction.params"),
        lambda c, _: c.correction.name == "auto" and bool(c.correction.params),
        "what it stands for depends on rollout.max_lag and has its own defaults, so nothing would read them",
        "correction=tis_token works with parameters, such as correction.params.cap=2",
    ),
)
