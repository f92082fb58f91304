"""The interface of a consistency policy: its view of the engine, and the methods that the engine calls.

To register a policy, add the name of its module to `built_in` of `doll.config.policy`, or name it by an entry point of
group `doll.policies` in another distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from doll.config.policy import PolicyConfig


class BatchId(NamedTuple):
    """The id of a batch: batch `number` of partition `partition`."""

    partition: int
    number: int


class WorkerCounters(Protocol):
    """The counters of one worker as policies see them; read-only."""

    @property
    def is_live(self) -> bool:
        """Whether the worker has joined and serves a partition, its lease has not expired, and it has not left."""

    @property
    def session(self) -> int:
        """The session of the worker's process; a restarted process has another one."""

    @property
    def applied(self) -> int:
        """The number of this worker's batches in the model."""

    @property
    def held(self) -> int:
        """The number of gradients that are received and not applied."""

    @property
    def first_held(self) -> BatchId:
        """The batch of the first held gradient; defined only while `held` is not 0."""

    @property
    def held_change(self) -> float:
        """The largest change of one number by the first held contribution; 0 without one. For policies of steps."""

    @property
    def moved(self) -> float:
        """The largest change of one number by all applied contributions of this term. For policies of steps."""

    @property
    def computing(self) -> int:
        """The number of granted batches whose gradient has not come."""

    @property
    def waiting(self) -> int:
        """The number of announced batches that may be granted now: 0 while the worker is not live or is stalled."""

    @property
    def is_done(self) -> bool:
        """Whether the source has ended and this worker has announced its last batch."""

    @property
    def is_spent(self) -> bool:
        """Whether the worker is done and all of its batches are in the model, so nobody waits for it."""

    @property
    def announced(self) -> int:
        """The number of announced batches without a grant, whether or not they may be granted now."""


class PolicyView(Protocol):
    """The engine's state as policies see it. Every access takes constant time, except `held_batches`."""

    @property
    def version(self) -> int:
        """The number of updates applied."""

    @property
    def now_s(self) -> float:
        """The time of the current event, in monotonic seconds. There are several events per second."""

    @property
    def num_live(self) -> int:
        """The number of live workers."""

    @property
    def num_held(self) -> int:
        """The number of gradients that are received and not applied, over all workers."""

    @property
    def num_computing(self) -> int:
        """The number of granted batches whose gradient has not come, over all workers."""

    @property
    def num_waiting(self) -> int:
        """The number of batches that may be granted now, over all workers."""

    @property
    def is_settling(self) -> bool:
        """Whether a checkpoint waits for what workers hold back. Then open rounds should end, and no other begin."""

    @property
    def num_left(self) -> int | None:
        """The number of announced batches that are not in the model, over all workers, if no more batches will come. A
        group of more batches would never be full. None: more may come. If None becomes a number or vice versa,
        `changed` names all workers."""

    def worker(self, number: int) -> WorkerCounters:
        """Return the counters of one worker."""

    def held_batches(self) -> Sequence[BatchId]:
        """Return the batches whose gradients are received and not applied, in the order of their grants."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The batches that a live worker has for the next update, and can still announce. Counts as in `WorkerCounters`.

    Attributes:
        stalled: True if a grant of the worker has timed out, so it gets no other grant now.
        lag: number of records in its stream that it has not read.
        room: number of batches that it may still announce.
    """

    held: int
    computing: int
    waiting: int
    stalled: bool
    lag: int
    room: int


