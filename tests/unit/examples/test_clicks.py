"""Clicks: packed records and lines say the same, bad ones are refused, and the gradient is that of a plain program."""

from __future__ import annotations

import gzip
import itertools
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.plain_models import PlainLogistic
from doll import config as job_config
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import BadRecordsError, ConfigError, SampleError
from doll.model.flat_model import FlatModel
from doll.task.base import Task, load_task
from examples.clicks import task as clicks
from examples.clicks.task import Clicks, SparseLinear, columns_of, mix
from hypothesis import given
from hypothesis import strategies as st
from paths import SHARED_DATA
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

COUNTS = [b"1", b"-3", b"", b"0", b"1382", b"4", b"15", b"2", b"181", b"1", b"2", b"", b"2147483647"]
CATEGORIES = [b"68fd1e64", b"", *(b"%08X" % (n * 40_503_001) for n in range(1, 24)), b"f"]
LINE = b"\t".join([b"1", *COUNTS, *CATEGORIES])


def changed(cell: int, value: bytes, line: bytes = LINE) -> bytes:
    """The line with another cell; they count from 1."""
    cells = line.split(b"\t")
    cells[cell - 1] = value
    return b"\t".join(cells)


def drawn(count: int, categories: int = 50, seed: int = 0) -> tuple[Any, np.ndarray, clicks.Truth]:
    """Clicks, their probabilities and the truth behind them."""
    rng = np.random.default_rng(seed)
    truth = clicks.draw_truth(categories, 1.1, 0.5, rng)
    return *clicks.draw(truth, count, rng), truth


def numbers_of(x: np.ndarray) -> np.ndarray:
    """What the docstring of `Clicks` says about the counts."""
    counts = x[:, :13].astype(np.float64)
    return np.where(x[:, :13] == -(2**31), 0.0, np.sign(counts) * np.log1p(np.abs(counts)) / 4)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_line_and_its_packed_record_are_one_sample() -> None:
    packed = clicks.pack_line(LINE)
    assert len(packed) == clicks.RECORD.itemsize == 157 < len(LINE)
    assert clicks.is_packed(packed)
    assert not clicks.is_packed(LINE)
    task = Clicks(1000)
    (x, y, *_), (packed_x, packed_y, *_) = task.decode(LINE + b"\r\n"), task.decode(packed)
    x = np.asarray(x)
    assert y == packed_y == 1
    assert (x == packed_x).all()
    assert x[:13].tolist() == [1, -3, -(2**31), 0, 1382, 4, 15, 2, 181, 1, 2, -(2**31), 2**31 - 1]
    numbers = [int(cell, 16) if cell else 0 for cell in CATEGORIES]
    assert x[13:].tolist() == columns_of(np.array([numbers]), 1000)[0].tolist()


