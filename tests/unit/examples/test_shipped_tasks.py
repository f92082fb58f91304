"""The tasks that ship: precise refusals, equal fast and slow paths, models that learn, held-out sets that stay out."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doll import config as job_config
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import BadRecordsError, ConfigError, SampleError
from doll.producers import sources
from doll.task import images
from doll.task.base import Task, load_task
from examples.digits.task import Digits
from examples.emnist.task import Emnist
from examples.intrusion.task import FAMILIES, Intrusion
from examples.synthetic.task import Gaussian
from hypothesis import example, given
from hypothesis import strategies as st
from paths import SHARED_DATA
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

DIGITS = "{kind: python, of: examples.digits.task:samples}"
GAUSSIANS = "{kind: python, of: examples.synthetic.source:gaussians"

KDD_NORMAL = (
    b"0,tcp,http,SF,181,5450,0,0,0,0,0,1,0,0,0,0,0,0,0,0,0,0,8,8,0.00,0.00,0.00,0.00,1.00,0.00,0.00,"
    b"9,9,1.00,0.00,0.11,0.00,0.00,0.00,0.00,0.00,normal."
)
KDD_SMURF = KDD_NORMAL.replace(b"tcp,http", b"icmp,ecr_i").replace(b"normal.", b"smurf.")


def _records(source: str, count: int, workers: int = 1) -> list[bytes]:
    text = f"job: t\ntask: {{class: 'a:B'}}\ndata: {{workers: {workers}}}\nsource: {source}"
    return list(itertools.islice(sources.open_streams(job_config.parse(text), [0] * workers)[0], count))


def _learn(task: Task, x: np.ndarray, y: np.ndarray, batch: int, lr: float, momentum: float = 0.9) -> torch.nn.Module:
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    for at in range(0, len(x) - batch + 1, batch):
        part = slice(at, at + batch)
        optimizer.zero_grad()
        task.loss(task.forward(model, torch.from_numpy(x[part])), torch.from_numpy(y[part])).backward()
        optimizer.step()
    return model


def _accuracy(task: Task, model: torch.nn.Module, x: np.ndarray, y: np.ndarray) -> float:
    with torch.no_grad():
        return task.metrics(task.forward(model, torch.from_numpy(x)), torch.from_numpy(y))["accuracy"]


# --- the fast path equals the slow one ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "source"),
    [
        (Digits(), DIGITS),
        (Gaussian(7, 3), f"{GAUSSIANS}, args: {{features: 7, classes: 3}}}}"),
        (Gaussian(1, 2), f"{GAUSSIANS}, args: {{features: 1, classes: 2}}}}"),
    ],
    ids=["digits", "gaussian", "gaussian-1"],
)
def test_a_block_decodes_as_its_records_do(task: Task, source: str) -> None:
    records = _records(source, 300)
    block = task.decode_block(memoryview(b"".join(records)), len(records[0]))
    assert block is not None
    x, y = block
    slow_x, slow_y = stack(task.decode(record) for record in records)
    assert x.shape == (300, *(task.input_shape or ()))
    assert (x == slow_x).all()
    assert (y == slow_y).all()
    assert x.dtype == slow_x.dtype
    assert x.flags.writeable  # or torch warns about each batch
    assert y.flags.writeable


def test_emnist_blocks_too() -> None:
    task = Emnist()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    records = images.encode(pixels, np.arange(40, dtype=np.uint8))
    block = task.decode_block(memoryview(b"".join(records)), 785)
    assert block is not None
    slow_x, slow_y = stack(task.decode(record) for record in records)
    assert (block[0] == slow_x).all()
    assert (block[1] == slow_y).all()
    assert (slow_x == pixels).all()


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        (Digits(), bytes([9]) + bytes(64), bytes([10]) + bytes(64)),
        (Gaussian(2), struct.pack("<3f", 1, 2, 1), struct.pack("<3f", 1, float("nan"), 1)),
        (Gaussian(2), struct.pack("<3f", 1, 2, 1), struct.pack("<3f", 1, 2, 2)),
    ],
    ids=["digits-class", "gaussian-nan", "gaussian-class"],
)
def test_one_bad_record_sends_its_block_to_the_slow_path(task: Task, good: bytes, bad: bytes) -> None:
    assert task.decode_block(memoryview(good * 3), len(good)) is not None
    assert task.decode_block(memoryview(good + bad + good), len(good)) is None
    with pytest.raises(SampleError):
        task.decode(bad)


def test_a_block_of_another_width_has_no_fast_path() -> None:
    assert Digits().decode_block(memoryview(bytes(66 * 2)), 66) is None
    assert Gaussian(2).decode_block(memoryview(bytes(16 * 2)), 16) is None
    assert Intrusion().decode_block(memoryview(bytes(100)), 50) is None


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        (Digits(), b"", r"expected 65 bytes \(class, then 8x8 grey values\), got 0"),
        (Digits(), bytes(64), "expected 65 bytes .* got 64"),
        (Digits(), b"garbage, not a digit", "expected 65 bytes .* got 20"),
        (Digits(), bytes([10]) + bytes(64), r"expected a class in 0..9 in the first byte, got 10"),
        (Emnist(), bytes(65), "expected 785 bytes .* got 65"),
        (Emnist(), bytes([47]) + bytes(784), r"expected a class in 0..46 in the first byte, got 47"),
        (Gaussian(2), b"", r"expected 12 bytes \(2 float32 features, then the class\), got 0"),
        (Gaussian(2), bytes(16), "expected 12 bytes .* got 16"),
        (Gaussian(2), struct.pack("<3f", 0, float("nan"), 0), "expected finite features, got nan at position 1"),
        (Gaussian(2), struct.pack("<3f", float("-inf"), 0, 0), "got -inf at position 0"),
        (Gaussian(2), struct.pack("<3f", 0, 0, 2), r"expected a class in 0..1, got 2.0"),
        (Gaussian(2), struct.pack("<3f", 0, 0, 0.5), "got 0.5"),
        (Gaussian(2), struct.pack("<3f", 0, 0, -1), "got -1.0"),
        (Gaussian(2), struct.pack("<3f", 0, 0, float("nan")), "expected a class in 0..1, got nan"),
        (Intrusion(), b"", "expected 42 columns .* got 1"),
        (Intrusion(), KDD_NORMAL + b",more", "expected 42 columns .* got 43"),
        (Intrusion(), b"\xff\x00\x80" * 50, "expected 42 columns .* got 1"),
        (Intrusion(), b"x" + KDD_NORMAL, "column 1: expected a finite number >= 0, got b'x0'"),
        (Intrusion(), b"nan" + KDD_NORMAL[1:], "column 1: expected a finite number >= 0, got b'nan'"),
        (Intrusion(), b"inf" + KDD_NORMAL[1:], "column 1: .* got b'inf'"),
        (Intrusion(), b"-2" + KDD_NORMAL[1:], "column 1: .* got b'-2'"),
        (Intrusion(), KDD_NORMAL.replace(b",181,", b",,"), "column 5: expected a finite number >= 0, got b''"),
        (Intrusion(), KDD_NORMAL.replace(b"0.11", b"1.11"), r"column 36: expected a fraction 0..1, got b'1.11'"),
        (Intrusion(), KDD_NORMAL.replace(b"normal.", b""), "expected `normal` or the name of an attack .* got ''"),
        (Intrusion("families"), KDD_NORMAL.replace(b"normal", b"brandnew"), "the name of an attack .* got 'brandnew'"),
    ],
)
def test_a_bad_record_is_refused_with_what_was_expected(task: Task, record: bytes, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        task.decode(record)


@pytest.mark.parametrize("build", [lambda: Digits(hidden=[0]), lambda: Emnist(images_path="a"), lambda: Gaussian(0)])
def test_bad_arguments_are_refused(build: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        build()  # type: ignore[operator]


def test_bad_arguments_in_a_job_file_are_a_config_error() -> None:
    text = "job: t\ntask: {class: 'examples.intrusion.task:Intrusion', args: {classes: many}}"
    with pytest.raises(ConfigError, match="expected binary or families, got 'many'"):
        load_task(job_config.parse(text))


# --- intrusion ---------------------------------------------------------------------------------------------------


def test_a_connection_becomes_scaled_numbers_and_hashed_words() -> None:
    x, y, *_ = Intrusion(hash_size=50).decode(KDD_NORMAL)
    x = np.asarray(x)
    assert y == 0
    assert x.shape == (88,)
    assert x[1] == pytest.approx(np.log1p(181) / 4)  # src_bytes: the second numeric column
    assert x[2] == pytest.approx(np.log1p(5450) / 4)
    assert x[32] == pytest.approx(0.11)  # dst_host_same_src_port_rate
    words = np.zeros(50)
    for word in (b"protocol_type=tcp", b"service=http", b"flag=SF"):
        words[zlib.crc32(word) % 50] += 1
    assert (x[38:] == words).all()


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "import sys; from examples.intrusion.task import Intrusion; import numpy as np;"
        f"sys.stdout.write(str(np.flatnonzero(Intrusion().decode({KDD_SMURF!r}).x).tolist()))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there == str(np.flatnonzero(np.asarray(Intrusion().decode(KDD_SMURF).x)).tolist())


@pytest.mark.parametrize(
    ("label", "binary", "family"),
    [(b"normal.", 0, "normal"), (b"normal", 0, "normal"), (b"smurf.", 1, "dos"), (b"satan", 1, "probe"),
     (b"guess_passwd.", 1, "r2l"), (b"rootkit.\r", 1, "u2r")],
)  # fmt: skip
def test_labels(label: bytes, binary: int, family: str) -> None:
    record = KDD_NORMAL.replace(b"normal.", label)
    assert Intrusion().decode(record).y == binary
    assert Intrusion("families").decode(record).y == FAMILIES.index(family)


def test_an_attack_nobody_knew_is_an_attack() -> None:
    assert Intrusion().decode(KDD_NORMAL.replace(b"normal", b"brandnew")).y == 1


_cells = st.one_of(
    st.floats(0, 1).map(lambda number: b"%r" % number),
    st.integers(-2, 2**70).map(lambda number: b"%d" % number),
    st.sampled_from(
        [
            b"0.00", b"1.", b".5", b"+1", b"-0", b"-0.0", b"00", b"1e3", b"1E-400", b"1e400", b"inf", b"nan", b"1_0",
            b" 1 ", b"", b"0x1", b"[1", b"1]", b'"1"', b"true", b"null", b"1 2", b"1\n", b"\xff",
            b"1.7976931348623157e308",
        ]
    ),
    st.binary(max_size=4).filter(lambda cell: b"," not in cell),
)  # fmt: skip
_changes = st.lists(st.tuples(st.integers(0, 41), _cells), max_size=2)


def _changed(record: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    cells = record.split(b",")
    for column, cell in changes:
        cells[column] = cell
    return b",".join(cells)


_lines = st.one_of(
    st.builds(_changed, st.sampled_from([KDD_NORMAL, KDD_SMURF]), _changes),
    st.sampled_from([KDD_NORMAL, KDD_SMURF, KDD_SMURF + b"\n", KDD_NORMAL + b",", KDD_NORMAL.replace(b",tcp", b"")]),
)


@pytest.mark.parametrize("classes", ["binary", "families"])
@given(values=st.lists(_lines, min_size=1, max_size=30))
@example(values=[b"-" + KDD_NORMAL])  # a negative zero
@example(values=[_changed(KDD_NORMAL, [(25, b"-0.0")])])
def test_intrusion_decodes_many_lines_as_one_by_one(classes: Any, values: list[bytes]) -> None:
    class Slow(Intrusion):
        decode_many = Task.decode_many  # type: ignore[assignment]

    records = RawRecords(range(len(values)), values)
    many, single = (
        decode_records(task, records, samples_per_record=1, max_record_bytes=9999)
        for task in (Intrusion(classes), Slow(classes))
    )
    assert many.refused == single.refused
    assert (many.x.dtype, many.y.dtype, many.x.shape) == (single.x.dtype, single.y.dtype, single.x.shape)
    assert (many.x.tobytes(), many.y.tobytes()) == (single.x.tobytes(), single.y.tobytes())


def test_lines_of_intrusion_are_decoded_in_one_call() -> None:
    x, y, *_ = Intrusion("families").decode_many([KDD_NORMAL, KDD_SMURF] * 50)
    slow_x, slow_y = stack(Intrusion("families").decode(record) for record in [KDD_NORMAL, KDD_SMURF] * 50)
    assert (x.tobytes(), y.tobytes(), x.dtype, y.dtype) == (
        slow_x.tobytes(),
        slow_y.tobytes(),
        slow_x.dtype,
        slow_y.dtype,
    )
    with pytest.raises(BadRecordsError) as refused:
        Intrusion().decode_many([KDD_NORMAL, KDD_NORMAL.replace(b"0.11", b"1.11"), KDD_SMURF, b"-1" + KDD_SMURF[1:]])
    assert refused.value.positions == (1, 3)


def test_intrusion_learns_the_real_stream_as_it_comes() -> None:
    path = SHARED_DATA / "kdd99/kddcup.data_10_percent.csv.gz"
    if not path.is_file():
        pytest.skip("needs the KDD Cup 1999 file in ../shared/data")
    task = Intrusion()
    text = f"job: t\ntask: {{class: 'a:B'}}\ndata: {{workers: 1}}\nsource: {{kind: csv, path: '{path.resolve()}'}}"
    stream = sources.open_streams(job_config.parse(text), [0])[0]
    x, y = stack(task.decode(record) for record in itertools.islice(stream, 51_200))
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    right = 0
    for at in range(0, len(x), 512):  # test, then train
        part_x, part_y = torch.from_numpy(x[at : at + 512]), torch.from_numpy(y[at : at + 512])
        output = task.forward(model, part_x)
        right += int((output.argmax(dim=1) == part_y).sum())
        optimizer.zero_grad()
        task.loss(output, part_y).backward()
        optimizer.step()
    commonest = max(y.mean(), 1 - y.mean())
    assert right / len(x) > max(0.9, commonest)


# --- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        (Digits(), 17_226),
        (Emnist(), 1_204_655),
        (Emnist(small=True), 23_535),
        (Gaussian(20, 2), 42),
        (Intrusion(), 10_818),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Task) else "",
)
def test_models_have_their_size_and_one_output_per_class(task: Task, parameters: int) -> None:
    model = task.build_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    x = torch.zeros(3, *(task.input_shape or ()), dtype=torch.uint8)
    output = task.forward(model, x)
    assert output.shape == (3, task.num_classes)
    assert task.loss(output, torch.zeros(3, dtype=torch.int64)).ndim == 0


def test_one_seed_builds_one_model() -> None:
    built = []
    for _ in range(2):
        torch.manual_seed(5)
        built.append(torch.nn.utils.parameters_to_vector(Digits().build_model().parameters()))
    assert torch.equal(built[0], built[1])


def test_digits_reach_95_percent_of_held_out_digits_within_the_example_jobs_samples() -> None:
    """examples/digits: steps of 128 samples with lr 0.1; 64,000 samples are 128 seconds of its stream."""
    task = Digits()
    digits_block = task.decode_block(memoryview(b"".join(_records(DIGITS, 64_000))), 65)
    assert digits_block is not None
    x, y = digits_block
    model = _learn(task, x, y, 128, 0.1)
    assert _accuracy(task, model, *stack(task.holdout())) >= 0.95


def test_gaussian_classes_are_learned() -> None:
    task = Gaussian(20, 3)
    records = b"".join(_records(f"{GAUSSIANS}, args: {{features: 20, classes: 3}}}}", 6000))
    block = task.decode_block(memoryview(records), 84)
    assert block is not None
    model = _learn(task, block[0][:5000], block[1][:5000], 50, 0.1)
    assert _accuracy(task, model, block[0][5000:], block[1][5000:]) > 0.95


# --- held-out sets -----------------------------------------------------------------------------------------------


def test_held_out_digits_are_never_in_a_stream() -> None:
    held_out = {np.asarray(sample.x).tobytes() for sample in Digits().holdout()}
    assert len(held_out) == 1000
    streamed = {record[1:] for record in _records(DIGITS, 50_000)}
    assert not held_out & streamed


def test_held_out_digits_have_the_streams_distribution() -> None:
    x, y = stack(Digits().holdout())
    records = np.frombuffer(b"".join(_records(DIGITS, 20_000)), np.uint8).reshape(-1, 65)
    assert x.mean() == pytest.approx(records[:, 1:].mean(), rel=0.05)
    assert x.std() == pytest.approx(records[:, 1:].std(), rel=0.05)
    assert set(y.tolist()) == set(range(10))


def test_held_out_emnist_is_the_front_of_the_file_that_the_stream_skips(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    (tmp_path / "i").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 12, 28, 28) + pixels.tobytes())
    (tmp_path / "l").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 12) + bytes(range(12)))
    text = (
        "job: t\ndata: {workers: 1}\nsource: {kind: python, of: examples.emnist.task:letters, "
        "args: {images_path: i, labels_path: l, augment: false, skip: 5}}\n"
        "task: {class: 'examples.emnist.task:Emnist', args: {images_path: i, labels_path: l, holdout_samples: 5}}"
    )
    config = job_config.parse(text, base_folder=tmp_path)
    held_out = {np.asarray(sample.x).tobytes() for sample in load_task(config).holdout()}
    streamed = {record[1:] for record in sources.open_streams(config, [0])[0]}
    assert held_out == {image.tobytes() for image in pixels[:5]}
    assert streamed == {image.tobytes() for image in pixels[5:]}


def test_held_out_images_of_another_size_are_refused(tmp_path: Path) -> None:
    (tmp_path / "i").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2, 8, 8) + bytes(128))
    (tmp_path / "l").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 2) + bytes(2))
    with pytest.raises(ConfigError, match="expected images of 28x28, got 8x8"):
        Emnist(str(tmp_path / "i"), str(tmp_path / "l")).holdout()


def test_tasks_without_a_held_out_set_offer_none() -> None:
    assert [list(task.holdout()) for task in (Emnist(), Intrusion(), Gaussian())] == [[], [], []]


# --- imports -----------------------------------------------------------------------------------------------------


def test_public_tasks_and_producers_import_neither_torch_nor_scikit_learn() -> None:
    code = (
        "import sys; from doll import GreyImageTask, JsonTask, Sample, Task, TextTask;"
        "task = GreyImageTask(); task.input_shape, task.num_classes = (8, 8), 10; task.decode(bytes(65));"
        "early = [m for m in ('confluent_kafka',) if m in sys.modules];"
        "import doll.producers.main;"
        "sys.exit(str(early + [m for m in ('torch', 'sklearn', 'faust') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
