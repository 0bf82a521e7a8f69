"""A learner that gives its device away between its turns trains as one that does not, at every ZeRO stage."""

import numpy as np
import pytest
import torch

from configs.schema import Dtype, Optimizer
from learner.aside import Aside
from rollout.weights import tensor_bytes

pytestmark = pytest.mark.timeout(120)

ROWS = [np.array([1, 20, 21, 22, 23], dtype=np.int32), np.array([1, 40, 33], dtype=np.int32)]
# Bytes a parameter: moments 8, masters 4 where they are not the weights, gradients 4 where they have a buffer of their own, and 4 of
# ZeRO-3's buffer that reduces them.
LAYOUTS = {
    (0, Dtype.float32): 8,
    (1, Dtype.float32): 12,
    (2, Dtype.float32): 12,
    (3, Dtype.float32): 20,
    (1, Dtype.bfloat16): 16,
    (2, Dtype.bfloat16): 12,
    (3, Dtype.bfloat16): 20,
}


def test_views_of_a_flat_buffer_stay_views_of_it_and_what_is_used_elsewhere_stays():
    flat, scratch, weight = torch.arange(6.0), torch.zeros(3), torch.ones(4)
    view, both = flat[2:4], weight[:2]
    aside = Aside([view, flat, both], scratch=[scratch], but=[weight])
    assert aside.num_bytes == 4 * (6 + 3)
    assert [t.untyped_storage().nbytes() for t in (flat, scratch, weight)] == [0, 0, 16]
    aside.put_back()
    flat[2] = 7
    assert view.tolist() == [7, 3]
    assert [t.untyped_storage().nbytes() for t in (flat, scratch, weight)] == [24, 12, 16]


def sent(learner):
    return {spec.name: tensor_bytes(b, i).tobytes() for b in learner.buckets(0) for i, spec in enumerate(b.specs)}


def steps(make_learner, batches, layout, *, in_turns):
    """Trains each batch; what can be done after it with the states laid aside."""
    stage, dtype = layout
    learner = make_learner("llama", zero_stage=stage, dtype=dtype, optimizer=Optimizer.adamw, learning_rate=1e-2)
    made, freed = [], None
    for batch in batches:
        if freed is not None:
            learner.reload()
        learner.prepare(batch)
        learner.train()
        if in_turns:
            freed = learner.offload()
        made.append((sent(learner), [row.tobytes() for row in learner.score_tokens(ROWS, 1.0)]))
    return learner, made, freed


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[1].value}-{layout[0]}")
def test_a_learner_in_turns_trains_and_sends_bit_for_bit_what_one_without_does(
    make_learner, rollouts, batch_of, layout, tmp_path
):
    batches = [batch_of(rollouts.group([1, 0, 0])), batch_of(rollouts.group([0, 1, 1, 0]), step=1)]
    learner, turns, freed = steps(make_learner, batches, layout, in_turns=True)
    num = sum(getattr(p, "ds_numel", p.numel()) for p in learner.model.policy.parameters())
    each = LAYOUTS[layout]
    assert freed == pytest.approx(each * num, abs=each * 64)  # flat buffers are filled up to whole pieces
    learner.export(tmp_path)
    for name, call in {
        "prepare": lambda: learner.prepare(batches[0]),
        "train": learner.train,
        "save": lambda: learner.save(tmp_path),
        "load": lambda: learner.load(tmp_path),
        "offload": learner.offload,
    }.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) comes after reload\(\)"):
            call()
    learner.reload()
    with pytest.raises(RuntimeError, match=r"reload\(\) comes after offload\(\)"):
        learner.reload()
    assert learner.save(tmp_path)
    _, plain, _ = steps(make_learner, batches, layout, in_turns=False)
    assert turns == plain
    assert turns[0] != turns[1]
