"""Embedding layers whose weights are tables. Their forward pass fetches the rows that it uses, and their backward pass
computes the gradients of these rows.

The parameter of every `torch.nn.Embedding` or `EmbeddingBag` with `sparse=True` is removed from the module, so it is
not in the flat vector (`doll.model.flat_model`). The layer's forward pass looks up the distinct ids of its input, and
computes with a matrix of only these rows. So no gradient is as large as the table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from doll.errors import ConfigError
from doll.tables.bounded_embedding import BoundedEmbedding, BoundedEmbeddingBag, BoundedLayer, used_rows
from doll.tables.bounds import FirstRows, TableBounds
from doll.tables.rows import Floats, Ids, LookUp, Rows, TableShape, add_in_order, add_where_equal

Layer: TypeAlias = torch.nn.Embedding | torch.nn.EmbeddingBag


class _Use(NamedTuple):
    """One call of a layer, and the rows that it has used; backward sets their `grad`."""

    name: str
    ids: Ids
    rows: torch.Tensor
    padding: int | None  # index of the padding row in `ids`


class _NoWeight:
    """The placeholder for the weight of a layer that is a table. It cannot be used in computations."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"table {self._name!r}: expected its rows to be used through the layer alone, got a use of its weight: "
            "look up ids with the layer, or use sparse=False"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__torch_function__()


class EmbeddingTables:
    """The tables of one module. Not thread-safe: one thread computes.

    Attributes:
        shapes: shape of each table, by the name of its parameter; for a table of several layers, by its first name.
        names: all names of each table in the module's `state_dict()`, by its name in `shapes`.
        scales: scale of the initial rows of each bounded table.
        bounds: bounds of each bounded table, after the job has set them (`doll.model.flat_model`).
        first_rows: first rows of bounded tables that do not begin empty; the server takes them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Remove the tables' parameters from `module`.

        Until `connect`, a forward pass through one of the layers raises RuntimeError. From now on, any use of the
        `weight` of such a layer raises RuntimeError, too.

        Raises:
            ConfigError: a layer cannot be a table; the message says why, and what to do.
        """
        self._weights = _find(module)
        self.shapes = {
            name: TableShape(layers[0].num_embeddings, layers[0].embedding_dim)
            for name, (_, layers) in self._weights.items()
        }
        self.scales = {
            name: layers[0].scale for name, (_, layers) in self._weights.items() if isinstance(layers[0], BoundedLayer)
        }
        self.bounds: dict[str, TableBounds] = {}
        self.first_rows: dict[str, FirstRows] = {}
        # One layer may have several paths; each path is a name.
        paths = [(path, id(layer)) for path, layer in module.named_modules(remove_duplicate=False)]
        self.names = {
            name: tuple(f"{path}.weight".lstrip(".") for path, at in paths if at in set(map(id, layers)))
            for name, (_, layers) in self._weights.items()
        }
        self._initial = {name: weight for name, (weight, _) in self._weights.items() if not weight.is_meta}
        self._look_up: LookUp | None = None
        self._uses: list[_Use] = []
        self._steps: dict[str, Rows] = {}  # changes that are added to rows when they are looked up
        for name, (_, layers) in self._weights.items():
            for layer in layers:
                del layer._parameters["weight"]
                object.__setattr__(layer, "weight", _NoWeight(name))
                forward = (
                    functools.partial(self._embed, layer, name)
                    if isinstance(layer, torch.nn.Embedding)
                    else functools.partial(self._embed_bags, layer, name)
                )
                object.__setattr__(layer, "forward", forward)

    @property
    def max_sizes(self) -> dict[str, TableShape]:
        """The shapes, with the maximum number of rows of each table."""
        return {
            name: shape._replace(num_rows=self.bounds[name].max_rows) if name in self.bounds else shape
            for name, shape in self.shapes.items()
        }

    def take_initial(self) -> dict[str, Floats]:
        """Return the initial rows of each table that is not bounded, float32, shape (num_rows, width), not copied.

        The caller owns the rows, and this object forgets them. A server keeps them; other processes drop them.

        Raises:
            RuntimeError: the rows were taken before, or the module was built without them
                (`doll.model.without_tables`).
        """
        initial, self._initial = self._initial, {}
        self._weights = {}
        if initial.keys() != (drawn := self.shapes.keys() - self.scales.keys()):
            raise RuntimeError(f"expected initial rows of {sorted(drawn)}, got those of {sorted(initial)}")
        return {name: np.ascontiguousarray(weight.detach().numpy()) for name, weight in initial.items()}

    def initial_rows(self, name: str) -> Floats:
        """Return the initial rows of one table, float32, shape (num_rows, width): a view that may be changed. Raises
        KeyError if the rows were taken before, or the module was built without them."""
        rows: Floats = self._initial[name].detach().numpy()
        return rows

    def connect(self, look_up: LookUp) -> None:
        """Look rows up with `look_up`, which is called once per call of a layer, and drop the initial rows."""
        self._initial, self._weights = {}, {}
        self._look_up = look_up

    def look_up(self, name: str, ids: Ids) -> Floats:
        """Return a copy of the rows `ids` of table `name`, float32, shape (n, width). Raises KeyError if there is no
        such table, and ValueError if the ids are not strictly increasing numbers of rows."""
        if problem := self.shapes[name].problem(ids):
            raise ValueError(f"table {name!r}: {problem}")
        return self._rows_of(name, ids)

    def reset(self) -> None:
        """Begin a gradient: forget all earlier forward passes."""
        self._uses.clear()

    def gradients(self) -> dict[str, Rows]:
        """Return the gradients of the rows used since `reset`, summed over all calls of a layer in their order.

        A row counts as used if its id was in an input, even if its gradient is 0. Padding rows do not count. A table
        that the loss does not depend on is left out.
        """
        pieces: dict[str, list[Rows]] = {}
        for name, ids, rows, padding in self._uses:
            if rows.grad is not None and len(ids):
                # The sparse gradient has one entry per input id, in order. Torch's dense gradient would take longer.
                total = torch.zeros(rows.shape, device=rows.device)
                values = total.index_add_(0, rows.grad._indices()[0], rows.grad._values()).cpu().numpy()
                if padding is not None:
                    ids, values = np.delete(ids, padding), np.delete(values, padding, axis=0)
                pieces.setdefault(name, []).append(Rows(ids, values))
        return {name: add_in_order(parts) for name, parts in pieces.items()}

    @contextmanager
    def stepped_by(self, gradients: Mapping[str, Rows], rate: float) -> Iterator[None]:
        """Add `rate` times `gradients` to rows in this context, as `GradientComputer.stepped_by` does for weights."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._steps = {
                name: Rows(rows.ids, (rate * rows.values.astype(np.float64)).astype(np.float32))
                for name, rows in gradients.items()
            }
        try:
            yield
        finally:
            self._steps = {}

    def _embed(self, layer: torch.nn.Embedding, name: str, input: torch.Tensor) -> torch.Tensor:  # as torch names it
        rows, places, padding = self._rows(name, input, layer.padding_idx)
        return functional.embedding(places, rows, padding, sparse=True)

    def _embed_bags(
        self,
        layer: torch.nn.EmbeddingBag,
        name: str,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, places, padding = self._rows(name, input, layer.padding_idx)
        return functional.embedding_bag(
            places,
            rows,
            None if offsets is None else offsets.long(),
            mode=layer.mode,
            sparse=True,
            per_sample_weights=per_sample_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=padding,
        )

    def _rows(
        self, name: str, input: torch.Tensor, padding_idx: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the distinct rows of `input`, the index of each input id in them, and the index of the padding row."""
        used = used_rows(f"table {name!r}", self.shapes[name].num_rows, input, padding_idx)
        values = self._rows_of(name, used.ids)
        if name in self._steps:
            add_where_equal(used.ids, values, self._steps[name])
        rows = torch.from_numpy(values).to(input.device).requires_grad_(torch.is_grad_enabled())
        if rows.requires_grad:
            self._uses.append(_Use(name, used.ids, rows, used.padding))
        return rows, used.places, used.padding

    def _rows_of(self, name: str, ids: Ids) -> Floats:
        if self._look_up is None:
            raise RuntimeError(f"table {name!r}: expected connect() before a forward pass")
        width = self.shapes[name].width
        values = self._look_up(name, ids) if len(ids) else np.zeros((0, width), np.float32)
        if values.shape != (len(ids), width):
            raise ValueError(f"table {name!r}: expected rows of shape {(len(ids), width)}, got {values.shape}")
        return values


