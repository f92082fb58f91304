"""Sources of clicks and ratings: the right samples on the right stream, bad lines kept, a restart that goes on."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from doll.config import JobConfig
from doll.errors import ConfigError
from doll.producers import sources
from examples.clicks import task as clicks
from examples.ratings import task as ratings
from job_files import job

pytestmark = pytest.mark.slow  # the examples import torch

LINES = [b"\t".join([b"%d" % (n % 2), *[b"%d" % n] * 13, *[b"%x" % (n + 1)] * 26]) for n in range(10)]


def of(example: str, function: str = "from_file", *, in_order: bool = True, **args: object) -> str:
    """A section `source` of an example."""
    of = f"examples.{example}.task:{function}"
    return json.dumps({"kind": "python", "of": of, "args": args, "in_order": in_order})


def config(folder: Path, source: str, workers: int = 3) -> JobConfig:
    return job(name="t", workers=workers, text=f"source: {source}\n", folder=folder)


def taken(config: JobConfig, positions: list[int], count: int) -> list[list[bytes]]:
    streams = sources.open_streams(config, [0] * len(positions), positions)
    return [list(itertools.islice(stream, count)) for stream in streams]


def test_lines_of_clicks_go_round_the_streams_packed_and_a_bad_one_as_it_is(tmp_path: Path) -> None:
    lines = [*LINES[:4], b"garbage", *LINES[5:]]
    (tmp_path / "c.tsv").write_bytes(b"\n".join(lines))
    expected = [clicks.pack_line(line) if line != b"garbage" else line for line in lines]
    streams = taken(config(tmp_path, of("clicks", clicks_path="c.tsv")), [0, 0, 0], 99)
    assert streams == [expected[0::3], expected[1::3], expected[2::3]]
    behind = taken(config(tmp_path, of("clicks", clicks_path="c.tsv")), [2, 1, 0], 99)
    assert behind == [expected[6::3], expected[4::3], expected[2::3]]
    again = taken(config(tmp_path, of("clicks", clicks_path="c.tsv", repeat=True), 1), [0], 15)
    assert again == [expected + expected[:5]]


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    (tmp_path / "r.csv").write_bytes(b"user,item,rating\n" + b"\n".join(b"%d,7,%d" % (n, n % 5) for n in range(20)))
    return tmp_path


def users(streams: list[list[bytes]]) -> list[list[int]]:
    return [[ratings.parse(record)[0] for record in stream] for stream in streams]


def test_ratings_in_the_order_of_the_file(rated: Path) -> None:
    source = of("ratings", ratings_path="r.csv", header=True, shuffle=False)
    assert users(taken(config(rated, source), [0, 0, 0], 99)) == [[*range(n, 20, 3)] for n in range(3)]
    assert users(taken(config(rated, source), [1, 0, 6], 99)) == [[*range(3, 20, 3)], [*range(1, 20, 3)], []]


def test_ratings_in_a_random_order_that_is_another_in_each_pass(rated: Path) -> None:
    source = of("ratings", ratings_path="r.csv", header=True, repeat=True)
    first = users(taken(config(rated, source), [0, 0, 0], 20))
    assert users(taken(config(rated, source), [0, 0, 0], 20)) == first
    passes = [first[place % 3][place // 3] for place in range(60)]  # in turn, as they lie in the file
    assert all(sorted(passes[at : at + 20]) == [*range(20)] for at in (0, 20, 40))
    assert passes[:20] != passes[20:40] != passes[40:60] != [*range(20)]
    # A producer that starts again goes on behind what each stream was given, in the middle of a pass.
    assert users(taken(config(rated, source), [9, 4, 0], 5)) == [first[0][9:14], first[1][4:9], first[2][:5]]
    once = users(taken(config(rated, source.replace(', "repeat": true', "")), [0, 0, 0], 99))
    assert sorted(itertools.chain(*once)) == [*range(20)]


def test_a_line_that_is_no_rating_is_sent_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_bytes(b"1,2,3\nbad line\n4,5,nan\n")
    streams = taken(config(tmp_path, of("ratings", ratings_path="r.csv", shuffle=False), 1), [0], 99)
    assert streams == [[ratings.pack(1, 2, 3.0), b"bad line", b"4,5,nan"]]
    assert Counter(taken(config(tmp_path, of("ratings", ratings_path="r.csv"), 1), [0], 99)[0]) == Counter(streams[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (of("clicks", clicks_path="none"), "No such file"),
        (of("ratings", ratings_path="none"), "No such file"),
        (of("ratings", ratings_path="r.csv", header=True, holdout_one_in=1), "that are not held out, got none"),
        (of("ratings", "made_up", users=1, items=1), "at least a rating for each of 3 streams, got 1"),
    ],
)
def test_a_source_that_cannot_be_opened_says_why(rated: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        taken(config(rated, source), [0, 0, 0], 1)


@pytest.mark.parametrize("example", ["clicks", "ratings"])
def test_made_up_streams_reproduce_differ_and_go_on_with_fresh_draws(tmp_path: Path, example: str) -> None:
    made = config(tmp_path, of(example, "made_up", in_order=False))
    streams, again = taken(made, [0, 0, 0], 2000), taken(made, [0, 0, 0], 2000)
    assert streams == again
    assert streams[0] != streams[1] != streams[2]
    restarted = sources.open_streams(made, [2000, 0, 0])
    assert list(itertools.islice(restarted[0], 2000)) != streams[0]
    assert list(itertools.islice(restarted[1], 2000)) == streams[1]


def test_streams_of_made_up_ratings_share_them_out(tmp_path: Path) -> None:
    source = of("ratings", "made_up", users=20, items=10, observed=0.5)
    sets = [set(stream) for stream in taken(config(tmp_path, source), [0, 0, 0], 3000)]
    assert [len(records) for records in sets] == [34, 33, 33]
    assert len(set.union(*sets)) == 100
    pairs = {ratings.parse(record)[:2] for record in set.union(*sets)}
    assert len(pairs) == 100
    assert np.array([max(values) for values in zip(*pairs, strict=True)]).tolist() == [19, 9]
