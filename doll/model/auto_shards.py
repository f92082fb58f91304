"""The number of shards of a job with `ps.shards: auto`. Pure.

The number depends only on the job file and on the size of the model, so every process computes the same one. `doll up`
computes it once, and writes it to the job file of the run. In other deployments it is in the fingerprint, which server
and workers compare, so a release with other limits is refused (docs/decisions/0144).
"""

from __future__ import annotations

import math
from typing import Final

from doll.amounts import byte_size
from doll.config import JobConfig

# ADR 144 has the reasons for these values.
SLICE_BYTES: Final = 1_000_000_000
CONTRIBUTIONS_BYTES_PER_S: Final = 1_000_000_000
LEAST_SLICE_BYTES: Final = 100_000_000
MAX_SHARDS: Final = 256
_VALUE_BYTES: Final = 4


def auto_shards(config: JobConfig, numel: int, *, has_tables: bool) -> int:
    """Return the number of shards for a flat vector of `numel` float32 values; 1 if the model cannot be divided."""
    if has_tables or any(config.shard_problems()):
        return 1
    size_bytes = numel * _VALUE_BYTES
    of_rate = math.ceil(contributions_per_s(config) * size_bytes / CONTRIBUTIONS_BYTES_PER_S)
    wanted = max(math.ceil(size_bytes / SLICE_BYTES), of_rate)
    return max(1, min(wanted, size_bytes // LEAST_SLICE_BYTES, MAX_SHARDS))


def contributions_per_s(config: JobConfig) -> float:
    """Return the contributions of all workers per second, if the job file states how many samples arrive; otherwise
    0."""
    if not config.states_rate:
        return 0.0
    return sum(config.rates_per_s()) / config.data.records_per_batch / config.training.policy.batches_per_push


def shards_text(config: JobConfig, shards: int, numel: int) -> str:
    """Return a text that says the number of shards and what it follows from."""
    size_bytes, rate = numel * _VALUE_BYTES, contributions_per_s(config)
    traffic = f", {byte_size(rate * size_bytes)} of contributions per second" if rate else ""
    return f"ps.shards: auto is {shards}: {byte_size(size_bytes)} of weights{traffic}"