def test_a_line_of_157_bytes_is_a_line() -> None:
    line = b"\t".join([b"0", *[b""] * 13, *[b"ffffffff"] * 13, *[b""] * 13])
    line = line + b"0" * 0
    line = changed(40, b"a" * 1, line)
    line += b"\r" * (157 - len(line))
    assert len(line) == 157
    assert not clicks.is_packed(line)
    assert Clicks().decode(line).y == 0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"", r"expected a packed record of 157 bytes, or 40 cells with tabs between .* got 1 cells in 0 bytes"),
        (LINE.rpartition(b"\t")[0], "got 39 cells"),
        (LINE + b"\t", "got 41 cells"),
        (LINE.replace(b"\t", b","), "got 1 cells"),
        (changed(1, b"2"), r"expected 0 or 1 in cell 1 \(the label\), got b'2'"),
        (changed(1, b""), "in cell 1 .* got b''"),
        (changed(2, b"-4"), "cell 2: expected a count of -3 to 2147483647, or nothing; got b'-4'"),
        (changed(14, b"2147483648"), "cell 14: expected a count .* got b'2147483648'"),
        (changed(14, b"9" * 5000), "cell 14: expected a count"),
        (changed(3, b"1.5"), "cell 3: .* got b'1.5'"),
        (changed(3, b"nan"), "cell 3: .* got b'nan'"),
        (changed(3, b"1_0"), "cell 3: .* got b'1_0'"),
        (changed(3, b" 1"), "cell 3: .* got b' 1'"),
        (changed(15, b"68fd1e6g"), "cell 15: expected a category of 1 to 8 hex digits, or nothing; got b'68fd1e6g'"),
        (changed(40, b"123456789"), "cell 40: expected a category .* got b'123456789'"),
        (changed(40, b"0x12"), "cell 40: .* got b'0x12'"),
        (changed(40, b"\xff\x00"), r"cell 40: .* got b'\\xff\\x00'"),
        (struct.pack("<B13i26I", 2, *[0] * 39), r"expected 0 or 1 in the first byte \(the label\), got 2"),
        (struct.pack("<B13i26I", 1, *[0] * 4, -4, *[0] * 34), "count 5: expected -3 to 2147483647, .* got -4"),
        (bytes(156), "got 1 cells in 156 bytes"),
    ],
)
def test_a_bad_record_is_refused_with_what_was_expected(record: bytes, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        Clicks().decode(record)
    good = clicks.pack_line(LINE)
    with pytest.raises(BadRecordsError) as refused:
        Clicks().decode_many([good, record, LINE])
    assert refused.value.positions == (1,)
    if len(record) == 157:
        assert Clicks().decode_block(memoryview(good + record + good), 157) is None


_cells = st.one_of(st.sampled_from([b"", b"0", b"-1", b"-4", b"12", b"2147483648", b"ff", b"fffffffff"]), st.binary())
_lines = st.one_of(
    st.builds(changed, st.integers(1, 40), _cells),
    st.sampled_from([LINE, clicks.pack_line(LINE), LINE + b"\n", bytes(157), b"\x02" + bytes(156)]),
    st.binary(min_size=157, max_size=157),
)


@given(values=st.lists(_lines, min_size=1, max_size=20))
def test_many_records_are_decoded_as_one_by_one(values: list[bytes]) -> None:
    class Slow(Clicks):
        decode_block = Task.decode_block
        decode_many = Task.decode_many  # type: ignore[assignment]

    records = RawRecords(range(len(values)), values)
    bulk, single = (
        decode_records(task, records, samples_per_record=1, max_record_bytes=9999) for task in (Clicks(), Slow())
    )
    assert bulk.refused == single.refused
    assert (bulk.x.dtype, bulk.y.dtype) == (single.x.dtype, single.y.dtype)
    assert (bulk.x.tobytes(), bulk.y.tobytes()) == (single.x.tobytes(), single.y.tobytes())


def test_a_block_is_decoded_as_its_records_are() -> None:
    rows, _, _ = drawn(300)
    block = Clicks().decode_block(memoryview(rows.tobytes()), 157)
    assert block is not None
    x, y = stack(Clicks().decode(row.tobytes()) for row in rows)
    assert (block[0].tobytes(), block[1].tobytes()) == (x.tobytes(), y.tobytes())
    assert (block[0].dtype, block[1].dtype) == (x.dtype, y.dtype)
    assert block[0].flags.writeable  # or torch warns about each batch


# --- hashing ---------------------------------------------------------------------------------------------------------


def test_the_hash_is_splitmix64() -> None:
    """The first numbers of the generator with seed 1234567, as its authors' program prints them."""
    step = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + n * step) % 2**64 for n in range(3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("columns", [1, 7, 100_000, 10_000_000])
def test_columns_are_in_range_spread_evenly_and_depend_on_the_place(columns: int) -> None:
    numbers = np.repeat(np.arange(20_000, dtype=np.uint32)[:, None], 26, axis=1)
    hashed = columns_of(numbers, columns)
    assert hashed.min() >= 0
    assert hashed.max() < columns
    used = len(np.unique(hashed))
    # Of `columns` that n balls are thrown into, so many are hit.
    assert used == pytest.approx(columns * (1 - math.exp(-hashed.size / columns)), rel=0.01)
    if columns > 7:
        assert (hashed[:, 0] != hashed[:, 1]).mean() > 0.999


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "import sys; from examples.clicks.task import Clicks; import numpy as np;"
        f"sys.stdout.write(str(np.asarray(Clicks(10**7).decode({LINE!r}).x).tolist()))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there == str(np.asarray(Clicks(10**7).decode(LINE).x).tolist())


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_is_that_of_the_plain_program(sparse: bool) -> None:
    rows, _, _ = drawn(200)
    task = Clicks(997, sparse=sparse)
    block = task.decode_block(memoryview(rows.tobytes()), 157)
    assert block is not None
    x, y = block
    rng = np.random.default_rng(3)
    plain = PlainLogistic(997, 13)
    plain.table[:], plain.dense[:] = rng.normal(0, 0.3, 997), rng.normal(0, 0.3, 14)
    computer = GradientComputer(task, FlatModel(task.build_model()))
    computer.load(np.concatenate([plain.table, plain.dense]).astype(np.float32))
    gradient = computer.compute(x, y)
    of_table, of_dense, losses = plain.gradient(numbers_of(x), x[:, 13:], y)
    expected = len(x) * np.concatenate([of_table, of_dense])
    assert gradient.values == pytest.approx(expected, abs=1e-4)
    assert np.abs(expected).max() > 1  # a gradient of nothing would be equal too
    assert gradient.loss_sum == pytest.approx(losses.sum(), rel=1e-5)


def test_no_model_is_better_than_the_truth_and_the_truth_is_a_model_of_the_task() -> None:
    """The weights behind the clicks, put into the task's model, have the Bayes log-loss; others have a higher one."""
    rows, probabilities, truth = drawn(20_000, categories=5)
    task = Clicks(1_000_003)  # 130 categories: hardly two share a column
    block = task.decode_block(memoryview(rows.tobytes()), 157)
    assert block is not None
    x, y = map(torch.from_numpy, block)
    model = task.build_model()
    assert isinstance(model, SparseLinear)
    ranks = np.repeat(np.arange(5)[:, None], 26, axis=1)
    columns = columns_of(clicks.names(ranks), task.columns).astype(np.int64)
    assert len(np.unique(columns)) == 130
    with torch.no_grad():
        model.table.weight[torch.from_numpy(columns.T.ravel()), 0] = torch.from_numpy(truth.category_weights.ravel())
        model.dense.weight[0] = torch.from_numpy(truth.count_weights)
        model.dense.bias[0] = truth.bias
        logits = task.forward(model, x)
        assert torch.sigmoid(logits).numpy() == pytest.approx(probabilities, abs=1e-5)
        assert float(task.loss(logits + 0.2, y)) > float(task.loss(logits, y)) < float(task.loss(1.2 * logits, y))
        assert task.metrics(logits, y)["accuracy"] == np.mean((probabilities > 0.5) == rows["label"])
        bayes = clicks.bayes_log_loss(truth, np.random.default_rng(1), 50_000)
        assert float(task.loss(logits, y)) == pytest.approx(bayes, abs=0.01)


def test_one_bad_argument_is_refused() -> None:
    for columns in (0, 2**31):
        with pytest.raises(ValueError, match=f"columns: expected 1 to 2147483647, got {columns}"):
            Clicks(columns)


def test_held_out_clicks_are_the_front_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv.gz").write_bytes(gzip.compress(b"\n".join([LINE, changed(1, b"0"), LINE])))
    text = "job: t\ntask: {class: 'examples.clicks.task:Clicks', args: {holdout_path: dev.tsv.gz, holdout_samples: 2}}"
    held_out = list(load_task(job_config.parse(text, base_folder=tmp_path)).holdout())
    assert [int(sample.y) for sample in held_out] == [1, 0]
    assert list(Clicks().holdout()) == []
    with pytest.raises(ConfigError, match="none"):
        list(Clicks(holdout_path=str(tmp_path / "none")).holdout())


# --- real clicks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[np.ndarray, np.ndarray]:
    path = SHARED_DATA / "criteo_sample/train.tsv.gz"
    if not path.is_file():
        pytest.skip("needs the Criteo sample in ../shared/data")
    text = (
        "job: t\ntask: {class: 'a:B'}\ndata: {workers: 1}\n"
        "source: {kind: python, of: 'examples.clicks.task:from_file', "
        f"args: {{clicks_path: '{path.resolve()}'}}}}"
    )
    from doll.producers import sources

    records = list(sources.open_streams(job_config.parse(text), [0])[0])
    assert all(map(clicks.is_packed, records))
    block = Clicks().decode_block(memoryview(b"".join(records)), 157)
    assert block is not None
    assert (len(block[0]), int(block[1].sum())) == (7200, 1549)
    return block


def test_the_plain_program_and_the_task_learn_the_same_from_real_clicks(real: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = real
    task, plain = Clicks(), PlainLogistic(100_000, 13)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    of_task, of_plain = [], []
    for at in range(0, 7200, 90):
        part = slice(at, at + 90)
        loss = task.loss(task.forward(model, torch.from_numpy(x[part])), torch.from_numpy(y[part]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        of_task.append(float(loss.detach()))
        of_plain.append(plain.learn(numbers_of(x[part]), x[part, 13:], y[part], 0.3))
    assert of_task == pytest.approx(of_plain, rel=1e-3)
    share = y.mean()
    assert np.mean(of_task[40:]) < -(share * math.log(share) + (1 - share) * math.log(1 - share))


def test_scikit_learn_finds_the_same_model_of_real_clicks(real: tuple[np.ndarray, np.ndarray]) -> None:
    """The regularized minimum is unique: plain gradient steps and scikit-learn's solver reach one loss."""
    from scipy import sparse
    from sklearn import linear_model

    x, y = real
    x, y, columns = x[:2000], y[:2000], 100_000
    rows = np.repeat(np.arange(len(x)), 26)
    hashed = sparse.csr_matrix((np.ones(rows.size), (rows, x[:, 13:].ravel())), shape=(len(x), columns))
    features = sparse.hstack([hashed, sparse.csr_matrix(numbers_of(x))], format="csr")
    strength = 0.01  # of the penalty strength / 2 |w|**2 on the mean log-loss
    solved = linear_model.LogisticRegression(C=1 / (strength * len(x)), tol=1e-6, max_iter=2000).fit(features, y)
    task = Clicks()
    model = task.build_model()
    assert isinstance(model, SparseLinear)
    inputs, target = torch.from_numpy(x), torch.from_numpy(y)

    def objective() -> torch.Tensor:
        weights = (model.table.weight, model.dense.weight)
        penalty = sum((weight.square().sum() for weight in weights), torch.zeros(()))
        return task.loss(task.forward(model, inputs), target) + strength / 2 * penalty

    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = objective()
        value.backward()
        return value

    optimizer.step(closure)
    with torch.no_grad():
        probabilities = torch.sigmoid(task.forward(model, inputs)).numpy()
    assert probabilities == pytest.approx(solved.predict_proba(features)[:, 1], abs=2e-3)


def test_the_stream_of_a_seed_is_endless_fresh_and_skewed() -> None:
    rng = np.random.default_rng(0)
    truth = clicks.draw_truth(100, 1.1, 0.3, rng)
    records = list(itertools.islice(clicks.drawn(truth, rng), 5000))
    assert len(set(records)) == 5000
    rows = np.frombuffer(b"".join(records), clicks.RECORD)
    assert clicks.check(rows).all()
    _, frequencies = np.unique(rows["categories"][:, 0], return_counts=True)
    first, second = sorted(frequencies.tolist(), reverse=True)[:2]
    assert first / second == pytest.approx(2**1.1, rel=0.15)  # Zipf's law
    assert 0.1 < rows["label"].mean() < 0.5
    assert (truth.category_weights == 0).mean() == pytest.approx(0.7, abs=0.03)
