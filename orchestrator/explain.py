"""``limen explain``: the objective of a configuration as one formula with its numbers, the way a token's credit takes through it, and
what that credit is at a grid of ratios. It starts nothing and needs no model.

Refused combinations are explained all the same, and said to be refused: by the checks that a run makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.errors import ConfigError
from configs.functions import check_params, resolve_function
from configs.lag import correction_in_use
from configs.refusals import Facts, refused
from configs.schema import Aggregation, Choice, Config, KlFilter, KlKind, KlPlace, KlRatio
from learner.advantages import ADVANTAGES, is_group_relative, is_per_token
from learner.corrections import CORRECTIONS
from learner.formulas import formula_of, source_of
from learner.selection import SELECTIONS
from learner.surrogates import SURROGATES, is_ratio_based
from learner.token_weights import TOKEN_WEIGHTINGS
from learner.weighting import WEIGHTINGS
from orchestrator.choices import check_functions
from orchestrator.credit_table import PI_OLD, CreditRow, credit_tables

_MEANS = {
    Aggregation.token_mean: ("mean over all loss tokens of the optimizer step", "its loss tokens"),
    Aggregation.seq_mean_token_mean: (
        "mean over responses of the mean over their tokens",
        "its responses x the response's loss tokens",
    ),
    Aggregation.seq_mean_token_sum: ("mean over responses of the sum over their tokens", "its responses"),
    Aggregation.token_sum_norm: ("sum over all loss tokens / (responses x {max_tokens})", "its responses x {max_tokens}"),
}
_KL = {  # value, factor on grad l
    KlKind.k1: ("d", "1"),
    KlKind.k2: ("d^2 / 2", "d"),
    KlKind.k3: ("(exp(-d) - 1 + d)", "(1 - exp(-d))"),
    KlKind.k3_plus: ("(exp(-d) - 1 + d)", "d"),
}
_KL_SOURCE = "Schulman, Approximating KL divergence (2020)"
_SYMBOLS = "l = log pi of the sampled token, r = pi / pi_old, R the score's value, H the entropy; all but l and H are held when differentiated"


@dataclass(frozen=True, slots=True)
class Part:
    """A function that the configuration chose."""

    key: str
    symbol: str  # in the formula
    choice: Choice
    function: Callable[..., Any]
    ours: bool

    @property
    def in_use(self) -> bool:
        return self.choice.name != "none"

    @property
    def words(self) -> str:
        return formula_of(self.function, self.choice.params)

    @property
    def origin(self) -> str:
        notes = [] if self.ours else ["a function of your own"]
        notes += [source_of(self.function)] if source_of(self.function) else []
        if getattr(self.function, "experimental", False) and "experimental" not in " ".join(notes):
            notes.append("experimental")
        return "; ".join(notes)


def chosen_parts(config: Config) -> dict[str, Part]:
    """The functions of the objective by key, in the order of the pipeline. Raises ConfigError for an unknown function or parameter."""
    surrogate = Choice(config.algorithm.name, config.algorithm.params)
    tables: list[tuple[str, str, Choice, Mapping[str, Callable[..., Any]]]] = [
        ("selection", "", config.selection, SELECTIONS),
        ("advantage", "A", config.advantage, ADVANTAGES),
        ("weighting", "W", config.weighting, WEIGHTINGS),
        ("correction", "omega", correction_in_use(config), CORRECTIONS),
        ("token_weighting", "v", config.token_weighting, TOKEN_WEIGHTINGS),
        ("algorithm", "w", surrogate, SURROGATES),
    ]
    parts = {}
    for key, symbol, choice, table in tables:
        function = resolve_function(choice.name, table, f"{key}.name")
        check_params(function, choice.params, f"{key}.params")
        parts[key] = Part(key, symbol, choice, function, choice.name in table)
    return parts


def explain(config: Config) -> int:
    """Prints the explanation of a configuration."""
    print("\n".join(explanation(config)))
    return 0


def explanation(config: Config) -> list[str]:
    """The lines that ``limen explain`` prints. Raises ConfigError for a function or parameter that cannot be."""
    parts = chosen_parts(config)
    return [
        *_objective(config, parts),
        "",
        *_pipeline(config, parts),
        "",
        *_tables(parts["algorithm"]),
        "",
        *_refused(config, parts),
    ]


# ---- the formula ----------------------------------------------------------------------------------------------------


def _objective(config: Config, parts: Mapping[str, Part]) -> list[str]:
    algorithm, kl = config.algorithm, config.algorithm.kl
    mean, denominator = (text.format(max_tokens=config.rollout.max_new_tokens) for text in _MEANS[algorithm.aggregation])
    weights = [parts[key].symbol for key in ("weighting", "token_weighting", "correction") if parts[key].in_use]
    weight = " ".join(["A", *weights, "w"])
    loss, credit = f"{mean} of [ -{weight} l ]", f"-{weight} / D"
    in_loss = kl.kind is not KlKind.off and kl.place is KlPlace.loss
    if in_loss:
        value, factor = _kl_words(config)
        low = ", low-entropy tokens alone," if kl.token_filter is KlFilter.low_entropy else ""
        loss += f"  +  {kl.beta:g} x the same{low} of [ {value} ]"
        credit += f" + {kl.beta:g} {factor} / {'D_kl' if low else 'D'}"
    bonus = _entropy_beta(config)
    if bonus:
        loss += f"  -  {bonus} x the same of [ H ]"
    rows = [
        (part.symbol, f"{key}={part.choice.name}", part.words, part.origin)
        for key, part in parts.items()
        if part.symbol and (part.in_use or key in ("advantage", "algorithm"))
    ]
    if kl.kind is not KlKind.off and not in_loss:
        taken = (
            f"R less {kl.beta:g} x the sum over tokens of {_KL[kl.kind][0]}, before the advantage; d = log pi_old - log pi_ref"
        )
        rows.insert(0, ("R", f"algorithm.kl={kl.kind.value} in the reward", taken, _KL_SOURCE))
    if in_loss:
        rows.append(("d", f"algorithm.kl={kl.kind.value}", "log pi - log pi_ref", _KL_SOURCE))
    rows.append(("D", f"algorithm.aggregation={algorithm.aggregation.value}", f"of the optimizer step: {denominator}", ""))
    if in_loss and kl.token_filter is KlFilter.low_entropy:
        rows.append(("D_kl", "", f"the same, of the {kl.entropy_quantile:g} lowest entropies of each response", ""))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [
        f"  {s:<{widths[0]}}  {name:<{widths[1]}}  {words}" + (f"  [{origin}]" if origin else "")
        for s, name, words, origin in rows
    ]
    entropy_credit = [f"          each token's H gets  e = -{bonus} / D"] if bonus else []
    return [
        f"minimise  {loss}",
        f"so that   each token's l gets the credit  c = {credit}",
        *entropy_credit,
        "where",
        *lines,
        f"  {_SYMBOLS}",
    ]


def _kl_words(config: Config) -> tuple[str, str]:
    kl = config.algorithm.kl
    value, factor = _KL[kl.kind]
    if kl.ratio is KlRatio.none:
        return value, factor
    through = "r d" if kl.kind is KlKind.k3 else f"r ({value} + {factor})"
    return f"r {value}", through if kl.ratio is KlRatio.through else f"r {factor}"


def _entropy_beta(config: Config) -> str:
    algorithm, adaptive = config.algorithm, config.algorithm.adaptive_entropy
    if adaptive.target is None:
        return f"{algorithm.entropy_beta:g}" if algorithm.entropy_beta else ""
    return f"beta_H [{algorithm.entropy_beta:g} at first, moved by {adaptive.gain:g} ({adaptive.target:g} - H) a step, at most {adaptive.max_beta:g}]"


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def _pipeline(config: Config, parts: Mapping[str, Part]) -> list[str]:
    batch, kl = config.batch, config.algorithm.kl
    steps = batch.num_mini_batches * batch.num_passes
    in_reward = [f"KL {kl.kind.value} from the rewards"] if kl.kind is not KlKind.off and kl.place is KlPlace.reward else []
    in_loss = [f"KL {kl.kind.value}"] if kl.kind is not KlKind.off and kl.place is KlPlace.loss else []
    masked = ["truncated completions out"] if config.algorithm.mask_truncated else []
    prepare = [*in_reward, *masked, _named(parts["advantage"]), _named(parts["weighting"]) + ", mean 1"]
    tokens = [_named(parts[key]) for key in ("correction", "token_weighting", "algorithm")]
    if config.correction.name == "auto":
        tokens[0] += f" (auto, at rollout.max_lag={config.rollout.max_lag})"
    old = "old_logp is the learner's own, from before the update" if steps > 1 else "one optimizer step a batch: r is exactly 1"
    if parts["correction"].choice.name == "bypass":
        old = "the engine's log-probabilities stand in for old_logp"
    return [
        "pipeline",
        f"  a step    {batch.groups_per_step} groups of {batch.group_size} -> {_named(parts['selection'])}",
        "  prepare   " + " -> ".join(prepare),
        f"  cut       {batch.num_mini_batches} mini-batches x {batch.num_passes} {'pass' if batch.num_passes == 1 else 'passes'} = {steps} optimizer steps; {old}",
        "  tokens    " + " -> ".join([*tokens, f"aggregation={config.algorithm.aggregation.value}", *in_loss]),
    ]


def _named(part: Part) -> str:
    return f"{part.key}={part.choice.name.rpartition('/')[2]}"  # the whole path stands above


# ---- the tables -----------------------------------------------------------------------------------------------------


def _tables(part: Part) -> list[str]:
    try:
        tables = credit_tables(partial(part.function, **part.choice.params))
    except ValueError as error:
        raise ConfigError(f"algorithm.params: {error}") from error
    lines = [
        f"factor w and credit c = -A w of algorithm={part.choice.name}, at A = +1 and A = -1, all weights and D 1, without KL; "
        f"pi_old = {PI_OLD:g} or less, both tokens of a response at the ratio"
    ]
    for kind, rows in tables.items():
        lines += ["", *([f"{kind} tokens of a response"] if kind != "all" else []), *_table(rows)]
    return lines


def _table(rows: list[CreditRow]) -> list[str]:
    head = ("r", "w, A>0", "c", "", "w, A<0", "c", "")
    cells = [
        (
            row.label,
            _digits(row.positive.factor),
            _digits(row.positive.credit),
            _regions(row.positive.regions),
            _digits(row.negative.factor),
            _digits(row.negative.credit),
            _regions(row.negative.regions),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in (head, *cells)
    ]


def _digits(value: float) -> str:
    return f"{value + 0.0:.6g}"  # no minus zero


def _regions(names: tuple[str, ...]) -> str:
    return ", ".join(name.removesuffix("_pos").removesuffix("_neg") for name in names)


# ---- what is refused ------------------------------------------------------------------------------------------------


def _refused(config: Config, parts: Mapping[str, Part]) -> list[str]:
    surrogate, advantage = parts["algorithm"].function, parts["advantage"].function
    facts = Facts(is_ratio_based(surrogate), is_group_relative(advantage), is_per_token(advantage))
    messages = list(refused(config, facts))
    if not messages:
        try:
            check_functions(config)
        except ConfigError as error:
            messages = [str(error)]
    return [f"refused   {message}" for message in messages] or ["no rule refuses this combination"]
