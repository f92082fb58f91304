"""Find parts of DOLL that other distributions add (entry points): commands, planners, simulations, pictures,
recordings.

The distribution `doll-lab` (the folder lab/ of this repository) contains the parts that only studies and reproductions
need. DOLL does not import any of them by name: it loads an entry point when the user needs the part.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, Final

from doll.errors import ConfigError

COMMANDS: Final = "doll.commands"
PICTURES: Final = "doll.pictures"
PLANNERS: Final = "doll.planners"
SIMULATIONS: Final = "doll.simulations"
TRACE_FORMATS: Final = "doll.trace_formats"
_LAB: Final = "doll_lab"


def has_lab() -> bool:
    """Return whether doll-lab is installed. Entry points are not read for this, because reading them takes 80 ms."""
    return importlib.util.find_spec(_LAB) is not None


@functools.cache
def find(group: str, name: str) -> Any | None:
    """Return the object of an entry point, or None if it is not installed."""
    if not has_lab():
        return None
    from importlib.metadata import entry_points

    return next((entry.load() for entry in entry_points(group=group, name=name)), None)


def need(group: str, name: str, what: str) -> Any:
    """Return the object of an entry point. If it is not installed, raise ConfigError, which names `what` the user
    requested."""
    part = find(group, name)
    if part is None:
        raise lab_is_missing(what)
    return part


def lab_is_missing(what: str) -> ConfigError:
    """Return the error that doll-lab is not installed, which names `what` the user requested."""
    return ConfigError(f"{what} is in doll-lab, which is not installed: install doll-lab (in a clone: make setup)")
