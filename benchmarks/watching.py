"""What watching costs a run: `python -m benchmarks.watching [--everything]`.

The same job alone, and with its page and somebody who follows it, in turn, in one run. With `--everything` an evaluator
watches it too, with gates and the detectors of drift in metrics, features, labels and answers, and `doll otel` sends
its traces to a collector. The job alone has no evaluator.

`--windows 30` measures in one job instead of two, because a shared machine changes its speed between two jobs: all
watchers are frozen (SIGSTOP) in every second window of `--seconds`. What came while they were frozen is read in the
next window, which makes watching look as if it cost up to twice as much. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import http.client
import http.server
import itertools
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from doll.config import JobConfig, parse
from doll.local import processes
from doll.local.forks import Role

from benchmarks.harness import Bench, LearningResult, image_records
from benchmarks.overhead import GROUP_SIZE, job_of, summarize
from benchmarks.pipeline import BATCH, MODELS, Measured, Runner
from benchmarks.results import keep

GOAL, GOAL_OF_EVERYTHING = 0.98, 0.97


@contextlib.contextmanager
def reader(port: int) -> Iterator[list[int]]:
    """Reads the events of a page within the context, as soon as it is there; the bytes of each part."""
    ended, sizes = threading.Event(), list[int]()

    def read() -> None:
        while not ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", "/events")
                answer = connection.getresponse()
                while not ended.is_set() and (line := answer.readline()):
                    sizes.append(len(line))
            except OSError:
                time.sleep(0.2)  # it is starting, or has ended
            finally:
                connection.close()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()


class _Collector(http.server.BaseHTTPRequestHandler):
    """Accepts what `doll otel` sends."""

    received = 0

    def do_POST(self) -> None:
        _Collector.received += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector within the context; its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def watched(config: JobConfig) -> JobConfig:
    """The job with everything that watches it."""
    sections = {"drift": {"inputs": {"window": 1_000}}, "versions": {"gates": {"min_interval_s": 0}}}
    return parse(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_unset=True) | sections))


def measure(runner: Runner, model: str, seconds: float) -> None:
    """One pair of runs; which comes first alternates."""
    bench = runner.bench
    if model not in runner.rates:
        runner.rates[model] = bench.bare(MODELS[model], 3.0).samples_per_s
    updates = max(12, round(runner.rates[model] * (seconds + 3.0) / (GROUP_SIZE * BATCH)))
    config = job_of(model, updates, checkpoints=True)
    bench.fill(config, image_records, (updates * GROUP_SIZE // 2 + 64) * BATCH)
    pairs = len([run for run in runner.runs if run["name"] == f"{model} on"])
    for name in ("on", "off") if pairs % 2 == 0 else ("off", "on"):

        def learn(is_watched: bool = name == "on") -> Measured:
            port = processes.free_port() if is_watched else 0
            with contextlib.ExitStack() as beside:
                sizes = beside.enter_context(reader(port)) if port else []
                watchers = []
                if is_watched and runner.args.everything:
                    endpoint = beside.enter_context(collector())
                    watchers = [
                        ("evaluator", "doll.run.local.roles:evaluator_role", ()),
                        ("otel", "benchmarks.probes:otel_role", (endpoint,)),
                    ]
                learned = bench.learn(watched(config) if watchers else config, page_port=port, watchers=watchers)
            more = {"updates": len(learned.updates), "events": len(sizes), "traced_bytes": _Collector.received}
            return Measured(learned.samples_per_s, learned.usage, more)

        runner.measure("watching", f"{model} {name}", learn)


class Windows:
    """The windows of one job, in every second of which its watchers are frozen."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._begins: list[tuple[float, bool]] = []  # (time, whether watchers run)

    def start(self, watchers: Sequence[Role]) -> None:
        self._thread = threading.Thread(target=self._run, args=(watchers,), daemon=True)
        self._thread.start()

    def _run(self, watchers: Sequence[Role]) -> None:
        self._ended.wait(2 * _STARTED_S)  # they have loaded what they need
        number = 0
        while not self._ended.is_set():
            is_on = (number + 1) // 2 % 2 == 0  # on, off, off, on: a machine that gets slower hurts both
            for role in watchers:
                os.kill(role.pid, signal.SIGCONT if is_on else signal.SIGSTOP)
            self._begins.append((time.monotonic(), is_on))
            number += 1
            self._ended.wait(self._every_s)
        for role in watchers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(role.pid, signal.SIGCONT)

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def rates(self, learned: LearningResult) -> list[tuple[bool, float]]:
        """Return whether watchers ran in each window that the job filled, and the window's samples per second."""
        totals = [0, *(update.samples_total for update in learned.updates)]
        totals[0] = totals[1] - (totals[2] - totals[1])
        times, rates = learned.times_s, []
        for (begin_s, is_on), (end_s, _) in itertools.pairwise(self._begins):
            first, last = bisect.bisect(times, begin_s), bisect.bisect(times, end_s) - 1
            if 0 < first < last and end_s < times[-1]:
                rates.append((is_on, (totals[last] - totals[first]) / (times[last] - times[first])))
        return rates


