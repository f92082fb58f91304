"""No credentials of a URL are shown: not by an error, a line of the log or a report, and no key of the job file takes
them."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from doll import telemetry
from doll.config import JobConfig, dump, parse
from doll.config.variants import sections_of
from doll.errors import ConfigError, DollError, ServiceUnavailableError
from doll.process.files import json_safe
from doll.records.bounded import short
from doll.redaction import holds_credentials, redacted
from pydantic import BaseModel

JOB = "job: j\ntask: {class: 'm:C'}\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:hush@host/x", "https://***@host/x"),
        ("https://ann:hu@sh@host/x", "https://***@host/x"),
        ("https://hush@host", "https://***@host"),
        ("redis://:hush@host:6379/0", "redis://***@host:6379/0"),
        ("s3://KEY:hu/sh@bucket/prefix", "s3://***@bucket/prefix"),
        ("postgresql+psycopg2://ann:1234@host/hub", "postgresql+psycopg2://***@host/hub"),
        ("got 'https://host/token?client_secret=hush', and", "got 'https://host/token?***', and"),
        ("cut off: https://ann:hus", "cut off: https://***@"),
        ("http://127.0.0.1:5000/a@b and http://[::1]:80/", "http://127.0.0.1:5000/a@b and http://[::1]:80/"),
        ("s3://bucket/prefix@stable, s3://bucket@stable", "s3://bucket/prefix@stable, s3://bucket@stable"),
        ("redis+cluster://a:1,b:2 or redis://host:port/db.", "redis+cluster://a:1,b:2 or redis://host:port/db."),
        ("no answer from http://host:80: refused", "no answer from http://host:80: refused"),
        ("ann:x@host is no URL", "ann:x@host is no URL"),
    ],
)
def test_user_password_and_query_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown
    assert holds_credentials(text) == ("@" in shown and "***" in shown)


URL = "http://ann:hush@host/x?key=hush"


def test_errors_logs_and_reports_show_none() -> None:
    assert str(ServiceUnavailableError(f"MLflow at {URL}: {short(OSError(URL), 400)}")).count("hush") == 0
    assert "hush" not in short(f"{'x' * 30} {URL}", 45), "it is hidden before the text is cut"
    stream = io.StringIO()
    telemetry.configure(stream=stream)
    try:
        try:
            raise OSError(URL)
        except OSError as exc:
            telemetry.get_logger("test").warning("away", address=URL, error=exc, exc_info=exc)
    finally:
        telemetry.configure()
    assert "http://***@host/x?***" in stream.getvalue()
    assert "hush" not in stream.getvalue()
    assert json_safe({"source": [URL]}) == {"source": ["http://***@host/x?***"]}
    assert DollError(3, URL).args == (3, "http://***@host/x?***")


def keys(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = (*path, field.alias or name)
        yield ".".join(inner)
        for each in sections_of(field):
            yield from keys(each, inner)


@pytest.mark.parametrize("url", ["https://ann:hush@host/x", "s3://KEY:hu/hush@bucket/x", "https://hush@host"])
def test_no_key_of_the_job_file_takes_credentials_or_repeats_them(url: str) -> None:
    names = sorted({*keys(JobConfig)} - {"base_folder"})  # which DOLL sets itself
    assert {"kafka.oauth.token_url", "checkpoint.folder", "training.init_from", "fleet.queue_url"} <= set(names)
    for name in names:
        for value in (url, f"[{url}]", f"{{a: {url}}}"):
            with pytest.raises(ConfigError) as caught:
                parse(JOB, [f"{name}={value}"])
            assert "hush" not in str(caught.value), name
            assert "hush" not in str(caught.value.__cause__), name


def test_a_query_that_an_address_needs_is_not_shown() -> None:
    settings = ["kafka.security=sasl_ssl", "kafka.sasl_mechanism=OAUTHBEARER"]
    config = parse(JOB, [*settings, "kafka.oauth.token_url=https://host/token?key=hush"])
    assert config.kafka.oauth is not None
    assert config.kafka.oauth.token_url.endswith("hush")
    assert "hush" not in redacted(dump(config))
