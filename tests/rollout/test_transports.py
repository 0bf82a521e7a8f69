"""The transports' phases, both halves at once. vLLM's own engines run; the communicator and CUDA below them are recording fakes."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.engine import EngineError, PushError, engine_environment

os.environ.update(engine_environment(num_threads=int(os.environ.get("OMP_NUM_THREADS", "1"))))  # before vLLM is imported

import torch
from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine

from learner import sending
from learner.sending import make_sender, send_all
from rollout import vllm_transports
from rollout.receiving import PushReceiver
from rollout.transports import Header, Invitation, make_receiver
from rollout.weights import Bucket, Manifest, TensorSpec, digest_bytes

pytestmark = pytest.mark.timeout(60)
HERE = "127.0.0.1"
GPU = {"uuid": "GPU-a"}


def make_bucket(generation: int, index: int) -> Bucket:
    data = np.random.default_rng(index).integers(0, 256, 640, dtype=np.uint8)
    spec = TensorSpec(f"weight.{index}", "float32", (10, 15), 600, digest_bytes(data[:600]))
    return Bucket(generation, index, (spec,), (0,), data)


def manifest(buckets: list[Bucket]) -> Manifest:
    return Manifest(buckets[0].generation, len(buckets), tuple(spec for bucket in buckets for spec in bucket.specs))


@dataclass
class Wire:
    """One communicator, all of its ranks: a broadcast ends, on every rank, when the last one has come to it or on a rank's own end."""

    world_size: int
    ranks: list[int] = field(default_factory=list)
    log: list[tuple[Any, ...]] = field(default_factory=list)
    destroyed: list[int] = field(default_factory=list)
    spoil: bool = False
    error: Exception | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    payloads: dict[int, torch.Tensor] = field(default_factory=dict)


class Communicator:
    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        wire = self.wire
        if wire.error:
            raise wire.error
        assert "generation" in threading.current_thread().name  # never the caller's own thread
        with wire.changed:
            number = wire.calls[self.rank]
            wire.calls[self.rank] += 1
            wire.log.append((number, self.rank, src, tensor.numel(), tensor.dtype))
            if self.rank == src:
                wire.payloads[number] = tensor.clone()
            wire.changed.notify_all()
            everyone = lambda: len(wire.calls) == wire.world_size and min(wire.calls.values()) > number  # noqa: E731
            wire.changed.wait_for(lambda: everyone() or self.rank in wire.destroyed)
            if self.rank not in wire.destroyed:
                tensor.copy_(wire.payloads[number])
                if wire.spoil and self.rank != src:
                    tensor[0] ^= 1

    def destroy(self) -> None:
        with self.wire.changed:
            self.wire.destroyed.append(self.rank)
            self.wire.changed.notify_all()