_STARTED_S = 5.0


def measure_windows(bench: Bench, model: str, count: int, every_s: float) -> list[tuple[bool, float]]:
    """Return the samples per second of the windows of one job."""
    rate = bench.bare(MODELS[model], 3.0).samples_per_s
    updates = round(rate * (count * every_s + 4 * _STARTED_S) / (GROUP_SIZE * BATCH))
    config = job_of(model, updates, checkpoints=True)
    bench.fill(config, image_records, (updates * GROUP_SIZE // 2 + 64) * BATCH)
    port, windows = processes.free_port(), Windows(every_s)
    with reader(port), collector() as endpoint:
        watchers = [
            ("evaluator", "doll.run.local.roles:evaluator_role", ()),
            ("otel", "benchmarks.probes:otel_role", (endpoint,)),
        ]
        try:
            learned = bench.learn(
                watched(config), page_port=port, watchers=watchers, on_start=windows.start,
                run_s=60 + 3 * count * every_s,
            )  # fmt: skip
        finally:
            windows.end()
    return windows.rates(learned)


def show_windows(rates: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    """Print the median of the ratios of neighbouring windows, with an interval of 95 % by resampling."""
    pairs = [
        (one if is_on else other) / (other if is_on else one)
        for (is_on, one), (_, other) in zip(rates[::2], rates[1::2], strict=False)
    ]
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(pairs, (10_000, len(pairs))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    row = {"pairs": len(pairs), "ratio": statistics.median(pairs), "low": float(low), "high": float(high)}
    print(
        f"watched over frozen: {row['ratio']:.3f} ({low:.3f} to {high:.3f} with 95 %, {len(pairs)} pairs of windows; "
        f"goal {GOAL_OF_EVERYTHING})"
    )
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of runs for each model; default 5")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run; default 15")
    parser.add_argument("--wait-s", type=float, default=20.0, help="longest wait for an idle machine before each run")
    parser.add_argument("--everything", action="store_true", help="gates, drift and traces too; the goal is 0.97")
    parser.add_argument("--windows", type=int, default=0, help="number of windows of one job with everything")
    parser.add_argument("--models", default="cnn", help="cnn and small, with a comma; default cnn")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began = datetime.now()

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    with Bench(say) as bench:
        if args.windows:
            rates = measure_windows(bench, args.models, args.windows, args.seconds)
            row = show_windows(rates)
            path = keep(
                f"watching-{began:%Y%m%d-%H%M%S}", {"cores": os.cpu_count(), "windows": row, "rates": rates}
            )  # fmt: skip
            print(f"written: {path}")
            return 0
        runner = Runner(bench, args, say)
        for repetition in range(args.repetitions):
            say(f"pair {repetition + 1} of {args.repetitions}; load {os.getloadavg()[0]:.1f}")
            for model in args.models.split(","):
                measure(runner, model, args.seconds)
    rows = summarize(runner.runs, GOAL_OF_EVERYTHING if args.everything else GOAL)
    path = keep(f"watching-{began:%Y%m%d-%H%M%S}", {"cores": os.cpu_count(), "rows": rows, "runs": runner.runs})
    for row in rows:
        print(
            f"{row['model']}: {row['on']:,.0f} samples/s watched, {row['off']:,.0f} without: {row['ratio']:.3f} "
            f"({row['ratio_low']:.3f} to {row['ratio_high']:.3f}, {row['pairs']} pairs; goal {row['goal']})"
        )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
