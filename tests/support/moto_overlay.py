"""moto's EC2 with what it lacks: a spot market, capacity, client tokens that count, notices and interruptions, time.

moto has instances, tags, templates, subnets, queues and events; this replaces its CreateFleet, spot price history and
listing by ones that behave as AWS documents them, on a clock that a test moves. Nothing in `doll` knows of it.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import boto3
from botocore.config import Config
from moto import mock_aws
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.amis import AmiBackend
from moto.ec2.models.instances import Instance, InstanceState, StateReason
from moto.ec2.responses.fleets import Fleets
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.responses.spot_instances import SpotInstances

REGION = "us-east-1"
NOTICE_S = 120.0
FORGOTTEN_S = 3600.0
PoolKey = tuple[str, str]  # instance type, zone


@functools.cache
def client(service: str) -> Any:
    """One for all tests: to make one takes longer than most of them. It does not try again by itself."""
    return boto3.client(
        service,
        REGION,
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=Config(retries={"max_attempts": 0}),
    )


class MotoMarket:
    """What the test decides about the market, and what the market has seen.

    Attributes:
        prices: spot price changes (Unix seconds, USD per hour) of each pool, in order.
        capacity: machines left, by pool and "spot" or "on-demand"; a pool that is not in it has any number.
        error_codes: error code instead of capacity, by pool and capacity type.
        api_errors: codes with which the next CreateFleet calls fail.
        lost_answers: so many next CreateFleet calls launch, and answer with an error.
        queue_url: where the events of EC2 go.
        boot_s, lag_s: how long an instance is pending; how long a listing does not show it.
        scores: spot placement score of each zone id; None: the account may not ask.
        score_requests: parameters of each question for them.
        requests: parameters of each CreateFleet call, whatever came of it.
        terminated: ids that TerminateInstances was called with, in order.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.prices: dict[PoolKey, list[tuple[float, float]]] = {}
        self.capacity: dict[tuple[PoolKey, str], int] = {}
        self.error_codes: dict[tuple[PoolKey, str], str] = {}
        self.api_errors: deque[str] = deque()
        self.lost_answers = 0
        self.queue_url = ""
        self.boot_s = self.lag_s = 0.0
        self.scores: dict[str, int] | None = {}
        self.score_requests: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.terminated: list[str] = []
        self._answers: dict[str, tuple[str, dict[str, Any]]] = {}
        self._taken_at_s: dict[str, float] = {}
        self._ended_at_s: dict[str, float] = {}
        self._launched_at_s: dict[str, float] = {}

    # --- what a test does -------------------------------------------------------------------------------------------

    def interrupt(self, id_: str, notice_s: float = NOTICE_S, *, announced: bool = True) -> float:
        """EC2 wants the instance back: the event goes out now, the instance goes `notice_s` later."""
        at_s = self._taken_at_s[id_] = self.clock() + notice_s
        if announced:
            self.event("EC2 Spot Instance Interruption Warning", id_, at_s - NOTICE_S)
        return at_s

    def event(self, kind: str, id_: str, time_s: float) -> None:
        """An event of EC2, as EventBridge's rule puts it into the queue."""
        at = datetime.fromtimestamp(time_s, UTC)
        body = {
            "version": "0", "id": "00000000-0000-0000-0000-000000000000", "detail-type": kind, "source": "aws.ec2",
            "account": "123456789012", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}", "region": REGION,
            "resources": [f"arn:aws:ec2:{REGION}a:instance/{id_}"],
            "detail": {"instance-id": id_, "instance-action": "terminate"},
        }  # fmt: skip
        client("sqs").send_message(QueueUrl=self.queue_url, MessageBody=json.dumps(body))

    def expire_visibility_timeout(self) -> None:
        """Let the time pass for which messages that were read and not deleted stay hidden."""
        from moto.sqs.models import sqs_backends

        for queue in sqs_backends["123456789012"][REGION].queues.values():
            for message in queue._messages:
                message.visible_at = 0.0

    def shut_down_from_inside(self, id_: str) -> None:
        """The machine shuts down from inside."""
        self._end(_instance(id_), "Client.InstanceInitiatedShutdown", "User initiated")

    def stop(self, id_: str) -> None:
        """A person stops it in the console; its volume stays, and is paid for."""
        instance, code = _instance(id_), "Client.UserInitiatedShutdown"
        instance._state, instance.state_reason = InstanceState("stopped", 80), StateReason(f"{code}: stopped", code)
        instance._reason = f"User initiated ({datetime.fromtimestamp(self.clock(), UTC):%Y-%m-%d %H:%M:%S} GMT)"

    def start(self, id_: str) -> None:
        """A person starts a stopped one, which launches it again."""
        instance = _instance(id_)
        instance._state, instance.state_reason, instance._reason = InstanceState("running", 16), StateReason("", ""), ""
        instance.launch_time = datetime.fromtimestamp(self.clock(), UTC).replace(tzinfo=None)

    def forget_ended(self) -> None:
        """An hour goes by: what has ended is listed no longer. Client tokens are remembered for a day."""
        reservations = _backend().reservations
        for id_, reservation in list(reservations.items()):
            if all(instance._state.name == "terminated" for instance in reservation.instances):
                del reservations[id_]

    # --- AWS's side -------------------------------------------------------------------------------------------------

    def apply_due_events(self) -> None:
        """Let happen what is due by now."""
        now_s = self.clock()
        backend = _backend()
        for reservation in list(backend.reservations.values()):
            for instance in reservation.instances:
                launched_s = self._launched_at_s.get(instance.id, 0.0)
                if instance._state.name == "pending" and now_s >= launched_s + self.boot_s:
                    instance._state = InstanceState("running", 16)
                if (
                    instance.id in self._taken_at_s
                    and now_s >= self._taken_at_s[instance.id]
                    and instance._state.name == "running"
                ):
                    self._end(instance, "Server.SpotInstanceTermination", "Server.SpotInstanceTermination")
            if all(
                now_s - self._ended_at_s.get(instance.id, now_s) > FORGOTTEN_S for instance in reservation.instances
            ):
                del backend.reservations[reservation.id]

    def _end(self, instance: Instance, code: str, reason: str) -> None:
        if instance._state.name != "terminated":
            _TERMINATE(instance)
            at = datetime.fromtimestamp(self.clock(), UTC)
            self._ended_at_s[instance.id] = self.clock()
            instance.state_reason = StateReason(f"{code}: ended", code)
            instance._reason = reason if code.startswith("Server") else f"{reason} ({at:%Y-%m-%d %H:%M:%S} GMT)"

    def create_fleet(self, response: Any) -> ActionResult:
        param = response._get_param
        request = {
            key: param(key)
            for key in ("Type", "LaunchTemplateConfigs", "TargetCapacitySpecification", "TagSpecifications",
                        "SpotOptions", "OnDemandOptions")
        }  # fmt: skip
        token = param("ClientToken")
        self.requests.append({**request, "ClientToken": token})
        if self.api_errors:
            raise EC2ClientError(self.api_errors.popleft(), "failure of the test")
        same = json.dumps(request, sort_keys=True, default=str)
        if token in self._answers:
            if self._answers[token][0] != same:
                raise EC2ClientError("IdempotentParameterMismatch", "the token was used with other parameters")
            return ActionResult(self._answers[token][1])
        answer = self._bought(response, request)
        self._answers[token] = (same, answer)
        if self.lost_answers:
            self.lost_answers -= 1
            raise EC2ClientError("InternalError", "told to lose the answer")
        return ActionResult(answer)

    def _bought(self, response: Any, request: dict[str, Any]) -> dict[str, Any]:
        (config,) = request["LaunchTemplateConfigs"]
        kind = request["TargetCapacitySpecification"]["DefaultTargetCapacityType"]
        errors: list[dict[str, Any]] = []
        zone_of = {
            id_: subnet.availability_zone for zone in _backend().subnets.values() for id_, subnet in zone.items()
        }
        choices = [
            ((override["InstanceType"], zone_of[override["SubnetId"]]), override) for override in config["Overrides"]
        ]
        for pool, override in sorted(choices, key=lambda choice: self._price(choice[0])):
            code = self.error_codes.get((pool, kind))
            if code is None and self.capacity.get((pool, kind), 1) > 0:
                if (pool, kind) in self.capacity:
                    self.capacity[pool, kind] -= 1
                return {**self._launched(response, request, config, override), "Errors": errors}
            errors.append({
                "ErrorCode": code or "InsufficientInstanceCapacity",
                "ErrorMessage": f"told so: {pool}",
                "Lifecycle": kind,
                "LaunchTemplateAndOverrides": {"Overrides": override},
            })  # fmt: skip
        return {"FleetId": "fleet-00000000-0000-0000-0000-000000000000", "Instances": [], "Errors": errors}

    def _launched(self, response: Any, request: dict[str, Any], config: Any, override: Any) -> dict[str, Any]:
        fleet = response.ec2_backend.create_fleet(
            on_demand_options=request["OnDemandOptions"] or {}, spot_options=request["SpotOptions"] or {},
            target_capacity_specification=request["TargetCapacitySpecification"],
            launch_template_configs=[{**config, "Overrides": [override]}], excess_capacity_termination_policy="",
            replace_unhealthy_instances=False, terminate_instances_with_expiration=False, fleet_type=request["Type"],
            valid_from=None, valid_until=None, tag_specifications=request["TagSpecifications"],
        )  # fmt: skip
        for got in fleet.instances:
            instance = _instance(got["InstanceIds"][0])
            self._launched_at_s[instance.id] = self.clock()
            instance.launch_time = datetime.fromtimestamp(self.clock(), UTC).replace(tzinfo=None)
            instance._state = InstanceState("pending", 0)
        return {"FleetId": fleet.id, "Instances": fleet.instances}

    def _price(self, pool: PoolKey) -> float:
        changes = [usd for at_s, usd in self.prices.get(pool, ()) if at_s <= self.clock()]
        return changes[-1] if changes else 1.0

    def describe_instances(self, response: Any, original: Callable[[Any], ActionResult]) -> ActionResult:
        self.apply_due_events()
        result = original(response)
        shown = [
            group
            for group in result._result["Reservations"]
            if all(
                self.clock() - self._launched_at_s.get(instance.id, 0.0) >= self.lag_s for instance in group.instances
            )
        ]
        # moto serializes 140 members of an instance, half a second of processor for 64: left out is what nobody reads.
        lean = [
            {"ReservationId": group.id, "Instances": [_lean(instance) for instance in group.instances]}
            for group in shown
        ]
        return ActionResult({**result._result, "Reservations": lean})

    def describe_spot_price_history(self, response: Any) -> ActionResult:
        filters, param = response._filters_from_querystring(), response._get_param
        start_s, end_s = (param(key).replace(tzinfo=UTC).timestamp() for key in ("StartTime", "EndTime"))
        rows = []
        for (type_, zone), changes in self.prices.items():
            if type_ in param("InstanceTypes", []) and zone in filters["availability-zone"]:
                before = [change for change in changes if change[0] <= start_s][-1:]
                inside = [change for change in changes if start_s < change[0] <= end_s]
                rows += [(at_s, type_, zone, usd) for at_s, usd in (*before, *inside)]
        rows.sort(reverse=True)
        first, size = int(param("NextToken") or 0), int(param("MaxResults") or 1000)
        history = [
            {"InstanceType": type_, "AvailabilityZone": zone, "ProductDescription": "Linux/UNIX (Amazon VPC)",
             "SpotPrice": f"{usd:.6f}", "Timestamp": datetime.fromtimestamp(at_s, UTC)}
            for at_s, type_, zone, usd in rows[first : first + size]
        ]  # fmt: skip
        more = str(first + size) if first + size < len(rows) else ""
        return ActionResult({"SpotPriceHistory": history, "NextToken": more})

    def get_spot_placement_scores(self, response: Any) -> ActionResult:
        asked = ("InstanceTypes", "TargetCapacity", "TargetCapacityUnitType", "SingleAvailabilityZone", "RegionNames")
        self.score_requests.append({name: response._get_param(name) for name in asked})
        if self.scores is None:
            raise EC2ClientError("UnauthorizedOperation", "You are not authorized to perform this operation.")
        scores = [{"Region": REGION, "AvailabilityZoneId": id_, "Score": score} for id_, score in self.scores.items()]
        return ActionResult({"SpotPlacementScores": scores})


