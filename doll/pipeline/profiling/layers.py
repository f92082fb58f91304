"""The layers of a model, between which it may be cut into stages.

If the task names layers (`Task.stages`), these layers are used. Otherwise, the layers of a `torch.nn.Sequential` are
its modules, and the modules of each `Sequential` inside it. The graph of any other module (`torch.fx`) is cut where
only one tensor is passed on, such as between the blocks of a residual network.

`torch.distributed.pipelining` also cuts graphs, but its `torch.export` fixes the number of samples of a batch. In DOLL
this number varies if samples are refused.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from doll.errors import ConfigError
from doll.pipeline.links.device import crossing_problem, is_differentiable
from doll.task import passes, trees
from doll.task.base import Task
from doll.task.batches import batch_of

_TOLERANCE: Final = 1e-6
_GRADIENT_TOLERANCE: Final = 1e-4
_PIECE: Final = 1 << 18  # numbers per piece; as float64, they fit into a cache


class Layer(NamedTuple):
    """A part of a model, whose input is the output of the layer before. `module` shares the model's parameters."""

    name: str
    module: torch.nn.Module


def layers_of(task: Task, model: torch.nn.Module) -> list[Layer]:
    """Return layers that together compute the model's output; `task.forward` calls the first one. Raise ConfigError if
    the model cannot be cut."""
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
    elif type(model) is torch.nn.Sequential:  # a subclass may have its own forward
        layers = _flattened(model)
    else:
        layers = _of_graph(model)
    _check(name, model, layers)
    return layers


def chain(layers: Sequence[Layer]) -> torch.nn.Sequential:
    """Combine layers into one module."""
    return torch.nn.Sequential(*(layer.module for layer in layers))


class Trial(NamedTuple):
    """Samples that the model accepts, in the form for `Task.forward`; or None, and the reason why there are none."""

    inputs: passes.Inputs | None
    reason: str = ""


def trial_input(task: Task, model: torch.nn.Module, samples: int) -> Trial:
    """Return random numbers of the task's shape, else integer zeros; without a shape, held-out samples."""
    reasons: list[str] = []
    tried: list[passes.Inputs] = []
    if task.input_shape is not None:
        shape = (samples, *task.input_shape)
        tried = list(map(inputs_for, (
            torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.zeros(shape, dtype=torch.int64),
        )))  # fmt: skip
    else:
        held_out = batch_of(task, task.holdout(), samples)
        tried = [passes.inputs_of(task, held_out)] if held_out.num_samples else []
    for inputs in tried:
        try:
            with torch.no_grad():
                passes.forward(task, model.eval(), inputs)
            return Trial(inputs)
        except Exception as exc:  # the user's module may raise anything
            shapes = ", ".join(str(tuple(array.shape)) for array in trees.arrays_of(inputs.x))
            reasons.append(f"it fails on samples of shape {shapes}: {type(exc).__name__}: {exc}")
        finally:
            model.train()
    return Trial(None, reasons[0] if reasons else "the task has neither")


def inputs_for(x: Any) -> passes.Inputs:
    """Return inputs with the samples x, without targets, weights and groups."""
    count = len(trees.arrays_of(x)[0])
    return passes.Inputs(x, None, None, None, count, float(count))


def only_calls(task: Task, module: torch.nn.Module, inputs: passes.Inputs) -> tuple[Any, bool]:
    """Return `task.forward(module, x)`, and whether this is the unchanged output of `module`. Any other computation of
    `task.forward` is only allowed after the last part of the model."""
    returned: list[tuple[Any, int]] = []
    hook = module.register_forward_hook(lambda _, __, output: returned.append((output, _version_of(output))))
    try:
        output = passes.forward(task, module, inputs)
    finally:
        hook.remove()
    return output, any(output is own and _version_of(output) == version for own, version in returned[-1:])


def _version_of(value: Any) -> int:
    """Return the version of a value; each change in place increases it."""
    return sum(leaf._version for leaf in trees.flat(value)[0] if isinstance(leaf, torch.Tensor))


