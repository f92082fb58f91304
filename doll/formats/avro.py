"""Avro records. Either each has a header with the id of its writer's schema, or all have one schema and no header.

Each schema is requested once and cached. `fastavro` decodes; msgspec checks types and fills in defaults, as for JSON.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any, Final

import fastavro
import msgspec
from fastavro import _read_py
from fastavro.schema import SchemaParseException

from doll.errors import ConfigError, SampleError
from doll.formats.reader import HEADER_BYTES, FieldReader, check_header, missing, schema_id
from doll.formats.registry import NotInRegistryError, RegisteredSchema, RegistryClient
from doll.records.bounded import short
from doll.telemetry import get_logger

log = get_logger(__name__)

# Wait time for schemas that cannot be used. A restarted registry or a replica may know them soon.
_REFUSAL_KEPT_S: Final = 30.0
_MAX_REFUSALS: Final = 1000
# Values of these types stay the numbers that Avro stores, because a task computes with numbers.
_TIMES: Final = ("date", "time-", "timestamp-", "local-timestamp-")
_TEXT: Final = "uuid"  # stays the text that Avro stores; msgspec converts it for a field of type UUID


class _Read:
    """A decoder of values of one schema. If there is a second schema, the decoder converts values to that schema."""

    def __init__(self, schema: Any, resolved: Any = None) -> None:
        self._schema, self._resolved = schema, resolved
        # fastavro's compiled decoder crashes on records nested 5,000 deep; its Python decoder raises RecursionError.
        self._decode = _read_py.schemaless_reader if _is_recursive(schema) else fastavro.schemaless_reader

    def __call__(self, stream: BytesIO) -> Any:
        return self._decode(stream, self._schema, self._resolved)

    def bad_field(self, value: bytes, begin: int) -> str:
        """Return the name of the first field that cannot be read; "" if all fields can be read."""
        fields = self._schema["fields"]

        def fails(count: int) -> bool:
            stream = BytesIO(value)
            stream.seek(begin)
            try:
                self._decode(stream, {**self._schema, "fields": fields[:count]}, None)
            except Exception:  # the decoder may raise anything for bad bytes
                return True
            return False

        at = bisect_left(range(len(fields) + 1), True, key=fails) - 1
        return str(fields[at]["name"]) if 0 <= at < len(fields) else ""


class AvroReader(FieldReader):
    """A reader of Avro records whose schemas are in a registry."""

    def __init__(
        self,
        record: type[msgspec.Struct],
        registry: RegistryClient,
        *,
        subject: str | None = None,
        version: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        subject, version: as in `data.format`. They are looked up when the first value is read.
        """
        super().__init__(record)
        self._registry = registry
        self._subject, self._version = subject, version
        self._clock = clock
        self._resolved: Any = None  # the schema to which all values are converted
        self._is_checked = subject is None
        self._readers: dict[bytes, _Read] = {}  # by header
        self._refusals: dict[bytes, tuple[float, str]] = {}  # time until which the header is refused, and the reason

    def read_one(self, value: bytes) -> Any:
        check_header(value)
        return msgspec.convert(read_value(self._reader(value[:HEADER_BYTES]), value, HEADER_BYTES), self.record)

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        headers = [value[:HEADER_BYTES] for value in values]
        if len(kinds := set(headers)) == 1:
            return self._read_alike(headers[0], values)
        # Schemas change rarely, so most batches have one schema.
        places: dict[bytes, list[int]] = defaultdict(list)
        for place, header in enumerate(headers):
            places[header].append(place)
        events: list[Any] = [None] * len(values)
        for header in kinds:
            alike = self._read_alike(header, [values[place] for place in places[header]])
            for place, event in zip(places[header], alike, strict=True):
                events[place] = event
        return events

    def _read_alike(self, header: bytes, values: Sequence[bytes]) -> list[Any]:
        check_header(header)
        return msgspec.convert(read_alike(self._reader(header), values, HEADER_BYTES), self._list)

    def _reader(self, header: bytes) -> _Read:
        """Return the decoder of values with this header.

        Raises:
            SampleError: values with this header cannot be decoded.
            RetryLater: the registry is unavailable.
            ConfigError: the subject or its version does not exist, or lacks a field.
        """
        if (read := self._readers.get(header)) is not None:
            return read
        now = self._clock()
        if (refusal := self._refusals.get(header)) is not None and now < refusal[0]:
            raise SampleError(refusal[1])
        if not self._is_checked:
            self._check_subject()
        number = schema_id(header)
        try:
            read = self._readers[header] = self._make(number)
        except SampleError as exc:
            if header not in self._refusals:
                log.error("schema_unusable", schema=number, registry=self._registry.url, reason=str(exc))
            if len(self._refusals) >= _MAX_REFUSALS:
                self._refusals.clear()
            self._refusals[header] = now + _REFUSAL_KEPT_S, str(exc)
            raise
        return read

    def _make(self, number: int) -> _Read:
        name = f"schema {number}"
        try:
            written = self._registry.by_id(number)
        except NotInRegistryError as exc:
            raise SampleError(
                f"{name} is not in the registry at {self._registry.url} ({exc}): was the record written with another?"
            ) from exc
        schema = parsed_schema(written, name)
        if self._resolved is None:
            check_fields(self.record, schema, name)
        return _Read(schema, self._resolved)

    def _check_subject(self) -> None:
        assert self._subject is not None
        name = f"version {self._version or 'latest'} of subject {self._subject}"
        try:
            registered = self._registry.by_subject(self._subject, self._version)
        except NotInRegistryError as exc:
            key = "subject" if self._version is None else "subject or version"
            raise ConfigError(
                f"data.format.{key}: the registry at {self._registry.url} has no {name} ({exc}); it has "
                f"{', '.join(self._registry.similar_subjects(self._subject)) or 'no subjects'}"
            ) from exc
        try:
            schema = parsed_schema(registered, name)
            check_fields(self.record, schema, name)
            self._resolved = None if self._version is None else schema
        except SampleError as exc:
            if self._version is not None:
                raise ConfigError(f"data.format: {exc}") from None
            log.error("schema_unusable", subject=self._subject, registry=self._registry.url, reason=str(exc))
        self._is_checked = True


