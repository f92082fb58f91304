"""Rows without own steps, of which the server sends the numbers that have changed: always the server's, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from doll.consumers.tables import row_cache
from doll.consumers.tables.row_cache import FetchedRows, RowCache
from doll.errors import BlobError
from doll.optim.significance_filter import RowResidual
from doll.ps.tables import store
from doll.ps.tables.number_changes import NumberChanges
from doll.ps.tables.store import TableStore
from doll.storage.sections import RowRequest, decode_push, decode_rows, encode_push, encode_rows
from doll.tables.rows import Floats, Ids, Rows, TableShape, no_rows

pytestmark = pytest.mark.slow  # loads torch

NAME, NUM_ROWS, WIDTH, WORKERS = "embed", 40, 5, 3
SHAPE = TableShape(NUM_ROWS, WIDTH)


class Job:
    """Rounds of several workers with a filter, on one table; numbers go over the wire.

    Attributes:
        num_sent: numbers in patches.
        num_rows: rows in answers, whole.
    """

    def __init__(self, seed: int, capacity: int = NUM_ROWS, threshold: float = 0.7) -> None:
        self.rng, self.dice = np.random.default_rng(seed), random.Random(seed)
        self.server = TableStore({NAME: self.rng.normal(size=SHAPE).astype(np.float32)}, None)
        self.server.track_numbers()
        one = RowCache(SHAPE, 0).num_bytes
        self.caches = [RowCache(SHAPE, capacity * one) for _ in range(WORKERS)]
        self.residuals = [RowResidual(threshold, WIDTH) for _ in range(WORKERS)] if threshold else []
        self.version, self.number, self.num_sent, self.num_rows = 0, 0, 0, 0
        self.applied = [0] * WORKERS
        self.sessions = [1] * WORKERS

    @property
    def rows(self) -> Floats:
        return self.server.tables[NAME].read(np.arange(NUM_ROWS)).values

    def fetch(self, worker: int) -> Callable[[RowRequest], FetchedRows]:
        def fetch(request: RowRequest) -> FetchedRows:
            answer = self.server.answer({NAME: request}, worker, self.sessions[worker])[NAME]
            patches = {} if answer.patch is None else {NAME: answer.patch}
            encoded = encode_rows({NAME: answer.rows}, {NAME: SHAPE}, job="j", version=self.version, patches=patches)
            stored = decode_rows(b"".join(encoded.parts), {NAME: SHAPE}, job="j")
            self.num_rows += len(answer.rows.ids)
            self.num_sent += 0 if answer.patch is None else len(answer.patch.values)
            got = tuple(stored.patches.values())
            return FetchedRows(stored.rows[NAME], stored.version, self.applied[worker], got)

        return fetch

    def get(self, worker: int, ids: Ids) -> Floats:
        """Also compares what is kept with the server's rows, bit for bit."""
        cache = self.caches[worker]
        seen = cache.get(ids, self.version, self.fetch(worker))
        slots = cache._index.find(ids)
        assert cache._values[slots[slots >= 0]].tobytes() == self.rows[ids[slots >= 0]].tobytes()
        held = np.zeros(SHAPE, np.float32)
        held[cache.held.ids] = cache.held.values
        np.testing.assert_allclose(seen, self.rows[ids] + held[ids], rtol=1e-5, atol=1e-6)
        return seen

    def apply(self, worker: int, rows: Rows, *, is_rest: bool = False) -> None:
        """Add what has come over the wire."""
        self.number += 1
        blob = b"".join(encode_push({NAME: rows}, {NAME: SHAPE}, job="j", version=1).parts)
        got = decode_push(blob, {NAME: SHAPE}, job="j", version=1)[NAME]
        assert isinstance(got, Rows)
        assert self.server.authors is not None
        self.server.add({NAME: got}, self.number)
        author = {} if is_rest else {self.number: self.server.authors.number(worker, self.sessions[worker])}
        self.server.apply(1.0, self.version, author)

    def round(self) -> None:
        pushes = []
        for worker, cache in enumerate(self.caches):
            cache.granted(self.version, self.applied[worker])
            ids = np.array(sorted(self.dice.sample(range(NUM_ROWS), 12)))
            seen = self.get(worker, ids)
            cache.own.inc(Rows(ids, (self.rng.normal(size=seen.shape) * 0.4 * np.abs(seen)).astype(np.float32)))
            batch = self.applied[worker]
            step = cache.own.close(batch)
            if self.dice.random() < 0.2:  # it is computed again
                cache.own.take_back(batch)
                self.get(worker, ids)
                cache.own.inc(step)
                step = cache.own.close(batch)
            if self.residuals:
                step = self.residuals[worker].split(step, cache.see, batch, self.version)
                cache.own.send_only(batch, step)
                cache.held = self.residuals[worker].held
            pushes.append(step)
        self.version += 1
        for worker, step in enumerate(pushes):
            self.apply(worker, step)
            self.applied[worker] += 1

    def settle(self) -> None:
        self.version += 1
        for worker, (cache, residual) in enumerate(zip(self.caches, self.residuals, strict=False)):
            self.apply(worker, residual.below(self.applied[worker]), is_rest=True)
            cache.must_ask(residual.clear())
            cache.held = residual.held

    def restart(self, worker: int) -> None:
        """Another process takes its place: it knows nothing of what was pushed."""
        self.caches[worker].clear()
        self.sessions[worker] += 1
        if self.residuals:
            self.residuals[worker].clear()

    def play(self, rounds: int = 12) -> Job:
        for _ in range(rounds):
            self.round()
            if self.dice.random() < 0.2:
                self.settle()
            if self.dice.random() < 0.1:
                self.restart(self.dice.randrange(WORKERS))
        return self

    @property
    def num_differences(self) -> int:
        return sum(cache.num_differences for cache in self.caches)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("capacity", [1, 7, NUM_ROWS])
