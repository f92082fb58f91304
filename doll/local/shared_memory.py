"""Manage a run's folder in shared memory: it is removed when the run ends, or by the next run if the run was killed.

The owner of the folder locks it. The kernel releases the lock when the owner's process ends, so a folder that can be
locked is stale.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from doll.process.platform import lock_exclusively

SHM_ROOT: Final = Path("/dev/shm")
_PREFIX: Final = "doll-blobs-"
_MIN_FREE_BYTES: Final = 256 * 1024 * 1024


@contextlib.contextmanager
def run_folder(root: Path = SHM_ROOT) -> Iterator[Path]:
    """Yield a new folder that only this user can access. It is removed with its contents at the exit of the context.
    Raise OSError if it cannot be created."""
    remove_stale_folders(root)
    folder, lock = _locked_folder(root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def obstacle(root: Path = SHM_ROOT) -> str | None:
    """Return the reason why blobs cannot be stored in shared memory, or None."""
    try:
        status = os.statvfs(root)
    except OSError as exc:
        return f"{root}: {exc.strerror}"
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{root} is not writable"
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < _MIN_FREE_BYTES:
        return f"{root} has {free_bytes >> 20} MiB free, expected {_MIN_FREE_BYTES >> 20}"
    return None


def remove_stale_folders(root: Path = SHM_ROOT) -> None:
    """Remove the folders of killed runs of this user."""
    with contextlib.suppress(OSError):
        for folder in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if folder.lstat().st_uid != os.geteuid():
                    continue
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if lock_exclusively(lock):
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _locked_folder(root: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # mode 0700
        # Before it is locked, another run's `remove_stale_folders` may lock or remove it: then create another one.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if lock_exclusively(lock) and folder.is_dir():
                return folder, lock
            os.close(lock)
