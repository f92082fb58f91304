"""A model that no blob can hold is refused before any process starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doll.config import parse
from doll.errors import ConfigError
from doll.model import flat_model
from doll.model.flat_model import MAX_MODEL_BYTES, build
from doll.storage.blobs import HEADER_BYTES, MAX_BLOB_BYTES
from doll.task.base import Sample, Task

pytestmark = pytest.mark.slow  # loads torch

CONFIG = parse('{job: j, task: {class: "examples.synthetic.task:Gaussian"}, data: {workers: 1, batch_size: 4}}')


class Wide(Task):
    """A task whose large layer has a size and the memory of one number."""

    input_shape = (10_000,)
    num_classes = 2

    def build_model(self) -> Any:
        wide = torch.nn.Linear(10_000, 13_000, bias=False, device="meta")
        wide.weight = torch.nn.Parameter(torch.zeros(()).expand(13_000, 10_000))
        return torch.nn.Sequential(wide, torch.nn.Linear(13_000, 2))

    def decode(self, record: bytes) -> Sample:
        raise NotImplementedError


class HalfFrozen(Wide):
    def build_model(self) -> Any:
        model = super().build_model()
        model[0].requires_grad_(False)
        return model


def test_a_model_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MODEL_BYTES + HEADER_BYTES <= MAX_BLOB_BYTES
    monkeypatch.setattr(flat_model, "MAX_MODEL_BYTES", 499_000_000)
    with pytest.raises(ConfigError, match=r"expected at most 499 MB of trainable .*got 520 MB: freeze a part of it"):
        build(CONFIG, Wide())


def test_frozen_parameters_do_not_count() -> None:
    assert build(CONFIG, HalfFrozen()).num_parameters == 26_002
