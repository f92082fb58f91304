"""Aliases and pins of a job's versions, and the rule that decides which checkpoints are kept. Pure.

Three kinds of checkpoints are kept: the newest ones (`checkpoint.keep`), all with an alias or a pin, and one of each
interval `checkpoint.history_every_s` for `checkpoint.history_s` seconds.

The aliases and pins are in a JSON file beside the checkpoints, so that people can read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from doll.errors import CheckpointError, ConfigError
from doll.records.bounded import short

MARKS: Final = "marks.json"  # name of the file, or object, in any store
LATEST: Final = "latest"
_SCHEMA: Final = 1
_WITH_GATES: Final = 2
_ALIAS: Final = re.compile(r"(?!v[0-9]+$)[a-z][a-z0-9_-]{0,62}")
_NAMED: Final = 20  # maximum number of versions that a message lists

_Version = Annotated[int, msgspec.Meta(ge=0)]


class Check(msgspec.Struct, frozen=True):
    """One check of a version: its name, whether the version has passed it, and the figures."""

    name: str
    passed: bool
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """Whether a version may have the alias of the gates. `against`: the alias's version with which it was compared."""

    version: _Version
    against: _Version | None
    time_s: float
    passed: bool
    checks: tuple[Check, ...] = ()

    def text(self) -> str:
        """Return the reason in one line."""
        failed = [f"{check.name}: {check.text}" for check in self.checks if not check.passed]
        return f"held back ({'; '.join(failed)})" if failed else "passed all checks"


class VersionMarks(msgspec.Struct, frozen=True):
    """The aliases of versions, and the pinned versions, which are kept permanently.

    Attributes:
        verdicts: those of the gates, of versions that were kept, in their order.
        moved_s: Unix time of the last move of an alias by gates.
        frozen: aliases that gates must not move, with the reason.
        reasons: why a person has moved an alias; gone when it moves again.
    """

    aliases: dict[str, _Version] = {}
    pins: tuple[_Version, ...] = ()  # ascending
    verdicts: tuple[Verdict, ...] = ()
    moved_s: dict[str, float] = {}
    frozen: dict[str, str] = {}
    reasons: dict[str, str] = {}

    def verdict_of(self, version: int) -> Verdict | None:
        return next((item for item in self.verdicts if item.version == version), None)

    def judged(
        self, alias: str, verdict: Verdict, kept: Collection[int], *, min_interval_s: float = 0.0,
        keeps_before: bool = False,
    ) -> VersionMarks:  # fmt: skip
        """Return these marks with a verdict, after which the alias moves if the version has passed, nobody has frozen
        or moved the alias since it was judged, and the last move is long enough ago.

        Args:
            kept: versions that exist.
            keeps_before: whether the alias `before(alias)` gets the version that has had the alias until now.
        """
        others = (item for item in self.verdicts if item.version in kept and item.version != verdict.version)
        marks = msgspec.structs.replace(self, verdicts=(*others, verdict))
        # A clock that was set back must not hold the alias for long.
        is_due = not 0 <= verdict.time_s - self.moved_s.get(alias, -math.inf) < min_interval_s
        named = self.aliases.get(alias)
        if named not in kept:  # somebody has deleted its checkpoint: there was none to compare with
            named = None
        if not verdict.passed or not is_due or alias in self.frozen or named != verdict.against:
            return marks
        if keeps_before and named is not None:
            marks = marks.with_alias(before(alias), named)
        moved_s = {**self.moved_s, alias: verdict.time_s}
        return msgspec.structs.replace(marks.with_alias(alias, verdict.version), moved_s=moved_s)

    def moved_back(self, alias: str, version: int, check: Check, kept: Collection[int]) -> VersionMarks:
        """Return these marks with the alias at the version that had it before, frozen, and the failed check in the
        verdict of `version`; the same marks if the alias is not at `version` any more, if people have frozen or moved
        it, or if there is no version before."""
        verdict, to = self.verdict_of(version), self.aliases.get(before(alias))
        is_at = self.aliases.get(alias) == version and alias not in self.frozen and alias not in self.reasons
        if not is_at or verdict is None or to not in kept or to == version:
            return self
        assert to is not None
        failed = msgspec.structs.replace(verdict, passed=False, checks=(*verdict.checks, check))
        others = (item for item in self.verdicts if item.version != version)
        marks = msgspec.structs.replace(self, verdicts=(*others, failed))
        reason = f"version {version} was moved back, {check.name}: {check.text}"
        return marks.with_alias(alias, to).with_freeze(alias, reason)

    def with_freeze(self, alias: str, reason: str | None) -> VersionMarks:
        """Return these marks with an alias that gates must not move; reason None: they may again."""
        others = {name: text for name, text in self.frozen.items() if name != alias}
        return msgspec.structs.replace(self, frozen=others if reason is None else {**others, alias: reason})

    @property
    def marked(self) -> frozenset[int]:
        """The versions that are never deleted."""
        return frozenset((*self.aliases.values(), *self.pins))

    def added_since(self, before: VersionMarks) -> frozenset[int]:
        """Return the versions that have a mark in this object and none in `before`."""
        named = dict(self.aliases.items() - before.aliases.items())
        return frozenset((*named.values(), *(set(self.pins) - set(before.pins))))

    def aliases_of(self, version: int) -> list[str]:
        """Return the aliases of a version, sorted."""
        return sorted(name for name, named in self.aliases.items() if named == version)

    def only(self, versions: Collection[int]) -> VersionMarks:
        """Return only the marks of these versions."""
        aliases = {name: version for name, version in self.aliases.items() if version in versions}
        pins = tuple(pin for pin in self.pins if pin in versions)
        verdicts = tuple(item for item in self.verdicts if item.version in versions)
        return msgspec.structs.replace(self, aliases=aliases, pins=pins, verdicts=verdicts)

    def with_alias(self, name: str, version: int, reason: str = "") -> VersionMarks:
        """Return these marks with alias `name` at `version`, for this reason. Raise ConfigError if `name` is not a
        valid alias."""
        reasons = {key: text for key, text in self.reasons.items() if key != name} | ({name: reason} if reason else {})
        return msgspec.structs.replace(self, aliases={**self.aliases, checked_alias(name): version}, reasons=reasons)

    def without_alias(self, name: str) -> VersionMarks:
        """Return these marks without this alias. Raise ConfigError if no version has it."""
        if name not in self.aliases:
            raise ConfigError(f"expected one of the aliases {_listed(sorted(self.aliases))}, got {short(name)!r}")
        return msgspec.structs.replace(self, aliases={key: at for key, at in self.aliases.items() if key != name})

    def with_pin(self, version: int) -> VersionMarks:
        """Return these marks with a pin of this version."""
        return msgspec.structs.replace(self, pins=tuple(sorted({*self.pins, version})))

    def without_pin(self, version: int) -> VersionMarks:
        """Return these marks without the pin of this version. Raise ConfigError if the version has no pin."""
        if version not in self.pins:
            raise ConfigError(f"expected one of the pinned versions {_listed(self.pins)}, got {version}")
        return msgspec.structs.replace(self, pins=tuple(pin for pin in self.pins if pin != version))


