"""The layers of a model, between which it may be cut into stages.

Three ways, in this order: the layers that the task names (`Task.stages`); those of a `torch.nn.Sequential`, nested
ones too; of any other module those of its graph (`torch.fx`), which is cut wherever one tensor alone goes on, such as
between the blocks of a residual network.

`torch.distributed.pipelining` cuts graphs as well, by `torch.export`: that fixes the number of samples of a batch,
which differs where samples are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from doll.errors import ConfigError
from doll.task import Task, stack

_TOLERANCE = 1e-6


class Layer(NamedTuple):
    """A part of a model that takes one tensor and returns one. `module` shares the model's parameters."""

    name: str
    module: torch.nn.Module


def layers_of(task: Task, model: torch.nn.Module) -> list[Layer]:
    """Layers that give the model's output one after the other, the first by `task.forward`.

    Raises:
        ConfigError: the model cannot be cut.
    """
    name = type(model).__name__
    if task.defines_step:
        raise ConfigError(f"{type(task).__name__} defines step(): a pipeline computes gradients, it cannot be cut")
    if tables := [key for key, module in model.named_modules() if getattr(module, "sparse", False) is True]:
        raise ConfigError(
            f"{name} cannot be cut: a pipeline has no tables yet, and {', '.join(map(repr, tables))} is one; build its "
            "embeddings with sparse=False"
        )
    named = task.stages(model)
    if named is not None:
        layers = [Layer(*item) for item in named]
    elif type(model) is torch.nn.Sequential:  # another class may have its own forward
        layers = _flattened(model)
    else:
        layers = _of_graph(model)
    _check(name, model, layers)
    return layers


def chain(layers: Sequence[Layer]) -> torch.nn.Sequential:
    """Layers as one module."""
    return torch.nn.Sequential(*(layer.module for layer in layers))


class Trial(NamedTuple):
    """Samples that the model takes; or None, and why it does not take random ones."""

    x: torch.Tensor | None
    reason: str = ""


def trial_input(task: Task, model: torch.nn.Module, samples: int) -> Trial:
    """Random numbers of the model's shape, else zeros as integers; held-out ones where it has no shape."""
    reasons: list[str] = []
    tried: list[torch.Tensor] = []
    if task.input_shape is not None:
        shape = (samples, *task.input_shape)
        tried = [
            torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.zeros(shape, dtype=torch.int64),
        ]  # fmt: skip
    else:
        held, _ = stack(sample for sample, _ in zip(task.holdout(), range(samples), strict=False))
        tried = [torch.from_numpy(held)] if len(held) else []
    for x in tried:
        try:
            with torch.no_grad():
                task.forward(model.eval(), x)
            return Trial(x)
        except Exception as exc:  # the user's module may raise anything
            reasons.append(f"it fails on samples of shape {tuple(x.shape)}: {type(exc).__name__}: {exc}")
        finally:
            model.train()
    return Trial(None, reasons[0] if reasons else "the task has neither")


def check_cut(task: Task, model: torch.nn.Module, layers: Sequence[Layer], x: torch.Tensor) -> None:
    """Compare the layers' output with the model's, for samples `x` of shape (n, *input_shape), without learning, and
    the parameters that either would learn: a graph does not keep `torch.no_grad()`.

    Raises:
        ConfigError: they differ, or a layer fails on the output of the one before.
    """
    modules = [model, *(layer.module for layer in layers)]
    was_training = [module.training for module in modules]
    try:
        for module in modules:
            module.eval()
        with torch.enable_grad():
            whole = task.forward(model, x.clone())  # they may change it in place
            h = x.clone()
            for number, layer in enumerate(layers):
                try:
                    h = layer.module(h) if number else task.forward(chain([layer]), h)
                except Exception as exc:  # the user's module may raise anything
                    raise _cannot(
                        type(model).__name__,
                        f"layer {layer.name!r} fails on the output of the one before ({type(exc).__name__}: {exc})",
                    ) from exc
                if not isinstance(h, torch.Tensor):
                    raise _cannot(
                        type(model).__name__, f"layer {layer.name!r} returns {type(h).__name__}, expected one tensor"
                    )
    finally:
        for module, training in zip(modules, was_training, strict=True):
            module.train(training)
    if not isinstance(whole, torch.Tensor):
        raise _cannot(type(model).__name__, f"it returns {type(whole).__name__}, expected one tensor")
    if whole.shape != h.shape:
        raise _cannot(type(model).__name__, f"its layers give {tuple(h.shape)}, the whole model {tuple(whole.shape)}")
    learned, expected = _learned(h), _learned(whole)
    if differ := [
        name
        for name, parameter in model.named_parameters()
        if (id(parameter) in learned) != (id(parameter) in expected)
    ]:
        raise _cannot(
            type(model).__name__,
            f"its layers learn other parameters than the whole model ({differ[0]!r}): use requires_grad_(False) or "
            "detach() instead of torch.no_grad()",
        )
    whole, h = whole.detach(), h.detach()
    difference = float((whole - h).abs().max()) if whole.numel() else 0.0
    if not difference <= _TOLERANCE * (float(whole.abs().max()) if whole.numel() else 0.0):
        raise _cannot(
            type(model).__name__,
            f"its layers give another output than the whole model (difference {difference:.3g}): {type(task).__name__}"
            ".forward does more than to call the model on its input",
        )


