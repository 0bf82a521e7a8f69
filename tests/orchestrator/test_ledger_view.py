"""`limen ledger RUN`, on folders as a run writes them: what it counts, and that it tells the history that stands from the one that does not."""

from __future__ import annotations

import json

import pytest

from configs.errors import ConfigError
from configs.schema import CheckpointConfig, LastBatch, LedgerConfig
from orchestrator.checkpoint import Checkpoints
from orchestrator.ledger import Ledger, Length
from orchestrator.ledger_view import history, ledger, report
from orchestrator.main import main
from orchestrator.pass_rates import Observation

IDS = [f"s/{i}" for i in range(40)]
STRATA = ["one digit"] * 20 + ["two\x1b digits"] * 20


def write_lines(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)


def row(step, incarnation=0, *, groups=4, visits=6, **drops):
    return {"step": step, "incarnation": incarnation, "batch/num_groups": groups, "batch/num_visits": visits} | {
        f"drop/{reason}": n for reason, n in drops.items()
    }


async def nothing(partial):
    return {}


@pytest.fixture
async def run(tmp_path):
    """Step 1 of six visits: four right of four in the first stratum, one of four in the second. At its checkpoint one visit is kept, one
    runs, one is lost; one has been open from the start."""
    book = Ledger(
        IDS,
        STRATA,
        LedgerConfig(half_life_versions=1.0, stuck_after_steps=1),
        length=Length(40, 4, LastBatch.wrap),
        seed=0,
        shuffle=False,
        max_visits=None,
    )
    picks = book.pick(6)
    for pick in picks[:4]:
        to_kept(book, pick, Observation(4, 4, ()))
    book.train([pick.visit for pick in picks[:3]])
    book.close_step(0)
    (late,) = book.pick(1)
    book.run([picks[4].visit])
    book.requeue(picks[5].visit, "lost_worker")
    to_scored(book, late, Observation(0, 4, ()))
    book.drop(late.visit, "zero_variance_unsolved")
    state = {"step": 1, "version": 1, "incarnation": 0, "ledger": book.state()}
    await Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).write(
        state, book.arrays(), {"groups.jsonl": ""}, nothing, pass_at_1=None
    )
    write_lines(tmp_path / "metrics.jsonl", [row(1, groups=3, visits=4)])
    write_lines(tmp_path / "events.jsonl", [{"event": "checkpoint", "incarnation": 0, "step": 1}])
    return tmp_path


def to_scored(book, pick, seen):
    book.run([pick.visit])
    book.finish(pick.visit)
    book.score(pick.visit, seen)


def to_kept(book, pick, seen):
    to_scored(book, pick, seen)
    book.keep(pick.visit)


def squeezed(lines):
    return [" ".join(line.split()) for line in lines]


async def test_what_became_of_the_visits_of_a_checkpoint(run):
    lines = squeezed(report(run))
    assert lines[0] == f"run {run}: step 1, checkpoint of step 1"
    assert lines[1:9] == [
        "",
        "visits (open ones as of step 1)",
        "trained 3",
        "dropped: zero_variance_unsolved 1",
        "running 1 asked again on resume",
        "kept 1 its groups are in the checkpoint",
        "queued again 1 picked before new visits",
        "asked again: lost_worker 1",
    ]


async def test_prompts_by_band_and_stratum(run):
    """Four groups of the first stratum were all right at version 0, and weigh half at version 1. With the one that Beta(1, 1) adds:
    W = 2 + 1, N = 8 + 4, X = 8 + 2, Q = 8 + (1 + 1) / 4 + 1 = 9.5, m = 5/6, (9.5 - 100/12) / (5/36) = 8.4, rho = (8.4 - 3) / 9 = 0.6,
    strength 2/3, at least 1: Beta(5/6, 1/6). Those four prompts: (5/6 + 2) / (1 + 2) = 0.94, easy; the others: 5/6, boundary."""
    lines = squeezed(report(run))
    at = lines.index("stratum prompts asked hard boundary easy expected pass rate of one not asked")
    assert lines[at - 1].endswith("at version 1; 7 visits, at most 1 to one prompt")
    assert lines[at + 1] == "one digit 20 7 0 16 4 0.833 (worth 1.0 completions)"
    assert lines[at + 2] == "two\x1b digits 20 0 0 20 0 0.500 (worth 2.0 completions)"
    assert lines[at + 3] == "all 40 7 0 36 4"


