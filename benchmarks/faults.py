"""Throughput that a job keeps under faults: `python -m benchmarks.faults` (or `make bench-faults`).

The same job without faults and with a fault every 29 s (62 in 30 minutes), in turn. The share is the samples learned
per second with faults by those learned without. Meta's torchft reports 97.7 % with 62 faults in 30 minutes,
of replicas that train with DiLoCo; a drill also kills brokers, Redis and the parameter server, and cuts connections.
`--asap`: the stream is faster than the workers, so that nothing can be caught up on. A shorter run with the same
`--every` is a scaled one: `--seconds 240` has 8 faults.

A machine whose speed differs by 10 % from one half hour to the next hides what faults cost. So the run with faults is
its own reference, too: the rate from one fault to the next, by the rate in the last seconds before the next one, when
the job has recovered. The difference is in seconds of the job's work, and is shown by what was faulted. It contains the
machine's noise; the time without any update does not, and is shown beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from doll.config import JobConfig, StopConfig, load
from doll.run.local.up import run_up

from benchmarks.results import keep
from doll_lab.drill.main import run_drill
from doll_lab.drill.plan import FaultTarget

EVERY_S: Final = 29.0  # 62 faults in 30 minutes
TARGET: Final = 0.977
_WARM_UP_S: Final = 10.0  # after the first update
_AFTER_S: Final = 15.0  # a job without faults goes on for so long: a large update may come late
_PAUSE_GAPS: Final = 5.0
_RECOVERED_SHARE: Final = 0.4  # of the time from fault to fault: its end, in which the job has recovered


def job_of(example: Path, *, asap: bool, policy: str | None = None, changes: Sequence[str] = ()) -> JobConfig:
    """The job of a file.

    Args:
        asap: its stream is as fast as the workers.
        policy: name of another policy than its own, with that one's defaults.
        changes: `key=value` of the job file, after the others.
    """
    words = [] if policy is None else [f"training.policy={{name: {policy}}}"]
    if policy == "diloco":
        # Its momentum is at the server: with the example's own at each worker as well, it would step too far.
        words += ["training.optimizer={name: sgd, lr: 0.02, momentum: 0.5}", "worker.max_pending_batches=64"]
    if asap:
        words.append("arrivals.process=asap")
    return load(example, [*words, *changes])


def _samples_until(updates: Path) -> tuple[Any, Any]:
    """When each valid update was made (Unix seconds), and the samples learned until then; shape (updates,) each."""
    with updates.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["void"] == "0"]
    return np.array([float(row["time_s"]) for row in rows]), np.cumsum([int(row["n_samples"]) for row in rows])


def losses(updates: Path, faults: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Seconds of the job's work that each fault but the last has cost, by what was faulted: "ps", "worker", "kafka".

    A loss below 0 is noise, as as much of the others is.

    Args:
        faults: of `faults.json`, in order.
    """
    at_s, total = _samples_until(updates)
    lost_s: dict[str, list[float]] = defaultdict(list)
    for fault, following in pairwise(faults):
        begin_s, end_s = fault["time_s"], following["time_s"]
        recovered_s = end_s - _RECOVERED_SHARE * (end_s - begin_s)
        begin, recovered, end = np.interp([begin_s, recovered_s, end_s], at_s, total)
        rate = (end - recovered) / (end_s - recovered_s)
        lost_s[fault["role"].split("-")[0]].append(float(end_s - begin_s - (end - begin) / rate))
    return dict(lost_s)


def paused_s(updates: Path, faults: Sequence[Mapping[str, Any]]) -> float:
    """Seconds between the first fault and the last in which nothing was learned: gaps between updates of more than
    `_PAUSE_GAPS` usual ones, less a usual one."""
    at_s, _ = _samples_until(updates)
    gaps_s = np.diff(at_s[(at_s >= faults[0]["time_s"]) & (at_s <= faults[-1]["time_s"])])
    usual_s = float(np.median(gaps_s))
    return float((gaps_s[gaps_s > _PAUSE_GAPS * usual_s] - usual_s).sum())


def samples_in(updates: Path, begin_s: float, seconds: float) -> float:
    """Samples of the valid updates that were made within `seconds` after `begin_s` from the first one.

    The samples of an update count evenly over the time since the update before it, so that a policy of few and large
    updates is not measured in whole ones.

    Raises:
        ValueError: the run has ended before.
    """
    made_s, total = _samples_until(updates)
    at_s = made_s - made_s[0]
    if at_s[-1] < begin_s + seconds:
        raise ValueError(f"expected updates until {begin_s + seconds:g} s after the first, got {at_s[-1]:.1f} s")
    begin, end = np.interp([begin_s, begin_s + seconds], at_s, total)
    return float(end - begin)


