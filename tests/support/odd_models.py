"""Models whose cuts are odd: another leading dimension, types and shapes that few layers have, random numbers,
statistics, weights that are computed; and models that no pipeline can take, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from doll.task.base import Sample, Task
from odd_layers import (
    CLASSES,
    Attention,
    Buffers,
    Ema,
    FrozenNorm,
    HalfLinear,
    Heads,
    LastState,
    Mixing,
    OfTuples,
    OfValues,
    Residual,
    Sign,
    Tensor,
    Uses,
)
from torch import nn
from torch.nn import functional

Array = npt.NDArray[Any]
VOCABULARY = 11


class F(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Case(NamedTuple):
    """A model, and where it is cut.

    Attributes:
        layers: make the layers of a `Sequential`; or one module that is no layer.
        cuts: how many layers are in each stage; None: two stages, cut where DOLL likes.
        shape: of one sample.
        kind: of the numbers in x: "f" float32, "i" ids, "b" bools, "i1" small integers.
        targets: shape of one sample's target; classes, or numbers where `loss` is given.
        forward, loss, stages: of the task.
        has_shape: the task has an `input_shape`.
        wide: the largest number in x.
    """

    layers: Callable[[], Sequence[nn.Module] | nn.Module]
    cuts: Sequence[int] | None = (1, 1)
    shape: tuple[int, ...] = (6,)
    kind: str = "f"
    targets: tuple[int, ...] = ()
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    stages: Callable[[Any], Sequence[tuple[str, nn.Module]]] | None = None
    has_shape: bool = True
    wide: float = 1.0


def loss_of_heads(output: Tensor, y: Tensor) -> Tensor:
    classes = functional.cross_entropy(output[:, :CLASSES], (y[:, 0].abs() * 2).long() % CLASSES)
    return classes + functional.mse_loss(output[:, CLASSES], y[:, 1].to(output.dtype))


def norm(width: int = 6, **options: Any) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(width, **options)


def linear(width: int = CLASSES) -> nn.Linear:
    return nn.Linear(6, width)


def tokens() -> nn.Module:
    return nn.Embedding(VOCABULARY, 6)


def of_tokens(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y.reshape(-1).long())


def of_numbers(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output, y.to(output.dtype))


def encoder(dropout: float = 0.0, *, batch_first: bool = False) -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=dropout, batch_first=batch_first)


def frozen() -> nn.Module:
    return linear(6).requires_grad_(False)


def flat() -> nn.Module:
    return F(lambda x: x.reshape(-1, 6))


def time_first() -> nn.Module:
    return F(lambda x: x.transpose(0, 1))


def ids(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x.long())
    return output


def as_it_is(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


def noisy(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x + 0.1 * torch.randn_like(x))
    return output


TEXT: dict[str, Any] = {"shape": (5,), "kind": "i", "forward": ids}

CASES: dict[str, Case] = {
    # another leading dimension
    "flattened tokens": Case(
        lambda: [tokens(), flat(), norm(), linear(VOCABULARY)], (2, 1, 1), targets=(5,), loss=of_tokens, **TEXT
    ),
    "flattened and folded again": Case(
        lambda: [tokens(), flat(), norm(), F(lambda x: x.reshape(-1, 5, 6).mean(1)), linear()], (2, 1, 2), **TEXT
    ),
    "sequence first transformer": Case(
        lambda: [tokens(), time_first(), encoder(), F(lambda x: x.mean(0)), linear()], (2, 1, 2), **TEXT
    ),
    "sequence first GRU": Case(
        lambda: [tokens(), time_first(), LastState(batch_first=False), linear()], (2, 1, 1), **TEXT
    ),
    "one in front": Case(lambda: [linear(6), F(lambda x: x[None]), F(lambda x: norm_of(x[0])), linear()], (2, 2)),
    "one in front of statistics": Case(
        lambda: [linear(6), F(lambda x: x[None].transpose(1, 2)), norm(), F(lambda x: x[0].T), linear()], (2, 1, 2)
    ),
    "features first": Case(lambda: [linear(6), F(lambda x: x.T), F(lambda x: torch.tanh(x.T)), linear()], (2, 2)),
    "pairs of samples and windows": Case(
        lambda: [
            F(lambda x: x.unfold(1, 6, 3)),
            flat(),
            norm(),
            linear(6),
            F(lambda x: x.reshape(-1, 3, 6).amax(1)),
            linear(),
        ],
        (2, 2, 2),
        shape=(12,),
    ),
    "patches of images": Case(
        lambda: [
            F(lambda x: x.reshape(-1, 2, 3, 2, 3).permute(0, 1, 3, 2, 4).reshape(-1, 9)),
            nn.Linear(9, 6),
            norm(),
            F(lambda x: x.reshape(-1, 4, 6).mean(1)),
            linear(),
        ],
        (1, 2, 2),
        shape=(6, 6),
    ),
    "channels in the middle": Case(
        lambda: [nn.Conv1d(1, 6, 3), F(lambda x: x.permute(2, 0, 1)), F(lambda x: x.mean(0)), linear()],
        (2, 2),
        shape=(1, 8),
    ),
    "no dimension": Case(
        lambda: [linear(6), F(lambda x: x.square().mean()), F(lambda x: x.expand(1))],
        (2, 1),
        targets=(),
        loss=lambda output, y: (output - y.float().mean()).square().mean(),
    ),
    # attention and heads
    "multi-head attention": Case(
        lambda: [tokens(), Attention(), Attention(), F(lambda x: x.mean(1)), linear()], (1, 1, 3), **TEXT
    ),
    "batch first transformer": Case(
        lambda: [tokens(), encoder(batch_first=True), encoder(batch_first=True), F(lambda x: x.mean(1)), linear()],
        (2, 1, 2),
        **TEXT,
    ),
    "several heads": Case(lambda: [linear(6), nn.Tanh(), Heads()], (2, 1), targets=(2,), loss=loss_of_heads),
    # random numbers
    "dropout in each stage": Case(
        lambda: [linear(6), nn.Dropout(0.5), linear(6), nn.Dropout(0.3), linear()], (2, 2, 1)
    ),
    "dropout and statistics": Case(lambda: [linear(6), norm(), nn.Dropout(0.4), linear(6), norm(), linear()], (3, 3)),
    "sequence first with dropout": Case(
        lambda: [tokens(), time_first(), encoder(0.2), encoder(0.2), F(lambda x: x.mean(0)), linear()],
        (3, 1, 2),
        **TEXT,
    ),
    "noise in front": Case(lambda: [linear(6), nn.ReLU(), linear()], (2, 1), forward=noisy),
    "a graph with dropout": Case(lambda: Residual(0.3), None),
    # statistics and other buffers
    "batch norm of images": Case(
        lambda: [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3), nn.Flatten(), nn.Linear(8, 3)],
        (1, 2, 3),
        shape=(1, 6, 6),
    ),
    "cumulative statistics": Case(lambda: [linear(6), norm(momentum=None), linear()], (1, 2)),
    "norms of instances and groups": Case(
        lambda: [
            nn.Conv1d(1, 6, 3),
            nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
            nn.GroupNorm(2, 6),
            nn.Flatten(),
            nn.Linear(36, 3),
        ],
        (2, 1, 2),
        shape=(1, 8),
    ),
    "a buffer that is replaced": Case(lambda: [Ema(), Ema(), linear()], (1, 2)),
    "buffers of integers": Case(lambda: [Buffers(), linear(6), Buffers(), linear()], (2, 2)),
    "statistics that are frozen": Case(lambda: [linear(6), FrozenNorm(6), linear()], (1, 2)),
    # types
    "bfloat16": Case(lambda: [HalfLinear(torch.bfloat16), F(lambda x: torch.tanh(x.float())), linear()], (1, 2)),
    "bfloat16 throughout": Case(
        lambda: [HalfLinear(torch.bfloat16), nn.ReLU(), HalfLinear(torch.bfloat16), HalfLinear(torch.bfloat16, 3)],
        (2, 1, 1),
        loss=lambda output, y: functional.cross_entropy(output.float(), y.long()),
    ),
    "float16": Case(lambda: [HalfLinear(torch.float16), F(lambda x: torch.tanh(x.float())), linear()], (1, 2)),
    "float64": Case(lambda: [HalfLinear(torch.float64), nn.Tanh(), F(lambda x: x.float()), linear()], (2, 2)),
    "bools": Case(lambda: [linear(6), F(lambda x: x > 0), F(lambda x: x.float()), linear()], (2, 2)),
    "integers": Case(lambda: [linear(VOCABULARY), F(lambda x: x.argmax(1)), tokens(), linear()], (2, 2)),
    "small integers": Case(
        lambda: [
            F(lambda x: (x * 8).to(torch.int8)),
            F(lambda x: (x + 1).to(torch.int16)),
            F(lambda x: x.float()),
            linear(),
        ],
        (1, 1, 2),
    ),
    "complex numbers": Case(
        lambda: [linear(6), Mixing(), F(lambda x: torch.fft.irfft(x, n=6, dim=1)), linear()], (2, 2)
    ),
    "bools as samples": Case(
        lambda: [F(lambda x: (~x).float()), linear(6), nn.Tanh(), linear()], (2, 2), kind="b", forward=as_it_is
    ),
    "bytes as samples": Case(
        lambda: [F(lambda x: x.float() / 8), linear(6), nn.Tanh(), linear()], (1, 3), kind="i1", forward=as_it_is
    ),
    # memory
    "expanded": Case(
        lambda: [linear(6), F(lambda x: x[:, None].expand(-1, 3, -1)), nn.Tanh(), F(lambda x: x.mean(1)), linear()],
        (2, 1, 2),
    ),
    "a slice that is changed in place": Case(
        lambda: [linear(6), F(lambda x: x[:, ::2]), F(lambda x: x.mul_(2.0)), nn.Linear(3, 3)], (2, 2)
    ),
    "samples that are changed in place": Case(lambda: [F(lambda x: x.mul_(2.0)), linear()], (1, 1)),
    "activations changed in place": Case(lambda: [linear(6), nn.ReLU(inplace=True), linear()], (1, 2)),
    # gradients
    "weight norm": Case(lambda: [nn.utils.parametrizations.weight_norm(linear(6)), nn.Tanh(), linear()], (1, 2)),
    "spectral norm": Case(lambda: [nn.utils.parametrizations.spectral_norm(linear(6)), nn.Tanh(), linear()], (1, 2)),
    "straight through": Case(lambda: [linear(6), F(Sign.apply), linear(6), nn.Tanh(), linear()], (2, 3)),
    "a gradient that ends": Case(lambda: [linear(6), nn.Tanh(), Uses()], (2, 1)),
    "frozen in the middle": Case(
        lambda: [linear(6), nn.Sequential(frozen(), nn.Tanh()), frozen(), linear()], (1, 2, 1)
    ),
    "a stage without parameters": Case(lambda: [linear(6), nn.Tanh(), linear()], (1, 1, 1)),
    "infinite outputs": Case(
        lambda: [linear(6), nn.Tanh(), F(lambda x: x.masked_fill(torch.arange(6) > 2, -math.inf))], (2, 1)
    ),
    "numbers instead of classes": Case(
        lambda: [linear(6), nn.Softplus(), linear(2)], (1, 2), targets=(2,), loss=of_numbers
    ),
    # graphs and names
    "a graph": Case(Residual, None),
    "a graph with a tuple": Case(OfTuples, None),
    "named stages": Case(
        OfValues, None, stages=lambda model: [("a", nn.Sequential(model.first, nn.ReLU())), ("b", model.second)]
    ),
    "no shape": Case(lambda: [linear(6), norm(), linear()], (2, 1), has_shape=False),
}


def norm_of(x: Tensor) -> Tensor:
    return x / (1.0 + x.square().mean(dim=1, keepdim=True))


# --- models that no pipeline can take ---------------------------------------------------------------------------------


def tied() -> Sequence[nn.Module]:
    first, second = linear(6), linear(6)
    second.weight = first.weight
    return [first, nn.ReLU(), second, linear()]


class TiedHead(nn.Module):
    """A graph; the weights of the embedding are those of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCABULARY, 6), linear(6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(self.embed(x))))
        return output


