"""What a launch may choose from: instance types by subnet, zone by zone, as EC2 offers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from doll import telemetry
from doll.provisioner.fleets.ec2.capacity import Ec2Pool
from doll.provisioner.fleets.ec2.client import aws_errors, launch_error
from doll.provisioner.fleets.port import LaunchError, LaunchFailure

log = telemetry.get_logger(__name__)


@dataclass(frozen=True)
class Override:
    """One instance type in one subnet: an entry of `Overrides` in CreateFleet."""

    instance_type: str
    subnet: str
    zone: str

    @property
    def pool(self) -> Ec2Pool:
        return Ec2Pool(self.instance_type, self.zone)


class Offers:
    """The offers of some subnets and instance types; looked up once.

    Args:
        client: boto3's EC2 client.
        subnets, instance_types: in order of preference.
    """

    def __init__(self, client: Any, subnets: Sequence[str], instance_types: Sequence[str]) -> None:
        self._client = client
        self._subnets = tuple(subnets)
        self._types = tuple(instance_types)
        self._by_zone: list[tuple[str, list[Override]]] = []
        self._zone_names: dict[str, str] = {}

    def by_zone(self) -> list[tuple[str, list[Override]]]:
        """All offers, by zone in the order of the subnets.

        Raises:
            LaunchError: subnets or types do not exist, or EC2 does not answer.
        """
        if not self._by_zone:
            self._look_up()
        return self._by_zone

    def zone_names(self) -> dict[str, str]:
        """The names of the subnets' zones by zone id, which is the same in every account.

        Raises:
            LaunchError: as `by_zone`.
        """
        self.by_zone()
        return dict(self._zone_names)

    def _look_up(self) -> None:
        try:
            answer = self._client.describe_subnets(SubnetIds=list(self._subnets))
            zone_of = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in answer["Subnets"]}
            self._zone_names = {
                subnet["AvailabilityZoneId"]: subnet["AvailabilityZone"] for subnet in answer["Subnets"]
            }
            zones = list(dict.fromkeys(zone_of[subnet] for subnet in self._subnets))
            pages = self._client.get_paginator("describe_instance_type_offerings").paginate(
                LocationType="availability-zone",
                Filters=[
                    {"Name": "location", "Values": zones},
                    {"Name": "instance-type", "Values": list(self._types)},
                ],
            )
            offered = {
                (offering["InstanceType"], offering["Location"])
                for page in pages
                for offering in page["InstanceTypeOfferings"]
            }
        except aws_errors() as error:
            raise launch_error("looking up subnets and instance types", error) from error
        by_zone = [
            (
                zone,
                [
                    Override(type_, subnet, zone)
                    for subnet in self._subnets
                    if zone_of[subnet] == zone
                    for type_ in self._types
                    if (type_, zone) in offered
                ],
            )
            for zone in zones
        ]
        missing = sorted({f"{type_}/{zone}" for type_ in self._types for zone in zones if (type_, zone) not in offered})
        if missing:
            log.warning("instance_type_not_offered", pools=missing)
        self._by_zone = [(zone, overrides) for zone, overrides in by_zone if overrides]
        if not self._by_zone:
            raise LaunchError(
                f"none of {', '.join(self._types)} is offered in {', '.join(zones)}: correct fleet.instance_types",
                failure=LaunchFailure.CONFIG,
                code="Unsupported",
            )
