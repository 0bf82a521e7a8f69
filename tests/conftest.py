"""What every test shares: one thread a process, no request to a hub (set before torch or a tokenizer is imported); and the rungs of the
sandbox."""

import os

import pytest
from hypothesis import settings

for name, value in {
    "OMP_NUM_THREADS": "1",  # two cores are shared by engine, learner and driver; libgomp's barriers spin
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

settings.register_profile("limen", deadline=None)  # of one example: on a machine with other work to do it says nothing
settings.load_profile("limen")


@pytest.fixture(params=["namespaces", "landlock"])
def rung(request):
    """A sandbox's tests run at each rung that protects; a rung that this machine lacks is not passed over in silence."""
    from rewards.sandbox import Rung, available  # here: it imports numpy, whose threads the lines above bound

    reason = available()[Rung(request.param)]
    if reason:
        message = f"the sandbox '{request.param}' is not tested here: {reason}"
        if os.environ.get("CI") == "true" and not os.environ.get("LIMEN_ALLOW_SKIPS"):
            pytest.fail(f"{message}. LIMEN_ALLOW_SKIPS=1 allows it")
        pytest.skip(message)
    return Rung(request.param)
