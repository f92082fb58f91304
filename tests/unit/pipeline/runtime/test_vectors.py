"""Vectors in memory and in files are read as they were written."""

from __future__ import annotations

import os
import random

import pytest
import torch
from doll.pipeline.runtime import vectors
from doll.pipeline.runtime.vectors import VectorFile, Vectors, VectorsInFile, VectorsInMemory
from fuzzing import seeds

pytestmark = pytest.mark.slow  # loads torch

NUMEL = 23


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "PIECE", 5)


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("seed", seeds(5))
def test_what_is_read_was_written(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    kept: Vectors = VectorsInMemory(NUMEL, "cpu") if kind == "memory" else VectorsInFile(NUMEL)
    model: dict[int, torch.Tensor] = {}
    for _ in range(200):
        number, at = draw.randrange(4), draw.randrange(NUMEL)
        count = draw.randint(0, NUMEL - at)
        if number not in model:
            model[number] = torch.randn(NUMEL)
            kept.write(number, 0, model[number])
        elif draw.random() < 0.4:
            values = torch.randn(count)
            model[number][at : at + count] = values
            kept.write(number, at, values)
        elif draw.random() < 0.1:
            del model[number]
            kept.free(number)
        else:
            into = torch.empty(count)
            kept.read(number, at, into)
            assert into.tolist() == model[number][at : at + count].tolist()


def test_a_file_is_seen_by_who_maps_it_and_by_a_fork() -> None:
    file = VectorFile(NUMEL)
    mapped = file.mapped()
    assert mapped.tolist() == [0.0] * NUMEL
    if (pid := os.fork()) == 0:
        file.write(7, torch.ones(3))
        os._exit(0)
    os.waitpid(pid, 0)
    assert mapped.tolist() == [0.0] * 7 + [1.0] * 3 + [0.0] * 13
    mapped[:2] = 2.0
    into = torch.empty(3)
    file.read(0, into)
    assert into.tolist() == [2.0, 2.0, 0.0]


def test_nothing_is_read_behind_the_end() -> None:
    with pytest.raises(OSError, match="ends there"):
        VectorFile(NUMEL).read(NUMEL - 1, torch.empty(2))


def test_a_file_of_nothing_can_be_mapped() -> None:
    assert VectorFile(0).mapped().shape == (0,)
