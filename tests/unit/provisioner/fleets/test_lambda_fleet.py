"""Functions with a time limit: when a successor is wanted, how an invocation has ended, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from doll.config import JobConfig, LambdaFleetConfig
from doll.config.loader import parse
from doll.errors import ConfigError
from doll.provisioner.billing import AWS_LAMBDA, bill
from doll.provisioner.fleets.aws_lambda import account
from doll.provisioner.fleets.aws_lambda.account import ask_function, check_function
from doll.provisioner.fleets.aws_lambda.fleet import MAX_EVENT_BYTES, LambdaFleet, connect
from doll.provisioner.fleets.port import EndReason, Instance, InstanceState, LaunchFailure, Order
from doll.provisioner.instances import InstanceTracker
from doll.provisioner.launch_state import LaunchLimits, LaunchState
from doll.provisioner.prices.port import StatedPrices
from doll.run.function import handle
from doll.services import REDIS_ENV
from fleet_rigs import LambdaRig, functions, refused

pytestmark = pytest.mark.slow

LIMIT_S = 300
ORDER = Order(0, 1, "on_demand")


@pytest.fixture
def rig() -> Iterator[LambdaRig]:
    with functions(timeout_s=LIMIT_S, start_s=40) as made:
        made.lives_s = LIMIT_S
        yield made


def only(rig: LambdaRig, id_: str) -> Instance:
    return next(each for each in rig.fleet.instances() if each.id == id_)


def test_a_limit_is_a_notice_and_no_interruption(rig: LambdaRig) -> None:
    """A successor is wanted when its start and the drain still fit; who then hands on has ended by its limit."""
    first = rig.fleet.launch(ORDER)
    started_s = rig.clock()
    rig.advance(30)
    assert only(rig, first.id).notice_s is None
    assert isinstance(rig.fleet, LambdaFleet)
    rig.advance(LIMIT_S - rig.fleet.handover_s - 35)
    assert only(rig, first.id).notice_s is None
    rig.advance(6)
    noticed = only(rig, first.id)
    assert noticed.notice_s == started_s + LIMIT_S
    tracker, launch_state = InstanceTracker(1), LaunchState(1, LaunchLimits())
    assert not tracker.record(noticed, launch_state, rig.clock(), server_runs=True)
    second = rig.fleet.launch(Order(0, 2, "on_demand"))
    rig.advance(5)
    ended = only(rig, first.id)
    assert (ended.state, ended.end_reason) == (InstanceState.ENDED, EndReason.LIMIT)
    assert not tracker.record(ended, launch_state, rig.clock(), server_runs=True)
    assert (tracker.interruptions, launch_state.slots[0].failures) == (0, 0)
    assert only(rig, second.id).is_alive


def test_measured_starts_replace_the_planned_one(rig: LambdaRig) -> None:
    fleet = rig.fleet
    assert isinstance(fleet, LambdaFleet)
    assert fleet.handover_s == 40 + fleet.lead_s
    fleet.launch(ORDER)
    rig.starving = True
    rig.advance(60)
    rig.starving = False
    rig.advance(0)
    fleet.instances()
    assert fleet.handover_s == pytest.approx(1.5 * 60 + fleet.lead_s)


def test_an_invocation_without_a_last_word(rig: LambdaRig) -> None:
    """It was lost, and cost until its last renewal; at its limit its owner has ended it."""
    lost, late = rig.fleet.launch(ORDER), rig.fleet.launch(Order(1, 1, "on_demand"))
    rig.advance(60)
    rig.fall_silent(lost.id)
    seen_s = rig.clock()
    rig.advance(60)
    ended = only(rig, lost.id)
    assert (ended.end_reason, ended.ended_s) == (EndReason.FAILED, seen_s)
    rig.advance(LIMIT_S - 125)
    rig.fall_silent(late.id)
    rig.advance(60)
    assert only(rig, late.id).end_reason is EndReason.LIMIT


def test_the_bill_has_milliseconds_and_memory(rig: LambdaRig) -> None:
    made = rig.fleet.launch(ORDER)
    rig.advance(60)
    rig.fleet.terminate([made.id])
    rig.advance(30.0004)
    ended = only(rig, made.id)
    usd_per_h = LambdaFleetConfig(kind="lambda", function="f", memory_mb=2048).usd_per_h
    assert usd_per_h == pytest.approx(2 * 1.66667e-5 * 3600, rel=1e-5)
    (line,) = bill([ended], StatedPrices(usd_per_h, usd_per_h).series, AWS_LAMBDA, rig.clock()).lines
    ran_s = ended.ended_s - ended.costs_from_s  # type: ignore[operator]
    assert 0 <= line.billed_s - ran_s < 0.001
    assert line.usd == pytest.approx(line.billed_s * 2 * 1.66667e-5, rel=1e-4)


def test_an_image_that_does_not_start_is_not_tried_again_at_once(rig: LambdaRig) -> None:
    made = rig.fleet.launch(ORDER)
    rig.wire().end(made.id, rig.clock(), "failed", "ModuleNotFoundError: no module named task")
    rig.fleet.instances()
    error = refused(rig.fleet, Order(1, 1, "on_demand"))
    assert error.failure is LaunchFailure.REFUSED
    assert "no module named task" in str(error)


def test_a_job_file_above_the_limit_of_an_event(rig: LambdaRig) -> None:
    fleet = rig.fleet
    assert isinstance(fleet, LambdaFleet)
    fleet.job_text = "x" * MAX_EVENT_BYTES
    error = refused(fleet, ORDER)
    assert error.failure is LaunchFailure.CONFIG
    assert str(MAX_EVENT_BYTES) in str(error)
    assert list(fleet.instances()) == []


# --- the handler


CONTEXT = SimpleNamespace(get_remaining_time_in_millis=lambda: 60_000)


def test_an_event_that_nobody_meant_is_refused_in_one_line() -> None:
    events: list[Any] = [None, [], {}, {"name": 3}, {"name": "a", "slot": True}]
    for event in events:
        answer = handle(event, CONTEXT)
        assert answer["cause"] == "refused"
        assert "expected" in answer["trouble"]
        assert "\n" not in answer["trouble"]


def test_an_event_that_comes_twice_or_too_late_does_no_work(rig: LambdaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_ENV, f"redis://127.0.0.1:{rig.redis.connection_pool.connection_kwargs['port']}/0")
    monkeypatch.setenv("DOLL_KAFKA", "127.0.0.1:1")
    job = "job: digits\ntask: {class: 'a:B'}\nfleet: {kind: lambda, function: f, cluster: digits}\n"
    made = rig.fleet.launch(ORDER)
    event: dict[str, Any] = {**rig.events[0], "job": job}
    event.pop("records")
    rig.fleet.terminate([made.id])
    assert handle(event, CONTEXT)["cause"] == "asked"
    assert handle(event, CONTEXT)["cause"] == "duplicate"


# --- what is refused at the start


def config(workers: int = 2, **fleet: Any) -> JobConfig:
    job = parse("job: digits\ntask: {class: 'a:B'}\nprovision: {every_s: 5}\n", [f"data.workers={workers}"])
    return job.model_copy(update={"fleet": LambdaFleetConfig(kind="lambda", function="doll", **fleet)})


class Owner:
    """AWS's answers on one function and one image."""

    def __init__(self, **changes: Any) -> None:
        self.function = {"State": "Active", "MemorySize": 1769, "Timeout": 900, **changes}
        self.concurrency: int | None = None
        self.image_bytes = 3 * 1024**3
        self.denied: tuple[str, ...] = ()

    def _refuse(self, action: str) -> None:
        if action in self.denied:
            answer = {"Error": {"Code": "AccessDeniedException", "Message": f"not authorized to perform: {action}"}}
            raise ClientError(answer, action.partition(":")[2])

    def invoke(self, *, InvocationType: str, **_: Any) -> Any:
        assert InvocationType == "DryRun"
        self._refuse("lambda:InvokeFunction")

    def get_function(self, FunctionName: str) -> Any:
        self._refuse("lambda:GetFunction")
        if FunctionName != "doll":
            answer = {"Error": {"Code": "ResourceNotFoundException", "Message": f"Function not found: {FunctionName}"}}
            raise ClientError(answer, "GetFunction")
        image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll:v1"
        return {"Configuration": self.function, "Code": {"ImageUri": image}}

    def get_function_concurrency(self, **_: Any) -> Any:
        self._refuse("lambda:GetFunctionConcurrency")
        return {} if self.concurrency is None else {"ReservedConcurrentExecutions": self.concurrency}

    def get_account_settings(self) -> Any:
        self._refuse("lambda:GetAccountSettings")
        return {"AccountLimit": {"UnreservedConcurrentExecutions": 10}}

    def describe_images(self, **_: Any) -> Any:
        self._refuse("ecr:DescribeImages")
        return {"imageDetails": [{"imageSizeInBytes": self.image_bytes}]}

    def close(self) -> None:
        pass


