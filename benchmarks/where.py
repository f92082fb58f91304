"""Where the time goes: CPU time of one row of section A by process and thread, and the Python functions that use it.

    python -m benchmarks.where [--model small] [--group-size 8] [--seconds 10] [--docs]     (or `make bench-where`)

Functions need py-spy, which is among the development packages, and the right to trace other processes (root, or
kernel.yama.ptrace_scope = 0). They come from a second run: sampling slows a process down.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, LearningResult, Observer
from benchmarks.pipeline import BATCH, CHANNELS, GROUP_SIZES, MODELS, Runner
from benchmarks.results import DOCS, commit, keep, update_section
from benchmarks.shares import gradient_share
from benchmarks.tables import Table
from benchmarks.threads import ThreadSampler, ThreadUse

MARK, COMMAND = "where", "make bench-where BENCH=--docs"
_LABELS = {("worker", "main"): "event loop", ("ps", "main"): "loop", ("redis", "main"): "redis-server"}
_LIBRDKAFKA = "rdk:"  # its threads are rdk:main and rdk:broker<number>
_ORDER = ("worker", "ps", "kafka", "redis", "bench", "other processes", "idle")
_LEAST_SHARE = 0.0005  # of both cores; smaller rows of a process become one
_FUNCTIONS = 12
_RATE_HZ = 200


def by_thread(
    uses: Mapping[tuple[str, str], ThreadUse], gradient_s: float, others_s: float, seconds: float, cores: int
) -> list[tuple[str, str, ThreadUse]]:
    """Rows (process, thread, use) that add up to all cores: observed threads, other processes, idle.

    Args:
        uses: by process and thread; a process's name ends at its first hyphen.
        gradient_s: CPU time of gradients, a part of the workers' torch threads.
        others_s: CPU time of processes that were not observed.
    """
    rows: dict[tuple[str, str], ThreadUse] = {}

    def add(process: str, thread: str, use: ThreadUse) -> None:
        row = rows.setdefault((process, thread), ThreadUse())
        row.cpu_s += use.cpu_s
        row.wait_s += use.wait_s

    for (name, thread), use in uses.items():
        process = name.split("-")[0]
        if (process, thread) == ("worker", "torch"):
            continue
        label = "librdkafka" if thread.startswith(_LIBRDKAFKA) else _LABELS.get((process, thread), thread)
        add(process, label if use.cpu_s >= _LEAST_SHARE * seconds * cores else "other threads", use)
    torch = [use for (name, thread), use in uses.items() if name.split("-")[0] == "worker" and thread == "torch"]
    torch_s, wait_s = sum(use.cpu_s for use in torch), sum(use.wait_s for use in torch)
    add("worker", "torch: gradients", ThreadUse(gradient_s, wait_s))
    add("worker", "torch: weights, sums, blobs", ThreadUse(max(0.0, torch_s - gradient_s)))
    used_s = sum(use.cpu_s for use in rows.values()) + others_s
    add("other processes", "", ThreadUse(others_s))
    add("idle", "", ThreadUse(max(0.0, seconds * cores - used_s)))
    place = {process: number for number, process in enumerate(_ORDER)}
    ordered = sorted(rows.items(), key=lambda item: (place.get(item[0][0], len(place)), -item[1].cpu_s))
    return [(process, thread, use) for (process, thread), use in ordered]


def thread_table(
    rows: Iterable[tuple[str, str, ThreadUse]], title: str, seconds: float, cores: int, batches: int
) -> Table:
    """CPU time by thread: in percent of all cores, and per batch."""
    table = Table(title, ("process", "thread", "of the cores", "ms per batch", "waits for a core, ms per batch"))
    for process, thread, use in rows:
        waits = f"{1e3 * use.wait_s / batches:.2f}" if use.wait_s else ""
        share = f"{use.cpu_s / (seconds * cores):.1%}"
        table.rows.append((process, thread, share, f"{1e3 * use.cpu_s / batches:.2f}", waits))
    return table


def by_function(lines: Iterable[str]) -> Counter[tuple[str, str]]:
    """Samples by (thread, function that ran), of py-spy's raw format: `thread;caller;callee 12` a line."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        stack, _, count = line.strip().rpartition(" ")
        frames = stack.split(";")
        if len(frames) < 2 or not count.isdigit():
            continue
        thread = frames[0].strip('"').removeprefix("thread").split(":")[-1].strip(' ()"')
        counts[thread, frames[-1]] += int(count)
    return counts


def function_table(counts: Mapping[str, Counter[tuple[str, str]]], title: str) -> Table:
    """The functions with the most samples of each process."""
    table = Table(title, ("process", "thread", "function", "samples", "of the process's"))
    for process, counter in counts.items():
        total = counter.total()
        for (thread, function), count in counter.most_common(_FUNCTIONS):
            table.rows.append((process, thread, f"`{function}`", f"{count:,}", f"{count / total:.1%}"))
    return table


