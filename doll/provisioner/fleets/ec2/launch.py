"""Launches by CreateFleet `instant`: the pools that EC2 offers, the pools to request, the request, and EC2's refusals.

A launch requests any of the instance types in the zone of the first subnet, and the next zone only if there is no
capacity. The reason is that traffic between zones costs money, which EC2's own choice of a pool ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, get_args

from doll import telemetry
from doll.provisioner.fleets.ec2.capacity import CapacityCache, Ec2Pool
from doll.provisioner.fleets.ec2.client import CallPacer, aws_errors, launch_error, rule_of
from doll.provisioner.fleets.ec2.errors import ErrorRule, Scope, advice, rule_of_pool, worst
from doll.provisioner.fleets.ec2.tags import CAPACITY_TYPE, client_token, order_text, tag_specifications
from doll.provisioner.fleets.port import Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market

log = telemetry.get_logger(__name__)

_MESSAGE_CHARS: Final = 300


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
    """The instance types that EC2 offers in some subnets, each in order of preference. EC2 is asked only once. Each
    method raises LaunchError if subnets or types do not exist, or if EC2 does not answer."""

    def __init__(self, client: Any, subnets: Sequence[str], instance_types: Sequence[str]) -> None:
        self._client = client
        self._subnets = tuple(subnets)
        self._types = tuple(instance_types)
        self._by_zone: list[tuple[str, list[Override]]] = []
        self._zone_names: dict[str, str] = {}

    def by_zone(self) -> list[tuple[str, list[Override]]]:
        """Return all offers by zone, in the order of the subnets."""
        if not self._by_zone:
            self._look_up()
        return self._by_zone

    def zones(self) -> list[str]:
        """Return the zones that have a subnet and at least one of the instance types, in order of preference."""
        return [zone for zone, _ in self.by_zone()]

    def zone_names(self) -> dict[str, str]:
        """Return the names of the subnets' zones by zone id, which is the same in every account."""
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
                Filters=[{"Name": "location", "Values": zones}, {"Name": "instance-type", "Values": list(self._types)}],
            )
            offered = {
                Ec2Pool(offering["InstanceType"], offering["Location"])
                for page in pages
                for offering in page["InstanceTypeOfferings"]
            }
        except aws_errors() as error:
            raise launch_error("looking up subnets and instance types", error) from error
        wanted = [Override(type_, subnet, zone_of[subnet]) for subnet in self._subnets for type_ in self._types]
        offers = [override for override in wanted if override.pool in offered]
        if missing := {override.pool.name for override in wanted if override.pool not in offered}:
            log.warning("instance_type_not_offered", pools=sorted(missing))
        by_zone = ((zone, [offer for offer in offers if offer.zone == zone]) for zone in zones)
        self._by_zone = [(zone, overrides) for zone, overrides in by_zone if overrides]
        if not self._by_zone:
            raise LaunchError(
                f"none of {', '.join(self._types)} is offered in {', '.join(zones)}: correct fleet.instance_types",
                failure=LaunchFailure.CONFIG,
                code="Unsupported",
            )


@dataclass(frozen=True)
class PoolRefusal:
    """The refusal of one pool or of a whole call: EC2's code and message, and the rule for the code."""

    code: str
    rule: ErrorRule
    message: str = ""


