"""The partition of a job's virtual workers that follows from a profile of its model. Without torch."""

from __future__ import annotations

import math

from doll.config import JobConfig
from doll.errors import ConfigError
from doll.pipeline.planner.live_memory import live_rule
from doll.pipeline.planner.partition import Partition, partition_in_order
from doll.pipeline.profiling.profile import Device, Network, Profile


def partition_by_profile(config: JobConfig, worker: int) -> tuple[Profile, Partition]:
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
