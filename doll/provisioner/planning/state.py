"""The planner's input: the aims of the job, its current state, and the required part of its history. Pure.

All times are in seconds of the job's clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from doll.provisioner.kept_state import KeptState
from doll.theory import checks
from doll.theory.checks import Floats
from doll.theory.cost import Prices

Bools = npt.NDArray[np.bool_]
Market = Literal["spot", "on_demand"]
Rule = Literal["pace", "theorem", "mix"]


@dataclass(frozen=True)
class Alpha:
    """The availability of spot: point estimate and interval, each in [0, 1]. Default of `low` and `high`: the point."""

    point: float
    low: float = math.nan
    high: float = math.nan

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", self.point if math.isnan(self.low) else self.low)
        object.__setattr__(self, "high", self.point if math.isnan(self.high) else self.high)
        checks.fraction(point=self.point, low=self.low, high=self.high)


@dataclass(frozen=True)
class PlannerSettings:
    """The aims of the job, and the behaviour of the planner. Raises ValueError for a number out of its range.

    Args:
        samples: total samples to learn: J K b for the J updates of K batches of b samples that meet the error target.
        batch_size: b, number of samples that the task makes of the records of a batch.
        group_size: K, batches per update. None: the policy does not fix it.
        deadline_s, budget_usd: θ on the job's clock, and the maximum cost of the workers. None: no limit.
        replan_s: longest time between two calls of the planner; the guard relies on it.
        detection_delay_s: longest time between the loss of a working spot machine and the next call of the planner.
            None: `replan_s`.
        boot_s: time from a change of market to a worker that is ready.
        cycle_s: mean length of one up period plus one down period of a spot worker, for forecasts and for `risk`.
        rule: "pace" waits for spot while the slack allows this, and covers workers that are down when it does not.
            "theorem" keeps the mix of Theorem 4/5 for the remaining work, as in the paper's adaptive provisioning.
            "mix" uses Theorem 4/5 once, at the start, as in the paper's a-priori plan: no slot moves later, and there
            is no guard.
        guard: whether to keep enough workers on-demand that the deadline is met even if all spot slots go down now.
        margin: fraction of the deadline that is kept as a reserve for noise in arrivals.
        slack_reserve: rule "pace": fraction of the slack of a uniform pace below which spot's outages are covered. 0:
            the slack is used as early as possible. 1: the job never falls behind the uniform pace.
        return_reserve: rule "pace": fraction of that slack above which workers return to spot. An outage may use up the
            difference to `slack_reserve` before workers move again.
        risk: rule "theorem": accepted probability of missing the deadline. None: the expected end must meet the
            deadline.
        spot_stable_s: time for which spot must be available before a slot returns. None: 2 boots, at least 5
            `replan_s`.
        dead_band: rule "theorem": number of workers up to which a change of the mix is ignored, to avoid moves.
    """

    samples: float
    batch_size: float
    deadline_s: float
    group_size: int | None = None
    budget_usd: float | None = None
    replan_s: float = 60.0
    detection_delay_s: float | None = None
    boot_s: float = 90.0
    cycle_s: float = 36_000.0
    rule: Rule = "pace"
    guard: bool = True
    margin: float = 0.005
    slack_reserve: float = 0.75
    return_reserve: float = 0.75
    risk: float | None = None
    spot_stable_s: float | None = None
    dead_band: int = 2

    def __post_init__(self) -> None:
        checks.positive(samples=self.samples, batch_size=self.batch_size)
        if self.group_size is not None:
            checks.positive(group_size=self.group_size)
        checks.positive(deadline_s=self.deadline_s, replan_s=self.replan_s, cycle_s=self.cycle_s)
        checks.non_negative(boot_s=self.boot_s, dead_band=self.dead_band)
        checks.fraction(margin=self.margin, slack_reserve=self.slack_reserve, return_reserve=self.return_reserve)
        if self.detection_delay_s is not None:
            checks.non_negative(detection_delay_s=self.detection_delay_s)
        if self.spot_stable_s is not None:
            checks.non_negative(spot_stable_s=self.spot_stable_s)
        if self.risk is not None and not 0 < self.risk <= 0.5:
            raise ValueError(f"risk: expected a probability in (0, 0.5], got {self.risk}")

    @property
    def samples_per_update(self) -> float | None:
        """The samples per update, K b; None if updates differ."""
        return None if self.group_size is None else self.group_size * self.batch_size

    @property
    def updates(self) -> float | None:
        """The number of updates, J; None if updates differ."""
        return None if self.samples_per_update is None else self.samples / self.samples_per_update

    @property
    def detection_delay(self) -> float:
        """The seconds for which the end of a spot machine may be unnoticed."""
        return self.replan_s if self.detection_delay_s is None else self.detection_delay_s

    @property
    def dwell(self) -> float:
        """The seconds for which spot must have been available before a return."""
        return max(2 * self.boot_s, 5 * self.replan_s) if self.spot_stable_s is None else self.spot_stable_s


@dataclass(frozen=True)
class PlannerState:
    """The state of a job. Raises ValueError if shapes differ, or if a number is out of its range.

    Args:
        rates_per_s: λ_n as estimated, samples per second of each slot, shape (N,).
        on_spot: current market of each slot, shape (N,): True on spot, False on-demand.
        up: whether the slot's worker is ready and works, shape (N,).
        spot_available: whether spot has a machine for this slot now, shape (N,). For a slot on spot: whether its
            machine runs or boots. For a slot on-demand: the report of a probe. Default: `up` for slots on spot,
            otherwise True.
        spot_changed_s: time of the last change of `spot_available`, shape (N,). Default: it never changed.
        moved_s: time of the slot's last change of market, shape (N,). Default: it never changed.
    """

    elapsed_s: float
    samples_done: float
    rates_per_s: Floats
    on_spot: Bools
    up: Bools
    alpha: Alpha
    prices: Prices
    spent_usd: float = 0.0
    spot_available: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    spot_changed_s: Floats = field(default_factory=lambda: np.empty(0))
    moved_s: Floats = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "rates_per_s", checks.rates(self.rates_per_s))
        shape = self.rates_per_s.shape
        put(self, "on_spot", np.asarray(self.on_spot, dtype=np.bool_))
        put(self, "up", np.asarray(self.up, dtype=np.bool_))
        self._check_shapes("on_spot", "up")
        # An empty array stands for the default.
        opened = np.asarray(self.spot_available, dtype=np.bool_)
        put(self, "spot_available", opened if opened.size else self.up | ~self.on_spot)
        for name in ("spot_changed_s", "moved_s"):
            given = np.asarray(getattr(self, name), dtype=np.float64)
            put(self, name, given if given.size else np.full(shape, -math.inf))
        self._check_shapes("spot_available", "spot_changed_s", "moved_s")
        checks.non_negative(samples_done=self.samples_done, spent_usd=self.spent_usd)

    def _check_shapes(self, *names: str) -> None:
        shape = self.rates_per_s.shape
        for name in names:
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, one per slot, got {getattr(self, name).shape}")

    @property
    def num_workers(self) -> int:
        return len(self.rates_per_s)

    def of_slots(self, slots: Bools) -> PlannerState:
        """Return the state of some slots only, in their order. Raises ValueError if no rate above 0 is left."""
        if slots.all():
            return self
        names = ("rates_per_s", "on_spot", "up", "spot_available", "spot_changed_s", "moved_s")
        return replace(self, **{name: getattr(self, name)[slots] for name in names})


class SlotHistory(KeptState):
    """The history of each slot: spot's availability (True before the first observation), the time at which the
    availability last changed, and the time at which the slot last changed its market. Times are seconds of any one
    clock; -inf: never. The shape is (N,) for one job of N slots, and (M, N) for M jobs."""

    KEPT: ClassVar = {"moved_s": Floats, "spot_available": Bools, "spot_changed_s": Floats}

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.spot_available: Bools = np.ones(shape, dtype=np.bool_)
        self.spot_changed_s: Floats = np.full(shape, -math.inf)
        self.moved_s: Floats = np.full(shape, -math.inf)

    def begin(self, spot_available: npt.ArrayLike) -> None:
        """Set the availability at the start, which does not count as a change."""
        self.spot_available = np.array(spot_available, dtype=np.bool_)

    def observe(self, spot_available: npt.ArrayLike, now_s: float) -> None:
        """Record the availability at `now_s`, an array of the history's shape."""
        observed = np.array(spot_available, dtype=np.bool_)
        self.spot_changed_s[observed != self.spot_available] = now_s
        self.spot_available = observed

    def move(self, moved: Bools, now_s: float) -> None:
        """Record that these slots change their market at `now_s`; an array of the history's shape."""
        self.moved_s[moved] = now_s

    def since(self, started_s: float = 0.0, *, job: int | None = None) -> dict[str, Any]:
        """Return the arguments of `PlannerState` that describe the past. `job` is the number of one of M jobs; None:
        there is one job."""
        at = slice(None) if job is None else job
        return {
            "spot_available": self.spot_available[at],
            "spot_changed_s": self.spot_changed_s[at] - started_s,
            "moved_s": self.moved_s[at] - started_s,
        }
