"""Models with tables on real processes: rows are asked for, pushed, checkpointed and exported, whoever dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doll.config import JobConfig, parse
from doll.model.flat_model import build
from doll.records.control import GetRows
from doll.run.export import export_model
from doll.storage.blobs import row_request_key
from doll.storage.sections import RowRequest, encode_row_request
from doll.storage.stores import open_blobs
from doll.tables.rows import TableShape
from doll.task.base import load_task
from job_policies import some
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

COLUMNS = 1_000_000
NAME = "table.weight"
CLICKS = (
    "task.class=examples.clicks.task:Clicks", f"task.args={{columns: {COLUMNS}, sparse: true}}", "data.batch_size=64",
    "data.samples_per_record=16",
    "source={kind: python, of: 'examples.clicks.task:made_up', args: {categories: 1000, density: 0.5}}",
    "arrivals={process: deterministic, rate_per_s: 1500}", "training.optimizer={name: adam, lr: 0.02}",
)  # fmt: skip
POLICIES = {
    "doll": "{name: doll, group_size: 2}",
    "essp": "{name: essp, staleness: 3}",
    "wsp": "{name: wsp, wave_batches: 2, clock_distance: 1}",
}


@pytest.mark.parametrize("policy", some(list(POLICIES), "doll", "wsp"))
def test_tables_outlive_server_shards_and_workers(make_pipeline: MakePipeline, policy: str) -> None:
    shards = 2 if policy == "wsp" else 1
    job = make_pipeline(
        *CLICKS,
        f"training.policy={POLICIES[policy]}",
        f"control.kind={'kafka' if policy == 'doll' else 'auto'}",
        f"ps.shards={shards}",
        "stop.updates=260",
        "source.limit_samples=45000",
    )
    job.start()
    job.start_producer()
    job.until_version(40)
    job.kill("worker-0")
    job.until_version(80)
    job.kill("ps")
    job.until_version(140)
    job.kill("worker-1")
    job.kill("ps" if shards == 1 else "shard-1")
    job.until_finished()
    job.assert_audit_ok()
    tensors = job.checkpoint().tensors
    touched = tensors[f"table.{NAME}.touched"]
    assert len(np.unique(touched)) == len(touched)
    assert set(touched % shards) == set(range(shards))
    assert 500 < len(touched) < COLUMNS / 10, "rows that no click has used are not touched"
    losses = [update.loss for update in job.updates]
    assert np.mean(losses[-50:]) < np.mean(losses[:20])
    assert job.last_status.measures is not None
    assert 0 < job.last_status.measures.row_bytes < 4 * COLUMNS * job.version / 10
    assert 0 < job.last_status.measures.row_request_bytes < job.last_status.measures.row_bytes


def test_a_bounded_table_outlives_server_and_workers(make_pipeline: MakePipeline) -> None:
    from safetensors.torch import load_file

    max_rows = 1000
    job = make_pipeline(
        *CLICKS,
        f"task.args={{columns: {2**31 - 1}, bounded: true}}",
        f"training.tables={{table: {{max_rows: {max_rows}, min_count: 2, ttl_updates: 200}}}}",
        "training.policy={name: doll, group_size: 2}",
        "stop.updates=150",
        "source.limit_samples=30000",
    )
    job.start()
    job.start_producer()
    job.until_version(30)
    job.kill("worker-0")
    job.until_version(60)
    job.kill("ps")
    job.until_version(90)
    job.kill("worker-1")
    job.until_finished()
    job.assert_audit_ok()
    (table,) = job.last_status.tables
    assert (table.name, table.rows <= max_rows) == (NAME, True)
    assert table.evicted > 0
    assert table.refused > 0
    assert table.admitted == table.rows + table.evicted + table.expired
    losses = [update.loss for update in job.updates]
    assert np.mean(losses[-40:]) < np.mean(losses[:20])
    content = export_model(job.config, job.run, job.folder / "model")
    assert content["parameters"] == max_rows + 14
    tensors = load_file(job.folder / "model" / "model.safetensors")
    ids, stored = tensors["table.ids"].numpy(), job.checkpoint().tensors
    assert (np.diff(ids) > 0).all()
    assert set(ids.tolist()) == set(stored[f"table.{NAME}.ids"].tolist()) - {-1}
    assert tensors["table.rows"].shape == (len(ids), 1)


def test_the_exported_model_has_the_rows_of_its_tables(make_pipeline: MakePipeline) -> None:
    from safetensors.torch import load_file

    job = make_pipeline(*CLICKS, "stop.updates=20", "source.limit_samples=6000")
    job.start()
    job.start_producer()
    job.until_finished()
    content = export_model(job.config, job.run, job.folder / "model")
    assert content["parameters"] == COLUMNS + 14
    model = load_task(job.config).build_model()
    before = model.state_dict()[NAME].clone()
    model.load_state_dict(load_file(job.folder / "model" / "model.safetensors"))
    stored = job.checkpoint().tensors
    assert model.state_dict()[NAME].numpy().tobytes() == stored[f"table.{NAME}.values"].tobytes()
    changed = np.flatnonzero((model.state_dict()[NAME] != before).any(dim=1).numpy())
    assert set(changed) <= set(stored[f"table.{NAME}.touched"].tolist())
    assert len(changed) > 100


def shapes(config: JobConfig) -> dict[str, TableShape]:
    tables = build(config, load_task(config), with_rows=False).tables
    assert tables is not None
    return tables.shapes


def test_requests_that_are_forged_torn_or_late_are_refused_and_counted(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(*CLICKS, "stop.updates=150", "source.limit_samples=25000")
    job.start()
    job.start_producer()
    job.until_version(5)
    job.until_status(lambda status: all(worker.is_live for worker in status.workers), "live workers")
    term, session = job.last_status.term, job.last_status.workers[0].session
    blobs = open_blobs(job.config, job.services, give_up=lambda: True)
    wanted = {NAME: RowRequest(np.array([3, 5]), np.empty(0, np.int64))}
    request = b"".join(encode_row_request(wanted, shapes(job.config), job=job.scope, version=0).parts)
    other = {NAME: TableShape(10 * COLUMNS, 1)}
    beyond = {NAME: RowRequest(np.array([9 * COLUMNS]), np.empty(0, np.int64))}
    forged = {
        "another session": (request, {"session": session + 7}),
        "another term": (request, {"term": term + 1}),
        "no such worker": (request, {"worker": 99}),
        "a negative worker": (request, {"worker": -1}),
        "nothing there": (b"", {}),
        "torn": (request[:-3], {}),
        "a bit changed": (request[:-1] + bytes([request[-1] ^ 1]), {}),
        "of another job": (b"".join(encode_row_request(wanted, shapes(job.config), job="x", version=0).parts), {}),
        "of the future": (b"".join(
            encode_row_request(wanted, shapes(job.config), job=job.scope, version=10**6).parts
        ), {}),
        "beyond the table": (b"".join(encode_row_request(beyond, other, job=job.scope, version=0).parts), {}),
    }  # fmt: skip
    for number, (blob, changes) in enumerate(forged.values(), 10**9):
        key = row_request_key(job.scope, term, 0, session, number)
        if blob:
            blobs.put(key, [blob], 60.0)
        names: dict[str, Any] = {"worker": 0, "session": session, "term": term, "number": number, "key": key}
        job.control("events", GetRows(**{**names, **changes}))
    job.until_status(lambda status: status.counters.get("refused_get_rows", 0) == len(forged), "all are refused")
    job.until_finished()
    job.assert_audit_ok()


def test_a_policy_that_takes_no_tables_is_refused_with_the_reason() -> None:
    config = parse(
        "job: j\ntask: {class: 'examples.clicks.task:Clicks', args: {columns: 100, sparse: true}}\n"
        "data: {workers: 2, batch_size: 4}\ntraining: {policy: {name: diloco}}"
    )
    with pytest.raises(Exception, match=r"training.policy diloco: expected a model without tables"):
        build(config, load_task(config))
