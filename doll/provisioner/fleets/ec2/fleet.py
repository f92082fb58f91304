"""`Fleet` on EC2: one instance per slot, bought by CreateFleet `instant`; who it is stands in its tags.

There is no state on disk: what is there is what DescribeInstances finds by tag, so a provisioner that crashed anywhere
starts again from that. A launch that was cut off is found by its tags, or repeated under the same client token.
Reference: docs/aws.md, AWS's "Ensuring idempotency in Amazon EC2 API requests" and "Eventual consistency".

Never used: DeleteFleets (deleting an `instant` fleet ends its instances), StopInstances, a maximum spot price.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, get_args

from doll import telemetry
from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.provisioner.fleets.ec2.capacity import CapacityCache, Ec2Pool
from doll.provisioner.fleets.ec2.errors import ErrorRule, Scope, advice, rule_of_call, rule_of_pool, worst
from doll.provisioner.fleets.port import EndReason, Fleet, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market

if TYPE_CHECKING:
    from doll.config import Ec2FleetConfig, JobConfig

log = telemetry.get_logger(__name__)

CLUSTER_TAG: Final = "doll:cluster"
WORKER_TAG: Final = "doll:worker"
INCARNATION_TAG: Final = "doll:incarnation"
MARKET_TAG: Final = "doll:market"
JOB_TAG: Final = "doll:job"
# Identity stands on all that a launch makes: the provisioner's role may create nothing that does not carry it.
_TAGGED: Final = ("instance", "volume", "network-interface", "fleet")
_TOKEN_CHARS: Final = 64
_MAX_IDS_PER_CALL: Final = 100
_ORDERS_REMEMBERED: Final = 4096
_SAYS_CHARS: Final = 300
LISTING_LAG_S: Final = 60.0
"""EC2's answers may lag behind what it has done, by seconds; for so long what it has promised counts."""
ENDED_KEPT_S: Final = 3600.0
FRESH_S: Final = 5.0
"""A listing of all is as good as a look of its own for so long: a turn lists first and then launches."""

_STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.ENDING,
    "stopping": InstanceState.ENDING,
    "stopped": InstanceState.ENDED,  # the template ends instances that shut down; one that is stopped works no more
    "terminated": InstanceState.ENDED,
}
_ENDS: Final[Mapping[str, EndReason]] = {
    "Server.SpotInstanceTermination": EndReason.INTERRUPTED,
    "Server.SpotInstanceShutdown": EndReason.INTERRUPTED,
    "Client.UserInitiatedShutdown": EndReason.TERMINATED,
}
_ENDED_AT: Final = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_CAPACITY_TYPE: Final[Mapping[Market, str]] = {"spot": "spot", "on_demand": "on-demand"}


class Notices(Protocol):
    """Interruption notices, as `doll.provisioner.fleets.ec2.notices` gets them."""

    def take(self, own: Collection[str]) -> Mapping[str, float]:
        """When each of these instances will be taken, of those that have had a notice; told at least once."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Known:
    """What was last known of an instance.

    Attributes:
        seen_s: when EC2 last told of it.
        terminate_sent_s: when it was told to end; minus infinity if it was not.
    """

    instance: Instance
    seen_s: float
    terminate_sent_s: float = float("-inf")


@dataclass(frozen=True)
class _Reason:
    """Why a pool, or a whole call, gave nothing: EC2's code and words, and what to do about it."""

    code: str
    rule: ErrorRule
    says: str = ""


@dataclass(frozen=True)
class _Override:
    """One way to get an instance: what a launch may choose from."""

    instance_type: str
    subnet: str
    zone: str

    @property
    def pool(self) -> Ec2Pool:
        return Ec2Pool(self.instance_type, self.zone)


_OrderKey = tuple[str, int, int, Market, int]


def _key(order: Order) -> _OrderKey:
    return (order.run, order.slot, order.incarnation, order.market, order.attempt)


