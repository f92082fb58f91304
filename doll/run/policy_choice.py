"""The policies of the option `--policies`, and the job under each of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from doll.config import JobConfig, load
from doll.config.policy import POLICIES
from doll.errors import ConfigError

_KEY: Final = re.compile(r"[a-z][a-z0-9_]*")
_VALUE: Final = re.compile(r"[A-Za-z0-9_.+-]+")
_FORM: Final = "NAME or NAME:KEY=VALUE[:KEY=VALUE...], as in essp:staleness=7"


@dataclass(frozen=True)
class PolicyChoice:
    """A policy and options of its section, as pairs (key, value) in the order of the command line."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The choice in the form of the command line."""
        return ":".join((self.name, *(f"{key}={value}" for key, value in self.options)))

    def overrides(self, own: str) -> list[str]:
        """Return the choice as overrides of a job file with the policy `own`; other options of `own` are kept."""
        section = [] if self.name == own else [f"training.policy={{name: {self.name}}}"]
        return section + [f"training.policy.{key}={value}" for key, value in self.options]


def parse_choices(texts: Sequence[str]) -> list[PolicyChoice]:
    """Return the policies of one or several `--policies`; without this option, all registered policies.

    Raises:
        ConfigError: a policy is not registered or is given twice, or an option is not KEY=VALUE.
    """
    parts = [part.strip() for text in texts for part in text.split(",")]
    choices = [parse_choice(part, "--policies") for part in parts] or [PolicyChoice(name) for name in POLICIES.names()]
    for choice in choices:
        if choices.count(choice) > 1:
            raise ConfigError(f"--policies: expected each policy with its options once, got {choice.label} twice")
    return choices


def parse_choice(text: str, flag: str = "--policy") -> PolicyChoice:
    """Return the one policy of an option. Raise ConfigError as `parse_choices`."""
    name, *options = text.split(":")
    if "=" in name:
        raise ConfigError(
            f"{flag}: expected {_FORM}, got {text[:60]!r}: colons stand before options, commas between policies"
        )
    names = POLICIES.names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{flag}: expected registered policies ({', '.join(names)}), got {name[:60]!r}{hint}")
    pairs: list[tuple[str, str]] = []
    for option in options:
        key, _, value = option.partition("=")
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{flag}: expected {_FORM}, got {text[:60]!r}")
        if key in ("name", *(known for known, _ in pairs)):
            raise ConfigError(f"{flag}: {text[:60]}: expected each key of the policy once, and no name, got {key}")
        pairs.append((key, value))
    return PolicyChoice(name, tuple(pairs))


def jobs_of(path: Path, overrides: Sequence[str], choices: Sequence[PolicyChoice]) -> list[JobConfig]:
    """Return the job file at `path` under each policy. The policy of the job file keeps its options.

    Raises:
        ConfigError: the job file is not valid, or a policy refuses an option.
    """
    own, jobs = load(path, overrides).training.policy.name, []
    for choice in choices:
        try:
            jobs.append(load(path, [*overrides, *choice.overrides(own)]))
        except ConfigError as error:
            raise ConfigError(f"--policies: {choice.label}: {error}") from error
    return jobs
