"""`Fleet` on EC2: one instance per slot, launched by CreateFleet, with its identity in its tags.

There is no state on disk. DescribeInstances by tag lists the existing instances, so a provisioner can continue from
this list after any crash. An interrupted launch is identified by its tags, or repeated with the same client token.
Reference: docs/aws.md, AWS's "Ensuring idempotency in Amazon EC2 API requests" and "Eventual consistency".

This fleet never uses DeleteFleets (deleting an `instant` fleet ends its instances), StopInstances or a maximum price.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final

from doll import telemetry
from doll.config import Ec2FleetConfig, JobConfig
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.ec2.capacity import CapacityCache, Ec2Pool
from doll.provisioner.fleets.ec2.client import CallPacer, aws_client, aws_errors, code_of, unavailable
from doll.provisioner.fleets.ec2.launch import Ec2Launcher, Offers, Override
from doll.provisioner.fleets.ec2.notices import Ec2Notices
from doll.provisioner.fleets.ec2.tags import TAGS, filters_of, instances_of
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order

log = telemetry.get_logger(__name__)

_MAX_IDS_PER_CALL: Final = 100
_ORDERS_REMEMBERED: Final = 4096
LISTING_LAG_S: Final = 60.0
"""EC2's listings may lag behind its answers by seconds. For this time, the answers are valid."""
ENDED_KEPT_S: Final = 3600.0
FRESH_S: Final = 5.0
"""Time for which a listing of the cluster replaces a search for an order: a turn lists before it launches."""


@dataclass(frozen=True)
class _Known:
    """The last known state of an instance, the time of EC2's last report on it, and the time of the request to end it
    (-inf: no request)."""

    instance: Instance
    seen_s: float
    terminate_sent_s: float = float("-inf")


def _key(order: Order) -> Order:
    """Return the order without the pools to avoid, because a repeated order may avoid other pools."""
    return replace(order, avoid=frozenset())


