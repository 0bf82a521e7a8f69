"""Every row of the table of refused combinations: what it refuses, its words, and that what it proposes works."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from configs.compose import ConfigError, load_config
from configs.refusals import PER_TOKEN, RATIO_FREE, REFUSALS, Facts, check_combinations, refused
from learner.advantages import ADVANTAGES, is_per_token
from learner.surrogates import SURROGATES, is_ratio_based
from orchestrator.choices import check_functions

pytestmark = pytest.mark.timeout(60)

# The row's place in the table: overrides that it refuses, and overrides that follow its advice.
CASES: dict[int, tuple[list[str], list[list[str]]]] = {
    0: (
        ["algorithm=cispo", "batch.num_mini_batches=1"],
        [["batch.num_mini_batches=4"], ["allow_inert=true"]],
    ),
    1: (["algorithm=aspo_archer", "correction=bypass"], [["correction=tis_token"], ["algorithm=grpo"]]),
    2: (["algorithm=reinforce", "correction=bypass"], [["correction=none"], ["correction=tis_token"]]),
    3: (["algorithm=sapo", "correction=decoupled"], [["correction=tis_token"], ["algorithm=grpo"]]),
    4: (["algorithm=gspo", "algorithm.aggregation=token_sum_norm"], [["algorithm.aggregation=seq_mean_token_mean"]]),
    5: (["algorithm=gspo", "advantage=reinforce_pp"], [["algorithm.name=gspo_token"]]),
    6: (["batch.group_size=1", "advantage=rloo"], [["batch.group_size=2"], ["advantage=reinforce"]]),
    7: (["advantage.name=gae"], [["advantage=reinforce_pp"]]),
    8: (
        ["algorithm=grpo", "correction=icepop", "rollout.top_p=0.9"],
        [["rollout.top_p=1", "rollout.top_k=0", "rollout.min_p=0"], ["correction=none"]],
    ),
    9: (["learner.reference=off"], [["learner.reference=frozen"], ["algorithm.kl.kind=off"]]),
    10: (["algorithm.kl.beta=0"], [["algorithm.kl.beta=0.001"], ["algorithm.kl.kind=off"]]),
    11: (["algorithm.kl.kind=k1"], [["algorithm.kl.kind=k2"], ["algorithm.kl.kind=k3"], ["algorithm.kl.place=reward"]]),
    12: (["algorithm.kl.kind=k3_plus", "algorithm.kl.place=reward"], [["algorithm.kl.kind=k1"], ["algorithm.kl.kind=k3"]]),
    13: (
        ["algorithm.kl.place=reward", "algorithm.kl.ratio=through"],
        [["algorithm.kl.ratio=none"], ["algorithm.kl.place=loss"]],
    ),
    14: (
        ["algorithm.kl.place=reward", "algorithm.kl.token_filter=low_entropy"],
        [["algorithm.kl.token_filter=all"], ["algorithm.kl.place=loss"]],
    ),
    15: (["algorithm.adaptive_entropy.target=0.3", "algorithm.entropy_beta=0.02"], [["algorithm.entropy_beta=0"]]),
    16: (["advantage=gdpo", "algorithm.kl.place=reward"], [["algorithm.kl.place=loss"], ["advantage=grpo"]]),
    17: (["advantage=gdpo", "reward.combine=min"], [["reward.combine=sum"], ["advantage=grpo"]]),
    18: (
        ["advantage=gdpo", "reward.clip_max=1"],
        [
            ["reward.clip_min=null", "reward.clip_max=null"],
            ["reward.clip_max=null", "reward.parts.exact_integer.clip_max=1"],
            ["advantage=grpo"],
        ],
    ),
    19: (
        ["rollout.max_lag=1", "rollout.oversample=1", "rollout.top_p=0.9"],
        [["rollout.top_p=1", "rollout.top_k=0", "rollout.min_p=0"], ["correction=none"]],
    ),
    20: (["correction.params.cap=3"], [["correction=tis_token"]]),
}


def check(overrides: list[str]) -> None:
    check_functions(load_config(overrides))


def test_every_row_has_a_case():
    assert set(CASES) == set(range(len(REFUSALS)))


@pytest.mark.parametrize("place", CASES)
def test_a_row_refuses_and_its_advice_works(place: int):
    overrides, cures = CASES[place]
    row = REFUSALS[place]
    with pytest.raises(ConfigError) as caught:
        check(overrides)
    message = str(caught.value)
    assert message.startswith(f"{row.keys[0]}=")
    assert row.reason in message
    for cure in cures:
        assert cure[0].split("=")[0].removesuffix(".name") in message.split("; ", 1)[1]
        # A group picked by the cure stands in for the one that was picked before; a key comes later and wins.
        groups = {c.split("=")[0] for c in cure}
        kept = [o for o in overrides if o.split("=")[0] not in groups and o.split("=")[0].removesuffix(".name") not in groups]
        check([*kept, *cure])


@pytest.mark.parametrize("key", ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05"])
@pytest.mark.parametrize("correction", ["bypass", "decoupled", "tis_seq"])
def test_no_correction_under_truncated_sampling(key: str, correction: str):
    with pytest.raises(ConfigError, match=r"rollout\.top_p=.*truncated distribution"):
        check(["algorithm=grpo", f"correction={correction}", key])


def test_a_stand_in_for_old_logp_is_not_inert():
    """With bypass the ratio is pi / pi_engine, which is not 1 with one optimizer step either."""
    check(["algorithm=grpo", "correction=bypass", "batch.num_mini_batches=1"])


def test_what_functions_say_of_themselves_is_in_the_table():
    assert {name for name, f in SURROGATES.items() if not is_ratio_based(f)} == RATIO_FREE
    assert {name for name, f in ADVANTAGES.items() if is_per_token(f)} == PER_TOKEN
    config = load_config(["algorithm=gspo"])
    check_combinations(config, Facts(ratio_based=True, group_relative=True, per_token=False))
    with pytest.raises(ConfigError, match="gspo_token works"):  # an advantage of the user's
        check_combinations(config, Facts(ratio_based=True, group_relative=False, per_token=True))


def test_all_rules_that_hold_are_told():
    config = load_config([])
    config.batch.group_size, config.algorithm.kl.beta = 1, 0.0
    words = list(refused(config))
    assert len(words) == 2
    assert words[0].startswith("batch.group_size=1, advantage.name=grpo: ")
    assert words[1].startswith("algorithm.kl.kind=k3, algorithm.kl.beta=0: ")
    assert all(re.search(r"; .* works", line) for line in words)


def test_the_table_needs_no_torch():
    code = "import sys, configs.refusals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
