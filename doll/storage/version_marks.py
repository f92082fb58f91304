"""Aliases and pins of a job's versions, kept beside its checkpoints, and what a version may be named by. Pure.

A store never deletes a version that has an alias or a pin. The file is JSON, so that people can read it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from doll.errors import CheckpointError, ConfigError, VersionUnknownError
from doll.records.bounded import short

MARKS: Final = "marks.json"
"""Name of the file, or object, in any store."""
LATEST: Final = "latest"
_SCHEMA: Final = 1
_ALIAS: Final = re.compile(r"(?!v[0-9]+$)[a-z][a-z0-9_-]{0,62}")
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_NAMED: Final = 20  # versions that a message names

_Version = Annotated[int, msgspec.Meta(ge=0)]


class VersionMarks(msgspec.Struct, frozen=True):
    """Which versions have a name of their own, and which are kept for good."""

    aliases: dict[str, _Version] = {}
    pins: tuple[_Version, ...] = ()  # rising

    @property
    def marked(self) -> frozenset[int]:
        """The versions that are never deleted."""
        return frozenset((*self.aliases.values(), *self.pins))

    def added_since(self, before: VersionMarks) -> frozenset[int]:
        """The versions that have a mark now which they had not before."""
        named = dict(self.aliases.items() - before.aliases.items())
        return frozenset((*named.values(), *(set(self.pins) - set(before.pins))))

    def aliases_of(self, version: int) -> list[str]:
        """The names of a version, sorted."""
        return sorted(name for name, named in self.aliases.items() if named == version)

    def only(self, versions: Collection[int]) -> VersionMarks:
        """Without the marks of other versions."""
        aliases = {name: version for name, version in self.aliases.items() if version in versions}
        return VersionMarks(aliases, tuple(pin for pin in self.pins if pin in versions))

    def with_alias(self, name: str, version: int) -> VersionMarks:
        """`name` is this version's from now on, and not that of another one.

        Raises:
            ConfigError: `name` cannot be an alias.
        """
        return msgspec.structs.replace(self, aliases={**self.aliases, checked_alias(name): version})

    def without_alias(self, name: str) -> VersionMarks:
        """No version has this alias.

        Raises:
            ConfigError: none has it now.
        """
        if name not in self.aliases:
            raise ConfigError(f"expected one of the aliases {_listed(sorted(self.aliases))}, got {short(name)!r}")
        return msgspec.structs.replace(self, aliases={key: at for key, at in self.aliases.items() if key != name})

    def with_pin(self, version: int) -> VersionMarks:
        """This version is kept."""
        return msgspec.structs.replace(self, pins=tuple(sorted({*self.pins, version})))

    def without_pin(self, version: int) -> VersionMarks:
        """This version is not kept for a pin.

        Raises:
            ConfigError: it has none.
        """
        if version not in self.pins:
            raise ConfigError(f"expected one of the pinned versions {_listed(self.pins)}, got {version}")
        return msgspec.structs.replace(self, pins=tuple(pin for pin in self.pins if pin != version))


NO_MARKS: Final = VersionMarks()


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    aliases: dict[str, _Version] = {}
    pins: tuple[_Version, ...] = ()


def encode_marks(marks: VersionMarks) -> bytes:
    """The content of the file."""
    stored = _Stored(schema=_SCHEMA, aliases=dict(sorted(marks.aliases.items())), pins=marks.pins)
    return msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n"


def decode_marks(data: bytes | None, location: str) -> VersionMarks:
    """The marks in the content of the file; none where it is not there.

    Args:
        location: of the file, for messages.

    Raises:
        CheckpointError: it is damaged, or of another release.
    """
    if data is None:
        return NO_MARKS
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(
            f"{location}: expected aliases and pins as doll versions writes them, got {short(exc)}: correct the file, "
            "or move it away to have none"
        ) from exc
    if stored.schema != _SCHEMA:
        raise CheckpointError(
            f"{location}: expected schema {_SCHEMA}, got {stored.schema}: use the release that wrote it"
        )
    return VersionMarks(stored.aliases, tuple(sorted(set(stored.pins))))


def checked_alias(name: str) -> str:
    """`name`, if it can be an alias.

    Raises:
        ConfigError: it cannot: it is a number, could be taken for one, or has characters that a path or an address
            gives a meaning.
    """
    if name == LATEST or not _ALIAS.fullmatch(name):
        raise ConfigError(
            "expected an alias of a-z, 0-9, - and _ that begins with a letter (at most 63, not latest, and not v with "
            f"a number), such as stable, got {short(name)!r}"
        )
    return name


class HoldsVersions(Protocol):
    """What `resolve_version` asks of a checkpoint store."""

    location: str

    def versions(self) -> list[tuple[int, int]]:
        """(term, version) of each checkpoint held, oldest first."""

    def read_marks(self) -> VersionMarks:
        """Aliases and pins."""


def resolve_version(store: HoldsVersions, name: str) -> int:
    """The version that `name` stands for now: `latest`, a number, or an alias.

    Raises:
        VersionUnknownError: there is none of this name, or it is not kept; the message names those that there are.
        CheckpointError: the store cannot be read.
    """
    kept = [version for _, version in store.versions()]
    if not kept:
        raise VersionUnknownError(f"{store.location}: no version is kept: nothing has been learned yet")
    if name == LATEST:
        return kept[-1]
    marks = store.read_marks()
    version = int(name) if _NUMBER.fullmatch(name) else marks.aliases.get(name)
    if version is not None and version in kept:
        return version
    raise VersionUnknownError(unknown_version(store.location, name, kept, marks))


def unknown_version(location: str, wanted: object, kept: Sequence[int], marks: VersionMarks) -> str:
    """The message for a version that is not there."""
    aliases = _listed([f"{alias} (version {version})" for alias, version in sorted(marks.aliases.items())])
    versions = sorted(set(kept))
    more = f"{len(versions) - _NAMED} older ones, " if len(versions) > _NAMED else ""
    return (
        f"{location}: expected a version that is kept ({more}{_listed(versions[-_NAMED:])}), an alias ({aliases}) or "
        f"{LATEST}, got {short(wanted)!r}"
    )


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"
