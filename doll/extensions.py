"""Parts of DOLL that other distributions add by entry points: commands, planners, simulations, pictures, recordings.

`doll-lab`, the folder lab/ of this repository, has those that only studies and reproductions need. DOLL imports none
of them by name: it asks for an entry point when somebody uses the part.
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
    """Whether doll-lab is installed; without a look at entry points, which takes 80 ms."""
    return importlib.util.find_spec(_LAB) is not None


@functools.cache
def find(group: str, name: str) -> Any | None:
    """The object of one entry point; None: it is not installed."""
    if not has_lab():
        return None
    from importlib.metadata import entry_points

    return next((entry.load() for entry in entry_points(group=group, name=name)), None)


def need(group: str, name: str, what: str) -> Any:
    """The object of one entry point; raises ConfigError, for `what` the user has asked for, if it is not installed."""
    part = find(group, name)
    if part is None:
        raise lab_is_missing(what)
    return part


def lab_is_missing(what: str) -> ConfigError:
    """The error that a part of doll-lab is not installed."""
    return ConfigError(f"{what} is in doll-lab, which is not installed: install doll-lab (in a clone: make setup)")
