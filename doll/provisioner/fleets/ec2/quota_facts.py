"""What AWS has said about a quota (`doll.provisioner.fleets.ec2.quotas` asks). Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuotaFacts:
    """Of one market.

    Attributes:
        market: `spot` or `on-demand`.
        vcpus: the quota; None where AWS does not say.
        needed: vCPUs of all workers at once, on the largest of the job's types; None where that is not known.
        problem: why something is not known.
    """

    market: str
    vcpus: float | None = None
    needed: int | None = None
    problem: str = ""