_TERMINATE = Instance.terminate
_ONE_AT_A_TIME = threading.RLock()


def _lean(instance: Instance) -> dict[str, Any]:
    """The members of DescribeInstances that identity, market, place, life and end are told by."""
    lifecycle = {"InstanceLifecycle": instance.lifecycle} if instance.lifecycle == "spot" else {}
    reason = {"StateReason": {"Code": instance.state_reason.code, "Message": instance.state_reason.message}}
    return {
        "InstanceId": instance.id,
        "ImageId": instance.image_id,
        "InstanceType": instance.instance_type,
        "LaunchTime": instance.launch_time,
        "SubnetId": instance.subnet_id,
        "Placement": {"AvailabilityZone": instance.placement.availability_zone},
        "State": {"Name": instance._state.name, "Code": instance._state.code},
        "StateTransitionReason": instance._reason,
        "Tags": [{"Key": tag["key"], "Value": tag["value"]} for tag in instance.get_tags()],
        **(reason if instance.state_reason.code else {}),
        **lifecycle,
    }


def _backend() -> Any:
    from moto.ec2.models import ec2_backends

    return ec2_backends["123456789012"][REGION]


def _instance(id_: str) -> Instance:
    instance: Instance = _backend().get_instance(id_)
    return instance


@contextmanager
def moto_market(clock: Callable[[], float]) -> Iterator[MotoMarket]:
    """AWS in this process until the end of the block, empty at its start."""
    market = MotoMarket(clock)
    listing = InstanceResponse.describe_instances

    def terminate(instance: Instance) -> Any:
        before = InstanceState(instance._state.name, instance._state.code)
        market.terminated.append(instance.id)
        market._end(instance, "Client.UserInitiatedShutdown", "User initiated")
        return before

    with (
        mock_aws(),
        mock.patch.dict(
            "os.environ", AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_DEFAULT_REGION=REGION
        ),
        mock.patch.object(Fleets, "create_fleet", _bound(market.create_fleet)),
        mock.patch.object(InstanceResponse, "describe_instances", _bound(market.describe_instances, listing)),
        mock.patch.object(SpotInstances, "describe_spot_price_history", _bound(market.describe_spot_price_history)),
        mock.patch.object(
            SpotInstances, "get_spot_placement_scores", _bound(market.get_spot_placement_scores), create=True
        ),
        mock.patch.object(Instance, "terminate", terminate),
        # 1300 public images for each test, and no test needs one: moto launches any.
        mock.patch.object(AmiBackend, "_load_amis", return_value=None),
    ):
        yield market


def _bound(function: Callable[..., Any], *more: Any) -> Callable[[Any], Any]:
    """As a method of moto's; one call at a time, as a server has many threads and moto's models know of none."""

    def call(response: Any) -> Any:
        with _ONE_AT_A_TIME:
            return function(response, *more)

    return call
