"""Bounded tables: against a model of dicts in random worlds, over checkpoints, and what is read without a row."""

from __future__ import annotations

from typing import Any

import doll.ps.tables.bounded_ids
import numpy as np
import pytest
from doll.errors import CheckpointError
from doll.optim.row_optimizer import Decayed, LazyAdam, RowAdagrad, RowOptimizer, RowSgd, RowwiseAdagrad
from doll.ps.tables.bounded_ids import IdCounts
from doll.ps.tables.bounded_table import BoundedTable, stored_bounded_rows
from doll.ps.tables.store import Table, TableStore
from doll.storage.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from doll.storage.sections import RowRequest
from doll.tables.bounds import TableBounds, initial_rows
from doll.tables.rows import Rows, TableShape

pytestmark = pytest.mark.slow  # loads torch

WIDTH, SPACE = 3, 2**63 - 1
INITIAL = initial_rows(7, "items.weight", WIDTH, 0.5)
ADAGRAD = RowAdagrad(0.1)
NONE = np.empty(0, np.int64)


def table_of(
    max_rows: int, min_count: int = 1, ttl: int | None = None, optimizer: RowOptimizer = ADAGRAD
) -> BoundedTable:
    return BoundedTable("items", TableShape(SPACE, WIDTH), TableBounds(max_rows, min_count, ttl, INITIAL), optimizer)


def gradient(ids: Any, value: float | None = None, rng: np.random.Generator | None = None) -> Rows:
    ids = np.unique(np.asarray(ids, np.int64))
    values = np.full((len(ids), WIDTH), value or 1.0) if rng is None else rng.standard_normal((len(ids), WIDTH))
    return Rows(ids, values.astype(np.float32))


def update(table: BoundedTable, version: int, *pushes: Any) -> None:
    for ids in pushes:
        table.add(gradient(ids))
    table.apply(1.0, version)


def with_rows(table: BoundedTable) -> list[int]:
    ids: list[int] = stored_bounded_rows(table.tensors(), "items", WIDTH).ids.tolist()
    return ids


