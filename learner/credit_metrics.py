"""The metrics of ALGORITHMS section 10 that a micro-batch can tell, as sums that merge.

``ratio`` is pi / pi_old, ``w`` the surrogate's factor, ``eff`` the whole weight (sample, token, correction, factor), ``mismatch``
engine against learner: rho = pi_old / pi_engine. ``kl/old_new`` and ``mismatch/k3_engine`` are the k3 estimates of KL(old || new) and
KL(engine || learner) on the tokens at hand. ``_pos`` and ``_neg`` are over the tokens with an advantage of that sign, ``clip/*_all``
over all tokens.

A token of which a number is not finite is in no statistic, and is counted: ``eff/nonfinite_frac`` for what trains,
``mismatch/nonfinite_frac`` for the engine's log-probability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from learner.corrections import Correction
from learner.kl import k3, reference_log_ratio
from learner.loss_tokens import MAX_EXPONENT, LossTokens
from learner.metric_sums import NUM_BINS, MetricSums, collect_sums, log_bins
from learner.surrogates import Surrogate

_NO_WEIGHT = 1e-14  # below e^-32: in the histogram it is 0

Pairs = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What a part of the tokens adds, for ``collect_sums``."""

    means: Pairs = field(default_factory=dict)
    maxima: Pairs = field(default_factory=dict)
    spreads: Pairs = field(default_factory=dict)
    histograms: dict[str, Tensor] = field(default_factory=dict)
    profiles: dict[str, Tensor] = field(default_factory=dict)


def credit_metrics(
    arrived: LossTokens, tokens: LossTokens, policy: Surrogate, correction: Correction | None, weight: Tensor
) -> MetricSums:
    """The sums of T tokens; one transfer from the device.

    Args:
        arrived: the tokens before the correction, whose old_logp is the learner's own.
        tokens: as the surrogate saw them.
        policy: what it made of them.
        correction: what the correction made of them; None without one.
        weight: [T], sample weight x token weight x correction.
    """
    if len(weight) == 0:
        return MetricSums({}, {})
    every = torch.ones_like(tokens.logp)
    gathered = _Gathered()
    raw = tokens.logp - tokens.old_logp
    sound = _finite(raw + policy.factor + tokens.entropy)
    signs = {"pos": (tokens.advantage > 0) * sound, "neg": (tokens.advantage < 0) * sound}
    log_ratio = raw.nan_to_num_(0.0, 0.0, 0.0).clamp_(-MAX_EXPONENT, MAX_EXPONENT)
    _add_ratio_and_factor(tokens, log_ratio, policy.factor.nan_to_num(0.0, 0.0, 0.0), signs, gathered)
    _add_mismatch(arrived, every, gathered)
    entropy = tokens.entropy.nan_to_num(0.0, 0.0, 0.0)
    gathered.means["policy/entropy"] = (entropy, sound)
    gathered.means["kl/old_new"] = (torch.expm1(log_ratio).sub_(log_ratio), sound)
    gathered.means["eff/nonfinite_frac"] = (1 - sound, every)
    gathered.means.update({f"policy/entropy_{sign}": (entropy, mask) for sign, mask in signs.items()})
    whole = (weight * policy.factor).nan_to_num_(0.0, 0.0, 0.0)
    gathered.means["eff/token_frac"] = ((whole > 0).float(), every)
    gathered.spreads["eff/{}"] = (whole, sound)
    if tokens.role is not None:
        gathered.means["eff/action_share"] = (tokens.role.float(), whole * tokens.advantage.abs())
    for name, region in policy.regions.items():
        mask = (tokens.advantage > 0) if _sign(name) == "pos" else (tokens.advantage < 0) if _sign(name) == "neg" else every
        gathered.means[f"clip/{name}"] = (region.float().nan_to_num(0.0), mask.float())
    if correction is not None:
        gathered.spreads["correction/{}"] = (correction.weight, every)
        gathered.maxima["correction/max"] = (correction.weight, every)
        gathered.means["correction/masked_frac"] = ((correction.weight == 0).float(), every)
        gathered.means.update({f"correction/{name}": (region.float(), every) for name, region in correction.regions.items()})
    if tokens.ref_logp is not None:
        in_kl, drift = reference_log_ratio(tokens)
        counted, drift = in_kl * _finite(drift), drift.nan_to_num(0.0, 0.0, 0.0)
        value = k3(drift).value
        gathered.means.update({"kl/k1_ref": (drift, counted), "kl/k3_ref": (value, counted)})
        gathered.profiles["kl/k3_ref_by_entropy_half"] = _profile(log_bins(entropy), value, counted)
    sums = collect_sums(gathered.means, gathered.maxima, gathered.spreads, gathered.histograms, gathered.profiles)
    of_all = {
        f"clip/{name}_all": (sums.sums[f"clip/{name}"][0], float(len(every)))
        for name, region in policy.regions.items()
        if _sign(name) in signs and region.dtype is torch.bool
    }
    return replace(sums, sums={**sums.sums, **of_all})


