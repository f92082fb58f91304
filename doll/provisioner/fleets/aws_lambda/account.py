"""Checks whether a function of the account fits the job file: its settings, its image, its concurrency, and our rights.

`doll provision` stops at the first check that fails; `doll doctor` shows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from doll import telemetry
from doll.config import JobConfig, LambdaFleetConfig
from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors, code_of, unavailable
from doll.records.bounded import short
from doll.records.check import Check, Result

log = telemetry.get_logger(__name__)

MAX_IMAGE_BYTES: Final = 10 * 1024**3
"""AWS's limit of a container image, uncompressed. The registry states the compressed size, which is smaller."""


def lead_s(config: JobConfig) -> float:
    """Return how long a successor has to exist before its predecessor must leave, in addition to its start."""
    return (config.provision.every_s or 30.0) + config.worker.drain_s


def check_function(client: Any, config: JobConfig, settings: LambdaFleetConfig) -> None:
    """Raise ConfigError if the function cannot run the job's workers as the job file describes them. Raises
    ServiceUnavailableError if AWS does not answer."""
    for group in _GROUPS:
        for check in group(client, config, settings):
            if check.result == "failed":
                raise ConfigError(": ".join(filter(None, (check.name, check.detail, check.todo))))
            if check.result != "ok":
                log.warning("function_check", check=check.name, result=check.result, reason=check.detail)


def ask_function(config: JobConfig, client: Any = None) -> list[Check]:
    """Return all checks of the job's function. None: a client is made for the fleet's region."""
    settings = config.fleet
    assert isinstance(settings, LambdaFleetConfig)
    try:
        client = client or aws_client("lambda", settings.region)
    except ConfigError as error:
        return [Check("AWS Lambda", "failed", str(error))]
    checks: list[Check] = []
    for group in _GROUPS:
        try:
            checks += group(client, config, settings)
        except DollError as error:
            result: Result = "unknown" if isinstance(error, ServiceUnavailableError) else "failed"
            checks.append(Check(_TITLES[group], result, str(error)))
    return checks


def _check_limit(client: Any, config: JobConfig, settings: LambdaFleetConfig) -> Iterator[Check]:
    needed_s = 2 * (lead_s(config) + settings.start_s)
    name = "fleet.timeout_s"
    if settings.timeout_s < needed_s:
        yield Check(
            name, "failed",
            f"expected {needed_s:g} or more (twice the sum of fleet.start_s, provision.every_s and worker.drain_s), "
            f"got {settings.timeout_s}", "a successor would not be warm in time",
        )  # fmt: skip


def _check_settings(client: Any, config: JobConfig, settings: LambdaFleetConfig) -> Iterator[Check]:
    """Check the function's state and numbers, and its image."""
    name = settings.function
    answer = _ask(f"function {name}", "lambda:GetFunction", lambda: client.get_function(FunctionName=name))
    function: Mapping[str, Any] = answer["Configuration"]
    state = function.get("State", "Active")
    if state in ("Active", "Inactive"):
        yield Check(f"function {name}", "ok", f"state {state}")
    else:
        why = function.get("StateReason") or function.get("StateReasonCode") or "no reason given"
        yield Check(f"function {name}", "failed", f"expected state Active, got {state}: {why}")
    yield from _check_image(name, answer.get("Code", {}), settings)
    given = {
        "memory_mb": function.get("MemorySize"), "timeout_s": function.get("Timeout"),
        "ephemeral_mb": function.get("EphemeralStorage", {}).get("Size", 512),
    }  # fmt: skip
    for key, value in given.items():
        if value == (wanted := getattr(settings, key)):
            yield Check(f"fleet.{key}", "ok", f"{value}")
            continue
        yield Check(
            f"fleet.{key}", "failed", f"expected {value}, as function {name} has it, got {wanted}",
            "correct the job file, or the function with `aws lambda update-function-configuration`",
        )  # fmt: skip


