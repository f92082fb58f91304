"""IDX files, and the stream of the example emnist: the right images on the right stream, clear errors."""

from __future__ import annotations

import gzip
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.producers import sources
from examples.emnist.task import read_idx, read_pair
from job_files import job

pytestmark = pytest.mark.slow  # loads torch


def _letters(folder: Path, args: str) -> JobConfig:
    args = f"{{images_path: images.gz, labels_path: labels, {args}}}"
    source = f"{{kind: python, of: examples.emnist.task:letters, args: {args}}}"
    return job(name="t", workers=3, text=f"source: {source}", folder=folder)


def _take(stream: Iterator[bytes], count: int) -> list[bytes]:
    return list(itertools.islice(stream, count))


def _write_idx(path: Path, array: np.ndarray) -> Path:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def idx_files(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    _write_idx(tmp_path / "images.gz", rng.integers(0, 256, (10, 4, 6)))
    _write_idx(tmp_path / "labels", np.arange(10))
    return tmp_path


def test_idx_images_in_order_go_round_the_streams_without_the_skipped(idx_files: Path) -> None:
    config = _letters(idx_files, "augment: false, skip: 3")
    taken = [list(stream) for stream in sources.open_streams(config, [0, 0, 0])]
    assert [[record[0] for record in stream] for stream in taken] == [[3, 6, 9], [4, 7], [5, 8]]
    pixels = read_idx(idx_files / "images.gz", 3)
    assert taken[1][0] == bytes([4]) + pixels[4].tobytes()


def test_idx_images_are_transformed_without_end_and_never_skipped_ones(idx_files: Path) -> None:
    config = _letters(idx_files, "skip: 8")
    taken = _take(sources.open_streams(config, [0, 0, 0])[0], 2000)
    assert {record[0] for record in taken} == {8, 9}
    assert len(set(taken)) == 2000


def test_only_the_first_items_can_be_read(idx_files: Path) -> None:
    assert (read_idx(idx_files / "images.gz", 3, limit=4) == read_idx(idx_files / "images.gz", 3)[:4]).all()
    assert len(read_idx(idx_files / "labels", 1, limit=99)) == 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "No such file"),
        ("empty", b"", "empty file"),
        ("text", b"hello, world", "first bytes 68656c6c"),
        ("floats", b"\0\0\x0d\x03" + bytes(12), "type 0x0d with 3 dimensions"),
        ("labels", b"\0\0\x08\x01" + bytes(12), "type 0x08 with 1 dimensions"),
        ("cut", b"\0\0\x08\x03\0\0", "header cut off after 6 bytes"),
        ("short", b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 2) + b"1234567", "expected 2 items of 4 bytes, got 7"),
        ("huge", b"\0\0\x08\x03" + struct.pack(">3I", 2, 2**16, 2**16), "expected items of 1 to"),
        ("torn.gz", gzip.compress(bytes(1000), mtime=0)[:-20], "expected an IDX file"),
        ("plain.gz", b"\0\0\x08\x03 not gzip", "expected an IDX file"),
    ],
)
def test_a_bad_idx_file_is_named_with_what_was_expected(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_labels_must_be_as_many_as_images(idx_files: Path) -> None:
    _write_idx(idx_files / "labels", np.arange(9))
    with pytest.raises(ConfigError, match=r"as many labels as images, got 10 in .*, 9 in"):
        read_pair(idx_files / "images.gz", idx_files / "labels")


def test_skipping_everything_is_refused(idx_files: Path) -> None:
    with pytest.raises(ConfigError, match=r"source.args.skip: expected 0 to 9, as .*images.gz has images, got 10"):
        sources.open_streams(_letters(idx_files, "skip: 10"), [0, 0, 0])
