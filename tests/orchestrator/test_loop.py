"""The loop, driven by fakes: what is open when, which groups make a batch, what happens when it cannot be filled."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from configs.errors import ConfigError
from configs.schema import Auto, DeadlinesConfig, LastBatch, Late, LedgerConfig, WhenShort
from learner.selection import SELECTIONS
from orchestrator.errors import RunStopped
from orchestrator.handles import Lost, StepReport
from orchestrator.ledger import Ledger, Length, State
from orchestrator.loop import Loop, LoopSettings
from orchestrator.pass_rates import Observation
from orchestrator.stages import Address, Finished, Kept, LoopState, Scored
from orchestrator.waits import DeadlinePassed, Waits
from rollout.records import Consequence, GroupMeta, Outcome, Score, Status

SETTINGS = LoopSettings(
    groups_per_step=4,
    max_lag=0,
    oversample=1.0,
    max_visits_per_step=32,
    when_short=WhenShort.carry,
    late=Late.correct,
    max_token_lag=None,
    max_failed_share=0.5,
    num_steps=5,
    verifiers_s=float,
    deadlines=DeadlinesConfig(),
)


def score(accuracy, status=Status.OK):
    ok = status is Status.OK
    return Score(
        status, Outcome.NONE, accuracy if ok else None, accuracy if ok else None, {}, None, 0.0, "", {}, Consequence.NONE
    )


class World:
    """Engine, verifier, learner, push and observer in one, with a log of what happened in which order."""

    def __init__(self, *, seed=0, drop=lambda visit: False, slow=0.0, failed=lambda visit: False):
        self.random = random.Random(seed)
        self.drop, self.failed, self.slow = drop, failed, slow
        self.by_version = None  # a drop that depends on the weights that made the group
        self.version = 0
        self.log = []
        self.batches = []
        self.outcomes = []
        self.queue = asyncio.Queue()
        self.lost = asyncio.Queue()
        self.manned = asyncio.Event()
        self.manned.set()
        self.tasks = set()
        self.cancelled = set()
        self.loop = None
        self.max_open = 0

    async def submit(self, visits):
        self.log.append(("submit", len(visits)))
        self.max_open = max(self.max_open, self.loop._ledger.num_open)
        self.cancelled -= set(visits)
        for visit in visits:
            task = asyncio.create_task(self.generate(visit))
            self.tasks.add(task)

    async def generate(self, visit):
        version = self.version
        await asyncio.sleep(self.random.random() * 0.01)
        meta = GroupMeta(visit, "w", 3, (2, 2), (2, 2), 0, version, self.version, 0, 0.0, 0, 0.0, ())
        if visit not in self.cancelled:
            self.queue.put_nowait([Finished(meta, Address(None, 0))])

    async def next_finished(self):
        return await self.queue.get()

    async def next_lost(self):
        return await self.lost.get()

    async def hold(self):
        self.log.append(("hold", self.version))

    async def cancel(self, visits):
        await asyncio.sleep(0.004)  # an engine takes it between two decode steps; scores come in meanwhile
        self.cancelled |= set(visits)

    async def score(self, finished):
        await asyncio.sleep(self.random.random() * 0.005)
        return [Scored(item.meta, item.address, self.scores(item.meta.visit, item.meta.min_version)) for item in finished]

    def scores(self, visit, version):
        if self.failed(visit):
            return (score(1.0), score(0.0), score(0, Status.TIMEOUT), score(0, Status.ERROR), score(0, Status.ERROR))
        dropped = self.by_version(visit, version) if self.by_version else self.drop(visit)
        return (score(1.0), score(1.0 if dropped else 0.0))

    async def fetch(self, batch):
        return []

    async def prepare(self, batch):
        self.log.append(("prepare", batch.step))
        self.batches.append([kept.pick for kept in batch.groups])
        await asyncio.sleep(self.slow)
        return {}

    async def train(self):
        await asyncio.sleep(self.slow)
        return StepReport({}, 1, moved=True)

    async def push(self, version, report):
        assert report.moved
        await asyncio.sleep(self.slow)
        self.version = version
        self.log.append(("pushed", version))
        return {}

    async def after_step(self, outcome):
        await asyncio.sleep(self.slow)
        self.outcomes.append(outcome)

    def event(self, name, **fields):
        self.log.append((name, fields))

    def make(self, settings=SETTINGS, *, num_prompts=200, last=LastBatch.wrap, num_epochs=None, shuffle=True):
        length = Length(num_prompts, settings.groups_per_step, last)
        ledger = Ledger(
            [f"p{i}" for i in range(num_prompts)],
            ["s"] * num_prompts,
            LedgerConfig(),
            length=length,
            seed=0,
            shuffle=shuffle,
            max_visits=None if num_epochs is None else length.visits(num_epochs),
        )
        handles = (self, self, self, self, self)
        self.loop = Loop(settings, ledger, handles, SELECTIONS["zero_variance"], Waits(), step=0, version=0)
        return self.loop


def third(visit):
    return int(visit.prompt_id[1:]) % 3 == 0


@pytest.mark.parametrize("oversample", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
async def test_lag_zero_is_synchronous(oversample, seed):
    """Nothing is asked of an engine between a full batch and the end of the push, however many visits were open."""
    world = World(seed=seed, drop=third, slow=0.02)
    assert await world.make(replace(SETTINGS, oversample=oversample, max_visits_per_step=64)).run() == "done"
    training = False
    for entry, value in world.log:
        if entry == "prepare":
            training = True
        elif entry == "pushed":
            training = False
        elif entry == "submit":
            assert not training, f"submitted {value} visits while training"
    assert world.max_open == 4 * oversample
    assert world.version == 5
    assert world.loop._ledger.num_open == 0
    assert all(o.batch.version == k.scored.meta.min_version for o in world.outcomes for k in o.batch.groups)


async def test_batches_do_not_depend_on_which_group_finishes_first():
    """At lag 0 a batch is the first kept visits in pick order, whatever the timing."""
    runs = []
    for seed in range(6):
        world = World(seed=seed, drop=third)
        await world.make().run()
        runs.append([[(p.order, p.visit) for p in batch] for batch in world.batches])
    assert all(run == runs[0] for run in runs)
    assert all([order for order, _ in batch] == sorted(order for order, _ in batch) for batch in runs[0])


async def test_oversampling_fills_sooner_and_asks_the_surplus_again():
    """What was asked beyond a full batch depends on timing; which visits are trained must not."""
    runs, metrics = [], []
    for seed in range(6):
        world = World(seed=seed)
        world.by_version = lambda visit, version: hash((int(visit.prompt_id[1:]), version)) % 3 == 0
        await world.make(replace(SETTINGS, oversample=2.0)).run()
        metrics.append([(o.dropped.get("zero_variance_solved"), [s.meta.visit for s in o.seen]) for o in world.outcomes])
        assert world.max_open == 8
        runs.append([[(p.order, p.visit) for p in batch] for batch in world.batches])
        surplus = sum(outcome.dropped.get("surplus", 0) for outcome in world.outcomes)
        counts = world.loop._ledger.counts
        assert surplus == counts["requeued/surplus"] > 0
        orders = [order for batch in runs[-1] for order, _ in batch]
        assert orders == sorted(orders), "no prompt is passed over"
        waiting = len(world.loop._ledger.state()["again"])
        assert counts["picked"] == counts["trained"] + counts["dropped/zero_variance_solved"] + waiting
    assert all(run == runs[0] for run in runs)
    assert all(metric == metrics[0] for metric in metrics), "what a step reports does not depend on timing either"


@pytest.mark.parametrize("max_lag", [1, 2, 4])
async def test_above_lag_zero_generation_goes_on_while_the_learner_works(max_lag):
    world = World(drop=third, slow=0.02)
    await world.make(replace(SETTINGS, max_lag=max_lag, num_steps=12)).run()
    training, overlapping = False, 0
    for entry, value in world.log:
        if entry in ("prepare", "pushed"):
            training = entry == "prepare"
        elif entry == "submit" and training:
            overlapping += value
    assert overlapping > 0
    assert world.max_open == (max_lag + 1) * 4
    lags = [o.batch.version - k.scored.meta.min_version for o in world.outcomes for k in o.batch.groups]
    assert 0 < max(lags) <= max_lag
    seen = sum(len(outcome.seen) for outcome in world.outcomes) + len(world.loop._seen)
    counts = world.loop._ledger.counts
    assert seen == counts["kept"] + counts["dropped/zero_variance_solved"], (
        "what comes in while the observer works is counted too"
    )
    trained = [pick.order for batch in world.batches for pick in batch]
    assert len(trained) == len(set(trained)) == 48, "no visit is trained twice"


def unsolvable(visit):
    return True


async def test_short_batch_stops_with_the_histogram():
    world = World(drop=unsolvable)
    with pytest.raises(
        RunStopped, match=r"0 of 4 groups were kept out of 32 visits .*pass rates of 32 groups: 1: 32.*max_visits"
    ):
        await world.make(replace(SETTINGS, when_short=WhenShort.stop)).run()


async def test_short_batch_trains_on_what_there_is():
    world = World(drop=lambda visit: int(visit.prompt_id[1:]) % 20 != 0)
    await world.make(replace(SETTINGS, when_short=WhenShort.train, max_visits_per_step=20)).run()
    sizes = [len(outcome.batch.groups) for outcome in world.outcomes]
    assert min(sizes) < 4
    assert sum(bool(size) for size in sizes) == world.version, "a step without groups trains nothing and pushes nothing"


async def test_short_batch_is_carried_into_the_next_step():
    world = World(drop=lambda visit: int(visit.prompt_id[1:]) % 20 != 0)
    await world.make(replace(SETTINGS, max_visits_per_step=20, num_steps=12)).run()
    sizes = [len(outcome.batch.groups) for outcome in world.outcomes]
    assert set(sizes) == {0, 4}
    assert any(name == "short_batch" for name, _ in world.log)


async def test_the_end_of_the_data_ends_the_run_with_a_short_batch():
    """B98, B149: the groups that are there are trained on, and the run says why it ended."""
    world = World(drop=lambda visit: visit.prompt_id == "p1")
    reason = await world.make(replace(SETTINGS, num_steps=100), num_prompts=7, last=LastBatch.keep, num_epochs=1).run()
    assert reason == "data used up"
    assert (
        sorted(len(outcome.batch.groups) for outcome in world.outcomes) == [2, 4]
        or sum(len(o.batch.groups) for o in world.outcomes) == 6
    )


@pytest.mark.parametrize(
    ("last", "sizes"), [(LastBatch.keep, [4, 4, 2, 4, 4, 2]), (LastBatch.drop, [4] * 4)], ids=["keep", "drop"]
)
async def test_two_epochs_of_ten_prompts_at_the_engine(last, sizes):
    """B108: with the partial batch 3 steps an epoch and each prompt twice; without it 2 steps, and two prompts an epoch skipped."""
    world, asked = World(), []
    planned = Length(10, 4, last).steps(2)
    loop = world.make(replace(SETTINGS, num_steps=planned), num_prompts=10, last=last, num_epochs=2)
    submit = world.submit

    async def noting(visits):
        asked.extend(visit.prompt_id for visit in visits)
        await submit(visits)

    world.submit = noting
    assert await loop.run() == "done"
    assert [len(batch) for batch in world.batches] == sizes
    assert len(sizes) == planned
    epochs = [asked[: len(asked) // 2], asked[len(asked) // 2 :]]
    assert [len(set(epoch)) for epoch in epochs] == [len(epoch) for epoch in epochs] == [10 - 2 * (last is LastBatch.drop)] * 2
    if last is LastBatch.drop:
        assert set(epochs[0]) != set(epochs[1]), "other prompts are skipped after each shuffle"


@pytest.mark.parametrize("shuffle", [True, False])
async def test_a_run_stopped_twice_asks_what_the_unbroken_one_asks(shuffle):
    """B113: 20 prompts, two a step: 3 steps, 2 more after a resume, and to the end after another; each once an epoch, in order."""
    settings = replace(SETTINGS, groups_per_step=2, num_steps=20)

    def begin(world, num_steps, held=None):
        loop = world.make(
            replace(settings, num_steps=num_steps), num_prompts=20, last=LastBatch.keep, num_epochs=2, shuffle=shuffle
        )
        if held is None:
            return loop
        step, state, ledger, arrays = held
        loop._ledger.restore(ledger, arrays)
        settings_now, handles = replace(settings, num_steps=num_steps), (world,) * 5
        selection = SELECTIONS["zero_variance"]
        world.loop = Loop(settings_now, loop._ledger, handles, selection, Waits(), step=step, version=step, state=state)
        world.version = step
        return world.loop

    whole = World()
    assert await begin(whole, 20).run() == "done"
    held, parts = None, []
    for num_steps in (3, 5, 20):
        world = World(seed=num_steps)
        loop = begin(world, num_steps, held)
        assert await loop.run() == "done"
        parts += world.batches
        held = (loop.step, loop.state(), json.loads(json.dumps(loop._ledger.state())), loop._ledger.arrays())
    assert parts == whole.batches
    ids = [pick.visit.prompt_id for batch in parts for pick in batch]
    first, second = ids[:20], ids[20:]
    everything = [f"p{i}" for i in range(20)]
    assert sorted(first) == sorted(second) == sorted(everything)
    assert (first == everything) == (second == everything) == (not shuffle)


async def test_every_group_keeps_its_own_scores_through_drops_refills_and_the_cut():
    """B100: of four groups the second and fourth are dropped and refilled twice, and what is kept is cut to the batch; every score names
    its visit."""
    world = World()

    def scores(visit, version):
        number = int(visit.prompt_id[1:]) + visit.number / 1000
        return (score(number), score(number if number % 2 >= 1 else number + 0.5))

    world.scores = scores
    assert await world.make(replace(SETTINGS, oversample=2.0, num_steps=6)).run() == "done"
    assert sum(outcome.dropped["zero_variance_solved"] for outcome in world.outcomes) > 12, (
        "refills were asked for, more than once a step"
    )
    for outcome in world.outcomes:
        assert len(outcome.batch.groups) == 4
        for kept in outcome.batch.groups:
            meta = kept.scored.meta
            assert meta.visit == kept.pick.visit
            assert kept.scored.scores == scores(meta.visit, meta.min_version)
            assert len(kept.scored.scores) == meta.num_finished


async def test_failing_verifiers_stop_the_run_with_the_counts():
    world = World(failed=lambda visit: True)
    with pytest.raises(RunStopped, match=r"the verifier failed on 12 of 20 completions of step 1 .*timeout: 4"):
        await world.make().run()


async def test_failing_verifiers_stop_a_run_that_carries_short_batches():
    world = World()
    world.scores = lambda visit, version: (score(0, Status.ERROR), score(0, Status.ERROR))
    with pytest.raises(RunStopped, match="the verifier failed on 6 of 6 completions of step 1"):
        await world.make().run()


async def test_the_first_failures_of_a_step_do_not_decide_and_the_one_too_many_does_at_once():
    """A batch is 4 groups of 2, of which half may fail: 4 failures are no reason, and the fifth is, long before 32 visits."""
    lost, fine = (score(0, Status.ERROR), score(0, Status.ERROR)), (score(1.0), score(0.0))
    for num_lost, words in ((2, None), (3, "failed on 6 of 6 completions of step 1 ")):
        world, asked = World(), []

        def scores(visit, version, asked=asked, num_lost=num_lost):
            asked.append(visit)
            return lost if len(asked) <= num_lost else fine

        world.scores = scores
        loop = world.make(replace(SETTINGS, num_steps=1))
        if words is None:
            assert await loop.run() == "done"
        else:
            with pytest.raises(RunStopped, match=words):
                await loop.run()
            assert len(asked) <= 4, "no refill is asked for"


async def test_a_resumed_run_whose_verifier_was_mended_goes_on():
    """What failed before the stop is in the checkpoint, and no longer counts."""
    world = World()
    world.scores = lambda visit, version: (score(0, Status.ERROR), score(0, Status.ERROR))
    loop = world.make(replace(SETTINGS, num_steps=1))
    with pytest.raises(RunStopped, match="failed on 6 of 6"):
        await loop.run()
    state = loop.state()
    assert len(state.judged) >= 3, "another may have come in at the same moment"
    mended = World()
    ledger = mended.make()._ledger
    ledger.restore(json.loads(json.dumps(loop._ledger.state())), loop._ledger.arrays())
    settings, handles = replace(SETTINGS, num_steps=1), (mended,) * 5
    mended.loop = Loop(settings, ledger, handles, SELECTIONS["zero_variance"], Waits(), step=0, version=0, state=state)
    assert await mended.loop.run() == "done"


async def test_a_few_failing_verifiers_do_not():
    world = World(failed=lambda visit: visit.prompt_id == "p3")
    assert await world.make().run() == "done"


async def test_a_policy_drops_the_whole_group_and_the_metric_says_why():
    """One completion of prompt p3 timed out, and its policy drops the group: selection would have kept it."""
    lost = replace(score(0, Status.TIMEOUT), consequence=Consequence.DROP_GROUP)
    world, seen = World(), []
    plain = world.scores

    def scores(visit, version):
        seen.append(visit.prompt_id)
        return (*plain(visit, version), lost) if visit.prompt_id == "p3" else plain(visit, version)

    world.scores = scores
    assert await world.make(replace(SETTINGS, num_steps=8), num_prompts=16).run() == "done"
    dropped = sum(outcome.dropped.get("verifier_timeout", 0) for outcome in world.outcomes)
    assert dropped == seen.count("p3") == world.loop._ledger.counts["dropped/verifier_timeout"] > 0
    assert not any(pick.visit.prompt_id == "p3" for batch in world.batches for pick in batch)


async def test_values_that_a_policy_puts_for_a_missing_verdict_count_as_failures():
    """A dead grader whose policy is `zero` must not pass for a model that is always wrong."""
    zeroed = replace(score(0.0), consequence=Consequence.ZERO, detail="no answer from the grader")
    world = World()
    world.scores = lambda visit, version: (score(1.0), zeroed, zeroed)
    with pytest.raises(
        RunStopped, match=r"failed on 8 of 12 completions of step 1 \(ok: 12, zeroed of these: 8\).*no answer from"
    ):
        await world.make().run()
    assert await world.make(replace(SETTINGS, max_failed_share=0.7)).run() == "done"


async def test_late_groups_are_dropped_only_when_asked():
    world = World(slow=0.03)
    await world.make(replace(SETTINGS, max_lag=3, late=Late.drop, max_token_lag=1, num_steps=10)).run()
    lags = [o.batch.version - k.scored.meta.min_version for o in world.outcomes for k in o.batch.groups]
    assert max(lags) <= 1
    assert world.loop._ledger.counts["dropped/late"] > 0


class LongTailed(World):
    """A twelfth of the visits ends six versions later, or when the loop has nothing else to wait for."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.long = set()

    async def generate(self, visit):
        if int(visit.prompt_id[1:]) % 12 == 1:
            self.long.add(visit)
            version = self.version
            while self.version < version + 6 and not (self.loop._filling and set(self.loop._running) <= self.long):
                await asyncio.sleep(0.001)
            meta = GroupMeta(visit, "w", 3, (2, 2), (2, 2), 0, version, self.version, 0, 0.0, 0, 0.0, ())
            if visit not in self.cancelled:
                self.queue.put_nowait([Finished(meta, Address(None, 0))])
        else:
            await super().generate(visit)


