"""Fares of taxi trips, from an existing topic: records are JSON objects with the columns of New York's TLC.

Run as a program, it prints made-up trips: python task.py 20000
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from doll import JsonTask
from torch import nn

ZONES = 265
Zone = Annotated[int, msgspec.Meta(ge=1, le=ZONES)]


class Trip(msgspec.Struct):
    """The used fields of a record. A record with invalid values, such as a refund, goes to the dead-letter topic."""

    lpep_pickup_datetime: datetime
    PULocationID: Zone
    DOLocationID: Zone
    trip_distance: Annotated[float, msgspec.Meta(ge=0, le=100)]  # miles
    fare_amount: Annotated[float, msgspec.Meta(ge=0, le=500)]  # USD


class Fares(JsonTask):
    """Predicts the fare from zones, distance and time of day. A target is in tens of USD."""

    record = Trip
    input_shape = (6,)

    def build_model(self) -> nn.Module:
        return FareModel()

    def samples(self, columns: Mapping[str, npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        miles = columns["trip_distance"]
        day = np.array([at.hour / 24 + at.minute / 1440 for at in columns["lpep_pickup_datetime"]]) * 2 * np.pi
        x = [
            columns["PULocationID"], columns["DOLocationID"], miles / 10, np.log1p(miles), np.sin(day), np.cos(day),
        ]  # fmt: skip
        return np.stack(x, axis=1).astype(np.float32), (columns["fare_amount"] / 10).astype(np.float32)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(output, target)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> Mapping[str, float]:
        return {"error_usd": 10 * float((output - target).abs().mean())}


class FareModel(nn.Module):
    """A model with a vector for each of the two zones, and four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pickup, self.dropoff = nn.Embedding(ZONES + 1, 8), nn.Embedding(ZONES + 1, 8)
        for zones in (self.pickup, self.dropoff):
            nn.init.normal_(zones.weight, std=0.1)
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zones = x[:, :2].long()
        inputs = torch.cat([self.pickup(zones[:, 0]), self.dropoff(zones[:, 1]), x[:, 2:]], dim=1)
        fares: torch.Tensor = self.layers(inputs).squeeze(1)
        return fares


def made_up(count: int) -> Iterator[dict[str, Any]]:
    """Yield random trips; most begin in few zones, as in New York."""
    rng, at = random.Random(0), datetime(2024, 1, 1)
    for _ in range(count):
        at += timedelta(seconds=rng.expovariate(1 / 45))
        miles = round(rng.lognormvariate(0.8, 0.7), 2)
        yield {
            "lpep_pickup_datetime": at.isoformat(timespec="seconds"),
            "PULocationID": min(ZONES, int(rng.paretovariate(0.7))),
            "DOLocationID": rng.randint(1, ZONES),
            "trip_distance": min(miles, 100.0),
            "fare_amount": round(min(500.0, 3 + 2.6 * miles + rng.expovariate(1 / 2)), 2),
        }


if __name__ == "__main__":
    for trip in made_up(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
        sys.stdout.write(json.dumps(trip) + "\n")
