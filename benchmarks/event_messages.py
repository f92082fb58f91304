"""The generated class of the Protobuf messages of `benchmarks.intake`, made without protoc."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "age": _Field.TYPE_DOUBLE, "visits": _Field.TYPE_INT32, "spend": _Field.TYPE_DOUBLE, "tenure": _Field.TYPE_DOUBLE,
    "left": _Field.TYPE_BOOL,
}  # fmt: skip

_file = descriptor_pb2.FileDescriptorProto(name="doll_bench/event.proto", package="doll_bench", syntax="proto3")
_message = _file.message_type.add(name="Event")
for _number, (_name, _type) in enumerate(_TYPES.items(), 1):
    _message.field.add(name=_name, number=_number, type=_type, label=_Field.LABEL_OPTIONAL)
_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file.SerializeToString())
Event: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName("doll_bench.Event"))