def check(owner: Owner, job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "aws_client", lambda *_: owner)
    assert isinstance(job.fleet, LambdaFleetConfig)
    check_function(owner, job, job.fleet)


def refusal(owner: Owner, job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(ConfigError) as caught:
        check(owner, job, monkeypatch)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_function_that_does_not_fit_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Owner(), config(), monkeypatch)
    assert "fleet.memory_mb: expected 1769" in refusal(Owner(), config(memory_mb=512), monkeypatch)
    assert "fleet.timeout_s: expected 60" in refusal(Owner(Timeout=60), config(), monkeypatch)
    failed = Owner(State="Failed", StateReason="The image is not valid")
    assert "expected state Active, got Failed: The image is not valid" in refusal(failed, config(), monkeypatch)
    assert "correct fleet.function" in refusal(Owner(), config().model_copy(
        update={"fleet": LambdaFleetConfig(kind="lambda", function="other")}
    ), monkeypatch)  # fmt: skip


def test_an_image_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    owner.image_bytes = 11 * 1024**3
    assert "at most 10 GiB, got doll:v1 with 11.0 GiB" in refusal(owner, config(), monkeypatch)


def test_a_quota_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    assert "the account's unreserved concurrency: expected more than the 10 workers" in refusal(
        owner, config(workers=10), monkeypatch
    )
    owner.concurrency = 2
    assert "the reserved concurrency of function doll: expected more than the 2 workers" in refusal(
        owner, config(), monkeypatch
    )
    owner.concurrency = 3
    check(owner, config(), monkeypatch)


