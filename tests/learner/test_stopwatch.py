"""The stopwatch adds up what happens inside it, and nothing else."""

import torch

from learner import stopwatch
from learner.stopwatch import Stopwatch


def test_it_counts_what_ran_inside_since_the_last_reading(monkeypatch):
    clock = iter([1.0, 3.0, 10.0, 10.5])  # in, out, in, out: 2 s and half a second, and 7 s between them
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.running():
            pass
    assert watch.read() == 2.5
    assert watch.read() == 0