def norm(gradients: Mapping[str, Rows]) -> float:
    """Return the norm of all gradients together; infinite if a number is not finite."""
    square = sum(float(np.square(rows.values, dtype=np.float64).sum()) for rows in gradients.values())
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _find(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Parameter, list[Layer]]]:
    """Return the weight of each table, and the layers that use it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[int, list[tuple[str, torch.nn.Module]]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((f"{prefix}.{name}" if prefix else name, owner))
    tables: dict[str, tuple[torch.nn.Parameter, list[Layer]]] = {}
    for prefix, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) or not layer.sparse:
            continue
        weight = layer._parameters.get("weight")
        if weight is not None and not weight.requires_grad:
            continue  # a frozen weight: each process has its own copy
        if (problem := _problem(layer, weight)) or weight is None:
            raise ConfigError(f"{type(layer).__name__} {prefix!r} with sparse=True cannot be a table: {problem}")
        name = names[id(weight)]
        for other, owner in owners[id(weight)]:
            if not (isinstance(owner, torch.nn.Embedding | torch.nn.EmbeddingBag) and owner.sparse):
                raise ConfigError(
                    f"table {name!r}: expected only embeddings with sparse=True to use it, but it is {other!r} too, "
                    "whose gradient is dense: give that layer a parameter of its own, or use sparse=False"
                )
        tables.setdefault(name, (weight, []))[1].append(layer)
    return tables


def _problem(layer: Layer, weight: torch.nn.Parameter | None) -> str:
    if weight is None and isinstance(layer, BoundedLayer):
        return "it has rows already; training.init_from begins with those of a file or a run"
    if weight is None:
        return "its weight is computed from other parameters; use sparse=False"
    if weight.dtype != torch.float32:
        return f"expected float32, got {weight.dtype}: call model.float()"
    if layer.max_norm is not None:
        return (
            f"expected max_norm=None, got {layer.max_norm}: it changes rows in the forward pass, which the server "
            "would not see; put a penalty on their length into the task's loss"
        )
    if layer.scale_grad_by_freq:
        return "expected scale_grad_by_freq=False, for which torch has no sparse gradient"
    if isinstance(layer, torch.nn.EmbeddingBag) and layer.mode == "max":
        return "expected mode 'sum' or 'mean', got 'max', for which torch has no sparse gradient"
    classes = (torch.nn.Embedding, torch.nn.EmbeddingBag, BoundedEmbedding, BoundedEmbeddingBag)
    if type(layer).forward not in [cls.forward for cls in classes]:
        return f"{type(layer).__name__} has a forward of its own; use it in another module, or sparse=False"
    return ""
