"""Whatever comes to a model server is answered, or refused with a reason: never 500."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import doll
import msgspec
import numpy as np
import pytest
import torch
from doll.task.base import Sample, Task
from fuzzing import JSON_WORDS, inputs
from serving_app import CalledApp

pytestmark = [pytest.mark.slow, pytest.mark.fuzz]  # loads torch
DIGITS = b"9" * 4_200
WORDS = [
    *JSON_WORDS, b'"datatype": "X"', b'"shape": [1e9]', b'"shape": [-1, 2]', b'"data": [[]]', b'"data": {}',
    b'"shape": [%b, %b]' % (DIGITS, DIGITS), b'"shape": [16777216, 16777216]', b'"shape": [0, 281474976710656]',
    b"[[1], [2, 3]]", b"[1, [2]]", b"[[], 1]", b"[" * 31 + b"1" + b"]" * 31, b"[" * 65 + b"1" + b"]" * 65,
    b"[" * 33 + b"]" * 33, b"9" * 400, DIGITS, b"1e400", b"-0", b"18446744073709551616", b"true",
]  # fmt: skip


class Pairs(Task):
    """One array of two numbers, of which the type is open."""

    input_shape = (2,)

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def forward(self, model: torch.nn.Module, x: Any) -> Any:
        return model(x.float())


class Visits(Task):
    """A tree, as `spec` says it."""

    def spec(self) -> Any:
        return {
            "numbers": doll.Field("float32", (2,)),
            "on": doll.Field("bool"),
            "word": doll.Field("int64", (2,)),
        }, None

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    def forward(self, model: torch.nn.Module, x: Any) -> Any:
        return model(x["numbers"]) + x["word"].sum(1, keepdim=True) * x["on"].float()[:, None]


class Bags(Task):
    """Samples of any length, which the task puts together."""

    def holdout(self) -> Iterable[Sample]:
        return [Sample(np.array([1, 2, 3]), 1)]

    def collate(self, samples: Any) -> Any:
        return np.array([[np.sum(sample.x), len(sample.x)] for sample in samples], np.float32), np.zeros(len(samples))

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 1)


def infer(**tensors: tuple[str, list[int], list[Any]]) -> bytes:
    rows = [
        {"name": name, "datatype": kind, "shape": shape, "data": data} for name, (kind, shape, data) in tensors.items()
    ]
    return msgspec.json.encode({"id": "1", "inputs": rows})


def replaced(request: bytes) -> Iterator[bytes]:
    """With each word in the place of each list of numbers and of each number."""
    for place in re.finditer(rb"\[[^][{}]*\]|\d+(\.\d+)?", request):
        for word in WORDS:
            yield request[: place.start()] + word + request[place.end() :]


CASES: list[tuple[Task, bytes, bytes]] = [
    (Pairs(), infer(x=("FP32", [1, 2], [1, 2.5])), b'[{"x": [1, 2.5]}, {"x": [3, 4]}]'),
    (
        Visits(),
        infer(numbers=("FP32", [1, 2], [1, 2]), word=("INT64", [1, 2], [3, 4]), on=("BOOL", [1], [True])),
        b'{"x": {"numbers": [1, 2.5], "word": [3, 4], "on": true}}',
    ),
    (Bags(), infer(x=("INT64", [1, 3], [1, 2, 3])), b'[{"x": [1, 2, 3]}, {"x": [4]}]'),
]  # fmt: skip


@pytest.mark.parametrize(("task", "tensors", "records"), CASES, ids=lambda value: type(value).__name__)
def test_requests_of_anybody_are_answered_or_refused(task: Task, tensors: bytes, records: bytes) -> None:
    app = CalledApp(task)
    sized = tensors.replace(b'"data":', b'"parameters":{"binary_data_size":8},"data":')

    async def ask() -> None:
        seen: dict[int, int] = {}
        for path, seeds in (("/v2/models/m/infer", [tensors, sized + bytes(8)]), ("/predict", [records])):
            assert (answer := await app.post(path, seeds[0]))[0] == 200, answer
            made_up = inputs(f"serve {type(task).__name__} {path}", 2_000, seeds, WORDS)
            for data in itertools.chain(replaced(seeds[0]), made_up):
                for length in ({}, {"Inference-Header-Content-Length": str(len(sized))}):
                    status, body, _ = await app.post(path, data, length)
                    seen[status] = seen.get(status, 0) + 1
                    assert status in (200, 400, 422), (path, data[:400], body)
                    assert status == 200 or 0 < len(msgspec.json.decode(body)["error"]) <= 2_000
        assert set(seen) == {200, 400, 422}, seen

    asyncio.run(ask())
