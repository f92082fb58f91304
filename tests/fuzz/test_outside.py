"""Every reader of what other programs write, against mutated and made-up inputs: AWS, docker, files, probes.

Refused with the reader's own error, or read with a meaning that holds; never another error, never for long. The good
items beside a bad one are kept.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from doll.config import load, parse
from doll.consumers.lifecycle.spot_notices import Imds, NoticeWatcher
from doll.errors import CheckpointError, ConfigError, RecordError, ServiceUnavailableError
from doll.ledger.snapshot_counts import SnapshotCounts, read_counts
from doll.monitor.state.csv_file import read_rows
from doll.monitor.views.prometheus import JobMetrics
from doll.process.health import Heartbeat, _serve
from doll.producers.arrivals import parse_gaps
from doll.provisioner.fleets.compose import ComposeFleet
from doll.provisioner.fleets.ec2.notices import Ec2Notices
from doll.provisioner.fleets.processes import ProcessFleet
from doll.provisioner.prices.ec2 import OnDemandPrices
from doll.provisioner.state_store import FileStateStore
from doll.provisioner.traces.recordings import survey
from doll.ps.checkpointing import decode_snapshot
from doll.ps.engine.events import EngineSnapshot
from doll.ps.event_log import FileEventLog, LogEntry, read_log
from doll.ps.start import Start
from doll.records import lines
from doll.records.bounded import MAX_DEPTH, MalformedError, json_value
from doll.records.control import Join, Metric, Update
from doll.storage.checkpoints import Checkpoint, encode_checkpoint
from examples.emnist.task import read_idx
from fuzzing import JSON_WORDS, call_or_none, inputs
from paths import SHARED_DATA
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.slow, pytest.mark.fuzz]  # loads torch

# Of MessagePack: nested without end, announced lengths of 4 GiB, text that is not UTF-8, an extension, huge numbers.
PACKED_WORDS = [
    b"\x91" * 3_000, b"\x81\xa1a" * 3_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xa2\xff\xfe", b"\xd4\x01x", b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf0" + bytes(6), b"\xc0",
]  # fmt: skip


def test_json_of_strangers() -> None:
    seeds = [b'{"a": [1, 2.5, "x", null, {"b": true}]}', b"[[[[1]]]]"]
    for data in inputs("json", 10_000, seeds, JSON_WORDS):
        value = call_or_none(MalformedError, data, json_value, data)
        repr(value)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_is_read_to_a_fixed_depth_whatever_the_stack_holds(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    fits = opening * (MAX_DEPTH - 1) + "1" + closing * (MAX_DEPTH - 1)
    assert json_value(fits)
    for text in (opening * 2 + fits + closing * 2, opening * 100_000):
        with pytest.raises(MalformedError) as caught:
            json_value(text)
        assert len(str(caught.value)) < 300


# --- AWS ------------------------------------------------------------------------------------------------------------

WARNING = "EC2 Spot Instance Interruption Warning"
GOOD = json.dumps({"detail-type": WARNING, "detail": {"instance-id": "i-0good"}, "time": "2026-11-22T08:00:00Z"})


class Queue:
    """Answers `receive_message` once with these bodies, as SQS would."""

    def __init__(self, bodies: Sequence[str]) -> None:
        self._bodies = list(bodies)
        self.deleted: list[str] = []

    def receive_message(self, **_: Any) -> dict[str, Any]:
        bodies, self._bodies = self._bodies, []
        return {"Messages": [{"Body": body, "ReceiptHandle": str(at)} for at, body in enumerate(bodies)]}

    def delete_message_batch(self, *, QueueUrl: str, Entries: list[dict[str, str]]) -> None:
        self.deleted += [entry["ReceiptHandle"] for entry in Entries]


def test_a_queue_of_anybodys_messages_gives_the_good_notices_among_them() -> None:
    seeds = [GOOD.replace("i-0good", "i-0else").encode(), b'{"detail-type": "x", "detail": {"instance-id": "i-1"}}']
    with structlog.testing.capture_logs():
        for data in inputs("sqs", 10_000, seeds, [*JSON_WORDS, b'"instance-id": []', b'"detail": []']):
            queue = Queue([data.decode("utf-8", "replace"), GOOD])
            notices = Ec2Notices(queue, "http://queue", clock=lambda: 1.8e9)
            noticed = call_or_none(ServiceUnavailableError, data, notices.read, {"i-0good": 1})
            assert list(noticed) == ["i-0good"], data[:400]
            assert "1" not in queue.deleted


class Said(Imds):
    """A metadata service that answers with one text."""

    def __init__(self, text: str) -> None:
        super().__init__("http://127.0.0.1:9")
        self.text = text

    def get(self, path: str) -> str | None:
        return self.text if path == "spot/instance-action" else None


def test_whatever_the_metadata_service_says_is_a_notice() -> None:
    seeds = [b'{"action": "terminate", "time": "2027-01-15T08:02:00Z"}']
    announced: list[float] = []
    with structlog.testing.capture_logs():
        for number, data in enumerate(inputs("imds", 8_000, seeds, JSON_WORDS)):
            watcher = NoticeWatcher(Said(data.decode("utf-8", "replace")), announced.append, wall=lambda: 1.8e9)
            assert call_or_none((), data, watcher.poll)
            assert len(announced) == number + 1
            assert 0 <= announced[-1] < math.inf


class PriceList:
    def __init__(self, product: str) -> None:
        self.product = product

    def get_products(self, **_: Any) -> dict[str, Any]:
        return {"PriceList": [self.product]}


def test_price_lists_and_their_file(tmp_path: Path) -> None:
    offer = {"priceDimensions": {"d": {"unit": "Hrs", "pricePerUnit": {"USD": "0.17"}}}}
    product = json.dumps({"terms": {"OnDemand": {"o": offer}}}).encode()
    kept = b'{"nowhere": {"c5.xlarge": {"usd_per_h": 0.17, "as_of": "2026-11-22"}}}'
    cache = tmp_path / "prices.json"
    with structlog.testing.capture_logs():
        for data in inputs("price list", 3_000, [product], JSON_WORDS):
            price = call_or_none(
                (), data, OnDemandPrices(PriceList(data.decode("utf-8", "replace")), "nowhere").lookup, "c5.xlarge"
            )
            assert price is None or 0 < price.usd_per_h < math.inf
        for data in inputs("price file", 2_000, [kept], JSON_WORDS):
            cache.write_bytes(data)
            price = call_or_none((), data, OnDemandPrices(None, "nowhere", cache=cache).lookup, "c5.xlarge")
            assert price is None or 0 < price.usd_per_h < math.inf


# --- docker ---------------------------------------------------------------------------------------------------------


class Engine(ComposeFleet):
    """A fleet whose docker prints this."""

    listed = inspected = ""

    def _call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        said = {"ps": self.listed, "inspect": self.inspected}.get(command[1], "")
        return subprocess.CompletedProcess(list(command), 0, said, "")


CONTAINER = {
    "Name": "/j-w0-i1-spot-a0", "Created": "2026-11-22T08:00:00.5Z",
    "Config": {"Labels": {"doll.cluster": "j", "doll.worker": "0", "doll.incarnation": "1", "doll.market": "spot"}},
    "State": {"Status": "running", "FinishedAt": "0001-01-01T00:00:00Z", "ExitCode": 0, "OOMKilled": False},
}  # fmt: skip


def test_what_docker_prints() -> None:
    fleet = Engine(cluster="j", project="j", file=Path("docker-compose.yml"), clock=lambda: 1.8e9)
    row, inspected = b'{"ID": "0abc"}\n{"ID": "0def"}\n', json.dumps([CONTAINER, CONTAINER]).encode()
    assert (fleet.listed, fleet.inspected) == ("", "")
    with structlog.testing.capture_logs():
        for turn, data in enumerate(inputs("docker", 8_000, [row, inspected], JSON_WORDS)):
            text = data.decode("utf-8", "replace")
            fleet.listed, fleet.inspected = (text, inspected.decode()) if turn % 2 else (row.decode(), text)
            for instance in call_or_none((ConfigError, ServiceUnavailableError), data, fleet.instances) or ():
                assert instance.slot >= 0
                assert instance.market in ("spot", "on_demand")


# --- files of ours that others can damage ---------------------------------------------------------------------------


def test_state_files_of_the_provisioner(tmp_path: Path) -> None:
    class NoForks:
        def running(self) -> list[Any]:
            return []

    kept = json.dumps([
        {"instance": {"id": "a", "slot": 0, "incarnation": 1, "market": "spot", "pool": "p", "state": "running",
                      "launched_s": 1.0, "ended_s": None, "end": ""}, "preempted": False, "killed": False},
    ]).encode()  # fmt: skip
    state_store = FileStateStore(tmp_path, "fuzz")
    with structlog.testing.capture_logs():
        for data in inputs("provisioner files", 4_000, [kept, b'{"state": 3, "turn": 7}'], JSON_WORDS):
            state_store.state.write_bytes(data)
            loaded = call_or_none((), data, state_store.load)
            assert loaded is None or isinstance(loaded, dict)
            fleet = object.__new__(ProcessFleet)
            fleet._path, fleet.forks, fleet._machines = state_store.state, NoForks(), {}  # type: ignore[assignment]
            fleet._roles, fleet.clock = {}, lambda: 0.0
            call_or_none(ConfigError, data, fleet._load)


def test_tables_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "updates.csv"
    seeds = [b"version,loss,time_s\n1,0.5,10.0\n2,0.4,11.0\n3,,12.0\n"]
    words = [b'"' * 9, b'"' + b"x" * 200_000, b"\0", b"\xff", b"nan", b"1e999", b"\r", b"," * 3_000]
    for data in inputs("tables", 3_000, seeds, words):
        path.write_bytes(data)
        assert all(
            isinstance(value, float) for row in call_or_none((), data, read_rows, path) for value in row.values()
        )


def _snapshot() -> EngineSnapshot:
    return EngineSnapshot(
        version=3, origins=(0, 0), records_per_batch=8, applied=(2, 1), assignment=(0, 1),
        sessions=(1 << 20, 0), processes=("a", ""), incarnations=(1, 0), restarts=(0, 0),
        samples_total=24, elapsed_s=2.5, counters={"stale": 1},
        policy="doll", policy_state={"clock": [1, 2]},
    )  # fmt: skip


def test_the_engines_state_in_a_checkpoint() -> None:
    """A user who can write to the folder can write a right checksum around the state."""
    config = parse("job: j\ntask: {class: 'm:C'}\ndata: {workers: 2, batch_size: 8}")
    valid = msgspec.msgpack.encode(_snapshot())
    for data in inputs("engine states", 8_000, [valid], PACKED_WORDS):
        checkpoint = Checkpoint(job="j", fingerprint="f", term=1, version=3, state=data, tensors={})
        snapshot = call_or_none(CheckpointError, data, decode_snapshot, checkpoint)
        assert snapshot is None or isinstance(snapshot, EngineSnapshot)
        counts = call_or_none(CheckpointError, data, read_counts, config, data)
        assert counts is None or isinstance(counts, SnapshotCounts)


def test_event_logs(tmp_path: Path) -> None:
    checkpoint = Checkpoint(job="j", fingerprint="f", term=1, version=3, state=b"s", tensors={})
    path = tmp_path / "events.log"
    log = FileEventLog(path, Start(1, 0.0, (), b"".join(encode_checkpoint(checkpoint))))
    for number in range(3):
        log.write(Join(worker=number, process="a"), float(number), b"gradient")
    log.close()
    valid = path.read_bytes()

    def read() -> list[LogEntry]:
        start, entries = read_log(path)
        assert isinstance(start, Start)
        return list(entries)

    assert len(read()) == 3
    for data in inputs("event logs", 6_000, [valid], [*PACKED_WORDS, b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"]):
        path.write_bytes(data)
        call_or_none(RecordError, data, read)


def test_job_files_of_any_size_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of zeros, which takes no room
    for source in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="expected at most"):
            load(source)
    path.unlink()
    path.write_bytes(b"job: \xff\n")
    with pytest.raises(ConfigError, match=r"job\.yaml: expected UTF-8, got byte 0xff at 5"):
        load(path)


# --- data sets ------------------------------------------------------------------------------------------------------


def test_idx_files(tmp_path: Path) -> None:
    path = tmp_path / "images"
    valid = struct.pack(">HBBIII", 0, 8, 3, 3, 2, 2) + bytes(12)
    for data in inputs("idx", 8_000, [valid], [b"\xff" * 4, b"\0\0\0\0", struct.pack(">I", 1 << 20)]):
        path.write_bytes(data)
        array = call_or_none(ConfigError, data, read_idx, path, 3)
        assert array is None or array.nbytes <= len(data)


def test_an_idx_header_that_announces_terabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.write_bytes(struct.pack(">HBBIII", 0, 8, 3, 0xFFFF_FFFF, 1024, 1024) + bytes(12))
    with pytest.raises(ConfigError, match=r"at most \d+ bytes, .*announces 4294967295 items of 1048576 bytes"):
        read_idx(path, 3)
    path.write_bytes(struct.pack(">HBBIII", 0, 8, 3, 8_000, 1024, 1024) + bytes(12))
    with pytest.raises(ConfigError, match="expected 8000 items of 1048576 bytes, got 12 bytes"):
        read_idx(path, 3)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_of_lines(tmp_path: Path, suffix: str) -> None:
    import gzip

    path = tmp_path / f"events.jsonl{suffix}"
    valid = b'{"a": 1}\n{"a": 2}\r\n\n{"a": 3}'
    seeds = [gzip.compress(valid, mtime=0)] if suffix else [valid]
    for data in inputs(f"lines{suffix}", 3_000, seeds, [b"x" * 300, b"\n" * 99, b"\r", b"\0"]):
        path.write_bytes(data)
        for line in call_or_none(ConfigError, data, lambda: list(lines.read_file(path, max_bytes=100))) or ():
            assert 0 < len(line) <= 101
            assert b"\n" not in line


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.truncate(1 << 26)
        file.seek(0, 2)
        file.write(b"\nlast")
    assert [len(line) for line in lines.read_file(path, max_bytes=1000)] == [5, 1001, 4]


def test_files_of_gaps() -> None:
    words = [b"inf", b"nan", b"1e308", b"1e400", b"-1", b"1_0", b"0x1", b"\x1c", b"\r"]
    for data in inputs("gaps", 3_000, [b"# seconds\n0.5\n0\n1.25\n"], words):
        gaps = call_or_none(ConfigError, data, parse_gaps, data.decode("utf-8", "replace"), "gaps.txt")
        assert gaps is None or (math.isfinite(gaps.sum() * 1e9) and gaps.min() >= 0 and gaps.max() > 0)


# --- probes and scrapes ---------------------------------------------------------------------------------------------


def test_the_health_endpoint_outlives_its_visitors() -> None:
    heartbeat = Heartbeat("ps")
    server = _serve(heartbeat, 0)
    assert server is not None
    port = server.server_address[1]

    async def visit(data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            writer.write_eof()
            await reader.read(100_000)
        except OSError:  # the server has hung up already
            pass
        finally:
            writer.close()

    seeds = [b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"HEAD /readyz HTTP/1.0\r\n\r\n"]
    words = [b"x" * 70_000, b"\r\nA: b" * 200, b"\0", b"\xff", b"HTTP/9.9", b"POST", b"Content-Length: -1", b"%00"]
    try:
        for data in inputs("health", 2_000, seeds, words):
            asyncio.run(visit(data))
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        asked.request("GET", "/healthz")
        assert json.loads(asked.getresponse().read())["healthy"]
        asked.close()
    finally:
        server.shutdown()
        server.server_close()


def test_what_a_scrape_holds_is_always_readable() -> None:
    """A user who may write to `metrics` can choose any name; Prometheus refuses the whole scrape for one bad line."""
    known = [Metric(source="worker-3", values={"lag": 1.0, "samples_total": 5.0}, time_s=1.0),
             Metric(source="ps", values={"worker_3_lag": 2.0, "version": 1.0}, time_s=1.0)]  # fmt: skip
    seeds = [msgspec.msgpack.encode(record) for record in known]
    words = [b"worker", b"_total", b'"', b"\\", b"\n", b"{", b"-", b"\xe2\x80\xa8", b"\xd9\xa3", b"job", b"\0"]
    read = 0
    for data in inputs("metrics", 4_000, seeds, words):
        try:
            record = msgspec.msgpack.decode(data, type=Metric)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        read += 1
        subject = JobMetrics("j", 2)
        for received in (*known, record, Update(term=1, version=1, members=(), n_samples=1, loss=0.5)):
            call_or_none((), data, subject.feed, received)
        registry = CollectorRegistry()
        registry.register(subject)
        text = call_or_none((), data, generate_latest, registry).decode()
        seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        for family in call_or_none((), data, lambda text=text: list(text_string_to_metric_families(text))):
            for sample in family.samples:
                at = (sample.name, tuple(sorted(sample.labels.items())))
                assert at not in seen, data
                seen.add(at)
    assert read > 0


def test_sources_without_end_do_not_fill_the_memory() -> None:
    subject = JobMetrics("j", 2)
    with structlog.testing.capture_logs() as logs:
        for number in range(12_000):
            subject.feed(Metric(source=f"s{number}", values={"a": 1.0}, time_s=1.0))
        subject.feed(Metric(source="s1", values={"a": 7.0}, time_s=2.0))
        subject.feed(Metric(source="x" * 10_000, values={}, time_s=2.0))
    assert [entry["event"] for entry in logs] == ["too_many_sources", "metric_refused"]
    served = {family.name: family.samples[0].value for family in subject.collect()}
    assert served["doll_s1_a"] == 7.0
    assert len(served) < 10_010


# --- recorded markets -----------------------------------------------------------------------------------------------

TRACE_WORDS = [
    b"inf", b"nan", b"1e308", b"1e400", b"-1", b"-0", b"0", b'"', b",", b"\r", b"\n", b"\n\n", b"\0", b"\xff",
    b"9" * 400, b'"' + b"x" * 140_000, b"[" * 3_000, b"add", b"remove", b"preempted", b"0001-01-01T00:00:00+14:00",
    b"9999-12-31T23:59:59-14:00", b"\xef\xbb\xbf", "٣".encode(),
]  # fmt: skip
MADE_UP = {
    "prices.csv": "timestamp_utc,availability_zone,instance_type,product,spot_usd_per_hour\n"
    + "".join(f"2016-01-{day:02}T00:00:00Z,z,m1.{kind},Linux/UNIX,0.0{day % 9}1\n"
              for day in range(1, 20) for kind in ("small", "medium", "odd")),
    "traces.jsonl": "".join(
        json.dumps({"kind": "a", "nodes": 4, "zone": zone, "resource": "v", "start_date": "2023-02-15",
                    "gap_seconds": 30, "data": [4, 2, 0, 4] * 9}) + "\n" for zone in "xy"),
    "p3_trace.csv": "".join(f"{at * 1000},{'remove' if at % 5 == 4 else 'add'},n{at}\n" for at in range(40)),
    "gcloud_a.txt": "".join(f"2021-12-10, 13:{at:02}:45, {80 - at % 7}\n" for at in range(50)),
    "vms.csv": "zone,lifetime_s,end_event\n" + "".join(f"z,{90000 + 600 * at},preempted\n" for at in range(20)),
    "pools.csv": "trace_set,pool,num_machines,on_demand_usd_per_hour,spot_usd_per_hour\ns,a,4,0.2,0.05\nt,b,9,0.2,\n",
}  # fmt: skip
BESIDE = {
    "pools.csv": {"availability.csv": "pool,seconds,num_up\na,0,4\na,900,2\na,5000,4\nb,0,9\nb,7000,3\n",
                  "prices.csv": "pool,seconds,usd_per_hour\nb,0,0.05\nb,3000,0.3\nb,9000,0.05\n"},
}  # fmt: skip


def _recorded(name: str) -> list[bytes]:
    """The made-up file, and the beginning of a real one where the shared data sets are beside this checkout."""
    import gzip
    import itertools

    real = [path for path in SHARED_DATA.glob(f"*/{name}.gz") if path.is_file()]
    seeds = [MADE_UP[name].encode()]
    for path in real[:3]:
        with gzip.open(path, "rb") as file:
            seeds.append(b"".join(line[:3_000] for line in itertools.islice(file, 40)))
    return seeds


@pytest.mark.parametrize("name", [*MADE_UP, "availability.csv"])
@pytest.mark.parametrize("packed", [False, True])
def test_recorded_markets(tmp_path: Path, name: str, packed: bool) -> None:
    """What cannot be used is left out with a reason; what is used has numbers that a market can have."""
    import gzip

    form = "pools.csv" if name == "availability.csv" else name
    for other, text in {form: MADE_UP[form], **BESIDE.get(form, {})}.items():
        (tmp_path / other).write_text(text)
    (tmp_path / name).unlink()
    path = tmp_path / (f"{name}.gz" if packed else name)
    seeds = [BESIDE[form][name].encode()] if name in BESIDE.get(form, {}) else _recorded(name)
    if packed:
        seeds = [gzip.compress(seed, mtime=0) for seed in seeds]
    path.write_bytes(seeds[0])
    assert survey(tmp_path).sets
    for data in inputs(f"traces {path.name}", 1_500, seeds, TRACE_WORDS):
        path.write_bytes(data)
        surveyed = call_or_none((), data, survey, tmp_path)
        assert surveyed.sets or surveyed.skipped, data[:400]
        for refusal in surveyed.skipped:
            assert "\n" not in str(refusal)
            assert len(str(refusal)) < 1_500, str(refusal)
        for pool in (pool for trace_set in surveyed.sets for pool in trace_set.pools):
            assert 0 <= pool.alpha <= 1
            assert 0 < pool.length_s < math.inf
            assert 0 < pool.cycle_s < math.inf
            assert 0 <= pool.price.mean(pool.start_s, pool.end_s) < 1e7
