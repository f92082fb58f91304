"""What a worker's actor is, as Ray's table of actors has it, and the instance that it stands for.

Reference: Ray's `gcs.proto` and `common.proto` (ActorTableData, ActorDeathCause, DrainNode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, cast, get_args

from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, Order
from doll.provisioner.planning.state import Market

POOL: Final = "actor/cluster"
CLUSTER_LABEL, JOB_LABEL, WORKER_LABEL, INCARNATION_LABEL, MARKET_LABEL, LAUNCHED_LABEL = (
    "doll-cluster",
    "doll-job",
    "doll-worker",
    "doll-incarnation",
    "doll-market",
    "doll-launched-ms",
)
NO_DEADLINE_S: Final = 120.0
"""A node that is drained without a deadline counts as taken after so long; nobody knows when it goes."""

Cause = Literal["", "exited", "killed", "node", "preempted", "start", "failed"]


@dataclass(frozen=True)
class Actor:
    """A row of the table.

    Attributes:
        node: id of its node; "" where it has none.
        started: its process is there, or was.
        start_s: when its constructor had returned; None while it has not.
        end_s: Unix seconds; None while it has not ended.
        cause: why it is dead: it left in order ("exited"), by `ray.kill`, its node died or was taken, its constructor
            failed ("start"), anything else.
        detail: what Ray says of its death.
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
    """The labels that say who the actor is."""
    return {
        CLUSTER_LABEL: cluster,
        **({JOB_LABEL: job} if job else {}),
        WORKER_LABEL: str(order.slot),
        INCARNATION_LABEL: str(order.incarnation),
        MARKET_LABEL: order.market,
        LAUNCHED_LABEL: str(round(now_s * 1000)),
    }


def instance_of(
    actor: Actor, known: Instance | None, draining: Mapping[str, float], asked: bool, now_s: float
) -> Instance | None:
    """The instance that an actor stands for; None: its labels are not a worker's.

    Args:
        known: what was last known of it. What has ended does not change, and who has had a notice was taken.
        draining: deadlines by node, Unix seconds; 0: without one.
        asked: this process has asked for its end.
    """
    if known is not None and known.state is InstanceState.ENDED:
        return known
    labels = actor.labels
    market, numbers = labels.get(MARKET_LABEL, ""), [
        labels.get(key, "") for key in (WORKER_LABEL, INCARNATION_LABEL, LAUNCHED_LABEL)
    ]  # fmt: skip
    if market not in get_args(Market) or not all(number.isdecimal() for number in numbers):
        return None
    slot, incarnation, launched_ms = map(int, numbers)
    instance = Instance(
        id=actor.name, slot=slot, incarnation=incarnation, market=cast("Market", market), pool=POOL,
        state=InstanceState.RUNNING if actor.state == "ALIVE" else InstanceState.PENDING, launched_s=launched_ms / 1000,
        job=labels.get(JOB_LABEL, ""), costs_from_s=actor.start_s if actor.started else actor.end_s or now_s,
        trouble=actor.detail if actor.cause == "start" else "",
    )  # fmt: skip
    notice_s = None if known is None else known.notice_s
    if notice_s is None and actor.node in draining and actor.started:
        notice_s = draining[actor.node] or now_s + NO_DEADLINE_S
    if actor.state == "DEAD":
        is_taken = notice_s is not None or actor.cause == "preempted" or (actor.cause == "node" and market == "spot")
        ordered = asked or actor.cause in ("exited", "killed")
        reason = EndReason.INTERRUPTED if is_taken else EndReason.TERMINATED if ordered else EndReason.FAILED
        ended_s = now_s if actor.end_s is None else actor.end_s
        return replace(instance, state=InstanceState.ENDED, ended_s=ended_s, end_reason=reason, notice_s=notice_s)
    if asked and notice_s is None:
        return replace(instance, state=InstanceState.ENDING)
    return replace(instance, notice_s=notice_s)
