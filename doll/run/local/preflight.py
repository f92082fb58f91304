"""Checks, without running the job, that the files and the task class of a job file exist."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.formats import require_format
from doll.process.platform import require_fork
from doll.run import examples
from doll.task.base import moved

if TYPE_CHECKING:
    from doll.model.initial_weights import InitReport


def check_files(config: JobConfig) -> None:
    """Check that every file of the job file exists, and that the decoder of its stream is installed.

    Raises:
        ConfigError: names the keys whose files are missing, or the missing extra.
    """
    require_format(config.data.format)
    missing = examples.missing_files(config)
    if missing:
        lines = [f"{key}: expected a file, but {path} does not exist" for key, path in missing]
        if examples.ships(config):
            lines.append(
                "DOLL does not ship this example's data: doll example copy NAME FOLDER, and set these keys in it"
            )
        raise ConfigError("\n".join(lines))


def check_task(config: JobConfig) -> None:
    """Check that the module of the task contains its class. It is only parsed, because importing torch takes seconds.

    Raises:
        ConfigError: the file, the module or the class does not exist.
    """
    module, _, name = config.task.cls.rpartition(":")
    path = config.path(Path(module)) if module.endswith(".py") else _find(module, config)
    if path is None:
        return
    if not path.is_file():
        raise ConfigError(f"task.class: expected a Python file, but {path} does not exist")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise ConfigError(f"task.class: cannot read {path}: {exc}") from exc
    names = set(_names(tree.body))
    if name not in names and "*" not in names:
        raise ConfigError(f"task.class: {module!r} has no class {name!r}{_hint(tree, name)}")


def check_pipeline(config: JobConfig) -> None:
    """Check that the model can be cut into the stages of pipelined workers. If workers are pipelines, imports torch.

    Raises:
        ConfigError: the task cannot be loaded, or its model cannot be cut in this way.
    """
    if config.worker.pipeline is None:
        return
    from doll.model.flat_model import build
    from doll.pipeline.planner.cut import cut
    from doll.task.base import load_task

    task = load_task(config)
    module = build(config, task, with_rows=False).module
    for worker in range(config.data.workers if len(config.worker.pipeline.devices) > 1 else 1):
        cut(config, task, module, worker)


def check_devices(config: JobConfig) -> None:
    """Check that this machine has the devices of its workers. If these are not CPUs, imports torch.

    Raises:
        ConfigError: this machine lacks a device, or cannot fork stages.
    """
    if config.worker.device != "cpu":
        from doll.model.devices import resolve

        resolve(config.worker.device, 0)
    if config.worker.pipeline is None:
        return
    require_fork()
    from doll.pipeline.links.device import check_device

    for worker in range(config.data.workers):
        for stage, device in enumerate(config.worker.pipeline.devices_of(worker), 1):
            try:
                check_device(device.device)
            except ConfigError as exc:
                raise ConfigError(f"worker.pipeline.devices: worker {worker}, stage {stage}: {exc}") from exc


class CheckedModel(NamedTuple):
    """The result of a trial build of a job's model.

    Attributes:
        parameters: number of trainable parameters, including those of tables.
        values: number of values of the model without tables.
        shards: number of shards among which it is divided.
        init_from: the tensors that `training.init_from` sets. None: the job file does not have this key, or the key was
            not checked.
    """

    parameters: int
    values: int
    shards: int
    init_from: InitReport | None


def check_model(config: JobConfig, *, begins: bool = True) -> CheckedModel:
    """Import the task, build its model, and compare it with `training.init_from`. Imports torch.

    Args:
        begins: whether the job starts without a checkpoint.

    Raises:
        ConfigError: the task cannot be loaded, or its model does not fit the policy, the optimizer, or the initial
            weights.
        CheckpointError: the initial weights are in checkpoints that cannot be read.
    """
    from doll.model.flat_model import build
    from doll.optim.recipe import check_recipe
    from doll.ps.start import matched
    from doll.task.base import load_task

    model = build(config, load_task(config), with_rows=False, in_files=config.ps.shards != 1)
    check_recipe(config.training, model)
    initial = matched(config, model) if begins else None
    parameters, report = model.num_parameters + model.num_table_values, None if initial is None else initial.report
    return CheckedModel(parameters, model.flat.numel(), len(model.slices), report)


def _find(module: str, config: JobConfig) -> Path | None:
    """Return the source file of a module; None if it has none (built-in, compiled)."""
    folder = str(config.base_folder)
    sys.path.append(folder)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as exc:
        raise ConfigError(f"task.class: cannot import {module!r}: {exc}{moved(module)}") from exc
    finally:
        sys.path.remove(folder)
    if spec is None:
        raise ConfigError(
            f"task.class: no module {module!r}: expected one that is installed or beside the job file, "
            "or a file, as in my_task.py:MyTask"
        )
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that the source of a module binds at its top level."""
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
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    near = difflib.get_close_matches(name, classes, n=1)
    if near:
        return f" (did you mean {near[0]!r}?)"
    return f" (it has {', '.join(classes)})" if classes else ""
