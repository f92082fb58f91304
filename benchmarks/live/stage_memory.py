"""A model for which no process of a worker has the memory, live: stages train it, the undivided worker cannot.

The digits through layers of one width, one worker, waves of one minibatch. Every process of the worker has the same
limit (`worker.memory_bytes`, RLIMIT_DATA). Three runs of `doll up`: a pipeline under the limit, the undivided worker
under it, and the undivided worker without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.live.experiment import Claim, Options, Report
from benchmarks.process_memory import read_memory
from benchmarks.tables import Table

NAME = "stage_memory"
PAPER = "Park et al. 2020 (HetPipe), sections 1, 4 and 7"
SETTINGS = {"width": "1800", "layers": "8", "stages": "4", "memory_mb": "240", "updates": "8"}

_FILES = (
    "The worker's own process maps the undivided model, the pulled version and the pushed steps from files. The table "
    "counts those pages, which the kernel can take back; the limit (RLIMIT_DATA) does not."
)
_EVERY_S = 0.2
_ANY_BYTES = 1e12  # a limit that is none; it marks the processes of the worker


class Run(NamedTuple):
    """One `doll up`.

    Attributes:
        taken_bytes: of each process of the worker, the most private memory that it had, its own process first.
        error: of the report; "": it succeeded.
    """

    name: str
    exit_code: int
    updates: int
    seconds: float | None
    loss: float | None
    taken_bytes: tuple[int, ...]
    error: str

    @classmethod
    def of(cls, name: str, report: dict[str, Any], taken_bytes: tuple[int, ...]) -> Run:
        return cls(
            name, report["exit_code"], report["updates"], report["training_seconds"], report["best_loss"], taken_bytes,
            (report.get("error") or "").strip().rpartition("\n")[2],  # those before name folders of this machine
        )  # fmt: skip


def run(folder: Path, options: Options) -> Report:
    wish = {key: int(value) for key, value in options.settings.items()}
    if options.quick:
        wish["updates"] = 3
    limit_bytes = 1e6 * wish["memory_mb"]
    pipeline = f"worker.pipeline={{stages: {wish['stages']}}}"
    runs = [
        _up("a pipeline, limited", folder, options, wish, limit_bytes, pipeline),
        _up("undivided, limited", folder, options, wish, limit_bytes),
        _up("undivided, not limited", folder, options, wish, _ANY_BYTES),
    ]
    weights_bytes = 4 * _num_parameters(wish["width"], wish["layers"])
    limited, undivided, _ = runs
    succeeds = limited.exit_code == 0 and limited.updates >= wish["updates"]
    fails = undivided.exit_code != 0 and "out of memory" in undivided.error
    table = Table(
        f"Weights of {weights_bytes / 1e6:.0f} MB, batches of 64, SGD with momentum, {wish['stages']} stages, a limit "
        f"of {wish['memory_mb']} MB for each process, beside what the interpreter and its libraries take; MB are all "
        "private memory, at most",
        ("worker", "result", "updates", "s", "best loss", "its process MB", "stages MB"),
        [_row(each) for each in runs],
    )
    is_shown = succeeds and fails
    claim = Claim(
        "a virtual worker trains a model that is too large for each of its devices", "yes",
        f"under {wish['memory_mb']} MB for each process: the pipeline {'trains' if succeeds else 'does not train'}, "
        f"the undivided worker {'cannot' if fails else 'is not refused'}",
        "reproduced" if is_shown else "not reproduced",
        "" if is_shown else limited.error or "the limit is too large for this model",
    )  # fmt: skip
    says = undivided.error.strip().splitlines() or ["nothing"]
    return Report(
        "A model for which no process of a worker has the memory", [table], options.seeds,
        "one seed: whether a run succeeds is the result", [claim],
        [_FILES, f"The undivided worker under the limit ends with: {says[-1][-700:]}"],
        {"weights_mb": weights_bytes / 1e6, "limit_mb": wish["memory_mb"], "runs": [each._asdict() for each in runs]},
    )  # fmt: skip


def _row(each: Run) -> list[str]:
    own, *stages = each.taken_bytes or (0,)
    loss = "" if each.loss is None else f"{each.loss:.3f}"
    return [
        each.name, "trained" if each.exit_code == 0 else "out of memory" if "out of memory" in each.error else "failed",
        str(each.updates), "" if each.seconds is None else f"{each.seconds:.0f}", loss,
        f"{own / 1e6:.0f}" if own else "",
        ", ".join(f"{taken / 1e6:.0f}" for taken in stages),
    ]  # fmt: skip


def _num_parameters(width: int, layers: int) -> int:
    sizes = [64, *[width] * layers, 10]
    return sum((before + 1) * after for before, after in pairwise(sizes))


def _up(name: str, folder: Path, options: Options, wish: dict[str, int], limit_bytes: float, *changes: str) -> Run:
    """One run, which may fail."""
    changes = (
        "data.workers=1", "data.batch_size=64", "arrivals.rate_per_s=300",
        f"task.args.hidden={[wish['width']] * wish['layers']}", f"seed={options.seeds[0]}",
        "training.optimizer={name: sgd, lr: 0.02, momentum: 0.9}",
        "training.policy={name: wsp, contributions: sum, wave_batches: 1, clock_distance: 0}",
        "stop.accuracy=null", f"stop.updates={wish['updates']}", "evaluation.max_samples=200",
        f"worker.memory_bytes={limit_bytes}", *changes,
    )  # fmt: skip
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "doll", "up", "digits", "--json", "--parent-folder", str(folder), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watched = Watch(process.pid)
        stdout, _ = process.communicate()
        taken_bytes = watched.end()
    return Run.of(name, json.loads(stdout), taken_bytes)


class Watch:
    """The most private memory of each process below another one that has a limit of its data."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._most: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> tuple[int, ...]:
        """Of each, a parent before its children."""
        self._ended.set()
        self._thread.join()
        return tuple(
            self._most[pid] for pid in sorted(self._most, key=lambda pid: (self._parents[pid] in self._most, pid))
        )

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            for pid, parent in _limited_below(self._root):
                with contextlib.suppress(OSError):
                    memory = read_memory(pid)
                    self._parents[pid] = parent
                    self._most[pid] = max(self._most.get(pid, 0), memory.private_bytes + memory.segment_bytes)


def _limited_below(root: int) -> Iterator[tuple[int, int]]:
    """Each process below `root` with a limit of its data, and its parent."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                text = Path("/proc", name, "stat").read_text(encoding="ascii", errors="replace")
                parents[int(name)] = int(text.rpartition(")")[2].split()[1])
    for pid, parent in parents.items():
        at = pid
        while at not in (0, 1, root):
            at = parents.get(at, 0)
        if at != root or pid == root:
            continue
        with contextlib.suppress(OSError):
            lines = Path("/proc", str(pid), "limits").read_text(encoding="ascii", errors="replace").splitlines()
            soft = next(line.split()[3] for line in lines if line.startswith("Max data size"))
            if soft != "unlimited":
                yield pid, parent
