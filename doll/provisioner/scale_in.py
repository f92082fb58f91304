"""The scale-in rule: it removes workers that hardly speed up a job, and recalls them if necessary. Pure.

A slot that has no worker because of this rule is *released*. Its machine ends in an orderly way: the worker finishes or
returns its batches, sends the updates that it still holds back, and leaves. The server assigns its partitions to the
other workers (`release_request`), so that they also learn its data, as in the paper. A released slot is *recalled*, and
gets partitions again, if the deadline comes into danger or the rule is switched off. See
docs/decisions/0032-scale-in-releases-slots.md, 0079-the-others-take-over-from-a-released-worker.md and 0121.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np

from doll.amounts import usd
from doll.errors import InfeasiblePlanError
from doll.provisioner.kept_state import KeptState
from doll.provisioner.observation import Observed
from doll.provisioner.planning import planner
from doll.provisioner.planning.estimators import MIN_EVALUATIONS, MIN_FALL
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.provisioner.planning.tuner import ScaleInTuner, TunerSettings
from doll.records.control import ProvisionDecision, Scale, ServerStatus
from doll.theory.checks import Floats
from doll.theory.comparison import certain_largest
from doll.theory.fitting import fit_tail

_RECALL: Final = 0.5
"""Fraction of the reserve for a release at which a slot is recalled. The distance prevents slots from alternating."""
_UNKNOWN: Final = "the state of an earlier provisioner is lost"
MOST_LATE = 0.05
"""The accepted probability of missing the deadline after a release, if the job does not state one (`plan.risk`)."""
_DEARER = 1.01  # factor of the expected cost that is more than the rounding of forecasts
_REPLICAS = 50
Evict = Literal["worst_replica", "slowest"]
_EQUAL_RATES: Final = 1.1  # rates of streams are estimates: up to this factor they count as equal


def spare_needed_s(settings: PlannerSettings, reserve: float) -> float:
    """Return the spare seconds that the release of a slot requires, if all remaining slots were on-demand. They are the
    sum of the reserve and the time that the deadline guard keeps for the loss of all spot machines."""
    return reserve * settings.deadline_s + settings.detection_delay + settings.boot_s


def deadline_at_risk(state: PlannerState, settings: PlannerSettings, reserve: float) -> str:
    """Return the reason why the slots of `state` cannot do the work with the fraction `reserve` of the deadline left,
    or "". `settings` has the work that the error target requires."""
    plan = planner.plan(state, settings)
    needed_s = spare_needed_s(settings, reserve)
    if not plan.feasible or plan.slack_s < needed_s:
        return (
            f"the deadline would be at risk: {state.num_workers} workers would leave {plan.slack_s:.0f} s to spare, "
            f"{needed_s:.0f} s are required"
        )
    return ""


def release_refusal(before: PlannerState, after: PlannerState, settings: PlannerSettings, reserve: float) -> str:
    """Return the reason against a change from the slots of `before` to those of `after`: danger for deadline or budget,
    or a higher cost; "" if there is none. The planner predicts cost and end for the remaining work, by Eq. (15)-(16)
    and (21)-(22) of the DOLL paper."""
    if refusal := deadline_at_risk(after, settings, reserve):
        return refusal
    forecast, cost_usd = (
        planner.plan(after, settings).forecast,
        planner.plan(before, settings).forecast.expected_cost_usd,
    )
    accepted = MOST_LATE if settings.risk is None else settings.risk
    if forecast.miss_prob > accepted:
        return f"the deadline would be missed with probability {forecast.miss_prob:.3f}, {accepted:g} is accepted"
    if forecast.over_budget:
        return f"the expected cost of {usd(forecast.expected_cost_usd)} USD would be above the budget"
    if forecast.expected_cost_usd > _DEARER * cost_usd:
        return (
            f"the expected cost would rise from {usd(cost_usd)} to {usd(forecast.expected_cost_usd)} USD: to be in "
            "time, the other workers would have to be on-demand for longer"
        )
    return ""


def sharing(
    state: PlannerState, slots: Bools, capacity_per_s: Floats, without_partition: Bools | None = None
) -> PlannerState:
    """Return the state of the slots that have workers, each with its share of the streams of the other slots.

    Args:
        state: state of all slots, each with the rate of the streams that it serves now.
        slots: slots that have workers, shape (N,).
        capacity_per_s: samples per second that each worker can compute, shape (N,). 0: not known; the worker gets no
            share.
        without_partition: slots whose streams other slots serve now, shape (N,). If such a slot gets a worker, it gets
            an equal part of the total rate. None: there is no such slot.

    Raises:
        ValueError: no slot with a rate above 0 is left.
    """
    own, count = state.rates_per_s, max(1, int(slots.sum()))
    if without_partition is not None and (back := slots & without_partition).any():
        own = np.where(back, float(own.sum()) / count, own * (1 - int(back.sum()) / count))
    share = float(own[~slots].sum()) / count
    rates = np.maximum(own, np.minimum(own + share, capacity_per_s))
    return replace(state, rates_per_s=rates).of_slots(slots)


def release_request(released: Sequence[int], status: ServerStatus | None) -> Scale | None:
    """Return the request to the parameter server; None if it has these released workers, or no server runs."""
    if status is None or not status.num_workers or tuple(released) == status.released:
        return None
    return Scale(workers=status.num_workers, run_id=status.run_id, released=tuple(released))


@dataclass(frozen=True)
class ErrorTarget:
    """The held-out error ε that a job must reach. `measure` is "error_rate" or "loss"."""

    error: float
    measure: str


def error_refusal(
    updates: Sequence[float], errors: Sequence[float], target: float, floor_growth: float
) -> tuple[str, float]:
    """Return the reason why the error target ε would be out of reach, or ""; and the upper end of J(ε) from the job's
    error curve, or 0 if the curve is too short.

    γ of (10) is proportional to 1/(K b), so updates of fewer batches raise the floor of the curve by the factor
    `floor_growth`: the batches of an update now, divided by those after the release. `updates` is J of each held-out
    evaluation, ascending; `errors` are above 0; both have the shape (m,).
    """
    at, measured = np.asarray(updates, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    if len(at) < MIN_EVALUATIONS or measured[-1] > MIN_FALL * measured[0]:
        return "", 0.0
    fit = fit_tail(at, measured, np.random.default_rng(len(at)), replicas=_REPLICAS)
    floor = fit.curve.gamma * floor_growth
    if floor >= target:
        return (f"the error target {target:g} would be at risk: the error curve would not fall below {floor:.4g}"), 0.0
    try:
        needed = fit.updates_to(target)
    except InfeasiblePlanError:  # only by rounding, because the floor is below the target
        return "", 0.0
    return "", needed.high if np.isfinite(needed.high) else needed.point


@dataclass(frozen=True)
class ScaleInSettings:
    """A job's settings of the rule.

    Attributes:
        deadline_reserve: fraction of the deadline that must be left as a reserve after a release.
        require_gain: whether a release requires that Perf/$ rises according to the measured step times.
        target: held-out error that the job must reach. None: only the planned work counts.
        evict: the worker to release: "worst_replica", as in the paper, or "slowest", as in MLLess's code.
        batches_of_update: batches of an update with 0, 1, ..., N live workers; empty if the number never changes.
    """

    tuner: TunerSettings
    deadline_reserve: float = 0.05
    require_gain: bool = True
    target: ErrorTarget | None = None
    evict: Evict = "worst_replica"
    batches_of_update: tuple[int, ...] = ()

    def floor_growth(self, workers: int) -> float:
        """Return the batches of an update with this number of workers, divided by the batches with one worker fewer."""
        if not self.batches_of_update:
            return 1.0
        return self.batches_of_update[workers] / self.batches_of_update[workers - 1]


Criterion = Literal["", "interruption_notice", "worst_replica", "slowest_stream", "slowest_worker", "newest_machine"]


@dataclass(frozen=True)
class SlotChange:
    """An action of the rule; the journal gets a line of this kind. `by`: what distinguished a slot to release."""

    kind: Literal["release", "recall", "release_refused"]
    slot: int
    why: str
    by: Criterion = ""


def choose_slot(slots: Sequence[int], rates_per_s: Floats, observed: Observed, evict: Evict) -> SlotChange:
    """Return which of `slots`, at least one, to release: that of the worst replica, by the loss of its worker's own
    weights on the samples that all workers evaluate. If noise could explain that: of the slowest stream, the slowest
    worker, or the newest machine. `rates_per_s`: of all slots' streams, shape (N,)."""

    def chosen(slot: int, by: Criterion, why: str) -> SlotChange:
        return SlotChange("release", slot, equal + why, by)

    equal = ""
    if evict == "worst_replica":
        losses = observed.shared_losses(slots)
        if (worst := certain_largest(losses)) is not None:
            excess, error = worst.excess / losses.mean(), worst.error / losses.mean()
            why = f"its replica is the worst: on the same samples its loss is {excess:.3%} (standard error {error:.3%})"
            why += f" above that of the next one, in {len(losses)} evaluations"
            return chosen(slots[worst.column], "worst_replica", why)
        equal = f"no replica is certainly the worst in {len(losses)} evaluations; "
    slowest_per_s = rates_per_s[slots].min()
    slots = [slot for slot in slots if rates_per_s[slot] <= _EQUAL_RATES * slowest_per_s]
    if len(slots) == 1:
        return chosen(slots[0], "slowest_stream", f"its stream is the slowest, with {slowest_per_s:.3g} samples/s")
    times_s = observed.services_s(slots)
    if (slowest := certain_largest(times_s)) is not None:
        took_s = times_s[:, slowest.column].mean()
        why = f"its worker is the slowest: a batch takes {took_s:.3g} s, {slowest.excess:.3g} s more than with the next"
        return chosen(slots[slowest.column], "slowest_worker", why)
    newest = max(slots, key=lambda slot: (0.0 if (held := observed.holder(slot)) is None else held.since_s, slot))
    return chosen(newest, "newest_machine", "no stream or worker is the slowest; its machine is the newest")


