"""The provisioner's loop, one turn at a time: observe, plan, reconcile, act. It has no clock and no thread of its own.

Order of effects of a turn: 1. look at the fleet; 2. settle the bills of what has ended; 3. note each end, then ask for
it; 4. note and save the orders; 5. make them, one by one; 6. save. After a crash between any two the next turn does the
same: what exists says the fleet (by its tags), an order that may have been made is made again word by word, which gives
the same instance, and an end may be asked for twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from doll import records, telemetry
from doll.errors import ServiceUnavailableError
from doll.provisioner import goal, planner
from doll.provisioner.book import Book
from doll.provisioner.fleet import End, Fleet, Instance, InstanceState, LaunchError, Trouble
from doll.provisioner.meter import (
    LOCAL,
    Bill,
    BillingRule,
    Line,
    bill_line,
    on_demand_usd,
    usd_per_1000_updates,
    usd_per_point,
)
from doll.provisioner.observation import Observed
from doll.provisioner.prices import PriceFeed
from doll.provisioner.reconcile import Action, Launch, Limits, Memory, Terminate, View, Wait, reconcile
from doll.provisioner.state import Alpha, Bools, Market, PlannerSettings, PlannerState
from doll.theory.checks import Floats
from doll.theory.cost import SECONDS_PER_HOUR, Prices, unequal_cost_usd

log = telemetry.get_logger(__name__)

Phase = Literal["run", "done", "drain", "budget", "stopped", "blind"]

_PASSES = 3  # a market found dry is planned around in the same turn, which may find the other one dry
_KEEP_LINES_S = 24 * 3600.0  # an ended instance is not listed any more by then
_RESERVE_TURNS = 3  # the bill of this many turns is held back: what is running cannot be ended at once
_RE_ESTIMATE_EVERY = 3  # evaluations
_STATE_VERSION = 1


class Probe(Protocol):
    """Whoever can tell, without buying, whether spot is to be had."""

    def spot_open(self, slot: int) -> bool | None:
        """Whether a spot launch for this slot would succeed now; None: nobody knows. May be repeated."""


@dataclass(frozen=True)
class ControllerSettings:
    """What the job asks for and how its provisioner behaves.

    Attributes:
        planner: work, deadline (on the job's clock), budget and behaviour; `replan_s` is the longest time between two
            turns, which the caller sees to.
        rates_per_s: λ_n as the job file says, shape (N,): one slot each.
        samples_per_record: m of packed records.
        prior_alpha: of spot, before anything is seen.
        limits: how fast, and how often.
        billing: how the owner of the machines counts.
        silent_s: a worker not heard for this long, while others are, does not work.
        target_error, measure: J is re-estimated from the job's own held-out errors; None: J is as planned.
        started_s: beginning of the job's clock; None: the first turn.
    """

    planner: PlannerSettings
    rates_per_s: Floats
    samples_per_record: int = 1
    prior_alpha: float = 0.9
    limits: Limits = field(default_factory=Limits)
    billing: BillingRule = LOCAL
    silent_s: float = 30.0
    target_error: float | None = None
    measure: str = "error_rate"
    started_s: float | None = None

    @property
    def num_slots(self) -> int:
        return len(self.rates_per_s)


@dataclass(frozen=True)
class Done:
    """An action and what came of it; "" where it did what it should."""

    action: Action
    trouble: str = ""
    id: str = ""

    def text(self) -> str:
        """For people."""
        match self.action:
            case Launch(order=order, why=why):
                got = self.trouble or self.id or "as planned"
                return f"slot {order.slot}: launch epoch {order.epoch} {order.market} ({why}): {got}"
            case Terminate(id=id_, slot=slot, why=why):
                return f"slot {slot}: end {id_} ({why}){': ' + self.trouble if self.trouble else ''}"
            case Wait(slot=slot, why=why):
                return f"slot {slot}: wait: {why}"


@dataclass(frozen=True)
class Decision:
    """One turn: what was seen, what is wanted and why, what was done, what it costs.

    Attributes:
        phase: "run"; "done" (the job has ended), "drain", "budget" (it is spent): everything is ended; "stopped" (a
            person must mend something); "blind" (the fleet or the prices do not answer: nothing is done).
        markets, reasons: per slot; None: no machine.
        binding: what decides, as `Plan.binding`, or "budget".
        done: actions with their outcome; waits are in it.
        instances: of this moment, ended ones included while the fleet lists them.
        ready: ids of instances whose worker has its slot.
        bill: until now.
        over: nothing runs and nothing is left to do.
    """

    turn: int
    now_s: float
    started_s: float
    phase: Phase
    markets: tuple[Market | None, ...]
    reasons: tuple[str, ...]
    binding: str
    feasible: bool
    done: tuple[Done, ...]
    instances: tuple[Instance, ...]
    ready: frozenset[str]
    epochs: tuple[int, ...]
    bill: Bill
    updates_done: float
    updates_wanted: float
    on_demand_usd: float
    expected_cost_usd: float
    expected_finish_s: float
    slack_s: float
    alpha: Alpha
    cycle_s: float
    prices: Prices | None
    rates_per_s: Floats
    usd_per_point: float
    moves: int
    interruptions: int
    alarms: tuple[str, ...]
    dry_run: bool
    over: bool

    @property
    def clock_s(self) -> float:
        """Seconds on the job's clock."""
        return self.now_s - self.started_s

    @property
    def alive(self) -> tuple[Instance, ...]:
        return tuple(one for one in self.instances if one.is_alive)

    @property
    def actions(self) -> tuple[Done, ...]:
        """What was done, without the waits."""
        return tuple(one for one in self.done if not isinstance(one.action, Wait))

    def record(self) -> records.Decision:
        """As it is told on the job's topic `metrics`."""
        distinct = tuple(dict.fromkeys(self.reasons))
        return records.Decision(
            turn=self.turn, time_s=self.now_s, started_s=self.started_s, phase=self.phase, binding=self.binding,
            feasible=self.feasible, markets=tuple(market or "" for market in self.markets), reasons=distinct,
            reason_of=tuple(distinct.index(one) for one in self.reasons), epochs=self.epochs,
            actions=tuple(one.text() for one in self.actions), alarms=self.alarms, instances=len(self.alive),
            num_spot=sum(one.market == "spot" for one in self.alive), updates_done=self.updates_done,
            spent_usd=self.bill.usd, expected_cost_usd=self.expected_cost_usd,
            expected_finish_s=self.expected_finish_s, dry_run=self.dry_run,
        )  # fmt: skip

    def measurements(self) -> dict[str, float]:
        """Numbers for the topic `metrics`, finite ones only."""
        alive = self.alive
        found = {
            "clock_s": self.clock_s,
            "spent_usd": self.bill.usd,
            "spent_spot_usd": self.bill.usd_by_market["spot"],
            "spent_on_demand_usd": self.bill.usd_by_market["on_demand"],
            "on_demand_usd": self.on_demand_usd,
            "expected_cost_usd": self.expected_cost_usd,
            "expected_finish_s": self.expected_finish_s,
            "slack_s": self.slack_s,
            "usd_per_1000_updates": usd_per_1000_updates(self.bill.usd, self.updates_done),
            "usd_per_point": self.usd_per_point,
            "instances_spot": sum(one.market == "spot" for one in alive),
            "instances_on_demand": sum(one.market == "on_demand" for one in alive),
            "instances_ready": len(self.ready),
            "slots_wanted_spot": sum(one == "spot" for one in self.markets),
            "slots_wanted_on_demand": sum(one == "on_demand" for one in self.markets),
            "availability": self.alpha.point,
            "spot_usd_per_h": self.prices.spot_usd_per_h if self.prices else math.nan,
            "on_demand_usd_per_h": self.prices.on_demand_usd_per_h if self.prices else math.nan,
            "moves_total": self.moves,
            "interruptions_total": self.interruptions,
            "alarms": len(self.alarms),
        }
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values: a line of the journal, and of `doll provision status --json`."""
        return {
            **{name: value for name, value in self.measurements().items()},
            "turn": self.turn,
            "time_s": self.now_s,
            "started_s": self.started_s,
            "phase": self.phase,
            "binding": self.binding,
            "feasible": self.feasible,
            "updates_done": self.updates_done,
            "updates_wanted": self.updates_wanted,
            "markets": [market or "" for market in self.markets],
            "reasons": _by_text(self.reasons),
            "actions": [one.text() for one in self.actions],
            "waits": _by_text_of(
                {one.action.slot: one.action.why for one in self.done if isinstance(one.action, Wait)}
            ),
            "alarms": list(self.alarms),
            "dry_run": self.dry_run,
            "over": self.over,
        }


class Controller:
    """The provisioner of one job.

    Call `turn` at least every `settings.planner.replan_s`, and `feed` it the job's records meanwhile. An object that is
    made anew after a crash goes on where the old one was.

    Args:
        book: keeps state and journal.
        probe: who can tell whether spot is to be had without buying; None: it is inferred from what happened.
        check_lease: raises where another provisioner has taken over.
        dry_run: decide and say, but do nothing and keep nothing.

    Attributes:
        observed: what is known of the job; feed it.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        fleet: Fleet,
        prices: PriceFeed,
        book: Book,
        *,
        probe: Probe | None = None,
        check_lease: Callable[[], None] | None = None,
        dry_run: bool = False,
    ) -> None:
        count = settings.num_slots
        self.settings = settings
        self.observed = Observed(
            settings.rates_per_s,
            samples_per_record=settings.samples_per_record,
            prior_alpha=settings.prior_alpha,
            prior_cycle_s=settings.planner.cycle_s,
            silent_s=settings.silent_s,
        )
        self._planner = settings.planner
        self._fleet = fleet
        self._prices = prices
        self._book = book
        self._probe = probe
        self._check_lease = check_lease
        self._dry_run = dry_run
        self._memory = Memory(count, settings.limits)
        self._turn = 0
        self._started_s = settings.started_s
        self._on_spot: Bools | None = None  # None: nothing was planned yet
        self._moved_s = np.full(count, -math.inf)
        self._spot_open = np.ones(count, dtype=np.bool_)
        self._spot_changed_s = np.full(count, -math.inf)
        self._pools = [""] * count
        self._known: dict[str, Instance] = {}  # alive when last seen
        self._told: set[str] = set()  # instances whose notice or end is in the memory
        self._ready_s: dict[str, float] = {}  # since when an instance's worker has, or had, its slot
        self._fenced_s: dict[str, float] = {}
        self._lines: dict[str, Line] = {}  # of ended instances
        self._settled = Bill()  # of those that ended long ago
        self._carried_usd = 0.0
        self._last_usd = 0.0
        self._last_prices: Prices | None = None
        self._spent_budget_usd: float | None = None  # the budget that is spent
        self._evaluations = 0
        self._moves = 0
        self._interruptions = 0
        self._restore()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def feed(self, record: records.AnyRecord, at_s: float) -> None:
        """A record of `updates`, `up`, `down` or `metrics`, written at about `at_s`."""
        self.observed.feed(record, at_s)

    def look_at_ends(self, now_s: float, ends: Sequence[int]) -> None:
        """The end of each sample partition at `now_s`."""
        self.observed.look_at_ends(now_s, ends)

    def retarget(self, settings: ControllerSettings) -> None:
        """Another deadline, budget or work, in mid-run; the number of slots stays.

        Raises:
            ValueError: another number of slots.
        """
        if settings.num_slots != self.settings.num_slots:
            raise ValueError(f"expected {self.settings.num_slots} slots as before, got {settings.num_slots}")
        self.settings, self._planner, self._evaluations = settings, settings.planner, 0

    # --- a turn -----------------------------------------------------------------------------------------------------

    def turn(self, now_s: float, *, draining: bool = False) -> Decision:
        """Decide and act.

        Args:
            draining: every instance is to be ended, and none started.

        Raises:
            FencedError: another provisioner has taken over. Nothing was done.
            ConfigError: the book cannot be written.
        """
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError


def slot_ranges(slots: Sequence[int], most: int = 12) -> str:
    """Ascending slot numbers for people.

    >>> slot_ranges([0, 1, 2, 3, 7, 9, 10])
    '0-3, 7, 9-10'
    """
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot - 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(shown[:most]) + (f", ... ({len(slots)} in all)" if len(shown) > most else "")


def _by_text(texts: Sequence[str]) -> dict[str, str]:
    """Which slots each text stands for."""
    return _by_text_of(dict(enumerate(texts)))


def _by_text_of(texts: Mapping[int, str]) -> dict[str, str]:
    slots: dict[str, list[int]] = {}
    for slot in sorted(texts):
        slots.setdefault(texts[slot], []).append(slot)
    return {text: slot_ranges(which) for text, which in slots.items()}
