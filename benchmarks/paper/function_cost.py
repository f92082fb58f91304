"""What a job on cloud functions costs, what it costs on machines, and performance per dollar.

Source: MLLess (journal version, 2023), "Cost" and Eq. (4); prices of IBM Cloud as stated there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from doll.theory import checks
from doll.theory.cost import SECONDS_PER_HOUR


@dataclass(frozen=True)
class FunctionPrices:
    """Prices of functions and of the machines beside them.

    Attributes:
        function_usd_per_s: p_f, one function of 2 GB.
        broker_usd_per_h: p_mq, the machine of the message broker.
        store_usd_per_h: p_redis, the machine of the key-value store.
    """

    function_usd_per_s: float = 3.4e-5
    broker_usd_per_h: float = 0.15
    store_usd_per_h: float = 0.17

    def __post_init__(self) -> None:
        checks.non_negative(
            function_usd_per_s=self.function_usd_per_s, broker_usd_per_h=self.broker_usd_per_h,
            store_usd_per_h=self.store_usd_per_h,
        )  # fmt: skip


MLLESS_PRICES = FunctionPrices()


def functions_usd(
    worker_s: float, supervisor_s: float, duration_s: float, prices: FunctionPrices = MLLESS_PRICES
) -> float:
    """p_f (Σ T_w + T_supervisor) + T (p_redis + p_mq).

    Args:
        worker_s: Σ T_w, seconds of all workers together.
        supervisor_s: seconds of the supervisor's function.
        duration_s: T, for which broker and store run.

    >>> round(functions_usd(worker_s=24 * 100, supervisor_s=100, duration_s=100), 4)
    0.0939
    """
    checks.non_negative(worker_s=worker_s, supervisor_s=supervisor_s, duration_s=duration_s)
    services_usd_per_h = prices.broker_usd_per_h + prices.store_usd_per_h
    return prices.function_usd_per_s * (worker_s + supervisor_s) + duration_s * services_usd_per_h / SECONDS_PER_HOUR


def machines_usd(count: int, duration_s: float, usd_per_h: float, *, step_s: float = 0.0) -> float:
    """Cost of `count` machines for `duration_s`.

    Args:
        step_s: a started step is billed as a whole one; 0: time as it is.

    >>> round(machines_usd(3, 320.5, 0.348), 4), machines_usd(1, 75.8, 1.948, step_s=3600)
    (0.0929, 1.948)
    """
    checks.positive(count=count)
    checks.non_negative(duration_s=duration_s, usd_per_h=usd_per_h, step_s=step_s)
    billed_s = math.ceil(duration_s / step_s - 1e-9) * step_s if step_s else duration_s
    return count * usd_per_h * billed_s / SECONDS_PER_HOUR


def perf_per_usd(duration_s: float, cost_usd: float) -> float:
    """Perf/$ = 1 / (T cost), per second and USD: (4).

    >>> round(perf_per_usd(130.8, 0.117), 4)
    0.0653
    """
    checks.positive(duration_s=duration_s, cost_usd=cost_usd)
    return 1 / (duration_s * cost_usd)
