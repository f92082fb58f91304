"""A broker's log without its end, as a power loss without fsync may leave it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from doll.kafka.reader import Partition

_DERIVED: Final = (".index", ".timeindex", ".snapshot")


def truncate_log(broker_folder: Path, partition: Partition, share: float) -> None:
    """Keep the first `share` of the bytes of a partition's newest segment, as a power loss without fsync may.

    The broker must have been killed (`LocalKafka.kill`); it rebuilds its indexes when it is started again.

    Args:
        broker_folder: the folder of a `LocalKafka`.

    Raises:
        FileNotFoundError: the broker has no log of `partition`.
    """
    logs = sorted(broker_folder.rglob(f"{partition.topic}-{partition.number}/*.log"))
    if not logs:
        raise FileNotFoundError(f"{broker_folder}: expected a log of {partition}")
    os.truncate(logs[-1], int(logs[-1].stat().st_size * share))
    for file in logs[-1].parent.iterdir():
        if file.suffix in _DERIVED:
            file.unlink()
