"""Recorded markets: the documented form, the known public ones, and what is wrong with a file."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from doll.cli.app import app
from doll.errors import ConfigError
from doll.provisioner.traces.model import Pool, Series, TraceSet, constant, read_folder, up_at_bid
from doll.provisioner.traces.recordings import load, survey
from paths import DOCS, SHARED_DATA
from typer.testing import CliRunner

from doll_lab.traces import FORMATS, google_lifetimes, loader_of
from doll_lab.traces.export import write_folder

POOLS = "trace_set,pool,num_machines,on_demand_usd_per_hour,spot_usd_per_hour\n"


def folder(path: Path, pools: str, prices: str = "", availability: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "pools.csv").write_text(POOLS + pools)
    if prices:
        (path / "prices.csv").write_text("pool,seconds,usd_per_hour\n" + prices)
    if availability:
        (path / "availability.csv").write_text("pool,seconds,num_up\n" + availability)
    return path


def test_a_series_holds_each_value_until_the_next_time() -> None:
    series = Series(np.array([0.0, 10.0, 40.0]), np.array([1.0, 3.0, 5.0]))
    assert series.at(np.array([-1.0, 0.0, 9.9, 10.0, 39.0, 50.0])).tolist() == [1, 1, 1, 3, 3, 5]
    assert series.mean(0.0, 40.0) == pytest.approx((10 * 1 + 30 * 3) / 40)
    assert series.mean(5.0, 15.0) == pytest.approx(2.0)


def test_a_folder_in_the_documented_form_is_read(tmp_path: Path) -> None:
    sets, _ = read_folder(
        folder(
            tmp_path,
            "mine,a,4,1.0,\nmine,b,2,2.0,0.5\nother,c,1,1.0,\n",
            prices="a,0,0.3\na,100,0.4\nc,0,0.5\nc,50,1.5\nc,80,0.5\n",
            availability="a,20,4\na,60,1\na,120,1\nb,0,2\nb,10,0\nb,30,0\n",
        )
    )
    assert [(trace_set.name, [pool.name for pool in trace_set.pools]) for trace_set in sets] == [
        ("mine", ["a", "b"]),
        ("other", ["c"]),
    ]
    a, b = sets[0].pools
    (c,) = sets[1].pools
    assert (a.start_s, a.end_s) == (20.0, 100.0)
    assert a.alpha == pytest.approx((40 * 4 + 40 * 1) / 80 / 4)
    assert a.cycle_s == pytest.approx(80 * 4 / 3)  # 4 machines for 80 s, 3 of them taken away
    assert b.price.at(np.array([5.0])).tolist() == [0.5]
    # Without availability a machine is there while it costs no more than on demand.
    assert c.num_up.at(np.array([10.0, 60.0, 80.0])).tolist() == [1, 0, 1]


def test_the_example_in_the_documentation_is_read(tmp_path: Path) -> None:
    text = (DOCS / "traces.md").read_text(encoding="utf-8")
    for part in text.split("    # ")[1:]:
        name, *lines = part.split("\n\n")[0].splitlines()
        (tmp_path / name).write_text("".join(line.strip() + "\n" for line in lines))
    (trace_set,) = load(tmp_path)
    assert trace_set.name == "mine"
    assert trace_set.pools[0].alpha == pytest.approx(1 - 0.5 * 3600 / 172800)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    price = Series(np.array([0.0, 0.1, 7.0]), np.array([0.123456789, 0.1, 0.1]))
    num_up = Series(np.array([0.0, 3.0]), np.array([3.0, 1.0]))
    sets = [TraceSet("s", (Pool("p q", 3, 0.7, price, num_up, "c5.xlarge"),))]
    write_folder(sets, tmp_path / "out")
    (back,) = load(tmp_path / "out")
    pool = back.pools[0]
    assert (back.name, pool.name, pool.num_machines, pool.on_demand_usd_per_hour) == ("s", "p q", 3, 0.7)
    assert pool.machine == "c5.xlarge"
    assert pool.price.times_s.tolist() == price.times_s.tolist()
    assert pool.price.values.tolist() == price.values.tolist()
    assert pool.num_up.values.tolist() == [3.0, 1.0]


def test_packed_files_and_folders_of_folders_are_read(tmp_path: Path) -> None:
    folder(tmp_path / "one", "x,a,1,1.0,0.1\n", availability="a,0,1\na,10,1\n")
    inner = folder(tmp_path / "two", "y,a,1,1.0,0.1\n", availability="a,0,1\na,10,1\n")
    (inner / "availability.csv.gz").write_bytes(gzip.compress((inner / "availability.csv").read_bytes()))
    (inner / "availability.csv").unlink()
    assert [trace_set.name for trace_set in load(tmp_path)] == ["x", "y"]


@pytest.mark.parametrize(
    ("pools", "prices", "availability", "expected"),
    [
        ("s,a,1,1.0,\n", "", "", "'a' has rows neither in prices.csv nor in availability.csv"),
        ("s,a,1,1.0,\n", "", "a,0,1\na,9,1\n", "expected spot_usd_per_hour"),
        ("s,a,1,1.0,0.1\n", "", "a,0,2\na,9,1\n", "expected num_up of 0 .. 1"),
        ("s,a,1,1.0,0.1\n", "", "a,9,1\na,0,1\n", "ascending order"),
        ("s,a,1,1.0,0.1\n", "", "a,0,1\n", "two or more times"),
        ("s,a,1,1.0,0.1\n", "", "a,0,1\na,x,1\n", "line 3: expected a number in seconds, got 'x'"),
        ("s,a,1,1.0,0.1\n", "", "a,0,1\na,nan,1\n", "expected a number in seconds"),
        ("s,a,1,0,0.1\n", "", "a,0,1\na,9,1\n", "on-demand price above 0"),
        ("s,a,1.5,1,0.1\n", "", "a,0,1\na,9,1\n", "whole number of machines"),
        ("s,a,1,1,-1\n", "", "a,0,1\na,9,1\n", "prices of 0 or more"),
        ("s,a,1,1.0,\ns,a,1,1.0,\n", "a,0,1\na,9,1\n", "", "line 3: pool 'a' is there twice"),
        ("s,a,1,1.0,\n", "a,0,1\na,9,1\n", "a,10,1\na,20,1\n", "overlap in time"),
        ("", "", "", "one pool per line"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(
    tmp_path: Path, pools: str, prices: str, availability: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(folder(tmp_path, pools, prices, availability))


def test_a_missing_column_and_a_folder_of_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected pools\.csv"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="not one"):
        load(tmp_path / "nowhere")
    (tmp_path / "pools.csv").write_text("trace_set,pool\ns,a\n")
    with pytest.raises(ConfigError, match="num_machines, on_demand_usd_per_hour missing"):
        load(tmp_path)
    (tmp_path / "pools.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path)


def test_sets_of_one_name_get_the_name_of_their_folder_too(tmp_path: Path) -> None:
    folder(tmp_path / "one", "x,a,1,1.0,0.1\n", availability="a,0,1\na,10,1\n")
    folder(tmp_path / "two", "x,a,1,1.0,0.1\ny,b,1,1.0,0.1\n", availability="a,0,1\na,10,1\nb,0,1\nb,10,1\n")
    sets = load(tmp_path)
    assert [trace_set.name for trace_set in sets] == ["x (one)", "x (two)", "y"]
    write_folder(sets, tmp_path / "copy")
    copied, skipped = read_folder(tmp_path / "copy")
    assert ([trace_set.name for trace_set in copied], skipped) == (["x (one)", "x (two)", "y"], [])
    assert [pool.name for trace_set in copied for pool in trace_set.pools] == ["a (x (one))", "a (x (two))", "b"]


AVAILABLE = "a,0,1\na,9,1\n"
SKY = {"kind": "availability", "nodes": 4, "zone": "z", "resource": "v100_1", "start_date": "2023-02-15",
       "gap_seconds": 30, "data": [4, 2, 4]}  # fmt: skip
EC2 = "timestamp_utc,availability_zone,instance_type,product,spot_usd_per_hour\n"


def test_a_set_that_cannot_be_used_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    pools = "good,a,1,1.0,0.1\nbad,b,1,1.0,0.1\nbad,c,1,1.0,0.1\n"
    folder(tmp_path / "mixed", pools, availability=AVAILABLE + "b,0,1\nb,9,1\nc,0,x\nd,0,1\nd,9,1\n")
    folder(tmp_path / "broken", "s,a,1,1.0,\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.csv").write_text("one,two\n1,2\n")
    (tmp_path / "other" / "README.txt").write_text("Not a recording.\n")
    surveyed = survey(tmp_path)
    assert [trace_set.name for trace_set in surveyed.sets] == ["good"]
    assert [str(refusal).replace(str(tmp_path), "") for refusal in surveyed.skipped] == [
        "/broken/pools.csv: line 2: pool 'a' has rows neither in prices.csv nor in availability.csv",
        "/mixed/pools.csv: trace set 'bad': /mixed/availability.csv: line 6: expected a number in num_up, got 'x'",
        "/mixed/pools.csv: pool 'd': it has rows in availability.csv, and is not in pools.csv",
        "/other/notes.csv: of no form that is known (docs/traces.md); it begins with 'one,two'",
    ]


def test_a_recording_is_known_by_what_is_in_it_whatever_its_name(tmp_path: Path) -> None:
    """A second trace beside the published one was ignored in silence."""
    events = "0,add,n1\n0,add,n2\n5000,remove,n1\n8000,add,n3\n"
    for name in ("p3_trace.csv", "g4dn_trace.csv"):
        (tmp_path / name).write_text(events)
    with gzip.open(tmp_path / "v100.txt.gz", "wt") as file:
        file.write("2021-12-10, 13:07:45, 80\n2021-12-10, 13:09:45, 60\n")
    (tmp_path / "more.jsonl").write_text(json.dumps(SKY) + "\n")
    (tmp_path / "p3_trace.csv.gz").write_bytes(b"never looked at")
    surveyed = survey(tmp_path)
    assert sorted(trace_set.name for trace_set in surveyed.sets) == [
        "bamboo-g4dn-trace", "bamboo-p3-trace", "bamboo-v100", "skypilot-availability-2023-02-15",
    ]  # fmt: skip
    assert [refusal.why for refusal in surveyed.skipped] == ["p3_trace.csv beside it is read instead"]


def test_the_year_of_a_history_is_that_of_its_rows_not_of_its_first(tmp_path: Path) -> None:
    """A history begins with the last change before its first day, and EC2 gives the newest row first."""
    lines = [
        "2015-12-30T10:00:00Z,us-east-1a,m1.small,Linux/UNIX,0.01\n",
        "2016-01-02T10:00:00Z,us-east-1a,m1.small,Linux/UNIX,0.02\n",
        "2016-01-03T10:00:00,us-east-1a,m1.small,Linux/UNIX,0.01\n",
        "2016-01-04T10:00:00+02:00,us-east-1a,m1.small,Linux/UNIX,0.02\n",
    ]
    for order in (lines, lines[::-1]):
        (tmp_path / "prices.csv").write_text(EC2 + "".join(order))
        surveyed = survey(tmp_path)
        (trace_set,) = surveyed.sets
        assert (trace_set.name, [pool.on_demand_usd_per_hour for pool in trace_set.pools]) == ("ec2-2016", [0.044])
        assert trace_set.pools[0].price.times_s.tolist() == [0.0, 259200.0, 345600.0, 424800.0]
        assert surveyed.skipped == []


def test_instance_types_without_a_price_are_named(tmp_path: Path) -> None:
    kinds = ["m1.small", *(f"x{n}.large" for n in range(12)), "once.large"]
    rows = [f"2016-01-0{day}T00:00:00Z,z,{kind},Linux/UNIX,0.01\n" for kind in kinds for day in (1, 2)]
    rows[-1] = rows[-1].replace("once.large", "m1.medium")
    (tmp_path / "prices.csv").write_text(EC2 + "".join(rows))
    surveyed = survey(tmp_path)
    assert [pool.name for trace_set in surveyed.sets for pool in trace_set.pools] == ["z m1.small"]
    assert [str(refusal).partition("prices.csv: ")[2] for refusal in surveyed.skipped] == [
        "pool z m1.medium: expected two or more prices, got one",
        "13 instance types (once.large, x0.large, x1.large, x10.large, x11.large, x2.large, x3.large, x4.large and 5 "
        "more), 25 rows: no on-demand price of 2016 is known: state it in on_demand.csv beside the file, see "
        "docs/traces.md",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p3_trace.csv.gz", gzip.compress(b"0,add,n1\n" * 999, mtime=0)[:-20], "whole .gz file, got one that is cut"),
        ("prices.csv.gz", b"no gzip", "expected a whole .gz file, got: Not a gzipped file"),
        ("prices.csv.gz", gzip.compress(b"x" * 99, mtime=0)[:20] + b"\xff" * 20, "expected a whole .gz file"),
        ("gcloud_a.txt", b"2021-12-10, 13:07:45, 8\xff\n", "expected text in UTF-8, got byte 0xff"),
        ("vms.csv", b"", "got an empty file"),
        ("p3_trace.csv", b"", "got an empty file"),
        ("gcloud_a.txt", b"", "got an empty file"),
        ("traces.jsonl", b"", "got no line of one"),
        ("p3_trace.csv", b"0,add,n1\n1e400,remove,n1\n", "line 2: expected a number in time, got '1e400'"),
        ("gcloud_a.txt", b"2021-12-10, 13:07:45, 1e300\n2021-12-10, 13:08:45, 1\n", "expected a number in count"),
        ("gcloud_a.txt", b"2021-12-10, 13:07:45, 1e14\n2021-12-10, 13:08:45, 1\n", "at most 10000000 machines"),
        ("vms.csv", b"zone,lifetime_s,end_event\nz,-601,preempted\n", "line 2: expected a lifetime of 0 s or more"),
        ("traces.jsonl", json.dumps(SKY | {"data": [[4], [2]]}).encode(), "line 1: expected a trace .*data: expected"),
        ("traces.jsonl", json.dumps(SKY | {"data": []}).encode(), "line 1: expected a trace"),
        ("traces.jsonl", json.dumps(SKY | {"nodes": 1e999}).encode(), "line 1: expected a trace"),
        ("traces.jsonl", json.dumps(SKY | {"gap_seconds": 0}).encode(), "expected a time above 0, got 0"),
        ("traces.jsonl", b"[" * 100_000, "line 1: expected a trace"),
        ("prices.csv", (EC2 + "soon,z,m1.small,Linux/UNIX,1\n").encode(), "line 2: expected a time like 2015"),
        ("prices.csv", (EC2 + "0001-01-01T00:00:00+09:00,z,m1.small,Linux/UNIX,1\n").encode(), "expected a time like"),
        ("prices.csv", (EC2 + "2016-01-01T00:00:00Z,z,m1.small,Linux/UNIX,inf\n").encode(), "line 2: expected a num"),
        ("prices.csv", (EC2 + '"' + "x" * 200_000).encode(), "expected CSV, got: field larger than field limit"),
        ("prices.csv", EC2.encode(), "expected one change of price per line, got none"),
    ],
)  # fmt: skip
def test_every_damaged_file_is_one_line_with_what_was_expected_and_came(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    surveyed = survey(tmp_path)
    assert surveyed.sets == []
    (only,) = surveyed.skipped
    assert str(only).startswith(f"{tmp_path / name}: ")
    assert "\n" not in str(only)
    assert re.search(expected, str(only)), str(only)
    result = CliRunner().invoke(app, ["backtest", str(tmp_path)])
    assert result.exit_code == 2, result.exception
    assert str(only) in result.stderr


def test_a_line_that_would_fill_the_memory_is_not_read_to_its_end(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "traces.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(b"[" * 1_000_000)
    (only,) = survey(tmp_path).skipped
    assert "expected at most 16000000 characters in a line" in only.why


def test_auction_rules() -> None:
    price = Series(np.array([0.0, 1.0, 2.0]), np.array([0.2, 0.21, 0.2]))
    assert up_at_bid(price, 5, bid_usd_per_hour=0.2).values.tolist() == [5, 0, 5]


def test_an_ec2_history_is_read(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text(
        "timestamp_utc,availability_zone,instance_type,product,spot_usd_per_hour\n"
        "2015-03-11T10:00:00Z,us-east-1a,c3.xlarge,Linux/UNIX,0.04\n"
        "2015-03-11T10:30:00Z,us-east-1b,c3.xlarge,Linux/UNIX,0.05\n"
        "2015-03-11T11:00:00Z,us-east-1a,c3.xlarge,Linux/UNIX,0.30\n"
        "2015-03-11T11:30:00Z,us-east-1a,x9.mystery,Linux/UNIX,0.30\n"
        "2015-03-11T12:00:00Z,us-east-1a,c3.xlarge,Linux/UNIX,0.04\n"
        "2015-03-11T13:00:00Z,us-east-1b,c3.xlarge,Linux/UNIX,0.05\n"
    )
    (trace_set,) = load(tmp_path)
    assert trace_set.name == "ec2-2015"
    a, b = trace_set.pools
    assert (a.name, a.on_demand_usd_per_hour) == ("us-east-1a c3.xlarge", 0.21)
    assert a.num_up.times_s.tolist() == [0.0, 3600.0, 7200.0]
    assert a.alpha == pytest.approx(0.5)
    assert (b.start_s, b.end_s) == (1800.0, 10800.0)


def test_stated_on_demand_prices_override_the_table_and_add_types(tmp_path: Path) -> None:
    header = "timestamp_utc,availability_zone,instance_type,product,spot_usd_per_hour\n"
    lines = [f"2015-03-1{day}T00:00:00Z,us-east-1a,{kind},Linux/UNIX,0.05\n" for kind in ("c3.xlarge", "x9.huge")
             for day in (1, 2)]  # fmt: skip
    (tmp_path / "prices.csv").write_text(header + "".join(lines))
    (alone,) = load(tmp_path)[0].pools
    assert alone.on_demand_usd_per_hour == 0.210
    (tmp_path / "on_demand.csv").write_text("instance_type,product,usd_per_hour\nc3.xlarge,,0.3\nx9.huge,,0.04\n")
    stated = {pool.name: pool for pool in load(tmp_path)[0].pools}
    assert stated["us-east-1a c3.xlarge"].on_demand_usd_per_hour == 0.3
    # The bid is the on-demand price: at 0.04 no machine is there for 0.05.
    assert stated["us-east-1a x9.huge"].alpha == 0.0
    (tmp_path / "on_demand.csv").write_text("instance_type,usd_per_hour\nc3.xlarge,-1\n")
    with pytest.raises(ConfigError, match="line 2: expected a price above 0"):
        load(tmp_path)


def test_an_ec2_history_of_unknown_machines_asks_for_the_documented_form(tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text(
        "timestamp_utc,availability_zone,instance_type,product,spot_usd_per_hour\n"
        "2015-03-11T10:00:00Z,us-east-1a,x9.mystery,Linux/UNIX,0.04\n"
    )
    with pytest.raises(ConfigError, match=r"docs/traces\.md"):
        load(tmp_path)


def test_skypilot_and_bamboo_recordings_are_read(tmp_path: Path) -> None:
    trace = {"kind": "availability", "nodes": 4, "zone": "z", "resource": "v100_1", "start_date": "2023-02-15",
             "gap_seconds": 30, "data": [4, 2, 4]}  # fmt: skip
    (tmp_path / "sky").mkdir()
    (tmp_path / "sky" / "traces.jsonl").write_text(json.dumps(trace) + "\n")
    (tmp_path / "bamboo").mkdir()
    (tmp_path / "bamboo" / "p3_trace.csv").write_text("0,add,n1\n0,add,n2\n5000,remove,n1\n8000,add,n3\n")
    (tmp_path / "bamboo" / "gcloud_x.txt").write_text(
        "2021-12-10, 13:07:45, 80\n2021-12-10, 13:09:45, 60\n2021-12-10, 13:08:45, 70\n"
    )
    counts, events, sky = sorted(load(tmp_path), key=lambda trace_set: trace_set.name)
    assert sky.pools[0].num_up.times_s.tolist() == [0, 30, 60, 90]
    assert sky.pools[0].alpha == pytest.approx(10 / 12)
    assert sky.pools[0].cycle_s == pytest.approx(90 * 4 / 2)
    assert events.pools[0].num_up.times_s.tolist() == [0, 5, 8]
    assert events.pools[0].num_up.values.tolist() == [2, 1, 2]
    assert counts.pools[0].num_up.values.tolist() == [80, 70, 60]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("traces.jsonl", "{}\n", "line 1: expected a trace"),
        ("traces.jsonl", "no json\n", "line 1: expected a trace"),
        ("p3_trace.csv", "0,add,n1\n5,explode,n1\n", "line 2: expected 'milliseconds,add|remove,node'"),
        ("gcloud_x.txt", "2021-12-10 13:07:45 80\n", "line 1: expected 'date, time, count'"),
        ("gcloud_x.txt", "yesterday, noon, 80\n", "line 1: expected a time like"),
        ("vms.csv", "zone,lifetime_s,end_event\nz,100,stopped\n", "zone z: expected at least one machine that was pre"),
    ],
)
def test_what_is_wrong_with_a_known_recording_is_said(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path)


def test_every_format_is_found_by_the_name_of_its_files() -> None:
    for known in FORMATS:
        assert loader_of("no first line of any format", known.published_as.replace("*", "x")) is known.load, known.name
    assert loader_of("no first line of any format", "other.csv") is None


def test_a_format_is_found_by_its_first_line_whatever_the_file_is_called() -> None:
    """The format is found also where its mark comes late in a long line."""
    skypilot = '{"data": [' + ", ".join(["1"] * 9000) + '], "gap_seconds": 60}'
    lines = {
        "SkyPilot availability": skypilot,
        "EC2 spot prices": "product,spot_usd_per_hour,timestamp_utc,availability_zone,instance_type",
        "Google lifetimes": "lifetime_s,end_event,zone,more",
        "Bamboo events": "12, add, node-1",
        "Bamboo counts": "2021-08-21, 10:00:01, 5",
    }
    assert {known.name for known in FORMATS} == lines.keys()
    for known in FORMATS:
        assert loader_of(lines[known.name], "vms.csv") is known.load, known.name


def test_kaplan_meier_counts_censored_lives_as_long_as_they_were_seen() -> None:
    """Ages 1 (dead), 2 (censored), 3 (dead), 4 (dead): 3/4, then 1/2 of it, then 0."""
    ages, survival = google_lifetimes.kaplan_meier([(3.0, True), (1.0, True), (4.0, True), (2.0, False)])
    assert ages.tolist() == [1.0, 3.0, 4.0]
    assert survival.tolist() == pytest.approx([0.75, 0.375, 0.0])


def test_google_machines_live_as_recorded_and_come_back(tmp_path: Path) -> None:
    lives = "".join(f"z,{3000 + 60 * (n % 11)},preempted\n" for n in range(60))
    (tmp_path / "vms.csv").write_text("zone,lifetime_s,end_event\n" + lives)
    (trace_set,) = load(tmp_path)
    (pool,) = trace_set.pools
    assert pool.alpha == pytest.approx(3300 / (3300 + 600), abs=0.01)
    assert pool.length_s == pytest.approx(10 * 86400.0)


def test_a_constant_holds() -> None:
    assert constant(0.5, 0.0, 9.0).mean(1.0, 8.0) == 0.5


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared data sets are not beside this checkout")
def test_the_shared_recordings_are_read() -> None:
    sets = {trace_set.name: trace_set for trace_set in load(SHARED_DATA / "spot_traces_skypilot")}
    intel = sets["skypilot-preemption-2023-04-19"]
    assert [round(pool.alpha, 2) for pool in intel.pools] == [0.85, 0.64, 0.94]
    assert {trace_set.name for trace_set in load(SHARED_DATA / "preempt_bamboo")} == {
        "bamboo-p3-trace",
        "bamboo-gcloud-v100-us-east1-c",
    }
    (auction,) = load(SHARED_DATA / "spot_us_east_1_2015")
    assert len(auction.pools) == 9
    assert max(pool.price.values.max() for pool in auction.pools if "c3.xlarge" in pool.name) == pytest.approx(2.1)
