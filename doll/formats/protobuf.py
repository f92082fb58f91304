"""Protobuf messages, decoded by a generated class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from doll.errors import ConfigError, SampleError
from doll.formats.reader import HEADER_BYTES, FieldReader, check_header

_FIRST_MESSAGE: Final = b"\0"  # how serializers write [0]


class ProtobufReader(FieldReader):
    """Messages of one generated class."""

    def __init__(self, record: type[msgspec.Struct], message: Any, *, header: bool) -> None:
        """
        Args:
            message: the class.
            header: values have a registry's header.

        Raises:
            ConfigError: it is no class of messages, or it has not the fields.
        """
        super().__init__(record)
        if not (isinstance(message, type) and issubclass(message, Message)):
            raise ConfigError(f"data.format.message: expected a class of Protobuf messages, got {message!r}")
        generated: Any = message
        descriptor: Any = generated.DESCRIPTOR
        known = descriptor.fields_by_name
        fields = msgspec.structs.fields(record)
        if lacking := [field.encode_name for field in fields if field.required and field.encode_name not in known]:
            raise ConfigError(
                f"data.format.message: {descriptor.full_name} has no field {', '.join(lacking)}, which the task's "
                f"{record.__name__} requires (it has: {', '.join(known)})"
            )
        self._parse: Callable[[bytes], Any] = generated.FromString
        self._name = descriptor.full_name
        self._getters = [
            (field.encode_name, _getter(known[field.encode_name])) for field in fields if field.encode_name in known
        ]
        self._path = list(_path(descriptor))
        self._prefixes: tuple[bytes, ...] | None = None
        if header:
            written = b"".join(map(_zigzag, (len(self._path), *self._path)))
            self._prefixes = (_FIRST_MESSAGE, written) if self._path == [0] else (written,)
        self._list = list[record]  # type: ignore[valid-type]

    def read_one(self, value: bytes) -> Any:
        return msgspec.convert(self._fields(value), self.record, from_attributes=True)

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        return msgspec.convert(list(map(self._fields, values)), self._list, from_attributes=True)

    def _fields(self, value: bytes) -> dict[str, Any]:
        message = self._parse(value if self._prefixes is None else value[self._begin(value) :])
        fields = {}
        for name, get in self._getters:
            if (item := get(message)) is not msgspec.UNSET:
                fields[name] = item
        return fields

    def _begin(self, value: bytes) -> int:
        check_header(value)
        assert self._prefixes is not None
        for prefix in self._prefixes:
            if value.startswith(prefix, HEADER_BYTES):
                return HEADER_BYTES + len(prefix)
        raise SampleError(
            f"expected message {self._path} of its schema ({self._name}), got {value[HEADER_BYTES:][:8].hex()} as its "
            "index: the topic holds other messages as well"
        )


def _getter(field: Any) -> Callable[[Any], Any]:
    """What a field of a message holds; UNSET where it is optional and not there."""
    name = field.name
    if _is_repeated(field):
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        make: Callable[[Any], Any] = dict if is_map else list
        return lambda message: make(getattr(message, name))
    if field.has_presence:
        return lambda message: getattr(message, name) if message.HasField(name) else msgspec.UNSET
    return lambda message: getattr(message, name)


def _is_repeated(field: Any) -> bool:
    if (repeated := getattr(field, "is_repeated", None)) is not None:
        return bool(repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _path(descriptor: Any) -> Iterator[int]:
    """Which message of its file this is: the number at the top, then the numbers in the messages around it."""
    if (parent := descriptor.containing_type) is not None:
        yield from _path(parent)
        siblings = [item.full_name for item in parent.nested_types]
    else:
        siblings = [item.full_name for item in descriptor.file.message_types_by_name.values()]
    yield siblings.index(descriptor.full_name)


def _zigzag(number: int) -> bytes:
    """As a varint of Protobuf, signed."""
    number, out = number << 1, bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
