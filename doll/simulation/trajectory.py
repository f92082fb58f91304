"""What a simulated run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Trajectory:
    """Time series of a run: one entry per update."""

    time_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # batches queued at the update
    up: list[int] = field(default_factory=list)  # workers up at the update
    group_s: list[float] = field(default_factory=list)  # from the group's first grant to its update
    usd: list[float] = field(default_factory=list)  # spent until the update