def check_cut(
    task: Task, model: torch.nn.Module, layers: Sequence[Layer], inputs: passes.Inputs
) -> None:  # fmt: skip
    """Compare the layers with the model on samples: output, gradient and buffers.

    The comparison uses evaluation mode and, with two samples or more, training mode with the same random numbers. Model
    and layers are not changed.

    Raises:
        ConfigError: the results differ, a layer fails on the output of the layer before, or the values between two
            layers cannot be sent from one process to another.
    """
    name = type(model).__name__

    def copied() -> passes.Inputs:
        return inputs.moved(torch.clone)  # because a module may change it in place

    def run_whole(training: bool) -> _Outcome:
        return _outcome(model, [model], training, lambda: passes.forward(task, model, copied()))

    def run_layers(training: bool) -> _Outcome:
        return _outcome(
            model, [layer.module for layer in layers], training, lambda: _through(task, name, layers, copied())
        )

    is_compared = False
    for training in (False, True)[: inputs.num_samples]:  # batch norm does not accept a single sample
        try:
            whole = run_whole(training)
        except Exception as exc:  # the user's module may raise anything
            problem = f"{type(exc).__name__}: {exc}"
            continue
        if not _are_tensors(whole.output):
            raise _cannot(name, f"it returns {type(whole.output).__name__}, expected tensors")
        difference = whole.difference(run_layers(training))
        if difference and whole.difference(run_whole(training)):
            # The model has its own random generator. The result in evaluation mode also applies to training, except for
            # noise.
            problem = "its output for the same input differs from call to call"
            continue
        if difference:
            raise _cannot(name, difference)
        is_compared = True
    if not is_compared:
        raise _cannot(name, f"its layers cannot be compared with it: {problem}")


class _Outcome(NamedTuple):
    """The result of one pass.

    Attributes:
        output: output of the whole model or of its layers.
        gradient: norm and sum of the gradient of each parameter that the backward pass reaches, by name.
        buffers: values of the buffers after the pass, by name.
    """

    output: Any
    gradient: dict[str, tuple[float, float]]
    buffers: dict[str, torch.Tensor]

    def difference(self, layers: _Outcome) -> str:
        """Describe how `layers` differ from `self`, the whole model, for an error message; "": no difference."""
        (owns, structure), (outputs, other) = trees.flat(self.output), trees.flat(layers.output)
        if structure != other:
            return f"its layers give {other}, the whole model {structure}"
        pairs = list(zip(owns, outputs, strict=True))
        for own, output in pairs:
            if own.shape != output.shape:
                return f"its layers give {tuple(output.shape)}, the whole model {tuple(own.shape)}"
            if own.dtype != output.dtype:
                return f"its layers give numbers of type {output.dtype}, the whole model of type {own.dtype}"
        learned = self.gradient | layers.gradient
        if differ := [key for key in learned if (key in self.gradient) != (key in layers.gradient)]:
            return (
                f"its layers learn other parameters than the whole model ({differ[0]!r}): use requires_grad_(False) or "
                "detach() instead of torch.no_grad()"
            )
        if (difference := max(_distance(own, output) for own, output in pairs)) > 0:
            return (
                f"its layers give another output than the whole model (difference {difference:.3g}): the task's "
                "forward() does more than to call the model on its input, or its stages() leaves something out"
            )
        bound = _GRADIENT_TOLERANCE * max((norm for norm, _ in self.gradient.values()), default=0.0)
        for key, numbers in self.gradient.items():
            if any(abs(a - b) > bound for a, b in zip(numbers, layers.gradient[key], strict=True)):
                return f"its layers give another gradient than the whole model, of {key!r}"
        for key, values in self.buffers.items():
            if _distance(values, layers.buffers[key]) > 0:
                return f"its layers give another buffer {key!r} than the whole model"
        return ""


