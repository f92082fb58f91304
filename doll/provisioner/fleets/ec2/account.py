"""EC2's information on an account: its spot placement scores and its quotas for a job's workers.

A score from 1 to 10 states how likely it is that a zone has spot capacity for all workers of a job. No decision depends
on the scores: the order of the subnets determines where to launch, and launches show which capacity is available. AWS
limits the number of different requests in 24 hours, so the same request is sent at the start and every hour. The quotas
are for `doll doctor`.

Sources: Amazon EC2 User Guide, "Spot placement score"; AWS, "Amazon EC2 instance type quotas": one quota of vCPUs for
all types whose family begins with A, C, D, H, I, M, R, T or Z, separately for spot and on-demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from doll import telemetry
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet, ec2_settings
from doll.records.check import Check

log = telemetry.get_logger(__name__)

ASK_AGAIN_S: Final = 3600.0


@dataclass
class Ec2Placement:
    """Requests the scores every hour. Failures are logged and have no effect. Requests with fewer than 3 instance types
    always get low scores. A zone without a name in `zones` is shown by its id."""

    client: Any
    _: KW_ONLY
    instance_types: Sequence[str]
    workers: int
    zones: Mapping[str, str]
    _asked_s: float = field(default=-math.inf, init=False)

    def poll_scores(self, now_s: float) -> dict[str, int] | None:
        """Return the scores of the ten best zones, best first, if an hour has passed since the last request; else
        None."""
        if now_s - self._asked_s < ASK_AGAIN_S:
            return None
        self._asked_s = now_s
        try:
            pages = self.client.get_paginator("get_spot_placement_scores").paginate(
                InstanceTypes=list(dict.fromkeys(self.instance_types)), TargetCapacity=self.workers,
                TargetCapacityUnitType="units", SingleAvailabilityZone=True, RegionNames=[self.client.meta.region_name],
            )  # fmt: skip
            scores = {
                score["AvailabilityZoneId"]: score["Score"] for page in pages for score in page["SpotPlacementScores"]
            }
        except aws_errors() as error:
            log.warning("placement_scores_unavailable", reason=str(error), action="going on without")
            return None
        best = sorted(scores.items(), key=lambda score: (-score[1], score[0]))
        return {self.zones.get(id_, id_): score for id_, score in best}


def connect(config: JobConfig, fleet: Ec2Fleet) -> Ec2Placement | None:
    """Return the source of the job's placement scores; None if the job does not request the scores. Raises ConfigError
    and LaunchError as the fleet does."""
    settings = ec2_settings(config)
    if not settings.placement_scores:
        return None
    return Ec2Placement(
        aws_client("ec2", settings.region), instance_types=settings.instance_types, workers=config.data.workers,
        zones=fleet.offers.zone_names(),
    )  # fmt: skip


QUOTAS: Final = {"spot": "L-34B43A08", "on-demand": "L-1216C47A"}
"""Codes in Service Quotas for the standard types, by market."""
_STANDARD: Final = "acdhimrtz"


def ask_quotas(config: JobConfig, ec2: Any = None, service_quotas: Any = None) -> list[Check]:
    """Check the account's quotas in both markets with boto3's clients. None: create clients for the fleet's region."""
    settings = ec2_settings(config)
    if others := [name for name in settings.instance_types if name[0] not in _STANDARD]:
        return [_unknown(market, f"{', '.join(others)}: not of the standard types") for market in QUOTAS]
    try:
        ec2 = ec2 or aws_client("ec2", settings.region)
        service_quotas = service_quotas or aws_client("service-quotas", settings.region)
        answer = ec2.describe_instance_types(InstanceTypes=list(settings.instance_types))
        most = max(item["VCpuInfo"]["DefaultVCpus"] for item in answer["InstanceTypes"])
    except ConfigError as error:  # without boto3 there are no errors of AWS to name
        return [_unknown(market, str(error)) for market in QUOTAS]
    except aws_errors() as error:
        return [_unknown(market, str(error)) for market in QUOTAS]
    needed = most * config.data.workers
    return [_quota(service_quotas, market, code, needed) for market, code in QUOTAS.items()]


def _quota(client: Any, market: str, code: str, needed: int) -> Check:
    try:
        vcpus = float(client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
    except aws_errors() as error:
        return _unknown(market, str(error))
    if vcpus < needed:
        return Check(_name(market), "warning", f"the quota is {vcpus:g}, all workers at once need {needed}",
                     "ask for more in Service Quotas, or set fewer workers or smaller types")  # fmt: skip
    return Check(_name(market), "ok", f"the quota is {vcpus:g}, {needed} are needed")


def _unknown(market: str, problem: str) -> Check:
    return Check(_name(market), "unknown", problem, "see the quota in Service Quotas (docs/aws.md)")


def _name(market: str) -> str:
    return f"provisioner: EC2 vCPUs, {market}"
