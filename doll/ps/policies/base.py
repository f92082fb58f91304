"""What a consistency policy sees and what it is asked.

A worker's batches are numbered 0, 1, 2, ... along its stream and are always granted, received and applied in that
order, so four counters say where each of them stands:

    [0, applied)           in the model
    [applied, received)    gradient held
    [received, granted)    being computed
    [granted, announced)   waiting
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from doll.config.policy import PolicyConfig


class BatchId(NamedTuple):
    """One batch: number `number` of worker `worker`'s stream."""

    worker: int
    number: int


class WorkerCounters(Protocol):
    """One worker's counters, read-only for policies."""

    @property
    def is_live(self) -> bool:
        """The worker is there: it has joined, its lease has not run out, it has not left."""
        ...

    @property
    def held(self) -> int:
        """Gradients received and not applied."""
        ...

    @property
    def computing(self) -> int:
        """Batches granted whose gradient has not come."""
        ...

    @property
    def waiting(self) -> int:
        """Batches announced that may be granted now (0 while the worker is down)."""
        ...


class PolicyView(Protocol):
    """The engine's state as policies see it."""

    @property
    def version(self) -> int:
        """Number of updates applied."""
        ...

    @property
    def num_held(self) -> int:
        """Gradients received and not applied, over all workers."""
        ...

    @property
    def num_computing(self) -> int:
        """Batches granted whose gradient has not come, over all workers."""
        ...

    @property
    def num_waiting(self) -> int:
        """Batches of live workers that may be granted, over all workers."""
        ...

    def workers(self) -> Iterable[tuple[int, WorkerCounters]]:
        """Every worker slot with its counters."""
        ...

    def waiting_batches(self) -> Iterator[tuple[int, int]]:
        """(worker, place of this batch in the worker's own queue) of every waiting batch: each worker's first batch in
        order of announcement, then each worker's second, and so on."""
        ...

    def held_batches(self) -> Sequence[BatchId]:
        """Gradients received and not applied, in the order in which they were granted."""
        ...


class Policy(Protocol):
    """A consistency model. Stateless: everything it decides follows from the view."""

    name: ClassVar[str]
    exact_version: ClassVar[bool]  # gradients applied together were all computed at the version they are applied to

    def start(self, view: PolicyView) -> Sequence[int]:
        """Workers whose next waiting batch is granted now, at the current version; a worker may stand there twice."""
        ...

    def collect(self, view: PolicyView) -> Sequence[BatchId]:
        """Held gradients that make the next update, or nothing. Called again after every event and every update."""
        ...


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One registered policy: an entry point of group `doll.policies` names an object of this class.

    Attributes:
        name: in the job file, `training.policy.name`; also the entry point's name.
        config: its section of the job file, which also predicts the update rate and the batches per update.
        factory: makes the policy of a server from its section, an object of `config`.
        exact_version: gradients applied together were all computed at the version they are applied to.
    """

    name: str
    config: type[PolicyConfig]
    factory: Callable[[Any], Policy]
    exact_version: bool
