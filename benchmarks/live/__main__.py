"""Runs the papers' experiments on real jobs, keeps their figures, and makes docs/live.md from those that are kept.

    python -m benchmarks.live [--only NAME[,NAME]] [--write] [--quick] [--data FOLDER] [--seeds 0,1,2] [--set KEY=VALUE]
    python -m benchmarks.live --list
    python -m benchmarks.live --no-run --write      # the page again, from what is kept

Figures name the commit: where code is not committed, only --quick and --out run.

An experiment whose data is missing, or which cannot be tried on this machine, is skipped with the reason; that is no
failure. benchmarks/live/experiment.py says what a module of an experiment has.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks import results
from benchmarks.live import page
from benchmarks.live.experiment import DATA, Experiment, Options, Skip, experiments

LOOKS = results.RESULTS / "live"  # where --quick keeps its figures: not in Git


def main(arguments: Sequence[str] | None = None, known: Mapping[str, Experiment] | None = None) -> int:
    """Run what the arguments say.

    Args:
        known: the experiments; those of the folder where it is None.

    Returns:
        1 if an experiment has failed, else 0.
    """
    known = experiments() if known is None else known
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"names with commas [all]: {', '.join(known)}")
    parser.add_argument("--list", action="store_true", help="list the experiments, and run nothing")
    parser.add_argument("--write", action="store_true", help="make docs/live.md from all kept figures")
    parser.add_argument("--no-run", action="store_true", help="run nothing: with --write")
    parser.add_argument("--quick", action="store_true", help=f"a look in seconds; figures go to {LOOKS}")
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder of the papers' data sets [{DATA}]")
    parser.add_argument("--seeds", default="", help="numbers with commas [those of the experiment]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of an experiment")
    parser.add_argument("--folder", type=Path, help="keep the run folders here [a temporary folder]")
    parser.add_argument("--out", type=Path, help=f"where figures are kept [{page.RESULTS}]")
    parser.add_argument("--docs", type=Path, default=results.DOCS, help="where live.md is written [docs/]")
    asked = parser.parse_args(arguments)
    if asked.list:
        for experiment in known.values():
            print(f"{experiment.name:16} {experiment.paper}\n{'':16} {experiment.about}")
            for key, value in experiment.settings.items():
                print(f"{'':16} --set {key}={value}")
        return 0
    names = list(known) if not asked.only else asked.only.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown experiment {', '.join(unknown)}: expected some of {', '.join(known)}")
    changes = dict(change.partition("=")[::2] for change in asked.set)
    if unknown := sorted(changes.keys() - {key for name in names for key in known[name].settings}):
        parser.error(f"unknown setting {', '.join(unknown)}: --list shows those of each experiment")
    if asked.quick and asked.write:
        parser.error("--quick and --write: figures of a look do not go into the documents")
    out = asked.out or (LOOKS if asked.quick else page.RESULTS)
    if not (asked.quick or asked.no_run or asked.out):
        results.refuse_dirty()
    line = _command(asked)
    failed = []
    for name in [] if asked.no_run else names:
        experiment = known[name]
        seeds = [int(seed) for seed in asked.seeds.split(",")] if asked.seeds else experiment.seeds
        settings = {key: changes.get(key, value) for key, value in experiment.settings.items()}
        options = Options(asked.data, tuple(seeds), settings, asked.quick)
        if not _run(experiment, options, asked.folder, out, line(name)):
            failed.append(name)
    if asked.write:
        print(f"written: {os.path.relpath(page.write(out, known, asked.docs))}")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def _command(asked: argparse.Namespace) -> Callable[[str], str]:
    """What one types to run a single experiment in the same way."""
    words = [
        *(["--seeds", asked.seeds] if asked.seeds else []),
        *(w for change in asked.set for w in ("--set", change)),
    ]
    return lambda name: f"make paper-live ONLY={name}" + (f' LIVE="{shlex.join(words)}"' if words else "")


def _run(experiment: Experiment, options: Options, folder: Path | None, out: Path, command: str) -> bool:
    """Run one, print and keep what it found; whether it did not fail."""
    print(f"{experiment.name}: {experiment.about}", flush=True)
    begin, load = time.monotonic(), os.getloadavg()[0]
    try:
        if folder is not None:
            (folder / experiment.name).mkdir(parents=True, exist_ok=True)
            report = experiment.run(folder / experiment.name, options)
        else:
            with tempfile.TemporaryDirectory() as temporary:
                report = experiment.run(Path(temporary), options)
    except Skip as reason:
        print(f"{experiment.name}: skipped: {reason}", flush=True)
        return True
    except subprocess.CalledProcessError as error:
        print(f"{experiment.name}: a job failed with exit code {error.returncode}: {shlex.join(map(str, error.cmd))}")
        return False
    print(page.text(report), flush=True)
    content = {
        "name": experiment.name,
        "paper": experiment.paper,
        "date": str(date.today()),
        "commit": results.commit(),
        "cores": os.cpu_count(),
        "load_before": round(load, 1),  # processes that ran or waited in the minute before
        "took_s": round(time.monotonic() - begin, 1),
        "command": command,
        "settings": dict(options.settings),
        "report": report.to_json(),
    }
    print(f"kept: {os.path.relpath(page.keep(out, experiment.name, content))}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
