"""What counts as lost with its node, and what does not."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, OwnerDiedError, RayTaskError

from orchestrator.lost import group_at, is_lost
from orchestrator.stages import Address

LOST = ObjectLostError("00ff", None, "here")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (OwnerDiedError("00ff", None, "here"), True),
        (RayTaskError("score", "Traceback", LOST), True),  # it was to be the argument of a call
        (RayTaskError("score", "Traceback", ValueError("no such part")), False),
        (ActorDiedError(), False),
        (OutOfMemoryError("the node was running low on memory"), False),
    ],
)
async def test_an_object_that_is_nowhere_any_more_is_lost_and_no_other_failure_is(error, lost):
    assert is_lost(error) is lost
    parcel = asyncio.get_running_loop().create_future()
    parcel.set_exception(error)
    if lost:
        assert await group_at(Address(parcel, 1)) is None
    else:
        with pytest.raises(type(error)):
            await group_at(Address(parcel, 1))


async def test_a_group_lies_at_its_place_in_the_parcel():
    parcel = asyncio.get_running_loop().create_future()
    parcel.set_result(["first", "second"])
    assert [await group_at(Address(parcel, place)) for place in (0, 1)] == ["first", "second"]
