"""Which tests `make test-fast` leaves out, decided by what a test uses and not by a list of names.

A test is slow that
- lies in a folder of whole jobs (integration, e2e),
- uses a fixture that starts a server or loads torch in another process,
- lies in a module that starts such a server itself, or that loads torch or Faust: with its own imports, with what these
  import in turn, or in one of its functions,
- took long when all tests were measured (`durations.py`),
- is marked `integration`, `e2e` or `fuzz`, or `slow`: long random runs and simulations, which no import gives away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import durations
import pytest
from import_graph import ImportGraph, When, read_module
from paths import ROOT, SUPPORT

SLOW_FOLDERS = ("integration", "e2e")
SLOW_MARKERS = ("integration", "e2e", "fuzz", "slow")
SERVER_FIXTURES = ("broker", "redis_server", "own_redis", "fork_server")
SERVER_MODULES = ("doll.local.forks", "doll.local.kafka_broker", "doll.local.kafka_cluster", "doll.local.redis_server")
HEAVY_PACKAGES = ("torch", "faust")


def slow_reason(path: Path, fixtures: Iterable[str], markers: Iterable[str]) -> str | None:
    """Why a test in `path` is slow; None: it is fast."""
    for marker in markers:
        if marker in SLOW_MARKERS:
            return f"is marked {marker}"
    for folder in path.relative_to(ROOT / "tests").parts[:-1] if path.is_relative_to(ROOT / "tests") else ():
        if folder in SLOW_FOLDERS:
            return f"lies in {folder}/"
    for fixture in fixtures:
        if fixture in SERVER_FIXTURES:
            return f"uses the fixture {fixture}"
    return module_reason(path)


@cache
def module_reason(path: Path) -> str | None:
    """Why every test of a module is slow; None: none is for the module's sake."""
    module = read_module("test", path)
    # Tests import what they need in their own bodies too.
    imports = tuple(
        replace(imported, when=When.LOAD) if imported.when is When.CALL else imported for imported in module.imports
    )
    for imported in imports:
        if imported.when is When.LOAD and imported.name in SERVER_MODULES:
            return f"starts servers with {imported.name}"
    chains = sources().chains(replace(module, imports=imports))
    for package in HEAVY_PACKAGES:
        if package in chains:
            return f"loads {package} by {' -> '.join(chains[package])}"
    return None


@cache
def sources() -> ImportGraph:
    """All that a test can import from this checkout."""
    return ImportGraph({"doll": ROOT / "doll", "benchmarks": ROOT / "benchmarks", "": SUPPORT})


def mark(items: Iterable[pytest.Item], measured_s: Mapping[str, float]) -> None:
    """Add the marker `slow` to each slow test; its reason is the marker's argument.

    Args:
        measured_s: test functions that took long, and the seconds that they took.
    """
    for item in items:
        fixtures = item.fixturenames if isinstance(item, pytest.Function) else ()
        reason = slow_reason(item.path, fixtures, [marker.name for marker in item.iter_markers()])
        if reason is None and (seconds := measured_s.get(durations.function_of(item.nodeid))) is not None:
            reason = f"took {seconds} s"
        if reason is not None:
            item.add_marker(pytest.mark.slow(reason))
