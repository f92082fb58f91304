"""Sources of kind python: a function beside the job file gives the records of each stream."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.producers import sources
from job_files import job

FUNCTIONS = """
import pathlib

loaded = []


def numbers(stream, first=0):
    for n in range(first + stream.number, 12, stream.count):
        yield f"{n} of {stream.sent}"


def drawn(stream):
    shared = stream.shared_rng().integers(10**9)
    order = stream.order_rng(1).permutation(5).tolist()
    yield f"{shared} {order} {stream.rng().integers(10**9)}"


def texts(stream, words_path):
    return [pathlib.Path(words_path).read_bytes()]


def fails_late(stream):
    yield b"one"
    raise RuntimeError("no more")


def objects(stream):
    yield {"a": 1}
"""


def streams(folder: Path, source: str, sent: list[int], positions: list[int] | None = None) -> list[list[bytes]]:
    (folder / "events.py").write_text(FUNCTIONS)
    config = job(name="t", workers=len(sent), text=f"source: {{kind: python, {source}}}\n", folder=folder)
    return [list(itertools.islice(stream, 50)) for stream in sources.open_streams(config, sent, positions or ())]


def test_a_function_gives_the_records_of_each_stream(tmp_path: Path) -> None:
    given = streams(tmp_path, "of: 'events.py:numbers', args: {first: 4}", [0, 7])
    assert given == [[b"4 of 0", b"6 of 0", b"8 of 0", b"10 of 0"], [b"5 of 7", b"7 of 7", b"9 of 7", b"11 of 7"]]


def test_a_path_is_relative_to_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes(b"a b")
    assert streams(tmp_path, "of: 'events.py:texts', args: {words_path: words.txt}", [0]) == [[b"a b"]]


def test_streams_share_a_truth_and_draw_for_themselves_again_after_a_start(tmp_path: Path) -> None:
    (first,), (second,) = streams(tmp_path, "of: 'events.py:drawn'", [0, 0])
    (later,), (same,) = streams(tmp_path, "of: 'events.py:drawn'", [3, 0])
    assert first.rpartition(b" ")[0] == second.rpartition(b" ")[0] == later.rpartition(b" ")[0]
    assert len({first, second, later}) == 3
    assert same == second


def test_a_producer_passes_over_what_it_has_sent_where_the_order_stays(tmp_path: Path) -> None:
    source = "of: 'events.py:numbers', in_order: true"
    assert streams(tmp_path, source, [2, 0], [2, 0])[0] == [b"4 of 2", b"6 of 2", b"8 of 2", b"10 of 2"]


def test_a_position_is_of_the_function_and_its_arguments(tmp_path: Path) -> None:
    def identity(source: str) -> list[object] | None:
        section = job(text=f"source: {{kind: python, {source}}}\n").source
        assert section is not None
        return section.position_identity()

    assert identity("of: 'events.py:numbers'") is None
    assert identity("of: 'a.py:f', in_order: true") != identity("of: 'a.py:f', in_order: true, args: {first: 1}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("of: 'gone.py:numbers'", r"source.of: expected a Python file at .*gone.py, which does not exist"),
        ("of: 'events.py:none'", r"source.of: cannot load 'events.py:none': AttributeError"),
        ("of: 'events.py:numbers', args: {last: 1}", r"source.args: events.py:numbers does not take .*'last'"),
        ("of: 'events.py:fails_late'", r"source.of: events.py:fails_late: RuntimeError: no more \(events.py, line"),
        ("of: 'events.py:objects'", "expected records of bytes or text, got dict"),
        ("of: numbers", "source.of"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        streams(tmp_path, source, [0])


@pytest.mark.parametrize(
    "kind", ["digits", "idx", "synthetic", "criteo", "synthetic_clicks", "ratings", "synthetic_ratings"]
)
def test_a_kind_that_has_become_an_example_says_what_to_write(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{kind} is a function of the example \w+ now .*kind: python, of: '(task|source).py:"
    ):
        job(text=f"source: {{kind: {kind}, path: x}}\n")
