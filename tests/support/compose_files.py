"""What compose and the engine make of the Dockerfile and docker-compose.yml."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml
from paths import ROOT

FILE = ROOT / "docker-compose.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "doll.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
IN_FOREIGN_IMAGES = {"kafka", "redis", "prometheus", "grafana"}
METRIC = re.compile(r"\bdoll_[a-z][a-z0-9_]*")


def interpolated(text: str, variables: dict[str, str]) -> str:
    """`${NAME:-default}` and `${NAME:+in its place}`, the forms that the file uses."""

    def value(match: re.Match[str]) -> str:
        name, sign, other = match.groups()
        given = variables.get(name, "")
        return (given and other) if sign == "+" else given or other

    return re.sub(r"\$\{(\w+):([-+])([^}]*)\}", value, text)


def project(**variables: str) -> dict[str, Any]:
    """The compose file with these variables in the environment."""
    read: dict[str, Any] = yaml.safe_load(interpolated(FILE.read_text(), variables))
    return read


def stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's instructions and their arguments, by stage; those before the first FROM are in none."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    parsed: list[list[tuple[str, str]]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parsed.append([])
        if parsed and instruction:
            parsed[-1].append((instruction, rest.strip()))
    return parsed


@dataclass(frozen=True)
class Image:
    """What the last stage leaves to those who run it."""

    entrypoint: list[str]
    environment: dict[str, str]
    folder: str


def image() -> Image:
    last = dict(stages()[-1])
    environment = dict(word.split("=", 1) for word in shlex.split(last["ENV"]))
    return Image(json.loads(last["ENTRYPOINT"]), environment, last["WORKDIR"])
