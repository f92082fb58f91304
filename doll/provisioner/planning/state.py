"""The planner's input: what the job asks for, where it stands, and what is needed of its past. Pure.

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
    """Availability of spot: point estimate and interval, each in [0, 1]. `low` and `high` default to the point."""

    point: float
    low: float = math.nan
    high: float = math.nan

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", self.point if math.isnan(self.low) else self.low)
        object.__setattr__(self, "high", self.point if math.isnan(self.high) else self.high)
        checks.fraction(point=self.point, low=self.low, high=self.high)


@dataclass(frozen=True)
class PlannerSettings:
    """The job's aims, and how the planner behaves. Raises ValueError for a number out of its range.

    Args:
        samples: samples to be learned: J K b for J updates of K batches of b samples that meet the error target.
        batch_size: b, in samples that the task makes of the records of a batch.
        group_size: K, batches per update; None if the policy does not fix it.
        deadline_s, budget_usd: θ on the job's clock, and the maximum cost of the workers; None for no bound.
        replan_s: the planner is asked again at least this often; the guard relies on it.
        detection_delay_s: how long a working spot machine may have been gone before the planner is asked; None:
            `replan_s`.
        boot_s: from a change of market to a worker that is ready.
        cycle_s: mean up + down time of a spot worker, for the spread of forecasts and for `risk`.
        rule: "pace" waits for spot while the slack allows and covers workers that are down when it does not; "theorem"
            keeps Theorem 4/5's mix on the remaining work, as in the paper's adaptive provisioning; "mix" is Theorem 4/5
            once, at the start, as in the paper's a-priori plan: no slot moves later, and there is no guard.
        guard: keep so much on-demand that the deadline holds even if all of spot went down now.
        margin: fraction of the deadline held back, for noise in arrivals.
        slack_reserve: rule "pace": fraction of the slack of a uniform pace that is kept before spot's outages are
            covered; 0 spends the slack as soon as it can, 1 never falls behind the uniform pace.
        return_reserve: rule "pace": fraction of that slack above which workers return to spot; the distance to
            `slack_reserve` is what an outage may use up before there is another move.
        risk: rule "theorem": accepted probability of missing the deadline; None plans on the expectation.
        spot_stable_s: how long spot must have been available before a worker returns; None: 2 boots, at least 5
            `replan_s`.
        dead_band: rule "theorem": changes of at most this many workers are not worth their moves.
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
        """K b; None if updates differ."""
        return None if self.group_size is None else self.group_size * self.batch_size

    @property
    def updates(self) -> float | None:
        """J; None if updates differ."""
        return None if self.samples_per_update is None else self.samples / self.samples_per_update

    @property
    def detection_delay(self) -> float:
        """Seconds for which the end of a spot machine may go unseen."""
        return self.replan_s if self.detection_delay_s is None else self.detection_delay_s

    @property
    def dwell(self) -> float:
        """Seconds that spot must have been available before a return."""
        return max(2 * self.boot_s, 5 * self.replan_s) if self.spot_stable_s is None else self.spot_stable_s


@dataclass(frozen=True)
class PlannerState:
    """The state of a job. Raises ValueError if shapes differ, or a number is out of its range.

    Args:
        rates_per_s: λ_n as estimated, one per slot, shape (N,).
        on_spot: current market of each slot, shape (N,): True on spot, False on-demand.
        up: the slot's worker is ready and works, shape (N,).
        spot_available: whether spot has a machine for this slot now, shape (N,): for a slot on spot, whether it runs or
            boots; for one on-demand, what a probe reported. Default: `up` for slots on spot, True for the others.
        spot_changed_s: since when `spot_available` is what it is, shape (N,). Default: since ever.
        moved_s: when the slot last changed its market, shape (N,). Default: never.
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
        """The state of some slots alone, in their order. Raises ValueError if no slot with a rate above 0 is left."""
        if slots.all():
            return self
        names = ("rates_per_s", "on_spot", "up", "spot_available", "spot_changed_s", "moved_s")
        return replace(self, **{name: getattr(self, name)[slots] for name in names})


class SlotHistory(KeptState):
    """Spot's availability per slot (True before the first observation), when it last changed, and when the slot last
    changed its market, in seconds of any one clock; -inf before. The shape is (N,) for one job of N slots, (M, N) for M
    jobs."""

    KEPT: ClassVar = {"moved_s": Floats, "spot_available": Bools, "spot_changed_s": Floats}

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.spot_available: Bools = np.ones(shape, dtype=np.bool_)
        self.spot_changed_s: Floats = np.full(shape, -math.inf)
        self.moved_s: Floats = np.full(shape, -math.inf)

    def begin(self, spot_available: npt.ArrayLike) -> None:
        """Availability as it is found at the start: no change."""
        self.spot_available = np.array(spot_available, dtype=np.bool_)

    def observe(self, spot_available: npt.ArrayLike, now_s: float) -> None:
        """Availability at `now_s`; array of the history's shape."""
        observed = np.array(spot_available, dtype=np.bool_)
        self.spot_changed_s[observed != self.spot_available] = now_s
        self.spot_available = observed

    def move(self, moved: Bools, now_s: float) -> None:
        """These slots change their market at `now_s`; array of the history's shape."""
        self.moved_s[moved] = now_s

    def since(self, started_s: float = 0.0, *, job: int | None = None) -> dict[str, Any]:
        """The arguments of `PlannerState` about the past; of one of M jobs, or of a history of one."""
        at = slice(None) if job is None else job
        return {
            "spot_available": self.spot_available[at],
            "spot_changed_s": self.spot_changed_s[at] - started_s,
            "moved_s": self.moved_s[at] - started_s,
        }
