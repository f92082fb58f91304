"""The example `trips`: what it refuses, that it learns, and what its owner's program sends."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.task.base import Sample
from examples.trips.fill import trips
from examples.trips.task import Fares, made_up
from paths import SHARED_DATA
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

MONTH = SHARED_DATA / "nyc_green_taxi_2024_01" / "trips.csv.gz"
TRIP = {
    "lpep_pickup_datetime": "2024-01-01T00:03:57", "PULocationID": 130, "DOLocationID": 196, "trip_distance": 5.06,
    "fare_amount": 23.3,
}  # fmt: skip


def test_a_trip_is_its_zones_its_distance_and_its_time() -> None:
    sample = Fares().decode(json.dumps(TRIP).encode())
    assert isinstance(sample, Sample)
    assert np.asarray(sample.x)[:4] == pytest.approx([130, 196, 0.506, np.log1p(5.06)], rel=1e-6)
    assert float(np.asarray(sample.y)) == pytest.approx(2.33)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("fare_amount", -23.3, "`float` >= 0.0 - at `$.fare_amount`"),
        ("PULocationID", 0, "`int` >= 1 - at `$.PULocationID`"),
        ("DOLocationID", None, "got `null` - at `$.DOLocationID`"),
        ("lpep_pickup_datetime", "yesterday", "Invalid RFC3339 encoded datetime"),
    ],
)
def test_a_trip_that_cannot_be_learned_is_refused_by_its_field(field: str, value: object, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        Fares().decode(json.dumps({**TRIP, field: value}).encode())
    assert words in str(error.value)


def test_many_decode_as_each_does() -> None:
    records = [json.dumps(trip).encode() for trip in made_up(200)]
    slow_x, slow_y = stack(Fares().decode(record) for record in records)
    decoded = decode_records(Fares(), RawRecords(range(200), records), samples_per_record=1, max_record_bytes=10_000)
    assert decoded.refused == []
    assert (decoded.x == slow_x).all()
    assert (decoded.y == slow_y).all()


def test_it_learns_fares() -> None:
    task = Fares()
    x, y, *_ = task.decode_many([json.dumps(trip).encode() for trip in made_up(4000)])
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
    inputs, fares = torch.from_numpy(x), torch.from_numpy(y)
    for at in itertools.islice(itertools.cycle(range(0, 3000, 100)), 300):
        optimizer.zero_grad()
        task.loss(task.forward(model, inputs[at : at + 100]), fares[at : at + 100]).backward()
        optimizer.step()
    with torch.no_grad():
        error_usd = task.metrics(task.forward(model, inputs[3000:]), fares[3000:])["error_usd"]
    mean_error_usd = 10 * float((fares[3000:] - fares[:3000].mean()).abs().mean())
    assert error_usd < 0.5 * mean_error_usd


def test_a_month_of_trips_is_sent_as_it_is(tmp_path: Path) -> None:
    if not MONTH.is_file():
        pytest.skip("needs the data in ../shared")
    with gzip.open(MONTH, "rt", encoding="utf-8") as file:
        records = [json.dumps(trip).encode() for trip in trips(file, is_csv=True)]
    assert len(records) == 56_551
    decoded = decode_records(
        Fares(), RawRecords(range(len(records)), records), samples_per_record=1, max_record_bytes=10_000
    )
    assert 56_000 < decoded.num_samples < len(records)
    assert {item.code for item in decoded.refused} == {"undecodable"}
