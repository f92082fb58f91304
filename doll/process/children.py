"""The child processes of a process, from /proc."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def children_of(pid: int, proc: Path = _PROC) -> list[int]:
    """Processes that `pid` has started and that run, oldest first; none where there is no /proc."""
    children: list[tuple[int, int]] = []
    for path in proc.glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        state, parent, started = fields[0], int(fields[1]), int(fields[19])
        if parent == pid and state != "Z":
            children.append((started, int(path.parent.name)))
    return [child for _, child in sorted(children)]
