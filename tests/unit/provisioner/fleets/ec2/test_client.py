"""Which failed calls of AWS are errors of a moment."""

from __future__ import annotations

import botocore.exceptions as aws
import pytest
from doll.errors import ConfigError, ServiceUnavailableError
from doll.provisioner.fleets.ec2.client import launch_error, unavailable
from doll.provisioner.fleets.port import LaunchFailure

CODES = (
    "RequestExpired", "ExpiredToken", "ExpiredTokenException", "SlowDown", "BandwidthLimitExceeded",
    "PriorRequestNotComplete", "RequestLimitExceeded",
)  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_an_error_of_a_moment_is_tried_again(code: str) -> None:
    answer = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    error = aws.ClientError(answer, "DescribeInstances")
    assert isinstance(unavailable("listing instances", error), ServiceUnavailableError)
    assert launch_error("worker 0", error).failure is LaunchFailure.THROTTLED


def test_credentials_that_cannot_be_renewed_now_are_one_and_missing_ones_are_not() -> None:
    renewed = aws.CredentialRetrievalError(provider="iam-role", error_msg="Credential refresh failed")
    assert isinstance(unavailable("listing instances", renewed), ServiceUnavailableError)
    assert isinstance(unavailable("listing instances", aws.NoCredentialsError()), ConfigError)
