"""An example task in thirty lines: it predicts whether a customer leaves. Events are JSON lines.

Run as a program, it prints random events: python task.py 20000 > events.jsonl
"""

import json
import math
import random
import sys

import msgspec
import numpy as np
import torch
from doll import JsonTask


class Event(msgspec.Struct):  # a line that is not JSON, or lacks a field, goes to the dead-letter topic
    age: float
    visits: float
    spend: float
    left: bool


class Churn(JsonTask):
    record = Event
    input_shape = (3,)
    num_classes = 2
    targets = ("left",)  # a record for a prediction may omit this field

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def samples(self, events):  # `events` has one array for each field, with the values of many events
        x = [events["age"] / 50, events["visits"] / 10, np.log1p(events["spend"]) / 5]
        return np.stack(x, axis=1), events["left"]


def random_event(rng):
    age, visits, spend = rng.uniform(18, 80), rng.randint(0, 30), rng.expovariate(1 / 80)
    leaves = 1 / (1 + math.exp(visits - 8 + spend / 40))
    return {"age": round(age, 1), "visits": visits, "spend": round(spend, 2), "left": rng.random() < leaves}


if __name__ == "__main__":
    rng = random.Random(0)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000):
        sys.stdout.write(json.dumps(random_event(rng)) + "\n")
