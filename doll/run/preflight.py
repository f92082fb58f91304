"""Checking what a job file points to without running it: files that are there, a class that stands in its module."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from doll.errors import ConfigError

if TYPE_CHECKING:
    from doll.config import JobConfig


def check_files(config: JobConfig) -> None:
    """Every file that the job file names is there.

    Raises:
        ConfigError: names the keys whose files are missing.
    """
    named = [("arrivals.trace", config.arrivals.trace)]
    for key in ("path", "images", "labels"):
        named.append((f"source.{key}", getattr(config.source, key, None)))
    missing = [(key, config.path(path)) for key, path in named if path is not None and not config.path(path).is_file()]
    if missing:
        from doll.cli import examples

        lines = [f"{key}: expected a file, found nothing at {path}" for key, path in missing]
        if config.base_folder == examples.folder():
            lines.append(
                "DOLL does not ship this example's data: doll example copy NAME FOLDER, and set these keys in it"
            )
        raise ConfigError("\n".join(lines))


def check_task(config: JobConfig) -> None:
    """The task's class stands in its module. The module is read, not run: importing torch would take seconds.

    Raises:
        ConfigError: there is no such file, module or class.
    """
    module, _, name = config.task.cls.rpartition(":")
    path = config.path(Path(module)) if module.endswith(".py") else _find(module, config)
    if path is None:
        return
    if not path.is_file():
        raise ConfigError(f"task.class: expected a Python file, found nothing at {path}")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ConfigError(f"task.class: cannot read {path}: {exc}") from exc
    names = set(_names(tree.body))
    if name not in names and "*" not in names:
        raise ConfigError(f"task.class: {module!r} has no class {name!r}{_hint(tree, name)}")


def _find(module: str, config: JobConfig) -> Path | None:
    """The source file of a module; None where it has none to read (a built-in, a compiled module)."""
    folder = str(config.base_folder)
    sys.path.append(folder)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as exc:
        raise ConfigError(f"task.class: cannot import {module!r}: {exc}") from exc
    finally:
        sys.path.remove(folder)
    if spec is None:
        raise ConfigError(
            f"task.class: no module {module!r}: expected one that is installed or stands beside the job file, "
            "or a file, as in my_task.py:MyTask"
        )
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's top level binds, as far as that can be read."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            case ast.Assign():
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name() as target):
                yield target.id
            case ast.If() | ast.Try():
                yield from _names(node.body)
                yield from _names(node.orelse)
                for handler in getattr(node, "handlers", []):
                    yield from _names(handler.body)


def _hint(tree: ast.Module, name: str) -> str:
    import difflib

    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    near = difflib.get_close_matches(name, classes, n=1)
    if near:
        return f" (did you mean {near[0]!r}?)"
    return f" (it has {', '.join(classes)})" if classes else ""
