"""A reader of a model with tables in shards: each version has the rows of all shards."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import record_builders
from doll.config import parse
from doll.evaluation.stored_weights import Place, place_of
from doll.evaluation.weight_follower import WeightFollower
from doll.model.flat_model import build, fingerprint
from doll.ps.engine import events as ev
from doll.ps.model.updater import make_parts
from doll.ps.shards.sharded_host import PartedStore
from doll.storage.blobs import followed_key
from doll.storage.checkpoints import Checkpoint
from doll.storage.contributions import Compressor, decode_contribution
from doll.storage.stores import open_store
from doll.tables.rows import Rows
from doll.task.base import load_task
from memory_shards import ShardThreads
from memory_stores import MemoryBlobs
from paths import SUPPORT
from pushes import applied_set, push_of

pytestmark = pytest.mark.slow  # loads torch

SHARDS, IDS, RUN = 3, 17, "r1"
JOB = f"""
job: unit
task: {json.dumps({"class": f"{SUPPORT / 'bag_task.py'}:Bags", "args": {"ids": IDS}})}
data: {{workers: 1, batch_size: 4}}
ps: {{shards: {SHARDS}}}
training: {{policy: {{name: bsp}}, optimizer: {{name: adam, lr: 0.1}}}}
"""
SCOPE = f"unit:{RUN}"


def test_each_version_has_the_rows_of_all_shards(tmp_path: Path) -> None:
    config, blobs, rng = parse(JOB), MemoryBlobs(), np.random.default_rng(4)
    task, store = load_task(config), open_store(config, tmp_path)
    model = build(config, task)
    assert model.tables is not None
    name, shapes = "0.weight", dict(model.tables.shapes)
    threads = ShardThreads(config, task, store, blobs)
    term = store.claim_term()
    host = threads.host(term, model.slices, tables=shapes, run_id=RUN, keeps_gradients=True)
    mark = fingerprint(config, model)
    assert host.begin(mark, None, lambda: False)
    whole = make_parts(config.training, model)
    reader = WeightFollower(config, blobs, tmp_path, build(config, task, with_rows=False), row_bytes=10**6)
    reader.feed(msgspec.structs.replace(record_builders.term_started(term), run_id=RUN))

    def save(version: int) -> None:
        host.tensors()
        state = msgspec.msgpack.encode({"run_id": RUN, "samples_total": 0, "version": version})
        PartedStore(store, host).save(
            Checkpoint(job="unit", fingerprint=mark, term=term, version=version, state=state, tensors={})
        )  # fmt: skip

    save(0)
    host.publish(0)
    host.tidy()
    place, sources = None, []
    for version in range(1, 9):
        ids = np.sort(rng.choice(IDS, rng.integers(1, IDS), replace=False))
        dense = rng.normal(size=host.num_values).astype(np.float32)
        rows = {name: Rows(ids, rng.normal(size=(len(ids), 3)).astype(np.float32))}
        encoder = Compressor(SCOPE, whole.updater.num_parameters, shapes)
        for key, parts in zip(
            model.slices.keys(f"g{version}"),
            encoder.compress_slices(dense, model.slices, version=version - 1, rows=rows), strict=True,
        ):  # fmt: skip
            blobs.put(key, parts, 60.0)
        outcome = host.fetch(ev.FetchGradient(version, f"g{version}", version - 1, in_order=False))
        assert outcome.blob is not None, "an event log has the whole gradient"
        logged = decode_contribution(
            outcome.blob, whole.updater.num_parameters, job=SCOPE, version=version - 1, numel=host.num_values,
            tables=shapes,
        )  # fmt: skip
        assert logged.values.tobytes() == dense.tobytes()
        assert [part.tobytes() for part in logged.rows[name]] == [part.tobytes() for part in rows[name]]
        push = push_of(
            worker=0, session=1, batch=version, term=term, grant_id=version, version=version - 1, key=f"g{version}"
        )  # fmt: skip
        host.apply(ev.ApplyUpdate(version, (applied_set(push),), 0.25, 4, 1))
        whole.updater.apply([dense], 0.25, 4.0)
        assert whole.tables is not None
        whole.tables.add(rows)
        whole.tables.apply(0.25, version)
        host.publish(version)
        host.tidy()
        stored = reader.newest(place)
        assert stored is not None
        place = place_of(stored)
        assert place == Place(term, version)
        sources.append(reader.row_bytes)
        stored.load_into(reader._model)
        assert reader._model.tables is not None
        got = reader._model.tables.look_up(name, np.arange(IDS))
        assert got.tobytes() == whole.tables.read(name, np.arange(IDS)).values.tobytes()
        if version == 5:
            save(version)
    assert all(sources), "changed rows are read, not only checkpoints"
    assert all(blobs.get(key) for key in model.slices.keys(followed_key(SCOPE))), "each shard is told of its reader"
    threads.close()
