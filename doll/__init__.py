"""DOLL: online learning on Kafka streams with preemptible machines.

Importing this package starts nothing, opens nothing and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BadRecordsError", "BoundedEmbedding", "BoundedEmbeddingBag", "ConfigError", "DollError", "Field", "FieldsTask",
    "GreyImageTask", "JsonTask", "Record", "Records", "RetryLater", "Run", "RunFailedError", "Sample", "Samples",
    "SkipRecord", "Task", "TextTask", "UInt64", "__version__", "compare", "open", "pad", "plan", "simulate", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from doll.api.planning import compare, plan, simulate
    from doll.api.run import Run, RunFailedError
    from doll.api.train import open_run as open
    from doll.api.train import train
    from doll.errors import BadRecordsError, ConfigError, DollError, RetryLater, SkipRecord
    from doll.formats.reader import UInt64
    from doll.tables.bounded_embedding import BoundedEmbedding, BoundedEmbeddingBag
    from doll.task.base import Sample, Samples, Task
    from doll.task.fields_task import FieldsTask, JsonTask
    from doll.task.forms import Field
    from doll.task.images import GreyImageTask
    from doll.task.padding import pad
    from doll.task.records import Record, Records
    from doll.task.text import TextTask

_MODULES = {
    "BadRecordsError": "errors",
    "BoundedEmbedding": "tables.bounded_embedding",
    "BoundedEmbeddingBag": "tables.bounded_embedding",
    "ConfigError": "errors",
    "DollError": "errors",
    "Field": "task.forms",
    "FieldsTask": "task.fields_task",
    "GreyImageTask": "task.images",
    "JsonTask": "task.fields_task",
    "Record": "task.records",
    "Records": "task.records",
    "RetryLater": "errors",
    "Run": "api.run",
    "RunFailedError": "api.run",
    "Sample": "task.base",
    "Samples": "task.base",
    "SkipRecord": "errors",
    "Task": "task.base",
    "TextTask": "task.text",
    "UInt64": "formats.reader",
    "compare": "api.planning",
    "open": "api.train",
    "pad": "task.padding",
    "plan": "api.planning",
    "simulate": "api.planning",
    "train": "api.train",
}


def __getattr__(name: str) -> Any:
    # `Task` needs numpy and, when it is used, torch; `import doll` must stay free of both.
    if name in _MODULES:
        attribute = "open_run" if name == "open" else name
        return getattr(importlib.import_module(f"doll.{_MODULES[name]}"), attribute)
    raise AttributeError(f"module 'doll' has no attribute {name!r}")