def _outcome(
    model: torch.nn.Module, roots: Sequence[torch.nn.Module], training: bool, run: Callable[[], Any]
) -> _Outcome:  # fmt: skip
    """Run a pass of `roots`, which are `model` or its layers, with the same random numbers each time. Their state is
    restored afterwards."""
    owners = {module: module.training for root in roots for module in root.modules()}
    before = [
        (owner, name, buffer, buffer.clone())
        for owner in owners
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            for root in roots:
                root.train(training)  # a module may have overridden this method
            output = run()
            gradient = _gradient(model, output)
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        return _Outcome(
            trees.mapped(torch.Tensor.detach, output) if _are_tensors(output) else output, gradient, buffers
        )
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, was_training in owners.items():
            module.training = was_training
        with torch.no_grad():
            for owner, name, buffer, values in before:
                buffer.copy_(values)
                owner._buffers[name] = buffer  # the pass may have replaced the buffer


def _gradient(model: torch.nn.Module, output: Any) -> dict[str, tuple[float, float]]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    outputs = [part for part in trees.flat(output)[0] if isinstance(part, torch.Tensor) and part.requires_grad]
    if not outputs or not parameters:
        return {}
    # Random numbers instead of ones: after a softmax, the sum is always the same.
    weights = [
        torch.linspace(0.5, 1.5, part.numel(), dtype=torch.float64).reshape(part.shape).to(part.dtype)
        for part in outputs
    ]
    outcomes: dict[str, tuple[float, float]] = {}

    def take(name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None  # one at a time, because all are as large as the model
        assert gradient is not None
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        squares = total = 0.0
        flat = values.reshape(-1)
        for at in range(0, len(flat), _PIECE):
            exact = flat[at : at + _PIECE].double()
            squares, total = squares + float(exact.square().sum()), total + float(exact.sum())
        outcomes[name] = (math.sqrt(squares), total)

    kept = [(parameter, parameter.grad) for parameter in parameters.values()]
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(take, name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
    ]
    try:
        for parameter in parameters.values():
            parameter.grad = None
        torch.autograd.backward(outputs, weights, inputs=list(parameters.values()))
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in kept:
            parameter.grad = gradient
    return {name: outcomes[name] for name in parameters if name in outcomes}


def _are_tensors(output: Any) -> bool:
    leaves, _ = trees.flat(output)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _through(task: Task, name: str, layers: Sequence[Layer], inputs: passes.Inputs) -> Any:
    """Compute the output of the layers, one after the other."""
    h: Any = None
    for number, layer in enumerate(layers):
        is_all = True
        try:
            if number:
                h = layer.module(h)
            elif len(layers) == 1:
                h = passes.forward(task, chain([layer]), inputs)
            else:
                h, is_all = only_calls(task, chain([layer]), inputs)
        except Exception as exc:  # the user's module may raise anything
            raise _cannot(
                name, f"layer {layer.name!r} fails on the output of the one before ({type(exc).__name__}: {exc})"
            ) from exc
        if not is_all:
            raise _cannot(
                name,
                f"{type(task).__name__}.forward does more than to call the model and to return its output, which its "
                "first layers alone cannot have",
            )
        if number < len(layers) - 1 and (problem := crossing_problem(h)):
            raise _cannot(name, f"layer {layer.name!r} {problem}")
    if not _are_tensors(h):
        raise _cannot(name, f"layer {layers[-1].name!r} returns {type(h).__name__}, expected tensors")
    return h


def _distance(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference, or 0 if it is explained by rounding. Values that are not finite must be equal."""
    if torch.equal(expected, actual) or not expected.numel():
        return 0.0
    if not is_differentiable(expected):
        return float((expected.double() - actual.double()).abs().max())
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    difference = float(torch.where(same, 0, (expected - actual).abs()).max())
    finite = expected[expected.isfinite()].abs()
    tolerance = max(_TOLERANCE, 4 * torch.finfo(expected.dtype).eps if expected.dtype.itemsize < 4 else 0.0)
    limit = tolerance * (float(finite.max()) if finite.numel() else 0.0)
    return 0.0 if difference <= limit else difference


def _flattened(model: torch.nn.Sequential, prefix: str = "") -> list[Layer]:
    layers: list[Layer] = []
    for name, module in model._modules.items():  # named_children leaves out repeated modules
        if module is None:
            continue
        full = f"{prefix}{name}"
        if type(module) is torch.nn.Sequential:
            layers += _flattened(module, f"{full}.")
        else:
            layers.append(Layer(full, module))
    return layers


def _check(name: str, model: torch.nn.Module, layers: Sequence[Layer]) -> None:
    """Check that each parameter and buffer of the model is in exactly one layer."""
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
    """Cut the graph of a module after each node whose value is the only one that later nodes use."""
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
    """Return whether later nodes take the node's value apart, so that it may be a tuple, which cannot be sent."""
    return all(user.op == "call_function" and user.target is operator.getitem for user in node.users)


def _traced(model: torch.nn.Module) -> fx.GraphModule:
    """Return the graph of a model. `fx` adds tensors that forward() makes to the model; they are removed again."""
    before = set(vars(model))
    try:
        return fx.symbolic_trace(model)
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)


class _Value(torch.nn.Module):
    """A parameter or buffer that a module uses directly, or a constant that its forward() makes."""

    def __init__(self, value: torch.Tensor, *, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("value", value)
        else:
            self.value = value

    def forward(self) -> torch.Tensor:
        return self.value


def _own_parameters_as_modules(traced: fx.GraphModule, buffers: Set[int]) -> dict[fx.Node, fx.Node]:
    """Replace each use of a parameter with a module that returns the parameter. Otherwise `split_module` would pass the
    parameter from part to part. Return the nodes of these modules, each with the node that uses it."""
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
    """Join layers with equal names, so that each name is unique."""
    seen: dict[str, int] = {}
    joined = []
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, 0) + 1
        joined.append(layer if seen[layer.name] == 1 else Layer(f"{layer.name}_{seen[layer.name]}", layer.module))
    return joined


def _name_of(nodes: Sequence[fx.Node]) -> str:
    """Return the name of a layer: the modules of the model that it calls, or its last function."""
    called = [str(node.target) for node in nodes if node.op == "call_module"]
    if not called:
        return nodes[-1].name
    return called[0] if called[-1] == called[0] else f"{called[0]}..{called[-1]}"


def _cannot(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be cut: {why}; build it as a torch.nn.Sequential, or define stages() in the task"
    )
