"""Replace a file atomically: a reader sees the old content or the new one, never a part of either."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from doll.errors import ConfigError, ServiceUnavailableError
from doll.process.platform import sync
from doll.records.bounded import json_object, read_text
from doll.redaction import redacted

MAX_JSON_BYTES: Final = 64_000_000


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` for the body to write; it replaces `path` when the body ends without an error.

    Folders above `path` are created. If the body raises, `path` stays as it was and the temporary file is removed. If
    it is `durable`, it survives a power failure, too: the file and its folder are synced to disk. Raises OSError if the
    folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        if durable:
            _sync(temporary)
        temporary.replace(path)
        if durable:
            _sync(path.parent)
    except OSError as exc:
        if exc.filename in (None, str(temporary)):  # a write to an open file names none
            exc.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace `path` by `content` (text as UTF-8), as `replacing` does; raises OSError if the folder cannot be
    written."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def refuse_unwritable(path: Path) -> Iterator[None]:
    """Guard the body, which writes a file that a user has named; raises ConfigError if it cannot be written."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc


def is_full(folder: Path) -> bool:
    """Whether less than a megabyte is left on the disk of a folder."""
    try:
        return shutil.disk_usage(folder).free < 1_000_000
    except OSError:
        return False


def folder_problem(folder: Path) -> str:
    """Why a folder is not private to this user, and so not to be trusted; "": it is. OSError: it is not there."""
    status = os.lstat(folder)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return (
        f"{folder}: expected a folder of user {os.geteuid()} that nobody else may enter, got mode "
        f"{stat.filemode(status.st_mode)} of user {status.st_uid}"
    )


def unwritable(error: OSError) -> ServiceUnavailableError:
    """The error for a file or folder that cannot be used: which, why, and what to do."""
    about = f"{error.filename}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    todo = "; free some space there, or name a folder on another disk" if full else ""
    return ServiceUnavailableError(f"{about}{error.strerror or error}{todo}")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, as `replacing` does; raises OSError if the folder cannot be
    written."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most `MAX_JSON_BYTES`; raises ConfigError if it cannot be read, or holds
    something else."""
    try:
        return json_object(read_text(path, max_bytes=MAX_JSON_BYTES))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc


def json_safe(value: Any) -> Any:
    """`value` with NaN and infinities as None, which JSON has not, and texts without credentials in URLs; also inside
    containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
