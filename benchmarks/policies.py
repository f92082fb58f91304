"""Every policy with its defaults on four tasks: what it learns, and what that takes in time, bytes and money.

    python -m benchmarks.policies [--task NAME ...] [--policy NAME ...] [--seeds 3] [--processes 1] [--quick] [--docs]

Each run is a job in virtual time (`doll_lab.simulation.learning`) with the production code of workers and server, four
workers, and the same samples, in the same order, under every policy. A batch takes 1 s on average, with a log-normal
jitter, and a push takes the time of its bytes on a link of `LINK_BYTES_PER_S`. A run's score is that of its last
version. On electricity it is the mean over the versions of the second half: the stream drifts, so that a version knows
the newest days best, and which days these are at the end is the same luck for each seed. Where a policy's defaults are
not for a job, `doll.config.step_size.advice` says what to set: the run is then made again with it. Runs that are in the
results are not made again; delete benchmarks/results/policies.json for new ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from doll.theory.comparison import standard_error

from benchmarks import results

ROOT: Final = Path(__file__).resolve().parents[1]
DATA: Final = ROOT.parent / "shared" / "data"
WORKERS: Final = 4
JITTER: Final = 0.1  # standard deviation of the logarithm of a batch's seconds
LINK_BYTES_PER_S: Final = 12.5e6  # of each worker: 100 Mbit/s
USD_PER_H: Final = 0.286  # of a worker: `plan.on_demand_usd_per_h` of the paper's machines
POINTS: Final = 0.03  # how far a policy may be behind the best one
ADVISED: Final = " as advised"

POLICIES: Final = {  # label: section of the job file
    "doll": "{name: doll}",
    "doll recent": "{name: doll, staleness: 3}",
    "bsp": "{name: bsp}",
    "asp": "{name: asp}",
    "ssp": "{name: ssp}",
    "essp": "{name: essp}",
    "vap": "{name: vap}",
    "isp": "{name: isp}",
    "wsp": "{name: wsp}",
    "diloco": "{name: diloco}",
    "diloco sparse": "{name: diloco, local_batches: 8, density: 0.02}",
}


@dataclass(frozen=True)
class BenchTask:
    """A task of the table.

    Attributes:
        job: its job file, or the text of one.
        samples, quick_samples: samples that each run learns.
        metric: what the table shows, in percent.
        variance: of the targets, if the metric is the share of it that the model explains; 0: it is the accuracy.
        data: the file that it needs; a task without it is not run.
        evaluate_every: samples between two evaluations of which the score is the mean, over the second half of the
            run; 0: the score is that of the last version.
    """

    job: Path | str
    samples: int
    quick_samples: int
    metric: str = "accuracy"
    variance: float = 0.0
    overrides: tuple[str, ...] = ()
    data: Path | None = None
    evaluate_every: int = 0


_ELECTRICITY: Final = """
job: electricity
task: {class: "benchmarks.electricity:Electricity"}
data: {workers: 4, batch_size: 32}
source: {kind: python, of: "benchmarks.electricity:samples"}
arrivals: {process: asap}
training: {optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
evaluation: {max_samples: 4532}
"""

TASKS: Final = {
    "digits": BenchTask(ROOT / "examples/digits/job.yaml", 20_000, 20_000),
    "electricity": BenchTask(
        _ELECTRICITY, 20_000, 5_000, metric="accuracy over the second half", data=DATA / "electricity/elec.csv.gz",
        evaluate_every=384,
    ),
    "ml-1m": BenchTask(
        ROOT / "examples/ratings/job.yaml", 200_000, 50_000, metric="explained variance of the ratings",
        variance=1.2456, data=DATA / "movielens_1m/ratings.csv.gz", overrides=("data.samples_per_record=1",),
    ),
    "transformer": BenchTask(
        ROOT / "examples/characters/job.yaml", 3_200, 800, metric="characters predicted",
        overrides=("data.workers=4", "data.batch_size=4", "task.args.length=64", "task.args.width=32"),
    ),
}  # fmt: skip


class Run(NamedTuple):
    """What is run: a policy's label, a task's name, a seed, and whether with advice."""

    task: str
    policy: str
    seed: int
    advised: bool = False


@dataclass(frozen=True)
class Row:
    """One run. `score`: the metric, between 0 and 1. `seconds`: virtual time. `push_bytes`: of all workers. `commit`:
    that of the code that has made it. `error`: the standard error of a score that is the mean over versions; else 0."""

    task: str
    policy: str
    seed: int
    score: float
    loss: float
    samples: int
    updates: int
    seconds: float
    push_bytes: int
    usd: float
    advice: str | None
    commit: str = ""
    error: float = 0.0


def job_of(run: Run, *, quick: bool = False) -> Any:
    """Return the job of a run."""
    from doll.config import load, parse
    from doll.config.step_size import dana_settings, fresher_settings

    task = TASKS[run.task]
    samples = task.quick_samples if quick else task.samples
    overrides = [
        f"training.policy={POLICIES[run.policy]}", f"stop={{samples: {samples}}}", f"seed={run.seed}",
        "worker.max_pending_batches=400", "checkpoint.every_updates=20", *task.overrides,
    ]  # fmt: skip
    read: Any = parse if isinstance(task.job, str) else load
    config = read(task.job, overrides)
    advised = [*overrides, *dana_settings(config), *fresher_settings(config)]
    return followed(read(task.job, advised)) if run.advised else config


def followed(config: Any) -> Any:
    """Return the job with the lr and the numbers of updates of `doll.config.step_size.advice`."""
    from doll.config.step_size import lr_ratio, updates_per_round

    training, ratio = config.training, updates_per_round(config)
    changes: dict[str, Any] = {}
    if (factor := lr_ratio(config)) != 1:
        args = {**training.optimizer.args, "lr": factor * training.optimizer.args["lr"]}
        changes["optimizer"] = training.optimizer.model_copy(update={"args": args})
    if training.schedule:
        changes["schedule"] = [_stretched(part, ratio) for part in training.schedule]
    if training.ema is not None:
        changes["ema"] = training.ema.model_copy(update={"decay": training.ema.decay ** (1 / ratio)})
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def _stretched(part: Any, ratio: float) -> Any:
    def count(value: Any) -> Any:
        return max(1, round(value * ratio)) if isinstance(value, int) and not isinstance(value, bool) else value

    args = {name: count(value) for name, value in part.args.items()}
    return part.model_copy(update={"args": args, "updates": count(part.updates)})


def measure(run: Run, quick: bool = False) -> Row:
    """Run one job in this process, with one thread."""
    import torch
    from doll.config.step_size import advice
    from doll.optim.optimizer import DivergedError

    from doll_lab.simulation.learning import LearningWorld, jittered

    torch.set_num_threads(1)
    config, task = job_of(run, quick=quick), TASKS[run.task]
    world = LearningWorld(
        config, compute_s=jittered(1.0, sigma=JITTER, seed=run.seed), message_s=lambda size: size / LINK_BYTES_PER_S,
        evaluate_every=task.evaluate_every,
    )  # fmt: skip
    try:
        end = world.run()
        errors = [point.error for point in world.points if point.samples >= end.samples / 2]
        loss = statistics.mean(error.loss for error in errors)
        accuracies = [error.accuracy or 0.0 for error in errors]
        score = 1 - loss / task.variance if task.variance else statistics.mean(accuracies)
        error = standard_error(accuracies) if len(accuracies) > 1 else 0.0
    except DivergedError:
        loss, score, error = float("inf"), 0.0, 0.0
    return Row(
        run.task, run.policy + (ADVISED if run.advised else ""), run.seed, score, loss, world.engine.samples_total,
        world.engine.version, world.now, world.push_bytes, world.now / 3600 * config.data.workers * USD_PER_H,
        advice(config), results.commit(), error,
    )  # fmt: skip


def runs(tasks: Sequence[str], policies: Sequence[str], seeds: int) -> Iterator[Run]:
    """Yield what is to be run: with the defaults, and as advised where there is advice."""
    from doll.config.step_size import advice

    for seed in range(seeds):
        for task in tasks:
            for policy in policies:
                run = Run(task, policy, seed)
                yield run
                if advice(job_of(run)) is not None:
                    yield run._replace(advised=True)


def means(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the means over the seeds: by task and by policy."""
    tables: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        tables.setdefault(row.task, {}).setdefault(row.policy, []).append(row)
    return {
        task: {
            policy: {
                "score": statistics.mean(row.score for row in same),
                "spread": max(row.score for row in same) - min(row.score for row in same),
                "seeds": len(same),
                "seconds": statistics.mean(row.seconds for row in same),
                "megabytes": statistics.mean(row.push_bytes for row in same) / 1e6,
                "usd": statistics.mean(row.usd for row in same),
            }
            for policy, same in by_policy.items()
        }
        for task, by_policy in tables.items()
    }


class Lack(NamedTuple):
    """How far a policy is behind the best one: the mean over the seeds, and its standard error. That is 0 for one seed
    and one version."""

    mean: float
    error: float

    @property
    def is_far(self) -> bool:
        """Whether it is more than `POINTS` behind, and by more than the standard error."""
        return self.mean > POINTS + self.error


def behind(rows: Sequence[Row]) -> dict[str, Lack]:
    """Return how far each policy is behind the best one of the rows' task, compared seed by seed.

    The best of many noisy means is probably not as good as it looks. So the policy that is best over the other seeds
    stands for the best one at each seed. With one seed there is no such correction. All seeds learn the same stream, so
    they do not reduce the error of a mean over its versions: this is added to the error of the mean over the seeds.
    """
    scores: dict[str, dict[int, float]] = {}
    of_versions: dict[str, float] = {}
    for row in rows:
        scores.setdefault(row.policy, {})[row.seed] = row.score
        of_versions[row.policy] = max(row.error, of_versions.get(row.policy, 0.0))

    def best_at(seed: int) -> float:
        here = {policy: by_seed for policy, by_seed in scores.items() if seed in by_seed}
        others = {
            policy: [by_seed[other] for other in by_seed if other != seed] for policy, by_seed in here.items()
        }  # fmt: skip
        rated = {policy: statistics.mean(values) for policy, values in others.items() if values}
        best = max(rated or here, key=lambda policy: rated.get(policy, here[policy][seed]))
        return here[best][seed]

    best = {row.seed: best_at(row.seed) for row in rows}
    lacks = {policy: [best[seed] - by_seed[seed] for seed in by_seed] for policy, by_seed in scores.items()}
    of_seeds = {policy: standard_error(values) if len(values) > 1 else 0.0 for policy, values in lacks.items()}
    return {
        policy: Lack(statistics.mean(values), math.hypot(of_seeds[policy], of_versions[policy]))
        for policy, values in lacks.items()
    }


def text(rows: Sequence[Row]) -> str:
    """Return the tables in Markdown."""
    parts = [
        "Means over the seeds; in brackets the range. Behind the best: the mean of the differences seed by seed, and "
        "its standard error. Bold: more than 3 points and this error behind."
    ]
    for task, table in means(rows).items():
        same = [row for row in rows if row.task == task]
        lacks = behind(same)
        parts.append(
            f"\n**{task}** ({TASKS[task].metric}, %; commit {', '.join(sorted({row.commit for row in same}))})\n\n"
            "| policy | % | behind the best | time (s) | pushes (MB) | money ($) | seeds |\n"
            "|---|---|---|---|---|---|---|"
        )
        order = [label + end for label in POLICIES for end in ("", ADVISED) if label + end in table]
        for policy in order:
            row, lack = table[policy], lacks[policy]
            far = f"{round(100 * lack.mean, 1) + 0.0:.1f}"  # not -0.0
            error = f" ± {100 * lack.error:.1f}" if lack.error or row["seeds"] > 1 else ""
            name = policy.removesuffix(ADVISED)
            cells = [
                f"`{name}`{policy.removeprefix(name)}", f"{100 * row['score']:.1f} ({100 * row['spread']:.1f})",
                (f"**{far}**" if lack.is_far else far) + error,
                f"{row['seconds']:.0f}", f"{row['megabytes']:.3g}", f"{row['usd']:.4f}", f"{row['seeds']:.0f}",
            ]  # fmt: skip
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer samples; the results are not kept")
    parser.add_argument("--docs", action="store_true", help="write the tables to docs/benchmarks.md")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    tasks = [name for name in args.task if (path := TASKS[name].data) is None or path.exists()]
    if missing := sorted(set(args.task) - set(tasks)):
        print(f"not run, because ../shared/data is absent: {', '.join(missing)}")
    kept = results.RESULTS / "policies.json"
    rows: list[Row] = []
    if kept.exists() and not args.quick:
        rows = [Row(**row) for row in json.loads(kept.read_text(encoding="utf-8"))["rows"]]
    done = {(row.task, row.policy, row.seed) for row in rows}
    wanted = [
        run for run in runs(tasks, args.policy, args.seeds)
        if (run.task, run.policy + (ADVISED if run.advised else ""), run.seed) not in done
    ]  # fmt: skip
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(measure, run, args.quick) for run in wanted]):
            row = future.result()
            rows.append(row)
            print(f"{row.task} {row.policy} seed {row.seed}: {100 * row.score:.1f} %, {row.seconds:.0f} s", flush=True)
            if not args.quick:
                results.keep("policies", {"rows": [asdict(each) for each in rows]})
    print(text(rows))
    if args.docs:
        command = "python -m benchmarks.policies --docs"
        results.update_section(results.DOCS / "benchmarks.md", "policies", command, text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
