"""Records of a made-up job on a clock that a test turns, and the page of it on a real HTTP server."""

from __future__ import annotations

import http.client
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from doll.config import JobConfig, parse
from doll.dashboard.runs_folder import RunsFolder
from doll.dashboard.server import JobPage, PageServer, RunsPage
from doll.dashboard.sources import JobSource
from doll.ledger.dead_letters import DeadRecord, save_dead_records
from doll.monitor.state.csv_file import CsvFile
from doll.monitor.state.folder_logs import save_updates
from doll.monitor.state.watched_job import KeptVersions, PageState, WatchedJob
from doll.monitor.views.run_report import RunOutcome, build_report
from doll.process.files import write_json
from doll.process.http_access import LOOPBACK, NO_TOKENS, Tokens, listen
from doll.records.control import (
    DeadLetter,
    Limit,
    Measures,
    Member,
    Metric,
    ProvisionDecision,
    TermStarted,
    Update,
)
from doll.run.folder import RunFolder
from statuses import gone_worker, live_worker, server_status
from waiting import until

T = TypeVar("T")

JOB = """
job: clicks
task: {class: 'examples.digits.task:Digits'}
source: {kind: python, of: examples.digits.task:samples}
arrivals: {process: poisson, rate_per_s: 40}
training: {policy: {name: doll, group_size: 4}}
stop: {samples: 100_000, accuracy: 0.97}
plan: {updates: 900, deadline_s: 300, budget_usd: 3}
"""
BATCH = 32


Errors = Callable[[int], tuple[float, float]]


def job(workers: int, *overrides: str) -> JobConfig:
    return parse(JOB, [f"data.workers={workers}", f"data.batch_size={BATCH}", *overrides])


def falling(version: int) -> tuple[float, float]:
    """Loss and accuracy of a job that learns."""
    progress = math.exp(-version / 160)
    return 0.1 + 2.2 * progress, 0.98 - 0.88 * progress


