"""DOLL: online learning on Kafka streams with preemptible machines.

Importing this package starts nothing, opens nothing and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["GreyImageTask", "JsonTask", "Sample", "Task", "TextTask", "__version__"]

if TYPE_CHECKING:
    from doll.task.base import Sample, Task
    from doll.task.images import GreyImageTask
    from doll.task.json_task import JsonTask
    from doll.task.text import TextTask

_MODULES = {
    "GreyImageTask": "images",
    "JsonTask": "json_task",
    "Sample": "base",
    "Task": "base",
    "TextTask": "text",
}  # of doll.task


def __getattr__(name: str) -> Any:
    # `Task` needs numpy and, when it is used, torch; `import doll` must stay free of both.
    if name in _MODULES:
        return getattr(importlib.import_module(f"doll.task.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'doll' has no attribute {name!r}")
