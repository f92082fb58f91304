"""DOLL: online learning on Kafka streams with preemptible machines.

Importing this package starts nothing, opens nothing and does not import torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["JsonTask", "Sample", "Task", "__version__"]

if TYPE_CHECKING:
    from doll.task.base import Sample, Task
    from doll.task.json_task import JsonTask


def __getattr__(name: str) -> Any:
    # `Task` needs numpy and, when it is used, torch; `import doll` must stay free of both.
    if name in ("Sample", "Task"):
        import doll.task.base

        return getattr(doll.task.base, name)
    if name == "JsonTask":
        import doll.task.json_task

        return doll.task.json_task.JsonTask
    raise AttributeError(f"module 'doll' has no attribute {name!r}")
