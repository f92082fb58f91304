"""`doll export`: writes a version of the model for other programs, as its tensors or as a computation graph.

`model.json` describes the version and its use. Before a graph is written, it is compared with torch on held-out samples
of the task, or on samples of the same form.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

import doll
from doll.errors import CheckpointError, ConfigError
from doll.process.files import refuse_unwritable, replacing, write_atomically, write_json
from doll.storage.checkpoints import resolve_version
from doll.storage.version_marks import LATEST
from doll.tables.bounds import part_name

if TYPE_CHECKING:
    import torch

    from doll.config import JobConfig
    from doll.evaluation.stored_weights import StoredWeights
    from doll.model.flat_model import FlatModel
    from doll.run.portable import Graph
    from doll.task.base import Task
    from doll.task.batches import SampleBatch

ExportFormat = Literal["safetensors", "onnx", "torch.export"]
SAFETENSORS: Final = "safetensors"
_FILE: Final = "model.safetensors"
_MOST_SAMPLES: Final = 256  # for the comparison of a graph with torch
_HOW_TO_LOAD = """\
from pathlib import Path
from safetensors.torch import load_file
from doll.config import load
from doll.task.base import load_task
model = load_task(load(Path("job.yaml"))).build_model()  # the job file, of the run folder or your own
model.load_state_dict(load_file("model.safetensors"))
model.eval()
"""
_HOW_TO_RUN: Final = {
    "onnx": """\
import onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, dict(zip([item.name for item in session.get_inputs()], [INPUTS])))
""",
    "torch.export": """\
import torch
model = torch.export.load("model.pt2").module()
output = model(INPUTS)
""",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The version to export, and its format.

    Attributes:
        version: `latest`, a number, or an alias.
        average: see `newest_weights`.
        samples: values of records for the comparison of a graph, if the task has no held-out samples.
    """

    version: str = LATEST
    format: ExportFormat = SAFETENSORS
    average: bool | None = None
    samples: Iterable[bytes] = ()


NEWEST: Final = ExportOptions()


def export_model(
    config: JobConfig, run_folder: Path, out_folder: Path, options: ExportOptions = NEWEST
) -> dict[str, Any]:
    """Write a version of the model to `out_folder`; return the content of `model.json`.

    The tensors have the names of the module's `state_dict()`.

    Raises:
        CheckpointError: there is no checkpoint (of this version), or it belongs to another job or model.
        ConfigError: the task cannot be loaded, the folder cannot be written, or the model cannot be converted to the
            format.
    """
    with refuse_unwritable(out_folder):  # before the model is loaded, which takes seconds
        out_folder.mkdir(parents=True, exist_ok=True)
    from doll.evaluation.stored_weights import newest_weights
    from doll.model.flat_model import build
    from doll.storage.stores import checkpoint_location, open_store
    from doll.task.base import load_task

    version = None
    if options.version != LATEST:
        version = resolve_version(open_store(config, run_folder), options.version)
    task = load_task(config)
    model = build(config, task, with_rows=False, in_files=config.ps.shards != 1)
    stored = newest_weights(config, run_folder, model, version=version, average=options.average, in_place=True)
    if stored is None:
        raise CheckpointError(
            f"no checkpoint in {checkpoint_location(config, run_folder)}: nothing has been learned yet, or "
            "checkpoint.folder or --run-folder is wrong"
        )
    return write_model(config, task, model, stored, out_folder, options)


