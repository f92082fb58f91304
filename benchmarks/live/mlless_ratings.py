"""MLLess's filter on its own main workload: PMF of MovieLens 1M under `isp` with several thresholds v.

Each v is a whole `doll up` of the example `ratings`, to its `stop.loss`, on this machine's own network and on a slow
one, with the factors in the flat vector and as tables. The table shows time, updates, and bytes both ways: what workers
push, and what they fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.config import JobConfig, load
from doll.run.local.up import run_up

from benchmarks.live import slow_network, sparse_allreduce
from benchmarks.live.experiment import JOBS, Claim, Options, Report, Skip, mean_sd
from benchmarks.tables import Table

NAME: Final = "mlless_ratings"
PAPER: Final = "MLLess, sections 4.2 and 6.3"
SETTINGS: Final = {
    "values": "0,0.7",  # thresholds v, the first of which is compared with
    "factors": "dense,tables",
    "mbit_per_s": "0,100",  # of each worker's link in each direction; 0: without a limit
    "batch_size": "6272",  # ratings: MLLess's 6 K, and a whole number of records
    "lr": "60",  # of a worker's mean gradient: at twice that the factors diverge
    "rate_per_s": "",  # ratings of each worker's stream; empty: as fast as they are taken
    "checkpoint_s": "20",  # between two checkpoints, each of which makes workers send what they hold back
    "all_reduce": "yes",  # sparse all-reduce by DistributedDataParallel on the same links, where they are available
    "samples": "",  # end of a run that does not reach the loss
}
JOB: Final = JOBS / "ratings" / "job.yaml"
ALL_REDUCE: Final = "all-reduce"  # in place of a kind of factors
FEWER: Final = 2.5  # times fewer bytes, at least
MORE: Final = 20.0  # % more updates, at most


class Row(NamedTuple):
    """One run.

    Attributes:
        is_reached: the held-out loss of the job's stop rule.
        loss: held out, the best.
        mbit_per_s: of each worker's link; 0: without a limit.
    """

    significance: float
    is_reached: bool
    time_s: float
    updates: int
    loss: float | None
    pushed_bytes: int
    fetched_bytes: int
    factors: str = "dense"
    mbit_per_s: float = 0.0

    @classmethod
    def of(
        cls, significance: float, report: dict[str, Any], loss: float | None, factors: str = "dense",
        mbit_per_s: float = 0.0,
    ) -> Row:  # fmt: skip
        """Of a run's report.json, where `loss` is to be reached."""
        sent = report["measures"]["bytes"]
        best = None if report["best_loss"] is None else float(report["best_loss"])  # of numpy in a report in memory
        is_reached = loss is not None and best is not None and best <= loss
        time_s, updates = report["training_seconds"], report["updates"]
        pushed, fetched = sent["pushed"], sent["fetched"]
        return cls(significance, is_reached, time_s, updates, best, pushed, fetched, factors, mbit_per_s)

    @property
    def both_bytes(self) -> int:
        return self.pushed_bytes + self.fetched_bytes

    def fewer(self, first: Row) -> float:
        """How many times fewer bytes than in `first`."""
        return first.both_bytes / max(self.both_bytes, 1)

    def more(self, first: Row) -> float:
        """How many % more updates."""
        return 100 * (self.updates / max(first.updates, 1) - 1)

    def faster(self, first: Row) -> float:
        return first.time_s / max(self.time_s, 1e-9)


def pairs_of(rows: Sequence[Row], factors: str, mbit_per_s: float, value: float) -> list[tuple[Row, Row]]:
    """Each run of `value` with that of the first value and the same seed; a value whose last seeds are still to come
    has fewer."""
    here = [row for row in rows if (row.factors, row.mbit_per_s) == (factors, mbit_per_s)]
    first = [row for row in here if row.significance == rows[0].significance]
    return list(zip(first, [row for row in here if row.significance == value], strict=False))


