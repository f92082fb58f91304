"""Checks whether a function of the account fits the job file: its settings, its image, its concurrency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from doll import telemetry
from doll.config import JobConfig, LambdaFleetConfig
from doll.errors import ConfigError
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors, code_of, unavailable

log = telemetry.get_logger(__name__)

MAX_IMAGE_BYTES: Final = 10 * 1024**3
"""AWS's limit of a container image, uncompressed. The registry states the compressed size, which is smaller."""


def check_function(client: Any, config: JobConfig, settings: LambdaFleetConfig) -> None:
    """Raise ConfigError if the function cannot run the job's workers as the job file describes them. Raises
    ServiceUnavailableError if AWS does not answer."""
    name = settings.function
    answer = _ask(f"function {name}", lambda: client.get_function(FunctionName=name))
    function: Mapping[str, Any] = answer["Configuration"]
    _check_image(name, answer.get("Code", {}), settings)
    if function.get("State", "Active") not in ("Active", "Inactive"):
        why = function.get("StateReason") or function.get("StateReasonCode") or "no reason given"
        raise ConfigError(f"function {name}: expected state Active, got {function['State']}: {why}")
    given = {
        "memory_mb": function.get("MemorySize"), "timeout_s": function.get("Timeout"),
        "ephemeral_mb": function.get("EphemeralStorage", {}).get("Size", 512),
    }  # fmt: skip
    for key, value in given.items():
        if value != (wanted := getattr(settings, key)):
            raise ConfigError(
                f"fleet.{key}: expected {value}, as function {name} has it, got {wanted}: correct the job file, or the "
                "function with `aws lambda update-function-configuration`"
            )
    _check_concurrency(client, config, name)


def _check_image(name: str, code: Mapping[str, Any], settings: LambdaFleetConfig) -> None:
    """Raise ConfigError if the function's image is larger than AWS's limit. Without the right to ask the registry, or
    if the image is in none, nothing is checked."""
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
        log.warning("image_not_checked", image=image, reason=code_of(error))
        return
    finally:
        registry.close()
    if size_bytes > MAX_IMAGE_BYTES:
        raise ConfigError(
            f"function {name}: expected an image of at most 10 GiB, got {image} with {size_bytes / 1024**3:.1f} GiB "
            "compressed: leave out what the worker does not need, e.g. torch's CUDA libraries"
        )


def _check_concurrency(client: Any, config: JobConfig, name: str) -> None:
    """Raise ConfigError if fewer invocations may run at a time than the job has workers. Each successor runs beside its
    predecessor, so with less than twice the workers hand-overs wait for each other."""
    own = _ask("concurrency", lambda: client.get_function_concurrency(FunctionName=name)).get(
        "ReservedConcurrentExecutions"
    )
    if own is None:
        limits = _ask("the account's quotas", client.get_account_settings)["AccountLimit"]
        own, what = limits["UnreservedConcurrentExecutions"], "the account's unreserved concurrency"
    else:
        what = f"the reserved concurrency of function {name}"
    if own <= (workers := config.data.workers):
        raise ConfigError(
            f"{what}: expected more than the {workers} workers of data.workers, because a successor starts beside "
            f"its predecessor, got {own}: raise the quota, or have fewer workers"
        )
    if own < 2 * workers:
        log.warning("low_concurrency", concurrency=own, workers=workers, effect="hand-overs wait for each other")


def _ask(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except aws_errors() as error:
        if code_of(error) == "ResourceNotFoundException":
            raise ConfigError(
                f"{what}: AWS Lambda has none: {error}: correct fleet.function or fleet.region"
            ) from error
        raise unavailable(f"AWS Lambda, {what}", error) from error