def write_model(
    config: JobConfig, task: Task, model: FlatModel, stored: StoredWeights, out_folder: Path, options: ExportOptions
) -> dict[str, Any]:
    """Write `stored`, weights of `model`; see `export_model`."""
    stored.load_into(model)
    tensors = tensors_of(model, stored)
    content: dict[str, Any] = {
        "job": config.job,
        "version": stored.version,
        "average": stored.is_average,
        "term": stored.term,
        "task": {"class": config.task.cls, "args": config.task.args},
        "parameters": model.num_parameters + model.num_table_values,
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "fingerprint": stored.fingerprint,
        "format": options.format,
        "file": _FILE,
        "how_to_load": _HOW_TO_LOAD.splitlines(),
        "doll_version": doll.__version__,
    }
    if options.format == SAFETENSORS:
        _write_tensors(out_folder / _FILE, tensors, config.job, stored.version)
    else:
        from doll.run.portable import FILES

        graph = _graph(config, task, model, stored, tensors, options)
        file = FILES[options.format]
        how = _HOW_TO_RUN[options.format].replace("INPUTS", ", ".join(graph.inputs))
        content |= {
            "file": file, "inputs": graph.inputs, "how_to_load": how.splitlines(),
            "compared": {"samples": graph.num_samples, "largest_difference": graph.largest_difference},
        }  # fmt: skip
        with refuse_unwritable(out_folder / file):
            write_atomically(out_folder / file, graph.content)
    with refuse_unwritable(out_folder / "model.json"):
        write_json(out_folder / "model.json", content)
    return content


def tensors_of(model: FlatModel, stored: StoredWeights) -> dict[str, torch.Tensor]:
    """Return the tensors of the `state_dict()` of the task's complete module, as `build_model` creates it.

    The result includes the tables, which `model` does not have. `stored` must have been loaded into `model`. The
    tensors share no memory, because safetensors refuses shared memory.
    """
    import torch

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.module.state_dict().items()}
    if model.tables is None:
        return tensors
    for table, names in model.tables.names.items():
        if table in stored.bounded:
            key = np.uint64(model.tables.bounds[table].initial.key).astype(np.int64)
            ids, rows = stored.bounded[table].ids, stored.bounded[table].values
            parts = [
                {part_name(name, "ids"): ids, part_name(name, "rows"): rows, part_name(name, "key"): np.array(key)}
                for name in names
            ]
        else:
            parts = [{name: stored.tables[table]} for name in names]
        for number, arrays in enumerate(parts):
            given = {name: torch.from_numpy(np.require(array, None, ["A", "W"])) for name, array in arrays.items()}
            tensors |= {name: tensor.clone() if number else tensor for name, tensor in given.items()}
    return tensors


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], job: str, version: int) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with refuse_unwritable(path), replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata={"job": job, "version": str(version)})
        except SafetensorError as exc:  # its own error if the disk is full
            raise OSError(f"{exc}") from exc
        temporary.chmod(0o644)  # safetensors makes it readable only by its owner


def _graph(
    config: JobConfig, task: Task, model: FlatModel, stored: StoredWeights, tensors: Mapping[str, torch.Tensor],
    options: ExportOptions,
) -> Graph:  # fmt: skip
    from doll.run.portable import make_graph, whole_module

    assert options.format != SAFETENSORS
    if stored.bounded:
        raise ConfigError(
            f"--format {options.format}: the operator doll.BoundedEmbedding ({', '.join(stored.bounded)}) has no form "
            f"in {options.format}: it makes rows of ids that it has not seen; --format safetensors writes the rows "
            "that there are"
        )
    samples = _samples(config, task, options.samples)
    return make_graph(options.format, task, whole_module(config, task, tensors), model.module.eval(), samples)


def _samples(config: JobConfig, task: Task, values: Iterable[bytes]) -> SampleBatch:
    """Return samples for the comparison of a graph: the given ones, held-out ones, or the first ones of the source."""
    from doll.producers.sources import open_streams
    from doll.task.base import described
    from doll.task.batches import batch_of

    kept = list(itertools.islice(values, _MOST_SAMPLES))
    try:
        if not kept:
            held_out = batch_of(task, task.holdout(), _MOST_SAMPLES)
            if held_out.num_samples:
                return held_out
            source = open_streams(config, [0] * config.data.num_partitions)[0]
            kept = list(itertools.islice(source, _MOST_SAMPLES))
        samples = batch_of(task, map(task.decode, kept), _MOST_SAMPLES)
    except Exception as exc:  # the user's code may raise anything
        raise ConfigError(
            f"--format: expected samples to compare with torch on: define {type(task).__name__}.holdout(), or give "
            f"--samples FILE, a record in each line ({described(exc)})"
        ) from exc
    if not samples.num_samples:
        raise ConfigError("--samples: expected at least one record that gives a sample, got none")
    return samples
