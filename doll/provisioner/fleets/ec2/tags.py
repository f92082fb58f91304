"""Converts an instance's identity to tags and client tokens, and EC2's description of an instance to an `Instance`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from doll import telemetry
from doll.provisioner.fleets.ec2.capacity import Ec2Pool
from doll.provisioner.fleets.orders import WorkerLabels
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, Order
from doll.provisioner.planning.state import Market

log = telemetry.get_logger(__name__)

TAGS: Final = WorkerLabels("doll:")
CAPACITY_TYPE: Final[Mapping[Market, str]] = {"spot": "spot", "on_demand": "on-demand"}
# All resources of a launch are tagged: the provisioner's IAM role may create none without the tags.
_TAGGED: Final = ("instance", "volume", "network-interface", "fleet")
_TOKEN_CHARS: Final = 64

_STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.ENDING,
    "stopping": InstanceState.ENDING,
    "stopped": InstanceState.STOPPED,  # by a person: the launch template terminates on shutdown
    "terminated": InstanceState.ENDED,
}
_ENDS: Final[Mapping[str, EndReason]] = {
    "Server.SpotInstanceTermination": EndReason.INTERRUPTED,
    "Server.SpotInstanceShutdown": EndReason.INTERRUPTED,
    "Client.UserInitiatedShutdown": EndReason.TERMINATED,
}
_ENDED_AT: Final = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


def tag_specifications(order: Order, *, cluster: str, job: str) -> list[dict[str, Any]]:
    """Return the `TagSpecifications` of a launch; for the job "" there is no job tag."""
    tags = TAGS.write(order, cluster, job)
    return [
        {"ResourceType": resource, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
        for resource in _TAGGED
    ]


def filters_of(order: Order, *, cluster: str) -> dict[str, str]:
    """Return filters of DescribeInstances for the instances of an order and of its earlier attempts."""
    return {f"tag:{name}": value for name, value in TAGS.write(order, cluster, "").items()}


def instances_of(descriptions: Sequence[Mapping[str, Any]], now_s: float) -> Iterator[Instance]:
    """Return EC2's descriptions as instances. Descriptions without valid worker tags are logged and skipped."""
    for description in descriptions:
        tags = {tag["Key"]: tag["Value"] for tag in description.get("Tags", ())}
        worker = TAGS.read(tags)
        if worker is None:
            log.warning("invalid_worker_tags", id=description["InstanceId"], tags=tags)
            continue
        state = _STATES.get(description["State"]["Name"], InstanceState.ENDING)
        end_reason, ended_s = EndReason.NONE, None
        if state in (InstanceState.STOPPED, InstanceState.ENDED):
            end_reason = _ENDS.get(description.get("StateReason", {}).get("Code", ""), EndReason.FAILED)
            at = _ENDED_AT.search(description.get("StateTransitionReason", ""))
            ended_s = datetime.strptime(at[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() if at else now_s
        yield Instance(
            id=description["InstanceId"], state=state, ended_s=ended_s, end_reason=end_reason,
            pool=Ec2Pool(description["InstanceType"], description["Placement"]["AvailabilityZone"]).name,
            launched_s=description["LaunchTime"].timestamp(), **worker,
        )  # fmt: skip


def client_token(cluster: str, order: Order, zone_number: int = 0) -> str:
    """Return the token with which EC2 recognises a repeated request: at most 64 ASCII characters.

    >>> client_token("digits", Order(slot=3, incarnation=2, market="spot", attempt=1))
    'digits-w3-i2-spot-a1'
    >>> client_token("digits", Order(slot=3, incarnation=2, market="spot", run="1a2b"), 1)
    'digits-w3-i2-spot-a0z1-r1a2b'
    """
    rest = f"-w{order.slot}-i{order.incarnation}-{CAPACITY_TYPE[order.market]}-a{order.attempt}"
    rest += f"z{zone_number}" if zone_number else ""
    rest += f"-r{order.run}" if order.run else ""
    if len(cluster) + len(rest) > _TOKEN_CHARS:
        digest = hashlib.sha256(cluster.encode()).hexdigest()[:10]
        cluster = f"{cluster[: _TOKEN_CHARS - len(rest) - 11]}-{digest}"
    return cluster + rest


def order_text(order: Order) -> str:
    """Return an order as text for messages."""
    return f"worker {order.slot}, incarnation {order.incarnation}, {CAPACITY_TYPE[order.market]}"