@pytest.mark.parametrize("max_lag", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_a_batch_that_waits_leaves_no_visit_to_become_too_old(max_lag, seed):
    """Under `correct` long visits are overtaken and trained late; under `wait` never, and none is dropped for it."""
    oldest = {}
    for late in (Late.correct, Late.wait):
        world = LongTailed(seed=seed, drop=third, slow=0.002)
        assert await world.make(replace(SETTINGS, max_lag=max_lag, late=late, num_steps=20)).run() == "done"
        lags = [o.batch.version - k.scored.meta.min_version for o in world.outcomes for k in o.batch.groups]
        trained = [pick.order for batch in world.batches for pick in batch]
        assert len(trained) == len(set(trained)) == 80, "no visit is trained twice"
        assert all([pick.order for pick in batch] == sorted(pick.order for pick in batch) for batch in world.batches)
        assert world.max_open <= (max_lag + 1) * 4
        assert not world.loop._ledger.counts["dropped/late"]
        oldest[late] = max(lags)
    assert oldest[Late.wait] <= max_lag
    assert oldest[Late.correct] > max_lag


async def test_late_groups_are_the_long_ones():
    """What `drop` costs: only long visits are dropped, and most of them."""
    world = LongTailed(slow=0.002)
    await world.make(replace(SETTINGS, max_lag=1, late=Late.drop, max_token_lag=1, num_steps=20)).run()
    late = world.loop._ledger.counts["dropped/late"]
    long = [k for o in world.outcomes for k in o.batch.groups if int(k.pick.visit.prompt_id[1:]) % 12 == 1]
    assert late > len(long)
    assert all(o.batch.version - k.scored.meta.min_version <= 1 for o in world.outcomes for k in o.batch.groups)


async def test_oversampling_by_itself_opens_what_the_keep_rate_asks_for():
    """Two thirds are dropped: three batches are open in the end, and the same visits are trained as without."""
    runs = {}
    for oversample in (1.0, Auto.auto):
        world = World(drop=lambda visit: int(visit.prompt_id[1:]) % 3 > 0)
        opened = []
        world.make(replace(SETTINGS, oversample=oversample, num_steps=25))
        submit = world.submit

        async def noting(visits, world=world, opened=opened, submit=submit):
            opened.append((world.loop.step, world.loop._ledger.num_open))
            await submit(visits)

        world.submit = noting
        assert await world.loop.run() == "done"
        runs[oversample] = [[pick.visit for pick in batch] for batch in world.batches]
        most = {step: max(num for at, num in opened if at == step) for step in range(25)}
        if oversample == 1.0:
            assert set(most.values()) == {4}
        else:
            assert most[0] == 4, "nothing is known of the first step"
            assert all(9 <= num <= 16 for step, num in most.items() if step > 15)
    assert runs[1.0] == runs[Auto.auto]


async def test_stop_ends_on_whole_steps():
    world = World(slow=0.02)
    loop = world.make(replace(SETTINGS, num_steps=1000))
    asyncio.get_running_loop().call_later(0.3, loop.stop)
    assert await loop.run() == "stopped"
    assert loop.between_steps
    assert loop.step == loop.version == len(world.outcomes) > 0


async def test_a_silent_engine_meets_the_deadline():
    world = World()

    async def nothing(visit):
        await asyncio.sleep(60)

    world.generate = nothing
    deadlines = DeadlinesConfig(generate_s=0.2)
    with pytest.raises(DeadlinePassed, match="rollout workers did not finish 'a finished group for step 1' within"):
        await world.make(replace(SETTINGS, deadlines=deadlines)).run()


async def test_slow_verifiers_have_their_own_deadline_not_the_engines():
    world = World()
    quick = world.score

    async def slow(finished):
        await asyncio.sleep(0.6)
        return await quick(finished)

    world.score = slow
    loop = world.make(replace(SETTINGS, num_steps=1, deadlines=DeadlinesConfig(generate_s=0.2)))
    assert await loop.run() == "done"


async def test_verifiers_that_pass_their_deadline_are_named():
    world = World()

    async def hang(finished):
        await asyncio.sleep(60)

    world.score = hang
    deadlines = DeadlinesConfig(generate_s=0.1, score_s=0.1)
    with pytest.raises(DeadlinePassed, match="reward pool did not finish 'scores' within"):
        await world.make(replace(SETTINGS, verifiers_s=lambda num: 0.01 * num, deadlines=deadlines)).run()


async def test_an_engine_that_raises_ends_the_run_with_its_own_words():
    """B168."""
    world = World()

    async def broken():
        raise RuntimeError("engine rollout-0 is gone")

    world.next_finished = broken
    with pytest.raises(RuntimeError, match="rollout-0 is gone"):
        await world.make().run()


def steps_of(*worlds):
    """What each step came to, but for surplus visits, whose number depends on timing."""
    return [
        (
            outcome.batch.step,
            [kept.pick for kept in outcome.batch.groups],
            [scored.meta.visit for scored in outcome.seen],
            {reason: n for reason, n in outcome.dropped.items() if reason != "surplus"},
        )
        for world in worlds
        for outcome in world.outcomes
    ]


@pytest.mark.parametrize("oversample", [1.0, 1.5])
@pytest.mark.parametrize("seed", range(8))
async def test_a_run_cut_anywhere_goes_on_as_the_unbroken_one(oversample, seed):
    """Stopped in the middle of a step and resumed from what it had in hand: same batches, same reports, and no kept group is asked
    for again. Half the visits are dropped, so some steps end short and carry groups."""
    settings = replace(SETTINGS, oversample=oversample, max_visits_per_step=7, num_steps=10)

    def drop(visit):
        return (int(visit.prompt_id[1:]) + visit.number) % 2 == 0

    whole = World(seed=seed, drop=drop)
    await whole.make(settings).run()
    assert {len(outcome.batch.groups) for outcome in whole.outcomes} == {0, 4}

    cut = World(seed=100 + seed, drop=drop)
    loop = cut.make(settings)
    asyncio.get_running_loop().call_later(0.02 + 0.013 * seed, loop.stop)
    assert await loop.run() == "stopped"
    state, ledger, arrays = loop.state(), json.loads(json.dumps(loop._ledger.state())), loop._ledger.arrays()

    rest = World(seed=200 + seed, drop=drop)
    rest.version = loop.version
    kept = {kept.pick.visit for kept in state.waiting}
    fresh = rest.make(settings)._ledger
    fresh.restore(ledger, arrays)
    assert fresh.num_open == len(kept)
    rest.loop = Loop(
        settings, fresh, (rest,) * 5, SELECTIONS["zero_variance"], Waits(), step=loop.step, version=loop.version, state=state
    )
    asked = []
    submit = rest.submit

    async def noting(visits):
        asked.extend(visits)
        await submit(visits)

    rest.submit = noting
    assert await rest.loop.run() == "done"
    if oversample == 1:  # above it, what was kept beyond a full batch is surplus, and asked again
        assert not kept & set(asked)
    assert steps_of(cut, rest) == steps_of(whole)
    for name in ("kept", "trained", "dropped/zero_variance_solved"):
        assert fresh.counts[name] == whole.loop._ledger.counts[name]
    ours, theirs = fresh.arrays(), whole.loop._ledger.arrays()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs), "what is known of prompts, bit for bit"


