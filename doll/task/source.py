"""A digest of a task's source, which says whether two versions were learned with the same code."""

from __future__ import annotations

import hashlib
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Final

from doll.task.base import Task

_NOT_THE_USERS: Final = frozenset({"doll", "builtins", "abc", "typing"})


def source_digest(task: Task) -> str:
    """The digest of the files in which a task's classes are written, without DOLL's own: 16 hexadecimal digits.

    "" if no such file is there, as for a class of a notebook.
    """
    digest = hashlib.sha256()
    files = []
    for cls in type(task).__mro__:
        if cls.__module__.partition(".")[0] in _NOT_THE_USERS:
            continue
        with suppress(OSError, TypeError):
            files.append(Path(inspect.getfile(cls)).read_bytes())
    for content in dict.fromkeys(files):  # several classes may be in one file
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:16] if files else ""
