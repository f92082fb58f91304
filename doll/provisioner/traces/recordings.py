"""The recorded markets of a folder, each judged by itself: what can be read, and what was left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from doll.bounded import short
from doll.errors import ConfigError
from doll.provisioner.traces import datasets
from doll.provisioner.traces.model import AVAILABILITY, POOLS, PRICES, Pool, TraceSet, read_folder
from doll.provisioner.traces.tables import text_lines

_MOST_CHARS: Final = 1000  # of a reason
_SUFFIXES: Final = (".csv", ".jsonl", ".txt", ".json", ".tsv")
_NO_RECORDINGS: Final = ("readme", "license", "licence", "notice", "citation", datasets.ON_DEMAND.split(".")[0])


@dataclass(frozen=True)
class LeftOut:
    """Something that was looked at and not used.

    Attributes:
        what: the file, and where only a part of it is left out, which.
        why: what was expected, what came, and what to do where that helps.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return self.why if self.why.startswith(self.what) else f"{self.what}: {self.why}"


@dataclass
class Survey:
    """What a folder holds."""

    sets: list[TraceSet] = field(default_factory=list)
    skipped: list[LeftOut] = field(default_factory=list)


def survey(folder: Path) -> Survey:
    """All trace sets in `folder` and its sub-folders: normal form, or a public data set that is known by its form.

    A file is known by what is in it, whatever its name. Sets of one name get the name of their folder or file too.

    Raises:
        ConfigError: this is no folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"expected a folder of traces, got {folder}, which is not one; see docs/traces.md")
    found = Survey()
    named: list[tuple[TraceSet, Path]] = []
    for inner in (folder, *_folders(folder, found)):
        for path, read in _readers(inner, found):
            try:
                sets, parts = read()
            except ConfigError as error:
                found.skipped.append(LeftOut(str(path), short(error, _MOST_CHARS)))
                continue
            named += [(one, path) for one in sets]
            found.skipped += [LeftOut(f"{path}: {short(what)}", short(why, _MOST_CHARS)) for what, why in parts]
    found.sets = _of_different_names(folder, named)
    return found


def select(folder: Path, surveyed: Survey, parts: Sequence[str] | None) -> Survey:
    """The trace sets whose name contains one of `parts`; all without parts. What was left out stays in it.

    Args:
        folder: what was surveyed, for messages.

    Raises:
        ConfigError: nothing in the folder can be used, or no set has such a name.
    """
    if not surveyed.sets:
        raise no_recordings_error(folder, surveyed.skipped)
    if not parts:
        return surveyed
    sets = [recorded for recorded in surveyed.sets if any(part in recorded.name for part in parts)]
    if not sets:
        names = ", ".join(recorded.name for recorded in surveyed.sets)
        raise ConfigError(
            f"--trace-set: no trace set of {folder} has {' or '.join(parts)} in its name; there are {names}"
            + "".join(f"\n{line}" for line in left_out_text(surveyed.skipped).splitlines())
        )
    return Survey(sets, surveyed.skipped)


def load(folder: Path) -> list[TraceSet]:
    """The trace sets that `survey` finds, at least one.

    Raises:
        ConfigError: there is none; the message says what was looked at and why it was left out.
    """
    found = survey(folder)
    if not found.sets:
        raise no_recordings_error(folder, found.skipped)
    return found.sets


def pool_of(folder: Path, name: str | None, asked_by: str) -> Pool:
    """One pool of the recordings in a folder: by its name, else the first.

    Args:
        asked_by: the option or key that names it, for the message.

    Raises:
        ConfigError: there is none, or not this one; what was left out is said.
    """
    found = survey(folder)
    if not found.sets:
        raise no_recordings_error(folder, found.skipped)
    pools: dict[str, Pool] = {}
    for pool in (pool for one in found.sets for pool in one.pools):
        pools.setdefault(pool.name, pool)
    chosen = next(iter(pools.values())) if name is None else pools.get(name)
    if chosen is None:
        names = sorted(pools)
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        left = "".join(f"\n{line}" for line in left_out_text(found.skipped).splitlines())
        raise ConfigError(f"{asked_by}: expected one of {shown}; got {name}{left}")
    return chosen


def no_recordings_error(folder: Path, skipped: Sequence[LeftOut]) -> ConfigError:
    """The error that no set can be used."""
    if skipped:
        return ConfigError(f"{folder}: nothing in it can be used:\n" + left_out_text(skipped))
    return ConfigError(
        f"{folder}: expected {POOLS} with {PRICES} or {AVAILABILITY} (docs/traces.md), found neither that nor a known "
        "data set"
    )


def left_out_text(skipped: Sequence[LeftOut], at_most: int = 20) -> str:
    """One line for each, for people."""
    lines = [f"skipped: {one}" for one in skipped[:at_most]]
    more = len(skipped) - at_most
    return "\n".join([*lines, f"skipped: {more} more; --json lists them all"] if more > 0 else lines)


def _folders(folder: Path, found: Survey) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError as error:
        found.skipped.append(LeftOut(str(folder), f"cannot be listed: {error.strerror or error}"))
        return []


Read = Callable[[], tuple[list[TraceSet], list[tuple[str, str]]]]


def _readers(folder: Path, found: Survey) -> Iterable[tuple[Path, Read]]:
    """What is to be read in one folder, without its sub-folders."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        found.skipped.append(LeftOut(str(folder), f"cannot be listed: {error.strerror or error}"))
        return
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
            found.skipped.append(LeftOut(str(path), f"{plain} beside it is read instead"))
            continue
        loader = _loader_of(path, plain, found)
        if loader is not None:
            yield path, lambda path=path, loader=loader: loader(path)  # type: ignore[misc]


def _loader_of(path: Path, plain: str, found: Survey) -> datasets.Loader | None:
    """Who reads the file: by its first line, else by the name under which it was published."""
    try:
        first = next((line for line in text_lines(path) if line.strip()), "")
    except ConfigError as error:
        found.skipped.append(LeftOut(str(path), str(error)))
        return None
    loader = datasets.of_form(first) or datasets.of_name(plain)
    if loader is None:
        why = f"of no form that is known (docs/traces.md); it begins with {short(first, 60)!r}" if first else "empty"
        if plain in (PRICES, AVAILABILITY):
            why = f"expected {POOLS} beside it, or a recording of a known form (docs/traces.md); {why}"
        found.skipped.append(LeftOut(str(path), why))
    return loader


def _of_different_names(folder: Path, named: Sequence[tuple[TraceSet, Path]]) -> list[TraceSet]:
    """Sets that share a name are told apart by their file, as is needed to choose one with --trace-set."""
    count = Counter(one.name for one, _ in named)
    used: Counter[str] = Counter()
    found = []
    for one, path in named:
        name = one.name
        if count[name] > 1:
            beside = path.parent.relative_to(folder)
            name = f"{name} ({beside if str(beside) != '.' else path.name})"
            used[name] += 1
            name += f" {used[name]}" if used[name] > 1 else ""
        found.append(replace(one, name=name))
    return found
