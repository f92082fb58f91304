"""A virtual worker's protocol with its stages: order and weights of minibatches (the HetPipe paper, section 4). Pure.

At most N_m minibatches are in flight. Minibatch p starts when minibatch p - N_m is complete. All stages compute it on
the same version of the weights: the version that was pulled last, plus the worker's own steps that this version does
not include. Minibatches complete in order. A wave is N_m minibatches, whose steps are pushed together.

Stages have memory for one version besides the version in use. So the next version is pulled while they compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from doll.errors import DollError
from doll.pipeline.runtime.messages import Commit, Forward, StageOrders

NO_SLOT: Final = -1
# Number of own waves that the weights in use may lack. The weights of a grant lack at most two waves.
MAX_WAVES_BEHIND: Final = 3


class Weights(NamedTuple):
    """A published version. `included`: number of batches of this worker's stream that it includes."""

    term: int
    version: int
    key: str
    included: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A minibatch to compute on weights of its term, `min_version` or newer. `token` is a value of the caller."""

    batch: int
    term: int
    min_version: int
    num_samples: int
    token: Any = None


class WaveSplitError(DollError):
    """Only some batches of a wave must be computed again. The process must end; a new one computes all batches that are
    not durable."""


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Copy these weights to the file that all stages read, then report `pulled`. Its old content is not needed."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Send this message down the chain, followed by the samples of `submitted`."""

    message: Forward
    submitted: Submission


class Wave(NamedTuple):
    """Steps of the batches below `until` that are pushed together. The push names the version that the last of these
    batches was computed on. `members`: all batches of the sum in order, including batches without a usable sample."""

    until: int
    last: Submission
    version: int
    members: tuple[Submission, ...]


@dataclass(frozen=True, slots=True)
class SendDown:
    """Send this message down the chain. If it is an order to store, report `stored` after all stages have done so.

    Attributes:
        wave: the wave whose steps are to be stored; None: it stores no steps.
    """

    message: StageOrders
    wave: Wave | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """This minibatch is computed. Reports are in order. `wave`: the wave that this minibatch ends, whose steps are
    stored. None: it ends no wave, or the wave has no steps. `members`: the minibatches of the ended wave."""

    submitted: Submission
    version: int
    wave: int | None = None
    members: tuple[Submission, ...] = ()


@dataclass(frozen=True, slots=True)
class Void:
    """This minibatch will be in no push, because nobody waits for it any longer, or it was not started."""

    submitted: Submission


@dataclass(frozen=True, slots=True)
class Missing:
    """No version of the weights that this minibatch may be computed on is available."""

    submitted: Submission


Action = PullWeights | StartBatch | SendDown | Done | Void | Missing


@dataclass(slots=True)
class _Computing:
    submitted: Submission
    slot: int
    version: int
    is_void: bool = False
    is_complete: bool = False
    scale: float = 0.0
    lr_factor: float = 1.0
    weight: float = 0.0