def keep(ledger, count):
    """Visits as they stand before a step trains them."""
    picks = ledger.pick(count)
    ledger.run([pick.visit for pick in picks])
    for pick in picks:
        ledger.finish(pick.visit)
        ledger.score(pick.visit, Observation(1, 2, ()))
        ledger.keep(pick.visit)
    return picks


def test_a_ledger_and_groups_that_do_not_belong_together_are_refused():
    world = World()
    ledger = world.make()._ledger
    keep(ledger, 1)
    with pytest.raises(ValueError, match="1 visits are open at the start, but 0 groups are at hand"):
        Loop(SETTINGS, ledger, (world,) * 5, SELECTIONS["zero_variance"], Waits(), step=0, version=0)


def test_more_groups_than_a_resumed_run_may_have_open_are_refused_with_both_numbers():
    """They were kept at a lag of 2; at one of 0 four may be open."""
    world = World()
    ledger = world.make()._ledger
    kept = []
    for pick in keep(ledger, 5):
        meta = GroupMeta(pick.visit, "w", 3, (2, 2), (2, 2), 0, 3, 3, 0, 0.0, 0, 0.0, ())
        kept.append(Kept(pick, Scored(meta, Address(None, 0), (score(1.0), score(0.0)))))
    state = LoopState(waiting=tuple(kept), judged=(), dropped={}, num_picked=0, budget=None)
    arguments = (ledger, (world,) * 5, SELECTIONS["zero_variance"], Waits())
    Loop(replace(SETTINGS, max_lag=1), *arguments, step=3, version=3, state=state)
    with pytest.raises(ConfigError, match=r"5 groups .*rollout\.max_lag=0 .*batch\.groups_per_step=4 allows 4"):
        Loop(SETTINGS, *arguments, step=3, version=3, state=state)


