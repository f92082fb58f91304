"""The recorded markets of a folder: the readable ones, and the skipped ones with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from doll import extensions
from doll.errors import ConfigError
from doll.provisioner.traces.model import AVAILABILITY, POOLS, PRICES, Pool, TraceSet, read_folder
from doll.provisioner.traces.tables import text_lines
from doll.records.bounded import short

_MOST_CHARS: Final = 1000  # of a reason
_SUFFIXES: Final = (".csv", ".jsonl", ".txt", ".json", ".tsv")
_NO_RECORDINGS: Final = ("readme", "license", "licence", "notice", "citation", "on_demand")

Parts = list[tuple[str, str]]
"""Skipped parts of a file, with reasons."""
Loader = Callable[[Path], tuple[list[TraceSet], Parts]]
"""A function that reads one file. Raises `ConfigError` if nothing in it is usable; the message names it."""


@dataclass(frozen=True)
class LeftOut:
    """A skipped file, or a skipped part of a file, with the expected and the actual content, and perhaps a remedy."""

    what: str
    why: str

    def __str__(self) -> str:
        return self.why if self.why.startswith(self.what) else f"{self.what}: {self.why}"


@dataclass
class Survey:
    """The content of a folder."""

    sets: list[TraceSet] = field(default_factory=list)
    skipped: list[LeftOut] = field(default_factory=list)

    def check(self, folder: Path) -> None:
        """Raise ConfigError if no recording is usable; the message lists the skipped files with the reasons."""
        if not self.sets:
            raise no_recordings_error(folder, self.skipped)


def survey(folder: Path) -> Survey:
    """Return all trace sets in `folder` and its sub-folders, in normal form or in a format of doll-lab
    (`doll_lab.traces`) if it is installed. A format is recognised by the first line of a file, otherwise by its name.
    Sets with the same name also get the name of their folder or file. Raises ConfigError if `folder` is not a
    folder."""
    if not folder.is_dir():
        raise ConfigError(f"expected a folder of traces, got {folder}, which is not one; see docs/traces.md")
    result = Survey()
    named: list[tuple[TraceSet, Path]] = []
    for inner in (folder, *(path for path in _listed(folder, result) if path.is_dir())):
        for path, read in _readers(inner, result):
            try:
                sets, parts = read()
            except ConfigError as error:
                result.skipped.append(LeftOut(str(path), short(error, _MOST_CHARS)))
                continue
            named += [(recorded, path) for recorded in sets]
            result.skipped += [LeftOut(f"{path}: {short(what)}", short(why, _MOST_CHARS)) for what, why in parts]
    result.sets = _of_different_names(folder, named)
    return result


def load(folder: Path) -> list[TraceSet]:
    """Return the trace sets that `survey` reads, at least one. Raises ConfigError as `Survey.check` does."""
    result = survey(folder)
    result.check(folder)
    return result.sets


def pool_of(folder: Path, name: str | None, asked_by: str) -> Pool:
    """Return one pool of the recordings in a folder: the pool `name`, or the first one if it is None. `asked_by` is the
    option or key that names the pool, for messages. Raises ConfigError if no recording, or not this pool, is usable."""
    pools: dict[str, Pool] = {}
    result = survey(folder)
    result.check(folder)
    for pool in (pool for recorded in result.sets for pool in recorded.pools):
        pools.setdefault(pool.name, pool)
    chosen = next(iter(pools.values())) if name is None else pools.get(name)
    if chosen is None:
        names = sorted(pools)
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        left = "".join(f"\n{line}" for line in left_out_text(result.skipped).splitlines())
        raise ConfigError(f"{asked_by}: expected one of {shown}; got {name}{left}")
    return chosen


def no_recordings_error(folder: Path, skipped: Sequence[LeftOut]) -> ConfigError:
    """Return the error for a folder without a usable set."""
    if skipped:
        return ConfigError(f"{folder}: nothing in it can be used:\n" + left_out_text(skipped))
    return ConfigError(
        f"{folder}: expected {POOLS} with {PRICES} or {AVAILABILITY} (docs/traces.md), found neither that nor a known "
        "data set"
    )


def left_out_text(skipped: Sequence[LeftOut], at_most: int = 20) -> str:
    """Return one line of text for each skipped file."""
    lines = [f"skipped: {item}" for item in skipped[:at_most]]
    more = len(skipped) - at_most
    return "\n".join([*lines, f"skipped: {more} more; --json lists them all"] if more > 0 else lines)


def _listed(folder: Path, result: Survey) -> list[Path]:
    """Return the entries of a folder in order. If it cannot be listed, return no entries and add it to `result`."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        result.skipped.append(LeftOut(str(folder), f"cannot be listed: {error.strerror or error}"))
        return []


Read = Callable[[], tuple[list[TraceSet], Parts]]


def _readers(folder: Path, result: Survey) -> Iterable[tuple[Path, Read]]:
    """Return the files to read in one folder, without its sub-folders."""
    files = [path for path in _listed(folder, result) if path.is_file()]
    names = {path.name for path in files}
    of_the_form = {POOLS, PRICES, AVAILABILITY} if names & {POOLS, f"{POOLS}.gz"} else set()
    if of_the_form:
        pools = folder / POOLS if POOLS in names else folder / f"{POOLS}.gz"
        yield pools, lambda: read_folder(folder)
    for path in files:
        plain = path.name.removesuffix(".gz")
        if plain in of_the_form or not plain.lower().endswith(_SUFFIXES):
            continue
        if plain.lower().startswith(_NO_RECORDINGS):
            continue
        if plain != path.name and plain in names:
            result.skipped.append(LeftOut(str(path), f"{plain} beside it is read instead"))
            continue
        loader = _loader_of(path, plain, result)
        if loader is not None:
            yield path, lambda path=path, loader=loader: loader(path)  # type: ignore[misc]


def _loader_of(path: Path, plain: str, result: Survey) -> Loader | None:
    """Return the loader of the file. If no loader reads it, returns None and adds an entry to `result`."""
    try:
        first = next((line for line in text_lines(path) if line.strip()), "")
    except ConfigError as error:
        result.skipped.append(LeftOut(str(path), str(error)))
        return None
    loader_of = extensions.find(extensions.TRACE_FORMATS, "public")
    loader: Loader | None = loader_of and loader_of(first, plain)
    if loader is None:
        why = f"of no form that is known (docs/traces.md); it begins with {short(first, 60)!r}" if first else "empty"
        if plain in (PRICES, AVAILABILITY):
            why = f"expected {POOLS} beside it, or a recording of a known form (docs/traces.md); {why}"
        if loader_of is None:
            why += "; doll-lab, which reads public data sets, is not installed"
        result.skipped.append(LeftOut(str(path), why))
    return loader


def _of_different_names(folder: Path, named: Sequence[tuple[TraceSet, Path]]) -> list[TraceSet]:
    """Add the name of their folder or file to sets with the same name, so that --trace-set can choose one."""
    count = Counter(recorded.name for recorded, _ in named)
    used: Counter[str] = Counter()
    renamed = []
    for recorded, path in named:
        name = recorded.name
        if count[name] > 1:
            beside = path.parent.relative_to(folder)
            name = f"{name} ({beside if str(beside) != '.' else path.name})"
            used[name] += 1
            name += f" {used[name]}" if used[name] > 1 else ""
        renamed.append(replace(recorded, name=name))
    return renamed
