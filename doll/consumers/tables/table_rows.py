"""The rows of a worker's tables: a cache for each table, filled by requests and by rows that the server pushes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from doll.consumers.tables.row_cache import FetchedRows, RowCache, cached_row_bytes
from doll.consumers.tables.row_client import RowClient
from doll.consumers.tables.row_steps import RowSteps, state_row_bytes
from doll.errors import BlobError
from doll.optim.row_optimizer import RowOptimizer
from doll.optim.significance_filter import RowResidual
from doll.records.control import Grant, NewVersion
from doll.storage.sections import RowRequest
from doll.tables.rows import Floats, Ids, Rows
from doll.telemetry import get_logger

log = get_logger(__name__)

_MIN_TABLE_BYTES: Final = 1 << 16
_REPORT_EVERY_S: Final = 10.0
_NO_BOUNDS: Final[Mapping[str, int]] = {}


class WorkerTables:
    """All tables of one worker. Not thread-safe, except `offer`: the thread that computes owns the object."""

    def __init__(
        self, client: RowClient, max_bytes: int, *, max_rows: Mapping[str, int] = _NO_BOUNDS,
        optimizers: Mapping[str, RowOptimizer] | None = None, threshold: float = 0.0, rounds: bool = False,
        report: Callable[[dict[str, float]], object] = lambda values: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Create the caches.

        Args:
            max_bytes: limit of the memory of all caches and of `steps` together. It is divided among the tables by
                their size. In its share, each table has room for as many cached rows as optimizer states.
            max_rows: maximum number of rows of each bounded table, by table name.
            optimizers: the optimizer of each table, by name, if this worker computes the optimizer steps. None: the
                worker sends gradients.
            threshold, rounds: of the significance filter for this worker's own steps, see `RowResidual`.
            report: function that is called with `measures` every 10 s.
        """
        self._client = client
        sizes = {name: max_rows.get(name, shape.num_rows) * shape.width for name, shape in client.tables.items()}
        self._caches: dict[str, RowCache] = {}
        self.steps: dict[str, RowSteps] = {}
        for name, shape in client.tables.items():
            share = max(_MIN_TABLE_BYTES, max_bytes * sizes[name] // max(sum(sizes.values()), 1))
            row = cached_row_bytes(shape.width)
            optimizer = None if optimizers is None else optimizers[name]
            state = 0 if optimizer is None else state_row_bytes(optimizer, shape.width)
            self._caches[name] = RowCache(shape, share * row // (row + state))
            if optimizer is not None:
                self.steps[name] = RowSteps(shape.width, optimizer, share * state // (row + state))
        self._residuals: dict[str, RowResidual] = {}
        if threshold > 0 or rounds:
            self._residuals = {
                name: RowResidual(threshold, at.width, rounds=rounds) for name, at in client.tables.items()
            }
        self._report = report
        self._clock = clock
        self._reported_s = clock()
        self._has_warned = False
        self._offered: deque[NewVersion] = deque()
        self._term = -1
        self._min_version = 0

    def offer(self, weights: NewVersion) -> None:
        """Store changed rows that the server has sent."""
        if weights.rows_key:
            self._offered.append(weights)

    def begin(self, grant: Grant, is_wanted: Callable[[], bool]) -> None:
        """Begin `grant`, for which rows are looked up next. If `is_wanted` returns False, the wait for rows ends."""
        if grant.term != self._term:  # versions of an earlier term may be void
            self._term = grant.term
            for cache in self._caches.values():
                cache.clear()
        self._client.begin(grant, is_wanted)
        self._min_version = grant.min_version
        self._merge_offered()
        for cache in self._caches.values():
            cache.granted(grant.version, grant.included)
        if self._clock() - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = self._clock()
            self._report(self.measures())

    def measures(self) -> dict[str, float]:
        """Return the rows, the optimizer states of rows and their memory, over all tables, as values of a `Metric`."""
        caches, steps = self._caches.values(), self.steps.values()
        evicted = sum(table.num_evicted for table in steps)
        if evicted and not self._has_warned:
            self._has_warned = True
            log.warning(
                "row_states_evicted", rows=evicted, kept=sum(map(len, steps)),
                action="these rows' optimizer state begins again; set worker.row_cache_bytes higher to keep it",
            )  # fmt: skip
        return {
            "row_cache_rows": float(sum(map(len, caches))),
            "row_cache_bytes": float(sum(cache.num_bytes for cache in caches)),
            "row_state_rows": float(sum(map(len, steps))),
            "row_state_bytes": float(sum(table.num_bytes for table in steps)),
            "row_states_evicted_total": float(evicted),
            "row_hits_total": float(sum(cache.num_hits for cache in caches)),
            "row_misses_total": float(sum(cache.num_misses for cache in caches)),
        }

    def look_up(self, name: str, ids: Ids) -> Floats:
        """Return a copy of rows `ids` of a table with the worker's own steps, float32, shape (n, width). `ids` are
        strictly ascending.

        Raises:
            BlobError: the server does not answer, or the grant is void.
            ServiceUnavailableError: the worker has stopped waiting for the blob store.
        """

        def fetch(request: RowRequest) -> FetchedRows:
            answer = self._client.fetch(name, request)
            # Only versions up to the answer's. Later ones contain own steps that this answer lacks.
            self._merge_offered(answer.version)
            return answer

        cache = self._caches[name]
        before = cache.num_differences
        rows = cache.get(ids, self._min_version, fetch)
        if cache.num_differences > before:
            log.warning("rows_differ", table=name, rows=len(ids), action="they were asked for again, whole")
        return rows

    # --- own steps ----------------------------------------------------------------------------------------------------

    def step(self, gradients: Mapping[str, Rows], scale: float) -> dict[str, Rows]:
        """Return the optimizer's changes of these rows, by table, without applying them. Raise BlobError if the rows
        have not arrived, and TaskError if there is no room for so many optimizer states."""
        seen = {name: self.look_up(name, rows.ids) for name, rows in gradients.items()}
        return {name: self.steps[name].step(seen[name], rows, scale) for name, rows in gradients.items()}

    def inc(self, steps: Mapping[str, Rows]) -> None:
        for name, rows in steps.items():
            self._caches[name].own.inc(rows)

    def close(self, batch: int) -> dict[str, Rows]:
        """End batch `batch`, and return its steps to push, by table."""
        closed = {name: cache.own.close(batch) for name, cache in self._caches.items()}
        return {name: rows for name, rows in closed.items() if len(rows.ids)}

    def take_back(self, batch: int) -> None:
        """Drop the own steps of `batch` and of later batches, which are computed again. Raise IllegalEventError like
        `RowResidual.take_back`."""
        for name, cache in self._caches.items():
            if (residual := self._residuals.get(name)) is not None:
                residual.take_back(batch)
                cache.held = residual.held
            cache.own.take_back(batch)

    # --- own steps that are held back ---------------------------------------------------------------------------------

    @property
    def holds_back(self) -> bool:
        """Whether a part of the own steps is not sent."""
        return any(len(residual.held.ids) for residual in self._residuals.values())

    def filter(self, steps: Mapping[str, Rows], batch: int, version: int) -> dict[str, Rows]:
        """Return the part that must be sent now: of the steps of `batch`, the newest batch, and of the held-back steps.
        See `RowResidual.split`."""
        if not self._residuals:
            return dict(steps)
        sent = {}
        for name, residual in self._residuals.items():
            cache = self._caches[name]
            rows = residual.split(steps.get(name, cache.no_rows()), cache.see, batch, version)
            cache.own.send_only(batch, rows)
            cache.held = residual.held
            if len(rows.ids):
                sent[name] = rows
        return sent

    def rest(self, until: int) -> dict[str, Rows]:
        """Return the held-back part of the steps of batches below `until`, by table; see `RowResidual.below`."""
        held = {name: residual.below(until) for name, residual in self._residuals.items()}
        return {name: rows for name, rows in held.items() if len(rows.ids)}

    def clear_rest(self) -> None:
        """Clear the held-back steps, because they are pushed or void. Their rows are fetched again."""
        for name, residual in self._residuals.items():
            cache = self._caches[name]
            cache.must_ask(residual.clear())
            cache.held = residual.held

    # --- eager rows ---------------------------------------------------------------------------------------------------

    def _merge_offered(self, until: float = math.inf) -> None:
        """Merge the rows that the server has sent, up to version `until`."""
        while self._offered and not (self._offered[0].term == self._term and self._offered[0].version > until):
            weights = self._offered.popleft()
            if weights.term != self._term:
                continue
            try:
                stored = self._client.take(weights.rows_key)
            except BlobError:  # missed rows are requested when the cached rows are too old
                continue
            for name, cache in self._caches.items():
                rows = stored.rows.get(name, cache.no_rows())
                cache.merge(weights.rows_since, stored.version, weights.included, rows)
