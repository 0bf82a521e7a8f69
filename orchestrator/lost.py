"""What lay on a node that is gone: Ray's errors for it, and groups that may have lain there."""

from __future__ import annotations

from ray.exceptions import ObjectLostError, RayError

from orchestrator.stages import Address
from rollout.records import Group


def is_lost(error: BaseException) -> bool:
    """Whether an object is nowhere any more, for the driver itself or for an actor that was to take it as an argument."""
    return isinstance(error, ObjectLostError) or isinstance(getattr(error, "cause", None), ObjectLostError)


async def group_at(address: Address) -> Group | None:
    """The group that lies there; None where its node is gone."""
    try:
        group: Group = (await address.parcel)[address.place]
    except RayError as error:
        if not is_lost(error):
            raise
        return None
    return group
