"""What the provisioner persists: its state in one small file, replaced atomically, and a journal of its decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from doll import telemetry
from doll.errors import ConfigError
from doll.process.files import write_atomically
from doll.records.bounded import json_value, read_text

log = telemetry.get_logger(__name__)

_MOST_BYTES: Final = 64_000_000  # far above what thousands of machines take


class StateStore(Protocol):
    """State and journal of one provisioner. Values are plain, as JSON has them."""

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None where nothing was, or it cannot be read. May be repeated."""

    def save(self, kept: Mapping[str, Any]) -> None:
        """Replace what was saved, whole or not at all; durable on return. May be repeated.

        Raises:
            ConfigError: it cannot be written.
        """

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the journal. Actions are written before they are done.

        Raises:
            ConfigError: it cannot be written.
        """


class FileStateStore:
    """`StateStore` as `provision-<job>.json` and `provision-<job>.jsonl` in a folder, made when it is first written to.

    A folder may outlive a job, as that of a host does, so each job has its own files.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.state = folder / f"provision-{job}.json"
        self.journal = folder / f"provision-{job}.jsonl"

    def load(self) -> dict[str, Any] | None:
        try:
            saved = json_value(read_text(self.state, max_bytes=_MOST_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            file = str(self.state)
            log.warning("provision_state_unreadable", file=file, error=str(exc), action="from tags and topics")
            return None
        return saved if isinstance(saved, dict) else None

    def save(self, kept: Mapping[str, Any]) -> None:
        try:
            write_atomically(self.state, json.dumps(kept), durable=True)
        except OSError as exc:
            raise ConfigError(f"cannot write {self.state}: {exc.strerror or exc}; see --run-folder") from exc

    def append(self, entry: Mapping[str, Any]) -> None:
        try:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except OSError as exc:
            raise ConfigError(f"cannot write {self.journal}: {exc.strerror or exc}; see --run-folder") from exc


class RetriedStateStore:
    """A state store whose errors, once it has taken something, are errors of a moment, as a full disk is.

    What a turn does for the job's safety must not depend on the disk: machines are ended and the budget is kept, though
    the journal has a gap. Only launches need `save` to have succeeded.

    Attributes:
        problem: why the last write failed; "" where it did not.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._has_written = False
        self.problem = ""

    def load(self) -> dict[str, Any] | None:
        """As the store."""
        return self._store.load()

    def save(self, kept: Mapping[str, Any]) -> None:
        """As the store, but only a store that has never taken anything raises."""
        self._write(self._store.save, kept)

    def append(self, entry: Mapping[str, Any]) -> None:
        """As the store, but only a store that has never taken anything raises."""
        self._write(self._store.append, entry)

    def _write(self, write: Callable[[Mapping[str, Any]], None], value: Mapping[str, Any]) -> None:
        try:
            write(value)
        except ConfigError as exc:
            if not self._has_written:
                raise
            self.problem = str(exc)
        else:
            self._has_written, self.problem = True, ""
