"""What the provisioner persists: its state in one small file, replaced whole, and a journal of its decisions.

The state of `doll provision` lies beside the job's checkpoints, in a folder or in S3, so that a provisioner on another
machine can go on from it. It names its owner, and is replaced only on condition that it is as its owner left it: from
the moment a successor has put its own number there, its predecessor can save nothing, and makes no order, since orders
are saved before they are made. The journal is for people, and stays on the machine of the provisioner that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from doll import telemetry
from doll.errors import CheckpointError, ConfigError, FencedError
from doll.process.files import write_atomically
from doll.provisioner.lease import claims_of
from doll.records.bounded import json_value, read_text

if TYPE_CHECKING:
    from doll.config import JobConfig
    from doll.storage.checkpoints import CheckpointStore

log = telemetry.get_logger(__name__)

_MOST_BYTES: Final = 64_000_000  # far above what thousands of machines take
_DOCUMENT: Final = "state.json"
_ATTEMPTS: Final = 10


class StateStore(Protocol):
    """State and journal of one provisioner. Values are plain, as JSON has them."""

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None where nothing was, or it cannot be read. May be repeated."""

    def save(self, kept: Mapping[str, Any]) -> None:
        """Replace what was saved, whole or not at all; durable on return. May be repeated.

        Raises:
            ConfigError, CheckpointError: it cannot be written.
            FencedError: it is another provisioner's by now.
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


class SharedStateStore:
    """`StateStore` beside the checkpoints, with its journal in a folder of this machine.

    What an earlier release, or a run on one machine, has left in that folder is taken over once.

    Args:
        store: where the claims are.
        local: the journal, and an earlier state.
        number: of the claim of the provisioner that writes; 0: it only reads.
    """

    def __init__(self, store: CheckpointStore, local: FileStateStore, number: int = 0) -> None:
        self._store = store
        self._local = local
        self._number = number
        self._known: object = None
        self.journal = local.journal

    def take(self) -> None:
        """Become the owner of the state; what a predecessor saves after that is refused.

        Raises:
            FencedError: a later provisioner has it already.
            CheckpointError: the store does not answer.
        """
        kept = self._read_own()
        earlier = self._local.load() if kept is None else None
        self._replace(kept if earlier is None else earlier, reread=True)
        if earlier is not None:
            moved = self._local.state.with_suffix(".json.moved")
            log.info("provision_state_moved", file=str(self._local.state), to=f"{self._store.location}/{_DOCUMENT}")
            try:
                self._local.state.replace(moved)
            except OSError as exc:  # a successor finds the newer one first
                log.warning("provision_state_not_moved", file=str(moved), error=str(exc))

    def load(self) -> dict[str, Any] | None:
        """As the port.

        Raises:
            CheckpointError: the store does not answer.
        """
        _, kept, _ = self._read()
        return self._local.load() if kept is None else kept

    def save(self, kept: Mapping[str, Any]) -> None:
        self._replace(kept, reread=False)

    def append(self, entry: Mapping[str, Any]) -> None:
        self._local.append(entry)

    def _read(self) -> tuple[int, dict[str, Any] | None, Any]:
        """The owner's number, the state, and what both are known by."""
        data, known = self._store.read_document(_DOCUMENT)
        if data is None:
            return 0, None, known
        try:
            document = json_value(data, max_chars=_MOST_BYTES)
            owner, kept = int(document["provisioner"]), document["kept"]
        except (ValueError, KeyError, TypeError) as exc:
            file = f"{self._store.location}/{_DOCUMENT}"
            log.warning("provision_state_unreadable", file=file, error=str(exc), action="from tags and topics")
            return 0, None, known
        return owner, kept if isinstance(kept, dict) else None, known

    def _read_own(self) -> dict[str, Any] | None:
        """The state, to be replaced; it is not a later provisioner's."""
        owner, kept, known = self._read()
        if owner > self._number:
            raise FencedError(
                f"provisioner {self._number} of this job is over: provisioner {owner} has its state; this process must "
                "stop (it leaves all instances as they are)"
            )
        self._known = known
        return kept

    def _replace(self, kept: Mapping[str, Any] | None, *, reread: bool) -> None:
        """Replace the state, also where an answer to an earlier attempt was lost.

        Args:
            reread: where a predecessor has saved meanwhile, what it saved is kept instead of `kept`.
        """
        for _ in range(_ATTEMPTS):
            data = json.dumps({"provisioner": self._number, "kept": kept}).encode()
            known = self._store.replace_document(_DOCUMENT, data, self._known)
            if known is not None:
                self._known = known
                return
            newer = self._read_own()
            if reread and newer is not None:
                kept = newer
        raise CheckpointError(f"{self._store.location}/{_DOCUMENT} was changed {_ATTEMPTS} times while it was replaced")


def state_of(config: JobConfig, run_folder: Path, number: int = 0) -> SharedStateStore:
    """The state of the job's provisioners, with the journal of the one that uses this folder.

    Args:
        number: see `SharedStateStore`.

    Raises:
        CheckpointError: it is in S3 and boto3 cannot be set up.
    """
    return SharedStateStore(claims_of(config, run_folder), FileStateStore(run_folder, config.job), number)


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
        except (ConfigError, CheckpointError) as exc:
            if not self._has_written:
                raise
            self.problem = str(exc)
        else:
            self._has_written, self.problem = True, ""
