"""Runs one measurement at a time on its own services: DOLL's roles, reference programs, and the CPU time of each.

Everything is started as by `doll up` (fork server, local Kafka, local Redis) and stopped with the `Bench`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import psutil
from doll import config as jobfile
from doll.config import JobConfig
from doll.kafka import topics
from doll.kafka.reader import Partition, Reader, from_end
from doll.ledger.admission import AFTER_TERM_ENV, read_lineage
from doll.local import processes
from doll.local.forks import ForkServer, Role
from doll.local.kafka_broker import KafkaCluster
from doll.local.stack import Stack, local_stack
from doll.records import packing
from doll.records.control import Finished, Update
from doll.services import BLOBS_ENV
from doll.storage.redis_client import connect_redis

from benchmarks import probes
from benchmarks.data import records
from benchmarks.intake import fill_topic
from benchmarks.shares import GradientRow, Hops, MessageRow, gradient_share, hops

_RUN_S = 180.0
_NOTE_S = 0.2
_COUNT_S = 1.0  # between two looks at the processor time of a run of DOLL
_WATCH_MS = 500
_POOL_RECORDS = 8192
WARM_S = 2.5  # excluded at the beginning of a DOLL run: joining, first batches, cold caches


@dataclass
class Usage:
    """CPU seconds during a measurement, by process; `others` is everything that this benchmark did not start."""

    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def others(self) -> float:
        """Share of the whole machine that other processes used."""
        return self.cpu_s.get("others", 0.0) / max(self.seconds * (os.cpu_count() or 1), 1e-9)


@dataclass
class LearningResult:
    """One DOLL run in its steady state."""

    samples_per_s: float
    updates: list[Update]  # the steady ones
    times_s: list[float]  # monotonic; of the update that begins the steady state, then of `updates`
    usage: Usage
    share: float  # of the cores: CPU time of gradients
    hops: Hops
    gradients: list[list[GradientRow]]  # of each worker, the whole run


class ReferenceResult(NamedTuple):
    """One run of a reference program."""

    samples_per_s: float
    usage: Usage
    share: float  # as of `LearningResult`


class Observer(Protocol):
    """Looks at the processes of a DOLL run in its steady state."""

    def begin(self, processes: Mapping[int, str]) -> None:
        """Names of the processes by their id; the steady state begins."""

    def note(self) -> None:
        """Called about five times a second, until the end."""

    def end(self) -> None:
        """The run ends; its processes are still there."""


class Bench:
    """Services and fork server for all measurements; use as a context manager."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open = contextlib.ExitStack()
        self._filled: dict[str, int] = {}
        self._names: dict[int, str] = {}  # of processes, by id
        self._services: set[int] = set()  # ids of Kafka and Redis
        self._run_number = 0
        self.folder: Path
        self.stack: Stack
        self.forks: ForkServer

    def __enter__(self) -> Self:
        try:
            self.folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="doll-bench-")))
            self.forks = self._open.enter_context(ForkServer(self.folder / "forkserver.log"))
            probe = job("bench-probe", task="examples.digits.task:Digits")
            self.stack = self._open.enter_context(local_stack(probe, self.folder, self._say))
            # The first role waits until torch is loaded, so that no measurement does.
            self.run_roles([("probe", "benchmarks.references:bare_loop", [self.out("probe"), True, 0, 0.0, 0.1])])
        except BaseException:
            self._open.close()
            raise
        for name, server in (("kafka", self.stack.kafka), ("redis", self.stack.redis)):
            if not isinstance(server, KafkaCluster | None) and server.pid is not None:
                self._names[server.pid] = name
                self._services.add(server.pid)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def out(self, name: str) -> str:
        """A new file for one role's result."""
        self._run_number += 1
        return str(self.folder / f"{self._run_number:04d}-{name}.json")

    # --- roles

    def start(self, name: str, target: str, args: Sequence[Any], env: Mapping[str, str] | None = None) -> Role:
        log_path = self.folder / "logs" / f"{name}.log"
        env = {BLOBS_ENV: self.stack.services.blobs, **(env or {})}
        role = self.forks.start_role(target, args, log_path=log_path, name=name, env=env)
        self._names[role.pid] = name.split("-")[0]
        return role

    def sampler(self) -> CpuSampler:
        """A sampler of the processes that run now or start later.

        Roles that have ended are forgotten: their ids may be those of threads by now, and the CPU time that psutil
        returns for a thread's id is that of its whole process.
        """
        running = self._services | {role.pid for role in self.forks.running()}
        self._names = {pid: name for pid, name in self._names.items() if pid in running}
        return CpuSampler(self._names)

    def run_roles(self, specs: Sequence[tuple[str, str, Sequence[Any]]]) -> Usage:
        """Start all, wait until all have exited with code 0, and return their CPU usage.

        Raises:
            RuntimeError: one failed or did not exit; the message shows its log.
        """
        sampler = self.sampler()
        roles = [self.start(*spec) for spec in specs]
        try:
            deadline_s = time.monotonic() + _RUN_S
            while any(role.poll() is None for role in roles):
                time.sleep(_NOTE_S)
                sampler.note()
                late = time.monotonic() > deadline_s
                for role in roles:
                    if role.poll() not in (None, 0) or (late and role.poll() is None):
                        how = "did not exit" if role.exitcode is None else f"ended with {role.exitcode}"
                        raise RuntimeError(f"{role.name} {how}:\n{processes.tail(role.log_path)}")
        finally:
            for role in roles:
                role.kill()
        return sampler.read()

    # --- reference programs

    def bare(self, small: bool, seconds: float, *, tuned: bool = True) -> ReferenceResult:
        """2 independent loops; not `tuned`: with the default malloc settings."""
        start_s = time.monotonic() + 1.5
        return self._reference("bare", lambda out, rank: [out, small, rank, start_s, seconds, tuned], "bare_loop")

    def barrier(self, small: bool, group_size: int, updates: int) -> ReferenceResult:
        """2 bare loops that meet after each group."""
        pipes = [str(self.folder / f"{self._run_number:04d}-pipe-{rank}") for rank in range(2)]
        for pipe in pipes:
            os.mkfifo(pipe)
        return self._reference("barrier", lambda out, rank: [out, small, rank, group_size, updates, 3, pipes])

    def ddp(self, small: bool, group_size: int, updates: int, samples: JobConfig | None = None) -> ReferenceResult:
        """torch's DistributedDataParallel over gloo, 2 processes; `samples`: they learn from the topic of this job."""
        args: list[Any] = [small, group_size, updates, 3, processes.free_port()]
        if samples is not None:
            args.append([self.stack.services.kafka, samples.topic("samples"), samples.data.samples_per_record])
        return self._reference("ddp", lambda out, rank: [out, args[0], rank, *args[1:]])

    def _reference(self, name: str, args: Callable[[str, int], list[Any]], target: str = "") -> ReferenceResult:
        """2 processes, each with its own result."""
        outs = [self.out(name) for _ in range(2)]
        target = f"benchmarks.references:{target or name}"
        usage = self.run_roles([(f"{name}-{rank}", target, args(out, rank)) for rank, out in enumerate(outs)])
        results = [_result(out) for out in outs]
        shares = [gradient_share([result["gradients"]], result["first_s"], result["last_s"]) for result in results]
        return ReferenceResult(sum(map(_rate, results)), usage, sum(shares) / len(shares))

    def redis_ps(self, small: bool, group_size: int, updates: int) -> ReferenceResult:
        """The bare Redis parameter server with 2 workers."""
        self.flush_redis()
        out, url = self.out("redis-ps"), self.stack.services.redis
        outs = [self.out("redis-worker") for _ in range(2)]
        server = ("bareps", "benchmarks.references:redis_server", [out, small, url, group_size, updates, 3])
        workers = [
            (f"bareworker-{rank}", "benchmarks.references:redis_worker", [worker_out, small, url, rank, group_size])
            for rank, worker_out in enumerate(outs)
        ]
        usage = self.run_roles([server, *workers])
        result, logs = _result(out), [_result(worker_out)["gradients"] for worker_out in outs]
        return ReferenceResult(_rate(result), usage, gradient_share(logs, result["first_s"], result["last_s"]))

    def flush_redis(self) -> None:
        client = connect_redis(self.stack.services)
        client.flushall()
        client.close()

    # --- DOLL

    def fill(self, config: JobConfig, make: Callable[[int], list[bytes]], samples: int) -> None:
        """Write samples to the job's topic until each partition has at least `samples`."""
        topics.ensure(config, self.stack.services)
        have = self._filled.get(config.job, 0)
        if have >= samples:
            return
        m = config.data.samples_per_record
        pool = make(_POOL_RECORDS)
        packs = [packing.pack(pool[at : at + m]) for at in range(0, len(pool), m)] if m > 1 else pool
        fill_topic(config, self.stack.services, packs, -(-(samples - have) // m))
        self._filled[config.job] = samples

    def learn(
        self, config: JobConfig, *, produce: bool = False, warm_s: float = WARM_S, observer: Observer | None = None,
        page_port: int = 0, watchers: Sequence[tuple[str, str, Sequence[Any]]] = (),
        on_start: Callable[[Sequence[Role]], object] = lambda watchers: None, run_s: float = _RUN_S,
    ) -> LearningResult:  # fmt: skip
        """Run the job's parameter server and workers until its stop rule; `produce` starts its source too, `page_port`
        a page, and `watchers` further processes: name, entry point and arguments after those of a role. `on_start` is
        called with the roles of the page and the watchers. `run_s` is the longest time that the job may take.

        Runs of one job name use the same topics, with separate checkpoint folders: each begins at the first sample.
        """
        topics.ensure(config, self.stack.services)
        self.flush_redis()
        run = Path(self.out(config.job)).with_suffix("")
        run.mkdir()
        args = self._write_job(config, run)
        messages, *logs = (str(run / f"log-{number}.json") for number in range(1 + config.data.workers))
        roles = []
        fresh = {AFTER_TERM_ENV: str(read_lineage(config, self.stack.services).newest_term)}
        # A fetch for each update would be work for the benchmark, not for the job. But an observer must see
        # the end at once.
        watch = {} if observer is not None else {"fetch_min_bytes": 1 << 20, "fetch_wait_max_ms": _WATCH_MS}
        topic = Partition(config.topic("updates"))
        with Reader(config, self.stack.services, "benchmark", [topic], from_end, **watch) as tail:
            roles.append(self.start("ps", "benchmarks.probes:ps_role", [messages, *args], fresh))
            roles += [
                self.start(f"worker-{n}", "benchmarks.probes:worker_role", [log, *args, n], fresh)
                for n, log in enumerate(logs)
            ]
            try:
                if produce:
                    time.sleep(3.0)  # as `doll up`, which waits for the workers
                    roles.append(self.start("producer", "doll.run.local.roles:producer_role", args))
                if page_port:
                    roles.append(self.start("page", "doll.run.local.roles:page_role", [*args, page_port], fresh))
                roles += [self.start(name, entry, [*args, *more], fresh) for name, entry, more in watchers]
                on_start(roles[1 + len(logs) + produce :])
                updates, usage = self._collect(tail, config, roles, warm_s, observer, run_s)
                for role in roles:
                    if role.name not in ("producer", "page", *(name for name, _, _ in watchers)):
                        role.wait(10.0)
            finally:
                for role in roles:
                    role.kill()
        rows: list[MessageRow] = probes.read(messages)
        sent_s = {version: time_s for kind, _, version, time_s in rows if kind == "update"}
        times_s = [sent_s[update.version] for update in updates]
        first_s, last_s = times_s[0], times_s[-1]
        gradients: list[list[GradientRow]]
        gradients, fetches = map(list, zip(*(probes.read(log) for log in logs), strict=True))
        result = LearningResult(
            samples_per_s=(updates[-1].samples_total - updates[0].samples_total) / (last_s - first_s),
            updates=updates[1:],
            times_s=times_s,
            usage=usage,
            share=gradient_share(gradients, first_s, last_s),
            hops=hops([row for row in rows if row[0] != "update"], gradients, fetches, first_s, last_s),
            gradients=gradients,
        )
        shutil.rmtree(run, ignore_errors=True)
        return result

    def _collect(
        self, tail: Reader, config: JobConfig, roles: list[Role], warm_s: float, observer: Observer | None, run_s: float
    ) -> tuple[list[Update], Usage]:
        updates: list[Update] = []
        came_s: list[float] = []  # by this process's clock: a server's wall clock may be set during the run
        sampler = self.sampler()
        warm = False
        noted_s = 0.0
        deadline_s = time.monotonic() + run_s
        while time.monotonic() < deadline_s:
            for entry in tail.poll(_NOTE_S if observer is not None else _COUNT_S):
                match entry.record:
                    case Update():
                        updates.append(entry.record)
                        came_s.append(time.monotonic())
                    case Finished():
                        if observer is not None and warm:
                            observer.end()
                        steady = [
                            update for update, at_s in zip(updates, came_s, strict=True) if at_s >= came_s[0] + warm_s
                        ]
                        if len(steady) < 3:
                            raise RuntimeError(f"only {len(steady)} updates after {warm_s} s: run for longer")
                        return steady, sampler.read()
            if came_s and not warm and came_s[-1] >= came_s[0] + warm_s:
                warm, sampler = True, self.sampler()
                if observer is not None:
                    pids = {role.pid: role.name for role in roles}
                    observer.begin({**self._names, **pids, os.getpid(): "bench"})
            if time.monotonic() - noted_s >= _COUNT_S:  # the last look may come when the roles have ended
                noted_s = time.monotonic()
                sampler.note()
            if observer is not None and warm:
                observer.note()
            for role in roles:
                if role.poll() not in (None, 0):
                    raise RuntimeError(f"{role.name} ended with {role.exitcode}:\n{processes.tail(role.log_path, 40)}")
        logs = "\n".join(f"--- {role.name}\n{processes.tail(role.log_path)}" for role in roles)
        raise RuntimeError(f"{config.job} did not finish within {run_s:g} s:\n{logs}")

    def intake(self, config: JobConfig, batches: int, *, produce: bool) -> tuple[float, Usage]:
        """Samples/s through one worker without gradients; `produce`: its source runs at the same time."""
        topics.ensure(config, self.stack.services)
        run = Path(self.out(config.job)).with_suffix("")
        run.mkdir()
        out, args = self.out("intake"), self._write_job(config, run)
        specs: list[tuple[str, str, Sequence[Any]]] = [
            ("confirm", "benchmarks.intake:confirm_all", [*args[:3], out, batches]),
            ("worker-0", "doll.run.local.roles:worker_role", [*args, 0]),
        ]
        if produce:
            specs.append(("producer-0", "benchmarks.intake:produce_later", [*args, 4.0]))
        usage = self.run_roles(specs)
        shutil.rmtree(run, ignore_errors=True)
        seen = json.loads(Path(out).read_text(encoding="utf-8"))
        first_s = seen[0][0] + 0.1 * (seen[-1][0] - seen[0][0])  # the first tenth is start-up
        steady = [item for item in seen if item[0] >= first_s]
        (t0, n0), (t1, n1) = steady[0], steady[-1]
        return (n1 - n0) * config.data.batch_size / (t1 - t0), usage

    def _write_job(self, config: JobConfig, run: Path) -> list[str]:
        path = run / "job.yaml"
        path.write_text(jobfile.dump(config), encoding="utf-8")
        return [str(path), self.stack.services.kafka, self.stack.services.redis, str(run)]


class CpuSampler:
    """CPU seconds from now on: of the processes in `names`, of this one, and of all others on the machine."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._known: set[int] = set()
        self._watched = {os.getpid()}  # without those that have ended: a run has many
        self._seen_s: dict[int, float] = {}
        self._before_s: dict[int, float] = {}
        self._began_s = time.monotonic()
        self._busy_before_s = busy_s()
        self.note()
        self._before_s = dict(self._seen_s)

    def note(self) -> None:
        """Record the CPU times; call it regularly, since those of an exited process are not available."""
        self._watched |= self._names.keys() - self._known
        self._known |= self._watched
        for pid in list(self._watched):
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                self._watched.discard(pid)
            else:
                self._seen_s[pid] = times.user + times.system

    def read(self) -> Usage:
        self.note()
        usage = Usage(time.monotonic() - self._began_s)
        for pid, seen_s in self._seen_s.items():
            used_s = seen_s - self._before_s.get(pid, 0.0)
            if used_s:
                name = self._names.get(pid, "bench")
                usage.cpu_s[name] = usage.cpu_s.get(name, 0.0) + used_s
        usage.cpu_s["others"] = max(0.0, busy_s() - self._busy_before_s - sum(usage.cpu_s.values()))
        return usage


def busy_s() -> float:
    """CPU time of the whole machine since its start."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def idle_share(seconds: float = 1.0) -> float:
    """Idle share of the machine over the next `seconds`."""
    return float(psutil.cpu_times_percent(seconds).idle) / 100.0


GAUSSIANS: Final = "examples.synthetic.source:gaussians"


def job(name: str, *, task: str, args: dict[str, Any] | None = None, **sections: Any) -> JobConfig:
    """A job file in Python; missing keys have the defaults."""
    return JobConfig.model_validate({"job": name, "task": {"class": task, "args": args or {}}, **sections})


def image_records(count: int) -> list[bytes]:
    """Records for the image tasks."""
    return records(count, seed=1)


def _result(out: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path(out).read_text(encoding="utf-8"))
    return result


def _rate(result: dict[str, Any]) -> float:
    return float(result["samples"] / (result["last_s"] - result["first_s"]))
