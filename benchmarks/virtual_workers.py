"""Virtual workers: what their pipeline costs, in what order it computes, and how much memory each stage takes.

    python -m benchmarks.virtual_workers [--out results.json] [--gantt picture.png] [--only overhead|order|memory]

No Kafka and no server: batches are submitted to the engine of one virtual worker, whose stages are real processes, and
new weights come after each wave.

- overhead: stages that sleep instead of computing, so that the cores of this machine do not matter: minibatches per
  second, divided by those of the simulator for the same times.
- order: the tasks of each stage in order, compared with the simulator's, and a picture of both.
- memory: the most private memory that each stage took, divided by what the partitioner counts with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from doll.config import JobConfig
from doll.pipeline.planner.cut import cut
from doll.pipeline.planner.partition import MemoryRule
from doll.pipeline.planner.profiled import live_rule, num_states
from doll.pipeline.profiling.layers import layers_of
from doll.pipeline.profiling.profiler import profile_layers, sample_batch
from doll.task.base import load_task

from benchmarks.process_memory import read_memory
from benchmarks.stage_rig import job, run_batches
from doll_lab.pipelines import plots
from doll_lab.pipelines.measured import timeline_of
from doll_lab.pipelines.schedule import StageTimes, simulate
from doll_lab.pipelines.timeline import Timeline

T = TypeVar("T")

STAGES: Final = (2, 3, 4)
IN_FLIGHT: Final = (1, 2, 3, 4, 5, 6)
GOAL: Final = 0.95
RULE_GOAL: Final = 1.3
# Stages of one speed, and unequal ones; seconds forward and backward, so long that a timer's error does not matter.
EQUAL: Final = (0.04, 0.06)
# No two tasks of a stage arrive at nearly the same moment, where the order would be a matter of luck: it is the same
# with tasks that take up to 10 % longer at random.
ORDERS: Final = (
    ((0.040, 0.040), (0.070, 0.045), (0.075, 0.070)),
    ((0.030, 0.040), (0.080, 0.125), (0.030, 0.100)),
)
UNEQUAL: Final = ((0.030, 0.055), (0.048, 0.078), (0.021, 0.045), (0.034, 0.041))


def run_sleeping(times: Sequence[tuple[float, float]], in_flight: int, minibatches: int) -> Timeline:
    """Stages that take `times`."""
    task = f'{{class: "benchmarks.stage_tasks:Sleeping", args: {{times: {[list(each) for each in times]}}}}}'
    config = job(task, len(times), in_flight, "training.guard.spike_factor=0", "training.optimizer.lr=0.000001")
    rng = np.random.default_rng(0)
    samples = [(rng.normal(size=(8, 4)).astype(np.float32), np.zeros((8, 4), np.float32)) for _ in range(minibatches)]
    return timeline_of(run_batches(config, in_flight, samples), len(times), in_flight)


def overhead() -> list[dict[str, Any]]:
    """A row for each number of stages and minibatches in flight, stages of one speed and unequal ones."""
    rows = []
    for kind in ("equal", "unequal"):
        for stages in STAGES:
            times = [EQUAL] * stages if kind == "equal" else list(UNEQUAL[:stages])
            for in_flight in IN_FLIGHT:
                count = 3 * in_flight + 14
                simulated = simulate([StageTimes(*each) for each in times], in_flight, count).throughput()
                measured = run_sleeping(times, in_flight, count).throughput()
                row = {
                    "stages": kind, "k": stages, "in_flight": in_flight, "simulated_per_s": simulated,
                    "measured_per_s": measured, "ratio": measured / simulated,
                }  # fmt: skip
                print(
                    f"{kind} k = {stages}, N_m = {in_flight}: {measured:.2f} of {simulated:.2f}/s, "
                    f"{measured / simulated:.3f}", file=sys.stderr,
                )  # fmt: skip
                rows.append(row)
    return rows


def order(picture: Path | None) -> dict[str, Any]:
    """Three unequal stages, four minibatches in flight."""
    in_flight, count = 4, 24
    result = {}
    for number, times in enumerate(ORDERS, 1):
        measured = run_sleeping(times, in_flight, count)
        simulated = simulate([StageTimes(*each) for each in times], in_flight, count)
        if picture is not None and number == 1:
            plots.save_timelines(picture, {"simulated": simulated, "measured": measured}, end_s=2.0)
        for stage in range(len(times)):
            result[f"pipeline {number}, stage {stage + 1}"] = {
                "is_same": measured.order(stage) == simulated.order(stage),
                "measured": measured.order(stage),
                "simulated": simulated.order(stage),
            }
    return result


def memory(models: Sequence[str]) -> list[dict[str, Any]]:
    """Models of many weights, of many activations, and with more of these in front and more of those behind: what each
    stage took at most, and what the partitioner says.

    Private memory and a stage's share of the memory that it shares with its neighbours and its worker. What a stage of
    next to nothing takes is taken off: the interpreter and torch.
    """
    base_bytes = min(_in_new_process(_peaks, _MODELS["nothing"], 2, "{name: sgd}"))
    rows = []
    for name in models:
        model = _MODELS[name]
        for optimizer in ("{name: sgd, momentum: 0.9}", "{name: adam}"):
            for in_flight in (1, 4):
                promised = _in_new_process(_promised, model, in_flight, optimizer)
                peaks = _in_new_process(_peaks, model, in_flight, optimizer)
                for stage, (peak_bytes, (promised_bytes, paper_bytes)) in enumerate(zip(peaks, promised, strict=True)):
                    taken = peak_bytes - base_bytes
                    rows.append({
                        "model": name, "optimizer": optimizer, "in_flight": in_flight, "stage": stage + 1,
                        "base_mb": base_bytes / 1e6, "promised_mb": promised_bytes / 1e6, "paper_mb": paper_bytes / 1e6,
                        "taken_mb": taken / 1e6, "ratio": taken / promised_bytes, "paper_ratio": taken / paper_bytes,
                    })  # fmt: skip
                    print(rows[-1], file=sys.stderr)
    return rows


class _Model(NamedTuple):
    task: str
    args: str
    samples: int
    stages: int = 3


_MODELS: Final = {
    "nothing": _Model("Wide", "{width: 2, layers: 1}", 4, stages=2),
    "weights": _Model("Wide", "{width: 1200, layers: 6}", 64),
    "activations": _Model("Wide", "{width: 400, layers: 9}", 4096),
    "convolutions": _Model("Convolutions", "{channels: 32, blocks: 4, side: 32}", 64),
}


def _in_new_process(function: Callable[..., T], *args: Any) -> T:
    """Call it in a fork of this process: a worker's heap has not seen other work when it forks its stages."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *args).result()