class Losing(World):
    """Loses a third of the visits the first time they are asked."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.asked = Counter()

    async def generate(self, visit):
        self.asked[visit] += 1
        if self.asked[visit] == 1 and third(visit):
            await asyncio.sleep(self.random.random() * 0.01)
            if visit not in self.cancelled:
                self.lost.put_nowait(Lost("w", (visit,), "lost_worker"))
        else:
            await super().generate(visit)


async def test_no_worker_is_being_proven_from_prepare_to_push():
    """A proof asks the learner too: behind a long prepare it would pass its deadline, which ends the run."""
    world = World()
    await world.make().run()
    stages = [entry for entry, _ in world.log if entry in ("hold", "prepare", "pushed")]
    assert stages == ["hold", "prepare", "pushed"] * 5


async def test_a_proof_may_take_its_own_deadline_however_short_that_of_a_start_is():
    world = World()

    async def hold():
        await asyncio.sleep(0.1)

    world.hold = hold
    assert await world.make(replace(SETTINGS, deadlines=DeadlinesConfig(start_s=0.01))).run() == "done"


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_visits_of_lost_workers_are_asked_again_under_their_numbers(max_lag):
    """Every visit is trained as if no worker had been lost; at lag 0 in the same batches, within the same budget of visits."""
    settings = replace(SETTINGS, max_lag=max_lag, max_visits_per_step=4 * (1 + max_lag))
    whole, losing = World(), Losing()
    for world in (whole, losing):
        assert await world.make(settings).run() == "done"
    counts = losing.loop._ledger.counts
    assert counts["requeued/lost_worker"] > 0
    trained = [[pick for batch in world.batches for pick in batch] for world in (whole, losing)]
    assert len(trained[1]) == len(set(trained[1])) == counts["trained"] == 20
    if max_lag == 0:
        assert losing.batches == whole.batches


async def test_nothing_of_an_unproven_worker_is_trained():
    """What waits in the buffer, what is being scored and what runs is asked again; what comes afterwards is taken."""
    world = World(slow=0.02)
    loop = world.make(replace(SETTINGS, max_lag=2, num_steps=8))
    scoring, score, voided, doubted = [], world.score, [], asyncio.Event()

    async def watched(finished):
        """The doubt comes at the first moment at which visits wait, run and are being scored."""
        scoring.extend(finished)
        waiting = [kept.scored for kept in loop._buffer.values()]
        running = set(loop._running) - {item.meta.visit for item in scoring}
        if world.version >= 2 and waiting and running and not voided:
            voided.extend([item.meta for item in (*waiting, *scoring)])
            world.lost.put_nowait(Lost("w", tuple(running), "unproven"))
            world.cancelled |= running
            doubted.set()
        scored = await score(finished)
        for item in finished:
            scoring.remove(item)
        return scored

    world.score = watched
    assert await loop.run() == "done"
    assert doubted.is_set()
    trained = [kept.scored.meta for outcome in world.outcomes for kept in outcome.batch.groups]
    assert not any(meta is void for meta in trained for void in voided)
    assert {void.visit for void in voided} <= {meta.visit for meta in trained}
    assert loop._ledger.counts["requeued/unproven"] > len(voided)


@pytest.mark.parametrize(("max_lag", "step", "oversample"), [(0, 1, 1.0), (0, 3, 1.5), (0, 3, 2.0), (2, 3, 1.0), (1, 3, 2.0)])
async def test_what_an_unproven_worker_made_drops_no_visit(max_lag, step, oversample):
    """Its weights are not the learner's: all that it made in this step was wrong, and dropped. None of it counts, neither as a drop nor for
    what is known of the prompts; the visits are asked again and trained."""
    world = World()
    settings = replace(SETTINGS, max_lag=max_lag, oversample=oversample, num_steps=6)
    loop = world.make(settings)
    ledger, void, broken, before = loop._ledger, [], True, 0

    def scores(visit, version):
        return (score(0.0), score(0.0)) if broken and loop.step >= step - 1 else (score(1.0), score(0.0))

    world.scores = scores

    async def doubts():
        """Once three groups of one step were dropped. Above lag 0 the step before may have dropped some too: they are over."""
        nonlocal broken, before
        while loop._dropped["zero_variance_unsolved"] < 3:
            await asyncio.sleep(0.001)
        void.extend(judged.pick.visit for judged in loop._judged.values() if judged.reason)
        before = ledger.counts["dropped/zero_variance_unsolved"] - loop._dropped["zero_variance_unsolved"]
        running = tuple(v for v in loop._running if ledger.state_of(v) is State.RUNNING)
        world.cancelled |= set(running)
        broken = False
        world.lost.put_nowait(Lost("w", running, "unproven"))

    doubting = asyncio.create_task(doubts())
    assert await loop.run() == "done"
    await doubting
    assert len(void) >= 3
    assert ledger.counts["dropped/zero_variance_unsolved"] == before
    assert max_lag or not before
    trained = {pick.visit for batch in world.batches for pick in batch}
    assert set(void) <= trained
    assert sum(outcome.dropped.get("zero_variance_unsolved", 0) for outcome in world.outcomes) == before
    places = ledger.prompts.find([visit.prompt_id for visit in void])
    prior = ledger.rates.priors(loop.version)
    right, wrong = (ledger.rates.posteriors(places, loop.version) - prior[ledger.rates.stratum[places]]).T
    assert right == pytest.approx(wrong, abs=1e-5), "half of what they showed was right"
    assert min(right) > 0.8
    if max_lag == 0:
        whole = World()
        await whole.make(settings).run()
        assert world.batches == whole.batches, "and in the batches that they belong to"


class Unreliable(Losing):
    """Loses visits, and now and then doubts its worker: what that has made and nobody trained is asked again. After ``left`` moments at
    which some stage began, the run is to be killed."""

    def __init__(self, left, **arguments):
        super().__init__(**arguments)
        self.left, self.killed = left, asyncio.Event()

    async def generate(self, visit):
        if self.random.random() < 0.05:
            running = tuple(v for v in self.loop._running if self.loop._ledger.state_of(v) is State.RUNNING)
            self.cancelled |= set(running)
            self.lost.put_nowait(Lost("w", running, "unproven"))
        await super().generate(visit)

    def __getattribute__(self, name):
        if name in ("score", "prepare", "train", "push", "after_step"):
            self.left -= 1
            if self.left == 0:
                self.killed.set()
        return super().__getattribute__(name)


class Rough(LongTailed, Unreliable):
    """Long visits among workers that are lost and doubted."""


@pytest.mark.parametrize("max_lag", [1, 3])
@pytest.mark.parametrize("seed", range(3))
async def test_the_bound_of_a_waiting_batch_holds_where_workers_are_lost_and_doubted(max_lag, seed):
    """What is asked again is as young as its last asking."""
    world = Rough(-1, seed=seed, drop=third, slow=0.002)
    assert await world.make(replace(SETTINGS, max_lag=max_lag, late=Late.wait, num_steps=15)).run() == "done"
    counts = world.loop._ledger.counts
    assert counts["requeued/lost_worker"] > 0
    assert counts["requeued/unproven"] > 0
    assert max(o.batch.version - k.scored.meta.min_version for o in world.outcomes for k in o.batch.groups) <= max_lag
    assert world.max_open <= (max_lag + 1) * 4
    trained = [pick.order for batch in world.batches for pick in batch]
    assert len(trained) == len(set(trained)) == 60


@pytest.mark.parametrize(("max_lag", "oversample"), [(0, 1.0), (0, 2.0), (2, 1.0), (1, 2.0)])
@pytest.mark.parametrize("seed", range(4))
async def test_in_the_history_that_stands_each_visit_is_trained_once_and_none_is_lost(max_lag, oversample, seed):
    """6.1: killed at random moments, the run goes on from a checkpoint of some steps ago; workers are lost and doubted meanwhile."""
    settings = replace(SETTINGS, max_lag=max_lag, oversample=oversample, num_steps=14)
    chance = random.Random(seed)
    saved, trained = [], {}  # trained: picks by step, those of a later history in place of an earlier one's

    class Saving(Unreliable):
        async def after_step(self, outcome):
            await super().after_step(outcome)
            step = outcome.batch.step
            for gone in [number for number in trained if number >= step]:
                del trained[gone]
            trained[step] = [kept.pick for kept in outcome.batch.groups]
            if step % 2 == 0:
                held, ledger = self.loop.state(), self.loop._ledger
                saved.append((step, self.version, held, json.loads(json.dumps(ledger.state())), ledger.arrays()))

    for kill in [*(chance.randrange(3, 25) for _ in range(4)), None]:  # 96 moments: fewer than 14 steps have
        world = Saving(kill, seed=chance.random(), drop=third, slow=0.001) if kill else Saving(-1, seed=seed, drop=third)
        loop = world.make(settings)
        if saved:
            step, world.version, held, state, arrays = saved[-1]
            loop._ledger.restore(state, arrays)
            handles, selection = (world,) * 5, SELECTIONS["zero_variance"]
            loop = Loop(settings, loop._ledger, handles, selection, Waits(), step=step, version=world.version, state=held)
            world.loop = loop
        run, killed = asyncio.create_task(loop.run()), asyncio.create_task(world.killed.wait())
        await asyncio.wait({run, killed}, return_when=asyncio.FIRST_COMPLETED)
        assert world.max_open <= (max_lag + oversample) * 4
        assert run.done() == (kill is None)
        run.cancel()
        killed.cancel()
        await asyncio.gather(run, killed, return_exceptions=True)
        if kill and len(saved) > 1 and chance.random() < 0.3:
            saved.pop()  # the newest is damaged
    assert run.result() == "done"
    ledger, counts = loop._ledger.state(), loop._ledger.counts
    picks = [pick.order for step in sorted(trained) for pick in trained[step]]
    assert sorted(trained) == list(range(1, 15))
    assert len(picks) == len(set(picks)) == counts["trained"] == 14 * 4
    waiting = {row[0] for row in [*ledger["open"], *ledger["again"]]}
    assert not waiting & set(picks)
    assert ledger["num_picks"] == len(picks) + len(waiting) + sum(n for name, n in counts.items() if name.startswith("dropped/"))
    if max_lag == 0:
        whole = World(drop=third)
        await whole.make(settings).run()
        assert [trained[step] for step in sorted(trained)] == whole.batches, "as if nothing had happened"


# ---- ends of epochs, and runs resumed under other settings ------------------------------------------------------------


@pytest.mark.parametrize("oversample", [1.5, 2.0, 3.0])
async def test_an_epoch_ends_with_its_own_short_batch_however_many_visits_are_open(oversample):
    """B108: what is asked beyond a batch is never of the next epoch."""
    world = World()
    settings = replace(SETTINGS, num_steps=6, oversample=oversample)
    assert await world.make(settings, num_prompts=10, last=LastBatch.keep, num_epochs=2).run() == "done"
    assert [[pick.order for pick in batch] for batch in world.batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [18, 19],
    ]


def resumed(world, settings, loop, **data):
    """``world`` goes on from what ``loop`` had in hand."""
    ledger = world.make(settings, **data)._ledger
    ledger.restore(json.loads(json.dumps(loop._ledger.state())), loop._ledger.arrays())
    world.version = loop.version
    at = {"step": loop.step, "version": loop.version, "state": loop.state()}
    world.loop = Loop(settings, ledger, (world,) * 5, SELECTIONS["zero_variance"], Waits(), **at)
    return world.loop


async def test_a_run_cut_while_many_are_open_by_oversample_auto_goes_on_as_the_unbroken_one():
    """What it has learned of the keep rate is not in a checkpoint, so fewer would be opened now than are. The visits that the kept ones
    overtook are asked before a batch is full."""
    settings = replace(SETTINGS, oversample=Auto.auto, num_steps=24)

    def drop(visit):
        return int(visit.prompt_id[1:]) % 3 > 0

    whole, cut = World(drop=drop), World(drop=drop, seed=1)
    assert await whole.make(settings).run() == "done"
    loop = cut.make(settings)
    plain = cut.generate

    async def first_ones_last(visit):
        while loop.step >= 20 and len(loop._buffer) <= 4 and not loop._stopping:
            if visit not in [pick.visit for pick in sorted((a.pick for a in loop._running.values()), key=lambda p: p.order)[:4]]:
                break
            await asyncio.sleep(0.001)
        await plain(visit)
        if loop.step >= 20 and len(loop._buffer) > 4:
            loop.stop()

    cut.generate = first_ones_last
    assert await loop.run() == "stopped"
    rest = World(drop=drop, seed=2)
    assert len(loop._buffer) > 4, "more than it would open, knowing nothing"
    assert await resumed(rest, settings, loop).run() == "done"
    assert steps_of(cut, rest) == steps_of(whole)


@pytest.mark.parametrize(
    ("max_lag", "late", "made", "again"),
    [
        (
            0,
            Late.correct,
            [3, 1, 3, 2, 3, 3],
            {1, 2, 3, 4, 5},
        ),  # a batch is cut in pick order: what follows an older one goes with it
        (1, Late.wait, [3, 1, 3, 2, 3, 3], {1}),
        (1, Late.wait, [2] * 6, {4, 5}),  # the first four have this batch, the others would have the next
        (1, Late.correct, [1] * 6, set()),
    ],
)
async def test_a_run_resumed_with_a_lower_lag_trains_nothing_too_old_for_it(max_lag, late, made, again):
    """At version 3, with groups that waited since the versions ``made``: those that could only be trained later than the new lag allows are
    asked again under their numbers, and counted."""
    world = World(drop=third)
    settings = replace(SETTINGS, max_lag=max_lag, late=late, num_steps=9)
    ledger, waiting = world.make(settings)._ledger, []
    for pick, version in zip(keep(ledger, 6), made, strict=True):
        meta = GroupMeta(pick.visit, "w", 3, (2, 2), (2, 2), 0, version, version, 0, 0.0, 0, 0.0, ())
        waiting.append(Kept(pick, Scored(meta, Address(None, 0), (score(1.0), score(0.0)))))
    held = LoopState(waiting=tuple(waiting), judged=(), dropped={}, num_picked=0, budget=None)
    world.version = 3
    at = {"step": 3, "version": 3, "state": held}
    world.loop = Loop(settings, ledger, (world,) * 5, SELECTIONS["zero_variance"], Waits(), **at)
    assert {row[0] for row in ledger.state()["again"]} == again
    assert ledger.counts["requeued/late"] == len(again)
    told = [fields for name, fields in world.log if name == "visits_lost"]
    assert told == ([{"worker": None, "reason": "late", "num_visits": len(again)}] if again else [])
    assert await world.loop.run() == "done"
    lags = [o.batch.version - k.scored.meta.min_version for o in world.outcomes for k in o.batch.groups]
    assert (max(lags) <= max_lag) == (late is Late.wait or max_lag == 0)
    trained = [pick.order for batch in world.batches for pick in batch]
    assert len(trained) == len(set(trained)) == ledger.counts["trained"]
    dropped = {pick.order for pick in (kept.pick for kept in waiting) if third(pick.visit)} & again
    assert {kept.pick.order for kept in waiting} - dropped <= set(trained), "none is lost"


async def test_a_run_resumed_with_a_lower_token_lag_asks_for_others_where_all_that_waits_is_dropped():
    """As many wait as may be open, so nothing runs: nobody would come to ask for more, and a healthy engine would be called late."""
    world = World()
    settings = replace(SETTINGS, max_lag=1, late=Late.drop, max_token_lag=1, num_steps=5)
    ledger, waiting = world.make(settings)._ledger, []
    for pick in keep(ledger, 8):
        meta = GroupMeta(pick.visit, "w", 3, (2, 2), (2, 2), 0, 1, 1, 0, 0.0, 0, 0.0, ())
        waiting.append(Kept(pick, Scored(meta, Address(None, 0), (score(1.0), score(0.0)))))
    held = LoopState(waiting=tuple(waiting), judged=(), dropped={}, num_picked=0, budget=None)
    world.version = 3
    at = {"step": 3, "version": 3, "state": held}
    world.loop = Loop(settings, ledger, (world,) * 5, SELECTIONS["zero_variance"], Waits(), **at)
    async with asyncio.timeout(5):
        assert await world.loop.run() == "done"
    assert (ledger.counts["dropped/late"], ledger.counts["trained"]) == (8, 8)


async def test_what_may_fail_is_a_share_of_a_batch_of_whole_groups():
    """The first group comes without three of its five members. Of a batch of 4 x 5 half may fail: 10, and not half of 4 x 2."""
    world = World()
    cut = (score(0, Status.ERROR), score(0, Status.ERROR))
    world.scores = lambda visit, version: cut
    fine = (score(1.0), score(0.0), score(1.0), score(0.0), score(1.0))
    loop = world.make(replace(SETTINGS, num_steps=1))
    plain = world.score
    seen = []

    async def with_members_missing(finished):
        scored = await plain(finished)
        seen.extend(scored)
        if len(seen) > 3:
            return [replace(item, scores=fine) for item in scored]
        return [replace(item, meta=replace(item.meta, unfinished=(9, 9, 9))) for item in scored]

    world.score = with_members_missing
    assert await loop.run() == "done"


class OnLostNodes(World):
    """A third of the groups lies on a node that is gone: half of these when they are to be scored, the others when they are fetched.
    Asked again, they lie elsewhere."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.gone, self.num_lost = set(), Counter()

    def is_lost(self, visit, moment):
        where = "score" if (int(visit.prompt_id[1:]) + visit.number) % 2 else "fetch"
        if visit in self.gone or not third(visit) or where != moment:
            return False
        self.gone.add(visit)
        self.num_lost[moment] += 1
        return True

    async def score(self, finished):
        return [item for item in await super().score(finished) if not self.is_lost(item.meta.visit, "score")]

    async def fetch(self, batch):
        self.log.append(("fetch", batch.step))
        await asyncio.sleep(0.002)
        return [kept for kept in batch.groups if self.is_lost(kept.pick.visit, "fetch")]


