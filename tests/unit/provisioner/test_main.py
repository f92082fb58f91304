"""The job file, as the provisioner watches it."""

from __future__ import annotations

import os
from pathlib import Path

from doll.config import JobConfig, load
from doll.provisioner.main import JobFile

JOB = "job: t\ntask: {{class: 'a:B'}}\nplan: {{deadline_s: {deadline}}}\n"


def test_a_job_file_is_read_again_once_per_change(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(deadline=100))
    reads: list[JobConfig] = []

    def read() -> JobConfig:
        reads.append(load(path))
        return reads[-1]

    job_file = JobFile(path, read)
    assert job_file.changed() is None
    path.write_text(JOB.format(deadline=2000))
    changed = job_file.changed()
    assert changed is not None
    assert changed.plan.deadline_s == 2000
    assert job_file.changed() is None
    assert len(reads) == 1


def test_an_invalid_or_missing_job_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(deadline=100))
    job_file = JobFile(path, lambda: load(path))
    path.write_text("job: [")
    assert job_file.changed() is None
    path.unlink()
    assert job_file.changed() is None, "an editor that replaces the file has removed it for a moment"
    path.write_text(JOB.format(deadline=300))
    os.utime(path, (1.0, 1.0))
    changed = job_file.changed()
    assert changed is not None
    assert changed.plan.deadline_s == 300
