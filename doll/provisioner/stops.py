"""Clearing a stop: the provisioner's state keeps that a job cannot advance, or a slot, until a person takes it back.

A supervisor may start a provisioner again whatever its exit code was. What it had stopped would be paid for again with
each start (docs/decisions/0107-a-stop-lasts-until-it-is-cleared.md).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doll.config import JobConfig
from doll.provisioner.lease import Lease, claims_of
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.state_store import state_of


def stops_of(kept: Mapping[str, Any], max_failures: int) -> list[str]:
    """What is stopped in the state that a provisioner has kept, for people.

    Args:
        max_failures: as of `LaunchLimits`.
    """
    stops = [f"the job: {failed}"] if (failed := kept.get("health", {}).get("failed")) else []
    slots = kept["launch_state"]["slots"]
    if given_up := [slot for slot, attempts in enumerate(slots) if attempts["failures"] >= max_failures]:
        stops.append(f"slots {slot_ranges(given_up)}: {slots[given_up[0]]['failure']}")
    return stops


def cleared(kept: Mapping[str, Any], max_failures: int) -> dict[str, Any]:
    """The state without them: the time without an update begins again, and a slot that was given up gets one more
    machine, at once. After a failure of that one it is given up again."""
    state = copy.deepcopy(dict(kept))
    state.get("health", {}).update(failed="", stalled_s=0.0)
    for attempts in state["launch_state"]["slots"]:
        if attempts["failures"] >= max_failures:
            attempts.update(failures=max_failures - 1, retry_at_s={})
    return state


def clear_stops(config: JobConfig, run_folder: Path) -> list[str]:
    """Clear what is stopped; returns it. A provisioner that runs is replaced, and ends, where there is something.

    Raises:
        CheckpointError: the store does not answer.
        FencedError: a provisioner has started at the same moment.
    """
    limit = config.provision.max_failures
    kept = state_of(config, run_folder).load()
    stops = [] if kept is None else stops_of(kept, limit)
    if stops:
        lease = Lease(claims_of(config, run_folder), config.provision.lease_s)
        store = state_of(config, run_folder, lease.number)
        store.take()  # from here on nobody else can save
        newest = store.load()
        if newest is not None:
            store.save(cleared(newest, limit))
            store.append({"kind": "cleared", "stops": stops})
        lease.end("left")
    return stops