@dataclass(eq=False, repr=False)
class Ec2Launcher:
    """Carries out orders.

    Args:
        template: `LaunchTemplateSpecification` of the request.
        adopt: function that returns the instance that an order has already launched.
        clock: function that returns Unix seconds.

    Attributes:
        cache: pools and markets that are not requested for a while.
    """

    client: Any
    offers: Offers
    _: KW_ONLY
    cluster: str
    job: str
    template: dict[str, str]
    pacer: CallPacer
    adopt: Callable[[Order], Instance | None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.cache = CapacityCache()
        self._closed_subnets: dict[str, float] = {}  # until
        self._backoff_codes: dict[tuple[Ec2Pool, Market], str] = {}  # the code of the last refusal

    def choices(self, order: Order, now_s: float) -> list[list[Override]]:
        """Return the possible overrides of an order, by zone. Raises LaunchError if no quota or no pool is left."""
        self._check_quota(order, now_s)
        by_zone = self.offers.by_zone()
        usable = ([override for override in offers if self._is_usable(override, order, now_s)] for _, offers in by_zone)
        choices = [overrides for overrides in usable if overrides]
        if not choices:
            # The error names no pools, because none was requested, so no pool's backoff starts again.
            codes = {
                self._backoff_codes.get((override.pool, order.market), "")
                for _, overrides in by_zone
                for override in overrides
            }
            known = ", ".join(sorted(code for code in codes if code)) or "all are to be avoided"
            raise LaunchError(
                f"{order_text(order)}: no pool is asked now ({known})", failure=LaunchFailure.CAPACITY, code="KnownDry"
            )
        return choices

    def _is_usable(self, override: Override, order: Order, now_s: float) -> bool:
        return (
            override.pool.name not in order.avoid
            and not self.cache.lacks_capacity(override.pool, order.market, now_s)
            and self._closed_subnets.get(override.subnet, now_s) <= now_s
        )

    def _check_quota(self, order: Order, now_s: float) -> None:
        until_s = self.cache.market_until_s(order.market, now_s)
        if until_s is not None:
            spot = order.market == "spot"
            raise LaunchError(
                f"{order_text(order)}: the {CAPACITY_TYPE[order.market]} quota was used up; asked again in "
                f"{until_s - now_s:.0f} s. Raise it in Service Quotas (docs/aws.md)",
                failure=LaunchFailure.SPOT_QUOTA if spot else LaunchFailure.ON_DEMAND_QUOTA,
                code="MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded",
            )

    def launch(self, order: Order, choices: Sequence[Sequence[Override]]) -> Instance:
        """Launch the instance in the first zone that has one. Raises LaunchError if none has one, or a call failed."""
        refusals: list[PoolRefusal] = []
        for number, overrides in enumerate(choices):
            outcome = self._create(order, number, overrides)
            if isinstance(outcome, Instance):
                return outcome
            refusals += outcome
            failure = worst(refusal.rule for refusal in refusals).failure
            if failure not in (LaunchFailure.CAPACITY, LaunchFailure.REFUSED):
                break
        raise _failure(order, refusals, {override.pool.name for overrides in choices for override in overrides})

    def _create(self, order: Order, number: int, overrides: Sequence[Override]) -> Instance | list[PoolRefusal]:
        """Call CreateFleet once, and return the instance or the refusals."""
        self.pacer.wait()
        try:
            answer = self.client.create_fleet(**self._request(order, number, overrides))
        except aws_errors() as error:
            code, rule = rule_of(error)
            if rule.failure is LaunchFailure.TAKEN and (adopted := self.adopt(order)) is not None:
                return adopted
            if rule.scope is Scope.NONE:
                raise launch_error(order_text(order), error) from error
            rule = _in_market(rule, order.market)
            for override in overrides:
                self._back_off(override, order.market, code, rule)
            return [PoolRefusal(code, rule, str(error))]
        refusals = [self._refusal(entry, order, overrides) for entry in answer.get("Errors", ())]
        ids = [(entry, id_) for entry in answer.get("Instances", ()) for id_ in entry["InstanceIds"]]
        if not ids:
            return refusals or [PoolRefusal("UnfulfillableCapacity", rule_of_pool("UnfulfillableCapacity"))]
        entry, id_ = ids[0]
        subnet = entry.get("LaunchTemplateAndOverrides", {}).get("Overrides", {}).get("SubnetId")
        zone = next((override.zone for override in overrides if override.subnet == subnet), overrides[0].zone)
        pool = Ec2Pool(entry.get("InstanceType", overrides[0].instance_type), zone)
        self.cache.clear(pool, order.market)
        log.info(
            "launched", id=id_, worker=order.slot, incarnation=order.incarnation, market=order.market, pool=pool.name
        )
        return Instance(
            id=id_, slot=order.slot, incarnation=order.incarnation, market=order.market, pool=pool.name,
            state=InstanceState.PENDING, launched_s=self.clock(), job=self.job,
        )  # fmt: skip

    def _refusal(self, entry: dict[str, Any], order: Order, overrides: Sequence[Override]) -> PoolRefusal:
        """Return the refusal for an entry of `Errors` in the answer; its pools are then not requested for a while."""
        code, message = entry.get("ErrorCode", ""), str(entry.get("ErrorMessage", ""))
        rule = _in_market(rule_of_pool(code), order.market)
        named = entry.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        for override in overrides:
            same_type = named.get("InstanceType", override.instance_type) == override.instance_type
            if same_type and named.get("SubnetId", override.subnet) == override.subnet:
                self._back_off(override, order.market, code, rule)
        if rule.alarm:
            log.error("launch_refused", code=code, message=message, worker=order.slot)
        return PoolRefusal(code, rule, message)

    def _request(self, order: Order, number: int, overrides: Sequence[Override]) -> dict[str, Any]:
        request: dict[str, Any] = {
            "Type": "instant",
            "ClientToken": client_token(self.cluster, order, number),
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": self.template,
                    "Overrides": [
                        {"InstanceType": override.instance_type, "SubnetId": override.subnet} for override in overrides
                    ],
                }
            ],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": 1,
                "DefaultTargetCapacityType": CAPACITY_TYPE[order.market],
            },
            "TagSpecifications": tag_specifications(order, cluster=self.cluster, job=self.job),
        }
        if order.market == "spot":
            request["SpotOptions"] = {"AllocationStrategy": "price-capacity-optimized"}
        else:
            request["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
        return request

    def _back_off(self, override: Override, market: Market, code: str, rule: ErrorRule) -> None:
        now_s = self.clock()
        self._backoff_codes[override.pool, market] = code
        match rule.scope:
            case Scope.POOL if rule.failure is LaunchFailure.REFUSED:
                self.cache.exclude(override.pool, market, now_s + rule.backoff_s)
            case Scope.POOL:
                self.cache.mark_unavailable(override.pool, market, now_s, rule.backoff_s)
            case Scope.PAIR:
                for each in get_args(Market):
                    self.cache.exclude(override.pool, each, now_s + rule.backoff_s)
            case Scope.SUBNET:
                self._closed_subnets[override.subnet] = now_s + rule.backoff_s
            case Scope.MARKET:
                self.cache.mark_market(market, now_s, rule.backoff_s)
            case Scope.NONE:
                return
        log.info("pool_excluded", pool=override.pool.name, market=market, code=code, for_s=rule.backoff_s)


def _failure(order: Order, refusals: Sequence[PoolRefusal], pools: Collection[str]) -> LaunchError:
    failure = worst(refusal.rule for refusal in refusals).failure
    codes = list(dict.fromkeys(refusal.code for refusal in refusals))
    chosen = next(refusal for refusal in refusals if refusal.rule.failure is failure)
    of_pools = failure in (LaunchFailure.CAPACITY, LaunchFailure.REFUSED)
    text = f"{order_text(order)}: {', '.join(codes)}" + (f" in {', '.join(sorted(pools))}" if of_pools else "")
    if failure in (LaunchFailure.REFUSED, LaunchFailure.CONFIG):
        text = f"{chosen.code}: {chosen.message[:_MESSAGE_CHARS] or 'EC2 gives no message'}: {advice(chosen.code)}"
    return LaunchError(text, failure=failure, code=chosen.code, pools=pools if of_pools else ())


def _in_market(rule: ErrorRule, market: Market) -> ErrorRule:
    """Return the rule with the quota of the requested market, also if the code names the other market."""
    if rule.scope is not Scope.MARKET:
        return rule
    return replace(rule, failure=LaunchFailure.SPOT_QUOTA if market == "spot" else LaunchFailure.ON_DEMAND_QUOTA)
