"""Memory growth in an hour at full speed with preemptions: `python -m benchmarks.soak` (or `make bench-soak`).

    python -m benchmarks.soak [--seconds 3600] [--out FOLDER]
    python -m benchmarks.soak --table FOLDER        # the table of a run that has ended or still runs

It is `doll up` on a job whose source sends as fast as samples are learned, with faults as on a spot market: every few
seconds a worker gets SIGTERM or SIGKILL and its successor starts; the parameter server and Redis are killed a few
times. Worker 0 runs for the hour in one process. Every few seconds the private memory (USS), open files, threads and
CPU time of each process and the sizes of topics and folders are appended to `soak.csv`; at the end each series gets a
verdict (`benchmarks/steadiness.py`), and the ledger is audited.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from doll.config import JobConfig
from doll.records.control import AnyRecord, ServerStatus, Update
from doll.run.folder import RunFolder
from doll.run.local.up import run_up

from benchmarks import steadiness
from benchmarks.harness import GAUSSIANS, job
from benchmarks.steadiness import WARM_UP, Point, Row
from doll_lab.drill.fault_injector import FaultInjector
from doll_lab.drill.plan import FAULT_KINDS, Fault, FaultTarget
from doll_lab.drill.routes import RoleRelays

if TYPE_CHECKING:
    from doll.local.stack import Stack
    from doll.local.supervisor import Supervisor
    from doll.monitor.views.display import Display

WORKERS: Final = 3
COLUMNS: Final = ("time_s", "of", "measure", "process", "value")
EVERY_S: Final = 5.0
_GAP_S: Final = 12.0  # from a recovery to the next fault
# Small enough that topics reach their steady size within the warm-up. Unread records need far less.
_RETENTION: Final = {
    "samples": {"retention.bytes": "33554432", "segment.bytes": "4194304"},
    **{kind: {"retention.bytes": "1048576", "segment.bytes": "1048576"} for kind in ("events", "commands", "metrics")},
}
# The source stops when a worker has more unread records than this, and continues when all have fewer than the next.
_PAUSE_RECORDS: Final = 1500
_RESUME_RECORDS: Final = 300
_SILENT_S: Final = 4.0  # without reports of the parameter server for this long, the unread records are unknown


def soak_job() -> JobConfig:
    """A small network at full speed: as many updates, records and messages as two cores can process."""
    return job(
        "soak",
        task="benchmarks.heldout_task:HeldOutGaussian",
        args={"features": 20, "classes": 4, "hidden": [64]},
        data={"workers": WORKERS, "batch_size": 256, "samples_per_record": 16},
        source={"kind": "python", "of": GAUSSIANS, "args": {"features": 20, "classes": 4}},
        arrivals={"process": "asap"},
        training={
            "policy": {"name": "doll", "group_size": 4}, "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
        },
        blobs={"kind": "redis"},  # as between machines
    )  # fmt: skip


def plan(seconds: float, workers: int) -> tuple[Fault, ...]:
    """Preemptions of all workers except the first, in turn, half of them without notice; a few of the server and Redis.

    The parameter server is killed after a third and preempted after two thirds of the time, so that each of its
    processes runs for long.
    """
    kinds = {kind.name: kind for kind in FAULT_KINDS}
    many = 100 + round(seconds / _GAP_S)
    expected = seconds / (_GAP_S + 2.0)
    rare = {
        round(expected / 3): "ps_kill", round(2 * expected / 3): "ps_preempt",
        round(expected / 2): "redis_kill", round(5 * expected / 6): "redis_kill",
    }  # fmt: skip
    return tuple(
        Fault(
            number=number,
            kind=kinds[rare.get(number, ("worker_preempt", "worker_kill")[number // (workers - 1) % 2])],
            worker=1 + number % (workers - 1),
            gap_s=_GAP_S,
            hold_s=0.0,
            overlapping=False,
        )
        for number in range(1, many + 1)
    )


class Soak(FaultInjector):
    """Injects faults into a run, keeps its source at the speed of its workers, and records resource usage."""

    def __init__(
        self, config: JobConfig, run: RunFolder, display: Display, *, seconds: float, csv_path: Path, relays: RoleRelays
    ) -> None:
        super().__init__(config, faults=1, seed=0, say=display.say, relays=relays, run_folder=run.path)
        self._job = config
        self._run = run
        self._seconds = seconds
        self._file = csv_path.open("w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._file)
        self._csv.writerow(COLUMNS)
        self._began_s: float | None = None
        self._next_s = 0.0
        self._version = 0
        self._samples = 0
        self._last_seen_s = 0.0
        self._unread = 0  # records that the slowest worker has not read yet
        self._paused_pid: int | None = None  # process id of the source while it stands still
        self._cpu_s: dict[int, tuple[float, float]] = {}
        self._limited = False

    def plan_for(self, targets: Collection[FaultTarget], brokers: int) -> tuple[Fault, ...]:
        return plan(self._seconds, self._job.data.workers)

    def feed(self, record: AnyRecord) -> None:
        super().feed(record)
        match record:
            case Update():
                self._version, self._samples = record.version, record.samples_total
                self._began_s = self._began_s or time.monotonic()
            case ServerStatus():
                self._last_seen_s = time.monotonic()
                self._unread = max((worker.lag_records for worker in record.workers), default=0)

    def tick(self, supervisor: Supervisor, stack: Stack) -> str | None:
        if not self._limited:
            limit_topics(self._job, stack)
            self._limited = True
        now = time.monotonic()
        self._pace(supervisor, now)
        if self._began_s is not None and now >= self._next_s:
            self._next_s = now + EVERY_S
            self._note(now - self._began_s, supervisor, stack)
        if self._began_s is not None and now - self._began_s > self._seconds:
            if self.is_recovered:
                return f"soak: {self._seconds:g} s"
            self.end_effects()
            return None
        super().tick(supervisor, stack)
        return None

    def close(self) -> None:
        super().close()
        if self._paused_pid is not None:
            _signal(self._paused_pid, signal.SIGCONT)
            self._paused_pid = None
        self._file.flush()

    def _pace(self, supervisor: Supervisor, now: float) -> None:
        """Stop the source while it is ahead: it sends as fast as it can, which is faster than anybody learns."""
        producer = supervisor.handles().get("producer")
        if producer is None:
            return
        most = self._unread
        if self._paused_pid != producer.pid and (most > _PAUSE_RECORDS or now - self._last_seen_s > _SILENT_S):
            _signal(producer.pid, signal.SIGSTOP)
            self._paused_pid = producer.pid
        elif self._paused_pid == producer.pid and most < _RESUME_RECORDS and now - self._last_seen_s < _SILENT_S:
            _signal(producer.pid, signal.SIGCONT)
            self._paused_pid = None

    def _note(self, at_s: float, supervisor: Supervisor, stack: Stack) -> None:
        for name, pid in self._processes(supervisor, stack):
            for measure, value in self._measured(pid):
                self._csv.writerow((f"{at_s:.1f}", name, measure, pid, f"{value:.3f}"))
        for name, megabytes in self._sizes(stack):
            self._csv.writerow((f"{at_s:.1f}", name, "size MB", 0, f"{megabytes:.3f}"))
        for measure, value in (("updates", self._version), ("samples", self._samples)):
            self._csv.writerow((f"{at_s:.1f}", "job", measure, 0, value))
        self._file.flush()

    def _processes(self, supervisor: Supervisor, stack: Stack) -> Iterator[tuple[str, int]]:
        yield "up", os.getpid()
        for name, handle in supervisor.handles().items():
            yield name, handle.pid
        for name, server in (("kafka", stack.kafka), ("redis", stack.redis)):
            if server is not None and server.pid is not None:
                yield name, server.pid

    def _measured(self, pid: int) -> list[tuple[str, float]]:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                used_s, now = times.user + times.system, time.monotonic()
                before = self._cpu_s.get(pid, (used_s, now))
                self._cpu_s[pid] = (used_s, now)
                share = (used_s - before[0]) / max(now - before[1], 1e-9)
                return [
                    ("memory MB", process.memory_full_info().uss / 1e6), ("files", float(process.num_fds())),
                    ("threads", float(process.num_threads())), ("processor %", 100.0 * share),
                ]  # fmt: skip
        except psutil.Error:
            return []  # it has ended

    def _sizes(self, stack: Stack) -> Iterator[tuple[str, float]]:
        run = self._run.path
        services = run / "services"
        yield "run folder", sum(_bytes_of(file) for file in run.iterdir() if file.is_file()) / 1e6
        yield "logs", _bytes_of(run / "logs") / 1e6
        yield "checkpoints", _bytes_of(run / "checkpoints") / 1e6
        yield "kafka's and redis's logs", sum(_bytes_of(file) for file in services.glob("*/*.log")) / 1e6
        topics: defaultdict[str, int] = defaultdict(int)
        prefix = f"doll.{self._job.job}."
        for partition in (services / "kafka" / "data").glob("*-*"):
            topics[partition.name.rpartition("-")[0].removeprefix(prefix)] += _bytes_of(partition)
        for topic, size in sorted(topics.items()):
            yield f"topic {topic}", size / 1e6
        if stack.redis is not None and (used := _redis_bytes(stack)) is not None:
            yield "redis's values", used / 1e6


def limit_topics(config: JobConfig, stack: Stack) -> None:
    """Set a small retention, as in a job that runs for longer than its retention."""
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
    from doll.kafka.clients import kafka_settings

    resources = []
    for kind, settings in _RETENTION.items():
        entries = [
            ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
            for key, value in (settings | {"file.delete.delay.ms": "1000"}).items()
        ]
        name = config.topic(kind)  # type: ignore[arg-type]
        resources.append(ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries))
    admin = AdminClient(kafka_settings(config, stack.services))
    for done in admin.incremental_alter_configs(resources).values():
        done.result()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended


def _bytes_of(path: Path) -> int:
    """Allocated bytes on disk: Kafka reserves index files without filling them."""
    try:
        if path.is_dir():
            return sum(_bytes_of(file) for file in path.iterdir())
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0  # deleted meanwhile


def _redis_bytes(stack: Stack) -> int | None:
    import redis
    from doll.storage.redis_client import connect_redis

    client = connect_redis(stack.services, timeout_s=1.0, retries=0)
    try:
        return int(client.info("memory")["used_memory"])
    except redis.exceptions.RedisError:
        return None
    finally:
        client.close()


# --- results


def read(path: Path) -> dict[tuple[str, str], list[Point]]:
    """The series of a `soak.csv`; an incomplete last line is ignored."""
    series: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                point = Point(float(row["time_s"]), int(row["process"]), float(row["value"]))
            except (TypeError, ValueError):
                continue
            series[row["of"], row["measure"]].append(point)
    return dict(series)


def verdicts(series: dict[tuple[str, str], list[Point]]) -> tuple[list[Row], float, float]:
    """The rows, the seconds and the updates per second after warm-up."""
    updates = series["job", "updates"]
    total_s = updates[-1].time_s
    late = [point for point in updates if point.time_s >= WARM_UP * total_s]
    rate = (late[-1].value - late[0].value) / max(late[-1].time_s - late[0].time_s, 1e-9)
    return steadiness.judge(series, total_s, rate), total_s, rate


def picture(series: dict[tuple[str, str], list[Point]], path: Path) -> None:
    """Memory, open files and sizes over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 12), sharex=True)
    for axis, measure in zip(axes, ("memory MB", "files", "size MB", "processor %"), strict=True):
        for (of, what), points in sorted(series.items()):
            if what == measure:
                axis.plot([point.time_s / 60 for point in points], [point.value for point in points], label=of, lw=0.8)
        axis.set_ylabel(measure)
        axis.legend(fontsize=6, ncol=3, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes since the first update")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def conclude(folder: Path) -> list[Row]:
    """Write `soak.md`, `soak.json` and `soak.png` from `soak.csv`."""
    series = read(folder / "soak.csv")
    rows, total_s, rate = verdicts(series)
    text = f"{total_s:,.0f} s, {rate:.1f} updates/s after warm-up ({WARM_UP:.0%} of the time).\n\n"
    (folder / "soak.md").write_text(text + steadiness.markdown(rows) + "\n", encoding="utf-8")
    facts = [{**{name: getattr(row, name) for name in Row.__slots__}, "verdict": row.verdict} for row in rows]
    summary = {"seconds": total_s, "updates_per_s": rate, "rows": facts}
    (folder / "soak.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    picture(series, folder / "soak.png")
    print(text + steadiness.markdown(rows), flush=True)
    return rows


def soak(seconds: float, folder: Path) -> int:
    """Run it; 0 if the audit passes and nothing grows."""
    folder.mkdir(parents=True, exist_ok=True)
    config = soak_job()

    def hook(run: RunFolder, display: Display) -> Soak:
        return Soak(config, run, display, seconds=seconds, csv_path=folder / "soak.csv", relays=relays)

    with RoleRelays(()) as relays:
        code = int(run_up(config, folder / "runs", hook=hook)["exit_code"])
    rows = conclude(folder)
    growing = [f"{row.of}: {row.measure}" for row in rows if row.verdict == "GROWS"]
    print(f"doll up ended with {code}; growing: {', '.join(growing) or 'nothing'}", flush=True)
    return code or bool(growing)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="default 3600")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/soak-{datetime.now():%Y%m%d-%H%M%S}"))
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="only write the table of what is in FOLDER")
    args = parser.parse_args(argv)
    stop: Callable[..., Any] = lambda *_: sys.exit(143)  # noqa: E731
    signal.signal(signal.SIGTERM, stop)  # so that everything started here is ended
    if args.table is not None:
        conclude(args.table)
        return 0
    return soak(args.seconds, args.out)


if __name__ == "__main__":
    sys.exit(main())
