"""MLLess's filter on logistic regression of Criteo's clicks under `isp` (benchmarks.live.mlless_filter).

The file has 7,200 of the 47 million clicks that MLLess learns from, so the stream repeats it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.live import mlless_filter
from benchmarks.live.experiment import JOBS, Options, Report
from benchmarks.live.mlless_filter import Learned

NAME: Final = "mlless_clicks"
PAPER: Final = "MLLess, sections 4.2 and 6.3"
SETTINGS: Final = {
    **mlless_filter.SETTINGS,
    "batch_size": "448",  # clicks: a quarter of a worker's, and a whole number of records
    "lr": "0.05",  # at ten times that the loss oscillates
    "loss": "0.4965",  # held out; to say 0.215 for each click, the share of the clicked ones, has 0.53
}
JOB: Final = JOBS / "clicks" / "job.yaml"


def _changes(options: Options) -> list[str]:
    train = options.file("criteo_sample/train.tsv.gz", "clicks in Criteo's format, lines of 40 cells")
    held_out = options.file("criteo_sample/dev.tsv.gz", "held-out clicks in the same format")
    samples = options.settings["samples"] or "1000000"
    return [
        "source.of=task.py:from_file", "source.in_order=true", f"source.args={{clicks_path: {train}, repeat: true}}",
        f"task.args.holdout_path={held_out}",
        "training.reduction=mean", "data.workers=4", f"stop={{loss: {options.settings['loss']}, samples: {samples}}}",
    ]  # fmt: skip


LEARNED: Final = Learned("LR", "Criteo's clicks", JOB, "clicks", _changes, gains_little=True)


def run(folder: Path, options: Options) -> Report:
    return mlless_filter.run(LEARNED, folder, options)
