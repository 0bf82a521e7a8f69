"""Cores: OpenMP threads of each process of a run, and how many actors a machine may carry. Plain arithmetic: the launch and `limen plan`
use it alike."""

from __future__ import annotations

import os
from dataclasses import dataclass

from configs.schema import Config

SMALLEST_BOOKS = 4  # CPUs in the books of a private Ray instance, however few cores there are
TINY_MODEL_PARAMETERS = 10_000_000  # below this a second thread costs more in barriers than it computes


def usable_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def private_books(asked: int, cores: int) -> int:
    """CPUs in the books of a private Ray instance that is asked for so many. It may carry two single-threaded actors a core (and four
    on one core), since at lag 0 engine and learner work in turn."""
    return max(cores, min(asked, max(SMALLEST_BOOKS, 2 * cores)))


@dataclass(frozen=True, slots=True)
class Threads:
    """OpenMP threads of one process of each kind."""

    engine: int
    learner: int
    verifier: int

    def __str__(self) -> str:
        return f"{self.engine} a rollout worker, {self.learner} a learner rank, {self.verifier} a verifier"


def thread_budget(config: Config, num_cpus: int, num_parameters: int) -> Threads:
    """Threads on CPU. A tiny model gets one an actor; a larger one all cores in turn at lag 0, a share of them above it."""
    if num_parameters < TINY_MODEL_PARAMETERS:
        engine = learner = 1
    elif config.rollout.max_lag == 0:
        engine, learner = max(1, num_cpus // config.rollout.num_workers), max(1, num_cpus // config.learner.num_ranks)
    else:
        engine = max(1, num_cpus // (config.rollout.num_workers + config.learner.num_ranks))
        learner = max(1, (num_cpus - engine * config.rollout.num_workers) // config.learner.num_ranks)
    return Threads(engine=config.rollout.num_threads or engine, learner=config.learner.num_threads or learner, verifier=1)
