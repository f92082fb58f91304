"""Models with tables, whose rows are in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_rig import JOB, ServingRig
from waiting import until

pytestmark = pytest.mark.slow  # loads torch

TASK = """
import doll
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.known = torch.nn.Embedding(10, 1, sparse=True)
        self.hashed = doll.BoundedEmbedding(1000, 1, scale=0.5)
        self.bias = torch.nn.Parameter(torch.zeros(1))


class Line(doll.Task):
    input_shape = (2,)

    def build_model(self):
        return Model()

    def forward(self, model, x):
        return model.known(x[:, 0].long()) + model.hashed(x[:, 1].long()) + model.bias

    def decode(self, record):
        raise NotImplementedError
"""
TABLES = JOB.replace("group_size: 1}}", "group_size: 1}, tables: {hashed: {max_rows: 32}}}")


def rows(version: int) -> dict[str, Any]:
    """All rows are `version`; of the bounded table, those of ids 3 and 7."""
    return {
        "table.known.weight.values": np.full((10, 1), version, np.float32),
        "table.hashed.weight.ids": np.array([7, 3, -1]),
        "table.hashed.weight.values": np.array([[version], [version], [0]], np.float32),
    }


def test_rows_are_those_of_the_version_and_a_new_id_has_what_training_would_give_it(tmp_path: Path) -> None:
    with ServingRig(tmp_path, task=TASK, job=TABLES) as rig:
        rig.save(2, **rows(2))
        rig.start()
        assert rig.model.tables is not None
        (initial,) = rig.model.tables.bounds["hashed.weight"].initial.of(np.array([500]))[:, 0].tolist()
        assert initial != 0
        for version in (2, 4):
            until(lambda version=version: rig.version() == version, f"version {version}")  # type: ignore[misc]
            status, answer = rig.infer([[0, 3], [9, 7], [1, 500]])
            assert status == 200
            expected = [2.5 * version, 2.5 * version, 1.5 * version + initial]
            assert answer["outputs"][0]["data"] == pytest.approx(expected)
            rig.save(4, **rows(4))
        assert rig.infer([[10, 3]])[0] == 422
        assert "expected ids of 0 to 9" in rig.infer([[10, 3]])[1]["error"]
