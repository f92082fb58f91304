"""Starts the challengers of a run: second jobs on its stream, after drifts (`drift.challenger`).

A challenger is a `doll up` of its own, at a lower priority: what happens to it does not reach the job. The decision
about a drift is in `challengers.json` of the run folder before the process starts, so it starts at most once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from doll.config import JobConfig, load
from doll.local.processes import describe_exit, end, spawn, tail
from doll.monitor.state.challengers import Challenge, NoticedDrift, challenger_arguments, decide, settings_of
from doll.process.files import unwritable, write_atomically
from doll.run.folder import RunFolder, display_path
from doll.services import Services

FILE: Final = "challengers.json"
FOLDER: Final = "challengers"
_GRACE_S: Final = 30.0  # for the last checkpoint of a challenger
_COMPARE_S: Final = 86_400  # after which two versions that do not differ are not compared any more
# With a niceness of 10, a full machine did not start a challenger in two minutes.
_PROGRAM: Final = ("nice", "-n", "5", sys.executable, "-m", "doll")


def check_recipe(config: JobConfig) -> None:
    """Raise ConfigError if the job file of the challengers cannot be used."""
    if (settings := settings_of(config)) is not None and settings.job is not None:
        load(config.path(settings.job))


@dataclass
class _Running:
    """The processes of a challenger and of its comparison with the job; None: not begun, or its end is noted."""

    version: int
    folder: Path
    compare_at_s: float
    job: subprocess.Popen[bytes] | None
    comparison: subprocess.Popen[bytes] | None = None


class LocalChallengers:
    """The challengers of one run. `add_event` shows an event and stores it."""

    def __init__(
        self, config: JobConfig, folder: RunFolder, services: Services, add_event: Callable[[str], object]
    ) -> None:
        self._config, self._folder, self._services, self._add_event = config, folder, services, add_event
        self._settings, self._path = settings_of(config), folder.path / FILE
        self._running: list[_Running] = []
        self._decided: list[Challenge] = []
        self._seen = 0
        try:
            if self._settings is not None and self._path.exists():
                self._decided = msgspec.json.decode(self._path.read_bytes(), type=list[Challenge])
        except (OSError, msgspec.MsgspecError) as exc:  # which drifts have had theirs is not known
            self._settings = None
            add_event(f"no challenger is started: cannot read {display_path(self._path)}: {exc}")

    def tick(self, drifts: Sequence[NoticedDrift]) -> None:
        """Decide about the drifts that were added since the last call, and follow the processes. Errors are events."""
        if (settings := self._settings) is None:
            return
        new, self._seen = drifts[self._seen :], len(drifts)
        try:
            for drift in new:
                decision = decide(settings, drift, self._decided, time.time())
                if decision is not None and not decision.refusal:
                    self._start(decision)
                elif decision is not None:
                    self._keep([*self._decided, decision])
                    self._add_event(f"no challenger for the drift of {drift.metric}: {decision.refusal}")
            for running in self._running:
                self._follow(running)
        except OSError as exc:
            self._add_event(f"challenger: {unwritable(exc)}")

    def stop(self) -> None:
        """End all processes. A challenger saves its last checkpoint."""
        for running in self._running:
            if running.comparison is not None:
                end(running.comparison, 0.0)
            if running.job is not None:
                end(running.job, _GRACE_S)
        self._running.clear()

    def _start(self, decision: Challenge) -> None:
        config, run, version = self._config, self._folder, decision.version
        assert self._settings is not None
        folder, recipe = run.path / FOLDER / str(version), self._settings.job
        command = challenger_arguments(
            config, version, job_file=str(run.job if recipe is None else config.path(recipe)), source=str(run.path),
            kafka=self._services.kafka,
        )  # fmt: skip
        command += ["--parent-folder", str(folder)]
        self._keep([*self._decided, msgspec.structs.replace(decision, command=("doll", *command))])
        folder.mkdir(parents=True, exist_ok=True)
        process = spawn([*_PROGRAM, *command], self._log_of(version))
        self._running.append(_Running(version, folder, time.monotonic() + self._settings.compare_after_s, process))
        place = display_path(folder)
        self._add_event(f"challenger {version} started after the drift of {decision.metric}; its run is in {place}")

    def _follow(self, running: _Running) -> None:
        if running.job is not None and (code := running.job.poll()) is not None:
            running.job = None
            self._note(running, f"ended with {describe_exit(code)}: {tail(self._log_of(running.version), 1).strip()}")
        compared = running.folder / "comparison.txt"
        if running.comparison is not None and (code := running.comparison.poll()) is not None:
            running.comparison = None
            self._note(running, f"compared: {tail(compared, 1).strip() or describe_exit(code)}")
        elif running.job is not None and time.monotonic() >= running.compare_at_s:
            # It has a version to compare when its first checkpoint is there.
            for path in [*running.folder.glob("*/checkpoints/*.doll")][:1]:
                running.compare_at_s = float("inf")
                running.comparison = self._compare(path.parent.parent, compared)

    def _compare(self, challenger: Path, compared: Path) -> subprocess.Popen[bytes]:
        assert self._settings is not None
        words = ["versions", "compare", str(self._folder.path), "latest", "latest", "--against", str(challenger)]
        words += ["--metric", self._settings.metric, "--duration", str(_COMPARE_S)]
        with compared.open("wb") as file:
            return spawn([*_PROGRAM, *words], compared.with_suffix(".log"), stdout=file)

    def _log_of(self, version: int) -> Path:
        return self._folder.logs / f"challenger-{version}.log"

    def _note(self, running: _Running, text: str) -> None:
        self._keep(
            [
                msgspec.structs.replace(item, outcome="; ".join(filter(None, (item.outcome, text))))
                if item.version == running.version and not item.refusal else item
                for item in self._decided
            ]
        )  # fmt: skip
        self._add_event(f"challenger {running.version} {text}")

    def _keep(self, decided: list[Challenge]) -> None:
        self._decided = decided
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(decided), indent=1), durable=True)
