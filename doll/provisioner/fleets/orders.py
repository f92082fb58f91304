"""Names and identities of orders, and the handling of failed starts, for fleets whose owner chooses the nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypedDict, cast, get_args

from doll.provisioner.fleets.port import Instance, LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market

REFUSE_S: Final = 300.0


def order_name(order: Order, cluster: str) -> str:
    """Return the name of an order. Equal orders have the same name, so that an order is launched only once."""
    parts = ["doll", cluster, str(order.slot), str(order.incarnation), order.market.replace("_", "-")]
    if order.attempt:
        parts.append(f"a{order.attempt}")
    if order.run:
        parts.append(f"r{order.run}")
    return "-".join(parts)


def identity(order: Order | Instance, instance: str) -> dict[str, str]:
    """Return the environment variables that tell a worker its identity."""
    return {
        "DOLL_WORKER": str(order.slot),
        "DOLL_INCARNATION": str(order.incarnation),
        "DOLL_INSTANCE": instance,
        "DOLL_MARKET": order.market,
    }


class WorkerIdentity(TypedDict):
    """The fields of `Instance` that its labels contain."""

    slot: int
    incarnation: int
    market: Market
    job: str


class WorkerLabels:
    """The names of the labels, or tags, that identify the worker of an instance; each name begins with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.cluster, self.job, self.market = f"{prefix}cluster", f"{prefix}job", f"{prefix}market"
        self.worker, self.incarnation = f"{prefix}worker", f"{prefix}incarnation"

    def write(self, order: Order, cluster: str, job: str) -> dict[str, str]:
        """Return the labels of an order's instance; for the job "" there is no job label."""
        labels = {self.cluster: cluster, self.worker: str(order.slot), self.incarnation: str(order.incarnation)}
        return {**labels, self.market: order.market, **({self.job: job} if job else {})}

    def read(self, labels: Mapping[str, str]) -> WorkerIdentity | None:
        """Return the identity in these labels; None if they are not the labels of a worker."""
        market, slot, incarnation = (labels.get(key, "") for key in (self.market, self.worker, self.incarnation))
        if market not in get_args(Market) or not slot.isdecimal() or not incarnation.isdecimal():
            return None
        job, market = labels.get(self.job, ""), cast("Market", market)
        return {"slot": int(slot), "incarnation": int(incarnation), "market": market, "job": job}


class LaunchGate:
    """Refuses orders for `REFUSE_S` seconds if they would fail for the same reason as an earlier order.

    If an instance could not start, orders of both markets are refused, because all instances have the same image. If an
    instance runs, the image is correct, so the failure of another instance is due to its node. If no node accepted an
    instance, orders of the same market are refused. Launches of other processes do not count, because a person may have
    corrected the problem.

    Args:
        pool: the only pool of the fleet, whose owner chooses the node.
        remedy: advice to people if instances do not start.
        clock: function that returns Unix seconds.
    """

    def __init__(self, pool: str, remedy: str, clock: Callable[[], float]) -> None:
        self._pool, self._remedy, self._clock = pool, remedy, clock
        self._no_start = (0.0, "")  # until when, and why
        self._no_node: dict[Market, tuple[float, str]] = {}

    def start_failed(self, why: str) -> None:
        """Record that an instance could not start."""
        self._no_start = (self._clock() + REFUSE_S, why)

    def started(self) -> None:
        """Record that an instance runs."""
        self._no_start = (0.0, "")

    def found_no_node(self, market: Market, why: str) -> None:
        """Record that no node has taken an instance of this market."""
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
