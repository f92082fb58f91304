"""What a function fetches before its first invocation, from moto."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from doll.errors import ConfigError
from doll.run import function_boot
from moto import mock_aws


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    for name in ("DOLL_KAFKA_PASSWORD", "DOLL_REDIS_PASSWORD"):
        monkeypatch.setenv(name, "before")  # so that it is taken back after the test
    with mock_aws():
        yield


def test_passwords_go_into_the_environment_and_certificates_into_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secrets, bucket = boto3.client("secretsmanager"), boto3.client("s3")
    secrets.create_secret(Name="doll/a/worker", SecretString="  DOLL_KAFKA_PASSWORD=a b=c\n\n# a comment\n")
    secrets.create_secret(Name="doll/a/cache", SecretString="DOLL_REDIS_PASSWORD=d\n")
    bucket.create_bucket(Bucket="doll-a")
    bucket.put_object(Bucket="doll-a", Key="ca/kafka.pem", Body=b"a certificate")
    monkeypatch.setenv(function_boot.SECRETS_ENV, "doll/a/worker doll/a/cache")
    monkeypatch.setenv(function_boot.AUTHORITIES_ENV, "kafka")
    monkeypatch.setenv(function_boot.BUCKET_ENV, "doll-a")
    monkeypatch.setenv("DOLL_KAFKA_CA", str(tmp_path / "kafka.pem"))
    function_boot.fetch()
    assert (os.environ["DOLL_KAFKA_PASSWORD"], os.environ["DOLL_REDIS_PASSWORD"]) == ("a b=c", "d")
    assert (tmp_path / "kafka.pem").read_bytes() == b"a certificate"


def test_without_names_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (function_boot.SECRETS_ENV, function_boot.AUTHORITIES_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(function_boot, "aws_client", None)
    function_boot.fetch()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({function_boot.SECRETS_ENV: "doll/a/none"}, "doll/a/none: .*allow it to the function's role"),
        ({function_boot.AUTHORITIES_ENV: "kafka"}, "expected 'DOLL_BOOT_BUCKET' in the function's environment"),
        ({function_boot.AUTHORITIES_ENV: "kafka", function_boot.BUCKET_ENV: "none"}, "s3://none/ca/kafka.pem: "),
    ],
)
def test_what_is_not_there_is_named_in_one_line(
    env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words) as caught:
        function_boot.fetch()
    assert "\n" not in str(caught.value)
