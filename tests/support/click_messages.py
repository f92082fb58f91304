"""Generated classes of Protobuf messages, made without protoc: `Click`, and `Other.Inner` behind it."""

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

_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file.SerializeToString())
Click: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Click"))
Inner: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_test.Other.Inner"))
