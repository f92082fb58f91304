"""The fixture of integration tests: a whole job of real processes on the real broker and Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doll.local.forks import ForkServer
from doll.services import Services
from job_rig import MakePipeline, Pipeline


@pytest.fixture
def make_pipeline(tmp_path: Path, services: Services, fork_server: ForkServer, job_name: str) -> Iterator[MakePipeline]:
    """`make_pipeline("stop.updates=50", ...)`: the standard job with overrides."""
    made: list[Pipeline] = []

    def make(*overrides: str) -> Pipeline:
        made.append(Pipeline(tmp_path, services, fork_server, job_name, overrides))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()
