"""Replace a file atomically: a reader sees either the old or the new content, never a part of it."""

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
    """Yield a temporary file beside `path`; it replaces `path` when the body ends without an error.

    Folders above `path` are created. If the body raises an error, `path` is not changed and the temporary file is
    removed. If `durable`, the change also survives a power failure: the file and its folder are synced to disk. Raise
    OSError if the folder cannot be written.
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
        if exc.filename in (None, str(temporary)):  # an error of a write to an open file does not name the file
            exc.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace `path` by `content` (text as UTF-8), as `replacing` does. Raise OSError if it cannot be written."""
    with replacing(path, durable=durable) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def refuse_unwritable(path: Path) -> Iterator[None]:
    """Raise ConfigError if a file that the user named cannot be written within this context."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror or exc}") from exc


def is_full(folder: Path) -> bool:
    """Return whether less than one megabyte is free on the disk of a folder."""
    try:
        return shutil.disk_usage(folder).free < 1_000_000
    except OSError:
        return False


def folder_problem(folder: Path) -> str:
    """Return why a folder is not private to this user (and not trusted); "" if it is. Raise OSError if it is
    missing."""
    status = os.lstat(folder)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return (
        f"{folder}: expected a folder of user {os.geteuid()} that nobody else may enter, got mode "
        f"{stat.filemode(status.st_mode)} of user {status.st_uid}"
    )


def unwritable(error: OSError) -> ServiceUnavailableError:
    """Return the error for a file or folder that cannot be used: which one, why, and what to do."""
    about = f"{error.filename}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    todo = "; free some space there, or name a folder on another disk" if full else ""
    return ServiceUnavailableError(f"{about}{error.strerror or error}{todo}")


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, as `replacing` does. Raise OSError if it cannot be written."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of at most `MAX_JSON_BYTES`. Raise ConfigError if the file cannot be read, or
    does not contain an object."""
    try:
        return json_object(read_text(path, max_bytes=MAX_JSON_BYTES))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc


def json_safe(value: Any) -> Any:
    """Return `value` in a form that is safe as JSON, also inside containers: None replaces NaN and infinities, which
    JSON does not have, and URLs in texts have no credentials."""
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
