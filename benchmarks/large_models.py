"""What one update costs the parameter server, for models of 0.1 to 400 MB: `python -m benchmarks.large_models`.

A real parameter server (engine, model host, checkpoints in a folder) and 2 worker processes that fetch the weights and
store gradients in real shared memory or a real Redis. Nothing is computed: a gradient is a constant. Control records go
through pipes instead of Kafka. K = 8, so an update has 8 batches in 2 sets. The same run measures a copy in
memory (memcpy) of the model's size, in the server's process, as the unit of the machine.

`--shards 4` instead trains a model in shards with `doll up`, resumes, exports and serves it, and shows the time of each
command and the peak memory of each process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from doll import telemetry
from doll.config import JobConfig, parse
from doll.errors import DollError
from doll.local.processes import free_port, tied
from doll.model.slices import sliced
from doll.records.control import (
    Announce,
    AnyRecord,
    BatchRange,
    Durable,
    Grant,
    Join,
    Nack,
    Push,
    PushedBatch,
    Welcome,
    decode,
    encode,
)
from doll.services import Services
from doll.storage.blobs import Buffer, gradient_key

RESULTS = Path(__file__).parent / "results"
WIDTHS = {
    0.1: 150,
    4.8: 1085,
    100.0: 4990,
    400.0: 9990,
    800.0: 14_142,
    2000.0: 22_360,
}  # of two layers: about so many MB of float32
WORKERS = 2
GROUP_SIZE = 8
BATCH = 256
WARM_UPDATES = 6  # excluded: new memory is allocated in the first versions
STORES = ("shm", "redis")
JOB = """
job: large
task: {class: "examples.synthetic.task:Gaussian", args: {features: 20, hidden: %s}}
data: {workers: 2, batch_size: 256}
training: {policy: {name: doll, group_size: 8}, optimizer: {name: sgd, lr: 0.001, momentum: %g}}
checkpoint: {every_updates: %d, every_s: 1000000, keep: 2}
worker: {max_pending_batches: 1000000, lease_s: 600, grant_timeout_s: 1000}
blobs: {ttl_s: 1000}
"""

SHARDED_JOB = """
job: large
task: {class: "examples.synthetic.task:Gaussian", args: {features: 20, hidden: %s}}
data: {workers: 1, batch_size: 4}
source: {kind: python, of: "examples.synthetic.source:gaussians", args: {features: 20}}
arrivals: {process: poisson, rate_per_s: 50}
training: {policy: {name: bsp}, optimizer: {name: sgd, lr: 0.001}, guard: {spike_factor: 0}}
ps: {shards: %d}
checkpoint: {every_updates: 2, every_s: 1000000, keep: 2}
evaluation: {enabled: false}
worker: {lease_s: 600, grant_timeout_s: 1000}
blobs: {ttl_s: 1000}
stop: {updates: %d}
"""
_SAMPLE_S = 0.1
_SERVED_S = 300.0


class CountingBlobs:
    """A blob store that counts the bytes that are put and got."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.moved_bytes = 0

    def put(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> None:
        self.moved_bytes += sum(map(len, parts))
        self._store.put(key, parts, ttl_s)

    def put_soon(self, key: str, parts: Sequence[Buffer], ttl_s: float) -> bool:
        self.moved_bytes += sum(map(len, parts))
        return bool(self._store.put_soon(key, parts, ttl_s))

    def settle(self) -> None:
        self._store.settle()

    @property
    def is_far(self) -> bool:
        return bool(self._store.is_far)

    def prefetch(self, keys: Sequence[str]) -> None:
        self._store.prefetch(keys)

    def reserve(self, size_bytes: int) -> memoryview | None:
        memory: memoryview | None = self._store.reserve(size_bytes)
        return memory

    def get(self, key: str) -> Buffer | None:
        blob: Buffer | None = self._store.get(key)
        self.moved_bytes += len(blob or b"")
        return blob

    def get_soon(self, key: str) -> Buffer | None:
        blob: Buffer | None = self._store.get_soon(key)
        self.moved_bytes += len(blob or b"")
        return blob

    def delete(self, *keys: str) -> None:
        self._store.delete(*keys)

    def close(self) -> None:
        self._store.close()


def open_store(kind: str, place: str) -> CountingBlobs:
    from doll.storage.redis_blobs import RedisBlobs
    from doll.storage.redis_client import connect_redis
    from doll.storage.shm_blobs import ShmBlobs, limit_bytes

    from doll_lab.simulation.memory_blobs import MemoryBlobs

    if kind == "redis":
        return CountingBlobs(RedisBlobs(connect_redis(Services("", place), timeout_s=60.0)))
    return CountingBlobs(ShmBlobs(Path(place), limit_bytes=limit_bytes(Path(place).parent), fallback=MemoryBlobs()))


# --- a worker's process ---------------------------------------------------------------------------------------------


class Replica:
    """The weights of a worker without a model."""

    def __init__(self, numel: int) -> None:
        self.weights = np.zeros(numel, np.float32)
        self.slices = sliced(numel, numel, numel, 1)

    def load(self, weights: npt.NDArray[np.float32]) -> None:
        self.weights[:] = weights


def work(pipe: Connection, worker: int, config: JobConfig, kind: str, place: str, numel: int) -> None:
    """Answer grants until the pipe is closed; then send what was measured."""
    from doll.consumers.compute.gradient import CachedVersion
    from doll.process.memory import keep_freed_memory
    from doll.storage.contributions import Compressor

    telemetry.configure(process=f"worker-{worker}")
    keep_freed_memory()  # as a worker does
    blobs = open_store(kind, place)
    replica, compressor = Replica(numel), Compressor(config.job)
    local_model = CachedVersion(config.job, blobs, replica)  # type: ignore[arg-type]
    gradient = np.full(numel, 1e-3, np.float32)
    fetch_s: list[float] = []
    store_s: list[float] = []
    session = 0
    while (data := pipe.recv_bytes()) != b"stop":
        match decode(data):
            case Welcome() as welcome:
                session = welcome.session
            case Grant() as grant:
                before_s = time.thread_time()
                if local_model.load(grant) is None:
                    pipe.send_bytes(encode(_nack(grant)))
                    continue
                loaded_s = time.thread_time()
                key = gradient_key(config.job, grant.term, grant.grant_ids[0])
                blobs.put(key, compressor.compress(gradient, version=grant.version), config.blobs.ttl_s)
                fetch_s.append(loaded_s - before_s)
                store_s.append(time.thread_time() - loaded_s)
                batches = tuple(
                    PushedBatch(batch=grant.first + at, grant_id=number, n_samples=BATCH, loss_sum=1.0)
                    for at, number in enumerate(grant.grant_ids)
                )
                push = Push(
                    worker=worker, session=session, term=grant.term, version=grant.version, key=key, batches=batches
                )
                pipe.send_bytes(encode(push))
    pipe.send_bytes(_json({"fetch_s": fetch_s, "store_s": store_s, "moved_bytes": blobs.moved_bytes}))
    blobs.close()


def _nack(grant: Grant) -> Nack:
    return Nack(
        worker=grant.worker, session=grant.session, batch=grant.first, term=grant.term, grant_id=grant.grant_ids[0],
        reason="weights",
    )  # fmt: skip


# --- the server's process -------------------------------------------------------------------------------------------


class PipeOutbox:
    """Commands go to the workers' pipes; updates are acknowledged at once.

    Attributes:
        granted_s: when the last grant was sent.
    """

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        self.sent = 0
        self.granted_s = 0.0
        self.gradients = 0
        self.sessions: dict[int, int] = {}

    def send_command(self, worker: int, record: AnyRecord) -> None:
        if isinstance(record, Grant | Welcome | Durable):
            self._pipes[worker].send_bytes(encode(record))
        if isinstance(record, Grant):
            self.granted_s = time.perf_counter()
        if isinstance(record, Welcome):
            self.sessions[worker] = record.session

    def send_update(self, record: AnyRecord) -> None:
        self.sent += 1

    def send_status(self, record: AnyRecord) -> None:
        pass

    def updates_acknowledged(self) -> int:
        return self.sent

    def flush(self, timeout_s: float) -> int:
        return 0


def serve(
    pipes: Sequence[Connection], report: Connection, config: JobConfig, kind: str, place: str, folder: str, updates: int
) -> None:
    """Run a parameter server for so many updates, and send what was measured."""
    import torch
    from doll.model.flat_model import build, fingerprint
    from doll.process.memory import keep_freed_memory
    from doll.ps.model.model_host import ModelHost
    from doll.ps.model.updater import make_parts
    from doll.ps.server import ParameterServer
    from doll.ps.start import Start, make_engine
    from doll.storage.file_checkpoints import FileCheckpointStore
    from doll.task.base import load_task

    telemetry.configure(process="ps")
    keep_freed_memory()
    torch.set_num_threads(1)
    blobs, outbox = open_store(kind, place), PipeOutbox(pipes)
    model = build(config, load_task(config))
    numel = model.flat.numel()
    copy_s = _copy_s(numel)
    _reset_peak()
    host = _Timed(ModelHost(config, 1, make_parts(config.training, model).updater, blobs))
    store = FileCheckpointStore(Path(folder) / "checkpoints", config.job)
    start = Start(store.claim_term(), time.monotonic(), (0,) * WORKERS)
    server = ParameterServer(
        config, engine=make_engine(config, start, host.load, fingerprint(config, model)), host=host, store=store,
        outbox=outbox,
    )  # fmt: skip
    report.send_bytes(_json({"numel": numel}))
    server.open()
    for worker in range(WORKERS):
        server.feed(Join(worker=worker, process=f"p{worker}"))
    for worker, session in outbox.sessions.items():
        runs = (BatchRange(worker, 0, (updates + 4) * GROUP_SIZE),)
        server.feed(Announce(worker=worker, session=session, runs=runs))
    latencies_s: list[float] = []
    gradients = 0
    cpu_s = began_s = moved = 0.0
    peak_shm = 0
    while (version := server.engine.version) < updates:
        for ready in wait(pipes, 0.05):
            assert isinstance(ready, Connection)
            record = decode(ready.recv_bytes())
            assert isinstance(record, Push | Nack)
            before_s, began = time.thread_time(), time.perf_counter()
            version = server.engine.version
            server.feed(record)
            if version >= WARM_UPDATES:
                cpu_s += time.thread_time() - before_s
                gradients += isinstance(record, Push)
                if server.engine.version > version:
                    latencies_s.append(outbox.granted_s - began)
            elif server.engine.version == WARM_UPDATES:
                began_s, moved = time.perf_counter(), blobs.moved_bytes
                host.tensors_s.clear()
            peak_shm = max(peak_shm, _shm_bytes(place) if kind == "shm" else 0)
        server.run_periodic()
    server.close()
    results = {
        "megabytes": numel * 4 / 1e6, "copy_ms": copy_s * 1e3, "updates": len(latencies_s),
        "latency_ms": median(latencies_s) * 1e3, "latency_max_ms": max(latencies_s) * 1e3,
        "cpu_per_gradient_ms": cpu_s / gradients * 1e3, "gradients": gradients,
        "cpu_per_update_ms": cpu_s / len(latencies_s) * 1e3,
        "server_moved_bytes": (blobs.moved_bytes - moved) / len(latencies_s),
        "wall_s": time.perf_counter() - began_s, "peak_mb": _peak_mb(), "store_peak_mb": peak_shm / 1e6,
        "checkpoint_blocks_ms": max(host.tensors_s, default=0.0) * 1e3, "checkpoints": len(host.tensors_s),
    }  # fmt: skip
    report.send_bytes(_json(results))
    blobs.close()


class _Timed:
    """A model host whose `tensors` is timed: for so long a checkpoint blocks the server."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.tensors_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def tensors(self) -> Any:
        began_s = time.perf_counter()
        tensors = self._host.tensors()
        self.tensors_s.append(time.perf_counter() - began_s)
        return tensors


def _copy_s(numel: int) -> float:
    """Seconds for one copy of so many float32, the best of several."""
    source, target = np.ones(numel, np.float32), np.zeros(numel, np.float32)
    best = float("inf")
    for _ in range(max(5, min(200, 10**8 // numel))):
        began_s = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began_s)
    return best


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def _shm_bytes(folder: str) -> int:
    inodes = {status.st_ino: status.st_size for status in (entry.stat() for entry in os.scandir(folder))}
    return sum(inodes.values())


# --- a model in shards ----------------------------------------------------------------------------------------------


class Peaks:
    """The peak memory of processes by name, in MB: resident (VmHWM), and the part that no file and no other process has
    (RssAnon, sampled)."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[float, float]] = {}

    def look(self, pids: Mapping[str, int]) -> None:
        for name, pid in pids.items():
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                values = [
                    next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))
                    for field in ("VmHWM:", "RssAnon:")
                ]
                before = self.of.get(name, (0.0, 0.0))
                self.of[name] = max(before[0], values[0]), max(before[1], values[1])