class Network:
    """Where ranks meet: joining returns when all have come, as a real rendezvous does."""

    def __init__(self) -> None:
        self.wires: dict[tuple[str, int], Wire] = {}
        self.changed = threading.Condition()

    def join(self, address: str, port: int, rank: int, world_size: int) -> Communicator:
        with self.changed:
            wire = self.wires.setdefault((address, port), Wire(world_size))
            assert wire.world_size == world_size
            wire.ranks.append(rank)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(wire.ranks) == world_size)
        return Communicator(wire, rank)

    @property
    def last(self) -> Wire:
        return list(self.wires.values())[-1]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    """CUDA's calls that the halves make, and vLLM's way to a communicator."""
    made = Network()
    stream = SimpleNamespace(synchronize=lambda: None)
    for name, value in {
        "Stream": lambda: stream,
        "set_stream": lambda stream: None,
        "current_stream": lambda: stream,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(**GPU),
        "ipc_collect": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(sending, "_on_gpu", lambda data: torch.from_numpy(data.copy()))
    monkeypatch.setattr(vllm_transports, "_this_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        nccl_engine,
        "worker_init_process_group",
        lambda info, parallel: made.join(
            info.master_address, info.master_port, parallel.rank + info.rank_offset, info.world_size
        ),
    )
    monkeypatch.setattr(
        nccl_common,
        "trainer_init",
        lambda info: made.join(info["master_address"], info["master_port"], 0, info["world_size"]),
    )
    return made


def make_receivers(num: int, transport: str = "nccl") -> list[Any]:
    return [make_receiver(transport, f"worker-{place}") for place in range(num)]


def open_for(sender: Any, receivers: list[Any], generation: int) -> None:
    sender.open(generation, [f"worker-{place}" for place in range(len(receivers))])


def push(sender: Any, receivers: list[Any], buckets: list[Bucket]) -> list[list[Bucket]]:
    """As the orchestrator does it: every receiver fetches a parcel before the next is handed out."""
    arrived: list[list[Bucket]] = [[] for _ in receivers]
    with ThreadPoolExecutor(len(receivers)) as pool:
        names = [f"worker-{place}" for place in range(len(receivers))]
        for parcel in send_all(sender, buckets[0].generation, names, buckets):
            assert isinstance(parcel, Header)
            carried = pickle.dumps(parcel)
            assert buckets[parcel.index].data[:32].tobytes() not in carried  # the bytes take another way
            parts = pool.map(lambda receiver, carried=carried: receiver.fetch(pickle.loads(carried)), receivers)
            for place, bucket in enumerate(parts):
                arrived[place].append(bucket)
    sender.close()
    for receiver in receivers:
        receiver.close()
    return arrived


def test_nccl_brings_every_bucket_to_every_receiver(network: Network) -> None:
    sender, receivers = make_sender("nccl", HERE), make_receivers(2)
    for generation in (1, 2):
        buckets = [make_bucket(generation, index) for index in range(4)]
        for arrived in push(sender, receivers, buckets):
            into = PushReceiver()
            for bucket in arrived:
                into.add(bucket)  # digests hold
            assert [b.data.tobytes() for b in into.take(manifest(buckets))] == [b.data.tobytes() for b in buckets]
        wire = network.last
        assert sorted(wire.ranks) == [0, 1, 2]
        assert sorted(wire.log) == [(number, rank, 0, 640, torch.uint8) for number in range(4) for rank in range(3)]
        assert sorted(wire.destroyed) == [0, 1, 2]  # each once
    assert len(network.wires) == 2  # a communicator of its own for each generation


def test_a_bucket_spoiled_on_the_way_does_not_pass_the_digest(network: Network) -> None:
    sender, receiver = make_sender("nccl", HERE), make_receiver("nccl", "worker-0")
    open_for(sender, [receiver], 1)
    parcel = sender.send(make_bucket(1, 0))
    while not network.wires:
        time.sleep(0.001)
    network.last.spoil = True
    with pytest.raises(PushError, match=r"arrived damaged: weight\.0"):
        PushReceiver().add(receiver.fetch(parcel))
    sender.abort()
    receiver.abort()


def test_two_buckets_are_under_way_while_the_third_waits(network: Network) -> None:
    sender, receiver = make_sender("nccl", HERE), make_receiver("nccl", "worker-0")
    open_for(sender, [receiver], 1)
    parcels = [sender.send(make_bucket(1, index)) for index in range(2)]  # nobody has joined, and none waits for that
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(sender.send, make_bucket(1, 2))
        time.sleep(0.1)
        assert not third.done()
        receiver.fetch(parcels[0])
        parcels.append(third.result(10))
    assert [receiver.fetch(parcel).index for parcel in parcels[1:]] == [1, 2]
    sender.close()
    receiver.close()


def test_abort_frees_the_survivors_of_a_silent_receiver_for_the_next_generation(network: Network) -> None:
    sender, receivers = make_sender("nccl", HERE), make_receivers(2)
    open_for(sender, receivers, 1)
    parcels = [sender.send(make_bucket(1, index)) for index in range(2)]
    with ThreadPoolExecutor(3) as pool:
        for fetched in [pool.submit(receiver.fetch, parcels[0]) for receiver in receivers]:
            fetched.result(10)
        stuck = [pool.submit(receivers[0].fetch, parcels[1])]  # receiver 1 is silent from here on
        sender.send(make_bucket(1, 2))
        stuck.append(pool.submit(sender.send, make_bucket(1, 3)))
        time.sleep(0.1)
        assert not any(waiting.done() for waiting in stuck)
        sender.abort()
        receivers[0].abort()
        for waiting in stuck:
            with pytest.raises(PushError, match=r"generation 1: aborted; the running weights are untouched"):
                waiting.result(10)
    assert sorted(network.last.destroyed) == [0, 1]
    with pytest.raises(PushError, match="aborted"):
        sender.send(make_bucket(1, 4))
    with pytest.raises(PushError, match="aborted"):
        receivers[0].fetch(Header.of(make_bucket(1, 2), parcels[0].way))
    buckets = [make_bucket(2, index) for index in range(3)]
    (arrived,) = push(sender, receivers[:1], buckets)
    assert [b.data.tobytes() for b in arrived] == [b.data.tobytes() for b in buckets]
    assert sorted(network.last.ranks) == [0, 1]


def test_abort_while_the_ranks_meet_and_whoever_comes_late_lets_go(network: Network) -> None:
    sender, receiver = make_sender("nccl", HERE), make_receiver("nccl", "worker-0")
    sender.open(1, ["worker-0", "worker-1"])
    parcel = sender.send(make_bucket(1, 0))
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(receiver.fetch, parcel)
        time.sleep(0.05)
        receiver.abort()
        sender.abort()
        with pytest.raises(PushError, match="worker-0 in generation 1: aborted"):
            fetched.result(10)
    network.join(parcel.way.address, parcel.way.port, 2, 3)  # the third comes after all
    wire = network.last
    with wire.changed:
        assert wire.changed.wait_for(lambda: sorted(wire.destroyed) == [0, 1], timeout=10)
    assert wire.log == []


def test_a_broken_communicator_is_told_in_its_own_words(network: Network) -> None:
    sender, receiver = make_sender("nccl", HERE), make_receiver("nccl", "worker-0")
    open_for(sender, [receiver], 1)
    while not network.wires:
        time.sleep(0.001)
    network.last.error = RuntimeError("NCCL error: unhandled system error")
    parcel = sender.send(make_bucket(1, 0))
    with pytest.raises(PushError, match="worker-0 in generation 1: RuntimeError: NCCL error: unhandled system error"):
        receiver.fetch(parcel)
    with pytest.raises(PushError, match="sender of generation 1: RuntimeError: NCCL error"):
        sender.close()
    assert sorted(network.last.destroyed) == [0, 1]


def test_parcels_of_another_generation_or_out_of_order_are_refused(network: Network) -> None:
    sender, receiver = make_sender("nccl", HERE), make_receiver("nccl", "worker-0")
    with pytest.raises(PushError, match="generation 3 was never opened"):
        sender.send(make_bucket(3, 0))
    with pytest.raises(PushError, match="parcel 1 of generation 3 came where parcel 0 of generation -1"):
        receiver.fetch(Header.of(make_bucket(3, 1), Invitation(HERE, 1, ("worker-0",))))
    open_for(sender, [receiver], 4)
    first, second = (sender.send(make_bucket(4, index)) for index in range(2))
    receiver.fetch(first)
    for wrong in (make_bucket(3, 0), make_bucket(3, 1), make_bucket(4, 0), make_bucket(4, 2), make_bucket(5, 1)):
        with pytest.raises(PushError, match=r"came where parcel 1 of generation 4 was next; the running weights are untouched"):
            receiver.fetch(Header.of(wrong, first.way))
    assert receiver.fetch(second).data.tobytes() == make_bucket(4, 1).data.tobytes()  # none of them has done harm


def test_a_failed_generation_is_gathered_to_its_end(network: Network) -> None:
    """The other ranks take part in every gather: were rank 0 to stop, they would wait for ever."""
    sender = make_sender("nccl", HERE)
    gathered = []

    def gather() -> Any:
        for index in range(5):
            gathered.append(index)
            yield make_bucket(1, index)

    parcels = send_all(sender, 1, ["worker-0"], gather())
    assert next(parcels).index == 0
    sender.abort()
    with pytest.raises(PushError, match="aborted"):
        next(parcels)
    assert gathered == [0, 1, 2, 3, 4]


def test_ipc_opens_the_senders_memory_on_its_own_gpu(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[str, torch.Tensor] = {}
    opened = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        memory[f"handle-{len(memory)}"] = tensor
        return None, (*range(6), "device of the sender", f"handle-{len(memory) - 1}")

    def rebuild(*arguments: Any) -> torch.Tensor:
        opened.append(arguments)
        return memory[arguments[7]]

    monkeypatch.setattr(sending, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild)
    sender, receiver = make_sender("ipc", HERE), make_receiver("ipc", "worker-0")
    buckets = [make_bucket(1, index) for index in range(3)]
    (arrived,) = push(sender, [receiver], buckets)
    assert [b.data.tobytes() for b in arrived] == [b.data.tobytes() for b in buckets]
    assert [(b.specs, b.offsets) for b in arrived] == [(b.specs, b.offsets) for b in buckets]
    assert opened == [(*range(6), None, f"handle-{index}") for index in range(3)]  # on the receiver's device: cpu has no index
    monkeypatch.setitem(GPU, "uuid", "GPU-b")
    parcel = sender.send(make_bucket(1, 3))
    monkeypatch.setitem(GPU, "uuid", "GPU-a")
    with pytest.raises(PushError, match=r"lie on GPU GPU-b, this engine runs on GPU-a.*transport=nccl or local works"):
        receiver.fetch(parcel)


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_a_vllm_with_another_interface_is_refused_at_start(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_transports, "_this_gpu", lambda: torch.device("cpu"))
    name = f"{transport.upper()}WeightTransferEngine"
    module = {"nccl": nccl_engine, "ipc": ipc_engine}[transport]
    monkeypatch.setattr(module, name, type(name, (), {"__init__": lambda self, config, parallel_config, model: None}))
    with pytest.raises(EngineError, match=rf"transport={transport} is written against vLLM 0\.32.*local works"):
        make_receiver(transport, "worker-0")
    monkeypatch.delattr(module, name)
    with pytest.raises(EngineError, match="is missing or another"):
        make_receiver(transport, "worker-0")


def test_local_hands_the_bucket_on_as_it_is() -> None:
    sender, receiver = make_sender("local", HERE), make_receiver("local", "worker-0")
    buckets = [make_bucket(1, index) for index in range(3)]
    for parcel, bucket in zip(send_all(sender, 1, ["worker-0"], buckets), buckets, strict=True):
        assert receiver.fetch(parcel) is bucket