@pytest.mark.parametrize(("max_lag", "oversample"), [(0, 1.0), (0, 2.0), (2, 1.0), (1, 2.0)])
async def test_groups_of_a_lost_node_are_asked_again_and_the_batch_is_filled_before_any_rank_begins(max_lag, oversample):
    """Every visit is trained as if no node had been lost; at lag 0 in the same batches. What is left of the step's visits is just enough."""
    settings = replace(SETTINGS, max_lag=max_lag, oversample=oversample, max_visits_per_step=int(4 * (max_lag + oversample)))
    whole, losing = World(), OnLostNodes()
    for world in (whole, losing):
        assert await world.make(settings).run() == "done"
    assert min(losing.num_lost["score"], losing.num_lost["fetch"]) > 0
    counts = losing.loop._ledger.counts
    told = [fields for name, fields in losing.log if name == "visits_lost"]
    assert {fields["reason"] for fields in told} == {"lost_node"}
    assert sum(fields["num_visits"] for fields in told) == counts["requeued/lost_node"]
    assert (
        losing.num_lost["fetch"] < counts["requeued/lost_node"] <= losing.num_lost.total()
    )  # above lag 0 some is scored as the run ends
    trained = [pick for batch in losing.batches for pick in batch]
    assert len(trained) == len(set(trained)) == counts["trained"] == 20
    stages = [name for name, _ in losing.log if name in ("fetch", "hold", "prepare")]
    assert all(stages[i - 2 : i + 1] == ["fetch", "hold", "prepare"] for i, name in enumerate(stages) if name == "prepare")
    if max_lag == 0:
        assert losing.batches == whole.batches
        assert counts["requeued/lost_node"] == losing.num_lost.total()


