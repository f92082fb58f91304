"""`Fleet` of function invocations on AWS Lambda: each one has a time limit, before which its successor starts.

An asynchronous invocation has no state that its owner shows, no name and no end that can be requested. So orders and
states are records in the job's Redis (`doll.storage.invocations`), which the invocation itself renews
(`doll.run.function`). The time limit is a notice that is known at the launch: it is shown when it is time to launch the
successor, which takes the place when it is warm. Reference: AWS Lambda Developer Guide, "Invoking a function
asynchronously", and API reference, "Invoke".
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final

import redis

from doll import telemetry
from doll.config import JobConfig, LambdaFleetConfig
from doll.config.loader import dump
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.aws_lambda.account import check_function, lead_s
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors, code_of, rule_of
from doll.provisioner.fleets.orders import LaunchGate, order_name
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market
from doll.records.bounded import short
from doll.services import resolve
from doll.storage.invocations import LOST_AFTER_S, Invocation, Invocations
from doll.storage.redis_client import connect_redis

log = telemetry.get_logger(__name__)

POOL: Final = "function/lambda"
ENDED_KEPT_S: Final = 3600.0
MAX_EVENT_BYTES: Final = 256 * 1024
"""AWS's limit of an asynchronous event when this was written first; accounts may allow 1 MB."""
_UNSEEN_S: Final = 10 * LOST_AFTER_S
_STARTS_KEPT: Final = 20
_SLOWER: Final = 1.5  # a start may take longer than those that were measured
_REASONS: Final = {
    "asked": EndReason.TERMINATED, "finished": EndReason.TERMINATED, "successor": EndReason.LIMIT,
    "limit": EndReason.LIMIT, "not started": EndReason.TERMINATED,  # for lack of capacity: no failure of the slot
}  # fmt: skip
_FAILURES: Final = {
    "ResourceNotFoundException": (LaunchFailure.CONFIG, "correct fleet.function or fleet.region"),
    "AccessDeniedException": (LaunchFailure.CONFIG, "allow lambda:InvokeFunction to the provisioner"),
    "InvalidParameterValueException": (LaunchFailure.CONFIG, "correct the function"),
    "RequestTooLargeException": (LaunchFailure.CONFIG, "make the job file smaller"),
    "KMSAccessDeniedException": (LaunchFailure.CONFIG, "allow the function's role to use its key"),
    "ResourceConflictException": (LaunchFailure.THROTTLED, "the function is being changed"),
    "ResourceNotReadyException": (LaunchFailure.THROTTLED, "the function is being changed"),
    "ServiceException": (LaunchFailure.THROTTLED, "AWS has a problem"),
    "TooManyRequestsException": (LaunchFailure.THROTTLED, "too many calls"),
    "ENILimitReachedException": (LaunchFailure.CAPACITY, "the VPC of the function has no network interface left"),
    "SubnetIPAddressLimitReachedException": (LaunchFailure.CAPACITY, "the function's subnets have no address left"),
}
"""The meaning of a refused Invoke: AWS's code, the required reaction, and what to do."""