class VirtualWorkerCore:
    """The state of one virtual worker. Each call returns the actions to take, in order."""

    def __init__(self, in_flight: int, wave_batches: int) -> None:
        """
        Args:
            in_flight: N_m >= 1, the number of minibatches in flight.
            wave_batches: n, the number of batches of a push; waves end after the batches k n - 1 of the stream.
        """
        self._in_flight = in_flight
        self._wave = wave_batches
        self._slots = deque(range(in_flight))  # free slots
        self._waiting: deque[Submission] = deque()
        self._computing: deque[_Computing] = deque()
        self._commits: list[Commit] = []  # not sent yet
        self._results: deque[Done | Void] = deque()  # in order; a `Done` whose wave is not stored yet delays later ones
        self._to_store: deque[Wave] = deque()  # complete waves; the first one may be in the process of being stored
        self._storing: Wave | None = None  # wave in the shared file; a void wave is no longer in `_to_store`
        self._is_showing = False
        self._has_steps = False  # whether the current wave has steps
        self._members: list[Submission] = []  # committed minibatches of the current wave
        self._term = -1
        self._next: int | None = None  # number of the next batch
        self._first = 0  # first batch of this term
        self._committed_until = 0
        self._last: tuple[Submission, int] | None = None  # last committed minibatch and its version
        self._forget_from: int | None = None
        self._known: Weights | None = None  # newest version of this term
        self._spare: Weights | None = None  # version in the file that the stages read; not yet in use
        self._base: Weights | None = None  # version of the minibatch that started last
        self._pulling: Weights | None = None
        self._is_adopted = True
        self._is_stopped = False
        self._is_held = False

    @property
    def num_computing(self) -> int:
        """Return the number of minibatches at the stages."""
        return sum(1 for item in self._computing if item.slot != NO_SLOT and not item.is_complete)

    def version_of(self, batch: int) -> int:
        """Return the version that a minibatch in flight is computed on."""
        return next((item.version for item in self._computing if item.submitted.batch == batch), 0)

    @property
    def is_storing(self) -> bool:
        """Whether the shared file is in use."""
        return self._storing is not None or self._is_showing

    @property
    def _first_in_flight(self) -> _Computing | None:
        return next((item for item in self._computing if not item.is_complete), None)

    def is_void(self, batch: int) -> bool:
        """Return whether nobody waits for the minibatch `batch`, the first one in flight."""
        item = self._first_in_flight
        return item is None or item.submitted.batch != batch or item.is_void

    # --- what is to be computed -------------------------------------------------------------------------------------

    def submit(self, submitted: Submission, weights: Weights) -> list[Action]:
        """Accept a minibatch to compute.

        If the minibatches before it are missing, the minibatch is missing, too. They were granted together, and will be
        granted again together.

        Args:
            weights: newest version that its grant names.

        Raises:
            WaveSplitError: only some batches of a wave must be computed again.
        """
        if submitted.term != self._term:
            self._begin_term(submitted)
        elif self._next is not None and submitted.batch < self._next:
            self._rewind(submitted.batch)
        elif self._next is not None and submitted.batch > self._next:
            return [Missing(submitted)]
        self._next = submitted.batch + 1
        self._waiting.append(submitted)
        self._learn_of(weights)
        return self._advance()

    def offer(self, weights: Weights) -> list[Action]:
        """Accept newer weights."""
        self._learn_of(weights)
        return self._advance()

    def stop(self) -> list[Action]:
        """Start no more minibatches, because the worker leaves."""
        self._is_stopped = True
        return self._advance()

    def hold(self) -> None:
        """Start no minibatches for now, because one is being inspected."""
        self._is_held = True

    def go_on(self) -> list[Action]:
        """Start minibatches again."""
        self._is_held = False
        return self._advance()

    def _learn_of(self, weights: Weights) -> None:
        if weights.term == self._term and (self._known is None or weights.version > self._known.version):
            self._known = weights

    def _begin_term(self, submitted: Submission) -> None:
        """Follow a new server. Results for the earlier server are in its checkpoint, or are computed again."""
        self._term = submitted.term
        self._void_from(0)
        if self._next is not None:
            self._forget_from = 0
        self._first = self._committed_until = submitted.batch
        self._known = self._spare = self._base = None
        self._members = []

    def _rewind(self, batch: int) -> None:
        """Go back to `batch`: this batch and later batches are computed again."""
        self._void_from(batch)
        if batch < self._committed_until:
            if batch % self._wave and batch > self._first:
                raise WaveSplitError(
                    f"expected batch {batch - batch % self._wave}, the first of its wave, to be computed again; got "
                    f"{batch}: its wave is pushed as one"
                )
            self._first = min(self._first, batch)
            self._forget_from = batch
            self._committed_until = batch
            self._members = [item for item in self._members if item.batch < batch]
            self._known = self._spare = self._base = None  # the weights in use include the void steps

    def _void_from(self, batch: int) -> None:
        for item in self._computing:
            if item.submitted.batch >= batch:
                item.is_void = True
        # A wave that is not stored yet will not be stored.
        self._results = deque(
            Void(item.submitted) if isinstance(item, Done) and item.submitted.batch >= batch else item
            for item in self._results
        )
        self._results += (Void(submitted) for submitted in self._waiting if submitted.batch >= batch)
        self._waiting = deque(submitted for submitted in self._waiting if submitted.batch < batch)

    # --- weights ----------------------------------------------------------------------------------------------------

    def pulled(self, weights: Weights, *, is_there: bool) -> list[Action]:
        """Report that the shared file has these weights. `is_there` False: the weights are not in the blob store."""
        self._pulling = None
        if is_there and weights.term == self._term and self._known is not None:
            self._spare = weights
        elif not is_there and self._known == weights:
            self._known = None
        return self._advance()

    def adopted(self, version: int) -> list[Action]:
        """Report that all stages use the weights that arrived with the first minibatch that needs them."""
        if self._base is None or version == self._base.version:
            self._is_adopted = True
        return self._advance()

    def _give_up_waiting(self) -> list[Action]:
        """Give up grants for which the weights in use are too old, because newer weights are not available."""
        base = self._spare or self._base
        first = next((item.batch for item in self._waiting if not self._is_answered_by(base, item)), None)
        if first is None:
            return []
        missing: list[Action] = [Missing(item) for item in self._waiting if item.batch >= first]
        self._waiting = deque(item for item in self._waiting if item.batch < first)
        self._next = first
        return missing

    # --- completion -------------------------------------------------------------------------------------------------

    def completed(
        self, batch: int, *, scale: float, weight: float, lr_factor: float = 1.0, is_void: bool = False
    ) -> list[Action]:
        """Report that the gradient of this minibatch is at all stages.

        Args:
            scale: factor for the gradient; 0: the gradient is dropped, because no sample is usable.
            weight: sum of the weights of the usable samples.
            lr_factor: factor of the learning rate of the step.
            is_void: whether nobody waits for the minibatch.

        Raises:
            ValueError: the minibatch is not the first one in flight.
        """
        item = self._first_in_flight
        if item is None or item.submitted.batch != batch:
            raise ValueError(f"expected minibatches to be complete in order, got {batch}")
        item.is_complete, item.scale, item.weight, item.lr_factor = True, scale, weight, lr_factor
        item.is_void |= is_void
        return self._advance()

    def stored(self, until: int | None) -> list[Action]:
        """Report that all stages have stored the steps of the wave below `until`; None: the weights."""
        if until is None:
            self._is_showing = False
        return self._advance()

    def pushed(self, until: int) -> list[Action]:
        """Report that the steps of this wave are in the blob store, so the shared file is free."""
        if self._storing is None or self._storing.until != until:
            raise ValueError(f"expected the wave that is stored, {self._storing}, to be pushed; got {until}")
        if self._to_store and self._to_store[0] is self._storing:
            self._to_store.popleft()
        self._storing = None
        return self._advance()

    def show(self) -> list[Action]:
        """Order the stages to store the weights with all own steps. No stage may compute, nor `is_storing` be True."""
        self._is_showing = True
        return [SendDown(StageOrders(commits=self._take_commits(), show=True))]

    def again(self, batch: int, num_samples: int) -> Forward:
        """Return the message that computes the first minibatch in flight again, with other samples. Raise ValueError if
        `batch` is not the first one in flight."""
        item = self._first_in_flight
        if item is None or item.submitted.batch != batch or self._base is None:
            raise ValueError(f"expected the first minibatch in flight, got {batch}")
        item.version = self._base.version
        return Forward(
            batch=batch, slot=item.slot, num_samples=num_samples, version=self._base.version,
            included=self._base.included, term=self._base.term, commits=self._take_commits(),
        )  # fmt: skip

    def close_wave(self) -> tuple[int | None, list[Action]]:
        """Store the steps of the current wave, which is not full: its other minibatches are not computed here.

        Returns:
            The number of the batch after the last stored step, and the actions to take. None: there are no such steps.
        """
        if not self._has_steps or self._last is None:
            return None, []
        until = self._committed_until
        self._has_steps = False
        self._commits.append(Commit(batch=until - 1, slot=NO_SLOT, scale=0.0, weight=0.0, ends_wave=True))
        self._to_store.append(Wave(until, *self._last, tuple(self._members)))
        self._members = []
        return until, self._advance()

    # --- the order of things ----------------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        self._commit()
        if self._forget_from is not None and not self._computing:
            actions.append(SendDown(StageOrders(commits=self._take_commits(), forget_from=self._forget_from)))
            self._to_store = deque(wave for wave in self._to_store if wave.until <= self._forget_from)
            self._forget_from, self._has_steps = None, False
        actions += self._store()
        actions += self._release()
        while self._may_start:
            actions += self._start(self._waiting.popleft())
            self._commit()
        if self._is_stopped:
            self._results += (Void(item) for item in self._waiting)
            self._waiting.clear()
        actions += self._store()  # a wave may end with a batch without samples
        actions += self._release()
        if self._known is None and self._pulling is None and self._forget_from is None:
            actions += self._give_up_waiting()
        if self._may_pull:
            self._pulling, self._spare = self._known, None
            assert self._pulling is not None
            actions.append(PullWeights(self._pulling))
        return actions

    def _commit(self) -> None:
        while self._computing and self._computing[0].is_complete:
            item = self._computing.popleft()
            batch, is_void = item.submitted.batch, item.is_void
            ends_wave = not is_void and (batch + 1) % self._wave == 0
            if item.slot != NO_SLOT:
                self._slots.append(item.slot)
            if item.slot != NO_SLOT or not is_void:
                scale, weight = (0.0, 0.0) if is_void else (item.scale, item.weight)
                commit = Commit(batch=batch, slot=item.slot, scale=scale, weight=weight, ends_wave=ends_wave)
                self._commits.append(msgspec.structs.replace(commit, lr_factor=item.lr_factor))
            self._results.append(Void(item.submitted) if is_void else self._done(item, ends_wave))

    def _done(self, item: _Computing, ends_wave: bool) -> Done:
        until = self._committed_until = item.submitted.batch + 1
        self._last = (item.submitted, item.version)
        self._has_steps |= item.scale != 0
        self._members.append(item.submitted)
        if not ends_wave:
            return Done(item.submitted, item.version)
        members, self._members = tuple(self._members), []
        if not self._has_steps:
            return Done(item.submitted, item.version, members=members)
        self._has_steps = False
        self._to_store.append(Wave(until, item.submitted, item.version, members))
        return Done(item.submitted, item.version, until, members)

    def _store(self) -> list[Action]:
        if not self._to_store or self.is_storing or self._forget_from is not None:
            return []
        wave = self._storing = self._to_store[0]
        return [SendDown(StageOrders(commits=self._take_commits(), store=wave.until), wave)]

    def _release(self) -> list[Action]:
        released: list[Action] = []
        while self._results:
            first = self._results[0]
            if isinstance(first, Done) and any(wave.until == first.wave for wave in self._to_store):
                break
            released.append(self._results.popleft())
        return released

    @property
    def _may_start(self) -> bool:
        if not self._waiting or self._is_stopped or self._is_held or self._forget_from is not None:
            return False
        if len(self._computing) >= self._in_flight or self._is_showing:
            return False
        if not self._waiting[0].num_samples:
            return True
        return bool(self._slots) and self._is_answered_by(self._spare or self._base, self._waiting[0])

    def _is_answered_by(self, base: Weights | None, item: Submission) -> bool:
        """Return whether `item` may be computed on these weights: new enough, and including enough own waves."""
        if base is None or base.version < item.min_version:
            return False
        return self._committed_until - base.included <= MAX_WAVES_BEHIND * self._wave

    def _start(self, submitted: Submission) -> Sequence[Action]:
        if not submitted.num_samples:
            # If it ends a wave, the push names this version, which the grant must allow.
            version = max(submitted.min_version, -1 if self._base is None else self._base.version)
            self._computing.append(_Computing(submitted, NO_SLOT, version, is_complete=True))
            return ()
        if self._spare is not None:
            self._base, self._spare, self._is_adopted = self._spare, None, False
        base = self._base
        assert base is not None
        slot = self._slots.popleft()
        self._computing.append(_Computing(submitted, slot, base.version))
        message = Forward(
            batch=submitted.batch, slot=slot, num_samples=submitted.num_samples, version=base.version,
            included=base.included, term=base.term, commits=self._take_commits(),
        )  # fmt: skip
        return (StartBatch(message, submitted),)

    def _take_commits(self) -> tuple[Commit, ...]:
        commits, self._commits = tuple(self._commits), []
        return commits

    @property
    def _may_pull(self) -> bool:
        if self._known is None or self._pulling is not None or not self._is_adopted or self._forget_from is not None:
            return False
        newest = self._spare or self._base
        return newest is None or newest.version < self._known.version