async def test_a_kept_group_that_is_found_lost_between_two_steps_is_asked_again():
    """As at a checkpoint, of what waits in the buffer."""
    world = World(slow=0.01)
    loop = world.make(replace(SETTINGS, max_lag=2, num_steps=6))
    found, after_step = [], world.after_step

    async def losing(outcome):
        await after_step(outcome)
        if loop._buffer and not found:
            found.append(next(iter(loop.state().waiting)))
            loop.forget([found[0].scored])
            assert found[0].pick.order not in {item.pick.order for item in (*loop.state().waiting, *loop.state().judged)}

    world.after_step = losing
    assert await loop.run() == "done"
    (lost,) = found
    assert loop._ledger.counts["requeued/lost_node"] == 1
    trained = [kept for outcome in world.outcomes for kept in outcome.batch.groups]
    (again,) = [kept for kept in trained if kept.pick == lost.pick]
    assert again.scored is not lost.scored


async def test_a_worker_that_is_being_replaced_is_not_a_silent_engine():
    """Generation has its deadline while there is a worker; the start of another has deadlines of its own."""
    world = World()
    submit, waiting = world.submit, []

    async def held(visits):
        if world.manned.is_set():
            await submit(visits)
        else:
            waiting.extend(visits)

    async def replace_worker():
        await asyncio.sleep(0.6)
        world.manned.set()
        await submit(waiting)

    world.submit = held
    world.manned.clear()
    deadlines = DeadlinesConfig(generate_s=0.2)
    loop = world.make(replace(SETTINGS, num_steps=1, deadlines=deadlines))
    coming = asyncio.create_task(replace_worker())
    assert await loop.run() == "done"
    await coming

    silent = World()
    silent.manned.clear()
    silent.submit = lambda visits: asyncio.sleep(0)
    deadlines = DeadlinesConfig(generate_s=60, close_s=0.02, start_s=0.02, push_s=0.02)
    with pytest.raises(DeadlinePassed, match=r"rollout workers did not finish 'a lost one to be replaced' within 0\.24 s"):
        await silent.make(replace(SETTINGS, deadlines=deadlines)).run()