NO_MARKS: Final = VersionMarks()


def before(alias: str) -> str:
    """Return the alias of the version that had `alias` before."""
    return f"{alias[:56]}-before"


class _StoredMarks(VersionMarks, frozen=True, kw_only=True):
    schema: int


def encode_marks(marks: VersionMarks) -> bytes:
    """Return the content of the file."""
    stored = {"schema": _SCHEMA, "aliases": dict(sorted(marks.aliases.items())), "pins": marks.pins}
    # A release before the gates would lose these marks, so it must not read them.
    if marks.verdicts or marks.moved_s or marks.frozen or marks.reasons:
        more = {name: value for name, value in msgspec.structs.asdict(marks).items() if value}
        stored = {**stored, **more, "schema": _WITH_GATES}
    return msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n"


def decode_marks(data: bytes | None, location: str) -> VersionMarks:
    """Return the marks in the content of the file at `location`; no marks if it does not exist. Raise CheckpointError
    if it is damaged or of another release."""
    if data is None:
        return NO_MARKS
    try:
        stored = msgspec.json.decode(data, type=_StoredMarks)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(
            f"{location}: expected aliases and pins as doll versions writes them, got {short(exc)}: correct the file, "
            "or move it away to have none"
        ) from exc
    if stored.schema not in (_SCHEMA, _WITH_GATES):
        raise CheckpointError(
            f"{location}: expected schema {_SCHEMA} or {_WITH_GATES}, got {stored.schema}: use the release that wrote "
            "it"
        )
    values = {field: getattr(stored, field) for field in VersionMarks.__struct_fields__}
    return VersionMarks(**values | {"pins": tuple(sorted(set(stored.pins)))})


def checked_alias(name: str) -> str:
    """Return `name`. Raise ConfigError if it is not a valid alias: it is a number, could be mistaken for one, or
    contains characters with a meaning in a path or address."""
    if name == LATEST or not _ALIAS.fullmatch(name):
        raise ConfigError(
            "expected an alias of a-z, 0-9, - and _ that begins with a letter (at most 63, not latest, and not v with "
            f"a number), such as stable, got {short(name)!r}"
        )
    return name


def unknown_version(location: str, wanted: object, kept: Sequence[int], marks: VersionMarks) -> str:
    """Return the message for a version that does not exist."""
    aliases = _listed([f"{alias} (version {version})" for alias, version in sorted(marks.aliases.items())])
    versions = sorted(set(kept))
    more = f"{len(versions) - _NAMED} older ones, " if len(versions) > _NAMED else ""
    return (
        f"{location}: expected a version that is kept ({more}{_listed(versions[-_NAMED:])}), an alias ({aliases}) or "
        f"{LATEST}, got {short(wanted)!r}"
    )


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


class StoredVersion(NamedTuple):
    """A checkpoint in a store, damaged or not."""

    term: int
    version: int
    saved_s: float  # Unix time
    size_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        return self.term, self.version


class VersionHistory(NamedTuple):
    """The rule for older checkpoints: one of each `every_s` seconds is kept for `for_s` seconds; 0: none is kept."""

    every_s: float = 0.0
    for_s: float = 0.0


NO_HISTORY: Final = VersionHistory()


def obsolete(
    stored: Sequence[StoredVersion], marked: Collection[int], *, keep: int, history: VersionHistory, now_s: float
) -> list[StoredVersion]:
    """Return the checkpoints of `stored`, oldest first, that may be deleted: all except the `keep` newest, those of the
    history, and those `marked` by an alias or a pin.

    Each checkpoint of the history is chosen by the time since the one before, so repeated calls keep the same ones.
    """
    gone: list[StoredVersion] = []
    last_kept_s = float("-inf")
    for item in stored[: max(len(stored) - keep, 0)]:
        is_of_history = now_s - item.saved_s <= history.for_s and item.saved_s - last_kept_s >= history.every_s
        if is_of_history and history.for_s:
            last_kept_s = item.saved_s
        elif item.version not in marked:
            gone.append(item)
    return gone
