"""The step loop of the engine contract, driven with a scripted model whose tokens tell which weights made them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout.engine import EngineError, GroupRequest, OnSwap, PushError, Sampling, Straggler, TokenScores, Wake
from rollout.records import Finish, Group, Purpose, Visit, describe_group
from rollout.stepping import Produced, SteppingEngine
from rollout.weights import Bucket, Manifest, TensorSpec, digest_bytes

pytestmark = pytest.mark.timeout(60)
START_WEIGHT = 7


class ScriptedStepper:
    """A model of one weight. Its token is 10 x weight, plus 1 where the completion's keys come from another weight.

    A completion's seed is its length. With a gate, each step waits for one permit.
    """

    def __init__(self) -> None:
        self.weight = START_WEIGHT
        self.running: dict[int, list[int]] = {}  # key: [tokens left, limit reached, weight of its keys]
        self.gate: threading.Semaphore | None = None
        self.step_s = 0.0005
        self.failure: Exception | None = None
        self.recompute = False
        self.closed = 0
        self.in_step = threading.Event()
        self.calls: list[str] = []  # of sleep, wake and load

    def sleep(self) -> int:
        assert not self.running
        self.calls.append("sleep")
        self.weight = 0  # lost
        return 4096

    def wake(self, what: Wake) -> None:
        self.calls.append(f"wake {what}")

    def check(self, request: GroupRequest) -> None:
        if len(request.prompt_token_ids) > 8:
            raise ValueError("prompt too long")

    def check_row(self, row: NDArray[np.int32]) -> None:
        if len(row) < 2:
            raise ValueError("row too short")

    def add(self, key: int, prompt_token_ids: list[int], seed: int | None, sampling: Sampling) -> None:
        length = sampling.max_new_tokens if seed is None else seed
        self.running[key] = [length, int(length == sampling.max_new_tokens), self.weight]

    def step(self) -> list[Produced]:
        self.in_step.set()
        if self.gate is None:
            time.sleep(self.step_s)
        else:
            assert self.gate.acquire(timeout=30)
        if self.failure is not None:
            raise self.failure
        made = []
        for key, state in list(self.running.items()):
            if self.recompute:
                state[2] = self.weight
            state[0] -= 1
            finish = (Finish.LENGTH if state[1] else Finish.STOP) if state[0] == 0 else None
            token = 10 * self.weight + (state[2] != self.weight)
            made.append(Produced(key, [token], [-token / 8], finish))
            if finish is not None:
                del self.running[key]
        self.recompute = False
        return made

    def abort(self, keys: Sequence[int]) -> None:
        for key in keys:
            del self.running[key]

    def load(self, buckets: Sequence[Bucket], *, recompute: bool) -> None:
        tensors = {
            s.name: b.data[o : o + s.num_bytes].view(np.float32) for b in buckets for s, o in zip(b.specs, b.offsets, strict=True)
        }
        if tensors["weight"][0] == 666:
            raise PushError("does not fill the model")
        self.calls.append("load")
        self.weight = int(tensors["weight"][0])
        self.recompute = recompute

    def score(self, rows: Sequence[NDArray[np.int32]], temperature: float) -> tuple[list[TokenScores], list[Produced]]:
        scores = [
            TokenScores(np.full(len(r) - 1, -self.weight / temperature, np.float32), np.ones(len(r) - 1, np.int32)) for r in rows
        ]
        return scores, self.step()

    def decode(self, token_ids: Sequence[NDArray[np.int32]]) -> list[str]:
        return [" ".join(map(str, ids)) for ids in token_ids]

    def close(self) -> None:
        self.closed += 1


@dataclasses.dataclass
class Bench:
    engine: SteppingEngine
    stepper: ScriptedStepper
    generation: int = 0

    def push(self, version: int, weight: int) -> object:
        self.generation += 1
        buckets, manifest = make_push(self.generation, weight)
        for bucket in buckets:
            self.engine.receive(bucket)
        return self.engine.swap(version, manifest)

    def collect(self, num: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < num:
            more = self.engine.poll(20.0)
            assert more, "no group within 20 s"
            groups += more
        return groups

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not true():
            assert time.monotonic() < end, "never came true"
            time.sleep(0.001)


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def start(on_swap: OnSwap = OnSwap.RECOMPUTE, *, max_running: int = 64, gate: bool = False) -> Bench:
        stepper = ScriptedStepper()
        stepper.gate = threading.Semaphore(0) if gate else None
        made.append(
            Bench(
                SteppingEngine("worker-3", lambda: stepper, on_swap=on_swap, max_running=max_running, first_version=-1), stepper
            )
        )
        return made[-1]

    yield start
    for bench in made:
        if bench.stepper.gate is not None:
            bench.stepper.gate.release(1000)
        bench.engine.close()


def ask(number: int, lengths: Sequence[int], limit: int = 10_000, straggler: Straggler | None = None) -> GroupRequest:
    visit = Visit(f"prompt-{number}", 0, Purpose.TRAIN)
    sampling = Sampling(1.0, 1.0, 0, 0.0, limit, ())
    return GroupRequest(visit, np.array([number], np.int32), tuple(lengths), len(lengths), sampling, straggler)


def pack(generation: int, index: int, tensors: dict[str, NDArray[np.float32]]) -> Bucket:
    specs, offsets, data = [], [], np.zeros(64 * len(tensors), np.uint8)
    for place, (name, values) in enumerate(tensors.items()):
        raw = values.view(np.uint8)
        data[64 * place : 64 * place + raw.nbytes] = raw
        specs.append(TensorSpec(name, "float32", values.shape, raw.nbytes, digest_bytes(raw)))
        offsets.append(64 * place)
    return Bucket(generation, index, tuple(specs), tuple(offsets), data)


def make_push(generation: int, weight: float) -> tuple[list[Bucket], Manifest]:
    buckets = [
        pack(generation, 0, {"weight": np.array([weight], np.float32), "bias": np.array([1, 2], np.float32)}),
        pack(generation, 1, {"norm": np.array([3], np.float32)}),
    ]
    return buckets, Manifest(generation, 2, tuple(spec for bucket in buckets for spec in bucket.specs))


@pytest.mark.parametrize("on_swap", list(OnSwap))
def test_no_token_carries_a_version_whose_weights_did_not_make_it(make: Callable[..., Bench], on_swap: OnSwap) -> None:
    bench = make(on_swap, max_running=10)
    weight_of = {-1: START_WEIGHT, 0: 3, 1: 5, 2: 4}
    bench.engine.submit([ask(number, [20 + 35 * ((number + place) % 6) for place in range(4)]) for number in range(12)])
    reports = []
    for version in (0, 1, 2):
        seen = bench.engine.health().num_tokens
        bench.until(lambda seen=seen: bench.engine.health().num_tokens > seen + 150)
        reports.append(bench.push(version, weight_of[version]))
    groups = bench.collect(12)
    completions = [completion for group in groups for completion in group.completions]
    for one in completions:
        assert [weight_of[version] for version in one.versions.tolist()] == (one.token_ids // 10).tolist()
        assert one.mixed.tolist() == (one.token_ids % 10 == 1).tolist()
        assert one.roll_logp.tolist() == (-one.token_ids / 8).tolist()
        assert np.all(np.diff(one.versions) >= 0)
        assert one.loss_mask.all()
    assert {version for one in completions for version in one.versions.tolist()} == {-1, 0, 1, 2}
    spanning = sum(one.versions[0] != one.versions[-1] for one in completions)
    assert (spanning == 0) == (on_swap is OnSwap.FINISH)
    assert any(one.mixed.any() for one in completions) == (on_swap is OnSwap.KEEP)
    assert sum(report.num_recomputed for report in reports) >= spanning * (on_swap is OnSwap.RECOMPUTE)
    assert all((report.num_mixed > 0) == (on_swap is OnSwap.KEEP) for report in reports)
    assert [report.version for report in reports] == [0, 1, 2]
    assert all((report.num_tensors, report.num_bytes) == (3, 16) for report in reports)


def test_groups_come_as_each_finishes_and_completions_by_index(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.submit([ask(0, [300, 2]), ask(1, [9, 4], limit=9), ask(2, [100])])
    groups = bench.collect(3)
    assert [group.visit.prompt_id for group in groups] == ["prompt-1", "prompt-2", "prompt-0"]
    assert [[one.num_tokens for one in group.completions] for group in groups] == [[9, 4], [100], [300, 2]]
    assert [one.finish for one in groups[0].completions] == [Finish.LENGTH, Finish.STOP]
    assert groups[0].completions[1].text == "70 70 70 70"
    assert groups[0].worker == "worker-3"
    assert groups[0].time_s < groups[1].time_s < groups[2].time_s
    meta = describe_group(groups[0])
    assert meta.num_truncated == 1
    assert (meta.repeated_share, meta.max_repeats) == (0.0, 0), "nine words hold no run of twenty"
    repeated = describe_group(groups[1])  # 100 words, all alike: 81 runs of twenty
    assert (repeated.repeated_share, repeated.max_repeats) == (80 / 81, 81)


def test_at_most_max_running_completions_run_and_the_rest_wait(make: Callable[..., Bench]) -> None:
    bench = make(max_running=5, gate=True)
    bench.engine.submit([ask(number, [3, 3, 3, 3]) for number in range(3)])
    bench.stepper.gate.release(2)
    bench.until(lambda: bench.engine.health().num_steps == 2)
    health = bench.engine.health()
    assert (health.num_running, health.num_waiting, health.num_tokens) == (5, 7, 10)
    bench.stepper.gate.release(100)
    assert len(bench.collect(3)) == 3
    assert bench.engine.health().num_tokens == 36


def test_health_answers_at_once_while_a_step_hangs_and_its_age_grows(make: Callable[..., Bench]) -> None:
    bench = make(gate=True)
    assert bench.engine.health().last_step_age_s == 0.0
    bench.engine.submit([ask(0, [5])])
    assert bench.stepper.in_step.wait(10)
    time.sleep(0.2)
    start = time.monotonic()
    age = bench.engine.health().last_step_age_s
    assert time.monotonic() - start < 0.05
    assert 0.15 < age < 5.0
    bench.stepper.gate.release(5)
    bench.collect(1)
    assert bench.engine.health().last_step_age_s == 0.0


def test_an_idle_engine_takes_no_processor_time(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.submit([ask(0, [5])])
    bench.collect(1)
    start = time.process_time()
    assert bench.engine.poll(0.5) == []
    assert time.process_time() - start < 0.1


def test_a_paused_engine_is_at_rest_until_resume(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.submit([ask(0, [40])])
    bench.until(lambda: bench.engine.health().num_tokens > 5)
    bench.engine.pause()
    steps = bench.engine.health().num_steps
    time.sleep(0.1)
    assert bench.engine.health().num_steps == steps < 40
    assert bench.engine.poll(0.01) == []
    bench.engine.resume()
    assert len(bench.collect(1)) == 1


def test_groups_that_end_while_scoring_a_paused_engine_are_held_until_resume(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.engine.submit([ask(0, [60])])
    bench.until(lambda: bench.engine.health().num_tokens > 5)
    bench.engine.pause()
    left = bench.stepper.running[0][0]
    for _ in range(left):
        (scores,) = bench.engine.score_tokens([np.array([1, 2, 3], np.int32)], 0.5)
        assert scores.logp.tolist() == [-2 * START_WEIGHT] * 2
    assert bench.engine.poll(0.05) == []
    bench.engine.resume()
    assert bench.collect(1)[0].completions[0].num_tokens == 60


def test_cancelled_visits_are_dropped_wherever_they_are(make: Callable[..., Bench]) -> None:
    bench = make(max_running=2, gate=True)
    requests = [ask(0, [1]), ask(1, [50]), ask(2, [3]), ask(3, [2])]
    bench.engine.submit(requests)
    bench.stepper.gate.release(1)
    bench.until(lambda: bench.engine.health().num_steps == 1)
    with ThreadPoolExecutor() as pool:  # 0 is ready, 1 runs, 2 runs from the next step on or waits, 3 waits
        gone = pool.submit(bench.engine.cancel, [requests[n].visit for n in (0, 1, 3)] + [Visit("unknown", 0, Purpose.EVAL)])
        bench.stepper.gate.release(10)
        gone.result(10)
    assert [group.visit.prompt_id for group in bench.collect(1)] == ["prompt-2"]
    assert bench.engine.poll(0.05) == []
    assert bench.engine.health().num_running == bench.engine.health().num_waiting == 0
    bench.engine.submit([requests[1]])  # a cancelled visit may come again
    bench.stepper.gate.release(50)
    assert bench.collect(1)[0].completions[0].num_tokens == 50


def test_what_the_stepper_raises_reaches_every_waiting_caller(make: Callable[..., Bench]) -> None:
    bench = make(gate=True)
    bench.engine.submit([ask(0, [5])])
    assert bench.stepper.in_step.wait(10)
    bench.stepper.failure = RuntimeError("out of memory")
    buckets, manifest = make_push(1, 3)
    for bucket in buckets:
        bench.engine.receive(bucket)
    row = np.array([1, 2], np.int32)
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(bench.engine.poll, 20.0),
            pool.submit(bench.engine.score_tokens, [row], 1.0),
            pool.submit(bench.engine.swap, 0, manifest),
            pool.submit(bench.engine.pause),
        ]
        bench.until(lambda: len(bench.engine._unanswered) == 3)
        bench.stepper.gate.release(1)
        for call in calls:
            with pytest.raises(EngineError, match=r"worker-3 stopped: RuntimeError: out of memory"):
                call.result(10)
    with pytest.raises(EngineError, match="out of memory"):
        bench.engine.submit([ask(1, [5])])
    with pytest.raises(EngineError, match="out of memory"):
        bench.engine.poll(0.0)
    assert bench.stepper.closed == 1


def test_close_ends_the_thread_and_waiting_callers_and_may_be_called_twice(make: Callable[..., Bench]) -> None:
    bench = make()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bench.engine.poll, 20.0)
        bench.engine.submit([ask(0, [100_000])])
        bench.engine.close()
        bench.engine.close()
        with pytest.raises(EngineError, match="closed"):
            waiting.result(10)
    with pytest.raises(EngineError, match="closed"):
        bench.engine.pause()
    assert bench.stepper.closed == 1
    assert not bench.engine._thread.is_alive()


def test_what_the_stepper_raises_while_it_is_built_comes_out_of_the_constructor() -> None:
    def build() -> ScriptedStepper:
        raise FileNotFoundError("no config.json")

    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        SteppingEngine("worker-3", build, on_swap=OnSwap.KEEP, max_running=1, first_version=0)


def test_requests_that_cannot_run_are_refused_whole(make: Callable[..., Bench]) -> None:
    bench = make(gate=True)
    long = dataclasses.replace(ask(1, [5]), prompt_token_ids=np.arange(9, dtype=np.int32))
    with pytest.raises(ValueError, match="prompt too long"):
        bench.engine.submit([ask(0, [5]), long])
    with pytest.raises(ValueError, match="1 seeds for 2 completions"):
        bench.engine.submit([dataclasses.replace(ask(0, [5]), group_size=2)])
    with pytest.raises(ValueError, match="twice at once"):
        bench.engine.submit([ask(0, [5]), ask(0, [5])])
    with pytest.raises(ValueError, match="row too short"):
        bench.engine.score_tokens([np.array([1], np.int32)], 1.0)
    with pytest.raises(ValueError, match="temperature"):
        bench.engine.score_tokens([np.array([1, 2], np.int32)], 0.0)
    assert bench.engine.health().num_waiting == bench.engine.health().num_running == 0
    bench.engine.submit([ask(0, [5])])
    with pytest.raises(ValueError, match="prompt-0"):
        bench.engine.submit([ask(0, [5])])


def replace_spec(bucket: Bucket, place: int, **changes: object) -> Bucket:
    specs = list(bucket.specs)
    specs[place] = dataclasses.replace(specs[place], **changes)
    return dataclasses.replace(bucket, specs=tuple(specs))


DEFECTS: dict[str, Callable[[list[Bucket]], list[Bucket]]] = {
    "norm: sent, never arrived": lambda b: b[:1],
    "more: arrived, but is not in the manifest": lambda b: [*b, pack(b[0].generation, 2, {"more": np.ones(1, np.float32)})],
    r"bias: sent as float32 \(2,\), arrived as float32 \(2, 1\)": lambda b: [replace_spec(b[0], 1, shape=(2, 1)), b[1]],
    r"norm: sent as float32 \(1,\), arrived as int32 \(1,\)": lambda b: [b[0], replace_spec(b[1], 0, dtype="int32")],
    "norm: digest": lambda b: [b[0], pack(b[0].generation, 1, {"norm": np.array([4], np.float32)})],
    "norm: arrived 2 times": lambda b: [*b, pack(b[0].generation, 2, {"norm": np.array([3], np.float32)})],
}


@pytest.mark.parametrize("message", DEFECTS)
def test_a_push_that_differs_from_its_manifest_is_refused_and_the_next_one_taken(
    make: Callable[..., Bench], message: str
) -> None:
    bench = make()
    bench.push(0, 3)
    buckets, manifest = make_push(2, 5)
    for bucket in DEFECTS[message](buckets):
        bench.engine.receive(bucket)
    with pytest.raises(PushError, match=f"untouched.*{message}"):
        bench.engine.swap(1, manifest)
    assert (bench.stepper.weight, bench.engine.health().version) == (3, 0)
    bench.generation = 2
    bench.push(1, 5)
    assert (bench.stepper.weight, bench.engine.health().version) == (5, 1)


def test_damaged_bytes_are_refused_on_arrival(make: Callable[..., Bench]) -> None:
    bench = make()
    buckets, manifest = make_push(1, 5)
    for place in (0, 64 + 7):  # the first byte of ``weight``, the last of ``bias``
        data = buckets[0].data.copy()
        data[place] ^= 1
        with pytest.raises(PushError, match="arrived damaged: " + ("weight" if place == 0 else "bias")):
            bench.engine.receive(dataclasses.replace(buckets[0], data=data))
    with pytest.raises(PushError, match="arrived damaged: bias"):
        bench.engine.receive(dataclasses.replace(buckets[0], data=buckets[0].data[:70]))
    for bucket in reversed(buckets):
        bench.engine.receive(bucket)
    assert bench.engine.swap(0, manifest).num_tensors == 3


def test_a_newer_generation_drops_an_older_one_and_the_older_is_refused_from_then_on(make: Callable[..., Bench]) -> None:
    bench = make()
    old, old_manifest = make_push(1, 5)
    new, new_manifest = make_push(2, 6)
    bench.engine.receive(old[0])
    bench.engine.receive(new[0])
    with pytest.raises(PushError, match="belongs to generation 1, but 2"):
        bench.engine.receive(old[1])
    with pytest.raises(PushError, match="swap of generation 1, but the newest buckets are of generation 2"):
        bench.engine.swap(0, old_manifest)
    bench.engine.receive(new[1])
    bench.engine.swap(0, new_manifest)
    assert bench.stepper.weight == 6
    with pytest.raises(PushError, match="belongs to generation 2"):  # it has ended
        bench.engine.receive(new[0])
    with pytest.raises(PushError, match="the newest swap of 2"):
        bench.engine.swap(1, new_manifest)
    with pytest.raises(PushError, match="generation 9"):
        bench.engine.swap(1, make_push(9, 1)[1])


def test_tensors_that_do_not_fill_the_model_are_refused_and_generation_goes_on(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.push(0, 3)
    bench.engine.submit([ask(0, [200])])
    bench.until(lambda: bench.engine.health().num_tokens > 5)
    with pytest.raises(PushError, match="does not fill the model"):
        bench.push(1, 666)
    (group,) = bench.collect(1)
    assert set(group.completions[0].token_ids.tolist()) == {30}
    assert set(group.completions[0].versions.tolist()) == {0}


def test_a_newer_swap_replaces_one_that_waits_for_running_completions(make: Callable[..., Bench]) -> None:
    bench = make(OnSwap.FINISH, gate=True)
    bench.engine.submit([ask(0, [3])])
    assert bench.stepper.in_step.wait(10)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(bench.push, 0, 3)
        bench.until(lambda: bench.engine._unanswered)
        bench.stepper.gate.release(1)
        bench.until(lambda: bench.engine._pending_swap is not None)
        second = pool.submit(bench.push, 1, 5)
        bench.until(lambda: len(bench.engine._unanswered) == 2)
        bench.stepper.gate.release(10)
        with pytest.raises(PushError, match="a swap of generation 2 came before"):
            first.result(10)
        assert second.result(10).version == 1
    assert bench.stepper.weight == 5
    assert set(bench.collect(1)[0].completions[0].versions.tolist()) == {-1}


# ---- sleep ----------------------------------------------------------------------------------------------------------


def test_a_sleeping_engine_wakes_weights_takes_a_push_and_wakes_its_cache(make) -> None:
    bench = make()
    bench.push(0, 5)
    bench.engine.submit([ask(0, [3])])
    bench.collect(1)
    report = bench.engine.sleep()
    assert report.freed_bytes == 4096
    assert bench.engine.health().version == -1
    with pytest.raises(ValueError, match="worker-3 sleeps already"):
        bench.engine.sleep()
    with pytest.raises(ValueError, match="its weights wake before its cache"):
        bench.engine.wake(Wake.CACHE)
    with pytest.raises(ValueError, match="no room for weights: wake them first"):
        bench.push(1, 6)
    bench.engine.wake(Wake.WEIGHTS)
    with pytest.raises(ValueError, match="its weights are not asleep"):
        bench.engine.wake(Wake.WEIGHTS)
    with pytest.raises(ValueError, match="asleep are its cache"):
        bench.engine.submit([ask(1, [3])])
    bench.push(1, 6)
    with pytest.raises(ValueError, match="asleep are its cache"):
        bench.engine.score_tokens([np.array([1, 2], np.int32)], 1.0)
    bench.engine.wake(Wake.CACHE)
    bench.engine.submit([ask(1, [3])])
    (group,) = bench.collect(1)
    assert group.completions[0].token_ids.tolist() == [60, 60, 60]
    assert group.completions[0].versions.tolist() == [1, 1, 1]
    assert bench.stepper.calls == ["load", "sleep", "wake weights", "load", "wake cache"]


def test_an_engine_that_slept_computes_nothing_before_a_push_has_filled_it(make) -> None:
    bench = make()
    bench.engine.sleep()
    bench.engine.wake(Wake.WEIGHTS)
    bench.engine.wake(Wake.CACHE)
    for call in (lambda: bench.engine.submit([ask(0, [3])]), lambda: bench.engine.score_tokens([np.array([1, 2])], 1.0)):
        with pytest.raises(ValueError, match="no push has filled its weights since"):
            call()
    bench.push(4, 2)
    assert bench.engine.score_tokens([np.array([1, 2], np.int32)], 1.0)[0].logp.tolist() == [-2.0]


def test_an_engine_with_completions_to_make_does_not_sleep_until_they_are_cancelled(make) -> None:
    bench = make(gate=True, max_running=2)
    bench.engine.submit([ask(0, [9, 9, 9])])
    assert bench.stepper.in_step.wait(20)
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(bench.engine.sleep)
        _until_asked(bench.engine)
        bench.stepper.gate.release(1)
        with pytest.raises(ValueError, match=r"has 3 completions to make and cannot sleep: cancel them first"):
            asleep.result(20)
        gone = pool.submit(bench.engine.cancel, [Visit("prompt-0", 0, Purpose.TRAIN)])
        _until_asked(bench.engine)
        bench.stepper.gate.release(1)
        gone.result(20)
    assert bench.engine.sleep().freed_bytes == 4096


def _until_asked(engine: SteppingEngine) -> None:
    """Until a caller's command waits for the step in hand: a step let go before that would not be followed by the command."""
    end = time.monotonic() + 20
    while not engine._commands:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_group_is_given_out_without_its_last_members(make: Callable[..., Bench]) -> None:
    """Three of four have ended and the fourth would take a million steps; another group has no such rule, and one not enough members."""
    bench = make()
    rule = Straggler(after_s=0.05, min_finished=3)
    endless = 10**6
    bench.engine.submit([ask(0, [5, endless, 9, 2], straggler=rule), ask(1, [5, 5, 5, endless])])
    bench.engine.submit([ask(2, [endless, endless, 3, 3], straggler=rule)])
    (group,) = bench.collect(1)
    assert group.visit.prompt_id == "prompt-0"
    assert [(one.index, one.num_tokens) for one in group.completions] == [(0, 5), (2, 9), (3, 2)]
    (cut,) = group.unfinished
    assert 9 <= cut < endless
    meta = describe_group(group)
    assert (meta.num_finished, meta.num_tokens, meta.unfinished) == (3, (5, 9, 2), (cut,))
    bench.until(lambda: bench.engine.health().num_running == 3)
    assert len(bench.stepper.running) == 3, "the fourth is not generated any more"
    assert bench.engine.poll(0.2) == [], "two of four are not enough, and without the rule a group is whole or nothing"
    bench.engine.submit([ask(0, [1, 1], straggler=Straggler(0.0, 1))])
    (again,) = bench.collect(1)
    assert (again.visit.prompt_id, again.unfinished) == ("prompt-0", ()), "both ended in one step"


def test_a_member_that_waits_for_a_place_is_no_straggler(make: Callable[..., Bench]) -> None:
    """Two may run at once. When the third ends, after six steps, the last one still waits: the group is cut one step later."""
    bench = make(max_running=2)
    bench.engine.submit([ask(0, [40, 3, 3, 3], straggler=Straggler(after_s=0.0, min_finished=2))])
    (group,) = bench.collect(1)
    assert [one.index for one in group.completions] == [1, 2]
    assert group.unfinished == (7, 1)


def test_a_swap_that_waits_for_completions_does_not_wait_for_one_that_is_cut(make: Callable[..., Bench]) -> None:
    bench = make(OnSwap.FINISH)
    bench.push(0, 3)
    bench.engine.submit([ask(0, [5, 5, 10**6], straggler=Straggler(after_s=0.05, min_finished=2))])
    bench.until(lambda: bench.engine.health().num_running > 0)
    bench.push(1, 5)
    (group,) = bench.collect(1)
    assert {version for one in group.completions for version in one.versions.tolist()} == {0}
    assert len(group.unfinished) == 1
