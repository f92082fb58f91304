"""Extensions that are named in the job file: DOLL's own and extensions of other distributions, found by entry point.

A distribution registers an extension in its metadata; nothing of it is imported until a job names it:

    [project.entry-points."doll.policies"]
    theirs = "their_package.policy:SPEC"
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any

from doll.errors import ConfigError


class Registry:
    """The extensions of one entry point group, by name.

    Attributes:
        group: entry point group in which other distributions register theirs.
        built_in: DOLL's own, as `module:attribute`.
    """

    def __init__(self, group: str, built_in: Mapping[str, str]) -> None:
        self.group = group
        self.built_in = MappingProxyType(dict(built_in))
        self._entry_points = lru_cache(maxsize=1)(self._discover)
        self._loaded: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """Every registered name: DOLL's own first, then the others in alphabetical order."""
        own = tuple(self.built_in)
        return (*own, *sorted(name for name in self._entry_points() if name not in self.built_in))

    def load(self, name: str) -> Any:
        """The object that is registered under `name`.

        Raises:
            KeyError: the name is not registered.
            ConfigError: two distributions register it, or its module cannot be imported.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def origin(self, name: str) -> str:
        """Where the extension comes from, for messages: the distribution, and the entry point's value."""
        point = self._entry_points()[name][0]
        return f"{self.group} entry point {name} = {point.value} of {_distribution(point)}"

    def refresh(self) -> None:
        """Forget what was discovered: distributions were installed or removed since."""
        self._entry_points.cache_clear()
        self._loaded.clear()

    def _load(self, name: str) -> Any:
        points = self._entry_points()[name]
        if len(points) > 1:
            owners = " and ".join(sorted(_distribution(point) for point in points))
            raise ConfigError(
                f"{self.group}: {name!r} is registered by {owners}: expected one; uninstall or rename the other"
            )
        try:
            return points[0].load()
        except Exception as exc:  # other people's code: whatever it raises at import
            raise ConfigError(
                f"cannot load {self.origin(name)}: {type(exc).__name__}: {exc}; update or uninstall this distribution"
            ) from exc

    def _discover(self) -> dict[str, list[EntryPoint]]:
        points = {name: [EntryPoint(name, value, self.group)] for name, value in self.built_in.items()}
        for point in importlib.metadata.entry_points(group=self.group):
            points.setdefault(point.name, []).append(point)
        return points


def _distribution(point: EntryPoint) -> str:
    return "doll" if point.dist is None else f"{point.dist.name} {point.dist.version}"
