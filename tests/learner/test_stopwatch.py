"""The stopwatch adds up what happens inside it, and nothing else."""

import time

import torch

from learner.stopwatch import Stopwatch


def test_it_counts_what_ran_inside_since_the_last_reading():
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.running():
            time.sleep(0.02)
        time.sleep(0.2)
    assert 0.04 <= watch.read() < 0.2
    assert watch.read() == 0
