"""The rule that removes workers that hardly speed a job up: when, which one, and when it comes back. Pure.

A slot without a worker by this rule is *released*. Its machine is ended in order: the worker finishes or returns its
batches, sends what it still holds back, and leaves. The records of its stream stay in Kafka, and the planner counts on
the other streams only. A released slot is *recalled*, with all records that have waited, where the deadline comes into
danger or the rule is switched off. See docs/decisions/0032-scale-in-releases-slots.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np

from doll.provisioner.kept_state import KeptState
from doll.provisioner.observation import Observed
from doll.provisioner.planning.release_rule import (
    ErrorTarget,
    deadline_at_risk,
    error_refusal,
    of_slots,
    release_refusal,
    with_work,
)
from doll.provisioner.planning.state import Bools, PlannerSettings, PlannerState
from doll.provisioner.planning.tuner import ScaleInTuner, TunerSettings
from doll.records.control import ProvisionDecision

_RECALL: Final = 0.5
"""A slot is recalled at this share of the reserve for a release: the distance keeps slots from alternating."""
_UNKNOWN: Final = "the state of an earlier provisioner is lost"


@dataclass(frozen=True)
class ScaleInSettings:
    """What a job asks of the rule.

    Attributes:
        tuner: when a removal is worth it.
        deadline_reserve: fraction of the deadline that must be left to spare after a release.
        require_gain: release only where Perf/$ rises by the step times that were measured.
        target: the held-out error that the job is to reach; None: its work says enough.
        batches_of_update: batches of an update with 0, 1, ..., N live workers; empty: always the same.
    """

    tuner: TunerSettings
    deadline_reserve: float = 0.05
    require_gain: bool = True
    target: ErrorTarget | None = None
    batches_of_update: tuple[int, ...] = ()

    def floor_growth(self, workers: int) -> float:
        """Batches of an update with so many workers over those with one fewer."""
        if not self.batches_of_update:
            return 1.0
        return self.batches_of_update[workers] / self.batches_of_update[workers - 1]


@dataclass(frozen=True)
class SlotChange:
    """What the rule did, for the journal: a line of this kind."""

    kind: Literal["release", "recall", "release_refused"]
    slot: int
    why: str


class ScaleIn(KeptState):
    """Which slots of a job are released.

    Args:
        settings: None: the rule is off, and released slots are recalled.

    Attributes:
        released: bool, shape (N,).
    """

    KEPT: ClassVar = {"whys": dict[int, str], "stopped": str, "tuner": KeptState}

    def __init__(self, settings: ScaleInSettings | None, num_slots: int) -> None:
        self._settings = settings
        self._num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """The job begins again: all slots have workers."""
        self.released: Bools = np.zeros(self._num_slots, dtype=np.bool_)
        self._whys: dict[int, str] = {}
        self._stopped = ""  # why no slot is released any more
        self._tuner = self._new_tuner(self._num_slots)

    def _new_tuner(self, workers: int) -> ScaleInTuner | None:
        return None if self._settings is None else ScaleInTuner(self._settings.tuner, workers)

    @property
    def active(self) -> Bools:
        """Slots that are to have workers, shape (N,)."""
        return ~self.released

    def why(self, slot: int) -> str:
        """Why this slot is released."""
        return f"released by scale-in, its records stay in Kafka: {self._whys.get(slot, _UNKNOWN)}"

    def retarget(self, settings: ScaleInSettings | None) -> None:
        """Other settings; switched on in mid-run, it begins with what is observed from then on."""
        self._settings = settings
        if settings is None:
            self._tuner = None
        elif self._tuner is None:
            self._tuner, self._stopped = self._new_tuner(int(self.active.sum())), ""
        else:
            self._tuner.settings = settings.tuner

    def adopt(self, decision: ProvisionDecision) -> None:
        """The state of an earlier provisioner is lost: what it last published says which slots were released."""
        if decision.phase not in ("run", "stopped") or len(decision.markets) != self._num_slots:
            return
        self.released = np.array([not market for market in decision.markets], dtype=np.bool_)
        if self.released.all():
            self.released[:] = False
        if self.released.any():
            self._stopped = _UNKNOWN

    # --- a turn

    def review(
        self, state: PlannerState, planner: PlannerSettings, observed: Observed, noticed: Collection[int], now_s: float
    ) -> list[SlotChange]:
        """Recall slots, or release one, or neither.

        Args:
            state: of all slots.
            noticed: slots whose machine has an interruption notice.
        """
        if self._settings is None:
            return [self._recall(slot, "scale-in is switched off") for slot in np.flatnonzero(self.released).tolist()]
        if self.released.any() and (changes := self._recall_in_danger(state, planner)):
            return changes
        if self._stopped or self._tuner is None:
            return []
        verdict = self._tuner.ask(observed.losses, now_s)
        if not verdict.remove:
            return []
        slot = self._candidate(state, observed, noticed)
        if slot is None:
            return [SlotChange("release_refused", -1, f"{verdict.why}, but no worker is ready")]
        if refusal := self._refusal(slot, state, planner, observed):
            return [SlotChange("release_refused", slot, f"{verdict.why}, but {refusal}")]
        self.released[slot] = True
        self._whys[slot] = verdict.why
        self._tuner.removed(observed.losses, now_s)
        return [SlotChange("release", slot, verdict.why)]

    def _recall_in_danger(self, state: PlannerState, planner: PlannerSettings) -> list[SlotChange]:
        """As many of the released slots, the fastest stream first, as the deadline needs."""
        assert self._settings is not None
        reserve = _RECALL * self._settings.deadline_reserve
        changes: list[SlotChange] = []
        for slot in sorted(np.flatnonzero(self.released).tolist(), key=lambda slot: -float(state.rates_per_s[slot])):
            if not (danger := deadline_at_risk(of_slots(state, self.active), planner, reserve)):
                break
            changes.append(self._recall(slot, danger))
            self._stopped = f"slots were recalled: {danger}"
        return changes

    def _recall(self, slot: int, why: str) -> SlotChange:
        self.released[slot] = False
        self._whys.pop(slot, None)
        return SlotChange("recall", slot, why)

    def _candidate(self, state: PlannerState, observed: Observed, noticed: Collection[int]) -> int | None:
        """The slot to release: one that is about to lose its machine, else that of the slowest stream, else that of the
        slowest worker, as in MLLess's code. None where no worker is ready."""
        rates = state.rates_per_s / state.rates_per_s.max()
        slots = [slot for slot in np.flatnonzero(self.active).tolist() if state.up[slot] or slot in noticed]
        # Rates are estimates: what is within a tenth is equal.
        return min(
            slots,
            key=lambda slot: (slot not in noticed, round(float(rates[slot]), 1), -observed.slot_service_s(slot), -slot),
            default=None,
        )

    def _refusal(self, slot: int, state: PlannerState, planner: PlannerSettings, observed: Observed) -> str:
        """Why the slot may not be released, or ""."""
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
                per_update = planner.samples_per_update or observed.batches_per_update * planner.batch_size
                planner = with_work(planner, needed * per_update if needed else 0.0)
        before, after = of_slots(state, self.active), of_slots(state, remaining)
        return release_refusal(before, after, planner, settings.deadline_reserve)

    # --- kept over restarts

    def to_dict(self) -> dict[str, Any]:
        return {"released": np.flatnonzero(self.released).tolist(), **super().to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        slots = [int(slot) for slot in kept["released"]]
        if any(not 0 <= slot < self._num_slots for slot in slots):
            raise ValueError(f"expected released slots of 0 to {self._num_slots - 1}, got {slots}")
        super().restore(kept)
        self.released[:] = False
        self.released[slots] = True