@dataclass(eq=False, repr=False)
class LambdaFleet:
    """The invocations for one job in one cluster.

    Args:
        client: boto3 client of Lambda, which does not repeat calls by itself.
        invocations: records of the job's invocations.
        job_text: job file without `base_folder`, which each event contains.
        lead_s: seconds for which a successor has to exist before its predecessor must leave, in addition to its
            start: the provisioner's interval, and the time in which the predecessor drains.
        clock: function that returns Unix seconds.
    """

    client: Any
    invocations: Invocations
    settings: LambdaFleetConfig
    _: KW_ONLY
    cluster: str
    job: str = ""
    job_text: str = ""
    lead_s: float = 10.0
    clock: Callable[[], float] = time.time
    close_records: Callable[[], None] = lambda: None
    _starts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STARTS_KEPT), init=False)
    _measured: set[str] = field(default_factory=set, init=False)
    _failed: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        remedy = "correct the image of the function; its log in CloudWatch shows more"
        self._gate = LaunchGate(POOL, remedy, self.clock)

    @property
    def handover_s(self) -> float:
        """The time before the limit of an invocation at which its successor is launched. At most half of the limit."""
        start_s = _SLOWER * max(self._starts_s) if self._starts_s else self.settings.start_s
        return min(start_s + self.lead_s, self.settings.timeout_s / 2)

    def launch(self, order: Order) -> Instance:
        """Invoke the function for the order. Every failure raises `LaunchError`. There is one pool, which an order
        cannot avoid: the gate says how long it is closed."""
        name, now_s = order_name(order, self.cluster), self.clock()
        try:
            before = self.invocations.get(name)
            if before is not None and (before.invoked_s is not None or before.started_s is not None):
                return self._instance(before, now_s)
            self._gate.check(order, name)
            launched_s = now_s if before is None else before.launched_s
            identity = {"slot": order.slot, "incarnation": order.incarnation, "market": order.market}
            self.invocations.order(name, {**identity, "launched_s": launched_s})
            # Where the answer is lost, the order may be claimed later. It is repeated, or becomes an instance then.
            self._invoke(name, order)
            self.invocations.mark(name, invoked_s=now_s)
        except redis.RedisError as error:
            raise LaunchError(f"{name}: {_no_redis(error)}", failure=LaunchFailure.THROTTLED, code="Redis") from error
        log.info("launched", id=name, worker=order.slot, incarnation=order.incarnation)
        made = Invocation(name=name, launched_s=launched_s, invoked_s=now_s, **identity)  # type: ignore[arg-type]
        return self._instance(made, now_s)

    def instances(self) -> Sequence[Instance]:
        """Return the instances. Invocations that are silent, or did not start in time, are ended in the records."""
        try:
            now_s, listed = self.clock(), list[Instance]()
            for each in self.invocations.all():
                each = self._settled(each, now_s)
                if each.ended_s is not None and now_s - each.ended_s > ENDED_KEPT_S:
                    self.invocations.forget(each.name)
                elif each.invoked_s is not None or each.started_s is not None:
                    self._learn(each)
                    listed.append(self._instance(each, now_s))
        except redis.RedisError as error:
            raise ServiceUnavailableError(_no_redis(error)) from error
        return listed

    def terminate(self, ids: Collection[str]) -> None:
        """Ask the invocations to leave; they see it within a second. One that has not started ends at once."""
        try:
            for id_ in ids:
                each = self.invocations.get(id_)
                if each is None or each.ended_s is not None:
                    continue
                if each.started_s is None:
                    self.invocations.end(id_, self.clock(), "asked")
                elif each.asked_s is None:
                    self.invocations.mark(id_, asked_s=self.clock())
        except redis.RedisError as error:
            raise ServiceUnavailableError(_no_redis(error)) from error

    def close(self) -> None:
        self.client.close()
        self.close_records()

    def _invoke(self, name: str, order: Order) -> None:
        event = {
            "name": name, "slot": order.slot, "incarnation": order.incarnation, "market": order.market,
            "job": self.job_text, "base_folder": self.settings.folder,
        }  # fmt: skip
        payload = json.dumps(event).encode()
        try:
            if len(payload) > MAX_EVENT_BYTES:
                raise LaunchError(
                    f"{name}: expected a job file of at most {MAX_EVENT_BYTES} bytes for an event, got {len(payload)}",
                    failure=LaunchFailure.CONFIG,
                )
            self.client.invoke(FunctionName=self.settings.function, InvocationType="Event", Payload=payload)
        except LaunchError:
            self.invocations.forget(name)
            raise
        except aws_errors() as error:
            refused = _launch_error(name, error, order.market)
            if hasattr(error, "response"):  # otherwise the invocation may exist
                self.invocations.forget(name)
            raise refused from error

    def _settled(self, each: Invocation, now_s: float) -> Invocation:
        """Return the invocation with its end, if it is silent, or did not start."""
        if each.ended_s is not None:
            return each
        cause = ""
        if each.started_s is None:
            if each.invoked_s is not None and now_s - each.invoked_s > self.settings.start_timeout_s:
                at_s, cause = now_s, "not started"
                trouble = f"it has not started within {self.settings.start_timeout_s:g} s: is the concurrency used up?"
                self._gate.found_no_node("spot" if each.market == "spot" else "on_demand", trouble)
        elif not each.runs(now_s):
            at_s, cause = each.seen_s or each.started_s, "lost"
            trouble = f"it has not renewed its record for {LOST_AFTER_S:g} s"
            if now_s - at_s > _UNSEEN_S:  # e.g. Redis was away: it may have worked and cost until now, or its limit
                at_s = min(now_s, each.limit_s or now_s)
            if each.asked_s is not None:
                cause = "asked"
            elif each.limit_s is not None and at_s + LOST_AFTER_S >= each.limit_s:
                cause, trouble = "limit", "it was ended at its limit, before its worker had left"
        if not cause:
            return each
        if not self.invocations.end(each.name, at_s, cause, trouble):
            return self.invocations.get(each.name) or each  # it has said a last word just now
        log.warning("invocation_ended", id=each.name, worker=each.slot, cause=cause, reason=trouble)
        return replace(each, ended_s=at_s, cause=cause, trouble=trouble)

    def _learn(self, each: Invocation) -> None:
        """Measure the start of an invocation, and remember whether invocations of this image start."""
        if each.warm_s is not None and each.name not in self._measured:
            self._measured.add(each.name)
            self._starts_s.append(max(0.0, each.warm_s - each.launched_s))
            self._gate.started()
        if (
            each.ended_s is not None
            and each.cause == "failed"
            and each.warm_s is None
            and each.name not in self._failed
        ):
            self._failed.add(each.name)
            if self.clock() - each.ended_s < ENDED_KEPT_S:
                self._gate.start_failed(each.trouble)

    def _instance(self, each: Invocation, now_s: float) -> Instance:
        market: Market = "spot" if each.market == "spot" else "on_demand"
        instance = Instance(
            id=each.name, slot=each.slot, incarnation=each.incarnation, market=market, pool=POOL, job=self.job,
            state=InstanceState.PENDING if each.started_s is None else InstanceState.RUNNING,
            launched_s=each.launched_s, trouble=each.trouble, is_limited=True,
            costs_from_s=each.started_s if each.started_s is not None else each.ended_s or now_s,
        )  # fmt: skip
        if each.ended_s is not None:
            return instance.ended(each.ended_s, _REASONS.get(each.cause, EndReason.FAILED))
        if each.asked_s is not None:
            return replace(instance, state=InstanceState.ENDING)
        if each.limit_s is not None and now_s >= each.limit_s - self.handover_s:
            return replace(instance, notice_s=each.limit_s)
        return instance


