"""Protobuf messages, decoded by a generated class.

The rules for the fields of a message also hold for the fields of nested messages, at every depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from doll.errors import ConfigError, SampleError
from doll.formats.reader import HEADER_BYTES, FieldReader, check_header, inner_kinds, missing

_FIRST_MESSAGE: Final = b"\0"  # serializers write [0] in this form
_LENGTH_DELIMITED: Final = 2  # the wire type of texts, bytes and messages


class ProtobufReader(FieldReader):
    """A reader of messages of one generated class."""

    def __init__(self, record: type[msgspec.Struct], message: Any, *, header: bool) -> None:
        """
        Args:
            record: the class whose fields are decoded.
            message: the generated class.
            header: whether values have the header of a registry.

        Raises:
            ConfigError: `message` is not a class of messages, it lacks a field, or a field is unsigned with 64 bits and
                the field of `record` is not.
        """
        super().__init__(record)
        if not (isinstance(message, type) and issubclass(message, Message)):
            raise ConfigError(f"data.format.message: expected a class of Protobuf messages, got {message!r}")
        generated: Any = message
        descriptor: Any = generated.DESCRIPTOR
        self._parse: Callable[[bytes], Any] = generated.FromString
        self._name = descriptor.full_name
        self._by_number = descriptor.fields_by_number
        self._fields_of = _fields_reader(descriptor, record, {})
        self._path = list(_path(descriptor))
        self._prefixes: tuple[bytes, ...] | None = None
        if header:
            written = b"".join(_varint(number << 1) for number in (len(self._path), *self._path))  # as signed ones
            self._prefixes = (_FIRST_MESSAGE, written) if self._path == [0] else (written,)

    def read_one(self, value: bytes) -> Any:
        try:
            fields = self._fields(value)
        except DecodeError as exc:
            raise SampleError(f"{self._bad_field(value) or 'the value'}: {type(exc).__name__}: {exc}") from None
        return msgspec.convert(fields, self.record)

    def read_all(self, values: Sequence[bytes]) -> list[Any]:
        return msgspec.convert(list(map(self._fields, values)), self._list)

    def _fields(self, value: bytes) -> dict[str, Any]:
        return self._fields_of(self._parse(value if self._prefixes is None else value[self._begin(value) :]))

    def _bad_field(self, value: bytes) -> str:
        """Return the name of a field that cannot be parsed on its own, such as a text that is not UTF-8; otherwise
        ""."""
        body = value if self._prefixes is None else value[self._begin(value) :]
        try:
            fields = list(UnknownFieldSet(Empty.FromString(body)))
        except DecodeError:
            return ""
        for field in fields:
            if field.wire_type == _LENGTH_DELIMITED:
                head = _varint(field.field_number << 3 | _LENGTH_DELIMITED) + _varint(len(field.data))
                try:
                    self._parse(head + field.data)
                except DecodeError:
                    return str(getattr(self._by_number.get(field.field_number), "name", ""))
        return ""

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


def _fields_reader(descriptor: Any, record: Any, made: dict[Any, Any]) -> Callable[[Any], dict[str, Any]]:
    """Make a reader of the fields of a message that `record` names, without absent fields. If `record` is not a Struct,
    read all fields.

    Args:
        made: readers of the messages that contain this one, by message and record: a message may contain its own type.
    """
    key = descriptor.full_name, record
    if key in made:
        return lambda message: made[key](message)
    made[key] = None  # replaced when the reader is complete
    known = descriptor.fields_by_name
    if record is None:
        wanted: list[tuple[str, Any]] = [(name, None) for name in known]
    else:
        if lacking := missing(record, known):
            raise ConfigError(
                f"data.format.message: {descriptor.full_name} has no field {lacking}, which the task's "
                f"{record.__name__} requires (it has: {', '.join(known)})"
            )
        fields = msgspec.structs.fields(record)
        wanted = [(field.encode_name, field.type) for field in fields if field.encode_name in known]
    getters = []
    for name, kind in wanted:
        field = known[name]
        inner = list(inner_kinds(kind))
        if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64) and int in inner:
            raise ConfigError(
                f"data.format.message: {descriptor.full_name}.{name} has 64 bits without a sign, and "
                f"{record.__name__}.{name} is an int, which has one: expected `{name}: doll.UInt64`"
            )
        structs = [item for item in inner if isinstance(item, type) and issubclass(item, msgspec.Struct)]
        getters.append((name, _getter(field, structs[0] if structs else None, made)))

    def read(message: Any) -> dict[str, Any]:
        return {name: item for name, get in getters if (item := get(message)) is not msgspec.UNSET}

    made[key] = read
    return read


def _getter(field: Any, record: Any, made: dict[Any, Any]) -> Callable[[Any], Any]:
    """Make a getter of a message's field. It returns UNSET if the field has presence and is absent."""
    name, inner = field.name, field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        of_map = inner.fields_by_name["value"]
        if of_map.message_type is None:
            return lambda message: dict(getattr(message, name))
        read = _fields_reader(of_map.message_type, record, made)
        return lambda message: {key: read(item) for key, item in getattr(message, name).items()}
    if inner is None:
        if _is_repeated(field):
            return lambda message: list(getattr(message, name))
        if field.has_presence:
            return lambda message: getattr(message, name) if message.HasField(name) else msgspec.UNSET
        return lambda message: getattr(message, name)
    read = _fields_reader(inner, record, made)
    if _is_repeated(field):
        return lambda message: [read(item) for item in getattr(message, name)]
    return lambda message: read(getattr(message, name)) if message.HasField(name) else msgspec.UNSET


def _is_repeated(field: Any) -> bool:
    if (repeated := getattr(field, "is_repeated", None)) is not None:
        return bool(repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _path(descriptor: Any) -> Iterator[int]:
    """Yield the path of this message in its file: the index of the top message, then those of the nested messages."""
    if (parent := descriptor.containing_type) is not None:
        yield from _path(parent)
        siblings = [item.full_name for item in parent.nested_types]
    else:
        siblings = [item.full_name for item in descriptor.file.message_types_by_name.values()]
    yield siblings.index(descriptor.full_name)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
