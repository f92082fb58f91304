"""Sources of lines: the right bytes on the right stream, clear errors."""

from __future__ import annotations

import gzip
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doll import config as job_config
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.producers import sources
from doll.records import lines
from job_files import job


def _config(source: str, folder: Path = Path("."), workers: int = 3, extra: str = "") -> JobConfig:
    return job(name="t", workers=workers, text=f"source: {source}\n{extra}", folder=folder)


def _take(stream: Iterator[bytes], count: int) -> list[bytes]:
    return list(itertools.islice(stream, count))


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz"])
def test_line_i_goes_to_stream_i_mod_n_byte_for_byte(tmp_path: Path, name: str) -> None:
    content = b"a;b\n" + b"".join(b"%d, \xff\xe9 \r\n" % n for n in range(7)) + b"\n7,last"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    streams = sources.open_streams(_config(f"{{kind: csv, path: {name}, header: true}}", tmp_path), [0, 0, 0])
    taken = [list(stream) for stream in streams]
    assert taken[0] == [b"0, \xff\xe9 ", b"3, \xff\xe9 ", b"6, \xff\xe9 "]
    assert taken[1] == [b"1, \xff\xe9 ", b"4, \xff\xe9 ", b"7,last"]
    assert taken[2] == [b"2, \xff\xe9 ", b"5, \xff\xe9 "]


def test_a_repeated_file_goes_on_counting(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{0}\n{1}\n{2}\n{3}\n")
    streams = sources.open_streams(_config("{kind: jsonl, path: d.jsonl, repeat: true}", tmp_path), [0, 0, 0])
    assert _take(streams[0], 4) == [b"{0}", b"{3}", b"{2}", b"{1}"]
    assert _take(streams[1], 3) == [b"{1}", b"{0}", b"{3}"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "expected at least one line"), (b"\n\r\n", "at least one line"), (b"h\n", "header")],
)
def test_a_file_without_lines_is_refused_at_once(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        sources.open_streams(_config("{kind: csv, path: d.csv, header: true}", tmp_path), [0, 0, 0])
    assert str(tmp_path / "d.csv") in str(caught.value)


def test_a_file_damaged_further_on_is_named_when_it_is_reached(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(97, 123, 200_000, dtype=np.uint8)
    noise[::50] = 10
    path = tmp_path / "d.csv.gz"
    path.write_bytes(gzip.compress(noise.tobytes(), mtime=0)[:-5000])
    stream = lines.read_file(path)
    with pytest.raises(ConfigError, match=r"d\.csv\.gz: expected a readable file of lines"):
        list(stream)


def test_a_pipe_gives_lines_as_they_come_and_none_while_it_is_silent() -> None:
    read_end, write_end = os.pipe()
    try:
        pipe = lines.read_pipe(read_end, max_bytes=100, timeout_s=0.001)
        assert next(pipe) is None
        os.write(write_end, b"one\r\n\ntwo\nthr")
        assert [next(pipe), next(pipe)] == [b"one", b"two"]
        assert next(pipe) is None
        os.write(write_end, b"ee\nlast without end")
        assert next(pipe) == b"three"
        os.close(write_end)
        write_end = -1
        assert list(pipe) == [b"last without end"]
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def test_a_line_of_a_pipe_that_is_too_long_is_cut_where_it_will_be_refused() -> None:
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, b"y" * 5 + b"\n" + b"n" * 9 + b"\r\n" + b"y" * 5 + b"\r\n")
        pipe = lines.read_pipe(read_end, max_bytes=5)
        assert [next(pipe) for _ in range(3)] == [b"y" * 5, b"n" * 6, b"y" * 5]
        os.write(write_end, b"z" * 50_000)  # in several reads, without end
        os.close(write_end)
        write_end = -1
        assert list(pipe) == [b"z" * 6]
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def test_a_pipe_carries_much_more_than_its_buffer() -> None:
    read_end, write_end = os.pipe()
    expected = [b"%d" % n * 40 for n in range(20_000)]

    def write() -> None:
        with os.fdopen(write_end, "wb") as file:
            file.write(b"\n".join(expected))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert [line for line in lines.read_pipe(read_end, max_bytes=1000) if line is not None] == expected
    finally:
        writer.join()
        os.close(read_end)


def test_no_source_is_an_error_that_says_what_to_write() -> None:
    config = job_config.parse("job: t\ntask: {class: 'a:B'}")
    with pytest.raises(ConfigError, match="source: expected a section"):
        sources.open_streams(config, [0] * 4)
