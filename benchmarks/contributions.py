"""Contributions in float32, bf16 and fp16: held-out accuracy and bytes: `python -m benchmarks.contributions`.

The streams, batches, models, updates and blobs of the examples `digits` and `emnist` (the small network), in one
process: each worker has an error of its own, and a blob is decoded as the server does it. The same batches make the
same updates in each form, so the runs differ by nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

from doll.config import load
from doll.consumers.compute.error_feedback import ErrorFeedback
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.evaluation.heldout import HeldOut
from doll.model.flat_model import build
from doll.optim.optimizer import Optimizer
from doll.producers.sources import open_streams
from doll.storage.contributions import Compressor, decode_contribution
from doll.task.base import load_task

from benchmarks.results import keep

Form = Literal["float32", "bf16", "fp16"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)
EXAMPLES: Final = {"digits": [], "emnist": ["task.args.small=true"]}


def learn(example: str, form: Form, updates: int, seed: int) -> dict[str, Any]:
    """One run; the mean accuracy of its last five looks, and the bytes of its contributions."""
    config = load(Path("examples") / example / "job.yaml", [*EXAMPLES[example], f"seed={seed}"])
    task = load_task(config)
    model, replica = build(config, task), build(config, task)
    optimizer = Optimizer(model, config.training.optimizer)
    computer, held_out = GradientComputer(task, replica), HeldOut(task, 2000)
    workers, size = config.data.workers, config.data.batch_size
    streams = open_streams(config, [0] * workers)
    rounding: list[Callable[..., Any] | None] = [
        None if form == "float32" else ErrorFeedback(form).round for _ in range(workers)
    ]
    compressors = [Compressor("j", model.num_parameters, rounding=each) for each in rounding]
    num_bytes, looks = 0, []
    for update in range(updates):
        computer.load(optimizer.weights)
        samples = 0
        for worker in range(workers):
            values = list(islice(streams[worker], size))
            batch = decode_records(
                task, RawRecords(range(len(values)), values), samples_per_record=1, max_record_bytes=1 << 20
            )
            blob = b"".join(compressors[worker].compress(computer.compute(*batch.samples).values, version=update))
            num_bytes += len(blob)
            got = decode_contribution(blob, model.num_parameters, job="j", version=update, numel=model.flat.numel())
            optimizer.add(got.values)
            samples += batch.num_samples
        optimizer.apply([], 1 / samples, samples)
        if update >= updates * 3 // 4 and (update + 1) % (updates // 20) == 0:
            looks.append(held_out.evaluate(model.module).accuracy or 0.0)
    return {"accuracy": sum(looks) / len(looks), "megabytes": num_bytes / 1e6}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contributions", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(argv)
    rows = []
    for example in args.examples:
        for seed in args.seeds:
            row: dict[str, Any] = {"example": example, "seed": seed}
            for form in FORMS:
                begun_s = time.monotonic()
                result = learn(example, form, args.updates, seed)
                row |= {f"{form} accuracy": round(result["accuracy"], 4), f"{form} MB": round(result["megabytes"], 2)}
                row[f"{form} s"] = round(time.monotonic() - begun_s, 1)
            rows.append(row)
            print(row, flush=True)
    for example in args.examples:
        mine = [row for row in rows if row["example"] == example]
        for form in FORMS[1:]:
            points = [100 * (row[f"{form} accuracy"] - row["float32 accuracy"]) for row in mine]
            share = sum(row[f"{form} MB"] for row in mine) / sum(row["float32 MB"] for row in mine)
            each = ", ".join(f"{number:+.2f}" for number in points)
            print(f"{example}, {form}: {each} points of float32 by seed, {share:.3f} of its bytes")
    print(keep(f"contributions-{datetime.now():%Y%m%d-%H%M%S}", {"updates": args.updates, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
