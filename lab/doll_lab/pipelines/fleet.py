"""A fleet as a table of devices: a YAML or CSV file with strict validation.

A CSV file has one line for each kind of device, with these columns; `name` is required, and an empty cell means the
default. A YAML file has the same keys under `devices`, and the links under `network`:

    devices:
      - {name: V100, count: 4, node: a, speed: 1.0, memory_gib: 16, usd_per_h: 3.06}
      - {name: T4, count: 4, node: b, speed: 0.4, memory_gib: 15, usd_per_h: 0.16, spot: true}
    network: {within_node_gb_per_s: 12, between_nodes_gb_per_s: 3, latency_s: 0.0001}
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from doll.config.loader import explain, plain_values
from doll.config.section import Section
from doll.errors import ConfigError
from doll.pipeline.profiling.profile import Device
from doll.records.bounded import MalformedError, read_text
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, StringConstraints, ValidationError

from doll_lab.pipelines.network import Network

MAX_BYTES = 1_000_000
MAX_DEVICES = 512
_GIB, _GB = 2.0**30, 1e9

_Section = TypeVar("_Section", bound=Section)
Text = Annotated[str, StringConstraints(min_length=1, max_length=100, strip_whitespace=True)]


class DeviceRow(Section):
    """Devices of one kind on one node."""

    name: Text = Field(description="kind of the device; times of a profile that names it are used as they are")
    count: PositiveInt = Field(default=1, description="number of such devices")
    node: Text | None = Field(
        default=None, description="machine that they are in; default: each is a machine by itself"
    )
    speed: PositiveFloat = Field(default=1.0, description="times that of the device that was profiled")
    memory_gib: PositiveFloat | None = Field(default=None, description="what a stage may take, GiB; default: any")
    usd_per_h: NonNegativeFloat = Field(default=0.0, description="price of one")
    spot: bool = Field(default=False, description="it can be preempted")


class NetworkSection(Section):
    """The links between devices; default: transfers take no time."""

    within_node_gb_per_s: PositiveFloat | None = None
    between_nodes_gb_per_s: PositiveFloat | None = None
    latency_s: NonNegativeFloat = 0.0


class FleetFile(Section):
    devices: list[DeviceRow] = Field(min_length=1)
    network: NetworkSection = Field(default_factory=NetworkSection)


def load_fleet(path: Path) -> tuple[list[Device], Network]:
    """Load the devices of a table, and their links. A name that ends with .csv is a CSV file, any other name YAML.

    Raises:
        ConfigError: the file cannot be read, or is not such a table; the message names the line or key.
    """
    try:
        text = read_text(path, max_bytes=MAX_BYTES)
    except (OSError, MalformedError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"cannot read {path}: {reason}: expected a table of devices") from exc
    parse = parse_csv if path.suffix.lower() == ".csv" else parse_yaml
    return parse(text, str(path))


def parse_yaml(text: str, origin: str) -> tuple[list[Device], Network]:
    """Parse the text of a YAML file as `load_fleet` does.

    Raises:
        ConfigError: as in `load_fleet`.
    """
    data = plain_values(text, f"{origin}:", "a table of devices")
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected devices: and network:, got {type(data).__name__}")
    file = _validated(FleetFile, data, origin)
    network = Network(
        _bytes_per_s(file.network.within_node_gb_per_s), _bytes_per_s(file.network.between_nodes_gb_per_s),
        file.network.latency_s,
    )  # fmt: skip
    rows = ((f"{origin}: devices.{number}", row) for number, row in enumerate(file.devices))
    return _devices(rows, origin), network


def parse_csv(text: str, origin: str) -> tuple[list[Device], Network]:
    """Parse the text of a CSV file as `load_fleet` does; its links take no time.

    Raises:
        ConfigError: as in `load_fleet`.
    """
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[tuple[str, DeviceRow]] = []
    try:
        columns = [name.strip() for name in next(reader, [])]
        _check_columns(columns, origin)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{origin}: line {reader.line_num}"
            if len(cells) > len(columns):
                raise ConfigError(f"{where}: expected {len(columns)} cells at most, one per column, got {len(cells)}")
            values = {name: cell.strip() for name, cell in zip(columns, cells, strict=False) if cell.strip()}
            rows.append((where, _validated(DeviceRow, values, where)))
    except csv.Error as exc:
        raise ConfigError(f"{origin}: line {reader.line_num}: not CSV: {exc}") from exc
    if not rows:
        raise ConfigError(f"{origin}: expected a line for each kind of device below the columns' names, got none")
    return _devices(rows, origin), Network()


def _validated(section: type[_Section], data: dict[str, Any], where: str) -> _Section:
    try:
        return section.model_validate(data)
    except ValidationError as exc:
        raise ConfigError("\n".join(f"{where}: {line}" for line in explain(exc, section))) from exc


def _check_columns(columns: list[str], origin: str) -> None:
    known = list(DeviceRow.model_fields)
    wrong = [name for name in columns if name not in known]
    if "name" not in columns or wrong or len(set(columns)) < len(columns):
        raise ConfigError(
            f"{origin}: line 1: expected the columns' names, `name` and any of {', '.join(known[1:])}, each once, got "
            f"{', '.join(wrong or columns)[:100] or 'nothing'}"
        )


def _devices(rows: Iterable[tuple[str, DeviceRow]], origin: str) -> list[Device]:
    devices: list[Device] = []
    kinds: dict[str, tuple[float, float]] = {}
    for where, row in rows:
        memory_bytes = math.inf if row.memory_gib is None else row.memory_gib * _GIB
        if kinds.setdefault(row.name, (row.speed, memory_bytes)) != (row.speed, memory_bytes):
            raise ConfigError(
                f"{where}: expected the same speed and memory_gib in all rows of {row.name!r}, got others before: use "
                "another name"
            )
        if len(devices) + row.count > MAX_DEVICES:
            raise ConfigError(f"{origin}: expected {MAX_DEVICES} devices at most, got more")
        for _ in range(row.count):
            node = row.node or f"machine {len(devices) + 1}"
            devices.append(Device(row.name, row.speed, memory_bytes, node, row.usd_per_h, row.spot))
    return devices


def _bytes_per_s(gb_per_s: float | None) -> float:
    return math.inf if gb_per_s is None else gb_per_s * _GB
