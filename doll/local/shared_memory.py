"""A run's folder in shared memory: made for one run, removed at its end, or by the next run where it was killed.

Its owner holds a lock on it. The kernel lets go of the lock when the owner dies, however that comes: a folder that can
be locked has nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SHM_ROOT: Final = Path("/dev/shm")
_PREFIX: Final = "doll-blobs-"
_LEAST_FREE_BYTES: Final = 256 * 1024 * 1024


@contextlib.contextmanager
def run_folder(root: Path = SHM_ROOT) -> Iterator[Path]:
    """A new folder that only this user may enter; it and what is in it are gone at the exit of the context.

    Raises:
        OSError: it cannot be made.
    """
    remove_stale_folders(root)
    folder, lock = _locked_folder(root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def why_not(root: Path = SHM_ROOT) -> str | None:
    """Why blobs cannot be held there, or None."""
    try:
        room = os.statvfs(root)
    except OSError as exc:
        return f"{root}: {exc.strerror}"
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{root} is not ours to write to"
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < _LEAST_FREE_BYTES:
        return f"{root} has {free_bytes >> 20} MiB free, expected {_LEAST_FREE_BYTES >> 20}"
    return None


def limit_bytes(folder: Path) -> int:
    """What the blobs of one run may take: half of the file system that `folder` is on. The same in all processes."""
    room = os.statvfs(folder)
    return room.f_blocks * room.f_frsize // 2


def remove_stale_folders(root: Path = SHM_ROOT) -> list[Path]:
    """Remove the folders of runs that were killed; what was removed. Folders of other users are left alone."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if folder.lstat().st_uid != os.geteuid():
                    continue
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
                finally:
                    os.close(lock)
    return removed


def _locked_folder(root: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))  # mode 0700
        # Another run's remove_stale_folders may take it for one that nobody holds: then it is gone, or held, and we make another.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.is_dir():
                    return folder, lock
            os.close(lock)
