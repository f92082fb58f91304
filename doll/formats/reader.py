"""The common parts of all formats: `FieldReader`, the header of a schema registry, and the search for bad values.

To add a format: its section in `doll.config.format`, a `FieldReader`, and a case in `open_reader` (`doll.formats`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Annotated, Any, Final, get_args

import msgspec

from doll.errors import BadRecordsError, ConfigError, RetryLater, SampleError

HEADER_BYTES: Final = 5
_MAGIC: Final = b"\0"
# Errors that decoders raise for bad bytes: msgspec's errors, text that is not UTF-8, lists that are nested too deep.
BAD_VALUE: Final = (ValueError, RecursionError)
# Tokens of JSON that separate fields. A text without an end matches up to the end, so that the time is linear.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}:]', re.DOTALL)
_LOOKED_AT_BYTES: Final = 65_536
_DEEP: Final = 500


UInt64 = Annotated[int, msgspec.Meta(ge=0, extra={"dtype": "uint64"})]
"""The type of a field with integers of 64 bits without a sign, such as ids that are hashes: 0 to 2**64 - 1. Its column
is of uint64, and an `int`'s of int64."""


def is_uint64(kind: Any) -> bool:
    """Return whether a field's type is `UInt64`."""
    return any(
        (getattr(item, "extra", None) or {}).get("dtype") == "uint64" for item in getattr(kind, "__metadata__", ())
    )


def inner_kinds(kind: Any) -> Iterator[Any]:
    """Yield the types in a type: of `list[Click] | None`, `Click` and None's type. `doll.UInt64` is not divided."""
    arguments = () if is_uint64(kind) else [item for item in get_args(kind) if not isinstance(item, msgspec.Meta)]
    if not arguments:
        yield kind
    for item in arguments:
        yield from inner_kinds(item)


def missing(record: type[msgspec.Struct], names: Container[str]) -> str:
    """Return the required fields of `record` that are not in `names`, separated by commas; "" if there are none."""
    fields = msgspec.structs.fields(record)
    return ", ".join(field.encode_name for field in fields if field.required and field.encode_name not in names)


class FieldReader(ABC):
    """Decodes values into instances of one `msgspec.Struct`, `record`."""

    def __init__(self, record: type[msgspec.Struct]) -> None:
        self.record = record
        self._list = list[record]  # type: ignore[valid-type]

    @abstractmethod
    def read_one(self, value: bytes) -> Any:
        """Return the fields of one value.

        Raises:
            SampleError, ValueError: the value does not have the fields; the message is the reason.
            RetryLater: something that is needed for decoding is not available yet.
            ConfigError: no value can be decoded.
        """

    def read(self, values: Sequence[bytes]) -> list[Any]:
        """Return the fields of each value.

        Raises:
            BadRecordsError: some values do not have the fields; `read_one` raises the reason for each.
            RetryLater, ConfigError: see `read_one`.
        """
        try:
            return self.read_all(values)
        except (RetryLater, ConfigError):
            raise
        except Exception:  # a decoder may raise anything for bad bytes
            raise BadRecordsError(positions_of_bad(self.read_one, values)) from None

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        """Read values as `read` does. If a value is bad, raise any exception."""
        return [self.read_one(value) for value in values]


def positions_of_bad(read_one: Callable[[bytes], Any], values: Sequence[bytes]) -> list[int]:
    """Return the positions of the values that `read_one` refuses."""
    bad = []
    for position, value in enumerate(values):
        try:
            read_one(value)
        except (RetryLater, ConfigError):
            raise
        except Exception:
            bad.append(position)
    return bad


class JsonReader(FieldReader):
    """A reader of JSON objects; the first `skip_bytes` bytes of each value are a header."""

    def __init__(self, record: type[msgspec.Struct], *, has_header: bool = False) -> None:
        super().__init__(record)
        self._decode = msgspec.json.Decoder(record).decode
        self._has_header = has_header

    def read_one(self, value: bytes) -> Any:
        if self._has_header:
            check_header(value)
            value = value[HEADER_BYTES:]
        try:
            return self._decode(value)
        except msgspec.ValidationError:  # its message names the field
            raise
        except BAD_VALUE as exc:
            name = self._bad_field(value) or "the value"
            raise SampleError(f"{name}: {type(exc).__name__}: {exc}") from None

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        decode = self._decode
        if not self._has_header:
            return [decode(value) for value in values]
        check_headers(values)
        return [decode(memoryview(value)[HEADER_BYTES:]) for value in values]

    def _bad_field(self, value: bytes) -> str:
        """Return the name of the bad field if it is known: one that fails by itself, else the last or too deep one."""
        try:
            raw = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        except BAD_VALUE:
            return _last_field(value[:_LOOKED_AT_BYTES])
        for field in msgspec.structs.fields(self.record):
            try:
                msgspec.json.decode(raw.get(field.encode_name, b"null"))
            except BAD_VALUE:
                return field.encode_name
        return ""


def _last_field(value: bytes) -> str:
    """Return the field of a JSON object in which the object becomes too deep, or ends."""
    depth, name, text = 0, b"", b""
    for match in _TOKEN.finditer(value):
        token = match[0]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
        elif token == b":" and depth == 1:
            name = text
        text = token[1:-1]
        if depth > _DEEP:
            break
    return name.decode(errors="replace")


def check_headers(values: Sequence[bytes]) -> None:
    """Check the headers of all values, as `check_header` does."""
    if {value[:1] for value in values} != {_MAGIC} or min(map(len, values)) < HEADER_BYTES:
        raise SampleError("a value has no header")


def check_header(value: bytes) -> None:
    """Raise SampleError if a value lacks the header of a schema registry."""
    if len(value) < HEADER_BYTES or value[:1] != _MAGIC:
        raise SampleError(
            "expected the header of a schema registry, a byte 0 and 4 bytes of a schema id, got "
            f"{value[:HEADER_BYTES]!r}: was the record written with a registry's serializer?"
        )


def schema_id(value: bytes) -> int:
    """Return the schema id in the header of a value that has one."""
    return int.from_bytes(value[1:HEADER_BYTES], "big")
