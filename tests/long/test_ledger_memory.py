"""The prompt ledger of ten million prompts: what it takes up before any is asked and when all have been, and how long its work keeps
the driver busy."""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from configs.schema import LastBatch, LedgerConfig
from orchestrator.ledger import Ledger, Length
from orchestrator.pass_rates import Observation

COUNT, GROUPS, STEPS = 10_000_000, 512, 100


def make(ids, strata):
    return Ledger(
        ids, strata, LedgerConfig(), length=Length(COUNT, GROUPS, LastBatch.wrap), seed=0, shuffle=True, max_visits=None
    )


def seconds(work, *arguments):
    started = time.perf_counter()
    result = work(*arguments)
    return result, time.perf_counter() - started


def everyone_asked(ledger):
    """Arrays as a run leaves them that asked every prompt once: four answers each."""
    some = np.ones(COUNT, dtype=np.float32)
    counts = np.zeros((COUNT, 8), dtype=np.uint32)
    counts[:, :4] = 2
    return ledger.arrays() | {
        "prompt": ledger.prompts.hashes_of(np.arange(COUNT)),
        "num_visits": np.ones(COUNT, dtype=np.int32),
        "right": 3 * some,
        "seen": 8 * some,
        "version": np.zeros(COUNT, dtype=np.int32),
        "stratum": ledger.rates.stratum,
        "answer_hashes": np.arange(8 * COUNT, dtype=np.uint64).reshape(COUNT, 8),
        "answer_counts": counts,
        "answer_others": np.zeros(COUNT, dtype=np.uint32),
    }


@pytest.mark.line(id="6.1")
@pytest.mark.timeout(1800)
def test_ten_million_prompts(record, tmp_path: Path):
    ids, strata = [f"source/{i}" for i in range(COUNT)], ["one", "two"] * (COUNT // 2)
    ledger, build_s = seconds(make, ids, strata)
    picks, epoch_s = seconds(ledger.pick, GROUPS)
    start_bytes = ledger.nbytes
    closing = []
    for version in range(STEPS):
        visits = [pick.visit for pick in picks]
        ledger.run(visits)
        for visit in visits:
            ledger.finish(visit)
            ledger.score(visit, Observation(3, 8, (1, 1, 2, 2, 3, 3, 4, 4)))
            ledger.keep(visit)
        ledger.train(visits)
        closing.append(seconds(ledger.close_step, version)[1])
        picks = ledger.pick(GROUPS)
    few, few_s = seconds(ledger.arrays)
    ledger.restore(ledger.state(), everyone_asked(ledger))
    copy, held_s = seconds(ledger.snapshot)
    arrays, snapshot_s = seconds(copy)
    path = tmp_path / "ledger.npz"
    _, write_s = seconds(lambda: np.savez(path, **arrays))
    state, end_bytes, size = ledger.state(), ledger.nbytes, path.stat().st_size
    again = make(ids, strata)
    with np.load(path) as saved:
        _, restore_s = seconds(lambda: again.restore(state, dict(saved)))
    path.unlink()
    record(
        {
            "prompts": COUNT,
            "ledger, no prompt asked, MB": start_bytes / 1e6,
            "list of the ids, MB": sys.getsizeof(ids) / 1e6,
            "ledger, every prompt asked, MB": end_bytes / 1e6,
            "bytes a prompt, every prompt asked": end_bytes / COUNT,
            "in a checkpoint, every prompt asked, MB": size / 1e6,
            "seconds to build": build_s,
            "seconds to draw an epoch's order": epoch_s,
            f"milliseconds to close a step of {GROUPS} groups, median": 1e3 * statistics.median(closing),
            f"seconds to copy for a checkpoint, {len(few['prompt']):,} prompts asked": few_s,
            "seconds to copy for a checkpoint, every prompt asked, in a thread": snapshot_s,
            "milliseconds before that for which the event loop stands still": 1e3 * held_s,
            "seconds to write it": write_s,
            "seconds to restore it": restore_s,
        }
    )
    assert (start_bytes + sys.getsizeof(ids)) / COUNT <= 50
    assert (end_bytes + sys.getsizeof(ids)) / COUNT <= 162
    assert again.nbytes <= end_bytes
