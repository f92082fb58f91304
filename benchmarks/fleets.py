"""Large fleets against one parameter server: `python -m benchmarks.fleets --workers 8,64,256`.

Stub workers (`benchmarks.stub_workers`) speak the real protocol with the real server, Kafka and Redis; the stream never
runs dry and a gradient is a pause. Shows how many batches and updates per second the server carries, what each costs,
and what is busy where it carries no more. `--profile` adds what the server's loop does with its time, `--faults` a
worker that is lost and a server that is killed, `--kills` servers and processes of workers that are killed, in turns,
during the run, and start again. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from doll.config import JobConfig
from doll.errors import DollError
from doll.kafka import topics
from doll.kafka.reader import Tail
from doll.ledger.admission import AFTER_TERM_ENV, read_lineage
from doll.local import processes
from doll.local.forks import Role
from doll.producers.sender import SampleSender
from doll.records.control import Finished, ServerStatus, TermStarted, Update

from benchmarks.fleet_report import LEASE_S, POLICIES, Fleet, Row, draw, markdown, profile_table, show
from benchmarks.harness import Bench, Usage, job
from benchmarks.pipeline import BATCH, EMNIST
from benchmarks.results import DOCS, RESULTS, commit, update_section

WORKERS_PER_PROCESS = 64
START_S = 600.0  # a thousand clients that connect to one broker on two cores take minutes
FAULT_S = 60.0
STUBS = "benchmarks.stub_workers:stub_workers"
SERVER = "benchmarks.stub_workers:clocked_ps"
MARK = "fleets"
COMMAND = 'make bench-fleets BENCH="--control kafka,redis,local --faults --profile --docs"'


class FleetBench(Bench):
    """`Bench` that runs fleets of stub workers."""

    def run_fleet(
        self, fleet: Fleet, *, warm_s: float, seconds: float, profile: Path | None = None, faults: bool = False,
        kills: int = 0, kills_s: float = 1800.0,
    ) -> Row:  # fmt: skip
        """One run, from the start of its server to its end.

        Raises:
            RuntimeError: a process failed, or nothing was learned; the message shows a log.
        """
        config = fleet_job(fleet)
        topics.ensure(config, self.stack.services)
        self.flush_redis()
        run = Path(self.out(config.job)).with_suffix("")
        run.mkdir()
        args = self._write_job(config, run)
        after_term = read_lineage(config, self.stack.services).newest_term
        fresh = {AFTER_TERM_ENV: str(after_term)}
        if faults or kills:  # a server that resumes checks that the log reaches as far as the model
            more_s = kills_s if kills else 2 * FAULT_S
            self._fill_log(config, round(fleet.offered / fleet.workers * (seconds + more_s)))
        wanted = (config.topic("updates"), config.topic("metrics"))
        roles: list[Role] = []
        with Tail(config, self.stack.services, wanted, from_now_on=True) as tail:
            watch = _Watch(tail)
            clock = run / "clock"
            ps_args = [*args, str(clock), "" if profile is None else str(profile)]
            try:
                # The last worker has a process of its own: it is the one that a fault kills.
                stub_args = {
                    f"stubs-{first}": [*args, first, until, fleet.compute_s, after_term]
                    for first, until in shares(fleet.workers, faults)
                }
                for name in stub_args:
                    roles.append(self.start(name, STUBS, stub_args[name]))
                server = self.start("ps", SERVER, ps_args, fresh)
                roles.append(server)
                watch.wait(lambda: watch.terms == 1 and _ready(run, roles), roles, START_S)
                (run / "go").touch()
                go_s, go_unix_s = time.monotonic(), time.time()
                watch.wait(lambda: watch.version > 0, roles, START_S)
                first_update_s = watch.update_s - go_unix_s
                joined = watch.wait(lambda: _joined(run, roles), roles, START_S)
                watch.idle(warm_s, roles)
                sampler = self.sampler()
                begin_s = time.monotonic()
                watch.idle(seconds, roles)
                usage, end_s = sampler.read(), time.monotonic()
                outcome = self._break(watch, roles, server, args, run, fresh) if faults else {}
                if kills:
                    starts_of: dict[str, Any] = {"ps": (SERVER, [*args, str(run / "clock-2"), ""], fresh)}
                    starts_of |= {name: (STUBS, stub_args[name], {}) for name in stub_args}
                    outcome = self._kill_in_turns(watch, roles, starts_of, fleet.workers, kills, kills_s / kills)
                [last for last in roles if last.name == "ps"][-1].send_signal(signal.SIGINT)
                watch.wait(lambda: watch.finished, roles, START_S)
                for role in roles:
                    role.wait(20.0)
            finally:
                for role in roles:
                    role.kill()
        starts = (max(joined) - go_s, first_update_s)
        return _row(fleet, watch, usage, _clock(clock, begin_s, end_s), (begin_s, end_s), starts, outcome)

    def _fill_log(self, config: JobConfig, records: int) -> None:
        """At least so many records in each partition of the samples; nobody reads them."""
        missing = records - self._filled.get(config.job, 0)
        sender = SampleSender(config, self.stack.services, self._say)
        for _ in range(missing):
            for partition in range(config.data.workers):
                sender.send(partition, b"-", 1, lambda: False)
        sender.drain(lambda: False, 60.0)
        self._filled[config.job] = max(records, self._filled.get(config.job, 0))

    def _break(
        self, watch: _Watch, roles: list[Role], server: Role, args: list[str], run: Path, env: dict[str, str]
    ) -> dict[str, float]:
        """Lose one worker, then the server; how long updates paused."""
        lone = max((role for role in roles if role.name.startswith("stubs-")), key=lambda role: int(role.name[6:]))
        lost_s = time.time()
        lone.kill()
        roles.remove(lone)
        watch.idle(3 * LEASE_S, roles)
        gaps = watch.longest_gap_s(lost_s, time.time())
        killed_s, terms = time.time(), watch.terms
        server.kill()
        roles.remove(server)
        successor = self.start("ps", SERVER, [*args, str(run / "clock-2"), ""], env)
        roles.append(successor)
        watch.wait(lambda: watch.terms > terms, roles, FAULT_S)
        opened_s = time.time() - killed_s
        watch.wait(lambda: watch.update_term == watch.term, roles, FAULT_S)
        return {"worker_lost_pause_s": gaps, "server_open_s": opened_s, "server_pause_s": watch.update_s - killed_s}

    def _kill_in_turns(
        self, watch: _Watch, roles: list[Role], starts: dict[str, Any], workers: int, kills: int, every_s: float
    ) -> dict[str, float]:
        """Kill the server and a process of workers in turns, start each again, and wait until all workers are live.

        Pauses are the longest time without an update; the rate is that of batches in the model.
        """
        begun_s, begun_batches = watch.update_s, watch.updates[-1][1].batches_total
        pauses: dict[str, list[float]] = {"ps": [], "stubs": []}
        stubs = itertools.cycle([name for name in starts if name != "ps"])
        for number in range(kills):
            name = "ps" if number % 2 == 0 else next(stubs)
            (place,) = (at for at, role in enumerate(roles) if role.name == name)
            killed_s, killed_at_s = time.time(), time.monotonic()
            roles[place].kill()
            roles[place] = self.start(name, *starts[name])

            def is_whole(since_s: float = killed_at_s + 2 * LEASE_S, killed_s: float = killed_s) -> bool:
                at_s, live = watch.live[-1]
                return at_s > since_s and live == workers and watch.update_s > killed_s

            watch.wait(is_whole, roles, START_S)
            now_s = time.time()
            pauses[name[:5]].append(watch.longest_gap_s(killed_s, now_s))
            self._say(
                f"kill {number + 1} of {kills}: {name}; no update for {pauses[name[:5]][-1]:.1f} s, all workers after "
                f"{now_s - killed_s:.1f} s"
            )
            watch.idle(max(0.0, every_s - (now_s - killed_s)), roles)
        seconds = watch.update_s - begun_s
        rate = (watch.updates[-1][1].batches_total - begun_batches) / seconds
        longest = {f"{name}_killed_pause_s": max(times) for name, times in pauses.items() if times}
        return {**longest, "kills": kills, "kills_s": seconds, "batches_per_s_with_kills": rate}


class _Watch:
    """What the job's topics say while it runs. Updates are decoded when they come: the cost is this process's."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self.updates: list[tuple[float, Update]] = []  # monotonic seconds of the arrival
        self.terms = 0
        self.term = 0
        self.version = 0
        self.update_s = 0.0  # Unix seconds of the last update, by the server
        self.update_term = 0
        self.live: list[tuple[float, int]] = []  # monotonic seconds, live workers
        self.finished = False

    def poll(self, timeout_s: float) -> None:
        for entry in self._tail.poll(timeout_s):
            match entry.record:
                case TermStarted() as started:
                    self.terms, self.term = self.terms + 1, started.term
                case Update() as update:
                    self.updates.append((time.monotonic(), update))
                    self.version, self.update_s, self.update_term = update.version, update.time_s, update.term
                case Finished():
                    self.finished = True
                case ServerStatus() as status:
                    self.live.append((time.monotonic(), sum(worker.is_live for worker in status.workers)))

    def wait(self, is_done: Callable[[], Any], roles: Sequence[Role], timeout_s: float) -> Any:
        """Wait until `is_done` says so, and return what it said.

        Raises:
            RuntimeError: a role has failed, or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (result := is_done()):
            self.poll(0.05)
            late = time.monotonic() > deadline_s
            for role in roles:
                if role.poll() not in (None, 0) or (late and role.name == "ps"):
                    how = "is late" if late else f"ended with {role.exitcode}"
                    raise RuntimeError(f"{role.name} {how}:\n{processes.tail(role.log_path)}")
        return result

    def idle(self, seconds: float, roles: Sequence[Role]) -> None:
        end_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end_s, roles, seconds + START_S)

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Longest time without an update between two Unix times."""
        times = [begin_s, *(u.time_s for _, u in self.updates if begin_s <= u.time_s <= end_s), end_s]
        return max(after - before for before, after in itertools.pairwise(times))