def _job(model: _Model, in_flight: int, optimizer: str) -> JobConfig:
    task = f'{{class: "benchmarks.stage_tasks:{model.task}", args: {model.args}}}'
    # A stage whose memory is limited returns what is free.
    devices = [{"device": "cpu", "memory_bytes": 1e9}] * model.stages
    return job(
        task, model.stages, in_flight, f"training.optimizer={optimizer}", "training.guard.spike_factor=0",
        "training.optimizer.lr=0.0001", f"worker.pipeline.devices={json.dumps(devices)}",
    )  # fmt: skip


def _peaks(model: _Model, in_flight: int, optimizer: str) -> list[int]:
    """Of each stage: the most memory that it had, in bytes, of 30 samples a second."""
    config = _job(model, in_flight, optimizer)
    rng = np.random.default_rng(0)
    shape = (model.samples, *load_task(config).input_shape)
    batches = [
        (rng.normal(size=shape).astype(np.float32), rng.integers(10, size=model.samples))
        for _ in range(6 * in_flight + 12)
    ]
    peaks: dict[int, int] = {}
    ended = threading.Event()

    def sample(pids: Sequence[int]) -> None:
        while not ended.wait(1 / 30):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    memory = read_memory(pid)
                    peaks[pid] = max(peaks.get(pid, 0), memory.private_bytes + memory.segment_bytes)

    def watch(pids: Sequence[int]) -> None:
        if not peaks:
            peaks.update(dict.fromkeys(pids, 0))
            threading.Thread(target=sample, args=(pids,), daemon=True).start()

    try:
        run_batches(config, in_flight, batches, watch)
    finally:
        ended.set()
    return list(peaks.values())


