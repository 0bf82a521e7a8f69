"""The push of a 135M-parameter model from a learner actor to an engine actor: the transport against memcpy, the whole and its parts.

    python benchmarks/push.py [--rounds 5] [--threads N]

The model is a random tied Llama (30 layers, hidden 576, vocabulary 49,152) in float32. Prints one JSON line of medians in seconds,
and ratios within the run: the transport alone (Ray's put and get of packed buckets, without packing and digests) in bytes a second
over those of one memcpy of the same bytes (target: 0.5), and the whole push over that copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
from transformers import LlamaConfig, LlamaForCausalLM

from configs.compose import load_config
from configs.schema import ClusterConfig, Config
from orchestrator import cluster, material
from orchestrator.actors import LearnerActor, RolloutActor
from orchestrator.threads import thread_budget, usable_cpus
from rollout import vllm_weights
from rollout.engine import engine_environment
from rollout.tokenizer import character_tokenizer
from rollout.weights import Bucket, Manifest, damaged_tensors

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
ROWS = [np.random.default_rng(i).integers(0, 49152, 38).astype(np.int32) for i in range(4)]


class TimedLearner(LearnerActor):
    """A learner rank that also runs the parts of its side alone."""

    def gather_alone(self) -> float:
        """Seconds of gathering, packing and digesting, bucket after bucket as in a push; then all of them, for the transport alone."""
        started = time.perf_counter()
        for _ in self._learner.buckets(0):
            pass
        seconds = time.perf_counter() - started
        self._buckets: list[Bucket] = list(self._learner.buckets(0))
        return seconds

    def copy_alone(self) -> float:
        """Seconds of one memcpy of every bucket, into memory that was touched before."""
        target = np.ones(max(bucket.data.nbytes for bucket in self._buckets), dtype=np.uint8)
        started = time.perf_counter()
        for bucket in self._buckets:
            np.copyto(target[: bucket.data.nbytes], bucket.data)
        return time.perf_counter() - started

    def put_alone(self) -> tuple[float, list[Any]]:
        started = time.perf_counter()
        references = [ray.put(bucket) for bucket in self._buckets]
        return time.perf_counter() - started, references

    def forget(self) -> None:
        self._buckets = []


class TimedWorker(RolloutActor):
    """A rollout worker that also runs the parts of its side alone, and tells the parts of a swap."""

    def get_alone(self, references: list[Any]) -> tuple[float, float]:
        """Seconds of fetching the buckets, and of digesting them."""
        started = time.perf_counter()
        buckets: list[Bucket] = ray.get(references)
        fetched = time.perf_counter()
        if any(damaged_tensors(bucket) for bucket in buckets):
            raise AssertionError("Ray changed the bytes")
        return fetched - started, time.perf_counter() - fetched

    def timed_swap(self, version: int, manifest: Manifest) -> dict[str, float]:
        seconds: dict[str, float] = {}
        plain = {name: getattr(vllm_weights, name) for name in ("_rehearse", "repack_tied_heads")}

        def timed(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                started = time.perf_counter()
                result = plain[name](*arguments)
                seconds[name] = time.perf_counter() - started
                return result

            return call

        for name in plain:
            setattr(vllm_weights, name, timed(name))
        try:
            report = self.swap(version, manifest)
        finally:
            for name, function in plain.items():
                setattr(vllm_weights, name, function)
        rehearse, repack = seconds["_rehearse"], seconds["repack_tied_heads"]
        return {"rehearse": rehearse, "repack_head": repack, "reload": report.time_s - rehearse - repack}


def start(config: Config, threads: int | None) -> tuple[Any, Any]:
    """A learner of one rank and an engine with random weights, ready."""
    stuff = material.gather_material(config, lambda line: None)
    budget = thread_budget(config, usable_cpus(), stuff.num_parameters)
    spec = material.engine_spec(config, stuff, name="rollout-0", model_path=stuff.model_path, load_format="dummy")
    environment = engine_environment(num_threads=threads or budget.engine)
    options = cluster.actor_options("rollout-0", num_cpus=1, num_gpus=0, env=environment, concurrency=8)
    worker = ray.remote(TimedWorker).options(**options).remote("rollout.vllm_in_process", spec)
    environment = cluster.learner_environment(threads or budget.learner, rank=0, world_size=1, gpu=False)
    options = cluster.actor_options("learner-0", num_cpus=1, num_gpus=0, env=environment, concurrency=1)
    learner = ray.remote(TimedLearner).options(**options).remote(0, 1)
    learner_spec = material.learner_spec(config, stuff.model_path, total_optimizer_steps=1)
    ray.get(learner.start.remote("learner.learner", learner_spec, *ray.get(learner.rendezvous.remote())))
    ray.get(worker.health.remote())
    return learner, worker


def push(learner: Any, worker: Any, generation: int) -> tuple[dict[str, float], Manifest]:
    """One whole push with its proof, as the orchestrator makes it; seconds of the whole and of what is told of its parts."""
    started = time.perf_counter()
    arriving = None
    for reference in learner.buckets.options(_generator_backpressure_num_objects=2).remote(generation):
        if arriving is not None:
            ray.get(arriving)
        arriving = worker.receive.remote(reference)
    ray.get(arriving)
    sent = time.perf_counter()
    manifest: Manifest = ray.get(learner.manifest.remote())
    parts: dict[str, float] = ray.get(worker.timed_swap.remote(generation, manifest))
    swapped = time.perf_counter()
    mine, engines = ray.get([learner.score_tokens.remote(ROWS, 1.0), worker.score_tokens.remote(ROWS, 1.0)])
    proven = time.perf_counter()
    gap = max(float(np.abs(one.logp - other).max()) for one, other in zip(engines, mine, strict=True))
    if not gap < 1e-3:
        raise SystemExit(f"the engine does not run the learner's weights: log-probabilities differ by {gap:.3g}")
    whole = {"push": swapped - started, "gather_and_send": sent - started, "swap": swapped - sent, "proof": proven - swapped}
    return whole | parts, manifest


def measure(learner: Any, worker: Any, rounds: int) -> dict[str, float]:
    """Medians of ``rounds`` rounds after one to warm up; then seconds are seconds a push."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for generation in range(1, rounds + 2):
        told, manifest = push(learner, worker, generation)
        told["gather_pack_digest"] = ray.get(learner.gather_alone.remote())
        told["memcpy"] = ray.get(learner.copy_alone.remote())
        told["put"], references = ray.get(learner.put_alone.remote())
        told["get"], told["digest_check"] = ray.get(worker.get_alone.remote(references))
        ray.get(learner.forget.remote())
        if generation == 1:
            first = told["push"]
            continue
        for name, value in told.items():
            seconds[name].append(value)
    found = {name: statistics.median(values) for name, values in seconds.items()}
    transport = found["put"] + found["get"]
    gb = manifest.num_bytes / 1e9
    return {
        "sent_gb": round(gb, 3),
        "memcpy_gb_per_s": round(gb / found["memcpy"], 2),
        "transport_gb_per_s": round(gb / transport, 2),
        "transport_over_memcpy": round(found["memcpy"] / transport, 3),
        "push_over_memcpy": round(found["push"] / found["memcpy"], 1),
        "first_push_s": round(first, 3),
        **{f"{name}_s": round(value, 4) for name, value in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of learner and engine each; by default as a run would have them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
        character_tokenizer().save_pretrained(Path(folder))
        config = load_config([f"model.path={folder}", "rollout.max_new_tokens=32", "rollout.max_running=16"])
        instance = cluster.start_cluster(ClusterConfig(address="local"), cluster.Demand(num_cpus=2, num_gpus=0))
        try:
            found = measure(*start(config, arguments.threads), arguments.rounds)
        finally:
            instance.close()
    print(json.dumps({"bench": "push of 135M", "load": os.getloadavg()[0], **found}), flush=True)


if __name__ == "__main__":
    main()
