"""DOLL: online learning on Kafka streams with preemptible machines.

Importing this package starts nothing, opens nothing and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BadRecordsError", "BoundedEmbedding", "BoundedEmbeddingBag", "ConfigError", "DollError", "Field", "FieldsTask",
    "GreyImageTask", "JoinedRecord", "JsonTask", "Record", "Records", "RetryLater", "Run", "RunFailedError", "Sample",
    "Samples", "SkipRecord", "Task", "TextTask", "UInt64", "__version__", "compare", "hash_ids", "losses", "metrics",
    "open", "pad", "plan", "simulate", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from doll import losses, metrics
    from doll.api.planning import compare, plan, simulate
    from doll.api.run import Run, RunFailedError
    from doll.api.train import open_run as open
    from doll.api.train import train
    from doll.errors import BadRecordsError, ConfigError, DollError, RetryLater, SkipRecord
    from doll.formats.reader import UInt64
    from doll.tables.bounded_embedding import BoundedEmbedding, BoundedEmbeddingBag
    from doll.task.base import Sample, Samples, Task
    from doll.task.fields_task import FieldsTask, JoinedRecord, JsonTask
    from doll.task.forms import Field, pad
    from doll.task.hashing import hash_ids
    from doll.task.images import GreyImageTask
    from doll.task.records import Record, Records
    from doll.task.text import TextTask

_MODULES = {
    name: module
    for module, names in {
        "api.planning": ("compare", "plan", "simulate"),
        "api.run": ("Run", "RunFailedError"),
        "api.train": ("open", "train"),
        "errors": ("BadRecordsError", "ConfigError", "DollError", "RetryLater", "SkipRecord"),
        "formats.reader": ("UInt64",),
        "tables.bounded_embedding": ("BoundedEmbedding", "BoundedEmbeddingBag"),
        "task.base": ("Sample", "Samples", "Task"),
        "task.fields_task": ("FieldsTask", "JoinedRecord", "JsonTask"),
        "task.forms": ("Field", "pad"),
        "task.hashing": ("hash_ids",),
        "task.images": ("GreyImageTask",),
        "task.records": ("Record", "Records"),
        "task.text": ("TextTask",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    # `Task` needs numpy and, when it is used, torch; `import doll` must stay free of both.
    if name in ("losses", "metrics"):
        return importlib.import_module(f"doll.{name}")
    if name in _MODULES:
        attribute = "open_run" if name == "open" else name
        return getattr(importlib.import_module(f"doll.{_MODULES[name]}"), attribute)
    raise AttributeError(f"module 'doll' has no attribute {name!r}")
