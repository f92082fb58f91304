"""MLLess's filter on its own main workload: PMF of MovieLens 1M under `isp` (benchmarks.live.mlless_filter)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.live import mlless_filter
from benchmarks.live.experiment import JOBS, Options, Report
from benchmarks.live.mlless_filter import Learned

NAME: Final = "mlless_ratings"
PAPER: Final = "MLLess, sections 4.2 and 6.3"
SETTINGS: Final = {
    **mlless_filter.SETTINGS,
    "batch_size": "6272",  # ratings: MLLess's 6 K, and a whole number of records
    "lr": "60",  # at twice that the factors diverge
}
JOB: Final = JOBS / "ratings" / "job.yaml"


def _changes(options: Options) -> list[str]:
    path = options.file("movielens_1m/ratings.csv.gz", "the ratings of MovieLens 1M (user,item,rating,timestamp)")
    return [f"source.args.ratings_path={path}", f"task.args.ratings_path={path}"]


LEARNED: Final = Learned("PMF", "MovieLens 1M", JOB, "ratings", _changes)


def run(folder: Path, options: Options) -> Report:
    return mlless_filter.run(LEARNED, folder, options)
