"""The account's quotas, from answers of AWS as its documentation shows them."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError
from doll.provisioner.fleets.ec2.account import ask_quotas
from job_files import job

FLEET = "fleet: {kind: ec2, launch_template: lt-0, launch_template_version: 1, subnets: [subnet-0123456789abcdef0], "


class Ec2:
    def describe_instance_types(self, InstanceTypes: list[str]) -> dict[str, Any]:
        vcpus = {"c7g.large": 2, "c7g.xlarge": 4}
        return {"InstanceTypes": [{"VCpuInfo": {"DefaultVCpus": vcpus[name]}} for name in InstanceTypes]}


class Quotas:
    def get_service_quota(self, ServiceCode: str, QuotaCode: str) -> dict[str, Any]:
        if QuotaCode == "L-1216C47A":
            raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "GetServiceQuota")
        return {"Quota": {"Value": 5.0}}


def test_the_largest_type_for_all_workers_is_what_is_needed() -> None:
    config = job(workers=3, text=FLEET + "instance_types: [c7g.large, c7g.xlarge]}")
    spot, on_demand = ask_quotas(config, Ec2(), Quotas())
    assert (spot.result, spot.detail) == ("warning", "the quota is 5, all workers at once need 12")
    assert on_demand.result == "unknown"
    assert "AccessDenied" in on_demand.detail


def test_a_quota_for_all_workers_is_enough() -> None:
    spot, _ = ask_quotas(job(workers=2, text=FLEET + "instance_types: [c7g.large]}"), Ec2(), Quotas())
    assert (spot.result, spot.detail) == ("ok", "the quota is 5, 4 are needed")


def test_other_families_have_quotas_of_their_own() -> None:
    checks = ask_quotas(job(text=FLEET + "instance_types: [g5.xlarge]}"), Ec2(), Quotas())
    assert all("not of the standard types" in item.detail for item in checks)
