"""Worker 1 with a notice of its end, as a watcher of spot notices gives it: from a thread of its own, at any moment."""

from __future__ import annotations

import threading
from pathlib import Path

from doll.config import load
from doll.consumers.lifecycle.departure import Departure
from doll.consumers.main import run_worker
from doll.services import Services


def run(job: str, kafka: str, redis: str, run_folder: str, fifo: str) -> int:
    """The worker, to its end. Its notice comes when somebody writes to `fifo`."""
    config = load(Path(job))
    departure = Departure()

    def watch() -> None:
        Path(fifo).read_text(encoding="utf-8")
        departure.leave_within(config.worker.notice_s, "notice")

    threading.Thread(target=watch, daemon=True).start()
    return run_worker(config, Services(kafka, redis), 1, Path(run_folder), departure=departure)
