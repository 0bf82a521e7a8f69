"""Bounds of what is open, and when a batch may close, against a schedule that is played through."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Auto
from orchestrator.admission import KeepRate, leaves_late, most_open, too_old

pytestmark = pytest.mark.timeout(60)


def test_open_visits():
    assert most_open(0, 1.0, 4) == 4
    assert most_open(0, 1.5, 4) == 6
    assert most_open(0, 1.15, 100) == 115
    assert most_open(0, 1.3, 4) == 5
    assert most_open(4, 1.0, 4) == 20
    assert most_open(0, Auto.auto, 4) == 16


def test_the_keep_rate_forgets():
    """One of one; then 1 of 4: (0.8 + 1) / (0.8 + 4) = 0.375; then 4 of 4: (1.44 + 4) / (3.84 + 4) = 0.69388."""
    rate = KeepRate()
    assert rate.oversample == 1.0
    rate = rate.after(1, 4)
    assert rate.oversample == pytest.approx(1 / 0.375)
    rate = rate.after(4, 4)
    assert rate.oversample == pytest.approx(7.84 / 5.44)
    for _ in range(5000):
        rate = rate.after(0, 8)
    assert rate.oversample == 4.0, "also where next to nothing is kept"
    assert KeepRate().after(0, 0).oversample == 1.0


def test_batches_of_two_at_a_lag_of_one_by_hand():
    """At version 5 whatever was asked at 4 must be in this batch; two of those asked at 5 have the next one."""
    at = {"version": 5, "max_lag": 1, "groups_per_step": 2}
    assert leaves_late([4], [], **at)
    assert not leaves_late([5, 5], [], **at)
    assert not leaves_late([5, 5], [4], **at), "one that does not run: waiting for others would not help it"
    assert not leaves_late([], [], **at)
    assert not leaves_late([0], [], version=5, max_lag=0, groups_per_step=2), "at lag 0 the order of picks decides"


@given(st.lists(st.integers(0, 6), max_size=14), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=500, deadline=None)
def test_it_says_whether_the_oldest_first_come_too_late(asked, max_lag, groups_per_step):
    """Of visits asked up to version 6, at which the batch closes, ``groups_per_step`` go into each of the batches 7, 8 and so on."""
    rest, version, late = sorted(asked), 7, False
    while rest:
        batch, rest = rest[:groups_per_step], rest[groups_per_step:]
        late = late or any(version - made > max_lag for made in batch)
        version += 1
    # what is asked at the version itself is bounded by what may be open, not here
    some_newest_late = asked.count(6) and len(asked) > max_lag * groups_per_step
    found = leaves_late(asked, [], version=6, max_lag=max_lag, groups_per_step=groups_per_step)
    assert found <= late
    if not some_newest_late:
        assert found == late


def test_what_a_resumed_run_is_too_late_for_by_hand():
    """At version 5 with two groups a batch: those of versions 3 to 5 that wait, by the order of their picks."""
    at = {"version": 5, "groups_per_step": 2}
    made = {7: 5, 8: 4, 9: 5, 10: 3}
    assert too_old(made, max_lag=0, waits=False, **at) == [8, 9, 10], "batches are cut in pick order"
    assert too_old(made, max_lag=1, waits=True, **at) == [10]
    assert too_old({1: 4, 2: 4, 3: 4}, max_lag=1, waits=True, **at) == [3], "the third has the next batch, at version 6"
    assert too_old(made, max_lag=1, waits=False, **at) == []
    assert too_old({}, max_lag=0, waits=True, **at) == []
