"""NVIDIA's client of the Open Inference Protocol, which knows nothing of DOLL, tests what the protocol asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_rig import ServingRig, output_of

pytestmark = pytest.mark.slow  # loads torch
triton = pytest.importorskip("tritonclient.http")
X = np.array([[1, 2], [3, 4]], np.float32)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingRig]:
    folder: Path = tmp_path_factory.mktemp("triton")
    with ServingRig(folder) as rig:
        rig.save(3)
        yield rig.start()


@pytest.fixture(scope="module")
def client(rig: ServingRig) -> Iterator[Any]:
    client = triton.InferenceServerClient(f"127.0.0.1:{rig.port}")
    yield client
    client.close()


def tensor(x: np.ndarray[Any, Any] = X, *, binary: bool, name: str = "x", datatype: str = "FP32") -> Any:
    made = triton.InferInput(name, list(x.shape), datatype)
    made.set_data_from_numpy(x, binary_data=binary)
    return made


def test_metadata_and_health(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("line")
    assert client.is_model_ready("line", "3")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "doll"
    metadata = client.get_model_metadata("line", "3")
    assert metadata["versions"] == ["3", "latest"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert metadata["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 1]}]


@pytest.mark.parametrize("to_server", [True, False])
@pytest.mark.parametrize("from_server", [True, False, None])
def test_infer(client: Any, to_server: bool, from_server: bool | None) -> None:
    outputs = None if from_server is None else [triton.InferRequestedOutput("output", binary_data=from_server)]
    result = client.infer("line", [tensor(binary=to_server)], outputs=outputs, request_id="a", model_version="3")
    assert result.as_numpy("output").tolist() == [[value] for value in output_of(3, X)]
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("line", "3", "a")
    assert answer["parameters"].keys() >= {"age_s", "samples_behind", "stale"}


def test_other_types_are_taken_as_training_takes_them(client: Any) -> None:
    result = client.infer("line", [tensor(X.astype(np.int32), binary=True, datatype="INT32")])
    assert result.as_numpy("output").ravel().tolist() == output_of(3, X)


@pytest.mark.parametrize(
    ("inputs", "more", "status", "said"),
    [
        ([tensor(binary=True, name="y")], {}, "422", "expected the inputs x, got y"),
        ([tensor(np.ones((1, 3), np.float32), binary=True)], {}, "422", "expected shape"),
        ([tensor(np.full((1, 2), np.nan, np.float32), binary=True)], {}, "422", "finite"),
        ([tensor(binary=False)], {"model_version": "9"}, "404", "expected one of the versions"),
        ([tensor(binary=False)], {"outputs": [triton.InferRequestedOutput("other")]}, "422", "expected outputs of"),
        ([tensor(binary=False)], {"request_compression_algorithm": "gzip"}, "415", "not compressed"),
    ],
)
def test_errors_have_a_status_and_a_reason(client: Any, inputs: Any, more: Any, status: str, said: str) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException) as raised:
        client.infer("line", inputs, **more)
    assert raised.value.status() == status
    assert said in raised.value.message()


def test_a_model_that_there_is_not(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match="expected the model line"):
        client.infer("other", [tensor(binary=True)])
