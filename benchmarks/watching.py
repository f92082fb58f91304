"""What watching costs a run: `python -m benchmarks.watching`.

The same job alone, and with its page and somebody who follows it, in turn, in one run. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from doll.local import processes

from benchmarks.harness import Bench, image_records
from benchmarks.overhead import GROUP_SIZE, job_of, summarize
from benchmarks.pipeline import BATCH, MODELS, Measured, Runner
from benchmarks.results import keep

GOAL = 0.98


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
            with reader(port) if port else contextlib.nullcontext([]) as sizes:
                learned = bench.learn(config, page_port=port)
            return Measured(
                learned.samples_per_s, learned.usage, {"updates": len(learned.updates), "events": len(sizes)}
            )

        runner.measure("watching", f"{model} {name}", learn)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of runs for each model; default 5")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run; default 15")
    parser.add_argument("--wait-s", type=float, default=20.0, help="longest wait for an idle machine before each run")
    parser.add_argument("--models", default="cnn", help="cnn and small, with a comma; default cnn")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began = datetime.now()

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    with Bench(say) as bench:
        runner = Runner(bench, args, say)
        for repetition in range(args.repetitions):
            say(f"pair {repetition + 1} of {args.repetitions}; load {os.getloadavg()[0]:.1f}")
            for model in args.models.split(","):
                measure(runner, model, args.seconds)
    rows = summarize(runner.runs, GOAL)
    path = keep(f"watching-{began:%Y%m%d-%H%M%S}", {"cores": os.cpu_count(), "rows": rows, "runs": runner.runs})
    for row in rows:
        print(
            f"{row['model']}: {row['on']:,.0f} samples/s with a page, {row['off']:,.0f} without: {row['ratio']:.3f} "
            f"({row['ratio_low']:.3f} to {row['ratio_high']:.3f}, {row['pairs']} pairs; goal {row['goal']})"
        )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
