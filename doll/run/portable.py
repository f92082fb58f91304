"""Exports a model as a computation graph for other programs: torch.export, or ONNX. The graph is compared with the
model in torch before it is written.

The graph has the inputs and the output of `Task.forward`. It accepts any number of samples in a batch.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.extras import lacking
from doll.records.bounded import short
from doll.task import passes, trees
from doll.task.base import Task, described
from doll.task.batches import SampleBatch

Format = Literal["onnx", "torch.export"]
FILES: Final[Mapping[str, str]] = {"onnx": "model.onnx", "torch.export": "model.pt2"}
TOLERANCE: Final = 1e-5
"""The largest allowed difference from torch's output: relative to the largest output of its sample, or absolute if that
is below 1."""
_OPERATOR: Final = re.compile(r"\b(?:aten|prims|prim|torchvision|quantized)(?:::|\.)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?")
_TRACED_SAMPLES: Final = 4  # a number of samples that is unlikely to equal a layer's width
_SIZES: Final = (1, 3)  # further batch sizes of the comparison, besides all samples together


class Graph(NamedTuple):
    """A graph; the number of samples on which it was compared with torch, and the largest difference of the outputs."""

    content: bytes
    inputs: list[str]
    num_samples: int
    largest_difference: float


class _AsTheTaskUsesIt(torch.nn.Module):
    """A module that computes the output of `Task.forward` from the arrays of x."""

    def __init__(self, task: Task, module: torch.nn.Module, structure: Any) -> None:
        super().__init__()
        self.module = module
        self._task = task
        self._structure = structure

    def forward(self, *arrays: torch.Tensor) -> Any:
        x = trees.tree_of(self._structure, arrays)
        if passes.takes(self._task, "forward", "group"):
            return self._task.forward(self.module, x, group=None)  # type: ignore[call-arg]
        return self._task.forward(self.module, x)


def whole_module(config: JobConfig, task: Task, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return the task's module with these tensors, tables included, in evaluation mode.

    Raises:
        ConfigError: the module cannot be built.
    """
    torch.manual_seed(config.seed)
    try:
        module = task.build_model()
        module.load_state_dict(dict(tensors))
    except Exception as exc:  # the user's code may raise anything
        raise ConfigError(f"{config.task.cls}: its model cannot be built with these tensors: {described(exc)}") from exc
    return module.eval()


def make_graph(
    kind: Format, task: Task, module: torch.nn.Module, expected: torch.nn.Module, samples: SampleBatch
) -> Graph:
    """Return the graph of `module`, after a comparison with the outputs of `expected` on `samples`.

    Raises:
        ConfigError: the graph cannot be created (the message names the operator), or its outputs differ.
    """
    example, structure = trees.flat(passes.inputs_of(task, samples.take(slice(_TRACED_SAMPLES))).x)
    names = [re.sub(r"\W+", "_", name).strip("_") for name in trees.names("x", structure)]
    for layer in module.modules():
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
            layer.sparse = False  # `sparse` only affects gradients
    wrapped = _AsTheTaskUsesIt(task, module, structure).eval()
    with _quiet(), torch.no_grad():
        program = _traced(kind, task, wrapped, tuple(example))
        if kind == "onnx":
            content, run = _onnx(program, names)
        else:
            content, run = _torch_export(program)
        worst = 0.0
        for size in sorted({*_SIZES, samples.num_samples}):
            inputs = passes.inputs_of(task, samples.take(slice(size)))
            wanted = passes.forward(task, expected, inputs)
            worst = max(worst, _difference(kind, task, _outputs(wanted), run(trees.arrays_of(inputs.x))))
    return Graph(content, names, samples.num_samples, worst)


def _traced(
    kind: Format, task: Task, wrapped: _AsTheTaskUsesIt, example: tuple[torch.Tensor, ...]
) -> torch.export.ExportedProgram:
    any_length = range(example[0].ndim if task.is_ragged else 1)  # ragged samples: also other dimensions
    shapes = tuple(
        {at: torch.export.Dim.AUTO for at in range(array.ndim) if at in any_length} for array in example
    )  # fmt: skip
    try:
        return torch.export.export(wrapped, example, dynamic_shapes=(shapes,), strict=False)
    except Exception as exc:  # from torch, or from the user's code during tracing
        raise _refusal(kind, task, exc) from exc


def _torch_export(program: torch.export.ExportedProgram) -> tuple[bytes, Callable[..., list[Any]]]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    content = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return content, lambda arrays: _outputs(loaded(*arrays))


def _onnx(program: torch.export.ExportedProgram, names: Sequence[str]) -> tuple[bytes, Callable[..., list[Any]]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # torch.onnx needs it, and says so in other words
    except ImportError as exc:
        raise lacking("--format onnx", "onnx") from exc
    try:
        made = torch.onnx.export(program, input_names=list(names), dynamo=True, verbose=False)
        assert made is not None
        content = made.model_proto.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as exc:  # from torch.onnx, onnxscript or onnxruntime
        raise _refusal("onnx", None, exc) from exc

    def run(arrays: Sequence[torch.Tensor]) -> list[Any]:
        inputs = {item.name: array.numpy() for item, array in zip(session.get_inputs(), arrays, strict=True)}
        return list(session.run(None, inputs))

    return content, run


def _refusal(kind: Format, task: Task | None, error: Exception) -> ConfigError:
    """Return the error of a failed conversion, with the operator's name."""
    chain: list[Exception] = []
    at: BaseException | None = error
    while isinstance(at, Exception) and len(chain) < 10:
        chain.append(at)
        at = at.__cause__ or at.__context__
    text = " ".join(str(item) for item in chain)
    named = _OPERATOR.search(text)
    if named is not None:
        operator = named[0].replace("::", ".").removesuffix(".default")
    elif "numpy" in text:
        operator = "Tensor.numpy"
    else:
        operator = type(chain[-1]).__name__
    of = "" if task is None else f" of {type(task).__name__}"
    return ConfigError(
        f"--format {kind}: the operator {operator}{of} has no form in {'ONNX' if kind == 'onnx' else kind}: "
        f"{short(described(chain[-1]), 400)}; --format safetensors writes the tensors of any model"
    )


def _difference(kind: str, task: Task, wanted: Sequence[Any], got: Sequence[Any]) -> float:
    if [np.shape(item) for item in wanted] != [np.shape(item) for item in got]:
        raise ConfigError(
            f"--format {kind}: expected outputs of shapes {[np.shape(item) for item in wanted]}, as "
            f"{type(task).__name__}.forward gives them, got {[np.shape(item) for item in got]}: does it depend on the "
            "number of samples?"
        )
    worst = 0.0
    for expected, actual in zip(wanted, got, strict=True):
        a, b = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        largest = np.abs(a).max(axis=tuple(range(1, a.ndim)), keepdims=True, initial=0.0)
        difference = np.abs(a - b) / np.maximum(1.0, largest)
        difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
        worst = max(worst, float(difference.max(initial=0.0)) if not np.isnan(difference).any() else np.inf)
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"--format {kind}: expected the outputs of {type(task).__name__}.forward within {TOLERANCE:g}, got a "
            f"difference of {worst:.3g}: nothing is written"
        )
    return worst


def _outputs(output: Any) -> list[Any]:
    """Return the arrays of an output, in order."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress messages of the exporters, because errors state the reason."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "torch.fx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
