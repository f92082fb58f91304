"""Requests for rows whose grant becomes void while they wait: nobody waits for their answer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import record_builders
from doll.config import parse
from doll.consumers.tables import row_client
from doll.consumers.tables.row_client import RowClient
from doll.errors import BlobError
from doll.records.control import GetRows, RowsStored
from doll.storage.blobs import rows_key
from doll.storage.sections import RowRequest, encode_rows
from doll.tables.rows import Rows, TableShape
from memory_stores import MemoryBlobs

JOB = "job: j\ntask: {class: 'm:T'}\ndata: {workers: 1, batch_size: 1}\ntraining: {policy: {name: asp}}"
TABLES = {"t": TableShape(10, 1)}
GRANT = record_builders.grant_of(
    term=1, worker=0, session=3, first=0, grant_ids=(1,), version=0, min_version=0, key="w"
)
REQUEST = RowRequest(np.array([4]), np.empty(0, np.int64))


class Asked:
    """A client whose requests reach `then` from another thread, as those of a worker do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(row_client, "_ASK_AGAIN_S", 3600.0)  # what waits for it fails by the test's time limit
        self.blobs = MemoryBlobs()
        self.client = RowClient(parse(JOB), self.blobs, TABLES)
        self.is_wanted = True
        self.threads: list[threading.Thread] = []
        self.client.connect(self._send)
        self.client.begin(GRANT, lambda: self.is_wanted)

    def _send(self, request: GetRows) -> None:
        self.threads.append(threading.Thread(target=self.then, args=(request,)))
        self.threads[-1].start()

    def then(self, request: GetRows) -> None:
        raise NotImplementedError

    def answer(self, request: GetRows) -> None:
        key = rows_key("j", 1, 0, 3, request.number)
        rows = {"t": Rows(np.array([4]), np.array([[0.5]], np.float32))}
        self.blobs.put(key, encode_rows(rows, TABLES, job="j", version=7).parts, 60.0)
        self.client.deliver(
            RowsStored(term=1, worker=0, session=3, number=request.number, version=7, key=key, included=0)
        )


def look_until_it_is_seen(client: RowClient) -> None:
    while not client._is_waiting:  # the request is sent before its answer is waited for
        pass
    client.look_again()


class VoidMeanwhile(Asked):
    def then(self, request: GetRows) -> None:
        self.is_wanted = False
        look_until_it_is_seen(self.client)


class StillWanted(Asked):
    def then(self, request: GetRows) -> None:
        look_until_it_is_seen(self.client)
        self.answer(request)


@pytest.mark.timeout(20)
def test_a_request_whose_grant_is_void_is_given_up_when_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = VoidMeanwhile(monkeypatch)
    with pytest.raises(BlobError, match="no rows of table 't' from the parameter server"):
        asked.client.fetch("t", REQUEST)
    assert len(asked.threads) == 1


@pytest.mark.timeout(20)
def test_a_look_does_not_end_a_request_whose_grant_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = StillWanted(monkeypatch)
    fetched = asked.client.fetch("t", REQUEST)
    assert fetched.version == 7
    assert fetched.rows.values.tolist() == [[0.5]]
    assert len(asked.threads) == 1


def test_looks_while_nobody_waits_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = StillWanted(monkeypatch)
    for _ in range(100):
        asked.client.look_again()
    assert asked.client._answers.empty()
