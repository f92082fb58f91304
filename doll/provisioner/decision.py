"""The record of one turn: the observations, the wanted state with reasons, the actions, and the costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from doll.provisioner.billing import Bill, usd_per_1000_updates
from doll.provisioner.fleets.port import Instance
from doll.provisioner.planning.planner import slot_ranges
from doll.provisioner.planning.state import Alpha, Market
from doll.provisioner.reconcile import FleetAction, Launch, Terminate, Wait
from doll.records import control as records
from doll.theory.checks import Floats
from doll.theory.cost import Prices

Phase = Literal["run", "done", "drain", "budget", "failed", "idle", "paused", "stopped", "unavailable"]


@dataclass(frozen=True)
class ActionResult:
    """An action and its outcome. `id` is the id of the launched instance."""

    action: FleetAction
    failure: str = ""
    id: str = ""

    def text(self) -> str:
        """Return the result as one line for people."""
        match self.action:
            case Launch(order=order, why=why):
                outcome = self.failure or self.id or "as planned"
                return f"slot {order.slot}: launch incarnation {order.incarnation} {order.market} ({why}): {outcome}"
            case Terminate(id=id_, slot=slot, why=why):
                return f"slot {slot}: end {id_} ({why}){': ' + self.failure if self.failure else ''}"
            case Wait(slot=slot, why=why):
                return f"slot {slot}: wait: {why}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of one turn.

    Attributes:
        now_s, started_s: time of the decision and start of the job's clock, Unix seconds.
        phase: "run": the job runs. In six phases, all machines are ended: "done" (the job has ended), "drain",
            "budget" (the budget is spent), "failed" (the job cannot advance, and a person must act), "idle" (the
            source sends nothing) and "paused" (the hour is excluded or expensive). "stopped": nothing is launched until
            a person has acted. "unavailable": nothing is done, because fleet or prices are unavailable.
        markets, reasons: wanted market of each slot, with the reason. None: the slot gets no machine; in phase "run",
            scale-in has released the slot.
        binding: the binding constraint, see `Plan.binding`, or "budget".
        results: actions with their outcomes; includes waits.
        instances: instances after the actions, including ended instances that the fleet still lists.
        ready: ids of the instances whose worker holds its slot.
        incarnations: highest incarnation used so far, per slot.
        samples_done, target_samples, updates_done: number of samples in the model, total samples of the work, and
            number of updates in the model.
        target_updates: total updates of the work; None if the policy does not fix the batches of an update.
        rates_per_s: λ_n as estimated, samples per second of each stream, shape (N,).
        prices: prices of a worker with all of its machines.
        finished: whether nothing runs and nothing is left to do.
        cost_sd_usd, finish_sd_s: standard deviations of `expected_cost_usd` and `expected_finish_s`.
    """

    turn: int
    now_s: float
    started_s: float
    phase: Phase
    markets: tuple[Market | None, ...]
    reasons: tuple[str, ...]
    binding: str
    feasible: bool = True
    results: tuple[ActionResult, ...] = ()
    instances: tuple[Instance, ...] = ()
    ready: frozenset[str] = frozenset()
    incarnations: tuple[int, ...]
    bill: Bill
    samples_done: float
    target_samples: float
    updates_done: int
    target_updates: float | None
    all_on_demand_usd: float
    expected_cost_usd: float = math.nan
    expected_finish_s: float = math.nan
    slack_s: float = math.nan
    alpha: Alpha
    cycle_s: float
    prices: Prices | None
    rates_per_s: Floats
    usd_per_error_point: float
    moves: int
    interruptions: int
    alarms: tuple[str, ...]
    dry_run: bool
    finished: bool = False
    machines_per_worker: int = 1
    cost_sd_usd: float = math.nan
    finish_sd_s: float = math.nan

    @property
    def elapsed_s(self) -> float:
        """The seconds on the job's clock."""
        return self.now_s - self.started_s

    @property
    def released(self) -> tuple[int, ...]:
        """The slots that have no worker because of scale-in."""
        if self.phase not in ("run", "stopped"):
            return ()
        return tuple(slot for slot, market in enumerate(self.markets) if market is None)

    @property
    def perf_per_usd(self) -> float:
        """The expected performance per USD of the whole job: 1 / (T x cost), MLLess's Eq. (4). NaN if T or the cost is
        not known."""
        product = self.expected_finish_s * self.expected_cost_usd
        return 1 / product if math.isfinite(product) and product > 0 else math.nan

    @property
    def alive(self) -> tuple[Instance, ...]:
        """The instances that run or boot."""
        return tuple(instance for instance in self.instances if instance.is_alive)

    @property
    def running(self) -> list[str]:
        """The market of each slot's worker; "" if no worker is ready."""
        markets: dict[int, str] = {
            instance.slot: instance.market for instance in self.alive if instance.id in self.ready
        }
        return [markets.get(slot, "") for slot in range(len(self.markets))]

    @property
    def actions(self) -> tuple[ActionResult, ...]:
        """The results without the waits."""
        return tuple(result for result in self.results if not isinstance(result.action, Wait))

    def record(self) -> records.ProvisionDecision:
        """Return the record for the job's topic `metrics`."""
        distinct = tuple(dict.fromkeys(self.reasons))
        return records.ProvisionDecision(
            turn=self.turn, time_s=self.now_s, started_s=self.started_s, phase=self.phase, binding=self.binding,
            feasible=self.feasible, markets=tuple(market or "" for market in self.markets), reasons=distinct,
            reason_of=tuple(distinct.index(reason) for reason in self.reasons), incarnations=self.incarnations,
            actions=tuple(result.text() for result in self.actions), alarms=self.alarms, instances=len(self.alive),
            num_spot=sum(instance.market == "spot" for instance in self.alive), samples_done=self.samples_done,
            target_samples=self.target_samples, updates_done=self.updates_done, spent_usd=self.bill.usd,
            expected_cost_usd=self.expected_cost_usd, expected_finish_s=self.expected_finish_s,
        )  # fmt: skip

    def measurements(self) -> dict[str, float]:
        """Return the measurements for the topic `metrics`; only finite numbers."""
        alive = self.alive
        values = {
            "elapsed_s": self.elapsed_s,
            "samples_done": self.samples_done,
            "target_samples": self.target_samples,
            "spent_usd": self.bill.usd,
            "spent_spot_usd": self.bill.usd_by_market["spot"],
            "spent_on_demand_usd": self.bill.usd_by_market["on_demand"],
            "all_on_demand_usd": self.all_on_demand_usd,
            "expected_cost_usd": self.expected_cost_usd,
            "expected_finish_s": self.expected_finish_s,
            "expected_cost_sd_usd": self.cost_sd_usd,
            "expected_finish_sd_s": self.finish_sd_s,
            "slack_s": self.slack_s,
            "usd_per_1000_updates": usd_per_1000_updates(self.bill.usd, self.updates_done),
            "usd_per_error_point": self.usd_per_error_point,
            "instances_spot": sum(instance.market == "spot" for instance in alive),
            "instances_on_demand": sum(instance.market == "on_demand" for instance in alive),
            "instances_ready": len(self.ready),
            "machines_per_worker": self.machines_per_worker,
            "machines_spot": sum(instance.machines for instance in alive if instance.market == "spot"),
            "machines_on_demand": sum(instance.machines for instance in alive if instance.market == "on_demand"),
            "released_slots": len(self.released),
            "perf_per_usd": self.perf_per_usd,
            "desired_slots_spot": self.markets.count("spot"),
            "desired_slots_on_demand": self.markets.count("on_demand"),
            "availability": self.alpha.point,
            "spot_usd_per_h": self.prices.spot_usd_per_h if self.prices else math.nan,
            "on_demand_usd_per_h": self.prices.on_demand_usd_per_h if self.prices else math.nan,
            "moves_total": self.moves,
            "interruptions_total": self.interruptions,
            "alarms": len(self.alarms),
            "stopped": self.phase in ("failed", "stopped", "budget"),
        }
        return {name: float(value) for name, value in values.items() if math.isfinite(value)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a line of the journal and for `doll provision status --json`."""
        waits = [result.action for result in self.results if isinstance(result.action, Wait)]
        return {
            **self.measurements(),
            "turn": self.turn,
            "time_s": self.now_s,
            "started_s": self.started_s,
            "phase": self.phase,
            "binding": self.binding,
            "feasible": self.feasible,
            "updates_done": self.updates_done,
            "target_updates": self.target_updates,
            "markets": [market or "" for market in self.markets],
            "running": self.running,
            "reasons": by_text(dict(enumerate(self.reasons))),
            "actions": [result.text() for result in self.actions],
            "waits": by_text({wait.slot: wait.why for wait in waits}),
            "alarms": list(self.alarms),
            "ready": sorted(self.ready),
            "dry_run": self.dry_run,
            "finished": self.finished,
        }


def order_fields(launch: Launch) -> dict[str, Any]:
    """Return the fields of an order for the journal."""
    order = launch.order
    return {
        "slot": order.slot, "incarnation": order.incarnation, "market": order.market, "attempt": order.attempt,
        "avoid": sorted(order.avoid), "why": launch.why,
    }  # fmt: skip


def by_text(texts: Mapping[int, str]) -> dict[str, str]:
    """Return the slots of each text, as ranges."""
    slots: dict[str, list[int]] = {}
    for slot in sorted(texts):
        slots.setdefault(texts[slot], []).append(slot)
    return {text: slot_ranges(which) for text, which in slots.items()}
