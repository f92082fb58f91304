"""Ratings: packed records and lines say the same, bad ones are refused, and tasks learn as a plain program does."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.plain_models import PlainFactors
from doll import config as job_config
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import BadRecordsError, SampleError
from doll.model.flat_model import FlatModel
from doll.producers import sources
from doll.task.base import Task, load_task
from examples.ratings import task as ratings
from examples.ratings.task import MatrixFactorization, Pmf
from hypothesis import given
from hypothesis import strategies as st
from paths import SHARED_DATA
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

TASK = MatrixFactorization(users=10, items=20)
NAN = float("nan")


def packed(user: int, item: int, rating: float, tag: int = 0) -> bytes:
    return struct.pack("<BIIf", tag, user, item, rating)


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record", [packed(9, 3, 4.5), b"9,3,4.5", b"9,3,4.5,1112486027", b"9\t3\t4.5\t88125\n", b"9::3::4.5::978300760"]
)
def test_the_forms_of_a_rating(record: bytes) -> None:
    x, y, *_ = TASK.decode(record)
    assert (np.asarray(x).tolist(), np.asarray(x).dtype, float(y)) == ([9, 3], np.int32, 4.5)


def test_a_line_as_long_as_a_packed_record_is_a_line() -> None:
    line = b"9,3,4.5,12345"
    assert len(line) == len(packed(9, 3, 4.5)) == 13
    assert float(TASK.decode(line).y) == 4.5
    assert TASK.decode_block(memoryview(line), 13) is None


BAD = [
    (b"", "expected a packed rating of 13 bytes, or a line of user, item and rating with commas, tabs or :: between"),
    (b"9,3", "or a line .* got b'9,3'"),
    (b"userId,movieId,rating,timestamp", "expected the number of the user, 0 to 2147483647, got b'userId'"),
    (b"9,three,4", "expected the number of the item"),
    (b"-1,3,4", "expected the number of the user, 0 to 2147483647, got b'-1'"),
    (b"4294967297,3,4", "got b'4294967297'"),
    (b"9" * 5000 + b",3,4", "expected the number of the user"),
    (b"9,3,", "expected a number as rating, got b''"),
    (b"9,3,good", "expected a number as rating, got b'good'"),
    (b"9,3,nan", "expected a rating of -1e.06 to 1e.06, got nan"),
    (b"9,3,1e999", "expected a rating .* got inf"),
    (packed(9, 3, NAN), "expected a rating .* got nan"),
    (packed(9, 3, float("-inf")), "got -inf"),
    (packed(9, 3, 2e6), "got 2000000.0"),
    (packed(10, 3, 4), r"expected user 0 to 9 \(task.args.users\), got 10"),
    (packed(9, 20, 4), r"expected item 0 to 19 \(task.args.items\), got 20"),
    (packed(2**32 - 1, 3, 4), "got 4294967295"),
    (b"10,3,4", "expected user 0 to 9"),
    (bytes(12), "expected a packed rating of 13 bytes, got 12"),
    (packed(9, 3, 4, tag=1), "or a line"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_a_bad_record_is_refused_with_what_was_expected(record: bytes, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        TASK.decode(record)
    good = packed(1, 2, 3)
    with pytest.raises(BadRecordsError) as refused:
        TASK.decode_many([good, b"1,2,3", record])
    assert refused.value.positions == (2,)
    if len(record) == 13:
        assert TASK.decode_block(memoryview(good + record), 13) is None


_records = st.one_of(
    st.sampled_from([packed(1, 2, 3), b"1,2,3", b"9\t3\t2.5", *(record for record, _ in BAD if record)]),
    st.builds(packed, st.integers(0, 12), st.integers(0, 22), st.floats(width=32)),
    st.binary(min_size=1, max_size=14),
)


@given(values=st.lists(_records, min_size=1, max_size=20))
def test_many_records_are_decoded_as_one_by_one(values: list[bytes]) -> None:
    class Slow(MatrixFactorization):
        decode_block = Task.decode_block
        decode_many = Task.decode_many  # type: ignore[assignment]

    records = RawRecords(range(len(values)), values)
    bulk, single = (
        decode_records(task, records, samples_per_record=1, max_record_bytes=9999) for task in (TASK, Slow(10, 20))
    )
    assert bulk.refused == single.refused
    assert (bulk.x.tobytes(), bulk.y.tobytes()) == (single.x.tobytes(), single.y.tobytes())
    assert (bulk.x.dtype, bulk.y.dtype) == (single.x.dtype, single.y.dtype)


def test_a_block_is_decoded_as_its_records_are() -> None:
    rng = np.random.default_rng(0)
    values = [packed(int(user), int(item), rng.normal()) for user, item in rng.integers(0, 10, (50, 2))]
    block = TASK.decode_block(memoryview(b"".join(values)), 13)
    assert block is not None
    x, y = stack(map(TASK.decode, values))
    assert (block[0].tobytes(), block[1].tobytes()) == (x.tobytes(), y.tobytes())
    assert block[0].flags.writeable  # or torch warns about each batch


def test_a_rating_that_is_no_finite_float32_is_refused_in_a_line_too() -> None:
    assert float(TASK.decode(b"1,2,1e6").y) == 1e6
    with pytest.raises(SampleError, match="1000001"):
        TASK.decode(b"1,2,1000001")


# --- models ----------------------------------------------------------------------------------------------------------


def plain_of(task: MatrixFactorization, weights: np.ndarray) -> PlainFactors:
    """The plain program at the weights of the task's model."""
    ends = np.cumsum([task.users * task.rank, task.items * task.rank, task.users, task.items])
    users, items, *biases = np.split(weights, ends[: 4 if task.biases else 2])[:4]
    plain = PlainFactors(
        users.reshape(task.users, -1), items.reshape(task.items, -1), regularization=task.regularization,
        biases=task.biases, mean=task.mean,
    )  # fmt: skip
    if task.biases:
        plain.user_biases[:], plain.item_biases[:] = biases
    return plain


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda sparse: MatrixFactorization(30, 40, rank=5, sparse=sparse),
        lambda sparse: MatrixFactorization(30, 40, rank=5, regularization=0.3, sparse=sparse),
        lambda sparse: Pmf(30, 40, regularization=0.5, mean=3.5, sparse=sparse),
        lambda sparse: Pmf(30, 40, regularization=0.5, biases=True, mean=3.5, sparse=sparse),
    ],
    ids=["plain", "penalty", "pmf", "biases"],
)
def test_the_gradient_is_that_of_the_plain_program(make: Any, sparse: bool) -> None:
    task = make(sparse)
    rng = np.random.default_rng(1)
    x = np.stack([rng.integers(0, 30, 200), rng.integers(0, 40, 200)], axis=1).astype(np.int32)
    y = rng.integers(1, 6, 200).astype(np.float32)
    computer = GradientComputer(task, FlatModel(task.build_model()))
    computer.load(rng.normal(0, 0.5, computer.weights.shape).astype(np.float32))
    plain = plain_of(task, computer.weights)
    gradient = computer.compute(x, y)
    expected = np.concatenate([part.ravel() for part in plain.gradient(x, y).values()]) * len(x)
    assert gradient.values == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert np.abs(expected).max() > 1
    # The loss is that of the ratings, whatever the penalty is.
    squares = (plain.predict(x) - y) ** 2
    assert gradient.loss_sum == pytest.approx(squares.sum(), rel=1e-4)
    assert gradient.metric_sums["squared_error"] == pytest.approx(squares.sum(), rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MatrixFactorization(0, 1), lambda: MatrixFactorization(1, 1, rank=0),
        lambda: MatrixFactorization(1, 1, regularization=-1), lambda: Pmf(1, 1, mean=NAN),
        lambda: Pmf(1, 1, holdout_one_in=1),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_made_up_ratings_are_learned_down_to_their_noise() -> None:
    """By the task with torch's SGD, and by the plain program: the same errors, and at the end that of the noise."""
    observed = ratings.observe(300, 200, 5, 0.1, 0.2, np.random.default_rng(0))
    assert len(observed.ratings) == 12_000
    assert observed.ratings.var() == pytest.approx(0.2 + 0.01, abs=0.03)
    torch.manual_seed(0)
    task = MatrixFactorization(300, 200)
    flat = FlatModel(task.build_model())
    plain = plain_of(task, flat.flat.numpy().copy())
    optimizer = torch.optim.SGD(flat.module.parameters(), 10.0)
    rng = np.random.default_rng(1)
    ids = np.stack([observed.users, observed.items], axis=1).astype(np.int32)
    of_task, of_plain = [], []
    for _ in range(900):
        chosen = rng.integers(12_000, size=128)
        x, y = torch.from_numpy(ids[chosen]), torch.from_numpy(observed.ratings[chosen])
        loss = task.loss(task.forward(flat.module, x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        of_task.append(float(loss.detach()))
        of_plain.append(plain.learn(ids[chosen], observed.ratings[chosen], 10.0))
    assert of_task[:200] == pytest.approx(of_plain[:200], rel=0.01)
    assert np.mean(of_task[:50]) > 0.15
    assert np.mean(of_task[-100:]) < 0.015
    assert np.mean(of_task[-100:]) == pytest.approx(np.mean(of_plain[-100:]), rel=0.01)


def test_pmf_learns_real_ratings_as_the_plain_program_does() -> None:
    """One pass over MovieLens 100K: held-out RMSE within 1 % of the plain program's, and far below the mean's."""
    path = SHARED_DATA / "movielens_100k/u.data.gz"
    if not path.is_file():
        pytest.skip("needs MovieLens 100K in ../shared/data")
    text = (
        "job: t\ndata: {workers: 1}\n"
        "source: {kind: python, of: 'examples.ratings.task:from_file', "
        f"args: {{ratings_path: '{path.resolve()}', holdout_one_in: 10}}}}\n"
        "task: {class: 'examples.ratings.task:Pmf', args: {users: 944, items: 1683, biases: true, mean: 3.53, "
        f"ratings_path: '{path.resolve()}'}}}}"
    )
    config = job_config.parse(text)
    task = load_task(config)
    assert isinstance(task, Pmf)
    records = list(sources.open_streams(config, [0])[0])
    held_x, held_y = stack(task.holdout())
    assert 9_000 < len(held_x) == 100_000 - len(records) or len(held_x) == 10_000
    block = task.decode_block(memoryview(b"".join(records)), 13)
    assert block is not None
    streamed = {tuple(pair) for pair in block[0].tolist()}
    assert not streamed & {tuple(pair) for pair in held_x.tolist()}
    torch.manual_seed(0)
    flat = FlatModel(task.build_model())
    plain = plain_of(task, flat.flat.numpy().copy())
    optimizer = torch.optim.SGD(flat.module.parameters(), 5.0)
    for at in range(0, len(block[0]) - 250, 250):
        x, y = block[0][at : at + 250], block[1][at : at + 250]
        optimizer.zero_grad(set_to_none=False)
        task.loss(task.forward(flat.module, torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
        plain.learn(x, y, 5.0)
    with torch.no_grad():
        output = task.forward(flat.module, torch.from_numpy(held_x))
        error = task.metrics(output, torch.from_numpy(held_y))["squared_error"] ** 0.5
    expected = float(((plain.predict(held_x) - held_y) ** 2).mean()) ** 0.5
    assert error == pytest.approx(expected, rel=0.01)
    assert error < 0.9 * held_y.std()


# --- the held-out part -----------------------------------------------------------------------------------------------


def test_one_in_so_many_is_held_out_by_user_and_item() -> None:
    pairs = list(itertools.product(range(200), range(200)))
    chosen = [ratings.is_held_out(user, item, 10) for user, item in pairs]
    assert np.mean(chosen) == pytest.approx(0.1, abs=0.006)
    by_user = np.reshape(chosen, (200, 200)).mean(axis=1)
    assert by_user.std() == pytest.approx((0.09 / 200) ** 0.5, rel=0.25)  # no user has all or none
    assert not any(ratings.is_held_out(user, item, 0) for user, item in pairs[:100])


def test_what_is_held_out_is_not_in_the_stream(tmp_path: Path) -> None:
    lines = [b"user,item,rating", *(b"%d,%d,3" % pair for pair in itertools.product(range(30), range(30)))]
    (tmp_path / "r.csv").write_bytes(b"\n".join(lines))
    text = (
        "job: t\ndata: {workers: 1}\nsource: {kind: python, of: 'examples.ratings.task:from_file', "
        "args: {ratings_path: r.csv, header: true, holdout_one_in: 5}}\n"
        "task: {class: 'examples.ratings.task:Pmf', args: {users: 30, items: 30, ratings_path: r.csv, header: true, "
        "holdout_one_in: 5}}"
    )
    config = job_config.parse(text, base_folder=tmp_path)
    held_out = {tuple(np.asarray(sample.x).tolist()) for sample in load_task(config).holdout()}
    streamed = {ratings.parse(record)[:2] for record in sources.open_streams(config, [0])[0]}
    assert 100 < len(held_out) < 260
    assert not held_out & streamed
    assert held_out | streamed == set(itertools.product(range(30), range(30)))
    assert list(Pmf(3, 3).holdout()) == []
