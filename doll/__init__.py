"""DOLL: online learning on Kafka streams with preemptible machines.

Importing this package starts nothing, opens nothing and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BadRecordsError", "FieldsTask", "GreyImageTask", "JsonTask", "Record", "Records", "RetryLater", "Sample",
    "Samples", "SkipRecord", "Task", "TextTask", "__version__",
]  # fmt: skip

if TYPE_CHECKING:
    from doll.errors import BadRecordsError, RetryLater, SkipRecord
    from doll.task.base import Sample, Samples, Task
    from doll.task.fields_task import FieldsTask, JsonTask
    from doll.task.images import GreyImageTask
    from doll.task.records import Record, Records
    from doll.task.text import TextTask

_MODULES = {
    "BadRecordsError": "errors",
    "FieldsTask": "task.fields_task",
    "GreyImageTask": "task.images",
    "JsonTask": "task.fields_task",
    "Record": "task.records",
    "Records": "task.records",
    "RetryLater": "errors",
    "Sample": "task.base",
    "Samples": "task.base",
    "SkipRecord": "errors",
    "Task": "task.base",
    "TextTask": "task.text",
}


def __getattr__(name: str) -> Any:
    # `Task` needs numpy and, when it is used, torch; `import doll` must stay free of both.
    if name in _MODULES:
        return getattr(importlib.import_module(f"doll.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'doll' has no attribute {name!r}")
