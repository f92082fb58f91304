"""The interface of a consistency policy: its view of the engine, the engine's questions, and its registration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from doll.config.policy import PolicyConfig


class BatchId(NamedTuple):
    """One batch: number `number` of partition `partition`."""

    partition: int
    number: int


class WorkerCounters(Protocol):
    """One worker as policies see it; read-only."""

    @property
    def is_live(self) -> bool:
        """Whether it has joined, its lease has not run out, and it has not left."""

    @property
    def session(self) -> int:
        """The session of its process: another one after a restart."""

    @property
    def applied(self) -> int:
        """Batches of this worker in the model."""

    @property
    def held(self) -> int:
        """Gradients received and not applied."""

    @property
    def first_held(self) -> BatchId:
        """The batch of its first held gradient; only while `held` is not 0."""

    @property
    def held_change(self) -> float:
        """How far its first held contribution moves any one number at most; 0 without one. For policies of steps."""

    @property
    def moved(self) -> float:
        """How far its applied contributions of this term have moved any one number at most. For policies of steps."""

    @property
    def computing(self) -> int:
        """Batches granted whose gradient has not come."""

    @property
    def waiting(self) -> int:
        """Batches announced that may be granted now: 0 while the worker is not live, or is stalled."""

    @property
    def is_done(self) -> bool:
        """Whether no more batches of this worker will come than it has announced: the source has ended."""

    @property
    def is_spent(self) -> bool:
        """Whether it is done and all of these are in the model: nobody waits for it."""

    @property
    def announced(self) -> int:
        """Batches announced and not granted, whether or not they may be granted now."""


class PolicyView(Protocol):
    """The engine's state as policies see it. Every access takes constant time, except `held_batches`."""

    @property
    def version(self) -> int:
        """Number of updates applied."""

    @property
    def now_s(self) -> float:
        """The time of the event that is being handled, monotonic seconds. An event comes several times a second."""

    @property
    def num_live(self) -> int:
        """Live workers."""

    @property
    def num_held(self) -> int:
        """Gradients received and not applied, over all workers."""

    @property
    def num_computing(self) -> int:
        """Batches granted whose gradient has not come, over all workers."""

    @property
    def num_waiting(self) -> int:
        """Batches that may be granted now, over all workers."""

    @property
    def num_left(self) -> int | None:
        """Batches announced and not in the model, over all workers, if no more will come: a group that waits for more
        is never full. None: more may come. When this begins or ceases to be known, `changed` names all workers."""

    def worker(self, number: int) -> WorkerCounters:
        """The counters of one worker."""

    def held_batches(self) -> Sequence[BatchId]:
        """Gradients received and not applied, in the order in which they were granted."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The batches that a live worker gives to the next update, and what it can still give. Counts, as `WorkerCounters`.

    Attributes:
        stalled: it let a grant time out and gets no other.
        lag: records in its stream that it has not read.
        room: how many more it may announce.
    """

    held: int
    computing: int
    waiting: int
    stalled: bool
    lag: int
    room: int


class Policy(ABC):
    """A consistency model: decides which batches start and which gradients are applied together.

    After every event the engine calls `changed`, `void`, `collect` and `start` in turn, until they return nothing.
    Answers must depend on the view, on what `changed` was given and on `state` only: a replay of the same events gives
    the same updates. Work per call must be proportional to what has changed, never to the number of workers.
    """

    name: ClassVar[str]
    exact_version: ClassVar[bool]  # gradients applied together were all computed at the version they are applied to
    holds_back: ClassVar[bool] = False  # a push may leave a part of its batches' steps at the worker
    takes_late_pushes: bool = True  # a push after its time limit may answer the next grants of its batches
    sends_versions: ClassVar[bool] = False  # `recipients` may name workers
    takes_later_weights: ClassVar[bool] = False  # a batch may use those of a later grant: its own may be gone
    batches_per_push: int = 1  # as in its section

    def changed(self, view: PolicyView, workers: Collection[int]) -> None:  # noqa: B027
        """The counters of these workers have changed since the last call; in the first call, of all workers."""

    def skipped(self, worker: int, batches: int) -> None:  # noqa: B027
        """Note that so many batches of this worker held no record; they count as applied from the next `changed` on."""

    @abstractmethod
    def start(self, view: PolicyView) -> Sequence[int]:
        """Workers whose first waiting batch is granted now. Asked again after these are granted."""

    @abstractmethod
    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        """Held gradients that make the next update, or nothing. Asked again after every update."""

    def void(self, view: PolicyView) -> Sequence[BatchId]:
        """Held batches whose gradients must not be applied: they go back to the queue, and are computed again.

        Each was pushed by itself, with nothing held back, and is the last one under way of its worker. Asked before
        `collect`, and again when these batches are back in the queue; default: none.
        """
        return ()

    def min_version(self, view: PolicyView, worker: int) -> int:
        """The oldest version that the next grant of `worker` may be computed on; default: the current one."""
        return view.version

    def recipients(self, view: PolicyView) -> Collection[int]:
        """Live workers that are sent the version just made; default: none, it is published with its first grant."""
        return ()

    def clock_offset(self, worker: int) -> int | None:
        """The difference between a worker's clock and the number of its batches, if it has joined after the others.

        Only measured with (`doll.ps.engine.measures`); default None: the policy keeps no clocks.
        """
        return None

    def waits_for(self, view: PolicyView) -> Collection[int]:
        """The live workers whose batches others must wait for now; asked once a second, for people. Default: none."""
        return ()

    def take_raised(self) -> Collection[int]:
        """Workers whose `clock_offset` has become larger since the last call; only measured with."""
        return ()

    def is_waited_for(self, worker: int) -> bool:
        """Whether others may have to wait for this live worker now; only measured with. Default: it is live."""
        return True

    def state(self) -> dict[str, Any] | None:
        """The policy's state for a checkpoint, beyond the engine's counters; None: it has none.

        Returns:
            Plain values under text keys: numbers, text, lists and mappings.
        """
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned in an earlier server; called before anything else. Raises ValueError if
        it is not a state of this policy."""
        raise ValueError(f"policy {self.name} keeps no state, got {sorted(state)}")

    def batches_needed(self, view: PolicyView) -> int:
        """Batches of the next update; default: one."""
        return 1

    def shortfall(self, view: PolicyView, offers: Sequence[Offer]) -> int:
        """How many batches the next update needs beyond all that the live workers can offer; 0: it can be made."""
        needed = self.batches_needed(view) - view.num_held - view.num_computing
        return max(0, needed - sum(offer.waiting + max(0, offer.room) for offer in offers if not offer.stalled))


class PooledConfig(PolicyConfig):
    """The section of a policy whose updates take batches of whichever workers have some: all streams together set the
    pace."""

    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """λ_U = (sum of the arrival rates) / (K b).

        Source: the DOLL paper, Eq. (1), for streams of unequal rates.
        """
        return sum(rates_per_s) / (self.batches_per_update(len(rates_per_s)) * batch_size)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One registered policy: an entry point of group `doll.policies` names an object of this class.

    Attributes:
        name: in the job file, `training.policy.name`; also the entry point's name.
        config: its section of the job file, which also predicts the update rate and the batches per update.
        factory: makes the policy of a server from its section, an object of `config`.
    """

    name: str
    config: type[PolicyConfig]
    factory: Callable[[Any], Policy]
