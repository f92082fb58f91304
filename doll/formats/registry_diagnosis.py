"""Asks a schema registry what a worker asks, and reports what it says. Nothing is changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from doll.errors import ConfigError, RetryLater, SampleError
from doll.formats.avro import parsed_schema
from doll.formats.registry import NotInRegistryError, RegisteredSchema, RegistryClient
from doll.formats.registry_facts import RegistryFacts

if TYPE_CHECKING:
    from doll.config.format import AvroFormat


def ask_registry(section: AvroFormat) -> RegistryFacts:
    """The registry of a format, and its subject. With the credentials of this process.

    Args:
        section: with a registry.
    """
    url, subject = section.registry, section.subject
    assert url is not None, "the caller has looked"
    begun_s = time.perf_counter()
    name = f"version {section.version or 'latest'} of subject {subject}"
    try:
        client = RegistryClient(url)
        try:
            # Without a subject: any question whose answer, also "not found", only a registry gives.
            registered = client.by_id(1) if subject is None else client.of_subject(subject, section.version)
        except NotInRegistryError as exc:
            latency_s = time.perf_counter() - begun_s
            if subject is None:
                return RegistryFacts(url, latency_s=latency_s)
            similar = tuple(client.similar_subjects(subject))
            return RegistryFacts(url, latency_s=latency_s, subject=subject, missing=str(exc), similar=similar)
    except (RetryLater, ConfigError) as exc:
        return RegistryFacts(url, refusal=str(exc), subject=subject)
    latency_s = time.perf_counter() - begun_s
    if subject is None:
        return RegistryFacts(url, latency_s=latency_s)
    try:
        fields = _fields(registered, name)
    except SampleError as exc:
        return RegistryFacts(url, latency_s=latency_s, subject=subject, unusable=str(exc))
    return RegistryFacts(url, latency_s=latency_s, subject=subject, fields=fields)


def fields_of(file: Path) -> tuple[str, ...]:
    """The fields of the schema in a file.

    Raises:
        ConfigError: it cannot be read, or is no schema of a record.
    """
    try:
        return _fields(RegisteredSchema(file.read_text(encoding="utf-8"), "AVRO"), str(file))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {file}: {exc}") from exc
    except SampleError as exc:
        raise ConfigError(str(exc)) from exc


def _fields(registered: RegisteredSchema, name: str) -> tuple[str, ...]:
    return tuple(str(field["name"]) for field in parsed_schema(registered, name)["fields"])