class PlainAvroReader(FieldReader):
    """A reader of Avro records without a header, all of one schema."""

    def __init__(self, record: type[msgspec.Struct], text: str, name: str) -> None:
        """
        Args:
            text: the schema, as JSON.

        Raises:
            ConfigError: the text is not a schema of a record with these fields.
        """
        super().__init__(record)
        try:
            schema = parsed_schema(RegisteredSchema(text, "AVRO"), name)
            check_fields(record, schema, name)
        except SampleError as exc:
            raise ConfigError(f"data.format.schema_file: {exc}") from exc
        self._read = _Read(schema)

    def read_one(self, value: bytes) -> Any:
        return msgspec.convert(read_value(self._read, value, 0), self.record)

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        return msgspec.convert(read_alike(self._read, values, 0), self._list)


def read_alike(read: _Read, values: Sequence[bytes], begin: int) -> list[Any]:
    """Return the fields of values of one schema; the fields begin after `begin` bytes."""
    events = []
    for value in values:
        stream = BytesIO(value)
        stream.seek(begin)
        events.append(read(stream))
        if stream.tell() != len(value):
            check_end(stream, value)
    return events


def read_value(read: _Read, value: bytes, begin: int) -> Any:
    """Return the fields of a value; they begin after `begin` bytes. Raise SampleError if the value is shorter or longer
    than its schema requires, or a field cannot be read."""
    stream = BytesIO(value)
    stream.seek(begin)
    try:
        fields = read(stream)
    except EOFError:
        name = read.bad_field(value, begin)
        raise SampleError(
            f"the value ends within {name or 'a field'}: is it cut off, or its schema id wrong?"
        ) from None
    except Exception as exc:  # the decoder may raise anything for bad bytes
        raise SampleError(f"{read.bad_field(value, begin) or 'the value'}: {type(exc).__name__}: {exc}") from None
    check_end(stream, value)
    return fields


def check_end(stream: BytesIO, value: bytes) -> None:
    """Refuse a value that has more bytes than its schema describes, because it was written with another schema."""
    if (left := len(value) - stream.tell()) != 0:
        raise SampleError(
            f"expected a record that ends with its fields, got {left} bytes more: is its schema id right?"
        )


def check_fields(record: type[msgspec.Struct], schema: Any, name: str) -> None:
    """Raise SampleError if the schema of a record lacks a field that `record` requires."""
    names = [field["name"] for field in schema["fields"]]
    if lacking := missing(record, names):
        raise SampleError(
            f"{name} has no field {lacking}, which the task's {record.__name__} requires (it has: "
            f"{short(', '.join(names), 200)}): give {record.__name__}.{lacking} a default, or set data.format.version "
            "to a version that has it"
        )


def parsed_schema(registered: RegisteredSchema, name: str) -> Any:
    """Parse the schema of a record. Raise SampleError if the text is not an Avro schema of a record."""
    if registered.kind != "AVRO":
        raise SampleError(f"{name}: expected an Avro schema (data.format.kind), got one of kind {registered.kind}")
    named: dict[str, Any] = {}
    try:
        for text in (*registered.references, registered.text):
            schema = fastavro.parse_schema(_as_stored(json.loads(text)), named_schemas=named)
    except (SchemaParseException, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise SampleError(f"{name} is no Avro schema: {short(f'{type(exc).__name__}: {exc}', 200)}") from exc
    if not (isinstance(schema, dict) and schema.get("type") == "record"):
        raise SampleError(f"{name}: expected the schema of a record, got {short(schema, 80)}")
    return schema


def _is_recursive(schema: Any) -> bool:
    """Return whether a parsed schema, or a schema that it names, contains itself."""
    named = schema.get("__named_schemas", {}) if isinstance(schema, dict) else {}
    seen: set[str] = set()  # names of types that are being checked, or do not contain themselves

    def holds(item: Any, around: frozenset[str]) -> bool:
        if isinstance(item, str):
            if item in around:
                return True
            is_new = item in named and item not in seen
            seen.add(item)
            return is_new and holds(named[item], around)
        if isinstance(item, list):
            return any(holds(option, around) for option in item)
        if not isinstance(item, dict):
            return False
        if (name := item.get("name")) in around:
            return True
        inside = around | {str(name)} if "fields" in item else around
        inner = [field["type"] for field in item.get("fields", ())] + [item.get(key) for key in ("items", "values")]
        return any(holds(part, inside) for part in (*inner, item["type"]) if part not in (None, "record"))

    return holds(schema, frozenset())


def _as_stored(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_as_stored(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_stored = str(schema.get("logicalType", "")).startswith((*_TIMES, _TEXT))
    items: Iterable[tuple[str, Any]] = schema.items()
    return {
        key: value if key in ("default", "doc", "symbols", "name") else _as_stored(value)
        for key, value in items
        if not (is_stored and key == "logicalType")
    }
