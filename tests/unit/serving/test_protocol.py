"""Requests and answers of the Open Inference Protocol as bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from doll.errors import SampleError
from doll.records.bounded import MalformedError
from doll.serving.protocol import (
    InferRequest,
    OutputTensor,
    WantedOutput,
    decode_request,
    encode_answer,
)


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def tensor(data: Any = (1.0, 2.0), *, name: str = "x", datatype: str = "FP32", shape: Any = (1, 2)) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [1.0, 2.0, 3.0, 4.0]])
def test_numbers_in_json_are_flat_or_nested(data: Any) -> None:
    request, tensors = decode_request(body(tensor(data, shape=(2, 2)), id="7"), None)
    assert request.id == "7"
    assert tensors["x"].dtype == np.float32
    assert tensors["x"].tolist() == [[1, 2], [3, 4]]


def test_null_is_what_a_client_writes_for_what_it_leaves_out() -> None:
    item = {**tensor(), "parameters": None}
    request, tensors = decode_request(body(item, id=None, parameters=None, outputs=None), None)
    assert tensors["x"].tolist() == [[1, 2]]
    answer = json.loads(encode_answer(request, "digits", "12", OUTPUTS, {})[0])
    assert [output["name"] for output in answer["outputs"]] == ["scores", "class"]
    assert "id" not in answer
    wanted = [{"name": "class", "parameters": None}, {"name": "scores", "parameters": {"binary_data": None}}]
    request, _ = decode_request(body(item, outputs=wanted, parameters={"binary_data_output": None}), None)
    assert encode_answer(request, "digits", "12", OUTPUTS, {})[1] is None
    request, _ = decode_request(body(item, outputs=wanted, parameters={"binary_data_output": True}), None)
    assert encode_answer(request, "digits", "12", OUTPUTS, {})[1] is not None


def test_tensors_behind_the_json_are_taken_in_order() -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[1], [2]], np.int64)
    head = json.dumps(
        {
            "inputs": [
                {"name": "a", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}},
                tensor([True, False], name="flag", datatype="BOOL", shape=(2,)),
                {"name": "b", "datatype": "INT64", "shape": [2, 1], "parameters": {"binary_data_size": 16}},
            ]
        }
    ).encode()
    _, tensors = decode_request(bytearray(head + first.tobytes() + second.tobytes()), str(len(head)))
    assert list(tensors) == ["a", "flag", "b"]
    assert tensors["a"].tolist() == first.tolist()
    assert tensors["b"].tolist() == second.tolist()
    assert tensors["flag"].tolist() == [True, False]
    assert all(array.flags.writeable and array.flags.aligned for array in tensors.values())


@pytest.mark.parametrize(
    ("data", "length", "said"),
    [
        (b"", None, "expected an inference request in JSON"),
        (b"{}", None, "inputs"),
        (b'{"inputs": 3}', None, "expected an inference request"),
        (b'{"inputs": [{"name": "x"}]}', None, "shape"),
        (b"\xff\xfe", None, "expected an inference request"),
        (b"[" * 100_000, None, "expected an inference request"),
        (body(), "4000", "at most"),
        (body(), "-3", "expected a number of bytes"),
        (body(), "٣", "expected a number of bytes"),
        (body() + b"xx", str(len(body())), "as the JSON says"),
    ],
)
def test_what_is_no_request_is_malformed(data: bytes, length: str | None, said: str) -> None:
    with pytest.raises(MalformedError, match=said):
        decode_request(data, length)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (tensor(datatype="FP99"), "expected a datatype of BOOL"),
        (tensor(datatype="BYTES", data=["a", "b"]), "expected a datatype of BOOL"),
        (tensor(shape=(2, 2)), "expected 4 numbers"),
        (tensor(shape=(-1, 2)), "shape of at most"),
        (tensor(shape=(1,) * 100), "shape of at most"),
        (tensor(shape=(0, 10**18)), "that a body can have"),
        (tensor(shape=(10**18, 10**18)), "that a body can have"),
        (tensor(shape=(int("9" * 4200), int("9" * 4200))), "that a body can have"),
        (tensor(shape=(2**24, 2**24, 2)), "that a body can have"),
        (tensor(shape=(2**24, 2**24)), "expected 281474976710656 numbers"),
        (tensor(["1", "2"]), "expected numbers of FP32"),
        (tensor([None, 2]), "expected numbers of FP32"),
        (tensor([True, False]), "expected numbers of FP32"),
        (tensor([[1, 2], [3]]), "different lengths"),
        (tensor([1.5, 2], datatype="INT32"), "expected numbers of INT32"),
        (tensor([1, 300], datatype="UINT8"), "one beyond"),
        (tensor([1, -1], datatype="UINT64"), "one beyond"),
        (tensor([1, 10**30], datatype="INT64"), "x: expected integers of 64 bits"),
        ({"name": "x", "datatype": "FP32", "shape": [1, 2]}, "expected data"),
        ({"name": "x" * 1000, "datatype": "FP32", "shape": [1, 2]}, "at most 200 characters"),
        ({"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}, "binary_data_size 4"),
        ({"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": "4"}}, "bytes after"),
    ],
)
def test_a_tensor_that_is_not_what_it_says_is_refused_by_name(item: dict[str, Any], said: str) -> None:
    with pytest.raises(SampleError, match=said):
        decode_request(body(item), None)


def test_integers_keep_all_64_bits() -> None:
    for data in ([2**63 + 1, 1], [2**64 - 1, 2**63]):  # numpy makes floats of the first ones
        _, tensors = decode_request(body(tensor(data, datatype="UINT64")), None)
        assert tensors["x"].tolist() == [data]


def test_an_input_stands_once() -> None:
    with pytest.raises(SampleError, match="x: expected each input once"):
        decode_request(body(tensor(), tensor()), None)


OUTPUTS = [
    OutputTensor("scores", np.array([[0.5, 1.5]], np.float32)),
    OutputTensor("class", np.array([1], np.int64)),
]


def test_an_answer_in_json_has_all_outputs_and_what_is_said_of_the_version() -> None:
    data, length = encode_answer(InferRequest([], id="7"), "digits", "12", OUTPUTS, {"age_s": 0.25, "stale": False})
    assert length is None
    assert json.loads(data) == {
        "model_name": "digits",
        "model_version": "12",
        "id": "7",
        "parameters": {"age_s": 0.25, "stale": False},
        "outputs": [
            {"name": "scores", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]},
            {"name": "class", "datatype": "INT64", "shape": [1], "data": [1]},
        ],
    }


def test_outputs_are_selected_and_each_goes_where_it_is_asked_for() -> None:
    wanted = [WantedOutput("class"), WantedOutput("scores", {"binary_data": True})]
    data, length = encode_answer(InferRequest([], outputs=wanted), "digits", "12", OUTPUTS, {})
    assert length is not None
    answer = msgspec.json.decode(data[:length])
    assert [item["name"] for item in answer["outputs"]] == ["class", "scores"]
    assert answer["outputs"][1]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(data[length:], np.float32).tolist() == [0.5, 1.5]
    whole, length = encode_answer(
        InferRequest([], parameters={"binary_data_output": True}), "digits", "12", OUTPUTS, {}
    )
    assert length is not None
    assert len(whole) - length == 16


def test_outputs_that_there_are_not_are_refused() -> None:
    with pytest.raises(SampleError, match="expected outputs of scores, class, got other"):
        encode_answer(InferRequest([], outputs=[WantedOutput("other")]), "digits", "12", OUTPUTS, {})
    wanted = [WantedOutput("class", {"classification": 3})]
    with pytest.raises(SampleError, match="POST /predict"):
        encode_answer(InferRequest([], outputs=wanted), "digits", "12", OUTPUTS, {})
