"""The plan of a fleet as text and as JSON, for `doll plan --pipeline`. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from doll.pipeline.profiling.profile import Profile

from doll_lab.pipelines.fleet_plan import Candidate, FleetPlan
from doll_lab.pipelines.partition import StagePlan
from doll_lab.pipelines.prediction import Prediction

_GIB, _MB = 2.0**30, 1e6


def report_text(plan: FleetPlan, notes: Sequence[str] = ()) -> str:
    """Return the best allocation with its stages, and a comparison of all allocations; `notes` are appended."""
    best = plan.best
    title = (
        f"{plan.profile.model}, minibatches of {plan.profile.batch_size}, on {len(plan.fleet)} devices: "
        f"virtual workers of {plan.k}, D = {plan.clock_distance}"
    )
    if best is None:
        lines = [f"NOT FEASIBLE: {title}", *(f"  {each.rule}: {each.problem}" for each in plan.candidates)]
        return "\n".join([*lines, *(f"- {note}" for note in notes)])
    lines = [title, "", *_comparison(plan, best), ""]
    lines.append(
        f"Best: {best.rule}, parameters {_PLACED[best.placement_name]}, N_m = {best.in_flight}: "
        f"{best.samples_per_s:.4g} samples/s"
    )
    for numbers, text in _alike([_worker_lines(plan.profile, best, at) for at in range(len(best.workers))]):
        lines += [f"  virtual worker{'s' if '-' in numbers or ',' in numbers else ''} {numbers}: {text[0]}", *text[1:]]
    lines += [*_traffic_lines(plan, best), *_spare(best), *(f"- {note}" for note in (*advice(plan), *notes))]
    return "\n".join(lines)


_PLACED = {"default": "dealt to all nodes", "local": "on the node that computes them"}


def _comparison(plan: FleetPlan, best: Prediction) -> list[str]:
    priced = any(device.usd_per_h for device in plan.fleet)
    rows = [["rule", "parameters", "N_m", "samples/s", "waiting", *(["USD/h", "USD per 10^6"] if priced else []), ""]]
    problems = []
    for candidate in plan.candidates:
        prediction = candidate.best
        if prediction is None:
            problems.append(f"  {candidate.rule}: not possible: {candidate.problem}")
            continue
        prices = [f"{prediction.usd_per_h:.4g}", f"{prediction.usd_per_million_samples:.4g}"] if priced else []
        rows.append([
            candidate.rule, candidate.placement_name, str(prediction.in_flight), f"{prediction.samples_per_s:.4g}",
            f"{max(prediction.waiting_shares):.0%}", *prices, "<- best" if prediction is best else "",
        ])  # fmt: skip
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    table = [
        "  " + "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width)
                         for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip
    return [*table, *problems]


def _worker_lines(profile: Profile, best: Prediction, worker: int) -> tuple[str, ...]:
    each = best.workers[worker]
    share = best.waiting_shares[worker]
    waits = f", waits {share:.0%} for {best.waits_for(worker)}" if share > 0.005 else ""
    lines = [f"{best.rates[worker] * best.batch_size:.4g} samples/s alone{waits}{_gang(best, worker)}"]
    for number, stage in enumerate(each.partition.stages):
        binds = ", binds" if number == each.partition.binding else ""
        lines.append(
            f"    stage {number + 1}  {stage.device.name} on {stage.device.node}: {layers_text(profile, stage)}, "
            f"{stage.total_s:.4g} s{_receive(stage)}, {_memory(stage)}{binds}"
        )
    return tuple(lines)


def layers_text(profile: Profile, stage: StagePlan) -> str:
    """Return the layers of a stage as text: first and last name, and their number."""
    names = [layer.name for layer in profile.layers[stage.first : stage.stop]]
    return f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]} ({len(names)})"


def _receive(stage: StagePlan) -> str:
    receive_s = stage.receive_forward_s + stage.receive_backward_s
    return f" of which {receive_s:.2g} s to receive" if receive_s else ""


def _memory(stage: StagePlan) -> str:
    of = "" if math.isinf(stage.device.memory_bytes) else f" of {stage.device.memory_bytes / _GIB:.3g}"
    return f"{stage.memory_bytes / _GIB:.3g}{of} GiB"


def _gang(best: Prediction, worker: int) -> str:
    devices = best.workers[worker].devices
    price = sum(device.usd_per_h for device in devices)
    spot = sum(device.is_spot for device in devices)
    return (f", {price:.4g} USD/h" if price else "") + (f", {spot} of {len(devices)} on spot" if spot else "")


def _alike(texts: Sequence[tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Group virtual workers with equal text; each group has their numbers, from 1: "1-3, 5"."""
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(texts, 1):
        numbers.setdefault(text, []).append(number)
    return [(_ranges(each), text) for text, each in numbers.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text with ranges.

    >>> _ranges([1, 2, 3, 5])
    '1-3, 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _traffic_lines(plan: FleetPlan, best: Prediction) -> list[str]:
    load = best.traffic
    lines = [
        "  traffic of a virtual worker: activations and gradients "
        f"{load.activation_bytes(is_between=True) / _MB:.4g} MB per minibatch between nodes "
        f"({load.activation_bytes(is_between=False) / _MB:.4g} within), parameters "
        f"{load.parameter_bytes(is_between=True) / _MB:.4g} MB per wave between nodes "
        f"({load.parameter_bytes(is_between=False) / _MB:.4g} within)"
    ]
    links = {link: each.bytes_per_minibatch(best.in_flight) for link, each in load.links.items() if link[0] != link[1]}
    if links:
        (source, target), most = max(links.items(), key=lambda item: item[1])
        lines.append(
            f"  busiest link: {source} to {target}, {most / _MB:.4g} MB per minibatch of each virtual worker, "
            f"{most * best.pace / _MB:.4g} MB/s"
        )
    if best.sync_s:
        lines.append(f"  a push and a pull take {best.sync_s:.3g} s at the end of a wave")
    return lines


def _spare(best: Prediction) -> list[str]:
    if not best.spare:
        return []
    names = sorted({device.name for device in best.spare})
    return [f"  left out: {len(best.spare)} devices ({', '.join(names)}); the others do more without them"]


def advice(plan: FleetPlan) -> list[str]:
    """Return notes that help to judge the plan."""
    lines = []
    best = plan.best
    searched = next((each for each in plan.candidates if each.answer is not None and each.best is not None), None)
    if searched is not None and best is not None and searched.answer is not None:
        most = searched.answer.bound * plan.profile.batch_size
        how = "all distinct groupings" if searched.answer.is_exact else "groupings by exchange of devices"
        lines.append(
            f"search: {how}, by the pace of their pipelines at each N_m; without parameter traffic no grouping at "
            f"N_m = {searched.best.in_flight if searched.best else 0} does more than {most:.4g} samples/s"
        )
    if best is not None and any(device.is_spot for worker in best.workers for device in worker.devices):
        lines.append(
            f"a virtual worker is a gang of {plan.k} machines: if one of them is preempted, all {plan.k} stop "
            "working, and its price is that of all"
        )
    return lines


# --- JSON ------------------------------------------------------------------------------------------------------------


def to_dict(plan: FleetPlan) -> dict[str, Any]:
    """Return all facts of the text, and each candidate's virtual workers."""
    best = plan.best
    return {
        "feasible": best is not None,
        "model": plan.profile.model,
        "batch_size": plan.profile.batch_size,
        "devices": len(plan.fleet),
        "devices_per_worker": plan.k,
        "clock_distance": plan.clock_distance,
        "best": None if best is None else {"rule": best.rule, "placement": best.placement_name},
        "candidates": [_candidate(plan, each) for each in plan.candidates],
    }


def _candidate(plan: FleetPlan, candidate: Candidate) -> dict[str, Any]:
    content: dict[str, Any] = {"rule": candidate.rule, "placement": candidate.placement_name}
    prediction = candidate.best
    if prediction is None:
        return {**content, "problem": candidate.problem}
    load = prediction.traffic
    content |= {
        "in_flight": prediction.in_flight,
        "samples_per_s": prediction.samples_per_s,
        "samples_per_s_by_in_flight": dict(candidate.by_in_flight),
        "usd_per_h": prediction.usd_per_h,
        "usd_per_million_samples": prediction.usd_per_million_samples,
        "sync_s": prediction.sync_s,
        "link_samples_per_s": len(prediction.workers) * prediction.link_pace * prediction.batch_size,
        "spare": [device.name for device in prediction.spare],
        "placement_by_layer": dict(
            zip((layer.name for layer in plan.profile.layers), prediction.placement, strict=True)
        ),
        "links": [
            {"from": a, "to": b, "activation_bytes_per_minibatch": each.activation_bytes,
             "parameter_bytes_per_wave": each.parameter_bytes}
            for (a, b), each in load.links.items()
        ],
        "workers": [_worker(plan.profile, prediction, number) for number in range(len(prediction.workers))],
    }  # fmt: skip
    if candidate.answer is not None:
        content["search"] = {
            "exact": candidate.answer.is_exact,
            "bound_samples_per_s": candidate.answer.bound * prediction.batch_size,
        }
    return content


def _worker(profile: Profile, prediction: Prediction, number: int) -> dict[str, Any]:
    worker = prediction.workers[number]
    return {
        "samples_per_s_alone": prediction.rates[number] * prediction.batch_size,
        "waiting_share": prediction.waiting_shares[number],
        "waits_for": prediction.waits_for(number),
        "binding_stage": worker.partition.binding,
        "usd_per_h": sum(device.usd_per_h for device in worker.devices),
        "spot_devices": sum(device.is_spot for device in worker.devices),
        "stages": [
            {
                "device": stage.device.name,
                "node": stage.device.node,
                "is_spot": stage.device.is_spot,
                "layers": [layer.name for layer in profile.layers[stage.first : stage.stop]],
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "receive_s": stage.receive_forward_s + stage.receive_backward_s,
                "total_s": stage.total_s,
                "memory_bytes": stage.memory_bytes,
                "available_bytes": stage.device.memory_bytes,
            }
            for stage in worker.partition.stages
        ],
    }
