"""The fleet port: what the provisioner asks of the owner of the machines.

One instance per slot, with the identity (slot, incarnation). A fleet knows machines, not workers: whether the worker
on an instance is ready, the parameter server's records say. All times are Unix seconds.
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
    STOPPED = "stopped"  # it has not run since `ended_s`, and what is left of it costs until it is ended
    ENDED = "ended"


class EndReason(enum.StrEnum):
    """Why a machine has ended; billing differs."""

    NONE = ""
    TERMINATED = "terminated"  # by us
    INTERRUPTED = "interrupted"  # by the owner of the spot market
    FAILED = "failed"  # by itself, or for an unknown reason


@dataclass(frozen=True)
class Order:
    """One try to get an instance for a slot.

    Attributes:
        incarnation: number of the machine of the slot, 1 or more; a higher one fences the lower ones.
        attempt: 0, 1, ...; the same order launches at most once, so a new try after a failure is a new attempt.
        avoid: names of pools without capacity.
        run: distinguishes the orders of one run of a job from others: an owner may remember orders for longer than
            anybody remembers incarnations.
        machines: of the worker: the instance stands for so many.
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
    """The embodiment of a slot, as the fleet sees it: a machine, or one process that stands for all of a worker's.

    Attributes:
        pool: instance type and zone, "c5.xlarge/us-east-1a"; prices and capacity are the pool's.
        launched_s: when it was asked for.
        ended_s: when it ended, or was stopped; None while it has not.
        notice_s: when it will be taken, by the notice that it has; None without a notice.
        job: whose worker it was launched for; "" if the fleet does not say.
        machines: how many machines it is. Each is billed from its launch to its end.
        costs_from_s: since when it is billed, if not since its launch: an owner may have to find it a node first. While
            it has none, the time at which it was listed.
        trouble: what keeps it from running, by its owner; "" if nothing does.
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

    @property
    def is_alive(self) -> bool:
        """It runs, or will."""
        return self.state in (InstanceState.PENDING, InstanceState.RUNNING)

    def ended(self, at_s: float, reason: EndReason) -> Instance:
        """The instance after its end."""
        return replace(self, state=InstanceState.ENDED, ended_s=at_s, end_reason=reason)

    @property
    def is_endable(self) -> bool:
        """Nobody has asked for its end yet: it is alive, or stopped."""
        return self.is_alive or self.state is InstanceState.STOPPED


class LaunchFailure(enum.StrEnum):
    """Why a launch failed, by what to do about it; the most informative come first (EC2's error codes, docs/aws.md)."""

    SPOT_QUOTA = "spot_quota"  # no spot for a while; a person must raise the quota
    ON_DEMAND_QUOTA = "on_demand_quota"  # keep spot; a person must raise the quota
    CAPACITY = "capacity"  # the pools are empty: other pools, then the other market
    REFUSED = "refused"  # not a lack of capacity: an operator must act; the provisioner stops if nothing else works
    THROTTLED = "throttled"  # the same order again, later
    TAKEN = "taken"  # the order was already made in other words: look at what is there
    CONFIG = "config"  # it can never succeed: stop and raise an alarm


class LaunchError(DollError):
    """An order that got no instance. `code` is the fleet's own word for it; `pools` are those that refused, empty if
    the failure was not about pools."""

    def __init__(self, message: str, *, failure: LaunchFailure, code: str = "", pools: Collection[str] = ()) -> None:
        super().__init__(message)
        self.failure = failure
        self.code = code
        self.pools = frozenset(pools)


class Fleet(Protocol):
    """Owner of the machines of one cluster (one job). Every call may be repeated; none waits for a machine."""

    def launch(self, order: Order) -> Instance:
        """Start an instance; the same order again gives the same instance. Raises LaunchError if none was launched,
        also if the owner does not answer."""

    def instances(self) -> Sequence[Instance]:
        """All instances of the cluster that are alive, and instances that ended lately (an hour at least).

        It includes what `launch` has returned, even if the owner's own listing lags behind. A notice shows as
        `notice_s`, an interruption as `EndReason.INTERRUPTED`; there is no other source of them.

        Raises:
            ConfigError: the owner does not permit it.
            ServiceUnavailableError: the owner does not answer now.
        """

    def terminate(self, ids: Collection[str]) -> None:
        """End these instances; unknown and ended ones are no error. What an owner keeps of an ended one may go with it:
        `instances` still has it. Raises as `instances`; instances that were not reached live on."""

    def close(self) -> None:
        """Release what this object holds; instances live on."""


SpotProbe = Callable[[int], bool]
"""Whether a spot launch for this slot would succeed now, without buying a machine. It may be asked repeatedly."""
