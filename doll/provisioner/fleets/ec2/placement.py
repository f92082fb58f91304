"""EC2's spot placement scores: how likely a zone is to have all workers of a job on spot, 1 to 10. Advice for people.

Nothing is decided by them: the order of the subnets decides where to launch, and launches show what is available.

Source: Amazon EC2 User Guide, "Spot placement score". AWS limits the number of different requests of an account in
24 hours, so the same request is sent at the start and hourly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from doll import telemetry
from doll.config import JobConfig
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors
from doll.provisioner.fleets.ec2.fleet import Ec2Fleet, ec2_settings

log = telemetry.get_logger(__name__)

ASK_AGAIN_S: Final = 3600.0


class Ec2Placement:
    """Requests the scores hourly; failures are logged and change nothing.

    Args:
        client: boto3's EC2 client.
        instance_types: 3 or more: fewer always score low.
        zones: names by zone id; zones without a name here appear by their id.
    """

    def __init__(self, client: Any, *, instance_types: Sequence[str], workers: int, zones: Mapping[str, str]) -> None:
        self._client = client
        self._types = list(dict.fromkeys(instance_types))
        self._workers = workers
        self._zones = zones
        self._asked_s = -math.inf

    def poll_scores(self, now_s: float) -> dict[str, int] | None:
        """The scores by zone, best first, where an hour has passed since the last request; else None.

        AWS answers with the ten best zones of the region.
        """
        if now_s - self._asked_s < ASK_AGAIN_S:
            return None
        self._asked_s = now_s
        try:
            pages = self._client.get_paginator("get_spot_placement_scores").paginate(
                InstanceTypes=self._types, TargetCapacity=self._workers, TargetCapacityUnitType="units",
                SingleAvailabilityZone=True, RegionNames=[self._client.meta.region_name],
            )  # fmt: skip
            scores = {
                score["AvailabilityZoneId"]: score["Score"] for page in pages for score in page["SpotPlacementScores"]
            }
        except aws_errors() as error:
            log.warning("placement_scores_unavailable", reason=str(error), action="going on without")
            return None
        best = sorted(scores.items(), key=lambda score: (-score[1], score[0]))
        return {self._zones.get(id_, id_): score for id_, score in best}


def connect(config: JobConfig, fleet: Ec2Fleet) -> Ec2Placement | None:
    """As the job file asks; None where it does not.

    Raises:
        ConfigError: another kind of fleet, or boto3 lacks what it needs to make a client.
        LaunchError: the fleet's subnets are not there, or EC2 does not answer.
    """
    settings = ec2_settings(config)
    if not settings.placement_scores:
        return None
    return Ec2Placement(
        aws_client("ec2", settings.region), instance_types=settings.instance_types, workers=config.data.workers,
        zones=fleet.offers.zone_names(),
    )  # fmt: skip