def ids_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Some frequent ids of the whole space among many that are rare."""
    ranks = np.minimum(rng.zipf(1.3, count), 400)
    return (ranks * np.int64(0x1234567890ABCD)) % SPACE


class Expected:
    """The same rules with dicts, an id at a time; `min_count` is 1 or every id has been counted exactly."""

    def __init__(self, max_rows: int, min_count: int, ttl: int | None) -> None:
        self.max_rows, self.min_count, self.ttl = max_rows, min_count, ttl
        self.slot: dict[int, int] = {}
        self.count: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.values: dict[int, np.ndarray] = {}
        self.sums: dict[int, np.ndarray] = {}
        self.num_counted = self.num_waiting = self.refused = self.evicted = self.expired = self.admitted = 0

    def forget(self, ids: list[int]) -> None:
        for each in ids:
            for part in (self.slot, self.count, self.touched, self.values, self.sums):
                del part[each]

    def update(self, version: int, pushes: list[Rows]) -> None:
        if self.ttl is not None and version % max(1, self.ttl // 64) == 0:
            old = [each for each in self.slot if self.touched[each] < version - self.ttl]
            self.expired += len(old)
            self.forget(old)
        named: dict[int, int] = {}
        for push in pushes:
            for each in push.ids.tolist():
                named[each] = named.get(each, 0) + 1
        for each in sorted(named):
            if each in self.slot:
                self.count[each] += named[each]
                self.touched[each] = version
        new = [each for each in sorted(named) if each not in self.slot]
        counts = {each: named[each] for each in new}
        if self.min_count > 1:
            for each in new:
                self.waiting[each] = counts[each] = min(self.waiting.get(each, 0) + named[each], 255)
            self.num_waiting += sum(named[each] for each in new)
            if self.num_waiting >= 2 * self.max_rows:
                self.waiting = {each: count >> 1 for each, count in self.waiting.items()}
                self.num_waiting = 0
        wanted = [each for each in new if counts[each] >= self.min_count]
        if len(wanted) > self.max_rows - len(self.slot):
            count = max(len(wanted) - (self.max_rows - len(self.slot)), self.max_rows // 64)
            others = [each for each in self.slot if self.touched[each] < version]
            others.sort(key=lambda each: (self.count[each], self.touched[each], self.slot[each]))
            self.evicted += len(others[:count])
            self.forget(others[:count])
        room = self.max_rows - len(self.slot)
        admitted = sorted(sorted(wanted, key=lambda each: (-counts[each], each))[:room])
        free = sorted(set(range(self.max_rows)) - set(self.slot.values()))
        for each, slot in zip(admitted, free, strict=False):
            self.slot[each], self.count[each], self.touched[each] = slot, counts[each], version
            self.values[each] = INITIAL.rows(np.array([each]))[0]
            self.sums[each] = np.zeros(WIDTH, np.float32)
        self.admitted += len(admitted)
        self.refused += sum(named[each] for each in new if each not in self.slot)
        self.num_counted += sum(named.values())
        if self.num_counted >= 8 * self.max_rows:
            self.count = {each: count >> 1 for each, count in self.count.items()}
            self.num_counted = 0
        for each in named:
            if each in self.slot:
                total = np.zeros(WIDTH, np.float32)
                for push in pushes:
                    total += push.values[push.ids == each].sum(axis=0)
                self.sums[each] += total**2
                self.values[each] = self.values[each] - np.float32(0.1) * total / np.sqrt(self.sums[each])


@pytest.mark.parametrize("max_rows", [40, 130])
@pytest.mark.parametrize("ttl", [None, 7, 200])
@pytest.mark.parametrize("min_count", [1, 3])
def test_a_random_world_is_that_of_dicts(
    max_rows: int, ttl: int | None, min_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doll.ps.tables.bounded_ids, "_CELLS_PER_ROW", 4096)  # so that no two ids have the same cells
    rng = np.random.default_rng([max_rows, ttl or 0, min_count])
    table, expected = table_of(max_rows, min_count, ttl), Expected(max_rows, min_count, ttl)
    for version in range(1, 300):
        ids = ids_of(rng, 30) if version % 50 > 10 else ids_of(rng, 2)
        pushes = [gradient(part, rng=rng) for part in np.array_split(ids, 3)]
        for push in pushes:
            table.add(push)
        table.apply(1.0, version)
        expected.update(version, pushes)
        assert with_rows(table) == sorted(expected.slot), version
        totals = table.totals
        assert totals == (
            len(expected.slot), expected.admitted, expected.evicted, expected.expired, expected.refused
        )  # fmt: skip
        assert totals.rows == totals.admitted - totals.evicted - totals.expired <= max_rows
        asked = np.unique(ids_of(rng, 20))
        rows = [expected.values.get(each, INITIAL.rows(np.array([each]))[0]) for each in asked.tolist()]
        np.testing.assert_allclose(table.read(asked).values, rows, rtol=1e-5, atol=1e-6)
    assert expected.evicted or max_rows == 130 or ttl == 7
    assert expected.expired or ttl != 7
    assert bool(expected.refused) == (min_count > 1)


@pytest.mark.parametrize(
    "optimizer",
    [RowSgd(0.3), RowAdagrad(0.1), LazyAdam(0.01), RowwiseAdagrad(0.1), Decayed(RowAdagrad(0.1), 0.9)],
    ids=lambda each: type(each).__name__,
)
def test_with_room_for_all_rows_it_is_a_table_to_the_bit(optimizer: RowOptimizer) -> None:
    rng = np.random.default_rng(1)
    everything = np.arange(200)
    plain = Table("items", INITIAL.rows(everything), optimizer)
    bounded = table_of(200, optimizer=optimizer)
    for version in range(1, 40):
        for _ in range(3):
            push = gradient(rng.integers(0, 200, 30), rng=rng)
            for table in (plain, bounded):
                table.add(push)
        assert plain.square_norm() == bounded.square_norm()
        for table in (plain, bounded):
            table.apply(0.25, version)
        assert plain.read(everything).values.tobytes() == bounded.read(everything).values.tobytes()


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize("cut", [1, 57, 100])
def test_it_goes_on_from_a_checkpoint_to_the_bit(min_count: int, cut: int) -> None:
    rng, first = np.random.default_rng(5), table_of(32, min_count, 20)
    updates = [[gradient(ids_of(rng, 20), rng=rng) for _ in range(2)] for _ in range(160)]
    second = table_of(32, min_count, 20)
    for version, pushes in enumerate(updates, 1):
        for push in pushes:
            first.add(push)
            if version > cut:
                second.add(push)
        first.apply(0.5, version)
        if version > cut:
            second.apply(0.5, version)
        if version == cut:
            checkpoint = Checkpoint(job="j", fingerprint="f", term=1, version=cut, state=b"", tensors=first.tensors())
            data = b"".join(bytes(part) for part in encode_checkpoint(checkpoint))
            update(second, 1, [1, 2, 3])  # whatever was there before is gone
            second.load(decode_checkpoint(data).tensors)
    assert first.totals == second.totals
    assert first.totals.evicted
    assert first.tensors().keys() == second.tensors().keys()
    for name, array in first.tensors().items():
        assert array.tobytes() == second.tensors()[name].tobytes(), name


def test_what_a_checkpoint_holds_stays_while_updates_go_on() -> None:
    table = table_of(4)
    update(table, 1, [5, 6])
    tensors = table.tensors()
    before = {name: array.copy() for name, array in tensors.items()}
    for version in range(2, 20):
        update(table, version, [version, version + 1])
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, before[name])


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    table = table_of(8, 2)
    update(table, 1, [1, 2], [1, 2], [3])
    tensors = table.tensors()
    for name, value, message in (
        ("bounded", np.array([2, 1, 1]), "expected format 1, got 2: update DOLL"),
        ("ids", np.arange(9), "expected at most 8 ids"),
        ("counts", np.zeros(1, np.int64), "counts: expected shape"),
        ("waiting", np.zeros((4, 8), np.uint8), "waiting: expected shape"),
        ("values", np.zeros((2, 1), np.float32), "values: expected shape"),
    ):
        with pytest.raises(CheckpointError, match=message):
            table_of(8, 2).load({**tensors, f"table.items.{name}": value})
    with pytest.raises(CheckpointError, match=r"table.items.state.sum: expected a tensor|expected shape"):
        table_of(8, 2).load({name: array for name, array in tensors.items() if "state" not in name})


# --- what is read ---------------------------------------------------------------------------------------------------


def test_an_id_without_a_row_is_read_as_its_initial_row_whoever_reads_it() -> None:
    ids = np.array([0, 1, 2**40, SPACE - 1])
    rows = INITIAL.rows(ids)
    assert rows.tobytes() == table_of(4).read(ids).values.tobytes()
    assert rows.tobytes() == np.concatenate([INITIAL.rows(ids[at : at + 1]) for at in range(4)]).tobytes()
    # Of this release, and of every later one: checkpoints do not hold these rows.
    assert initial_rows(7, "a", 2, 0.5).rows(np.array([0, 2**40])).view(np.uint32).tolist() == GOLDEN
    many = INITIAL.rows(np.arange(100_000))
    assert -0.5 <= many.min() < -0.499
    assert 0.499 < many.max() < 0.5
    assert abs(many.mean()) < 0.003
    assert len(np.unique(many[:, 0])) > 99_000
    for other in (initial_rows(8, "items.weight", WIDTH, 0.5), initial_rows(7, "users.weight", WIDTH, 0.5)):
        assert not (other.rows(ids) == rows).any()


GOLDEN = [[3197198146, 1056906278], [1053995000, 1033496360]]


def test_gradients_before_the_admission_are_dropped_and_counted() -> None:
    table = table_of(8, min_count=3)
    update(table, 1, [5], [5])
    assert table.read(np.array([5])).values.tobytes() == INITIAL.rows(np.array([5])).tobytes()
    assert table.totals == (0, 0, 0, 0, 2)
    update(table, 2, [5])
    np.testing.assert_allclose(table.read(np.array([5])).values, INITIAL.rows(np.array([5])) - 0.1, rtol=1e-5)
    assert table.totals == (1, 1, 0, 0, 2)


def known(table: BoundedTable, since: int, *ids: int) -> list[int]:
    """Which of these ids, known as of version `since`, are sent."""
    sent: list[int] = table.answer(RowRequest(NONE, np.array(ids), since)).rows.ids.tolist()
    return sent


def test_a_worker_s_cache_keeps_no_row_of_an_earlier_life() -> None:
    """A row that was evicted is sent as its initial row, one that was admitted again as its new one."""
    table = table_of(2)
    update(table, 1, [5])
    update(table, 2, [6])
    assert known(table, 1, 5, 6) == [6]
    assert known(table, 2, 5, 6) == []
    update(table, 3, [7])
    assert with_rows(table) == [6, 7], "5 was used the longest ago"
    assert known(table, 2, 5, 6) == [5]
    assert (
        table.answer(RowRequest(NONE, np.array([5]), 2)).rows.values.tobytes() == INITIAL.rows(np.array([5])).tobytes()
    )
    table.add(gradient([5], 3.0))  # late: computed on the row of the earlier life
    table.apply(1.0, 4)
    assert with_rows(table) == [5, 7]
    assert known(table, 3, 5, 6, 7) == [5, 6]
    np.testing.assert_allclose(table.read(np.array([5])).values, INITIAL.rows(np.array([5])) - 0.1, rtol=1e-5)
    assert known(table, 9, 7) == [7], "a version of an earlier term"


def test_rows_expire_when_no_push_names_them() -> None:
    table = table_of(8, ttl=3)
    update(table, 1, [5, 6])
    for version in range(2, 5):
        update(table, version, [6])
    assert with_rows(table) == [5, 6]
    table.apply(1.0, 5)  # an update that names no id
    assert with_rows(table) == [6]
    assert table.totals.expired == 1


def test_frequent_ids_keep_their_rows_in_a_flood_of_others() -> None:
    table, rng = table_of(1000), np.random.default_rng(2)
    frequent = np.arange(100) * 1_000_003
    for version in range(1, 400):
        update(table, version, [*rng.choice(frequent, 30), *rng.integers(10**9, SPACE, 300)])
    assert np.isin(frequent, with_rows(table)).all()
    assert table.totals.evicted > 100_000


def test_ids_that_were_frequent_long_ago_make_room() -> None:
    table, rng = table_of(100), np.random.default_rng(2)
    for version in range(1, 200):
        update(table, version, np.arange(100))
    for version in range(200, 2000):
        update(table, version, 1000 + rng.integers(0, 120, 40))
    assert min(with_rows(table)) >= 1000


def test_an_update_that_names_more_ids_than_there_are_rows_gives_rows_to_the_most_frequent() -> None:
    table = table_of(4)
    update(table, 1, np.arange(10), [7, 8], [8, 9], [9])
    assert with_rows(table) == [0, 7, 8, 9]
    assert table.totals == (4, 4, 0, 0, 6)


def test_estimates_are_never_too_low_and_seldom_too_high() -> None:
    counts, rng, exact = IdCounts(5_000), np.random.default_rng(3), dict[int, int]()
    for _ in range(9):  # below 2 for each row: not halved yet
        ids, times = np.unique(ids_of(rng, 500), return_counts=True)
        ids = np.concatenate([ids, rng.integers(2**40, 2**62, 600)])
        times = np.concatenate([times, np.ones(600, np.int64)])
        estimates = counts.add(ids, times)
        for each, count, estimate in zip(ids.tolist(), times.tolist(), estimates.tolist(), strict=True):
            exact[each] = exact.get(each, 0) + count
            assert estimate >= min(exact[each], 255)
    assert counts.num_added == 9 * 1100
    too_high = np.mean(counts.add(rng.integers(2**62, SPACE, 20_000), np.ones(20_000, np.int64)) > 2)
    assert too_high < 0.02
    assert counts.num_added == 0, "halved"


def test_tables_of_both_kinds_change_together() -> None:
    plain = np.zeros((10, WIDTH), np.float32)
    store = TableStore({"users": plain}, {"users": RowSgd(1.0)}, {"items": table_of(4, optimizer=RowSgd(1.0))})
    assert store.shapes == {"users": TableShape(10, WIDTH), "items": TableShape(SPACE, WIDTH)}
    store.add({"users": gradient([1]), "items": gradient([2**50])})
    assert store.norm() == pytest.approx(np.sqrt(2 * WIDTH))
    store.apply(1.0, 1)
    answers = store.answer({"users": RowRequest(np.array([1]), NONE), "items": RowRequest(np.array([2**50]), NONE)})
    np.testing.assert_array_equal(answers["users"].rows.values, [[-1.0] * WIDTH])
    np.testing.assert_allclose(answers["items"].rows.values, INITIAL.rows(np.array([2**50])) - 1.0)
    assert {name: totals.rows for name, totals in store.totals.items()} == {"items": 1}
