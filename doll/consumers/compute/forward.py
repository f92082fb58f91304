"""How a worker runs its module: in which precision, and compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import torch

from doll.telemetry import get_logger

log = get_logger(__name__)

T = TypeVar("T")


class ForwardPasses:
    """Runs forward and loss. Not thread-safe: one thread computes.

    `bf16` is `torch.autocast`: parameters, gradients and the sum of a set stay float32. A module that is compiled is
    the same module with the same parameters; if compiled code fails and the module itself does not, the rest of the
    job runs without it.
    """

    def __init__(
        self, module: torch.nn.Module, device: str = "cpu", precision: Literal["float32", "bf16"] = "float32", *,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        self._module = module
        self._device_type = device.partition(":")[0]
        self._precision = precision
        self._compiled: Any = torch.compile(module) if compiles else None

    def run(self, forward: Callable[[torch.nn.Module], T], undo: Callable[[], None]) -> T:
        """The result of `forward` for the module, which it may call more than once.

        Args:
            undo: puts the module back to what it was before a pass. Compiled code that fails may have run in part, and
                may have changed buffers, such as the statistics of batch norm.
        """
        if self._compiled is not None:
            try:
                with self._context():
                    return forward(self._compiled)
            except Exception as exc:  # of the compiler, of its code, or of the user's
                undo()
                with self._context():
                    result = forward(self._module)
                self._compiled = None
                log.warning("not_compiled", error=f"{type(exc).__name__}: {exc}"[:500], hint="worker.compile: false")
                return result
        with self._context():
            return forward(self._module)

    def _context(self) -> AbstractContextManager[Any]:
        if self._precision == "float32":
            return nullcontext()
        return torch.autocast(self._device_type, dtype=torch.bfloat16)
