"""A run folder: the files of one run, under fixed names.

- `job.yaml`: the resolved job file, which can be loaded from anywhere; paths inside the folder are relative to it
- `job.grid-<n>.yaml`: the job file of each earlier grid
- `stack.json`: addresses of Kafka and Redis, and the path of the folder at that time
- `roles.json`, `health.json`: ids of the running processes, and the ports of their health probes
- `init_from.json`: the weights with which the job began
- `events.jsonl`, `logs/`, `checkpoints/`, `updates.csv`, `evaluations.csv`: events of the processes, logs, results
- at the end: `newest_updates.msgpack`, `model/`, `audit.json`, `report.json` and `report.html`
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from doll.config import JobConfig, dump_run
from doll.errors import ConfigError, ServiceUnavailableError
from doll.process.files import read_json, write_atomically, write_json
from doll.process.platform import lock_exclusively
from doll.services import Services

JOB: Final = "job.yaml"
STACK: Final = "stack.json"


class RunFolder:
    """The paths of the files in one run folder."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.job: Final = path / JOB
        self.next_job: Final = path / "job.next.yaml"  # exists during a regrid (`doll.run.target`)
        self.stack: Final = path / STACK
        self.roles: Final = path / "roles.json"
        self.health: Final = path / "health.json"
        self.logs: Final = path / "logs"
        self.page: Final = path / "report.html"
        self.model: Final = path / "model"
        self.dead: Final = path / "dead.json"
        self.report: Final = path / "report.json"
        self.init_from: Final = path / "init_from.json"  # the weights with which the job began (`training.init_from`)

    def write_job(self, config: JobConfig, to: Path | None = None) -> None:
        """Write the resolved job file; its relative paths keep their meaning, also if this folder is copied.

        Args:
            to: path of the file. None: `job`.
        """
        write_atomically(to or self.job, dump_run(config, self.path), durable=True)

    def write_stack(self, services: Services, **fields: Any) -> None:
        """Write the addresses of the services, without secrets, and the path of this folder to `stack.json`."""
        addresses = {"kafka": services.kafka, "redis": services.redis, "blobs": services.blobs}
        write_json(self.stack, {**addresses, "folder": str(self.path), **fields})

    def recorded(self) -> dict[str, Any]:
        """Return the content of `stack.json`.

        Raises:
            ConfigError: the file cannot be read.
        """
        return read_json(self.stack)

    def earlier_place(self) -> Path | None:
        """Return the earlier path of this folder if it was copied or moved after the run's last start, otherwise None.

        Raises:
            ConfigError: `stack.json` cannot be read.
        """
        place = Path(str(self.recorded().get("folder", self.path)))
        with contextlib.suppress(OSError):
            return None if place == self.path or place.samefile(self.path) else place
        return place

    def refuse_copy(self, shared: str) -> None:
        """Refuse to change data that a copied run folder shares with the original run.

        Raises:
            ConfigError: this folder is a copy, and the original still exists.
        """
        original = self.earlier_place()
        if original is not None and (original / STACK).is_file():
            raise ConfigError(
                f"{self.path} is a copy of {original}, and both have the same {shared}: expected one folder that goes "
                f"on with them; use {original}, or move it away, or begin a job of its own with these weights: doll up "
                f"--set training.init_from={self.path} --set job=NAME"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other runs; the lock ends with this process.

        Raises:
            ConfigError: another run has locked the folder.
        """
        file = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            if not lock_exclusively(file):
                raise ConfigError(f"{self.path}: this run is still running; expected one that has ended")
            yield
        finally:
            os.close(file)

    def services(self) -> Services | None:
        """Return the services of this run; None if none are recorded.

        Raises:
            ConfigError: `stack.json` cannot be read, or the services belong to the run from which this folder was
                copied.
            ServiceUnavailableError: the services run only at the path from which the folder was copied or moved.
        """
        if not self.stack.exists():
            return None
        recorded = self.recorded()
        if (place := self.earlier_place()) is not None:
            if recorded.get("kafka_kind") == "local":
                raise ServiceUnavailableError(
                    f"{self.path} was copied or moved from {place}, and its Kafka does not run: doll resume starts it"
                )
            self.refuse_copy(f"records, on Kafka at {recorded.get('kafka')}")
        try:
            blobs = str(recorded.get("blobs", ""))  # a folder of this machine that exists during the run
            return Services(
                str(recorded["kafka"]), str(recorded["redis"]), blobs if blobs and Path(blobs).is_dir() else ""
            )
        except (KeyError, TypeError) as exc:
            raise ConfigError(f"{self.stack}: expected the keys kafka and redis, got {recorded!r}") from exc


def cluster_of(path: Path) -> str:
    """Return the name of the machines of the run in a folder. A copy of the folder gets another name."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", path.name[-54:]).strip("-") or "run"
    return f"{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def create(runs: Path, job: str, now: datetime) -> RunFolder:
    """Create the folder of a new run, `runs/<job>-<YYYYmmdd-HHMMSS>[-n]`.

    Raises:
        ConfigError: the folder cannot be created.
    """
    path = new_folder(runs, job, now)
    (path / "logs").mkdir()
    return RunFolder(path)


def new_folder(runs: Path, prefix: str, now: datetime) -> Path:
    """Create a folder `runs/<prefix>-<YYYYmmdd-HHMMSS>[-n]`; `n` separates folders of the same second.

    Raises:
        ConfigError: the folder cannot be created.
    """
    name = f"{prefix}-{now:%Y%m%d-%H%M%S}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = (runs / (name if attempt == 1 else f"{name}-{attempt}")).resolve()
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as exc:
        raise ConfigError(f"cannot create a run folder in {runs}: {exc.strerror or exc}; see --parent-folder") from exc
    raise ConfigError(f"cannot create a run folder in {runs}: 1000 folders named {name} exist")


def display_path(path: Path) -> str:
    """Return a path for messages: relative to the working directory if the path is inside it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
