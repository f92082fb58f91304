"""Models are cut into layers that give the same output, and share their parameters; others are refused clearly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from doll.errors import ConfigError
from doll.model.flat_model import FlatModel
from doll.pipeline.profiling.layers import chain, check_cut, inputs_for, layers_of
from doll.pipeline.runtime.stage import homes_of
from doll.task.base import Task
from torch import nn

pytestmark = pytest.mark.slow  # loads torch


class Any4(Task):
    input_shape = (4,)

    def decode(self, record: bytes) -> object:  # type: ignore[override]
        raise NotImplementedError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Residual(nn.Module):
    """Blocks with connections around them, a shape that depends on the batch, and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        for block in self.blocks:
            h = block(h)
        return self.head(h.reshape(h.shape[0], -1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x).unsqueeze(1)).squeeze(1))


class OfTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (h, _) = self.lstm(x.unsqueeze(1))
        return self.head(h[-1])


class OfValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Around(nn.Module):
    """The input is used at the end again: there is no place to cut but the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) + x


class OfParameters(nn.Module):
    """Parameters that no module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(x * self.scale) + self.shift)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))


MODELS: list[tuple[Callable[[], nn.Module], Sequence[str] | int]] = [
    (nested, ["0", "1.0", "1.1.0", "1.1.1"]),
    (Residual, 6),
    (Attention, 3),
    (Around, 1),
    (OfParameters, 3),
]


@pytest.mark.parametrize(("build", "expected"), MODELS)
def test_layers_give_the_output_of_the_model(build: Callable[[], nn.Module], expected: Sequence[str] | int) -> None:
    torch.manual_seed(0)
    model = build()
    layers = layers_of(Any4(), model)
    if isinstance(expected, int):
        assert len(layers) >= expected
    else:
        assert [layer.name for layer in layers] == expected
    for samples in (1, 7):  # the size of a batch is free
        check_cut(Any4(), model, layers, inputs_for(torch.randn(samples, 4)))


@pytest.mark.parametrize("build", [build for build, _ in MODELS])
def test_the_layers_hold_all_of_the_models_vector_once(build: Callable[[], nn.Module]) -> None:
    whole = FlatModel(build())
    covered = torch.zeros(whole.flat.numel(), dtype=torch.int)
    for layer in layers_of(Any4(), whole.module):
        names = homes_of(chain([layer]), whole)
        tensors = dict(chain([layer]).named_parameters()) | dict(chain([layer]).named_buffers())
        for name, at in names.items():
            length = -(-tensors[name].numel() * tensors[name].element_size() // 4)
            covered[at : at + length] += 1
    assert covered[: whole.num_floats].eq(1).all()
    assert covered.max() == 1


def test_gradients_are_those_of_the_model() -> None:
    torch.manual_seed(1)
    model, x = Residual(), torch.randn(5, 4)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    h = x
    for layer in layers_of(Any4(), model):
        h = layer.module(h)
    h.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (OfValues, r"cannot be cut: its forward\(\) cannot be traced \(TraceError"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 4, sparse=True)), "a pipeline has no tables yet"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of(Any4(), build())


def test_an_lstm_is_in_one_layer_with_what_takes_its_tuple_apart() -> None:
    model = OfTuples()
    layers = layers_of(Any4(), model)
    check_cut(Any4(), model, layers, inputs_for(torch.randn(2, 4)))
    assert [layer.name for layer in layers if "lstm" in layer.name]


def test_weights_that_two_layers_share_are_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(ConfigError, match="layers '0' and '2' share a parameter"):
        layers_of(Any4(), tied)


def test_a_task_names_its_layers() -> None:
    class Named(Any4):
        def stages(self, model: nn.Module) -> Sequence[tuple[str, nn.Module]]:
            assert isinstance(model, OfValues)
            return [("all", model)]

    assert [layer.name for layer in layers_of(Named(), OfValues())] == ["all"]

    class Short(Any4):
        def stages(self, model: nn.Module) -> Sequence[tuple[str, nn.Module]]:
            return [("first", model.first)]  # type: ignore[list-item]

    with pytest.raises(ConfigError, match=r"its parameter 'second\.weight' is in none of its layers"):
        layers_of(Short(), Around())


def test_a_forward_that_does_more_behind_the_model_is_refused() -> None:
    class Behind(Any4):
        def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = model(x)
            return output * 2 + 1

    model = nested()
    with pytest.raises(ConfigError, match=r"Behind\.forward does more than to call the model and to return"):
        check_cut(Behind(), model, layers_of(Behind(), model), inputs_for(torch.randn(3, 4)))


def test_the_model_is_left_in_the_mode_in_which_it_was() -> None:
    model = nested()
    layers = layers_of(Any4(), model)
    check_cut(Any4(), model, layers, inputs_for(torch.randn(3, 4)))
    assert model.training
    assert all(layer.module.training for layer in layers)


def test_a_module_that_comes_twice_is_two_layers() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4, bias=False), relu)
    layers = layers_of(Any4(), model)
    assert [layer.name for layer in layers] == ["0", "1", "2", "3"]
    check_cut(Any4(), model, layers, inputs_for(torch.randn(5, 4)))


def test_a_sequential_with_its_own_forward_is_cut_by_its_graph() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = Doubled(nn.Linear(4, 4), nn.ReLU())
    check_cut(Any4(), model, layers_of(Any4(), model), inputs_for(torch.randn(5, 4)))


def test_a_graph_that_depends_on_the_mode_is_refused() -> None:
    class OfMode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.layer(x), 0.5, self.training)

    with pytest.raises(ConfigError, match=r"depends on `self\.training`"):
        layers_of(Any4(), OfMode())


def test_small_outputs_are_compared_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.data *= 1e-6
    layers = layers_of(Any4(), model)
    check_cut(Any4(), model, layers, inputs_for(torch.randn(5, 4)))
    with pytest.raises(ConfigError, match="another output"):
        check_cut(
            Any4(),
            model,
            [layers[0], layers[1]._replace(module=nn.Sequential(layers[1].module, Triple()))],
            inputs_for(torch.randn(5, 4)),
        )


class Triple(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class OfConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * torch.tensor(2.0))


def test_a_tensor_that_forward_makes_is_no_buffer_and_does_not_stay_at_the_model() -> None:
    model = OfConstants()
    before = set(vars(model))
    layers = layers_of(Any4(), model)
    check_cut(Any4(), model, layers, inputs_for(torch.randn(2, 4)))
    assert len(layers) == 3
    assert set(vars(model)) == before
    assert not [buffer for layer in layers for buffer in layer.module.buffers()]


class WithoutGradient(OfConstants):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.first(x)
        return self.second(h)


def test_layers_that_learn_what_the_model_does_not_are_refused() -> None:
    model = WithoutGradient()
    with pytest.raises(ConfigError, match=r"its layers learn other parameters than the whole model \('first.weight'"):
        check_cut(Any4(), model, layers_of(Any4(), model), inputs_for(torch.randn(2, 4)))
