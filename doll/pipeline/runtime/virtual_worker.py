"""A virtual worker's protocol with its stages: which minibatch starts when, on which weights; pure (the HetPipe paper,
section 4).

N_m minibatches are in flight. Minibatch p starts when p - N_m is complete, on one version of the weights at all stages:
those that were pulled last, with the worker's own steps that they do not hold. Minibatches are complete in order. The
steps of a wave, N_m minibatches, are pushed as one.

Stages have memory for one version beside that in use, so that another one is pulled while they compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from doll.errors import DollError
from doll.pipeline.runtime.messages import Commit, Forward, StageOrders

NO_SLOT: Final = -1
# Own waves that the weights in use may lack. A grant names weights that lack two at most.
MAX_WAVES_BEHIND: Final = 3


class Weights(NamedTuple):
    """A published version: `included` says how many batches of this worker's stream are in it."""

    term: int
    version: int
    key: str
    included: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A minibatch to compute, on weights of its term that are not older than `min_version`. `token` is the caller's."""

    batch: int
    term: int
    min_version: int
    num_samples: int
    token: Any = None


class WaveSplitError(DollError):
    """Batches inside a wave are to be computed again, and the others of the wave are not: a new process computes all
    that is not durable."""


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Bring these weights into the file that all stages read; report `pulled`. No stage reads older ones there."""

    weights: Weights


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Send this down the chain, with the samples of `submitted` after it."""

    message: Forward
    submitted: Submission


class Wave(NamedTuple):
    """Steps that are pushed as one: of batches below `until`, the last of which was computed on `version`; the push is
    of that version too. `members`: all that the sum holds, in order, also those without a usable sample."""

    until: int
    last: Submission
    version: int
    members: tuple[Submission, ...]


@dataclass(frozen=True, slots=True)
class SendDown:
    """Send this down the chain. If it asks for something to be stored, report `stored` when all stages have.

    Attributes:
        wave: what is to be stored, if it is steps.
    """

    message: StageOrders
    wave: Wave | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """This minibatch is computed, in order. `wave`: the steps of the wave that ends with it are stored, below that
    batch; None: it is not the last of its wave, or its wave has no steps. `members`: of the wave that ends with it."""

    submitted: Submission
    version: int
    wave: int | None = None
    members: tuple[Submission, ...] = ()


@dataclass(frozen=True, slots=True)
class Void:
    """This minibatch has no part in any push: nobody waits for it any more, or it was not begun."""

    submitted: Submission


@dataclass(frozen=True, slots=True)
class Missing:
    """The weights that this minibatch may be computed on are not available."""

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
    weight: float = 0.0