class Policy(ABC):
    """A consistency model: decides which batches start and which gradients are applied together.

    After every event the engine calls `changed`, `void`, `collect` and `start` in turn, until all return nothing. The
    results must depend only on the view, on the arguments of `changed` and on `state`, so that a replay of the same
    events makes the same updates. The work per call must be proportional to the changes, not to the number of workers.
    """

    name: ClassVar[str]
    exact_version: ClassVar[bool]  # whether all gradients of an update must be computed at the version before it
    holds_back: bool = False  # whether a push may leave a part of its batches' steps at the worker
    takes_late_pushes: bool = True  # whether a push after its time limit may answer the next grants of its batches
    sends_versions: ClassVar[bool] = False  # whether `recipients` may name workers
    takes_later_weights: ClassVar[bool] = False  # whether a batch may use the weights of a later grant
    batches_per_push: int = 1  # as in the policy's section of the job file

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:  # noqa: B027
        """Note that the counters of these workers have changed since the last call. The first call has all workers."""

    def skipped(self, worker: int, batches: int) -> None:  # noqa: B027
        """Note that `batches` batches of this worker hold no record. The next `changed` counts them as applied."""

    @abstractmethod
    def start(self, view: PolicyView) -> Sequence[int]:
        """Return the workers whose first waiting batch is granted now. Called again after these grants."""

    @abstractmethod
    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        """Return the held gradients that make the next update, or nothing. Called again after every update."""

    def void(self, view: PolicyView) -> Sequence[BatchId]:
        """Return the held batches whose gradients must not be applied. They are requeued and computed again.

        Each must have a push of its own with nothing held back, and be the last granted batch of its worker. Called
        before `collect`, and again after these batches are requeued. Default: none.
        """
        return ()

    def min_version(self, view: PolicyView, worker: int) -> int:
        """Return the oldest version on which the next grant of `worker` may be computed. Default: the current one."""
        return view.version

    def recipients(self, view: PolicyView) -> Collection[int]:
        """Return live workers that get the new version at once. Default: none; a version is sent with its grants."""
        return ()

    def clock_offset(self, worker: int) -> int | None:
        """Return the difference between a worker's clock and its number of batches, if it has joined after the others.

        Used for measures only (`doll.ps.engine.measures`). Default: None, for a policy without clocks.
        """
        return None

    def waits_for(self, view: PolicyView) -> Collection[int]:
        """Return the live workers for which others must wait now. Called once a second, for reports. Default: none."""
        return ()

    def take_raised(self) -> Mapping[int, int]:
        """Return the workers whose `clock_offset` has increased since the last call, each with the version at which it
        has. Used for measures only."""
        return {}

    def minimum_clock(self, version: int) -> int:
        """Return the clock that each live worker has at least at a version, in batches, also one without batches. Used
        for measures only. Default: 0, for a policy without clocks."""
        return 0

    def state(self) -> dict[str, Any] | None:
        """Return the policy's state for a checkpoint, beyond the engine's counters. None: the policy has no state.

        Returns:
            Plain values under text keys: numbers, text, lists and mappings.
        """
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned in an earlier server. Called before any other method. Raises ValueError
        if `state` is not a state of this policy."""
        raise ValueError(f"policy {self.name} keeps no state, got {sorted(state)}")

    def batches_needed(self, view: PolicyView) -> int:
        """Return the number of batches of the next update. Default: 1."""
        return 1

    def shortfall(self, view: PolicyView, offers: Sequence[Offer]) -> int:
        """Return how many batches the next update lacks beyond all that live workers can offer; 0: it is possible."""
        needed = self.batches_needed(view) - view.num_held - view.num_computing
        return max(0, needed - sum(offer.waiting + max(0, offer.room) for offer in offers if not offer.stalled))


class PooledConfig(PolicyConfig):
    """The section of a policy whose updates take batches from any worker that has some, so that the sum of all streams
    determines the update rate."""

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """Return the update rate λ_U = (sum of the arrival rates) / (K b).

        Source: the DOLL paper, Eq. (1), for streams of unequal rates.
        """
        return sum(rates_per_s) / (self.batches_per_update(len(rates_per_s)) * batch_size)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A registered policy. `doll.config.policy` lists those of this repository; an entry point of group `doll.policies`
    names one of another distribution.

    Attributes:
        name: value of `training.policy.name` in the job file; also the name of the entry point.
        config: class of its section in the job file, which also predicts the update rate and the batches per update.
        factory: function that makes a server's policy from its section, an object of `config`.
    """

    name: str
    config: type[PolicyConfig]
    factory: Callable[[Any], Policy]
