"""How fast samples come in each partition, while they come, and for the slots that serve the partitions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from doll.provisioner.kept_state import KeptState
from doll.provisioner.planning.estimators import RateEstimator
from doll.provisioner.planning.state import Bools
from doll.theory import checks
from doll.theory.checks import Floats

PAUSE_S: Final = 480.0
"""A stream without a sample for so long has paused, unless it is so slow that this is nothing unusual."""
_GAPS_OF_A_PAUSE: Final = 20.0  # mean gaps between two samples; chance makes one of e^-20
_LEAST_OF_PRIOR: Final = 1e-6  # the planner needs a rate above 0, also of a slot without a partition

Owners = npt.NDArray[np.int64]


class StreamRates(KeptState):
    """Feed it the ends of the partitions. Which slot serves a partition is the caller's to say: it changes.

    Args:
        prior_per_s: what the job file states for the streams of each slot at first, shape (N,).
        samples_per_record: as of `ControllerSettings`.

    Attributes:
        owners: the slot that serves each partition, shape (P,); P is 0 before the first ends.
        last_arrival_s: of any partition; None before the first ends.
    """

    def __init__(self, prior_per_s: npt.ArrayLike, samples_per_record: float) -> None:
        self._prior = checks.rates(prior_per_s)
        self._samples_per_record = samples_per_record
        self._rates: RateEstimator | None = None
        self._quiet_s = np.zeros(0)  # time without a sample, up to the newest ends
        self._ends: tuple[float, Sequence[int]] | None = None
        self.owners = self.first_owners(0)
        self.last_arrival_s: float | None = None

    def first_owners(self, partitions: int) -> Owners:
        """The slots that serve the partitions of a new job."""
        return np.arange(partitions) % len(self._prior)

    def observe(self, now_s: float, ends: Sequence[int]) -> None:
        """The end of each partition, offsets, as seen at `now_s`. Partitions may be added, not taken away."""
        if self._rates is None or len(ends) != len(self._quiet_s):
            self._resize(len(ends))
        assert self._rates is not None
        if self.last_arrival_s is None:
            self.last_arrival_s = now_s
        if self._ends is not None and now_s > self._ends[0]:
            before_s, before = self._ends
            known = np.asarray([*before, *ends[len(before) :]])[: len(ends)]
            grown = np.maximum(0, np.asarray(ends) - known) * self._samples_per_record
            came, span_s = grown > 0, now_s - before_s
            # A gap between two samples is part of the rate; a pause of the source is not.
            gap_s = np.where(self._is_quiet(), 0.0, self._quiet_s)
            self._rates.observe(grown, np.where(came, span_s + gap_s, 0.0))
            self._quiet_s = np.where(came, 0.0, self._quiet_s + span_s)
            if came.any():
                self.last_arrival_s = now_s
        self._ends = (now_s, list(ends))

    def _resize(self, partitions: int) -> None:
        """What is known of the partitions stays, where they become more."""
        earlier, owners = self._rates, self.first_owners(partitions)
        self._rates = RateEstimator(self._prior[owners] / np.bincount(owners, minlength=len(self._prior))[owners])
        keep = 0 if partitions < len(self._quiet_s) else len(self._quiet_s)
        if earlier is not None and keep:
            self._rates.adopt(earlier)
        self._quiet_s = np.concatenate([self._quiet_s[:keep], np.zeros(partitions - keep)])
        self.owners = np.concatenate([self.owners[:keep], owners[keep:]])

    def per_s(self) -> Floats:
        """λ̂ > 0, samples per second of the partitions of each slot while they come, shape (N,)."""
        if self._rates is None:
            return self._prior
        count = len(self._prior)
        served = np.bincount(self.owners, weights=self._rates.per_s(), minlength=count)
        rates: Floats = np.maximum(served, _LEAST_OF_PRIOR * self._prior.max())
        return rates

    def pause_s(self) -> Floats:
        """How long the streams of each slot may be without a sample before they count as paused, shape (N,)."""
        pauses_s: Floats = np.maximum(PAUSE_S, _GAPS_OF_A_PAUSE * self._samples_per_record / self.per_s())
        return pauses_s

    def paused(self) -> Bools:
        """Slots of which no partition sends anything, shape (N,); also those that have none."""
        if self._rates is None:
            return np.zeros(len(self._prior), dtype=np.bool_)
        quiet: Bools = np.bincount(self.owners[~self._is_quiet()], minlength=len(self._prior)) == 0
        return quiet

    def is_silent(self) -> bool:
        """No partition sends anything."""
        return self._rates is not None and bool(self._is_quiet().all())

    def without_partition(self) -> Bools:
        """Slots that serve no partition, though there is one for each slot, shape (N,)."""
        count = len(self._prior)
        none: Bools = np.bincount(self.owners, minlength=count) == 0
        return none & (len(self.owners) >= count)

    def _is_quiet(self) -> Bools:
        assert self._rates is not None
        gaps_s = _GAPS_OF_A_PAUSE * self._samples_per_record / np.maximum(self._rates.per_s(), 1e-300)
        quiet: Bools = self._quiet_s > np.maximum(PAUSE_S, gaps_s)
        return quiet

    # --- kept over restarts

    def to_dict(self) -> dict[str, Any]:
        return {} if self._rates is None else {"partitions": len(self._quiet_s), **self._rates.to_dict()}

    def restore(self, kept: Mapping[str, Any]) -> None:
        if kept:
            self._resize(int(kept["partitions"]))
            assert self._rates is not None
            self._rates.restore(kept)
