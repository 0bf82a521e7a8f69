"""What every test shares: one thread a process, and no request to a hub. Set before torch or a tokenizer is imported."""

import os

for name, value in {
    "OMP_NUM_THREADS": "1",  # two cores are shared by engine, learner and driver; libgomp's barriers spin
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)
