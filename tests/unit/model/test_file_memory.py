"""A model whose memory is files is the same model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from doll.model import file_memory
from doll.model.file_memory import LargeTensorsInFiles, forget_pages, zeros_in_file
from doll.model.flat_model import FlatModel

pytestmark = pytest.mark.slow  # loads torch


def build() -> torch.nn.Sequential:
    torch.manual_seed(3)
    first = torch.nn.Linear(20, 30)
    torch.nn.init.orthogonal_(first.weight)
    first.bias.data = torch.linspace(0, 1, 30) * torch.rand(30)
    frozen = torch.nn.Conv1d(30, 4, 1).requires_grad_(False)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(30), torch.nn.ReLU(), frozen)


def is_in_file(tensor: torch.Tensor) -> bool:
    """Whether its memory is a mapping of a file without a name, by the table of this process."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.split()[1].endswith("s")
    return False


def test_a_model_that_is_built_in_files_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = build()
    monkeypatch.setattr(file_memory, "FROM_BYTES", 4)
    with LargeTensorsInFiles():
        actual = build()
    assert all(is_in_file(parameter) for parameter in actual.parameters())
    assert not any(is_in_file(parameter) for parameter in expected.parameters())
    for name, value in expected.state_dict().items():
        assert actual.state_dict()[name].numpy().tobytes() == value.numpy().tobytes(), name
    assert [p.requires_grad for p in actual.parameters()] == [p.requires_grad for p in expected.parameters()]
    flat = FlatModel(actual, zeros=zeros_in_file)
    assert is_in_file(flat.flat)
    assert is_in_file(flat.grad)
    assert flat.flat.tolist() == FlatModel(expected).flat.tolist()


def test_small_tensors_stay_where_they_are() -> None:
    with LargeTensorsInFiles():
        model = build()
    assert not any(is_in_file(parameter) for parameter in model.parameters())


def test_gradients_are_computed_in_the_file() -> None:
    model = FlatModel(build()[0], zeros=zeros_in_file)
    torch.autograd.backward(model.module(torch.ones(2, 20)).sum())
    assert is_in_file(model.grad)
    assert model.grad[:600].tolist() == [2.0] * 600


def test_pages_that_were_forgotten_come_back_and_a_fork_shares_them() -> None:
    values = zeros_in_file(100_000)
    values += 1.5
    forget_pages(values)
    assert values.unique().tolist() == [1.5]
    if (pid := os.fork()) == 0:
        values[7] = 3.0
        os._exit(0)
    os.waitpid(pid, 0)
    assert values[7].item() == 3.0


def test_a_copy_of_a_model_is_of_its_memory() -> None:
    model = FlatModel(build(), zeros=zeros_in_file)
    copy = model.copied(np.arange(5, dtype=np.float32))
    assert copy.tolist() == [0, 1, 2, 3, 4]
    assert is_in_file(torch.from_numpy(copy))
    assert zeros_in_file(0).shape == (0,)
