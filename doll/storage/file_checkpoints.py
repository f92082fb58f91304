"""Store checkpoints as files in one folder of a local or shared file system.

`checkpoint-<term>-<version>.doll` is a checkpoint. `term-<n>.claim` states that term n is claimed. The newest claims
are kept, and a claim below them is not valid, so no term is claimed twice. `.lock` orders claims and saves: after a
claim returns, no checkpoint of a lower term can appear. The lock also orders changes of documents (`read_document`).

Order of the steps of `save`: 1. write and fsync a temporary file; 2. take the lock; 3. look for a higher term; 4.
rename; 5. fsync the folder; 6. delete old checkpoints without a mark; 7. release the lock. A crash before 4 leaves a
temporary file that a save of a later term removes. After 4 the checkpoint is complete; after 5 it survives a power
failure.
"""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from doll import telemetry
from doll.errors import CheckpointError
from doll.process.fault_points import fault_point
from doll.process.files import write_atomically
from doll.process.platform import lock_exclusively, sync
from doll.storage.blobs import Buffer
from doll.storage.checkpoints import (
    Checkpoint,
    CheckpointStore,
    checkpoint_name,
    checkpoints_among,
    claim_name,
    claims_among,
    is_forgotten,
    old_claims,
    unused_parts,
)
from doll.storage.version_marks import NO_HISTORY, StoredVersion, VersionHistory

log = telemetry.get_logger(__name__)

LOCK_TIMEOUT_S: Final = 10.0
_TEMPORARY: Final = re.compile(r"checkpoint-(\d{8,})-\d{10,}(?:\.part-\d+-of-\d+)?\.doll\.\d+\.tmp")


