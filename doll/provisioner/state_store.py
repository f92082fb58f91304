"""The provisioner's state in one small file, which is replaced as a whole, and a journal of its decisions.

The state is stored beside the job's checkpoints, in a folder or in S3, so that a provisioner on another machine can
continue from it. The state names its owner. It is replaced only if it has not changed since this owner's last write.
After a successor has written its own number, its predecessor can neither save nor make orders, because orders are saved
before they are made. The journal is for people. It stays on the machine of the provisioner that wrote it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from doll import telemetry
from doll.config import JobConfig
from doll.errors import CheckpointError, ConfigError, FencedError
from doll.process.files import write_atomically
from doll.provisioner.lease import Lease, claims_of
from doll.provisioner.planning.planner import slot_ranges
from doll.records.bounded import json_value, read_text
from doll.storage.checkpoints import CheckpointStore

log = telemetry.get_logger(__name__)

_MOST_BYTES: Final = 64_000_000  # far more than the state of thousands of machines needs
_DOCUMENT: Final = "state.json"
_ATTEMPTS: Final = 10


class StateStore(Protocol):
    """State and journal of one provisioner. Values are plain JSON values."""

    def load(self) -> dict[str, Any] | None:
        """Return the state that was saved last; None if there is none, or it cannot be read."""

    def save(self, kept: Mapping[str, Any]) -> None:
        """Replace the state, completely or not at all. The new state is durable when this method returns. Raises
        ConfigError or CheckpointError if it cannot be written, FencedError if another provisioner owns it."""

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the journal. Actions are written before they are carried out. Raises ConfigError if the line
        cannot be written."""


class FileStateStore:
    """A `StateStore` in the files `provision-<job>.json` and `provision-<job>.jsonl` of a folder, which is created at
    the first write. A folder may be used by several jobs, one after the other, so each job has its own files."""

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
    """A `StateStore` beside the checkpoints, with its journal in a folder of this machine. A state in that folder, from
    an earlier release or a run on one machine, is taken over once.

    `number` is the number of the provisioner's claim; 0: the object only reads.
    """

    def __init__(self, store: CheckpointStore, local: FileStateStore, number: int = 0) -> None:
        self._store = store
        self._local = local
        self._number = number
        self._known: object = None
        self.journal = local.journal

    def take(self) -> None:
        """Become the owner of the state. After this call, writes of a predecessor are refused. Raises FencedError if a
        later provisioner owns the state already, CheckpointError if the store is not available."""
        kept = self._read_own()
        earlier = self._local.load() if kept is None else None
        self._replace(kept if earlier is None else earlier, reread=True)
        if earlier is not None:
            moved = self._local.state.with_suffix(".json.moved")
            log.info("provision_state_moved", file=str(self._local.state), to=f"{self._store.location}/{_DOCUMENT}")
            try:
                self._local.state.replace(moved)
            except OSError as exc:  # a successor reads the newer one first
                log.warning("provision_state_not_moved", file=str(moved), error=str(exc))

    def load(self) -> dict[str, Any] | None:
        """Return the state. Raises CheckpointError if the store is not available."""
        _, kept, _ = self._read()
        return self._local.load() if kept is None else kept

    def save(self, kept: Mapping[str, Any]) -> None:
        self._replace(kept, reread=False)

    def append(self, entry: Mapping[str, Any]) -> None:
        self._local.append(entry)

    def _read(self) -> tuple[int, dict[str, Any] | None, Any]:
        """Return the owner's number, the state, and the version mark of the document."""
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
        """Return the state before it is replaced. Raises FencedError if a later provisioner owns it."""
        owner, kept, known = self._read()
        if owner > self._number:
            raise FencedError(
                f"provisioner {self._number} of this job is over: provisioner {owner} has its state; this process must "
                "stop (it leaves all instances as they are)"
            )
        self._known = known
        return kept

    def _replace(self, kept: Mapping[str, Any] | None, *, reread: bool) -> None:
        """Replace the state, even if the answer to an earlier attempt was lost. With `reread`, a state that a
        predecessor has saved in the meantime is written instead of `kept`."""
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
    """Return the state of the job's provisioners, with the journal in this folder; see `SharedStateStore`. Raises
    CheckpointError if the state is in S3 and boto3 cannot be set up."""
    return SharedStateStore(claims_of(config, run_folder), FileStateStore(run_folder, config.job), number)


def stops_of(kept: Mapping[str, Any], max_failures: int) -> list[str]:
    """Return the stops in a saved state as text for people. `max_failures` is that of `LaunchLimits`."""
    stops = [f"the job: {failed}"] if (failed := kept.get("health", {}).get("failed")) else []
    slots = kept["launch_state"]["slots"]
    if given_up := [slot for slot, attempts in enumerate(slots) if attempts["failures"] >= max_failures]:
        stops.append(f"slots {slot_ranges(given_up)}: {slots[given_up[0]]['failure']}")
    return stops


def cleared(kept: Mapping[str, Any], max_failures: int) -> dict[str, Any]:
    """Return the state without stops. The time without an update starts at 0 again, and a slot that was given up gets
    one more machine at once. If this machine fails, the slot is given up again."""
    state = copy.deepcopy(dict(kept))
    state.get("health", {}).update(failed="", stalled_s=0.0)
    for attempts in state["launch_state"]["slots"]:
        if attempts["failures"] >= max_failures:
            attempts.update(failures=max_failures - 1, retry_at_s={})
    return state


def clear_stops(config: JobConfig, run_folder: Path) -> list[str]:
    """Clear the stops and return them. If there are any, a running provisioner is replaced, and ends.

    Restarts do not clear stops (docs/decisions/0107-a-stop-lasts-until-it-is-cleared.md). A supervisor may restart a
    provisioner after any exit code, and the stopped work would then cost money again. Raises CheckpointError if the
    store is not available, FencedError if a provisioner has started at the same moment.
    """
    limit = config.provision.max_failures
    kept = state_of(config, run_folder).load()
    stops = [] if kept is None else stops_of(kept, limit)
    if stops:
        lease = Lease(claims_of(config, run_folder), config.provision.lease_s)
        store = state_of(config, run_folder, lease.number)
        store.take()  # from here on no other process can save
        newest = store.load()
        if newest is not None:
            store.save(cleared(newest, limit))
            store.append({"kind": "cleared", "stops": stops})
        lease.end("left")
    return stops
