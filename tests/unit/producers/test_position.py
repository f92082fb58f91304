"""Positions of a file in its streams' records, and reading on from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from doll.config import FeedSource, JobConfig, StdinSource
from doll.config.source import HistorySource, SourceSection
from doll.config.source import sources as source_sections
from doll.config.variants import Variants
from doll.producers import sources
from doll.producers.position import HEADER, position_headers, position_in, source_name
from job_files import job


def config(source: str, folder: Path = Path()) -> JobConfig:
    return job(workers=3, text=f"source: {source}", folder=folder)


def test_only_what_is_read_in_order_has_positions() -> None:
    names = [
        source_name(config(source).source)
        for source in (
            "{kind: csv, path: a.csv}", "{kind: csv, path: b.csv}", "{kind: csv, path: a.csv, header: true}",
            "{kind: jsonl, path: a.csv}", "{kind: text, path: a.csv}", "{kind: text, path: a.csv, skip: 5}",
        )
    ]  # fmt: skip
    assert len(set(names)) == 6
    assert all(names)
    assert source_name(config("{kind: csv, path: a.csv, repeat: true, limit_samples: 5}").source) == names[0]
    for source in ("{kind: python, of: examples.digits.task:samples}", "{kind: stdin}"):
        assert source_name(config(source).source) == ""


def test_a_position_is_read_back_and_another_source_s_is_not() -> None:
    name, other = (source_name(config(f"{{kind: csv, path: {path}}}").source) for path in ("a", "b"))
    assert position_in(name, [("trace", b"x"), *position_headers(name, 17)]) == 17
    assert position_in(other, position_headers(name, 17)) is None
    assert position_headers("", 17) == []
    for value in (None, b"17", name.encode() + b" -1"):
        assert position_in(name, [(HEADER, value)]) is None
    assert position_in(name, ()) is None


@pytest.mark.parametrize("name", ["d.csv", "d.jsonl"])
def test_each_stream_goes_on_behind_its_own_position(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("".join(f"{line}\n" for line in range(10)))
    kind = name.rpartition(".")[2]
    once = config(f"{{kind: {kind}, path: {name}}}", tmp_path)
    assert [list(stream) for stream in sources.open_streams(once, [9, 9, 9], [1, 3, 0])] == [
        [b"3", b"6", b"9"], [], [b"2", b"5", b"8"],
    ]  # fmt: skip
    again = config(f"{{kind: {kind}, path: {name}, repeat: true}}", tmp_path)
    whole = [list(itertools.islice(stream, 40)) for stream in sources.open_streams(again, [0, 0, 0])]
    for position in (1, 3, 4, 7, 23):
        rest = sources.open_streams(again, [0, 0, 0], [position] * 3)
        assert [list(itertools.islice(stream, 10)) for stream in rest] == [
            stream[position : position + 10] for stream in whole
        ]


def test_a_source_that_does_not_define_its_positions_is_refused() -> None:
    class Parquet(SourceSection):
        kind: Literal["parquet"]

    with pytest.raises(ValueError, match=r"Parquet: expected position_identity to be defined"):
        Variants("kind", Parquet)


def test_a_new_source_is_one_section_and_one_opener(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it defines is where its streams begin, and the name under which a restarted producer continues."""

    class Counter(SourceSection):
        kind: Literal["counter"]

        def position_identity(self) -> list[Any] | None:
            return ["counter"]

    def opened(config: JobConfig, source: SourceSection, streams: list[sources.Stream]) -> list[Iterator[bytes]]:
        return [map(str.encode, map(str, itertools.count(stream.position))) for stream in streams]

    monkeypatch.setattr(source_sections, "_classes", {**source_sections.classes, "counter": Counter})
    openers: dict[Any, Any] = {**sources.OPENERS, Counter: opened}
    monkeypatch.setattr(sources, "OPENERS", openers)
    counter = config("{kind: counter}")
    streams = sources.open_streams(counter, [9, 9, 9], [4, 0, 7])
    assert [next(stream) for stream in streams] == [b"4", b"0", b"7"]
    assert source_name(counter.source) != ""


def test_every_source_but_the_pipe_and_the_history_has_an_opener() -> None:
    assert set(sources.OPENERS) == set(source_sections.classes.values()) - {StdinSource, FeedSource, HistorySource}
