"""A run of `doll up` that was killed with all its processes, and the command line as a program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from waiting import until

JOB = """
job: {job}
task: {{class: 'examples.synthetic.task:Gaussian', args: {{features: 4, hidden: [8]}}}}
data: {{workers: 2, batch_size: 8}}
source: {{kind: synthetic, features: 4, classes: 2}}
arrivals: {{process: poisson, rate_per_s: 80}}
training: {{policy: {{name: doll, group_size: 2}}}}
checkpoint: {{every_updates: 5, every_s: 0.5}}
evaluation: {{enabled: false}}
worker: {{lease_s: 3}}
"""


def doll(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "doll", *(str(argument) for argument in arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False, cwd="/", env={**os.environ, **env}
    )


def killed_run(folder: Path, job: str, *options: str, **env: str) -> Path:
    """The folder of a run of `doll up` that was killed, with all its processes, after 20 updates."""
    (folder / "job.yaml").write_text(JOB.format(job=job))
    command = [sys.executable, "-m", "doll", "up", str(folder / "job.yaml"), "--parent-folder", str(folder / "runs")]
    err = folder / "err.txt"
    with err.open("w") as file:
        process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, cwd=folder,
            env={**os.environ, **env},
        )  # fmt: skip
    try:
        until(lambda: re.search(r"run folder (\S+)", err.read_text()), err.read_text)
        (path,) = (folder / "runs").iterdir()
        until(lambda: version(path) >= 20, err.read_text)
        refused = doll("resume", path)
        assert refused.returncode == 2, refused.stderr
        assert "this run is still running" in refused.stderr
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not left(path), lambda: "\n".join(left(path)))
    return path


def version(run: Path) -> int:
    """The newest version in the run's checkpoint folder or, without one, in its parameter server's log."""
    saved = [int(name.stem.rsplit("-", 1)[1]) for name in (run / "checkpoints").glob("checkpoint-*.doll")]
    return max(saved, default=0)


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