def _promised(model: _Model, in_flight: int, optimizer: str) -> list[tuple[float, float]]:
    """Of each stage: what the partitioner counts with, and the paper's rule; bytes."""
    config = _job(model, in_flight, optimizer)
    task = load_task(config)
    module = task.build_model()
    batch = sample_batch(task, module, model.samples, np.random.default_rng(0))
    profile = profile_layers(task, layers_of(task, module), batch, model=model.task, repeats=1)
    parts = cut(config, task, module, 0)
    # The paper's rule leaves out what an interpreter and its libraries take.
    rules = [live_rule(config.training.optimizer), MemoryRule(1 + num_states(config.training.optimizer))]
    promised, at = [], 0
    for number, part in enumerate(parts):
        size, is_last = profile.size_of(at, at + len(part)), number == len(parts) - 1
        live, paper = (float(rule.stage_bytes(size, in_flight=in_flight, is_last=is_last)) for rule in rules)
        promised.append((live, paper))
        at += len(part)
    return promised


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("overhead", "order", "memory"), action="append")
    parser.add_argument("--model", choices=list(_MODELS)[1:], action="append", help="of memory [all]")
    parser.add_argument("--gantt", type=Path, help="PNG of the order, simulated and measured")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(argv)
    parts = args.only or ["overhead", "order", "memory"]
    result: dict[str, Any] = {}
    if "overhead" in parts:
        result["overhead"] = overhead()
        print("| stages | k | N_m | simulated /s | measured /s | ratio |\n|---|---|---|---|---|---|")
        for row in result["overhead"]:
            print(
                f"| {row['stages']} | {row['k']} | {row['in_flight']} | {row['simulated_per_s']:.2f} | "
                f"{row['measured_per_s']:.2f} | {row['ratio']:.3f} |"
            )
        worst = min(row["ratio"] for row in result["overhead"])
        print(f"smallest ratio {worst:.3f}, goal {GOAL}: {'met' if worst >= GOAL else 'missed'}")
    if "order" in parts:
        result["order"] = order(args.gantt)
        for stage, row in result["order"].items():
            print(f"{stage}: the measured order of tasks is {'' if row['is_same'] else 'not '}the simulated one")
    if "memory" in parts:
        result["memory"] = memory(args.model or list(_MODELS)[1:])
        print(
            "| model | optimizer | N_m | stage | HetPipe's rule MB | promised MB | taken MB | taken / rule | "
            "taken / promised |\n|---|---|---|---|---|---|---|---|---|"
        )
        for row in result["memory"]:
            print(
                f"| {row['model']} | {row['optimizer']} | {row['in_flight']} | {row['stage']} | "
                f"{row['paper_mb']:.0f} | {row['promised_mb']:.0f} | {row['taken_mb']:.0f} | "
                f"{row['paper_ratio']:.2f} | {row['ratio']:.2f} |"
            )
        largest = max(row["ratio"] for row in result["memory"])
        print(f"largest of taken / promised: {largest:.2f}, goal 1: {'met' if largest <= 1 else 'missed'}")
        weights = max(row["paper_ratio"] for row in result["memory"] if row["model"] == "weights")
        print(
            f"an interpreter with its libraries takes {result['memory'][0]['base_mb']:.0f} MB besides; largest of "
            f"taken / rule with the model of weights: {weights:.2f}, goal {RULE_GOAL}: "
            f"{'met' if weights <= RULE_GOAL else 'missed'}"
        )
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
