"""How a process shows on the topic `metrics` that it is alive, and that it has exited normally."""

from __future__ import annotations

from typing import Final

HEARTBEAT_EVERY_S: Final = 10.0
"""A process that has nothing to measure sends a `Metric` without values this often."""
LEFT: Final = "left"
"""In the values of a process's last `Metric`: it exits normally, so its silence is no failure."""
