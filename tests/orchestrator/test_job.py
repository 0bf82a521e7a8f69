"""What a run writes of a step when something after it fails."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from configs.compose import load_config
from orchestrator import job as job_module
from orchestrator.grace import StepInHand
from orchestrator.job import Job
from orchestrator.stages import Address, Batch, Kept, LoopState, StepOutcome
from orchestrator.waits import DeadlinePassed, Waits

pytestmark = pytest.mark.timeout(30)


async def test_a_step_keeps_its_row_where_the_evaluation_after_it_fails():
    """The step is saved then, and a resumed run begins with the next one."""
    rows = []

    async def nothing(outcome):
        pass

    async def hangs(title):
        raise DeadlinePassed(SimpleNamespace(owner="rollout workers", name="evaluation", deadline_s=1.0), [])

    waits = Waits()
    job = SimpleNamespace(
        config=load_config(["evaluation.every=1"]),
        num_steps=9,
        _material=SimpleNamespace(by_id={}),
        _lag=SimpleNamespace(take=lambda: 0.0),
        _seconds=defaultdict(float),
        _recorder=SimpleNamespace(groups=nothing, metrics=lambda *row: rows.append(row)),
        _rewards=None,
        _held_out={"p0": None},
        _pusher=SimpleNamespace(digest="00ff"),
        _evaluate=hangs,
        _wait=lambda work, owner, name, deadline_s: waits.wait(work, owner=owner, name=name, deadline_s=deadline_s),
    )
    outcome = StepOutcome(Batch(5, 4, ()), (), 0, {}, {"time/step_s": 1.5})
    with pytest.raises(DeadlinePassed):
        await Job.after_step(job, outcome)
    ((step, version, digest, metrics),) = rows
    assert (step, version, digest, metrics["time/step_s"]) == (5, 4, "00ff", 1.5)


async def test_groups_that_do_not_come_for_a_checkpoint_are_no_fault_of_the_learner():
    """They lie with the rollout workers; a learner that passes a deadline would have the run go back."""
    pick, scored = SimpleNamespace(order=1), SimpleNamespace(address=Address(asyncio.Event().wait(), 0))
    state = LoopState(waiting=(Kept(pick, scored),), judged=(), dropped={}, num_picked=1, budget=None)

    async def wait(awaitable, owner, name, deadline_s):
        return await Waits().wait(awaitable, owner=owner, name=name, deadline_s=deadline_s)

    job = SimpleNamespace(_step=3, _wait=wait, config=load_config(["deadlines.checkpoint_s=0.2"]))
    with pytest.raises(DeadlinePassed, match="rollout workers did not finish 'groups of the checkpoint of step 3'"):
        await Job._held_groups(job, SimpleNamespace(state=lambda: state))


@pytest.mark.parametrize("asked", [False, True])
async def test_a_run_that_is_asked_to_end_in_its_last_step_is_not_evaluated_first(monkeypatch, asked):
    """The signal comes while the last step is trained or saved: an evaluation may take longer than the scheduler waits."""
    done = []

    class LastStep:
        between_steps = True

        def __init__(self, *_, **__):
            self.stop = lambda: done.append("stop")

        async def run(self):
            if asked:
                assert Job.stop(job)
            return "done"

    async def does(what):
        done.append(what)

    monkeypatch.setattr(job_module, "Loop", LastStep)
    monkeypatch.setattr(job_module, "LoopLag", lambda: SimpleNamespace(close=lambda: None))
    nothing = dict.fromkeys(("_ledger", "_fleet", "_scorer", "_learner", "_turns", "_pusher", "_waits", "_selftest", "_resumed"))
    job = SimpleNamespace(
        **nothing,
        config=load_config(["evaluation.before=false"]),
        _held_out={"p0": None},
        _step=9,
        _version=9,
        _stopping=False,
        _in_hand=StepInHand(None),
        _enter=lambda stage: None,
        _settings=lambda: None,
        _selection=lambda: None,
        _read_state=lambda: asyncio.sleep(0),
        _save=lambda: does("save"),
        _to_engines=lambda: asyncio.sleep(0),
        _evaluate=does,
    )
    assert await Job.run(job) == "done"
    assert done == (["stop", "save"] if asked else ["save", "after training"])
