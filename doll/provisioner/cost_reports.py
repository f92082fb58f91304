"""Cost and Usage Reports of AWS: the lines of a file that belong to a job. The file is read row by row.

The columns are those of CUR 2.0 (`line_item_unblended_cost`) or of the earlier reports (`lineItem/UnblendedCost`).
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from doll.errors import ConfigError
from doll.records.bounded import json_object, short

COST: Final = "line_item_unblended_cost"
START: Final = "line_item_usage_start_date"
END: Final = "line_item_usage_end_date"
RESOURCE: Final = "line_item_resource_id"
USAGE: Final = "line_item_usage_type"
KIND: Final = "line_item_line_item_type"
PRODUCT: Final = "line_item_product_code"
CURRENCY: Final = "line_item_currency_code"
TAGS: Final = "resource_tags"
_NEEDED: Final = (COST, START, RESOURCE, USAGE)
_TAG: Final = "resource_tags_user_"
_MOST_LINE_CHARS: Final = 1_000_000
_MOST_ROWS: Final = 50_000_000
_BATCH_ROWS: Final = 10_000
_HOUR_S: Final = 3600.0  # the length of a line's time if the report has no column for its end


@dataclass(frozen=True)
class ReportLine:
    """A line of a report. `kind`: Usage, SpotUsage, Credit, Tax, ...; `tags` have names such as `doll_job`."""

    start_s: float
    end_s: float
    usd: float
    resource: str
    usage: str
    kind: str
    product: str
    tags: Mapping[str, str]


def column_name(name: str) -> str:
    """Return the name that CUR 2.0 gives to a column.

    >>> column_name("lineItem/UnblendedCost"), column_name("resourceTags/user:doll:job")
    ('line_item_unblended_cost', 'resource_tags_user_doll_job')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip().lstrip("\ufeff"))
    return re.sub(r"[^a-z0-9]+", "_", words.lower())


def read_report(path: Path) -> Iterator[ReportLine]:
    """Yield the lines of a report: CSV, CSV compressed with gzip, or Parquet, by the name of the file. Raises
    ConfigError, which names the file and the row, if the file cannot be read or is not such a report."""
    number = 0
    try:
        for number, row in enumerate(_parquet(path) if path.suffix == ".parquet" else _csv(path), 1):
            if number > _MOST_ROWS:
                raise ValueError(f"expected at most {_MOST_ROWS} rows, got more")
            yield _line(row)
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: row {number}: {short(error)}: expected a Cost and Usage Report of AWS") from error


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.reader(_short_lines(file), strict=True)
        names = _columns(next(rows, []))
        for row in rows:
            if len(row) != len(names):
                raise ValueError(f"expected {len(names)} cells, got {len(row)}")
            yield dict(zip(names, row, strict=True))


def _short_lines(file: Any) -> Iterator[str]:
    """Yield the lines of a file, each read up to a limit: a small compressed file may contain an endless line."""
    while line := file.readline(_MOST_LINE_CHARS + 1):
        if len(line) > _MOST_LINE_CHARS:
            raise ValueError(f"expected lines of at most {_MOST_LINE_CHARS} characters, got more")
        yield line


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path}: Parquet needs pyarrow: pip install pyarrow, or give the report as CSV") from error
    with pyarrow.parquet.ParquetFile(path) as file:
        given = file.schema_arrow.names
        names = dict(zip(given, _columns(given), strict=True))
        read = [name for name, known in names.items() if known.startswith(("line_item_", TAGS))]
        for batch in file.iter_batches(_BATCH_ROWS, columns=read):
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                yield {names[name]: value for name, value in row.items()}


def _columns(given: Iterable[str]) -> list[str]:
    names = [column_name(name) for name in given]
    if missing := [name for name in _NEEDED if name not in names]:
        raise ValueError(f"no column {', '.join(missing)}")
    return names


def _line(row: Mapping[str, Any]) -> ReportLine:
    usd = float(row[COST] if row[COST] not in ("", None) else 0.0)
    if not math.isfinite(usd):
        raise ValueError(f"expected {COST} as a finite number, got {usd}")
    if (currency := row.get(CURRENCY) or "USD") != "USD":
        raise ValueError(f"expected costs in USD, got {currency}")
    start_s = _unix_s(row[START])
    end_s = _unix_s(row[END]) if row.get(END) else start_s + _HOUR_S
    tags = {name.removeprefix(_TAG): str(value) for name, value in row.items() if name.startswith(_TAG) and value}
    if column := row.get(TAGS):  # a column of CUR 2.0 with all tags
        columns = column if isinstance(column, dict) else json_object(column)
        tags |= {column_name(name).removeprefix("user_"): str(value) for name, value in columns.items() if value}
    resource, usage, kind, product = (str(row.get(name) or "") for name in (RESOURCE, USAGE, KIND, PRODUCT))
    return ReportLine(start_s, end_s, usd, resource, usage, kind, product, tags)


def _unix_s(value: Any) -> float:
    at = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return (at.replace(tzinfo=UTC) if at.tzinfo is None else at).timestamp()


_CATEGORIES: Final = (  # the first that matches the product and the usage type counts
    (r"AmazonMSK|kafka", "kafka"),
    (r"AmazonElastiCache", "cache"),
    (r"awskms|AWSSecretsManager|AmazonCloudWatch|AmazonSNS|AWSQueueService|AWSEvents", "keys"),
    (r"NatGateway|VpcEndpoint|PublicIPv4|AmazonVPC", "network"),
    (r"DataTransfer|AWS-(Out|In)-Bytes|Out-Bytes|In-Bytes", "egress"),
    (r"AmazonS3 .*Requests", "checkpoints"),
    (r"EBS:|TimedStorage", "storage"),
    (r"SpotUsage|BoxUsage|Lambda", "machines"),
)


def category(line: ReportLine) -> str:
    """Return the category of a line; "" if it is not known. A machine that is no worker belongs to the role in the name
    that Terraform gives it."""
    if line.kind and not line.kind.endswith(("Usage", "Fee")):
        return "credits and taxes"
    text = f"{line.product} {line.usage}"
    matched = next((name for pattern, name in _CATEGORIES if re.search(pattern, text)), "")
    if matched != "machines":
        return matched
    if "doll_worker" in line.tags:
        return "workers"
    name = line.tags.get("name", "")
    return "control_host" if "-control" in name else "kafka" if "-kafka" in name else ""
