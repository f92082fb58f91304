"""Requests and answers of the Open Inference Protocol V2 over HTTP, in JSON and with its binary extension. Pure.

Protocol: https://github.com/kserve/open-inference-protocol. Binary tensors after the JSON:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md. If a request
contains binary tensors, the header `Inference-Header-Content-Length` states the length of the JSON before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from doll.errors import SampleError
from doll.records.bounded import MalformedError, short
from doll.serving.tensors import DATATYPE_OF, DTYPES
from doll.task.forms import array_of
from doll.task.trees import Array, are_numbers

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
_SIZE: Final = "binary_data_size"
_MAX_DIMENSIONS: Final = 16
_MAX_NUMBERS: Final = 2**48  # in a shape; more than a body can contain
_MAX_NAME_CHARS: Final = 200
_NONE: Final[Mapping[str, Any]] = {}
_ACCEPTED: Final = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}  # numpy kinds of JSON numbers, by the tensor's kind


class InputTensor(msgspec.Struct):
    """One tensor of a request."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class WantedOutput(msgspec.Struct):
    """An output that a request asks for."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(msgspec.Struct):
    """The JSON of a request. Some clients write all of its fields, with null for missing values."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[WantedOutput] | None = None
    parameters: dict[str, Any] | None = None

    def is_binary(self, wanted: WantedOutput | None) -> bool:
        """Return whether an output is written as binary data after the JSON."""
        default = (self.parameters or _NONE).get("binary_data_output")
        own = None if wanted is None or wanted.parameters is None else wanted.parameters.get("binary_data")
        return bool(default if own is None else own)


class OutputTensor(NamedTuple):
    """One tensor of an answer."""

    name: str
    array: Array


_decoder = msgspec.json.Decoder(InferRequest)


def decode_request(body: bytes | bytearray, json_bytes: str | None) -> tuple[InferRequest, dict[str, Array]]:
    """Decode a request; return it, and its tensors by name.

    Args:
        json_bytes: value of the header `LENGTH_HEADER`. None: the whole body is JSON.

    Raises:
        MalformedError: the body is not a valid request.
        SampleError: the data of a tensor do not fit its type and shape.
    """
    length = len(body)
    if json_bytes is not None:
        if not (json_bytes.isascii() and json_bytes.isdecimal() and len(json_bytes) < 18):
            raise MalformedError(f"{LENGTH_HEADER}: expected a number of bytes, got {json_bytes!r:.60}")
        if (length := int(json_bytes)) > len(body):
            raise MalformedError(f"{LENGTH_HEADER}: expected at most {len(body)}, the bytes of the body, got {length}")
    view = memoryview(body)
    try:
        request = _decoder.decode(view[:length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(f"expected an inference request in JSON: {short(exc)}") from None
    if request.id is not None and len(request.id) > _MAX_NAME_CHARS:
        raise SampleError(f"id: expected at most {_MAX_NAME_CHARS} characters, got {len(request.id)}")
    tensors: dict[str, Array] = {}
    at = length
    for item in request.inputs:
        if len(item.name) > _MAX_NAME_CHARS:
            raise SampleError(f"expected names of at most {_MAX_NAME_CHARS} characters, got {len(item.name)}")
        dtype = DTYPES.get(item.datatype)
        if dtype is None:
            raise SampleError(f"{item.name}: expected a datatype of {', '.join(DTYPES)}, got {item.datatype!r:.60}")
        shape = item.shape
        is_possible = len(shape) <= _MAX_DIMENSIONS and all(0 <= size <= _MAX_NUMBERS for size in shape)
        if not is_possible or math.prod(size or 1 for size in shape) > _MAX_NUMBERS:
            expected_sizes = f"expected a shape of at most {_MAX_DIMENSIONS} sizes that a body can have"
            raise SampleError(f"{item.name}: {expected_sizes}, got {shape!r:.60}")
        if item.name in tensors:
            raise SampleError(f"{item.name}: expected each input once")
        size = (item.parameters or _NONE).get(_SIZE)
        if size is None:
            tensors[item.name] = _from_json(item, dtype)
            continue
        expected = math.prod(item.shape) * dtype.itemsize
        if size != expected or isinstance(size, bool) or at + expected > len(body):
            raise SampleError(
                f"{item.name}: expected {expected} bytes after the JSON for {item.datatype} of shape "
                f"{item.shape!r:.60}, got {_SIZE} {size!r:.20} and {len(body) - at} bytes"
            )
        # Copied, so that it is aligned and torch may write to it.
        numbers = np.frombuffer(view[at : at + expected], dtype.newbyteorder("<"))
        tensors[item.name] = numbers.reshape(item.shape).astype(dtype)
        at += expected
    if at != len(body):
        raise MalformedError(f"expected {at} bytes, as the JSON says, got {len(body)}")
    return request, tensors


def _from_json(item: InputTensor, dtype: np.dtype[Any]) -> Array:
    """Return the array of a tensor whose numbers are in the JSON, flat or nested."""
    if item.data is None:
        raise SampleError(f"{item.name}: expected data, or {_SIZE} in its parameters")
    if not are_numbers(item.data):
        raise SampleError(f"{item.name}: expected numbers of {item.datatype}, got other values")
    try:
        array = array_of(item.data, item.name)
    except (ValueError, OverflowError):
        raise SampleError(f"{item.name}: expected numbers, got lists of different lengths") from None
    if array.size and array.dtype.kind not in _ACCEPTED[dtype.kind]:
        raise SampleError(f"{item.name}: expected numbers of {item.datatype}, got other values")
    if array.size != math.prod(item.shape):
        raise SampleError(
            f"{item.name}: expected {math.prod(item.shape)} numbers for shape {item.shape!r:.60}, got {array.size}"
        )
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise SampleError(f"{item.name}: expected numbers of {item.datatype}, got one beyond")
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which is refused later
        return array.astype(dtype).reshape(item.shape)


def encode_answer(
    request: InferRequest, model: str, version: str, outputs: Sequence[OutputTensor], parameters: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON; None as the length if no binary tensors follow.

    Raises:
        SampleError: the request asks for an output that does not exist, or for a form that is not supported.
    """
    wanted: dict[str, WantedOutput] = {}
    if request.outputs:
        wanted = {item.name: item for item in request.outputs}
        by_name = {output.name: output for output in outputs}
        if unknown := wanted.keys() - by_name:
            raise SampleError(f"expected outputs of {', '.join(by_name)}, got {', '.join(sorted(unknown))!s:.200}")
        if any("classification" in (item.parameters or _NONE) for item in request.outputs):
            raise SampleError("parameters.classification: expected none: POST /predict answers with classes")
        outputs = [by_name[name] for name in wanted]
    behind: list[bytes] = []
    tensors = []
    for output in outputs:
        array = output.array
        tensor: dict[str, Any] = {
            "name": output.name, "datatype": DATATYPE_OF[array.dtype], "shape": list(array.shape)
        }  # fmt: skip
        if request.is_binary(wanted.get(output.name)):
            behind.append(array.tobytes())
            tensor["parameters"] = {_SIZE: len(behind[-1])}
        else:
            tensor["data"] = array.reshape(-1).tolist()
        tensors.append(tensor)
    answer = {"model_name": model, "model_version": version, "parameters": parameters, "outputs": tensors}
    if request.id:
        answer["id"] = request.id
    head = msgspec.json.encode(answer)
    return (b"".join([head, *behind]), len(head)) if behind else (head, None)