class Stormy(Rough):
    """Nodes leave as well: with groups of a batch in hand, and with such as wait."""

    async def fetch(self, batch):
        await asyncio.sleep(self.random.random() * 0.003)
        return [kept for kept in batch.groups if self.random.random() < 0.04]

    async def after_step(self, outcome):
        state = self.loop.state()
        held = [item.scored for item in (*state.judged, *state.waiting)]
        self.loop.forget([scored for scored in held if self.random.random() < 0.06])
        await super().after_step(outcome)


def any_settings(chance, num_steps, last):
    max_lag = 0 if last is LastBatch.keep else chance.choice([0, 0, 1, 2, 4])
    late = chance.choice(list(Late))
    return replace(
        SETTINGS,
        max_lag=max_lag,
        oversample=chance.choice([1.0, 1.5, 2.0, *([] if max_lag else [Auto.auto])]),
        late=late,
        max_token_lag=max_lag if late is Late.drop else None,
        max_visits_per_step=chance.choice([4, 7, 16, 32]),
        when_short=chance.choice([WhenShort.carry, WhenShort.train]),
        num_steps=num_steps,
    )


def books_close(ledger, trained):
    """Every visit has ended once, or is open, or is queued again."""
    state, counts = ledger.state(), ledger.counts
    ended = counts["trained"] + sum(num for name, num in counts.items() if name.startswith("dropped/"))
    assert state["num_picks"] == counts["picked"] == ended + len(state["open"]) + len(state["again"])
    assert len(trained) == len(set(trained)) == counts["trained"]


