"""The text source: what a token is, pieces of limited length, what cannot be read, and where streams go on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from doll.errors import ConfigError
from doll.producers import sources
from doll.producers.position import source_name
from doll.task.text import records, tokens
from hypothesis import example, given
from hypothesis import strategies as st
from job_files import job


def _texts(values: list[bytes]) -> list[str]:
    return [json.loads(value)["text"] for value in values]


def _streams(path: Path, options: str = "", workers: int = 2, positions: tuple[int, ...] = ()) -> list[list[str]]:
    source = f"source: {{kind: text, path: {path.name}, tokens_per_record: 3{options}}}"
    config = job(workers=workers, text=source, folder=path.parent)
    streams = sources.open_streams(config, [0] * workers, positions)
    return [_texts(list(itertools.islice(stream, 12))) for stream in streams]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The U.S. dollar, 155,221 bags!", ["the", "u", "s", "dollar", "bags"]),
        ("Don't", ["don", "t"]),
        ("snake_case and x2y", ["snake", "case", "and", "x", "y"]),
        ("Größe ΑΣ 東京", ["größe", "ας", "東京"]),
        (" \n1987 -- 42%", []),
    ],
)
def test_a_token_is_a_run_of_letters_in_lower_case(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


@pytest.mark.slow
@given(text=st.text())
@example(text="İstanbul")  # lower case of one letter is a letter and a mark
def test_the_tokens_of_tokens_are_the_same(text: str) -> None:
    assert tokens(" ".join(tokens(text))) == tokens(text)


@given(length=st.integers(1, 100), limit=st.integers(1, 30))
def test_a_long_document_is_cut_into_few_pieces_of_equal_length(length: int, limit: int) -> None:
    words = [chr(97 + n // 26) + chr(97 + n % 26) for n in range(length)]
    pieces = [text.split() for text in _texts(list(records([" ".join(words).encode()], (), tokens_per_record=limit,
                                                           max_bytes=1000)))]  # fmt: skip
    assert list(itertools.chain.from_iterable(pieces)) == words
    assert len(pieces) == -(-length // limit)
    assert max(map(len, pieces)) <= limit
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_fields_of_a_json_object_are_joined() -> None:
    line = b'{"id": 7, "title": "Cocoa Review", "body": "Showers\\ncontinued"}'
    (value,) = records([line], ("title", "body"), tokens_per_record=9, max_bytes=1000)
    assert msgspec.json.decode(value) == {"text": "cocoa review showers continued"}


@pytest.mark.parametrize(
    "line",
    [
        b"not json", b"[1]", b'{"title": "a"}', b'{"title": "a", "body": null}', b'{"title": "a", "body": ["b"]}',
        b'{"title": "a", "body": "\xff"}', b'{"title": "a", "body": "b"', b"[" * 100_000,
        b'{"title": "a", "body": "' + b"b" * 200_000 + b'"}',
    ],
)  # fmt: skip
def test_a_line_that_has_no_text_is_sent_as_it_is_for_a_worker_to_refuse(line: bytes) -> None:
    good = b'{"title": "a", "body": "b"}'
    taken = list(records([good, line, good], ("title", "body"), tokens_per_record=9, max_bytes=150_000))
    assert taken == [b'{"text":"a b"}', line, b'{"text":"a b"}']


def test_a_plain_line_that_is_not_text_is_sent_as_it_is() -> None:
    taken = list(records([b"caf\xe9", "café".encode(), b"1 2 3"], (), tokens_per_record=9, max_bytes=100))
    assert taken == [b"caf\xe9", '{"text":"café"}'.encode()]


def test_line_i_goes_to_stream_i_mod_n_with_all_its_pieces(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("a b c d e\nf\n\n123\ng h\ni j k l\n")
    assert _streams(path) == [["a b", "c d e", "i j", "k l"], ["f", "g h"]]


def test_each_stream_goes_on_behind_its_own_position(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("a b c d e\nf\ng h\ni j k l\n")
    whole = _streams(path)
    assert whole == [["a b", "c d e", "g h"], ["f", "i j", "k l"]]
    assert _streams(path, positions=(1, 3)) == [whole[0][1:], []]
    again = _streams(path, ", repeat: true")
    assert again[0][:6] == whole[0] * 2
    assert _streams(path, ", repeat: true", positions=(4, 5)) == [
        (whole[0] * 6)[4:16], (whole[1] * 6)[5:17],
    ]  # fmt: skip


def test_held_out_lines_are_in_no_repetition(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("held\nout\na\nb\nc\n")
    assert _streams(path, ", skip: 2", workers=1) == [["a", "b", "c"]]
    assert _streams(path, ", skip: 2, repeat: true", workers=1) == [["a", "b", "c"] * 4]
    with pytest.raises(ConfigError, match=r"source.skip: expected fewer than the lines of .*d.txt, got 5"):
        _streams(path, ", skip: 5")


def test_another_cut_is_another_source() -> None:
    names = {
        source_name(job(text=f"source: {{kind: text, path: {path}{options}}}").source)
        for path, options in (
            ("a", ""), ("b", ""), ("a", ", fields: [body]"), ("a", ", skip: 1"), ("a", ", tokens_per_record: 9"),
        )
    }  # fmt: skip
    assert len(names) == 5
    assert "" not in names
    same = job(text="source: {kind: text, path: a, repeat: true, limit_samples: 5}").source
    assert source_name(same) in names


def test_each_text_goes_to_one_stream_and_has_one_number_in_each_repetition(tmp_path: Path) -> None:
    path = tmp_path / "five.txt"
    path.write_text("a b c d\n12\nc\nd\ne\n")  # 5 lines, no multiple of 2 streams; one has no token
    config = job(
        workers=2, folder=tmp_path,
        text=f"source: {{kind: text, path: {path.name}, tokens_per_record: 3, repeat: true, numbered: true}}",
    )  # fmt: skip
    streams = [list(itertools.islice(stream, 8)) for stream in sources.open_streams(config, [0, 0])]
    even, odd = ([tuple(json.loads(value).values()) for value in stream] for stream in streams)
    assert even == [("a b", 0), ("c d", 2), ("c", 4), ("e", 6)] * 2
    assert odd == [("d", 1)] * 8
    later = sources.open_streams(config, [5, 5], (5, 5))[0]
    assert json.loads(next(later)) == {"text": "c d", "number": 2}


def test_a_stream_without_a_text_is_refused_where_it_would_look_for_one_for_ever(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\n")
    with pytest.raises(ConfigError, match="expected a text for each of 2 streams, got none for stream 1"):
        _streams(tmp_path / "one.txt", ", repeat: true")
