"""What a run is refused for before anything is built."""

import json

import pytest
import torch

from configs.compose import ConfigError, load_config
from configs.schema import LastBatch
from orchestrator import material
from orchestrator.ledger import Length
from orchestrator.material import gather_material, prompts_line
from rollout.prompts import PromptSet
from rollout.sources import DataError

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_a_transport_between_gpus_is_refused_without_one(transport, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config([f"rollout.transport={transport}", "model.path=no-such-model"])
    with pytest.raises(ConfigError, match=rf"rollout\.transport={transport} .* has none; rollout\.transport=local works"):
        gather_material(config, lambda line: None)


@pytest.mark.parametrize("by", ["", None, "someorg/gsm8k-mirror", "Math"], ids=["empty", "missing", "unknown", "other case"])
def test_b64_a_row_with_an_unknown_reward_is_refused_before_a_model_is_built(by, tmp_path, monkeypatch):
    rows = [{"prompt": f"1+{i}=", "answer": str(i + 1), "by": "math"} for i in range(4)]
    rows[2] = {name: value for name, value in (rows[2] | {"by": by}).items() if value is not None}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = []
    monkeypatch.setattr(material, "base_model_path", lambda model, progress: built.append(model))
    source = "data.sources.main"
    overrides = ["data=jsonl", f"{source}.path={tmp_path}/rows.jsonl", f"{source}.reward_column=by", "reward=[math,exact]"]
    words = "no column 'by'" if by is None else f"column 'by': no reward part {by!r}.*; reward.parts has exact, math"
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: {words}"):
        gather_material(load_config(overrides), lambda line: None)
    assert not built


@pytest.mark.parametrize(
    ("last", "num_too_long", "words"),
    [
        (LastBatch.keep, 2, "prompts: 10 to train on, 3 held out, 2 too long and left out, 1 cut at their beginning"),
        (
            LastBatch.drop,
            0,
            "prompts: 10 to train on, 3 held out, 1 cut at their beginning, 2 skipped in each epoch (data.last_batch=drop)",
        ),
    ],
)
def test_the_start_of_a_run_says_which_prompts_are_left_out(last, num_too_long, words):
    """B106, B108: 10 prompts, 4 a step."""
    prompts = PromptSet(train=(None,) * 10, held_out=(None,) * 3, num_too_long=num_too_long, num_cut=1)
    assert prompts_line(prompts, Length(10, 4, last)) == words
