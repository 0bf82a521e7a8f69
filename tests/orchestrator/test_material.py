"""What a run is refused for before anything is built."""

import pytest
import torch

from configs.compose import ConfigError, load_config
from orchestrator.material import gather_material


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_a_transport_between_gpus_is_refused_without_one(transport, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = load_config([f"rollout.transport={transport}", "model.path=no-such-model"])
    with pytest.raises(ConfigError, match=rf"rollout\.transport={transport} .* has none; rollout\.transport=local works"):
        gather_material(config, lambda line: None)
