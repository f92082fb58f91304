"""What fleets whose owner places instances have in common: an order's name and identity, markets without nodes, and
instances that cannot start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from doll.provisioner.fleets.port import LaunchError, LaunchFailure, Order
from doll.provisioner.planning.state import Market

DRY_S: Final = 300.0
"""A market whose instances no node took is not tried for so long."""


def order_name(order: Order, cluster: str) -> str:
    """The same order has the same name, so that it launches once."""
    parts = ["doll", cluster, str(order.slot), str(order.incarnation), order.market.replace("_", "-")]
    if order.attempt:
        parts.append(f"a{order.attempt}")
    if order.run:
        parts.append(f"r{order.run}")
    return "-".join(parts)


def identity(order: Order, instance: str) -> dict[str, str]:
    """What a worker's environment says of who it is."""
    return {
        "DOLL_WORKER": str(order.slot),
        "DOLL_INCARNATION": str(order.incarnation),
        "DOLL_INSTANCE": instance,
        "DOLL_MARKET": order.market,
    }


class FailedStarts:
    """Whether the job's instances can start, as they have shown lately.

    Orders are refused for a while after one could not: in both markets, since all have the same image. One that runs
    shows that the image is right, and that another's failure is its node's. What another process has launched says
    nothing: a person may have corrected it.

    Args:
        remedy: what a person should correct.
        clock: Unix seconds.
    """

    def __init__(self, remedy: str, clock: Callable[[], float]) -> None:
        self._remedy = remedy
        self._clock = clock
        self._until_s = 0.0
        self._why = ""

    def put(self, why: str) -> None:
        """An instance could not start."""
        self._until_s, self._why = self._clock() + DRY_S, why

    def clear(self) -> None:
        """An instance runs."""
        self._until_s = 0.0

    def check(self, name: str) -> None:
        """Refuse an order whose instance would not start either.

        Raises:
            LaunchError: a person must act.
        """
        if self._clock() < self._until_s:
            raise LaunchError(
                f"{name}: instances of this job do not start: {self._why}; {self._remedy}",
                failure=LaunchFailure.REFUSED, code="DoesNotStart",
            )  # fmt: skip


class DryMarkets:
    """Markets for whose instances there was no node lately.

    Args:
        pool: the one pool of the fleet: its owner chooses the node.
        clock: Unix seconds.
    """

    def __init__(self, pool: str, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._until_s: dict[Market, float] = {}
        self._why: dict[Market, str] = {}

    def put(self, market: Market, why: str) -> None:
        """No node has taken an instance of this market."""
        self._until_s[market] = self._clock() + DRY_S
        self._why[market] = why

    def check(self, order: Order, name: str) -> None:
        """Refuse an order on a market that was found dry.

        Raises:
            LaunchError: for lack of capacity.
        """
        if self._clock() < self._until_s.get(order.market, 0.0):
            raise LaunchError(
                f"{name}: no node takes {order.market} instances: {self._why[order.market]}",
                failure=LaunchFailure.CAPACITY, code="Unschedulable", pools=[self._pool],
            )  # fmt: skip
