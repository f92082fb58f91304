"""Layers of unusual models: that keep state, take or return several values, or compute in their own way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor
CLASSES = 3


class Ema(nn.Module):
    """Replaces its buffer instead of writing to it."""

    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return x * self.w - self.ema


class Buffers(nn.Module):
    """Buffers of integers and bools."""

    calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen[int(self.calls) % 5] = True
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return output


class LastState(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.gru(x)[1]
        return state[0]


class OfTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(6, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.lstm(self.embed(x).unsqueeze(1))
        output: Tensor = self.head(h[-1])
        return output


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.drop(self.second(torch.relu(self.norm(self.first(x))))))


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


class Heads(nn.Module):
    """Several outputs, in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.number = nn.Linear(6, CLASSES), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.classes(x), self.number(x)], dim=1)


class HalfLinear(nn.Module):
    """Computes in another type than its weights have."""

    def __init__(self, dtype: torch.dtype, width: int = 6) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(6, width), dtype

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.dtype), self.linear.weight.to(self.dtype), self.linear.bias.to(self.dtype))


class Sign(torch.autograd.Function):
    """Straight-through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class FrozenNorm(nn.BatchNorm1d):
    """Is never in training mode."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(False)
        return self


class OfValues(nn.Module):
    """No graph; its stages have names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) if x.shape[0] else x
        output: Tensor = self.second(h)
        return output


class Uses(nn.Module):
    """Sums the input, whose gradient does not go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x.detach())
        return output


class Mixing(nn.Module):
    """A layer of complex numbers behind a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.weight).conj()
        return output
