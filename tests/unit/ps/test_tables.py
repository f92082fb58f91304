"""Tables at the server: what dense arithmetic and torch's optimizers give, and state for touched rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import AdagradConfig, AdamConfig, OptimizerConfig, SgdConfig, TrainingConfig
from doll.errors import CheckpointError, ConfigError, IllegalEventError
from doll.model.flat_model import FlatModel
from doll.optim.optimizer import DivergedError, Optimizer
from doll.optim.row_optimizer import (
    Decayed,
    LazyAdam,
    RowAdagrad,
    RowOptimizer,
    RowSgd,
    RowwiseAdagrad,
    row_optimizer,
    row_optimizers,
)
from doll.ps.tables.row_array import RowArray
from doll.ps.tables.row_server import Subscriptions
from doll.ps.tables.store import Table, TableStore
from doll.ps.tables.touched_rows import NEVER, TouchedRows
from doll.storage.checkpoints import Checkpoint, decode_checkpoint, encode_checkpoint
from doll.storage.sections import RowRequest
from doll.tables.rows import Floats, Rows, add_in_order
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow  # loads torch

NUM_ROWS, WIDTH = 40, 3
OPTIMIZERS: tuple[RowOptimizer, ...] = (RowSgd(0.3), RowAdagrad(0.1), RowAdagrad(0.1, 0.5), LazyAdam(0.01, 0.8, 0.9))


def initial(seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)


def some_rows(rng: np.random.Generator, num_rows: int = NUM_ROWS, width: int = WIDTH) -> Rows:
    ids = np.sort(rng.choice(num_rows, rng.integers(0, num_rows // 2), replace=False))
    return Rows(ids, rng.standard_normal((len(ids), width)).astype(np.float32))


def everything(table: Table) -> Floats:
    return table.read(np.arange(table.shape.num_rows)).values


# --- steps ----------------------------------------------------------------------------------------------------------


def torch_optimizer(optimizer: RowOptimizer, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    match optimizer:
        case RowSgd():
            return torch.optim.SGD([parameter], lr=optimizer.lr)
        case RowAdagrad():
            initial = optimizer.initial_accumulator
            return torch.optim.Adagrad([parameter], lr=optimizer.lr, initial_accumulator_value=initial)
        case LazyAdam():
            return torch.optim.SparseAdam([parameter], lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2))
    raise AssertionError(optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
@pytest.mark.parametrize("width", [1, 3, 16, 33])
def test_equals_torch_on_sparse_gradients_to_the_bit(optimizer: RowOptimizer, width: int) -> None:
    rng = np.random.default_rng(3)
    start = rng.standard_normal((NUM_ROWS, width)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    reference = torch_optimizer(optimizer, parameter)
    table = Table("embed", start.copy(), optimizer)
    for version in range(1, 41):
        rows = some_rows(rng, width=width)
        if not len(rows.ids):
            continue
        values = torch.from_numpy(rows.values * np.float32(0.25))
        with torch.sparse.check_sparse_tensor_invariants():
            parameter.grad = torch.sparse_coo_tensor(torch.from_numpy(rows.ids)[None], values, start.shape)
            reference.step()
        table.add(rows)
        table.apply(0.25, version)
        assert everything(table).tobytes() == parameter.detach().numpy().tobytes()


class Dense(torch.nn.Module):
    def __init__(self, values: Floats) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(values.copy()))


@pytest.mark.parametrize("scale", [1 / 64, 1 / 60])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_sgd_equals_the_dense_optimizer_to_the_bit(scale: float, clip_norm: float | None) -> None:
    model = FlatModel(Dense(initial()))
    dense = Optimizer(model, SgdConfig(lr=0.3), clip_norm)
    store = TableStore({"embed": initial()}, {"embed": row_optimizer(SgdConfig(lr=0.3))})
    rng = np.random.default_rng(4)
    for version in range(1, 20):
        for _ in range(3):
            rows = some_rows(rng)
            gradient = np.zeros((NUM_ROWS, WIDTH), np.float32)
            gradient[rows.ids] = rows.values
            dense.add(gradient.reshape(-1))
            store.add({"embed": rows})
        dense.apply([], scale, 60)
        norm = scale * store.norm()
        store.apply(scale if clip_norm is None or norm <= clip_norm else scale * clip_norm / norm, version)
        table = everything(store.tables["embed"]).reshape(-1)
        if clip_norm is None:
            assert table.tobytes() == dense.weights.tobytes()
        else:
            np.testing.assert_allclose(table, dense.weights, rtol=1e-6)


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_steps_of_workers_are_added_in_order(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    expected, table = initial(), Table("counts", initial(), None)
    for version in range(1, 6):
        for _ in range(count):
            rows = some_rows(rng)
            expected[rows.ids] += rows.values
            table.add(rows)
        table.apply(1.0, version)
        assert everything(table).tobytes() == expected.tobytes()


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None], ids=lambda optimizer: type(optimizer).__name__)
def test_the_order_of_contributions_counts_and_their_cut_does_not(optimizer: RowOptimizer | None) -> None:
    rng = np.random.default_rng(5)
    pieces = [Rows(np.arange(NUM_ROWS), rng.standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)) for _ in range(6)]

    def made_of(order: Sequence[Rows]) -> bytes:
        table = Table("embed", initial(), optimizer)
        for rows in order:
            table.add(rows)
        table.square_norm()
        table.apply(0.1, 1)
        table.add(pieces[0])  # Adagrad's first step is as long for any gradient
        table.apply(0.1, 2)
        return everything(table).tobytes()

    assert made_of(pieces) == made_of([Rows(rows.ids.copy(), rows.values.copy()) for rows in pieces])
    assert made_of(pieces) != made_of(pieces[::-1])
    if optimizer is not None:
        assert made_of(pieces) == made_of([add_in_order(pieces[:3]), *pieces[3:]])


def test_finite_gradients_with_a_finite_mean_do_not_overflow() -> None:
    table = Table("embed", np.zeros((2, 1), np.float32), RowSgd(1.0))
    for _ in range(4):
        table.add(Rows(np.array([1]), np.full((1, 1), 3e38, np.float32)))
    table.apply(0.25, 1)
    assert everything(table).ravel().tolist() == [0, pytest.approx(-3e38)]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None], ids=lambda optimizer: type(optimizer).__name__)
def test_what_diverges_is_said(optimizer: RowOptimizer | None) -> None:
    table = Table("embed", np.full((2, 1), 3e38, np.float32), optimizer)
    table.add(Rows(np.array([1]), np.full((1, 1), np.inf, np.float32)))
    with pytest.raises(DivergedError, match=r"table 'embed' are not finite.*the last checkpoint is intact"):
        table.apply(1.0, 1)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (SgdConfig(momentum=0.9), "training.optimizer.momentum"),
        (AdagradConfig(momentum=0.9), "training.optimizer.momentum"),
        (SgdConfig(weight_decay=0.1), "training.optimizer.weight_decay"),
        (AdamConfig(weight_decay=0.1), "training.optimizer.weight_decay"),
        (AdagradConfig(weight_decay=0.1), "training.optimizer.weight_decay"),
    ],
)
def test_an_optimizer_that_moves_untouched_rows_is_refused(config: OptimizerConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected 0 for a model with tables"):
        row_optimizer(config)


def test_the_optimizers_of_the_job_file() -> None:
    assert row_optimizer(SgdConfig(lr=0.5)) == RowSgd(0.5)
    assert row_optimizer(AdamConfig(lr=0.5, beta1=0.1, beta2=0.2)) == LazyAdam(0.5, 0.1, 0.2)
    assert row_optimizer(AdagradConfig(lr=0.5, initial_accumulator=2.0)) == RowAdagrad(0.5, 2.0)


def training(tables: dict[str, Any], **others: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"tables": tables, **others})


def test_each_table_has_the_optimizer_of_the_first_expression_that_is_found_in_its_name() -> None:
    config = training(
        {
            "^user": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.5, "initial_accumulator": 2}},
            "emb": {"optimizer": {"name": "adagrad", "lr": 0.25, "weight_decay": 0.5}},
            "item$": {"optimizer": {"name": "adam", "lr": 0.5, "beta1": 0.1, "beta2": 0.2}},
            "bias": {"optimizer": {"name": "sgd", "lr": 0.5}},
        },
        optimizer={"name": "sgd", "lr": 0.125},
    )
    assert row_optimizers(config, ["user.emb", "emb.x", "item", "bias", "other"]) == {
        "user.emb": RowwiseAdagrad(0.5, 2.0),
        "emb.x": Decayed(RowAdagrad(0.25), 0.875),
        "item": LazyAdam(0.5, 0.1, 0.2),
        "bias": RowSgd(0.5),
        "other": RowSgd(0.125),
    }


def test_tables_with_an_optimizer_of_their_own_leave_the_rest_any_optimizer() -> None:
    dense = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}
    own = training({".": {"optimizer": {"name": "sgd", "lr": 0.5}}}, optimizer=dense)
    assert row_optimizers(own, ["embed"]) == {"embed": RowSgd(0.5)}
    with pytest.raises(ConfigError, match=r"training.optimizer.weight_decay: expected 0 .*training.tables"):
        row_optimizers(training({}, optimizer=dense), ["embed"])


@pytest.mark.parametrize(("names", "shown"), [(["embed"], "'embed'"), ([], "none")])
def test_a_setting_of_no_table_is_refused(names: list[str], shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"training.tables: expected .* got 'user'; the model's tables .*: {shown}"):
        row_optimizers(training({"user": {}}), names)


def test_row_wise_adagrad_is_adagrad_where_a_row_is_one_number_and_has_one_sum_for_a_row_elsewhere() -> None:
    rng = np.random.default_rng(9)
    tables = [Table("one", initial()[:, :1].copy(), each) for each in (RowAdagrad(0.1, 0.5), RowwiseAdagrad(0.1, 0.5))]
    wide, expected, sums = Table("wide", initial(), RowwiseAdagrad(0.1)), initial(), np.zeros(NUM_ROWS, np.float32)
    for version in range(1, 20):
        rows = some_rows(rng)
        for table in tables:
            table.add(Rows(rows.ids, rows.values[:, :1].copy()))
        wide.add(rows)
        for table in (*tables, wide):
            table.apply(0.5, version)
        gradient = rows.values * np.float32(0.5)
        sums[rows.ids] += (gradient**2).mean(axis=1)
        expected[rows.ids] -= np.float32(0.1) * gradient / (np.sqrt(sums[rows.ids]) + np.float32(1e-10))[:, None]
    assert everything(tables[0]).tobytes() == everything(tables[1]).tobytes()
    np.testing.assert_allclose(everything(wide), expected, rtol=1e-5, atol=1e-6)
    assert wide.tensors()["table.wide.state.row_sum"].shape == (len(wide._touched), 1)


def test_lazy_decay_shrinks_a_row_when_it_has_a_gradient_and_no_other_row() -> None:
    before = initial()
    table = Table("embed", initial(), Decayed(RowSgd(0.1), 1 - 0.1 * 0.5))
    rows = Rows(np.array([3, 5]), np.ones((2, WIDTH), np.float32))
    table.add(rows)
    table.apply(1.0, 1)
    after = before.copy()
    after[[3, 5]] = before[[3, 5]] * np.float32(0.95) - np.float32(0.1)
    np.testing.assert_allclose(everything(table), after, rtol=1e-6)
    assert np.delete(everything(table), [3, 5], 0).tobytes() == np.delete(before, [3, 5], 0).tobytes()


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS, RowwiseAdagrad(0.1, 0.5), Decayed(RowAdagrad(0.1), 0.9), None],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_continues_from_a_checkpoint_to_the_bit(optimizer: RowOptimizer | None) -> None:
    rng, version = np.random.default_rng(6), 0
    optimizers = None if optimizer is None else dict.fromkeys(("embed", "other"), optimizer)
    store = TableStore({"embed": initial(), "other": initial(1)}, optimizers)

    def update(*stores: TableStore) -> None:
        nonlocal version
        version += 1
        contribution = {"embed": some_rows(rng), "other": some_rows(rng)}
        for each in stores:
            each.add(contribution)
            each.apply(0.5, version)

    for _ in range(4):
        update(store)
    checkpoint = Checkpoint(job="j", fingerprint="f", term=1, version=version, state=b"", tensors=store.tensors())
    data = b"".join(bytes(part) for part in encode_checkpoint(checkpoint))
    restored = TableStore({"embed": initial(7), "other": initial(8)}, optimizers)
    update(restored)  # whatever was there before is gone
    version -= 1
    restored.load(decode_checkpoint(data).tensors)
    assert np.array_equal(
        restored.tables["embed"].changed_since(version - 1), np.unique(store.tables["embed"]._touched.ids)
    )
    for _ in range(4):
        update(store, restored)
        for name in store.tables:
            assert everything(store.tables[name]).tobytes() == everything(restored.tables[name]).tobytes()
    assert store.tensors().keys() == restored.tensors().keys()
    for name, array in store.tensors().items():
        assert array.tobytes() == restored.tensors()[name].tobytes()


def test_state_exists_for_touched_rows_only() -> None:
    table = Table("embed", np.zeros((100_000, 4), np.float32), LazyAdam(0.1))
    table.add(Rows(np.array([7, 99_999]), np.ones((2, 4), np.float32)))
    table.apply(1.0, 1)
    tensors = table.tensors()
    assert tensors["table.embed.touched"].tolist() == [7, 99_999]
    assert {name: array.shape for name, array in tensors.items() if "state" in name} == {
        "table.embed.state.exp_avg": (2, 4), "table.embed.state.exp_avg_sq": (2, 4),
    }  # fmt: skip
    assert len(table._touched) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"table.embed.values": np.zeros((3, 3), np.float32)}, r"expected shape \(40, 3\), got shape \(3, 3\)"),
        ({"table.embed.touched": np.array([40])}, "expected touched rows of 0 to 39"),
        ({"table.embed.touched": np.array([0, 1, 2])}, r"state.exp_avg: expected shape \(3, 3\), got shape \(2, 3\)"),
        ({"table.embed.numbers": None}, "table.embed.numbers: expected shape"),
        ({"table.embed.state.exp_avg": None}, "got nothing"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: Mapping[str, np.ndarray | None], says: str) -> None:
    table = Table("embed", initial(), LazyAdam(0.1))
    table.add(Rows(np.array([7, 9]), np.ones((2, 3), np.float32)))
    table.apply(1.0, 1)
    tensors = {name: array for name, array in {**table.tensors(), **change}.items() if array is not None}
    with pytest.raises(CheckpointError, match=says):
        Table("embed", initial(), LazyAdam(0.1)).load(tensors)


# --- rows that are held ---------------------------------------------------------------------------------------------

operations = st.lists(
    st.tuples(st.sampled_from(["write", "hold", "view", "drop", "extend", "replace"]), st.integers(0, 2**32)),
    max_size=40,
)


@given(operations)
def test_what_is_held_stays_and_the_rest_goes_on(steps: list[tuple[str, int]]) -> None:
    expected = initial()
    array = RowArray(expected.copy())
    held: list[tuple[np.ndarray, bytes]] = []
    for name, number in steps:
        rng = np.random.default_rng(number)
        if name == "write":
            rows = some_rows(rng, len(expected))
            expected[rows.ids] = rows.values
            array.write(*rows)
        elif name == "hold":
            held.append((array.hold(), expected.tobytes()))
        elif name == "view" and held:
            # What encodes a checkpoint keeps a view of a view, and not the array that it was given.
            kept, content = held.pop(number % len(held))
            held.append((kept.reshape(-1).view(np.uint8), content))
        elif name == "drop" and held:
            del held[number % len(held)]
        elif name == "extend":
            grown = np.zeros((max(len(expected), number % 90), WIDTH), np.float32)
            grown[: len(expected)] = expected
            array.extend(number % 90)
            expected = grown
        elif name == "replace":
            expected = initial(number)
            array.replace(expected)
            expected = expected.copy()
        assert len(array) == len(expected)
        assert array.read(np.arange(len(expected))).tobytes() == expected.tobytes()
        for kept, content in held:
            assert kept.tobytes() == content
            assert not kept.flags.writeable
    del held
    kept = None  # type: ignore[assignment]
    assert array.read(np.arange(len(expected))).tobytes() == expected.tobytes()
    assert array._num_moved == 0


def test_holding_copies_only_what_changes() -> None:
    values = np.zeros((10_000, 4), np.float32)
    array = RowArray(values)
    held = array.hold()
    assert np.shares_memory(held, values)
    assert np.shares_memory(array.hold(), values), "nothing has changed since: the same again"
    for _ in range(3):
        array.write(np.array([5, 9_000]), np.ones((2, 4), np.float32))
    assert array._num_moved == 2
    second = array.hold()
    assert not np.shares_memory(second, values)
    assert second[5].tolist() == [1.0] * 4
    assert held[5].tolist() == [0.0] * 4
    del held
    array.write(np.array([6]), np.ones((1, 4), np.float32))
    assert values[5:7].tolist() == [[1.0] * 4] * 2, "in its place again"
    assert array._num_moved == 0


def test_holding_again_begins_anew() -> None:
    array = RowArray(np.zeros((10, 1), np.float32))
    for value in range(1, 4):
        held = array.hold()
        array.write(np.array([3, 7]), np.full((2, 1), value, np.float32))
        array.write(np.array([value + 3]), np.full((1, 1), -value, np.float32))
        assert held[3, 0] == value - 1
        del held
    assert array.read(np.arange(10))[:, 0].tolist() == [0, 0, 0, 3, -1, -2, -3, 3, 0, 0]


def test_rows_must_be_contiguous_float32() -> None:
    for values in (np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros((4, 4), np.float32)[:, :2]):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            RowArray(values)  # type: ignore[arg-type]


# --- what has changed -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 11), max_size=6)), max_size=30), st.booleans())
def test_rows_that_changed_since_a_version(changes: list[tuple[int, set[int]]], short_log: bool) -> None:
    touched, expected, version = TouchedRows(12), dict[int, int](), 0
    for step, ids in changes:
        version += step
        slots = touched.note_change(np.array(sorted(ids), np.int64), version)
        assert touched.ids[slots].tolist() == sorted(ids)
        expected |= dict.fromkeys(ids, version)
        if short_log and expected:
            touched._shorten()
        for since in range(-1, version + 1):
            assert touched.changed_since(since).tolist() == sorted(id_ for id_, v in expected.items() if v > since)
        assert touched.last_change(np.arange(12)).tolist() == [expected.get(id_, NEVER) for id_ in range(12)]
    assert len(touched) == len(expected)


def test_the_log_of_changes_is_bounded_by_the_touched_rows() -> None:
    touched = TouchedRows(1000)
    for version in range(1, 5000):
        touched.note_change(np.array([version % 7, 500 + version % 3]), version)
        assert touched._log_entries <= 2 * len(touched) + 1024 + 2
    assert len(touched) == 10
    assert touched.changed_since(4998).tolist() == sorted({4999 % 7, 500 + 4999 % 3})
    assert all(before < after for before, after in pairwise(touched._versions))
    with pytest.raises(IllegalEventError, match="expected a change in version 4999 or later, got 3"):
        touched.note_change(np.array([1]), 3)


def test_an_answer_has_the_rows_that_are_new_and_those_that_changed() -> None:
    table = Table("embed", initial(), None)
    for version, id_ in enumerate([3, 5, 7], 1):
        table.add(Rows(np.array([id_]), np.ones((1, WIDTH), np.float32)))
        table.apply(1.0, version)
    known = np.array([3, 5, 7, 8])
    assert table.answer(RowRequest(np.array([0, 9]), known, 1)).rows.ids.tolist() == [0, 5, 7, 9]
    assert table.answer(RowRequest(np.array([0, 9]), known, 3)).rows.ids.tolist() == [0, 9]
    assert table.answer(RowRequest(np.array([0]), known, 99)).rows.ids.tolist() == [0, 3, 5, 7, 8], "of another term"
    rows = table.answer(RowRequest(np.array([3]), np.array([4]), 0)).rows
    assert rows.values.tobytes() == everything(table)[rows.ids].tobytes()


def test_subscribers_are_sent_what_changed_of_what_they_have_asked_for() -> None:
    store = TableStore({"embed": initial(), "other": initial(1)}, None)
    subscriptions = Subscriptions(store)

    def update(version: int, *ids: int) -> None:
        store.add({"embed": Rows(np.array(ids), np.ones((len(ids), WIDTH), np.float32))})
        store.apply(1.0, version)

    update(1, 3, 5)
    subscriptions.subscribe(0, "embed", np.array([3, 4]), 1)
    assert subscriptions.due(1, 1) is None
    update(2, 4, 5)
    subscriptions.subscribe(0, "embed", np.array([5]), 2)
    update(3, 3)
    changes = subscriptions.due(0, 3)
    assert changes is not None
    since, changed = changes
    assert since == 1
    assert changed["embed"].ids.tolist() == [3, 4, 5]
    assert changed["embed"].values.tobytes() == everything(store.tables["embed"])[[3, 4, 5]].tobytes()
    assert list(changed) == ["embed"]
    again = subscriptions.due(0, 3)
    assert again == (3, {})
    subscriptions.forget(0)
    assert subscriptions.due(0, 4) is None
