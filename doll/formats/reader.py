"""What all formats have in common: `FieldReader`, the header of a schema registry, and how bad values are found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from doll.errors import BadRecordsError, ConfigError, RetryLater, SampleError

HEADER_BYTES: Final = 5
_MAGIC: Final = b"\0"
# What decoders raise for bad bytes: msgspec's errors, text that is not UTF-8, lists in lists in lists.
BAD_VALUE: Final = (ValueError, RecursionError)


class FieldReader(ABC):
    """Decodes values into instances of one `msgspec.Struct`, `record`."""

    def __init__(self, record: type[msgspec.Struct]) -> None:
        self.record = record

    @abstractmethod
    def read_one(self, value: bytes) -> Any:
        """The fields of one value.

        Raises:
            SampleError, ValueError: the value has not the fields, for this reason.
            RetryLater: what is needed for decoding is not there yet.
            ConfigError: no value can be decoded.
        """

    def read(self, values: Sequence[bytes]) -> list[Any]:
        """The fields of each value.

        Raises:
            BadRecordsError: some values have not the fields; `read_one` says why.
            RetryLater, ConfigError: as `read_one`.
        """
        try:
            return self.read_all(values)
        except (RetryLater, ConfigError):
            raise
        except Exception:  # a decoder may raise anything for bad bytes
            raise BadRecordsError(positions_of_bad(self.read_one, values)) from None

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        """As `read`, where no value is bad; where one is, any exception."""
        return [self.read_one(value) for value in values]


def positions_of_bad(read_one: Callable[[bytes], Any], values: Sequence[bytes]) -> list[int]:
    """Where the values are that `read_one` refuses."""
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
    """JSON objects; `skip_bytes` of each value are a header."""

    def __init__(self, record: type[msgspec.Struct], *, has_header: bool = False) -> None:
        super().__init__(record)
        self._decode = msgspec.json.Decoder(record).decode
        self._has_header = has_header

    def read_one(self, value: bytes) -> Any:
        if self._has_header:
            check_header(value)
            return self._decode(memoryview(value)[HEADER_BYTES:])
        return self._decode(value)

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        decode = self._decode
        if not self._has_header:
            return [decode(value) for value in values]
        check_headers(values)
        return [decode(memoryview(value)[HEADER_BYTES:]) for value in values]


def check_headers(values: Sequence[bytes]) -> None:
    """As `check_header`, of all values."""
    if {value[:1] for value in values} != {_MAGIC} or min(map(len, values)) < HEADER_BYTES:
        raise SampleError("a value has no header")


def check_header(value: bytes) -> None:
    """Refuse a value without the header of a schema registry.

    Raises:
        SampleError: it has none.
    """
    if len(value) < HEADER_BYTES or value[:1] != _MAGIC:
        raise SampleError(
            "expected the header of a schema registry, a byte 0 and 4 bytes of a schema id, got "
            f"{value[:HEADER_BYTES]!r}: was the record written with a registry's serializer?"
        )


def schema_id(value: bytes) -> int:
    """The id in the header of a value that has one."""
    return int.from_bytes(value[1:HEADER_BYTES], "big")
