"""The bill of one job: what runs, what has ended, and what an earlier provisioner with lost state had spent."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from doll.errors import ServiceUnavailableError
from doll.provisioner.billing import Bill, BillingRule, BillLine, PriceOf, bill_lines
from doll.provisioner.fleets.port import Instance
from doll.provisioner.planning.state import Market
from doll.provisioner.traces.model import Series, constant
from doll.records.control import ProvisionDecision
from doll.theory.cost import Prices

LINES_KEPT_S = 24 * 3600.0
"""The bill of an instance that ended longer ago is kept as part of a sum; no fleet lists the instance any more."""


class BillingAccount:
    """Bills instances and keeps the bills of ended instances.

    Args:
        rule: how the cloud bills.
        price_of: `PriceFeed.series`.
    """

    def __init__(self, rule: BillingRule, price_of: PriceOf) -> None:
        self._rule = rule
        self._feed = price_of
        self._last_usd_per_h: dict[str, float] = {}  # by market and pool
        self.clear()

    def clear(self) -> None:
        """Begin a bill of zero."""
        self._lines: dict[str, BillLine] = {}  # of ended instances
        self._archived_bill = Bill()  # of instances that ended long ago
        self._earlier_usd = 0.0
        self._last_usd = 0.0

    @property
    def billed(self) -> Collection[str]:
        """Ids of ended instances with a line on the bill."""
        return self._lines.keys()

    def expect_earlier_costs(self) -> None:
        """The state is lost: the next bill takes over the sum that the last decision announced."""
        self._earlier_usd = math.nan

    def bill_ended(
        self, instance: Instance, now_s: float, *, ready_s: Mapping[str, float], fenced_s: Mapping[str, float]
    ) -> BillLine:
        """Put the final bill of an ended instance on the account.

        Raises:
            ServiceUnavailableError: prices do not answer.
        """
        (line,) = bill_lines([instance], self._price_of, self._rule, now_s, ready_s=ready_s, fenced_s=fenced_s)
        self._lines[instance.id] = line
        return line

    def bill(
        self,
        running: Iterable[Instance],
        now_s: float,
        *,
        ready_s: Mapping[str, float],
        fenced_s: Mapping[str, float],
        announced: ProvisionDecision | None,
        otherwise: Prices | None,
        machines: int,
        alarms: list[str],
    ) -> Bill:
        """The bill until now. Where prices do not answer, machines are billed at the last price that is known, and the
        bill is at least as high as the last one.

        Args:
            running: instances without a final bill.
            otherwise: prices of a worker of so many machines, where none of the pool was ever known.
            announced: the newest published decision, see `expect_earlier_costs`.
            alarms: one is added where prices do not answer.
        """
        lines, missing = list[BillLine](), list[str]()

        def price_of(pool: str, market: Market, start_s: float, end_s: float) -> Series:
            try:
                return self._price_of(pool, market, start_s, end_s)
            except ServiceUnavailableError as exc:
                missing.append(str(exc))
                usd_per_h = self._last_usd_per_h.get(_key(pool, market))
                if usd_per_h is None and otherwise is not None:
                    usd_per_h = otherwise.spot_usd_per_h if market == "spot" else otherwise.on_demand_usd_per_h
                    usd_per_h /= machines
                if usd_per_h is None:
                    raise
                return constant(usd_per_h, start_s, end_s)

        try:
            lines = bill_lines(running, price_of, self._rule, now_s, ready_s=ready_s, fenced_s=fenced_s)
        except ServiceUnavailableError as exc:
            alarms.append(f"running instances cannot be billed now: {exc}")
        else:
            if missing:
                alarms.append(f"running instances are billed at the last known prices: {missing[0]}")
        self._archive(now_s)
        bill = self._ended_bill().plus(Bill.of(lines))
        if math.isnan(self._earlier_usd):
            spent_usd = announced.spent_usd if announced is not None and math.isfinite(announced.spent_usd) else 0.0
            self._earlier_usd = max(0.0, spent_usd - bill.usd)
        usd = bill.usd + self._earlier_usd
        self._last_usd = max(usd, self._last_usd) if missing else usd
        return replace(bill, usd=self._last_usd)

    def last_bill(self) -> Bill:
        """The last sum, where nothing can be observed now."""
        return replace(self._ended_bill(), usd=self._last_usd)

    def _ended_bill(self) -> Bill:
        return self._archived_bill.plus(Bill.of(self._lines.values()))

    def _archive(self, now_s: float) -> None:
        for id_, line in list(self._lines.items()):
            if now_s - (line.ended_s or now_s) > LINES_KEPT_S:
                self._archived_bill = replace(self._archived_bill.plus(Bill.of([line])), lines=())
                del self._lines[id_]

    def _price_of(self, pool: str, market: Market, start_s: float, end_s: float) -> Series:
        """The feed's answer; its newest price is remembered."""
        series = self._feed(pool, market, start_s, end_s)
        self._last_usd_per_h[_key(pool, market)] = float(series.values[-1])
        return series

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "lines": [line.to_dict() for line in self._lines.values()],
            "archived_bill": self._archived_bill.to_dict(),
            "earlier_usd": 0.0 if math.isnan(self._earlier_usd) else self._earlier_usd,
            "last_usd": self._last_usd,
            "last_usd_per_h": self._last_usd_per_h,
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `to_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: `kept` is something else.
        """
        self._lines = {line["id"]: BillLine(**line) for line in kept["lines"]}
        self._archived_bill = Bill(**kept["archived_bill"])
        self._earlier_usd, self._last_usd = float(kept["earlier_usd"]), float(kept["last_usd"])
        self._last_usd_per_h = {str(key): float(usd) for key, usd in kept.get("last_usd_per_h", {}).items()}


def _key(pool: str, market: Market) -> str:
    return f"{market} {pool}"
