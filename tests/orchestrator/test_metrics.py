"""Numbers of the driver: pass@k, histograms, evaluations; and what reaches a terminal."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from orchestrator.console import printable
from orchestrator.errors import RunStopped
from orchestrator.evaluation import choose_prompts, evaluate, summarize
from orchestrator.job import ShufflingScorer
from orchestrator.metrics import pass_at_k, pass_rate_histogram, step_metrics
from orchestrator.stages import Address, Batch, Finished, Scored, StepOutcome
from orchestrator.waits import Waits
from rollout.records import Consequence, GroupMeta, Outcome, Prompt, Purpose, Score, Status, Visit, repetition, sampling_seed


def score(value, status=Status.OK):
    ok = status is Status.OK
    return Score(status, Outcome.NONE, value if ok else None, value if ok else None, {}, None, 0.0, "", {}, Consequence.NONE)


def scored(prompt_id, *values, purpose=Purpose.TRAIN, repeated=(0.0, 0)):
    lengths = (2,) * len(values)
    meta = GroupMeta(Visit(prompt_id, 0, purpose), "w", 3, lengths, lengths, 0, 0, 0, 0, *repeated, 0.0, ())
    return Scored(meta, Address(None, 0), tuple(v if isinstance(v, Score) else score(v) for v in values))


PROMPTS = {
    name: Prompt(name, "arithmetic", stratum, name, np.array([1], np.int32), 0, None)
    for name, stratum in [("a", "easy"), ("b", "hard"), ("c", "hard")]
}


@pytest.mark.parametrize(("n", "right"), [(4, 0), (4, 1), (4, 3), (6, 2), (5, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, right):
    samples = [1] * right + [0] * (n - right)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert math.isclose(pass_at_k(n, right, k), sum(map(max, subsets)) / len(subsets))


class Pass:
    """A fleet and a scorer of an evaluation with these results."""

    def __init__(self, *results):
        self.results = results

    async def evaluate(self, visits):
        return [Finished(of.meta, of.address) for of in self.results]

    async def score(self, finished):
        return list(self.results)


@pytest.mark.parametrize("missing", [score(0, Status.ERROR), replace(score(0.0), consequence=Consequence.ZERO)])
async def test_an_evaluation_of_which_too_little_was_judged_is_none(missing):
    """Three of four have no verdict; the one that has is right, and would pass for a pass rate of 1."""
    away = replace(missing, detail="the judge is away")
    judged = Pass(scored("a", 1.0, missing, purpose=Purpose.EVAL), scored("b", away, missing, purpose=Purpose.EVAL))
    keys, asked = {"num_samples": 2, "version": 0, "deadline_s": 10.0}, {name: PROMPTS[name] for name in "ab"}
    with pytest.raises(RunStopped, match=r"failed on 3 of 4 completions of the evaluation of version 0 .*max_failed_share=0\.5"):
        await evaluate(judged, judged, asked, Waits(), **keys, max_failed_share=0.5)
    assert (await evaluate(judged, judged, asked, Waits(), **keys, max_failed_share=0.75)).num_prompts == 2


def test_evaluation_means_over_prompts_and_leaves_failed_verifiers_out():
    failed = score(0, Status.TIMEOUT)
    result = summarize(
        [scored("a", 1.0, 1.0, 0.0, 1.0), scored("b", 0.0, 0.0, 0.0, 1.0), scored("c", failed, failed, failed, 1.0)],
        PROMPTS,
        num_samples=4,
        version=3,
    )
    assert result.pass_at[1] == pytest.approx(fmean([0.75, 0.25, 1.0]))
    assert result.pass_at[2] == pytest.approx(fmean([1.0, 0.5]))  # c has one valid sample: it cannot be judged at k = 2
    assert result.pass_at[4] == 1.0
    assert result.pass_at_1_by_stratum == {"easy": 0.75, "hard": pytest.approx(0.625)}
    assert result.num_failed == 3
    assert result.metrics()["eval/pass@1/hard"] == pytest.approx(0.625)


def test_the_histogram_tells_never_and_always_apart():
    seen = [scored("a", *([1.0] * right + [0.0] * (8 - right))) for right in (0, 0, 1, 7, 8)]
    assert pass_rate_histogram(seen) == "pass rates of 5 groups: 0: 2, 1/8-2/8: 1, 7/8-8/8: 1, 1: 1"


def test_step_metrics_of_a_worked_step():
    seen = (
        scored("a", 1.0, 0.0, repeated=(0.25, 7)),
        scored("b", 0.0, 0.0, repeated=(0.5, 3)),
        scored("c", 1.0, 1.0),
    )
    batch = Batch(step=1, version=0, groups=())
    outcome = StepOutcome(
        batch, seen, 1, {"zero_variance_solved": 1, "zero_variance_unsolved": 1, "surplus": 2}, {"time/step_s": 0.5}
    )
    metrics = step_metrics(outcome, PROMPTS)
    assert metrics["reward/mean"] == 0.5
    assert metrics["group/solve_none"] == metrics["group/solve_all"] == metrics["group/valid"] == pytest.approx(1 / 3)
    assert (metrics["rep/ratio20"], metrics["rep/max_freq20"]) == (0.25, 7)
    assert metrics["pass_rate/easy"] == 0.5
    assert metrics["pass_rate/hard"] == 0.5
    assert metrics["eff/prompt_frac"] == pytest.approx(1 / 3)
    assert metrics["time/tokens_per_s"] == 24.0
    assert metrics["time/num_surplus"] == 2
    assert "drop/surplus" not in metrics, "it depends on the clock"


def test_parts_measures_and_missing_verdicts_are_metrics_of_their_own():
    """Of three completions one failed, and one got a 0 from a policy; a part or measure counts where it is."""

    def judged(status, value, parts, measures, consequence, time_s):
        return Score(status, Outcome.NONE, value, value, parts, None, time_s, "", measures, consequence)

    scores = (
        judged(Status.OK, 1.5, {"math": 1.0, "style": 0.5}, {"math.num_steps": 3.0}, Consequence.NONE, 1.0),
        judged(Status.OK, 0.0, {"math": 0.0, "style": 0.0}, {}, Consequence.ZERO, 2.0),
        judged(Status.ERROR, None, {"style": 0.1}, {"math.num_steps": 4.0}, Consequence.DROP_SAMPLE, 6.0),
    )
    outcome = StepOutcome(Batch(1, 0, ()), (scored("a", *scores),), 0, {"verifier_error": 1}, {})
    metrics = step_metrics(outcome, PROMPTS)
    assert metrics["reward/math_mean"] == 0.5
    assert metrics["reward/style_mean"] == pytest.approx(0.2)
    assert metrics["reward/math.num_steps"] == 3.5
    assert (metrics["verifier/ok"], metrics["verifier/zeroed"], metrics["verifier/error"]) == (2, 1, 1)
    assert metrics["drop/verifier_error"] == 1
    assert metrics["time/verifier_max_s"] == 6.0
    assert metrics["time/verifier_p95_s"] == pytest.approx(
        2 + 0.9 * 4
    )  # 1, 2, 6: the 95th percentile lies 0.9 of the way up the last gap
    assert [score.has_verdict for score in scores] == [True, False, False]


def test_held_out_prompts_are_cut_by_stratum():
    class Config:
        max_prompts_per_stratum = 1

    assert [p.id for p in choose_prompts(list(PROMPTS.values()), Config)] == ["a", "b"]


async def test_shuffled_scores_stay_in_their_group_and_repeat():
    class Inner:
        async def score(self, finished):
            return finished

    values = [float(i) for i in range(8)]
    groups = [scored("a", *values), scored("b", *values), scored("a", *values, purpose=Purpose.EVAL)]
    first, second, evaluated = await ShufflingScorer(Inner(), 0).score(groups)
    for item in (first, second):
        assert sorted(s.value for s in item.scores) == values
        assert [s.value for s in item.scores] != values
    assert [s.value for s in first.scores] != [s.value for s in second.scores]
    assert evaluated is groups[2], "an evaluation is never shuffled"
    assert await ShufflingScorer(Inner(), 0).score(groups[:1]) == [first]


def test_seeds_are_apart_for_everything_that_names_a_completion():
    visits = [Visit(p, n, purpose) for p in ("a", "a1", "b") for n in (0, 1) for purpose in Purpose]
    seeds = [sampling_seed(run, visit, i) for run in (0, 1) for visit in visits for i in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(0, visits[0], 0) == sampling_seed(0, Visit("a", 0, Purpose("train")), 0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[/path] a[0] [bold]x[/]", "[/path] a[0] [bold]x[/]"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\0b", "a\\x00b"),
        ("half \ud800", "half \\ud800"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
    ],
)
def test_completions_are_shown_literally_or_escaped(text, shown):
    """B174, B176."""
    assert printable(text) == shown
    assert printable("x" * 10**6).endswith("(998000 more characters)")


def test_repetition_counts_runs_of_twenty_words():
    words = [f"w{n}" for n in range(30)]
    assert repetition(" ".join(words)) == (0.0, 1), "eleven runs, all different"
    assert repetition(" ".join(words[:19])) == (0.0, 0), "nineteen words hold no run"
    assert repetition("") == (0.0, 0)
    assert repetition("the\n" * 24) == (4 / 5, 5), "five runs, all the same"
    # 30 words twice: 41 runs; those that begin at words 0 to 10 come again 30 words later.
    assert repetition("  ".join(words + words)) == (11 / 41, 2)


def test_the_missing_are_reported_against_the_rest():
    """Group a was cut: members of 4 and 6 tokens ended, two of 20 and 31 did not. Group b is whole, and repeats itself."""
    meta = scored("a", 1.0, 0.0).meta
    cut = replace(meta, num_tokens=(4, 6), num_loss_tokens=(4, 6), unfinished=(20, 31), repeated_share=0.5)
    whole = scored("b", 1.0, 0.0, 1.0, 1.0, repeated=(0.25, 3))
    seen = (replace(scored("a", 1.0, 0.0), meta=cut), whole)
    metrics = step_metrics(StepOutcome(Batch(1, 0, ()), seen, 2, {}, {}), PROMPTS)
    assert cut.num_finished == 2
    assert metrics["time/straggler_num_groups"] == 1
    assert metrics["time/straggler_num_missing"] == 2
    assert metrics["time/straggler_len_missing"] == 25.5
    assert metrics["time/straggler_len_finished"] == 5
    assert metrics["rep/ratio20"] == pytest.approx((2 * 0.5 + 4 * 0.25) / 6), "over completions, not groups"
    assert "time/straggler_num_groups" not in step_metrics(StepOutcome(Batch(1, 0, ()), (whole,), 1, {}, {}), PROMPTS)
