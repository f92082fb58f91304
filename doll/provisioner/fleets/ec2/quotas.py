"""The account's quotas of vCPUs in EC2, beside what a job's workers need: for `doll doctor`. It changes nothing.

Source: AWS, "Amazon EC2 instance type quotas": one quota of vCPUs for all types whose family begins with A, C, D, H, I,
M, R, T or Z, for spot and for on-demand each.
"""

from __future__ import annotations

from typing import Any, Final

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors
from doll.provisioner.fleets.ec2.fleet import ec2_settings
from doll.provisioner.fleets.ec2.quota_facts import QuotaFacts

QUOTAS: Final = {"spot": "L-34B43A08", "on-demand": "L-1216C47A"}
"""Codes in Service Quotas of the standard types, by market."""
_STANDARD: Final = "acdhimrtz"


def ask_quotas(config: JobConfig, ec2: Any = None, service_quotas: Any = None) -> list[QuotaFacts]:
    """The facts of both markets.

    Args:
        ec2, service_quotas: boto3's clients; default: of the fleet's region.
    """
    settings = ec2_settings(config)
    if others := [name for name in settings.instance_types if name[0] not in _STANDARD]:
        return [QuotaFacts(market, problem=f"{', '.join(others)}: not of the standard types") for market in QUOTAS]
    try:
        ec2 = ec2 or aws_client("ec2", settings.region)
        service_quotas = service_quotas or aws_client("service-quotas", settings.region)
        answer = ec2.describe_instance_types(InstanceTypes=list(settings.instance_types))
        most = max(item["VCpuInfo"]["DefaultVCpus"] for item in answer["InstanceTypes"])
    except ConfigError as error:
        return [QuotaFacts(market, problem=str(error)) for market in QUOTAS]
    except aws_errors() as error:
        return [QuotaFacts(market, problem=str(error)) for market in QUOTAS]
    needed = most * config.data.workers
    return [_ask(service_quotas, market, code, needed) for market, code in QUOTAS.items()]


def _ask(client: Any, market: str, code: str, needed: int) -> QuotaFacts:
    try:
        quota = client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"]
    except aws_errors() as error:
        return QuotaFacts(market, needed=needed, problem=str(error))
    return QuotaFacts(market, float(quota), needed)
