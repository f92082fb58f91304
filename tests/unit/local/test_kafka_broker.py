"""A local broker's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.errors import ConfigError
from doll.local.kafka_broker import LocalKafka


def test_a_folder_with_a_comma_is_refused(tmp_path: Path) -> None:
    """Kafka takes the setting of its data folder for a list: it would write below the working directory."""
    with pytest.raises(ConfigError, match="expected a path without a comma"):
        LocalKafka(tmp_path / "runs, old")
    LocalKafka(tmp_path / "runs")