def _add_ratio_and_factor(
    tokens: LossTokens, log_ratio: Tensor, factor: Tensor, signs: Mapping[str, Tensor], gathered: _Gathered
) -> None:
    shift = torch.expm1(log_ratio)  # r - 1, with the digits of a small one
    ratio, share = shift.double() + 1, 1 / tokens.response_length()
    for sign, mask in signs.items():
        gathered.spreads[f"ratio/{{}}_{sign}"] = (ratio, mask)
        gathered.maxima[f"ratio/max_{sign}"] = (ratio, mask)
        gathered.means[f"ratio/resp_mean_{sign}"] = (ratio.float(), mask * share)  # over responses, of the mean over their tokens
        gathered.spreads[f"w/{{}}_{sign}"] = (factor, mask)
        gathered.maxima[f"w/max_{sign}"] = (factor, mask)
    gathered.means["ratio/lag_frac"] = ((log_ratio < 0).float(), signs["pos"])
    kind = (signs["pos"] + 2 * signs["neg"]).to(torch.int32) * NUM_BINS
    for name, bins in (("ratio", log_bins(log_ratio)), ("w", log_bins(factor.clamp(min=_NO_WEIGHT).log_()))):
        counts = torch.bincount(bins.add_(kind), minlength=3 * NUM_BINS).view(3, NUM_BINS)
        gathered.histograms.update({f"{name}/{{}}_pos": counts[1], f"{name}/{{}}_neg": counts[2]})
    gathered.profiles["w/by_pi_quartile"] = _profile(log_bins(tokens.logp), factor, signs["pos"] + signs["neg"])


def _add_mismatch(tokens: LossTokens, every: Tensor, gathered: _Gathered) -> None:
    gap = tokens.old_logp - tokens.roll_logp
    known = _finite(gap)
    gap = gap.nan_to_num_(0.0, 0.0, 0.0)
    shift, size = torch.expm1(gap.clamp(-MAX_EXPONENT, MAX_EXPONENT)), gap.abs()
    gathered.means["mismatch/logp_absdiff"] = (size, known)
    gathered.means["mismatch/k3_engine"] = (shift - gap, known)
    gathered.means["mismatch/nonfinite_frac"] = (1 - known, every)
    gathered.spreads["mismatch/rho_{}"] = (shift.double() + 1, known)
    gathered.maxima["mismatch/logp_absdiff_max"] = (size, known)
    gathered.maxima["mismatch/rho_max"] = (shift + 1, known)


def _finite(values: Tensor) -> Tensor:
    """1 where they are finite, else 0."""
    return (values * 0 == 0).float()


def _profile(bins: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([torch.bincount(bins, weights=w, minlength=NUM_BINS) for w in (mask, value * mask)])


def _sign(name: str) -> str:
    return name.rpartition("_")[2]