def fleet_job(fleet: Fleet) -> JobConfig:
    """The job of a fleet; one record holds a batch, so that partitions are short."""
    policy = {"name": "bsp"} if fleet.policy == "bsp" else {"name": "doll", "group_size": fleet.group_size}
    return job(
        f"bench-fleet-{fleet.workers}",
        task=EMNIST,
        args={"small": True},
        data={"workers": fleet.workers, "batch_size": BATCH, "samples_per_record": BATCH},
        training={"policy": policy, "optimizer": {"name": "sgd", "lr": 0.01}},
        blobs={"kind": fleet.blobs},
        worker={"lease_s": LEASE_S},
        control={"kind": fleet.control},
    )


def shares(workers: int, lone_last: bool) -> list[tuple[int, int]]:
    """Which workers each process has: (first, until)."""
    end = workers - 1 if lone_last else workers
    ranges = [(first, min(first + WORKERS_PER_PROCESS, end)) for first in range(0, end, WORKERS_PER_PROCESS)]
    return [*ranges, (end, workers)] if lone_last else ranges


def _ready(run: Path, roles: Iterable[Role]) -> bool:
    return all((run / f"ready-{role.name[6:]}").exists() for role in roles if role.name.startswith("stubs-"))


def _joined(run: Path, roles: Iterable[Role]) -> list[float]:
    """When each worker had its Welcome; empty until all have."""
    paths = [run / f"joined-{role.name[6:]}.json" for role in roles if role.name.startswith("stubs-")]
    if not all(path.exists() for path in paths):
        return []
    return [joined_s for path in paths for joined_s in json.loads(path.read_text(encoding="utf-8"))]


