"""A run folder: everything that one run of a job leaves behind, under names that never change.

`job.yaml` (as resolved, loads from anywhere), `stack.json` (where Kafka and Redis are or were), `roles.json` (process
ids while it runs), `health.json` (ports of the health probes), `logs/`, `checkpoints/`, `updates.csv`,
`evaluations.csv`, `progress.png`, `model/` and, at the end, `audit.json` and `report.json`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doll.errors import ConfigError
from doll.process.files import read_json, write_atomically, write_json

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.services import Services

JOB = "job.yaml"
STACK = "stack.json"
REPORT = "report.json"


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / JOB

    @property
    def stack(self) -> Path:
        return self.path / STACK

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def roles(self) -> Path:
        return self.path / "roles.json"

    @property
    def health(self) -> Path:
        return self.path / "health.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def plot(self) -> Path:
        return self.path / "progress.png"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def write_job(self, config: JobConfig) -> None:
        """Write the resolved job file; relative paths in it keep their meaning."""
        import yaml

        from doll.config import dump

        base = yaml.safe_dump({"base_folder": str(config.base_folder.resolve())}, allow_unicode=True)
        write_atomically(self.job, dump(config) + base)

    def write_stack(self, services: Services, **facts: Any) -> None:
        """Note where the services are; they hold no secret."""
        write_json(self.stack, {"kafka": services.kafka, "redis": services.redis, "blobs": services.blobs, **facts})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else runs in this folder meanwhile; the end of our process, however it comes, gives it free.

        Raises:
            ConfigError: somebody does.
        """
        file = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path}: this run is still going; expected one that has ended") from None
            yield
        finally:
            os.close(file)

    def services(self) -> Services | None:
        """The services of this run; None where none are recorded.

        Raises:
            ConfigError: the note cannot be read.
        """
        if not self.stack.exists():
            return None
        from doll.services import Services

        recorded = read_json(self.stack)
        try:
            blobs = str(recorded.get("blobs", ""))  # a folder of this machine, as long as the run lasts
            return Services(
                str(recorded["kafka"]), str(recorded["redis"]), blobs if blobs and Path(blobs).is_dir() else ""
            )
        except (KeyError, TypeError) as exc:
            raise ConfigError(f"{self.stack}: expected the keys kafka and redis, got {recorded!r}") from exc


def create(runs: Path, job: str, now: datetime) -> RunFolder:
    """A new folder `runs/<job>-<YYYYmmdd-HHMMSS>[-n]`, ours alone even where another run starts in the same second.

    Raises:
        ConfigError: it cannot be made.
    """
    name = f"{job}-{now:%Y%m%d-%H%M%S}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = (runs / (name if attempt == 1 else f"{name}-{attempt}")).resolve()
            try:
                path.mkdir()
            except FileExistsError:
                continue
            (path / "logs").mkdir()
            return RunFolder(path)
    except OSError as exc:
        raise ConfigError(f"cannot make a run folder in {runs}: {exc.strerror or exc}; see --runs-folder") from exc
    raise ConfigError(f"cannot make a run folder in {runs}: a thousand of {name} are there already")


@dataclass(frozen=True)
class Target:
    """What a command was pointed at: a job file, or the folder of a run.

    Attributes:
        path: the job file.
    """

    config: JobConfig
    run: RunFolder
    is_run_folder: bool
    path: Path

    def services(self) -> Services:
        """Where Kafka and Redis are: as the run recorded, else as the job file or the environment says.

        Raises:
            ConfigError: nothing says where they are.
        """
        from doll.services import resolve

        recorded = self.run.services() if self.is_run_folder else None
        return recorded if recorded is not None else resolve(self.config)


def open_target(path: Path, overrides: list[str], run_folder: Path | None = None) -> Target:
    """The job at `path`: a job file, a run folder (or the job file in one), or the name of a shipped example.

    Args:
        run_folder: where roles keep their files; default: the run's own folder, else `runs/<job>`.

    Raises:
        ConfigError: neither is there, or the job file is wrong.
    """
    from doll.cli import examples
    from doll.config import load

    if not path.is_file() and not (path / JOB).is_file() and (shipped := examples.named(path)) is not None:
        path = shipped
    if path.is_dir():
        if not (path / JOB).is_file():
            raise ConfigError(f"{path}: expected a job file or a run folder (with a {JOB}), found neither")
        path = path / JOB
    elif not path.exists():
        raise ConfigError(f"cannot read job file {path}: No such file or directory{examples.hint(path)}")
    config = load(path, overrides)
    is_run_folder = (path.parent / STACK).is_file()
    if run_folder is None:
        run_folder = path.parent.resolve() if is_run_folder else Path("runs") / config.job
    return Target(config, RunFolder(run_folder.resolve()), is_run_folder, path)
