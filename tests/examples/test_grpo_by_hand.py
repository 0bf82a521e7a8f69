"""The example, run as a stranger would run it, only shorter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_by_hand.py"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("surrogate", ["grpo", "aspo"])
def test_reward_rises(surrogate: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--surrogate", surrogate, "--steps", "60"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    rewards = [float(x) for x in re.findall(r"last 10 steps ([0-9.]+)", out)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.1