def live_in_shards(size: float, shards: int, updates: int) -> str:
    """Train a model of so many MB in shards, resume, export and serve it. Return what it took, in Markdown."""
    peaks, seconds, doll = Peaks(), dict[str, float](), [sys.executable, "-m", "doll"]
    with tempfile.TemporaryDirectory(prefix="doll-large-") as name:
        folder, runs = Path(name), Path(name) / "runs"
        (folder / "job.yaml").write_text(SHARDED_JOB % ([WIDTHS[size] // 3] * 10, shards, updates))

        def call(what: str, *arguments: object, until: Callable[[], bool] = lambda: False) -> None:
            """Run a command until its end, or until `until` returns True."""
            began_s = time.monotonic()
            with (folder / "log").open("ab") as log:
                process = subprocess.Popen(tied([*doll, *map(str, arguments)]), stdout=log, stderr=log)
            try:
                while process.poll() is None and not until():
                    peaks.look({f"doll {what}": process.pid})
                    for path in runs.glob("*/roles.json"):
                        with suppress(ValueError):  # it is being written
                            peaks.look(json.loads(path.read_text()))
                    time.sleep(_SAMPLE_S)
                seconds[what] = time.monotonic() - began_s
                peaks.look({f"doll {what}": process.pid})  # `until` may have waited for it
                if process.poll():
                    tail = (folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"doll {what}: exit code {process.returncode}: {tail}")
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60.0)

        call("up", "up", folder / "job.yaml", "--parent-folder", runs, "--no-page")
        run, port = next(runs.iterdir()), free_port()
        call("resume", "resume", run, "--no-page", "--set", f"stop.updates={2 * updates}")
        call("export", "export", run, "--out", folder / "model")
        body = json.dumps({"x": [0.0] * 20}).encode()

        def answers() -> bool:
            with suppress(OSError):
                request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", body)
                return bool(urllib.request.urlopen(request, timeout=_SERVED_S).read())
            return False

        call("serve", "serve", run, "--port", port, until=answers)
        files = sum(path.stat().st_size for path in (run / "checkpoints").iterdir()) / 1e6
    lines = ["| process | peak MB | of its own, MB |", "|---|---:|---:|"]
    lines += [f"| {name} | {peak:,.0f} | {own:,.0f} |" for name, (peak, own) in sorted(peaks.of.items())]
    took = ", ".join(f"{what} {value:.0f} s" for what, value in seconds.items())
    note = f"{size:g} MB, {shards} shards, {2 * updates} updates: {took}; checkpoints of {files:,.0f} MB"
    return "\n".join([*lines, "", note])


# --- rows -----------------------------------------------------------------------------------------------------------


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[str]:
    """The place of a store: a folder in shared memory, or a Redis server's address."""
    if kind == "shm":
        from doll.local.shared_memory import run_folder

        with run_folder() as place:
            yield str(place)
    else:
        from doll.local.redis_server import LocalRedis

        server = LocalRedis(folder, max_memory_mb=8000)
        server.start()
        try:
            yield server.address
        finally:
            server.stop()


def measure(size: float, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    updates = WARM_UPDATES + (args.updates if size >= 50 else 10 * args.updates)
    widths = [WIDTHS[size], WIDTHS[size]] if size > 0 else []
    config = parse(JOB % (widths, args.momentum, args.checkpoint_every))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "doll.ps.server", "doll.optim.optimizer", "doll.consumers.compute.gradient"]
    )
    with tempfile.TemporaryDirectory(prefix="doll-large-") as name, store_of(kind, Path(name)) as place:
        ends = [context.Pipe() for _ in range(WORKERS)]
        ours, theirs = context.Pipe()
        pipes = [server_end for server_end, _ in ends]
        processes = [context.Process(target=serve, args=(pipes, theirs, config, kind, place, name, updates))]
        processes[0].start()
        theirs.close()
        try:
            numel = _received(ours, processes)["numel"]
            for worker, (_, end) in enumerate(ends):
                processes.append(context.Process(target=work, args=(end, worker, config, kind, place, numel)))
                processes[-1].start()
            row: dict[str, Any] = _received(ours, processes)
            for pipe in pipes:
                pipe.send_bytes(b"stop")
            measured = [_received(pipe, processes) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    fetch_s = [value for item in measured for value in item["fetch_s"][WARM_UPDATES:]]
    store_s = [value for item in measured for value in item["store_s"][WARM_UPDATES:]]
    row |= {
        "store": kind, "fetch_cpu_ms": median(fetch_s) * 1e3, "store_cpu_ms": median(store_s) * 1e3,
        "moved_mb": (row["server_moved_bytes"] + sum(item["moved_bytes"] for item in measured) / updates) / 1e6,
        "latency_copies": row["latency_ms"] / row["copy_ms"],
    }  # fmt: skip
    return row


def _received(pipe: Connection, processes: Sequence[Any]) -> dict[str, Any]:
    """The next results that come; records in front of them are passed over.

    Raises:
        RuntimeError: a process has ended.
    """
    while True:
        while not pipe.poll(0.2):
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process has failed: its error is above")
        data = pipe.recv_bytes()
        if data[:1] == b"{":
            results: dict[str, Any] = json.loads(data)
            return results


def _json(results: dict[str, Any]) -> bytes:
    return json.dumps(results).encode()


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The table, in Markdown."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("model", lambda row: f"{row['megabytes']:.1f} MB"),
        ("blobs in", lambda row: row["store"]),
        ("memcpy ms", lambda row: f"{row['copy_ms']:.2f}"),
        ("update latency ms", lambda row: f"{row['latency_ms']:.2f}"),
        ("in memcpys", lambda row: f"{row['latency_copies']:.1f}"),
        ("server CPU ms / gradient", lambda row: f"{row['cpu_per_gradient_ms']:.2f}"),
        ("worker CPU ms: fetch", lambda row: f"{row['fetch_cpu_ms']:.2f}"),
        ("store", lambda row: f"{row['store_cpu_ms']:.2f}"),
        ("MB moved / update", lambda row: f"{row['moved_mb']:.1f}"),
        ("checkpoint blocks ms", lambda row: f"{row['checkpoint_blocks_ms']:.2f}"),
        ("server peak MB", lambda row: f"{row['peak_mb']:.0f}"),
        ("shared memory MB", lambda row: f"{row['store_peak_mb']:.0f}" if row["store"] == "shm" else ""),
    ]
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|---|---|" + "---:|" * (len(columns) - 2)]
    lines += ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_models", description=__doc__.splitlines()[0])
    sizes = ",".join(f"{size:g}" for size in WIDTHS)
    parser.add_argument("--sizes", default=sizes, help=f"of the model, MB; default {sizes}")
    parser.add_argument("--stores", default=",".join(STORES), help="default both")
    parser.add_argument("--updates", type=int, default=20, help="of a row; ten times as many below 50 MB; default 20")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="updates; default 10")
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD; default 0")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; default benchmarks/results/large-*.json")
    parser.add_argument("--shards", type=int, default=1, help="of the model; default 1: another benchmark")
    args = parser.parse_args(argv)
    if args.shards > 1:
        for size in map(float, args.sizes.split(",")):
            print(live_in_shards(size, args.shards, args.updates))
        return 0
    began = datetime.now()
    rows = []
    for size in map(float, args.sizes.split(",")):
        for kind in args.stores.split(","):
            print(f"{datetime.now():%H:%M:%S} {size:g} MB in {kind}; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
            try:
                rows.append(measure(size, kind, args))
            except (DollError, RuntimeError) as exc:
                print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
                return 1
    print(show(rows))
    out = args.out or RESULTS / f"large-{began:%Y%m%d-%H%M%S}.json"
    out.parent.mkdir(exist_ok=True)
    facts = {
        "began": began.isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "arguments": vars(args) | {"out": ""},
    }
    out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
