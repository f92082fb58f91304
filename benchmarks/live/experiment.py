"""What an experiment on real jobs is: a module of this folder with the names of `Experiment`, and what it reports.

A module looks so:

    NAME = "vap"                              # of `make paper-live ONLY=vap`
    PAPER = "Dai et al. 2015, section 4"      # where the claim stands
    SETTINGS = {"bounds": "0.01,0.1"}         # defaults of what `--set bounds=...` changes; may be left out
    SEEDS = (0, 1, 2)                         # default of `--seeds`; may be left out: (0,)

    def run(folder: Path, options: Options) -> Report: ...   # minutes; run folders go into `folder`
    def draw(figure: Figure, data: dict[str, Any]) -> None: ...  # from `Report.data`; may be left out: no picture

`run` raises `Skip` where it cannot be tried here. A picture is drawn from the kept data, so that a page of documents
can be made again without another run.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.tables import Table

DATA: Final = Path(__file__).parents[3] / "shared" / "data"
JOBS: Final = Path(__file__).parents[2] / "examples"

Verdict = Literal["reproduced", "not reproduced", "cannot be tried here"]


class Skip(Exception):
    """An experiment cannot be tried here; the message says why, and what it expects where."""


@dataclass(frozen=True, slots=True)
class Options:
    """How an experiment is run.

    Attributes:
        data: folder of the papers' data sets.
        seeds: one run of each row for each of them.
        settings: those of the module, all of them, as text.
        quick: a look in seconds; its figures are not kept.
    """

    data: Path = DATA
    seeds: Sequence[int] = (0,)
    settings: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False

    def file(self, name: str, what: str) -> Path:
        """A file of the data folder.

        Args:
            name: its path there.
            what: what it is, for whoever does not have it.

        Raises:
            Skip: it is not there.
        """
        path = (self.data / name).resolve()
        if not path.is_file():
            raise Skip(f"{path}: expected {what}; put it there, or name another folder with --data")
        return path


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of "claim of the paper, ours, verdict".

    Attributes:
        why: the cause, where the verdict is not `reproduced`.
    """

    claim: str
    paper: str
    ours: str
    verdict: Verdict
    why: str = ""

    def __post_init__(self) -> None:
        if self.verdict != "reproduced" and not self.why:
            raise ValueError(f"{self.claim}: expected the reason why it is {self.verdict}")


@dataclass(frozen=True, slots=True)
class Report:
    """What an experiment found.

    Attributes:
        title: heading of its section.
        tables: its rows; the title of each says what they are.
        seeds: those that were run.
        spread: what stands beside a mean and over what, for example "standard deviation over 3 seeds"; where there is
            one seed, why that is enough or that it is not.
        claims: what the paper says, and whether it is so here.
        notes: sentences under the tables.
        data: what `draw` needs, and whatever else should be kept; JSON.
    """

    title: str
    tables: Sequence[Table]
    seeds: Sequence[int]
    spread: str
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds or not self.spread:
            raise ValueError(f"{self.title}: expected the seeds that were run, and what the spread of figures is")

    def to_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        return asdict(self)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Report:
        """From `to_json`."""
        tables = [Table(**table) for table in kept["tables"]]
        claims = [Claim(**claim) for claim in kept["claims"]]
        return cls(kept["title"], tables, kept["seeds"], kept["spread"], claims, kept["notes"], kept["data"])


@dataclass(frozen=True, slots=True)
class Experiment:
    """A module that keeps to the interface."""

    name: str
    paper: str
    about: str  # the first line of the module's docstring
    settings: Mapping[str, str]
    seeds: Sequence[int]
    run: Callable[[Path, Options], Report]
    draw: Callable[[Any, dict[str, Any]], None] | None

    @classmethod
    def of(cls, module: Any) -> Experiment:
        """Raises:
        AttributeError: the module lacks a name of the interface.
        """
        about = (module.__doc__ or "").strip().partition("\n")[0]
        settings, seeds = getattr(module, "SETTINGS", {}), getattr(module, "SEEDS", (0,))
        return cls(module.NAME, module.PAPER, about, settings, seeds, module.run, getattr(module, "draw", None))


def experiments() -> dict[str, Experiment]:
    """Those of this folder by name, in alphabetical order."""
    return {experiment.name: experiment for experiment in sorted(_modules(), key=lambda each: each.name)}


def _modules() -> Iterator[Experiment]:
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not info.name.startswith("__"):  # to import __main__ would run it
            module = importlib.import_module(f"benchmarks.live.{info.name}")
            if hasattr(module, "NAME"):
                yield Experiment.of(module)


def up(job: Path | str, folder: Path, changes: Sequence[str] = (), *words: str, command: str = "up") -> dict[str, Any]:
    """One `doll up`, in a process of its own; its report.json.

    Args:
        job: a job file, or the name of an example.
        folder: its run folder is created in it.
        changes: `key=value` of the job file.
        words: further options of the command.
        command: another one that runs a job and takes the same options, such as `spot`.

    Raises:
        subprocess.CalledProcessError: the run has failed; its log stands in its run folder.
    """
    options = [word for change in changes for word in ("--set", change)]
    line = [sys.executable, "-m", "doll", command, str(job), "--json", "--parent-folder", str(folder), *options, *words]
    done = subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def mean_sd(values: Sequence[float], digits: int) -> str:
    """Mean and, where there are several values, ± their sample standard deviation; infinity: a goal was not reached."""
    if missed := sum(map(math.isinf, values)):
        return "not reached" + (f" by {missed} of {len(values)}" if len(values) > 1 else "")
    mean = statistics.fmean(values) if values else math.nan
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{spread}"
