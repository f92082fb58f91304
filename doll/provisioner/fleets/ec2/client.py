"""boto3 clients, the pace of their calls, and the conversion of AWS's errors to DOLL's errors with their remedies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.provisioner.fleets.ec2.errors import ErrorRule, advice, rule_of_call
from doll.provisioner.fleets.port import LaunchError, LaunchFailure


def aws_client(service: str, region: str | None) -> Any:
    """Return a boto3 client with timeouts and AWS's standard retries, and with credentials from the usual places of
    boto3. Raises ConfigError if no region is set, if the profile is unknown, and for similar errors."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    retries = {"mode": "standard", "max_attempts": 4}
    config = Config(connect_timeout=5, read_timeout=30, retries=retries, user_agent_extra="doll")
    try:
        return boto3.client(service, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"AWS {service}: {error}: set fleet.region, or AWS_REGION and credentials") from error


@dataclass
class CallPacer:
    """Spaces calls, because EC2 throttles bursts for the whole account."""

    per_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _next_s: float = field(default=float("-inf"), init=False)

    def wait(self) -> None:
        """Wait until the next call may be made."""
        now_s = self.clock()
        if now_s < self._next_s:
            self.sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + 1.0 / self.per_s


def aws_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a call of a boto3 client may raise."""
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError)


def code_of(error: Exception) -> str:
    """Return AWS's error code, or the name of the exception if there was no answer."""
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return type(error).__name__


def rule_of(error: Exception) -> tuple[str, ErrorRule]:
    """Return the code of a failed call, and the rule for it."""
    from botocore import exceptions as aws

    code = code_of(error)
    if isinstance(error, aws.ClientError):
        return code, rule_of_call(code, int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)))
    misconfigured = (aws.NoCredentialsError, aws.PartialCredentialsError, aws.NoRegionError, aws.ParamValidationError)
    failure = LaunchFailure.CONFIG if isinstance(error, misconfigured) else LaunchFailure.THROTTLED
    return code, ErrorRule(failure)


def launch_error(what: str, error: Exception) -> LaunchError:
    """Return the LaunchError for a failed call of a launch."""
    code, rule = rule_of(error)
    more = f": {advice(code)}" if rule.failure is LaunchFailure.CONFIG else ""
    return LaunchError(f"{what}: {error}{more}", failure=rule.failure, code=code)


def unavailable(what: str, error: Exception, service: str = "EC2") -> DollError:
    """Return DOLL's error for a failed call that is not a launch: `ConfigError` or `ServiceUnavailableError`."""
    _, rule = rule_of(error)
    if rule.failure is LaunchFailure.CONFIG:
        return ConfigError(f"{what}: {error}: see docs/aws.md for the permissions that are needed")
    return ServiceUnavailableError(f"{service}, {what}: {error}")