def _clock(path: Path, begin_s: float, end_s: float) -> tuple[float, float]:
    """Shares of a core that the server's main thread and its other threads used between two times."""
    lines = [[float(word) for word in line.split()] for line in path.read_text(encoding="utf-8").splitlines()]
    inside = [line for line in lines if begin_s <= line[0] <= end_s]
    if len(inside) < 2:
        raise RuntimeError(f"the server's clock has {len(inside)} readings in {end_s - begin_s:.0f} s: run for longer")
    first, last = inside[0], inside[-1]
    seconds = last[0] - first[0]
    loop_s, process_s = last[1] - first[1], last[2] - first[2]
    return loop_s / seconds, (process_s - loop_s) / seconds


def _row(
    fleet: Fleet,
    watch: _Watch,
    usage: Usage,
    clock: tuple[float, float],
    window: tuple[float, float],
    starts: tuple[float, float],
    faults: dict[str, float],
) -> Row:
    updates = [update for at_s, update in watch.updates if window[0] <= at_s <= window[1]]
    if len(updates) < 3:
        raise RuntimeError(f"{fleet}: only {len(updates)} updates: run for longer")
    seconds = updates[-1].time_s - updates[0].time_s
    batches_per_s = (updates[-1].batches_total - updates[0].batches_total) / seconds
    updates_per_s = (len(updates) - 1) / seconds
    per_batch = {name: 1e3 * cpu_s / usage.seconds / batches_per_s for name, cpu_s in usage.cpu_s.items()}
    latencies = sorted(1e3 * update.grant_to_update_s for update in updates)
    members = [member for update in updates for member in update.members]
    pushes = len({(update.term, member.set_grant_id) for update in updates for member in update.members})
    workers_per_update = statistics.mean(len({member.worker for member in update.members}) for update in updates)
    cores = os.cpu_count() or 1
    return Row(
        fleet, batches_per_s, updates_per_s, fleet.offered, *clock,
        cores_busy=sum(usage.cpu_s.values()) / usage.seconds / cores, others=usage.others, cpu_ms=per_batch,
        loop_ms=1e3 * clock[0] / batches_per_s, update_ms=per_batch["ps"] * batches_per_s / updates_per_s,
        latency_p50_ms=statistics.median(latencies), latency_p99_ms=latencies[int(0.99 * (len(latencies) - 1))],
        set_size=len(members) / pushes, workers_per_update=workers_per_update,
        min_live=min((live for at_s, live in watch.live if window[0] <= at_s <= window[1]), default=0),
        joined_s=starts[0], first_update_s=starts[1], faults=faults,
    )  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """One run: with faults, or under the profiler, or neither."""

    fleet: Fleet
    faults: bool = False
    profile: bool = False
    kills: int = 0


