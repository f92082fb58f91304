"""The device on which a process computes: the setting `worker.device`, resolved on this machine.

Devices are counted without initializing CUDA, because after that a process cannot fork processes that use CUDA.
"""

from __future__ import annotations

import torch

from doll.errors import ConfigError


def resolve(setting: str, worker: int) -> str:
    """Return the device of worker number `worker`: `cpu`, `cuda:N` or `mps`.

    `auto` and `cuda` distribute workers over the CUDA devices by their numbers.

    Raises:
        ConfigError: this machine does not have the device.
    """
    if setting.startswith("cpu"):  # `cpu:0` is for tests: it is the same device as `cpu`, but has separate tensors
        return setting
    count, has_mps = torch.cuda.device_count(), torch.backends.mps.is_available()
    if setting == "auto":
        if count:
            return f"cuda:{worker % count}"
        return "mps" if has_mps else "cpu"
    if setting == "mps" and has_mps:
        return "mps"
    if setting == "cuda" and count:
        return f"cuda:{worker % count}"
    if setting.startswith("cuda:") and int(setting.partition(":")[2]) < count:
        return setting
    there = ["cpu", *(f"cuda:{number}" for number in range(count)), *(["mps"] if has_mps else [])]
    why = "" if torch.version.cuda or not setting.startswith("cuda") else "; this build of torch has no CUDA"
    raise ConfigError(f"worker.device: expected a device of this machine ({', '.join(there)}), got {setting!r}{why}")
