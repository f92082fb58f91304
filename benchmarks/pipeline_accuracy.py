"""Virtual workers learn as undivided ones: held-out accuracy after the same number of samples, over Kafka.

    python -m benchmarks.pipeline_accuracy [--samples 120000] [--seeds 0 1 2] [--out results.json]

Two workers, waves of four batches, digits by three hidden layers. As undivided workers; as pipelines of three stages on
three processes each; and the same with the second one at half the speed. Accuracy is that of the last version, medians
over the seeds. The goal: pipelines within one point of undivided workers with the same clock distance D.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from doll.config import parse
from doll.run.local.up import run_up

GOAL: Final = 0.01
JOB: Final = """
job: accuracy
task: {class: "examples.digits.task:Digits", args: {hidden: [128, 64, 64]}}
data: {workers: 2, batch_size: 32}
source: {kind: python, of: examples.digits.task:samples}
arrivals: {process: asap}
training:
  policy: {name: wsp, contributions: sum, wave_batches: 4}
  optimizer: {name: sgd, lr: 0.02}
evaluation: {every_s: 2, max_samples: 1000}
"""
SLOW: Final = "worker.pipeline.devices=[[cpu, cpu, cpu], [{slowdown: 2}, {slowdown: 2}, {slowdown: 2}]]"
KINDS: Final = {
    "undivided": (),
    "pipelines": ("worker.pipeline.stages=3",),
    "unequal pipelines": ("worker.pipeline.stages=3", SLOW),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=120_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--distances", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for distance in args.distances:
        for kind, overrides in KINDS.items():
            reports = [_run(args.samples, seed, distance, overrides) for seed in args.seeds]
            audits = [report["audit"] for report in reports]
            rows.append({
                "D": distance, "workers": kind,
                "accuracy": statistics.median(report["accuracy"] for report in reports),
                "accuracies": [report["accuracy"] for report in reports],
                "updates_per_s": statistics.median(report["update_rate_measured_per_s"] for report in reports),
                "missing": sum(audit["missing"] for audit in audits),
                "twice": sum(audit["duplicate"] for audit in audits),
            })  # fmt: skip
            print(rows[-1], file=sys.stderr)
    print("| D | workers | accuracy | of each seed | updates/s | missing, twice |\n|---|---|---|---|---|---|")
    is_met = True
    for row in rows:
        undivided = next(each["accuracy"] for each in rows if each["D"] == row["D"])
        is_met &= row["accuracy"] >= undivided - GOAL
        each_seed = ", ".join(f"{accuracy:.3f}" for accuracy in row["accuracies"])
        print(
            f"| {row['D']} | {row['workers']} | {row['accuracy']:.3f} | {each_seed} | {row['updates_per_s']:.0f} | "
            f"{row['missing']}, {row['twice']} |"
        )
    print(f"pipelines within {GOAL} of undivided workers: {'met' if is_met else 'missed'}")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _run(samples: int, seed: int, distance: int, overrides: Sequence[str]) -> dict[str, Any]:
    config = parse(
        JOB,
        [
            *overrides, f"stop.samples={samples}", f"seed={seed}",
            f"training.policy.clock_distance={distance}",
        ],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="doll-accuracy-") as folder:
        return run_up(config, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
