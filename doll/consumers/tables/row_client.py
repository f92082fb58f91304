"""The client that requests rows of tables from the parameter server. It waits for the rows in the thread that
computes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from doll.config import JobConfig
from doll.consumers.tables.row_cache import FetchedRows
from doll.errors import BlobError, NotFiniteError
from doll.model.slices import Slices
from doll.records.control import GetRows, Grant, RowsStored
from doll.storage.blobs import Blobs, row_request_key
from doll.storage.sections import RowRequest, StoredAnswer, decode_rows, encode_row_request
from doll.tables.row_slices import RowSlice, joined_rows, row_slices, with_ids
from doll.tables.rows import Patch, Rows, TableShape, no_rows
from doll.telemetry import get_logger

log = get_logger(__name__)

_ASK_AGAIN_S: Final = 1.0
_GIVE_UP_S: Final = 20.0  # below the default time after which a grant is replaced


class TakenRows(NamedTuple):
    """Rows from the blob store, by table name; see `StoredAnswer`. Of the patches, each shard has its own."""

    rows: dict[str, Rows]
    version: int
    patches: dict[str, tuple[Patch, ...]]


class RowClient:
    """The requests of one worker process, one at a time. If the model has shards, each request and each answer has a
    blob for each shard. Any thread may call `deliver` and `look_again`; only one
    thread may call the other methods."""

    def __init__(
        self, config: JobConfig, blobs: Blobs, tables: dict[str, TableShape], scope: str = "",
        slices: Slices | None = None,
    ) -> None:  # fmt: skip
        """Create the client. `scope`: see `doll.storage.blobs.scope_of`. Default: the name of the job, for a run
        without an id. `slices`: those of the model's shards; None: it is not divided."""
        self._slices = slices
        self._parts = row_slices(1 if slices is None else len(slices))
        self._scope = scope or config.job
        self._ttl_s = config.blobs.ttl_s
        self._blobs = blobs
        self.tables = tables
        self._send: Callable[[GetRows], object] | None = None
        self._answers: queue.SimpleQueue[RowsStored | None] = queue.SimpleQueue()  # None: check the grant again
        self._is_waiting = False
        self._number = 0
        self._grant: Grant | None = None
        self._is_wanted: Callable[[], bool] = lambda: True

    def connect(self, send: Callable[[GetRows], object]) -> None:
        """Use the function `send`, which is called in the thread that computes, to send requests."""
        self._send = send

    def deliver(self, answer: RowsStored) -> None:
        self._answers.put(answer)

    def look_again(self) -> None:
        """Check again whether the grant has become void. A task that waits for rows of a void grant stops waiting."""
        if self._is_waiting:
            self._answers.put(None)

    def begin(self, grant: Grant, is_wanted: Callable[[], bool]) -> None:
        """From now on, request rows that `grant` allows, while `is_wanted` returns True."""
        self._grant, self._is_wanted = grant, is_wanted

    def fetch(self, name: str, request: RowRequest) -> FetchedRows:
        """Return the rows that `request` names in table `name`, from the grant's `min_version` or a later version.

        A request or an answer may be lost, so the request is repeated every second.

        Raises:
            BlobError: the grant is not wanted any more, or there was no answer for 20 s.
            ServiceUnavailableError: the worker has stopped waiting for the blob store.
        """
        assert self._send is not None, "connect() comes first"
        assert self._grant is not None, "begin() comes first"
        grant, begun_s = self._grant, time.monotonic()
        blobs = [
            encode_row_request(
                {name: _part_of(request, part)}, part.shapes(self.tables), job=self._scope, version=grant.min_version
            )
            for part in self._parts
        ]
        while True:
            self._number += 1
            key = row_request_key(self._scope, grant.term, grant.worker, grant.session, self._number)
            for stored_key, blob in zip(self._keys(key), blobs, strict=True):
                self._blobs.put(stored_key, blob.parts, self._ttl_s)
            self._send(
                GetRows(worker=grant.worker, session=grant.session, term=grant.term, number=self._number, key=key)
            )
            self._is_waiting = True
            try:
                answer = self._wait(grant)
            finally:
                self._is_waiting = False
            if answer is not None and (rows := self._read(name, answer)) is not None:
                return rows
            waited_s = time.monotonic() - begun_s
            if waited_s >= _GIVE_UP_S or not self._is_wanted():
                raise BlobError(f"no rows of table {name!r} from the parameter server for {waited_s:.1f} s")
            log.info("rows_asked_again", table=name, waited_s=round(waited_s, 1))

    def _wait(self, grant: Grant) -> RowsStored | None:
        deadline_s = time.monotonic() + _ASK_AGAIN_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left_s)
            except queue.Empty:
                return None
            if answer is None:
                if not self._is_wanted():
                    return None
                continue
            if (answer.term, answer.session, answer.number) == (grant.term, grant.session, self._number):
                return answer
            self._blobs.delete(*self._keys(answer.key))  # the answer to a request that was repeated
        return None

    def _read(self, name: str, answer: RowsStored) -> FetchedRows | None:
        """Return the rows of an answer; None if the blob store does not contain all of them."""
        try:
            stored = self.take(answer.key)
        except NotFiniteError:
            raise
        except BlobError:
            return None
        rows = stored.rows.get(name, no_rows(self.tables[name].width))
        return FetchedRows(rows, stored.version, answer.included, stored.patches.get(name, ()))

    def take(self, key: str) -> TakenRows:
        """Return the rows under `key`, and delete them, because no other process reads them. Log and raise BlobError if
        the blob store does not contain all of them. Raise NotFiniteError if a value is NaN or infinite.
        """
        keys = self._keys(key)
        try:
            answers = [self._decoded(stored_key, part) for stored_key, part in zip(keys, self._parts, strict=True)]
            if len({answer.version for answer in answers}) > 1:
                raise BlobError("the shards have answered with rows of different versions")
        except BlobError as exc:
            log.warning("rows_refused", key=key, reason=str(exc))
            raise
        self._blobs.delete(*keys)
        return self._joined(answers)

    def _decoded(self, key: str, part: RowSlice) -> StoredAnswer:
        if (blob := self._blobs.get(key)) is None:
            raise BlobError("not in the blob store (any more)")
        return decode_rows(blob, part.shapes(self.tables), job=self._scope)

    def _joined(self, answers: list[StoredAnswer]) -> TakenRows:
        rows, patches = {}, {}
        for name, shape in self.tables.items():
            if any(name in answer.rows for answer in answers):
                rows[name] = joined_rows([answer.rows.get(name, no_rows(shape.width)) for answer in answers])
            if any(name in answer.patches for answer in answers):
                patches[name] = tuple(
                    with_ids(answer.patches.get(name), part, shape.width)
                    for answer, part in zip(answers, self._parts, strict=True)
                )
        return TakenRows(rows, answers[0].version, patches)

    def _keys(self, key: str) -> list[str]:
        return [key] if self._slices is None else self._slices.keys(key)


def _part_of(request: RowRequest, part: RowSlice) -> RowRequest:
    """Return the part of a request for rows of one table that a shard answers."""
    since = np.broadcast_to(request.since, len(request.known))[part.has(request.known)]
    return RowRequest(part.numbers(request.ids), part.numbers(request.known), since)
