"""MLLess's filter on one task: runs under `isp` with several thresholds v, and sparse all-reduce on the same links.

Each v is a whole `doll up` of an example, to its loss, on this machine's own network and on slower ones, with the
weights in the flat vector and as tables. The table shows time, updates, and bytes both ways: what workers push, and
what they fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.config import load
from doll.run.local.up import run_up

from benchmarks.live import slow_network, sparse_allreduce
from benchmarks.live.experiment import Claim, Options, Report, Skip, mean_sd
from benchmarks.tables import Table

SETTINGS: Final = {
    "values": "0,0.3,0.7,1",  # thresholds v, the first of which is compared with
    "model": "dense,tables",
    "contributions": "float32,bf16",  # how numbers are sent, at every v
    "mbit_per_s": "0,1000,100",  # of each worker's link in each direction; 0: without a limit
    "rate_per_s": "",  # samples of each worker's stream; empty: as fast as they are taken
    "checkpoint_s": "20",  # between two checkpoints, each of which makes workers send what they hold back
    "all_reduce": "yes",  # sparse all-reduce by DistributedDataParallel on the same links, where they are available
    "samples": "",  # end of a run that does not reach the loss
}
ALL_REDUCE: Final = "all-reduce"  # in place of a kind of model
FEWER: Final = 2.5  # times fewer bytes, at least
MORE: Final = 20.0  # % more updates, at most
LITTLE: Final = 1.5  # times as fast, of what gains little


@dataclass(frozen=True)
class Learned:
    """What is learned.

    Attributes:
        short, title: its name in claims, and of the report.
        job: the job file.
        samples: what they are called.
        changes: of the job file: where its data is, and what is its own.
        gains_little: whether the paper says so of it.
    """

    short: str
    title: str
    job: Path
    samples: str
    changes: Callable[[Options], list[str]]
    gains_little: bool = False


class Row(NamedTuple):
    """One run.

    Attributes:
        is_reached: the held-out loss of the job's stop rule.
        loss: held out, the best.
        mbit_per_s: of each worker's link; 0: without a limit.
        contributions: how numbers are sent, `blobs.contributions`.
    """

    significance: float
    is_reached: bool
    time_s: float
    updates: int
    loss: float | None
    pushed_bytes: int
    fetched_bytes: int
    model: str = "dense"
    mbit_per_s: float = 0.0
    contributions: str = "float32"

    @classmethod
    def of(
        cls, significance: float, report: dict[str, Any], loss: float | None, model: str = "dense",
        mbit_per_s: float = 0.0, contributions: str = "float32",
    ) -> Row:  # fmt: skip
        """Of a run's report.json, where `loss` is to be reached."""
        sent = report["measures"]["bytes"]
        best = None if report["best_loss"] is None else float(report["best_loss"])  # of numpy in a report in memory
        is_reached = loss is not None and best is not None and best <= loss
        time_s, updates = report["training_seconds"], report["updates"]
        pushed, fetched = sent["pushed"], sent["fetched"]
        return cls(significance, is_reached, time_s, updates, best, pushed, fetched, model, mbit_per_s, contributions)

    @property
    def kind(self) -> tuple[str, str, float]:
        """What rows that are compared have in common."""
        return self.model, self.contributions, self.mbit_per_s

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


def pairs_of(rows: Sequence[Row], kind: tuple[str, str, float], value: float) -> list[tuple[Row, Row]]:
    """Each run of `value` with that of the first value and the same seed; a value whose last seeds are still to come
    has fewer."""
    here = [row for row in rows if row.kind == kind]
    first = [row for row in here if row.significance == rows[0].significance or row.model == ALL_REDUCE]
    return list(zip(first, [row for row in here if row.significance == value], strict=False))


