"""Where the actors of a run go: devices are reserved before anything is started, so that a run has all of them or says what is missing.

A bundle is what one actor holds, on one node; a reservation is a Ray placement group, which goes when the run leaves Ray. A worker
that takes over from a lost one starts in the same bundle, as soon as that one's devices are free, and nobody else can take them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.errors import RunStopped

RESERVE_S = 60.0  # for Ray to find the places: what others hold may become free meanwhile
POLL_S = 0.05
Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bundles that Ray holds for us."""

    group: PlacementGroup
    bundles: tuple[Bundle, ...]
    sharers: int  # actors in each bundle

    def asks(self, place: int) -> dict[str, float]:
        """What an actor asks of Ray that takes the bundle ``place``, or its share: half a GPU is the same GPU to both halves."""
        bundle = self.bundles[place]
        return {"num_cpus": bundle["CPU"] / self.sharers, "num_gpus": bundle.get("GPU", 0.0) / self.sharers}

    def at(self, place: int) -> dict[str, Any]:
        """The option that puts an actor into the bundle ``place``."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=place)}

    def nodes(self) -> list[str]:
        """The id of the node that each bundle lies on now; Ray moves those of a lost node."""
        nodes: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        return [nodes.get(place, "") for place in range(len(self.bundles))]


async def give_back(reservations: Sequence[Reservation]) -> None:
    """Returns once Ray counts them as gone, or after RESERVE_S: whoever asks next waits by itself."""
    for reservation in reservations:
        remove_placement_group(reservation.group)
    until = time.monotonic() + RESERVE_S
    while any(placement_group_table(r.group)["state"] != "REMOVED" for r in reservations) and time.monotonic() < until:
        await asyncio.sleep(POLL_S)


def living_nodes() -> dict[str, Any]:
    """What Ray knows of each node of the cluster that lives, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


async def reserve(
    what: str,
    bundles: Sequence[Bundle],
    strategy: str,
    *,
    sharers: int = 1,
    nodes: Sequence[str] | None = None,
    deadline_s: float = RESERVE_S,
) -> Reservation:
    """Reserves the bundles: ``PACK`` on few nodes, ``SPREAD`` over many, or each on the one of ``nodes``, which are ids.

    Raises RunStopped with asked and available numbers where Ray finds no place for all of them within the deadline.
    """
    pinned = None if nodes is None else [{"ray.io/node-id": node} for node in nodes]
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy, bundle_label_selector=pinned)
    until = time.monotonic() + deadline_s
    try:
        while placement_group_table(group)["state"] != "CREATED":
            if time.monotonic() > until:
                raise RunStopped(_no_place(what, bundles, ray.available_resources(), nodes, deadline_s))
            await asyncio.sleep(POLL_S)
    except BaseException:  # whoever waited gives up too, and nobody would know of what Ray finds later
        remove_placement_group(group)
        raise
    return Reservation(group, tuple(bundles), sharers)


def _no_place(
    what: str, bundles: Sequence[Bundle], free: Mapping[str, float], nodes: Sequence[str] | None, deadline_s: float
) -> str:
    asked = ", ".join(f"{sum(bundle[name] for bundle in bundles):g} {name}s" for name in bundles[0])
    available = ", ".join(f"{free.get(name, 0):g}" for name in bundles[0])
    each = " and ".join(f"{count:g} {name}s" for name, count in bundles[0].items())
    where = "the nodes of the rollout workers" if nodes else "one node"
    living = living_nodes()
    totals = "; ".join(
        f"{node['NodeManagerAddress']} has " + " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in bundles[0])
        for node in living.values()
    )
    return (
        f"no place for {what} within {deadline_s:g} s: asked {asked} ({len(bundles)} times {each}, each on {where}), available "
        f"{available} (in all, {totals}); ask for fewer, or wait until others' actors end"
    )
