"""Price tables of several regions: their age, what they lack, and what is wrong in them."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.provisioner.prices.regions import region_prices

TODAY = date(2026, 12, 1)
ROWS = """region,instance_type,usd_per_hour,spot_usd_per_hour,egress_usd_per_gb
moon-1,big,0.3,0.1,0.05
moon-2,big,0.4,0.1,
"""


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("head", "note"),
    [
        ("# as_of: 2026-11-24\n", None),
        ("# as_of: 2026-11-23\n", "8 days old"),
        ("# as_of: 2026-12-05\n", "a date to come"),
        ("# as_of: last week\n", "expected a line '# as_of: YYYY-MM-DD'"),
        ("", "expected a line '# as_of: YYYY-MM-DD'"),
    ],
)
def test_a_table_that_is_a_week_old_is_named(tmp_path: Path, head: str, note: str | None) -> None:
    notes: list[str] = []
    path = table(tmp_path, head + ROWS)
    one, two = region_prices([("moon-1", "big"), ("moon-2", "big")], 0.02, path, TODAY, notes)
    assert (one.egress_usd_per_gb, two.egress_usd_per_gb) == (0.05, 0.02)
    assert one.prices.on_demand_usd_per_h == 0.3
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected rows with region"),
        ("region,instance_type\nmoon-1,big\n", "usd_per_hour is missing"),
        (ROWS.replace("0.3,", "free,"), "usd_per_hour of big in moon-1: expected a price, got 'free'"),
        (ROWS.replace("0.3,", "inf,"), "expected a price, got 'inf'"),
        (ROWS.replace("0.05", "-1"), "expected a price, got '-1'"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        region_prices([("moon-1", "big")], 0.02, table(tmp_path, text), TODAY, [])


def test_a_region_without_the_type_is_refused_with_the_types_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prices of small in moon-1: it has one of big there"):
        region_prices([("moon-1", "small")], 0.02, table(tmp_path, ROWS), TODAY, [])
    with pytest.raises(ConfigError, match="no prices of big in mars: it has no type at all there"):
        region_prices([("mars", "big")], 0.02, table(tmp_path, ROWS), TODAY, [])
