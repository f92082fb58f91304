"""Rows that the server sends without asking, while a request for others is on its way."""

from __future__ import annotations

import numpy as np
import pytest
import record_builders
from doll.config import parse
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.table_rows import WorkerTables
from doll.records.control import GetRows, NewVersion, RowsStored
from doll.storage.blobs import changed_rows_key, rows_key
from doll.storage.sections import encode_rows
from doll.tables.rows import Rows, TableShape
from memory_stores import MemoryBlobs

pytestmark = pytest.mark.slow  # loads torch

JOB = "job: j\ntask: {class: 'm:T'}\ndata: {workers: 1, batch_size: 1}\ntraining: {policy: {name: asp}}"
TABLES = {"t": TableShape(10, 1)}


class Server:
    """Row i of version v is 100 v + i, plus `step` of the worker's batch 0 where the version includes it."""

    def __init__(self) -> None:
        self.blobs = MemoryBlobs()
        self.client = RowClient(parse(JOB), self.blobs, TABLES)
        self.client.connect(self.answer)
        self.rows = WorkerTables(self.client, 1 << 20)
        self.version = self.included = self.asked = 0
        self.pushes_behind: list[tuple[int, int, int]] = []  # since, version, included: they overtake the next answer

    def begin(self, min_version: int) -> None:
        grant = record_builders.grant_of(
            term=1, worker=0, session=3, first=0, grant_ids=(1,), version=min_version, min_version=min_version,
            key="w", included=self.included,
        )  # fmt: skip
        self.rows.begin(grant, lambda: True)

    def look_up(self, *ids: int) -> list[float]:
        return [float(row[0]) for row in self.rows.look_up("t", np.array(ids))]

    def stored(self, version: int, included: int, *ids: int) -> Rows:
        values = [[100.0 * version + at + (1000.0 if included else 0.0)] for at in ids]
        return Rows(np.array(ids), np.array(values, np.float32))

    def answer(self, request: GetRows) -> None:
        self.asked += 1
        key = rows_key("j", 1, 0, 3, request.number)
        rows = self.stored(self.version, self.included, 4, 5)
        self.blobs.put(key, encode_rows({"t": rows}, TABLES, job="j", version=self.version).parts, 60.0)
        self.client.deliver(
            RowsStored(
                term=1, worker=0, session=3, number=request.number, version=self.version, key=key,
                included=self.included,
            )
        )  # fmt: skip
        for since, version, included in self.pushes_behind:
            self.push(since, version, included)
        self.pushes_behind = []

    def push(self, since: int, version: int, included: int) -> None:
        self.version, self.included = version, included
        key = changed_rows_key("j", 1, 0, version)
        rows = {"t": self.stored(version, included, 4)}
        self.blobs.put(key, encode_rows(rows, TABLES, job="j", version=version).parts, 60.0)
        self.rows.offer(
            NewVersion(term=1, worker=0, version=version, key="w", included=included, rows_key=key, rows_since=since)
        )


def test_rows_that_overtake_an_answer_neither_void_it_nor_lose_own_steps() -> None:
    server = Server()
    server.begin(0)
    server.rows.inc({"t": Rows(np.array([4, 5]), np.array([[1000.0], [1000.0]], np.float32))})
    server.rows.close(0)
    server.pushes_behind = [(0, 1, 1)]
    assert server.look_up(4, 5) == [1004.0, 1005.0], "the rows of version 0 with the own step, which they lack"
    assert server.asked == 1
    server.begin(1)
    assert server.look_up(4) == [1104.0], "as the push has it, the step once"
    assert server.asked == 1


def test_rows_that_were_sent_before_an_answer_are_taken_with_it() -> None:
    server = Server()
    server.begin(0)
    assert server.look_up(4) == [4.0]
    server.push(0, 2, 0)
    assert server.look_up(5) == [205.0]
    assert server.asked == 2
    assert server.look_up(4) == [204.0], "the push is of the answer's version"
    assert server.asked == 2