class Ec2Fleet:
    """The EC2 instances that carry our cluster tag; no others are ever touched.

    A launch asks the first subnet's zone for any of the instance types, and only where that zone has none the next:
    traffic between zones costs money, and EC2's own choice of a pool does not know of it.

    Args:
        client: boto3's EC2 client.
        cluster: value of the tag `doll:cluster`.
        job: value of the tag `doll:job`; jobs may have the machines of one cluster, one after the other. "": no tag.
        launch_template: id or name.
        version: of the launch template.
        subnets, instance_types: in order of preference.
        notices: where interruption notices come from; None: an interruption is seen when it has happened.
        api_calls_per_s: mutating calls, at most.
        clock: Unix seconds.
        sleep: waits; only the pacing of calls uses it.
        page_size: of listings; 5 to 1000.
    """

    def __init__(
        self,
        client: Any,
        *,
        cluster: str,
        job: str = "",
        launch_template: str,
        version: int,
        subnets: Sequence[str],
        instance_types: Sequence[str],
        notices: Notices | None = None,
        api_calls_per_s: float = 2.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        page_size: int = 200,
    ) -> None:
        self.cache = CapacityCache()
        self._client = client
        self._cluster = cluster
        self._job = job
        named = "LaunchTemplateId" if launch_template.startswith("lt-") else "LaunchTemplateName"
        self._template = {named: launch_template, "Version": str(version)}
        self._subnets = tuple(subnets)
        self._types = tuple(instance_types)
        self._notices = notices
        self._clock = clock
        self._pacer = Pacer(api_calls_per_s, sleep=sleep)
        self._page_size = page_size
        self._zones: list[tuple[str, list[_Override]]] = []
        self._zone_names: dict[str, str] = {}
        self._known: dict[str, _Known] = {}
        self._listed_s = float("-inf")
        self._ids: dict[_OrderKey, str] = {}
        # What each order asked for: repeated, it must be the same to the byte, though the cache has changed since.
        self._asked: dict[_OrderKey, list[list[_Override]]] = {}
        self._closed_subnets: dict[str, float] = {}
        self._backoff_codes: dict[tuple[Ec2Pool, Market], str] = {}  # the code of the last refusal

    # --- the port ---------------------------------------------------------------------------------------------------

    def launch(self, order: Order) -> Instance:
        """As the port. Everything that keeps it from an instance is a `LaunchError`, EC2 being away too."""
        key = _key(order)
        try:
            found = self._adopted(order)
        except ServiceUnavailableError as error:
            raise LaunchError(str(error), failure=LaunchFailure.THROTTLED, code="Unavailable") from error
        if found is not None:
            self._ids[key] = found.id
            return found
        now_s = self._clock()
        if key not in self._asked:
            self._refuse_if_held(order, now_s)
            self._remember(key, self._choices(order, now_s))
        reasons: list[_Reason] = []
        for number, overrides in enumerate(self._asked[key]):
            got = self._create(order, number, overrides)
            if isinstance(got, Instance):
                self._ids[key] = got.id
                return got
            reasons += got
            if worst(one.rule for one in reasons).failure not in (LaunchFailure.CAPACITY, LaunchFailure.REFUSED):
                break
        raise self._failure(order, reasons, {one.pool.name for choice in self._asked[key] for one in choice})

    def instances(self) -> Sequence[Instance]:
        """As the port.

        Raises:
            ConfigError: we may not look.
            ServiceUnavailableError: EC2 does not answer.
        """
        listed = {one.id: one for one in self._listed({"tag:" + CLUSTER_TAG: self._cluster})}
        now_s = self._listed_s = self._clock()
        for id_, instance in listed.items():
            self._learn(id_, instance, now_s)
        for id_, known in list(self._known.items()):
            if (
                id_ not in listed
                and known.instance.state is not InstanceState.ENDED
                and now_s - known.seen_s > LISTING_LAG_S
            ):
                # Nobody tells of it any more: it ended while we did not look.
                gone = replace(known.instance, state=InstanceState.ENDED, ended_s=now_s, end_reason=EndReason.FAILED)
                self._known[id_] = replace(known, instance=gone)
            ended_s = self._known[id_].instance.ended_s
            if ended_s is not None and id_ not in listed and now_s - ended_s > ENDED_KEPT_S:
                del self._known[id_]
        self._take_notices(now_s)
        return [known.instance for known in self._known.values()]

    def terminate(self, ids: Collection[str]) -> None:
        """As the port; what does not carry our tags is passed over.

        Raises:
            ConfigError: we may not end instances.
            ServiceUnavailableError: EC2 does not answer; those that were not reached live on.
        """
        unknown = sorted(set(ids) - set(self._known))
        for start in range(0, len(unknown), _MAX_IDS_PER_CALL):
            batch = unknown[start : start + _MAX_IDS_PER_CALL]
            for one in self._listed({"tag:" + CLUSTER_TAG: self._cluster, "instance-id": batch}):
                self._learn(one.id, one, self._clock())
        own = [id_ for id_ in ids if id_ in self._known and self._known[id_].instance.is_alive]
        if passed := sorted(set(ids) - set(self._known)):
            log.warning("foreign_instances", ids=passed, cluster=self._cluster)
        for start in range(0, len(own), _MAX_IDS_PER_CALL):
            self._terminate(own[start : start + _MAX_IDS_PER_CALL])

    def zones(self) -> list[str]:
        """The zones that have a subnet and at least one of the instance types, in order of preference.

        Raises:
            LaunchError: subnets or types do not exist, or EC2 does not answer.
        """
        return [zone for zone, _ in self._offered()]

    def zone_names(self) -> dict[str, str]:
        """The names of these zones by their ids, which are the same in every account.

        Raises:
            LaunchError: as `zones`.
        """
        self._offered()
        return dict(self._zone_names)

    def close(self) -> None:
        if self._notices is not None:
            self._notices.close()
        self._client.close()

    # --- launching --------------------------------------------------------------------------------------------------

    def _adopted(self, order: Order) -> Instance | None:
        """The instance that this order, or its like of before a crash, has made."""
        key = _key(order)
        known = self._known.get(self._ids.get(key, ""))
        now_s = self._clock()
        if known is not None and now_s - known.seen_s <= LISTING_LAG_S:
            return known.instance
        if key not in self._asked and now_s - self._listed_s <= FRESH_S:
            # All was listed a moment ago, and this order was not made since: another look would show the same.
            like = [one.instance for one in self._known.values() if self._is_of(one.instance, order)]
            return min(like, key=lambda one: (one.launched_s, one.id)) if like else None
        found = self._listed({
            "tag:" + CLUSTER_TAG: self._cluster,
            "tag:" + WORKER_TAG: str(order.slot),
            "tag:" + INCARNATION_TAG: str(order.incarnation),
            "tag:" + MARKET_TAG: order.market,
        })  # fmt: skip
        of_order = []
        for one in found:
            self._learn(one.id, one, now_s)
            # A later attempt is only made when the earlier ones got nothing, so any that lives is what is wanted.
            if self._is_of(self._known[one.id].instance, order) or one.id == self._ids.get(key):
                of_order.append(self._known[one.id].instance)
        if not of_order:
            return known.instance if known is not None else None
        return min(of_order, key=lambda one: (not one.is_alive, one.launched_s, one.id))

    def _is_of(self, one: Instance, order: Order) -> bool:
        """It lives, and is what the order, or an earlier attempt of it, wanted."""
        same = (one.slot, one.incarnation, one.market) == (order.slot, order.incarnation, order.market)
        return one.is_alive and same and (not one.job or one.job == self._job)

    def _refuse_if_held(self, order: Order, now_s: float) -> None:
        until_s = self.cache.market_until_s(order.market, now_s)
        if until_s is not None:
            spot = order.market == "spot"
            raise LaunchError(
                f"{_named(order)}: the {_CAPACITY_TYPE[order.market]} quota was used up; asked again in "
                f"{until_s - now_s:.0f} s. Raise it in Service Quotas (docs/aws.md)",
                failure=LaunchFailure.SPOT_QUOTA if spot else LaunchFailure.ON_DEMAND_QUOTA,
                code="MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded",
            )

    def _choices(self, order: Order, now_s: float) -> list[list[_Override]]:
        """What the order may choose from, zone by zone.

        Raises:
            LaunchError: nothing is left.
        """
        zones = self._offered()
        choices = []
        for _, overrides in zones:
            usable = [
                one
                for one in overrides
                if one.pool.name not in order.avoid
                and not self.cache.lacks_capacity(one.pool, order.market, now_s)
                and self._closed_subnets.get(one.subnet, now_s) <= now_s
            ]
            if usable:
                choices.append(usable)
        if not choices:
            # It names no pools: what was not asked is no news, and must not make the time longer for which it is not.
            held = [
                self._backoff_codes.get((one.pool, order.market), "") for _, overrides in zones for one in overrides
            ]
            codes = ", ".join(sorted({code for code in held if code})) or "to be avoided"
            raise LaunchError(
                f"{_named(order)}: no pool is to be asked now ({codes})",
                failure=LaunchFailure.CAPACITY,
                code="KnownDry",
            )
        return choices

    def _offered(self) -> list[tuple[str, list[_Override]]]:
        """All that can be asked for, by zone in the order of the subnets; looked up once.

        Raises:
            LaunchError: subnets or types do not exist, or EC2 does not answer.
        """
        if self._zones:
            return self._zones
        try:
            answer = self._client.describe_subnets(SubnetIds=list(self._subnets))
            zone_of = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in answer["Subnets"]}
            self._zone_names = {one["AvailabilityZoneId"]: one["AvailabilityZone"] for one in answer["Subnets"]}
            zones = list(dict.fromkeys(zone_of[subnet] for subnet in self._subnets))
            pages = self._client.get_paginator("describe_instance_type_offerings").paginate(
                LocationType="availability-zone",
                Filters=[
                    {"Name": "location", "Values": zones},
                    {"Name": "instance-type", "Values": list(self._types)},
                ],
            )
            offered = {
                (one["InstanceType"], one["Location"]) for page in pages for one in page["InstanceTypeOfferings"]
            }
        except _aws_errors() as error:
            raise _launch_error("looking up subnets and instance types", error) from error
        found = [
            (
                zone,
                [
                    _Override(type_, subnet, zone)
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
        self._zones = [(zone, overrides) for zone, overrides in found if overrides]
        if not self._zones:
            raise LaunchError(
                f"none of {', '.join(self._types)} is offered in {', '.join(zones)}: correct fleet.instance_types",
                failure=LaunchFailure.CONFIG,
                code="Unsupported",
            )
        return self._zones

    def _create(self, order: Order, number: int, overrides: Sequence[_Override]) -> Instance | list[_Reason]:
        """One CreateFleet call: the instance, or what EC2 said against it."""
        market = order.market
        self._pacer.wait()
        try:
            answer = self._client.create_fleet(**self._request(order, number, overrides))
        except _aws_errors() as error:
            code, rule = _rule_of(error)
            if rule.failure is LaunchFailure.TAKEN and (found := self._adopted(order)) is not None:
                return found
            if rule.scope is Scope.NONE:
                raise _launch_error(_named(order), error) from error
            rule = _in_market(rule, market)
            for one in overrides:
                self._back_off_pool(one, market, code, rule)
            return [_Reason(code, rule, str(error))]
        reasons = []
        for refusal in answer.get("Errors", ()):
            code = refusal.get("ErrorCode", "")
            rule = _in_market(rule_of_pool(code), market)
            reasons.append(_Reason(code, rule, str(refusal.get("ErrorMessage", ""))))
            named = refusal.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
            for one in overrides:
                if named.get("InstanceType", one.instance_type) == one.instance_type and (
                    named.get("SubnetId", one.subnet) == one.subnet
                ):
                    self._back_off_pool(one, market, code, rule)
            if rule.alarm:
                log.error("launch_refused", code=code, says=refusal.get("ErrorMessage", ""), worker=order.slot)
        ids = [(got, id_) for got in answer.get("Instances", ()) for id_ in got["InstanceIds"]]
        if not ids:
            return reasons or [_Reason("UnfulfillableCapacity", rule_of_pool("UnfulfillableCapacity"))]
        got, id_ = ids[0]
        subnet = got.get("LaunchTemplateAndOverrides", {}).get("Overrides", {}).get("SubnetId")
        zone = next((one.zone for one in overrides if one.subnet == subnet), overrides[0].zone)
        pool = Ec2Pool(got.get("InstanceType", overrides[0].instance_type), zone)
        self.cache.forget(pool, market)
        now_s = self._clock()
        instance = Instance(
            id=id_,
            slot=order.slot,
            incarnation=order.incarnation,
            market=market,
            pool=pool.name,
            state=InstanceState.PENDING,
            launched_s=now_s,
            job=self._job,
        )
        self._known[id_] = _Known(instance, now_s)
        log.info("launched", id=id_, worker=order.slot, incarnation=order.incarnation, market=market, pool=pool.name)
        return instance

    def _request(self, order: Order, number: int, overrides: Sequence[_Override]) -> dict[str, Any]:
        tags = {
            CLUSTER_TAG: self._cluster,
            WORKER_TAG: str(order.slot),
            INCARNATION_TAG: str(order.incarnation),
            MARKET_TAG: order.market,
            **({JOB_TAG: self._job} if self._job else {}),
        }
        request: dict[str, Any] = {
            "Type": "instant",
            "ClientToken": client_token(self._cluster, order, number),
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": self._template,
                    "Overrides": [{"InstanceType": one.instance_type, "SubnetId": one.subnet} for one in overrides],
                }
            ],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": 1,
                "DefaultTargetCapacityType": _CAPACITY_TYPE[order.market],
            },
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
                for kind in _TAGGED
            ],
        }
        if order.market == "spot":
            request["SpotOptions"] = {"AllocationStrategy": "price-capacity-optimized"}
        else:
            request["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
        return request

    def _back_off_pool(self, override: _Override, market: Market, code: str, rule: ErrorRule) -> None:
        now_s = self._clock()
        self._backoff_codes[override.pool, market] = code
        match rule.scope:
            case Scope.POOL if rule.failure is LaunchFailure.REFUSED:
                self.cache.exclude(override.pool, market, now_s + rule.hold_s)
            case Scope.POOL:
                self.cache.mark(override.pool, market, now_s, rule.hold_s)
            case Scope.PAIR:
                for each in get_args(Market):
                    self.cache.exclude(override.pool, each, now_s + rule.hold_s)
            case Scope.SUBNET:
                self._closed_subnets[override.subnet] = now_s + rule.hold_s
            case Scope.MARKET:
                self.cache.mark_market(market, now_s, rule.hold_s)
            case Scope.NONE:
                return
        log.info("pool_excluded", pool=override.pool.name, market=market, code=code, for_s=rule.hold_s)

    def _failure(self, order: Order, reasons: Sequence[_Reason], pools: Collection[str]) -> LaunchError:
        failure = worst(one.rule for one in reasons).failure
        codes = list(dict.fromkeys(one.code for one in reasons))
        chosen = next(one for one in reasons if one.rule.failure is failure)
        of_pools = failure in (LaunchFailure.CAPACITY, LaunchFailure.REFUSED)
        text = f"{_named(order)}: {', '.join(codes)}" + (f" in {', '.join(sorted(pools))}" if of_pools else "")
        if failure in (LaunchFailure.REFUSED, LaunchFailure.CONFIG):
            text = f"{chosen.code}: {chosen.says[:_SAYS_CHARS] or 'EC2 gives no message'}: {advice(chosen.code)}"
        return LaunchError(text, failure=failure, code=chosen.code, pools=pools if of_pools else ())

    def _remember(self, key: _OrderKey, choices: list[list[_Override]]) -> None:
        self._asked[key] = choices
        for old in (self._asked, self._ids):
            while len(old) > _ORDERS_REMEMBERED:
                del old[next(iter(old))]

    # --- looking ----------------------------------------------------------------------------------------------------

    def _listed(self, filters: Mapping[str, str | Sequence[str]]) -> list[Instance]:
        """Instances by tags, in all states."""
        asked = [
            {"Name": name, "Values": [value] if isinstance(value, str) else list(value)}
            for name, value in (*filters.items(), ("tag-key", WORKER_TAG))
        ]
        try:
            pages = self._client.get_paginator("describe_instances").paginate(
                Filters=asked, PaginationConfig={"PageSize": self._page_size}
            )
            raw = [one for page in pages for group in page["Reservations"] for one in group["Instances"]]
        except _aws_errors() as error:
            raise _unavailable("listing instances", error) from error
        return list(self._readable(raw))

    def _readable(self, raw: Sequence[Mapping[str, Any]]) -> Iterator[Instance]:
        now_s = self._clock()
        for one in raw:
            tags = {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())}
            market, worker, incarnation = (tags.get(key, "") for key in (MARKET_TAG, WORKER_TAG, INCARNATION_TAG))
            if market not in get_args(Market) or not worker.isdecimal() or not incarnation.isdecimal():
                log.warning("invalid_worker_tags", id=one["InstanceId"], tags=tags)
                continue
            state = _STATES.get(one["State"]["Name"], InstanceState.ENDING)
            end, ended_s = EndReason.NONE, None
            if state is InstanceState.ENDED:
                end = _ENDS.get(one.get("StateReason", {}).get("Code", ""), EndReason.FAILED)
                at = _ENDED_AT.search(one.get("StateTransitionReason", ""))
                ended_s = datetime.strptime(at[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp() if at else now_s
            yield Instance(
                id=one["InstanceId"], slot=int(worker), incarnation=int(incarnation), market=cast("Market", market),
                pool=Ec2Pool(one["InstanceType"], one["Placement"]["AvailabilityZone"]).name, state=state,
                launched_s=one["LaunchTime"].timestamp(), ended_s=ended_s, end_reason=end, job=tags.get(JOB_TAG, ""),
            )  # fmt: skip

    def _learn(self, id_: str, instance: Instance, now_s: float) -> None:
        """Put what EC2 says beside what is known: it may lag behind, and does not tell twice when one has ended."""
        before = self._known.get(id_)
        if before is None:
            self._known[id_] = _Known(instance, now_s)
            return
        old = before.instance
        instance = replace(instance, notice_s=old.notice_s)
        lags = now_s - before.terminate_sent_s <= LISTING_LAG_S or (
            old.ended_s is not None and now_s - old.ended_s <= LISTING_LAG_S
        )
        if instance.is_alive and lags and not old.is_alive:
            instance = replace(instance, state=old.state, ended_s=old.ended_s, end_reason=old.end_reason)
        elif instance.state is InstanceState.ENDED and old.ended_s is not None:
            instance = replace(instance, ended_s=old.ended_s)
        elif instance.end_reason is EndReason.INTERRUPTED:
            if instance.notice_s is not None and instance.ended_s is not None:
                instance = replace(instance, ended_s=min(instance.ended_s, max(instance.notice_s, instance.launched_s)))
            self.cache.mark(Ec2Pool.of(instance.pool), instance.market, now_s)
            log.info("interrupted", id=id_, worker=instance.slot, pool=instance.pool)
        elif instance.end_reason is EndReason.FAILED and before.terminate_sent_s > float("-inf"):
            instance = replace(instance, end_reason=EndReason.TERMINATED)
        self._known[id_] = replace(before, instance=instance, seen_s=now_s)

    def _take_notices(self, now_s: float) -> None:
        if self._notices is None:
            return
        own = [id_ for id_, known in self._known.items() if known.instance.is_alive]
        try:
            taken = self._notices.take(own)
        except ServiceUnavailableError as error:
            log.warning("spot_notices_unavailable", reason=str(error))  # the listing still tells what has ended
            return
        for id_, at_s in taken.items():
            known = self._known[id_]
            if known.instance.notice_s is None:
                self._known[id_] = replace(known, instance=replace(known.instance, notice_s=at_s))
                self.cache.mark(Ec2Pool.of(known.instance.pool), "spot", now_s)
                log.info("notice", id=id_, worker=known.instance.slot, in_s=round(at_s - now_s))

    # --- ending -----------------------------------------------------------------------------------------------------

    def _terminate(self, ids: Sequence[str]) -> None:
        self._pacer.wait()
        try:
            self._client.terminate_instances(InstanceIds=list(ids))
        except _aws_errors() as error:
            if _code_of(error) != "InvalidInstanceID.NotFound":
                raise _unavailable("ending instances", error) from error
            if len(ids) > 1:  # one that is gone makes EC2 refuse all of them
                for id_ in ids:
                    self._terminate([id_])
            return
        now_s = self._clock()
        for id_ in ids:
            known = self._known[id_]
            instance = replace(known.instance, state=InstanceState.ENDING)
            self._known[id_] = replace(known, instance=instance, terminate_sent_s=now_s, seen_s=now_s)
            log.info("terminated", id=id_, worker=instance.slot, incarnation=instance.incarnation)


class Pacer:
    """Keeps calls apart: EC2 refuses, for everybody in the account, what comes in bursts.

    Args:
        per_s: calls per second, at most.
    """

    def __init__(
        self,
        per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gap_s = 1.0 / per_s
        self._clock = clock
        self._sleep = sleep
        self._next_s = float("-inf")

    def wait(self) -> None:
        """Return when the next call may be made."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + self._gap_s


def client_token(cluster: str, order: Order, zone_number: int = 0) -> str:
    """What tells EC2 that a request is a repetition: at most 64 ASCII characters.

    >>> client_token("digits", Order(slot=3, incarnation=2, market="spot", attempt=1))
    'digits-w3-i2-spot-a1'
    >>> client_token("digits", Order(slot=3, incarnation=2, market="spot", run="1a2b"), 1)
    'digits-w3-i2-spot-a0z1-r1a2b'
    """
    rest = f"-w{order.slot}-i{order.incarnation}-{_CAPACITY_TYPE[order.market]}-a{order.attempt}"
    rest += f"z{zone_number}" if zone_number else ""
    rest += f"-r{order.run}" if order.run else ""
    if len(cluster) + len(rest) > _TOKEN_CHARS:
        digest = hashlib.sha256(cluster.encode()).hexdigest()[:10]
        cluster = f"{cluster[: _TOKEN_CHARS - len(rest) - 11]}-{digest}"
    return cluster + rest


def connect(config: JobConfig) -> Ec2Fleet:
    """The fleet that a job file describes. Credentials, region and endpoint are found as boto3 finds them.

    Raises:
        ConfigError: another kind of fleet, or boto3 lacks what it needs to make a client.
    """
    from doll.provisioner.fleets.ec2.notices import Ec2Notices

    settings = ec2_settings(config)
    notices = None
    if settings.queue_url is not None:
        notices = Ec2Notices(aws_client("sqs", settings.region), settings.queue_url)
    return Ec2Fleet(
        aws_client("ec2", settings.region), cluster=config.cluster, job=config.job,
        launch_template=settings.launch_template,
        version=settings.launch_template_version, subnets=settings.subnets, instance_types=settings.instance_types,
        notices=notices, api_calls_per_s=settings.api_calls_per_s,
    )  # fmt: skip


def ec2_settings(config: JobConfig) -> Ec2FleetConfig:
    """The `fleet` section of a job that runs on EC2.

    Raises:
        ConfigError: it runs on another fleet.
    """
    from doll.config import Ec2FleetConfig

    if not isinstance(config.fleet, Ec2FleetConfig):
        raise ConfigError(f"fleet.kind: expected ec2, got {config.fleet.kind}")
    return config.fleet


def aws_client(service: str, region: str | None) -> Any:
    """A boto3 client with timeouts, that tries again by itself where AWS says that it may.

    Raises:
        ConfigError: no region, a profile that is not there, and the like.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.client(
            service,
            region_name=region,
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "max_attempts": 4},
                user_agent_extra="doll",
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"AWS {service}: {error}: set fleet.region, or AWS_REGION and credentials") from error


def _in_market(rule: ErrorRule, market: Market) -> ErrorRule:
    """A quota is the quota of the market that was asked, whatever its code is called."""
    if rule.scope is not Scope.MARKET:
        return rule
    return replace(rule, failure=LaunchFailure.SPOT_QUOTA if market == "spot" else LaunchFailure.ON_DEMAND_QUOTA)


def _named(order: Order) -> str:
    return f"worker {order.slot}, incarnation {order.incarnation}, {_CAPACITY_TYPE[order.market]}"


def _aws_errors() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError)


def _code_of(error: Exception) -> str:
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def _rule_of(error: Exception) -> tuple[str, ErrorRule]:
    from botocore import exceptions as aws

    code = _code_of(error)
    if isinstance(error, aws.ClientError):
        return code, rule_of_call(code, int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)))
    ours = (
        aws.NoCredentialsError,
        aws.PartialCredentialsError,
        aws.CredentialRetrievalError,
        aws.NoRegionError,
        aws.ParamValidationError,
    )
    return code, ErrorRule(LaunchFailure.CONFIG if isinstance(error, ours) else LaunchFailure.THROTTLED)


def _launch_error(what: str, error: Exception) -> LaunchError:
    code, rule = _rule_of(error)
    more = f": {advice(code)}" if rule.failure is LaunchFailure.CONFIG else ""
    return LaunchError(f"{what}: {error}{more}", failure=rule.failure, code=code)


def _unavailable(what: str, error: Exception) -> DollError:
    _, rule = _rule_of(error)
    if rule.failure is LaunchFailure.CONFIG:
        return ConfigError(f"{what}: {error}: see docs/aws.md for the permissions that are needed")
    return ServiceUnavailableError(f"EC2, {what}: {error}")


_fleet: type[Fleet] = Ec2Fleet