def table(rows: Sequence[Row]) -> Table:
    """A line for each kind of run, means over its seeds; the last three columns compare with the first v."""
    columns = ("model", "numbers", "Mbit/s", "v", "reached", "time, s", "updates", "best loss")
    sizes = ("pushed MB", "fetched MB", "both MB")
    result = Table("To the held-out loss of the job", (*columns, *sizes, "fewer bytes", "more updates", "faster"))
    for kind, value in dict.fromkeys((row.kind, row.significance) for row in rows):
        model, numbers, mbit_per_s = kind
        pairs = pairs_of(rows, kind, value)
        mine = [row for _, row in pairs]
        losses = [row.loss for row in mine if row.loss is not None]
        result.rows.append(
            [
                model, numbers, f"{mbit_per_s:g}" if mbit_per_s else "no limit", f"{value:g}",
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


def claims(rows: Sequence[Row], learned: Learned) -> list[Claim]:
    """What v = 0.7 saves, for each kind of model and network, and whether it is faster than the all-reduce."""
    result = []
    for model, numbers in dict.fromkeys((row.model, row.contributions) for row in rows if row.model != ALL_REDUCE):
        for mbit_per_s in sorted({row.mbit_per_s for row in rows}):
            kind = (model, numbers, mbit_per_s)
            pairs = [pair for pair in pairs_of(rows, kind, 0.7) if all(row.is_reached for row in pair)]
            if not pairs or rows[0].significance:
                continue
            fewer = min(row.fewer(first) for first, row in pairs)
            more = max(row.more(first) for first, row in pairs)
            faster = [row.faster(first) for first, row in pairs]
            where = f"{mbit_per_s:g} Mbit/s" if mbit_per_s else "no limit"
            if learned.gains_little:
                bar = f"Fig. 7: it gains little with sparse samples; less than {LITTLE:g} times as fast"
                is_met, why = max(faster) < LITTLE, "it gains more"
            else:
                bar = f"our bar: at least {FEWER} times fewer bytes, at most {MORE:g} % more updates, faster where "
                bar += "limited"
                is_met = fewer >= FEWER and more <= MORE and (not mbit_per_s or min(faster) > 1)
                why = (
                    "each checkpoint makes workers send what they hold back, and fetch what the others held: models "
                    "with tables are evaluated at checkpoints"
                    if model == "tables"
                    else "the cause is not known"
                )
            result.append(
                Claim(
                    f"{learned.short}, {model}, {numbers}, {where}: v = 0.7 against v = 0, to the same loss", bar,
                    f"{fewer:.2f} times fewer, {more:+.1f} % updates, {min(faster):.2f} times as fast",
                    "reproduced" if is_met else "not reproduced", "" if is_met else why,
                )
            )  # fmt: skip
    for kind in dict.fromkeys(row.kind for row in rows if row.significance == 0.7):
        model, numbers, mbit_per_s = kind
        others = [row for row in rows if (row.model, row.mbit_per_s) == (ALL_REDUCE, mbit_per_s)]
        if not others or not mbit_per_s:
            continue
        mine = [row for row in rows if (row.kind, row.significance) == (kind, 0.7)]
        least = min(row.faster(other) for other, row in zip(others, mine, strict=False))
        fewer = min(row.fewer(other) for other, row in zip(others, mine, strict=False))
        why = (
            "a batch asks for its rows when it begins, one table after the other, and waits for them"
            if model == "tables"
            else "at this rate the bytes cost the all-reduce less than the way over the server costs"
        )
        result.append(
            Claim(
                f"{learned.short}, {model}, {numbers}, {mbit_per_s:g} Mbit/s: v = 0.7 against sparse all-reduce, to "
                "the same loss", "faster", f"{least:.2f} times as fast, {fewer:.2f} times fewer bytes",
                "reproduced" if least > 1 else "not reproduced", "" if least > 1 else why,
            )
        )  # fmt: skip
    return result


def changes_of(learned: Learned, options: Options, model: str) -> list[str]:
    """Of the job file."""
    asked = options.settings
    changes = [
        *learned.changes(options), f"training.optimizer={{name: sgd, lr: {asked['lr']}}}",
        f"data.batch_size={asked['batch_size']}", f"task.args.sparse={model == 'tables'}",
        f"arrivals.rate_per_s={rate}" if (rate := asked["rate_per_s"]) else "arrivals.process=asap",
        f"checkpoint.every_s={asked['checkpoint_s']}", "checkpoint.every_updates=1000000", "evaluation.every_s=0.2",
    ]  # fmt: skip
    if samples := "100000" if options.quick else asked["samples"]:
        changes.append(f"stop.samples={samples}")
    return changes


def run(learned: Learned, folder: Path, options: Options) -> Report:
    """All runs of an experiment."""
    asked = options.settings
    models, forms, limits = (asked[name].split(",") for name in ("model", "contributions", "mbit_per_s"))
    kinds = list(product(models, forms, map(float, limits)))
    job = load(learned.job, changes_of(learned, options, kinds[0][0]))
    rows: list[Row] = []
    for seed, (model, numbers, limit), value in product(options.seeds, kinds, map(float, asked["values"].split(","))):
        changes = [*changes_of(learned, options, model), f"seed={seed}", f"blobs.contributions={numbers}"]
        changes += [
            f"training.policy={{name: isp, contributions: sum, significance: {value!r}}}",
            *(slow_network.CHANGES if limit else ()),
        ]
        own = folder / f"{model}-{numbers}-{limit:g}-{value:g}-{seed}"
        own.mkdir()
        with slow_network.network(limit) as hook:
            report = run_up(load(learned.job, changes), own, hook=lambda *_, hook=hook: hook)
        rows.append(Row.of(value, report, job.stop.loss, model, limit, numbers))
        print(table(rows).text(), flush=True)
    notes = [
        f"{job.data.workers} workers, batches of {asked['batch_size']} {learned.samples}, SGD at {asked['lr']} of a "
        f"worker's mean gradient, a checkpoint every {asked['checkpoint_s']} s, or when a worker holds three quarters "
        f"of the {job.worker.max_pending_batches} batches that it may, at every v: under isp a checkpoint makes "
        "workers send what they hold back, so it is due at three quarters and not at half. Numbers: what workers push "
        "is float32, or rounded to bf16 while what rounding takes is held back (blobs.contributions); what they fetch "
        "is float32. Models with tables are evaluated at "
        "checkpoints, so they end at one. Where the network is limited, each worker has a link of its own: to Redis, "
        "or to the others with the all-reduce. The stream is faster than the workers; the all-reduce reads its "
        f"{learned.samples} from memory, and has no ledger, no checkpoints and no server."
    ]
    try:
        for seed, limit in product(
            options.seeds, sorted({limit for _, _, limit in kinds}) if asked["all_reduce"] == "yes" else ()
        ):
            changes = [*changes_of(learned, options, "tables"), f"seed={seed}"]
            report = sparse_allreduce.measure(learned.job, changes, lr=float(asked["lr"]), mbit_per_s=limit)
            rows.append(Row.of(0.0, report, job.stop.loss, ALL_REDUCE, limit))
    except Skip as exc:
        notes.append(f"The all-reduce was not run: {exc}.")
    count = len(options.seeds)
    spread = (
        "one run each, so the spread is not known" if count == 1 else f"± is the standard deviation of {count} runs"
    )
    return Report(
        f"MLLess: the significance filter on {learned.title}",
        [table(rows)],
        options.seeds,
        spread,
        claims=claims(rows, learned),
        notes=notes,
        data={"rows": [row._asdict() for row in rows]},
    )
