"""Orders' names and identities, markets without nodes, and instances that cannot start: for fleets whose owner places
instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypedDict, cast, get_args

from doll.provisioner.fleets.port import Instance, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market

REFUSE_S: Final = 300.0


def order_name(order: Order, cluster: str) -> str:
    """The same order has the same name, so that it launches once."""
    parts = ["doll", cluster, str(order.slot), str(order.incarnation), order.market.replace("_", "-")]
    if order.attempt:
        parts.append(f"a{order.attempt}")
    if order.run:
        parts.append(f"r{order.run}")
    return "-".join(parts)


def identity(order: Order | Instance, instance: str) -> dict[str, str]:
    """The variables that tell a worker who it is."""
    return {
        "DOLL_WORKER": str(order.slot),
        "DOLL_INCARNATION": str(order.incarnation),
        "DOLL_INSTANCE": instance,
        "DOLL_MARKET": order.market,
    }


class WorkerIdentity(TypedDict):
    """The fields of `Instance` that its labels state."""

    slot: int
    incarnation: int
    market: Market
    job: str


class WorkerLabels:
    """The names of the labels, or tags, that say whose worker an instance is; each begins with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.cluster, self.job, self.market = f"{prefix}cluster", f"{prefix}job", f"{prefix}market"
        self.worker, self.incarnation = f"{prefix}worker", f"{prefix}incarnation"

    def write(self, order: Order, cluster: str, job: str) -> dict[str, str]:
        """The labels of an order's instance; there is no label of the job ""."""
        labels = {self.cluster: cluster, self.worker: str(order.slot), self.incarnation: str(order.incarnation)}
        return {**labels, self.market: order.market, **({self.job: job} if job else {})}

    def read(self, labels: Mapping[str, str]) -> WorkerIdentity | None:
        """The identity in these labels; None if they are not a worker's."""
        market, slot, incarnation = (labels.get(key, "") for key in (self.market, self.worker, self.incarnation))
        if market not in get_args(Market) or not slot.isdecimal() or not incarnation.isdecimal():
            return None
        job, market = labels.get(self.job, ""), cast("Market", market)
        return {"slot": int(slot), "incarnation": int(incarnation), "market": market, "job": job}


class LaunchGate:
    """Refuses orders that would fail like earlier ones have, for `REFUSE_S`.

    After an instance could not start, orders of both markets are refused, since all have the same image. One that runs
    shows that the image is right, and another's failure is its node's. After no node took an instance, orders of its
    market are. What another process has launched says nothing: a person may have corrected it.

    Args:
        pool: the one pool of the fleet, whose owner chooses the node.
        remedy: what a person should correct if instances do not start.
        clock: Unix seconds.
    """

    def __init__(self, pool: str, remedy: str, clock: Callable[[], float]) -> None:
        self._pool, self._remedy, self._clock = pool, remedy, clock
        self._no_start = (0.0, "")  # until when, and why
        self._no_node: dict[Market, tuple[float, str]] = {}

    def start_failed(self, why: str) -> None:
        """An instance could not start."""
        self._no_start = (self._clock() + REFUSE_S, why)

    def started(self) -> None:
        """An instance runs."""
        self._no_start = (0.0, "")

    def found_no_node(self, market: Market, why: str) -> None:
        """No node has taken an instance of this market."""
        self._no_node[market] = (self._clock() + REFUSE_S, why)

    def check(self, order: Order, name: str) -> None:
        """Raise LaunchError for an order whose instance would not start, or would find no node."""
        now_s = self._clock()
        until_s, why = self._no_start
        if now_s < until_s:
            raise LaunchError(
                f"{name}: instances of this job do not start: {why}; {self._remedy}",
                failure=LaunchFailure.REFUSED, code="DoesNotStart",
            )  # fmt: skip
        until_s, why = self._no_node.get(order.market, (0.0, ""))
        if now_s < until_s:
            raise LaunchError(
                f"{name}: no node takes {order.market} instances: {why}",
                failure=LaunchFailure.CAPACITY, code="Unschedulable", pools=[self._pool],
            )  # fmt: skip