def _check_image(name: str, code: Mapping[str, Any], settings: LambdaFleetConfig) -> Iterator[Check]:
    """Check that the function's image is not larger than AWS's limit, if it is in a registry that we may ask."""
    _, _, image = str(code.get("ImageUri", "")).partition("/")
    repository, at, digest = image.partition("@")
    if not at:
        repository, _, tag = image.rpartition(":")
    if not repository:
        return
    wanted = {"imageDigest": digest} if at else {"imageTag": tag}
    registry = aws_client("ecr", settings.region)
    try:
        (details,) = registry.describe_images(repositoryName=repository, imageIds=[wanted])["imageDetails"]
        size_bytes = int(details["imageSizeInBytes"])
    except aws_errors() as error:
        yield Check(
            f"image {image}", "unknown", f"its size was not asked: {code_of(error)}", "allow ecr:DescribeImages"
        )
        return
    finally:
        registry.close()
    size = f"{size_bytes / 1024**3:.1f} GiB compressed"
    if size_bytes > MAX_IMAGE_BYTES:
        yield Check(
            f"function {name}", "failed", f"expected an image of at most 10 GiB, got {image} with {size}",
            "leave out what the worker does not need, e.g. torch's CUDA libraries",
        )  # fmt: skip
    else:
        yield Check(f"image {image}", "ok", f"{size}, at most 10 GiB uncompressed")


def _check_concurrency(client: Any, config: JobConfig, settings: LambdaFleetConfig) -> Iterator[Check]:
    """Check that more invocations may run at a time than the job has workers. Each successor runs beside its
    predecessor, so with less than twice the workers hand-overs wait for each other."""
    name = settings.function
    own = _ask(
        f"concurrency of function {name}", "lambda:GetFunctionConcurrency",
        lambda: client.get_function_concurrency(FunctionName=name),
    ).get("ReservedConcurrentExecutions")  # fmt: skip
    what = f"the reserved concurrency of function {name}"
    if own is None:
        limits = _ask("the account's quotas", "lambda:GetAccountSettings", client.get_account_settings)["AccountLimit"]
        own, what = limits["UnreservedConcurrentExecutions"], "the account's unreserved concurrency"
    workers = config.data.workers
    if own <= workers:
        yield Check(
            what, "failed",
            f"expected more than the {workers} workers of data.workers, because a successor starts beside its "
            f"predecessor, got {own}", "raise the quota, or have fewer workers",
        )  # fmt: skip
    elif own < 2 * workers:
        yield Check(
            what, "warning", f"{own} for {workers} workers: hand-overs wait for each other",
            f"{2 * workers} let all workers hand over at once",
        )  # fmt: skip
    else:
        yield Check(what, "ok", f"{own} for {workers} workers")


def _check_right(client: Any, config: JobConfig, settings: LambdaFleetConfig) -> Iterator[Check]:
    """Check that the function may be invoked, without an invocation."""
    name = settings.function
    _ask(
        f"function {name}", "lambda:InvokeFunction",
        lambda: client.invoke(FunctionName=name, InvocationType="DryRun", Payload=b"{}"),
    )  # fmt: skip
    yield Check("lambda:InvokeFunction", "ok", "allowed, by a dry run")


_Group = Callable[[Any, JobConfig, LambdaFleetConfig], Iterator[Check]]
_TITLES: Final[Mapping[_Group, str]] = {
    _check_limit: "fleet.timeout_s", _check_settings: "function", _check_concurrency: "concurrency",
    _check_right: "lambda:InvokeFunction",
}  # fmt: skip
_GROUPS: Final = tuple(_TITLES)


def _ask(what: str, right: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except aws_errors() as error:
        code = code_of(error)
        if code == "ResourceNotFoundException":
            raise ConfigError(
                f"{what}: AWS Lambda has none: {short(error)}: correct fleet.function or fleet.region"
            ) from error
        if code.startswith("AccessDenied"):
            raise ConfigError(f"{what}: AWS refuses {right}: allow it to whoever provisions: {short(error)}") from error
        raise unavailable(what, error, "AWS Lambda") from error
