"""HetPipe Fig. 4 and Table 4: allocation of 16 GPUs to virtual workers, placement of parameters, and more GPUs.

Four nodes of four GPUs each (TITAN V, TITAN RTX, GeForce RTX 2060, Quadro P4000), D = 0, minibatches of 32 images; the
models, speeds and links are those of `benchmarks.paper.hetpipe_models`. Each virtual worker has the best partition,
and the N_m from 1 to 8 is taken with most images per second. Nothing is measured on GPUs: absolute numbers are not
comparable with the paper's. Horovod is a formula: a step takes as long as on the slowest GPU that holds the model, and
the all-reduce of a ring, 2 S (n - 1) / n bytes over the link between nodes.

Criteria, as orderings: NP is worst; local parameters are at least as good as dealt ones with ED, and gain more for
VGG-19 than for ResNet-152; throughput grows from 4 to 8, 12 and 16 GPUs, for VGG-19 by less each time; ResNet-152 does
not fit on a lone RTX 2060; the search is as good as the best rule; S (n - 1) / n is the volume that the paper states
for Horovod.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from doll.pipeline.planner.allocation import GroupRates
from doll.pipeline.planner.fleet_plan import FleetPlan, plan_fleet
from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.profiling.profile import Device, Profile
from doll.process.figures import decorate

from benchmarks.paper.harness import FORMULA, OURS, PAPER, Check, Result, Value, main
from benchmarks.paper.hetpipe_models import GPUS, MODELS, NETWORK, OPTIMIZER_MULTIPLIER, virtual_worker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_IN_FLIGHT = 8
PER_NODE = 4
# GPUs of Table 4: the kinds, and devices per virtual worker.
TABLE_4 = {4: ("V", 4), 8: ("VR", 2), 12: ("VRQ", 3), 16: ("VRGQ", 4)}
PAPER_TABLE_4 = {"VGG-19": {4: 300, 8: 530, 12: 572, 16: 606}, "ResNet-152": {4: 256, 8: 516, 12: 538, 16: 580}}
HOROVOD_MB = {"VGG-19": (548e6, 16, 515), "ResNet-152": (230e6, 12, 211)}
PAPER_BY_HOROVOD = {"VGG-19": 1.8, "ResNet-152": 1.4}
LOCAL, DEALT = "ED-local", "ED"


@dataclass(frozen=True)
class ModelResult:
    """Of one model: images per second by allocation on 16 GPUs, and by number of GPUs.

    Attributes:
        chosen: N_m by allocation.
        horovod: by number of GPUs; None where the model does not fit on one of them alone.
        fits_alone: kinds of GPUs on which the model fits alone.
        local_bytes: activations and gradients of a minibatch between nodes, with ED-local.
    """

    by_allocation: dict[str, float]
    chosen: dict[str, int]
    by_gpus: dict[int, float]
    horovod: dict[int, float | None]
    horovod_on: int
    fits_alone: str
    local_bytes: float


def fleet_of(kinds: str) -> list[Device]:
    return [device for kind in kinds for device in virtual_worker(kind * PER_NODE)]


def ring_bytes(parameter_bytes: float, workers: int) -> float:
    """What each of n workers sends in one half of a ring's all-reduce, S (n - 1) / n: the volume that the HetPipe paper
    states for Horovod.

    >>> round(ring_bytes(548e6, 16) / 1e6), round(ring_bytes(230e6, 12) / 1e6)
    (514, 211)
    """
    return parameter_bytes * (workers - 1) / workers


def horovod(profile: Profile, rates: GroupRates, kinds: str) -> float | None:
    """Images per second of data-parallel training on four GPUs of each kind; None if the model does not fit on one.

    Args:
        rates: at N_m = 1.
    """
    alone = [rates.rate([GPUS[kind]]) for kind in kinds]
    if not all(alone):
        return None
    workers = PER_NODE * len(kinds)
    size = 2.0 * ring_bytes(sum(layer.parameter_bytes for layer in profile.layers), workers)
    link = NETWORK.between_nodes_bytes_per_s if len(kinds) > 1 else NETWORK.within_node_bytes_per_s
    return workers * profile.batch_size / (1.0 / min(alone) + size / link)


def best_by_allocation(plan: FleetPlan) -> tuple[dict[str, float], dict[str, int]]:
    """Images per second with the best N_m, and that N_m."""
    rates: dict[str, float] = {}
    chosen: dict[str, int] = {}
    for candidate in plan.candidates:
        name = candidate.rule + ("-local" if candidate.placement_name == "local" else "")
        if candidate.by_in_flight:
            chosen[name], rates[name] = max(candidate.by_in_flight, key=lambda pair: (pair[1], -pair[0]))
    return rates, chosen


def of_model(name: str) -> ModelResult:
    profile, memory = MODELS[name](), MemoryRule(OPTIMIZER_MULTIPLIER)
    rates = GroupRates(profile, NETWORK, memory, 1)

    def plan(kinds: str, k: int, **options: object) -> FleetPlan:
        return plan_fleet(profile, fleet_of(kinds), NETWORK, memory, k=k, max_in_flight=MAX_IN_FLIGHT, **options)  # type: ignore[arg-type]

    whole = plan("VRGQ", 4)
    by_allocation, chosen = best_by_allocation(whole)
    by_gpus = {}
    for gpus, (kinds, k) in TABLE_4.items():
        by_rule = best_by_allocation(plan(kinds, k, rules=["ED"]))[0]
        by_gpus[gpus] = by_rule.get(LOCAL, by_rule[DEALT])  # on one node the placements are the same
    fits = "".join(kind for kind in GPUS if rates.rate([GPUS[kind]]))
    local = next(each.best for each in whole.candidates if each.rule == "ED" and each.placement_name == "local")
    assert local is not None
    return ModelResult(
        by_allocation, chosen, by_gpus, {gpus: horovod(profile, rates, kinds) for gpus, (kinds, _) in TABLE_4.items()},
        PER_NODE * len(fits), fits, local.traffic.activation_bytes(is_between=True),
    )  # fmt: skip


def checks_of(results: dict[str, ModelResult]) -> list[Check]:
    checks: list[Check] = []
    for model, result in results.items():
        rates = result.by_allocation
        others = [rate for name, rate in rates.items() if name != "NP"]
        checks += [
            Check(f"{model}, 16 GPUs: NP, images/s, the others {min(others):.0f} at least", None, None, rates["NP"],
                  "worst", rates["NP"] < min(others)),
            Check(f"{model}: ED-local by ED", None, None, rates[LOCAL] / rates[DEALT], "≥ 1",
                  rates[LOCAL] >= rates[DEALT]),
            Check(f"{model}: search by the best rule", None, None,
                  max(rates["search"], rates.get("search-local", 0.0))
                  / max(rate for name, rate in rates.items() if "search" not in name), "≥ 1",
                  max(rates["search"], rates.get("search-local", 0.0))
                  >= max(rate for name, rate in rates.items() if "search" not in name)),
        ]  # fmt: skip
    gains = {model: result.by_allocation[LOCAL] / result.by_allocation[DEALT] for model, result in results.items()}
    checks.append(
        Check("gain of ED-local, VGG-19 by ResNet-152", None, None, gains["VGG-19"] / gains["ResNet-152"], "> 1",
              gains["VGG-19"] > gains["ResNet-152"])
    )  # fmt: skip
    for model, result in results.items():
        before = 0.0
        for gpus, rate in result.by_gpus.items():
            checks.append(
                Check(f"{model}: {gpus} GPUs, images/s", PAPER_TABLE_4[model][gpus], None, rate, "grows", rate > before)
            )
            before = rate
        steps = np.diff(list(result.by_gpus.values()))
        is_strict = model == "VGG-19"
        checks.append(
            Check(f"{model}: steps to 8, 12 and 16 GPUs", " > ".join(str(step) for step in
                  np.diff(list(PAPER_TABLE_4[model].values()))) if is_strict else
                  ", ".join(str(step) for step in np.diff(list(PAPER_TABLE_4[model].values()))), None,
                  ", ".join(f"{step:.0f}" for step in steps), "each smaller" if is_strict else "first is the largest",
                  bool(np.all(np.diff(steps) < 0) if is_strict else steps[0] > steps[1:].max()))
        )  # fmt: skip
        reference = result.horovod.get(result.horovod_on)
        if reference:
            checks.append(
                Check(f"{model}: ED-local by Horovod on {result.horovod_on} GPUs", PAPER_BY_HOROVOD[model], None,
                      result.by_allocation[LOCAL] / reference, "> 1", result.by_allocation[LOCAL] > reference)
            )  # fmt: skip
        size, workers, stated = HOROVOD_MB[model]
        volume = ring_bytes(size, workers) / 1e6
        checks.append(
            Check(f"{model}: S (n - 1) / n of {workers} GPUs, MB", stated, None, volume, "paper ± 0.5 %",
                  abs(volume / stated - 1) < 0.005)
        )  # fmt: skip
        checks.append(
            Check(f"{model}: activations and gradients of a minibatch between nodes, ED-local, MB",
                  {"VGG-19": 103, "ResNet-152": 298}[model], None, result.local_bytes / 1e6, "", None)
        )  # fmt: skip
    fits = results["ResNet-152"].fits_alone
    checks.append(
        Check("ResNet-152: kinds of GPUs on which it fits alone", "VRQ", None, fits, "not G", "G" not in fits)
    )
    return checks


def run(quick: bool) -> Result:
    results = {model: of_model(model) for model in MODELS}
    rows: list[dict[str, Value]] = []
    for model, result in results.items():
        rows += [
            {"model": model, "gpus": 16, "allocation": name, "in_flight": result.chosen[name], "images_per_s": rate}
            for name, rate in result.by_allocation.items()
        ]
        rows += [
            {"model": model, "gpus": gpus, "allocation": name, "in_flight": None, "images_per_s": rate}
            for name, rates in (("Table 4", result.by_gpus), ("Horovod, formula", result.horovod))
            for gpus, rate in rates.items()
        ]
    notes = [
        "Virtual workers of Table 4: four GPUs of one node for 4 GPUs; then four virtual workers with one GPU of each "
        "kind. The paper's own steps for ResNet-152 (260, 22, 42) do not diminish throughout: the last one adds G, on "
        "which Horovod cannot run at all.",
        "N_m by allocation: "
        + "; ".join(
            f"{model}: " + ", ".join(f"{name} {n}" for name, n in result.chosen.items())
            for model, result in results.items()
        )
        + ".",
        "The search tries all distinct groupings of 16 GPUs by the pace of their pipelines, and takes the best of its "
        "answer and those of the rules with the parameters' traffic.",
        "103 and 298 MB of the paper are activations and gradients alone: with ED-local no parameters go from node to "
        "node. Ours are for other cuts, chosen with our times.",
    ]
    return Result(
        "HetPipe Fig. 4 and Table 4: allocation, placement and more GPUs", checks_of(results), rows,
        lambda figure: _draw(figure, results), notes,
    )  # fmt: skip


def _draw(figure: Figure, results: dict[str, ModelResult]) -> None:
    panels = figure.subplots(1, 2 * len(results), width_ratios=(1.3, 1.0) * len(results))
    for number, (model, result) in enumerate(results.items()):
        bars, line = panels[2 * number], panels[2 * number + 1]
        names = ["NP", "ED", LOCAL, "HD"]
        bars.set_ylim(0, 1.2 * max(result.by_allocation.values()))
        drawn = bars.bar(names, [result.by_allocation[name] for name in names], 0.7, color=OURS)
        bars.bar_label(drawn, fmt="%.0f", fontsize=7)
        reference = result.horovod.get(result.horovod_on)
        if reference:
            bars.axhline(reference, color=FORMULA, linestyle="--", linewidth=1, label="Horovod, formula")
            bars.legend(fontsize=7, frameon=False, loc="upper left")
        bars.tick_params(axis="x", labelsize=7)
        decorate(bars, f"{model}, 16 GPUs", "", "images/s")
        line.plot(list(result.by_gpus), list(result.by_gpus.values()), "o-", color=OURS, label="ours")
        line.plot(list(PAPER_TABLE_4[model]), list(PAPER_TABLE_4[model].values()), "s--", color=PAPER, label="paper")
        line.set_ylim(bottom=0)
        line.set_xticks(list(result.by_gpus))
        decorate(line, "ED-local", "GPUs", "")
        line.legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    main("hetpipe_fig4", run)
