"""Reads what a join needs of a record: its key, its event time, and the JSON of its features or of its label."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from doll.config.join import OWN_FIELDS, FeaturesConfig, JoinConfig, KeyConfig, LabelConfig, TimeConfig
from doll.errors import SampleError
from doll.records.bounded import short
from doll.records.event_times import MAX_MS, MS_PER_UNIT, header_ms, milliseconds
from doll.records.join_log import FEATURES

MAX_KEY_BYTES: Final = 1_024
_NOTHING: Any = Literal["\0a text that no field has"]
Headers = Sequence[tuple[str, bytes | None]]
_BRACE: Final = {ord("{")}
_UNUSUAL_ENDS: Final = {b"{}", b" }", b"\t}", b"\n}", b"\r}"}  # of a value: no comma and no field may follow
_NOT_RETRACTED: Final = {None, msgspec.UNSET, False}
_NO_TIMESTAMP: Final = 0  # Kafka's kind of a timestamp that is not known


class Bad(SampleError):
    """A record that cannot be joined. `code` is for programs."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Extracted(NamedTuple):
    """Parts of a record, as in `doll.records.join_log.Routed`."""

    key: bytes
    time_ms: int
    value: bytes


class Extractor:
    """Reads the records of one topic. `source`: `FEATURES`, or 1 and above for labels."""

    def __init__(self, join: JoinConfig, source: int, *, max_record_bytes: int) -> None:
        section: FeaturesConfig | LabelConfig = join.features if source == FEATURES else join.labels[source - 1]
        self.source, self.topic = source, section.topic
        self._max_record_bytes = max_record_bytes
        self._key, self._time = section.key, section.time
        self._label = section if isinstance(section, LabelConfig) else None
        self._reads_headers = section.key.header is not None or section.time.header is not None
        self._constant = b""
        self._numeric = False
        wanted: dict[str, tuple[str, Any]] = {}  # name of the field: name in the struct, type
        if section.key.field is not None:
            wanted["key"] = section.key.field, str | int
        if section.time.field is not None:
            wanted["time"] = section.time.field, datetime if section.time.unit == "iso8601" else float
        if self._label is not None:
            if isinstance(self._label.value, str):
                wanted["label"] = self._label.value, msgspec.Raw
            else:
                self._constant = msgspec.json.encode(self._label.value)
            if isinstance(self._label.retract, str):
                wanted["retract"] = self._label.retract, bool | int | None
            self._numeric = self._label.take == "sum"
        optional = {"label", "retract"}
        fields: list[Any] = [
            (name, kind | msgspec.UnsetType if name in optional else kind, msgspec.UNSET)
            if name in optional else (name, kind)
            for name, (_, kind) in sorted(wanted.items(), key=lambda item: item[0] in optional)
        ]  # fmt: skip
        rename = {name: field for name, (field, _) in wanted.items()}
        self._taken: frozenset[str] = frozenset()
        if self._label is None:  # a value with a field that the join writes does not have this type, and is refused
            self._taken = frozenset([*(label.name for label in join.labels), *OWN_FIELDS])
            for at, name in enumerate(sorted(self._taken)):
                fields.append((f"taken{at}", _NOTHING | msgspec.UnsetType, msgspec.UNSET))
                rename[f"taken{at}"] = name
        decoder = msgspec.json.Decoder(msgspec.defstruct("Fields", fields, rename=rename))
        self._decode, self._decode_lines = decoder.decode, decoder.decode_lines

    def read_all(
        self, values: Sequence[bytes | None], keys: Sequence[bytes | None], timestamps: Sequence[tuple[int, int]]
    ) -> tuple[list[bytes], list[int], list[bytes]] | None:
        """Return the keys, the times and the values of records, if all of them are usual ones: faster than `read`, and
        with the same results. None: use `read` for each of them.

        The values are decoded at once, one in a line. Each begins with { and ends with }, and JSON has no } and { with
        only a newline between them inside of a value. So no value can take a part of the next one, and a line with two
        values shows in the number of them.
        """
        if self._reads_headers or self._numeric or not all(values):
            return None
        lines = cast(Sequence[bytes], values)
        opens, ends = {value[0] for value in lines}, {value[-2:] for value in lines}
        if opens != _BRACE or not ends.isdisjoint(_UNUSUAL_ENDS) or {end[1:] for end in ends} != {b"}"}:
            return None
        if max(map(len, lines)) > self._max_record_bytes:
            return None
        try:
            fields: list[Any] = self._decode_lines(b"\n".join(lines))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        if len(fields) != len(lines):
            return None
        names = keys
        if self._key.field is not None:
            names = [key.encode() if type(key := item.key) is str else _text(key) for item in fields]
        if not all(names) or max(map(len, cast(list[bytes], names))) > MAX_KEY_BYTES:
            return None
        times_ms = self._times_ms(fields, timestamps)
        contents = [value[:-1] + b"," for value in lines] if self._label is None else self._values(fields)
        if times_ms is None or contents is None:
            return None
        return cast(list[bytes], names), times_ms, contents

    def _times_ms(self, fields: list[Any], timestamps: Sequence[tuple[int, int]]) -> list[int] | None:
        if self._time.unit == "iso8601":
            return None
        if self._time.field is None:
            times_ms: list[Any] = [time_ms for kind, time_ms in timestamps if kind != _NO_TIMESTAMP]
        else:
            unit_ms = MS_PER_UNIT[self._time.unit]
            times_ms = [item.time * unit_ms for item in fields]
        if len(times_ms) != len(fields) or not 0 <= min(times_ms) <= max(times_ms) <= MAX_MS:
            return None
        return [int(time_ms) for time_ms in times_ms]

    def _values(self, fields: list[Any]) -> list[bytes] | None:
        """Return the labels; None: one is missing, or retracted."""
        assert self._label is not None
        if isinstance(self._label.retract, str) and not {item.retract for item in fields} <= _NOT_RETRACTED:
            return None
        if self._constant:
            return [self._constant] * len(fields)
        labels = [item.label for item in fields]
        if msgspec.UNSET in labels:
            return None
        contents = [bytes(label) for label in labels]
        return None if b"null" in contents else contents

    def read(
        self,
        value: bytes | None,
        key: bytes | None,
        timestamp: tuple[int, int],
        headers: Headers,
    ) -> Extracted:
        """Return the parts of a record. Raise Bad if one is missing or cannot be used.

        Args:
            timestamp: its kind and its milliseconds, as from `confluent_kafka.Message.timestamp`.
        """
        if not value:
            return self._tombstone(key, timestamp, headers)
        if len(value) > self._max_record_bytes:
            raise Bad("too_long", f"record of {len(value)} bytes: expected at most {self._max_record_bytes}")
        try:
            fields = self._decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise self._refusal(value, exc) from None
        key_bytes = _key(self._key, getattr(fields, "key", None), key, headers)
        time_ms = _time_ms(self._time, getattr(fields, "time", None), timestamp, headers)
        if self._label is None:
            body = value.strip()[:-1].rstrip()
            return Extracted(key_bytes, time_ms, body if body == b"{" else body + b",")
        return Extracted(key_bytes, time_ms, self._value(fields))

    def _tombstone(self, key: bytes | None, timestamp: tuple[int, int], headers: Headers) -> Extracted:
        if self._label is None or not self._label.retract:
            raise Bad("empty", "no value: expected a JSON object")
        if self._key.field is not None or self._time.field is not None:
            raise Bad("empty", "no value, and data.join reads the key or the time from fields of the value")
        return Extracted(_key(self._key, None, key, headers), _time_ms(self._time, None, timestamp, headers), b"")

    def _refusal(self, value: bytes, error: Exception) -> Bad:
        """Return why a value cannot be decoded."""
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            if there := self._taken & msgspec.json.decode(value, type=dict[str, msgspec.Raw]).keys():
                name = min(there)
                return Bad("field_taken", f"the field {name} is there already: the join writes a field of this name")
        return Bad("not_json", f"expected a JSON object with the fields of data.join: {short(error)}")

    def _value(self, fields: Any) -> bytes:
        assert self._label is not None
        if getattr(fields, "retract", None) not in (None, msgspec.UNSET) and fields.retract:
            return b""
        if self._constant:
            return self._constant
        if fields.label is msgspec.UNSET:
            raise Bad("no_label", f"the field {self._label.value} is missing")
        raw = bytes(fields.label)
        if raw == b"null":
            raise Bad("no_label", f"the field {self._label.value} is null")
        if self._numeric:
            try:
                number = msgspec.json.decode(raw, type=float)
            except msgspec.MsgspecError:
                raise Bad(
                    "no_label", f"{self._label.value}: expected a number, to be added, got {raw[:40]!r}"
                ) from None
            if not math.isfinite(number):
                raise Bad("no_label", f"{self._label.value}: expected a finite number")
        return raw


