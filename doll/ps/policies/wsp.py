"""Wave synchronous parallel: bounded staleness for waves of batches, one push per wave (HetPipe paper, sec. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from doll.ps.policies.base import BatchId, PolicySpec, PolicyView
from doll.ps.policies.gated import GatedByClock, GatedConfig

MAX_WAVE_BATCHES = 1_000
MAX_CLOCK_DISTANCE = 10_000


class WspPolicyConfig(GatedConfig):
    """Waves: each worker pushes the steps of N_m batches as one, and is at most D waves ahead of the slowest."""

    name: Literal["wsp"] = "wsp"
    wave_batches: PositiveInt = Field(
        default=4, le=MAX_WAVE_BATCHES, description="N_m: batches of a wave; a worker may have as many under way"
    )
    clock_distance: NonNegativeInt = Field(
        default=0,
        le=MAX_CLOCK_DISTANCE,
        description="D: how many waves a worker may be ahead of the slowest one when it begins another",
    )
    pipelined: bool = Field(
        default=False,
        description="workers are pipelines of stages, and begin a wave while the last batches of the one before are "
        "computed; set by worker.pipeline",
    )

    @property
    def bound_text(self) -> str:
        return "the workers wait for the slowest wave"

    @property
    def batches_per_push(self) -> int:
        return self.wave_batches

    @property
    def parallel_batches(self) -> int:
        return self.wave_batches if self.pipelined else 1

    def batches_per_update(self, num_workers: int) -> int:
        return self.wave_batches


class Wsp(GatedByClock):
    """The policy of waves. A worker's clock is the number of its whole waves in the model. A wave begins after all of
    its batches are announced, except in a pipeline.

    The batch at place p of its stream (p = 1, 2, ...) needs c - D + 1 waves of every live worker, where c = floor(p /
    N_m) - 2, if c >= D. So a worker that has pushed a wave can compute all batches of the next one except the last.
    """

    name: ClassVar[str] = "wsp"

    def __init__(self, wave_batches: int, clock_distance: int, *, pipelined: bool = False) -> None:
        """`wave_batches`: N_m >= 1. `clock_distance`: D >= 0. `pipelined`: True: a worker computes N_m batches at once
        and begins one whenever another is done, so it begins the next wave before it has pushed the current one."""
        super().__init__(history=clock_distance + 2)
        self.batches_per_push = wave_batches
        self.clock_distance = clock_distance
        self.whole_pushes = not pipelined
        self._max_under_way = wave_batches if not pipelined or wave_batches == 1 else 2 * wave_batches

    def max_under_way(self) -> int:
        return self._max_under_way

    def clock(self, applied: int) -> int:
        return applied // self.batches_per_push

    def needed(self, batch: int, offset: int) -> int:
        waves = (batch + 1) // self.batches_per_push + offset - 2
        return waves - self.clock_distance + 1 if waves >= self.clock_distance else 0

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        return view.held_batches() if view.num_held else ()

    def batches_needed(self, view: PolicyView) -> int:
        return self.batches_per_push


def _make(config: WspPolicyConfig) -> Wsp:
    return Wsp(config.wave_batches, config.clock_distance, pipelined=config.pipelined)


SPEC = PolicySpec("wsp", WspPolicyConfig, _make)