def connect(config: JobConfig) -> LambdaFleet:
    """Return the fleet of a job file, with credentials from the usual places of boto3.

    Raises:
        ConfigError: the fleet is of another kind, or the function does not fit the job file.
        ServiceUnavailableError: AWS does not answer.
    """
    settings = config.fleet
    if not isinstance(settings, LambdaFleetConfig):
        raise ConfigError(f"fleet.kind: expected lambda, got {settings.kind}")
    client = aws_client("lambda", settings.region)
    check_function(client, config, settings)
    records = connect_redis(resolve(config))
    return LambdaFleet(
        client, Invocations(records, config.job, config.cluster), settings, cluster=config.cluster, job=config.job,
        job_text=dump(config), lead_s=lead_s(config), close_records=records.close,
    )  # fmt: skip


def _launch_error(name: str, error: Exception, market: Market) -> LaunchError:
    code, reason = code_of(error), str(getattr(error, "response", {}).get("Reason", ""))
    if "ConcurrentInvocationLimit" in reason or "ConcurrentExecution" in reason:
        quota = LaunchFailure.SPOT_QUOTA if market == "spot" else LaunchFailure.ON_DEMAND_QUOTA
        return LaunchError(
            f"{name}: the concurrency of the function is used up ({reason}): raise its reserved concurrency or the "
            "account's quota, or have fewer workers",
            failure=quota, code=reason,
        )  # fmt: skip
    if code in _FAILURES:
        failure, remedy = _FAILURES[code]
        pools = [POOL] if failure is LaunchFailure.CAPACITY else []
        return LaunchError(f"{name}: {short(error)}: {remedy}", failure=failure, code=code, pools=pools)
    return LaunchError(f"{name}: {short(error)}", failure=rule_of(error)[1].failure, code=code)


def _no_redis(error: redis.RedisError) -> str:
    return f"the job's Redis, which has the records of invocations, does not answer: {short(error)}"