@pytest.mark.parametrize("seed", range(24))
async def test_lives_under_any_settings_train_each_visit_once_and_keep_their_promises(seed):
    """6.1: a run is stopped at any moment and resumed with other settings, three times over, while workers are lost and doubted and nodes
    leave. Settings that cannot take up what there is are refused in words, and the next ones are tried."""
    chance = random.Random(seed)
    last = chance.choice(list(LastBatch))
    trained, before = [], None
    for _ in range(4):
        settings = any_settings(chance, (before.step if before else 0) + chance.randint(2, 7), last)
        world = Stormy(-1, seed=chance.random(), drop=third, slow=chance.choice([0, 0.002]))
        loop = world.make(settings, num_prompts=30, last=last)
        if before is not None:
            try:
                loop = resumed(world, settings, before, num_prompts=30, last=last)
            except ConfigError:
                continue
        if chance.random() < 0.7:
            asyncio.get_running_loop().call_later(chance.random() * 0.25, loop.stop)
        assert await asyncio.wait_for(loop.run(), 60) in ("done", "stopped")
        assert all(0 <= outcome.num_kept <= len(outcome.seen) for outcome in world.outcomes)
        trained += [pick.order for batch in world.batches for pick in batch]
        books_close(loop._ledger, trained)
        before = loop
        for outcome in world.outcomes:
            orders = [kept.pick.order for kept in outcome.batch.groups]
            lags = [outcome.batch.version - kept.scored.meta.min_version for kept in outcome.batch.groups]
            assert orders == sorted(orders)
            assert max(lags, default=0) <= settings.max_lag or (settings.late is Late.correct and settings.max_lag > 0)
            assert last is not LastBatch.keep or len({order // 30 for order in orders}) <= 1, "no batch of two epochs"