class MadeUpJob:
    """A job whose records this process makes: four updates and a status per second of its own clock.

    Args:
        errors: its loss and accuracy at a version.
        plan: section of the job file.

    Attributes:
        now_s: its Unix time.
        problem: why what is shown may be old.
    """

    is_live = True

    def __init__(
        self, workers: int = 8, *, members: int = 4, seed: int = 3, errors: Errors = falling, plan: str = ""
    ) -> None:
        self.config = job(workers, *([f"plan={plan}"] if plan else []))
        self.problem = ""
        self._errors = errors
        self.watched = WatchedJob(self.config, 0.0)
        self.now_s = self._start_s = 1_795_000_000.0
        self._workers, self._members = workers, members
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._version = self._samples = self._turn = 0
        self._batches = [0] * workers
        self._gone: dict[int, float] = {}
        self.feed(
            TermStarted(term=1, resumed_version=0, origins=(0,) * workers, records_per_batch=BATCH, time_s=self.now_s)
        )

    def read(self, view: Callable[[PageState], T]) -> T:
        with self._lock:
            elapsed_s = self.now_s - self._start_s
            return view(self.watched.state(elapsed_s, self.now_s, problem=self.problem))

    def kept_versions(self) -> KeptVersions | None:
        return None

    def feed(self, record: Any) -> None:
        with self._lock:
            self.watched.feed(record)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context nobody can read its state."""
        with self._lock:
            yield

    def run(self, seconds: int) -> None:
        """Go on for so many seconds of its clock."""
        for _ in range(seconds):
            for _ in range(4):
                self.now_s += 0.25
                self._update()
            self._evaluate()
            self.status()

    def kill(self, worker: int) -> None:
        """A worker is gone from now on."""
        self._gone[worker] = self.now_s

    def decide(self, *actions: str) -> None:
        """A turn of the provisioner."""
        self._turn += 1
        elapsed_s, workers = self.now_s - self._start_s, self._workers
        numbers = {
            "all_on_demand_usd": 0.004 * elapsed_s,
            "expected_finish_sd_s": 4.2,
            "expected_cost_sd_usd": 0.03,
            "instances_spot": 5.0,
            "instances_on_demand": workers - 5.0,
            "moves_total": float(self._turn),
        }
        self.feed(Metric(source="provisioner", values=numbers, time_s=self.now_s))
        self.feed(
            ProvisionDecision(
                turn=self._turn,
                time_s=self.now_s,
                started_s=self._start_s,
                phase="run",
                binding="deadline",
                feasible=True,
                markets=("spot",) * 5 + ("on_demand",) * (workers - 5),
                reasons=(
                    "spot is cheaper and the slack can bear its loss",
                    "without it the work would not be done in time",
                ),
                reason_of=(0,) * 5 + (1,) * (workers - 5),
                actions=actions,
                samples_done=float(self._samples),
                target_samples=100_000.0,
                updates_done=self._version,
                spent_usd=0.0026 * elapsed_s,
                expected_cost_usd=0.72,
                expected_finish_s=262.0,
            )
        )

    def refuse(self, offset: int, reason: str, payload: bytes = b'{"x": 1}', **more: Any) -> None:
        """A dead letter of partition 0, which is in the next update."""
        letter = DeadLetter(
            worker=0,
            partition=0,
            offset=offset,
            reason=reason,
            payload=payload,
            payload_bytes=len(payload),
            time_s=self.now_s,
            term=1,
            **more,
        )
        self.feed(letter)

    def status(self, *, unread: int = 400, **fields: Any) -> None:
        """What the parameter server says each second.

        Args:
            unread: records at each worker, at most.
        """
        elapsed_s = self.now_s - self._start_s
        workers = [
            gone_worker(n, restarts=1)
            if n in self._gone
            else live_worker(
                n,
                live_since_s=self._start_s,
                market="spot" if n % 8 < 5 else "on_demand",
                control="local",
                partitions=1,
                lag_records=self._random.randrange(unread + 1),
                retained_batches=self._random.randrange(6),
                batch_s=0.05,
            )
            for n in range(self._workers)
        ]
        measures = Measures(
            staleness={-1: 90 * self._version, 0: 8 * self._version, 1: self._version},
            staleness_total=-89 * self._version,
            blocked_s=0.1 * elapsed_s,
            computing_s=0.7 * elapsed_s,
            idle_s=0.3 * elapsed_s,
            gradient_bytes=59_520 * self._version,
            dense_gradient_bytes=59_520 * self._version,
            weights_bytes=59_520 * self._version,
        )
        values = {
            "version": self._version,
            "durable_version": max(0, self._version - 6),
            "samples_total": self._samples,
            "time_s": self.now_s,
            "measures": measures,
            "waiting_batches": 3,
        }
        self.feed(server_status(workers, **{**values, **fields}))

    def limited(self) -> None:
        """A status that says what limits the job."""
        self.status(
            limit=Limit(kind="partition", worker=3, partitions=(3,), num_partitions=2, unread=41_204, share=0.93)
        )

    def _update(self) -> None:
        self._version += 1
        live = [n for n in range(self._workers) if n not in self._gone]
        chosen = [live[(self._version * self._members + at) % len(live)] for at in range(self._members)]
        members = tuple(self._member(n) for n in sorted(chosen))
        self._samples += BATCH * len(members)
        loss, accuracy = self._errors(self._version)
        noise = self._random.uniform(-0.04, 0.04)
        self.feed(
            Update(
                term=1,
                version=self._version,
                members=members,
                n_samples=BATCH * len(members),
                loss=loss + noise,
                metrics=_known({"accuracy": accuracy + noise / 4}),
                samples_total=self._samples,
                batches_total=self._version * self._members,
                apply_s=0.012,
                grant_to_update_s=0.09,
                time_s=self.now_s,
            )
        )

    def _member(self, worker: int) -> Member:
        batch = self._batches[worker]
        self._batches[worker] += 1
        return Member(
            worker=worker,
            partition=worker,
            batch=batch,
            lo=BATCH * batch,
            hi=BATCH * (batch + 1),
            n_samples=BATCH,
            base_version=self._version - 1,
            compute_s=self._random.uniform(0.02, 0.3),
            wait_s=self._random.uniform(0.01, 0.1),
        )

    def _evaluate(self) -> None:
        loss, accuracy = self._errors(self._version)
        values = {
            "version": self._version,
            "term": 1,
            "loss": 0.015 + 0.955 * loss,
            "accuracy": 0.006 + 0.989 * accuracy,
        }
        self.feed(Metric(source="evaluator", values=_known(values), time_s=self.now_s))


def _known(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not math.isnan(value)}


def leave_run(made_up: MadeUpJob, folder: Path, **outcome: Any) -> None:
    """The folder that `doll up` leaves of a job that has ended."""
    progress = made_up.watched.progress
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write_job(made_up.config)
    report = RunOutcome("samples: 30720 reached", 0, 60.0, started_at_s=made_up.now_s, **outcome)
    write_json(folder / "report.json", build_report(progress, report, None))
    CsvFile(folder / "updates.csv", progress.history.updates).sync()
    CsvFile(folder / "evaluations.csv", progress.history.evaluations).sync()
    save_updates(folder, progress.newest_updates)
    letters = made_up.read(lambda state: [*state.letters])
    save_dead_records(folder / "dead.json", [DeadRecord(letter) for letter in letters])


@contextmanager
def served(source: JobSource | RunsFolder, *, tokens: Tokens = NO_TOKENS, every_s: float = 0.1) -> Iterator[int]:
    """The page of a job, or of runs, on a real server within the context; its port."""
    shown = RunsPage(source, every_s) if isinstance(source, RunsFolder) else JobPage(source, every_s)
    with listen(LOOPBACK, 0, tokens) as listener:
        server = PageServer(shown, tokens=tokens)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started, "the server")
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def ask(
    port: int, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and content of one answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
