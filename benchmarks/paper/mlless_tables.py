"""MLLess Tables 3, 4, 6 and 7, and the costs of Fig. 9: the arithmetic of Perf/$ with functions and machines.

Criteria: Table 4 agrees with (4) to rounding, with the times of its second and third row exchanged, and not as printed;
Table 7's GPU rows give 75.8 s and 61.6 s with whole hours billed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.paper.function_cost import functions_usd, machines_usd, perf_per_usd
from benchmarks.paper.harness import OURS, PAPER, Check, Result, Value, cannot_be_tried, claim, main
from doll_lab.figures import decorate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GPU_USD_PER_H, HOUR_S = 1.948, 3600.0
PYTORCH_USD_PER_H, PYTORCH_MACHINES = 0.2, 6
GPU_SPEED_UP = 3.6  # Fig. 11: the GPU against MLLess on matrix factorisation


@dataclass(frozen=True)
class Machines:
    """A row of Table 4 with its price from Table 3."""

    name: str
    count: int
    usd_per_h: float
    printed_s: float
    corrected_s: float
    cost_usd: float
    perf: float


TABLE_4 = (
    Machines("6 x B1.4x8", 6, 0.178, 579.1, 579.1, 0.171, 0.010),
    Machines("3 x B1.8x16", 3, 0.348, 285.4, 320.5, 0.091, 0.034),
    Machines("1 x B1.32x64", 1, 1.379, 320.5, 285.4, 0.110, 0.032),
)
MLLESS_S, MLLESS_USD, MLLESS_PERF, MLLESS_WORKERS = 130.8, 0.117, 0.065, 24
# Table 7, Perf/$ x 1e-3 of matrix factorisation: the GPU at its largest batch, MLLess, and the GPU's time.
TABLE_7 = {"ML-10M": (6.77, 6.22, 75.8), "ML-20M": (8.34, 7.22, 61.6)}
# Table 6, TFLOPS in double and single precision.
P100_TFLOPS, FUNCTIONS_TFLOPS = (4.7, 9.3), (1.6, 2.7)


def rounds_to(value: float, printed: float) -> bool:
    """Whether `value` is `printed` in thousandths."""
    return abs(value - printed) <= 0.0005 + 1e-9


def run(quick: bool) -> Result:
    checks: list[Check] = []
    rows: list[dict[str, Value]] = []

    def add(table: str, what: str, paper: Value, ours: float, criterion: str, ok: bool, cause: str = "") -> None:
        checks.append(claim("arithmetic", f"{table}, {what}", paper, ours, criterion, ok, cause))
        rows.append({"table": table, "what": what, "paper": paper, "ours": ours})

    for row in TABLE_4:
        cost = machines_usd(row.count, row.corrected_s, row.usd_per_h)
        perf = perf_per_usd(row.corrected_s, row.cost_usd)
        add(
            "Tables 3, 4",
            f"{row.name}: cost in USD",
            row.cost_usd,
            cost,
            "within 2.5 %",
            _near(cost, row.cost_usd, 0.025),
        )
        add("Table 4", f"{row.name}: Perf/$", row.perf, perf, "to rounding", rounds_to(perf, row.perf))
        if row.printed_s != row.corrected_s:
            printed_perf = perf_per_usd(row.printed_s, row.cost_usd)
            printed_usd = machines_usd(row.count, row.printed_s, row.usd_per_h)
            add(
                "Table 4", f"{row.name}: Perf/$ with its printed time", row.perf, printed_perf, "to rounding",
                rounds_to(printed_perf, row.perf) or _near(printed_usd, row.cost_usd, 0.025),
                "the times of this row and of another one are exchanged (M5)",
            )  # fmt: skip
    perf = perf_per_usd(MLLESS_S, MLLESS_USD)
    add("Table 4", "MLLess: Perf/$", MLLESS_PERF, perf, "to rounding", rounds_to(perf, MLLESS_PERF))
    usd = functions_usd(MLLESS_WORKERS * MLLESS_S, MLLESS_S, MLLESS_S)
    add(
        "Table 4",
        "MLLess: cost in USD of 24 workers to the end",
        MLLESS_USD,
        usd,
        "within 6 %",
        _near(usd, MLLESS_USD, 0.06),
    )
    single = P100_TFLOPS[1] / FUNCTIONS_TFLOPS[1]
    add("Table 6", "Fig. 11's speed-up follows from single precision", GPU_SPEED_UP, single, "within 10 %",
        _near(single, GPU_SPEED_UP, 0.1))  # fmt: skip
    for job, (gpu_perf, mlless_perf, gpu_s) in TABLE_7.items():
        hour_usd = machines_usd(1, gpu_s, GPU_USD_PER_H, step_s=HOUR_S)
        seconds = 1000 / (gpu_perf * hour_usd)
        add("Table 7", f"{job}: seconds on the GPU", gpu_s, seconds, "± 0.1 s", abs(seconds - gpu_s) <= 0.1)
        mlless_usd = 1000 / (mlless_perf * GPU_SPEED_UP * seconds)
        times = hour_usd / mlless_usd
        add(
            "Table 7",
            f"{job}: GPU's cost over MLLess's",
            "3.2 to 3.3",
            times,
            "within 5 %",
            3.2 * 0.95 <= times <= 3.3 * 1.05,
        )
    for job, seconds, mlless_usd, printed_times in (("ML-20M", 1800.0, 0.0948, 6.32), ("ML-10M", 2029.0, 0.1348, 4.94)):
        usd = machines_usd(PYTORCH_MACHINES, seconds, PYTORCH_USD_PER_H)
        times = usd / mlless_usd
        add(
            "Fig. 9",
            f"{job}: PyTorch's cost over MLLess's",
            printed_times,
            times,
            "within 2.5 %",
            _near(times, printed_times, 0.025),
        )
    checks += [
        cannot_be_tried(
            "order", "Fig. 5: speed-up of two threads in a function of 2 GB", "little", "IBM's functions of 2021"
        ),
        cannot_be_tried(
            "value",
            "Fig. 6: seconds of PyTorch on 6, 3 and 1 machines",
            "579.1, 320.5, 285.4",
            "IBM's machines of 2021",
        ),
        cannot_be_tried("value", "Fig. 11: seconds of PyTorch on a P100", "75.8, 61.6", "no such GPU"),
    ]
    notes = [
        "Table 4 has the times of 3 x B1.8x16 and 1 x B1.32x64 exchanged: price x time and Perf/$ agree with the costs "
        "only with 320.5 s and 285.4 s.",
        "Table 7 bills the GPU by whole hours: 1.948 USD for either job.",
        "The times of the paper (hardware and prices of 2021) are not reproduced, only what follows from them.",
    ]
    return Result("MLLess Tables 3, 4, 6, 7: cost arithmetic", checks, rows, _draw, notes)


def _near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value / wanted - 1) <= tolerance


def _draw(figure: Figure) -> None:
    axes = figure.subplots()
    names = [row.name for row in TABLE_4] + ["MLLess"]
    ours = [perf_per_usd(row.corrected_s, machines_usd(row.count, row.corrected_s, row.usd_per_h)) for row in TABLE_4]
    ours.append(perf_per_usd(MLLESS_S, functions_usd(MLLESS_WORKERS * MLLESS_S, MLLESS_S, MLLESS_S)))
    paper = [row.perf for row in TABLE_4] + [MLLESS_PERF]
    at = range(len(names))
    axes.bar([place - 0.2 for place in at], ours, 0.38, color=OURS, label="price x corrected time")
    axes.bar([place + 0.2 for place in at], paper, 0.38, color=PAPER, label="paper")
    axes.set_xticks(list(at), names)
    decorate(axes, "Table 4: Perf/$", "", "1 / (s USD)")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main("mlless_tables", run)
