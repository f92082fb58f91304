"""A run of `doll up` that was killed with all its processes."""

from __future__ import annotations

import re
from pathlib import Path

import commands
import psutil
from doll.errors import ConfigError
from doll.ledger.snapshot_counts import SnapshotCounts, read_counts
from doll.run.folder import RunFolder
from doll.run.target import open_target
from doll.storage.stores import open_store
from forked_commands import Program
from process_checks import is_gone
from waiting import until

JOB = """
job: {job}
task: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: python, of: examples.synthetic.source:gaussians, args: {{features: 4, classes: 2}}}}
arrivals: {{process: poisson, rate_per_s: 80}}
training: {{policy: {{name: doll, group_size: 2}}}}
checkpoint: {{every_updates: 5, every_s: 0.5}}
evaluation: {{enabled: false}}
worker: {{lease_s: 3}}
"""


def killed_run(doll: Program, folder: Path, job: str, *options: str, **env: str) -> Path:
    """The folder of a run of `doll up` that was killed, with all its processes, after 20 updates."""
    (folder / "job.yaml").write_text(JOB.format(job=job))
    err = folder / "err.txt"
    process = doll.start(
        "up", folder / "job.yaml", "--parent-folder", folder / "runs", *options, err=err, cwd=folder, **env
    )
    try:
        until(lambda: re.search(r"run folder (\S+)", err.read_text()), err.read_text)
        (path,) = (folder / "runs").iterdir()
        until(lambda: version(path) >= 20, err.read_text)
        refused = commands.doll("resume", path)
        assert refused.exit_code == 2, refused.stderr
        assert "this run is still running" in refused.stderr
        started = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    until(lambda: not left(path), lambda: "\n".join(left(path)))
    until(lambda: all(map(is_gone, started)), lambda: str(started))
    until(lambda: not is_locked(path), lambda: f"{path} is locked by a process that was started meanwhile")
    return path


def is_locked(run: Path) -> bool:
    try:
        with RunFolder(run).locked():
            return False
    except ConfigError:
        return True


def version(run: Path) -> int:
    """The newest version in the run's checkpoint folder or, without one, in its parameter server's log."""
    saved = [int(name.stem.rsplit("-", 1)[1]) for name in (run / "checkpoints").glob("checkpoint-*.doll")]
    return max(saved, default=0)


def counts_of(run: Path, version: int | None = None) -> SnapshotCounts:
    """The counts in the newest checkpoint of a run, or in that of a version."""
    config = open_target(run, []).config
    checkpoint = open_store(config, run).load_newest(None, version)
    assert checkpoint is not None
    return read_counts(config, checkpoint.state)


def left(run: Path) -> list[str]:
    """Processes of this run that are still there."""
    texts = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(run) in text:
            texts.append(text)
    return texts
