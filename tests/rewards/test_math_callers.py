"""Case B36: the verifier ``math`` gives the same score from whatever calls it. Time limits built on signals fail here."""

import threading

import pytest
import ray

from configs.schema import ClusterConfig
from orchestrator.cluster import Demand, start_cluster
from rewards.math_verifier import math

pytestmark = pytest.mark.timeout(180)

# exact arithmetic, roots in a child process, math-verify there, and one that is ended at its limit
ROWS = [(r"\frac{1}{3}", "1/3"), (r"\sqrt{8}", r"2\sqrt2"), (r"\int_0^1 x\,dx", "1/2"), (r"\sum_{k=1}^{10^9} \frac{1}{k}", "4")]
VALUES = [1.0, 1.0, 1.0, 0.0]


def values():
    return [math(rf"\boxed{{{pred}}}", gold, timeout_seconds=0.5).value for pred, gold in ROWS]


class Grader:
    def grade(self):
        return values()


class AsyncGrader:
    async def grade(self):
        return values()


def test_main_thread():
    assert threading.current_thread() is threading.main_thread()
    assert values() == VALUES


def test_plain_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(values()))
    thread.start()
    thread.join()
    assert found == [VALUES]


@pytest.fixture(scope="module")
def cluster():
    instance = start_cluster(ClusterConfig(address="local", num_cpus=2), Demand(num_cpus=2, num_gpus=0))
    yield instance
    instance.close()


@pytest.mark.parametrize(
    ("kind", "options"), [(Grader, {"max_concurrency": 4}), (AsyncGrader, {})], ids=["concurrency 4", "asyncio"]
)
def test_ray_actors(cluster, kind, options):
    grader = ray.remote(kind).options(num_cpus=0.5, **options).remote()
    assert ray.get([grader.grade.remote() for _ in range(3)], timeout=120) == [VALUES] * 3
    ray.kill(grader)