async def test_stuck_visits_of_the_checkpoint_and_of_later_events(run):
    later = {"event": "visit_stuck", "incarnation": 0, "step": 3, "state": "running", "since_step": 2}
    events = [
        {"event": "checkpoint", "incarnation": 0, "step": 1},
        {"event": "visits_lost", "incarnation": 0, "worker": "w", "reason": "lost_node", "num_visits": 5},
        later | {"prompt_id": "s/9", "visit": 0, "order": 9},
        later | {"prompt_id": "s/0", "visit": 0, "order": 0},  # ended before the checkpoint, which knows it
    ]
    write_lines(run / "events.jsonl", events)
    lines = squeezed(report(run))
    at = lines.index("stuck visits: 4, open for 1 steps or more")
    assert lines[at + 1 :] == [
        "s/3 visit 0: kept at step 1, open since step 0",
        "s/4 visit 0: running at step 1, open since step 0",
        "s/5 visit 0: queued again at step 1, open since step 0",
        "s/9 visit 0: running at step 3, open since step 2, unknown to the checkpoint",
    ]
    assert "asked again: lost_node 5, lost_worker 1" in lines


async def test_later_steps_are_added_and_what_was_gone_back_over_is_discarded(run):
    """Steps 2 and 3 were made, then made again from the checkpoint of step 1; the last line is being written."""
    rows = [row(1, groups=3), row(2), row(3), row(2, 1, late=2), row(3, 1, late=1, zero_variance_unsolved=3)]
    write_lines(run / "metrics.jsonl", rows, end='\n{"step": 4, "inc')
    lines = squeezed(report(run))
    assert lines[0].startswith(f"run {run}: step 3,")
    assert lines[3:6] == ["trained 11", "dropped: late 3", "dropped: zero_variance_unsolved 4"]
    assert "discarded by going back to a checkpoint: 2 steps, in which 12 visits were judged and 8 trained" in lines


async def test_what_a_life_did_before_it_was_gone_back_over_is_not_counted_twice(run):
    """After the checkpoint of step 1: step 2 with three visits lost and one stuck; a return by itself; step 2 anew, with one lost."""
    stuck = {"event": "visit_stuck", "step": 2, "state": "running", "since_step": 1, "prompt_id": "s/9", "visit": 0, "order": 9}
    lost = {"event": "visits_lost", "worker": "w", "reason": "lost_node"}
    back = {"event": "rolled_back", "cause": "a learner rank died in 'train'", "incarnation": 1}
    events = [
        {"event": "checkpoint", "incarnation": 0, "step": 1},
        lost | {"incarnation": 0, "num_visits": 3},
        stuck | {"incarnation": 0},
        back,
        lost | {"incarnation": 1, "num_visits": 1},
    ]
    write_lines(run / "events.jsonl", events)
    write_lines(run / "metrics.jsonl", [row(1, groups=3), row(2), row(2, 1, groups=2)])
    lines = squeezed(report(run))
    assert "trained 5" in lines
    assert "asked again: lost_node 1, lost_worker 1" in lines
    assert "discarded by going back to a checkpoint: 1 steps, in which 6 visits were judged and 4 trained" in lines
    assert "went back by itself 1 times: a learner rank died in 'train' (1)" in lines
    assert not any("s/9" in line for line in lines)


def test_a_row_is_void_where_the_run_went_back_over_it():
    """Twice from step 2, under one number even; then from step 4 under the next, which has written nothing yet."""
    rows = [row(1), row(2), row(3), row(3, 1), row(4, 1), row(3, 1, groups=1), row(4, 1, groups=1), row(5, 1, groups=1)]
    past = history(rows, 1, saved_step=2)
    assert [(r["step"], r["batch/num_groups"]) for r in past.standing] == [(1, 4), (2, 4), (3, 1), (4, 1), (5, 1)]
    assert [r["step"] for r in past.discarded] == [3, 3, 4]
    assert [r["step"] for r in history(rows, 2, saved_step=4).discarded] == [3, 3, 4, 5]
    assert history([], 3, saved_step=0).discarded == ()


async def test_a_run_before_its_first_checkpoint(run):
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    lines = squeezed(report(run))
    assert lines[0].endswith("step 1, no checkpoint yet")
    assert "trained 3" in lines
    assert lines[-1] == "prompts and open visits are known once a checkpoint is written (checkpoint.every)"


async def test_the_verb_and_its_exit_codes(run, capsys):
    assert main(["ledger", str(run)]) == 0
    assert r"two\x1b digits" in capsys.readouterr().out, "nothing of the data reaches the terminal raw"
    (run / "checkpoints" / "step-000001" / "ledger.npz").unlink()
    assert main(["ledger", str(run)]) == 2
    assert "ledger.npz: was removed while it was read" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        ledger(run / "checkpoints")