@dataclass(eq=False, repr=False)
class Ec2Fleet:
    """The EC2 instances that have the cluster's tag; other instances are never changed.

    Args:
        cluster: value of the tag `doll:cluster`.
        job: value of the tag `doll:job`, which distinguishes jobs that use one cluster, one after the other. "": no
            tag.
        launch_template: id or name of the launch template.
        subnets, instance_types: subnets and instance types, in order of preference.
        notices: source of interruption notices. None: an interruption is seen only after it has happened.
        api_calls_per_s: maximum rate of calls that change something.
        clock, sleep: function that returns Unix seconds, and function that waits between calls.
        page_size: instances per page of a listing, 5 to 1000.

    Attributes:
        offers: instance types by subnet.
    """

    client: Any
    _: KW_ONLY
    cluster: str
    job: str = ""
    launch_template: str
    version: int
    subnets: Sequence[str]
    instance_types: Sequence[str]
    notices: Ec2Notices | None = None
    api_calls_per_s: float = 2.0
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    page_size: int = 200

    def __post_init__(self) -> None:
        self._pacer = CallPacer(self.api_calls_per_s, sleep=self.sleep)
        self.offers = Offers(self.client, self.subnets, self.instance_types)
        named = "LaunchTemplateId" if self.launch_template.startswith("lt-") else "LaunchTemplateName"
        self._launcher = Ec2Launcher(
            self.client, self.offers, cluster=self.cluster, job=self.job, pacer=self._pacer, adopt=self._adopted,
            template={named: self.launch_template, "Version": str(self.version)}, clock=self.clock,
        )  # fmt: skip
        self._known: dict[str, _Known] = {}
        self._listed_s = float("-inf")
        self._ids: dict[Order, str] = {}
        # A repeated request must be identical, even if the capacity cache has changed in between.
        self._choices: dict[Order, list[list[Override]]] = {}

    @property
    def cache(self) -> CapacityCache:
        """The pools and markets that are not requested for a while."""
        return self._launcher.cache

    def launch(self, order: Order) -> Instance:
        """Launch the order's instance. Every failure raises `LaunchError`, also if EC2 does not answer."""
        key = _key(order)
        try:
            adopted = self._adopted(order)
        except ServiceUnavailableError as error:
            raise LaunchError(str(error), failure=LaunchFailure.THROTTLED, code="Unavailable") from error
        if adopted is not None:
            self._ids[key] = adopted.id
            return adopted
        if key not in self._choices:
            self._remember(key, self._launcher.choices(order, self.clock()))
        instance = self._launcher.launch(order, self._choices[key])
        self._ids[key] = instance.id
        if instance.id not in self._known:
            self._known[instance.id] = _Known(instance, instance.launched_s)
        return instance

    def instances(self) -> Sequence[Instance]:
        listed = {instance.id: instance for instance in self._list({f"tag:{TAGS.cluster}": self.cluster})}
        now_s = self._listed_s = self.clock()
        for id_, instance in listed.items():
            self._learn(id_, instance, now_s)
        for id_, known in list(self._known.items()):
            ended = known.instance.state is InstanceState.ENDED
            if id_ not in listed and not ended and now_s - known.seen_s > LISTING_LAG_S:
                # It is not listed any more, so it has ended since the last listing, or since it was stopped.
                gone = replace(known.instance, state=InstanceState.ENDED)
                gone = gone.ended(now_s, EndReason.FAILED) if gone.ended_s is None else gone
                self._known[id_] = replace(known, instance=gone)
            ended_s = self._known[id_].instance.ended_s
            if ended_s is not None and id_ not in listed and now_s - ended_s > ENDED_KEPT_S:
                del self._known[id_]
        self._read_notices(now_s)
        return [known.instance for known in self._known.values()]

    def terminate(self, ids: Collection[str]) -> None:
        """End the instances; instances without the cluster's tag are skipped."""
        unknown = sorted(set(ids) - set(self._known))
        for start in range(0, len(unknown), _MAX_IDS_PER_CALL):
            batch = unknown[start : start + _MAX_IDS_PER_CALL]
            for instance in self._list({f"tag:{TAGS.cluster}": self.cluster, "instance-id": batch}):
                self._learn(instance.id, instance, self.clock())
        own = [id_ for id_ in ids if id_ in self._known and self._known[id_].instance.is_endable]
        if foreign := sorted(set(ids) - set(self._known)):
            log.warning("foreign_instances", ids=foreign, cluster=self.cluster)
        for start in range(0, len(own), _MAX_IDS_PER_CALL):
            self._terminate(own[start : start + _MAX_IDS_PER_CALL])

    def close(self) -> None:
        if self.notices is not None:
            self.notices.close()
        self.client.close()

    def _adopted(self, order: Order) -> Instance | None:
        """Return the instance that this order has already launched, possibly before a crash."""
        key = _key(order)
        known = self._known.get(self._ids.get(key, ""))
        now_s = self.clock()
        if known is not None and now_s - known.seen_s <= LISTING_LAG_S:
            return known.instance
        if key not in self._choices and now_s - self._listed_s <= FRESH_S:
            # The cluster was just listed, and this order was not made since: a search would show the same.
            matches = [entry.instance for entry in self._known.values() if self._is_of(entry.instance, order)]
            return min(matches, key=lambda instance: (instance.launched_s, instance.id)) if matches else None
        matches = []
        for instance in self._list(filters_of(order, cluster=self.cluster)):
            self._learn(instance.id, instance, now_s)
            # A later attempt is only made when the earlier ones got nothing, so any live instance is the order's.
            if self._is_of(self._known[instance.id].instance, order) or instance.id == self._ids.get(key):
                matches.append(self._known[instance.id].instance)
        if not matches:
            return known.instance if known is not None else None
        return min(matches, key=lambda instance: (not instance.is_alive, instance.launched_s, instance.id))

    def _is_of(self, instance: Instance, order: Order) -> bool:
        """Return whether the instance is alive and was launched by this order or an earlier attempt of it."""
        wanted = (order.slot, order.incarnation, order.market)
        same = (instance.slot, instance.incarnation, instance.market) == wanted
        return instance.is_alive and same and (not instance.job or instance.job == self.job)

    def _remember(self, key: Order, choices: list[list[Override]]) -> None:
        self._choices[key] = choices
        for orders in (self._choices, self._ids):
            while len(orders) > _ORDERS_REMEMBERED:
                del orders[next(iter(orders))]

    def _list(self, filters: Mapping[str, str | Sequence[str]]) -> list[Instance]:
        """Return the instances with these tags, in all states."""
        named = [
            {"Name": name, "Values": [value] if isinstance(value, str) else list(value)}
            for name, value in (*filters.items(), ("tag-key", TAGS.worker))
        ]
        try:
            pages = self.client.get_paginator("describe_instances").paginate(
                Filters=named, PaginationConfig={"PageSize": self.page_size}
            )
            descriptions = [item for page in pages for group in page["Reservations"] for item in group["Instances"]]
        except aws_errors() as error:
            raise unavailable("listing instances", error) from error
        return list(instances_of(descriptions, self.clock()))

    def _learn(self, id_: str, instance: Instance, now_s: float) -> None:
        """Merge EC2's listing with the known state, because it may lag, and reports the time of an end once."""
        before = self._known.get(id_)
        if before is None:
            self._known[id_] = _Known(instance, now_s)
            return
        old = before.instance
        instance = replace(instance, notice_s=old.notice_s)
        # A listing that shows it alive lags behind an end that EC2 has reported, but not behind one that was presumed.
        is_reported = old.ended_s is not None and old.ended_s - before.seen_s <= LISTING_LAG_S
        lags = now_s - before.terminate_sent_s <= LISTING_LAG_S or (
            is_reported and now_s - (old.ended_s or 0.0) <= LISTING_LAG_S and instance.launched_s == old.launched_s
        )
        if instance.is_endable and lags and not old.is_alive:
            instance = replace(instance, state=old.state, ended_s=old.ended_s, end_reason=old.end_reason)
        elif old.ended_s is not None and not instance.is_alive:
            instance = replace(instance, ended_s=old.ended_s, end_reason=old.end_reason)
        elif instance.end_reason is EndReason.INTERRUPTED:
            if instance.notice_s is not None and instance.ended_s is not None:
                instance = replace(instance, ended_s=min(instance.ended_s, max(instance.notice_s, instance.launched_s)))
            self.cache.mark_unavailable(Ec2Pool.parse(instance.pool), instance.market, now_s)
            log.info("interrupted", id=id_, worker=instance.slot, pool=instance.pool)
        elif instance.end_reason is EndReason.FAILED and before.terminate_sent_s > float("-inf"):
            instance = replace(instance, end_reason=EndReason.TERMINATED)
        self._known[id_] = replace(before, instance=instance, seen_s=now_s)

    def _read_notices(self, now_s: float) -> None:
        if self.notices is None:
            return
        own = [id_ for id_, known in self._known.items() if known.instance.is_alive]
        try:
            notices = self.notices.read(own)
        except ServiceUnavailableError as error:
            log.warning("spot_notices_unavailable", reason=str(error))  # the listing still shows an ended instance
            return
        for id_, at_s in notices.items():
            known = self._known[id_]
            if known.instance.notice_s is None:
                self._known[id_] = replace(known, instance=replace(known.instance, notice_s=at_s))
                self.cache.mark_unavailable(Ec2Pool.parse(known.instance.pool), "spot", now_s)
                log.info("notice", id=id_, worker=known.instance.slot, in_s=round(at_s - now_s))

    def _terminate(self, ids: Sequence[str]) -> None:
        self._pacer.wait()
        try:
            self.client.terminate_instances(InstanceIds=list(ids))
        except aws_errors() as error:
            if code_of(error) != "InvalidInstanceID.NotFound":
                raise unavailable("ending instances", error) from error
            if len(ids) > 1:  # one unknown id makes EC2 refuse all of them
                for id_ in ids:
                    self._terminate([id_])
            return
        now_s = self.clock()
        for id_ in ids:
            known = self._known[id_]
            instance = replace(known.instance, state=InstanceState.ENDING)
            self._known[id_] = replace(known, instance=instance, terminate_sent_s=now_s, seen_s=now_s)
            log.info("terminated", id=id_, worker=instance.slot, incarnation=instance.incarnation)


def connect(config: JobConfig) -> Ec2Fleet:
    """Return the fleet of a job file, with credentials, region and endpoint from the usual places of boto3. Raises
    ConfigError for another kind of fleet, or if boto3 cannot create a client."""
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
    """Return the fleet section of the job file. Raises ConfigError if it describes another kind of fleet."""
    if not isinstance(config.fleet, Ec2FleetConfig):
        raise ConfigError(f"fleet.kind: expected ec2, got {config.fleet.kind}")
    return config.fleet