class FunctionSampler:
    """`Observer` that runs py-spy on one worker and the parameter server.

    Attributes:
        counts: by process, as of `by_function`.
    """

    def __init__(self, py_spy: str, folder: Path, seconds: float, say: Callable[[str], None]) -> None:
        self._py_spy = py_spy
        self._folder = folder
        self._seconds = seconds
        self._say = say
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.counts: dict[str, Counter[tuple[str, str]]] = {}

    def begin(self, processes: Mapping[int, str]) -> None:
        for pid, name in processes.items():
            if name in ("worker-0", "ps"):
                command = [
                    self._py_spy, "record", "--pid", str(pid), "--nonblocking", "--threads", "--function",
                    "--format", "raw", "--rate", str(_RATE_HZ), "--duration", str(max(1, round(self._seconds))),
                    "--output", str(self._folder / f"{name}.txt"),
                ]  # fmt: skip
                with (self._folder / f"{name}.log").open("wb") as log:
                    self._running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def note(self) -> None:
        pass

    def end(self) -> None:
        for name, process in self._running.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)
            process.kill()
            output = self._folder / f"{name}.txt"
            if output.exists():
                self.counts[name] = by_function(output.read_text(encoding="utf-8").splitlines())
            else:
                log = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                self._say(f"py-spy has no samples of {name}: {log.strip()[-300:]}")


def measure(runner: Runner, args: argparse.Namespace, say: Callable[[str], None]) -> list[Table]:
    """Both tables; only the first where py-spy is not installed or not permitted."""
    rate = runner.bench.bare(MODELS[args.model], 3.0).samples_per_s
    updates = max(12, round(rate * (args.seconds + 3.0) / (args.group_size * BATCH)))

    def learn(observer: Observer) -> LearningResult:
        return runner.learn(args.model, args.group_size, updates, observer)

    return tables_of(learn, _row(args), say, seconds=args.seconds, functions=not args.no_functions)


def tables_of(
    learn: Callable[[Observer], LearningResult], what: str, say: Callable[[str], None], *, seconds: float,
    functions: bool = True,
) -> list[Table]:  # fmt: skip
    """CPU time of a run by thread, and of a second one by Python function.

    Args:
        learn: runs DOLL.
        what: it runs.
        seconds: of the second run that are sampled.
    """
    sampler, cores = ThreadSampler(), os.cpu_count() or 1
    learned = learn(sampler)
    batches = sum(len(update.members) for update in learned.updates)
    share = gradient_share(learned.gradients, sampler.began_s, sampler.began_s + sampler.seconds)
    gradient_s = share * len(learned.gradients) * sampler.seconds
    rows = by_thread(sampler.uses, gradient_s, sampler.others_s, sampler.seconds, cores)
    title = f"CPU time by process and thread, {what}, {_figures(learned)}"
    tables = [thread_table(rows, title, sampler.seconds, cores, batches)]
    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if not functions or py_spy is None:
        say("no table of functions: " + ("--no-functions" if py_spy else "py-spy is not installed"))
        return tables
    with tempfile.TemporaryDirectory(prefix="doll-where-") as folder:
        spy = FunctionSampler(py_spy, Path(folder), seconds, say)
        learn(spy)
    if spy.counts:
        tables.append(function_table(spy.counts, f"Python functions by CPU samples ({_RATE_HZ} per second)"))
    return tables


def _row(args: argparse.Namespace) -> str:
    return f"{args.model} K = {args.group_size}" + (f", control channel `{args.channel}`" if args.channel else "")


def _figures(learned: LearningResult) -> str:
    return f"{learned.samples_per_s:,.0f} samples/s, share {learned.share:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.where", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two runs; default 10")
    parser.add_argument("--channel", choices=CHANNELS, help="`control.kind`; default: the job file's")
    parser.add_argument("--cold", action="store_true", help="do not warm the broker")
    parser.add_argument("--no-functions", action="store_true", help="only the table by thread")
    parser.add_argument("--docs", action="store_true", help="put the table by thread into docs/benchmarks.md")
    args = parser.parse_args(argv)
    began, load = datetime.now(), os.getloadavg()[0]

    def say(text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)

    with Bench(say) as bench:
        runner = Runner(bench, args, say)
        if not args.cold:
            runner.warm()
        tables = measure(runner, args, say)
    when = f"{began:%Y-%m-%d %H:%M}, commit {commit()}, {os.cpu_count()} cores, load {load:.2f} before it began."
    result: dict[str, Any] = {"conditions": when, "tables": [vars(table) for table in tables]}
    path = keep(f"where-{began:%Y%m%d-%H%M%S}", result)
    text = "\n".join([when, *(table.text(120) for table in tables)])
    path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\nwritten: {os.path.relpath(path)} and {path.with_suffix('.txt').name}")
    if args.docs:
        update_section(DOCS / "benchmarks.md", MARK, COMMAND, f"{when}\n\n{tables[0].markdown()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
