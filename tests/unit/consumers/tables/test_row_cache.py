"""The row cache gives rows of the server's history, never too old, with the worker's own steps on top of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from doll.consumers.tables.row_cache import FetchedRows, OpLog, RowCache
from doll.errors import BlobError, IllegalEventError
from doll.storage.sections import RowRequest
from doll.tables.rows import Floats, Rows, TableShape
from hypothesis import given
from hypothesis import strategies as st

NUM_ROWS, WIDTH = 10, 2


def rows(values: dict[int, float], width: int = WIDTH) -> Rows:
    ids = sorted(values)
    return Rows(
        np.array(ids, np.int64), np.array([[values[id_]] * width for id_ in ids], np.float32).reshape(-1, width)
    )


def ids(numbers: Iterable[int]) -> np.ndarray:
    return np.array(sorted(numbers), np.int64)


class Server:
    """All versions of one table. Every number is an integer, so float32 adds them exactly in any order."""

    def __init__(self) -> None:
        self.history = [np.zeros((NUM_ROWS, WIDTH), np.float32)]
        self.changed = [set[int]()]
        self.included = [0]  # batches of the worker in each version
        self.requests: list[RowRequest] = []
        self.wanted = set[int]()
        self.sent = 0

    @property
    def version(self) -> int:
        return len(self.history) - 1

    def apply(self, steps: Rows, own_batches: int) -> None:
        table = self.history[-1].copy()
        table[steps.ids] += steps.values
        self.history.append(table)
        self.changed.append(set(steps.ids.tolist()))
        self.included.append(own_batches)

    def changed_since(self, version: int) -> set[int]:
        return set[int]().union(*self.changed[version + 1 :])

    def fetch(self, request: RowRequest) -> FetchedRows:
        self.requests.append(request)
        self.wanted |= {*request.ids.tolist(), *request.known.tolist()}
        known = zip(request.known.tolist(), np.broadcast_to(request.since, len(request.known)).tolist(), strict=True)
        sent = ids({*request.ids.tolist(), *(id_ for id_, since in known if id_ in self.changed_since(since))})
        return FetchedRows(Rows(sent, self.history[-1][sent]), self.version, self.included[-1])

    def push(self) -> tuple[int, int, int, Rows]:
        since, self.sent = self.sent, self.version
        changed = ids(self.changed_since(since) & self.wanted)
        return since, self.version, self.included[-1], Rows(changed, self.history[-1][changed])


steps_ = st.dictionaries(st.integers(0, NUM_ROWS - 1), st.integers(1, 9), max_size=4)
ids_ = st.sets(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=6)
operations = st.lists(
    st.tuples(st.just("others"), steps_)
    | st.tuples(st.just("step"), steps_)
    | st.tuples(st.just("own"), st.just(0))
    | st.tuples(st.just("get"), ids_, st.integers(0, 3))
    | st.tuples(st.just("push"), st.booleans())
    | st.tuples(st.just("late"), st.just(0))
    | st.tuples(st.just("grant"), st.just(0))
    | st.tuples(st.just("take back"), st.just(0)),
    max_size=50,
)


@given(operations, st.sampled_from([1, 3, 100]))
def test_rows_are_of_an_allowed_version_with_own_steps_on_top(trace: list[tuple[Any, ...]], capacity: int) -> None:
    shape = TableShape(NUM_ROWS, WIDTH)
    one_row = RowCache(shape, 0).num_bytes
    server, cache = Server(), RowCache(shape, capacity * one_row)
    own = dict[int, Rows]()  # by batch
    applied, late = 0, list[tuple[int, int, int, Rows]]()
    open_steps = np.zeros((NUM_ROWS, WIDTH), np.float32)

    def view(version: int) -> Floats:
        table = server.history[version].copy()
        for batch, steps in own.items():
            if batch >= server.included[version]:
                table[steps.ids] += steps.values
        return table + open_steps

    for name, *args in trace:
        if name == "others":
            server.apply(rows(args[0]), applied)
        elif name == "step":
            cache.own.inc(rows(args[0]))
            open_steps[list(args[0])] += np.array(list(args[0].values()), np.float32)[:, None]
        elif name == "own":
            # A batch ends, and the server applies it at once or later: the oldest first.
            pushed = cache.own.close(len(own))
            assert pushed.values.tolist() == open_steps[pushed.ids].tolist()
            own[len(own)], open_steps = pushed, np.zeros_like(open_steps)
            if len(own) % 2 and applied < len(own):
                server.apply(own[applied], applied + 1)
                applied += 1
        elif name == "get":
            wanted, slack = ids(args[0]), args[1]
            min_version = max(0, server.version - slack)
            got = cache.get(wanted, min_version, server.fetch)
            allowed = [view(version)[wanted] for version in range(min_version, server.version + 1)]
            for at, row in enumerate(got):
                assert any((row == table[at]).all() for table in allowed)
        elif name == "push":
            push = server.push()
            if args[0]:
                cache.merge(*push)
            else:
                late.append(push)
        elif name == "late" and late:
            cache.merge(*late.pop(0))
        elif name == "grant":
            cache.granted(server.version, server.included[-1])
        elif name == "take back" and len(own) > applied:
            cache.own.take_back(len(own) - 1)
            own.pop(len(own) - 1)
            open_steps = np.zeros_like(open_steps)
        assert len(cache) <= capacity
        assert len(cache.own._closed) <= len(own)
    everything = np.arange(NUM_ROWS)
    assert cache.get(everything, server.version, server.fetch).tolist() == view(server.version).tolist()


def test_a_row_of_the_minimum_version_is_used_and_an_older_one_is_not() -> None:
    server, cache = Server(), RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    server.apply(rows({3: 1}), 0)
    cache.get(ids({3, 4}), 0, server.fetch)
    cache.get(ids({3, 4}), 1, server.fetch)
    assert len(server.requests) == 1, "equal is enough: with `>` staleness 0 would never be served from here"
    assert (cache.num_hits, cache.num_misses) == (2, 2)
    server.apply(rows({3: 5}), 0)
    assert cache.get(ids({3, 4, 5}), 2, server.fetch)[:, 0].tolist() == [6, 0, 0]
    request = server.requests[1]
    assert (request.ids.tolist(), request.known.tolist()) == ([5], [3, 4])
    assert np.broadcast_to(request.since, 2).tolist() == [1, 1]
    cache.get(ids({3, 4, 5}), 2, server.fetch)
    assert len(server.requests) == 2, "row 4 has not changed, which is known now"


def test_pushes_without_a_gap_keep_unchanged_rows_usable() -> None:
    server, cache = Server(), RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    cache.get(ids({3, 4}), 0, server.fetch)
    for version in range(1, 4):
        server.apply(rows({3: 1}), 0)
        assert cache.merge(*server.push())
        assert cache.get(ids({3, 4}), version, server.fetch)[:, 0].tolist() == [version, 0]
    assert len(server.requests) == 1, "the first GET was the last"
    server.apply(rows({4: 1}), 0)
    missed = server.push()
    server.apply(rows({3: 1}), 0)
    assert cache.merge(*server.push())
    assert cache.get(ids({3}), 5, server.fetch)[0, 0] == 4
    assert len(server.requests) == 1, "row 3 was in the push"
    assert not cache.merge(*missed), "behind a later one"
    assert cache.get(ids({4}), 5, server.fetch)[0, 0] == 1
    assert server.requests[-1].known.tolist() == [4], "one push was missed: row 4 may have changed"


def test_own_steps_are_read_at_once_and_counted_once() -> None:
    server, cache = Server(), RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    cache.own.inc(rows({3: 1}))
    assert cache.get(ids({3}), 0, server.fetch)[0, 0] == 1, "not pushed yet, and the row was not here"
    cache.own.inc(rows({3: 2, 4: 1}))
    pushed = cache.own.close(0)
    assert pushed.ids.tolist() == [3, 4]
    assert pushed.values[:, 0].tolist() == [3, 1], "coalesced: one entry for a row"
    cache.own.inc(rows({3: 10}))
    server.apply(rows({3: 100}), 0)
    assert cache.get(ids({3, 4}), 1, server.fetch)[:, 0].tolist() == [113, 1], "not in version 1"
    server.apply(pushed, 1)
    assert cache.get(ids({3, 4}), 2, server.fetch)[:, 0].tolist() == [113, 1], "in version 2: not added again"
    cache.granted(2, 1)
    assert (len(cache.own._closed), len(cache.own._open.ids)) == (0, 1)


def test_own_steps_stay_on_top_of_a_pushed_row() -> None:
    server, cache = Server(), RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    cache.get(ids({3}), 0, server.fetch)
    steps = []
    for batch in range(2):
        cache.own.inc(rows({3: 1 + batch}))
        steps.append(cache.own.close(batch))
    server.apply(steps[0], 1)
    server.apply(rows({3: 100}), 1)
    assert cache.merge(*server.push())
    assert cache.get(ids({3}), 2, server.fetch)[0, 0] == 103, "100 of others, 1 in the push, 2 on top"
    cache.granted(2, 1)
    assert len(cache.own._closed) == 1, "the server has batch 0, not batch 1"
    server.apply(rows({3: 100}), 1)
    assert cache.get(ids({3}), 3, server.fetch)[0, 0] == 203


def test_rows_of_several_versions_are_asked_about_each_since_its_own() -> None:
    server, cache = Server(), RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    cache.get(ids({3}), 0, server.fetch)
    server.apply(rows({3: 1}), 0)
    cache.get(ids({4}), 1, server.fetch)
    server.apply(rows({5: 1}), 0)
    assert cache.get(ids({3, 4}), 2, server.fetch)[:, 0].tolist() == [1, 0]
    assert np.asarray(server.requests[-1].since).tolist() == [0, 1]


def test_steps_that_are_taken_back_are_gone() -> None:
    server, cache = Server(), RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    cache.get(ids({3, 4, 5}), 0, server.fetch)
    for batch in range(3):
        cache.own.inc(rows({3 + batch: 1}))
        cache.own.close(batch)
    cache.own.take_back(1)
    assert cache.get(ids({3, 4, 5}), 0, server.fetch)[:, 0].tolist() == [1, 0, 0]
    assert len(server.requests) == 1, "no row that is kept had them"
    with pytest.raises(IllegalEventError, match="expected a batch after 0, got 0"):
        cache.own.close(0)


def test_answers_that_are_too_old_or_lack_rows_are_refused() -> None:
    cache = RowCache(TableShape(NUM_ROWS, WIDTH), 10_000)
    with pytest.raises(BlobError, match="expected rows of version 3 or later, got 2"):
        cache.get(ids({1}), 3, lambda _: FetchedRows(rows({1: 0}), 2))
    with pytest.raises(BlobError, match="got none for 2 of them"):
        cache.get(ids({1, 2, 3}), 3, lambda _: FetchedRows(rows({2: 0}), 3))
    with pytest.raises(BlobError, match="got none for 1 of them"):
        cache.get(ids({1}), 3, lambda _: FetchedRows(rows({}), 3))
    cache.granted(8, 0)
    with pytest.raises(BlobError, match="expected rows of version 8 or later, got 7"):
        cache.get(ids({1}), 3, lambda _: FetchedRows(rows({1: 0}), 7))
    assert len(cache) == 0


def test_the_bound_holds_and_rows_in_use_stay() -> None:
    shape = TableShape(1_000_000, 4)
    cache = RowCache(shape, 100_000)
    assert 80_000 < cache.num_bytes <= 100_000
    rng, fetched = np.random.default_rng(1), list[int]()

    def fetch(request: RowRequest) -> FetchedRows:
        fetched.extend(request.ids.tolist())
        return FetchedRows(rows(dict.fromkeys(request.ids.tolist(), 1.0), 4), 1)

    hot = np.arange(100) * 7919
    for _ in range(200):
        cold = rng.integers(0, 1_000_000, 400)
        got = cache.get(np.unique(np.concatenate([hot, cold])), 1, fetch)
        assert (got == 1).all()
        assert cache.num_bytes <= 100_000
    assert sum(id_ in set(hot.tolist()) for id_ in fetched) < 5 * len(hot), "least recently used out first"
    cache.get(np.arange(5000), 1, fetch)  # more than it holds, in one go
    assert len(cache) == cache._capacity
    cache.clear()
    assert len(cache) == 0
    assert cache.get(hot, 1, fetch).shape == (100, 4)


def test_an_open_log_of_nothing_closes() -> None:
    log = OpLog(2)
    assert log.close(0).values.shape == (0, 2)
    log.take_back(0)
    assert not log._closed