def _runs(args: argparse.Namespace) -> Iterable[_Run]:
    """Every run. Faults and profiles are those of the largest fleet, doll K=N, with each control channel."""
    sizes = [int(word) for word in args.workers.split(",")]
    for control, blobs in itertools.product(args.control.split(","), args.blobs.split(",")):
        for size, policy in itertools.product(sizes, args.policies.split(",")):
            yield _Run(Fleet(size, policy, args.compute_ms / 1e3, blobs, control), kills=args.kills)
        largest = Fleet(max(sizes), "doll K=N", args.compute_ms / 1e3, blobs, control)
        if args.faults:
            yield _Run(largest, faults=True)
        if args.profile:
            yield _Run(largest, profile=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleets", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="8,64,256", help="sizes of the fleet; default 8,64,256")
    parser.add_argument("--policies", default="doll K=N/4,doll K=N,doll K=4N", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--compute-ms", type=float, default=40.0, help="of one simulated gradient; default 40")
    parser.add_argument("--control", default="kafka", help="control channels, as control.kind; default kafka")
    parser.add_argument("--blobs", default="redis", help="blob stores, as blobs.kind; default redis")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run's steady state; default 15")
    parser.add_argument("--warm-s", type=float, default=5.0, help="before it, after the first update; default 5")
    parser.add_argument("--profile", action="store_true", help="profile the server's loop in a run of its own")
    parser.add_argument("--faults", action="store_true", help="lose a worker, then the server, in a run of its own")
    parser.add_argument("--kills", type=int, default=0, help="server and workers in turns, afterwards; default 0")
    parser.add_argument("--kills-s", type=float, default=1800.0, help="for this long; default 1800")
    parser.add_argument("--docs", action="store_true", help="write the section of docs/benchmarks.md")
    args = parser.parse_args(argv)
    if unknown := set(args.policies.split(",")) - POLICIES.keys():
        parser.error(f"--policies: expected some of {', '.join(POLICIES)}, got {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began = datetime.now()

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"fleets-{began:%Y%m%d-%H%M%S}.json"
    rows: list[Row] = []
    profiles: dict[str, str] = {}
    failed = False
    with FleetBench(say) as bench:
        for number, run in enumerate(_runs(args)):
            profile = path.with_name(f"{path.stem}-{number}.pstats") if run.profile else None
            try:
                row = bench.run_fleet(
                    run.fleet, warm_s=args.warm_s, seconds=args.seconds, profile=profile, faults=run.faults,
                    kills=run.kills, kills_s=args.kills_s,
                )  # fmt: skip
            except (KeyboardInterrupt, RuntimeError, DollError) as exc:
                failed = True
                say(f"{run}: {type(exc).__name__} {exc}")
                if isinstance(exc, KeyboardInterrupt):
                    break
                continue
            say(f"{run}: {row.batches_per_s:,.0f} batches/s, {row.updates_per_s:.2f} updates/s")
            if profile is None:
                rows.append(row)
            else:
                name = f"{row.fleet.workers} workers, {row.fleet.policy}, control {row.fleet.control}"
                profiles[name] = profile_table(profile)
    facts = {
        "commit": commit(), "began": began.isoformat(timespec="seconds"), "cores": os.cpu_count(), "batch_size": BATCH,
    }  # fmt: skip
    measured = {**facts, "rows": [asdict(row) for row in rows], "profiles": profiles}
    path.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if not rows:
        return 1
    show(rows)
    for name, table in profiles.items():
        print(f"\n{name}\n\n{table}")
    draw([row for row in rows if not row.faults] or rows, path.with_suffix(".png"))
    print(f"written: {path} and {path.with_suffix('.png').name}")
    if args.docs:
        others = f"{min(row.others for row in rows):.0%} to {max(row.others for row in rows):.0%}"
        what = f"gradient {args.compute_ms:g} ms, blobs {args.blobs}, others took {others}."
        where = f"{began:%Y-%m-%d}, commit {commit()}, {os.cpu_count()} cores, {what}"
        update_section(DOCS / "benchmarks.md", MARK, COMMAND, markdown(rows, where))
        shutil.copyfile(path.with_suffix(".png"), DOCS / "fleets.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
