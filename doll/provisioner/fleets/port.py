"""The fleet port: the calls from the provisioner to the owner of the machines.

There is one instance per slot, with the identity (slot, incarnation). A fleet knows machines, not workers: only the
parameter server's records state whether the worker on an instance is ready. All times are Unix seconds.

To add a fleet: its section in `doll.config.fleets`, an adapter of `Fleet` here, and a function that opens it in
`OPENERS` of `doll.provisioner.machines`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from doll.errors import DollError
from doll.provisioner.planning.state import Market


class InstanceState(enum.StrEnum):
    """The stages of a machine's life."""

    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"
    STOPPED = "stopped"  # it has not run since `ended_s`, and its volume costs money until it is ended
    ENDED = "ended"


class EndReason(enum.StrEnum):
    """The reason why a machine has ended; billing depends on it."""

    NONE = ""
    TERMINATED = "terminated"  # by the provisioner
    INTERRUPTED = "interrupted"  # by the owner of the spot market
    FAILED = "failed"  # by itself, or for an unknown reason
    LIMIT = "limit"  # at the end of the time that its owner gives to each machine, or because its successor was warm


@dataclass(frozen=True)
class Order:
    """One attempt to get an instance for a slot.

    Attributes:
        incarnation: number of the slot's machine, 1 or more; a higher incarnation fences all lower ones.
        attempt: number of the attempt, 0 or more. The same order is launched at most once, so a retry after a failure
            is a new attempt.
        avoid: names of pools without capacity.
        run: text that distinguishes the orders of one run of a job from the orders of other runs. Without it, an owner
            that remembers old orders could take an order of a new run for a repetition.
        machines: number of machines of the worker. The instance represents all of them.
    """

    slot: int
    incarnation: int
    market: Market
    attempt: int = 0
    avoid: frozenset[str] = frozenset()
    run: str = ""
    machines: int = 1


@dataclass(frozen=True)
class Instance:
    """One incarnation of a slot, as the fleet sees it: a machine, or one process for all machines of a worker.

    Attributes:
        pool: instance type and zone, "c5.xlarge/us-east-1a". Prices and capacity are those of the pool.
        launched_s: time of the order.
        ended_s: time at which it ended or was stopped; None if it has not ended.
        notice_s: time at which it will be interrupted, according to its notice; None without a notice.
        job: job for which it was launched; "" if the fleet does not state the job.
        machines: number of its machines. Each one is billed from its launch to its end.
        costs_from_s: time from which it is billed, if this is later than its launch, because its owner must first find
            a node. If it has no node yet, the time of the listing.
        trouble: reason, stated by its owner, why it does not run; "" if there is none.
        is_limited: whether its owner gives it a fixed time. Its notice then announces the end of this time, and a
            successor is launched; it is no interruption, and says nothing about its market.
    """

    id: str
    slot: int
    incarnation: int
    market: Market
    pool: str
    state: InstanceState
    launched_s: float
    ended_s: float | None = None
    end_reason: EndReason = EndReason.NONE
    notice_s: float | None = None
    job: str = ""
    machines: int = 1
    costs_from_s: float | None = None
    trouble: str = ""
    is_limited: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs or will run."""
        return self.state in (InstanceState.PENDING, InstanceState.RUNNING)

    def ended(self, at_s: float, reason: EndReason) -> Instance:
        """Return the instance after its end."""
        return replace(self, state=InstanceState.ENDED, ended_s=at_s, end_reason=reason)

    @property
    def is_endable(self) -> bool:
        """Whether its end can be requested: it is alive, or stopped."""
        return self.is_alive or self.state is InstanceState.STOPPED


class LaunchFailure(enum.StrEnum):
    """The kinds of failed launches, by the required reaction, with the most informative kind first (EC2's error codes,
    docs/aws.md)."""

    SPOT_QUOTA = "spot_quota"  # no spot for a while; a person must raise the quota
    ON_DEMAND_QUOTA = "on_demand_quota"  # keep spot; a person must raise the quota
    CAPACITY = "capacity"  # the pools are empty: other pools, then the other market
    REFUSED = "refused"  # not a lack of capacity: an operator must act; the provisioner stops if nothing else works
    THROTTLED = "throttled"  # the same order again, later
    TAKEN = "taken"  # the same order was made with other parameters: list the instances
    CONFIG = "config"  # it can never succeed: stop and raise an alarm


class LaunchError(DollError):
    """An order got no instance. `code` is the fleet's own name of the failure. `pools` are the pools that refused the
    order; empty if the failure does not concern pools."""

    def __init__(self, message: str, *, failure: LaunchFailure, code: str = "", pools: Collection[str] = ()) -> None:
        super().__init__(message)
        self.failure = failure
        self.code = code
        self.pools = frozenset(pools)


class Fleet(Protocol):
    """The owner of the machines of one cluster (one job). Every call may be repeated, and none waits for a machine."""

    def launch(self, order: Order) -> Instance:
        """Launch an instance. The same order returns the same instance. Raises LaunchError if no instance was launched,
        also if the owner does not answer."""

    def instances(self) -> Sequence[Instance]:
        """Return all instances of the cluster that are alive, and instances that ended recently (at least within the
        last hour).

        The result includes the instances that `launch` has returned, even if the owner's own listing lags behind.
        `notice_s` and `EndReason.INTERRUPTED` are the only sources of notices and interruptions; `is_limited` tells
        the notice of a time limit from that of an interruption.

        Raises:
            ConfigError: the owner does not permit the call.
            ServiceUnavailableError: the owner does not answer now.
        """

    def terminate(self, ids: Collection[str]) -> None:
        """End these instances. Unknown and ended instances cause no error. The owner may remove its record of an ended
        instance, but `instances` still returns it. Raises the errors of `instances`; the remaining instances then
        continue to run."""

    def close(self) -> None:
        """Release the resources of this object; instances continue to run."""


SpotProbe = Callable[[int], bool]
"""A function that returns whether a spot launch for this slot would succeed now, without a launch. May be repeated."""
