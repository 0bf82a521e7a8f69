"""`limen ARGUMENTS`, with a look at what Ray still holds for it before its instance ends: python storm_drive.py HELD.json ARGUMENTS"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray._private import internal_api
from ray._private import state as ray_state
from ray._private.worker import global_worker

from orchestrator.cluster import Cluster
from orchestrator.main import main


def held() -> dict[str, Any]:
    """References of the driver, actors that live, and what the object stores say of themselves."""
    gc.collect()
    actors = [actor for actor in ray_state.actors().values() if actor["State"] != "DEAD"]
    return {
        "references": sorted(name.decode() for name in global_worker.core_worker.get_all_reference_counts()),
        "actors": sorted(f"{actor['ActorClassName']} {actor['Name']}" for actor in actors),
        "stores": internal_api.memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True),
    }


if __name__ == "__main__":
    file, *arguments = sys.argv[1:]
    end = Cluster.close

    def look_and_end(self: Cluster) -> None:
        Path(file).write_text(json.dumps(held(), indent=2) + "\n")
        end(self)

    Cluster.close = look_and_end  # type: ignore[method-assign]
    sys.exit(main(arguments))
