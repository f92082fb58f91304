"""The partition of a job's virtual workers that follows from a profile of its model, and the memory of a stage.

Without torch.
"""

from __future__ import annotations

import math
from typing import Final

from doll.config import AdagradConfig, AdamConfig, JobConfig, OptimizerConfig, SgdConfig
from doll.errors import ConfigError
from doll.pipeline.planner.partition import MemoryRule, Partitioning, partition_in_order
from doll.pipeline.profiling.profile import Device, Network, Profile
from doll.pipeline.runtime.virtual_worker import MAX_WAVES_BEHIND

# Arrays of the size of the stage's weights, beside the weights themselves and the copies for minibatches in flight: the
# gradient (where the optimizer's sum is too), one layer's on its way into it, the steps of the wave under way, those of
# the waves that the version in use does not hold yet, and what the worker shares with it: half of the memory for
# versions that are pulled, and of that for steps that are pushed.
_COPIES: Final = 4 + MAX_WAVES_BEHIND + 1
# Of the largest input or output of a layer, beside what is kept for the backward pass: the output, gradients on their
# way through a layer (3), and two messages in each direction on both links, of which the neighbours have half (4).
_TEMPORARIES: Final = 8
_SCRATCH_BYTES: Final = 24_000_000  # what BLAS keeps, and small arrays


def live_rule(optimizer: OptimizerConfig, in_flight: int) -> MemoryRule:
    """The rule for N_m minibatches in flight.

    Unlike in the paper, the last stage keeps N_m copies of its weights too: it is N_m - 1 minibatches ahead of what the
    first stage has completed, and makes their steps only when the first stage does. The inputs of as many may wait at
    each stage.
    """
    match optimizer:
        case AdamConfig():
            state = 2
        case AdagradConfig(momentum=momentum):
            state = 2 if momentum else 1
        case SgdConfig(momentum=momentum):
            state = 1 if momentum else 0
        case _:
            state = 2
    return MemoryRule(
        _COPIES + state, stash_last=in_flight, inputs=True, temporaries=_TEMPORARIES, reserved_bytes=_SCRATCH_BYTES
    )


def partition_by_profile(config: JobConfig, worker: int) -> tuple[Profile, Partitioning]:
    """The partition with the least bottleneck, on this worker's devices in their order, and the profile.

    Raises:
        ConfigError: `worker.pipeline.profile` cannot be read, is of another batch size, or a stage does not fit its
            device.
    """
    pipeline = config.worker.pipeline
    assert pipeline is not None
    assert pipeline.profile is not None
    path = config.path(pipeline.profile)
    profile = Profile.load(path)
    if profile.batch_size != config.data.batch_size:
        raise ConfigError(
            f"worker.pipeline.profile: {path} is of batches of {profile.batch_size}, data.batch_size is "
            f"{config.data.batch_size}: profile it again (doll profile JOB.yaml --out {path.name})"
        )
    in_flight = config.training.policy.batches_per_push
    devices = [
        Device(
            f"{device.device} of stage {number}", device.speed / device.slowdown,
            math.inf if device.memory_bytes is None else device.memory_bytes,
        )
        for number, device in enumerate(pipeline.devices_of(worker), 1)
    ]  # fmt: skip
    rule = live_rule(config.training.optimizer, in_flight)
    return profile, partition_in_order(profile, devices, Network(), in_flight=in_flight, memory=rule)
