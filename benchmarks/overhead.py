"""What durability costs an undisturbed run: `python -m benchmarks.overhead` (or `make bench-overhead`).

The same job with everything as a user gets it, and with checkpoints off, in turn, in one run. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from doll.config import JobConfig
from doll.errors import DollError
from doll.local import processes

from benchmarks.harness import Bench, image_records, job
from benchmarks.pipeline import BATCH, EMNIST, MODELS, PACKING, Measured, Runner
from benchmarks.results import keep

TARGET_RATIO = 0.95
GROUP_SIZE = 8
NEVER = 10**9


def job_of(model: str, updates: int, *, checkpoints: bool) -> JobConfig:
    """The job with the defaults of a user and health probes, or without checkpoints and probes.

    A worker holds a batch until it is durable, and stops reading when it holds `max_pending_batches`. Without
    checkpoints nothing is durable before the end, therefore it may hold all batches of the run then.
    """
    on: dict[str, Any] = {"health": {"base_port": processes.free_port()}}
    off: dict[str, Any] = {
        "checkpoint": {"every_updates": NEVER, "every_s": float(NEVER)},
        "worker": {"max_pending_batches": updates * GROUP_SIZE},
    }
    return job(
        f"bench-overhead-{model}",
        task=EMNIST,
        args={"small": MODELS[model]},
        data={"workers": 2, "batch_size": BATCH, "samples_per_record": PACKING[model]},
        training={"policy": {"name": "doll", "group_size": GROUP_SIZE}, "optimizer": {"name": "sgd", "lr": 0.01}},
        stop={"updates": updates},
        **(on if checkpoints else off),
    )


def measure(runner: Runner, model: str, seconds: float) -> None:
    """One pair of runs, each learning for about `seconds`; which comes first alternates."""
    bench = runner.bench
    if model not in runner.rates:
        runner.rates[model] = bench.bare(MODELS[model], 3.0).samples_per_s
    # The rate of bare loops is never reached: a run lasts somewhat longer. 3 s go by before its steady state.
    updates = max(12, round(runner.rates[model] * (seconds + 3.0) / (GROUP_SIZE * BATCH)))
    configs = {name: job_of(model, updates, checkpoints=name == "on") for name in ("on", "off")}
    # Whatever order streams and groups take, a worker never runs out of samples.
    bench.fill(configs["on"], image_records, (updates * GROUP_SIZE // 2 + 64) * BATCH)
    pairs = len([run for run in runner.runs if run["name"] == f"{model} on"])
    for name in ("on", "off") if pairs % 2 == 0 else ("off", "on"):

        def learn(config: JobConfig = configs[name]) -> Measured:
            learned = bench.learn(config)
            return Measured(learned.samples_per_s, learned.usage, {"updates": len(learned.updates)})

        runner.measure("F", f"{model} {name}", learn)


def summarize(runs: Sequence[dict[str, Any]], goal: float = TARGET_RATIO) -> list[dict[str, Any]]:
    """For each model the medians of both, the ratio of the medians, and the range of the ratios of each pair."""
    rows = []
    for model in dict.fromkeys(run["name"].split()[0] for run in runs):
        on, off = ([run["value"] for run in runs if run["name"] == f"{model} {name}"] for name in ("on", "off"))
        pairs = [one / other for one, other in zip(on, off, strict=False)]
        if not pairs:
            continue
        ratio = statistics.median(on) / statistics.median(off)
        rows.append(
            {
                "model": model, "pairs": len(pairs), "on": statistics.median(on), "off": statistics.median(off),
                "ratio": ratio, "ratio_low": min(pairs), "ratio_high": max(pairs),
                "others": statistics.median(run["others"] for run in runs if run["name"].startswith(model)),
                "goal": goal, "met": ratio >= goal,
            }
        )  # fmt: skip
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Durability: samples/s with everything on and with checkpoints off, medians")
    for column in ("model", "pairs", "on", "off", "on / off", "range of pairs", "others", "goal", "met"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"], str(row["pairs"]), f"{row['on']:,.0f}", f"{row['off']:,.0f}", f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}", f"{row['others']:.0%}", f">= {TARGET_RATIO}",
            "yes" if row["met"] else "NO",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of runs for each model; default 5")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run; default 15")
    parser.add_argument("--wait-s", type=float, default=20.0, help="longest wait for an idle machine before each run")
    parser.add_argument("--models", default="cnn,small", help="default both")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began = datetime.now()

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    failed, runs = _run(args, say)
    rows = summarize(runs)
    facts = {"began": began.isoformat(timespec="seconds"), "cores": os.cpu_count(), "batch_size": BATCH}
    path = keep(f"overhead-{began:%Y%m%d-%H%M%S}", {**facts, "rows": rows, "runs": runs})
    show(rows)
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 1 if failed else 0


def _run(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether it broke off, and every single run."""
    with Bench(say) as bench:
        runner = Runner(bench, args, say)
        try:
            for repetition in range(args.repetitions):
                say(f"pair {repetition + 1} of {args.repetitions}; load {os.getloadavg()[0]:.1f}")
                for model in args.models.split(","):
                    measure(runner, model, args.seconds)
        except (KeyboardInterrupt, RuntimeError, DollError) as exc:
            say(f"{type(exc).__name__} {exc}: the figures so far")
            return True, runner.runs
    return False, runner.runs


if __name__ == "__main__":
    sys.exit(main())
