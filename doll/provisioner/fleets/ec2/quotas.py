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
from doll.records.check import Check

QUOTAS: Final = {"spot": "L-34B43A08", "on-demand": "L-1216C47A"}
"""Codes in Service Quotas of the standard types, by market."""
_STANDARD: Final = "acdhimrtz"


def ask_quotas(config: JobConfig, ec2: Any = None, service_quotas: Any = None) -> list[Check]:
    """What the account may run at once in both markets.

    Args:
        ec2, service_quotas: boto3's clients; default: of the fleet's region.
    """
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
