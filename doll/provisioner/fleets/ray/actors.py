"""The actor of a worker as a row of Ray's table of actors, and the instance that it represents.

Reference: Ray's `gcs.proto` and `common.proto` (ActorTableData, ActorDeathCause, DrainNode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from doll.provisioner.fleets.orders import WorkerLabels
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, Order

POOL: Final = "actor/cluster"
LABELS: Final = WorkerLabels("doll-")
LAUNCHED_LABEL: Final = "doll-launched-ms"
NO_DEADLINE_S: Final = 120.0
"""A node that is drained without a deadline counts as taken after this time, because its end is not known."""

Cause = Literal["", "exited", "killed", "node", "preempted", "start", "failed"]


@dataclass(frozen=True)
class Actor:
    """A row of the table of actors. Times are Unix seconds, or None before the event.

    Attributes:
        node: id of its node; "" if it has none.
        started: whether its process exists or existed.
        start_s: time at which its constructor returned.
        cause: cause of its death: an orderly exit ("exited"), `ray.kill`, the loss of its node, a failure of its
            constructor ("start"), or any other cause.
        detail: Ray's message on its death.
    """

    name: str
    labels: Mapping[str, str]
    state: str
    node: str = ""
    started: bool = False
    start_s: float | None = None
    end_s: float | None = None
    cause: Cause = ""
    detail: str = ""


def labels_of(order: Order, cluster: str, job: str, now_s: float) -> dict[str, str]:
    """Return the labels that state the identity of the actor."""
    return {**LABELS.write(order, cluster, job), LAUNCHED_LABEL: str(round(now_s * 1000))}


def instance_of(
    actor: Actor, known: Instance | None, draining: Mapping[str, float], asked: bool, now_s: float
) -> Instance | None:
    """Return the instance that an actor represents; None if its labels are not a worker's.

    Args:
        known: its last known state. An ended instance does not change. An instance that had a notice counts as
            interrupted.
        draining: deadlines by node, Unix seconds; 0: no deadline.
        asked: whether this process has requested its end.
    """
    if known is not None and known.state is InstanceState.ENDED:
        return known
    worker, launched_ms = LABELS.read(actor.labels), actor.labels.get(LAUNCHED_LABEL, "")
    if worker is None or not launched_ms.isdecimal():
        return None
    instance = Instance(
        id=actor.name, pool=POOL, launched_s=int(launched_ms) / 1000,
        state=InstanceState.RUNNING if actor.state == "ALIVE" else InstanceState.PENDING,
        costs_from_s=actor.start_s if actor.started else actor.end_s or now_s,
        trouble=actor.detail if actor.cause == "start" else "", **worker,
    )  # fmt: skip
    notice_s = None if known is None else known.notice_s
    if notice_s is None and actor.node in draining and actor.started:
        notice_s = draining[actor.node] or now_s + NO_DEADLINE_S
    if actor.state == "DEAD":
        lost_spot = actor.cause == "node" and instance.market == "spot"
        is_taken = notice_s is not None or actor.cause == "preempted" or lost_spot
        ordered = asked or actor.cause in ("exited", "killed")
        reason = EndReason.INTERRUPTED if is_taken else EndReason.TERMINATED if ordered else EndReason.FAILED
        ended_s = now_s if actor.end_s is None else actor.end_s
        return replace(instance.ended(ended_s, reason), notice_s=notice_s)
    if asked and notice_s is None:
        return replace(instance, state=InstanceState.ENDING)
    return replace(instance, notice_s=notice_s)