class FileCheckpointStore(CheckpointStore):
    """A `CheckpointStore` in `folder`, which is created when something is first written."""

    def __init__(
        self, folder: Path, job: str | None, *, keep: int = 3, history: VersionHistory = NO_HISTORY,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:  # fmt: skip
        super().__init__(job, str(folder), keep, history)
        self.folder = folder
        self._lock_timeout_s = lock_timeout_s  # another process holds the lock only for milliseconds

    def claim_term(self, above: int = 0) -> int:
        with self._translate_errors("claim a term in"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                while True:
                    term = max(self.newest_term(), above) + 1
                    try:
                        # O_EXCL decides even if the file system has no locks.
                        file = os.open(self.folder / claim_name(term), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                    except FileExistsError:
                        continue
                    sync(file)
                    os.close(file)
                    _fsync_folder(self.folder)
                    if not is_forgotten(term, self.newest_term()):
                        return term

    def newest_term(self) -> int:
        terms = [term for term, _ in self.versions()]
        return max([*terms, *claims_among(self._names())], default=0)

    def save(self, checkpoint: Checkpoint) -> None:
        self._check_owner(checkpoint)
        key = checkpoint.term, checkpoint.version
        with self._translate_errors("save a checkpoint in"):
            self._check_term(checkpoint)  # checked before the work, and again under the lock
            encoded = self._encode(checkpoint, self.versions())
            with self._written(checkpoint_name(*key), encoded.parts) as rename, self._locked():
                self._check_term(checkpoint)
                self._require_base(checkpoint, encoded, self.versions())
                rename()
                self._note_saved(checkpoint, encoded)
                self._delete_old(checkpoint.term)

    def _write_part(self, name: str, data: Sequence[Buffer], checkpoint: Checkpoint) -> None:
        with self._translate_errors("save a checkpoint in"):
            self._check_term(checkpoint)
            with self._written(name, data) as rename, self._locked():
                self._check_term(checkpoint)
                rename()

    @contextmanager
    def _written(self, name: str, data: Sequence[Buffer]) -> Iterator[Callable[[], None]]:
        """Write a temporary file, and yield the function that gives it its name."""
        path = self.folder / name
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self.folder.mkdir(parents=True, exist_ok=True)

        def rename() -> None:
            temporary.replace(path)
            _fsync_folder(self.folder)

        try:
            with temporary.open("wb") as file:
                for part in data:
                    file.write(part)
                    fault_point("ps.mid_checkpoint", file.flush)
                file.flush()
                sync(file.fileno())
            yield rename
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, keys: Iterable[tuple[int, int]]) -> None:
        with self._translate_errors("delete a checkpoint in"), self._locked():
            for key in self._but_newest(keys):
                self._path(*key).unlink(missing_ok=True)
            for name in unused_parts(self._names()):
                (self.folder / name).unlink(missing_ok=True)
            _fsync_folder(self.folder)

    def _read_file(self, name: str, size: int | None = None) -> bytes:
        with self._opened(name) as file:
            return file.read(-1 if size is None else size)

    def _map(self, name: str, access: int) -> mmap.mmap:
        with self._opened(name) as file:
            return mmap.mmap(file.fileno(), 0, access=access)

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        with (
            self._translate_errors("read a checkpoint in", but=FileNotFoundError),
            (self.folder / name).open("rb") as file,
        ):
            yield file

    def stored(self) -> list[StoredVersion]:
        items = []
        with self._translate_errors("look into"):
            for term, version in self.versions():
                with suppress(FileNotFoundError):  # deleted meanwhile
                    status = self._path(term, version).stat()
                    items.append(StoredVersion(term, version, status.st_mtime, status.st_size))
        return items

    def read_document(self, name: str) -> tuple[bytes | None, bytes | None]:
        with self._translate_errors(f"read {name} in"):
            try:
                data = (self.folder / name).read_bytes()
            except FileNotFoundError:
                return None, None
            return data, data

    def replace_document(self, name: str, data: bytes, known: bytes | None) -> bytes | None:
        with self._translate_errors(f"change {name} in"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if self.read_document(name)[1] != known:
                    return None
                write_atomically(self.folder / name, data, durable=True)
                return data

    def versions(self) -> list[tuple[int, int]]:
        return checkpoints_among(self._names())

    def _path(self, term: int, version: int) -> Path:
        return self.folder / checkpoint_name(term, version)

    def _names(self) -> list[str]:
        with self._translate_errors("look into"):
            try:
                return os.listdir(self.folder)
            except FileNotFoundError:
                return []

    def _check_term(self, checkpoint: Checkpoint) -> None:
        self._refuse_if_superseded(checkpoint, self.newest_term(), self.versions())

    def _delete_old(self, term: int) -> None:
        """Delete the checkpoints that are not kept, and the temporary files of crashed servers."""
        paths = [self._path(*item.key) for item in self._obsolete(self.stored())]
        gone = {path.name for path in paths}
        names = [name for name in self._names() if name not in gone]
        paths += [self.folder / name for name in unused_parts(names)]
        paths += [
            self.folder / name for name in names if (match := _TEMPORARY.fullmatch(name)) and int(match[1]) < term
        ]
        paths += [self.folder / name for name in old_claims(names, self.newest_term())]
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:  # the new checkpoint is safe
                log.warning("checkpoint_not_deleted", file=path.name, error=str(exc))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            deadline_s = time.monotonic() + self._lock_timeout_s
            while not lock_exclusively(file):
                if time.monotonic() > deadline_s:
                    raise CheckpointError(
                        f"another process has held {self.folder / '.lock'} for {self._lock_timeout_s:g} s: is a "
                        "parameter server suspended? End it, then start again"
                    )
                time.sleep(0.01)
            yield
        finally:
            os.close(file)  # this releases the lock, as does the end of the process

    @contextmanager
    def _translate_errors(self, what: str, *, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
        try:
            yield
        except but:
            raise
        except OSError as exc:
            raise CheckpointError(f"cannot {what} {self.folder}: {exc.strerror or exc}") from exc


def _fsync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(file)
    finally:
        os.close(file)
