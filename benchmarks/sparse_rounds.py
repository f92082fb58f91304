"""Bytes and time to the same loss: sparse rounds against `doll` and dense rounds, on jobs that learn in virtual time.

    python -m benchmarks.sparse_rounds --tasks digits --seeds 3 --message 40

A batch takes one unit of time. `--message` is the time that a worker's link needs for all parameters in 32 bits; a
smaller push takes less. The target is the lowest held-out loss that all policies of a task and a seed reach. Bytes are
those of pushes, with the rests that are sent before checkpoints. `--docs` puts the newest results of all tasks into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from doll.config import load

from benchmarks.results import DOCS, RESULTS, keep, update_section
from doll_lab.simulation.learning import LearningWorld, Point

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# A checkpoint every 20 rounds: for it, a worker sends once what it holds back.
COMMON = [
    "checkpoint.every_s=1000000", "checkpoint.every_updates=20", "worker.max_pending_batches=256",
    "evaluation.max_samples=1000",
]  # fmt: skip
POLICIES = {
    "doll": [],
    "dense": ["training.policy={name: diloco, local_batches: 8, outer_momentum: 0, outer_lr: 1}"],
    "sparse": ["training.policy={name: diloco, local_batches: 8, density: 0.02}"],
}
# The samples of a run, and what differs from the example's job file.
TASKS: dict[str, tuple[int, list[str]]] = {
    "digits": (40_000, []),
    "emnist": (20_000, ["task.args.small=true", "data.samples_per_record=1"]),
    "characters": (6_400, ["training.policy.group_size=2"]),
}


def run(task: str, policy: str, seed: int, message: float, samples: int) -> dict[str, Any]:
    """One run, with the held-out error at twenty points."""
    overrides = [*TASKS[task][1], *POLICIES[policy], *COMMON, f"seed={seed}", f"stop={{samples: {samples}}}"]
    config = load(EXAMPLES / task / "job.yaml", overrides)
    dense_bytes = [0]
    world = LearningWorld(
        config, message_s=lambda size: message * size / dense_bytes[0], evaluate_every=max(1, samples // 20)
    )
    dense_bytes[0] = 4 * world.num_values
    world.run()
    return {
        "policy": policy, "seed": seed, "message": message, "dense_bytes": dense_bytes[0],
        "points": [_row(point) for point in world.points],
    }  # fmt: skip


def _row(point: Point) -> dict[str, float]:
    return {
        "time": point.time_s, "samples": point.samples, "loss": point.error.loss,
        "accuracy": point.error.accuracy or 0.0, "bytes": point.push_bytes,
    }  # fmt: skip


def rows(results: list[dict[str, Any]]) -> list[str]:
    """A row of the table for each policy: medians over the seeds, with the accuracies' range in points behind doll."""
    lines = []
    by_seed: dict[int, dict[str, dict[str, Any]]] = {}
    for result in results:
        by_seed.setdefault(result["seed"], {})[result["policy"]] = result
    reached: dict[str, list[dict[str, float]]] = {}
    for of in by_seed.values():
        target = max(min(point["loss"] for point in result["points"]) for result in of.values())
        for policy, result in of.items():
            first = next(point for point in result["points"] if point["loss"] <= target)
            reached.setdefault(policy, []).append(
                {**first, "target": target, "last": result["points"][-1]["accuracy"], "dense": result["dense_bytes"]}
            )
    for policy, items in reached.items():
        base = reached["doll"]
        fewer = [doll["bytes"] / item["bytes"] for doll, item in zip(base, items, strict=True)]
        sooner = [doll["time"] / item["time"] for doll, item in zip(base, items, strict=True)]
        behind = [100 * (doll["last"] - item["last"]) for doll, item in zip(base, items, strict=True)]
        middle = {key: statistics.median(item[key] for item in items) for key in items[0]}
        lines.append(
            f"{policy} | {middle['target']:.3f} | {middle['bytes'] / 1e6:.3g} | {min(fewer):.3g} to {max(fewer):.3g} | "
            f"{middle['time']:.0f} | {min(sooner):.2f} to {max(sooner):.2f} | {100 * middle['last']:.1f} | "
            f"{min(behind):+.1f} to {max(behind):+.1f}"
        )
    return lines


def table(names: list[str]) -> str:
    lines = [
        "| task, message | policy | loss | MB to it | times fewer | time to it | times sooner | accuracy, % "
        "| points behind `doll` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        title = f"{kept['task']}, {kept['message']:g} ({kept['samples']:,} samples, {kept['seeds']} seeds)"
        lines += [f"| {title} | {row} |" for row in rows(kept["runs"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--message", type=float, default=40.0)
    parser.add_argument("--samples", type=int, default=0, help="of a run; 0: those of the task")
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for task in [] if args.docs else args.tasks:
        samples, results = args.samples or TASKS[task][0], []
        for seed in range(args.seeds):
            for policy in args.policies:
                results.append(run(task, policy, seed, args.message, samples))
                last = results[-1]["points"][-1]
                print(task, seed, policy, f"{last['loss']:.3f}", f"{last['accuracy']:.3f}", last["bytes"], flush=True)
            name = f"sparse-rounds-{task}-{args.message:g}"
            keep(name, {"task": task, "message": args.message, "samples": samples, "seeds": seed + 1, "runs": results})
            print("\n".join(rows(results)), flush=True)
    if args.docs:
        names = sorted(path.stem for path in RESULTS.glob("sparse-rounds-*.json"))
        update_section(
            DOCS / "benchmarks.md", "sparse rounds", "python -m benchmarks.sparse_rounds --docs", table(names)
        )


if __name__ == "__main__":
    main()
