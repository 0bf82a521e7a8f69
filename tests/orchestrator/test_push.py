"""A push from a real DeepSpeed learner to a real vLLM engine, each in its Ray actor: agreement after every push, and sabotage."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import ray
from ray import cloudpickle

from configs.compose import load_config
from configs.schema import Dtype
from orchestrator import cluster, material
from orchestrator.actors import LearnerActor, RolloutActor
from orchestrator.errors import RunStopped
from orchestrator.fleet import Worker
from orchestrator.push import RayPusher
from orchestrator.ranks import RayLearner
from rollout.engine import engine_environment

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(300)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = [np.array([1, 20, 21, 22, 23, 24, 30], dtype=np.int32), np.array([1, 40, 33, 22, 11], dtype=np.int32)]


class Saboteur(LearnerActor):
    """A learner whose pushes lie consistently: bytes, digests and manifest agree with one another."""

    lie = "none"

    def tell(self, lie):
        self.lie = lie

    def nudge(self, factor):
        """Moves every weight, as a step of training does."""
        import torch

        with torch.no_grad():
            for parameter in self._learner.model.policy.parameters():
                parameter.mul_(factor)

    def buckets(self, generation, scale=1.0):
        for bucket in super().buckets(generation, scale):
            yield _lie(bucket, self.lie)

    def manifest(self):
        manifest = super().manifest()
        if self.lie == "skipped":
            return dataclasses.replace(manifest, specs=tuple(s for s in manifest.specs if "up_proj" not in s.name))
        if self.lie == "swapped":
            return dataclasses.replace(manifest, specs=tuple(_swap(manifest.specs)))
        return manifest


def _lie(bucket, lie):
    if lie == "skipped":
        kept = [i for i, spec in enumerate(bucket.specs) if "up_proj" not in spec.name]
        return dataclasses.replace(
            bucket, specs=tuple(bucket.specs[i] for i in kept), offsets=tuple(bucket.offsets[i] for i in kept)
        )
    if lie == "swapped":
        return dataclasses.replace(bucket, specs=tuple(_swap(bucket.specs)))
    if lie == "damaged":
        data = bucket.data.copy()
        data[bucket.offsets[1]] ^= 1
        return dataclasses.replace(bucket, data=data)
    return bucket


def _swap(specs):
    """Gives the bytes of two tensors of one shape each other's names."""
    specs = list(specs)
    first, second = (
        i for i, s in enumerate(specs) if s.name.endswith(("layers.0.mlp.gate_proj.weight", "layers.1.mlp.gate_proj.weight"))
    )
    a, b = specs[first], specs[second]
    specs[first], specs[second] = dataclasses.replace(a, name=b.name), dataclasses.replace(b, name=a.name)
    return specs


@pytest.fixture(scope="module")
def ray_instance():
    config = load_config([])
    instance = cluster.start_cluster(config.cluster, cluster.Demand(num_cpus=2, num_gpus=0))
    yield instance
    instance.close()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(request, ray_instance):
    """A learner and an engine that starts from random weights."""
    config = load_config(
        [f"model.embedded.tie_word_embeddings={str(request.param).lower()}", "model.embedded.steps=2", "rollout.temperature=0.7"]
    )
    stuff = material.gather_material(config, lambda line: None)
    spec = material.engine_spec(config, stuff, name="rollout-0", model_path=stuff.model_path, load_format="dummy")
    name = f"engine-{request.param}"
    options = cluster.actor_options(name, num_cpus=1, num_gpus=0, env=engine_environment(num_threads=1), concurrency=8)
    engine = ray.remote(RolloutActor).options(**options).remote("rollout.vllm_in_process", spec)
    environment = cluster.learner_environment(1, rank=0, world_size=1, gpu=False)
    options = cluster.actor_options(f"learner-{request.param}", num_cpus=1, num_gpus=0, env=environment, concurrency=1)
    learner = ray.remote(Saboteur).options(**options).remote(0, 1)
    ray.get(
        learner.start.remote(
            "learner.learner",
            material.learner_spec(config, stuff.model_path, total_optimizer_steps=1),
            *ray.get(learner.rendezvous.remote()),
        )
    )
    yield (
        learner,
        RayPusher(RayLearner([learner]), [Worker("rollout-0", engine)], dtype=Dtype.float32, temperature=0.7, rows=ROWS),
    )
    for actor in (engine, learner):
        ray.kill(actor)


async def push_and_prove(pusher):
    await pusher.push(11)
    await pusher.prove()


async def test_engine_and_learner_agree_after_every_push(pair):
    learner, pusher = pair
    with pytest.raises(RunStopped, match="rollout-0 does not run the weights it was sent"):
        await pusher.prove()  # random weights: off by nats
    for version, factor in enumerate([1.0, 1.01, 0.97, 1.02]):
        await learner.nudge.remote(factor)
        metrics = await pusher.push(version)
        (agreement,) = await pusher.prove()
        assert agreement.max_difference <= 1e-4
        assert metrics["push/sent_bytes"] > 0
        assert version == 0 or metrics["push/changed_frac"] == 1.0


@pytest.mark.parametrize(
    ("lie", "words"),
    [("skipped", "up_proj"), ("damaged", "damaged"), ("swapped", "does not run the weights it was sent")],
)
async def test_sabotage_is_caught(pair, lie, words):
    """Refused by the receiver where the set is not whole; told by the proof where it is whole but wrong."""
    learner, pusher = pair
    await pusher.push(10)
    await learner.tell.remote(lie)
    await learner.nudge.remote(1.01)
    with pytest.raises(RunStopped, match=words):
        await push_and_prove(pusher)
    await learner.tell.remote("none")
    await pusher.push(12)
    await pusher.prove()
