"""Generated classes of Protobuf messages, made without protoc: `Click`, `Other.Inner` behind it, and others."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto

_file = descriptor_pb2.FileDescriptorProto(name="doll_test/click.proto", package="doll_test", syntax="proto3")
_click = _file.message_type.add(name="Click")
for _number, (_name, _type, _label) in enumerate(
    [
        ("user", _Field.TYPE_INT64, _Field.LABEL_OPTIONAL),
        ("price", _Field.TYPE_FLOAT, _Field.LABEL_OPTIONAL),
        ("clicked", _Field.TYPE_BOOL, _Field.LABEL_OPTIONAL),
        ("tags", _Field.TYPE_INT64, _Field.LABEL_REPEATED),
    ],
    1,
):
    _click.field.add(name=_name, number=_number, type=_type, label=_label)
_click.oneof_decl.add(name="_age")
_click.field.add(
    name="age", number=5, type=_Field.TYPE_DOUBLE, label=_Field.LABEL_OPTIONAL, oneof_index=0, proto3_optional=True
)
_click.field.add(
    name="place", number=6, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL, type_name=".doll_test.Other.Inner"
)
_inner = _file.message_type.add(name="Other").nested_type.add(name="Inner")
_inner.field.add(name="country", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
_visit = _file.message_type.add(name="Visit")  # all that may be in a message
_visit.field.add(name="hash", number=1, type=_Field.TYPE_FIXED64, label=_Field.LABEL_OPTIONAL)
_visit.field.add(name="words", number=2, type=_Field.TYPE_STRING, label=_Field.LABEL_REPEATED)
_visit.oneof_decl.add(name="_age")
_visit.field.add(
    name="age", number=3, type=_Field.TYPE_DOUBLE, label=_Field.LABEL_OPTIONAL, oneof_index=0, proto3_optional=True
)
for _name, _number, _label, _kind in (
    ("place", 4, _Field.LABEL_OPTIONAL, "Other.Inner"), ("before", 5, _Field.LABEL_OPTIONAL, "Visit"),
    ("others", 6, _Field.LABEL_REPEATED, "Visit"), ("by_name", 7, _Field.LABEL_REPEATED, "Visit.ByNameEntry"),
    ("counts", 8, _Field.LABEL_REPEATED, "Visit.CountsEntry"),
):  # fmt: skip
    _visit.field.add(
        name=_name, number=_number, type=_Field.TYPE_MESSAGE, label=_label, type_name=f".doll_test.{_kind}"
    )
_entries = ("ByNameEntry", _Field.TYPE_MESSAGE, ".doll_test.Visit"), ("CountsEntry", _Field.TYPE_INT64, "")
for _name, _type, _kind in _entries:
    _entry = _visit.nested_type.add(name=_name)
    _entry.options.map_entry = True
    _entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    _entry.field.add(name="value", number=2, type=_type, label=_Field.LABEL_OPTIONAL, type_name=_kind or None)

_hashed = _file.message_type.add(name="Hashed")
_hashed.field.add(name="user", number=1, type=_Field.TYPE_UINT64, label=_Field.LABEL_OPTIONAL)
_hashed.field.add(name="price", number=2, type=_Field.TYPE_DOUBLE, label=_Field.LABEL_OPTIONAL)
_event = _file.message_type.add(name="Event")  # of `format_tasks`
for _number, (_name, _type) in enumerate(
    [
        ("user", _Field.TYPE_UINT64),
        ("price", _Field.TYPE_DOUBLE),
        ("seen", _Field.TYPE_INT64),
        ("name", _Field.TYPE_STRING),
    ],
    1,
):
    _event.field.add(name=_name, number=_number, type=_type, label=_Field.LABEL_OPTIONAL)
_event.field.add(
    name="more", number=5, type=_Field.TYPE_MESSAGE, label=_Field.LABEL_OPTIONAL, type_name=".doll_test.Event"
)

_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file.SerializeToString())
Click: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Click"))
Hashed: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Hashed"))
Visit: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Visit"))
Event: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Event"))
Inner: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Other.Inner"))
