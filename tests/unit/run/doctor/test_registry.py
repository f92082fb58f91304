"""What `doll doctor` says of a schema registry and of the subject of a stream, as a worker would ask for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doll.config import JobConfig
from doll.config.format import AvroFormat
from doll.formats import registry_diagnosis
from doll.local.processes import free_port
from doll.records.check import Check
from doll.run.doctor.examine import _schemas
from fake_registry import FakeRegistry, fake_registry, schema
from job_files import job

CLICK = schema(("user", "long"), ("clicked", "boolean"))


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as server:
        server.add_version("clicks-value", "latest", CLICK)
        server.answers["/subjects"] = (200, ["clicks-value", "views-value"])
        yield server


def asked(config: JobConfig) -> dict[str, Check]:
    section = config.data.format
    assert isinstance(section, AvroFormat)
    return {check.name: check for check in _schemas(section, config)}


def of(url: str, more: str = "", folder: Path = Path(".")) -> dict[str, Check]:
    return asked(job(f"data.format={{kind: avro, registry: '{url}'{more}}}", folder=folder))


def test_a_good_registry_passes_with_the_fields_of_the_subject(registry: FakeRegistry) -> None:
    checks = of(registry.url, ", subject: clicks-value")
    assert [check.result for check in checks.values()] == ["ok"] * 3
    assert checks["worker: subject clicks-value"].detail == "fields user, clicked"
    assert next(iter(checks)) == f"Registry: connect to {registry.url.removeprefix('http://')}"


def test_without_a_subject_only_the_log_in_is_looked_at(registry: FakeRegistry) -> None:
    checks = of(registry.url)
    assert checks["worker: registry"].result == "ok"
    assert checks["worker: subject"].result == "unknown"
    assert checks["worker: subject"].todo == "name it: data.format.subject"


def test_a_subject_that_is_not_there_names_those_that_are_like_it(registry: FakeRegistry) -> None:
    check = of(registry.url, ", subject: clicks-valu")["worker: subject clicks-valu"]
    assert (check.result, check.detail) == ("failed", "40403: Schema not found; there is clicks-value, views-value")
    assert check.todo == "correct data.format.subject or version, or register the schema"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"schema": '"string"'}, "expected the schema of a record"),
        ({"schema": "{}", "schemaType": "JSON"}, "expected an Avro schema .* got one of kind JSON"),
        ({"schema": "{"}, "is no Avro schema"),
    ],
)
def test_a_schema_that_cannot_be_used_says_why(registry: FakeRegistry, answer: object, words: str) -> None:
    registry.answers["/subjects/clicks-value/versions/3"] = (200, answer)
    check = of(registry.url, ", subject: clicks-value, version: 3")["worker: subject clicks-value"]
    assert check.result == "failed"
    assert re.search(words, check.detail), check.detail


@pytest.mark.parametrize(
    ("down", "words"),
    [
        ((401, b""), "refuses the log-in (HTTP 401): set DOLL_REGISTRY_USERNAME and DOLL_REGISTRY_PASSWORD"),
        ((200, b"<html>"), "expected a schema registry with Confluent's API"),
        ((503, b"back soon"), "answers HTTP 503: back soon"),
    ],
)
def test_what_is_no_registry_or_refuses_us_is_said(
    registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch, down: tuple[int, bytes], words: str
) -> None:
    monkeypatch.setenv("DOLL_REGISTRY_TOKEN", "t0ken-hush")
    registry.down = down
    check = of(registry.url, ", subject: clicks-value")["worker: registry"]
    assert check.result == "failed"
    assert words in check.detail
    assert "hush" not in f"{check}"
    assert registry.asked[0][1]["Authorization"] == "Bearer t0ken-hush"


def test_a_registry_that_is_not_there_is_not_asked() -> None:
    checks = of(f"http://127.0.0.1:{free_port()}/apis/ccompat/v7", ", subject: clicks-value")
    (check,) = checks.values()
    assert check.result == "failed"
    assert "nothing answers" in check.detail


def test_a_secret_that_cannot_be_read_is_said(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOLL_REGISTRY_TOKEN_FILE", "/nowhere/token")
    check = of(registry.url)["worker: registry"]
    assert (check.result, check.detail) == (
        "failed", "DOLL_REGISTRY_TOKEN_FILE: cannot read /nowhere/token: No such file or directory",
    )  # fmt: skip


def test_a_schema_file_is_looked_at_in_place_of_a_registry(tmp_path: Path) -> None:
    config = job("data.format={kind: avro, schema_file: click.avsc}", folder=tmp_path)
    name = "worker: schema click.avsc"
    assert asked(config)[name].result == "failed"
    (tmp_path / "click.avsc").write_text(
        '{"type": "record", "name": "C", "fields": [{"name": "user", "type": "long"}]}'
    )
    assert asked(config)[name] == Check(name, "ok", "fields user")
    (tmp_path / "click.avsc").write_text('"string"')
    assert "expected the schema of a record" in asked(config)[name].detail


def test_a_slow_registry_is_a_warning(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_diagnosis, "_SLOW_S", 0.0)
    check = of(registry.url, ", subject: clicks-value")["worker: registry"]
    assert (check.result, check.todo) == ("warning", "run near it: a worker waits for it with each new schema")
