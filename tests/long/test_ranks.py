"""Line 3.1: two ranks in bfloat16, at every ZeRO stage that allows it, move the master weights as far as float32 does.

Run by pytest, this file starts itself as the ranks of each group.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Dtype, Optimizer

STEPS, LEARNING_RATE = 200, 1e-6

_SPEC = importlib.util.spec_from_file_location("learner_conftest", Path(__file__).parents[1] / "learner" / "conftest.py")
conftest = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conftest)

from learner.learner import Learner, RolloutBatch  # noqa: E402  after conftest has chosen DeepSpeed's accelerator


def main(folder, rank, world_size):
    """The move of every master over the steps. One optimizer step a batch: the ratio is exactly 1, so the credit is that of the
    advantages and the same in every group."""
    stage, dtype = (folder / "group.txt").read_text().split()
    spec = conftest.learner_spec(
        str(folder.parent / "model"),
        zero_stage=int(stage),
        dtype=Dtype[dtype],
        optimizer=Optimizer.adamw,
        learning_rate=LEARNING_RATE,
        max_grad_norm=1.0,
        tokens_per_micro_batch=64,
        total_optimizer_steps=STEPS,
    )
    learner = Learner(spec, rank, world_size)
    named = dict(learner.model.hf.named_parameters())

    def masters():
        return {name: s["master"].clone() for name, s in zip(named, learner.engine.states(list(named.values())), strict=True)}

    rollouts = conftest.Rollouts(np.random.default_rng(0))
    before, skipped = masters(), 0
    for step in range(STEPS):
        groups = tuple(rollouts.group([1, 0, 0, 1]) for _ in range(3))
        learner.prepare(RolloutBatch(step, step, groups))
        skipped += learner.train().num_skipped
    moves = {name: after - before[name] for name, after in masters().items()}
    torch.save({"moves": moves, "skipped": skipped}, folder / f"rank-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))


def flat(moves):
    return torch.cat([move.flatten() for move in moves.values()]).double()


@pytest.mark.line(id="3.1")
@pytest.mark.timeout(900)
def test_bfloat16_moves_the_masters_as_far_as_float32(record, tmp_path):
    """The move's length over all weights, and that of each tensor; a bfloat16 weight near 0.2 cannot take a step of 1e-6 at all."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**conftest.SHAPE)).to(torch.bfloat16).save_pretrained(tmp_path / "model")

    def moves(stage, dtype, world_size):
        folder = tmp_path / f"{stage}-{dtype}-{world_size}"
        folder.mkdir()
        (folder / "group.txt").write_text(f"{stage} {dtype}")
        first, *others = conftest.run_group(__file__, folder, world_size, timeout_s=250)
        assert first["skipped"] == 0
        assert all(torch.equal(first["moves"][name], other["moves"][name]) for other in others for name in first["moves"])
        return first["moves"]

    single = moves(0, "float32", 1)
    figures, ratios = {"mean move of a weight in float32": flat(single).abs().mean().item()}, []
    for stage in (1, 2, 3):
        got = moves(stage, "bfloat16", 2)
        ratio = (flat(got).norm() / flat(single).norm()).item()
        by_tensor = [(move.norm() / single[name].norm()).item() for name, move in got.items()]
        cosine = torch.nn.functional.cosine_similarity(flat(got), flat(single), dim=0).item()
        ratios += [ratio, *by_tensor]
        figures |= {
            f"stage {stage}: length of the move over that in float32": ratio,
            f"stage {stage}: the same by tensor, lowest": min(by_tensor),
            f"stage {stage}: the same by tensor, highest": max(by_tensor),
            f"stage {stage}: cosine to the move in float32": cosine,
        }
    record(figures)
    assert single.keys() == got.keys()
    assert all(abs(ratio - 1) < 0.01 for ratio in ratios)
