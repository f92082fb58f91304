"""A task of a notebook or script, put into a run's folder so that the processes of the run find it there.

A class of a module is named by its module. One of a notebook or of `__main__`, an instance, and a class without
`decode` for pairs (x, y) are written with cloudpickle. Only the folder's owner can read or write the file, and it is
read from there alone: nothing that comes over a wire is ever unpickled (docs/security.md).
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import cloudpickle

from doll.errors import ConfigError
from doll.task.base import Task
from doll.task.pairs import PairTask, write_pairs

PICKLE: Final = "task.cloudpickle"
HOLDOUT: Final = "held_out.pairs"
_FILE: Final = "task.py"
_TEXT: Final = '''"""The task of this run, as doll.train got it. {about}"""

from doll.api.shipping import shipped

{name} = shipped(__file__)
'''


def task_class(task: Any) -> type[Task]:
    """The class of a task that is given as a class or as an instance.

    Raises:
        ConfigError: it is neither.
    """
    cls = task if isinstance(task, type) else type(task)
    if not issubclass(cls, Task):
        raise ConfigError(f"task: expected a subclass of doll.Task, or an instance of one, got {cls.__name__}")
    return cls


def write_task(folder: Path, task: Any, *, are_pairs: bool, held_out: Iterable[tuple[Any, Any]] | None) -> str:
    """Write a task into a run's folder; returns what `task.class` of the job file says.

    Args:
        task: a class, or an instance.
        are_pairs: the source gives pairs (x, y), which the class need not decode itself.
        held_out: pairs that are never learned; they take the place of the class's `holdout`.

    Raises:
        ConfigError: it is no task, or its class has something that cannot be written.
    """
    cls = task_class(task)
    if held_out is not None:
        try:
            write_pairs(folder / HOLDOUT, held_out)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"held_out: expected pairs (x, y): {exc}") from exc
    decodes = cls.decode is not Task.decode or cls.decode_record is not Task.decode_record
    if not decodes and not are_pairs:
        raise ConfigError(
            f"task: expected {cls.__name__} to define decode(record), or a source of pairs (x, y), which need none"
        )
    as_pairs = not decodes or held_out is not None
    if task is cls and not as_pairs and cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__:
        return f"{cls.__module__}:{cls.__qualname__}"
    try:
        content = cloudpickle.dumps({"task": task, "as_pairs": as_pairs, "decodes": decodes})
    except Exception as exc:  # pickling runs code of any object that the class refers to
        raise ConfigError(
            f"task: {cls.__name__} cannot be given to other processes: {type(exc).__name__}: {exc}; make open files, "
            "connections and the like in its methods, not outside of it"
        ) from exc
    descriptor = os.open(folder / PICKLE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    try:
        (folder / "task.source.py").write_text(inspect.getsource(cls), encoding="utf-8")  # for people
        about = "Its source is in task.source.py."
    except (OSError, TypeError):
        about = "Its source is not known."
    (folder / _FILE).write_text(_TEXT.format(about=about, name=cls.__name__), encoding="utf-8")
    return f"{folder / _FILE}:{cls.__name__}"


def shipped(file: str) -> type[Task]:
    """The task that `write_task` has written beside `file`.

    Raises:
        ConfigError: somebody else could have written it, or this Python cannot read it.
    """
    folder = Path(file).parent
    path = folder / PICKLE
    info = path.stat()
    if hasattr(os, "getuid") and (info.st_uid not in (os.getuid(), 0) or info.st_mode & 0o022):
        raise ConfigError(
            f"{path}: expected a file that its owner alone can write, and that belongs to the user of this process"
        )
    try:
        content = pickle.loads(path.read_bytes())  # noqa: S301 - of the user's own run folder, see the module's text
    except Exception as exc:  # unpickling imports and runs what the class refers to
        raise ConfigError(
            f"{path}: expected the Python (here {sys.version_info.major}.{sys.version_info.minor}) and the packages of "
            f"the program that started the run: {type(exc).__name__}: {exc}"
        ) from exc
    task, cls = content["task"], content["task"] if isinstance(content["task"], type) else type(content["task"])
    bases: tuple[type, ...] = (cls,)
    members: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if content["as_pairs"]:
        names = [] if content["decodes"] else ["decode", "decode_many"]
        if (folder / HOLDOUT).exists():
            members["holdout_file"] = folder / HOLDOUT
            names.append("holdout")
        members |= {name: getattr(PairTask, name) for name in names}
    if task is not cls:
        members["__init__"] = lambda self: self.__dict__.update(vars(task))
    return type(cls.__name__, bases, members)
