"""`doll provision ...` of a job as a program of its own, and what it has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from doll.provisioner.state_store import FileStateStore
from forked_commands import Command
from waiting import WAIT_TIMEOUT_S


class Provisioner:
    """`doll provision ...` of a pipeline's job, as a program of its own."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.processes: list[Command] = []

    def __call__(self, *arguments: str) -> Command:
        log = f"provision-{len(self.processes)}"
        self.processes.append(self.job.doll(f"provision {arguments[0]}", *arguments[1:], log=log))
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
            process.kill()
            process.wait()


def journal_of(folder: Path, job: Any, kind: str = "") -> list[dict[str, Any]]:
    """What a provisioner with this run folder has written so far; of one kind, or all."""
    journal = FileStateStore(folder, job.config.job).journal
    text = journal.read_text() if journal.exists() else ""
    lines = text.rpartition("\n")[0].splitlines()  # the last one may be half written
    return [entry for entry in map(json.loads, lines) if kind in ("", entry["kind"])]
