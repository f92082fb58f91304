"""The example `clicks_avro`: what it refuses, that both schemas give the same samples, and that it learns."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import fastavro
import msgspec
import numpy as np
import pytest
import torch
from doll import config as job_config
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.task.base import load_task
from examples.clicks_avro.fill import Schema, clicks, encode
from examples.clicks_avro.task import CATEGORIES, COUNTS, Clicks, made_up
from fake_registry import FakeRegistry, fake_registry
from paths import EXAMPLES, SHARED_DATA
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

FOLDER = EXAMPLES / "clicks_avro"
CLICK: dict[str, Any] = {"clicked": True, "counts": [7, None, *[0] * 11], "categories": ["0f", None, *["a"] * 24]}


def schema(version: int) -> Schema:
    return Schema(version, fastavro.parse_schema(json.loads((FOLDER / f"click-{version}.avsc").read_text())))


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with fake_registry() as server:
        for version in (1, 2):
            server.add(version, json.loads((FOLDER / f"click-{version}.avsc").read_text()))
        server.add_version("clicks-value", "latest", json.loads((FOLDER / "click-2.avsc").read_text()))
        yield server


@pytest.fixture
def task(registry: FakeRegistry) -> Any:
    """As a worker of the example's job file loads it."""
    return load_task(job_config.load(FOLDER / "job.yaml", [f"data.format.registry={registry.url}"]))


def test_a_record_of_either_schema_is_the_same_sample(task: Any) -> None:
    for version in (1, 2):
        sample = task.decode(encode(schema(version), {"impression": 2**60 + 1, **CLICK}))
        x = np.asarray(sample.x)
        assert x[: COUNTS + 2] == pytest.approx(
            [math.log(8) / 4, *[0] * 12, task.column(0, "0f"), task.column(1, None)], rel=1e-6
        )
        assert sample.y == 1


def test_many_of_both_schemas_decode_as_each_does(task: Any) -> None:
    records = [encode(schema(1 + at % 2), click) for at, click in enumerate(clicks(made_up(200)))]
    slow_x, slow_y = stack(task.decode(record) for record in records)
    decoded = decode_records(task, RawRecords(range(200), records), samples_per_record=1, max_record_bytes=10_000)
    assert decoded.refused == []
    assert (decoded.x == slow_x).all()
    assert (decoded.y == slow_y).all()
    assert {0, 1} == set(decoded.y.tolist())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("counts", [1] * 12, "`array` of length >= 13 - at `$.counts`"),
        ("counts", [-4] * 13, "`float` >= -3.0 - at `$.counts[0]`"),
        ("categories", ["a"] * 27, "`array` of length <= 26 - at `$.categories`"),
    ],
)
def test_a_record_that_cannot_be_learned_is_refused_by_its_field(
    task: Any, field: str, value: object, words: str
) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        task.decode(encode(schema(1), {**CLICK, field: value}))
    assert words in str(error.value)


def test_ids_stay_whole_as_the_owner_sends_them() -> None:
    first, second = itertools.islice(clicks(made_up(2)), 2)
    bodies = [io.BytesIO(encode(schema(2), click)[5:]) for click in (first, second)]
    values: list[Any] = [fastavro.schemaless_reader(body, schema(2).parsed) for body in bodies]
    assert [value["impression"] for value in values] == [2**53 + 1, 2**53 + 2]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="columns: expected 1 to 16777216, got 0"):
        Clicks(0)


def test_it_learns_the_clicks_that_are_made_up() -> None:
    task = Clicks()
    x, y, *_ = task.decode_many([json.dumps(click).encode() for click in clicks(made_up(4000))])
    model = task.build_model()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05, initial_accumulator_value=3)
    losses = []
    for at in range(0, 3968, 128):
        optimizer.zero_grad()
        part = slice(at, at + 128)
        loss = task.loss(task.forward(model, torch.from_numpy(x[part])), torch.from_numpy(y[part]))
        losses.append(loss.item())
        (128 * loss).backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert np.mean(losses[-10:]) < 0.57


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the data in ../shared")
def test_lines_of_the_published_file_are_clicks(task: Any) -> None:
    with gzip.open(SHARED_DATA / "criteo_sample" / "dev.tsv.gz", "rt") as file:
        rows = list(clicks(file))
    assert (len(rows), sum(row["clicked"] for row in rows)) == (409, 93)
    x, y, *_ = task.decode_many([encode(schema(2), row) for row in rows])
    assert x.shape == (409, COUNTS + CATEGORIES)
    assert int(y.sum()) == 93


def test_a_line_of_other_cells_ends_the_program() -> None:
    with pytest.raises(SystemExit, match="line 2: expected 40 cells, got 2"):
        list(clicks([next(made_up(1)), "1\t2\n"]))
