"""The trained model as files that can be read without DOLL: `model.safetensors` and `model.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import doll
from doll.errors import CheckpointError
from doll.process.files import refuse_unwritable, replacing, write_json

if TYPE_CHECKING:
    from doll.config import JobConfig

_HOW_TO_LOAD = """\
from pathlib import Path
from safetensors.torch import load_file
from doll.config import load
from doll.task.base import load_task
model = load_task(load(Path("job.yaml"))).build_model()  # the job file, of the run folder or your own
model.load_state_dict(load_file("model.safetensors"))
model.eval()
"""
# Its layer has no weight: the ids that have rows, and these.
_HOW_TO_LOAD_BOUNDED = """\
from safetensors.torch import load_file
tensors = load_file("model.safetensors")
# of a doll.BoundedEmbedding `name`: row i, tensors["name.rows"][i], is that of id tensors["name.ids"][i]
# ids increase; another id has the row initial_rows(SEED, "name.weight", WIDTH, SCALE).of(ids) of doll.tables.bounds
"""


def export_model(
    config: JobConfig, run_folder: Path, out_folder: Path, *, average: bool | None = None
) -> dict[str, Any]:
    """Write the model of the newest checkpoint to `out_folder`; returns the content of `model.json`.

    The tensors have the names of the module's `state_dict()`.

    Args:
        average: as of `newest_weights`.

    Raises:
        CheckpointError: there is no checkpoint, or it belongs to another job or model.
        ConfigError: the task cannot be loaded, or the folder cannot be written.
    """
    with refuse_unwritable(out_folder):  # before the model is loaded, which takes seconds
        out_folder.mkdir(parents=True, exist_ok=True)
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from doll.evaluation.stored_weights import newest_weights
    from doll.model.flat_model import build
    from doll.storage.stores import checkpoint_location
    from doll.tables.bounds import part_name
    from doll.task.base import load_task

    model = build(config, load_task(config), with_rows=False)
    stored = newest_weights(config, run_folder, model, average=average)
    if stored is None:
        raise CheckpointError(
            f"no checkpoint in {checkpoint_location(config, run_folder)}: nothing has been learned yet, or "
            "checkpoint.folder or --run-folder is wrong"
        )
    stored.load_into(model)
    # Copies: safetensors refuses tensors that share memory, and all parameters are views of one vector.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.module.state_dict().items()}
    if model.tables is not None:
        for table, bounded in stored.bounded.items():
            parts = {"ids": bounded.ids, "rows": bounded.values}
            tensors |= {part_name(table, part): torch.from_numpy(array) for part, array in parts.items()}
        for table, names in model.tables.names.items():
            if table in stored.bounded:
                continue
            rows = torch.from_numpy(stored.tables[table])
            tensors |= {name: rows if name == names[0] else rows.clone() for name in names}
    content = {
        "job": config.job,
        "version": stored.version,
        "average": stored.is_average,
        "term": stored.term,
        "task": {"class": config.task.cls, "args": config.task.args},
        "parameters": model.num_parameters + model.num_table_values,
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "fingerprint": stored.fingerprint,
        "file": "model.safetensors",
        "how_to_load": (_HOW_TO_LOAD_BOUNDED if stored.bounded else _HOW_TO_LOAD).splitlines(),
        "doll_version": doll.__version__,
    }
    path = out_folder / "model.safetensors"
    with refuse_unwritable(path), replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"job": config.job, "version": str(stored.version)})
        except SafetensorError as exc:  # its own error for a disk that is full
            raise OSError(f"{exc}") from exc
        temporary.chmod(0o644)  # safetensors makes it readable by its owner only
    with refuse_unwritable(out_folder / "model.json"):
        write_json(out_folder / "model.json", content)
    return content
