"""Answers to workers that request rows of tables, and changed rows that workers get without a request (ESSP).

The rows go through the blob store, like weights: a record on the control channel names the blob.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import BlobError
from doll.ps.tables.store import TableStore
from doll.records.control import GetRows
from doll.storage.blobs import Blobs, changed_rows_key, rows_key
from doll.storage.sections import EncodedBlob, WireSize, decode_row_request, encode_rows
from doll.tables.rows import Ids, Rows


class Subscriptions:
    """The rows that workers have asked for: a bit for each row and worker, in pages that take memory only after they
    are used.

    Dai et al., "High-Performance Distributed ML at Scale through Parameter Server Consistency Models" (AAAI 2015): the
    first GET of a row registers a call-back. Here a push holds only the rows that have changed since the last push.
    """

    def __init__(self, tables: TableStore) -> None:
        self._tables = tables
        self._rows: dict[int, dict[str, npt.NDArray[np.bool_]]] = {}
        self._sent: dict[int, int] = {}  # worker -> version up to which its rows have been sent

    def subscribe(self, worker: int, name: str, ids: Ids, version: int) -> None:
        """Note that these rows of a table, as of `version`, the newest one, are being sent to `worker`."""
        rows = self._rows.setdefault(worker, {})
        if name not in rows:
            rows[name] = np.zeros(self._tables.shapes[name].num_rows, np.bool_)
        rows[name][ids] = True
        self._sent.setdefault(worker, version)

    def due(self, worker: int, version: int) -> tuple[int, dict[str, Rows]] | None:
        """Return the version up to which the rows of `worker` have been sent, and its rows that have changed after that
        version, up to `version`, the newest one. The result counts as sent. Return None if the worker has asked for no
        row."""
        since = self._sent.get(worker)
        if since is None:
            return None
        self._sent[worker] = version
        rows = {}
        for name, is_wanted in self._rows[worker].items():
            ids = self._tables.tables[name].changed_since(since)
            ids = ids[is_wanted[ids]]
            if len(ids):
                rows[name] = self._tables.tables[name].read(ids)
        return since, rows

    def forget(self, worker: int) -> None:
        self._rows.pop(worker, None)
        self._sent.pop(worker, None)


class StoredRows(NamedTuple):
    """Rows in the blob store.

    Attributes:
        since: version after which the rows have changed; unused in an answer to a request.
        request_bytes: size of the blob with the request; 0: there was no request.
    """

    key: str
    size: WireSize
    since: int = 0
    request_bytes: int = 0


class RowServer:
    """Sends the rows of one term's tables to workers. Not thread-safe."""

    def __init__(self, config: JobConfig, scope: str, term: int, tables: TableStore, blobs: Blobs) -> None:
        """`scope`: as in `doll.storage.blobs.scope_of`."""
        self._scope = scope
        self._ttl_s = config.blobs.ttl_s
        self._term = term
        self._tables = tables
        self._blobs = blobs
        self._subscriptions = Subscriptions(tables)

    def answer(self, request: GetRows, version: int, *, subscribes: bool) -> StoredRows:
        """Store the rows that `request` asks for, as they are in `version`, the newest one.

        Args:
            subscribes: True: the worker gets these rows again whenever they have changed (`changes`).

        Raises:
            BlobError: the request is not in the blob store, does not fit the tables of this job, or asks for a version
                that does not exist.
        """
        blob = self._blobs.get(request.key)
        if blob is None:
            raise BlobError("the request is not in the blob store (any more)")
        requests, min_version = decode_row_request(blob, self._tables.shapes, job=self._scope)
        if min_version > version:
            raise BlobError(f"expected rows of version {version} or earlier to be asked for, got {min_version}")
        answers = self._tables.answer(requests, request.worker, request.session)
        encoded = encode_rows(
            {name: answer.rows for name, answer in answers.items()}, self._tables.shapes, job=self._scope,
            version=version,
            patches={name: answer.patch for name, answer in answers.items() if answer.patch is not None},
        )  # fmt: skip
        self._blobs.delete(request.key)
        if subscribes:
            for name, wanted in requests.items():
                self._subscriptions.subscribe(request.worker, name, wanted.ids, version)
        key = rows_key(self._scope, self._term, request.worker, request.session, request.number)
        return self._store(key, encoded)._replace(request_bytes=len(blob))

    def changes(self, worker: int, version: int) -> StoredRows | None:
        """Store the changed rows for `worker`, as of `version`, the newest one. Return None if it has asked for no
        row."""
        changes = self._subscriptions.due(worker, version)
        if changes is None:
            return None
        since, rows = changes
        encoded = encode_rows(rows, self._tables.shapes, job=self._scope, version=version)
        stored = self._store(changed_rows_key(self._scope, self._term, worker, version), encoded)
        return stored._replace(since=since)

    def forget(self, worker: int) -> None:
        self._subscriptions.forget(worker)

    def _store(self, key: str, encoded: EncodedBlob) -> StoredRows:
        self._blobs.put(key, encoded.parts, self._ttl_s)
        return StoredRows(key, encoded.size)