class VirtualWorkerCore:
    """One virtual worker. Each call returns the actions to take, in order."""

    def __init__(self, in_flight: int, wave_batches: int) -> None:
        """
        Args:
            in_flight: N_m >= 1, minibatches in flight.
            wave_batches: of a push; waves end after batches k n - 1 of the stream.
        """
        self._in_flight = in_flight
        self._wave = wave_batches
        self._slots = deque(range(in_flight))  # free
        self._waiting: deque[Submission] = deque()
        self._computing: deque[_Computing] = deque()
        self._commits: list[Commit] = []  # not sent yet
        self._results: deque[Done | Void] = deque()  # in order; `Done` of a wave that is not stored holds the rest up
        self._to_store: deque[Wave] = deque()  # waves that are complete; the first one may be under way
        self._storing: Wave | None = None  # in the shared file; not in `_to_store` any more if it is void
        self._is_showing = False
        self._has_steps = False  # the wave under way
        self._members: list[Submission] = []  # of the wave under way: the committed ones
        self._term = -1
        self._next: int | None = None  # batch that comes next
        self._first = 0  # batch of this term
        self._committed_until = 0
        self._last: tuple[Submission, int] | None = None  # that was committed, and its version
        self._forget_from: int | None = None
        self._known: Weights | None = None  # the newest of this term
        self._spare: Weights | None = None  # in the file that the stages read, not in use
        self._base: Weights | None = None  # of the minibatch that started last
        self._pulling: Weights | None = None
        self._is_adopted = True
        self._is_stopped = False
        self._is_held = False

    @property
    def num_computing(self) -> int:
        """Minibatches at the stages."""
        return sum(1 for item in self._computing if item.slot != NO_SLOT and not item.is_complete)

    def version_of(self, batch: int) -> int:
        """The version that a minibatch in flight is computed on."""
        return next((item.version for item in self._computing if item.submitted.batch == batch), 0)

    @property
    def is_storing(self) -> bool:
        """The shared file is in use."""
        return self._storing is not None or self._is_showing

    @property
    def _first_in_flight(self) -> _Computing | None:
        return next((item for item in self._computing if not item.is_complete), None)

    def is_void(self, batch: int) -> bool:
        """Nobody waits for the first minibatch in flight, which is `batch`."""
        item = self._first_in_flight
        return item is None or item.submitted.batch != batch or item.is_void

    # --- what is to be computed -------------------------------------------------------------------------------------

    def submit(self, submitted: Submission, weights: Weights) -> list[Action]:
        """
        It is missing if those before it are: it was granted with them, and is granted again with them.

        Args:
            weights: the newest that its grant names.

        Raises:
            WaveSplitError: a batch inside a wave is to be computed again, whose others are not.
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
        """Take newer weights."""
        self._learn_of(weights)
        return self._advance()

    def stop(self) -> list[Action]:
        """Begin nothing more: the worker leaves."""
        self._is_stopped = True
        return self._advance()

    def hold(self) -> None:
        """Begin nothing more for now: a minibatch is inspected."""
        self._is_held = True

    def go_on(self) -> list[Action]:
        """Begin minibatches again."""
        self._is_held = False
        return self._advance()

    def _learn_of(self, weights: Weights) -> None:
        if weights.term == self._term and (self._known is None or weights.version > self._known.version):
            self._known = weights

    def _begin_term(self, submitted: Submission) -> None:
        """Follow another server: results for the one before are in its checkpoint, or computed again."""
        self._term = submitted.term
        self._void_from(0)
        if self._next is not None:
            self._forget_from = 0
        self._first = self._committed_until = submitted.batch
        self._known = self._spare = self._base = None
        self._members = []

    def _rewind(self, batch: int) -> None:
        """Batch `batch` and those after it are computed again."""
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
            self._known = self._spare = self._base = None  # the weights in use hold the steps that are void

    def _void_from(self, batch: int) -> None:
        for item in self._computing:
            if item.submitted.batch >= batch:
                item.is_void = True
        # Of a wave that is not stored yet: it will not be.
        self._results = deque(
            Void(item.submitted) if isinstance(item, Done) and item.submitted.batch >= batch else item
            for item in self._results
        )
        self._results += (Void(submitted) for submitted in self._waiting if submitted.batch >= batch)
        self._waiting = deque(submitted for submitted in self._waiting if submitted.batch < batch)

    # --- weights ----------------------------------------------------------------------------------------------------

    def pulled(self, weights: Weights, *, is_there: bool) -> list[Action]:
        """The file that all stages read holds these weights; or the blob store does not have them any more."""
        self._pulling = None
        if is_there and weights.term == self._term and self._known is not None:
            self._spare = weights
        elif not is_there and self._known == weights:
            self._known = None
        return self._advance()

    def adopted(self, version: int) -> list[Action]:
        """All stages use the weights that came with the minibatch that used them first."""
        if self._base is None or version == self._base.version:
            self._is_adopted = True
        return self._advance()

    def _give_up_waiting(self) -> list[Action]:
        """The newest weights are gone: grants that the weights in use do not satisfy cannot be answered."""
        base = self._spare or self._base
        first = next((item.batch for item in self._waiting if not self._is_answered_by(base, item)), None)
        if first is None:
            return []
        missing: list[Action] = [Missing(item) for item in self._waiting if item.batch >= first]
        self._waiting = deque(item for item in self._waiting if item.batch < first)
        self._next = first
        return missing

    # --- completion -------------------------------------------------------------------------------------------------

    def completed(self, batch: int, *, scale: float, weight: float, is_void: bool = False) -> list[Action]:
        """The gradient of this minibatch is at all stages.

        Args:
            scale: what it is multiplied by; 0: it is dropped, since no sample is usable.
            weight: sum of the weights of the usable samples.

        Raises:
            ValueError: it is not the first that is in flight.
        """
        item = self._first_in_flight
        if item is None or item.submitted.batch != batch:
            raise ValueError(f"expected minibatches to be complete in order, got {batch}")
        item.is_complete, item.scale, item.weight = True, scale, weight
        item.is_void |= is_void
        return self._advance()

    def stored(self, until: int | None) -> list[Action]:
        """All stages have stored as asked: the steps of the wave below `until`; None: the weights."""
        if until is None:
            self._is_showing = False
        return self._advance()

    def pushed(self, until: int) -> list[Action]:
        """The steps of this wave are in the blob store: the shared file is free."""
        if self._storing is None or self._storing.until != until:
            raise ValueError(f"expected the wave that is stored, {self._storing}, to be pushed; got {until}")
        if self._to_store and self._to_store[0] is self._storing:
            self._to_store.popleft()
        self._storing = None
        return self._advance()

    def show(self) -> list[Action]:
        """Have the weights stored, with all own steps; only while no stage computes, and not while `is_storing`."""
        self._is_showing = True
        return [SendDown(StageOrders(commits=self._take_commits(), show=True))]

    def again(self, batch: int, num_samples: int) -> Forward:
        """Compute a minibatch again that is the first of those in flight, with other samples: what to send down.

        Raises:
            ValueError: it is not the first that is in flight.
        """
        item = self._first_in_flight
        if item is None or item.submitted.batch != batch or self._base is None:
            raise ValueError(f"expected the first minibatch in flight, got {batch}")
        item.version = self._base.version
        return Forward(
            batch=batch, slot=item.slot, num_samples=num_samples, version=self._base.version,
            included=self._base.included, commits=self._take_commits(),
        )  # fmt: skip

    def close_wave(self) -> tuple[int | None, list[Action]]:
        """Store the steps of the wave under way, whose other minibatches are not computed here.

        Returns:
            Below which batch they are, and what to do; None: no such steps.
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
        actions += self._store()  # of a wave that ends with a batch without samples
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
                self._commits.append(
                    Commit(batch=batch, slot=item.slot, scale=scale, weight=weight, ends_wave=ends_wave)
                )
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
        """`item` may be computed on these weights: not on older ones than it says, nor on ones that lack the steps of
        more waves than the stages keep."""
        if base is None or base.version < item.min_version:
            return False
        return self._committed_until - base.included <= MAX_WAVES_BEHIND * self._wave

    def _start(self, submitted: Submission) -> Sequence[Action]:
        if not submitted.num_samples:
            # Its push is of this version if it ends a wave, and must be of one that its grant allows.
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
            included=base.included, commits=self._take_commits(),
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
