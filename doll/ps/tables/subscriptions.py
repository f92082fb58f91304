"""Which rows each worker is sent without asking: rows that it has asked for once, when they have changed (ESSP).

Dai et al., "High-Performance Distributed ML at Scale through Parameter Server Consistency Models" (AAAI 2015): the
first GET of a row registers a call-back. Here a push holds only the rows that have changed since the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from doll.ps.tables.store import TableStore
from doll.tables.rows import Ids, Rows


class Changes(NamedTuple):
    """What a worker has not been sent: its rows that have changed after `since`, as they are in `version`."""

    since: int
    version: int
    rows: dict[str, Rows]


class Subscriptions:
    """Rows that workers have asked for. A bit for each row and worker, in pages that take memory once they are used."""

    def __init__(self, tables: TableStore) -> None:
        self._tables = tables
        self._rows: dict[int, dict[str, npt.NDArray[np.bool_]]] = {}
        self._sent: dict[int, int] = {}  # worker -> version up to which it has been sent its rows

    def subscribe(self, worker: int, name: str, ids: Ids, version: int) -> None:
        """`worker` is being sent these rows of a table as they are in `version`, the newest."""
        rows = self._rows.setdefault(worker, {})
        if name not in rows:
            rows[name] = np.zeros(self._tables.shapes[name].num_rows, np.bool_)
        rows[name][ids] = True
        self._sent.setdefault(worker, version)

    def due(self, worker: int, version: int) -> Changes | None:
        """What `worker` is to be sent now that `version` is the newest; None where it has not asked for any row.

        It counts as sent.
        """
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
        return Changes(since, version, rows)

    def forget(self, worker: int) -> None:
        """`worker` has left, or has begun a new session."""
        self._rows.pop(worker, None)
        self._sent.pop(worker, None)
