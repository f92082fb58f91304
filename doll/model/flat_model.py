"""A task's model as one flat vector. Parameters and buffers are views into it, so publishing it needs no copy.

Layout of the vector: first all trainable parameters in the order of `named_parameters()`, then all float buffers
(batch-norm statistics) in the order of `named_buffers()`, then the memory of all other buffers (counters, masks), each
from an even index on. A gradient vector has the same layout. For parameters it contains sums over samples. For float
buffers it contains the value after the batch times the number of samples, so that the parameter server can take the
mean of both. For other buffers it contains the bytes after the batch. These bytes are not float32 numbers: copy them,
never compute with them.

Frozen parameters are not in the vector. They never change, so each process makes its own in `build_model`. A checksum
in the fingerprint shows whether all processes have the same values (docs/architecture.md). Tables, the embeddings with
`sparse=True`, are not in the vector either: the server has them, and workers fetch rows (docs/decisions/0033).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib
from torch.nn.parameter import is_lazy

from doll.config import JobConfig
from doll.config.fingerprint import make_fingerprint
from doll.config.tables import settings_of_tables
from doll.errors import ConfigError, TaskError
from doll.model.auto_shards import auto_shards
from doll.model.file_memory import LargeTensorsInFiles, zeros_in_file
from doll.model.layout import WeightsLayout, round_up_to_even
from doll.model.slices import BLOCK, Slices, sliced
from doll.model.without_tables import build_without_tables
from doll.tables.bounds import TableBounds, initial_rows
from doll.tables.embedding_tables import EmbeddingTables
from doll.task.base import Task, described

MAX_MODEL_BYTES: Final = 8_000_000_000  # one blob, header included, is at most a little more (`doll.storage.blobs`)


class FlatModel:
    """A module whose trainable parameters, their gradients and its buffers are views into flat float32 tensors.

    Attributes:
        device: device of the flat tensors and of the module, as torch names it.
        flat: float32, shape (numel,), with the layout above.
        host: weights in this machine's memory: `flat` itself, or a copy if the model is on another device.
        grad: float32, as long as `flat`. Each `.grad` of the module is a view into it. The buffers' part is unused.
        num_parameters, num_buffers: number of values of trainable parameters, and of float buffers.
        ends_of_parameters: end index of each trainable parameter in `flat`, in order.
        num_floats: number of float values; from this index on `flat` holds bytes.
        shapes: name and shape of each float tensor.
        other_buffers: name, shape and dtype of each buffer that is not of floats.
        tables: the embeddings whose rows are at the server; None: the model has no tables.
    """

    def __init__(
        self, module: torch.nn.Module, tables: EmbeddingTables | None = None, *, device: str = "cpu",
        may_be_empty: bool = False, grad: torch.Tensor | None = None,
        zeros: Callable[[int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Move the module's trainable parameters and buffers into one flat tensor.

        Args:
            tables: tables that were removed from the module before.
            device: device of the flat tensors; the module's frozen parameters must be on it.
            may_be_empty: True if the module is a part of a model. Such a part may have no trainable parameter.
            grad: memory for gradients of another model with the same layout; only one model may use it at a time.
            zeros: function that allocates flat tensors, float32, shape (n,). None: memory of `device`.

        Raises:
            ConfigError: there is no trainable parameter and no table, or a tensor cannot be in the vector.
        """
        self.module = module
        self.tables = tables
        self.device = device
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # parameters, with their parts of `grad`
        self._counts: list[int] = []  # change counters of these parts when `begin_gradient` was called
        buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        others = [(name, b) for name, b in module.named_buffers() if not b.is_floating_point()]
        if not parameters and tables is None and not may_be_empty:
            raise ConfigError(f"the task's model {type(module).__name__} has no trainable parameter")
        check_tensors(module)
        self.num_parameters = sum(p.numel() for _, p in parameters)
        self.num_buffers = sum(b.numel() for _, b in buffers)
        self.num_floats = self.num_parameters + self.num_buffers
        self.shapes = tuple((name, tuple(tensor.shape)) for name, tensor in [*parameters, *buffers])
        self.other_buffers = tuple((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in others)
        ends = [round_up_to_even(self.num_floats)]
        for _, tensor in others:
            ends.append(ends[-1] + round_up_to_even(-(-tensor.numel() * tensor.element_size() // 4)))
        self._zeros = zeros or partial(torch.zeros, dtype=torch.float32, device=device)
        self.flat = self._zeros(ends[-1] if others else self.num_floats)
        self.grad = self._zeros(len(self.flat)) if grad is None else grad
        at, ends_of_parameters = 0, []
        for _, tensor in [*parameters, *buffers]:
            here = slice(at, at + tensor.numel())
            _move(tensor, self.flat[here].view(tensor.shape))
            if isinstance(tensor, torch.nn.Parameter):
                # `.data` has its own change counter; other views share the counter of the whole vector.
                tensor.grad = part = self.grad[here].view(tensor.shape).data
                self._gradients.append((tensor, part))
                ends_of_parameters.append(here.stop)
            at = here.stop
        self.ends_of_parameters = tuple(ends_of_parameters)
        self.slices = sliced(len(self.flat), self.num_parameters, self.num_floats, 1)
        for (_, tensor), begin in zip(others, ends, strict=False):
            raw = self.flat[begin:].view(torch.uint8)[: tensor.numel() * tensor.element_size()]
            _move(tensor, raw.view(tensor.dtype).view(tensor.shape))
        self.host = self.flat.detach()
        self._copy: torch.Tensor | None = None  # see `to_host`; allocated at its first call
        if device != "cpu":
            self.host = torch.empty(len(self.flat), pin_memory=device.startswith("cuda")).copy_(self.host)
        self._owners = [(path, owner, dict(owner._buffers)) for path, owner in module.named_modules()]

    @property
    def layout(self) -> WeightsLayout:
        """The names, shapes and order of the tensors in `flat`."""
        return WeightsLayout(self.shapes, self.other_buffers)

    @property
    def num_table_values(self) -> int:
        """The number of values in all rows of the tables; for a bounded table, in its maximum number of rows."""
        return 0 if self.tables is None else sum(rows * width for rows, width in self.tables.max_sizes.values())

    def copied(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return a copy of `values`, shape (n,), in this machine's memory, allocated like `host`."""
        if self.device != "cpu":
            return values.copy()
        copy: npt.NDArray[np.float32] = self._zeros(len(values)).numpy()
        copy[:] = values
        return copy

    def to_host(self, vector: torch.Tensor) -> torch.Tensor:
        """Return `vector`, as long as `flat`, in this machine's memory. If the model is on another device, this is a
        copy, valid until the next call: its memory is page-locked, so that CUDA copies into it directly."""
        if self.device == "cpu":
            return vector
        if self._copy is None:
            self._copy = torch.empty(len(self.flat), pin_memory=self.device.startswith("cuda"))
        return self._copy.copy_(vector)

    def load_weights(self, weights: npt.NDArray[np.float32]) -> None:
        """Copy `weights`, float32, shape (numel,), into `host`. Raises ValueError if they have another shape."""
        if weights.shape != (self.flat.numel(),):
            raise ValueError(f"expected weights of shape ({self.flat.numel()},), got {weights.shape}")
        array: npt.NDArray[np.float32] = self.host.numpy()
        array[:] = weights

    def drop_gradients(self) -> None:
        """Free the memory of gradients, for a model that only computes outputs."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self.grad, self._gradients = self.grad.new_empty(0), []

    def begin_gradient(self) -> None:
        """Set all gradients to zero before a pass, because backward adds to them."""
        self.grad.zero_()
        for parameter, home in self._gradients:
            if parameter.grad is not home:
                parameter.grad = home
        self._counts = [home._version for _, home in self._gradients]

    def use_running_stats(self) -> None:
        """Make batch norm use its running statistics until the module's `train` is called again."""
        for part in self.module.modules():
            if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
                part.eval()

    def absent(self) -> int:
        """Return a bit mask of the parameters without a gradient since `begin_gradient`: bit i is for parameter i.

        In torch their `.grad` is None. Changes of `.grad` by the module's code, such as `zero_grad`, count as in torch.
        """
        absent = 0
        for index, ((parameter, home), count) in enumerate(zip(self._gradients, self._counts, strict=True)):
            if (gradient := parameter.grad) is home:
                is_absent = home._version == count
            else:
                is_absent, parameter.grad = gradient is None, home
                if gradient is None:
                    home.zero_()
                else:
                    home.copy_(gradient.detach())
            absent |= is_absent << index
        return absent

    def restore_buffers(self) -> None:
        """Copy buffers that the module's code has replaced (`self.mean = ...` instead of `copy_`) into the vector.

        A buffer that is not persistent may have another shape, such as a cache that has grown. It then stays outside
        the vector: torch does not store it in a `state_dict`, because each process can make its own.

        Raises:
            TaskError: a persistent buffer is not in the vector, or has another shape there. The module gets the
                vector's buffers again.
        """
        problem = ""
        for path, owner, buffers in self._owners:
            for name, current in tuple(owner._buffers.items()) if owner._buffers else ():
                buffer = buffers.get(name)
                if current is buffer:
                    continue
                before, after = (None if tensor is None else tuple(tensor.shape) for tensor in (buffer, current))
                if buffer is not None and after in (None, before):
                    with torch.no_grad():
                        buffer.copy_(buffer if current is None else current)
                    owner._buffers[name] = buffer
                elif name not in owner._non_persistent_buffers_set:
                    problem = problem or (
                        f"buffer {f'{path}.{name}'.lstrip('.')!r} has shape {after} after a pass, and {before} when "
                        "build_model() had made it: expected buffers that keep their shape, because workers, "
                        "checkpoints and evaluations share them; register it with persistent=False if each process "
                        "can make it itself, such as a cache of positions, or make it as large as it gets in "
                        "build_model()"
                    )
                    owner._buffers[name] = buffer
        if problem:
            raise TaskError(problem)

    def frozen_checksum(self) -> int | None:
        """Return the CRC-32 of the values of all frozen parameters; None if no parameter is frozen."""
        total = None
        for _, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                total = isal_zlib.crc32(raw.data, total or 0)
        return total


def check_tensors(module: torch.nn.Module) -> None:
    """Check that all tensors of a module have values, and that trained parameters and float buffers are float32. Raises
    ConfigError, which names the first wrong tensor and says what to change in `build_model`."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
        problem = ""
        if is_lazy(tensor):
            problem = (
                f"expected tensors with shapes, got {name!r}, which {owner} has not made yet: use the layer that is "
                "told its sizes (torch.nn.Linear for LazyLinear), or call the model once with zeros of a sample's shape"
            )
        elif tensor.is_meta:
            problem = f"expected tensors with values, got {name!r} on the device meta: build {owner} on the device cpu"
        elif isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
            continue  # a frozen parameter: each process has its own
        elif tensor.is_complex() and tensor.requires_grad:
            problem = (
                f"expected float32 parameters, got {tensor.dtype} for {name!r}: keep it as torch.view_as_real(tensor), "
                "whose last size is 2, and have forward call torch.view_as_complex"
            )
        elif tensor.element_size() > 8:
            problem = f"expected numbers of at most 8 bytes each, got {tensor.dtype} for {name!r}: make it complex64"
        elif tensor.is_floating_point() and tensor.dtype != torch.float32:
            kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else "buffers"
            problem = f"expected float32 {kind}, got {tensor.dtype} for {name!r}: return model.float()"
        if problem:
            raise ConfigError(f"build_model(): {problem}")


def _move(tensor: torch.Tensor, home: torch.Tensor) -> None:
    with torch.no_grad():
        home.copy_(tensor)
        tensor.data = home


def build(
    config: JobConfig, task: Task, *, with_rows: bool = True, in_files: bool = False, device: str = "cpu"
) -> FlatModel:
    """Build the task's model in the machine's memory. The seed is set before, so every process builds the same model.

    Args:
        device: device to which the model is moved afterwards.
        with_rows: True: build the first rows of its tables, which the server and `doll export` need. False: use no
            memory for them, if possible.
        in_files: True: use files as the memory of its tensors (`doll.model.file_memory`).

    Raises:
        ConfigError: the task does not fit the policy, its `build_model` fails, or its model cannot be trained here or
            is too large.
    """
    if task.defines_step and not config.training.policy.sends_steps:
        raise ConfigError(
            f"{config.task.cls} defines {'step_rows' if task.steps_rows else 'step'}(): expected a training.policy "
            "whose workers send steps (ssp, essp, vap, "
            f"isp, wsp, or bsp and asp with contribution: step), got {config.training.policy.name}"
        )
    if task.defines_step and config.worker.device != "cpu":
        raise ConfigError(
            f"worker.device: expected cpu, because {config.task.cls} computes its steps itself, from arrays, got "
            f"{config.worker.device}"
        )
    torch.manual_seed(config.seed)
    try:
        with LargeTensorsInFiles() if in_files else nullcontext():  # type: ignore[no-untyped-call]
            module = task.build_model() if with_rows else build_without_tables(task.build_model)
    except Exception as exc:  # the user's code may raise anything
        raise ConfigError(f"{config.task.cls}.build_model() failed: {described(exc)}") from exc
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"{config.task.cls}.build_model(): expected a torch.nn.Module, got {type(module).__name__}")
    tables = _take_tables(config, task, module)
    check_tensors(module)
    size_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    )
    if size_bytes > MAX_MODEL_BYTES:
        raise ConfigError(
            f"{config.task.cls}.build_model(): expected at most {MAX_MODEL_BYTES / 1e6:.0f} MB of trainable parameters "
            f"and buffers, got {size_bytes / 1e6:.0f} MB: freeze a part of it "
            "(requires_grad_(False)), make embeddings tables (sparse=True), or train a smaller one"
        )
    if device != "cpu":
        module.to(device)
    model = FlatModel(module, tables, device=device, zeros=zeros_in_file if in_files else None)
    if config.ps.shards != 1:
        model.slices = _slices_of(config, model)
    return model


def counted(config: JobConfig, task: Task) -> JobConfig:
    """Return `config` with the number of shards in place of `auto`. Raises the errors of `build`."""
    if config.ps.shards != "auto":
        return config
    return config.with_shards(len(build(config, task, with_rows=False, in_files=True).slices))


def _slices_of(config: JobConfig, model: FlatModel) -> Slices:
    shards = config.ps.shards
    if shards == "auto":
        shards = auto_shards(config, model.flat.numel(), has_tables=model.tables is not None)
    if shards == 1:
        return model.slices
    if model.tables is not None and (model.tables.bounds or config.training.clip_norm is not None):
        names = ", ".join(map(repr, model.tables.shapes))
        what = "training.tables.max_rows" if model.tables.bounds else "training.clip_norm"
        raise ConfigError(
            f"ps.shards: expected 1 with {what}, because {config.task.cls} has tables ({names}): all of their rows are "
            f"needed in one process, got {shards}"
        )
    try:
        return sliced(
            model.flat.numel(), model.num_parameters, model.num_floats, shards,
            may_be_empty=model.tables is not None,
        )  # fmt: skip
    except ValueError as exc:
        raise ConfigError(f"ps.shards: {exc}: each shard has at least {BLOCK} of them") from exc


def _take_tables(config: JobConfig, task: Task, module: torch.nn.Module) -> EmbeddingTables | None:
    tables = EmbeddingTables(module)
    if not tables.shapes:
        return None
    names, policy = ", ".join(map(repr, tables.shapes)), config.training.policy
    if not policy.supports_tables:
        raise ConfigError(
            f"training.policy {policy.name}: expected a model without tables, but {config.task.cls} has {names}: use "
            "doll, bsp, asp, ssp, essp, vap, isp or wsp, or build its embeddings with sparse=False"
        )
    if task.defines_step and not task.steps_rows:
        raise ConfigError(
            f"{config.task.cls} defines step(): expected a model without tables, got {names}: define step_rows(), or "
            "build its embeddings with sparse=False"
        )
    tables.bounds = _bounds_of(config, tables)
    return tables


def _bounds_of(config: JobConfig, tables: EmbeddingTables) -> dict[str, TableBounds]:
    training, bounds = config.training, {}
    num_samples = training.policy.batches_per_update(config.data.workers) * config.data.batch_size
    for name, settings in settings_of_tables(training.tables, tables.shapes).items():
        if (settings.max_rows is None) != (name not in tables.scales):
            raise ConfigError(
                f"training.tables: expected max_rows for table {name!r}, which is a doll.BoundedEmbedding"
                if settings.max_rows is None
                else f"training.tables: expected no max_rows for table {name!r}, which has a row for each id; "
                "make it a doll.BoundedEmbedding"
            )
        if settings.max_rows is None:
            continue
        if training.policy.sends_steps:
            raise ConfigError(
                f"training.policy {training.policy.name}: expected workers that send gradients (doll, bsp, asp) for "
                f"bounded table {name!r}: a worker would keep its own steps on rows that the server has not admitted"
            )
        if settings.max_rows < num_samples:
            raise ConfigError(
                f"training.tables: expected max_rows of at least {num_samples} for table {name!r}, the samples of an "
                f"update, since each may name an id of its own, got {settings.max_rows}"
            )
        initial = initial_rows(config.seed, name, tables.shapes[name].width, tables.scales[name])
        bounds[name] = TableBounds(settings.max_rows, settings.min_count, settings.ttl_updates, initial)
    return bounds


def fingerprint(config: JobConfig, model: FlatModel) -> str:
    """Return the facts on which checkpoint, parameter server and workers must agree (`doll.config.fingerprint`)."""
    if config.ps.shards == "auto":
        config = config.with_shards(len(model.slices))
    shapes = zlib.crc32(repr(model.shapes).encode())
    others = zlib.crc32(repr(model.other_buffers).encode()) if model.other_buffers else None
    tables = None
    if model.tables is not None:
        scales = repr(sorted(model.tables.scales.items())) if model.tables.scales else ""
        tables = zlib.crc32((repr(sorted(model.tables.shapes.items())) + scales).encode())
    return make_fingerprint(
        config, parameters=model.num_parameters, buffers=model.num_buffers, shapes=shapes, others=others,
        frozen=model.frozen_checksum(), tables=tables,
    )  # fmt: skip
