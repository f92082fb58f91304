"""EC2's error codes as data: for each code, the reaction to a failed launch, and which pools are not requested for a
while. Pure.

A code is in `Errors[].ErrorCode` of a CreateFleet answer (one for each pool), or it is the code of a failed call.
Sources: AWS, "Error codes for the Amazon EC2 API" and "Fleet error codes"; read 2026-11, docs/aws.md.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from doll.provisioner.fleets.port import LaunchFailure


class Scope(enum.StrEnum):
    """The scope of an error: which pools are not requested for a while."""

    POOL = "pool"  # (instance type, zone) in the market that was asked
    PAIR = "pair"  # (instance type, zone) in both markets
    SUBNET = "subnet"
    MARKET = "market"
    NONE = "none"


@dataclass(frozen=True)
class ErrorRule:
    """The reaction to one error code.

    Attributes:
        backoff_s: seconds for which the pools of `scope` are not requested.
        alarm: whether a person should act, because the error does not disappear by itself.
    """

    failure: LaunchFailure
    scope: Scope = Scope.NONE
    backoff_s: float = 0.0
    alarm: bool = False


CAPACITY_BACKOFF_S: Final = 180.0
REFUSAL_BACKOFF_S: Final = 30.0
QUOTA_BACKOFF_S: Final = 900.0

_NO_CAPACITY = ErrorRule(LaunchFailure.CAPACITY, Scope.POOL, CAPACITY_BACKOFF_S)
_SPOT_QUOTA = ErrorRule(LaunchFailure.SPOT_QUOTA, Scope.MARKET, QUOTA_BACKOFF_S, alarm=True)
_ON_DEMAND_QUOTA = ErrorRule(LaunchFailure.ON_DEMAND_QUOTA, Scope.MARKET, QUOTA_BACKOFF_S, alarm=True)
_THROTTLED = ErrorRule(LaunchFailure.THROTTLED)
_MISCONFIGURED = ErrorRule(LaunchFailure.CONFIG, alarm=True)
# It may be of one market, type or zone only, or what was made a moment ago may not be known everywhere yet: who asks
# decides by what others say, and by how often. See `doll.provisioner.launch_state.LaunchState`.
_REFUSED = ErrorRule(LaunchFailure.REFUSED, Scope.POOL, REFUSAL_BACKOFF_S, alarm=True)

_CODES: Final[dict[ErrorRule, tuple[str, ...]]] = {
    _NO_CAPACITY: (
        "InsufficientInstanceCapacity", "InsufficientCapacity", "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity", "InsufficientVolumeCapacity", "ReservationCapacityExceeded",
        "UnfulfillableCapacity",
        "SpotMaxPriceTooLow",  # only if the launch template sets a maximum price; DOLL sets none
    ),
    # No such type in that zone.
    ErrorRule(LaunchFailure.CAPACITY, Scope.PAIR, math.inf): ("Unsupported",),
    ErrorRule(LaunchFailure.CAPACITY, Scope.SUBNET, QUOTA_BACKOFF_S, alarm=True): (
        "InsufficientFreeAddressesInSubnet",
    ),
    _SPOT_QUOTA: ("MaxSpotInstanceCountExceeded",),
    _ON_DEMAND_QUOTA: ("VcpuLimitExceeded", "InstanceLimitExceeded"),
    _THROTTLED: (
        "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled", "RequestThrottledException",
        "InternalError", "InternalFailure", "ServerInternal", "ServiceUnavailable", "Unavailable", "RequestTimeout",
        "RequestResourceCountExceeded", "BandwidthLimitExceeded", "PriorRequestNotComplete", "SlowDown",
        "RequestExpired",  # the call waited too long, or the clock is being set
        "ExpiredToken", "ExpiredTokenException",  # credentials of a role are renewed
    ),
    ErrorRule(LaunchFailure.TAKEN): ("IdempotentParameterMismatch",),
    _REFUSED: (
        "AuthFailure.",  # of the service-linked role of spot; on-demand does without
        "Blocked", "InvalidBlockDeviceMapping", "InvalidKeyPair.", "InvalidSecurityGroupID.", "InvalidSnapshot.",
        "MaxIOPSLimitExceeded", "NetworkInterfaceLimitExceeded", "PendingVerification", "UnsupportedOperation",
        "VolumeLimitExceeded",
    ),
    _MISCONFIGURED: (
        "UnauthorizedOperation", "AuthFailure", "OptInRequired", "InvalidClientTokenId", "SignatureDoesNotMatch",
        "InvalidLaunchTemplateId.", "InvalidLaunchTemplateName.", "InvalidLaunchTemplateVersion", "InvalidAMIID.",
        "InvalidSubnetID.", "InvalidGroup.", "InvalidParameter", "InvalidParameterValue",
        "InvalidParameterCombination", "InvalidFleetConfig", "InvalidFleetConfiguration", "MissingParameter",
    ),
}  # fmt: skip
RULES: Final = {code: rule for rule, codes in _CODES.items() for code in codes}
"""The rule of each code. A code that ends in "." stands for all codes with this prefix."""


def rule_of_pool(code: str) -> ErrorRule:
    """Return the rule of a code in `Errors[]`. An unknown code does not count as a lack of capacity. Only this pool is
    not requested for a while."""
    return _find(code) or _REFUSED


def rule_of_call(code: str, http_status: int = 400) -> ErrorRule:
    """Return the rule of a failed call's code. A call with an unknown code is repeated if AWS is at fault (5xx),
    otherwise never, so that no unknown error causes an endless loop."""
    return _find(code) or (_THROTTLED if http_status >= 500 else _MISCONFIGURED)


def worst(rules: Iterable[ErrorRule]) -> ErrorRule:
    """Return the rule that determines the failure of a launch. Raises ValueError if there is none."""
    ranks = list(LaunchFailure)
    return min(rules, key=lambda rule: ranks.index(rule.failure))


_TEMPLATE: Final = "correct the launch template (fleet.launch_template and its version)"
_RIGHTS: Final = "give the provisioner's role the permissions of docs/aws.md"
_LIMIT: Final = "raise this limit of the account in Service Quotas"
_ADVICE: Final[dict[str, str]] = {
    "AuthFailure.ServiceLinkedRole": "create the role of spot once per account: aws iam create-service-linked-role "
    "--aws-service-name spot.amazonaws.com",
    "AuthFailure": "check the credentials, and that this region is enabled for the account",
    "Blocked": "ask AWS's support why the account is blocked",
    "InvalidBlockDeviceMapping": f"{_TEMPLATE}: device names, sizes and snapshot must fit the image",
    "InvalidSubnetID": "correct fleet.subnets",
    "Invalid": _TEMPLATE,
    "MissingParameter": _TEMPLATE,
    "MaxIOPSLimitExceeded": _LIMIT,
    "NetworkInterfaceLimitExceeded": _LIMIT,
    "VolumeLimitExceeded": _LIMIT,
    "OptInRequired": "accept the image's terms, or enable the region, in the console",
    "PendingVerification": "wait until AWS has verified the account",
    "SignatureDoesNotMatch": "check the credentials",
    "UnauthorizedOperation": _RIGHTS,
    "UnsupportedOperation": f"{_TEMPLATE}, or fleet.instance_types: they do not go together",
}


def advice(code: str) -> str:
    """Return the remedy for a code that does not concern capacity, as text for people."""
    unknown = 'look it up in AWS\'s "Error codes for the Amazon EC2 API"; launch template, image, keys or permissions'
    return next((text for start, text in _ADVICE.items() if code.startswith(start)), unknown)


def _find(code: str) -> ErrorRule | None:
    if (rule := RULES.get(code)) is not None:
        return rule
    return next((RULES[start] for start in RULES if start.endswith(".") and code.startswith(start)), None)