def _learned(output: torch.Tensor) -> set[int]:
    """Ids of the parameters that a backward pass from `output` would reach."""
    seen: set[Any] = set()
    reached: set[int] = set()
    ahead: list[Any] = [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        ahead += [following for following, _ in node.next_functions]
    return reached


def _flattened(model: torch.nn.Sequential, prefix: str = "") -> list[Layer]:
    layers: list[Layer] = []
    for name, module in model._modules.items():  # named_children leaves out a module that comes again
        if module is None:
            continue
        full = f"{prefix}{name}"
        if type(module) is torch.nn.Sequential:
            layers += _flattened(module, f"{full}.")
        else:
            layers.append(Layer(full, module))
    return layers


def _check(name: str, model: torch.nn.Module, layers: Sequence[Layer]) -> None:
    """Each parameter and buffer of the model must be in one layer."""
    for layer in layers:
        if not isinstance(layer.module, torch.nn.Module) or not isinstance(layer.name, str):
            raise _cannot(name, f"stages(): expected pairs of a name and a module, got {tuple(layer)!r:.100}")
    names = [layer.name for layer in layers]
    if not layers or len(set(names)) != len(names):
        raise _cannot(name, f"expected layers of different names, got {names!r:.200}")
    owners: dict[int, str] = {}
    for layer in layers:
        for tensor in {id(t): t for t in (*layer.module.parameters(), *layer.module.buffers())}.values():
            if id(tensor) in owners:
                raise _cannot(name, f"layers {owners[id(tensor)]!r} and {layer.name!r} share a parameter or buffer")
            owners[id(tensor)] = layer.name
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for key, tensor in tensors:
            if id(tensor) not in owners:
                raise _cannot(name, f"its {kind} {key!r} is in none of its layers")


def _of_graph(model: torch.nn.Module) -> list[Layer]:
    """Cut the graph of a module behind each node whose value alone is used further on."""
    name = type(model).__name__
    try:
        evaluating = _traced(model.eval()).code
        traced = _traced(model.train())
    except Exception as exc:  # the user's forward may raise anything on symbols
        why = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
        raise _cannot(name, f"its forward() cannot be traced ({why})") from exc
    if traced.code != evaluating:
        raise _cannot(name, "its forward() depends on `self.training`, which a graph does not keep (use nn.Dropout)")
    values = _own_parameters_as_modules(traced, {id(buffer) for buffer in model.buffers()})
    nodes = [node for node in traced.graph.nodes if node.op not in ("get_attr", "output") and node not in values]
    inputs = [node for node in nodes if node.op == "placeholder" and node.users]
    if len(inputs) != 1:
        raise _cannot(name, f"expected a forward() of one tensor, got one of {len(inputs)}")
    at = {node: number for number, node in enumerate(nodes)}
    last_use = {node: max((at.get(user, len(nodes)) for user in node.users), default=at[node]) for node in nodes}
    part, parts, alive = 0, dict[fx.Node, int](), list[fx.Node]()
    for number, node in enumerate(nodes):
        if node.op != "placeholder":
            parts[node] = part
        alive = [other for other in (*alive, node) if last_use[other] > number]
        if node.op != "placeholder" and alive == [node] and last_use[node] < len(nodes) and not _is_taken_apart(node):
            part += 1
    parts |= {value: parts[user] for value, user in values.items()}
    split = split_module(traced, model, lambda node: parts.get(node, 0), keep_original_order=True)
    layers: list[Layer] = []
    modules = {int(child.rpartition("_")[2]): module for child, module in split.named_children()}
    for number, module in sorted(modules.items()):
        layers.append(Layer(_name_of([node for node in nodes if parts.get(node) == number]), module))
    return _joined(layers)


def _is_taken_apart(node: fx.Node) -> bool:
    """It may be a tuple, which cannot be sent."""
    return all(user.op == "call_function" and user.target is operator.getitem for user in node.users)


def _traced(model: torch.nn.Module) -> fx.GraphModule:
    """Its graph. `fx` leaves tensors that forward() makes at the model: without them, it is as it was."""
    before = set(vars(model))
    try:
        return fx.symbolic_trace(model)
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


class _Value(torch.nn.Module):
    """A parameter or buffer that a module uses by itself, or a constant that its forward() makes."""

    def __init__(self, value: torch.Tensor, *, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("value", value)
        else:
            self.value = value

    def forward(self) -> torch.Tensor:
        return self.value


def _own_parameters_as_modules(traced: fx.GraphModule, buffers: Set[int]) -> dict[fx.Node, fx.Node]:
    """Replace each use of a parameter by a module that returns it: `split_module` would pass it from part to part.

    Returns:
        The nodes of these modules, with the node that uses each.
    """
    values: dict[fx.Node, fx.Node] = {}
    for node in [node for node in traced.graph.nodes if node.op == "get_attr"]:
        value: Any = traced
        for part in str(node.target).split("."):
            value = getattr(value, part)
        for user in [user for user in node.users if user.op != "output"]:
            target = f"value_{len(values)}"
            traced.add_submodule(target, _Value(value, is_buffer=id(value) in buffers))
            with traced.graph.inserting_before(user):
                new = traced.graph.call_module(target)
            user.replace_input_with(node, new)
            values[new] = user
        if not node.users:
            traced.graph.erase_node(node)
    return values


def _joined(layers: Sequence[Layer]) -> list[Layer]:
    """Names that no other layer has."""
    seen: dict[str, int] = {}
    joined = []
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, 0) + 1
        joined.append(layer if seen[layer.name] == 1 else Layer(f"{layer.name}_{seen[layer.name]}", layer.module))
    return joined


def _name_of(nodes: Sequence[fx.Node]) -> str:
    """By the modules of the model that it calls, or by its last function."""
    called = [str(node.target) for node in nodes if node.op == "call_module"]
    if not called:
        return nodes[-1].name
    return called[0] if called[-1] == called[0] else f"{called[0]}..{called[-1]}"


def _cannot(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be cut: {why}; build it as a torch.nn.Sequential, or define stages() in the task"
    )