def _text(key: str | int) -> bytes:
    return key.encode() if isinstance(key, str) else b"%d" % key


def _key(section: KeyConfig, field_value: Any, key: bytes | None, headers: Headers) -> bytes:
    if section.field is not None:
        content = _text(field_value)
    elif section.header is not None:
        values = [value for name, value in headers if name == section.header]
        content = values[-1] if values and values[-1] else b""
    else:
        content = key or b""
    if not content:
        where = "Kafka's key"
        if section.field or section.header:
            where = f"field {section.field}" if section.field else f"header {section.header}"
        raise Bad("no_key", f"no key: {where} is missing or empty")
    if len(content) > MAX_KEY_BYTES:
        raise Bad("no_key", f"key of {len(content)} bytes: expected at most {MAX_KEY_BYTES}")
    return content


def _time_ms(section: TimeConfig, field_value: Any, timestamp: tuple[int, int], headers: Headers) -> int:
    if section.field is None and section.header is None:
        kind, time_ms = timestamp
        if kind == _NO_TIMESTAMP or time_ms < 0:
            raise Bad("no_time", "no event time: Kafka has no timestamp of the record")
        return time_ms
    where = section.field or f"header {section.header}"
    try:
        if section.header is not None:
            return header_ms(headers, section.header, section.unit)
        return milliseconds(field_value, section.unit)
    except (ValueError, OverflowError) as exc:
        raise Bad("no_time", f"{where}: {short(exc)}") from None
