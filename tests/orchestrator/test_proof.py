"""The decisions of a proof, on figures worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from configs.schema import Dtype
from orchestrator.proof import Agreement, Baseline, LoadingProof, manifest_problem, num_changed
from rollout.weights import Manifest, TensorSpec

LEARNER = [np.array([-1.0, -2.0], np.float32), np.array([-4.0], np.float32)]


def shifted(by):
    return [LEARNER[0] + np.float32(by), LEARNER[1]]


def test_agreement_is_over_all_tokens_of_all_rows():
    agreement = Agreement.of(LEARNER, shifted(-0.75))
    assert agreement == Agreement(max_difference=0.75, mean_difference=0.5)  # 0.75, 0.75, 0


def test_float32_is_held_to_its_largest_difference_and_bfloat16_to_its_mean():
    assert Agreement(1e-4, 1e-4).proves(Dtype.float32)
    assert not Agreement(1.1e-4, 0.0).proves(Dtype.float32)
    assert Agreement(0.4, 0.1).proves(Dtype.bfloat16)
    assert not Agreement(0.11, 0.11).proves(Dtype.bfloat16)
    assert not Agreement(math.nan, math.nan).proves(Dtype.float32)


@pytest.mark.parametrize("dtype", Dtype)
def test_a_second_push_must_move_and_a_third_restore_bit_for_bit(dtype):
    proof = LoadingProof.of(LEARNER, LEARNER, shifted(0.5), LEARNER)
    assert proof.figures() == {"max_difference": 0, "mean_difference": 0, "moved": 0.5, "not_restored": 0}
    assert proof.problem(dtype) is None
    assert "moved its log-probabilities of the fixed tokens by 0," in LoadingProof.of(LEARNER, LEARNER, LEARNER, LEARNER).problem(
        dtype
    )
    last_bit = [np.nextafter(LEARNER[0], np.float32(0)), LEARNER[1]]
    assert "differ by 1.19e-07 from before" in LoadingProof.of(LEARNER, LEARNER, shifted(0.5), last_bit).problem(dtype)
    nothing = [np.full(2, np.nan, np.float32), LEARNER[1]]
    assert LoadingProof.of(LEARNER, LEARNER, nothing, LEARNER).problem(dtype)
    assert LoadingProof.of(LEARNER, LEARNER, shifted(0.5), nothing).problem(dtype)


@pytest.mark.parametrize(
    ("dtype", "healthy", "below", "beyond"),
    [
        (Dtype.float32, 1e-6, 1e-3, 1.01e-3),  # the absolute limit is the higher one
        (Dtype.float32, 5e-4, 4.9e-3, 5.1e-3),  # ten times the baseline is
        (Dtype.bfloat16, 0.01, 0.2, 0.21),
        (Dtype.bfloat16, 0.06, 0.239, 0.241),
    ],
)
def test_a_mismatch_is_looked_into_beyond_the_limit_and_beyond_the_baseline(dtype, healthy, below, beyond):
    baseline = Baseline(dtype)
    assert not any(baseline.is_beyond(value) for value in [None, healthy, healthy, healthy, healthy, healthy])
    assert baseline.value == pytest.approx(healthy)
    assert not baseline.is_beyond(below)
    assert baseline.is_beyond(beyond)
    assert baseline.is_beyond(math.nan)
    assert baseline.value == pytest.approx(healthy), "only the first steps make it"


def test_a_first_step_beyond_the_limit_is_no_baseline():
    baseline = Baseline(Dtype.float32)
    assert baseline.is_beyond(0.5)
    assert baseline.value == 0


def manifest(*specs):
    return Manifest(1, 1, tuple(TensorSpec(name, dtype, shape, 4, digest) for name, dtype, shape, digest in specs))


def test_manifests_are_compared_by_name_shape_and_dtype_and_changes_counted_by_digest():
    before = manifest(("a", "float32", (1,), 1), ("b", "float32", (2,), 2))
    after = manifest(("b", "float32", (2,), 3), ("a", "float32", (1,), 1))
    assert manifest_problem(None, before) is None
    assert manifest_problem(before, after) is None
    assert num_changed(before, after) == 1
    wrong = manifest(("a", "bfloat16", (1,), 1), ("c", "float32", (2,), 3))
    assert manifest_problem(before, wrong) == (
        "the learner sent 2 tensors, 2 before, and they are not the same: "
        "a is bfloat16 (1,), was float32 (1,); b is missing; c is new"
    )
