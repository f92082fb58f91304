"""The construction of a task's model without memory for its tables, for workers: they get rows from the server.

Embeddings with `sparse=True` are constructed on torch's device meta. Their random numbers are drawn in pieces and
discarded, so that all other values are the same as in a model with tables. Frozen layers must have the same values,
because a checksum compares them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from doll.telemetry import get_logger

log = get_logger(__name__)

_DRAWS: Final = ("aten::normal_", "aten::uniform_")
# A multiple of 16. Torch draws normal numbers in blocks of 16; for an incomplete block, it draws the last 16 again.
_PIECE: Final = 1 << 16
_INIT: Final = "__init__"


def build_without_tables(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return the result of `build()`, with its tables on the device meta if possible.

    This is not possible if `build` reads a table's values or device, computes with them, freezes a table, or draws
    random numbers for it in an unknown way. Then `build` is called again with memory for the tables.
    """
    state = torch.get_rng_state()
    draws = _CountedDraws()
    try:
        with _tables_on_meta(), draws, _DeviceQuestions(draws):
            module = build()
    except Exception as exc:  # the user's code may raise anything; errors of the second call are raised
        reason = f"{type(exc).__name__}: {exc}"
    else:
        if not (problem := f"{draws.unknown} on a table" if draws.unknown else _needs_memory(module)):
            return module
        reason = problem
    log.info("tables_built_in_full", reason=reason)
    torch.set_rng_state(state)
    return build()


def _needs_memory(module: torch.nn.Module) -> str:
    """Return the name of a tensor of `module` that has no memory and is not a table; "" if there is no such tensor."""
    if not isinstance(module, torch.nn.Module):
        return ""  # the caller reports this error
    for path, part in module.named_modules():
        is_table = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        for name, value in {**part._parameters, **part._buffers, **vars(part)}.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.is_meta and not (is_table and leaf.requires_grad):
                    return f"{path}.{name} is a frozen table, or made of one".lstrip(".")
    return ""


class _CountedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that draws the random numbers that operations on tensors without memory would draw.

    Attributes:
        unknown: operation that would make a different model; "": no such operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch would load its compiler, which takes seconds, to disable it for this class

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown = ""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = str(func._schema.name)
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            if not all(tensor.is_meta for tensor in tensors) and not (name == "aten::copy_" and tensors[0].is_meta):
                self.unknown = name
                # Refuse such operations, because torch does not refuse all: some would read memory that does not exist.
                raise RuntimeError(f"{name} on a table and another tensor")
            if torch.Tag.nondeterministic_seeded in func.tags:
                if name in _DRAWS and tensors[0].is_contiguous():
                    self._draw(func, tensors[0], args[1:], named)
                else:
                    self.unknown = name
            if name.endswith("_") and tensors[0].is_meta:
                return tensors[0]  # do nothing: in torch, this operation in place would first load the compiler
        return func(*args, **named)

    def _draw(self, func: Any, tensor: torch.Tensor, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        left = tensor.numel()
        scratch = torch.empty(min(left, 2 * _PIECE), dtype=tensor.dtype)
        while left:
            count = _PIECE if left >= 2 * _PIECE else left
            func(scratch[:count], *args, **named)
            left -= count


class _DeviceQuestions(TorchFunctionMode):
    """A mode that notices questions about a tensor's device. `torch.nn.init.trunc_normal_` draws nothing on meta."""

    def __init__(self, draws: _CountedDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if answer is True and getattr(func, "__self__", None) is torch.Tensor.is_meta:
            self._draws.unknown = self._draws.unknown or "is_meta"
        return answer


@contextmanager
def _tables_on_meta() -> Iterator[None]:
    """Construct embeddings with sparse=True without memory in this context, in any thread."""
    classes = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    before = [vars(cls)[_INIT] for cls in classes]
    for cls, init in zip(classes, before, strict=True):
        setattr(cls, _INIT, _on_meta(init))
    try:
        yield
    finally:
        for cls, init in zip(classes, before, strict=True):
            setattr(cls, _INIT, init)


def _on_meta(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def construct(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("sparse") and bound.arguments.get("_weight") is None:
            bound.arguments["device"] = "meta"
        init(*bound.args, **bound.kwargs)

    return construct