def measure(
    config: JobConfig, seconds: float, every_s: float, seed: int, *, with_faults: bool, **options: Any
) -> dict[str, Any]:
    """One run; its samples, and what its audit says.

    Args:
        options: of the drill: `only`, `brokers`, `standby`.
    """
    with tempfile.TemporaryDirectory(prefix="doll-faults-") as name:
        if with_faults:
            # The last one comes behind the time that is measured: the job ends when it has recovered from it.
            faults = math.ceil((seconds + _WARM_UP_S) / every_s) + 1
            report, failure = run_drill(config, Path(name), faults=faults, seed=seed, every_s=every_s, **options)
            if failure:
                raise RuntimeError(failure)
        else:
            stop = StopConfig(seconds=seconds + _WARM_UP_S + _AFTER_S)
            # As a drill: blobs go through Redis.
            blobs = config.blobs.model_copy(update={"kind": "redis"})
            report = run_up(config.model_copy(update={"stop": stop, "blobs": blobs}), Path(name))
        (updates,) = Path(name).glob("*/updates.csv")
        samples = samples_in(updates, _WARM_UP_S, seconds)
        faulted = json.loads((updates.parent / "faults.json").read_text()) if with_faults else []
        lost = losses(updates, faulted) if faulted else {}
        paused = paused_s(updates, faulted) / (faulted[-1]["time_s"] - faulted[0]["time_s"]) if faulted else 0.0
    if report["exit_code"]:
        raise RuntimeError(f"the run failed: {report['reason']}")
    audit = report["audit"]
    return {
        "with_faults": with_faults, "seconds": seconds, "samples": round(samples),
        "samples_per_s": samples / seconds, "missing": audit["missing"], "twice": audit["duplicate"],
        "faults": report.get("recoveries", 0), "recovery_s": report.get("recovery_s"), "lost_s": lost, "paused": paused,
    }  # fmt: skip


def kept_within(lost_s: Mapping[str, Sequence[float]], every_s: float) -> float:
    """The share of its own rate that a run has kept under such faults."""
    each = [seconds for role in lost_s.values() for seconds in role]
    return 1 - statistics.fmean(each) / every_s


def table(lost_s: Mapping[str, Sequence[float]], every_s: float) -> str:
    """What the faults of each role cost, the dearest first."""
    lines = [
        f"  {role:10} {len(each):3} faults, {statistics.fmean(each):5.2f} s each, "
        f"kept {kept_within({role: each}, every_s):6.1%}"
        for role, each in sorted(lost_s.items(), key=lambda entry: -statistics.fmean(entry[1]))
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, default=Path("examples/digits/job.yaml"))
    parser.add_argument("--seconds", type=float, default=600.0, help="that are compared of each run; default 600")
    parser.add_argument(
        "--every", type=float, default=EVERY_S, help=f"seconds from fault to fault; default {EVERY_S:g}"
    )
    parser.add_argument("--calm-seconds", type=float, help="of the run without faults [--seconds]")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--policy", help="a policy with its defaults [that of the job file]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job file")
    parser.add_argument("--only", choices=get_args(FaultTarget), help="fault no other processes than these [all]")
    parser.add_argument("--brokers", type=int, default=1, help="of Kafka, of which one at a time is faulted; default 1")
    parser.add_argument("--standby", action="store_true", help="with a standby of the parameter server")
    parser.add_argument("--asap", action="store_true", help="a stream that is faster than the workers")
    args = parser.parse_args(argv)
    config = job_of(args.job, asap=args.asap, policy=args.policy, changes=args.set)
    options = {"only": args.only, "brokers": args.brokers, "standby": args.standby}
    runs: list[dict[str, Any]] = []
    for pair in range(args.pairs):
        for with_faults in (False, True) if pair % 2 == 0 else (True, False):
            seconds = args.seconds if with_faults else args.calm_seconds or args.seconds
            run = measure(config, seconds, args.every, pair, with_faults=with_faults, **options)
            runs.append({"pair": pair, **run})
            print(run, file=sys.stderr, flush=True)
    shares = [
        next(run["samples_per_s"] for run in runs if run["pair"] == pair and run["with_faults"])
        / next(run["samples_per_s"] for run in runs if run["pair"] == pair and not run["with_faults"])
        for pair in range(args.pairs)
    ]
    kept = statistics.median(shares)
    policy = config.training.policy.name
    facts = {
        "job": config.job,
        "policy": policy,
        "asap": args.asap,
        "seconds": args.seconds,
        "every_s": args.every,
        **options,
    }
    path = keep(
        f"faults-{policy}-{datetime.now():%Y%m%d-%H%M%S}", {**facts, "kept": kept, "shares": shares, "runs": runs}
    )
    faults = sum(run["faults"] for run in runs)
    lost: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for role, each in run["lost_s"].items():
            lost[role] += each
    each = [seconds for role in lost.values() for seconds in role]
    error = statistics.stdev(each) / math.sqrt(len(each)) / args.every
    print(f"by the run's own rate: kept {kept_within(lost, args.every):.1%} +- {error:.1%}\n{table(lost, args.every)}")
    paused = statistics.fmean(run["paused"] for run in runs if run["with_faults"])
    print(f"without any update for {paused:.1%} of the time")
    print(
        f"{policy}: throughput kept under {faults} faults, one in {args.every:g} s: {kept:.1%} "
        f"(torchft with DiLoCo: {TARGET:.1%}); {sum(run['missing'] for run in runs)} missing, "
        f"{sum(run['twice'] for run in runs)} twice; written: {path.name}"
    )
    return 0 if kept > TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
