"""`benchmarks.gpu` without a GPU: the stages of an update, and what it says where the device is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import gpu
from benchmarks.gpu_stages import STAGES, Stages
from examples.emnist.task import Emnist

pytestmark = pytest.mark.slow  # loads torch


@pytest.mark.parametrize("policy", ["doll", "essp", "diloco"])
def test_each_policy_has_a_valid_job(policy: str) -> None:
    config = gpu.config_of("transformer", "cpu", "float32", 1, 1.0, 64, policy)
    assert config.training.policy.name == policy
    assert policy != "doll" or config.group_size == gpu.GROUP_SIZE


def weights_after(device: str, updates: int) -> np.ndarray:
    size = 2
    stages = Stages(
        gpu.config_of("cnn", device, "float32", 1, 1.0, size), device, gpu.decoded_pool(Emnist(), "cnn", size)
    )
    try:
        for _ in range(updates):
            stages.update()
        return stages._host._updater.weights.copy()
    finally:
        stages.close()


def test_the_stages_make_the_same_versions_on_the_device_as_on_the_cpu() -> None:
    there, here = (weights_after(device, 2) for device in ("cpu:0", "cpu"))
    np.testing.assert_array_equal(there.view(np.uint32), here.view(np.uint32))


def test_each_stage_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "stages.json"
    gpu.stages(str(out), "cnn", "cpu:0", "float32", 0.0, 1, torch.get_num_threads())
    result = json.loads(out.read_text())
    assert result["updates"] >= 3
    assert all(result[name][0] > 0 for name in STAGES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--short"]) == 2
    assert "nothing was measured: worker.device: expected a device of this machine (cpu)" in capsys.readouterr().err