class ScaleIn(KeptState):
    """The released slots of a job, bool of shape (N,). If `settings` is None, the rule is off and released slots are
    recalled."""

    KEPT: ClassVar = {"whys": dict[int, str], "stopped": str, "tuner": KeptState}

    def __init__(self, settings: ScaleInSettings | None, num_slots: int) -> None:
        self._settings = settings
        self._num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Start again with workers in all slots."""
        self.released: Bools = np.zeros(self._num_slots, dtype=np.bool_)
        self._whys: dict[int, str] = {}
        self._stopped = ""  # why no slot is released any more
        self._tuner = self._new_tuner(self._num_slots)

    def _new_tuner(self, workers: int) -> ScaleInTuner | None:
        return None if self._settings is None else ScaleInTuner(self._settings.tuner, workers)

    @property
    def active(self) -> Bools:
        """The slots that should have workers, shape (N,)."""
        return ~self.released

    def why(self, slot: int) -> str:
        """Return the reason why this slot is released."""
        return f"released by scale-in, the others have its partitions: {self._whys.get(slot, _UNKNOWN)}"

    def retarget(self, settings: ScaleInSettings | None) -> None:
        """Use other settings. If the rule is switched on during a run, it uses only observations from then on."""
        self._settings = settings
        if settings is None:
            self._tuner = None
        elif self._tuner is None:
            self._tuner, self._stopped = self._new_tuner(int(self.active.sum())), ""
        else:
            self._tuner.settings = settings.tuner

    def adopt(self, decision: ProvisionDecision) -> None:
        """Take the released slots from the last published decision, because the earlier provisioner's state is lost."""
        if decision.phase not in ("run", "stopped") or len(decision.markets) != self._num_slots:
            return
        self.released = np.array([not market for market in decision.markets], dtype=np.bool_)
        if self.released.all():
            self.released[:] = False
        if self.released.any():
            self._stopped = _UNKNOWN

    def review(
        self, state: PlannerState, asked: PlannerSettings, observed: Observed, noticed: Collection[int], now_s: float
    ) -> list[SlotChange]:
        """Recall slots, release one slot, or do neither. `noticed` are the slots with an interruption notice."""
        if self._settings is None:
            return [self._recall(slot, "scale-in is switched off") for slot in np.flatnonzero(self.released).tolist()]
        if self.released.any() and (changes := self._recall_in_danger(state, asked, observed)):
            return changes
        if self._stopped or self._tuner is None:
            return []
        verdict = self._tuner.ask(observed.losses, now_s)
        if not verdict.remove:
            return []
        change = self._candidate(state, observed, noticed)
        if change is None:
            return [SlotChange("release_refused", -1, f"{verdict.why}, but no worker is ready")]
        if refusal := self._refusal(change.slot, state, asked, observed):
            return [replace(change, kind="release_refused", why=f"{verdict.why}, but {refusal}")]
        self.released[change.slot] = True
        self._whys[change.slot] = f"{verdict.why}; {change.why}"
        self._tuner.removed(observed.losses, now_s)
        return [replace(change, why=self._whys[change.slot])]

    def _recall_in_danger(
        self, state: PlannerState, asked: PlannerSettings, observed: Observed
    ) -> list[SlotChange]:  # fmt: skip
        """Recall as many released slots as the deadline requires, those with the fastest streams first."""
        assert self._settings is not None
        reserve = _RECALL * self._settings.deadline_reserve
        of_others = observed.capacity_per_s(asked.batch_size), observed.without_partition()
        changes: list[SlotChange] = []
        for slot in sorted(np.flatnonzero(self.released).tolist(), key=lambda slot: -float(state.rates_per_s[slot])):
            if not (danger := deadline_at_risk(sharing(state, self.active, *of_others), asked, reserve)):
                break
            changes.append(self._recall(slot, danger))
            self._stopped = f"slots were recalled: {danger}"
        return changes

    def _recall(self, slot: int, why: str) -> SlotChange:
        self.released[slot] = False
        self._whys.pop(slot, None)
        return SlotChange("recall", slot, why)

    def _candidate(self, state: PlannerState, observed: Observed, noticed: Collection[int]) -> SlotChange | None:
        """Return the release of a slot, first of one that will lose its machine; None if no worker is ready."""
        assert self._settings is not None
        slots = [slot for slot in np.flatnonzero(self.active).tolist() if state.up[slot] or slot in noticed]
        if leaving := [slot for slot in slots if slot in noticed]:
            return SlotChange("release", leaving[-1], "its machine is about to be interrupted", "interruption_notice")
        return choose_slot(slots, state.rates_per_s, observed, self._settings.evict) if slots else None

    def _refusal(self, slot: int, state: PlannerState, asked: PlannerSettings, observed: Observed) -> str:
        """Return the reason why the slot must not be released, or ""."""
        settings, tuner = self._settings, self._tuner
        assert settings is not None
        assert tuner is not None
        if settings.require_gain and (gain := tuner.gain_of_removal(observed.losses)) is not None and gain <= 1:
            return f"by the measured step times Perf/$ would fall to {gain:.3f} of what it is"
        remaining = self.active
        remaining[slot] = False
        if not state.rates_per_s[remaining].any():
            return "no other stream has records"
        if (target := settings.target) is not None:
            updates, errors = observed.errors(target.measure)
            if not errors or errors[-1] > target.error:
                growth = settings.floor_growth(int(self.active.sum()))
                refusal, needed = error_refusal(updates, errors, target.error, growth)
                if refusal:
                    return refusal
                per_update = asked.samples_per_update or observed.batches_per_update * asked.batch_size
                asked = replace(asked, samples=max(asked.samples, needed * per_update if needed else 0.0))
        of_others = observed.capacity_per_s(asked.batch_size), observed.without_partition()
        before, after = (sharing(state, slots, *of_others) for slots in (self.active, remaining))
        return release_refusal(before, after, asked, settings.deadline_reserve)

    def to_dict(self) -> dict[str, Any]:
        return {"released": np.flatnonzero(self.released).tolist(), **super().to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        slots = [int(slot) for slot in kept["released"]]
        if any(not 0 <= slot < self._num_slots for slot in slots):
            raise ValueError(f"expected released slots of 0 to {self._num_slots - 1}, got {slots}")
        super().restore(kept)
        self.released[:] = False
        self.released[slots] = True
