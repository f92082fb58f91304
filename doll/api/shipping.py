"""Writes the task of a notebook or script into a run folder, where the processes of the run load it.

A class of a module is referred to by its module. The following are written with cloudpickle: a class of a notebook or
of `__main__`, an instance, and a class without `decode` for pairs (x, y). Only the folder's owner can read or write the
file, and processes load it only from this folder. Data from a network are never unpickled (docs/security.md).
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import pickle
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, get_type_hints

import cloudpickle
import msgspec

from doll.api.items import Items
from doll.errors import ConfigError
from doll.task.base import Task
from doll.task.pairs import PairTask, write_records

PICKLE: Final = "task.cloudpickle"
HOLDOUT: Final = "held_out.records"
_FILE: Final = "task.py"
_TEXT: Final = '''"""The task of this run, as doll.train got it. {about}"""

from doll.api.shipping import shipped

{name} = shipped(__file__)
'''


def task_class(task: Any) -> type[Task]:
    """Return the class of a task that is given as a class or as an instance.

    Raises:
        ConfigError: `task` is neither.
    """
    cls = task if isinstance(task, type) else type(task)
    if not issubclass(cls, Task):
        raise ConfigError(f"task: expected a subclass of doll.Task, or an instance of one, got {cls.__name__}")
    return cls


def write_task(folder: Path, task: Any, *, are_pairs: bool, held_out: Items | None) -> str:
    """Write a task into a run folder; return the value of `task.class` for the job file.

    Args:
        task: a class, or an instance.
        are_pairs: whether the source contains pairs (x, y), which the class does not need to decode.
        held_out: samples that are never learned; they replace the class's `holdout`. None: the class's `holdout` is
            used.

    Raises:
        ConfigError: `task` is not a task, its class refers to an object that cannot be written, or a held-out sample is
            not valid.
    """
    cls = task_class(task)
    decodes = cls.decode is not Task.decode or cls.decode_record is not Task.decode_record
    if not decodes and not are_pairs:
        raise ConfigError(
            f"task: expected {cls.__name__} to define decode(record), or a source of pairs (x, y), which need none"
        )
    if held_out is not None:
        if not decodes and not held_out.are_pairs:
            raise ConfigError(
                f"held_out: expected pairs (x, y), as the source has, since {cls.__name__} does not define decode"
            )
        write_records(folder / HOLDOUT, held_out.records)
    as_pairs = not decodes or held_out is not None
    if task is cls and not as_pairs and cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__:
        return f"{cls.__module__}:{cls.__qualname__}"
    try:
        holds_pairs = held_out is not None and held_out.are_pairs
        content = _pickled({"task": task, "as_pairs": as_pairs, "decodes": decodes, "holds_pairs": holds_pairs})
    except Exception as exc:  # pickling runs code of any object that the class refers to
        raise ConfigError(
            f"task: {cls.__name__} cannot be given to other processes: {type(exc).__name__}: {exc}; make open files, "
            "connections and the like in its methods, not outside of it"
        ) from exc
    descriptor = os.open(folder / PICKLE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    try:
        (folder / "task.source.py").write_text(inspect.getsource(cls), encoding="utf-8")  # for humans only
        about = "Its source is in task.source.py."
    except (OSError, TypeError):
        about = "Its source is not known."
    (folder / _FILE).write_text(_TEXT.format(about=about, name=cls.__name__), encoding="utf-8")
    return f"{folder / _FILE}:{cls.__name__}"


def _pickled(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles classes of a notebook together with the types of their fields, which cloudpickle omits.

    cloudpickle first creates a class without annotations and sets its attributes afterwards. But a `msgspec.Struct`
    determines its fields when the class is created, so it would have no fields. Annotations that are text (`from
    __future__ import annotations`) name objects of the notebook, which do not exist in the process that loads the
    class.
    """

    def reducer_override(self, obj: Any) -> Any:
        if obj is dataclasses.MISSING:
            return "MISSING"  # loads as the object of the reading process: it is compared by identity
        if isinstance(obj, msgspec.Meta):
            given = {name: getattr(obj, name) for name in dir(obj) if not name.startswith("_")}
            return _make, (msgspec.Meta, {name: value for name, value in given.items() if value is not None})
        reduced = super().reducer_override(obj)
        if not isinstance(obj, type) or not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced  # not a class, or a class of a module
        make, args, (members, slots), *rest = reduced
        members.pop("__msgspec_cache__", None)  # belongs to this process and cannot be pickled
        if annotations := inspect.get_annotations(obj):
            try:
                hints = get_type_hints(obj, include_extras=True)
            except (
                NameError,
                TypeError,
                AttributeError,
                SyntaxError,
            ):  # these annotations are unusable anyway
                hints = {}
            members["__annotations__"] = annotations | {name: hints[name] for name in annotations if name in hints}
        if issubclass(obj, msgspec.Struct):
            metaclass, name, bases, namespace, *_ = args
            make, args = _make_struct, (metaclass, name, bases, namespace, *_fields_of(obj, annotations))
        return make, args, (members, slots), *rest


def _fields_of(
    cls: type[msgspec.Struct], names: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], bool, dict[str, Any]]:
    """Return the defaults of a struct's own fields, as arguments of `msgspec.field`; whether it has a `__post_init__`;
    and the options of its class."""
    fields = {field.name: field for field in msgspec.structs.fields(cls) if field.name in names}
    defaults = {
        name: {
            key: value
            for key in ("default", "default_factory")
            if (value := getattr(field, key)) is not msgspec.NODEFAULT
        }
        for name, field in fields.items()
    }
    config, parameters = cls.__struct_config__, inspect.signature(cls).parameters
    options = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    if config.tag is None:
        del options["tag"], options["tag_field"]
    options["kw_only"] = any(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in fields)
    options["rename"] = {name: field.encode_name for name, field in fields.items()}
    return defaults, hasattr(cls, "__post_init__"), options


def _make(cls: type, arguments: dict[str, Any]) -> Any:
    return cls(**arguments)


def _make_struct(
    metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any],
    defaults: dict[str, dict[str, Any]], has_post_init: bool, options: dict[str, Any],
) -> type:  # fmt: skip
    namespace = namespace | {field: msgspec.field(**given) for field, given in defaults.items() if given}
    namespace["__annotations__"] = dict.fromkeys(defaults, Any)
    if has_post_init:
        namespace["__post_init__"] = _post_init
    return types.new_class(name, bases, {"metaclass": metaclass, **options}, lambda body: body.update(namespace))


def _post_init(self: Any) -> None:
    """Call the class's own `__post_init__`. It is set after the class is created, but msgspec looks for it before."""
    type(self).__post_init__(self)


def shipped(file: str) -> type[Task]:
    """Return the task that `write_task` has written to the folder of `file`.

    Raises:
        ConfigError: another user could have written it, or this Python cannot load it.
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
    except Exception as exc:  # unpickling imports and runs code that the class refers to
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
            members |= {"holdout_file": folder / HOLDOUT, "holdout_are_pairs": content["holds_pairs"]}
            names.append("holdout")
        members |= {name: getattr(PairTask, name) for name in names}
    if task is not cls:
        members["__init__"] = lambda self: self.__dict__.update(vars(task))
    return type(cls.__name__, bases, members)
