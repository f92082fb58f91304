"""Models with tables, whose rows are in checkpoints, and in what versions have changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doll.storage.blobs import followed_key, row_changes_key
from doll.storage.row_changes import RowChanges, encode_row_changes
from doll.tables.rows import Rows
from serving_rig import JOB, RUN_ID, ServingRig
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
        (initial,) = rig.model.tables.bounds["hashed.weight"].initial.rows(np.array([500]))[:, 0].tolist()
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


def publish(rig: ServingRig, version: int, since: int, known: list[int], hashed: list[int]) -> None:
    """A version, and that it has changed these rows to its number."""
    assert rig.model.tables is not None
    scope = f"line:{RUN_ID}"
    rows = {
        name: Rows(np.array(ids, np.int64), np.full((len(ids), 1), version, np.float32))
        for name, ids in (("known.weight", known), ("hashed.weight", hashed))
    }
    changes = RowChanges(since, version, 0, rows)
    blob = encode_row_changes(changes, rig.model.tables.shapes, job=scope)
    rig.blobs.put(row_changes_key(scope, 1, version), blob, 600.0)
    rig.publish(version)


def test_versions_come_with_the_rows_that_they_change(tmp_path: Path) -> None:
    x = [[0, 3], [9, 7], [1, 500]]
    with ServingRig(tmp_path, task=TASK, job=TABLES) as rig:
        rig.save(2, **rows(2))
        rig.start()
        assert rig.model.tables is not None
        (initial,) = rig.model.tables.bounds["hashed.weight"].initial.rows(np.array([500]))[:, 0].tolist()
        publish(rig, 3, 2, known=[0], hashed=[3])
        until(lambda: rig.version() == 3, "version 3")
        assert rig.infer(x)[1]["outputs"][0]["data"] == pytest.approx([3 + 3 + 1.5, 2 + 2 + 1.5, 2 + initial + 1.5])
        publish(rig, 5, 4, known=[9], hashed=[])  # and nobody knows what version 4 has changed
        # Nor does Redis, which is away here.
        until(lambda: "Redis is unreachable" in rig.infer(x)[1]["parameters"].get("stale_because", ""), "a reason")
        assert rig.version() == 3
        rig.save(5, **rows(5))
        until(lambda: rig.version() == 5, "the next checkpoint")
        assert rig.infer(x)[1]["outputs"][0]["data"] == pytest.approx([12.5, 12.5, 7.5 + initial])
        publish(rig, 6, 5, known=[], hashed=[500, 700])
        until(lambda: rig.version() == 6, "version 6")
        assert rig.infer(x)[1]["outputs"][0]["data"] == pytest.approx([13, 13, 5 + 6 + 3])
        assert "Redis" not in rig.infer(x)[1]["parameters"].get("stale_because", "")
        assert rig.blobs.get(followed_key(f"line:{RUN_ID}")), "the parameter server publishes rows for it"


def test_where_too_many_rows_have_changed_the_next_checkpoint_is_served(tmp_path: Path) -> None:
    with ServingRig(tmp_path, task=TASK, job=TABLES, row_bytes=100) as rig:
        rig.save(2, **rows(2))
        rig.start()
        publish(rig, 3, 2, known=list(range(10)), hashed=[])
        until(lambda: "--row-memory-mb" in rig.infer([[0, 3]])[1]["parameters"].get("stale_because", ""), "a reason")
        assert rig.version() == 2
        rig.save(4, **rows(4))
        publish(rig, 4, 3, known=[], hashed=[])
        until(lambda: rig.version() == 4, "the checkpoint")


def test_rows_go_back_with_a_rollback_while_the_version_before_is_published(tmp_path: Path) -> None:
    with ServingRig(tmp_path, task=TASK, job=TABLES) as rig:
        rig.save(5, **rows(5))
        rig.start()
        rig.publish(9)
        assert rig.store.claim_term() == 2
        rig.save(10, term=2, **rows(7))
        until(lambda: rig.version() == 10, "the version of the rollback")
        assert rig.infer([[0, 3]])[1]["outputs"][0]["data"] == pytest.approx([7 + 7 + 5])