class FreezesItsNorm(nn.Sequential):
    """Its own `train` keeps a child in evaluation mode; a stage does not know of this."""

    def train(self, mode: bool = True) -> FreezesItsNorm:
        super().train(mode)
        self[1].eval()
        return self


class OfGenerator(nn.Module):
    """Random numbers of its own, also where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(6, generator=self.generator)


class Branches(OfValues):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(x) if float(x.sum()) > 0 else -self.first(x))
        return output


def autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(x)
    return output


def doubled(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output * 2


def clamped(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.clamp(-50.0, 50.0)


def clamped_in_place(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.clamp_(-50.0, 50.0)


def narrow(x: Tensor) -> Tensor:
    return x.to(torch.float8_e5m2) if x.abs().max() > 40 else x


def minds(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output * 2 if x.abs().max() > 40 else output


def plain() -> Sequence[nn.Module]:
    return [linear(6), nn.ReLU(), linear()]


REFUSED: dict[str, tuple[Case, str]] = {
    "tied weights": (Case(tied, (2, 2)), "layers '0' and '2' share a parameter or buffer"),
    "a tied head": (Case(TiedHead, None, targets=(5,), **TEXT), "share a parameter or buffer"),
    "a table": (
        Case(lambda: [nn.EmbeddingBag(VOCABULARY, 6, sparse=True), linear()], **TEXT), "a pipeline has no tables yet",
    ),
    "a type that cannot be sent": (
        Case(lambda: [linear(6), F(lambda x: x.to(torch.float8_e5m2)), F(lambda x: x.float()), linear()], (2, 2)),
        "layer '0..1' returns a tensor of type torch.float8_e5m2, expected one of float32, .*bfloat16",
    ),
    "a sparse tensor": (
        Case(lambda: [F(lambda x: x.to_sparse()), F(lambda x: x.to_dense()), linear()], (1, 2)),
        r"returns a tensor of layout torch.sparse_coo, expected a dense one",
    ),
    "too many dimensions": (
        Case(lambda: [F(lambda x: x.reshape(-1, *[1] * 7, 6)), F(lambda x: x.reshape(-1, 6)), linear()], (1, 2)),
        "returns a tensor of 9 dimensions, expected at most 8",
    ),
    "a forward that scales": (Case(plain, (2, 1), forward=doubled), "forward does more than to call"),
    "a clamp out of reach": (Case(plain, (2, 1), forward=clamped), "forward does more than to call"),
    "a clamp in place": (Case(plain, (2, 1), forward=clamped_in_place), "forward does more than to call"),
    "autocast": (Case(plain, (2, 1), forward=autocast), "layer .2. fails on the output of the one before .*BFloat16"),
    "values that branch": (Case(Branches, None), r"its forward\(\) cannot be traced"),
    "a stage that leaves out a layer": (
        Case(OfValues, None, stages=lambda model: [("a", model.first), ("b", model.second)]),
        r"another output than the whole model .* its stages\(\) leaves something out",
    ),
    "a stage that leaves out a detach": (
        Case(
            lambda: [linear(6), F(lambda x: x + x.detach()), linear()], None,
            stages=lambda model: [("a", model[0]), ("b", nn.Sequential(F(lambda x: x + x), model[2]))],
        ), "another gradient than the whole model",
    ),
    "a stage that leaves out a dropout": (
        Case(
            lambda: [linear(6), nn.Dropout(0.5), linear()], None,
            stages=lambda model: [("a", model[0]), ("b", model[2])],
        ), "another output than the whole model",
    ),
    "a train of its own": (
        Case(
            lambda: FreezesItsNorm(linear(6), norm(), linear()), None,
            stages=lambda model: [("a", nn.Sequential(model[0], model[1])), ("b", model[2])],
        ), "another output than the whole model",
    ),
    "random numbers of its own": (
        Case(lambda: [OfGenerator(), linear()]), "cannot be compared with it: its output for the same input differs",
    ),
}  # fmt: skip

UNSEEN: dict[str, tuple[Case, str]] = {
    # What random numbers do not show, and samples do.
    "no numbers to compare with": (
        Case(OfValues, None, stages=lambda model: [("a", model.first), ("b", model.second)], has_shape=False),
        "batch 0: .* another output than the whole model",
    ),
    "a clamp out of the numbers' reach": (
        Case(
            lambda: [linear(6), F(lambda x: x.clamp(-4.0, 4.0)), linear()], None, wide=80.0,
            stages=lambda model: [("a", model[0]), ("b", model[2])],
        ), "batch 0: .* another output than the whole model",
    ),
    "a forward that minds the numbers": (
        Case(plain, (2, 1), wide=80.0, forward=minds),
        "forward does more than to call the model",
    ),
    "a type that depends on the numbers": (
        Case(
            lambda: [F(narrow), F(lambda x: x.float()), linear()],
            (1, 2), wide=80.0,
        ), "returns a tensor of type torch.float8_e5m2",
    ),
}  # fmt: skip


# --- the task ---------------------------------------------------------------------------------------------------------


def case_of(name: str) -> Case:
    return CASES[name] if name in CASES else (REFUSED | UNSEEN)[name][0]


class Odd(Task):
    """The task of a case, by its name."""

    num_classes = CLASSES

    def __init__(self, name: str) -> None:
        self.case = case_of(name)
        self.input_shape = self.case.shape if self.case.has_shape else None
        if self.case.targets or self.case.loss is not None:
            self.num_classes = None  # type: ignore[assignment]

    def build_model(self) -> nn.Module:
        made = self.case.layers()
        return made if isinstance(made, nn.Module) else nn.Sequential(*made)

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        return super().forward(model, x) if self.case.forward is None else self.case.forward(model, x)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) if self.case.loss is None else self.case.loss(output, target)

    def stages(self, model: nn.Module) -> Sequence[tuple[str, nn.Module]] | None:
        return None if self.case.stages is None else self.case.stages(model)


def odd_samples(case: Case, seed: int, n: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x: Array
    if case.kind == "f":
        x = (rng.normal(size=(n, *case.shape)) * case.wide).astype(np.float32)
    elif case.kind == "i":
        x = rng.integers(VOCABULARY, size=(n, *case.shape))
    elif case.kind == "b":
        x = rng.random(size=(n, *case.shape)) < 0.5
    else:
        x = rng.integers(-9, 9, size=(n, *case.shape)).astype(np.int8)
    if case.loss in (of_numbers, loss_of_heads):
        return x, rng.normal(size=(n, *case.targets)).astype(np.float32)
    return x, rng.integers(CLASSES, size=(n, *case.targets))
