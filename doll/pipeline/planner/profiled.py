"""Divide the model of a job into stages, with the times of a profile, and compute the memory that a stage needs.

Does not import torch.
"""

from __future__ import annotations

import math
from typing import Final

from doll.config import AdagradConfig, AdamConfig, JobConfig, OptimizerConfig, SgdConfig
from doll.errors import ConfigError
from doll.pipeline.planner.partition import MemoryRule, stops_in_order
from doll.pipeline.profiling.profile import Device, Profile

# For a stage with limited memory: number of arrays of the size of its weights, besides the weights and their copies for
# minibatches in flight. They are the gradient, whose memory is also the optimizer's sum, and one layer's gradient.
_COPIES: Final = 2
# Number of arrays of the size of the largest input or output of a layer, besides the memory kept for the backward pass:
# the output, gradients inside a layer (3), two messages per direction and link, half of them at the neighbours (4).
_TEMPORARIES: Final = 8
_SCRATCH_BYTES: Final = 24_000_000  # memory that BLAS keeps, and small arrays


def live_rule(optimizer: OptimizerConfig) -> MemoryRule:
    """Return the rule for the maximum memory of a stage whose memory is limited.

    As in the paper, the last stage keeps one copy of its weights. The inputs of N_m minibatches may wait at each stage.
    """
    return MemoryRule(
        _COPIES + num_states(optimizer), inputs=True, temporaries=_TEMPORARIES, reserved_bytes=_SCRATCH_BYTES
    )


def num_states(optimizer: OptimizerConfig) -> int:
    """Return the number of arrays with the size of the weights that the optimizer keeps."""
    match optimizer:
        case AdamConfig():
            return 2
        case AdagradConfig(momentum=momentum):
            return 2 if momentum else 1
        case SgdConfig(momentum=momentum):
            return 1 if momentum else 0
        case _:
            return 2


def load_profile(config: JobConfig) -> Profile:
    """Load the profile that the job file names. Raise ConfigError if `worker.pipeline.profile` cannot be read, or was
    made with another batch size."""
    assert config.worker.pipeline is not None
    assert config.worker.pipeline.profile is not None
    path = config.path(config.worker.pipeline.profile)
    profile = Profile.load(path)
    if profile.batch_size != config.data.batch_size:
        raise ConfigError(
            f"worker.pipeline.profile: {path} is of batches of {profile.batch_size}, data.batch_size is "
            f"{config.data.batch_size}: profile it again (doll profile JOB.yaml --out {path.name})"
        )
    return profile


def stops_by_profile(config: JobConfig, profile: Profile, worker: int) -> list[int]:
    """Return the end of each stage in the partition with the smallest bottleneck, on this worker's devices in order.
    Raise ConfigError if a stage does not fit on its device."""
    assert config.worker.pipeline is not None
    devices = [
        Device(
            f"{device.device} of stage {number}", device.speed / device.slowdown,
            math.inf if device.memory_bytes is None else device.memory_bytes,
        )
        for number, device in enumerate(config.worker.pipeline.devices_of(worker), 1)
    ]  # fmt: skip
    rule = live_rule(config.training.optimizer)
    return stops_in_order(profile, devices, in_flight=config.training.policy.batches_per_push, memory=rule)
