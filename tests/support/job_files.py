"""Jobs for tests that need a job file and care for little in it."""

from __future__ import annotations

from pathlib import Path

from doll.config import JobConfig, parse


def job(
    *overrides: str, name: str = "j", workers: int | None = None, text: str = "", folder: Path = Path(".")
) -> JobConfig:
    """A job whose task is never loaded.

    Args:
        overrides: as of `--set`, for instance `data.batch_size=8`.
        text: further sections, as they stand in a job file.
        folder: where its paths begin.
    """
    data = "" if workers is None else f"data: {{workers: {workers}}}\n"
    return parse(f"job: {name}\ntask: {{class: 'a:B'}}\n{data}{text}", overrides, base_folder=folder)
