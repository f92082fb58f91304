"""Checks of a schema registry for `doll doctor`. They send the requests of a worker, and change nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from doll.config.format import AvroFormat
from doll.errors import ConfigError, RetryLater, SampleError
from doll.formats.avro import parsed_schema
from doll.formats.registry import NotInRegistryError, RegisteredSchema, RegistryClient
from doll.records.bounded import short
from doll.records.check import Check

_SLOW_S: Final = 1.0
_SHOWN_CHARS: Final = 120


def ask_registry(section: AvroFormat) -> Iterator[Check]:
    """Yield the checks of the registry of a format that has one, except for its address, with the credentials of this
    process."""
    assert section.registry is not None, "the caller has looked"
    subject, begun_s = section.subject, time.perf_counter()
    registered, missing = None, ""
    try:
        client = RegistryClient(section.registry)
        try:
            # Without a subject, send any request that only a registry can answer, even with "not found".
            registered = client.by_id(1) if subject is None else client.by_subject(subject, section.version)
        except NotInRegistryError as exc:
            missing = str(exc)
        latency_s = time.perf_counter() - begun_s
        similar = client.similar_subjects(subject) if missing and subject is not None else ()
    except (RetryLater, ConfigError) as exc:
        yield Check("worker: registry", "failed", str(exc))
        return
    slow = latency_s > _SLOW_S
    todo = "run near it: a worker waits for it with each new schema" if slow else ""
    yield Check("worker: registry", "warning" if slow else "ok", f"{1000 * latency_s:.1f} ms", todo)
    if subject is None:
        yield Check("worker: subject", "unknown", "none is named: schemas are looked at with the first record",
                    "name it: data.format.subject")  # fmt: skip
        return
    name = f"worker: subject {subject}"
    if registered is None:
        known = f"; there is {', '.join(similar)}" if similar else ""
        yield Check(name, "failed", f"{missing}{known}",
                    "correct data.format.subject or version, or register the schema")  # fmt: skip
        return
    try:
        fields = _fields(registered, f"version {section.version or 'latest'} of subject {subject}")
        yield Check(name, "ok", f"fields {short(', '.join(fields), _SHOWN_CHARS)}")
    except SampleError as exc:
        yield Check(name, "failed", str(exc), "correct data.format.subject, or its schema")


def fields_of(file: Path) -> tuple[str, ...]:
    """Return the names of the fields of the schema in a file. Raise ConfigError if the file cannot be read, or is not a
    schema of a record."""
    try:
        return _fields(RegisteredSchema(file.read_text(encoding="utf-8"), "AVRO"), str(file))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {file}: {exc}") from exc
    except SampleError as exc:
        raise ConfigError(str(exc)) from exc


def _fields(registered: RegisteredSchema, name: str) -> tuple[str, ...]:
    return tuple(str(field["name"]) for field in parsed_schema(registered, name)["fields"])