def table(rows: Sequence[Row]) -> Table:
    """A line for each kind of run, means over its seeds; the last three columns compare with the first v."""
    columns = ("factors", "Mbit/s", "v", "reached", "time, s", "updates", "best loss")
    sizes = ("pushed MB", "fetched MB", "both MB")
    result = Table("To the held-out loss of the job", (*columns, *sizes, "fewer bytes", "more updates", "faster"))
    for factors, mbit_per_s, value in dict.fromkeys((row.factors, row.mbit_per_s, row.significance) for row in rows):
        pairs = pairs_of(rows, factors, mbit_per_s, value)
        mine = [row for _, row in pairs]
        losses = [row.loss for row in mine if row.loss is not None]
        result.rows.append(
            [
                factors, f"{mbit_per_s:g}" if mbit_per_s else "no limit", f"{value:g}",
                f"{sum(row.is_reached for row in mine)} of {len(mine)}", mean_sd([row.time_s for row in mine], 1),
                mean_sd([row.updates for row in mine], 0), mean_sd(losses, 4) if losses else "?",
                *(mean_sd([getattr(row, f"{name}_bytes") / 1e6 for row in mine], 1)
                  for name in ("pushed", "fetched", "both")),
                mean_sd([row.fewer(first) for first, row in pairs], 2) + " x",
                mean_sd([row.more(first) for first, row in pairs], 1) + " %",
                mean_sd([row.faster(first) for first, row in pairs], 2) + " x",
            ]
        )  # fmt: skip
    return result


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What v = 0.7 saves, for each kind of factors, and whether it is faster on the slowest network."""
    result = []
    for factors in dict.fromkeys(row.factors for row in rows if row.factors != ALL_REDUCE):
        for mbit_per_s in sorted({row.mbit_per_s for row in rows}):
            pairs = [pair for pair in pairs_of(rows, factors, mbit_per_s, 0.7) if all(row.is_reached for row in pair)]
            if not pairs or rows[0].significance:
                continue
            fewer = min(row.fewer(first) for first, row in pairs)
            more = max(row.more(first) for first, row in pairs)
            faster = min(row.faster(first) for first, row in pairs)
            where = f"{mbit_per_s:g} Mbit/s" if mbit_per_s else "no limit"
            what = f"PMF, {factors}, {where}: v = 0.7 against v = 0, to the same loss"
            bar = f"at least {FEWER} times fewer bytes, at most {MORE:g} % more updates, faster where limited"
            is_met = fewer >= FEWER and more <= MORE and (not mbit_per_s or faster > 1)
            why = (
                "with tables a worker fetches the rows that its batch needs, at v = 0 as well, and a row has changed "
                "where one of its numbers has: the filter saves what is pushed"
                if factors == "tables"
                else "the cause is not known"
            )
            result.append(
                Claim(
                    what, f"our bar: {bar}",
                    f"{fewer:.2f} times fewer, {more:+.1f} % updates, {faster:.2f} times as fast",
                    "reproduced" if is_met else "not reproduced", "" if is_met else why,
                )
            )  # fmt: skip
    for factors, mbit_per_s in dict.fromkeys((row.factors, row.mbit_per_s) for row in rows if row.significance == 0.7):
        others = [row for row in rows if (row.factors, row.mbit_per_s) == (ALL_REDUCE, mbit_per_s)]
        if not others or not mbit_per_s:
            continue
        mine = [row for row in rows if (row.factors, row.mbit_per_s, row.significance) == (factors, mbit_per_s, 0.7)]
        faster = min(row.faster(other) for other, row in zip(others, mine, strict=False))
        fewer = min(row.fewer(other) for other, row in zip(others, mine, strict=False))
        why = "a batch asks for its rows when it begins, one table after the other, and waits for them"
        result.append(
            Claim(
                f"PMF, {factors}, {mbit_per_s:g} Mbit/s: v = 0.7 against sparse all-reduce, to the same loss", "faster",
                f"{faster:.2f} times as fast, {fewer:.2f} times fewer bytes",
                "reproduced" if faster > 1 else "not reproduced",
                "" if faster > 1 else why,
            )
        )  # fmt: skip
    return result


def changes_of(options: Options, job: JobConfig, factors: str) -> list[str]:
    """Of the job file."""
    ratings = options.file("movielens_1m/ratings.csv.gz", "the ratings of MovieLens 1M (user,item,rating,timestamp)")
    asked = options.settings
    changes = [
        f"source.path={ratings}", f"task.args.ratings_path={ratings}", f"training.optimizer.lr={asked['lr']}",
        f"data.batch_size={asked['batch_size']}", f"task.args.sparse={factors == 'tables'}",
        f"arrivals.rate_per_s={rate}" if (rate := asked["rate_per_s"]) else "arrivals.process=asap",
        f"checkpoint.every_s={asked['checkpoint_s']}", "checkpoint.every_updates=1000000", "evaluation.every_s=0.2",
    ]  # fmt: skip
    if samples := "100000" if options.quick else asked["samples"]:
        changes.append(f"stop.samples={samples}")
    return changes


def run(folder: Path, options: Options) -> Report:
    job, asked = load(JOB), options.settings
    kinds = list(product(asked["factors"].split(","), map(float, asked["mbit_per_s"].split(","))))
    rows: list[Row] = []
    for seed, (factors, limit), value in product(options.seeds, kinds, map(float, asked["values"].split(","))):
        changes = [*changes_of(options, job, factors), f"seed={seed}"]
        changes += [f"training.policy={{name: isp, significance: {value!r}}}", *(slow_network.CHANGES if limit else ())]
        own = folder / f"{factors}-{limit:g}-{value:g}-{seed}"
        own.mkdir()
        with slow_network.network(limit) as hook:
            report = run_up(load(JOB, changes), own, hook=lambda *_, hook=hook: hook)
        rows.append(Row.of(value, report, job.stop.loss, factors, limit))
        print(table(rows).text(), flush=True)
    notes = [
        f"{job.data.workers} workers, batches of {asked['batch_size']} ratings, a checkpoint every "
        f"{asked['checkpoint_s']} s. Where the network is limited, each worker has a link of its own: to Redis, or "
        "to the others with the all-reduce. The stream is faster than the workers; the all-reduce reads its "
        "ratings from memory, and has no ledger, no checkpoints and no server."
    ]
    try:
        for seed, limit in product(
            options.seeds, sorted({limit for _, limit in kinds}) if asked["all_reduce"] == "yes" else ()
        ):
            changes = [*changes_of(options, job, "tables"), f"seed={seed}"]
            report = sparse_allreduce.measure(JOB, changes, lr=float(asked["lr"]), mbit_per_s=limit)
            rows.append(Row.of(0.0, report, job.stop.loss, ALL_REDUCE, limit))
    except Skip as exc:
        notes.append(f"The all-reduce was not run: {exc}.")
    count = len(options.seeds)
    spread = (
        "one run each, so the spread is not known" if count == 1 else f"± is the standard deviation of {count} runs"
    )
    return Report(
        "MLLess: the significance filter on MovieLens 1M",
        [table(rows)],
        options.seeds,
        spread,
        claims=claims(rows),
        notes=notes,
        data={"rows": [row._asdict() for row in rows]},
    )