def test_rows_are_the_servers_to_the_bit(capacity: int, threshold: float) -> None:
    for seed in range(10):
        assert Job(seed, capacity, threshold).play().num_differences == 0


def test_numbers_are_sent_in_place_of_rows() -> None:
    job = Job(1)
    for _ in range(3):
        job.round()
    job.num_rows = job.num_sent = 0
    for _ in range(20):
        job.round()
    assert 0 < job.num_sent < 0.6 * 20 * WORKERS * 12 * WIDTH
    assert job.num_rows < 0.2 * 20 * WORKERS * 12


def test_own_pushes_are_not_sent_back() -> None:
    job = Job(2, threshold=0.0)
    ids = np.arange(5)
    job.get(0, ids)
    for batch in range(4):
        job.caches[0].own.inc(Rows(ids, job.rng.normal(size=(5, WIDTH)).astype(np.float32)))
        step = job.caches[0].own.close(batch)
        job.version += 1
        job.apply(0, step)
        job.applied[0] += 1
    job.num_rows = 0
    job.get(0, ids)
    assert (job.num_rows, job.num_sent) == (0, 0)
    job.restart(0)  # its pushes are another process's now
    job.get(0, ids)
    assert job.num_rows == 5


def test_a_row_that_is_known_for_long_is_right_too() -> None:
    """More versions than sections."""
    job = Job(3, threshold=0.0)
    for at in range(20):
        job.get(0, np.array([at]))
        job.version += 1
        job.apply(1, Rows(np.array([at, at + 1]), np.ones((2, WIDTH), np.float32)))
    requests: list[RowRequest] = []
    fetch = job.fetch(0)

    def seen(request: RowRequest) -> FetchedRows:
        requests.append(request)
        return fetch(request)

    job.caches[0].get(np.arange(20), job.version, seen)
    assert len(np.unique(requests[0].since)) == row_cache._MAX_VERSIONS
    job.get(0, np.arange(20))
    assert job.num_differences == 0


# --- would it be seen? ------------------------------------------------------------------------------------------------


def forgets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that forgets who changed a number before its last author."""
    note = NumberChanges.note

    def note_last(self: NumberChanges, slots: Any, is_changed: Any, version: int, author: int) -> None:
        note(self, slots, is_changed, version, author)
        self._by_others[:] = 0

    monkeypatch.setattr(NumberChanges, "note", note_last)


def test_what_the_server_forgets_is_noticed_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_others(monkeypatch)
    assert Job(1).play().num_differences > 0  # and every row was right


def test_without_the_checksum_rows_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets_others(monkeypatch)
    monkeypatch.setattr(row_cache, "checksum_of", lambda rows: 0)
    monkeypatch.setattr(store, "checksum_of", lambda rows: 0)
    with pytest.raises(AssertionError):
        Job(1).play()


def test_a_worker_that_loses_a_push_of_its_own_asks_again() -> None:
    job = Job(4, threshold=0.0)
    job.round()
    job.caches[0].own._closed.clear()
    for _ in range(3):
        job.round()
    assert job.caches[0].num_differences == 1
    assert job.caches[1].num_differences == 0


def test_a_server_that_sends_whole_rows_is_understood() -> None:
    job = Job(5)
    for table in job.server.tables.values():
        table._numbers = None
    assert job.play().num_differences == 0
    assert job.num_sent == 0


def test_an_answer_that_lacks_rows_or_is_too_old_is_refused() -> None:
    cache = RowCache(SHAPE, 100_000)
    with pytest.raises(BlobError, match="got none for 2 of them"):
        cache.get(np.array([1, 2]), 3, lambda request: FetchedRows(no_rows(WIDTH), 3))
    with pytest.raises(BlobError, match="expected rows of version 4 or later, got 3"):
        cache.get(np.array([1]), 4, lambda request: FetchedRows(no_rows(WIDTH), 3))