RIGHTS = ("lambda:GetFunction", "lambda:GetFunctionConcurrency", "lambda:GetAccountSettings", "lambda:InvokeFunction")


@pytest.mark.parametrize("right", RIGHTS)
def test_a_right_that_is_missing_is_named(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the provisioner, which stops, and by `doll doctor`, which goes on to what else it can ask."""
    owner = Owner()
    owner.denied = (right,)
    assert f"AWS refuses {right}: allow it" in refusal(owner, config(), monkeypatch)
    failed = [each for each in ask_function(config(), owner) if each.result == "failed"]
    assert [right in each.detail for each in failed] == [True]


def test_doctor_has_a_line_for_each_number_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(MemorySize=512, Timeout=60, State="Failed")
    monkeypatch.setattr(account, "aws_client", lambda *_: owner)
    owner.concurrency, owner.image_bytes = 2, 11 * 1024**3
    checks = ask_function(config(timeout_s=80))
    assert all("\n" not in each.detail + each.todo for each in checks)
    assert [each.name for each in checks if each.result == "failed"] == [
        "fleet.timeout_s", "function doll", "function doll", "fleet.memory_mb", "fleet.timeout_s",
        "the reserved concurrency of function doll",
    ]  # fmt: skip
    owner = Owner()
    owner.denied = ("ecr:DescribeImages",)
    assert {each.name: each.result for each in ask_function(config()) if each.result != "ok"} == {
        "image doll:v1": "unknown"
    }
    owner.concurrency = 3
    (warning,) = [each for each in ask_function(config()) if each.result == "warning"]
    assert (warning.detail, warning.todo) == (
        "3 for 2 workers: hand-overs wait for each other", "4 let all workers hand over at once",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ({"timeout_s": 901}, "less than or equal to 900"),
        ({"memory_mb": 64}, "greater than or equal to 128"),
        ({"memory_mb": 20_000}, "less than or equal to 10240"),
        ({"function": "a b"}, "match pattern"),
        ({"timeout_s": 60, "start_s": 40}, "twice start_s"),
    ],
)
def test_limits_of_functions(fleet: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LambdaFleetConfig(**{"kind": "lambda", "function": "doll", **fleet})


def test_a_silence_that_is_found_late_is_billed_to_the_limit(rig: LambdaRig) -> None:
    """While Redis is away, nobody renews a record, and the invocation costs on."""
    made = rig.fleet.launch(ORDER)
    rig.advance(30)
    started_s = rig.clock()
    rig.fall_silent(made.id)
    rig.clock.advance(3600)
    ended = only(rig, made.id)
    assert (ended.end_reason, ended.ended_s) == (EndReason.LIMIT, started_s - 30 + LIMIT_S)


def test_a_limit_too_short_for_a_hand_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.timeout_s: expected 86 or more"):
        connect(config(timeout_s=80, region="us-east-1"))
