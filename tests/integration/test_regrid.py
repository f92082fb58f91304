"""`doll regrid` and `doll rollback` of a job whose roles are started one by one: those of before are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from doll.config import dump, load
from doll.ps.checkpointing import decode_snapshot
from doll.storage.stores import open_store
from job_rig import MakePipeline

pytestmark = pytest.mark.integration


def test_a_deployed_job_goes_on_in_another_grid_from_an_earlier_version(make_pipeline: MakePipeline) -> None:
    job = make_pipeline()
    before = Path(shutil.copy(job.job_path, job.folder / "before.yaml"))
    ps = job.launch("ps-before", "ps_role", job_path=before)
    workers = [job.launch(f"worker-before-{n}", "worker_role", n, job_path=before) for n in range(2)]
    job.send(job.samples(400))
    job.until_version(12)

    job.config = load(job.job_path, ["data.batch_size=12", "training.policy={name: asp}", "stop.samples=700"])
    job.job_path.write_text(dump(job.config))
    led = job.doll("regrid").finished()
    assert led.returncode == 2, led.stderr
    assert "a parameter server leads" in led.stderr
    ps.terminate()
    job.until(lambda: ps.poll() is not None, "the end of the parameter server")
    saved = job.checkpoint()

    done = job.doll("regrid").finished()
    assert done.returncode == 0, done.stderr
    assert f"at version {saved.version}: batches of 12 records from offsets" in done.stdout
    assert (job.checkpoint().version, job.checkpoint().term) == (saved.version, saved.term + 1)
    learned = decode_snapshot(saved)
    grid = decode_snapshot(job.checkpoint())
    assert grid.origins == tuple(8 * count for count in learned.applied)

    # An earlier version goes on in a third grid, and what was learned since is skipped.
    to = min(version for _, version in open_store(job.config, job.run).versions())
    back = job.doll("rollback", "--to", str(to), "--skip").finished()
    assert back.returncode == 0, back.stderr
    assert f"from version {saved.version} to {to}, which is version {saved.version + 1} now" in back.stdout
    rolled_back = decode_snapshot(job.checkpoint())
    assert (rolled_back.origins, rolled_back.grid) == (grid.origins, 2)

    # Whoever has the job file of before is refused.
    old = job.launch("ps-old", "ps_role", job_path=before)
    job.until(lambda: old.poll() is not None, "the end of a server with the job file of before")
    assert "data.batch_size: expected 12, got 8" in job.log("ps-old")
    assert [worker.poll() for worker in workers] == [None, None], "they wait for a server"
    job.start()
    job.until(lambda: None not in [worker.poll() for worker in workers], "the end of the workers of before")
    job.send(job.samples(500))
    job.until_finished()
    report = job.assert_audit_ok()
    assert report.applied >= 700
    assert report.skipped == 8 * sum(learned.applied) - rolled_back.samples_total > 0
    assert [line.origin for line in report.partitions] == [0, 0]
    assert (job.term_starts[-1].grid, job.term_starts[-1].rolled_back_to) == (2, to)
    assert {member.hi - member.lo for update in job.updates for member in update.members} == {8, 12}
