"""Read the weights that `training.init_from` names: checkpoints of a run, a safetensors file, or torch's state_dict.

A file of torch is a pickle. It is read with `weights_only=True`, which creates only tensors and plain containers and
refuses everything else, so no code in it is run (docs/security.md).
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from doll.config import JobConfig, load
from doll.errors import CheckpointError, ConfigError
from doll.records.bounded import short
from doll.storage.checkpoints import CheckpointStore, checkpoints_among, resolve_version
from doll.storage.stores import INIT_FROM, SAFETENSORS, TORCH, checkpoint_location, find_source, open_place, open_store
from doll.tables.bounds import part_name

_JOB: Final = "job.yaml"
_WEIGHTS: Final = "weights"
_WRAPPED: Final = ("state_dict", "model_state_dict", "model")  # its keys in checkpoints of programs
_GLOBAL: Final = re.compile(r"Unsupported global: GLOBAL (\S+)")
_TABLE: Final = re.compile(r"table\.(.+)\.values")


class Source(NamedTuple):
    """Tensors by name, with their origin and sha256."""

    name: str
    tensors: Mapping[str, torch.Tensor]


def read_source(config: JobConfig, source: str) -> Source:
    """Return the tensors that `training.init_from` names. Raise ConfigError if the file or run does not exist or cannot
    be read, and CheckpointError if checkpoints cannot be read, or the version is not kept."""
    path, version = find_source(config, source)
    try:
        if isinstance(path, str):
            return _of_checkpoints(open_place(path, None), path, version)
        if path.is_dir():
            return _of_folder(path, version)
    except CheckpointError as exc:
        raise type(exc)(f"{INIT_FROM}: {exc}") from exc
    if version is not None:
        raise ConfigError(f"{INIT_FROM}: expected a version of a run folder, got {source}, which is a file")
    if path.suffix == SAFETENSORS:
        return _named(path.name, _of_safetensors(path))
    if path.suffix in TORCH:
        return _named(*_of_torch(path))
    raise ConfigError(f"{INIT_FROM}: expected a file that ends in {', '.join((SAFETENSORS, *TORCH))}, got {path}")


def _of_folder(path: Path, version: str | None) -> Source:
    if (path / _JOB).is_file():
        job = load(path / _JOB)
        return _of_checkpoints(open_store(job, path), str(checkpoint_location(job, path)), version)
    if not checkpoints_among(item.name for item in path.iterdir()):
        raise ConfigError(f"{INIT_FROM}: expected the folder of a run (with a {_JOB}) or of checkpoints, got {path}")
    return _of_checkpoints(open_place(path, None), str(path), version)


def _of_checkpoints(store: CheckpointStore, location: str, version: str | None) -> Source:
    checkpoint = store.load_newest(None, None if version is None else resolve_version(store, version))
    if checkpoint is None:
        raise ConfigError(f"{INIT_FROM}: no checkpoint in {location}: expected a run that has learned something")
    where = f"{location}, version {checkpoint.version}"
    if not checkpoint.layout.floats and checkpoint.tensors[_WEIGHTS].size:
        raise CheckpointError(
            f"{where}: this checkpoint is of an earlier release and does not name its tensors: export it (doll export "
            f"RUN), and give the file to {INIT_FROM}"
        )
    try:
        arrays = checkpoint.layout.tensors(checkpoint.tensors[_WEIGHTS])
        arrays |= _rows_of_tables(checkpoint.tensors)
    except (KeyError, ValueError, IndexError) as exc:
        raise CheckpointError(f"{where}: its weights or tables are not as it says itself: {exc}") from exc
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return _named(f"version {checkpoint.version} of {checkpoint.job}", tensors)


def _rows_of_tables(stored: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return all rows of each table by name; for a bounded table, the ids that have rows, the rows, and their
    counts."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for tensor, values in stored.items():
        if (match := _TABLE.fullmatch(tensor)) is None:
            continue
        table = match[1]
        if (ids := stored.get(f"table.{table}.ids")) is None:
            arrays[table] = values
            continue
        has_row = ids >= 0
        parts = {"ids": ids, "rows": values, "counts": stored[f"table.{table}.counts"]}
        arrays |= {part_name(table, part): array[has_row] for part, array in parts.items()}
    return arrays


def _of_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ConfigError(f"{INIT_FROM}: cannot read {path} as safetensors: {short(exc)}") from exc


def _of_torch(path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Return a `state_dict`, alone or inside a program's checkpoint, and its name."""
    saved = "torch.save(model.state_dict(), ...)"
    try:
        with warnings.catch_warnings(action="ignore"):  # hides warnings about files that are refused anyway
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:  # a malformed file may make torch raise anything
        # torch's message has several lines, and advises to run the code in the file.
        if type(exc).__name__ == "UnpicklingError":
            named = _GLOBAL.search(str(exc))
            what = short(named[1]) if named else "other objects"
            problem = f"expected tensors, got a pickle of {what}, which is not read, since that runs code"
        elif "TorchScript" in str(exc):
            problem = "expected tensors, got a TorchScript archive: torch.jit.load reads it"
        else:
            problem = f"is damaged, or no file of torch ({type(exc).__name__})"
        raise ConfigError(f"{INIT_FROM}: {path}: {problem}: save the model where it was made with {saved}") from exc
    source = path.name
    while isinstance(content, Mapping) and (key := _wrapper(content)):
        source, content = f"{source}, its {key}", content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        got = (
            f"a dict of {short(', '.join(map(str, content)))}"
            if isinstance(content, Mapping)
            else type(content).__name__
        )
        raise ConfigError(
            f"{INIT_FROM}: {path}: expected a state_dict, names with tensors, by itself or as "
            f"{', '.join(map(repr, _WRAPPED))} of a dict, got {got}: save it with {saved}"
        )
    for name, tensor in content.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise ConfigError(
                f"{INIT_FROM}: {path}: expected dense tensors of real numbers, got {name} as {tensor.dtype}"
            )
    return source, dict(content)


def _wrapper(content: Mapping[Any, Any]) -> str:
    return next((key for key in _WRAPPED if isinstance(content.get(key), Mapping)), "")


def _named(name: str, tensors: Mapping[str, torch.Tensor]) -> Source:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return Source(f"{name} (sha256 {digest.hexdigest()[:16]})", tensors)
