"""Runs side by side: the runs of one `doll compare`, or any other runs in one folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from doll.config import load
from doll.dashboard.sources import EndedRun, file_stamp
from doll.errors import ConfigError, DollError
from doll.monitor.views.comparison import Comparison, PolicyRun, comparison_page, read_run, workers_usd_per_h
from doll.process.files import read_json

MAX_RUNS: Final = 50  # only the newest ones are shown
_COMPARISON: Final = "comparison.json"
_JOB: Final = "job.yaml"
_FILES: Final = ("report.json", "updates.csv", "evaluations.csv")


def is_runs_folder(folder: Path) -> bool:
    """Return whether a folder contains runs or belongs to a comparison, and is not a run folder itself."""
    return not (folder / _JOB).exists() and ((folder / _COMPARISON).is_file() or any(folder.glob(f"*/{_JOB}")))


class RunsFolder:
    """The runs in a folder. Unchanged files are not read again. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[Any, str, PolicyRun]] = {}
        self._opened: dict[str, EndedRun] = {}

    def page(self) -> dict[str, Any]:
        """Return the page of the runs; if they cannot be compared, the page states the reason."""
        try:
            return comparison_page(self.comparison())
        except DollError as error:
            return comparison_page(Comparison(self._folder.name, (), notes=(str(error),)))

    def comparison(self) -> Comparison:
        """Return the current runs, the earliest first.

        Raises:
            ConfigError: `comparison.json` does not have the format of this release.
        """
        saved = self._folder / _COMPARISON
        plain = read_json(saved) if saved.exists() else {}
        try:
            rows = [(Path(row["folder"]).name, str(row["policy"])) for row in plain.get("policies", ())]
            not_run = [*map(str, plain.get("not_run", ()))]
            seeds = [*map(int, plain.get("seeds", ()))]  # a comparison of an earlier release has none
            target = float(plain["target_loss"]) if plain.get("target_given") else None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{saved}: expected a comparison of this release ({type(error).__name__}: {error})"
            ) from error
        paths = sorted(self._folder.glob(f"*/{_JOB}"), key=lambda path: file_stamp(path) or (0, 0))
        labels = dict(rows)
        # In the table, a run that failed at its start has no folder; the current run has no row.
        others = iter([*(policy for name, policy in rows if not name), *not_run])
        for path in paths:
            if path.parent.name not in labels:
                labels[path.parent.name] = next(others, path.parent.name)
        read = [self._run(path.parent, labels[path.parent.name]) for path in paths[-MAX_RUNS:]]
        notes = [*map(str, plain.get("notes", ()))]
        if not plain and len({job for job, _ in read}) > 1:  # losses of different jobs cannot be compared
            target = math.nan
        if len(paths) > MAX_RUNS:
            notes.append(f"{len(paths) - MAX_RUNS} older runs are left out")
        job = str(plain.get("job", self._folder.name))
        wanted = list(dict.fromkeys([*(policy for _, policy in rows), *not_run]))
        return Comparison(job, [run for _, run in read], target, wanted, notes, seeds)

    def opened(self, name: str) -> EndedRun | None:
        """Return the run in the folder of this name; None if it does not exist or has not ended.

        Raises:
            ConfigError: its report cannot be read.
        """
        if name not in self._opened:
            folder = next((path.parent for path in self._folder.glob(f"*/{_JOB}") if path.parent.name == name), None)
            if folder is None or not (folder / _FILES[0]).exists():
                return None
            self._opened[name] = EndedRun(load(folder / _JOB), folder)
        return self._opened[name]

    def _run(self, folder: Path, label: str) -> tuple[str, PolicyRun]:
        """Return the job's name, and the run."""
        stamp = (label, *(file_stamp(folder / name) for name in _FILES))
        kept = self._read.get(folder)
        if kept is None or kept[0] != stamp:
            self._read[folder] = kept = (stamp, *_read(folder, label))
        return kept[1:]


def _read(folder: Path, label: str) -> tuple[str, PolicyRun]:
    try:
        config = load(folder / _JOB)
        return config.job, read_run(label, folder, usd_per_h=workers_usd_per_h(config), seed=config.seed)
    except DollError as error:
        return "", PolicyRun(label, str(error), ok=False, folder=str(folder))
