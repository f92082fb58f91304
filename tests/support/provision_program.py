"""`doll provision ...` of a job as a program of its own, and what it has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from doll.provisioner.state_store import FileStateStore
from doll.services import KAFKA_ENV, REDIS_ENV
from waiting import WAIT_TIMEOUT_S


class Provisioner:
    """`doll provision ...` of a pipeline's job, as a program of its own."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, *arguments: str) -> subprocess.Popen[bytes]:
        env = os.environ | {KAFKA_ENV: self.job.services.kafka, REDIS_ENV: self.job.services.redis}
        log = self.job.run / "logs" / f"provision-{len(self.processes)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "doll", "provision", arguments[0], "--job", str(self.job.job_path)]
        argv += ["--run-folder", str(self.job.run), *arguments[1:]]
        with log.open("wb") as file:
            self.processes.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=file))
        return self.processes[-1]

    def ask(self, *arguments: str) -> dict[str, Any]:
        """What a command that ends by itself says."""
        process = self(*arguments, "--json")
        out, _ = process.communicate(timeout=WAIT_TIMEOUT_S)
        assert process.returncode == 0, self.job.log(f"provision-{len(self.processes) - 1}")
        document: dict[str, Any] = json.loads(out)
        return document

    def journal(self) -> list[dict[str, Any]]:
        return journal_of(self.job.run, self.job)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def journal_of(folder: Path, job: Any, kind: str = "") -> list[dict[str, Any]]:
    """What a provisioner with this run folder has written so far; of one kind, or all."""
    journal = FileStateStore(folder, job.config.job).journal
    text = journal.read_text() if journal.exists() else ""
    lines = text.rpartition("\n")[0].splitlines()  # the last one may be half written
    return [entry for entry in map(json.loads, lines) if kind in ("", entry["kind"])]
