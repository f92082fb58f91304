"""Throughput of the pipeline and of reference programs, in one run: `python -m benchmarks.pipeline` (or `make bench`).

Sections: A throughput against bare loops, DDP and a bare Redis parameter server; B intake without gradients; C time at
the parameter server; D latency of an update; E update rate against theory. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from doll.config import JobConfig
from doll.errors import DollError
from doll.records.control import Member
from doll.theory.queueing import update_rate_per_s

from benchmarks import report
from benchmarks.arrivals import arrivals_between
from benchmarks.harness import (
    GAUSSIANS,
    Bench,
    LearningResult,
    Observer,
    ReferenceResult,
    Usage,
    idle_share,
    image_records,
    job,
)
from benchmarks.intake import avro_records, csv_records, event_records, events, protobuf_records, schema_server
from benchmarks.results import keep
from benchmarks.shares import is_steady, percentile

BATCH = 256
EMNIST = "examples.emnist.task:Emnist"
# Packed as streams of about these rates would be; docs/benchmarks.md has the cost of unpacked records.
PACKING = {"cnn": 16, "small": 32}
MODELS = {"cnn": False, "small": True}
GROUP_SIZES = (2, 8)
CHANNELS = ("auto", "kafka", "redis", "local")
_WARM_RUNS = 6  # at most
_RATE_WARM_S = 15.0  # section E: what came while the workers joined is learned by then


@dataclass
class Measured:
    """One run: its figure, what it used, and what else is kept of it."""

    value: float
    usage: Usage
    more: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Runs sections and keeps the results of every repetition."""

    def __init__(self, bench: Bench, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self.bench = bench
        self.args = args
        self.say = say
        self.runs: list[dict[str, Any]] = []
        self.rates: dict[str, float] = {}  # samples/s of the bare loops, to size the other runs

    def measure(self, section: str, name: str, call: Callable[[], Measured]) -> float:
        """Measure when the machine is idle, or after `--wait-s` in any case; return the result."""
        waited_s = time.monotonic()
        while (idle := idle_share(0.5)) < 0.85 and time.monotonic() - waited_s < self.args.wait_s:
            pass
        measured = call()
        value, usage = measured.value, measured.usage
        self.runs.append(
            {
                "section": section, "name": name, "value": value, "idle_before": idle, "others": usage.others,
                "seconds": usage.seconds, "cpu_s": usage.cpu_s, **measured.more,
            }
        )  # fmt: skip
        share = f", share {measured.more['share']:.3f}" if "share" in measured.more else ""
        self.say(f"{section} {name}: {value:,.1f}{share} (others used {usage.others:.0%} of the machine)")
        return value

    def warm(self) -> None:
        """Run each model for nothing, the small one until the broker's CPU time per update is steady.

        A broker whose Java code is not compiled yet uses nearly twice the CPU time of a warm one.
        """
        cost_s: list[float] = []
        while not is_steady(cost_s) and len(cost_s) < _WARM_RUNS:
            learned = self.learn("small", GROUP_SIZES[0], 250)
            cost_s.append(learned.usage.cpu_s.get("kafka", 0.0) / len(learned.updates))
            self.say(f"warming: the broker used {1e3 * cost_s[-1]:.1f} ms per update")
        self.learn("cnn", GROUP_SIZES[-1], 12)

    def learn(self, model: str, group_size: int, updates: int, observer: Observer | None = None) -> LearningResult:
        """DOLL learns `updates` updates of section A's job."""
        config = self.job_a(model, group_size, updates)
        samples = updates * group_size * BATCH // 2
        self.bench.fill(config, image_records, samples + (config.worker.max_pending_batches + 8) * BATCH)
        return self.bench.learn(config, observer=observer)

    # --- A, C, D

    def throughput(self, model: str, group_size: int) -> None:
        small, seconds = MODELS[model], self.args.seconds
        name = f"{model} K={group_size}"

        def reference(row: str, call: Callable[[], ReferenceResult]) -> float:
            def measured() -> Measured:
                result = call()
                return Measured(result.samples_per_s, result.usage, {"share": result.share})

            return self.measure("A", f"{name} {row}", measured)

        rate = reference("bare", lambda: self.bench.bare(small, seconds))
        # Each of the others learns for about as long as the bare loops did.
        updates = max(10, round(rate * seconds / (group_size * BATCH)))

        def doll() -> Measured:
            learned = self.learn(model, group_size, round(updates * (1 + 3.0 / seconds)))
            return Measured(learned.samples_per_s, learned.usage, _anatomy(learned))

        self.measure("A", f"{name} doll", doll)
        # Once more: a shared machine changes its speed by a third within a minute, and DOLL is set beside both.
        reference("bare", lambda: self.bench.bare(small, seconds))
        reference("barrier", lambda: self.bench.barrier(small, group_size, updates))
        reference("ddp", lambda: self.bench.ddp(small, group_size, updates))
        topic = self.job_a(model, group_size, updates)  # which holds the samples of the run above
        reference("ddp+kafka", lambda: self.bench.ddp(small, group_size, updates, topic))
        reference("redis", lambda: self.bench.redis_ps(small, group_size, updates))

    def stock(self, model: str) -> None:
        """Bare loops with the default malloc settings; in the rows of the smallest K."""
        name = f"{model} K={GROUP_SIZES[0]} stock"

        def measured() -> Measured:
            result = self.bench.bare(MODELS[model], self.args.seconds, tuned=False)
            return Measured(result.samples_per_s, result.usage, {"share": result.share})

        self.measure("A", name, measured)

    def job_a(self, model: str, group_size: int, updates: int) -> JobConfig:
        return job(
            f"bench-{model}",
            task=EMNIST,
            args={"small": MODELS[model]},
            data={"workers": 2, "batch_size": BATCH, "samples_per_record": PACKING[model]},
            training={
                "policy": {"name": "doll", "group_size": group_size},
                "optimizer": {"name": "sgd", "lr": 0.01},
            },
            stop={"updates": updates},
            **({"control": {"kind": self.args.channel}} if self.args.channel else {}),
        )

    # --- B

    def intake(self) -> None:
        share = 4 if self.args.quick else 1
        for packed, samples in ((1, 1_200_000 // share), (64, 4_000_000 // share)):
            stored = self.job_b(f"bench-stored-{packed}", packed, samples)
            self.bench.fill(stored, gaussian_records, samples)
            self.intake_of(stored, f"stored m={packed}", samples, produce=False)
            # A new topic each time: the source goes on where the stream ends. The source is slower than the worker.
            samples //= 6
            live = self.job_b(f"bench-live-{packed}-{len(self.runs)}", packed, samples)
            self.intake_of(live, f"live m={packed}", samples, produce=True)
        samples = 800_000 // share
        with schema_server() as registry:
            formats: dict[str, tuple[Callable[[int], list[bytes]], dict[str, Any] | None]] = {
                "json": (event_records, None),
                "avro": (avro_records, {"kind": "avro", "registry": registry}),
                "protobuf": (protobuf_records, {"kind": "protobuf", "message": "benchmarks.event_messages:Event"}),
                "csv": (csv_records, {"kind": "csv", "columns": list(next(events(1)))}),
            }
            for name, (records, section) in formats.items():
                config = self.job_b(f"bench-stored-{name}", 1, samples, "benchmarks.intake:Events", {}, section)
                self.bench.fill(config, records, samples)
                self.intake_of(config, f"stored {name}", samples, produce=False)

    def intake_of(self, config: JobConfig, name: str, samples: int, *, produce: bool) -> None:
        self.measure("B", name, lambda: Measured(*self.bench.intake(config, samples // BATCH, produce=produce)))

    def job_b(
        self,
        name: str,
        packed: int,
        samples: int,
        task: str = "examples.synthetic.task:Gaussian",
        args: dict[str, Any] | None = None,
        section: dict[str, Any] | None = None,
    ) -> JobConfig:
        return job(
            name,
            task=task,
            args={"features": 20} if args is None else args,
            data={"workers": 1, "batch_size": BATCH, "samples_per_record": packed, "format": section},
            source={"kind": "python", "of": GAUSSIANS, "args": {"features": 20}, "limit_samples": samples},
            arrivals={"process": "asap"},
            training={"policy": {"name": "doll", "group_size": 1}},
        )

    # --- E

    def update_rate(self) -> None:
        """8 workers at 200 samples/s each: 192,000 arrivals in 120 s, a standard error of 0.23 %."""
        workers, rate_per_s, batch, group = 8, 200.0, 32, 8
        seconds = 20.0 if self.args.quick else 120.0
        predicted = update_rate_per_s(workers * rate_per_s, group, batch)
        config = job(
            f"bench-rate-{len(self.runs)}",
            task="examples.digits.task:Digits",
            data={"workers": workers, "batch_size": batch},
            source={"kind": "python", "of": "examples.digits.task:samples"},
            arrivals={"process": "poisson", "rate_per_s": rate_per_s},
            training={"policy": {"name": "doll", "group_size": group}},
            stop={"updates": round(predicted * (seconds + _RATE_WARM_S))},
            seed=len(self.runs),
        )
        sent: dict[str, float] = {}

        def learn() -> Measured:
            learned = self.bench.learn(config, produce=True, warm_s=_RATE_WARM_S)
            measured = len(learned.updates) / (learned.times_s[-1] - learned.times_s[0])
            first, last = learned.updates[0], learned.updates[-1]
            arrivals = arrivals_between(config, self.bench.stack.services, first.time_s, last.time_s)
            sent["ratio"] = (len(learned.updates) - 1) * group * batch / arrivals
            more = {"predicted": predicted, "measured": measured, "arrivals": arrivals}
            return Measured(measured / predicted, learned.usage, more)

        self.measure("E", "update rate / prediction", learn)
        last = self.runs[-1]
        self.runs.append({**last, "name": "update rate / prediction for the arrivals sent", "value": sent["ratio"]})


def gaussian_records(count: int) -> list[bytes]:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(size=(count, 20)), rng.integers(0, 2, count)]).astype("<f4")
    return [row.tobytes() for row in rows]


def _anatomy(learned: LearningResult) -> dict[str, Any]:
    """What the records and the processes of one run say (sections C and D); times in milliseconds."""
    updates = learned.updates
    members = [member for update in updates for member in update.members]
    grant_to_update_s = sorted(update.grant_to_update_s for update in updates)
    to_fetch_s, to_gradient_s, to_push_s = learned.hops
    return {
        "updates": len(updates),
        "share": learned.share,
        "apply_share": sum(u.apply_s for u in updates) / sum(m.compute_s for m in members),
        "apply_ms": _median_ms([update.apply_s for update in updates]),
        "compute_ms": _median_ms([member.compute_s for member in members]),
        "fetch_ms": _median_ms(_of_sets(members, lambda member: member.fetch_s)),
        "store_ms": _median_ms(_of_sets(members, lambda member: member.store_s)),
        "sets": len(_of_sets(members, lambda member: 0.0)),
        "hops": len(to_gradient_s),
        "grant_to_fetch_p50_ms": 1e3 * percentile(to_fetch_s, 0.50),
        "grant_to_fetch_p99_ms": 1e3 * percentile(to_fetch_s, 0.99),
        "grant_to_gradient_p50_ms": 1e3 * percentile(to_gradient_s, 0.50),
        "grant_to_gradient_p99_ms": 1e3 * percentile(to_gradient_s, 0.99),
        "gradient_to_push_p50_ms": 1e3 * percentile(to_push_s, 0.50),
        "gradient_to_push_p99_ms": 1e3 * percentile(to_push_s, 0.99),
        "grant_to_update_p50_ms": 1e3 * percentile(grant_to_update_s, 0.50),
        "grant_to_update_p99_ms": 1e3 * percentile(grant_to_update_s, 0.99),
        "period_ms": 1e3 * (learned.times_s[-1] - learned.times_s[0]) / len(updates),
    }


def _of_sets(members: Iterable[Member], what: Callable[[Member], float]) -> list[float]:
    """The sum of a time over the members of each set: the batches of a set share one fetch and one store."""
    times_s: dict[int, float] = {}
    for member in members:
        times_s[member.set_grant_id] = times_s.get(member.set_grant_id, 0.0) + what(member)
    return list(times_s.values())


def _median_ms(values: Sequence[float]) -> float:
    return 1e3 * statistics.median(values)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 repetitions of short runs (about 8 minutes)")
    parser.add_argument("--repetitions", type=int, help="default 5; 2 with --quick")
    parser.add_argument("--seconds", type=float, help="of each run in section A; default 5; 4 with --quick")
    parser.add_argument("--wait-s", type=float, default=20.0, help="longest wait for an idle machine before each run")
    parser.add_argument("--only", default="A,B,E", help="sections, from A (with C and D), B, E; default all")
    parser.add_argument("--models", default="cnn,small", help="of section A; default both")
    parser.add_argument("--channel", choices=CHANNELS, help="`control.kind` of section A; default: the job file's")
    parser.add_argument("--cold", action="store_true", help="do not warm the broker before the first repetition")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/benchmarks.md")
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    repetitions = args.repetitions or (2 if args.quick else 5)
    args.seconds = args.seconds or (4.0 if args.quick else 5.0)
    sections = set(args.only.upper().replace("C", "A").replace("D", "A").split(","))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything started here is ended
    began, load = datetime.now(), os.getloadavg()[0]

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    failed = False
    with Bench(say) as bench:
        runner = Runner(bench, args, say)
        try:
            if "A" in sections and not args.cold:
                runner.warm()
            for repetition in range(repetitions):
                say(f"repetition {repetition + 1} of {repetitions}; load {os.getloadavg()[0]:.1f}")
                _repeat(runner, repetition, sections, args.models.split(","))
        except (KeyboardInterrupt, RuntimeError, DollError) as exc:
            failed = True
            say(f"{type(exc).__name__} {exc}: the figures so far")
    facts = {
        "began": began.isoformat(timespec="seconds"), "took_s": round((datetime.now() - began).total_seconds()),
        "cores": os.cpu_count(), "load_before": round(load, 2), "batch_size": BATCH, "repetitions": repetitions,
        "seconds": args.seconds, "channel": args.channel or "", "command": " ".join([parser.prog, *given]),
    }  # fmt: skip
    path = keep(f"{began:%Y%m%d-%H%M%S}", {**facts, "rows": report.summarize(runner.runs), "runs": runner.runs})
    print(report.show(path))
    if args.docs and not failed:
        report.write_docs(path)
    return 1 if failed else 0


def _repeat(runner: Runner, repetition: int, sections: set[str], models: Sequence[str]) -> None:
    if "A" in sections:
        for model in models:
            for group_size in GROUP_SIZES:
                runner.throughput(model, group_size)
            if repetition == 0:
                runner.stock(model)
    if "B" in sections and repetition < 2:
        runner.intake()
    if "E" in sections and repetition == 0:  # its error is the stream's, not the machine's
        runner.update_rate()


if __name__ == "__main__":
    sys.exit(main())
