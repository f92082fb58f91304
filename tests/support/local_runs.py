"""A `LocalRun` whose services and fork server were never started."""

from __future__ import annotations

from pathlib import Path

from doll.config import JobConfig
from doll.local.forks import ForkServer
from doll.local.stack import Stack
from doll.monitor.views.display import Display
from doll.process.signals import Interrupts
from doll.run.folder import RunFolder
from doll.run.local.context import LocalRun, RunHook
from doll.services import Services


def local_run(config: JobConfig, folder: Path) -> LocalRun:
    stack = Stack(Services("127.0.0.1:1", "redis://127.0.0.1:2/0"), "local", "local")
    forks = ForkServer(folder / "forkserver.log")
    return LocalRun(config, RunFolder(folder), Display(config.stop), Interrupts(), RunHook(), forks, stack)
